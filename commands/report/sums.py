"""What left masked, padded or rotated, for the ledger report: in which rounds, who reads what, how
sums ended.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ...security.ledger.messages import At, LedgerMessage, Totals
from ...security.ledger.overview import LedgerOverview
from ...security.ledger.records import HiddenBinding, SumEnd, SumOpened
from ...security.policy.release import GRAM_READER, MASKED, SILOS_READER, SUM_READER
from .tables import Listed, newest, spans

NAMED = "named"  # masked for single silos, which are its readers by name


@dataclass(frozen=True, slots=True)
class SumRow:
    """The secure sums of one job.

    Numbers of silos as ``4`` or ``3 to 4``, empty where there is none.
    """

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
class PartRow:
    """One part that left padded or rotated."""

    job: str
    part: str
    form: str
    readers: tuple[str, ...]
    rounds: str
    messages: int
    versions: int  # that differ in their pad or rotation
    bytes: int


@dataclass(frozen=True, slots=True)
class SumsSection:
    """All that a page says of secure sums, mixes and comparisons."""

    jobs: tuple[SumRow, ...]
    parts: tuple[PartRow, ...]
    forms: tuple[str, ...]  # that occur, "silos" and NAMED too, "plain" left out
    ends: Listed[At[SumEnd]]  # attempts that ended without a sum


def sum_table(view: LedgerOverview) -> SumsSection:
    """One row a job that has any record of one, in the order in which the ledger comes to them.

    And one a part.
    """
    rows = [_row(view.of(job), job) for job in view.jobs]
    ends = [at for at in view.sums if isinstance(at.record, SumEnd)]
    parts = tuple(row for job in view.jobs for row in _parts(view.of(job).messages))
    masked = {
        reader
        for message in view.messages
        if message.intent.secagg
        for reader in message.intent.readers
    }
    sums = [
        name
        for name, reader in ((MASKED, SUM_READER), (SILOS_READER, SILOS_READER))
        if reader in masked
    ]
    sums += [NAMED] if masked - {SUM_READER, SILOS_READER, GRAM_READER} else []
    forms = (*sums, *sorted({row.form for row in parts}))
    return SumsSection(tuple(row for row in rows if row is not None), parts, forms, newest(ends))


def _parts(messages: Iterable[LedgerMessage]) -> Iterator[PartRow]:
    """Rows of the messages of one job."""
    found: dict[tuple[str, str, tuple[str, ...]], list[tuple[int, HiddenBinding, int]]] = {}
    for intent in (message.intent for message in messages):
        if intent.hidden:
            own = found.setdefault((intent.part, intent.form, intent.readers), [])
            own.append((intent.round, intent.hidden, intent.message.bytes))
            job = intent.job
    for (part, form, readers), left in found.items():
        yield PartRow(
            job=job,
            part=part,
            form=form,
            readers=readers,
            rounds=spans(number for number, _, _ in left),
            messages=len(left),
            versions=len({hidden.ctx for _, hidden, _ in left}),
            bytes=sum(size for _, _, size in left),
        )


def _row(view: LedgerOverview, job: str) -> SumRow | None:
    masked = [
        (message.intent.round, message.intent.secagg)
        for message in view.messages
        if message.intent.secagg
    ]
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
    return (
        " to ".join(f"{number:,}" for number in dict.fromkeys((found[0], found[-1])))
        if found
        else ""
    )
