"""FLOPs of local training, counted on a few records of a silo.

A round of a few records is computed once per model and course (``LocalWork.course``), and torch's
own formulas count its matrix products and convolutions, forward and backward. All else, such as
activations and optimisers, is left out, as is usual. A record costs the same in a batch of any
size, so the count per record times the records of a silo is what its round took.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ...algorithms.course import SiloState
from ...algorithms.data.dataset import Dataset
from ...algorithms.engines.engine import Records, Serial, SiloWork
from ...algorithms.engines.simulation import Simulation, Snapshot
from ...algorithms.job.job import Job
from ...algorithms.numerics.devices import in_memory
from ...algorithms.training.loop import evaluate
from ...algorithms.training.silo_round import RoundReport, local_round, to_modules
from ...errors import LocalError
from .work_file import NO_WORK

FEW = 4  # records: Per-FedAvg halves a batch of as many

# of a silo's state before its first round here, by the names of its tensors
Shapes = tuple[tuple[str, tuple[int, ...]], ...]
Kind = tuple[Shapes, tuple[str, ...]]  # with its course


class FlopMeter:
    """Counts the FLOPs of a job's rounds; silos of the same model and course are counted once."""

    def __init__(self, job: Job, records: Mapping[str, Records], device: torch.device) -> None:
        self._records, self._device = records, device
        training = job.training.model_copy(update={"batch_size": FEW})
        # With small batches, so that few records are no partly filled batch.
        self._job, self._few = job, replace(job, training=training)
        self._known: dict[Kind, float | None] = {}
        self._shapes: dict[str, Shapes] = {}

    def count(
        self,
        before: Snapshot,
        states: Mapping[str, SiloState],
        reports: Mapping[str, RoundReport],
    ) -> dict[str, int | None]:
        """FLOPs by silo of the round after ``before``, with these states.

        None where they cannot be counted.
        """
        found: dict[str, int | None] = {}
        for silo, report in reports.items():
            work = report.work or NO_WORK
            # Of any of its rounds: a silo's model has the same shapes in all, and is not loaded
            # for that again.
            if silo not in self._shapes:
                self._shapes[silo] = _shapes(states[silo])
            kind = self._shapes[silo], work.course
            if kind not in self._known:
                self._known[kind] = self._per_record(before, silo)
            each = self._known[kind]
            found[silo] = None if each is None else round(each * work.records)
        return found

    def _per_record(self, before: Snapshot, silo: str) -> float | None:
        few = Records(*map(_few, self._records[silo].sides))
        simulation = Simulation(self._job, Serial(self._job, {silo: few}), begun=before)
        (work,) = simulation.work([silo])
        try:
            return self._counted(before.round, work, few)
        # On so few records training may diverge that does not on all.
        except LocalError:
            return None

    def _counted(self, round_: int, work: SiloWork, few: Records) -> float:
        job, method, device = self._few, self._job.method(), self._device
        test = _few(few.test, 1)
        with _FlopCounter() as all_of_it:
            outcome = local_round(
                method,
                job,
                work.state,
                round_,
                work.delivered,
                few.train,
                test,
                work.silo,
                device=device,
            )
        # Tests, before and after training, are not training.
        with in_memory(), _FlopCounter() as tests:
            modules = to_modules(method, work.silo, outcome.state, device)
            evaluate(method, modules, test, job.counting)
        taken = outcome.report.work or NO_WORK
        training: float = all_of_it.flops - 2 * tests.flops
        return training / max(1, taken.records)


class _FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the FLOPs of every operation that torch has a formula for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and count it."""
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        return out


def _shapes(state: SiloState) -> Shapes:
    return tuple((name, tuple(tensor.shape)) for name, tensor in state.flat.items())


def _few(records: Dataset, most: int = FEW) -> Dataset:
    return records.take(np.arange(min(most, len(records))))
