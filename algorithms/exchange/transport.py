"""The [transport] table of a job file: in which form uploads cross.

::

    [transport]
    codec = "bfloat16"

It is part of the signed job, so all silos use the same, and what they upload stands in the job's
schema in the form in which it crosses. Downloads are never coded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ...files.documents import Real, Strict
from .codec import Bfloat16, Int8, TopK
from .parts import DTYPES, Codec, Kind, Part

# By codec, the exchanges by which what it codes crosses. Compared vectors stay exact: what is
# rounded looks alike. What one round left out belongs to models that all rounds add up, and not to
# rows that a silo may not hold in the next, nor to what is passed on as it is.
EXCHANGES = {
    "bfloat16": ("sum.mean", "sum.ratio", "mix", "each"),
    "int8": ("sum.mean", "mix"),
    "top-k": ("sum.mean",),
}
# Numbers of a model; counts, memberships and statistics cross as they are.
LEARNT = (
    Kind.WHOLE_MODEL,
    Kind.BACKBONE,
    Kind.INTER_LEARNING_MODEL,
    Kind.HEADER_ROWS,
    Kind.PROTOTYPES,
    Kind.CANONICAL_MODELS,
    Kind.CLASSIFIER_ROWS,
)


class TransportTable(Strict):
    """The [transport] table."""

    codec: Literal["bfloat16", "int8", "top-k"]
    """The form in which matrices of models cross upwards (codec.py)."""
    keep: Annotated[Real, Field(gt=0, le=0.5)] | None = None
    """For top-k: the share of a matrix that crosses. Above a half, it would be more bytes."""

    @model_validator(mode="after")
    def _fit(self) -> "TransportTable":
        if (self.codec == "top-k") != (self.keep is not None):
            raise ValueError(
                'keep is for codec = "top-k", and that needs it: write keep = 0.05 to send the'
                " twentieth of each matrix that changed most, or take keep out"
            )
        return self

    @property
    def form(self) -> Codec:
        """The codec."""
        codecs: Mapping[str, Codec] = {"bfloat16": Bfloat16(), "int8": Int8()}
        return codecs.get(self.codec) or TopK(self.keep or 0.0)

    def coded(self, parts: Sequence[Part], passed_on: Sequence[Part]) -> tuple[Part, ...]:
        """The parts that go up, with the codec where they take it.

        ``passed_on`` are those that a codec which compares can compare with what came down.
        """
        form = self.form
        known = set(passed_on if form.compares else parts)
        return tuple(
            replace(part, codec=form) if part in known and self._takes(part) else part
            for part in parts
        )

    def _takes(self, part: Part) -> bool:
        return part.exchange.schema_name in EXCHANGES[self.codec] and part.kind in LEARNT

    def fault(self, schema: Sequence[Mapping[str, Any]]) -> str:
        """Why the table does nothing for what this schema lets cross; empty if it does."""
        for phase in schema:
            for part in phase["up"]:
                if any(tensor["dtype"] not in DTYPES for tensor in part["tensors"]):
                    return ""
        return (
            f"transport.codec = {self.codec!r} does nothing: no part that goes up has a float32"
            " matrix of a model that is summed, mixed or passed on; take [transport] out"
        )

    @property
    def blind_fault(self) -> str:
        """Why a blind job cannot have it."""
        return (
            f'transport.codec = {self.codec!r} with security.secure_aggregation = "required":'
            " masked sums are of whole numbers of 32 or 64 bits, which no codec makes shorter;"
            " take [transport] out"
        )
