"""The coordinator's ledger: what it received, under which head of the silo's own ledger, and what
it delivered.

The same log as a silo's (security/log/append_log.py), in ``<coordinator>/ledger/``, signed by the
coordinator's log key. Each side is the other's witness: a silo holds the head that came with its
last receipt, the coordinator the head under which the silo's last upload stands. `staddle ledger
reconcile` compares the two ledgers.
"""

from collections.abc import Callable
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
from .fast_decoder import Record, well_formed
from .records import Received, is_durable

RESTORE = (
    "restore the newest copy of the coordinator's folder, ledger, database and jobs together; silos"
    " hold the head of this ledger, and would record a fork from then on if another began"
)


class ReceivingLedger:
    """The writer; safe to share between threads.

    ``append`` and ``seal`` return once the record is on the disk, or raise LocalError. The few
    types that records.py lists last reach it with the next record.
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
        fence: Callable[[], object] = bool,
    ) -> Self:
        """Open and check it; LocalError refuses one that breaks its chain or is not that of its
        checkpoint.

        So it does one that is missing or older where the database has ``known``, a head of it that
        silos hold. ``fence`` as for ``AppendLog``.
        """
        # A new ledger would be a fork: silos hold heads of the old one and could prove it.
        if known is not None and not (folder / CHECKPOINT).exists():
            why = f"the ledger is missing, and the database knows one of {known.size} records"
            raise LocalError(f"{folder}: {why}; {RESTORE}")
        log = AppendLog.open(
            folder, Signer.of(federation, coordinator, key), None, well_formed, fence
        )
        # A restored folder agrees with its own older checkpoint, but not with the database.
        if known is not None and (problem := log.disagreement(HeldHead("the database", known))):
            log.close()
            raise LocalError(
                f"{folder}: is not the ledger that the database knows: {problem}; {RESTORE}"
            )
        return cls(log)

    def append(self, record: Record) -> Appended:
        """Write a record.

        LocalError if the disk fails, and for every record after that until a restart: what cannot
        be recorded must not be done.
        """
        return self._log.append(record.model_dump(mode="json"), durable=is_durable(record))

    def seal(self, record: Received) -> SignedRecord:
        """Append it, and sign the head that ends with it, for the silo to hold."""
        return self._log.seal(record.model_dump(mode="json"))

    def growth(self, held: int, to: Note) -> bytes:
        """Proof for who holds the head of ``held`` records.

        From none, where this ledger never had so many.
        """
        # No proof leads from a larger tree, so the silo sees for itself that this ledger lacks
        # records.
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
