"""A part of a Mix or a Gram as a message of its own: padded words (security/blind/padded_mix.py),
or rotated vectors.

Both are hidden from the coordinator by a key that it lacks; whoever has that key and these bytes
has the values.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...algorithms.exchange.parts import DTYPES, Part, all_finite, upload_items
from ...errors import LocalError
from ...proto.frames import ChunkFrame
from ...proto.stream import Digests, chunks, recut
from ...proto.wire import to_wire
from ...security.arithmetic.fixedpoint import check_values
from ...security.blind.mix_context import MixContext, Version
from ...security.blind.padded_mix import hidden_pieces, tagger_of
from ...security.blind.rotated_sketch import hidden_each
from ...security.blind.rotation import Use
from ...security.ledger.records import HiddenBinding
from ...security.policy.release import GRAM_READER, MIX_READER, PADDED, ROTATED
from ..parts.releases import padded_releases, rotated_releases
from ..parts.tensors import flat, vectors_of
from .messages import Outgoing


@dataclass(frozen=True)
class Padding:
    """What hides a part of a Mix: line and version, a fresh seed, and the key that the job's silos
    share.
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
    reals = flat(values)
    check_values(padding.line.group, reals)
    ctx = padding.version.context(padding.line)
    tag = b""

    def pieces() -> Iterator[ChunkFrame]:
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
    """What a padded upload was whose chunks were made to the last."""
    return Sent(digests.tensors[0], outgoing.tags())


def sent_of(part: Part, values: Sequence[Tensor], padding: Padding) -> Sent:
    """What the padded upload of these values is, without sending it."""
    outgoing = padded(part, values, padding)
    return sent(outgoing, outgoing.digests())


@dataclass(frozen=True)
class Rotating:
    """What hides a part of a Gram: its use and the key that the job's silos share.

    ``context`` is of the use.
    """

    use: Use
    context: bytes
    key: bytes = field(repr=False)


def rotated(part: Part, values: Sequence[Tensor], rotating: Rotating) -> Outgoing:
    """The vectors as they are compared: each row, or its sketch, under a rotation of its own, in
    the wire's dtype.
    """
    (item,), (value,) = upload_items((part,)), values
    vectors, size = vectors_of(part, value), part.sketch
    keys = [replace(rotating.use, row=row).key(rotating.key) for row in range(len(vectors))]
    given = (
        torch.from_numpy(hidden_each(vectors, size, keys))
        .to(DTYPES[item.spec.dtype])
        .reshape(item.spec.shape)
    )
    if not all_finite(given):
        raise LocalError(
            f"part {part.name!r}: a vector is too long for {item.spec.dtype}; training has diverged"
        )
    return Outgoing(
        form=ROTATED,
        readers=(GRAM_READER,),
        releases=rotated_releases(part),
        sizes=(item.spec.nbytes,),
        headers=tuple(to_wire((item,))),
        chunks=lambda: chunks([given]),
        hashes=lambda _: (),
        hidden=HiddenBinding(ctx=rotating.context.hex(), number=0),
        part=part.name,
    )
