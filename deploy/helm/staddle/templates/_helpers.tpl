{{- define "staddle.name" -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" }}
{{- end }}

{{- define "staddle.selector" -}}
app.kubernetes.io/name: staddle
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "staddle.labels" -}}
{{ include "staddle.selector" . }}
app.kubernetes.io/component: {{ .Values.role }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "staddle.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "staddle.health" -}}
exec:
  command: [staddle, health, --config, /etc/staddle/{{ .Values.role }}.toml]
timeoutSeconds: 10
{{- end }}
