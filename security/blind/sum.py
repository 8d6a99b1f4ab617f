"""The ``Sum`` exchange by a secure sum: a part is one group, its fold that group's opened sum.

=========  =======================================  ========================  ======================
form       the group's elements                     weights                   ring
=========  =======================================  ========================  ======================
``mean``   all tensors, one after another           public (declared          32; 64 where private
                                                    counts), or private, one  weights spread more
                                                                              than 16-fold
``ratio``  row by row, the tensors side by side     private, one per row      the same
``total``  all tensors, one after another           equal                     64: counts stay whole
=========  =======================================  ========================  ======================

``Quantised`` is what blind silos and their coordinator compute, without masks: these cancel
exactly, so a simulation with it gives the bits of a blind federation. ``Mix`` and ``Gram`` are in
mix_and_gram.py.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ...algorithms.exchange.parts import (
    DTYPES,
    WEIGHT,
    Contribution,
    Gram,
    Kind,
    Mix,
    Part,
    Read,
    Sum,
    TensorSpec,
    elements_of,
    laid_out,
)
from ...algorithms.exchange.plain import PLAIN
from ...errors import LocalError
from ..arithmetic.fixedpoint import (
    COORDINATOR_READS,
    SILOS_READ,
    WIDEST_PRIVATE,
    Floats,
    Group,
    Ring,
    Words,
    error_bound,
    weight_exponent,
)
from ..secagg.masked_sum import (
    Accumulator,
    GroupValues,
    OpenedGroup,
    check_group_values,
    masked_chunks,
)
from ..secagg.spec import Frame, RoundSpec, Terms, specify
from .mix_and_gram import MixRows, compared, compared_by_shares

COUNT_EXPONENT = 40  # a total of counts: each silo's are below 2^40
CHUNK_BYTES = 1 << 20
SOME_KEY = bytes(32)  # of a simulation: nothing is hidden by it


@dataclass(frozen=True)
class Bounds:
    """A job's declared bounds: magnitudes up to 2^clip_exponent, private weights least to most.

    Weights of a ``ratio`` are never public: they would show who has which class. ``for_silos`` are
    the parts whose sums silos alone read.
    """

    clip_exponent: int = 3
    weights: Literal["public", "private"] = "private"
    least: int = 1
    most: int = 1
    for_silos: frozenset[str] = frozenset()


def group(part: Part, bounds: Bounds) -> Group:
    """The group of a part; LocalError for a part that is no Sum.

    It has no scale yet, which depends on the cohort. Silos and coordinator make the same group
    from the job.
    """
    own = _group(part, bounds)
    return own.model_copy(update={"reader": SILOS_READ}) if part.name in bounds.for_silos else own


def _group(part: Part, bounds: Bounds) -> Group:
    match part.exchange:
        # Counts must stay whole, and ring 64 has room for them.
        case Sum("total"):
            counts = all(spec.dtype == "int64" for spec in part.tensors)
            clip = COUNT_EXPONENT if counts else bounds.clip_exponent
            return Group(
                name=part.name,
                elements=elements_of(part.tensors),
                ring=64,
                clip_exponent=clip,
                weights="equal",
            )
        case Sum("mean") if bounds.weights == "public":
            return Group(
                name=part.name,
                elements=elements_of(part.tensors),
                clip_exponent=bounds.clip_exponent,
                weights="public",
            )
        case Sum(form, most):
            # a presence is 0 or 1, whatever counts the job declares
            own = most if most <= 1 else bounds.most
            least = bounds.least if own > 1 else 1
            # A silo of little weight loses bits, of which ring 32 has none to spare (security
            # rule 18).
            ring: Ring = 64 if own > WIDEST_PRIVATE * least else 32
            return Group(
                name=part.name,
                elements=elements_of(part.tensors),
                rows=part.tensors[0].shape[0] if form == "ratio" else 1,
                ring=ring,
                clip_exponent=bounds.clip_exponent,
                weights="private",
                weight_most=int(own),
                weight_least=int(least),
            )
        case _:
            raise LocalError(
                f"part {part.name!r} crosses by {part.exchange!r}, which is not a secure sum"
            )


def row_name(part: str, recipient: str) -> str:
    """Name of the group that is one recipient's row of a part; no part has a dot in its name."""
    return f"{part}.{recipient}"


def row_group(part: Part, bounds: Bounds, recipient: str) -> Group:
    """The group of one recipient's row.

    Its weights are set with the cohort (``spec.specify``). Values are clipped at the job's bound.
    """
    name, clip = row_name(part.name, recipient), bounds.clip_exponent
    return Group(
        name=name,
        elements=elements_of(part.tensors),
        clip_exponent=clip,
        weights="public",
        reader=recipient,
    )


def given(part: Part, own: Group, tensors: Mapping[str, Tensor]) -> GroupValues:
    """A silo's values for a part's group, from the tensors it uploads in the clear (``part.wire``).

    Its values are float tensors' own memory, row by row of a ratio alone a copy: leave the tensors
    as they are.
    """
    dtype = _floats(part)
    flat = [
        tensors[spec.name].detach().reshape(own.rows, -1).numpy().astype(dtype, copy=False)
        for spec in part.tensors
    ]
    whole = own.rows == 1 or len(flat) == 1
    values = (
        tuple(each.reshape(-1) for each in flat)
        if whole
        # The elements of a row side by side, since each row has a weight of its own.
        else np.concatenate(flat, axis=1).reshape(-1)
    )
    if own.weights != "private":
        return GroupValues(values)
    return GroupValues(values, tensors[WEIGHT].reshape(own.rows).numpy().astype(np.float64))


def folded(
    part: Part, own: Group, opened: OpenedGroup, memory: Words | None = None
) -> dict[str, Tensor]:
    """The fold of a part, as ``Plain.collect`` makes it, with the total weight for mean and ratio.

    ``memory`` of the words, in one piece, may become that of the tensors.
    """
    if own.weights == "equal":
        return _cut(part, own, opened.total, total=True)
    # A copy, since ``from_numpy`` would share memory with the opened group.
    weight = torch.from_numpy(opened.weight.copy())
    mean = opened.mean(_floats(part), memory)
    ratio = isinstance(part.exchange, Sum) and part.exchange.form == "ratio"
    return {**_cut(part, own, mean, total=False), WEIGHT: weight if ratio else weight.reshape(())}


def deviation(own: Group, spec: RoundSpec, opened: OpenedGroup, largest: float) -> float:
    """Bound on the error of a fold of magnitude up to ``largest``, before rounding to its dtype.

    A total is off by ``error_bound``; a mean by that, as a part of the total weight, and by what
    rounding did to private weights.
    """
    # Over the whole cohort: with fewer members the bound is only wider than it need be.
    members = len(spec.cohort)
    if own.weights == "equal":
        return float(error_bound(own, members))
    # A mean is divided by its weight, so the lightest row has the largest error.
    lightest = float(opened.weight[opened.weight > 0].min(initial=np.inf))
    total = float(error_bound(own, members)) * opened.unit / lightest
    if own.weights != "private":
        return total
    off = (
        float(Fraction(members, 2 ** (weight_exponent(own.ring, members) + 1)))
        * own.weight_most
        / lightest
    )
    # The divisor is rounded, too: it may be smaller by that part.
    return total + largest * off / (1 - off)


class Quantised:
    """The exchanges of one job, from its first round on, as the numbers that cross blind.

    ``Each`` in the clear.

    ``terms`` are what rows are mixed by. Without the job's own ``group_key`` and digest a Gram is
    that of another key: within ``mix_and_gram.gram_deviation``, but not the same bits.
    """

    def __init__(
        self,
        bounds: Bounds,
        counts: Mapping[str, int] | None = None,
        terms: Terms | None = None,
        group_key: bytes = SOME_KEY,
        job: str = "",
    ) -> None:
        """``counts``, by silo, are the declared ones of public weights.

        ``job`` is the digest of its document.
        """
        self._bounds = bounds
        self._counts = tuple(sorted((counts or {}).items()))
        terms = terms or Terms()
        self._rows, self._min_cohort = MixRows(bounds.clip_exponent, terms), terms.min_cohort
        self._group_key, self._job = group_key, job
        self._counted: Counter[str] = Counter()  # rounds in which each part of test counts came

    def contribute(self, part: Part, contribution: Contribution) -> dict[str, Tensor]:
        """All tensors: quantised where they are summed or mixed, sketched where compared.

        ``collect`` quantises and sketches them; here they are as they would cross in the clear.
        """
        return laid_out(part, contribution)

    def collect(self, part: Part, members: Sequence[str], read: Read) -> dict[str, Tensor]:
        """The result; ``members`` are at least two. LocalError for values beyond the bounds.

        Test counts are the last parts of each round, and so tell which round it is.
        """
        match part.exchange:
            case Sum():
                # One specification per part has the same result as one for all parts, since groups
                # do not depend on one another.
                spec, opened = self.opened(part, members, read)
                if part.kind is Kind.METRIC:
                    self._counted[part.name] += 1
                return folded(part, spec.groups[0], opened)
            case Gram(shared=True):
                return {"gram": compared_by_shares(part, members, read, self._bounds.clip_exponent)}
            case Gram():
                round_ = max(self._counted.values(), default=0)
                return {"gram": compared(part, members, read, self._group_key, self._job, round_)}
            case Mix(directed=False):
                self._rows.gave(part, members, read)
        return PLAIN.collect(part, members, read)

    def mix(
        self, part: Part, recipient: str, weights: Mapping[str, float], read: Read
    ) -> dict[str, Tensor] | None:
        """The row, if the recipient may have one.

        A directed one is over what was given in this round.
        """
        if part.exchange != Mix(directed=True):
            return self._rows.row(part, recipient, weights, read)

        # A sum over one silo would be its values.
        if len(weights) < 2:
            return None
        own = row_group(part, self._bounds, recipient)
        spec = specify(replace(self._frame(own), rows={own.name: weights}), sorted(weights), 0)
        # Counts of zeros mean that there is no row (secagg/spec.py).
        if not any(spec.groups[0].counts):
            return None
        made = folded(part, spec.groups[0], self._sum(part, spec, read))
        return {each.name: made[each.name] for each in part.tensors}

    def mix_rows(
        self, part: Part, rows: Mapping[str, Mapping[str, float]], read: Read
    ) -> dict[str, dict[str, Tensor] | None]:
        """``mix`` for each recipient."""
        return {silo: self.mix(part, silo, weights, read) for silo, weights in rows.items()}

    def opened(
        self, part: Part, members: Sequence[str], read: Read
    ) -> tuple[RoundSpec, OpenedGroup]:
        """The specification that the members would have, and the opened sum.

        Bounds are checked as in a federation.
        """
        spec = specify(self._frame(group(part, self._bounds)), members, 0)
        return spec, self._sum(part, spec, read)

    def _sum(self, part: Part, spec: RoundSpec, read: Read) -> OpenedGroup:
        """The sum of a specification's one group over its cohort: masks and pads cancel."""
        # Masks and pads cancel, so the sum is made without them; bounds are checked all the same.
        own = spec.groups[0].model_copy(update={"reader": COORDINATOR_READS})
        # ``open`` checks bounds only where the coordinator is the reader, so here it always is.
        spec = spec.model_copy(update={"groups": (own,)})
        accumulator = Accumulator(spec)
        for silo in spec.cohort:
            contribution = given(
                part, own, {each.name: read(silo, each.name) for each in part.wire}
            )
            check_group_values(spec, [contribution])
            accumulator.add(
                words.tobytes() for words in masked_chunks(spec, silo, [contribution], ())
            )
        return accumulator.open((), spec.cohort)[0]

    def _frame(self, own: Group) -> Frame:
        nothing = "0" * 64  # no mask is made, so nothing is bound to it
        return Frame(
            federation="none",
            members=nothing,
            job="none",
            job_digest=nothing,
            round=0,
            exchange="sum",
            purpose="update",
            recipient="coordinator",
            model_digest=nothing,
            schema_digest=nothing,
            groups=(own,),
            min_cohort=self._min_cohort,
            chunk_bytes=CHUNK_BYTES,
            counts=self._counts,
        )


def _floats(part: Part) -> type[np.float32 | np.float64]:
    """One dtype for all tensors of a part: integers and float64 would lose digits in float32."""
    return np.float64 if any(spec.dtype != "float32" for spec in part.tensors) else np.float32


def _cut(part: Part, own: Group, values: Floats, *, total: bool) -> dict[str, Tensor]:
    """The group's elements as the part's tensors again."""
    # Only ratios have several rows; a row of the group has one row of each tensor.
    table, at = torch.from_numpy(values).reshape(own.rows, -1), 0
    found = {}
    for spec in part.tensors:
        width = spec.elements // own.rows
        found[spec.name] = (
            table[:, at : at + width].reshape(spec.shape).to(_dtype(spec, total=total))
        )
        at += width
    return found


def _dtype(spec: TensorSpec, *, total: bool) -> torch.dtype:
    """The dtype that a fold has in the clear: a total is in float64, counts stay whole."""
    return torch.float64 if total and spec.dtype != "int64" else DTYPES[spec.dtype]
