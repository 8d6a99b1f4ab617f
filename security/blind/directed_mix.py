"""``Mix`` by groups of a round's secure sum that one silo each opens: security rule 9.

Such a group (``Group.reader`` is the silo) is one recipient's row: its counts are the integer
weights of the row, and besides the masks of the sum each sender has a pad on its numbers that the
recipient alone takes off. So what the coordinator opens stays hidden by the pads of all survivors;
self masks, shares, signed survivors are those of the sum::

    pad key  HKDF(X25519(prekey_j, prekey_r), salt = ctx, info = framed(MIX_PAD, prg, j, r, round,
             group))
    silo j   q(w_j x_j) + PRG(pad_jr) + masks
    opened   Σ_j q(w_j x_j) + Σ_j PRG(pad_jr)       over the survivors, at the coordinator: noise,
             to it
    r        subtracts the pads of exactly the survivors, then compares tags

The recipient is a silo of the job that is away in the round, or a member of it; a job has the one
or the other (``Method.directed_for``). The context is of one attempt, so no pad is used twice. The
tag of such a group has a pad from the pad key in place of one from the key that all silos share:
what it would tell of a sender's numbers, a silo colluding with the coordinator does not learn
either. Together they see the rows for that silo, and can alter those of others
(security/secagg/linear_tags.py).

**A recipient that is a member** gives to the rows of all others, and zeros to its own, where its
weight is 0: under masks and under a pad that it agrees on with itself, so that its uploads look
like those of all others. What it keeps of its own part is mixed in where the row comes down, and
stands in the group (``own_weight``, of 2^32), signed before anything is given. So no silo sends its
part to itself, and the coordinator cannot choose what it keeps once it knows who survived.

Weights for silos that are away follow from the job, and each silo makes them itself. Those for
members follow from what the coordinator alone has, and come with the specification. Each silo
checks them before it deals keys (``spec.brought_fault``), and the survivors once more before it
unmasks anything: one row for each silo that the job draws, of that silo alone, over this round's
parts, none above half, as many as ``min_cohort`` asks. Which silos are alike it cannot check. So a
coordinator that colludes with the recipient of a row weighs that row as it likes, within these
bounds: one equation a round over ``min_cohort`` silos or more. Two recipients that collude would
have two equations of its choice, from which one silo's part can follow exactly, so jobs with
``colluders`` above 1 have no rows for members (``_members_in_league`` of
algorithms/job/blind_rules.py). Over rounds the same holds of one recipient, but for what training
changes in between: rows of two rounds, weighed for it, come near to one silo's part. Differential
privacy alone bounds that (docs/threat-model.md, "What is open").
"""

from collections.abc import Mapping

from ..arithmetic.fixedpoint import COORDINATOR_READS, SILOS_READ, Group, Words
from ..arithmetic.masks import Term
from ..identity.domains import MIX_PAD, framed
from ..identity.pairwise_keys import agree, derive, public_key
from ..secagg.masked_sum import OpenedGroup, unpad
from ..secagg.spec import RoundSpec
from .open_sum import Claim, open_group


def is_row(group: Group) -> bool:
    """True if one silo alone opens a group."""
    return group.reader not in (COORDINATOR_READS, SILOS_READ)


def sender_pads(
    spec: RoundSpec, silo: str, seed: bytes, prekeys: Mapping[str, bytes]
) -> dict[int, Term]:
    """A sender's pads by group.

    ``seed`` is the private half of its prekey, ``prekeys`` are those of the other silos.

    To its own row, where it is a member of the cohort, it gives zeros, under a pad that nobody else
    has.
    """
    # With itself too, so that its uploads look like those of all others.
    known = {**prekeys, silo: public_key(seed)}
    return {
        index: _pad(spec, group, silo, seed, known[group.reader], group.reader)
        for index, group in enumerate(spec.groups)
        if is_row(group)
    }


def recipient_pads(
    spec: RoundSpec, group: Group, seed: bytes, prekeys: Mapping[str, bytes]
) -> dict[str, Term]:
    """Like ``sender_pads``, at the recipient of a group: the pads of the whole cohort, by sender.

    ``seed`` is the private half of the recipient's prekey. ``open_row`` removes only the
    survivors' pads.
    """
    # A reader that is in the cohort pads its own upload too, under a key with itself.
    known = {**prekeys, group.reader: public_key(seed)}
    return {silo: _pad(spec, group, silo, seed, known[silo], silo) for silo in spec.cohort}


def open_row(
    spec: RoundSpec, index: int, claim: Claim, key: bytes, pads: Mapping[str, Term], words: Words
) -> OpenedGroup:
    """At the recipient: its row, of the opened words of its group, which are changed.

    The claim was checked, ``pads`` are those of the whole cohort. RefusedError if it is not the sum
    of what the survivors gave.
    """
    # Pads of exactly the survivors: one more or less leaves noise, and no tag fits it.
    unpad(index, words, [pads[silo] for silo in claim.survivors])
    return open_group(spec, index, claim, key, words, {silo: pad.key for silo, pad in pads.items()})


def _pad(spec: RoundSpec, group: Group, sender: str, seed: bytes, public: bytes, peer: str) -> Term:
    fields = (sender.encode(), group.reader.encode(), spec.round.to_bytes(8), group.name.encode())
    # Always sender before reader, so that both sides derive the same key.
    info = framed(MIX_PAD, spec.prg.to_bytes(1), *fields)
    return Term(derive(agree(seed, public, peer), spec.context(), info))
