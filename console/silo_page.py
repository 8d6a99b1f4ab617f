"""What the page of a silo shows: plain values for the templates, from its folder and its ledger."""

import datetime as dt
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from types import MappingProxyType

from ..algorithms.tasks.counting import ScoreForm
from ..errors import LocalError
from ..security.dp.rdp import shown
from ..security.ledger.messages import CONTROL, MESSAGE, PROTOCOL, Totals
from ..security.ledger.records import JobDecline
from ..security.policy.release import GRAM_READER, MIX_READER, SILOS_READER, SUM_READER
from ..silo.admission.approvals import UNRULED, WaitingJob
from ..silo.admission.budget import BudgetReport
from ..silo.config import SiloConfig
from ..silo.job_folder import JobFolder
from ..silo.status import SiloJobStatus
from .curves import NUMBER, SHARE, MetricCurve, Points, curve
from .silo_facts import LeftKey, SiloFacts

SMALL = {  # parts that are not of a model
    CONTROL: "polls and heartbeats",
    PROTOCOL: "messages of secure sums",
    MESSAGE: "bytes of no tensor",
}
READERS = {  # who is no member but a way to read
    SUM_READER: "only a sum over the round's silos is readable",
    SILOS_READER: "only a sum over the round's silos is readable, by silos",
    MIX_READER: "only weighted means are readable, by the other silos",
    GRAM_READER: "only lengths and similarity are readable",
}
MODELS = {"score_delivered": "as delivered", "score_trained": "as trained here"}


@dataclass(frozen=True)
class LeftLine:
    """What left of one part of one job, for the same readers."""

    job: str
    part: str
    readers: str
    today: Totals
    ever: Totals


@dataclass(frozen=True)
class SiloJobLine:
    """One job, or one that this silo declined; ``reasons`` are why."""

    name: str
    state: str
    method: str = ""
    done: int = 0
    rounds: int = 0
    reasons: tuple[str, ...] = ()
    at: str = ""
    is_offered: bool = False  # a person may decide about it


@dataclass(frozen=True)
class BudgetGauge:
    """How much of a data set's privacy budget is spent; texts are exact, numbers for the meter."""

    dataset: str
    spent: str
    limit: str
    delta: str
    left: str
    share: float
    jobs: tuple[str, ...]
    problem: str = ""


@dataclass(frozen=True)
class DataLine:
    """One data set of the configuration."""

    name: str
    kind: str
    where: str
    problem: str  # why it cannot be found; whether its records are right only a check can say
    records_of: str
    jobs: tuple[str, ...]


@dataclass(frozen=True)
class ModelLine:
    """How good the models of a job are on this silo's own held-out records."""

    job: str
    method: str
    tested: int | None
    delivered: str
    trained: str
    constant: str
    score: str
    chart: MetricCurve | None
    kept: str  # where the model is


def left_lines(facts: SiloFacts, today: str) -> list[LeftLine]:
    """By job, the newest first, part and readers; ``today`` is the day, in UTC."""
    nothing, lines = Totals(), []
    # The ledger's last day may be another than today: then nothing left today.
    own: Mapping[LeftKey, Totals] = facts.today if facts.day == today else {}
    order = {job: place for place, (job, _, _) in enumerate(facts.ever)}
    for key in sorted(facts.ever, key=lambda key: (key[0] == CONTROL, -order[key[0]], key[1:])):
        job, part, readers = key
        read_by = ", ".join(READERS.get(reader, reader) for reader in readers)
        ever = facts.ever[key]
        lines.append(LeftLine(job, SMALL.get(part, part), read_by, own.get(key, nothing), ever))
    return lines


def total(lines: Sequence[Totals]) -> Totals:
    """All of them together."""
    found = Totals()
    for each in lines:
        found.add(each)
    return found


def job_lines(
    jobs: Sequence[SiloJobStatus],
    facts: SiloFacts | None,
    waiting: Sequence[WaitingJob] = (),
    gone: Mapping[str, float] = MappingProxyType({}),
    unruled: Mapping[str, float] = MappingProxyType({}),
) -> list[SiloJobLine]:
    """Jobs about which a person decides, accepted ones, and those declined and not accepted since.

    Next come those that are ``unruled`` by the policy, and last those that waited and are ``gone``,
    both since when. The newest of each stand first.
    """
    offered = list(map(_offered, reversed(waiting)))
    lines = offered + [
        SiloJobLine(
            name=job.job,
            state=state_of(job),
            method=job.method,
            done=job.done,
            rounds=job.rounds,
            reasons=tuple(filter(None, [job.why])),
        )
        for job in reversed(jobs)
    ]
    rest = {"waits for a person": unruled, "no longer offered": gone}
    left = [
        SiloJobLine(name, state, reasons=_unruled(name) * (since is unruled), at=_time(since[name]))
        for state, since in rest.items()
        for name in sorted(since, key=since.__getitem__, reverse=True)
    ]
    for more in (_declined(facts), left):
        known = {line.name for line in lines}
        lines += [line for line in more if line.name not in known]
    return lines


def _unruled(job: str) -> tuple[str, ...]:
    return (UNRULED.format(what="it yet", job=job),)


def _time(since: float) -> str:
    return dt.datetime.fromtimestamp(since, dt.UTC).isoformat()


def _offered(waiting: WaitingJob) -> SiloJobLine:
    decision = waiting.decision
    state, at, why = "waits for a person", _time(waiting.since), ""
    if decision is not None:
        state, at, why = f"{decision.answer} by a person", decision.time, decision.reason
    reasons = tuple(filter(None, [why]))
    return SiloJobLine(waiting.job, state, reasons=reasons, at=at, is_offered=True)


def state_of(job: SiloJobStatus) -> str:
    """One word for where a job stands here."""
    words = {"failed": "ended without a result", "runs": "running"}
    return "unreadable" if job.problem else words.get(job.stage, job.stage)


def _declined(facts: SiloFacts | None) -> Iterator[SiloJobLine]:
    newest: dict[str, SiloJobLine] = {}
    for at in facts.decisions if facts else ():
        newest.pop(at.record.job, None)
        if isinstance(at.record, JobDecline):
            job, reasons = at.record.job, at.record.reasons
            newest[job] = SiloJobLine(job, "declined", reasons=reasons, at=at.time)
    yield from reversed(newest.values())


def gauges(reports: Sequence[BudgetReport]) -> list[BudgetGauge]:
    """A gauge for each data set; one before any spending stands at 0."""
    return list(map(_gauge, reports))


def _gauge(report: BudgetReport) -> BudgetGauge:
    asked, budget = report.policy, report.budget
    limit, delta = ("-", "-") if asked is None else (f"{asked.epsilon:f}", f"{asked.delta:f}")
    if budget is None:
        return BudgetGauge(report.dataset, "0", limit, delta, limit, 0.0, (), report.lost)
    limit, delta = budget.limit.epsilon, budget.limit.delta
    spent = shown(budget.spent)
    share = min(Decimal(1), Decimal(spent) / Decimal(limit)) if Decimal(limit) else Decimal(1)
    jobs = tuple(job.job for job in budget.jobs)
    left = f"{budget.left:f}"
    return BudgetGauge(report.dataset, spent, limit, delta, left, float(share), jobs)


def data_lines(config: SiloConfig, jobs: Mapping[str, Sequence[str]]) -> Iterator[DataLine]:
    """The data sets of the configuration; ``jobs`` are those on each. No record is read."""
    records = config.names.records
    for name, source in config.sources.items():
        problem = ""
        try:
            source.check_present()
        except LocalError as error:
            problem = str(error)
        yield DataLine(
            name=name,
            kind=source.kind,
            where=source.where,
            problem=problem,
            records_of=records[name] if records[name] != name else "",
            jobs=tuple(jobs.get(name, ())),
        )


def model_lines(config: SiloConfig, jobs: Sequence[SiloJobStatus]) -> Iterator[ModelLine]:
    """Models that were tested here, the newest job first."""
    for job in reversed(jobs):
        form = job.form
        if job.problem or form is None or not job.tested:
            continue
        folder = JobFolder(config.directory / "jobs" / job.job)
        report = folder.report()
        last = report["final"] or report["rounds"][-1]
        yield ModelLine(
            job=job.job,
            method=job.method,
            tested=job.tested,
            delivered=_score(form, last.get("score_delivered")),
            trained=_score(form, last.get("score_trained")),
            constant=f"{form.constant} {_score(form, last.get('baseline'))}",
            score=form.name,
            chart=_chart(form, report["rounds"]),
            kept=str(folder.model) if folder.model.is_dir() else "",
        )


def _score(form: ScoreForm, value: float | None) -> str:
    return "-" if value is None else form.text(value)


def _chart(form: ScoreForm, rounds: Sequence[Mapping[str, float | None]]) -> MetricCurve | None:
    series: dict[str, Points] = {}
    for key, name in MODELS.items():
        series[name] = [
            (int(entry["round"] or 0), float(entry[key] or 0.0))
            for entry in rounds
            if entry.get(key) is not None
        ]
    title = f"{form.title} on this silo's own held-out records"
    return curve(title, series, SHARE if form.share else NUMBER)


def summary(
    running: bool,
    jobs: Sequence[SiloJobStatus],
    facts: SiloFacts | None,
    waiting: Sequence[WaitingJob] = (),
) -> str:
    """One sentence for a reader of the screen: it is read out where it changes."""
    asks = [f"{each.job} waits for a person" for each in waiting if each.decision is None]
    runs = "Agent runs" if running else "Agent does not run"
    open_jobs = [
        f"{job.job}: {job.done} of {job.rounds} rounds"
        for job in jobs
        if state_of(job) == "running"
    ]
    return "; ".join([runs, verdict(facts), *asks, *open_jobs])


def verdict(facts: SiloFacts | None) -> str:
    """Whether the ledger holds, in a few words."""
    if facts is None:
        return "the ledger is being verified"
    if facts.verified is None:
        return "the ledger cannot be read"
    return "the ledger holds" if facts.verified.ok else "the ledger does NOT hold"
