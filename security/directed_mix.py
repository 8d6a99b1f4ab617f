"""``Mix`` by groups of a round's secure sum that one silo each opens: SECURITY.md rule 9.

Such a group (``Group.reader`` is the silo) is one recipient's row: its counts are the integer weights of the row, and
beside the masks of the sum each sender has a pad on its numbers that the recipient alone takes off. So what the
coordinator opens stays hidden by the pads of all survivors; self masks, shares, signed survivors are those of the sum::

    pad key   HKDF(X25519(prekey_j, prekey_r), salt = ctx, info = framed(MIX_PAD, prg, j, r, round, group))
    silo j    q(w_j x_j) + PRG(pad_jr) + masks
    opened    Σ_j q(w_j x_j) + Σ_j PRG(pad_jr)       over the survivors, at the coordinator: noise, to it
    r         subtracts the pads of exactly the survivors, then compares tags

The recipient is a silo of the job that is away in the round, and never in the cohort. The context is of one attempt, so
no pad is used twice. The tag of such a group has a pad from the pad key in place of one from the key that all silos
share: what it would tell of a sender's numbers, a silo in league with the coordinator does not learn either. Together
they see the rows for that silo, and can alter those of others (tags.py).
"""

from collections.abc import Mapping

from .fixedpoint import COORDINATOR_READS, SILOS_READ, Group, Words
from .labels import MIX_PAD, framed
from .masked_sum import Opened, unpad
from .masks import Term
from .open_sum import Claim, open_group
from .pairwise import agree, derive
from .round_spec import RoundSpec


def is_row(group: Group) -> bool:
    """Whether one silo alone opens a group."""
    return group.reader not in (COORDINATOR_READS, SILOS_READ)


def sender_pads(spec: RoundSpec, silo: str, seed: bytes, prekeys: Mapping[str, bytes]) -> dict[int, Term]:
    """At a sender, by group: ``seed`` is the private half of its prekey, ``prekeys`` are those of the other silos."""
    return {
        index: _pad(spec, group, silo, seed, prekeys[group.reader], group.reader)
        for index, group in enumerate(spec.groups)
        if is_row(group)
    }


def recipient_pads(spec: RoundSpec, group: Group, seed: bytes, prekeys: Mapping[str, bytes]) -> dict[str, Term]:
    """The same at the recipient of a group, by sender."""
    return {silo: _pad(spec, group, silo, seed, prekeys[silo], silo) for silo in spec.cohort}


def open_row(spec: RoundSpec, index: int, claim: Claim, key: bytes, pads: Mapping[str, Term], words: Words) -> Opened:
    """At the recipient: its row, of the opened words of its group, which are changed.

    The claim was checked, ``pads`` are those of the whole cohort. RefusedError if it is not the sum of what the
    survivors gave.
    """
    unpad(index, words, [pads[silo] for silo in claim.survivors])
    return open_group(spec, index, claim, key, words, {silo: pad.key for silo, pad in pads.items()})


def _pad(spec: RoundSpec, group: Group, sender: str, seed: bytes, public: bytes, peer: str) -> Term:
    fields = (sender.encode(), group.reader.encode(), spec.round.to_bytes(8), group.name.encode())
    info = framed(MIX_PAD, spec.prg.to_bytes(1), *fields)
    return Term(derive(agree(seed, public, peer), spec.context(), info))
