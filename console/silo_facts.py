"""What a silo's ledger and budgets say, read whole: it takes long where the ledger is long."""

import time
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from ..errors import LocalError, StaddleError
from ..security.identity.certificate import utc_now
from ..security.ledger import messages, overview
from ..security.ledger.audit import LEDGER, AuditResult, verify
from ..security.ledger.messages import At, Totals
from ..security.ledger.overview import Flow, LedgerOverview
from ..security.ledger.records import Deny, JobAccept, JobDecline
from ..security.log.head import own_log_key
from ..silo.admission import budget as budgets
from ..silo.admission.budget import BudgetReport
from ..silo.config import SiloConfig

# who could read which part of which job
LeftKey: TypeAlias = tuple[str, str, tuple[str, ...]]


@dataclass(frozen=True)
class SiloFacts:
    """The verdict on a ledger, and what it says; a ledger that does not hold says nothing.

    ``at`` is when it was verified, in UTC. ``today`` is of the day ``day``.
    """

    at: str
    seconds: float
    verified: AuditResult | None = None
    problem: str = ""  # why it could not be read
    software: str = ""
    day: str = ""
    today: dict[LeftKey, Totals] = field(default_factory=dict)
    ever: dict[LeftKey, Totals] = field(default_factory=dict)
    decisions: tuple[At[JobAccept] | At[JobDecline], ...] = ()
    denials: tuple[At[Deny], ...] = ()
    budgets: tuple[BudgetReport, ...] = ()
    budget_problem: str = ""


def read(config: SiloConfig) -> SiloFacts:
    """Verify the ledger, and gather what it and the budgets say."""
    began = time.monotonic()
    facts = SiloFacts(utc_now().strftime("%Y-%m-%d %H:%M:%S UTC"), 0.0)
    try:
        facts = _of_ledger(config, facts)
    except StaddleError as error:
        facts = replace(facts, problem=str(error))
    # A broken budget must not hide what left.
    try:
        facts = replace(facts, budgets=budgets.read(config))
    except StaddleError as error:
        facts = replace(facts, budget_problem=str(error))
    return replace(facts, seconds=time.monotonic() - began)


def _of_ledger(config: SiloConfig, facts: SiloFacts) -> SiloFacts:
    folder = config.directory / LEDGER
    if not folder.is_dir():
        why = "no such folder; the agent makes it when it is run for the first time"
        raise LocalError(f"{folder}: {why}")
    verified = verify(folder, key=own_log_key(config.trust.federation, config.keys))
    # Totals of a ledger that does not hold would be taken for what left.
    if not verified.ok:
        return replace(facts, verified=verified)
    view = overview.view(verified, messages.records(folder))
    day = view.last[:10]
    return replace(
        facts,
        verified=verified,
        software=view.starts[-1].record.software if view.starts else "",
        day=day,
        today=_left(of_day(view, day)),
        ever=_left(view),
        decisions=tuple(view.decisions),
        denials=tuple(view.denials),
    )


def of_day(view: LedgerOverview, day: str) -> LedgerOverview:
    """What left on one day; a session of control messages counts on the day that it began."""
    return replace(
        view,
        messages=[entry for entry in view.messages if entry.time.startswith(day)],
        protocol=[entry for entry in view.protocol if entry.time.startswith(day)],
        sessions=[entry for entry in view.sessions if entry.time.startswith(day)],
    )


def _left(view: LedgerOverview) -> dict[LeftKey, Totals]:
    found: dict[LeftKey, Totals] = {}
    for flow, totals in overview.flows(view).items():
        found.setdefault(_key(flow), Totals()).add(totals)
    return found


def _key(flow: Flow) -> LeftKey:
    return flow.job, flow.part, flow.readers
