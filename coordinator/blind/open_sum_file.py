r"""The words of an open sum that silos get as they are, in a file, with all that goes down beside them.

::

    <words>{"document":"{\"attempt\":0,…}","file_sha256":"77ab…","sha256":"9f86…","signature":"9a0b…",
    "survivors":["a","b","c"],"tag":"5c1f…"}

The words are the integers of one group without its canaries, little-endian; how many there are the job says. They are
written while they are read, so that no more than a piece of them is in memory (unmask.py).
"""

import hashlib
import mmap
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from ...errors import LocalError, RefusedError
from ...files.checked_file import from_json, to_json
from ...files.documents import Strict
from ...proto.channel import CHUNK_BYTES
from ...security.arithmetic.fixedpoint import Words
from ...security.blind.open_sum import Claim
from ...security.identity.keys import Hex32, Id


class _Tail(Strict):
    document: str
    sha256: Hex32
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]
    survivors: tuple[Id, ...]
    tag: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


@dataclass(frozen=True)
class KeptSum:
    """One file of them: what goes down in the manifest, the digest of its words, how many bytes they are."""

    part: str
    claim: Claim
    sha256: bytes
    nbytes: int
    path: Path

    def check(self) -> None:
        """LocalError where the disk changed the words, or they are gone."""
        digest, left = hashlib.sha256(), self.nbytes
        try:
            with self.path.open("rb") as file:
                while piece := file.read(min(left, CHUNK_BYTES)):
                    digest.update(piece)
                    left -= len(piece)
        except OSError as error:
            raise LocalError(f"{self.path}: cannot read it: {error.strerror or error}") from error
        if digest.digest() != self.sha256:
            raise LocalError(f"{self.path}: its words are not those of the open sum: the disk changed them")

    def words(self, silo: str) -> Iterator[memoryview]:
        """The words, piece by piece, each valid until the next; RefusedError ROUND_CLOSED where the file is gone."""
        buffer, left = bytearray(CHUNK_BYTES), self.nbytes
        try:
            file = self.path.open("rb", buffering=0)
        except FileNotFoundError as error:
            raise RefusedError(silo, "ROUND_CLOSED", f"{self.path.name}: the round of this delivery is over") from error
        with file:
            while left:
                size = file.readinto(memoryview(buffer)[: min(left, CHUNK_BYTES)])
                left -= size
                yield memoryview(buffer)[:size]


def kept_words(claim: Claim, numbers: Iterable[Words]) -> Iterator[bytes | memoryview]:
    """What a file holds, piece by piece; each is hashed while it is written."""
    digest = hashlib.sha256()
    with ThreadPoolExecutor(1) as beside:
        for words in numbers:
            hashing = beside.submit(digest.update, piece := words.data.cast("B"))
            yield piece
            hashing.result()
    yield to_json(
        _Tail(
            document=claim.document.decode(),
            sha256=digest.hexdigest(),
            signature=claim.signature.hex(),
            survivors=claim.survivors,
            tag=claim.tag.hex(),
        )
    )


def kept_sum(part: str, path: Path, nbytes: int) -> KeptSum:
    """Read what stands beside the words; LocalError for a file that something else wrote."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            tail = from_json(data[nbytes:], _Tail, str(path))
    except (OSError, ValueError) as error:  # the latter: it is empty
        raise LocalError(f"{path}: cannot read it: {error}") from error
    claim = Claim(tail.document.encode(), bytes.fromhex(tail.signature), tail.survivors, bytes.fromhex(tail.tag))
    return KeptSum(part, claim, bytes.fromhex(tail.sha256), nbytes, path)
