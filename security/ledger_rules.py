"""What may follow what in a ledger: pure functions of records, the same for the writer and for the verifier.

====================  ==========================================================================
record                may come
====================  ==========================================================================
``egress.intent``     any time; its tensors fit into its message and the bytes before its offset, and these were
                      declared by an earlier intent of that round
``egress.digest``     once for an intent without outcome, with its tensors and the bytes of the whole payload
``egress.outcome``    once for an intent; ``sent`` only after its digest and with all its bytes
``control.open``      when no control session is open; a ``start`` abandons one that a crash left open
``control.close``     for the open session, within its caps
all others            any time
====================  ==========================================================================
"""

from dataclasses import dataclass

from .records import ControlClose, ControlOpen, Digest, Intent, Outcome, Record, Start


@dataclass(slots=True)
class OpenIntent:
    """An intent without outcome so far."""

    tensors: tuple[tuple[str, str], ...]  # (part, name)
    bytes: int  # that go now
    offset: int  # bytes of the payload before them
    digested: bool = False


class Rules:
    """Follows a ledger record by record; ``check`` before ``accept``."""

    def __init__(self) -> None:
        self.intents: dict[int, OpenIntent] = {}
        self.control: tuple[int, ControlOpen] | None = None
        self.declared: dict[tuple[str, int], int] = {}  # (job digest, round) → bytes of the payload declared so far

    def check(self, record: Record) -> str:
        """Why this record must not come next; empty if it may."""
        match record:
            case Intent():
                return self._check_intent(record)
            case Digest():
                return self._check_digest(record)
            case Outcome():
                return self._check_outcome(record)
            case ControlOpen() if self.control:
                return f"control session {self.control[1].session!r} (seq {self.control[0]}) is still open"
            case ControlClose():
                return self._check_close(record)
        return ""

    def accept(self, seq: int, record: Record) -> None:
        """Take note of a record that ``check`` lets pass."""
        match record:
            case Start():
                self.control = None
            case Intent():
                names = tuple((tensor.part, tensor.name) for tensor in record.tensors)
                self.intents[seq] = OpenIntent(names, record.message.bytes, record.offset)
                place, end = (record.job_digest, record.round), record.offset + record.message.bytes
                self.declared[place] = max(end, self.declared.get(place, 0))
            case Digest():
                self.intents[record.ref].digested = True
            case Outcome():
                del self.intents[record.ref]
            case ControlOpen():
                self.control = (seq, record)
            case ControlClose():
                self.control = None

    def _check_intent(self, record: Intent) -> str:
        names = [(tensor.part, tensor.name) for tensor in record.tensors]
        if len(set(names)) != len(names):
            return f"intent names a tensor twice: {_names(names)}"
        inside = sum(tensor.bytes for tensor in record.tensors)
        if inside > record.offset + record.message.bytes:
            behind = f" behind {record.offset}" if record.offset else ""
            size = record.message.bytes
            return f"tensors of {inside} bytes do not fit into the intent's message of {size} bytes{behind}"
        if not record.readers:
            return "intent names no reader; name at least its recipient"
        before = self.declared.get((record.job_digest, record.round), 0)
        if record.offset > before:
            return f"intent goes on at byte {record.offset}, of which earlier intents of its round declared {before}"
        return ""

    def _check_digest(self, record: Digest) -> str:
        intent = self.intents.get(record.ref)
        if intent is None:
            return f"digest refers to seq {record.ref}, which is no open intent"
        if intent.digested:
            return f"second digest for intent {record.ref}"
        names = tuple((tensor.part, tensor.name) for tensor in record.tensors)
        if names != intent.tensors:
            return f"digest of intent {record.ref} has tensors {_names(names)}, the intent {_names(intent.tensors)}"
        whole = intent.offset + intent.bytes
        if record.message.bytes != whole:
            return f"digest of intent {record.ref} has {record.message.bytes} bytes, the intent {whole}"
        return ""

    def _check_outcome(self, record: Outcome) -> str:
        intent = self.intents.get(record.ref)
        if intent is None:
            return f"outcome refers to seq {record.ref}, which is no open intent"
        if record.bytes_sent > intent.bytes:
            return f"outcome of intent {record.ref} sent {record.bytes_sent} bytes, the intent has {intent.bytes}"
        if record.status == "sent" and not intent.digested:
            return f"outcome of intent {record.ref} is 'sent' without a digest"
        if record.status == "sent" and record.bytes_sent != intent.bytes:
            return f"outcome of intent {record.ref} is 'sent' with {record.bytes_sent} of {intent.bytes} bytes"
        return ""

    def _check_close(self, record: ControlClose) -> str:
        if self.control is None or self.control[0] != record.ref:
            return f"control.close refers to seq {record.ref}, which is no open control session"
        cap = self.control[1]
        if record.messages > cap.max_messages or record.bytes > cap.max_bytes:
            return (
                f"control session {cap.session!r} closed with {record.messages} messages and {record.bytes} bytes, "
                f"its cap is {cap.max_messages} and {cap.max_bytes}"
            )
        return ""


def _names(names: list[tuple[str, str]] | tuple[tuple[str, str], ...]) -> str:
    return ", ".join("/".join(name) for name in names) or "none"
