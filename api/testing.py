"""What the author of a method asks of it, in a test or a notebook: ``from staddle import testing``.

Each function raises LocalError, which says what differs, where, and what it means.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..algorithms.data.dataset import Dataset
from ..algorithms.engines.engine import Records, Serial
from ..algorithms.engines.simulation import Shards, Simulation, simulate
from ..algorithms.engines.vmap_engine import Stacked
from ..algorithms.job.job import Job, JobFile
from ..algorithms.job.lengthening import lengthening_fault
from ..algorithms.method import Method, initial_state
from ..algorithms.models.build import input_shape
from ..algorithms.training.accountant import MemoryAccount, PrivateSilo
from ..errors import LocalError
from ..files.documents import validate
from ..files.program_code import name_of
from ..security.blind.plan import simulated
from ..security.dp.noise import Randomness

SILOS = ("a", "b", "c", "d")
BLIND = {"secure_aggregation": "required", "clip_exponent": 4, "weight_most": 1000}
# Counts of a few records are above noise of this size.
PRIVACY = {"epsilon": 500.0, "delta": 1e-5, "sample_rate": 0.5, "sigma": "1.0"}
PRIVACY |= {"histogram_sigma": 1.0}
PLACES = 1e-4  # by which engines may differ: they add up in another order
ROUNDING = 1e-3  # of fixed point, over a few rounds


@dataclass(frozen=True)
class MethodReport:
    """What a method can: empty texts, or why it cannot be blind or private."""

    blind: str
    private: str


def make_job(method: str | type[Method], **settings: Any) -> Job:
    """A job of four silos and three rounds on images of 8 x 8 pixels and three classes.

    ``method`` is a name or a class of this program; ``settings`` are keys of a job file that
    replace its own, and ``options`` those of the method.
    """
    name = method if isinstance(method, str) else name_of(method)
    document = {
        "version": 1,
        "name": "trial",
        "seed": 7,
        "rounds": 3,
        "silos": list(SILOS),
        "min_cohort": 4,
        "method": {"name": name, "options": settings.pop("options", {})},
        "model": {"name": "cnn-digits", "classes": 3},
        "training": {"epochs": 2, "batch_size": 8, "lr": 0.05},
        **settings,
    }
    return Job.from_file(validate(document, JobFile, "trial"), "trial")


def make_records(job: Job, train: int = 24, test: int = 12) -> dict[str, tuple[Dataset, Dataset]]:
    """Training and test records of each silo: noise, brighter for later classes; sizes differ."""
    rng = np.random.default_rng(7)

    def drawn(count: int) -> Dataset:
        y = rng.integers(0, job.model.width, count)
        x = rng.normal(size=(count, *input_shape(job.model))) + y.reshape(
            -1, *[1] * len(input_shape(job.model))
        )
        return Dataset(torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y))

    sizes = range(train, train + 5 * len(job.silos), 5)
    return {silo: (drawn(size), drawn(test)) for silo, size in zip(job.silos, sizes, strict=True)}


def check_method(method: str | type[Method], **settings: Any) -> MethodReport:
    """All checks of this module on one method; the report says what it is not made for.

    LocalError where one fails.
    """
    job = make_job(method, **settings)
    records = make_records(job)
    check_trains(job, records)
    check_engines(job, records)
    check_longer(job, records)
    blind, private = "", ""
    try:
        check_blind(make_job(method, security=BLIND, **settings), job, records)
    except NotMadeForError as error:
        blind = str(error)
    try:
        check_private(make_job(method, privacy=PRIVACY, **settings), records)
    except NotMadeForError as error:
        private = str(error)
    return MethodReport(blind, private)


class NotMadeForError(LocalError):
    """The method says itself that it cannot do this, and why."""


def check_trains(job: Job, records: Shards) -> None:
    """Each silo's model, and each further tensor that it keeps, changes over the rounds."""
    result, method = simulate(job, records), job.method()
    for silo, state in result.states.items():
        began = initial_state(method, silo)
        for name in began.extra:
            if torch.equal(state.extra.get(name, began.extra[name]), began.extra[name]):
                raise LocalError(
                    f"silo {silo!r}: the tensor {name!r} that the method keeps never changed; a"
                    " state that deliver or a Change returns is kept, and of contribute one that"
                    " is returned as ContributionsAndState"
                )
        if all(torch.equal(own, began.flat[name]) for name, own in state.flat.items()):
            raise LocalError(f"silo {silo!r}: nothing of its model changed over the rounds")


def check_engines(job: Job, records: Shards, atol: float = PLACES) -> None:
    """One silo after another and all of them stacked (``torch.vmap``) end in the same states."""
    own = {silo: Records(*sides) for silo, sides in records.items()}
    ends = []
    for engine in (Serial(job, own), Stacked(job, own)):
        simulation = Simulation(job, engine)
        while simulation.round < job.length:
            simulation.step()
        ends.append(simulation.states)
    why = "a loss or penalty may ask a tensor for its value, or remember a silo in self"
    _check_same(ends[0], ends[1], atol, f"stacked it differs: {why}")


def check_longer(job: Job, records: Shards) -> None:
    """The job's rounds are the first ones of a longer job, unless the method says otherwise."""
    longer = replace(job, rounds=2 * job.rounds)
    if lengthening_fault(job, longer, job.length):
        return
    own = {silo: Records(*sides) for silo, sides in records.items()}
    ends = []
    for each in (job, longer):
        simulation = Simulation(each, Serial(each, own))
        while simulation.round < job.length:
            simulation.step()
        ends.append(simulation.states)
    why = "what a method does by setting.rounds stands in by_rounds, or shows in up and down"
    _check_same(ends[0], ends[1], 0.0, f"in a longer job it differs: {why}")


def check_blind(blind: Job, plain: Job, records: Shards, atol: float = ROUNDING) -> None:
    """The states of a blind job are those of the plain one, but for the rounding of its sums.

    NotMadeForError where something in the job has no blind form.
    """
    try:
        blind.document()
    except LocalError as error:
        raise NotMadeForError(str(error)) from error
    summed = simulate(blind, records, exchanges=simulated(blind)).states
    why = "values beyond its clip, or a coordinator half that looks at single contributions"
    _check_same(simulate(plain, records).states, summed, atol, f"blind it differs: {why}")


def check_private(job: Job, records: Shards) -> None:
    """A private job runs to its end; its tracker refuses what would show records without noise.

    NotMadeForError where the method says that it cannot be private.
    """
    try:
        job.document()
    except LocalError as error:
        raise NotMadeForError(str(error)) from error
    simulate(job, records, private=lambda _: PrivateSilo(MemoryAccount(job), Randomness))


def _check_same(one: Mapping[str, Any], other: Mapping[str, Any], atol: float, why: str) -> None:
    for silo, state in one.items():
        for name, value in state.flat.items():
            far = float((value.double() - other[silo].flat[name].double()).abs().max())
            if not far <= atol:
                raise LocalError(f"silo {silo!r}, {name}: by {far:.2g}, more than {atol:g}; {why}")
