"""Newcomers' scores apart from those of the other silos, and how often silos were missing.

Scores follow from the looks at all silos, silo by silo. A newcomer's ``aggregated`` before it
joins is what a delivery alone does for a silo that has never trained.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, filterfalse
from math import isnan, nan
from statistics import fmean

from ...algorithms.tasks.counting import ScoreForm
from ..run.history import Measured
from ..run.scores import ALL, TITLES, spread
from .finished_runs import Recorded
from .markdown import NONE, escaped, method_table

SHOWN_ROUNDS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)  # rounds since they joined
NEWCOMERS, OTHERS = "newcomers", "others"


def groups_of(run: Recorded) -> Mapping[str, Sequence[str]]:
    """The run's silos as newcomers and others; empty where all are there from the beginning."""
    silos = tuple(silo.name for silo in run.silos)
    newcomers = run.identity.who.joining(silos)
    if not newcomers:
        return {}
    return {NEWCOMERS: newcomers, OTHERS: tuple(filterfalse(newcomers.__contains__, silos))}


def apart(run: Recorded, one: Measured) -> Iterator[tuple[str, Measured]]:
    """A look at all silos as one at newcomers and one at the others, each with its name.

    Such as ``newcomers/trained``. Nothing for other measures, and without newcomers.
    """
    if one.measure not in ALL:
        return
    for group, silos in groups_of(run).items():
        # A silo without test records has no score.
        measured = list(filter(one.records.__contains__, silos))
        if measured:
            yield one.measure.replace("all", group, 1), one.of(measured)


def newcomers_section(groups: Mapping[str, Sequence[Recorded]], form: ScoreForm) -> str:
    """The section, a table per kind of model and a row per label; empty without newcomers."""
    first = next(iter(groups.values()))[0]
    apart_from, join_after = groups_of(first), first.identity.who.join_after
    if not apart_from or join_after is None:
        return ""
    joining = apart_from[NEWCOMERS]
    text = (
        f"## Newcomers\n\n{len(joining)} of {len(first.silos)} silos take no part in the first"
        f" {join_after} rounds, and join then: {escaped(', '.join(joining))}. Below are means over"
        f" these silos, each counting the same, on test records, {form.measured_in}, by the number"
        " of rounds since they joined. At 0 they have never trained: the model as delivered is what"
        " the method makes for a silo without a history, the model as last trained is the initial"
        " one. *Others* are all other silos after the last round.\n"
    )
    for measure in ALL:
        title = TITLES[measure].replace("all silos", NEWCOMERS).capitalize()
        text += f"\n### {title} ({measure.replace('all', NEWCOMERS, 1)})\n\n"
        text += _table(groups, measure, join_after, form)
    return text


def _table(
    groups: Mapping[str, Sequence[Recorded]], measure: str, join_after: int, form: ScoreForm
) -> str:
    kind = measure.partition("/")[2]
    # By label: for each seed the mean scores, by rounds since the newcomers joined.
    found: dict[str, list[dict[int, float]]] = {}
    for label, runs in groups.items():
        found[label] = [_since(run, f"{NEWCOMERS}/{kind}", join_after) for run in runs]
    seen = set().union(*chain.from_iterable(found.values()))
    columns = list(filter(seen.__contains__, SHOWN_ROUNDS))
    rows = []
    for label, seeds in found.items():
        cells = [_cell([own.get(since) for own in seeds], form) for since in columns]
        others = [_since(run, f"{OTHERS}/{kind}", 0) for run in groups[label]]
        cells += [_cell(list(map(_last, group)), form) for group in (seeds, others)]
        rows.append([escaped(label), *cells])
    return method_table([*map(str, columns), "last round", "others"], rows)


def _since(run: Recorded, name: str, after: int) -> dict[int, float]:
    """The mean scores of a group of silos, by rounds since so many; earlier ones are left out."""
    found = {}
    for one in run.history:
        own = dict(apart(run, one)).get(name)
        if own is not None and one.rounds >= after:
            found[one.rounds - after] = own.macro
    return found


def _last(values: Mapping[int, float]) -> float | None:
    return values[max(values)] if values else None


def _cell(values: Sequence[float | None], form: ScoreForm) -> str:
    """Mean and deviation over seeds; a dash where one of them has no score."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return NONE
    over = spread(known)
    return form.cell(over.mean, over.deviation)


def attendance_section(groups: Mapping[str, Sequence[Recorded]]) -> str:
    """Who was missing from the rounds, a row per label; empty where all were there in time."""
    everyone = chain.from_iterable(groups.values())
    if all(run.identity.attendance is None for run in everyone):
        return ""
    rows = []
    for label, runs in groups.items():
        cells = map(_count, zip(*map(_attended, runs), strict=True))
        rows.append([escaped(label), *cells])
    titles = ("took part", "absent", "late", "simulated seconds")
    return (
        "## Who was there\n\nPer run, over all rounds: how often a silo's upload entered a round,"
        " how often a drawn silo was absent, and how often its upload came after the round had"
        " closed. Newcomers count from when they join. The simulated clock counts local training"
        " alone, and a round ends with its last upload, its quorum or its timeout; what late silos"
        " did is not in the table of work above.\n\n" + method_table(titles, rows)
    )


def _attended(run: Recorded) -> tuple[float, ...]:
    """How often silos took part, were absent and were late; simulated seconds, NaN without."""
    here, absent, late = 0, 0, 0
    seconds = []
    for line in run.work:
        here += len(line.silos)
        absent += len(line.absent)
        late += len(line.late)
        if line.simulated is not None:
            seconds.append(line.simulated)
    return here, absent, late, sum(seconds) if seconds else nan


def _count(values: Sequence[float]) -> str:
    """The mean over seeds."""
    mean = fmean(values)
    return NONE if isnan(mean) else f"{mean:,.1f}".removesuffix(".0")
