"""The contexts of a one-upload ``Mix``: the line that uploads are mixed in, and each version.

A line's canonical JSON, here broken and cut; ``SHA-256(framed(MIX_LINE, document))`` binds all tags
of the line, and ``SHA-256(framed(MIX_VERSION, line, silo, round, attempt, number))`` all else of
one upload::

    {"federation":"lung","group":{"clip_exponent":3,"elements":62006,"name":"extractor",…},"job":"j1","key_epoch":2,
     "job_digest":"5c1f…","members":"9f86…","prg":2,"protocol":"staddle-mix/1","schema_digest":"9a0b…"}
"""

import hashlib
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ...algorithms.exchange.parts import MIX_BITS
from ...errors import LocalError
from ...files.documents import Strict, canonical_json
from ..arithmetic.fixedpoint import Group
from ..arithmetic.masks import AES_256_GCM
from ..identity.domains import MIX_LINE, MIX_VERSION, framed
from ..identity.keys import Hex32, Id

TOP = 62  # no row exceeds 2^62: |Σ a q| with Σ a = 2^32 and |q| ≤ 2^30
LARGEST_CLIP = TOP - MIX_BITS
WORD_BYTES = 8

Number = Annotated[int, Field(strict=True, ge=0, le=2**53 - 1)]


def mix_group(name: str, elements: int, clip_exponent: int) -> Group:
    """The group of a part that crosses by ``Mix``.

    LocalError if its clip leaves no bit behind the point.
    """
    # |Σ a q| ≤ 2^62 with weights that add up to 2^32, so that no row wraps (security rule 19).
    if clip_exponent > LARGEST_CLIP:
        raise LocalError(
            f"group {name!r}: a Mix holds values up to 2^{LARGEST_CLIP}, not 2^{clip_exponent}"
        )
    scale = LARGEST_CLIP - clip_exponent
    return Group(
        name=name,
        elements=elements,
        ring=64,
        clip_exponent=clip_exponent,
        scale_exponent=scale,
        weights="equal",
    )


class MixContext(Strict):
    """The line that uploads are mixed in: a tensor group of a job, in one epoch of the group key.

    Other members, or other keys of theirs, begin a new epoch, and so new lines: uploads that are
    stored under the old one expire.
    """

    protocol: Literal["staddle-mix/1"] = "staddle-mix/1"
    federation: Id
    members: Hex32  # ``rosters.members_digest`` of the job's silos
    key_epoch: Number
    job: Id
    job_digest: Hex32
    schema_digest: Hex32
    group: Group
    prg: Literal[2] = AES_256_GCM

    @model_validator(mode="after")
    def _check(self) -> Self:
        group = self.group
        # All other fields follow from these three. With another scale a row could overflow.
        if group.clip_exponent > LARGEST_CLIP or group != mix_group(
            group.name, group.elements, group.clip_exponent
        ):
            raise ValueError(f"group {group.name!r} is not one of a Mix, in ring 64 with its scale")
        return self

    def context(self) -> bytes:
        """Ctx of the line, 32 bytes: all its tags are bound to it."""
        return hashlib.sha256(
            framed(MIX_LINE, canonical_json(self.model_dump(mode="json")))
        ).digest()

    @property
    def nbytes(self) -> int:
        """Length of every upload and of every row on the wire."""
        return WORD_BYTES * self.group.elements


class Version(Strict):
    """One upload of a silo to a line; ``number`` grows with each, a restarted one included.

    A restarted process cannot know how much of its pad has left, so it begins a new version with a
    new seed.
    """

    silo: Id
    round: Number
    attempt: Number
    number: Number

    def context(self, line: MixContext) -> bytes:
        """Ctx of this upload, 32 bytes."""
        fields = (
            self.silo.encode(),
            # The number too: a restarted upload of a round has another one, and so another pad.
            *(value.to_bytes(8) for value in (self.round, self.attempt, self.number)),
        )
        return hashlib.sha256(framed(MIX_VERSION, line.context(), *fields)).digest()
