"""The first two pages of the ledger report: what left, in words that a lay reader knows.

Per job: its purpose, whose records it is on, what left, who can read that, what protects it, and
what it took of the privacy budget. Every sentence follows from records of the ledger, from the
roster, and from the signed jobs (signed_jobs.py); what these do not say is said to be unknown.
Tables with every figure follow behind.
"""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter

from ...errors import LocalError
from ...files.documents import parse_toml
from ...security.identity.roster import Roster
from ...security.ledger.messages import LedgerMessage, Totals
from ...security.ledger.overview import LedgerOverview
from ...security.ledger.records import JobAccept, JobDecline, PolicyChange, Tensor
from ...security.policy.file import PolicyFile
from ...security.policy.release import (
    GRAM_READER,
    MASKED,
    MIX_READER,
    PLAIN,
    SILOS_READER,
    SUM_READER,
)
from ..ledger.show import persons
from ..terminal.output import number, size
from ..terminal.printer import printable
from .signed_jobs import JobDocument, SignedJob
from .tables import MEASURED, Listed, newest

MOST_JOBS = 3  # shown in full: two printed pages have room for no more
MOST_LINES = 4  # one for each further job, on the same pages
MOST_ITEMS = 3  # kinds or readers of one job
MOST_NAME, MOST_TEXT = 64, 280  # characters of a name, and of a purpose

KINDS = {  # of what left, as the ledger names them
    "whole_model": "the numbers of a whole trained model",
    "backbone": "the numbers of a trained model without its last layer",
    "inter_learning_model": "the numbers of a model that the institutions exchange",
    "header_rows": "a model's numbers for each class, which show what classes occur here",
    "prototypes": "for each class, the average of what a model makes of the records",
    "canonical_models": "the numbers of models that are mixed for each institution",
    "classifier_rows": "a model's numbers for each class, which show how classes relate",
    "membership": "a few numbers that say which mix of models fits the records here",
    "counts": "numbers of records, or which classes occur",
    "metric": "how many test records there are, and how many the model got right",
    "metric by class": "how many test records of each class there are, and how models do on them",
    "sketch": "a shortened form of a model's change",
    "statistics": "sums over the records, which show averages and spreads",
    "key": "keys for encryption",
    "share": "encrypted shares of keys",
    "": "check words, which say nothing of records",
}
# Parts of metrics from which the number of this silo's test records of each class follows.
BY_CLASS = {"confusion", "scores", "torchmetrics"}
OWN = {  # readers by name, of what is masked and of what is not
    False: "{reader} reads this institution's own numbers",
    True: "{reader} reads weighted averages over several institutions",
}
PUBLIC = ", in a form that was computed from no records here, such as zeros"
# Readers who do not read this silo's own numbers.
READERS = {
    SUM_READER: "{coordinator} reads sums over several institutions, never one's own numbers",
    SILOS_READER: "the institutions of the job read sums, never one's own numbers",
    MIX_READER: "other institutions of the job read mixtures, each one of its own",
    GRAM_READER: "{coordinator} reads how alike the institutions' numbers are, and not these",
}
NOISE = {  # by what is protected, as the signed job says it
    "record": "Noise hides what each record adds; how well, epsilon says.",
    "silo": (
        "Noise hides the whole silo, what all records here add together; how well, epsilon says."
    ),
    "": (
        "Noise was added. Whether it hides each record or the whole silo is not known: the signed"
        " job is not next to this ledger."
    ),
}
SHARED = (
    "Each institution adds a share of the noise: it protects the sum as long as no more than {some}"
    " of {silos} leave theirs out or tell it."
)
EXACT = (
    "No noise protects {what}: whoever can read it may find out whether a record was used, or learn"
    " more."
)
NOTHING = "Nothing that left was computed from records here."
OPEN = "Only the connection is encrypted: the readers above read the numbers themselves."
PERSONS = {
    False: "Records are counted, not persons.",
    True: "A person has at most {most:,} of them, says this silo's policy.",
}
HIDDEN = (
    "Encryption hides this institution's own numbers, unless the coordinator works together with"
    " {some} of the other institutions."
)


@dataclass(frozen=True, slots=True)
class LayJob:
    """One job, each answer a few sentences; empty where there is nothing to say."""

    job: str
    outcome: str
    purpose: str
    records: str
    left: tuple[str, ...]
    readers: tuple[str, ...]
    protection: tuple[str, ...]
    budget: str


@dataclass(frozen=True, slots=True)
class FirstPages:
    """The jobs of the two pages: the newest in full, the others in a line each."""

    jobs: tuple[LayJob, ...]
    others: Listed[tuple[str, str]]  # job, what left
    totals: Totals
    budgets: Listed[tuple[str, str]]  # data set, what all jobs took of its budget


@dataclass(frozen=True, slots=True)
class Sources:
    """What the pages draw on besides the ledger."""

    members: Roster | None = None
    signed: Mapping[str, SignedJob] = field(default_factory=dict)


def first_pages(whole: LedgerOverview, view: LedgerOverview, sources: Sources) -> FirstPages:
    """The pages of ``view``, which is the ledger ``whole`` or one job of it."""
    persons = _records_per_person(whole)
    shown, rest = view.jobs[-MOST_JOBS:], view.jobs[:-MOST_JOBS]
    jobs = [_job(view.of(job), job, sources, persons) for job in reversed(shown)]
    amounts = (_amount(_totals(view.of(job).messages)) for job in rest)
    lines = list(zip(map(shortened, rest), amounts, strict=True))
    last = {at.record.dataset: at for at in view.budgets}
    budgets = []
    for dataset, at in last.items():
        head = at.record
        spent = f"{head.epsilon} of {head.limit} epsilon spent or reserved, by all jobs together"
        budgets.append((shortened(dataset), f"{spent}, at delta {head.delta}; {at.time[:10]}"))
    return FirstPages(
        jobs=tuple(jobs),
        others=newest(lines, MOST_LINES),
        totals=_totals(view.messages),
        budgets=newest(budgets, MOST_ITEMS),
    )


def _totals(messages: Sequence[LedgerMessage]) -> Totals:
    return Totals(
        messages=len(list(filter(MEASURED, messages))),
        bytes=sum(map(MEASURED, messages)),
        assumed=sum(map(attrgetter("assumed"), messages)),
    )


def _job(view: LedgerOverview, job: str, sources: Sources, persons: Mapping[str, int]) -> LayJob:
    signed = sources.signed.get(job, SignedJob())
    # What did not leave needs no reader and no protection.
    left = list(filter(attrgetter("most"), view.messages))
    datasets = dict.fromkeys(message.intent.dataset for message in left)
    answers = map(_answer, map(attrgetter("record"), view.decisions))
    return LayJob(
        job=shortened(job),
        outcome=", later ".join(dict.fromkeys(answers)) or "no decision of this silo is recorded",
        purpose=shortened(signed.document.purpose, MOST_TEXT),
        records=_records(list(filter(None, datasets)), signed, persons),
        left=tuple(_left(left)),
        readers=tuple(_readers(left, sources.members)),
        protection=tuple(_protection(left, signed.document)),
        budget=_budget(left, signed.document),
    )


_ANSWERS: dict[type, str] = {
    JobAccept: "this silo accepted it",
    JobDecline: "this silo declined it",
}


def _answer(record: JobAccept | JobDecline) -> str:
    person = persons(record)
    return _ANSWERS[type(record)] + f" ({shortened(person)})" * bool(person)


def _records(named: Sequence[str], signed: SignedJob, persons: Mapping[str, int]) -> str:
    sets = ", ".join(map(shortened, named[:MOST_ITEMS])) or "not recorded"
    most = max((persons.get(name, 1) for name in named), default=1)
    several = PERSONS[most > 1].format(most=most)
    return f"Data set {sets}: {signed.counted}. {several}"


def _kind(tensor: Tensor) -> tuple[str, bool]:
    """Its kind in ``KINDS``, and whether it was computed from no record here."""
    kind = "metric by class" if tensor.part in BY_CLASS else tensor.kind
    return kind, tensor.taint == "public"


def _left(messages: Sequence[LedgerMessage]) -> Iterable[str]:
    """A line per kind, the largest first, and the bytes that nobody measured."""
    kinds: dict[tuple[str, bool], Totals] = {}
    for message in messages:
        found = message.pieces(_kind, ("", False))
        for key, totals in found.items():
            kinds.setdefault(key, Totals()).add(totals)
    ranked = sorted(kinds.items(), key=lambda item: -item[1].bytes)
    for (kind, public), totals in ranked[:MOST_ITEMS]:
        what = KINDS.get(kind, shortened(kind)) + PUBLIC * public
        yield f"{what}: {size(totals.bytes)} in {_messages(totals.messages)}"
    if ranked[MOST_ITEMS:]:
        yield f"{number(len(ranked) - MOST_ITEMS, 'further kind')}: section 3"
    if assumed := sum(message.assumed for message in messages):
        yield f"at most {size(assumed)} more may have left, which nobody measured"


def _readers(messages: Sequence[LedgerMessage], members: Roster | None) -> Iterable[str]:
    """Who can read what left: organisations, and what they read."""
    forms: dict[str, set[str]] = {}
    for message in messages:
        for reader in message.intent.readers:
            forms.setdefault(reader, set()).add(message.intent.form)
    recipients = dict.fromkeys(message.intent.recipient.id for message in messages)
    coordinator = " and ".join(organisation(peer, members) for peer in recipients)
    # Single numbers are the most that anybody reads, so readers by name come first.
    for reader in sorted(forms, key=READERS.__contains__)[:MOST_ITEMS]:
        said = READERS.get(reader, OWN[MASKED in forms[reader]])
        yield said.format(coordinator=coordinator, reader=organisation(reader, members))
    if len(forms) > MOST_ITEMS:
        yield f"{number(len(forms) - MOST_ITEMS, 'further reader')}: section 3"


def organisation(member: str, members: Roster | None) -> str:
    """``General Hospital (hospital-a)``, and who runs its machine if that is another one."""
    if members is None or member not in members:
        return f"{shortened(member)} (organisation not known)"
    entry = members[member]
    host = f", on machines of {shortened(entry.host_operator)}"
    other = host * (entry.host_operator != entry.organisation)
    return f"{shortened(entry.organisation)} ({member}{other})"


def _protection(messages: Sequence[LedgerMessage], document: JobDocument) -> Iterable[str]:
    """Noise first, then encryption; the lack of either is said, too."""
    tensors = chain.from_iterable(message.leaving for message in messages)
    taints = {tensor.taint for tensor, _ in tensors}
    forms = {message.intent.form for message in messages}
    attempts = filter(None, (message.intent.secagg for message in messages))
    colluders = min((attempt.colluders for attempt in attempts), default=0)
    # One other institution is enough to open what is padded or rotated.
    some = {True: f"more than {colluders}", False: "one"}[forms == {MASKED}]
    privacy = document.privacy
    shared = SHARED.format(some=privacy.dishonest, silos=len(document.silos))
    said = {
        NOTHING: taints == {"public"},
        NOISE[privacy.unit]: "noised" in taints,
        shared: privacy.noise == "shared",
        EXACT.format(what="the rest"): taints >= {"exact", "noised"},
        EXACT.format(what="what left"): "exact" in taints and "noised" not in taints,
        HIDDEN.format(some=some): forms > set() and PLAIN not in forms,
        OPEN: PLAIN in forms,
    }
    return [sentence for sentence, holds in said.items() if holds]


def _budget(messages: Sequence[LedgerMessage], document: JobDocument) -> str:
    paid = filter(None, (message.intent.dp for message in messages))
    datasets = dict.fromkeys(map(attrgetter("dataset"), paid))
    if not datasets:
        return "Nothing was taken from a privacy budget."
    sets = f"It took from the budget of data set {', '.join(map(shortened, datasets))}."
    most = f" As signed, this job alone may take at most {document.privacy.epsilon} epsilon."
    return sets + most * bool(document.privacy.epsilon)


def _amount(totals: Totals) -> str:
    return f"{size(totals.bytes)} in {_messages(totals.messages)}"


def _messages(count: int) -> str:
    return number(count, "message")


def _records_per_person(view: LedgerOverview) -> dict[str, int]:
    """By data set, as the last policy whose text the ledger has says it."""
    texts = [at.record.text for at in view.policies if isinstance(at.record, PolicyChange)]
    # There may be none, or one of a release whose policies this one does not read.
    with contextlib.suppress(LocalError):
        tables = parse_toml("".join(texts[-1:]).encode(), PolicyFile, "policy").dataset
        return {name: table.records_per_person for name, table in tables.items()}
    return {}


def shortened(text: str, most: int = MOST_NAME) -> str:
    """At most so many characters: what others write must not push the rest off the pages."""
    words = " ".join(printable(text).split())
    return words if len(words) <= most else f"{words[: most - 1]}\u2026"
