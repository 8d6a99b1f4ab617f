"""What this silo remembers of a job's mixed and compared parts, in its folder, part by part.

::

    mix-<part>.versions.json  the uploads that it began and signed: VersionMemory of
                              security/blind/mix_row.py
    mix-<part>.signed         its word on the last one that it signed, as it leaves but for the
                              session
    mix-<part>.rows.json      of which uploads the rows were made that it opened; there from the
                              start
    mix-<part>.directed.json  in place of all these, where the job mixes by directed sums: of which
                              rounds it opened rows; there from the start
    gram-<part>.json          the vectors that it rotated last, and the last upload of them that was
                              accepted

Each is durable before what it is about leaves, or is opened, so that neither a crash nor a restart
leads to a second one. Each carries its digest (files/checked_file.py). None holds a secret: seeds
are in no file. What is lost of uploads and vectors the ledger still has
(silo/blind/hidden_uploads.py); of rows it has none, so their memory is begun before this silo
contributes to the job's key, and is there from then on.
"""

from pathlib import Path
from typing import Annotated, TypeVar

from google.protobuf.message import DecodeError
from pydantic import Field

from ...algorithms.exchange.parts import Mix
from ...algorithms.job.job import Job
from ...errors import LocalError
from ...files import checked_file
from ...files.documents import Strict
from ...proto import secure_pb2 as pb
from ...security.blind.mix_row import Ordinal, RowMemory, VersionMemory
from ...security.blind.rotation import RotationMemory
from ...security.identity.keys import Hex32

M = TypeVar("M", bound=Strict)


class OpenedRows(Strict):
    """The file of the rows of one part that were opened.

    ::

        {"delivered":["9f86…"],"memory":{"last":"9f86…","newest":{"b":4,"c":4}}}

    ``delivered`` are the digests of the rows of the last delivery, which may come again: that shows
    nothing new.
    """

    memory: RowMemory = RowMemory()
    delivered: tuple[Hex32, ...] = ()


class OpenedDirected(Strict):
    """The file of the directed rows of one part that were opened.

    ``{"delivered":["9f86…"],"newest":7}``, with the newest round.

    ``delivered`` are the contexts of the sums of the last delivery, whose rows may come again.
    """

    newest: Ordinal = -1
    delivered: tuple[Hex32, ...] = ()


class Rotations(Strict):
    """The file of the vectors of one part that were rotated.

    ``{"given":"5c1f…","memory":{"attempt":0,"round":17,"vectors":"9f86…"}}``
    """

    memory: RotationMemory = RotationMemory()
    # ctx of the last upload that was accepted
    given: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""


class MixMemory:
    """The files of one job.

    LocalError where one was changed, UnwritableError where the disk takes none.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    # Rows.

    def check_begun(self, job: Job, contributed: bool) -> None:
        """LocalError where memory of rows is gone.

        ``contributed``: the ledger has this silo's contribution to their key.
        """
        # Files are begun before the contribution leaves, so now they must be there.
        for part in _mixed(job) if contributed else ():
            self._begun(_rows(job, part), _model(job))

    def begin(self, job: Job) -> None:
        """Note, before this silo contributes to the job's key, that nothing was opened yet.

        Files that exist stay.
        """
        for part in _mixed(job):
            # Accepting a job again must not forget which rows were opened.
            if not (self._folder / _rows(job, part)).exists():
                self._save(_rows(job, part), _model(job)())

    def rows(self, part: str) -> OpenedRows:
        """The rows of a part that were opened.

        LocalError also where that is gone, since they could come again.
        """
        return self._begun(f"mix-{part}.rows.json", OpenedRows)

    def directed(self, part: str) -> OpenedDirected:
        """The directed rows of a part that were opened; LocalError also where that is gone.

        For jobs that mix by directed sums.
        """
        return self._begun(f"mix-{part}.directed.json", OpenedDirected)

    def _begun(self, name: str, model: type[M]) -> M:
        path = self._folder / name
        # Unlike in ``_load``, a missing file is an error: with an empty memory, rows over the same
        # uploads could be opened again with other weights.
        if not path.exists():
            raise LocalError(
                f"{path}: gone, and with it what this silo remembers of the rows that it opened:"
                " restore its folder, or have the job signed under a new name"
            )
        return self._load(name, model)

    def save_rows(self, part: str, memory: OpenedRows) -> None:
        """Keep which rows of a part were opened.

        Call it before a seed is opened. Durable when it returns, as all below.
        """
        self._save(f"mix-{part}.rows.json", memory)

    def save_directed(self, part: str, memory: OpenedDirected) -> None:
        """Keep which directed rows of a part were opened.

        Call it before their words are taken in.
        """
        self._save(f"mix-{part}.directed.json", memory)

    # Uploads.

    def versions(self, part: str) -> VersionMemory:
        """The uploads of a part so far.

        Empty without a file: the caller asks the ledger whether that can be.
        """
        return self._load(f"mix-{part}.versions.json", VersionMemory)

    def save_versions(self, part: str, memory: VersionMemory) -> None:
        """Keep the uploads of a part.

        Call it before the first byte of the newest leaves, and before the word on it does.
        """
        self._save(f"mix-{part}.versions.json", memory)

    def signed(self, part: str) -> pb.PaddedWordUpload | None:
        """The last word on an upload of a part, without its session; None before the first."""
        path = self.word(part)
        if not path.exists():
            return None
        try:
            return pb.PaddedWordUpload.FromString(checked_file.read_bytes(path))
        except DecodeError as error:
            raise LocalError(
                f"{path}: no message that this silo kept; restore the folder from a backup"
            ) from error

    def word(self, part: str) -> Path:
        """The path of the last word on an upload of a part."""
        return self._folder / f"mix-{part}.signed"

    def save_signed(self, part: str, message: pb.PaddedWordUpload) -> None:
        """Keep a word in place of the last one; it is sent again after a restart."""
        checked_file.write_bytes(self.word(part), message.SerializeToString(deterministic=True))

    def rotations(self, part: str) -> Rotations:
        """The vectors of a part that were rotated.

        Empty without a file: the caller asks the ledger whether that can be.
        """
        return self._load(f"gram-{part}.json", Rotations)

    def save_rotations(self, part: str, memory: Rotations) -> None:
        """Keep the vectors of a part that were rotated.

        Call it before one of them leaves.
        """
        self._save(f"gram-{part}.json", memory)

    def _load(self, name: str, model: type[M]) -> M:
        path = self._folder / name
        return checked_file.read_json(path, model) if path.exists() else model()

    def _save(self, name: str, memory: Strict) -> None:
        checked_file.write_json(self._folder / name, memory)


def _rows(job: Job, part: str) -> str:
    return (
        f"mix-{part}.directed.json" if job.security.mix == "directed" else f"mix-{part}.rows.json"
    )


def _model(job: Job) -> type[Strict]:
    return OpenedDirected if job.security.mix == "directed" else OpenedRows


def _mixed(job: Job) -> list[str]:
    """The parts of which rows come down."""
    parts = (
        part
        for start in job.phase_starts
        for part in job.up(start)
        if isinstance(part.exchange, Mix)
    )
    return list(dict.fromkeys(part.name for part in parts))
