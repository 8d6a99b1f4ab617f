"""The secure sums of the ledger report: which rounds left masked, with whom, and how their attempts ended."""

from collections.abc import Iterable
from dataclasses import dataclass

from ..security.ledger_overview import At, View
from ..security.ledger_view import Totals
from ..security.records_secure import SumEnd, SumOpened
from .report_tables import Listed, newest, spans


@dataclass(frozen=True, slots=True)
class SumRow:
    """The secure sums of one job; numbers of silos as ``4`` or ``3 to 4``, empty where there is none."""

    job: str
    masked: str  # rounds
    members: str  # silos that a message was masked among
    thresholds: str  # shares that open it
    colluders: str  # silos that may side with the coordinator, as the job assumes
    clipped: int  # values that were cut to their bound, over all messages
    opened: str  # rounds
    survivors: str  # silos in an opened sum
    protocol: Totals


@dataclass(frozen=True, slots=True)
class Sums:
    """All that a page says of secure sums."""

    jobs: tuple[SumRow, ...]
    ends: Listed[At[SumEnd]]  # attempts that ended without a sum


def sum_table(view: View) -> Sums:
    """One row a job that has any record of a secure sum, in the order in which the ledger comes to them."""
    rows = [_row(view.of(job), job) for job in view.jobs]
    ends = [at for at in view.sums if isinstance(at.record, SumEnd)]
    return Sums(tuple(row for row in rows if row is not None), newest(ends))


def _row(view: View, job: str) -> SumRow | None:
    masked = [(message.intent.round, message.intent.secagg) for message in view.messages if message.intent.secagg]
    if not (masked or view.protocol or view.sums):
        return None
    opened = [at.record for at in view.sums if isinstance(at.record, SumOpened)]
    protocol = Totals()
    for sent in view.protocol:
        protocol.add(Totals(messages=1, bytes=sent.record.message.bytes))
    return SumRow(
        job=job,
        masked=spans(number for number, _ in masked),
        members=_span(len(attempt.members) for _, attempt in masked),
        thresholds=_span(attempt.threshold for _, attempt in masked),
        colluders=_span(attempt.colluders for _, attempt in masked),
        clipped=sum(attempt.clipped for _, attempt in masked),
        opened=spans(record.round for record in opened),
        survivors=_span(len(record.survivors) for record in opened),
        protocol=protocol,
    )


def _span(numbers: Iterable[int]) -> str:
    found = sorted(set(numbers))
    return " to ".join(f"{number:,}" for number in dict.fromkeys((found[0], found[-1]))) if found else ""
