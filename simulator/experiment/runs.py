"""The runs of an experiment: one job for each method and seed, once it is known which silos there
are.
"""

import difflib
from collections.abc import Sequence

import torch

from ...algorithms.engines.simulation import check_population
from ...algorithms.job.job import Job
from ...algorithms.job.security import SecurityTable
from ...algorithms.training.record_checks import check_training
from ...errors import LocalError
from .experiment import ChosenMethod, Experiment, job_of
from .plan import Population, Run


def runs(
    experiment: Experiment,
    population: Population,
    methods: Sequence[str] = (),
    seeds: Sequence[int] = (),
    rounds: int | None = None,
) -> tuple[Run, ...]:
    """Method by method, each with its seeds in turn.

    LocalError where the records do not fit a method's job.

    What a record must be is the same for all methods (``experiment.read``), and is asked once: it
    takes seconds.

    ``methods``, by label or name, ``seeds`` and ``rounds`` stand in for what the file says.
    """
    found: list[Run] = []
    for method in chosen_methods(experiment, methods):
        chosen = method if rounds is None else method.model_copy(update={"rounds": rounds})
        wanted = tuple(dict.fromkeys(seeds)) or experiment.file.all_seeds
        own = [
            Run(chosen.title, seed, _job(experiment, population, chosen, seed)) for seed in wanted
        ]
        if not found:
            check_population(own[0].job, population.records)
        for silo, records in population.records.items():
            check_training(own[0].job, records.train, silo, f"silo {silo!r}")
        found += own
    return tuple(found)


def chosen_methods(experiment: Experiment, wanted: Sequence[str]) -> list[ChosenMethod]:
    """The methods of these labels or names, all for none.

    LocalError for one that the file does not have.
    """
    methods = experiment.file.all_methods
    known = {method.title: method for method in methods}
    for name in wanted:
        if not any(name in (method.title, method.name) for method in methods):
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise LocalError(f"{experiment.path}: no method is labelled or named {name!r}; {hint}")
    # a label says which, a name alone means all of it
    by_name = {name for name in wanted if name not in known}
    return [
        method
        for method in methods
        if not wanted or method.title in wanted or method.name in by_name
    ]


def _job(experiment: Experiment, population: Population, method: ChosenMethod, seed: int) -> Job:
    silos, security = tuple(population.records), experiment.file.security
    if security.required and security.weights == "public" and not security.counts:
        clear = job_of(experiment, method, seed, silos, SecurityTable())
        security = _declared(security, population, class_counts=clear.method().compares_labels)
    job = job_of(experiment, method, seed, silos, security)
    job.method()  # whether it works with this model
    return job


def _declared(
    security: SecurityTable, population: Population, *, class_counts: bool
) -> SecurityTable:
    """The table with the counts that an operator of a federation would ask of each silo."""
    labels = {silo: records.train.y for silo, records in population.records.items()}
    declared: dict[str, object] = {"counts": {silo: len(y) for silo, y in labels.items()}}
    if class_counts and not security.class_counts:
        declared["class_counts"] = {
            silo: tuple(torch.bincount(y, minlength=population.classes).tolist())
            for silo, y in labels.items()
        }
    return security.model_copy(update=declared)
