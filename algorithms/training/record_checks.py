"""Checks that a silo's records fit a job, when a silo admits the job and before a simulation.

Records are refused only if no method can work with them. A silo that lacks some classes, or has a
single one, fits: label skew is what the methods are for. So does a single training record, except
under batch norm: where the feature maps have shrunk to one pixel, as MobileNetV2's do, a batch of
copies of it is normalised to zero, whatever the record.
"""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import LocalError
from ..data.dataset import Dataset
from ..data.features import declarations_differ, out_of_range, outside, shown
from ..data.lazy import LazyRecords
from ..exchange.parts import all_finite
from ..job.class_census import shown_rows
from ..job.job import Job
from ..models.build import ModelOptions, image_shape, input_shape, vocabularies
from ..models.class_names import names_differ, names_fault
from ..models.inputs import inputs_differ, shapes_of
from ..models.registry import Shape
from ..tasks.registry import guard
from ..tasks.task import histogram, labels_fault
from .loop import batch_coupled

# Where the records' names of classes are listed, and where their number is said.
NAMING = ("data.class_names (or the data's own list)", "the job's model.classes")
MOST_LISTED = 100  # classes, in a line of the log
# Share of its records that a silo may have in other classes than a job declares, since declared
# counts may be rounded, or outside a feature's range.
LARGEST_MISS = 0.05


def check_records(job: Job, records: Dataset, where: str) -> None:
    """LocalError, with ``where`` and the first fault, unless the job can work with the records.

    The checks run in the order of their numbers, since later ones rely on earlier ones.
    """
    x, shape = records.x, input_shape(job.model)
    # (1) There are some.
    if not len(records):
        raise LocalError(
            f"{where}: no records; at least one to train on and one to test on are needed"
        )
    # (2) They are what the model takes: the features that the job declares, in its shape.
    if job.features:
        _refuse(where, declarations_differ(job.features, records.features))
    inputs = job.model.named_inputs
    _refuse(where, [inputs_differ(shapes_of(inputs), records.inputs)])
    if tuple(x.shape[1:]) != shape:
        raise LocalError(
            f"{where}: x is {list(x.shape)}, the job's model takes {_stored(shape)};"
            f" {_reshaping(job.model, tuple(x.shape[1:]), shape)}"
        )
    # (3) What is true of them is what the task is about, such as a class of the job.
    with guard(job.task):
        _refuse(where, [job.task.records_fault(records.y, job.model.width)])
    # Counts by class rely on it, whatever a task of another project says.
    if job.task.has_classes:
        _refuse(where, [labels_fault(records.y, job.model.width)])
    if job.task.dense:
        _refuse(where, [_positions_fault(job, records)])
    # (4) Their values are numbers, most of them within the ranges that the job declares. Lazy
    # records are looked at when they are read, and have no features.
    if isinstance(x, torch.Tensor) and not all_finite(x):
        record = int(torch.nonzero(~x.isfinite().reshape(len(x), -1).all(1))[0])
        raise LocalError(
            f"{where}: x holds NaN or a value beyond float32 in record {record}; clean it first"
        )
    # The answer leaves: in a private job it must not depend on any record, and elsewhere not on a
    # single one, or an operator could find it by the ranges of several jobs.
    if job.privacy is None:
        _refuse(where, tokens_faults(x, job.model))
        if job.features:
            _refuse(where, out_of_range(job.features, records.held, LARGEST_MISS))
        with guard(job.task):
            _refuse(where, [job.task.range_fault(records.y)])
    # (5) Where both name the classes, a label means the same in both.
    if job.features and job.model.class_names and records.class_names is None:
        _refuse(where, ["the job names its classes, and this data set does not; name them"])
    if records.class_names is not None:
        fault = names_fault(records.class_names, job.model.width, *NAMING)
        if not fault and job.model.class_names is not None:
            fault = names_differ(job.model.class_names, records.class_names)
        if fault:
            raise LocalError(f"{where}: {fault}")
    # (6) No two have the same id, where they have ids.
    if twice := same_id(records.ids):
        raise LocalError(
            f"{where}: records {twice[0]} and {twice[1]} have the same id; give each record its own"
        )


def _accepts(model: ModelOptions, shape: Shape) -> bool:
    """Whether a job may have the same model with another input."""
    own = model.model_dump(exclude={"weights"})
    try:
        type(model).model_validate({**own, "input": shape})
    except ValueError:  # pydantic's, of a network for other shapes
        return False
    return True


def _reshaping(model: ModelOptions, found: Shape, wanted: Shape) -> str:
    """What to do about records of another shape than a model takes."""
    # A network takes records of so many axes only, and the first, of channels, is easily left out.
    full = (1,) * (len(wanted) - len(found)) + found
    if full == wanted:
        return f"store it as {_stored(wanted)}"
    if not _accepts(model, full):
        return f"reshape it, or choose a model that takes records of {list(found)}"
    stored = "" if full == found else f"store it as {_stored(full)} and "
    return f"reshape it, or {stored}have the job say model.input = {list(full)}"


def _stored(shape: Shape) -> str:
    return f"[N, {', '.join(map(str, shape))}]"


def _positions_fault(job: Job, records: Dataset) -> str:
    """Why there is no class for each position of a record; empty if there is."""
    sides = image_shape(job.model)[1:]
    if tuple(records.y.shape[1:]) == sides:
        return ""
    return (
        f"y is {list(records.y.shape)} and x {list(records.x.shape)}; give a class for each"
        f" position, [N, {', '.join(map(str, sides))}]"
    )


def tokens_faults(x: Tensor | LazyRecords, model: ModelOptions) -> list[str]:
    """Why numbers are not tokens where a model takes tokens; lazy records are not looked at."""
    if isinstance(x, LazyRecords):
        return []
    return [_tokens_fault(x[:, own], tokens) for own, tokens in vocabularies(model)]


def _tokens_fault(x: Tensor, vocabulary: int) -> str:
    """Why numbers [N, …] are not tokens of such a vocabulary; empty where they are.

    A few may be none: the network takes them for the nearest token.
    """
    odd = (x != x.round()) | (x < 0) | (x >= vocabulary)
    records = int(odd.flatten(1).any(1).sum())
    # Never by a single record, as in ``out_of_range``.
    if records <= max(LARGEST_MISS * len(x), 1):
        return ""
    return (
        f"{records} of {len(x)} records have numbers that are no tokens from 0 to"
        f" {vocabulary - 1}; raise the model's tokens, or number the tokens so"
    )


def _refuse(where: str, faults: Sequence[str]) -> None:
    if found := list(filter(None, faults)):
        raise LocalError(f"{where}: {shown(found)}")


def same_id(ids: Sequence[str] | None) -> tuple[int, int] | None:
    """The first two records of one id; None where each has its own, or none has one.

    They are given as indices, the earlier one first.
    """
    first: dict[str, int] = {}
    for record, own in enumerate(ids or ()):
        before = first.setdefault(own, record)
        if before != record:
            return before, record
    return None


def check_training(job: Job, train: Dataset, silo: str, where: str) -> None:
    """LocalError unless these records, which fit the job one by one, are enough to train on.

    In a plain job that declares class counts, the shares of classes may differ from these by at
    most ``LARGEST_MISS``.
    """
    method = job.method()
    if isinstance(train.x, LazyRecords) and any(
        method.effort(round_).whole for round_ in range(job.length)
    ):
        raise LocalError(
            f"{where}: method {job.method_name!r} takes steps on all records at once, so they have"
            " to fit the memory; leave data.lazy out"
        )

    # In a private job an answer that depends on the number of records would be a release.
    if job.privacy is not None:
        return
    if len(train) < 2 and batch_coupled(method.modules(silo)):
        raise LocalError(
            f"{where}: {len(train)} training record, too few for batch norm; add records, or have"
            " the operator choose another model.norm"
        )
    fault = _declared_fault(job.security.class_counts.get(silo, ()), train)
    if fault:
        raise LocalError(f"{where}: {fault}")


def check_testing(job: Job, test: Dataset, where: str) -> None:
    """LocalError where sums over so many test records are more than a job can add up."""
    # In a private job an answer that depends on the number of records would be a release.
    if job.privacy is not None:
        return
    for part in job.counted_parts:
        for spec in part.tensors:
            with guard(job.task):
                most = len(test) * job.counting.unit(part.name, spec.name)
            if most > spec.bounds[1]:
                raise LocalError(
                    f"{where}: {len(test):,} test records, too many for the sums of a"
                    f" {job.task.kind}; lower data.test_fraction"
                )


def range_advice(job: Job, *sides: Dataset) -> list[str]:
    """What the silo's own people should know of values outside the job's ranges.

    It stays at the silo. A private job's answer cannot depend on them, and another's does so only
    where they are many.
    """
    found: Counter[str] = Counter()
    for side in sides if job.features else ():
        found.update({name: out for name, (out, _) in outside(job.features, side.held).items()})
    everyone = sum(map(len, sides))
    told = [
        f"feature {name!r}: {records} of {everyone} records are outside the range that the job"
        " declares; correct them, or leave them out"
        for name, records in found.items()
    ]
    y = torch.cat([side.y for side in sides])
    with guard(job.task):
        return [*told, *filter(None, (job.task.range_advice(y),))]


def counts_by_class(job: Job, train: Dataset, test: Dataset) -> dict[str, object]:
    """Counts for the silo's own log: records by class, and classes that are not trained on.

    They stay at the silo. Lists are cut to ``MOST_LISTED`` classes.
    """
    trained, tested = (histogram(job.task, side.y, job.model.width) for side in (train, test))
    sizes: dict[str, object] = {"training": len(train), "test": len(test)}
    if not job.task.has_classes:
        return sizes
    absent = trained == 0
    return {
        **sizes,
        "training_by_class": trained.tolist()[:MOST_LISTED],
        "classes_not_trained": _listed(absent),
        "classes_tested_not_trained": _listed(absent & (tested > 0)),
    }


def withheld_classes(job: Job, train: Dataset, holders: torch.Tensor) -> dict[str, object]:
    """For the silo's own log: the fewest holders of a class in a sum, and the classes withheld.

    ``holders`` [C] of each class are the result of the count (algorithms/job/class_census.py).
    """
    held = histogram(job.task, train.y, job.model.width) > 0
    return {
        "fewest_holders": job.fewest_holders,
        "classes_withheld": _listed(held & ~shown_rows(holders, job.fewest_holders)),
    }


def _declared_fault(declared: Sequence[int], train: Dataset) -> str:
    """How training records differ from a job's counts by class; empty if they do not."""
    if not declared:
        return ""
    found = torch.bincount(train.y, minlength=len(declared)).double()
    said = torch.tensor(declared, dtype=torch.float64)
    # Total variation distance: half the sum of absolute differences of shares.
    missed = float((found / found.sum() - said / said.sum()).abs().sum()) / 2
    if missed <= LARGEST_MISS:
        return ""
    return (
        f"{missed:.0%} of its training records are of other classes than security.class_counts of"
        f" the job says, at most {LARGEST_MISS:.0%} may be; have the job signed with"
        f" {found.long().tolist()[:MOST_LISTED]}, or near it"
    )


def _listed(classes: torch.Tensor) -> list[int | str]:
    numbers: list[int | str] = torch.nonzero(classes)[:, 0].tolist()
    rest = len(numbers) - MOST_LISTED
    if rest <= 0:
        return numbers
    return [*numbers[:MOST_LISTED], f"and {rest} more"]
