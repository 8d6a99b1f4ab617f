"""The coordinator's ledger: what it received, under which head of the silo's own ledger, and what
it delivered.

The same log as a silo's (security/log/append_log.py), in ``<coordinator>/ledger/``, signed by the
coordinator's log key. Each side is the other's witness: a silo holds the head that came with its
last receipt, the coordinator the head under which the silo's last upload stands. `staddle ledger
reconcile` compares the two ledgers.
"""

from pathlib import Path
from types import TracebackType
from typing import Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ...errors import LocalError
from ..log.append_log import Appended, AppendLog, SignedRecord
from ..log.head import HeldHead, Signer
from ..log.note import Note
from ..log.segments import CHECKPOINT
from ..log.tree_head import TreeHead
from .fast_decoder import well_formed
from .records import DeliveredRecord, HeadRefused, Payload, Received, Serving, StopRecord

RESTORE = (
    "restore the newest copy of the coordinator's folder, ledger, database and jobs together; silos"
    " hold the head of this ledger, and would record a fork from then on if another began"
)


class ReceivingLedger:
    """The writer; safe to share between threads.

    Every method returns once its record is durable, or raises.
    """

    def __init__(self, log: AppendLog) -> None:
        self._log = log

    @classmethod
    def open(
        cls,
        folder: Path,
        coordinator: str,
        federation: str,
        key: Ed25519PrivateKey,
        known: TreeHead | None = None,
    ) -> Self:
        """Open and check it; LocalError refuses one that breaks its chain or is not that of its
        checkpoint.

        So it does one that is missing or older where the database has ``known``, a head of it that
        silos hold.
        """
        if known is not None and not (folder / CHECKPOINT).exists():
            why = f"the ledger is missing, and the database knows one of {known.size} records"
            raise LocalError(f"{folder}: {why}; {RESTORE}")
        log = AppendLog.open(folder, Signer.of(federation, coordinator, key), None, well_formed)
        if known is not None and (problem := log.disagreement(HeldHead("the database", known))):
            log.close()
            raise LocalError(
                f"{folder}: is not the ledger that the database knows: {problem}; {RESTORE}"
            )
        return cls(log)

    def serving(self, coordinator: str, software: str, roster: str) -> Appended:
        """The coordinator has started."""
        return self._log.append(
            Serving(coordinator=coordinator, software=software, roster=roster).model_dump(
                mode="json"
            )
        )

    def stop(self, reason: str) -> Appended:
        """It stops in good order."""
        return self._log.append(StopRecord(reason=reason).model_dump(mode="json"))

    def received(self, record: Received) -> SignedRecord:
        """An upload was taken; with the head for the silo to hold."""
        return self._log.seal(record.model_dump(mode="json"))

    def delivered(
        self, silo: str, job: str, job_digest: str, round_: int, message: Payload
    ) -> Appended:
        """A delivery was sent to its end; durable with the next record."""
        record = DeliveredRecord(
            silo=silo, job=job, job_digest=job_digest, round=round_, message=message
        )
        return self._log.append(record.model_dump(mode="json"), durable=False)

    def refused(self, silo: str, checkpoint: Note, why: str) -> Appended:
        """A silo signed a head that does not extend the one that is held."""
        record = HeadRefused(silo=silo, checkpoint=bytes(checkpoint).decode(), why=why[:1000])
        return self._log.append(record.model_dump(mode="json"))

    def growth(self, held: int, to: Note) -> bytes:
        """Proof for who holds the head of ``held`` records.

        From none, where this ledger never had so many.
        """
        return bytes(self._log.growth(held if held <= TreeHead.parse(to.text).size else 0, to))

    def close(self) -> None:
        """Make everything durable and let the lock go."""
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()
