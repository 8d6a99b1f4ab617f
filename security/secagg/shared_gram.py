"""``Gram`` by secret sharing: a coordinator with c silos learns inner products and no more.

No key is shared. Each silo i deals Shamir shares of its vector to all others, and the coordinator
gets from each silo k a share of each inner product. Over the field of security/arithmetic/field.py,
with k the number of a holder and d = max(c, 1)::

    dealt     f_i(x) = q_i + a_1 x + … + a_d x^d          a uniform vectors; k gets f_i(k)
              z_ij(x) = b_1 x + … + b_2d x^2d             b uniform numbers, for each silo j; k gets
              z_ij(k)
    revealed  m_ij(k) = ⟨f_i(k), f_j(k)⟩ + z_ij(k) + z_ji(k)          z_ii once
    opened    m_ij(0) = ⟨q_i, q_j⟩, from 2d + 1 values of a polynomial of degree 2d

c silos hold c values of f_i, which fit every q_i equally well (Shamir, "How to share a secret",
1979). The product of two shares is a share of the product on a polynomial of twice the degree
(Ben-Or, Goldwasser, Wigderson, "Completeness theorems for non-cryptographic fault-tolerant
distributed computation", 1988). That polynomial alone would tell more than its constant term; with
z it is uniform among all of degree 2d that have this term, whoever of i and j is honest. It takes
2d + 1 silos to reveal, and more of them show whether any value is wrong (Gennaro, Rabin, Rabin,
"Simplified VSS and fast-track multiparty computations", 1998, use the same two steps): ``opened``
corrects up to half as many as there are too many, and says whose they are.

What it does not hold off: a silo colluding with the coordinator may deal vectors of its choice and
so has, as by any ``Gram``, one inner product with each other silo's vector a round. If its shares
lie on no polynomial of degree d, it has up to n - 2d of them.

Fixed point: q = rint(v 2^e), e = 29 - clip_exponent, for vectors no longer than 2^clip_exponent.
Then ‖q‖ ≤ 2^29 + √w / 2 for w ≤ 2^16 numbers, and |⟨q_i, q_j⟩| < 2^59, below p / 2: nothing wraps.
``deviation`` is the bound of what rounding does.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from ...algorithms.exchange.parts import Part
from ...errors import check_local
from ...files.documents import Strict
from ..arithmetic.error_correction import wrong_points
from ..arithmetic.field import (
    NUMBER_BYTES,
    Integers,
    Source,
    add,
    from_signed,
    interpolation,
    is_field,
    powers,
    product,
    uniform,
)
from ..arithmetic.field import to_signed as signed
from ..arithmetic.fixedpoint import Reals, Words
from ..arithmetic.masks import Keystream

NORM_BITS = 29  # of the length of a quantised vector
WIDEST = 1 << 16  # numbers of one vector

Size = Annotated[int, Field(strict=True, ge=1, le=2**53 - 1)]
Exponent = Annotated[int, Field(strict=True, ge=-64, le=62)]


class Compared(Strict):
    """The comparison of a round: ``groups`` vectors of ``width`` numbers per silo.

    None is longer than 2^clip_exponent::

        {"clip_exponent":3,"groups":1,"name":"rows","width":640}
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    groups: Size
    width: Annotated[int, Field(strict=True, ge=1, le=WIDEST)]
    clip_exponent: Exponent

    @property
    def elements(self) -> int:
        """Numbers of a silo's vectors together."""
        return self.groups * self.width

    def numbers(self, cohort: int) -> int:
        """Numbers that a dealer of such a cohort deals to each holder: its vectors', and zero's."""
        return self.elements + self.groups * cohort

    def products(self, silos: int) -> int:
        """Inner products of so many silos' vectors, those with themselves too."""
        return self.groups * silos * (silos + 1) // 2


def compared_of(part: Part, clip_exponent: int) -> Compared:
    """The comparison of a ``Gram`` part by secret sharing."""
    groups, width = part.tensors[0].shape
    return Compared(name=part.name, groups=groups, width=width, clip_exponent=clip_exponent)


def degree(colluders: int) -> int:
    """d, the degree of the polynomials that hide a vector.

    At least 1, or each silo would read the vectors of all others.
    """
    return max(colluders, 1)


def needed(colluders: int) -> int:
    """Silos whose shares open an inner product, 2d + 1."""
    return 2 * degree(colluders) + 1


def quantise(own: Compared, vectors: Reals) -> Integers:
    """Integers q [groups, width] of vectors, float64.

    LocalError for one that is longer than the job declares.
    """
    longest = float(np.sqrt((vectors * vectors).sum(axis=1)).max())
    check_local(
        longest <= 2.0**own.clip_exponent,  # False for NaN, too
        f"part {own.name!r}: a vector has length {longest:.6g}, above the bound"
        f" 2^{own.clip_exponent} of the job; have it signed with a higher"
        " security.clip_exponent, or look why training went so far",
    )
    return np.rint(vectors * 2.0 ** (NORM_BITS - own.clip_exponent)).astype(np.int64)


def dequantise(own: Compared, products: Integers) -> Reals:
    """Inner products of the vectors, float64, from those of their q.

    A q is v 2^e, rounded, so products are divided by 2^(2 e). ``deviation`` bounds the error.
    """
    return products.astype(np.float64) * 2.0 ** (-2 * (NORM_BITS - own.clip_exponent))


def deviation(own: Compared, one: float, other: float) -> float:
    """How far an opened inner product of vectors of these lengths may be from the exact one."""
    off = float(np.sqrt(own.width)) * 2.0 ** -(NORM_BITS - own.clip_exponent + 1)  # ‖q 2^-e - v‖
    return off * (one + other) + off * off + one * other * 2.0**-52


def gram(own: Compared, vectors: Sequence[Reals]) -> Reals:
    """The opened inner products [groups, n, n] of n silos' vectors, to the same bits.

    A simulation has all vectors, each [groups, width] float64, in one process. It quantises and
    multiplies them like the protocol, so simulated rounds equal real ones.
    """
    # [groups, n, width]
    numbers = np.stack([from_signed(quantise(own, each)) for each in vectors], axis=1)
    return dequantise(own, np.stack([signed(product(each, each.T)) for each in numbers]))


@dataclass(frozen=True, slots=True)
class GramShare:
    """The share that one dealer dealt to one holder; printing it shows nothing.

    ``vectors`` [groups, width] are the values of f at the holder's number, ``zeros`` [cohort,
    groups] those of z, for each silo of the cohort.
    """

    vectors: Words
    zeros: Words

    def __repr__(self) -> str:
        return f"GramShare(vectors {list(self.vectors.shape)}, zeros {list(self.zeros.shape)})"


def deal(
    own: Compared, quantised: Integers, cohort: int, colluders: int, source: Source
) -> tuple[GramShare, ...]:
    """Shares of a silo's vectors for the holders 1 to ``cohort``, its own among them.

    ``source`` is a fresh stream.
    """
    # Numbers from 1 on: the value at 0 is the vector itself.
    d, holders = degree(colluders), range(1, cohort + 1)
    # d uniform coefficients per number: the shares of d holders fit every vector.
    hiding = uniform(source, (d, own.elements))
    coefficients = np.concatenate([from_signed(quantised).reshape(1, -1), hiding])
    values = product(powers(holders, 0, d), coefficients)  # [holders, elements]

    # Twice the degree, as the product has: what is revealed is then uniform but for its value at 0.
    nothing = product(powers(holders, 1, 2 * d), uniform(source, (2 * d, cohort * own.groups)))
    shares = zip(values, nothing, strict=True)
    return tuple(
        GramShare(f.reshape(own.groups, own.width), z.reshape(cohort, own.groups))
        for f, z in shares
    )


def dumped(share: GramShare) -> bytes:
    """A share as it is sealed: the numbers of f, then those of z, 8 bytes each, little-endian."""
    return share.vectors.astype("<u8").tobytes() + share.zeros.astype("<u8").tobytes()


def loaded(own: Compared, cohort: int, data: bytes) -> GramShare | None:
    """The share of these bytes, which may be anything; None where they are none."""
    # The dealer may have sealed bytes of any form.
    if len(data) != NUMBER_BYTES * own.numbers(cohort):
        return None
    numbers = _numbers(data)
    if numbers is None:
        return None
    at = own.elements
    return GramShare(
        numbers[:at].reshape(own.groups, own.width), numbers[at:].reshape(cohort, own.groups)
    )


def multiply(shares: Mapping[int, GramShare]) -> Words:
    """One holder's shares of all inner products [pairs, groups], of pairs (i, j) with i ≤ j.

    ``shares`` are what it holds, by the dealer's number in the cohort, 1 and up.
    """
    dealers = sorted(shares)
    # Inner products are symmetric, so each pair is computed once.
    first, second = np.triu_indices(len(dealers))
    # [i, j, groups]
    zeros = np.stack([shares[i].zeros for i in dealers])[:, [j - 1 for j in dealers]]
    vectors = np.stack([shares[i].vectors for i in dealers], axis=1)  # [groups, i, width]
    found = np.stack([product(each, each.T) for each in vectors], axis=2)[first, second]
    # z_ij and z_ji hide the product of two dealers' vectors. For i = j there is only z_ii, which
    # must not be added twice.
    both = np.where((first != second)[:, None], zeros[second, first], np.uint64(0))
    return add(add(found, zeros[first, second]), both)


@dataclass(frozen=True, slots=True)
class OpenedGram:
    """Inner products of the quantised vectors [pairs, groups], and holders of wrong shares.

    Products are int64, for pairs (i, j) with i ≤ j in the order of the dealers' numbers. ``wrong``
    are numbers in the cohort, 1 and up.
    """

    products: Integers
    wrong: tuple[int, ...] = ()


def opened(revealed: Mapping[int, Words], colluders: int) -> OpenedGram | None:
    """Open inner products from their shares [pairs, groups] by holder's number.

    None where too many are wrong: of 2d + 1 + r shares, r are checked against the others, and up to
    r / 2 wrong ones are found and left out. LocalError for fewer than 2d + 1.
    """
    holders, least = sorted(revealed), needed(colluders)
    count = len(holders)
    check_local(count >= least, f"shares of {count} silos open no inner product; it takes {least}")
    # [holders, pairs · groups]: each column lies on a polynomial of its own.
    values = np.stack([revealed[holder].reshape(-1) for holder in holders])
    # The usual case first: if all shares fit, one matrix product opens and checks them.
    products, wrong = _joined(holders, values, least), tuple[int, ...]()
    if products is None:
        # One wrong share must not end the sum, nor stay unnamed.
        # All values of a holder are combined into one, since the search takes n³ steps per value.
        wrong = wrong_points(holders, _combined(values), least - 1) or ()
        kept = [at for at, holder in enumerate(holders) if holder not in wrong]
        products = _joined([holders[at] for at in kept], values[kept], least) if wrong else None
    if products is None:
        return None
    return OpenedGram(signed(products).reshape(revealed[holders[0]].shape), wrong)


def _joined(holders: Sequence[int], values: Words, least: int) -> Words | None:
    """The numbers at 0 by the first ``least`` values.

    None where the other values are not of the same polynomials.
    """
    found = product(interpolation(holders[:least], [0, *holders[least:]]), values[:least])
    return found[0] if np.array_equal(found[1:], values[least:]) else None


def _combined(values: Words) -> list[int]:
    """A number for each holder: the sum of its values [holders, elements], each times a factor.

    The factors follow from all values, so nobody knows them before. A wrong value shows in its
    holder's number with a probability of 1 - 1/p.
    """
    stream = Keystream(hashlib.sha256(values.astype("<u8").tobytes()).digest(), 0)
    combined: list[int] = product(values, uniform(stream, (values.shape[1], 1)))[:, 0].tolist()
    return combined


def products_dumped(products: Words) -> bytes:
    """Shares of inner products as they are revealed, 8 bytes each, little-endian."""
    return products.astype("<u8").tobytes()


def products_loaded(own: Compared, silos: int, data: bytes) -> Words | None:
    """The shares [pairs, groups] of these bytes, which may be anything, for so many silos.

    None where they are none.
    """
    if len(data) != NUMBER_BYTES * own.products(silos):
        return None
    numbers = _numbers(data)
    return None if numbers is None else numbers.reshape(-1, own.groups)


def squares(own: Compared, products: Reals, silos: int) -> Reals:
    """Inner products [pairs, groups] as symmetric matrices [groups, silos, silos].

    ``products`` are float64, the upper triangle row by row: pairs (i, j) with i ≤ j.
    """
    first, second = np.triu_indices(silos)
    made = np.empty((own.groups, silos, silos))
    made[:, first, second] = made[:, second, first] = products.T
    return made


def _numbers(data: bytes) -> Words | None:
    # Little-endian on the wire; ``astype`` converts to the machine's order.
    numbers = np.frombuffer(data, "<u8").astype(np.uint64)
    return numbers if is_field(numbers) else None
