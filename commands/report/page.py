"""The model that the template of the ledger report draws: a pure function of its sources."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...security.identity import roster as rosters
from ...security.identity.roster import Roster
from ...security.ledger.audit import AuditResult
from ...security.ledger.messages import At, Session, Totals
from ...security.ledger.overview import LedgerOverview, parts
from ...security.ledger.receipt_checks import Receipts
from ...security.ledger.records import Deny, Peer, WitnessRecord
from . import chart, tables
from . import policies as rules
from . import sums as report_sums
from .chart import Chart, SpendingChart
from .first_pages import FirstPages, Sources, first_pages
from .policies import PolicySpan, PolicyText
from .sentences import sentence
from .signed_jobs import SignedJob
from .sums import SumsSection
from .tables import BudgetRow, JobFlows, JobRow, Listed, MessageRow, TaintRow

MAX_CHARTS = 12  # keeps the page printable; it says how many more there are


@dataclass(frozen=True, slots=True)
class RosterSources:
    """Sources next to the ledger: rosters, and founders who must have signed them.

    Founders are named by the fingerprints of their keys.
    """

    rosters: tuple[Roster, ...] = ()
    founders: tuple[str, ...] = ()

    def named(self, view: LedgerOverview) -> Roster | None:
        """The roster that the newest start names, if it is one of these.

        Compared by digest, so a roster that the ledger does not name is never used.
        """
        known = {rosters.digest(roster): roster for roster in self.rosters}
        for start in reversed(view.starts):
            if start.record.roster in known:
                return known[start.record.roster]
        return None


@dataclass(frozen=True, slots=True)
class RosterFacts:
    """The newest of the sources' rosters that the ledger names.

    If it names none of them, the first one stands here, and nothing of it is used.
    """

    federation: str
    version: int
    digest: str
    matches: bool
    vouchers: tuple[str, ...]  # founders whose keys the user named, and who signed it


@dataclass(frozen=True, slots=True)
class Recipient:
    """A peer that bytes went to, and the TLS key that it showed.

    ``roster`` says what the roster knows of it.
    """

    id: str
    spki: str
    organisation: str
    roster: str


@dataclass(frozen=True, slots=True)
class Body:
    """The sections that only a valid ledger has.

    Times and names are as in the ledger; the template escapes them.
    """

    first: str
    last: str
    software: tuple[str, ...]
    sentences: tuple[tuple[str, str], ...]  # job, and the rest of the sentence
    flows: tuple[JobFlows, ...]
    total: Totals
    recipients: tuple[Recipient, ...]
    days: Chart | None
    charts: tuple[Chart, ...]
    charts_left_out: int
    policies: tuple[PolicySpan, ...]
    policy_texts: tuple[PolicyText, ...]
    unannounced: tuple[str, ...]
    rules: tuple[tuple[str, str, int], ...]
    denials: Listed[At[Deny]]
    jobs: tuple[JobRow, ...]
    sums: SumsSection
    taints: tuple[TaintRow, ...]
    budgets: tuple[BudgetRow, ...]
    spending: tuple[SpendingChart, ...]  # pictures of them
    sessions: Listed[Session]
    control: Totals
    events: Listed[tuple[int, str, str, str]]
    witnesses: tuple[At[WitnessRecord], ...]  # by member: the last head that it said to hold
    grouped: bool
    messages: Listed[MessageRow]
    message_count: int  # listed, those of which nothing left among them
    sent_count: int
    elsewhere: tuple[int, int]  # messages and their bytes of jobs that are not on this page


@dataclass(frozen=True, slots=True)
class Page:
    """The whole report; no body where the ledger does not hold.

    Except for ``made``, everything on it comes from the ledger or a roster.
    """

    silo: str
    made: str
    only: str  # the job that the page is restricted to; empty for all
    verified: AuditResult
    head: str  # SEQ:LEAF, empty for an empty ledger
    roster: RosterFacts | None
    receipts: Receipts | None  # None where none could be checked
    first_pages: FirstPages | None
    body: Body | None


def broken(verified: AuditResult, made: str, silo: str) -> Page:
    """The page of a ledger that does not hold: what is wrong, and whose it claims to be."""
    return Page(silo, made, "", verified, "", None, None, None, None)


def page(
    view: LedgerOverview,
    made: str,
    sources: RosterSources,
    only: str = "",
    jobs: Mapping[str, SignedJob] | None = None,
    receipts: Receipts | None = None,
) -> Page:
    """The page of a ledger that holds.

    ``made`` is the date to print, ``only`` the one job to report on, ``jobs`` what is known of the
    jobs besides.
    """
    # Restricted once, before any table is made, so that none can show other jobs.
    shown = view
    if only:
        shown = view.of(only)

    # names and verification are of the whole ledger, also where one job is shown
    members = sources.named(view)
    verified = view.verified
    head = ""
    if verified.head:
        head = f"{verified.records - 1}:{verified.head}"
    return Page(
        silo=view.silo,
        made=made,
        only=only,
        verified=verified,
        head=head,
        roster=_roster_facts(sources, members),
        receipts=receipts,
        first_pages=first_pages(view, shown, Sources(members, jobs or {})),
        body=_body(view, shown, sources, receipts),
    )


def _roster_facts(sources: RosterSources, members: Roster | None) -> RosterFacts | None:
    """The roster that the page names; ``members`` is the one that the ledger names."""
    # a reader who brought a roster of other times is told so, and not left without any word of it
    candidates = [members] if members else list(sources.rosters)
    if not candidates:
        return None
    roster = candidates[0]
    return RosterFacts(
        federation=roster.federation,
        version=roster.version,
        digest=rosters.digest(roster),
        matches=roster is members,
        vouchers=rosters.signers(roster, sources.founders),
    )


def _body(
    whole: LedgerOverview, view: LedgerOverview, sources: RosterSources, receipts: Receipts | None
) -> Body:
    members = sources.named(whole)
    # Polls and heartbeats belong to no job, so a page of one job has none.
    flows = tables.flow_table(view, control=view is whole)
    budgets = tables.budget_table(view.budgets)
    sessions, control = tables.session_table(view.sessions)
    # None: without a roster no receipt could be checked, and the table does not say that it was.
    checked = None
    if receipts:
        checked = receipts.good
    # Many messages are grouped by round, to keep the page printable.
    grouped, rows = tables.message_table(view.messages, checked)
    days, charts, left_out = _charts(view)

    # policies, starts and witnesses are the ledger's, whatever job the page is of
    return Body(
        first=whole.first,
        last=whole.last,
        software=tuple(dict.fromkeys(start.record.software for start in whole.starts)),
        sentences=tuple((job, sentence(view.of(job), members)) for job in view.jobs),
        flows=flows,
        total=tables.added(group.total for group in flows),
        recipients=tuple(_recipients(view, members, sources.rosters)),
        days=days,
        charts=charts,
        charts_left_out=left_out,
        policies=rules.policy_table(whole.policies),
        policy_texts=rules.policy_texts(whole.policies),
        unannounced=rules.unannounced(view),
        rules=rules.rule_table(view.messages),
        denials=tables.newest(view.denials),
        jobs=tables.job_table(view),
        sums=report_sums.sum_table(view),
        taints=tables.taint_table(view.messages),
        budgets=budgets,
        spending=tuple(_spending(view, row.last.record.dataset) for row in budgets[:MAX_CHARTS]),
        sessions=sessions,
        control=control,
        events=tables.event_table(view),
        witnesses=tuple(whole.witnesses[by] for by in sorted(whole.witnesses)),
        grouped=grouped,
        messages=rows,
        message_count=len(view.messages),
        sent_count=len(list(filter(tables.MEASURED, view.messages))),
        elsewhere=_elsewhere(whole, view),
    )


def _spending(view: LedgerOverview, dataset: str) -> SpendingChart:
    return chart.spending([at for at in view.budgets if at.record.dataset == dataset])


def _elsewhere(whole: LedgerOverview, view: LedgerOverview) -> tuple[int, int]:
    """Messages, and their bytes, of jobs that are not on this page."""
    shown, sizes = _sizes(view), _sizes(whole)
    # Each message belongs to one job, so the rest are those of other jobs.
    return len(sizes) - len(shown), sum(sizes.values()) - sum(shown.values())


def _sizes(view: LedgerOverview) -> dict[int, int]:
    """Bytes of each message that left, those of protocols included, by seq."""
    left = filter(tables.MEASURED, view.messages)
    sizes = {message.seq: message.measured for message in left}
    return sizes | {at.seq: at.record.message.bytes for at in view.protocol}


def _charts(view: LedgerOverview) -> tuple[Chart | None, tuple[Chart, ...], int]:
    """Bytes by day and job, and by round and part for the jobs with the most bytes."""
    days: dict[str, Counter[str]] = {}
    rounds: dict[str, dict[int, Counter[str]]] = {}
    totals: Counter[str] = Counter()
    jobs: Counter[str] = Counter()
    # A message that may not have left has no bar.
    for message in filter(tables.MEASURED, view.messages):
        intent = message.intent
        pieces = {part: piece.bytes for part, piece in parts(message).items()}
        # Time stamps are in UTC and begin with the date.
        day = days.setdefault(message.time[:10], Counter())
        day[intent.job] += message.measured
        of_job = rounds.setdefault(intent.job, {})
        of_job.setdefault(intent.round, Counter()).update(pieces)
        totals.update(pieces)
        # Decides which jobs get a picture of their own.
        jobs[intent.job] += message.measured

    # one bar says nothing that the total does not say
    by_day = None
    if len(days) > 1:
        columns = chart.by_date(days)
        across = {10: "day (UTC)", 7: "month", 4: "year"}[len(columns[0][0])]
        by_day = chart.stacked("All jobs", across, columns, chart.patterns(jobs))

    # a part has one pattern in all pictures; the page stays printable, so the largest jobs alone
    patterns = chart.patterns(totals)
    drawn = dict(jobs.most_common(MAX_CHARTS))
    charts = []
    # In the order of the ledger, not by size.
    for job, by in rounds.items():
        if job in drawn:
            picture = chart.stacked(f"Job {job}", "round", chart.by_round(by), patterns)
            charts.append(picture)
    return by_day, tuple(charts), len(rounds) - len(charts)


def _recipients(
    view: LedgerOverview, members: Roster | None, known: Sequence[Roster]
) -> Iterable[Recipient]:
    peers = [message.intent.recipient for message in view.messages]
    # Protocol messages, such as keys and shares, have recipients, too.
    peers += [sent.record.recipient for sent in view.protocol]
    peers += [session.opened.recipient for session in view.sessions]
    # One line per id and TLS key: a member that changed its key has two.
    for peer in dict.fromkeys(peers):
        organisation, roster = _in_roster(peer, members, known)
        yield Recipient(peer.id, peer.spki, organisation, roster)


def _in_roster(peer: Peer, members: Roster | None, known: Sequence[Roster]) -> tuple[str, str]:
    """The organisation of a peer, and what the roster knows of its TLS key.

    ``known`` are all rosters that are at hand: keys are renewed.
    """
    if members is None:
        return "", ""
    if peer.id not in members:
        return "", "not in the roster"

    # a key that is not the roster's may be a peer that posed as this one
    member = members[peer.id]
    keys = {each.spki_sha256 for roster in known for each in roster.entries if each.id == peer.id}
    said = dict.fromkeys(keys, "its key in another version") | {member.spki_sha256: "its key"}
    return member.organisation, said.get(peer.spki, "has ANOTHER key there")
