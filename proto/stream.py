"""Tensor streams as values: a manifest, then chunks, then an end with the digests.

::

    state     frame     goes to
    manifest  manifest  chunks   checked against the schema before a byte is taken
    chunks    (bytes)   chunks   once, where the manifest has an offset: the bytes before it
    chunks    chunk     chunks   1 MiB each, the last one what is left of the declared bytes
    chunks    end       done     all bytes there, every digest as computed here

Anything else is refused. No I/O here: the receiver passes checked bytes to its sink.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

from torch import Tensor

from ..errors import LocalError, RefusedError
from . import tensor_pb2 as pb
from .channel import CHUNK_BYTES
from .frames import ChunkFrame, Frame
from .wire import tensor_bytes

TOGETHER = 4  # chunks that go to a thread at a time, where one does the work


@dataclass(frozen=True, slots=True)
class Digests:
    """SHA-256 of each tensor's bytes, and of these digests one after another."""

    tensors: tuple[bytes, ...]

    @property
    def total(self) -> bytes:
        """Digest of the whole message.

        32 bytes. It is over the tensors' digests, so one tensor can be checked without the bytes of
        the others.
        """
        return sha256(b"".join(self.tensors)).digest()


class Digester:
    """Digests of tensors that lie back to back in a byte stream cut anywhere.

    Sizes are in bytes. An empty tensor has the digest of no bytes.
    """

    def __init__(self, sizes: Sequence[int], known: Mapping[int, bytes] | None = None) -> None:
        """``known``: digests that need not be computed again, by the tensor's index."""
        self._sizes = list(sizes)
        self._known = dict(known or {})
        self._done: list[bytes] = []
        self._hash = sha256()
        self._left = 0
        self._index = -1
        self._advance()

    def _advance(self) -> None:
        """Close finished tensors (empty ones too) and open the next."""
        while self._left == 0:
            # Not before the first tensor is open.
            if self._index >= 0:
                self._done.append(self._known.get(self._index) or self._hash.digest())
            self._index += 1
            if self._index >= len(self._sizes):
                return
            self._hash = sha256()
            self._left = self._sizes[self._index]

    def update(self, data: bytes | memoryview) -> None:
        """Take the next bytes; LocalError for more than the sizes allow."""
        view = memoryview(data)
        while view:
            if self._left == 0:
                raise LocalError(f"{len(view)} bytes more than the tensors have")
            # A chunk may hold the end of one tensor and the beginning of the next.
            take = view[: self._left]
            if self._index not in self._known:
                self._hash.update(take)
            self._left -= len(take)
            view = view[len(take) :]
            self._advance()

    def digests(self) -> Digests:
        """The digests, once every byte was taken.

        Called earlier, it returns the digests of the finished tensors only.
        """
        return Digests(tuple(self._done))


def chunks(tensors: Iterable[Tensor], size: int = CHUNK_BYTES) -> Iterator[ChunkFrame]:
    """The tensors' bytes back to back, in chunks of ``size`` (the last may be smaller).

    Each chunk is a copy, so the tensors it came from may change once it was yielded.
    """
    pieces: list[memoryview] = []
    left = size
    for tensor in tensors:
        view = tensor_bytes(tensor)
        while view:
            piece, view = view[:left], view[left:]
            # Tensors share chunks, since the receiver accepts only full ones before the last.
            pieces.append(piece)
            left -= len(piece)
            if not left:
                yield ChunkFrame.of(pieces)
                pieces, left = [], size
    if pieces:
        yield ChunkFrame.of(pieces)


def recut(pieces: Iterable[memoryview], size: int = CHUNK_BYTES) -> Iterator[ChunkFrame]:
    """The same bytes in chunks of ``size``; the last has the rest.

    A piece is copied before the next one is requested: only once, where a chunk lies within it.
    """
    buffer, filled = bytearray(size), 0
    for piece in pieces:
        left = piece
        while left:
            # A chunk that lies within a piece is not copied twice.
            if not filled and len(left) >= size:
                yield ChunkFrame.of([left[:size]])
                left = left[size:]
                continue
            step = min(len(left), size - filled)
            buffer[filled : filled + step] = left[:step]
            left, filled = left[step:], filled + step
            if filled == size:
                # ``of`` copies, so the buffer can be filled again.
                yield ChunkFrame.of([memoryview(buffer)])
                filled = 0
    if filled:
        yield ChunkFrame.of([memoryview(buffer)[:filled]])


def resumable(offset: int, size: int) -> bool:
    """True if a stream of ``size`` bytes may resume at ``offset``: between chunks or at the end."""
    # Bytes come in whole chunks, so an interrupted upload holds no part of one.
    return offset == size or (0 <= offset < size and offset % CHUNK_BYTES == 0)


class Inbound:
    """The receiving end of one stream.

    Pass each frame to ``feed``, then call ``finish``, which refuses a stream that stopped early.
    """

    def __init__(
        self,
        peer: str,
        check: Callable[[pb.Manifest], Sequence[int]],
        sink: Callable[[memoryview], object],
    ) -> None:
        """``check`` refuses a manifest or returns the sizes of what is hashed.

        ``sink`` takes the declared bytes.
        """
        self._peer = peer
        self._check = check
        self._sink = sink
        self._digester: Digester | None = None
        self._left = 0
        self._missing = 0  # bytes before the manifest's offset that were not taken up yet
        self.end: pb.End | None = None
        self.digests: Digests | None = None

    def feed(self, frame: Frame) -> None:
        """Take one frame; RefusedError for any that does not belong here.

        The codes are MANIFEST for a frame out of turn, LENGTH for a wrong number of bytes and
        DIGEST for an end frame whose digests differ. The sink gets a chunk only after its size was
        checked.
        """
        body = "chunk" if isinstance(frame, ChunkFrame) else frame.WhichOneof("body")
        if self.end is not None or body is None:
            raise RefusedError(self._peer, "MANIFEST", "a frame without body, or after the end")

        # Nothing is taken before the manifest, whose sizes bound all that follows.
        if self._digester is None:
            if isinstance(frame, ChunkFrame) or body != "manifest":
                raise RefusedError(
                    self._peer, "MANIFEST", f"the first frame is a {body}, not a manifest"
                )
            self._begin(frame.manifest)
        elif isinstance(frame, ChunkFrame):
            self._take(frame.content, self._digester)
        elif body == "end":
            self._finish(frame.end, self._digester)
        else:
            raise RefusedError(self._peer, "MANIFEST", "a second manifest in one stream")

    def _begin(self, manifest: pb.Manifest) -> None:
        sizes = self._check(manifest)
        self._digester = Digester(sizes)
        self._left = sum(sizes)
        # ``take_up`` hashes the bytes of an earlier stream before a chunk is taken.
        self._missing = manifest.offset
        if not resumable(self._missing, self._left):
            raise RefusedError(
                self._peer,
                "MANIFEST",
                f"resumes at byte {self._missing} of {self._left}, which begins no chunk",
            )

    def take_up(self, pieces: Iterable[bytes]) -> None:
        """Hash the bytes before the manifest's offset.

        They came with an earlier stream, so the sink has them.
        """
        # The digests are over the whole message, also where its connection was lost.
        for piece in pieces:
            if self._digester is None or len(piece) > self._missing:
                raise LocalError(
                    f"a piece of {len(piece)} bytes where {self._missing} lie before the offset"
                )
            self._digester.update(piece)
            self._missing -= len(piece)
            self._left -= len(piece)

    def _take(self, chunk: memoryview, digester: Digester) -> None:
        if self._missing:
            raise LocalError(
                f"a chunk while {self._missing} bytes before the offset were not taken up"
            )
        # Full chunks alone: a stream of single bytes would cost a call for each.
        wanted = min(self._left, CHUNK_BYTES)
        if not chunk or len(chunk) != wanted:
            raise RefusedError(
                self._peer,
                "LENGTH",
                f"a chunk of {len(chunk)} bytes where {self._left} were left of the manifest;"
                f" {wanted} are due",
            )
        self._left -= len(chunk)
        digester.update(chunk)
        # The sink never gets more bytes than declared, but their digest is checked only at the end.
        self._sink(chunk)

    def _finish(self, end: pb.End, digester: Digester) -> None:
        # Digests of a part must not pass for those of the whole.
        if self._left:
            raise RefusedError(
                self._peer, "LENGTH", f"the stream ended {self._left} bytes before its manifest"
            )
        digests = digester.digests()
        # Of each tensor, too: the silo's ledger names them one by one (security rule 27).
        if tuple(end.tensor_sha256) != digests.tensors or end.sha256 != digests.total:
            raise RefusedError(
                self._peer, "DIGEST", "the bytes that arrived have other digests than the end says"
            )
        self.end, self.digests = end, digests

    def finish(self) -> tuple[pb.End, Digests]:
        """The end frame and the digests; RefusedError where the stream stopped before its end."""
        if self.end is None or self.digests is None:
            raise RefusedError(
                self._peer, "INTERRUPTED", "the stream stopped before its end frame; send it again"
            )
        return self.end, self.digests
