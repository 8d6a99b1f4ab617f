"""The ledger report in sentences."""

from collections import Counter
from collections.abc import Iterable

from ..security.ledger_overview import View, parts
from ..security.records import JobAccept, JobDecline
from ..security.roster import Roster
from .units import size


def sentence(view: View, members: Roster | None) -> str:
    """What left for one job, to whom, how much, under which rule."""
    messages = view.messages
    declined = sum(isinstance(decision.record, JobDecline) for decision in view.decisions)
    accepted = any(isinstance(decision.record, JobAccept) for decision in view.decisions)
    held = f" The silo's policy held {_count(len(view.denials), 'message')} back." if view.denials else ""
    protocol = _protocol(view)
    if not messages:
        what = "no tensor left" if protocol else "nothing left"
        why = "this silo declined it" if declined and not accepted else "this silo accepted it" if accepted else ""
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
    rules = dict.fromkeys(rule for message in messages for rule in message.intent.policy.rule.split(", "))
    masked = sum(message.intent.secagg is not None for message in messages)
    assumed = sum(message.intent.message.bytes for message in messages if not message.digested)
    return (
        f"{_bytes(total)} left in {_count(len(messages), 'message')}, {span}, "
        f"for {_names((m.intent.recipient.id for m in messages), members)}: "
        + ", ".join(f"{part} {count:,} bytes" for part, count in sizes.items())
        + f". Who can read it: {_names(r for m in messages for r in m.intent.readers)}. "
        + (f"{_count(masked, 'message')} of these left masked, and can be read only in a sum. " if masked else "")
        + f"The policy's {'rule' if len(rules) == 1 else 'rules'} {', '.join(rules)} let it pass."
        + (f" {assumed:,} of these bytes are of messages cut short and are counted in full." if assumed else "")
        + protocol
        + held
    )


def _protocol(view: View) -> str:
    if not view.protocol:
        return ""
    size = sum(sent.record.message.bytes for sent in view.protocol)
    return f" The protocol of secure sums took {_count(len(view.protocol), 'message')} besides, {_bytes(size)}."


def _bytes(count: int) -> str:
    return f"{count:,} bytes" if count < 1024 else f"{count:,} bytes ({size(count)})"


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _names(ids: Iterable[str], members: Roster | None = None) -> str:
    told = (f"{i} ({members[i].organisation})" if members and i in members else i for i in dict.fromkeys(ids))
    return ", ".join(told)
