"""Why an attempt at a secure sum was refused or ended: the closed list of codes.

``RefusedError(peer, code, why)`` carries one, where the fault is a peer's; the state machines turn
it into their end.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

from ..errors import RefusedError


class Code(StrEnum):
    """The kinds of fault; only these words leave a silo, never the texts."""

    SPEC = "SPEC"  # the specification is malformed, unsigned or not the one of this job and round
    # this silo's policy asks for another cohort, threshold, weights or ring, or lets no upload
    # leave
    POLICY = "POLICY"
    ATTEMPT = "ATTEMPT"  # this attempt, or one that excludes it, was entered before
    ABANDON = "ABANDON"  # too few abandon notes, or one that does not hold
    KEYS = "KEYS"  # a bundle of keys is unsigned, of a stranger, repeated or unusable
    SHARES = "SHARES"  # dealt shares are unsigned, do not open, or do not fit their commitments
    COMPLAINT = "COMPLAINT"  # a complaint about a dealer does not hold
    MISDEALT = (
        # evidence shows that a dealer's shares do not open, or do not join
        # (security/secagg/evidence.py)
        "MISDEALT"
    )
    UPLOAD = "UPLOAD"  # a masked upload or its header is not what it should be
    SURVIVORS = "SURVIVORS"  # the set of survivors is too small, or not one that this silo may sign
    NOTES = "NOTES"  # too few survivors signed the same set, or a signature does not hold
    REVEAL = "REVEAL"  # revealed shares are not those asked for, or do not fit their commitments
    SUM = "SUM"  # the opened sum is not one of the masked values
    ORDER = "ORDER"  # a message that cannot come now
    EQUIVOCATION = "EQUIVOCATION"  # a second message that differs from the first
    TOO_FEW = "TOO_FEW"  # not enough silos are left
    STOPPED = "STOPPED"  # asked to stop


# Whom a silo blames, besides a silo by its id:
NOBODY = ""  # for what honest silos and an honest coordinator come to, when processes die
COORDINATOR = "coordinator"  # for what only the coordinator can have done
# for what either can have done, and nobody can tell which
COORDINATOR_OR_SILO = "coordinator or a silo of the cohort"


def check(holds: bool, peer: str, code: Code, why: str) -> None:
    """RefusedError unless it holds.

    ``peer`` is the party that is blamed: a silo's id, or one of the constants above. ``why`` is
    for this machine's own log and ledger.
    """
    if not holds:
        raise RefusedError(peer, code, why)


@contextmanager
def passed_on() -> Iterator[None]:
    """Blame the coordinator for passing on what it could have seen, such as a bad signature.

    A RefusedError in the body of the ``with`` keeps its code, but blames the coordinator. An honest
    one makes the same checks before it passes a message on.
    """
    try:
        yield
    except RefusedError as error:
        raise RefusedError(
            COORDINATOR, error.code, f"passed on from {error.peer!r}: {error.why}"
        ) from None
