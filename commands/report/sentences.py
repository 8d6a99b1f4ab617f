"""The ledger report in sentences."""

from collections import Counter
from collections.abc import Iterable
from operator import attrgetter

from ...security.identity.roster import Roster
from ...security.ledger.messages import LedgerMessage
from ...security.ledger.overview import LedgerOverview, parts
from ...security.ledger.records import JobAccept
from ...security.policy.release import GRAM_READER, MASKED, PADDED, ROTATED, SILOS_READER
from ..terminal.output import number, size
from .policies import rules_of
from .tables import MEASURED

HOW = {  # by form
    MASKED: "and can be read only in a sum",
    PADDED: "and can be read only by other silos, mixed with what these and others uploaded",
    ROTATED: (
        "of which the coordinator reads only lengths and their similarity to those of other silos"
    ),
}

SILOS_ALONE = (
    "Sums that only silos read are hidden from the coordinator unless a silo colludes with it. "
)
SHARED_OUT = (
    "For vectors that silos share out among themselves, the coordinator reads only lengths and"
    " similarity. "
)
SHARES = (
    "The silos of this job share the noise, and what this silo uploaded has its share of it: what"
    " is protected is a sum, as long as the other silos add their shares and tell them to nobody. "
)
NO_COLLUSION = (
    "For padded and rotated messages, this holds unless a silo colludes with the coordinator. "
)


def sentence(view: LedgerOverview, members: Roster | None) -> str:
    """Sentences on what left for one job, to whom, how much, under which rule.

    ``members`` gives recipients their organisations.
    """
    messages = view.messages
    # There may be protocol messages and denials although no tensor left.
    besides = _assumed(messages) + _protocol(view) + _held_back(view)
    # Of a message that was cut short at its first byte nothing left.
    messages = list(filter(attrgetter("most"), messages))
    if not messages:
        return _nothing_left(view) + besides

    sizes: Counter[str] = Counter()
    recipients: list[str] = []
    readers: list[str] = []
    for message in messages:
        # By part; bytes that belong to no tensor count as a part of their own.
        sizes.update({part: piece.bytes for part, piece in parts(message).items()})
        recipients.append(message.intent.recipient.id)
        # Readers may differ from the recipient: of a masked message they can read the sum.
        readers += message.intent.readers
    by_part = ", ".join(f"{part} {count:,} bytes" for part, count in (+sizes).items()) or "none"
    measured = len(list(filter(MEASURED, messages)))
    rules = dict.fromkeys(rules_of(messages))
    rule = "rules"
    if len(rules) == 1:
        rule = "rule"

    # The sentences that say who can read it stand before the rule that let it pass, since the
    # policy decides on readers.
    return (
        f"{_bytes(sizes.total())} left in {number(measured, 'message')}, {_rounds(messages)}, "
        f"for {_names(recipients, members)}: {by_part}. Who can read it: {_names(readers)}. "
        + _hidden(view)
        + _protected(view)
        + f"The policy's {rule} {', '.join(rules)} let it pass."
        + besides
    )


def _nothing_left(view: LedgerOverview) -> str:
    what = "nothing left"
    if view.protocol:  # keys and shares of a secure sum left, and then no sum was made
        what = "no tensor left"
    if not view.decisions:
        return f"{what}."
    accepted = any(isinstance(decision.record, JobAccept) for decision in view.decisions)
    verb = "accepted" if accepted else "declined"
    return f"{what}; this silo {verb} it."


def _held_back(view: LedgerOverview) -> str:
    if not view.denials:
        return ""
    return f" The silo's policy held {number(len(view.denials), 'message')} back."


def _rounds(messages: Iterable[LedgerMessage]) -> str:
    rounds = {message.intent.round for message in messages}
    first, last = min(rounds), max(rounds)
    if first == last:
        return f"round {first}"
    # The silo took no part in some of the rounds between.
    if len(rounds) <= last - first:
        return f"{len(rounds):,} rounds between {first} and {last}"
    return f"rounds {first} to {last}"


def _assumed(messages: Iterable[LedgerMessage]) -> str:
    open_ended = list(filter(None, map(attrgetter("assumed"), messages)))
    if not open_ended:
        return ""
    return (
        f" At most {_bytes(sum(open_ended))} more may have left, of"
        f" {number(len(open_ended), 'message')} whose end no record tells."
    )


def _hidden(view: LedgerOverview) -> str:
    """Which messages cannot be read as they stand, and under which assumption."""
    forms: Counter[str] = Counter()
    readers: dict[str, set[str]] = {}  # by form
    for message in view.messages:
        forms[message.intent.form] += 1
        readers.setdefault(message.intent.form, set()).update(message.intent.readers)

    sentences = []
    for form, how in HOW.items():
        if forms[form]:
            sentences.append(f"{number(forms[form], 'message')} of these left {form}, {how}. ")

    # each assumption is said once, with the last of what rests on it
    if SILOS_READER in set().union(*readers.values()):
        sentences.append(SILOS_ALONE)
    if GRAM_READER in readers.get(MASKED, ()):
        sentences.append(SHARED_OUT)
    if forms[PADDED] or forms[ROTATED]:
        sentences.append(NO_COLLUSION)
    return "".join(sentences)


def _protected(view: LedgerOverview) -> str:
    """How much of it is differentially private, or that nothing is."""
    taints: Counter[str] = Counter()
    for message in view.messages:
        taints.update(tensor.taint for tensor, _ in message.leaving)
    # Leaving noise out is somebody's choice, and is said like the rest.
    if not taints["noised"]:
        if not taints["exact"]:
            return ""
        return (
            "None of it is differentially private: the silo's software states"
            f" {number(taints['exact'], 'tensor')} computed from records without noise. "
        )
    bare = f"{taints['exact']:,} computed from records without noise"
    tensors = (
        f"{number(taints['noised'], 'tensor')} differentially private, {taints['public']:,} public,"
        f" {bare}"
    )
    noises = {message.intent.dp.noise for message in view.messages if message.intent.dp}
    return f"The silo's software states: {tensors} (section 8). {SHARES * ('shared' in noises)}"


def _protocol(view: LedgerOverview) -> str:
    if not view.protocol:
        return ""
    size, kinds = 0, set()
    for sent in view.protocol:
        size += sent.record.message.bytes
        kinds.add(sent.record.kind)
    of = "protocol of secure sums"
    # Parts of a job's key, and signatures on padded uploads, are not messages of a sum.
    if not kinds.isdisjoint({"contribution", "padded"}):
        of = "protocols of secure sums and mixes"
    return f" The {of} took {number(len(view.protocol), 'message')} more, {_bytes(size)}."


def _bytes(count: int) -> str:
    # The exact number can be compared with other tables.
    exact = f"{count:,} bytes"
    if count < 1024:
        return exact
    return f"{exact} ({size(count)})"


def _names(ids: Iterable[str], members: Roster | None = None) -> str:
    """Ids, each once, with their organisations where a roster has them."""
    names = []
    for member in dict.fromkeys(ids):
        name = member
        if members and member in members:
            name = f"{member} ({members[member].organisation})"
        names.append(name)
    return ", ".join(names)
