"""A part of a Mix or a Gram as a message of its own.

It leaves as padded words (security/blind/padded_mix.py) or as rotated vectors
(security/blind/rotation.py). Both are hidden from the coordinator by a key that it lacks; whoever
has that key and these bytes has the values.
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
    """The line, version, fresh seed and key of the job's silos that hide a part of a Mix."""

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

    # Made anew each time, so that an upload whose connection broke has the same bytes again.
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
