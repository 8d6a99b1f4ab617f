r"""The open sum of a blind round: from masked words to one file, and from there into the fold.

::

    <round>.@sum.safetensors  tensors "part/name", and "part/@weight" where a part has weights; of a
                              part that is compared by shares "part/gram", in the order of the
                              "survivors", a JSON list in the header

For a part whose words are kept for silos, the header has only their SHA-256, under "words": the
fold reads the words themselves. Where silos alone read a part, its pads hide it from the fold too.

A file of such words has next to them all that goes down with them::

    <words>{"document":"{\"attempt\":0,…}","file_sha256":"77ab…","sha256":"9f86…","signature":"9a0b…",
    "survivors":["a","b","c"],"tag":"5c1f…"}

The words are the integers of one group without its canaries, little-endian; the job says how many
there are. They are written while they are read, so that no more than a piece of them is in memory.
"""

import hashlib
import json
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from safetensors import safe_open
from torch import Tensor

from ...algorithms.exchange.parts import Contribution, Gram, Part, Read, Sum
from ...algorithms.exchange.plain import PLAIN
from ...errors import LocalError, RefusedError, reason
from ...files import tensor_file
from ...files.checked_file import from_json, to_json
from ...files.documents import Strict, parse_canonical
from ...proto.channel import CHUNK_BYTES
from ...security.arithmetic.fixedpoint import COORDINATOR_READS, WORD, Words
from ...security.blind.directed_mix import is_row
from ...security.blind.open_sum import Claim, tag_of
from ...security.blind.plan import RoundPlan
from ...security.blind.sum import Bounds, folded, group
from ...security.identity.keys import Hex32, Id
from ...security.secagg.coordinator_events import Open
from ...security.secagg.gram_pieces import message_bytes
from ...security.secagg.masked_sum import Accumulator, chunks, opened_group
from ...security.secagg.shared_gram import Compared, dequantise, squares
from ...security.secagg.spec import RoundSpec, specify
from ..storage.store import JobStore, opened_sum, summed_words


class _Tail(Strict):
    document: str
    sha256: Hex32
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]
    survivors: tuple[Id, ...]
    tag: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


@dataclass(frozen=True)
class KeptSum:
    """One file of words: the claim on them for the manifest, their digest and their bytes.

    ``nbytes`` is the length of the words, which come first in the file.
    """

    part: str
    claim: Claim
    sha256: bytes
    nbytes: int
    path: Path

    def check(self) -> None:
        """LocalError where the disk changed the words, or they are gone."""
        # Only the words are read: the claim behind them has its own digest (files/checked_file.py).
        digest, left = hashlib.sha256(), self.nbytes
        try:
            with self.path.open("rb") as file:
                while piece := file.read(min(left, CHUNK_BYTES)):
                    digest.update(piece)
                    left -= len(piece)
        except OSError as error:
            raise LocalError(f"{self.path}: cannot read it: {reason(error)}") from error
        if digest.digest() != self.sha256:
            raise LocalError(
                f"{self.path}: its words are not those of the open sum: the disk changed them"
            )

    def words(self, silo: str) -> Iterator[memoryview]:
        """The words, piece by piece, each valid until the next.

        RefusedError ROUND_CLOSED where the file is gone.
        """
        buffer, left = bytearray(CHUNK_BYTES), self.nbytes
        try:
            file = self.path.open("rb", buffering=0)
        except FileNotFoundError as error:
            raise RefusedError(
                silo, "ROUND_CLOSED", f"{self.path.name}: the round of this delivery is over"
            ) from error
        with file:
            while left:
                size = file.readinto(memoryview(buffer)[: min(left, CHUNK_BYTES)])
                left -= size
                yield memoryview(buffer)[:size]


def open_sum_file(claim: Claim, numbers: Iterable[Words]) -> Iterator[bytes | memoryview]:
    """The bytes of a file of words, piece by piece; each is hashed while it is written.

    The claim comes last, since it has the digest of the words.
    """
    digest = hashlib.sha256()
    with ThreadPoolExecutor(1) as hasher:
        # A second thread hashes each piece while it is written.
        for words in numbers:
            hashing = hasher.submit(digest.update, piece := words.data.cast("B"))
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
    """Read the claim behind the words; LocalError for a file that something else wrote."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            tail = from_json(data[nbytes:], _Tail, str(path))
    # A ValueError: the file is empty, and nothing can be mapped of it.
    except (OSError, ValueError) as error:
        raise LocalError(f"{path}: cannot read it: {error}") from error
    claim = Claim(
        tail.document.encode(),
        bytes.fromhex(tail.signature),
        tail.survivors,
        bytes.fromhex(tail.tag),
    )
    return KeptSum(part, claim, bytes.fromhex(tail.sha256), nbytes, path)


SURVIVORS, WORDS = "survivors", "words"
GRAM = "gram"
NO_DIGEST = "0" * 64  # in place of digests where only sizes are computed


@dataclass(frozen=True)
class Keeping:
    """Names of parts whose words are kept for silos, and the signature over the specification."""

    parts: Sequence[str] = ()
    signature: bytes = b""


NOTHING_KEPT = Keeping()


def masked_bytes(plan: RoundPlan) -> int:
    """Largest upload of a silo in a round, in bytes: masked words, and shares of what is compared.

    LocalError for a job whose sums are impossible.
    """
    frame = plan.frame("none", NO_DIGEST, NO_DIGEST)
    return message_bytes(specify(frame, plan.job.cohort(plan.round), 0))


def open_sum(
    store: JobStore,
    parts: Sequence[Part],
    spec: RoundSpec,
    opening: Open,
    digests: Mapping[str, bytes],
    keep: Keeping = NOTHING_KEPT,
) -> bytes:
    """Add up the survivors' words, take the masks off, write what is left.

    ``parts`` are those of the first groups; the others are rows for one silo each. ``digests``, by
    silo, are those of the uploads. Words that are kept, and those of rows in which somebody is
    mixed, are durable before the file, which has only their digests. Returns the SHA-256 of the
    durable file. LocalError for an upload that the disk changed, RefusedError (SUM) where canaries
    do not come out, OSError where the disk fails: then there is no file of the sum, and the next
    try writes the words again.
    """
    survivors = opening.survivors
    accumulator = _added_up(store, spec, survivors, digests)
    # Reversed, so that ``pop`` takes them in order and frees each once it is folded.
    sums = list(reversed(accumulator.open(opening.terms, survivors)[: len(parts)]))

    # The words go first: where there is a file of the sum, all that its header names is there.
    words = _write_words(store, spec, opening, keep, accumulator)
    # Its words are as large as the sums themselves.
    del accumulator

    tensors: dict[str, Tensor] = {}
    for part, own in zip(parts, spec.groups[: len(parts)], strict=True):
        # One at a time: a fold of all parts together would hold the sum twice in memory.
        opened = sums.pop()
        if part.name in words or own.reader != COORDINATOR_READS:
            continue
        for name, tensor in folded(part, own, opened).items():
            tensors[f"{part.name}/{name}"] = tensor
    if spec.compared is not None:
        tensors[f"{spec.compared.name}/{GRAM}"] = _products(spec.compared, opening)

    # The fold reads from the header whose sum this is, and which files of words belong to it.
    header = {SURVIVORS: json.dumps(list(survivors)), WORDS: json.dumps(words, sort_keys=True)}
    store.write(opened_sum(spec.round), tensors, header)
    with store.sum_file(spec.round).open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _added_up(
    store: JobStore, spec: RoundSpec, survivors: Sequence[str], digests: Mapping[str, bytes]
) -> Accumulator:
    """The sum of the survivors' masked words, each hashed while it is added."""
    # In the fixed order of the survivors, and hashed again: a disk may have changed what was
    # checked when it arrived.
    accumulator = Accumulator(spec)
    with ThreadPoolExecutor(1) as hasher:
        for silo in survivors:
            path = store.masked(spec.round, silo)
            data = np.memmap(path, np.uint8, "r").data
            hashing = hasher.submit(hashlib.sha256, data)
            accumulator.add(_pieces(data, spec))
            if hashing.result().digest() != digests[silo]:
                raise LocalError(f"{path}: is not what its silo uploaded: the disk changed it")
    return accumulator


def _write_words(
    store: JobStore, spec: RoundSpec, opening: Open, keep: Keeping, accumulator: Accumulator
) -> dict[str, str]:
    """Write the words that silos get; their SHA-256 by the name of the group, in hex."""
    written: dict[str, str] = {}
    for index, own in enumerate(spec.groups):
        # A row in which nobody is mixed would be a file that its reader cannot use.
        mixes = is_row(own) and any(own.counts)
        if own.name not in keep.parts and not mixes:
            continue
        # Each group has its own tag, which goes down with its words.
        tag = tag_of(opening.tags, index, len(spec.groups))
        claim = Claim(spec.signed_bytes(), keep.signature, opening.survivors, tag)
        numbers = (words for group, words in accumulator.numbers() if group == index)
        name = summed_words(spec.round, own.name)
        store.write_aside(name, open_sum_file(claim, numbers))
        written[own.name] = kept_sum(own.name, store.path(name), own.nbytes).sha256.hex()
    return written


def _pieces(data: memoryview, spec: RoundSpec) -> Iterator[memoryview]:
    """Masked words in the chunks in which they were made; bytes beyond them come last."""
    at = 0
    for chunk in chunks(spec):
        stop = at + chunk.words * (spec.groups[chunk.group].ring // 8)
        yield data[at:stop]
        at = stop
    # Only where vectors are compared do sealed shares follow the words.
    if not spec.compared and at < len(data):
        yield data[at:]


def _products(compared: Compared, opening: Open) -> Tensor:
    """The inner products [groups, n, n] of the survivors, float64, in their order."""
    products = np.frombuffer(opening.products, "<i8").astype(np.int64).reshape(-1, compared.groups)
    return torch.from_numpy(
        squares(compared, dequantise(compared, products), len(opening.survivors))
    )


class OpenedSums:
    """The exchanges of a blind job, whose sums were opened before the fold.

    It reads the files that ``open_sum`` wrote.
    """

    def __init__(self, store: JobStore, round_: Callable[[], int], bounds: Bounds) -> None:
        """``round_``: the one that is folded."""
        self._store = store
        self._round = round_
        self._bounds = bounds

    def contribute(self, part: Part, contribution: Contribution) -> dict[str, Tensor]:
        """Never called: silos mask their contributions themselves."""
        raise LocalError(f"part {part.name!r} is uploaded blind; this is a bug in Staddle")

    def collect(self, part: Part, members: Sequence[str], read: Read) -> dict[str, Tensor]:
        """A part's fold over exactly these members.

        LocalError for another set, and for words that the disk changed. A Sum, or a Gram by shares,
        lies in the file or in the words next to it; a sum that silos alone read is empty.
        """
        # A rotation keeps inner products, so rotated vectors are compared like any others.
        shared = isinstance(part.exchange, Gram) and part.exchange.shared
        if not shared and not isinstance(part.exchange, Sum):
            return PLAIN.collect(part, members, read)
        path, prefix = self._store.sum_file(self._round()), f"{part.name}/"
        tensor_file.check(path)
        with safe_open(path, framework="pt") as file:
            header = file.metadata()
            survivors, words = json.loads(header[SURVIVORS]), json.loads(header[WORDS])
            # Nobody can take a silo out of an open sum: over other members it says nothing.
            if set(survivors) != set(members):
                raise LocalError(f"{path}: is the sum over {survivors}, not over {list(members)}")
            stored = list(file.keys())
            names = [name for name in stored if name.startswith(prefix)]
            found = {name.removeprefix(prefix): file.get_tensor(name) for name in names}

        if part.name in words:
            return self._of_words(part, words[part.name])
        if shared:
            # Products are in the order of the survivors, the fold needs that of the members.
            order = torch.tensor([survivors.index(silo) for silo in members])
            found[GRAM] = found[GRAM][:, order[:, None], order]
        return found

    def _of_words(self, part: Part, sha256: str) -> dict[str, Tensor]:
        """The fold of a part whose sum lies in words, which are mapped and hashed meanwhile."""
        # A sum for silos alone is padded: the coordinator has nothing to fold.
        own = group(part, self._bounds)
        if own.reader != COORDINATOR_READS:
            return {}
        name = summed_words(self._round(), part.name)
        path = self._store.path(name)
        kept = kept_sum(part.name, path, own.nbytes)
        spec = parse_canonical(kept.claim.document, RoundSpec, str(path))
        words = np.memmap(path, WORD[own.ring], "r", shape=(own.body,))

        # The digest comes from the sum's file, which was checked: the words carry none of their own
        # that a disk could not change together with them.
        with ThreadPoolExecutor(1) as hasher:
            hashing = hasher.submit(lambda: hashlib.sha256(words.data).hexdigest())
            index = next(index for index, each in enumerate(spec.groups) if each.name == own.name)
            made = folded(
                part,
                spec.groups[index],
                opened_group(spec, index, kept.claim.survivors, [(0, words)]),
            )
            if hashing.result() != sha256:
                raise LocalError(
                    f"{path}: its words are not those of the open sum, the disk changed them"
                )
        self._store.found_sound(name)
        return made

    def mix(self, part: Part, recipient: str, weights: Mapping[str, float], read: Read) -> None:
        """Mix nothing: only its recipient can open a row (mix_rows.py)."""

    def mix_rows(
        self, part: Part, rows: Mapping[str, Mapping[str, float]], read: Read
    ) -> dict[str, None]:
        """Mix nothing either."""
        return dict.fromkeys(rows)
