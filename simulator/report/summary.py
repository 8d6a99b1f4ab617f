"""The comparison of an experiment's methods as Markdown: what was run, every measure, the weakest
silos, what it took.

Pure: the same runs give the same text.

What was run, for a summary: what all runs of an experiment have in common, and what is different
for a method.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from statistics import median
from typing import Any
from urllib.parse import quote

from ...algorithms.job.job import Job
from ...algorithms.partition.file import PartitionFile
from ...errors import LocalError
from ..experiment.plan import Population
from ..run.history import Measure, Measured
from ..run.scores import (
    ALL,
    AVERAGES,
    CHOICES,
    DEFINITIONS,
    TITLES,
    Choice,
    Named,
    Spread,
    over_seeds,
    scores,
    spread,
)
from .finished_runs import Recorded
from .markdown import MarkdownColumn, escaped, table
from .silo_spread import against, kept, spectrum

Rows = list[tuple[str, str]]
Groups = Mapping[str, Sequence[Recorded]]  # runs by label, those of a label by seed

# of a job's document, that a simulation heeds
TABLES = ("rounds", "participation", "min_cohort", "model", "training")
KEEPS = {
    "delivered": "the model delivered last (all/aggregated)",
    "trained": "the model trained last (all/trained)",
}


def check_comparable(groups: Groups, population: Population | None = None) -> None:
    """LocalError unless all runs had the same records, the population's, and those of a label the
    same method.
    """
    everyone = [run for runs in groups.values() for run in runs]
    if population is not None and population.digest != everyone[0].identity.population:
        raise LocalError(
            f"{everyone[0].folder}: its silos held other records than now; choose another --out"
        )
    for run in everyone[1:]:
        if run.identity.population != everyone[0].identity.population:
            raise LocalError(
                f"{run.folder}: its silos hold other records than those of {everyone[0].folder}, so"
                " the two cannot be compared; let each partition have an --out of its own"
            )
    for label, runs in groups.items():
        for run in runs[1:]:
            if _said(run) != _said(runs[0]):
                raise LocalError(
                    f"{run.folder}: its job is not that of {runs[0].folder}, though both are"
                    f" labelled {label!r}; remove the one that is out of date"
                )


def experiment(groups: Groups, partition: PartitionFile | None) -> Rows:
    """Names and values that hold for all runs."""
    first = next(iter(groups.values()))[0]
    here, seeds = first.identity, sorted({run.seed for runs in groups.values() for run in runs})
    rows: Rows = []
    if partition is not None:
        how = {"kind": "", **partition.how}  # first
        split = how.pop("split", None)
        rows.append(("data", f"{partition.data}: {partition.records:,} records"))
        rows.append(("partition", _listed({**how, "seed": partition.seed})))
        rows += [("split", _listed(split))] if isinstance(split, Mapping) else []
    sides = {"training": "train", "validation": "validation", "test": "test"}
    rows.append(("silos", str(len(first.silos))))
    for name, side in sides.items():
        counts = [getattr(silo, side) or 0 for silo in first.silos]
        if any(counts):
            told = (
                f"{min(counts):,} to {max(counts):,}, median {median(counts):g}; {sum(counts):,}"
                " in all"
            )
            rows.append((f"{name} records of a silo", told))
    rows += [(key, value) for key, value in _settings(first) if _shared(groups, key, value)]
    sizes = {_job(runs[0]).cohort_size for runs in groups.values()}
    rows.append(("silos drawn for a round", " or ".join(str(size) for size in sorted(sizes))))
    rows.append(("seeds", ", ".join(map(str, seeds))))
    every = (
        "after each round"
        if here.look_every == 1
        else f"after every {here.look_every} rounds and after the last"
    )
    rows.append(("all silos evaluated", every))
    made = sorted({str(run.identity.made_with) for runs in groups.values() for run in runs})
    rows.append(("made", "; ".join(made)))
    return rows


def methods(groups: Groups) -> list[tuple[str, str]]:
    """By label, what the method is and what it has that not all have."""
    found = []
    for label, runs in groups.items():
        method = runs[0].identity.job["method"]
        own = _listed(
            {key: value for key, value in _settings(runs[0]) if not _shared(groups, key, value)}
        )
        options = _listed(method["options"]) or "no options"
        told = (
            f"{method['name']} version {method['version']}; {options}; a silo keeps"
            f" {KEEPS[runs[0].product]}"
        )
        found.append((label, f"{told}; {own}" if own else told))
    return found


def drawn(run: Recorded) -> frozenset[str]:
    """The silos that were in the cohort of any round, a census included: those that ``Simulation``
    calls trained.
    """
    found: set[str] = set()
    for cohort in _job(run).cohorts():
        found.update(cohort)
        if len(found) == len(run.silos):
            break
    return frozenset(found)


def _job(run: Recorded) -> Job:
    return Job.from_document(run.identity.job, str(run.folder), federated=False)


def _said(run: Recorded) -> Mapping[str, Any]:
    return {key: value for key, value in run.identity.job.items() if key != "seed"}


def _settings(run: Recorded) -> Iterator[tuple[str, str]]:
    """``("training.lr", "0.1")``."""
    for key in TABLES:
        value = run.identity.job[key]
        if isinstance(value, Mapping):
            yield from (
                (f"{key}.{name}", _told(inner))
                for name, inner in value.items()
                if inner is not None
            )
        else:
            yield key, _told(value)


def _shared(groups: Groups, key: str, value: str) -> bool:
    return all(dict(_settings(runs[0])).get(key) == value for runs in groups.values())


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key} = {_told(value)}" for key, value in values.items() if value is not None
    )


def _told(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case list() | tuple():
            return f"[{', '.join(map(_told, value))}]"
        case Mapping():
            return _listed(value)
        case _:
            return str(value)


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


def summary(
    groups: Groups, partition: PartitionFile | None = None, pictures: Sequence[Link] = ()
) -> str:
    """Of finished runs by label, which can be compared (``described.check_comparable``)."""
    title = next(iter(groups.values()))[0].identity.job["name"]
    sections = (
        _experiment(groups, partition),
        _silos(groups),
        _accuracy(groups),
        _cost(groups),
        _pictures(pictures),
    )
    return "\n".join([f"# {escaped(title)}\n", *filter(None, sections), _meaning()])


def _experiment(groups: Groups, partition: PartitionFile | None) -> str:
    rows = [(escaped(name), escaped(value)) for name, value in experiment(groups, partition)]
    listed = "".join(
        f"- **{escaped(label)}**: {escaped(told)}\n" for label, told in methods(groups)
    )
    return (
        "## What was run\n\n"
        + table([MarkdownColumn("what"), MarkdownColumn("value")], rows)
        + "\n"
        + listed
    )


def _silos(groups: Groups) -> str:
    alone = next(
        (label for label, runs in groups.items() if len(groups) > 1 and runs[0].method == LOCAL),
        None,
    )
    text = "## In the end, silo by silo\n\nAfter the last round, on test records, in percent"
    text += ", mean ± standard deviation over seeds.\n" if _several(groups) else ".\n"
    if alone is not None:
        text += (
            f"Better, equal and worse are how many of the {len(groups[alone][0].silos)} silos have"
            f" more, as many and fewer records right than with **{escaped(alone)}**, where each"
            " trains alone, under the same seed.\n"
        )
    own = {label: {run.seed: _kept(run) for run in runs} for label, runs in groups.items()}
    text += (
        "\n### The model that each silo keeps\n\nWhich that is stands above with each method; a"
        " silo that was in no "
    )
    text += "cohort keeps the one delivered last.\n\n" + _by_silo(own, alone)
    for measure in ALL:
        taken = {
            label: {run.seed: _last(run, measure) for run in runs} for label, runs in groups.items()
        }
        text += f"\n### {TITLES[measure].capitalize()} ({measure})\n\n" + _by_silo(taken, alone)
    return text


def _by_silo(taken: Mapping[str, Mapping[int, Measured]], alone: str | None) -> str:
    """A row a method, of what was measured with each seed."""
    titles = [
        *AVERAGES,
        *SPECTRUM.values(),
        *(("better", "equal", "worse") if alone is not None else ()),
    ]
    rows = []
    for label, seeds in taken.items():
        seen = [
            {"macro": one.macro, "micro": one.micro, **asdict(spectrum(one))}
            for one in seeds.values()
        ]
        row = [
            escaped(label),
            *(_percent(spread([one[name] for one in seen])) for name in (*AVERAGES, *SPECTRUM)),
        ]
        if alone is not None:
            row += [NONE] * 3 if label == alone else _duels(seeds, taken[alone])
        rows.append(row)
    return table(
        [MarkdownColumn("method"), *(MarkdownColumn(title, numbers=True) for title in titles)], rows
    )


def _duels(seeds: Mapping[int, Measured], others: Mapping[int, Measured]) -> list[str]:
    """Better, equal and worse, the mean over the seeds that both have."""
    found = [asdict(against(one, others[seed])) for seed, one in seeds.items() if seed in others]
    if not found:
        return [NONE] * 3
    return [
        f"{spread([one[way] for one in found]).mean:.1f}".removesuffix(".0") for way in found[0]
    ]


def _accuracy(groups: Groups) -> str:
    found = {
        label: over_seeds([scores(run.history) for run in runs]) for label, runs in groups.items()
    }
    return "## Every measure\n\nOn test records, in percent as above.\n" + "".join(
        _scores(found, choice) for choice in CHOICES
    )


def _scores(found: Mapping[str, Mapping[Named, Spread]], choice: Choice) -> str:
    named = [(measure, average, choice) for measure in SHOWN for average in AVERAGES]
    columns = [one for one in named if any(one in own for own in found.values())]
    if not columns:
        return ""
    titles = [
        MarkdownColumn(f"{measure} {average}", numbers=True) for measure, average, _ in columns
    ]
    rows = [
        [escaped(label), *(_percent(own.get(one)) for one in columns)]
        for label, own in found.items()
    ]
    return f"\n### {choice.capitalize()}\n\nThat is {CHOICES[choice]}.\n\n" + table(
        [MarkdownColumn("method"), *titles], rows
    )


def _cost(groups: Groups) -> str:
    columns = [
        MarkdownColumn("method"),
        *(
            MarkdownColumn(title, numbers=True)
            for title in ("runs", "seconds a run", "rounds a second")
        ),
    ]
    rows = []
    for label, runs in groups.items():
        timed = [(run.rounds, run.seconds) for run in runs if run.seconds]
        seconds = sum(seconds for _, seconds in timed)
        told = (
            [f"{seconds / len(timed):,.1f}", _pace(sum(n for n, _ in timed) / seconds)]
            if timed
            else [NONE] * 2
        )
        rows.append([escaped(label), str(len(runs)), *told])
    return (
        "## What it took\n\nSeconds on the wall while processes were at a run, evaluation included,"
        " and in the first run of a command the start of its worker processes; what was lost when"
        " one was killed is not counted.\n\n" + table(columns, rows)
    )


def _pictures(pictures: Sequence[Link]) -> str:
    shown = [
        f"![{escaped(one.caption)}]({quote(str(one.path))})\n" for one in pictures if one.shown
    ]
    named = [
        f"- [{escaped(one.caption)}]({quote(str(one.path))})\n" for one in pictures if not one.shown
    ]
    return "\n".join(["## Pictures\n", *shown, "".join(named)]) if pictures else ""


def _meaning() -> str:
    measures = "".join(f"- **{measure}**: {meaning}.\n" for measure, meaning in DEFINITIONS.items())
    averages = "".join(f"- **{average}**: {meaning}.\n" for average, meaning in AVERAGES.items())
    return (
        "## What the numbers mean\n\nThe accuracy of a silo is the share of its own records, of"
        f" the side named, that a model classifies right.\n\n{measures}{averages}- **spread**: the"
        " standard deviation of the silos' accuracies, of a population: it is of these silos.\n-"
        " **worst tenth**, **best tenth**: the mean accuracy of the tenth of the silos, rounded"
        " up, with the lowest and with the highest accuracies.\n- **±**: the standard deviation"
        " over seeds, of a sample (n − 1).\n\nA round is one that trains; a census before the"
        " first is none. Seeds draw initial models, cohorts and batches; who holds which record,"
        " and on which side, is the same for all.\n"
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
