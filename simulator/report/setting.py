"""What was run, for a summary: what all runs of an experiment have in common, and what is different for a method."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from ...algorithms.job.job import Job
from ...algorithms.partition.file import PartitionFile
from ...errors import LocalError
from ..experiment.plan import Population
from .finished_runs import Recorded

Rows = list[tuple[str, str]]
Groups = Mapping[str, Sequence[Recorded]]  # runs by label, those of a label by seed

TABLES = ("rounds", "participation", "min_cohort", "model", "training")  # of a job's document, that a simulation heeds
KEEPS = {"delivered": "the model delivered last (all/aggregated)", "trained": "the model trained last (all/trained)"}


def check_comparable(groups: Groups, population: Population | None = None) -> None:
    """LocalError unless all runs had the same records, the population's, and those of a label the same method."""
    everyone = [run for runs in groups.values() for run in runs]
    if population is not None and population.digest != everyone[0].identity.population:
        raise LocalError(f"{everyone[0].folder}: its silos held other records than now; choose another --out")
    for run in everyone[1:]:
        if run.identity.population != everyone[0].identity.population:
            raise LocalError(
                f"{run.folder}: its silos hold other records than those of {everyone[0].folder}, so the two cannot be "
                "compared; let each partition have an --out of its own"
            )
    for label, runs in groups.items():
        for run in runs[1:]:
            if _said(run) != _said(runs[0]):
                raise LocalError(
                    f"{run.folder}: its job is not that of {runs[0].folder}, though both are labelled {label!r}; "
                    "remove the one that is out of date"
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
            told = f"{min(counts):,} to {max(counts):,}, median {median(counts):g}; {sum(counts):,} in all"
            rows.append((f"{name} records of a silo", told))
    rows += [(key, value) for key, value in _settings(first) if _shared(groups, key, value)]
    sizes = {_job(runs[0]).cohort_size for runs in groups.values()}
    rows.append(("silos drawn for a round", " or ".join(str(size) for size in sorted(sizes))))
    rows.append(("seeds", ", ".join(map(str, seeds))))
    every = "after each round" if here.look_every == 1 else f"after every {here.look_every} rounds and after the last"
    rows.append(("all silos evaluated", every))
    made = sorted({str(run.identity.made_with) for runs in groups.values() for run in runs})
    rows.append(("made", "; ".join(made)))
    return rows


def methods(groups: Groups) -> list[tuple[str, str]]:
    """By label, what the method is and what it has that not all have."""
    found = []
    for label, runs in groups.items():
        method = runs[0].identity.job["method"]
        own = _listed({key: value for key, value in _settings(runs[0]) if not _shared(groups, key, value)})
        options = _listed(method["options"]) or "no options"
        told = f"{method['name']} version {method['version']}; {options}; a silo keeps {KEEPS[runs[0].product]}"
        found.append((label, f"{told}; {own}" if own else told))
    return found


def drawn(run: Recorded) -> frozenset[str]:
    """The silos that were in the cohort of any round, a census included: those that ``Simulation`` calls trained."""
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
            yield from ((f"{key}.{name}", _told(inner)) for name, inner in value.items() if inner is not None)
        else:
            yield key, _told(value)


def _shared(groups: Groups, key: str, value: str) -> bool:
    return all(dict(_settings(runs[0])).get(key) == value for runs in groups.values())


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {_told(value)}" for key, value in values.items() if value is not None)


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
