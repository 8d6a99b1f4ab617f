"""The runs of an experiment: one job for each method and seed, once the silos are known."""

from collections import defaultdict
from collections.abc import Sequence

import torch

from ...algorithms.engines.attendance import Attendance, check_attendance
from ...algorithms.engines.simulation import check_population
from ...algorithms.job.job import Job
from ...algorithms.job.security import SecurityTable
from ...algorithms.training.record_checks import check_training
from ...errors import LocalError
from .chosen_method import ChosenMethod
from .experiment import CheckedExperiment, job_of
from .hints import hint
from .plan import Population, Run


def runs(
    experiment: CheckedExperiment,
    population: Population,
    methods: Sequence[str] = (),
    seeds: Sequence[int] = (),
    rounds: int | None = None,
) -> tuple[Run, ...]:
    """The runs, method by method, each with its seeds in turn.

    LocalError where the records do not fit a method's job. ``methods``, by label or name, ``seeds``
    and ``rounds`` replace those of the file.
    """
    chosen = chosen_methods(experiment, methods)
    if rounds is not None:
        _check_one_length(experiment)
        # The command line also overrides a method's own rounds.
        chosen = [method.model_copy(update={"rounds": rounds}) for method in chosen]
    # A seed that is named twice runs once.
    wanted = tuple(dict.fromkeys(seeds)) or experiment.file.all_seeds

    found: list[Run] = []
    for method in chosen:
        jobs = [_job(experiment, population, method, seed) for seed in wanted]

        # all methods take the same records (``experiment.read``): one check, which takes seconds
        if not found:
            check_population(jobs[0], population.records)

        # a method trains a model of its own, so what its batches demand is checked for each; the
        # jobs of a method differ in the seed alone
        for silo, records in population.records.items():
            check_training(jobs[0], records.train, silo, f"silo {silo!r}")
        attendance = experiment.file.attendance
        for job in jobs:
            _check_attendance(experiment, attendance, job)
            found.append(Run(method.title, job.seed, job, attendance))
    return tuple(found)


def _check_attendance(experiment: CheckedExperiment, attendance: Attendance, job: Job) -> None:
    try:
        check_attendance(attendance, job)
    except LocalError as error:
        raise LocalError(f"{experiment.path}: {error}") from error


def _check_one_length(experiment: CheckedExperiment) -> None:
    sweep = experiment.file.sweep
    if sweep is not None and "rounds" in sweep.settings:
        raise LocalError(
            f"{experiment.path}: --rounds would make all variants one, since [sweep] has 'rounds';"
            " leave it out, or change [sweep]"
        )


def chosen_methods(experiment: CheckedExperiment, wanted: Sequence[str]) -> list[ChosenMethod]:
    """The methods of these labels or names; all methods where none is wanted.

    LocalError for one that the file does not have.

    A name selects all methods of that name, and the label of a method in a sweep all its variants.
    The result is in the file's order.
    """
    methods = experiment.file.all_methods
    if not wanted:
        return list(methods)

    named: dict[str, set[str]] = defaultdict(set)
    labels = []
    for method in methods:
        named[method.name].add(method.title)
        labels.append(method.title)
    # a label means one method, even where it is also the name of others
    of_method: dict[str, set[str]] = defaultdict(set)
    for variant in experiment.variants:
        of_method[variant.method].add(variant.label)
    named |= of_method
    for label in labels:
        named[label] = {label}

    titles: set[str] = set()
    for name in wanted:
        if name not in named:
            # Suggest labels, which people see in folders and tables.
            nearest = hint(name, labels)
            raise LocalError(
                f"{experiment.path}: no method is labelled or named {name!r}; {nearest}"
            )
        titles |= named[name]

    # in the file's order, whatever that of the command line: labels have colours by it
    return [method for method in methods if method.title in titles]


def _job(
    experiment: CheckedExperiment, population: Population, method: ChosenMethod, seed: int
) -> Job:
    silos, security = tuple(population.records), experiment.file.security
    # a secure sum weighted by public counts needs them in the job; a simulation knows them
    weighs_publicly = security.required and security.weights == "public"
    if weighs_publicly and not security.counts:
        # a job that lacks the counts cannot say what it needs, one in the clear can
        clear = job_of(experiment, method, seed, silos, SecurityTable())
        compares = clear.method().compares_labels
        security = _declared(security, population, class_counts=compares)
    job = job_of(experiment, method, seed, silos, security)
    job.method()  # LocalError where it does not work with this model
    return job


def _declared(
    security: SecurityTable, population: Population, *, class_counts: bool
) -> SecurityTable:
    """The table with the counts that an operator of a federation would ask of each silo."""
    counts: dict[str, int] = {}
    by_class: dict[str, tuple[int, ...]] = {}
    for silo, records in population.records.items():
        y = records.train.y
        counts[silo] = len(y)
        # Training records only, as a silo of a federation declares them.
        if class_counts:
            histogram = torch.bincount(y, minlength=population.classes)
            by_class[silo] = tuple(histogram.tolist())
    declared: dict[str, object] = {"counts": counts}
    if class_counts and not security.class_counts:
        declared["class_counts"] = by_class
    return security.model_copy(update=declared)
