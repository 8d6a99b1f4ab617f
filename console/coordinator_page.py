"""What the page of a coordinator shows: plain values for the templates, from status and ledger."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import lru_cache

from ..algorithms.job.evaluated import Evaluated, evaluated
from ..algorithms.job.job import Job
from ..algorithms.tasks.counting import flattened
from ..commands.federation.round_text import NAMES, UNTOLD, WORDS
from ..commands.policy.visibility import (
    revealed_by_likeness,
    seen,
    starts_from,
    together,
    unbounded,
)
from ..coordinator.config import CoordinatorConfig
from ..coordinator.live_status import SiloSeen
from ..coordinator.rounds.events import in_words
from ..coordinator.status import CoordinatorJobStatus, CoordinatorStatus
from ..coordinator.storage.database import Database
from ..errors import LocalError
from ..files.documents import parse_json
from ..security.blind.plan import JobPlan
from ..security.identity.keys import Role
from ..security.identity.roster import Roster
from .coordinator_facts import CoordinatorFacts, RoundTraffic, seconds_left
from .curves import NUMBER, SHARE, MetricCurve, Points, curve

IDLE = ("queued", "ended", "stopped")  # stages in which no silo is awaited
AWAITED = {"admitting": "its answer to {}", "finishing": "its word that {} has ended"}
UPLOAD = "its upload to {}, round {}"
LOST = "lost"  # code of a silo that was silent for six beats
MOST_ROUNDS = 20  # in the table of a job
# Why no curve shows how far single silos are apart; by whether the job's sums are blind.
NO_SPREAD = {
    True: "No spread over the silos is drawn. The coordinator sees nothing but sums of a round; and"
    " with mean and spread, one of three silos could work out what the other two scored. Each silo"
    " sees its own figures on its own console.",
    False: "No spread over the silos is drawn. The coordinator adds up the silos' figures and keeps"
    " the sum alone; with mean and spread, one of three silos could work out what the other two"
    " scored. Each silo sees its own figures on its own console.",
}


@dataclass(frozen=True)
class SiloLine:
    """One silo of the roster, as the coordinator knows it."""

    name: str
    organisation: str
    host_operator: str
    state: str  # "connected", "not connected", "lost", or why it dropped out; "" if not known
    is_away: bool
    live: SiloSeen
    heard: str  # time of its last upload
    bytes: int
    waits: tuple[str, ...]  # what is awaited from it


@dataclass(frozen=True)
class RoundLine:
    """What one round took and moved."""

    round: int
    seconds: float
    received: int
    delivered: int


@dataclass(frozen=True)
class JobDetails:
    """One job: its status, its curves, and what the coordinator could read of it."""

    status: CoordinatorJobStatus
    dropped: Mapping[str, str]  # silo → why, in words
    awaited: str  # what those who are missing owe
    curves: tuple[MetricCurve, ...]
    untold: str  # why there are none
    no_spread: str
    readable: tuple[str, ...]
    rounds: tuple[RoundLine, ...]
    seconds_left: float | None


def silo_lines(
    status: CoordinatorStatus, roster: Roster, facts: CoordinatorFacts | None
) -> list[SiloLine]:
    """All silos of the roster; which are connected is not known where no coordinator runs."""
    running = [job for job in status.jobs if job.stage not in IDLE]
    # A ledger that is not verified yet says nothing.
    said, lines = facts or CoordinatorFacts("", 0.0), []
    for entry in roster.having(Role.SILO):
        codes = [job.dropped[entry.id] for job in running if entry.id in job.dropped]
        live = status.live.silos.get(entry.id)
        near = None if live is None else live.connected
        state = {True: "connected", False: "not connected", None: ""}[near]
        # A silo that is back was lost for its round alone.
        if codes and not near:
            state = in_words(codes[0])
        lines.append(
            SiloLine(
                name=entry.id,
                organisation=entry.organisation,
                host_operator=entry.host_operator,
                state=state,
                is_away=near is False or (LOST in codes and not near),
                live=live or SiloSeen(connected=False),
                heard=said.heard.get(entry.id, ""),
                bytes=said.sent[entry.id],
                waits=tuple(_awaited(job) for job in running if entry.id in job.missing),
            )
        )
    return lines


def _awaited(job: CoordinatorJobStatus) -> str:
    return AWAITED.get(job.stage, UPLOAD).format(job.job, job.closed)


def queue(jobs: Iterable[CoordinatorJobStatus]) -> str:
    """How many jobs stand where, such as "1 round, 2 queued"."""
    stages = Counter(job.stage for job in jobs)
    return ", ".join(f"{number} {stage}" for stage, number in stages.items()) or "none"


def missing(job: CoordinatorJobStatus) -> list[str]:
    """Who is missing in a job's stage, and why; none in one that does not run."""
    if job.stage in IDLE:
        return []
    away = [f"{silo}: {in_words(code)}" for silo, code in job.dropped.items()]
    return [*(f"{silo}: owes {_awaited(job)}" for silo in job.missing), *away]


def summary(status: CoordinatorStatus) -> str:
    """One sentence for a reader of the screen: it is read out where it changes."""
    says = "Coordinator runs" if status.running else "Coordinator does not run"
    rounds = [
        f"{job.job}: {job.stage}, {job.closed} of {job.rounds} rounds closed"
        for job in status.jobs
        if job.stage not in IDLE
    ]
    return "; ".join([says, *rounds])


def job_details(
    config: CoordinatorConfig, found: CoordinatorJobStatus, facts: CoordinatorFacts | None
) -> JobDetails:
    """Everything that the folder has of one job."""
    with closing(Database(config.directory / "coordinator.sqlite", read_only=True)) as database:
        signed, closed = database.signed_job(found.job), database.rounds(found.job)
        evaluation = database.evaluation(found.job)
    known = None
    # The task of an installed package, or a job of another release: there are only its sums.
    with suppress(LocalError):
        known = evaluated(evaluation)
    drawn = tuple(_curves(closed, known)) if known else ()
    traffic = facts.rounds.get(found.job, {}) if facts else {}
    return JobDetails(
        status=found,
        dropped={silo: in_words(code) for silo, code in found.dropped.items()},
        awaited=_awaited(found),
        curves=drawn,
        untold="" if drawn else _untold(found),
        no_spread=NO_SPREAD[found.blind],
        readable=readable(signed, tuple(config.packages)),
        rounds=tuple(_round_lines(traffic)),
        seconds_left=None
        if found.stage in IDLE
        else seconds_left(traffic, found.closed, found.rounds),
    )


def _untold(found: CoordinatorJobStatus) -> str:
    return UNTOLD if found.closed else "no round has closed yet"


def _round_lines(traffic: Mapping[int, RoundTraffic]) -> Iterator[RoundLine]:
    for number in sorted(traffic, reverse=True)[:MOST_ROUNDS]:
        own = traffic[number]
        yield RoundLine(number, own.seconds, own.received, own.delivered)


def _curves(
    closed: Iterable[tuple[int, list[str], Mapping[str, int]]], known: Evaluated
) -> Iterator[MetricCurve]:
    """A chart for each measure that more than the newest round has."""
    counting, series = known.counting, dict[str, dict[str, list[tuple[int, float]]]]()
    for number, _, sums in closed:
        for key, value in flattened(counting.of_sums(sums)).items():
            name, _, model = key.rpartition(".")
            # Bounds and the answer that is the same for all are no curves.
            if model in WORDS:
                series.setdefault(name, {}).setdefault(WORDS[model], []).append((number, value))
    score = counting.score
    names = {**NAMES, score.key: score.axis}
    for name in sorted(series, key=lambda name: name != score.key):
        form = SHARE if name == score.key and score.share else NUMBER
        drawn = curve(names.get(name, name), dict[str, Points](series[name]), form)
        if drawn is not None:
            yield drawn


@lru_cache(maxsize=16)
def readable(signed: bytes, packages: tuple[str, ...]) -> tuple[str, ...]:
    """What the coordinator could read in a job, in sentences; or why that cannot be said."""
    try:
        document = parse_json(signed, "the job").get("document")
        plan = JobPlan(Job.from_document(document, "the job", packages))
    except LocalError as error:
        return (f"This release cannot read the job: {error}",)
    job = plan.job
    private = "" if job.privacy else "no [privacy]: nothing bounds what the sums reveal of a record"
    said = (
        seen(job),
        together(job),
        starts_from(job),
        unbounded(plan),
        revealed_by_likeness(plan),
        private,
    )
    return tuple(filter(None, said))
