"""``Mix`` and ``Gram`` as blind silos and their coordinator compute them, without pads.

=========  ============================================  ===========================================
exchange   computed                                      off from the one in the clear, before it is
                                                         rounded to its dtype
=========  ============================================  ===========================================
``Mix``    (Σ a_j q(x_j)) 2^-(32+e) by padded_mix.py,    2^-(e+1) and what float64 loses:
           of those rows that mix_row.py allows          ``row_deviation``
``Gram``   ⟨Qv_i, Qv_j⟩, Qv by rotation.py in float64,   2^-23 ‖v_i‖ ‖v_j‖ and what float64 loses in
           then rounded to its dtype, float32            rotating: ``gram_deviation``
           ⟨q(v_i), q(v_j)⟩ 2^-2e by shared_gram.py,     ``shared_gram.deviation``
           where silos deal shares of their vectors
           the same of sketches, by rotated_sketch.py    √((1 + c²) / k) for a cosine c, which no
                                                         two maps have alike
=========  ============================================  ===========================================

Pads cancel, so a row has the bits of a blind federation. A Gram has them under the same group key
alone: under another one the rounded vectors differ, and with them weights that a method makes of
their products.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ...algorithms.exchange.parts import (
    DTYPES,
    MIX_BITS,
    Part,
    Read,
    TensorSpec,
    elements_of,
    integer_weights,
)
from ...algorithms.exchange.plain import PLAIN
from ..arithmetic.fixedpoint import Group, Reals, check_values, dequantise, quantise
from ..secagg.shared_gram import compared_of, gram
from ..secagg.spec import Terms
from .mix_context import Version, mix_group
from .mix_row import RecipientRow, RowMemory, Share, fault
from .rotated_sketch import hidden
from .rotation import Use, check_kind, check_vectors

NO_LINE = "0" * 64  # nothing is sent, so nothing is bound to one
# by which two numbers may differ, as a part of the larger, that were rounded apart
FLOAT32 = 2.0**-23


class MixRows:
    """The rows of a job's Mix parts: which versions there are, and who had a row of which."""

    def __init__(self, clip_exponent: int, terms: Terms) -> None:
        self._clip_exponent, self._terms = clip_exponent, terms
        self._rounds: dict[str, int] = {}  # by part: those in which it was given
        self._numbers: dict[tuple[str, str], int] = {}  # (part, silo): of its newest version
        self._memories: dict[tuple[str, str], RowMemory] = {}  # (part, recipient)

    def gave(self, part: Part, members: Sequence[str], read: Read) -> None:
        """Note new versions of members; LocalError for values beyond the bounds.

        Rows are made of each member's newest version.
        """
        number = self._rounds[part.name] = self._rounds.get(part.name, -1) + 1
        for silo in members:
            check_values(
                self._group(part), tuple(_values(spec, silo, read) for spec in part.tensors)
            )
            # Version numbers grow with each upload, as in a federation: ``fault`` judges rows by
            # them.
            self._numbers[part.name, silo] = number

    def row(
        self, part: Part, recipient: str, weights: Mapping[str, float], read: Read
    ) -> dict[str, Tensor] | None:
        """The recipient's row; None if the rules forbid it.

        The same versions and weights give the same row again.
        """
        whole = dict(zip(weights, integer_weights(list(weights.values())), strict=True))
        own = whole.pop(recipient, 0)
        others = sorted(silo for silo, weight in whole.items() if weight)
        if not others:
            return None
        shares = tuple(
            Share(version=self._version(part, silo), weight=whole[silo]) for silo in others
        )
        row = RecipientRow(line=NO_LINE, recipient=recipient, own_weight=own, shares=shares)

        # The very last row may come again: it tells its recipient nothing that it has not.
        memory = self._memories.get((part.name, recipient), RowMemory())
        if row.digest() != memory.last and fault(recipient, own, shares, memory, self._terms):
            return None
        self._memories[part.name, recipient] = memory.opened(row, self._terms)

        # A blind recipient adds its own part itself, and its integers are the same.
        summed = row.sent()
        if own:
            summed[recipient] = own
        return {spec.name: _row(self._group(part), spec, summed, read) for spec in part.tensors}

    def _version(self, part: Part, silo: str) -> Version:
        number = self._numbers[part.name, silo]
        return Version(silo=silo, round=number, attempt=0, number=number)

    def _group(self, part: Part) -> Group:
        return mix_group(part.name, elements_of(part.tensors), self._clip_exponent)


def compared(
    part: Part, members: Sequence[str], read: Read, group_key: bytes, job: str, round_: int
) -> Tensor:
    """The Gram [groups, n, n] of a part's vectors as they leave.

    ``job`` is the digest of the job's document, hex.
    """
    (spec,) = part.wire
    check_kind(part.name, part.kind)
    vectors = [read(silo, spec.name).double().numpy() for silo in members]  # n times [groups, d]
    for own in vectors:
        check_vectors(part.name, own)
    turned = np.empty((len(members), *spec.shape))
    for row in range(spec.shape[0]):
        # Equal to ``JobPlan.use``, so that the rotations are those of a federation.
        use = Use(epoch=0, job=job, round=round_, attempt=0, group=part.name, row=row)
        turned[:, row] = hidden(
            np.stack([own[row] for own in vectors]), part.sketch, use.key(group_key)
        )
    # Rounded before they are multiplied: the coordinator gets them in the dtype of the wire.
    given = dict(zip(members, torch.from_numpy(turned).to(DTYPES[spec.dtype]), strict=True))
    return PLAIN.collect(part, members, lambda silo, _: given[silo])["gram"]


def compared_by_shares(
    part: Part, members: Sequence[str], read: Read, clip_exponent: int
) -> Tensor:
    """The Gram [groups, n, n] of a part's vectors as silos open it together from their shares.

    LocalError for a part whose Gram discloses it, or a vector longer than 2^clip_exponent.
    """
    (spec,) = part.tensors
    check_kind(part.name, part.kind)
    vectors = []
    for silo in members:
        value = read(silo, spec.name).double()
        vectors.append(value.reshape(len(value), -1).numpy())
        check_vectors(part.name, vectors[-1])
    return torch.from_numpy(gram(compared_of(part, clip_exponent), vectors))


def row_deviation(own: Group) -> float:
    """Bound on how far a row's element is from Σ a_j x_j / 2^32, for values within the clip.

    The weights add up to 2^32, so rounding of the values counts once, whatever the number of silos.
    """
    return 2.0 ** -(own.scale_exponent + 1) + 2.0 ** (own.clip_exponent - 53)


def gram_deviation(width: int) -> float:
    """Bound on the relative error of an inner product of float32 vectors [width].

    Relative to the product of their lengths. The first term is for rounding to float32, the second
    for what float64 loses in rotating.
    """
    return FLOAT32 * (1 + FLOAT32) + width * 2.0**-46


def _row(own: Group, spec: TensorSpec, weights: Mapping[str, int], read: Read) -> Tensor:
    total, words = np.zeros(spec.elements, "<u8"), np.empty(spec.elements, "<u8")
    for silo, weight in weights.items():
        quantise(own, _values(spec, silo, read), 1.0, words)
        # Words wrap mod 2^64 like those that cross; the signed sum stays in range (mix_context.py).
        total += words * np.uint64(weight)
    mixed = torch.from_numpy(dequantise(total, own.ring, MIX_BITS + own.scale_exponent))
    return mixed.reshape(spec.shape).to(DTYPES[spec.dtype])


def _values(spec: TensorSpec, silo: str, read: Read) -> Reals:
    values: Reals = read(silo, spec.name).double().reshape(-1).numpy()
    return values
