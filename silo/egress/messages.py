"""One upload of the gate's, whatever its form: what policy and ledger read of it, and its bytes.

plain
    The tensors as the job's schema has them, one after another. The ledger has the hash of each,
    and of all.
masked
    All groups of a secure sum with their canaries, words of the ring under masks. Policy and ledger
    read them under the tensors' names; all rows of a part are one. The ledger has the hash of all:
    a hash of values could be guessed.
padded
    One part of a Mix, words of 64 bits under a stream of its own, read under the tensors' names
    (security/blind/padded_mix.py). The ledger has the hash of all.
rotated
    One part of a Gram as the job's schema has it, each row under a secret rotation
    (security/blind/rotation.py). The ledger has the hash of all.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from torch import Tensor

from ...algorithms.exchange.parts import DTYPES, WEIGHT, Gram, Item, Part, all_finite, upload_items
from ...errors import LocalError
from ...proto import tensor_pb2 as tensor
from ...proto.frames import ChunkFrame
from ...proto.stream import Digester, Digests, chunks, recut
from ...proto.wire import to_wire
from ...security.arithmetic.fixedpoint import Words, check_values
from ...security.arithmetic.masks import Term
from ...security.blind.directed_mix import is_row
from ...security.blind.mix_context import MixContext, Version
from ...security.blind.padded_mix import hidden_pieces, tagger_of
from ...security.blind.rotated_sketch import hidden_each
from ...security.blind.rotation import Use
from ...security.blind.silo_pads import silo_pads
from ...security.blind.sum import given
from ...security.ledger.records import HiddenBinding, Secagg, TensorDigest
from ...security.policy.release import GRAM_READER, MIX_READER, PADDED, ROTATED, Release
from ...security.secagg.gram_pieces import GramKeys, deal_sealed, message_bytes
from ...security.secagg.linear_tags import Tagger
from ...security.secagg.masked_sum import GroupValues, check_group_values, masked_chunks
from ...security.secagg.shared_gram import quantise
from ...security.secagg.silo_events import Streamed
from ...security.secagg.spec import RoundSpec
from ..parts.contributions import Contributions
from ..parts.declared import Declared
from ..parts.releases import (
    masked_releases,
    padded_releases,
    readers_of_each,
    release_of,
    rotated_releases,
    shared_releases,
)
from ..parts.tensors import exactly, flat, vectors_of


@dataclass(frozen=True)
class Outgoing:
    """An upload that is about to leave.

    ``chunks`` may be called again.
    """

    form: str
    readers: tuple[str, ...]  # all who can open some of it
    releases: tuple[Release, ...]
    sizes: tuple[int, ...]  # of what is hashed, one after another
    headers: tuple[tensor.TensorHeader, ...]  # of the manifest
    chunks: Callable[[], Iterator[ChunkFrame]]  # the same each time
    hashes: Callable[[Digests], tuple[TensorDigest, ...]]  # for the ledger
    secagg: Secagg | None = None
    hidden: HiddenBinding | None = None
    part: str = ""  # of what leaves part by part, padded or rotated
    tags: Callable[[], bytes] = bytes  # linear ones, padded, of chunks that were made to the last
    kept: bytes = field(default=b"", repr=False)  # what this silo keeps of the shares that it deals

    @property
    def size(self) -> int:
        """Bytes of the whole message."""
        return sum(self.sizes)

    def digests(self) -> Digests:
        """The digests of the bytes, made without sending them."""
        digester = Digester(self.sizes)
        for chunk in self.chunks():
            digester.update(chunk.content)
        return digester.digests()

    @property
    def context(self) -> bytes:
        """The ctx of the attempt at a secure sum, or of a hidden message; empty for a plain one."""
        bound = self.secagg or self.hidden
        return bytes.fromhex(bound.ctx) if bound else b""

    @property
    def attempt(self) -> int:
        """The number of the attempt at a secure sum; 0 for any other message."""
        return self.secagg.attempt if self.secagg else 0


@dataclass(frozen=True)
class UploadForm:
    """One form in which a round's contributions leave.

    ``parts`` are those that leave in the message; None for all of the round's. ``mismatch`` says
    how what hides them differs from the signed document.
    """

    make: Callable[[Sequence[Item], Sequence[Tensor]], Outgoing]
    parts: Sequence[Part] | None = None
    mismatch: str = ""


def plain(items: Sequence[Item], values: Sequence[Tensor], readers: tuple[str, ...]) -> Outgoing:
    """The upload of the values as they are, for ``readers``.

    The ledger has a hash of each tensor.
    """

    def hashes(digests: Digests) -> tuple[TensorDigest, ...]:
        named = zip(items, digests.tensors, strict=True)
        return tuple(
            TensorDigest(part=item.part, name=item.spec.name, sha256=digest.hex())
            for item, digest in named
        )

    return Outgoing(
        form="plain",
        readers=readers,
        releases=tuple(map(release_of, items)),
        sizes=tuple(item.spec.nbytes for item in items),
        headers=tuple(to_wire(items)),
        chunks=lambda: chunks(values),
        hashes=hashes,
    )


@dataclass(frozen=True)
class Masking:
    """The inputs by which a secure sum masks the values of a round.

    ``terms`` are the masks of this silo, ``members`` those of U2. ``records`` is how many training
    records this silo has; None in a private job. ``key`` is what the silos of a keyed job share.
    """

    spec: RoundSpec
    silo: str
    terms: tuple[Term, ...]
    members: tuple[str, ...]
    records: int | None
    key: bytes = field(default=b"", repr=False)
    # by group that the coordinator is not to read
    pads: Mapping[int, Term] = field(default_factory=dict)
    # of vectors that are compared by shares
    hiding: GramKeys | None = field(default=None, repr=False)

    @property
    def readers(self) -> tuple[str, ...]:
        """The silos that get rows of the sum, in the order of their groups."""
        return tuple(dict.fromkeys(group.reader for group in self.spec.groups if is_row(group)))


class _Tagging:
    """The linear tags of a masked upload, made again each time that its chunks are made."""

    def __init__(self, masking: Masking) -> None:
        self._masking = masking
        self._padded = b""

    def chunks(self, contributions: Sequence[GroupValues]) -> Iterator[Words]:
        """The masked words; once the last is taken, ``tags`` has their tags."""
        masking, spec = self._masking, self._masking.spec
        if not spec.tagged:
            yield from masked_chunks(
                spec, masking.silo, contributions, masking.terms, pads=masking.pads
            )
            return
        if not masking.key:
            raise LocalError(
                "a tagged sum without the key that its silos share; this is a bug in Staddle"
            )

        # What silos alone read is hidden from the coordinator by pads that all of them can remove,
        # and a row by such as its reader alone can.
        ctx = spec.context()
        tagger = Tagger(masking.key, ctx, len(spec.groups))
        pads = {**silo_pads(spec, masking.silo, masking.key), **masking.pads}
        yield from masked_chunks(spec, masking.silo, contributions, masking.terms, tagger, pads)
        own = {index: pad.key for index, pad in masking.pads.items()}
        # After the last chunk, since tags cover all words.
        self._padded = tagger.padded(masking.key, ctx, masking.silo, own, masking.terms)

    def tags(self) -> bytes:
        """The tags of the chunks, once all of them were made."""
        if self._masking.spec.tagged and not self._padded:
            raise LocalError(
                "tags of an upload that was not made to its end; this is a bug in Staddle"
            )
        return self._padded


def masked(
    parts: Sequence[Part], items: Sequence[Item], values: Sequence[Tensor], masking: Masking
) -> Outgoing:
    """The values as a secure sum takes them.

    LocalError for one beyond the bounds that the job declares.
    """
    # Public weights are the declared counts of records: a method that weighs by something else
    # would be averaged wrongly, and nobody would see it.
    spec = masking.spec
    by_name = {
        (item.part, item.spec.name): value for item, value in zip(items, values, strict=True)
    }
    contributions: list[GroupValues] = []
    for part, own in zip(parts, spec.groups, strict=True):  # of a row a part comes again
        tensors = {each.name: by_name[part.name, each.name] for each in part.wire}
        # Rows have their own weights, and a private job's method only knows a noisy count.
        if own.weights == "public" and not is_row(own) and masking.records is not None:
            _check_declared(part.name, float(tensors[WEIGHT]), masking.records)
        contributions.append(given(part, own, tensors))

    # A value beyond the bounds would wrap around in the ring, and spoil the sum of all silos.
    clipped = check_group_values(spec, contributions)
    tagging = _Tagging(masking)
    sealed, kept, releases = _dealt(items, values, masking)

    # Made again each time, so that an upload whose connection broke has the same bytes again.
    def pieces() -> Iterator[ChunkFrame]:
        words = (words.data.cast("B") for words in tagging.chunks(contributions))
        return recut(chain(words, map(memoryview, sealed)))

    secagg = Secagg(
        ctx=spec.context().hex(),
        attempt=spec.attempt,
        members=masking.members,
        threshold=spec.threshold,
        colluders=spec.colluders,
        clipped=sum(clipped),
    )
    releases = (*masked_releases(parts, spec.groups), *releases)
    return Outgoing(
        form="masked",
        readers=readers_of_each(releases),
        releases=releases,
        sizes=(message_bytes(spec),),
        headers=(),
        chunks=pieces,
        hashes=lambda _: (),
        secagg=secagg,
        tags=tagging.tags,
        kept=kept,
    )


def _dealt(
    items: Sequence[Item], values: Sequence[Tensor], masking: Masking
) -> tuple[list[bytes], bytes, tuple[Release, ...]]:
    """The shares of the part that is compared by shares.

    Returns those sealed to the other silos, our own, and the releases for policy and ledger.
    """
    # Dealt once, before the chunks are made: a lost connection resumes with the same shares.
    spec = masking.spec
    if spec.compared is None:
        return [], b"", ()
    if masking.hiding is None:
        raise LocalError(
            f"part {spec.compared.name!r} without keys to seal its shares; this is a bug in Staddle"
        )
    ((item, value),) = (
        pair for pair in zip(items, values, strict=True) if pair[0].part == spec.compared.name
    )
    part = Part(item.part, item.kind, Gram(shared=True), (item.spec,))
    vectors = vectors_of(part, value)
    sealed, kept = deal_sealed(spec, masking.silo, quantise(spec.compared, vectors), masking.hiding)
    return sealed, kept, shared_releases(part, len(spec.cohort))


def _check_declared(part: str, weight: float, records: int) -> None:
    """LocalError unless the method weighs the part by this silo's number of training records.

    A sum by public weights takes the declared counts of records in place of the method's own
    weights. A count may be declared rounded, so it need not be the very number. The method of a
    private job knows a noisy one.
    """
    if weight != records:
        raise LocalError(
            f"part {part!r}: the method weights it by {weight:g}, not by the {records} training"
            " records of this silo, so that declared counts cannot stand for it; have the job"
            ' signed with security.weights = "private"'
        )


def streamed(outgoing: Outgoing, digests: Digests) -> Streamed:
    """The header's account of a masked upload whose chunks were made to the last."""
    return Streamed(outgoing.size, digests.tensors[0], outgoing.tags(), outgoing.kept)


def streamed_of(
    declared: Declared, round_: int, contributions: Contributions, masking: Masking
) -> Streamed:
    """The header's account of the masked upload of these values, which is not sent.

    For an upload whose receipt was lost with the connection.
    """
    items = declared.items(round_)
    parts, _ = declared.groups(round_, masking.readers)
    outgoing = masked(parts, items, exactly(items, contributions.tensors), masking)
    return streamed(outgoing, outgoing.digests())


# One part of a Mix or a Gram on its own. Both are hidden from the coordinator by a key that it
# lacks; whoever has that key and these bytes has the values.


@dataclass(frozen=True)
class Padding:
    """The line, version, fresh seed and key of the job's silos that hide a part of a Mix.

    The seed is for this version only: a second vector would make a two-time pad.
    """

    line: MixContext
    version: Version
    seed: bytes = field(repr=False)
    key: bytes = field(repr=False)


@dataclass(frozen=True)
class Sent:
    """SHA-256 of a padded upload's bytes, and its padded tag: what its silo signs."""

    sha256: bytes
    tag: bytes


def padded(part: Part, values: Sequence[Tensor], padding: Padding) -> Outgoing:
    """One part of a Mix as it leaves; ``values`` are those of the part's tensors.

    LocalError for one beyond the bounds that the job declares.
    """
    # A value beyond the bounds would wrap around in the ring, and spoil every row that it is in.
    reals = flat(values)
    check_values(padding.line.group, reals)
    ctx = padding.version.context(padding.line)
    tag = b""

    # Made again each time, so that an upload whose connection broke has the same bytes again.
    def pieces() -> Iterator[ChunkFrame]:
        # Set after the last chunk.
        nonlocal tag
        tagger = tagger_of(padding.line, padding.key)
        words = hidden_pieces(padding.line, padding.version, padding.seed, reals, tagger)
        yield from recut(each.data.cast("B") for each in words)
        tag = tagger.padded(padding.key, ctx, padding.version.silo)

    return Outgoing(
        form=PADDED,
        readers=(MIX_READER,),
        releases=padded_releases(part),
        sizes=(padding.line.nbytes,),
        headers=(),
        chunks=pieces,
        hashes=lambda _: (),
        hidden=HiddenBinding(ctx=ctx.hex(), number=padding.version.number),
        part=part.name,
        tags=lambda: tag,
    )


def sent(outgoing: Outgoing, digests: Digests) -> Sent:
    """The hash and the tag of a padded upload whose chunks were made to the last."""
    return Sent(digests.tensors[0], outgoing.tags())


def sent_of(part: Part, values: Sequence[Tensor], padding: Padding) -> Sent:
    """The hash and the tag of the padded upload of these values, which is not sent.

    For an upload whose receipt was lost with the connection.
    """
    outgoing = padded(part, values, padding)
    return sent(outgoing, outgoing.digests())


@dataclass(frozen=True)
class Rotating:
    """The use and the key of the job's silos that hide a part of a Gram.

    ``context`` binds the upload to the use.
    """

    use: Use
    context: bytes
    key: bytes = field(repr=False)


def rotated(part: Part, values: Sequence[Tensor], rotating: Rotating) -> Outgoing:
    """The vectors as they are compared, in the wire's dtype.

    Each row, or its sketch, is under a rotation of its own. LocalError for a vector too long for
    the dtype.
    """
    # One rotation per row: inner products of different rows are nobody's to see.
    (item,), (value,) = upload_items((part,)), values
    vectors, size = vectors_of(part, value), part.sketch
    keys = [replace(rotating.use, row=row).key(rotating.key) for row in range(len(vectors))]
    hidden = (
        torch.from_numpy(hidden_each(vectors, size, keys))
        .to(DTYPES[item.spec.dtype])
        .reshape(item.spec.shape)
    )

    # The gate checked the vectors before: the cast to the wire's dtype can still overflow.
    if not all_finite(hidden):
        raise LocalError(
            f"part {part.name!r}: a vector is too long for {item.spec.dtype}; training has diverged"
        )
    return Outgoing(
        form=ROTATED,
        readers=(GRAM_READER,),
        releases=rotated_releases(part),
        sizes=(item.spec.nbytes,),
        headers=tuple(to_wire((item,))),
        chunks=lambda: chunks([hidden]),
        hashes=lambda _: (),
        hidden=HiddenBinding(ctx=rotating.context.hex(), number=0),
        part=part.name,
    )
