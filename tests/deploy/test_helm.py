"""The chart refuses values that cannot work, and renders pods that may do little.

By helm where it is installed, else by its library for Python, helm-python-sdk.
"""

import copy
import json
import shutil
import subprocess
import tomllib

import jsonschema
import pytest
import yaml
from support.deployed import DEPLOY, beside

from staddle.commands.loader import COMMANDS
from staddle.coordinator.config import CoordinatorConfig
from staddle.files.documents import parse_toml
from staddle.silo.config import SiloConfig

try:
    import helm_python
except ImportError:
    helm_python = None

CHART = DEPLOY / "helm" / "staddle"
ROLES = {"coordinator": CoordinatorConfig, "silo": SiloConfig}
HELM = shutil.which("helm")

pytestmark = beside
rendering = pytest.mark.skipif(
    not (HELM or helm_python), reason="neither helm nor helm-python-sdk is installed"
)


def values(role):
    return yaml.safe_load((CHART / "ci" / f"{role}-values.yaml").read_text())


def defaults():
    return yaml.safe_load((CHART / "values.yaml").read_text())


def merged(base, own):
    """Values as helm merges them."""
    found = copy.deepcopy(base)
    for key, value in own.items():
        both = isinstance(value, dict) and isinstance(found.get(key), dict)
        found[key] = merged(found[key], value) if both else value
    return found


def called(*arguments):
    done = subprocess.run([HELM, *map(str, arguments)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(done.stderr + done.stdout)
    return done.stdout


def rendered(role, tmp_path, /, **own):
    """The objects of a release by kind and name; ValueError for what helm refuses."""
    given = merged(values(role), own)
    if HELM:
        path = tmp_path / "values.yaml"
        path.write_text(yaml.safe_dump(given))
        texts = [called("template", "site", CHART, "--namespace", "fed", "--values", path)]
    else:
        try:
            with helm_python.Chart.load(str(CHART)) as chart:
                chart.validate_schema(chart.merge_values(given))
                parts = chart.render(given, name="site", namespace="fed")
        except helm_python.HelmError as error:
            raise ValueError(str(error)) from error
        texts = [text for path, text in parts.items() if path.endswith(".yaml")]
    found = [each for text in texts for each in yaml.safe_load_all(text) if each]
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def pod(objects):
    return objects["StatefulSet", "site"]["spec"]["template"]["spec"]


@rendering
@pytest.mark.parametrize("role", ROLES)
def test_helm_has_no_complaint(role):
    path = CHART / "ci" / f"{role}-values.yaml"
    if HELM:
        called("lint", "--strict", CHART, "--values", path)
        return
    said = helm_python.lint(str(CHART), values(role), strict=True)
    assert (said["total_charts_linted"], said["errors"]) == (1, [])


@rendering
@pytest.mark.parametrize("role", ROLES)
def test_a_pod_has_no_rights_and_writes_its_folder_alone(role, tmp_path):
    spec = pod(rendered(role, tmp_path))
    assert spec["automountServiceAccountToken"] is False
    alone = spec["securityContext"]
    assert (alone["runAsNonRoot"], alone["runAsUser"], alone["fsGroup"]) == (True, 10001, 10001)
    assert alone["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in (*spec["initContainers"], *spec["containers"]):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    (daemon,) = spec["containers"]
    written = {each["mountPath"] for each in daemon["volumeMounts"] if not each.get("readOnly")}
    assert written == {"/var/lib/staddle", "/tmp"}
    mounted = {each["name"] for each in daemon["volumeMounts"]}
    # The secret itself is seen by the container alone that copies it.
    assert mounted == {each["name"] for each in spec["volumes"]} - {"secret"} | {"state"}


@rendering
@pytest.mark.parametrize("role", ROLES)
def test_a_pod_starts_and_asks_by_commands_that_exist(role, tmp_path):
    objects = rendered(role, tmp_path)
    assert objects["StatefulSet", "site"]["spec"]["replicas"] == 1
    (daemon,) = pod(objects)["containers"]
    file = f"/etc/staddle/{role}.toml"
    assert daemon["args"] == [role, "run", "--config", file]
    assert f"{role} run" in COMMANDS
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert daemon[probe]["exec"]["command"] == ["staddle", "health", "--config", file]
    assert "health" in COMMANDS
    data = objects["ConfigMap", "site"]["data"]
    config = parse_toml(data[f"{role}.toml"].encode(), ROLES[role], role)
    assert str(config.roster) in data
    mounts = {each["mountPath"] for each in daemon["volumeMounts"]}
    assert {str(config.directory), str(config.keys)} <= mounts
    assert objects["PodDisruptionBudget", "site"]["spec"]["minAvailable"] == 1


@rendering
def test_a_silo_reaches_its_coordinator_and_nobody_else(tmp_path):
    objects = rendered("silo", tmp_path)
    policy = objects["NetworkPolicy", "site"]["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["ingress"] == []
    assert policy["egress"] == [
        {
            "ports": [{"protocol": "TCP", "port": 7443}],
            "to": [{"ipBlock": {"cidr": "203.0.113.7/32"}}],
        }
    ]
    spec = pod(objects)
    assert spec["hostAliases"] == [{"ip": "203.0.113.7", "hostnames": ["federation.example"]}]
    assert spec["dnsPolicy"] == "None"
    assert objects["Service", "site"]["spec"]["clusterIP"] == "None"
    near = [{"podSelector": {"matchLabels": {"app": "coordinator"}}}]
    inside = rendered("silo", tmp_path, networkPolicy={"to": near}, coordinator={"ip": ""})
    assert inside["NetworkPolicy", "site"]["spec"]["egress"][0]["to"] == near
    assert "dnsPolicy" not in pod(inside)
    six = rendered("silo", tmp_path, coordinator={"ip": "2001:db8::7"})
    (rule,) = six["NetworkPolicy", "site"]["spec"]["egress"]
    assert rule["to"] == [{"ipBlock": {"cidr": "2001:db8::7/128"}}]


@rendering
def test_a_coordinator_is_called_and_calls_nobody(tmp_path):
    objects = rendered("coordinator", tmp_path)
    policy = objects["NetworkPolicy", "site"]["spec"]
    assert policy["egress"] == []
    silos, scrapes = policy["ingress"]
    assert silos == {"ports": [{"protocol": "TCP", "port": 7443}]}
    assert [each["port"] for each in scrapes["ports"]] == [9464]
    assert scrapes["from"]
    service = objects["Service", "site"]["spec"]
    assert [each["port"] for each in service["ports"]] == [7443]
    assert ("Service", "site-metrics") in objects


@rendering
@pytest.mark.parametrize(
    ("role", "own", "why"),
    [
        ("silo", {"keys": {"existingSecret": ""}}, "existingSecret"),
        ("silo", {"coordinator": {"ip": ""}}, "ip"),
        ("silo", {"files": {"policy.toml": None}}, "policy.toml"),
        ("coordinator", {"role": "founder"}, "role"),
        ("coordinator", {"replicas": 2}, "replicas"),
    ],
)
def test_helm_refuses_values_that_cannot_work(role, own, why, tmp_path):
    with pytest.raises(ValueError, match=why):
        rendered(role, tmp_path, **own)


@pytest.mark.parametrize("role", ROLES)
def test_the_schema_knows_every_value_and_takes_the_examples(role):
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.validate(merged(defaults(), values(role)), schema)
    with pytest.raises(jsonschema.ValidationError, match="does not match"):
        jsonschema.validate(defaults(), schema)
    assert schema["properties"].keys() - {"global"} == defaults().keys()


def test_the_chart_has_the_release_of_the_package():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    assert chart["appVersion"] == chart["version"] == project["version"]
