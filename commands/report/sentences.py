"""The ledger report in sentences."""

from collections import Counter
from collections.abc import Iterable

from ...security.identity.roster import Roster
from ...security.ledger.overview import LedgerOverview, parts
from ...security.ledger.records import JobAccept, JobDecline
from ...security.policy.release import GRAM_READER, MASKED, PADDED, ROTATED, SILOS_READER
from ..console.output import size

HOW = {  # by form
    MASKED: "and can be read only in a sum",
    PADDED: "and can be read only by other silos, mixed with what these and others gave",
    ROTATED: (
        "of which the coordinator reads only lengths and how alike they are to those of other silos"
    ),
}


def sentence(view: LedgerOverview, members: Roster | None) -> str:
    """What left for one job, to whom, how much, under which rule."""
    messages = view.messages
    declined = sum(isinstance(decision.record, JobDecline) for decision in view.decisions)
    accepted = any(isinstance(decision.record, JobAccept) for decision in view.decisions)
    held = (
        f" The silo's policy held {_count(len(view.denials), 'message')} back."
        if view.denials
        else ""
    )
    protocol = _protocol(view)
    if not messages:
        what = "no tensor left" if protocol else "nothing left"
        why = (
            "this silo declined it"
            if declined and not accepted
            else "this silo accepted it"
            if accepted
            else ""
        )
        return f"{what}{f'; {why}' if why else ''}.{protocol}{held}"
    sizes: Counter[str] = Counter()
    for message in messages:
        sizes.update(parts(message))
    total = sum(sizes.values())
    rounds = {message.intent.round for message in messages}
    first, last = min(rounds), max(rounds)
    span = f"round {first}" if first == last else f"rounds {first} to {last}"
    if len(rounds) <= last - first:
        span = f"{len(rounds):,} rounds between {first} and {last}"
    rules = dict.fromkeys(
        rule for message in messages for rule in message.intent.policy.rule.split(", ")
    )
    assumed = sum(message.intent.message.bytes for message in messages if not message.digested)
    return (
        f"{_bytes(total)} left in {_count(len(messages), 'message')}, {span}, "
        f"for {_names((m.intent.recipient.id for m in messages), members)}: "
        + ", ".join(f"{part} {count:,} bytes" for part, count in sizes.items())
        + f". Who can read it: {_names(r for m in messages for r in m.intent.readers)}. "
        + _hidden(view)
        + _protected(view)
        + f"The policy's {'rule' if len(rules) == 1 else 'rules'} {', '.join(rules)} let it pass."
        + (
            f" {assumed:,} of these bytes are of messages cut short and are counted in full."
            if assumed
            else ""
        )
        + protocol
        + held
    )


def _hidden(view: LedgerOverview) -> str:
    """What cannot be read as it stands, and while who sides with nobody."""
    forms = Counter(message.intent.form for message in view.messages)
    said = [
        f"{_count(forms[form], 'message')} of these left {form}, {how}. "
        for form, how in HOW.items()
        if forms[form]
    ]
    alone = "Of padded and rotated ones this holds while the coordinator and no silo collude. "
    if any(SILOS_READER in message.intent.readers for message in view.messages):
        said.append(
            "Sums that silos alone read are kept from the coordinator while no silo colludes with"
            " it. "
        )
    if any(
        message.intent.form == MASKED and GRAM_READER in message.intent.readers
        for message in view.messages
    ):
        said.append(
            "Of vectors that silos share out among them the coordinator reads only lengths and"
            " likeness. "
        )
    return "".join(said) + (alone if forms[PADDED] or forms[ROTATED] else "")


def _protected(view: LedgerOverview) -> str:
    """How much of it is differentially private; nothing where nothing is."""
    taints = Counter(
        tensor.taint for message in view.messages for tensor, _ in message.intent.leaving
    )
    if not taints["dp"]:
        return ""
    bare = f"{taints['private']:,} computed from records without noise"
    told = (
        f"{_count(taints['dp'], 'tensor')} differentially private, {taints['public']:,} public and"
        f" {bare}"
    )
    return f"As the silo's software states, it is {told} (section 8). "


def _protocol(view: LedgerOverview) -> str:
    if not view.protocol:
        return ""
    size = sum(sent.record.message.bytes for sent in view.protocol)
    mixes = any(sent.record.kind in ("contribution", "padded") for sent in view.protocol)
    of = "protocols of secure sums and mixes" if mixes else "protocol of secure sums"
    return f" The {of} took {_count(len(view.protocol), 'message')} besides, {_bytes(size)}."


def _bytes(count: int) -> str:
    return f"{count:,} bytes" if count < 1024 else f"{count:,} bytes ({size(count)})"


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _names(ids: Iterable[str], members: Roster | None = None) -> str:
    told = (
        f"{i} ({members[i].organisation})" if members and i in members else i
        for i in dict.fromkeys(ids)
    )
    return ", ".join(told)
