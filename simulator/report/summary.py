"""The comparison of an experiment's methods as Markdown: what was run, every measure, the weakest silos, what it took.

Pure: the same runs give the same text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from urllib.parse import quote

from ...algorithms.partition.file import PartitionFile
from ..run.history import Measure, Measured
from ..run.measures import ALL, AVERAGES, CHOICES, DEFINITIONS, TITLES
from ..run.scores import Choice, Named, Spread, over_seeds, scores, spread
from .finished_runs import Recorded
from .markdown import Column, escaped, table
from .setting import Groups, drawn, experiment, methods
from .silo_spread import against, kept, spectrum

SHOWN: tuple[Measure, ...] = (*ALL, "selected/before", "selected/after")
LOCAL = "local"  # the method by which each silo trains alone
NONE = "–"
SPECTRUM = {
    "least": "worst silo",
    "worst_tenth": "worst tenth",
    "median": "median",
    "best_tenth": "best tenth",
    "most": "best silo",
    "spread": "spread",
}


@dataclass(frozen=True)
class Link:
    """A picture's file, from the folder of the summary on; one that is not ``shown`` is named."""

    path: PurePosixPath
    caption: str
    shown: bool = True


def summary(groups: Groups, partition: PartitionFile | None = None, pictures: Sequence[Link] = ()) -> str:
    """Of finished runs by label, which can be compared (``described.check_comparable``)."""
    title = next(iter(groups.values()))[0].identity.job["name"]
    sections = (_experiment(groups, partition), _silos(groups), _accuracy(groups), _cost(groups), _pictures(pictures))
    return "\n".join([f"# {escaped(title)}\n", *filter(None, sections), _meaning()])


def _experiment(groups: Groups, partition: PartitionFile | None) -> str:
    rows = [(escaped(name), escaped(value)) for name, value in experiment(groups, partition)]
    listed = "".join(f"- **{escaped(label)}**: {escaped(told)}\n" for label, told in methods(groups))
    return "## What was run\n\n" + table([Column("what"), Column("value")], rows) + "\n" + listed


def _silos(groups: Groups) -> str:
    alone = next((label for label, runs in groups.items() if len(groups) > 1 and runs[0].method == LOCAL), None)
    text = "## In the end, silo by silo\n\nAfter the last round, on test records, in percent"
    text += ", mean ± standard deviation over seeds.\n" if _several(groups) else ".\n"
    if alone is not None:
        text += (
            f"Better, equal and worse are how many of the {len(groups[alone][0].silos)} silos have more, as many and "
            f"fewer records right than with **{escaped(alone)}**, where each trains alone, under the same seed.\n"
        )
    own = {label: {run.seed: _kept(run) for run in runs} for label, runs in groups.items()}
    text += (
        "\n### The model that each silo keeps\n\nWhich that is stands above with each method; a silo that was in no "
    )
    text += "cohort keeps the one delivered last.\n\n" + _by_silo(own, alone)
    for measure in ALL:
        taken = {label: {run.seed: _last(run, measure) for run in runs} for label, runs in groups.items()}
        text += f"\n### {TITLES[measure].capitalize()} ({measure})\n\n" + _by_silo(taken, alone)
    return text


def _by_silo(taken: Mapping[str, Mapping[int, Measured]], alone: str | None) -> str:
    """A row a method, of what was measured with each seed."""
    titles = [*AVERAGES, *SPECTRUM.values(), *(("better", "equal", "worse") if alone is not None else ())]
    rows = []
    for label, seeds in taken.items():
        seen = [{"macro": one.macro, "micro": one.micro, **asdict(spectrum(one))} for one in seeds.values()]
        row = [escaped(label), *(_percent(spread([one[name] for one in seen])) for name in (*AVERAGES, *SPECTRUM))]
        if alone is not None:
            row += [NONE] * 3 if label == alone else _duels(seeds, taken[alone])
        rows.append(row)
    return table([Column("method"), *(Column(title, numbers=True) for title in titles)], rows)


def _duels(seeds: Mapping[int, Measured], others: Mapping[int, Measured]) -> list[str]:
    """Better, equal and worse, the mean over the seeds that both have."""
    found = [asdict(against(one, others[seed])) for seed, one in seeds.items() if seed in others]
    if not found:
        return [NONE] * 3
    return [f"{spread([one[way] for one in found]).mean:.1f}".removesuffix(".0") for way in found[0]]


def _accuracy(groups: Groups) -> str:
    found = {label: over_seeds([scores(run.history) for run in runs]) for label, runs in groups.items()}
    return "## Every measure\n\nOn test records, in percent as above.\n" + "".join(
        _scores(found, choice) for choice in CHOICES
    )


def _scores(found: Mapping[str, Mapping[Named, Spread]], choice: Choice) -> str:
    named = [(measure, average, choice) for measure in SHOWN for average in AVERAGES]
    columns = [one for one in named if any(one in own for own in found.values())]
    if not columns:
        return ""
    titles = [Column(f"{measure} {average}", numbers=True) for measure, average, _ in columns]
    rows = [[escaped(label), *(_percent(own.get(one)) for one in columns)] for label, own in found.items()]
    return f"\n### {choice.capitalize()}\n\nThat is {CHOICES[choice]}.\n\n" + table([Column("method"), *titles], rows)


def _cost(groups: Groups) -> str:
    columns = [
        Column("method"),
        *(Column(title, numbers=True) for title in ("runs", "seconds a run", "rounds a second")),
    ]
    rows = []
    for label, runs in groups.items():
        timed = [(run.rounds, run.seconds) for run in runs if run.seconds]
        seconds = sum(seconds for _, seconds in timed)
        told = [f"{seconds / len(timed):,.1f}", _pace(sum(n for n, _ in timed) / seconds)] if timed else [NONE] * 2
        rows.append([escaped(label), str(len(runs)), *told])
    return (
        "## What it took\n\nSeconds on the wall while processes were at a run, evaluation included, and in the first "
        "run of a command the start of its worker processes; what was lost when one was killed is not counted.\n\n"
        + table(columns, rows)
    )


def _pictures(pictures: Sequence[Link]) -> str:
    shown = [f"![{escaped(one.caption)}]({quote(str(one.path))})\n" for one in pictures if one.shown]
    named = [f"- [{escaped(one.caption)}]({quote(str(one.path))})\n" for one in pictures if not one.shown]
    return "\n".join(["## Pictures\n", *shown, "".join(named)]) if pictures else ""


def _meaning() -> str:
    measures = "".join(f"- **{measure}**: {meaning}.\n" for measure, meaning in DEFINITIONS.items())
    averages = "".join(f"- **{average}**: {meaning}.\n" for average, meaning in AVERAGES.items())
    return (
        "## What the numbers mean\n\n"
        "The accuracy of a silo is the share of its own records, of the side named, that a model classifies right.\n\n"
        f"{measures}{averages}"
        "- **spread**: the standard deviation of the silos' accuracies, of a population: it is of these silos.\n"
        "- **worst tenth**, **best tenth**: the mean accuracy of the tenth of the silos, rounded up, with the lowest "
        "and with the highest accuracies.\n"
        "- **±**: the standard deviation over seeds, of a sample (n − 1).\n\n"
        "A round is one that trains; a census before the first is none. Seeds draw initial models, cohorts and "
        "batches; who holds which record, and on which side, is the same for all.\n"
    )


def _several(groups: Groups) -> bool:
    return any(len(runs) > 1 for runs in groups.values())


def _kept(run: Recorded) -> Measured:
    return kept(run.history, run.product, drawn(run))


def _last(run: Recorded, measure: Measure) -> Measured:
    return [one for one in run.history if one.measure == measure][-1]


def _pace(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _percent(value: Spread | None) -> str:
    if value is None:
        return NONE
    deviation = "" if value.deviation is None else f" ± {100 * value.deviation:.2f}"
    return f"{100 * value.mean:.2f}{deviation}"
