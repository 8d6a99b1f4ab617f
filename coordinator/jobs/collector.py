"""How the rounds of one job are collected, chosen once when the job is admitted.

In a plain job silos upload tensors (plain_collector.py), in a blind one they take part in a secure
sum (blind_collector.py). Nobody else asks which of the two a job is.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from torch import Tensor

from ...algorithms.exchange.parts import Exchanges, Item, Part
from ...algorithms.job.job import Job
from ...errors import RefusedError
from ...proto import secure_pb2 as secure
from ...proto import tensor_pb2 as tensor
from ...proto.convert.mix import PaddedWord
from ...proto.convert.secagg_received import SecaggDelivery
from ...proto.stream import Digests
from ..blind.mix_rows import Memories
from ..blind.secure_sum import SecureSum
from ..rounds.events import Effect, Event
from ..rounds.machine import JobState
from ..storage.store import Folding


class Upload(Protocol):
    """One upload that arrived whole.

    Its digests were checked at the end of the stream.
    """

    round: int
    context: bytes  # what it is bound to in a blind job, else empty

    @property
    def name(self) -> str:
        """Its part, where that crosses on its own; else empty."""


@dataclass(frozen=True)
class StoredUploadFile:
    """The file of an accepted upload, and what remains to be written of it.

    ``record`` writes the ledger's record and the database's row, in an open transaction; called
    with ``again`` where the silo may have uploaded for this round before. Then ``committed``.
    """

    file: str
    size: int
    digests: Digests
    record: Callable[..., None]
    committed: Callable[[], None]


@dataclass(frozen=True)
class ExpectedUpload:
    """The sizes that a manifest has to declare, and the tensors among them.

    ``items`` are in wire order, the order of their bytes in the upload.
    """

    sizes: list[int]  # in bytes
    items: tuple[Item, ...] = ()  # none of words, which have no values to check
    part: Part | None = None  # where it crosses on its own

    @classmethod
    def of(cls, items: tuple[Item, ...], part: Part | None = None) -> "ExpectedUpload":
        """The upload of these tensors, which are of ``part`` where it crosses on its own."""
        return cls([item.spec.nbytes for item in items], items, part)


@dataclass(frozen=True)
class DeliveredWords:
    """The words of one sum or row, as they go down.

    ``pieces`` can be consumed only once.
    """

    nbytes: int
    pieces: Iterator[memoryview]  # each valid until the next
    sha256: bytes | None = None  # None of a row, which is added up while it is sent


@dataclass(frozen=True)
class Attachments:
    """All that goes down to a silo next to tensors.

    All fields are empty in a plain job. ``proofs`` show who may be missing from sums and rows.
    """

    rows: Sequence[secure.MixedRow] = ()
    prekeys: Sequence[secure.DeliveredPrekey] = ()
    sums: Sequence[secure.OpenSum] = ()
    proofs: Sequence[secure.Misdealing] = ()
    words: Sequence[DeliveredWords] = ()  # of the sums, then of the rows


@dataclass(frozen=True)
class HiddenLeft:
    """Changes by a fold among uploads that the coordinator cannot read.

    ``gone`` and ``mixed`` hold names of files in the job's folder.
    """

    memories: Memories = field(default_factory=dict)  # of the rows that were put aside
    # by part and silo: files that these rows are of
    mixed: dict[tuple[str, str], frozenset[str]] = field(default_factory=dict)
    gone: frozenset[str] = frozenset()  # files of uploads that nothing needs any more


@dataclass(frozen=True)
class FoldInputs:
    """Inputs of a fold and the archive that it changes; ``left`` is called once it is done.

    ``read`` maps one tensor at a time into memory. ``archive`` changes nothing that is committed.
    """

    read: Callable[[str, str, str], Tensor]  # by part, silo and name
    archive: Folding
    left: Callable[[], HiddenLeft] = HiddenLeft


class Collector(ABC):
    """Collects the rounds of one job; what it does not say is nothing to do in a plain job.

    Methods are called in the event loop, except for ``inputs``. That, its result and ``exchanges``
    are used in other threads.
    """

    exchanges: Exchanges
    largest_upload: int  # bytes
    kept_files: Collection[str]  # that the open round may need after a restart
    effects: Mapping[type[Effect], Callable[[Any], None]] = MappingProxyType({})  # of its own

    def __init__(self, job: Job) -> None:
        self._job = job

    @property
    def needed(self) -> Collection[str]:
        """Files of uploads from which rows put aside are still to be made.

        They must outlive their round.
        """
        return ()

    # After a restart.

    def recover(self) -> None:  # noqa: B027 nothing to do
        """Take up the open round, for all jobs before any of them resumes."""

    def resume(self) -> None:  # noqa: B027
        """Do again what may not have been done before this process began."""

    # What silos upload.

    @abstractmethod
    def upload_bytes(self, round_: int, part: str = "") -> int:
        """Length of a silo's upload in a round, or of this part of it.

        In bytes. An empty ``part`` stands for the round's main upload.
        """

    @abstractmethod
    def awaits(self, silo: str, round_: int, context: bytes, part: str) -> bool:
        """True while this upload is still to come, in a round that is open to the silo.

        ``context`` binds a blind upload to its round; it is empty in a plain job.
        """

    def missing(self, silo: str, round_: int) -> Sequence[str]:
        """Parts that a silo has to upload, and sign, before all else in the open round."""
        return ()

    @abstractmethod
    def check_form(self, silo: str, manifest: tensor.Manifest) -> None:
        """RefusedError MANIFEST for an upload such as silos send in the other kind of job."""

    @abstractmethod
    def expected(self, silo: str, manifest: tensor.Manifest) -> ExpectedUpload:
        """RefusedError MANIFEST where a manifest declares something else than is due."""

    @abstractmethod
    def keep(self, silo: str, round_: int, path: Path, part: Part | None) -> str:
        """Name a checked upload, durably.

        Returns its name in the job's folder. The upload does not count before ``take``.
        """

    @abstractmethod
    def take(self, silo: str, upload: Upload, stored: StoredUploadFile) -> None:
        """Count an accepted upload, in one transaction with what ``stored`` records.

        Database and ledger have it when it returns.
        """

    def counts(self, silo: str, round_: int, part: str) -> bool:
        """True if an upload that has a receipt still counts."""
        return True

    # The messages of a secure sum.

    def padded(self, silo: str, word: PaddedWord, body: bytes) -> None:
        """Take a silo's word on its upload of a part; ``body`` is what is kept of it.

        RefusedError says why not.
        """
        raise not_awaited(silo, self._job, word.upload.version.round)

    def sum_of(self, silo: str, round_: int) -> SecureSum:
        """The sum of the open round; RefusedError ROUND_CLOSED where there is none."""
        raise RefusedError(
            silo, "ROUND_CLOSED", f"job {self._job.name!r}: round {round_} has no open sum"
        )

    def message(self, silo: str, round_: int, had: int) -> SecaggDelivery | None:
        """The next message of a round's sum for a silo that has received ``had``; None: not yet.

        RefusedError ROUND_CLOSED for a round without a sum.
        """
        return self.sum_of(silo, round_).next_message(silo, had)

    # What goes down.

    async def attachments(self, round_: int, silo: str) -> Attachments:
        """All that goes down next to tensors, once what has to be durable before is written."""
        return Attachments()

    # The end of a round.

    @abstractmethod
    def inputs(self, round_: int, members: tuple[str, ...]) -> FoldInputs:
        """Inputs of the fold over these members; LocalError where the disk changed them.

        It runs in the thread of the folds. DamagedError if the silos may upload again.
        """

    def committed(self, left: HiddenLeft) -> None:  # noqa: B027
        """The database has what a fold left."""

    def record(self, event: Event, state: JobState) -> None:  # noqa: B027
        """Write, in the event's transaction, what goes with the step to this state.

        ``state`` is the new one; the job still has the old one.
        """

    def moved(self, event: Event, before: JobState) -> None:  # noqa: B027
        """Follow a step of the job, once the database has it."""

    def expire(self) -> None:  # noqa: B027
        """The job is over: remove what nobody may open any more (security rule 10)."""


def not_awaited(silo: str, job: Job, round_: int) -> RefusedError:
    """ROUND_CLOSED: a round awaits nothing of this silo.

    The silo gets the text, so it says nothing about other silos.
    """
    return RefusedError(silo, "ROUND_CLOSED", f"job {job.name!r}: round {round_} does not await it")


def misfit(silo: str, manifest: tensor.Manifest, upload: str) -> RefusedError:
    """The refusal of an upload of the other kind of job."""
    if manifest.part:
        upload = f"a part {manifest.part[:64]!r} by itself, nothing of the job does"
    return RefusedError(
        silo, "MANIFEST", f"gives {upload}; run the release of Staddle that the job asks for"
    )
