"""What the coordinator's ledger says: when it heard of whom, and what rounds took."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import pairwise
from statistics import median

from ..coordinator.config import CoordinatorConfig
from ..errors import StaddleError
from ..security.identity.certificate import utc_now
from ..security.ledger import messages
from ..security.ledger.audit import LEDGER, AuditResult, verify
from ..security.ledger.fast_decoder import Record
from ..security.ledger.records import DeliveredRecord, Received, Serving
from ..security.log.chain import VerifiedLine
from ..security.log.head import own_log_key

RECENT = 5  # rounds by which the time that is left is estimated


@dataclass
class RoundTraffic:
    """One round of one job: when its first and its last message crossed, and bytes."""

    first: str
    last: str
    received: int = 0
    delivered: int = 0

    @property
    def seconds(self) -> float:
        """From its first message to its last, by the coordinator's clock."""
        return (moment(self.last) - moment(self.first)).total_seconds()


@dataclass(frozen=True)
class CoordinatorFacts:
    """The verdict on the ledger, and what it says; one that does not hold says nothing."""

    at: str
    seconds: float
    verified: AuditResult | None = None
    problem: str = ""
    software: str = ""
    heard: dict[str, str] = field(default_factory=dict)  # silo → time of its last upload
    sent: Counter[str] = field(default_factory=Counter)  # silo → bytes that it uploaded
    rounds: dict[str, dict[int, RoundTraffic]] = field(default_factory=dict)  # by job


def read(config: CoordinatorConfig) -> CoordinatorFacts:
    """Verify the ledger and gather what it says."""
    began = time.monotonic()
    facts = CoordinatorFacts(utc_now().strftime("%Y-%m-%d %H:%M:%S UTC"), 0.0)
    folder = config.directory / LEDGER
    try:
        verified = verify(folder, key=own_log_key(config.trust.federation, config.keys))
        facts = replace(facts, verified=verified)
        if verified.ok:
            facts = gathered(facts, messages.records(folder))
    except StaddleError as error:
        facts = replace(facts, problem=str(error))
    return replace(facts, seconds=time.monotonic() - began)


def gathered(
    facts: CoordinatorFacts, records: Iterable[tuple[VerifiedLine, Record]]
) -> CoordinatorFacts:
    """The facts with what these records say."""
    software = facts.software
    for line, record in records:
        match record:
            case Serving():
                software = record.software
            case Received(silo=silo):
                facts.heard[silo] = line.record["time"]
                facts.sent[silo] += record.message.bytes
                _traffic(facts, line, record).received += record.message.bytes
            case DeliveredRecord():
                _traffic(facts, line, record).delivered += record.message.bytes
    return replace(facts, software=software)


def _traffic(
    facts: CoordinatorFacts, line: VerifiedLine, record: Received | DeliveredRecord
) -> RoundTraffic:
    now = line.record["time"]
    rounds = facts.rounds.setdefault(record.job, {})
    found = rounds.setdefault(record.round, RoundTraffic(now, now))
    found.last = now
    return found


def moment(stamp: str) -> datetime:
    """The instant of a record's time stamp."""
    return datetime.fromisoformat(stamp)


def seconds_left(rounds: Mapping[int, RoundTraffic], closed: int, of: int) -> float | None:
    """About how long a job still takes, by its last rounds; None before two of them."""
    ends = [moment(rounds[number].last) for number in sorted(rounds) if number < closed]
    recent = [(after - before).total_seconds() for before, after in pairwise(ends[-RECENT - 1 :])]
    if not recent:
        return None
    return median(recent) * (of - closed)
