"""The ledger's record of a session's control messages: greetings, polls, heartbeats, fetch requests
and answers.

They hold names, numbers and codes of a closed list. Each is counted before it leaves, against the
caps of the policy, which stand in the record that the session begins with; its totals are written
when the session is over.
"""

import asyncio

from google.protobuf.message import Message

from ...errors import LocalError
from ...security.ledger.egress_ledger import Ledger
from ...security.ledger.records import ControlClose, ControlOpen, Peer
from ...security.policy.file import ControlCaps as Caps

MAX_CONTROL_BYTES = 1024  # one control message: ids, digests and numbers fit well below


class SessionCounts:
    """Counts of the session that is open, if one is."""

    def __init__(self, ledger: Ledger, caps: Caps, recipient: Peer) -> None:
        self._ledger = ledger
        self._caps = caps
        self._recipient = recipient
        self._ref: int | None = None
        self.messages = 0
        self.size = 0  # bytes

    async def open(self) -> bytes:
        """A session begins, the one before is over.

        The leaf hash of its record, which nobody can guess before.
        """
        await self.close()
        name = f"{self._ledger.silo}-{(self._ledger.head.seq + 1) if self._ledger.head else 0}"
        record = ControlOpen(
            session=name,
            recipient=self._recipient,
            max_messages=self._caps.max_messages,
            max_bytes=self._caps.max_bytes,
        )
        opened = await asyncio.to_thread(self._ledger.append, record)
        self._ref, self.messages, self.size = opened.seq, 0, 0
        return bytes.fromhex(opened.leaf)

    def count(self, message: Message) -> str:
        """Count a message that is about to leave.

        If it may not, why a new session is wanted first.
        """
        size = message.ByteSize()
        if self._ref is None:
            return "no session is open; say hello first"
        if size > MAX_CONTROL_BYTES:
            raise LocalError(
                f"a control message of {size} bytes, at most {MAX_CONTROL_BYTES} may leave"
                " uncounted"
            )
        if self.messages + 1 > self._caps.max_messages or self.size + size > self._caps.max_bytes:
            return "the session's control record is full; a new one opens"
        self.messages += 1
        self.size += size
        return ""

    async def close(self) -> None:
        """The session is over: write its totals."""
        if self._ref is not None:
            ref, self._ref = self._ref, None
            record = ControlClose(ref=ref, messages=self.messages, bytes=self.size)
            await asyncio.to_thread(self._ledger.append, record)
