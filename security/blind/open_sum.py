"""The result of a secure sum as silos receive it: in words, so that they see any change.

With the words of a group come the specification of the attempt, which the coordinator signed, and
who survived in it. What a silo expects it knows itself: the federation, the job, the round whose
sum it is, the groups. So another job's sum, an older one, or that of another group does not pass;
and by the survivors' tags (security/secagg/linear_tags.py) no word was altered, and none of the
survivors left out or put in. A coordinator that colludes with one silo of the job can forge a
tag.

A group that silos alone read comes down under the survivors' pads (silo_pads.py), which come off
first: the tags are of the numbers. With pads of others than the survivors what is left is noise,
and no tag fits it.

The model digest of a specification is not compared: a silo that was away knows nothing of that
round's model.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ..arithmetic.fixedpoint import SILOS_READ, Words
from ..faults import COORDINATOR, Code, check
from ..identity.signers import Signers
from ..secagg.linear_tags import Tagger
from ..secagg.masked_sum import OpenedGroup, check_bounds, opened_group, unpad
from ..secagg.spec import (
    Frame,
    RoundSpec,
    Terms,
    check_cohort,
    check_frame,
    check_survivors,
    listed,
    signed_spec,
)
from .silo_pads import silo_pad

PIECE = 1 << 18  # words that are worked on at a time


@dataclass(frozen=True)
class Claim:
    """The coordinator's statement on one group of an open sum; the words come separately.

    ``document`` and ``signature`` are the attempt's specification, ``tag`` is that of the group
    alone. ``check_claim`` and ``open_group`` check it all.
    """

    document: bytes
    signature: bytes
    survivors: tuple[str, ...]
    tag: bytes


def check_claim(claim: Claim, frame: Frame, terms: Terms, signers: Signers) -> RoundSpec:
    """The specification, before a word is taken in; ``frame`` is of the round that is expected.

    RefusedError if not.
    """
    # A silo that was away in that round checks what its silos checked then.
    # (1) The coordinator signed it, for silos that we know.
    spec = signed_spec(claim.document, claim.signature, signers)

    # (2) It is of the job and the round that we expect, and sums what we would have summed.
    # The digest of that round's model is taken from the specification: a silo that was away does
    # not have the model.
    check_frame(spec, replace(frame, model_digest=spec.model_digest))

    # (3) Its cohort is one that we would have joined.
    check_cohort(spec, terms)

    # (4) The survivors are members of it, each once and in order, and (5) such as open a sum.
    named = ", ".join(claim.survivors)[:400]
    check(
        listed(claim.survivors, spec.cohort),
        COORDINATOR,
        Code.SURVIVORS,
        f"names survivors {named}, which are not members of the cohort in order",
    )
    check_survivors(spec, terms, claim.survivors)
    return spec


def open_group(
    spec: RoundSpec,
    group: int,
    claim: Claim,
    key: bytes,
    words: Words,
    own: Mapping[str, bytes] | None = None,
) -> OpenedGroup:
    """The sum of a group, once its words are here: its elements, then private weights.

    RefusedError if a word was altered, or where no values within the clip add up to it.

    Pads of a group that all silos read are taken off ``words`` in place. ``own``, by survivor, are
    keys of the pads of tags that only one silo checks.
    """
    # Tags are made of the numbers before the pads are added, so the pads come off first.
    ctx = spec.context()
    if spec.groups[group].reader == SILOS_READ:
        unpad(group, words, [silo_pad(key, ctx, silo, spec.prg) for silo in claim.survivors])

    # The tag is checked before the words mean anything: a coordinator that shifts a few of them
    # would otherwise steer the model of every silo (security rule 8).
    tagger = Tagger(key, ctx, len(spec.groups))
    for _, piece in _pieces(words):
        tagger.add(group, piece)
    tagger.check_group(
        group, claim.tag, own or dict.fromkeys(claim.survivors, key), ctx, claim.survivors
    )

    # A tag vouches for what silos sent, not for its size: a silo may send words beyond the clip.
    opened = opened_group(spec, group, claim.survivors, _pieces(words))
    check_bounds(spec.groups[group], len(spec.cohort), len(claim.survivors), opened)
    return opened


def tag_of(tags: bytes, group: int, groups: int) -> bytes:
    """The tag of one group, out of those of all."""
    # All tags have the same length, so no table of lengths is needed.
    size = len(tags) // groups
    return tags[group * size : (group + 1) * size]


def _pieces(words: Words) -> Iterator[tuple[int, Words]]:
    for at in range(0, words.size, PIECE):
        yield at, words[at : at + PIECE]
