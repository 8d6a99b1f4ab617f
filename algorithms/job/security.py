"""The [security] table: it makes a job's sums blind, and declares facts about its silos.

::

    [security]
    secure_aggregation = "required"
    weights = "public"
    counts = { clinic-a = 410, clinic-b = 380, clinic-c = 512, clinic-d = 450 }

Under "required" nobody can open what a silo uploads, only sums over the silos of a round. A value
that does not change between rounds must not enter sums over varying sets of silos: two such sums
reveal it (security rule 1). A value that does change reveals single silos too, over many rounds.
So sums are of whole fixed batches of silos (batches.py), and of all silos where more than weighted
means is summed. A lost silo costs the round its batch, or all of it where there is one alone.
``dropouts = "any"`` continues without it, at that price. Mixed parts cross under pads that the
other silos take off, compared parts cross rotated: both take a key that all silos of the job share.
With ``compare = "shared"`` silos deal shares of such vectors to one another instead, and no key is
behind it. With such a key silos also see whether the coordinator altered what comes down of a sum.
They agree on one for that alone, too, unless the job has ``tags = false``. With ``audience =
"silos"`` the coordinator only passes such sums on: it reads the metrics, and what else it has to
compute with.

A sum by class shows, for a class that few silos hold, the few. So a round before the first counts
the holders of each class. Silos upload rows only of the classes that ``min_holders`` silos hold,
and ``colluders`` more (class_census.py). Such a job takes that key too: nobody may alter the
counts.

A blind job declares the facts about silos that a method would otherwise ask of each: the number of
training records, and with ``class_counts = { clinic-a = [200, 210], … }`` the number per class.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ...files.documents import Strict
from ..exchange.parts import DISCLOSED, Kind
from ..tasks.counting import METRICS
from ..tasks.table_counting import RIGHT

LARGEST = 2**53 - 1  # what canonical JSON can hold
MOST_SILOS = 1000  # of one blind sum
# Names of exchanges, as ``schema_name`` in exchange/parts.py gives them.
MIXED = ("mix", "mix.directed")
COMPARED = ("gram", "gram.shared")
KEYED = (*MIXED, "gram")  # exchanges whose blind form takes a key that the job's silos share
FEWEST = 3  # silos of one blind sum: in a sum of two, each could subtract its own part
# numbers of a vector, or its sketch: a secret rotation takes 2 d² multiplications
LONGEST_COMPARED = 1 << 16
MOST_SHARES = 3 << 20  # bytes of the shares of all compared vectors that one silo gets at once
MOST_PRODUCTS = 1 << 20  # bytes of the shares of inner products that one silo reveals at once

SchemaPart = Mapping[str, Any]  # as schema.py writes it
Schema = Sequence[Mapping[str, Any]]

# this engine's $ is the very end, no newline passes
Name = Annotated[str, Field(pattern=r"^[a-z0-9-]{1,64}$")]
Count = Annotated[int, Field(strict=True, ge=1, le=LARGEST)]
ClassCounts = Annotated[
    tuple[Annotated[int, Field(strict=True, ge=0, le=LARGEST)], ...], Field(min_length=1)
]


class SecurityTable(Strict):
    """The [security] table.

    Keys without effect are refused, so that no reader thinks that they protect something.
    """

    secure_aggregation: Literal["off", "required"] = "off"
    """The coordinator sees each silo's upload ("off"), or only sums over a round's silos."""
    clip_exponent: Annotated[int, Field(strict=True, ge=-64, le=62)] = 3
    """No number that is summed, counts aside, is above 2 to this power.

    A silo does not upload a round with a larger one.
    """
    weights: Literal["private", "public"] = "private"
    """The silos' weights are secret like their tensors, or stand in ``counts``."""
    weight_least: Count = 1
    """Smallest private weight of a silo."""
    weight_most: Count = 1_000_000
    """Largest private weight of a silo."""
    counts: dict[Name, Count] = Field(default_factory=dict)
    """Training records by silo, for public weights."""
    class_counts: dict[Name, ClassCounts] = Field(default_factory=dict)
    """Training records by silo and class, for methods that compare the silos' labels."""
    colluders: Annotated[int, Field(strict=True, ge=0, le=MOST_SILOS)] = 1
    """Silos that may collude with the coordinator."""
    dropouts: Literal["batches", "any"] = "batches"
    """A sum continues without a lost silo's fixed batch, or without any lost silo ("any").

    With "any", sums over many rounds reveal single silos' updates.
    """
    tags: Annotated[bool, Field(strict=True)] = True
    """True if silos tag their sums by a shared key, and so check that no result was altered.

    Where no sum comes down to them, there is nothing to tag.
    """
    min_holders: Annotated[int, Field(strict=True, ge=0, le=MOST_SILOS)] = 0
    """Silos that hold a class before its rows are summed, and ``colluders`` more.

    0: as many as ``min_cohort``.
    """
    audience: Literal["coordinator", "silos"] = "coordinator"
    """The readers of sums that are published as they are: the coordinator too, or silos alone.

    The silos alone tag them.
    """
    mix: Literal["one-upload", "directed"] = "one-upload"
    """A silo uploads a mixed part once, or once for each silo that gets a row of it.

    Uploaded once, it is hidden unless the coordinator colludes with a silo. Uploaded for each
    silo, it is hidden from the coordinator and the other silos together.
    """
    compare: Literal["rotated", "shared"] = "rotated"
    """Compared vectors cross rotated, or as shares among the round's silos.

    Rotated, they are hidden unless the coordinator colludes with a silo. Shared, they are
    hidden from the coordinator and up to ``colluders`` silos together.
    """

    @model_validator(mode="after")
    def _fit(self) -> "SecurityTable":
        if not self.required:
            self._check_nothing_set()
        # A job document is public, so declared counts would reveal private weights.
        if self.weights == "private":
            self._check_nothing_declared()
        if self.weight_least > self.weight_most:
            raise ValueError(
                f"weight_least = {self.weight_least} is above weight_most = {self.weight_most};"
                " lower it"
            )
        # In a sum of two holders, each could subtract its own row.
        if 0 < self.min_holders < FEWEST:
            raise ValueError(
                f"min_holders = {self.min_holders} would reveal too few; write {FEWEST} or more"
            )
        return self

    def _check_nothing_set(self) -> None:
        """Without blind sums no other key has any effect, and a reader could think it had."""
        # A key written with its default value claims nothing, so it passes.
        idle = changed(self, *SecurityTable.model_fields)
        if idle:
            raise ValueError(
                f'{idle} does nothing with secure_aggregation = "off"; take it out, or write'
                ' "required"'
            )

    def _check_nothing_declared(self) -> None:
        """A job document is not secret, so counts in it reveal the weights."""
        for key in ("counts", "class_counts"):
            if getattr(self, key):
                raise ValueError(
                    f'{key} would reveal private weights; take it out, or write weights = "public"'
                )

    @property
    def required(self) -> bool:
        """True if the sums are blind.

        No other key has any effect without it.
        """
        return self.secure_aggregation == "required"


def tagged(security: SecurityTable, schema: Schema) -> bool:
    """True if the silos of a blind job agree on a key in order to tag sums.

    Parts that are mixed or compared need a key anyway (``keyed_exchanges``).
    """
    return security.tags and bool(summed_down(schema))


def uploaded(schema: Schema) -> Iterator[SchemaPart]:
    """Every part that silos upload, phase by phase; a part of several phases is repeated."""
    return chain.from_iterable(map(itemgetter("up"), schema))


def exchanges(schema: Schema) -> set[str]:
    """The exchanges by which silos upload anything.

    They are named as by ``schema_name``; ``sum.total`` is always there, for the metrics.
    """
    return {part["exchange"] for part in uploaded(schema)}


def by_method(schema: Schema) -> Iterator[SchemaPart]:
    """The method's uploads, and sums over test records: all but how many are right.

    Like a method's sums of classes, such sums hardly change from round to round, or say as much
    where a constant model is delivered, such as errors of a regression. So the rules for these hold
    for them, too.
    """
    return (part for part in uploaded(schema) if not _counts_right(part))


def _counts_right(part: SchemaPart) -> bool:
    names = [tensor["name"] for tensor in part["tensors"]]
    return part["name"] == METRICS and names == [spec.name for spec in RIGHT.tensors]


def is_summed(part: SchemaPart) -> bool:
    """True if a part is summed, in any of the forms of a sum."""
    return bool(part["exchange"].startswith("sum."))


def keyed_exchanges(schema: Schema) -> bool:
    """True if a part crosses whose blind form takes a key that the job's silos share."""
    return not exchanges(schema).isdisjoint(KEYED)


def for_silos(audience: str, schema: Schema) -> frozenset[str]:
    """Parts of a job without fault whose sums silos alone read.

    The coordinator reads the metrics, so these are not among them.
    """
    return summed_down(schema) if audience == "silos" else frozenset()


def summed_down(schema: Schema) -> frozenset[str]:
    """Parts that are summed and come down; metrics are summed, and do not."""
    # A part that comes down under a sum's name is that sum (``Method.down``).
    down = chain.from_iterable(map(itemgetter("down"), schema))
    return frozenset(_names(filter(is_summed, uploaded(schema))) & _names(down))


def _names(parts: Iterable[SchemaPart]) -> set[str]:
    return {part["name"] for part in parts}


def unblind(schema: Schema) -> Iterator[tuple[int, SchemaPart]]:
    """First round and part of each upload without a blind form (security rule 2)."""
    for phase in schema:
        for part in filter(_visible, phase["up"]):
            yield phase["from_round"], part


def _visible(part: SchemaPart) -> bool:
    """True if the coordinator would see a part, or inner products that disclose it."""
    # For these kinds, inner products disclose the values as well (security rule 2).
    disclosed = Kind[part["kind"].upper()] in DISCLOSED
    return part["exchange"] == "each" or (disclosed and part["exchange"] in COMPARED)


def changed(table: SecurityTable, *keys: str) -> str:
    """The first of these keys that is not at its default, with its value; empty if all are."""
    for key in keys:
        field = SecurityTable.model_fields[key]
        value = getattr(table, key)
        if value != field.get_default(call_default_factory=True):
            return f"{key} = {value!r}"
    return ""
