"""The comparison of an experiment's methods as a piece of HTML, for notebooks.

It says what ``summary.md`` says first: how the silos fare, whether the methods did the same work,
and the curves. All text is escaped, whoever chose a label.
"""

from base64 import b64encode
from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter

from jinja2 import Environment

from ..run.scores import AVERAGES
from .finished_runs import Recorded, by_label, comparable
from .markdown import NONE
from .summary import DUELS, kept_rows, trains_alone
from .work_table import COLUMNS, UNEQUAL, WHY_IT_MATTERS, differences, work_rows

SHOWN = ("macro", "balanced", "worst tenth", *DUELS)  # of the summary's columns
TEMPLATE = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string("""\
{% macro table(titles, rows) %}
<table>
<thead><tr>{% for title in titles %}<th>{{ title }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in rows %}
<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table>
{% endmacro %}
{{ table(titles, rows) }}
<p>{{ meaning }}</p>
{% if choice %}
<p>{{ choice }}.</p>
{% endif %}
{% if waiting %}
<p>Not finished, and not shown: {{ waiting | join("; ") }}.</p>
{% endif %}
{% if unequal %}
<p><b>Warning: {{ why[0] }}</b> {{ why[1] }}</p>
<ul>{% for name, text in unequal.items() %}<li><b>{{ name }}</b>: {{ text }}</li>{% endfor %}</ul>
{% endif %}
<details>
<summary>What training took</summary>
{{ table(work_titles, work) }}
<p>Steps, records and MFLOPs per silo and round in which it was drawn; megabytes per run.</p>
</details>
{% if curves %}
<img src="data:image/png;base64,{{ curves }}" alt="curves" style="max-width: 100%">
{% endif %}
""")


def results_html(
    runs: Sequence[Recorded],
    curves: bytes = b"",
    outranked: Collection[str] = (),
    choice: str = "",
) -> str:
    """What the finished ones of these runs compare; at least one is finished.

    ``curves`` is a PNG; empty where there is none. ``outranked`` are labels of a sweep's variants
    that are left out, and ``choice`` says what chose the others.
    """
    shown = [run for run in runs if run.label not in outranked]
    finished = comparable(shown)
    groups = by_label(finished)
    titles, rows = kept_rows(groups)
    kept = [place for place, title in enumerate(titles) if title in SHOWN]
    return TEMPLATE.render(
        titles=["method", "seeds", "rounds", *(titles[place] for place in kept)],
        rows=[
            [row[0], *_extent(groups.get(row[0])), *(row[1 + place] for place in kept)]
            for row in rows
        ],
        meaning=_meaning(groups, titles),
        choice=choice,
        waiting=[run.title for run in shown if run not in finished],
        unequal=differences(groups),
        why=(UNEQUAL, WHY_IT_MATTERS),
        work_titles=["method", *COLUMNS],
        work=work_rows(groups),
        curves=b64encode(curves).decode(),
    )


def _extent(runs: Sequence[Recorded] | None) -> tuple[str, str]:
    """How many seeds and rounds a method had; the constant answer has neither."""
    if runs is None:
        return NONE, NONE
    # Of a label, runs differ in the seed alone.
    return str(len(runs)), str(runs[0].rounds)


def _meaning(groups: Mapping[str, Sequence[Recorded]], titles: Sequence[str]) -> str:
    """What the numbers of the first table are, in a few sentences."""
    everyone = [run for runs in groups.values() for run in runs]
    form = everyone[0].form
    silos = len(everyone[0].silos)
    text = (
        f"{form.title} of the model that each of {silos} silos keeps, on its own test records,"
        f" {form.measured_in}, after the last round"
    )
    if len(set(map(attrgetter("seed"), everyone))) > 1:
        text += " (mean ± standard deviation over seeds)"
    for name, said in AVERAGES.items():
        if name in titles and name in SHOWN:
            text += f"; {name}: {said}"
    text += "; worst tenth: the mean of the tenth of the silos with the worst scores"
    alone = trains_alone(groups)
    if alone is not None:
        text += f"; better, equal, worse: how many silos fare so, next to {alone}"
    return f"{text}."
