"""The [transport] table of a job file: in which form uploads cross.

::

    [transport]
    codec = "bfloat16"

It is part of the signed job, so all silos use the same, and what they upload stands in the job's
schema in the form in which it crosses. Downloads are never coded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from ...files.documents import Strict
from .codec import Bfloat16, Int8
from .parts import DTYPES, Codec, Kind, Part

CODECS: Mapping[str, Codec] = {"bfloat16": Bfloat16(), "int8": Int8()}
# By codec, the exchanges by which what it codes crosses. Compared vectors stay exact: what is
# rounded looks alike. What one round left out belongs to models that all rounds add up, and not to
# rows that a silo may not hold in the next, nor to what is passed on as it is.
EXCHANGES = {
    "bfloat16": ("sum.mean", "sum.ratio", "mix", "each"),
    "int8": ("sum.mean", "mix"),
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

    codec: Literal["bfloat16", "int8"]
    """The form in which matrices of models cross upwards (codec.py)."""

    def coded(self, part: Part) -> Part:
        """A part that goes up, with the codec if it takes one."""
        takes = part.exchange.schema_name in EXCHANGES[self.codec] and part.kind in LEARNT
        return replace(part, codec=CODECS[self.codec]) if takes else part

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
