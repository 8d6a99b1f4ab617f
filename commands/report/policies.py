"""The policies of the ledger report: when each was in force, its text, and what it let out."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ...security.ledger.messages import At, LedgerMessage
from ...security.ledger.overview import LedgerOverview
from ...security.ledger.records import PolicyChange, Start


@dataclass(slots=True)
class PolicySpan:
    """A policy file in force from one start of the agent to the next that had another one.

    ``until`` is empty while it is in force. ``starts`` counts the agent's starts with it.
    """

    digest: str
    since: str
    until: str = ""
    starts: int = 0


def policy_table(named: Iterable[At[Start] | At[PolicyChange]]) -> tuple[PolicySpan, ...]:
    """Changes of the policy, oldest first.

    Each span ends where the next begins.
    """
    found: list[PolicySpan] = []
    for at in named:
        match at.record:
            case Start(policy=digest):
                starts = 1
            case PolicyChange(after=digest):
                starts = 0

        # a start names the policy again, changed or not
        if not found or found[-1].digest != digest:
            found.append(PolicySpan(digest, at.time))
        found[-1].starts += starts

    for before, after in pairwise(found):
        before.until = after.since
    return tuple(found)


@dataclass(frozen=True, slots=True)
class PolicyText:
    """The text of a policy file, as the ledger has it, and when it was in force.

    No lines where the ledger has none.
    """

    digest: str
    spans: tuple[PolicySpan, ...]
    lines: tuple[str, ...]


def policy_texts(named: Sequence[At[Start] | At[PolicyChange]]) -> tuple[PolicyText, ...]:
    """Each policy once, in the order in which they came into force.

    Tabs are expanded.
    """
    texts = {}
    for at in named:
        if isinstance(at.record, PolicyChange):
            # Only a change has the text; a start has just the digest.
            texts[at.record.after] = at.record.text

    # a policy that was taken back came into force twice, and has one text
    spans: dict[str, list[PolicySpan]] = {}
    for span in policy_table(named):
        spans.setdefault(span.digest, []).append(span)
    found = []
    for digest, own in spans.items():
        lines = texts.get(digest, "").expandtabs(4).splitlines()
        found.append(PolicyText(digest, tuple(own), tuple(lines)))
    return tuple(found)


def unannounced(view: LedgerOverview) -> tuple[str, ...]:
    """Digests of policies by which something was decided and that no record puts in force."""
    used = [message.intent.policy.file for message in view.messages]
    used += [denial.record.policy for denial in view.denials]
    # A policy by which something was decided must have been in force at some time.
    named = {span.digest for span in policy_table(view.policies)}
    return tuple(digest for digest in dict.fromkeys(used) if digest not in named)


def rule_table(messages: Iterable[LedgerMessage]) -> tuple[tuple[str, str, int], ...]:
    """Job, rule, and how many messages it let out.

    A message of several parts may take several rules.

    In the order in which they first let something out.
    """
    found: Counter[tuple[str, str]] = Counter()
    for message in messages:
        found.update((message.intent.job, rule) for rule in rules_of([message]))
    return tuple((job, rule, count) for (job, rule), count in found.items())


def rules_of(messages: Iterable[LedgerMessage]) -> list[str]:
    """The rules that let messages out, in order; one for each part of each message."""
    found = []
    for message in messages:
        # A record joins the rules of its parts with commas.
        found += message.intent.policy.rule.split(", ")
    return found
