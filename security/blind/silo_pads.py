"""Pads over sums that silos alone read: what the coordinator opens stays hidden by them.

A silo adds a stream to the numbers of such a group before its masks, of a key of its own in each
attempt::

    pad key, silo j  HKDF(group key, salt = ctx, info = framed(HIDE, prg, j))

The masks come off the sum at the coordinator; the pads of exactly the survivors come off at each
silo (open_sum.py), by the key that the job's silos share and the coordinator lacks. Together with
any one of them it reads the sum, and nothing but the sum: no silo's own numbers, which the masks
hide.

The pads are each silo's own. Of a pad P that all had in common |U3| times P would be on the sum,
which for an even |U3| is an even number: the lowest bit of each total would be in the clear, of
four silos two bits, of eight three.
"""

from ..arithmetic.fixedpoint import SILOS_READ
from ..arithmetic.masks import Term
from ..identity.domains import SECAGG_HIDE, framed
from ..identity.pairwise_keys import derive
from ..secagg.spec import RoundSpec


def silo_pad(group_key: bytes, ctx: bytes, silo: str, prg: int) -> Term:
    """The pad that a silo adds in an attempt; each group has a stream of its own.

    Its key depends on the context, so no two attempts share a pad.
    """
    return Term(derive(group_key, ctx, framed(SECAGG_HIDE, prg.to_bytes(1), silo.encode())))


def silo_pads(spec: RoundSpec, silo: str, group_key: bytes) -> dict[int, Term]:
    """The pads of a silo over the groups of a sum that silos alone read, by group."""
    # One key serves all groups: the stream of each has the number of its group.
    hidden = [index for index, group in enumerate(spec.groups) if group.reader == SILOS_READ]
    if not hidden:
        return {}
    return dict.fromkeys(hidden, silo_pad(group_key, spec.context(), silo, spec.prg))
