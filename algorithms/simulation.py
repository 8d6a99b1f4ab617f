"""All silos of a job in one process, one after another: no network, no disk, the same functions as the federation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from ..errors import LocalError
from .account import PrivateSilo
from .aggregation import MemoryArchive, close_round, deliver
from .data import Dataset
from .exchange import PLAIN, Exchanges, Tensors
from .fit import check_records, check_training
from .job import Job
from .local_round import Report, final_round, local_round
from .method import CoordinatorState, SiloState, initial_state
from .training import silent

Shards = Mapping[str, tuple[Dataset, Dataset]]  # silo → (training records, test records)


@dataclass(frozen=True)
class SimulationResult:
    """What a simulated job leaves behind."""

    history: Mapping[str, tuple[Report, ...]]  # by silo: the rounds in which it trained, then the final delivery
    metrics: tuple[Mapping[str, Tensor], ...]  # by round: the sums that the coordinator sees
    states: Mapping[str, SiloState]  # the model that each silo keeps
    coordinator: CoordinatorState

    def accuracy(self, product: str) -> dict[str, float]:
        """Test accuracy by silo after the last round, of the model "delivered" last or "trained" last."""
        last = {silo: reports[-1] for silo, reports in self.history.items()}
        return {silo: getattr(report, f"correct_{product}") / report.tested for silo, report in last.items()}


def simulate(
    job: Job,
    shards: Shards,
    progress: Callable[[int, int], None] = silent,
    weights: Mapping[str, Mapping[str, Tensors]] | None = None,
    exchanges: Exchanges | None = None,
    private: Callable[[str], PrivateSilo] | None = None,
) -> SimulationResult:
    """Run a job to its end; ``progress`` is told the rounds done and their total.

    ``weights``, by silo and part, are initial values of private parts (weights.load_weights). ``exchanges`` is how
    what the silos give is put together, in the clear unless it is named. ``private`` makes what a silo of a private job
    pays with; no other job takes it.
    """
    if (job.privacy is None) != (private is None):
        fix = "give simulate() the accounts of its silos" if private is None else "give it no accounts"
        raise LocalError(f"job {job.name!r} has {'no' if job.privacy is None else 'a'} [privacy] table; {fix}")
    exchanges = exchanges or PLAIN
    if set(shards) != set(job.silos):
        raise LocalError(f"data was given for silos {sorted(shards)}, the job names {sorted(job.silos)}")
    for silo in job.silos:
        for side, records in zip(("training", "test"), shards[silo], strict=True):
            check_records(job, records, f"{side} records of silo {silo!r}")
        check_training(job, shards[silo][0], silo, f"silo {silo!r}")
    method = job.method()
    archive, coordinator = MemoryArchive(), method.begin()
    own = weights or {}
    paying = {silo: None if private is None else private(silo) for silo in job.silos}
    public = None if private is None else ()
    states = {silo: initial_state(method, silo, own.get(silo), public) for silo in job.silos}
    history: dict[str, list[Report]] = {silo: [] for silo in job.silos}
    metrics: list[Mapping[str, Tensor]] = []
    for round_ in range(job.length):
        cohort, up = job.cohort(round_), job.up(round_)
        spool: dict[tuple[str, str], dict[str, Tensor]] = {}
        for silo in cohort:
            down = deliver(method, exchanges, coordinator, round_, silo, archive)
            payer = paying[silo]
            outcome = local_round(method, job, states[silo], round_, down, *shards[silo], silo, private=payer)
            states[silo] = outcome.state
            if payer is not None and outcome.spending is not None:
                payer.account.commit(outcome.spending)
            history[silo].append(outcome.report)
            spool |= {(part.name, silo): exchanges.give(part, outcome.gifts[part.name]) for part in up}

        def read(part: str, silo: str, name: str, spool: Mapping[tuple[str, str], dict[str, Tensor]] = spool) -> Tensor:
            return spool[part, silo][name]

        coordinator, sums = close_round(method, exchanges, coordinator, round_, cohort, up, read, archive)
        metrics.append(sums)
        progress(round_ + 1, job.length)
    for silo in job.silos:
        down = deliver(method, exchanges, coordinator, job.length, silo, archive)
        ever, payer = bool(history[silo]), paying[silo]
        outcome = final_round(method, job, states[silo], down, *shards[silo], silo, trained=ever, private=payer)
        states[silo] = outcome.state
        history[silo].append(outcome.report)
    return SimulationResult({s: tuple(r) for s, r in history.items()}, tuple(metrics), states, coordinator)
