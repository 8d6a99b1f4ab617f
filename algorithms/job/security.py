"""The [security] table of a job: whether its sums are blind, and what the job then declares of its
values.

::

    [security]
    secure_aggregation = "required"
    weights = "public"
    counts = { clinic-a = 410, clinic-b = 380, clinic-c = 512, clinic-d = 450 }

Under "required" nobody can open what a silo gives, only sums over the silos of a round. A value
that does not change between rounds must not enter sums over varying sets of silos: two such sums
tell it (SECURITY.md rule 1). What does change tells of single silos too, over many rounds. So sums
are of whole fixed batches of silos (batches.py), and of all silos where more than weighted means is
summed. A lost silo costs the round its batch, or all of it where there is one alone. ``dropouts =
"any"`` goes on without it, at that price. What is mixed crosses under pads that the other silos
take off, what is compared crosses rotated: both take a key that all silos of the job share. With
``compare = "shared"`` silos deal shares of it to one another instead, and no key is behind it. By
such a key silos also see whether the coordinator altered what comes down of a sum. They agree on
one for that alone, too, unless the job has ``tags = false``. With ``audience = "silos"`` the
coordinator only passes such sums on: it reads the metrics, and what else it has to compute with.

What is summed class by class shows, of a class that few silos hold, the few. So a round before the
first counts the holders of each class, and only of those that ``min_holders`` silos hold, and
``colluders`` more, rows are given (class_census.py). Such a job takes that key too: nobody may
alter the counts.

What a method wants to know of the silos beforehand, and would ask of each, a blind job declares:
how many training records there are, and with ``class_counts = { clinic-a = [200, 210], … }`` of
which class.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ...files.documents import Strict
from ..exchange.parts import DISCLOSED, Kind

LARGEST = 2**53 - 1  # what canonical JSON can hold
MOST_SILOS = 1000  # of one blind sum
MIXED = ("mix", "mix.directed")
COMPARED = ("gram", "gram.shared")
KEYED = (*MIXED, "gram")  # exchanges whose blind form takes a key that the job's silos share
FEWEST = 3  # silos of one blind sum: of two, each could take away its own part
# numbers of a vector, or its sketch: a secret rotation takes 2 d² multiplications
LONGEST_COMPARED = 1 << 16
MOST_SHARES = 3 << 20  # bytes of the shares of all compared vectors that one silo is told at once
MOST_PRODUCTS = 1 << 20  # bytes of the shares of inner products that one silo reveals at once

# this engine's $ is the very end, no newline passes
Name = Annotated[str, Field(pattern=r"^[a-z0-9-]{1,64}$")]
Count = Annotated[int, Field(strict=True, ge=1, le=LARGEST)]
ClassCounts = Annotated[
    tuple[Annotated[int, Field(strict=True, ge=0, le=LARGEST)], ...], Field(min_length=1)
]


class SecurityTable(Strict):
    """The [security] table."""

    secure_aggregation: Literal["off", "required"] = "off"
    """Whether the coordinator sees what each silo gives, or only sums over the silos of a round."""
    clip_exponent: Annotated[int, Field(strict=True, ge=-64, le=62)] = 3
    """No number that is summed, counts aside, is above 2 to this power.

    A round with a larger one is not given.
    """
    weights: Literal["private", "public"] = "private"
    """Whether the silos' weights are secret like their tensors, or stand in ``counts``."""
    weight_least: Count = 1
    """Smallest private weight of a silo."""
    weight_most: Count = 1_000_000
    """Largest private weight of a silo."""
    counts: dict[Name, Count] = Field(default_factory=dict)
    """Training records by silo, for public weights."""
    class_counts: dict[Name, ClassCounts] = Field(default_factory=dict)
    """The same class by class, for methods that compare the silos' labels."""
    colluders: Annotated[int, Field(strict=True, ge=0, le=MOST_SILOS)] = 1
    """Silos that may be in league with the coordinator."""
    dropouts: Literal["batches", "any"] = "batches"
    """Whether a sum goes on without a lost silo's fixed batch, or without any silo: then sums over
    many rounds tell single silos' updates.
    """
    tags: Annotated[bool, Field(strict=True)] = True
    """Whether silos tag what they sum, by a key that they share, and check that no result was
    altered on its way; where none comes down to them, there is nothing to tag.
    """
    min_holders: Annotated[int, Field(strict=True, ge=0, le=MOST_SILOS)] = 0
    """Silos that hold a class before its rows are summed, and ``colluders`` more.

    0: as many as ``min_cohort``.
    """
    audience: Literal["coordinator", "silos"] = "coordinator"
    """Who reads sums that are published as they are: the coordinator and the silos, or the silos
    alone, with tags.
    """
    mix: Literal["one-upload", "directed"] = "one-upload"
    """Whether a silo gives what is mixed once, hidden unless the coordinator is in league with a
    silo, or once for each silo that gets a row of it, hidden from coordinator and other silos
    together.
    """

    compare: Literal["rotated", "shared"] = "rotated"
    """Whether vectors that are compared cross rotated, hidden unless the coordinator is in league
    with a silo, or as shares among the silos of the round, hidden from the coordinator and up to
    ``colluders`` silos together.
    """

    @model_validator(mode="after")
    def _fit(self) -> "SecurityTable":
        if not self.required and (idle := changed(self, *SecurityTable.model_fields)):
            raise ValueError(
                f'{idle} does nothing with secure_aggregation = "off"; take it out, or write'
                ' "required"'
            )
        if self.weight_least > self.weight_most:
            raise ValueError(
                f"weight_least = {self.weight_least} is above weight_most = {self.weight_most};"
                " lower it"
            )
        if self.counts and self.weights == "private":
            raise ValueError(
                'counts would tell private weights; take it out, or write weights = "public"'
            )
        if 0 < self.min_holders < FEWEST:
            raise ValueError(
                f"min_holders = {self.min_holders} would show too few; write {FEWEST} or more"
            )
        if self.class_counts and self.weights == "private":
            raise ValueError(
                'class_counts would tell private weights; take it out, or write weights = "public"'
            )
        return self

    @property
    def required(self) -> bool:
        """Whether the sums are blind."""
        return self.secure_aggregation == "required"


def tagged(security: SecurityTable, schema: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the silos of a blind job without fault agree on a key to tag, if they need none for
    anything else.
    """
    return security.tags and bool(summed_down(schema))


def keyed_exchanges(schema: Sequence[Mapping[str, Any]]) -> bool:
    """Whether something crosses whose blind form takes a key that the job's silos share."""
    return any(part["exchange"] in KEYED for phase in schema for part in phase["up"])


def for_silos(audience: str, schema: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Parts of a job without fault whose sums silos alone read."""
    return summed_down(schema) if audience == "silos" else frozenset()


def summed_down(schema: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Parts that are summed and come down; metrics are summed, and do not."""
    given = {
        part["name"]
        for phase in schema
        for part in phase["up"]
        if part["exchange"].startswith("sum.")
    }
    return frozenset(
        part["name"] for phase in schema for part in phase["down"] if part["name"] in given
    )


def unblind(schema: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """First round and part of everything that silos give by an exchange without a blind form
    (SECURITY.md rule 2).
    """
    for phase in schema:
        for part in phase["up"]:
            disclosed = part["exchange"] in COMPARED and Kind[part["kind"].upper()] in DISCLOSED
            if part["exchange"] == "each" or disclosed:
                yield phase["from_round"], part


def changed(table: SecurityTable, *keys: str) -> str:
    """The first of these keys that is not at its default, with its value; empty if all are."""
    for key in keys:
        field = SecurityTable.model_fields[key]
        if (value := getattr(table, key)) != field.get_default(call_default_factory=True):
            return f"{key} = {value!r}"
    return ""
