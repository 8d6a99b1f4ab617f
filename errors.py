"""Whose fault it is.

::

    StaddleError
    ├── LocalError        we, or the person at this keyboard: a file, a key, a value, a call in the
                          wrong order
    │   ├── CancelledError     this process was asked to stop
    │   ├── UnwritableError    the disk does not take what must be kept: a daemon stops, and resumes
                               once there is room
    │   └── ExhaustedError     a data set's privacy budget does not cover what is asked; nothing of
                               it was done
    ├── PeerError         another member of the federation broke the protocol, or a stranger knocked
    │   ├── RefusedError       the same, with a code of the closed list that may be told to the peer
    │   │   └── LateError          what was asked of it came when it was no longer needed; nobody's
                                   fault
    │   └── UnreachableError   it did not answer; asking again later may help
    │       └── AbsentError        nothing listens there, or there is no such address
    ├── ProofError         a note, checkpoint or proof does not hold; whoever asked for it knows
                           whose it is
    └── AbortedError           nobody's fault: a deadline passed, too few silos were left

Every text names the thing, the value and the fix. From a silo only codes of the closed list
``ErrorCode`` in ``proto/federation.proto`` cross the wire, never these texts: a text may hold what
a silo must not tell. The coordinator, which holds no data, explains a refusal to the silo whose
message it refuses.
"""


class StaddleError(Exception):
    """Root of all errors that Staddle raises on purpose; its text is written for people.

    Commands print it without a traceback; anything else is a bug.
    """


class LocalError(StaddleError):
    """Our own side is wrong: a configuration, a file, an argument.

    Whoever runs this process can fix it.
    """


class CancelledError(LocalError):
    """Work stopped because this process was asked to stop."""


class UnwritableError(LocalError):
    """A file that must be kept could not be written; nothing that depends on it continues."""


class ExhaustedError(LocalError):
    """A privacy budget does not cover what was to be done with the data, so it was not done."""


class PeerError(StaddleError):
    """A peer misbehaved. ``peer`` is its roster id, or its address where it has none.

    ``why`` is the text without the peer.
    """

    def __init__(self, peer: str, why: str) -> None:
        super().__init__(f"{peer}: {why}")
        self.peer = peer
        self.why = why


class RefusedError(PeerError):
    """What a peer sent is refused.

    ``code`` is a name of ``ErrorCode`` without its prefix, such as ``POLICY``.
    """

    def __init__(self, peer: str, code: str, why: str) -> None:
        super().__init__(peer, why)
        self.code = code


class LateError(RefusedError):
    """What a peer was asked for came after others had given enough.

    It is told so, and nothing is wrong.
    """


class UnreachableError(PeerError):
    """A peer did not answer; trying again later may help.

    The message may still have reached it.
    """


class AbsentError(UnreachableError):
    """Nothing listens at a peer's address, or no host has its name.

    Other keys of ours would change nothing.
    """


class ProofError(StaddleError):
    """A signed note, a checkpoint or a Merkle proof is malformed or does not hold.

    It names no culprit; the caller knows whose proof it is.
    """


class AbortedError(StaddleError):
    """The work cannot continue, and nobody broke a rule."""


def reason(error: OSError) -> str:
    """Why the system refused something, in its own words; its errors may have none."""
    return error.strerror or str(error)


def check_local(holds: bool, why: str) -> None:
    """LocalError unless it holds: a mistake on this machine, which no peer is to blame for."""
    if not holds:
        raise LocalError(why)
