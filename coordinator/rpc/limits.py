"""How much one member may ask of the coordinator: calls a second, and calls of one kind at a time.

Pure values: the caller passes the time in seconds of any monotonic clock.
"""

from collections import Counter
from dataclasses import dataclass, field

from ...errors import RefusedError
from ...proto.channel import MOST_LANES

CALLS_PER_SECOND = 50.0
BURST = 200.0
AT_ONCE = {  # calls that carry or make much, and waits: one may not know that its silo left
    "Upload": 1,
    "Fetch": 1,
    "Weights": 1,
    "SubmitWeights": 1,
    "GroupKey": 1,
    "Poll": 1 + MOST_LANES,
    "SecureNext": 1 + MOST_LANES,
}
OTHERS_AT_ONCE = 4
# lines per minute on refused strangers: anybody can connect, and must not fill the disk
STRANGERS_LOGGED = 20


@dataclass
class Bucket:
    """A token bucket of ``BURST`` tokens: full at first, refilled at a rate, one token per call.

    ``filled`` is when it was refilled last, in seconds.
    """

    tokens: float = BURST
    filled: float = 0.0

    def take(self, now: float) -> bool:
        """Take a token if there is one.

        ``now`` in seconds, of a monotonic clock.
        """
        # Whoever was silent for days may not ask for days' worth of calls at once.
        self.tokens = min(BURST, self.tokens + (now - self.filled) * CALLS_PER_SECOND)
        self.filled = now
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True


@dataclass
class LoggedStrangers:
    """Which refusals of strangers are logged: the first ``STRANGERS_LOGGED`` of each minute."""

    minute: float = -1.0
    refused: int = 0  # since the minute began

    def one_more(self, now: float) -> int:
        """How many were refused in this minute, with this one; ``now`` in seconds."""
        minute = now // 60
        self.refused = self.refused + 1 if minute == self.minute else 1
        self.minute = minute
        return self.refused


@dataclass
class CallLimits:
    """Buckets and running calls of all members.

    Members are those of the roster, so this stays small.
    """

    buckets: dict[str, Bucket] = field(default_factory=dict)
    running: Counter[tuple[str, str]] = field(default_factory=Counter)

    def enter(self, member: str, rpc: str, now: float) -> None:
        """Count a call in; RefusedError LIMIT where the member asks too much.

        Call ``leave`` once for each ``enter`` that returned. ``rpc`` is the method's bare name.
        """
        # Every member starts with a full bucket.
        bucket = self.buckets.setdefault(member, Bucket(filled=now))
        if not bucket.take(now):
            raise RefusedError(
                member, "LIMIT", f"more than {CALLS_PER_SECOND:g} calls per second; slow down"
            )
        # After the bucket, so that calls refused here cost tokens, too.
        allowed = AT_ONCE.get(rpc, OTHERS_AT_ONCE)
        if self.running[member, rpc] >= allowed:
            raise RefusedError(
                member, "LIMIT", f"{allowed} {rpc} calls are running already; wait for one to end"
            )
        self.running[member, rpc] += 1

    def leave(self, member: str, rpc: str) -> None:
        """Count a call out.

        Also for a call that failed or was cancelled.
        """
        self.running[member, rpc] -= 1
        # Only calls that run stand here: the metrics show each entry.
        if not self.running[member, rpc]:
            del self.running[member, rpc]
