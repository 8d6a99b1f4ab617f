"""The policies of the ledger report: which were in force when, with their texts, and which rules
let messages out.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...security.ledger.messages import At, LedgerMessage
from ...security.ledger.overview import LedgerOverview
from ...security.ledger.records import PolicyChange, Start


@dataclass(slots=True)
class PolicySpan:
    """A policy file in force from one start of the agent to the next that had another one.

    Empty ``until``: still.
    """

    digest: str
    since: str
    until: str = ""
    starts: int = 0


def policy_table(named: Iterable[At[Start] | At[PolicyChange]]) -> tuple[PolicySpan, ...]:
    """Changes of the policy, oldest first."""
    found: list[PolicySpan] = []
    for at in named:
        digest = at.record.policy if isinstance(at.record, Start) else at.record.after
        if not found or found[-1].digest != digest:
            if found:
                found[-1].until = at.time
            found.append(PolicySpan(digest, at.time))
        found[-1].starts += isinstance(at.record, Start)
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
    """Each policy once, in the order in which they came into force."""
    texts = {at.record.after: at.record.text for at in named if isinstance(at.record, PolicyChange)}
    spans = policy_table(named)
    return tuple(
        PolicyText(
            digest,
            tuple(span for span in spans if span.digest == digest),
            tuple(texts.get(digest, "").expandtabs(4).splitlines()),
        )
        for digest in dict.fromkeys(span.digest for span in spans)
    )


def unannounced(view: LedgerOverview) -> tuple[str, ...]:
    """Digests of policies by which something was decided and that no record puts in force."""
    used = [message.intent.policy.file for message in view.messages] + [
        d.record.policy for d in view.denials
    ]
    named = {span.digest for span in policy_table(view.policies)}
    return tuple(digest for digest in dict.fromkeys(used) if digest not in named)


def rule_table(messages: Iterable[LedgerMessage]) -> tuple[tuple[str, str, int], ...]:
    """Job, rule, and how many messages it let out.

    A message of several parts may take several rules.
    """
    found = Counter(
        (m.intent.job, rule) for m in messages for rule in m.intent.policy.rule.split(", ")
    )
    return tuple((job, rule, count) for (job, rule), count in found.items())
