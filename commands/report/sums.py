"""What left masked, padded or rotated, for the ledger report.

It names the rounds, who reads each part, and how secure sums ended.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter

from ...security.ledger.messages import At, LedgerMessage, Totals
from ...security.ledger.overview import LedgerOverview
from ...security.ledger.records import SumEnd, SumOpened
from ...security.policy.release import GRAM_READER, MASKED, SILOS_READER, SUM_READER
from .tables import MEASURED, Listed, newest, spans

# who reads a sum → what a page calls it
SUM_FORMS = {SUM_READER: MASKED, SILOS_READER: SILOS_READER}
NAMED = "named"  # masked for single silos, which are its readers by name


@dataclass(frozen=True, slots=True)
class SumRow:
    """The secure sums of one job.

    Numbers of silos as ``4`` or ``3 to 4``, empty where there is none.

    ``masked`` and ``opened`` are rounds as in ``tables.spans``.
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
    assumed: int  # bytes that may have left besides
    versions: int  # that differ in their pad or rotation
    bytes: int


@dataclass(frozen=True, slots=True)
class SumsSection:
    """The section on secure sums, mixes and comparisons."""

    jobs: tuple[SumRow, ...]
    parts: tuple[PartRow, ...]
    forms: tuple[str, ...]  # that occur, "silos" and NAMED too, "plain" left out
    ends: Listed[At[SumEnd]]  # attempts that ended without a sum


def sum_table(view: LedgerOverview) -> SumsSection:
    """One row per job with any record of a sum, and one per part, in the order of the ledger."""
    jobs: list[SumRow] = []
    hidden: list[PartRow] = []
    for job in view.jobs:
        own = view.of(job)
        hidden += _parts(own.messages)
        row = _row(own, job)
        if row is not None:
            jobs.append(row)

    # the page explains each form that occurs, and no other
    hidden_forms = {row.form for row in hidden}
    forms = (*_sum_forms(view.messages), *sorted(hidden_forms))
    ends = [at for at in view.sums if isinstance(at.record, SumEnd)]
    return SumsSection(
        jobs=tuple(jobs),
        parts=tuple(hidden),
        forms=forms,
        ends=newest(ends),
    )


def _sum_forms(messages: Iterable[LedgerMessage]) -> list[str]:
    """The forms of masked messages, by who reads the sum."""
    readers: set[str] = set()
    for message in messages:
        # ``secagg`` is set for masked messages only.
        if message.intent.secagg:
            readers.update(message.intent.readers)
    forms = [form for reader, form in SUM_FORMS.items() if reader in readers]
    # All others are names of silos, each of which reads its own row.
    if readers - SUM_FORMS.keys() - {GRAM_READER}:
        forms.append(NAMED)
    return forms


def _parts(messages: Iterable[LedgerMessage]) -> Iterator[PartRow]:
    """Rows of the messages of one job."""
    found: dict[tuple[str, str, str, tuple[str, ...]], list[LedgerMessage]] = {}
    contexts: dict[tuple[str, str, str, tuple[str, ...]], set[str]] = {}
    for message in messages:
        intent = message.intent
        if intent.hidden:
            kind = (intent.job, intent.part, intent.form, intent.readers)
            found.setdefault(kind, []).append(message)
            contexts.setdefault(kind, set()).add(intent.hidden.ctx)

    for kind, uploads in found.items():
        job, part, form, readers = kind
        yield PartRow(
            job=job,
            part=part,
            form=form,
            readers=readers,
            rounds=spans(upload.intent.round for upload in uploads),
            messages=len(list(filter(MEASURED, uploads))),
            versions=len(contexts[kind]),
            assumed=sum(map(attrgetter("assumed"), uploads)),
            bytes=sum(map(MEASURED, uploads)),
        )


def _row(view: LedgerOverview, job: str) -> SumRow | None:
    rounds, members, thresholds, colluders = set(), set(), set(), set()
    clipped = 0
    for message in view.messages:
        attempt = message.intent.secagg
        if attempt:
            rounds.add(message.intent.round)
            members.add(len(attempt.members))
            thresholds.add(attempt.threshold)
            colluders.add(attempt.colluders)
            clipped += attempt.clipped
    # The job is plain.
    if not (rounds or view.protocol or view.sums):
        return None

    # an attempt may end without a sum, so rounds that left masked and rounds that opened differ
    opened, survivors = set(), set()
    for at in view.sums:
        if isinstance(at.record, SumOpened):
            opened.add(at.record.round)
            survivors.add(len(at.record.survivors))
    # Protocol messages: keys, shares and notes.
    sizes = [sent.record.message.bytes for sent in view.protocol]
    return SumRow(
        job=job,
        masked=spans(rounds),
        members=_span(members),
        thresholds=_span(thresholds),
        colluders=_span(colluders),
        clipped=clipped,
        opened=spans(opened),
        survivors=_span(survivors),
        protocol=Totals(messages=len(sizes), bytes=sum(sizes)),
    )


def _span(found: Collection[int]) -> str:
    if not found:
        return ""
    least, most = min(found), max(found)
    if least == most:
        return f"{least:,}"
    return f"{least:,} to {most:,}"
