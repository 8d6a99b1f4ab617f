"""The rules that a blind job keeps, one function per rule: it says why a job breaks it, or nothing.

``cohort_fault`` asks the rules about silos and cohorts, ``crossing_fault`` those about what its
rounds send. The first broken rule speaks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..method import METRICS, Method
from .class_census import ClassCensus
from .security import (
    COMPARED,
    FEWEST,
    KEYED,
    LARGEST,
    LONGEST_COMPARED,
    MIXED,
    MOST_PRODUCTS,
    MOST_SHARES,
    MOST_SILOS,
    SecurityTable,
    changed,
    keyed_exchanges,
    summed_down,
    unblind,
)

# a Mix has 2^32 steps of weight beside its values, in 64 bits; a directed one, 32 bits
LARGEST_MIX_CLIP = 30
MOST_DIRECTED = 80_000  # weights of a round's directed rows: its specification stays below a MiB
SPEC_OF_ROW = 32  # what a row takes of it besides its weights, in weights
# in league, of rows whose weights the coordinator brings: two could be combined into one silo's
# part
MOST_READERS = 1
READERS = {"coordinator", "silos", "sum"}  # of a sum, as specifications and policies name them

DIRECTED = 'security.mix = "directed"'
SHARED = 'security.compare = "shared"'
OUT = "take it out"

SchemaPart = Mapping[str, Any]  # as schema.py writes it


@dataclass(frozen=True)
class Draw:
    """The silos of a job and how its rounds draw them, as ``Job`` has it."""

    security: SecurityTable
    silos: tuple[str, ...]
    cohort_size: int
    min_cohort: int
    participation: float
    quorum: float
    batched: bool


@dataclass(frozen=True)
class Crossing:
    """What crosses in the rounds of a blind job: its configured method, the schema of its
    document.
    """

    job: Draw
    method: Method
    schema: Sequence[Mapping[str, Any]]
    blind_methods: Callable[[], Sequence[str]]  # names of methods whose parts all have a blind form

    @property
    def security(self) -> SecurityTable:
        """The job's table."""
        return self.job.security

    @property
    def counted(self) -> bool:
        """Whether round 0 counts the holders of each class."""
        return isinstance(self.method, ClassCensus)

    @cached_property
    def up(self) -> list[SchemaPart]:
        """Every part of every phase that silos upload."""
        return [part for phase in self.schema for part in phase["up"]]

    @cached_property
    def summed(self) -> list[SchemaPart]:
        """Those of the method that are summed."""
        others = (*KEYED, *COMPARED)
        return [p for p in self.up if p["name"] != METRICS.name and p["exchange"] not in others]

    @cached_property
    def mixed(self) -> str:
        """The name of the first part that is mixed; empty if none is."""
        return next((part["name"] for part in self.up if part["exchange"] in MIXED), "")


def cohort_fault(job: Draw) -> str:
    """Why the silos of a job and its rounds do not fit blind sums.

    Empty if they do, or need not.
    """
    if not job.security.required:
        return ""
    return next(filter(None, (rule(job) for rule in COHORT_RULES)), "")


def crossing_fault(crossing: Crossing) -> str:
    """Why what a job's rounds send cannot cross blind; empty if it can, or need not."""
    if not crossing.security.required:
        return ""
    return next(filter(None, (rule(crossing) for rule in CROSSING_RULES)), "")


# Silos and cohorts.


def _too_many_silos(job: Draw) -> str:
    if len(job.silos) <= MOST_SILOS:
        return ""
    return (
        f"silos names {len(job.silos)}, a blind sum takes {MOST_SILOS} at most; sign a job for"
        " fewer"
    )


def _min_cohort_too_small(job: Draw) -> str:
    if job.min_cohort >= FEWEST:
        return ""
    blind = 'security.secure_aggregation = "required"'
    return f"min_cohort = {job.min_cohort}, {blind} takes {FEWEST} or more; raise it"


def _too_few_for_colluders(job: Draw) -> str:
    colluders, size = job.security.colluders, job.cohort_size
    needed = 3 * colluders + 1
    if size >= needed:
        return ""
    fix = "name more silos" if size == len(job.silos) else "raise participation"
    return (
        f"security.colluders = {colluders} takes {needed} silos or more in a round, this job has "
        f"{size}; {fix}, or lower colluders"
    )


def _weights_over_changing_silos(job: Draw) -> str:
    if job.security.dropouts == "batches" or job.security.weights == "public":
        return ""
    return (
        'security.dropouts = "any" with private weights: sums over changing silos tell the '
        "weight of one; take it "
        'out, or write security.weights = "public" with counts'
    )


def _too_few_for_batches(job: Draw) -> str:
    if job.participation == 1 or job.security.dropouts == "any" or job.batched:
        return ""
    return (
        f"participation = {job.participation:g}: {len(job.silos)} silos are too few for two "
        "batches that are summed in "
        "turn, and sums over changing silos tell single ones over many rounds; write "
        "participation = 1.0, or name "
        'more silos (or accept that: security.dropouts = "any", with public weights)'
    )


def _idle_quorum(job: Draw) -> str:
    if job.quorum == 1:
        return ""
    return (
        f"quorum = {job.quorum:g} does nothing in a blind job, which waits for all that are there;"
        f" {OUT}"
    )


def _counts_of_other_silos(job: Draw) -> str:
    counts = job.security.counts
    if job.security.weights == "private":
        return ""
    if missing := [silo for silo in job.silos if silo not in counts]:
        return (
            f"security.counts lacks {', '.join(missing)}; public weights need the training records"
            " of each silo"
        )
    if strange := sorted(set(counts) - set(job.silos)):
        return f"security.counts has {', '.join(strange)}, no silo of the job; {OUT}"
    return ""


COHORT_RULES: tuple[Callable[[Draw], str], ...] = (
    _too_many_silos,
    _min_cohort_too_small,
    _too_few_for_colluders,
    _weights_over_changing_silos,
    _too_few_for_batches,
    _idle_quorum,
    _counts_of_other_silos,
)


# Class counts.


def _idle_class_counts(crossing: Crossing) -> str:
    if crossing.method.compares_labels or not crossing.security.class_counts:
        return ""
    return f"security.class_counts does nothing: no labels are compared; {OUT}"


def _class_counts_of_other_silos(crossing: Crossing) -> str:
    if not crossing.method.compares_labels:
        return ""
    declared, silos = crossing.security.class_counts, crossing.job.silos
    if missing := [silo for silo in silos if silo not in declared]:
        return (
            "compares the labels of the silos, which do not cross blind: declare them, "
            "security.class_counts = { silo "
            f"= [training records of each class] }}; it lacks {', '.join(missing)}"
        )
    if strange := sorted(set(declared) - set(silos)):
        return f"security.class_counts has {', '.join(strange)}, no silo of the job; {OUT}"
    return ""


def _class_counts_that_disagree(crossing: Crossing) -> str:
    declared, classes = crossing.security.class_counts, crossing.method.setting.classes
    for silo in filter(declared.__contains__, crossing.job.silos):
        key, numbers, total = (
            f"security.class_counts.{silo}",
            declared[silo],
            crossing.security.counts[silo],
        )
        if len(numbers) != classes:
            return f"{key} has {len(numbers)} numbers, model.classes = {classes}; give one for each"
        if sum(numbers) != total:
            return (
                f"{key} adds up to {sum(numbers)}, security.counts.{silo} = {total}; make them"
                " agree"
            )
    return ""


# Exchanges.


def no_blind_form(crossing: Crossing) -> str:
    """All is summed, mixed or compared; nothing is compared that its inner products disclose."""
    first, part = next(unblind(crossing.schema), (0, None))
    if part is None:
        return ""
    kind, methods = part["kind"].lower(), ", ".join(crossing.blind_methods())
    choose = (
        f"choose a method that needs no such part ({methods}), or write" if methods else "write"
    )
    return (
        f"part {part['name']!r} ({kind}) crosses by {part['exchange']!r} from round {first} "
        "on, which has no blind "
        f'form: {choose} security.secure_aggregation = "off"'
    )


def _what_hardly_changes(crossing: Crossing) -> str:
    """Over changing silos, only means by weights that are declared."""
    if crossing.job.participation == 1 and crossing.security.dropouts == "batches":
        return ""
    part = next((part for part in crossing.summed if part["exchange"] != "sum.mean"), None)
    if part is None:
        return ""
    return (
        f"part {part['name']!r} ({part['exchange']}) may hold what hardly changes between "
        "rounds, such as the "
        "classes of a silo: sums over changing silos tell it of one; write participation = "
        "1.0, and leave out "
        "security.dropouts"
    )


def _mixed_from_too_few(crossing: Crossing) -> str:
    """Whoever is mixed for can have a row at all (SECURITY.md rule 4)."""
    others, fewest = len(crossing.job.silos) - 1, crossing.job.min_cohort
    if not crossing.mixed or others >= fewest:
        return ""
    return (
        f"part {crossing.mixed!r} is mixed for each silo from at least min_cohort = {fewest} "
        "others, and there are "
        f"{others}: nobody would get anything; lower min_cohort, or name more silos"
    )


def _mixed_beyond_words(crossing: Crossing) -> str:
    """The words of a mix can hold its values."""
    exponent = crossing.security.clip_exponent
    if not crossing.mixed or exponent <= LARGEST_MIX_CLIP:
        return ""
    return (
        f"part {crossing.mixed!r} is mixed, in which values are 2^{LARGEST_MIX_CLIP} at most, "
        "security.clip_exponent = "
        f"{exponent}; lower it"
    )


def _too_long_to_rotate(crossing: Crossing) -> str:
    for part in crossing.up:
        width = part["tensors"][0]["shape"][-1] if part["exchange"] == "gram" else 0
        if width > LONGEST_COMPARED:
            return (
                f"part {part['name']!r} compares vectors of {width} numbers, too long to be "
                "rotated; choose a "
                f"smaller model, or options by which it compares {LONGEST_COMPARED} or fewer"
            )
    return ""


def _idle_weight_bounds(crossing: Crossing) -> str:
    """The bounds of private weights bound something: rows are never weighted by public weights."""
    idle = changed(crossing.security, "weight_least", "weight_most")
    if not idle or crossing.security.weights == "private":
        return ""
    ratios = [part for part in crossing.summed if part["exchange"] == "sum.ratio"]
    if any(_largest_weight(part) > 1 for part in ratios):
        return ""
    return f"security.{idle} does nothing: this job's weights stand in counts; {OUT}"


def _counts_each_silo_once(crossing: Crossing) -> str:
    """Public weights are counts of records, not 1 of each silo."""
    if crossing.security.weights == "private":
        return ""
    means = [part for part in crossing.summed if part["exchange"] == "sum.mean"]
    part = next((part for part in means if _largest_weight(part) <= 1), None)
    if part is None:
        return ""
    return (
        f"part {part['name']!r} counts each silo once, so declared counts of records cannot "
        "stand for its "
        'weights; write security.weights = "private"'
    )


def _largest_weight(part: SchemaPart) -> float:
    """Of a part that is summed by weights, which cross last."""
    return float(part["tensors"][-1].get("most", LARGEST))


# Tags, audience and holders.


def _idle_audience(crossing: Crossing) -> str:
    if crossing.security.audience == "coordinator" or summed_down(crossing.schema):
        return ""
    return f"security.audience does nothing: no sum comes down to silos as it was opened; {OUT}"


def _idle_lack_of_tags(crossing: Crossing) -> str:
    security = crossing.security
    if security.tags:
        return ""
    said = "security.tags = false does nothing"
    if security.audience == "silos" or crossing.counted or keyed_exchanges(crossing.schema):
        return (
            f"{said}: its silos share a key for what they hide or count, and tag by it in any case;"
            f" {OUT}"
        )
    if not summed_down(crossing.schema):
        return f"{said}: no sum comes down to silos as it was opened, so that none is tagged; {OUT}"
    return ""


def _idle_min_holders(crossing: Crossing) -> str:
    if crossing.counted or not crossing.security.min_holders:
        return ""
    return (
        f"security.min_holders = {crossing.security.min_holders} does nothing: no class is summed;"
        f" {OUT}"
    )


def _never_enough_holders(crossing: Crossing) -> str:
    """Some class can be summed at all (SECURITY.md rule 7)."""
    job, own = crossing.job, crossing.security.min_holders
    fewest = (own or job.min_cohort) + job.security.colluders
    if not crossing.counted or fewest <= len(job.silos):
        return ""
    said = f"security.min_holders = {own}" if own else f"min_cohort = {job.min_cohort}"
    return (
        f"a class is summed where as many silos hold it as {said} says and colluders = "
        f"{job.security.colluders} more, "
        f"and there are {len(job.silos)}, so none would be; lower one of them, or name more silos"
    )


# Directed sums.


def _directed(rule: Callable[[Crossing], str]) -> Callable[[Crossing], str]:
    """A rule for jobs that mix by directed sums alone."""
    return lambda crossing: rule(crossing) if crossing.security.mix == "directed" else ""


def _idle_mix(crossing: Crossing) -> str:
    return "" if crossing.mixed else f"{DIRECTED} does nothing: no part is mixed; {OUT}"


def _weights_known_too_late(crossing: Crossing) -> str:
    if crossing.method.directed_for:
        return ""
    return (
        f"{DIRECTED}: the weights by which part {crossing.mixed!r} is mixed follow from the "
        "very round "
        "in which it is given, and a directed sum takes them before; take it out, or choose "
        "fedsimsup or pfedsim"
    )


def _named_as_other_readers(crossing: Crossing) -> str:
    taken = sorted(READERS & set(crossing.job.silos))
    if not taken:
        return ""
    return (
        f"{DIRECTED}: a silo named {taken[0]!r} could not be told from other readers of its sums;"
        f" {OUT}"
    )


def _members_in_league(crossing: Crossing) -> str:
    """The coordinator weighs the rows of members, and could combine those of two colluders."""
    colluders = crossing.security.colluders
    if crossing.method.directed_for != "members" or colluders <= MOST_READERS:
        return ""
    return (
        f"{DIRECTED} with security.colluders = {colluders}: the coordinator weighs "
        f"the rows of part {crossing.mixed!r}, and by rows for {colluders} silos of a round it "
        "could solve for a "
        f"single other; lower colluders to {MOST_READERS}, or take mix out"
    )


def _members_from_too_few(crossing: Crossing) -> str:
    others, fewest = crossing.job.cohort_size - 1, crossing.job.min_cohort
    if crossing.method.directed_for != "members" or others >= fewest:
        return ""
    return (
        f"part {crossing.mixed!r} is mixed for each silo of a round from at least min_cohort = "
        f"{fewest} others of it, "
        f"and there are {others}: nobody would get anything; lower min_cohort, or raise "
        "participation"
    )


def _too_many_weights(crossing: Crossing) -> str:
    size = crossing.job.cohort_size
    members = crossing.method.directed_for == "members"
    rows = size if members else len(crossing.job.silos) - size
    if rows * (size + SPEC_OF_ROW) <= MOST_DIRECTED:
        return ""
    return (
        f"{DIRECTED}: {rows} silos are {'in' if members else 'away in'} a round, each with its "
        "own weights of "
        f"{size}, more than one specification holds; sign a job for fewer silos, or take it out"
    )


# Comparisons by shares.


def _shared(rule: Callable[[Sequence[SchemaPart], Crossing], str]) -> Callable[[Crossing], str]:
    """A rule for what a phase compares by shares, asked phase by phase."""

    def ask(crossing: Crossing) -> str:
        if crossing.security.compare != "shared":
            return ""
        phases = [
            [p for p in phase["up"] if p["exchange"] in COMPARED] for phase in crossing.schema
        ]
        return next(filter(None, (rule(compared, crossing) for compared in phases)), "")

    return ask


def _idle_compare(crossing: Crossing) -> str:
    if crossing.security.compare != "shared" or any(
        part["exchange"] in COMPARED for part in crossing.up
    ):
        return ""
    return f"{SHARED} does nothing: no part is compared; {OUT}"


def _several_compared(compared: Sequence[SchemaPart], _: Crossing) -> str:
    if len(compared) <= 1:
        return ""
    names = ", ".join(part["name"] for part in compared)
    return f"{SHARED}: {names} are compared in one round, by shares one part can be; {OUT}"


def _not_by_shares(compared: Sequence[SchemaPart], crossing: Crossing) -> str:
    for part in compared:
        if fault := _sketched(part) or _too_many_shares(part, crossing):
            return fault
    return ""


def _sketched(part: SchemaPart) -> str:
    if "sketch_of" not in part:
        return ""
    return (
        f"{SHARED}: part {part['name']!r} crosses as sketches, whose map has to be a secret of "
        "the silos; have "
        "whole vectors compared by the method's options, or take it out"
    )


def _too_many_shares(part: SchemaPart, crossing: Crossing) -> str:
    groups, width = part["tensors"][0]["shape"]
    drawn = crossing.method.setting.drawn
    # of the largest round
    silos = max(len(drawn(phase["from_round"])) for phase in crossing.schema)
    shares, products = 8 * silos * groups * (width + silos), 4 * groups * silos * (silos + 1)
    if shares <= MOST_SHARES and products <= MOST_PRODUCTS and width <= LONGEST_COMPARED:
        return ""
    return (
        f"{SHARED}: part {part['name']!r} has {groups} vectors of {width} numbers, of which "
        f"{silos} silos deal "
        f"{shares:,} bytes to each silo ({MOST_SHARES:,} at most) and reveal {products:,} "
        "bytes of products "
        f"({MOST_PRODUCTS:,} at most); name fewer silos, choose a smaller model, or take it out"
    )


CROSSING_RULES: tuple[Callable[[Crossing], str], ...] = (
    _idle_class_counts,
    _class_counts_of_other_silos,
    _class_counts_that_disagree,
    no_blind_form,
    _what_hardly_changes,
    _mixed_from_too_few,
    _mixed_beyond_words,
    _too_long_to_rotate,
    _idle_weight_bounds,
    _counts_each_silo_once,
    _idle_audience,
    _idle_lack_of_tags,
    _idle_min_holders,
    _never_enough_holders,
    *map(_directed, (_idle_mix, _weights_known_too_late, _named_as_other_readers)),
    *map(_directed, (_members_in_league, _members_from_too_few, _too_many_weights)),
    _idle_compare,
    *map(_shared, (_several_compared, _not_by_shares)),
)
