"""The [security] table of a job: whether its sums are blind, and what the job then declares of its values.

::

    [security]
    secure_aggregation = "required"
    weights = "public"
    counts = { clinic-a = 410, clinic-b = 380, clinic-c = 512, clinic-d = 450 }

Under "required" nobody can open what a silo gives, only sums over the silos of a round. A value that does not change
between rounds must not enter sums over varying sets of silos: two such sums tell it (SECURITY.md rule 1). What does
change tells of single silos too, over many rounds. So sums are of whole fixed batches of silos (batches.py), and of all
silos where more than weighted means is summed. A lost silo costs the round its batch, or all of it where there is one
alone. ``dropouts = "any"`` goes on without it, at that price. What is mixed crosses under pads that the other silos
take off, what is compared crosses rotated: both take a key that all silos of the job share. With ``compare = "shared"``
silos deal shares of it to one another instead, and no key is behind it.
By such a key silos also see whether the coordinator altered what comes down of a sum. They agree on one for that alone,
too, unless the job has ``tags = false``. With ``audience = "silos"`` the coordinator only passes such sums on: it reads
the metrics, and what else it has to compute with.

What is summed class by class shows, of a class that few silos hold, the few. So a round before the first counts the
holders of each class, and only of those that ``min_holders`` silos hold, and ``colluders`` more, rows are given
(class_census.py). Such a job takes that key too: nobody may alter the counts.

What a method wants to know of the silos beforehand, and would ask of each, a blind job declares: how many training
records there are, and with ``class_counts = { clinic-a = [200, 210], … }`` of which class.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ...files.documents import Strict
from ..exchange.parts import DISCLOSED, Kind
from ..method import METRICS

LARGEST = 2**53 - 1  # what canonical JSON can hold
MOST_SILOS = 1000  # of one blind sum
MIXED = ("mix", "mix.directed")
COMPARED = ("gram", "gram.shared")
KEYED = (*MIXED, "gram")  # exchanges whose blind form takes a key that the job's silos share
READERS = {"coordinator", "silos", "sum"}  # of a sum, as specifications and policies name them
FEWEST = 3  # silos of one blind sum: of two, each could take away its own part
LARGEST_MIX_CLIP = 30  # a Mix has 2^32 steps of weight beside its values, in 64 bits; a directed one, 32 bits
MOST_DIRECTED = 80_000  # weights of a round's directed rows: its specification stays below a MiB
SPEC_OF_ROW = 32  # what a row takes of it besides its weights, in weights
MOST_READERS = 1  # in league, of rows whose weights the coordinator brings: two could be combined into one silo's part
LONGEST_COMPARED = 1 << 16  # numbers of a vector, or its sketch: a secret rotation takes 2 d² multiplications
MOST_SHARES = 3 << 20  # bytes of the shares of all compared vectors that one silo is told at once
MOST_PRODUCTS = 1 << 20  # bytes of the shares of inner products that one silo reveals at once

Name = Annotated[str, Field(pattern=r"^[a-z0-9-]{1,64}$")]  # this engine's $ is the very end, no newline passes
Count = Annotated[int, Field(strict=True, ge=1, le=LARGEST)]
ClassCounts = Annotated[tuple[Annotated[int, Field(strict=True, ge=0, le=LARGEST)], ...], Field(min_length=1)]


class SecurityTable(Strict):
    """The [security] table."""

    secure_aggregation: Literal["off", "required"] = "off"
    """Whether the coordinator sees what each silo gives, or only sums over the silos of a round."""
    clip_exponent: Annotated[int, Field(strict=True, ge=-64, le=62)] = 3
    """No number that is summed, counts aside, is above 2 to this power; a round with a larger one is not given."""
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
    """Whether a sum goes on without a lost silo's fixed batch, or without any silo: then sums over many rounds tell
    single silos' updates."""
    tags: Annotated[bool, Field(strict=True)] = True
    """Whether silos tag what they sum, by a key that they share, and check that no result was altered on its way;
    where none comes down to them, there is nothing to tag."""
    min_holders: Annotated[int, Field(strict=True, ge=0, le=MOST_SILOS)] = 0
    """Silos that hold a class before its rows are summed, and ``colluders`` more; 0: as many as ``min_cohort``."""
    audience: Literal["coordinator", "silos"] = "coordinator"
    """Who reads sums that are published as they are: the coordinator and the silos, or the silos alone, with tags."""
    mix: Literal["one-upload", "directed"] = "one-upload"
    """Whether a silo gives what is mixed once, hidden unless the coordinator is in league with a silo, or once for each
    silo that gets a row of it, hidden from coordinator and other silos together."""

    compare: Literal["rotated", "shared"] = "rotated"
    """Whether vectors that are compared cross rotated, hidden unless the coordinator is in league with a silo, or as
    shares among the silos of the round, hidden from the coordinator and up to ``colluders`` silos together."""

    @model_validator(mode="after")
    def _fit(self) -> "SecurityTable":
        if not self.required and (idle := _changed(self, *SecurityTable.model_fields)):
            raise ValueError(f'{idle} does nothing with secure_aggregation = "off"; take it out, or write "required"')
        if self.weight_least > self.weight_most:
            raise ValueError(f"weight_least = {self.weight_least} is above weight_most = {self.weight_most}; lower it")
        if self.counts and self.weights == "private":
            raise ValueError('counts would tell private weights; take it out, or write weights = "public"')
        if 0 < self.min_holders < FEWEST:
            raise ValueError(f"min_holders = {self.min_holders} would show too few; write {FEWEST} or more")
        if self.class_counts and self.weights == "private":
            raise ValueError('class_counts would tell private weights; take it out, or write weights = "public"')
        return self

    @property
    def required(self) -> bool:
        """Whether the sums are blind."""
        return self.secure_aggregation == "required"


def cohort_fault(
    security: SecurityTable,
    silos: Sequence[str],
    cohort_size: int,
    min_cohort: int,
    participation: float,
    quorum: float,
    batched: bool,
) -> str:
    """Why the silos of a job and of its rounds do not fit blind sums; empty if they do."""
    if not security.required:
        return ""
    if len(silos) > MOST_SILOS:
        return f"silos names {len(silos)}, a blind sum takes {MOST_SILOS} at most; sign a job for fewer"
    if min_cohort < FEWEST:
        return f'min_cohort = {min_cohort}, security.secure_aggregation = "required" takes {FEWEST} or more; raise it'
    needed = 3 * security.colluders + 1
    if cohort_size < needed:
        fix = "name more silos" if cohort_size == len(silos) else "raise participation"
        return (
            f"security.colluders = {security.colluders} takes {needed} silos or more in a round, this job has "
            f"{cohort_size}; {fix}, or lower colluders"
        )
    if security.dropouts == "any" and security.weights == "private":
        return (
            'security.dropouts = "any" with private weights: sums over changing silos tell the weight of one; take it '
            'out, or write security.weights = "public" with counts'
        )
    if participation < 1 and security.dropouts == "batches" and not batched:
        return (
            f"participation = {participation:g}: {len(silos)} silos are too few for two batches that are summed in "
            "turn, and sums over changing silos tell single ones over many rounds; write participation = 1.0, or name "
            'more silos (or accept that: security.dropouts = "any", with public weights)'
        )
    if quorum < 1:
        return f"quorum = {quorum:g} does nothing in a blind job, which waits for all that are there; take it out"
    if security.weights == "public" and set(security.counts) != set(silos):
        return _counts_fault(security.counts, silos)
    return ""


def classes_fault(security: SecurityTable, silos: Sequence[str], classes: int, wanted: bool) -> str:
    """Why the declared class counts are not what the job's method needs; empty if they are.

    ``wanted``: whether it compares the silos' labels.
    """
    if not security.required:
        return ""
    declared = security.class_counts
    if not wanted:
        return "security.class_counts does nothing: no labels are compared; take it out" if declared else ""
    missing = [silo for silo in silos if silo not in declared]
    if missing:
        return (
            "compares the labels of the silos, which do not cross blind: declare them, security.class_counts = { silo "
            f"= [training records of each class] }}; it lacks {', '.join(missing)}"
        )
    if strange := sorted(set(declared) - set(silos)):
        return f"security.class_counts has {', '.join(strange)}, no silo of the job; take it out"
    for silo in silos:
        own, total = declared[silo], security.counts[silo]
        if len(own) != classes:
            return f"security.class_counts.{silo} has {len(own)} numbers, model.classes = {classes}; give one for each"
        if sum(own) != total:
            return (
                f"security.class_counts.{silo} adds up to {sum(own)}, security.counts.{silo} = {total}; make them agree"
            )
    return ""


def sums_fault(
    security: SecurityTable,
    schema: Sequence[Mapping[str, Any]],
    varying: bool,
    others: int,
    min_cohort: int,
    suitable: Callable[[], Sequence[str]],
) -> str:
    """Why what a job's rounds give cannot cross blind; empty if it can.

    ``schema`` is that of the document, ``varying`` says whether its rounds may have different silos, ``others`` is how
    many silos there are beside one, and ``suitable`` names the methods whose parts all have a blind form.
    """
    if not security.required:
        return ""
    # (1) Everything is summed, mixed or compared, and nothing that its inner products would disclose is compared.
    if clear := list(unblind(schema)):
        first, part = clear[0]
        name, exchange, kind = part["name"], part["exchange"], part["kind"].lower()
        names = ", ".join(suitable())
        choose = f"choose a method that needs no such part ({names}), or write" if names else "write"
        return (
            f"part {name!r} ({kind}) crosses by {exchange!r} from round {first} on, which has no blind form: {choose} "
            'security.secure_aggregation = "off"'
        )
    # (2) Over changing silos, only means by weights that are declared.
    given = [part for phase in schema for part in phase["up"]]
    parts = [part for part in given if part["name"] != METRICS.name and part["exchange"] not in (*KEYED, *COMPARED)]
    told = next((part for part in parts if part["exchange"] != "sum.mean"), None)
    if varying and told:
        return (
            f"part {told['name']!r} ({told['exchange']}) may hold what hardly changes between rounds, such as the "
            "classes of a silo: sums over changing silos tell it of one; write participation = 1.0, and leave out "
            "security.dropouts"
        )
    # (3) Whoever is mixed for can have a row at all (SECURITY.md rule 4), of values that its words can hold.
    if mixed := next((part["name"] for part in given if part["exchange"] in MIXED), ""):
        if others < min_cohort:
            return (
                f"part {mixed!r} is mixed for each silo from at least min_cohort = {min_cohort} others, and there are "
                f"{others}: nobody would get anything; lower min_cohort, or name more silos"
            )
        if security.clip_exponent > LARGEST_MIX_CLIP:
            return (
                f"part {mixed!r} is mixed, in which values are 2^{LARGEST_MIX_CLIP} at most, security.clip_exponent = "
                f"{security.clip_exponent}; lower it"
            )
    # (4) What is compared can be rotated.
    for part in (part for part in given if part["exchange"] == "gram"):
        if (width := part["tensors"][0]["shape"][-1]) > LONGEST_COMPARED:
            return (
                f"part {part['name']!r} compares vectors of {width} numbers, too long to be rotated; choose a "
                f"smaller model, or options by which it compares {LONGEST_COMPARED} or fewer"
            )
    # (5) The bounds of private weights bound something.
    idle = _changed(security, "weight_least", "weight_most")
    if idle and security.weights == "public" and not any(map(_counts_rows, parts)):
        return f"security.{idle} does nothing: this job's weights stand in counts; take it out"
    # (6) Public weights are counts of records, not 1 of each silo.
    if security.weights == "public":
        for part in (part for part in parts if part["exchange"] == "sum.mean" and _largest_weight(part) <= 1):
            return (
                f"part {part['name']!r} counts each silo once, so declared counts of records cannot stand for its "
                'weights; write security.weights = "private"'
            )
    return ""


def tags_fault(security: SecurityTable, schema: Sequence[Mapping[str, Any]], counted: bool) -> str:
    """Why to do without tags would change nothing in a job, or its audience hide nothing; empty if it does.

    ``counted``: whether the job is blind and sums class by class.
    """
    if not security.required:
        return ""
    down, hidden = summed_down(schema), security.audience != "coordinator"
    if hidden and not down:
        return "security.audience does nothing: no sum comes down to silos as it was opened; take it out"
    if security.tags:
        return ""
    if hidden or counted or keyed_exchanges(schema):
        why = "its silos share a key for what they hide or count, and tag by it in any case"
    else:
        why = "" if down else "no sum comes down to silos as it was opened, so that none is tagged"
    return f"security.tags = false does nothing: {why}; take it out" if why else ""


def tagged(security: SecurityTable, schema: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the silos of a blind job without fault agree on a key to tag, if they need none for anything else."""
    return security.tags and bool(summed_down(schema))


def keyed_exchanges(schema: Sequence[Mapping[str, Any]]) -> bool:
    """Whether something crosses whose blind form takes a key that the job's silos share."""
    return any(part["exchange"] in KEYED for phase in schema for part in phase["up"])


def for_silos(audience: str, schema: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Parts of a job without fault whose sums silos alone read."""
    return summed_down(schema) if audience == "silos" else frozenset()


def summed_down(schema: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Parts that are summed and come down; metrics are summed, and do not."""
    given = {part["name"] for phase in schema for part in phase["up"] if part["exchange"].startswith("sum.")}
    return frozenset(part["name"] for phase in schema for part in phase["down"] if part["name"] in given)


def holders_fault(security: SecurityTable, counted: bool, min_cohort: int, silos: int) -> str:
    """Why the fewest holders of a class do not fit a job (SECURITY.md rule 7); empty if they do.

    ``counted``: whether the job is blind and sums class by class.
    """
    own = security.min_holders
    if not counted:
        return f"security.min_holders = {own} does nothing: no class is summed; take it out" if own else ""
    fewest = own or min_cohort
    if fewest + security.colluders <= silos:
        return ""
    said = f"security.min_holders = {own}" if own else f"min_cohort = {min_cohort}"
    return (
        f"a class is summed where as many silos hold it as {said} says and colluders = {security.colluders} more, and "
        f"there are {silos}, so none would be; lower one of them, or name more silos"
    )


def mix_fault(
    security: SecurityTable,
    schema: Sequence[Mapping[str, Any]],
    silos: Sequence[str],
    cohort_size: int,
    min_cohort: int,
    readers: Literal["", "away", "members"],
) -> str:
    """Why a job cannot mix by directed sums; empty if it can, or is not to.

    ``readers``: for whom the method has rows, as ``Method.directed_for``.
    """
    if security.mix != "directed":
        return ""
    mixed = next((part["name"] for phase in schema for part in phase["up"] if part["exchange"] in MIXED), "")
    if not mixed:
        return f'security.mix = "{security.mix}" does nothing: no part is mixed; take it out'
    if not readers:
        return (
            f'security.mix = "{security.mix}": the weights by which part {mixed!r} is mixed follow from the very round '
            "in which it is given, and a directed sum takes them before; take it out, or choose fedsimsup or pfedsim"
        )
    if taken := sorted(READERS & set(silos)):
        return (
            f'security.mix = "{security.mix}": a silo named {taken[0]!r} could not be told from other readers of'
            " its sums; take it out"
        )
    if readers == "members" and (fault := _members_fault(security, mixed, cohort_size, min_cohort)):
        return fault
    of, how = (cohort_size, "in") if readers == "members" else (len(silos) - cohort_size, "away in")
    if of * (cohort_size + SPEC_OF_ROW) > MOST_DIRECTED:
        return (
            f'security.mix = "{security.mix}": {of} silos are {how} a round, each with its own weights of '
            f"{cohort_size}, more than one specification holds; sign a job for fewer silos, or take it out"
        )
    return ""


def _members_fault(security: SecurityTable, part: str, cohort_size: int, min_cohort: int) -> str:
    """The same of rows for a round's own members, whose weights the coordinator brings."""
    if security.colluders > MOST_READERS:
        return (
            f'security.mix = "{security.mix}" with security.colluders = {security.colluders}: the coordinator weighs '
            f"the rows of part {part!r}, and by rows for {security.colluders} silos of a round it could solve for a "
            f"single other; lower colluders to {MOST_READERS}, or take mix out"
        )
    if cohort_size - 1 < min_cohort:
        return (
            f"part {part!r} is mixed for each silo of a round from at least min_cohort = {min_cohort} others of it, "
            f"and there are {cohort_size - 1}: nobody would get anything; lower min_cohort, or raise participation"
        )
    return ""


def compare_fault(security: SecurityTable, schema: Sequence[Mapping[str, Any]], silos: int) -> str:
    """Why a job cannot compare by shares; empty if it can, or is not to. ``silos`` are those of its largest round."""
    if security.compare != "shared":
        return ""
    said, rounds = f'security.compare = "{security.compare}"', [_compared(phase) for phase in schema]
    if not any(rounds):
        return f"{said} does nothing: no part is compared; take it out"
    for parts in rounds:
        if len(parts) > 1:
            names = ", ".join(part["name"] for part in parts)
            return f"{said}: {names} are compared in one round, by shares one part can be; take it out"
    for part in (part for parts in rounds for part in parts):
        if "sketch_of" in part:
            return (
                f"{said}: part {part['name']!r} crosses as sketches, whose map has to be a secret of the silos; have "
                "whole vectors compared by the method's options, or take it out"
            )
        groups, width = part["tensors"][0]["shape"]
        told, products = 8 * silos * groups * (width + silos), 4 * groups * silos * (silos + 1)
        if told > MOST_SHARES or products > MOST_PRODUCTS or width > LONGEST_COMPARED:
            return (
                f"{said}: part {part['name']!r} has {groups} vectors of {width} numbers, of which {silos} silos deal "
                f"{told:,} bytes to each silo ({MOST_SHARES:,} at most) and reveal {products:,} bytes of products "
                f"({MOST_PRODUCTS:,} at most); name fewer silos, choose a smaller model, or take it out"
            )
    return ""


def _compared(phase: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [part for part in phase["up"] if part["exchange"] in COMPARED]


def unblind(schema: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """First round and part of everything that silos give by an exchange without a blind form (SECURITY.md rule 2)."""
    for phase in schema:
        for part in phase["up"]:
            disclosed = part["exchange"] in COMPARED and Kind[part["kind"].upper()] in DISCLOSED
            if part["exchange"] == "each" or disclosed:
                yield phase["from_round"], part


def _counts_fault(counts: Mapping[str, int], silos: Sequence[str]) -> str:
    missing = [silo for silo in silos if silo not in counts]
    if missing:
        return f"security.counts lacks {', '.join(missing)}; public weights need the training records of each silo"
    strange = sorted(set(counts) - set(silos))
    return f"security.counts has {', '.join(strange)}, no silo of the job; take it out"


def _counts_rows(part: Mapping[str, Any]) -> bool:
    """Whether a part is weighted row by row, by more than having the row or not: never by public weights."""
    return part["exchange"] == "sum.ratio" and _largest_weight(part) > 1


def _largest_weight(part: Mapping[str, Any]) -> float:
    """Of a part that is summed by weights, which cross last."""
    return float(part["tensors"][-1].get("most", LARGEST))


def _changed(table: SecurityTable, *keys: str) -> str:
    """The first of these keys that is not at its default, with its value; empty if all are."""
    for key in keys:
        field = SecurityTable.model_fields[key]
        if (value := getattr(table, key)) != field.get_default(call_default_factory=True):
            return f"{key} = {value!r}"
    return ""
