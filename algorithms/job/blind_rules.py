"""The rules that a blind job keeps, one function per rule.

``COHORT`` holds the rules about silos and cohorts, ``CROSSING`` those about what the job's rounds
send. The first broken rule says why the job is rejected, so the order of this file matters: what
a rule takes for granted, an earlier one has checked.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, filterfalse
from typing import Generic, TypeVar

from ..exchange.parts import Kind
from ..method import Method
from .class_census import ClassCensus
from .security import (
    COMPARED,
    FEWEST,
    LARGEST,
    LONGEST_COMPARED,
    MIXED,
    MOST_PRODUCTS,
    MOST_SHARES,
    MOST_SILOS,
    Schema,
    SchemaPart,
    SecurityTable,
    by_method,
    changed,
    is_summed,
    keyed_exchanges,
    summed_down,
    unblind,
    uploaded,
)

# A word of 64 bits holds a Mix's values and its 2^32 steps of weight (security rule 19).
LARGEST_MIX_CLIP = 30
MOST_DIRECTED = 80_000  # weights of a round's directed rows: its specification stays below a MiB
SPEC_OF_ROW = 32  # the size of a row in it without its weights, in weights
# Colluding readers of rows whose weights the coordinator chooses: by the rows of two, it could
# solve for one silo's part.
MOST_READERS = 1
READERS = {"coordinator", "silos", "sum"}  # names of a sum's readers in specifications, policies

DIRECTED = 'security.mix = "directed"'
SHARED = 'security.compare = "shared"'
OUT = "take it out"


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
    """The parts that cross in a blind job: its configured method, its document's schema.

    The rules of ``CROSSING`` judge it. Its lists are cached, since several rules read them.
    """

    job: Draw
    method: Method
    schema: Schema
    blind_methods: Callable[[], Sequence[str]]  # names of methods whose parts all have a blind form

    @property
    def security(self) -> SecurityTable:
        """The job's table."""
        return self.job.security

    @property
    def counted(self) -> bool:
        """True if round 0 counts the holders of each class.

        A blind job needs that if it sums class by class (class_census.py).
        """
        return isinstance(self.method, ClassCensus)

    @cached_property
    def up(self) -> list[SchemaPart]:
        """Every part of every phase that silos upload.

        A part that is in several phases is there several times.
        """
        return list(uploaded(self.schema))

    @cached_property
    def summed(self) -> list[SchemaPart]:
        """The method's parts that are summed, and tables of test counts; not METRICS."""
        return list(filter(is_summed, by_method(self.schema)))

    def summed_by(self, exchange: str) -> list[SchemaPart]:
        """The method's parts summed by one exchange, such as ``sum.mean``."""
        return [part for part in self.summed if part["exchange"] == exchange]

    @cached_property
    def mixed(self) -> str:
        """The name of the first part that is mixed; empty if none is."""
        names = (part["name"] for part in self.up if part["exchange"] in MIXED)
        return next(names, "")

    @cached_property
    def compared(self) -> list[list[SchemaPart]]:
        """The parts that are compared, phase by phase."""
        return [list(filter(_is_compared, phase["up"])) for phase in self.schema]

    @property
    def for_members(self) -> bool:
        """True if rows are mixed for the members of a round, not for those who are away.

        Members' weights are chosen by the coordinator; those of absent silos follow from the job's
        declarations.
        """
        return self.method.directed_for == "members"

    @property
    def row_readers(self) -> int:
        """Silos that get a directed row in each round."""
        size = self.job.cohort_size
        return size if self.for_members else len(self.job.silos) - size


Subject = TypeVar("Subject")
Rule = Callable[[Subject], str]  # says why it is broken, and what to do; nothing if it is kept


class JobRules(Generic[Subject]):
    """Rules about one subject, in the order in which they are written.

    The order matters, since a rule may rely on what an earlier one has checked.
    """

    def __init__(self) -> None:
        self._rules: list[Rule[Subject]] = []

    def broken_where(
        self, *conditions: Callable[[Subject], bool]
    ) -> Callable[[Rule[Subject]], Rule[Subject]]:
        """Add a rule that speaks only where all conditions hold.

        Under conditions that are only necessary, the function itself looks further.
        """

        def add(says: Rule[Subject]) -> Rule[Subject]:
            def rule(subject: Subject) -> str:
                applies = all(condition(subject) for condition in conditions)
                return says(subject) if applies else ""

            self._rules.append(rule)
            return rule

        return add

    def fault(self, subject: Subject) -> str:
        """The text of the first broken rule; empty if all are kept.

        Rules after it are not evaluated.
        """
        faults = (rule(subject) for rule in self._rules)
        return next(filter(None, faults), "")


COHORT, CROSSING = JobRules[Draw](), JobRules[Crossing]()


def cohort_fault(job: Draw) -> str:
    """Why the silos of a job and its rounds do not fit blind sums.

    Empty if they do, or need not.
    """
    # Without blind sums the coordinator sees every upload, so there is nothing to protect.
    return COHORT.fault(job) if job.security.required else ""


def crossing_fault(crossing: Crossing) -> str:
    """Why what a job's rounds send cannot cross blind; empty if it can, or need not.

    Call ``cohort_fault`` first: these rules rely on its rules about the silos.
    """
    return CROSSING.fault(crossing) if crossing.security.required else ""


# Conditions that several rules share.


def _public_weights(subject: Draw | Crossing) -> bool:
    return subject.security.weights == "public"


def _sums_without_anyone(subject: Draw | Crossing) -> bool:
    return subject.security.dropouts == "any"


def _compares_labels(crossing: Crossing) -> bool:
    return crossing.method.compares_labels


def _mixes(crossing: Crossing) -> bool:
    return bool(crossing.mixed)


def _mixes_directed(crossing: Crossing) -> bool:
    return crossing.security.mix == "directed"


def _for_members(crossing: Crossing) -> bool:
    return crossing.for_members


def _compares_by_shares(crossing: Crossing) -> bool:
    return crossing.security.compare == "shared"


def _is_compared(part: SchemaPart) -> bool:
    return bool(part["exchange"] in COMPARED)


# Silos and cohorts.


@COHORT.broken_where(lambda job: len(job.silos) > MOST_SILOS)
def _too_many_silos(job: Draw) -> str:
    return (
        f"silos names {len(job.silos)}, a blind sum takes {MOST_SILOS} at most; sign a job for"
        " fewer"
    )


@COHORT.broken_where(lambda job: job.min_cohort < FEWEST)
def _min_cohort_too_small(job: Draw) -> str:
    blind = 'security.secure_aggregation = "required"'
    return f"min_cohort = {job.min_cohort}, {blind} takes {FEWEST} or more; raise it"


def _needed_for(colluders: int) -> int:
    # security rule 6: 3c < n.
    return 3 * colluders + 1


@COHORT.broken_where(lambda job: job.cohort_size < _needed_for(job.security.colluders))
def _too_few_for_colluders(job: Draw) -> str:
    colluders, size = job.security.colluders, job.cohort_size
    fix = "name more silos" if size == len(job.silos) else "raise participation"
    return (
        f"security.colluders = {colluders} takes {_needed_for(colluders)} silos or more in a round,"
        f" this job has {size}; {fix}, or lower colluders"
    )


# security rule 1: a static value is exact after enough sums over known cohorts.
@COHORT.broken_where(_sums_without_anyone, lambda job: not _public_weights(job))
def _weights_over_changing_silos(_: Draw) -> str:
    return (
        'security.dropouts = "any" with private weights: sums over changing silos tell the weight'
        ' of one; take it out, or write security.weights = "public" with counts'
    )


@COHORT.broken_where(
    lambda job: job.participation != 1,
    lambda job: not _sums_without_anyone(job),
    lambda job: not job.batched,
)
def _too_few_for_batches(job: Draw) -> str:
    return (
        f"participation = {job.participation:g}: {len(job.silos)} silos are too few for two batches"
        " that are summed in turn, and sums over changing silos tell single ones over many rounds;"
        " write participation = 1.0, or name more silos (or accept that:"
        ' security.dropouts = "any", with public weights)'
    )


@COHORT.broken_where(lambda job: job.quorum != 1)
def _idle_quorum(job: Draw) -> str:
    return (
        f"quorum = {job.quorum:g} does nothing in a blind job, which waits for all that are there;"
        f" {OUT}"
    )


@COHORT.broken_where(_public_weights)
def _counts_of_other_silos(job: Draw) -> str:
    counts = job.security.counts
    missing = _names_without(counts, job.silos)
    if missing:
        return (
            f"security.counts lacks {missing}; public weights need the training records of each"
            " silo"
        )
    return _declared_for_others("counts", counts, job.silos)


def _names_without(declared: Collection[str], silos: Sequence[str]) -> str:
    return ", ".join(filterfalse(declared.__contains__, silos))


def _declared_for_others(key: str, declared: Collection[str], silos: Sequence[str]) -> str:
    # Such a declaration has no effect, and keys without effect are refused.
    others = ", ".join(sorted(set(declared).difference(silos)))
    return f"security.{key} has {others}, no silo of the job; {OUT}" if others else ""


# Class counts.


@CROSSING.broken_where(
    lambda crossing: not _compares_labels(crossing),
    lambda crossing: bool(crossing.security.class_counts),
)
def _idle_class_counts(_: Crossing) -> str:
    return f"security.class_counts does nothing: no labels are compared; {OUT}"


@CROSSING.broken_where(_compares_labels)
def _class_counts_of_other_silos(crossing: Crossing) -> str:
    declared, silos = crossing.security.class_counts, crossing.job.silos
    missing = _names_without(declared, silos)
    if missing:
        return (
            "compares the labels of the silos, which do not cross blind: declare them,"
            " security.class_counts = { silo = [training records of each class] };"
            f" it lacks {missing}"
        )
    return _declared_for_others("class_counts", declared, silos)


# ``counts`` and ``class_counts`` declare the same records, so they must agree.
@CROSSING.broken_where(_compares_labels)
def _class_counts_that_disagree(crossing: Crossing) -> str:
    classes = crossing.method.setting.outputs
    # In job order, so that every machine reports the same fault.
    for silo in crossing.job.silos:
        key = f"security.class_counts.{silo}"
        numbers = crossing.security.class_counts[silo]
        total = crossing.security.counts[silo]
        if len(numbers) != classes:
            return f"{key} has {len(numbers)} numbers, model.classes = {classes}; give one for each"
        if sum(numbers) != total:
            return (
                f"{key} adds up to {sum(numbers)}, security.counts.{silo} = {total}; make them"
                " agree"
            )
    return ""


# Exchanges.


@CROSSING.broken_where(lambda crossing: any(unblind(crossing.schema)))
def no_blind_form(crossing: Crossing) -> str:
    """Every part is summed, mixed or compared, and no comparison discloses a part (rule 2)."""
    first, part = next(unblind(crossing.schema))
    methods = ", ".join(crossing.blind_methods())
    write = 'write security.secure_aggregation = "off"'
    if methods:
        write = f"choose a method that needs no such part ({methods}), or {write}"
    return (
        f"part {part['name']!r} ({part['kind'].lower()}) crosses by {part['exchange']!r} from round"
        f" {first} on, which has no blind form: {write}"
    )


def _draws_change(crossing: Crossing) -> bool:
    return crossing.job.participation != 1 or _sums_without_anyone(crossing)


@CROSSING.broken_where(_draws_change)
def _what_hardly_changes(crossing: Crossing) -> str:
    """Over changing silos, only means by declared weights are summed (security rule 1)."""
    for part in crossing.summed:
        # ``sum.mean`` is for models, which change from round to round.
        if part["exchange"] != "sum.mean":
            return (
                f"part {part['name']!r} ({part['exchange']}) may hold what hardly changes between"
                " rounds, such as the classes of a silo: sums over changing silos tell it of one;"
                " write participation = 1.0, and leave out security.dropouts"
            )
    return ""


@CROSSING.broken_where(lambda crossing: crossing.counted)
def _counts_classes_of_few(crossing: Crossing) -> str:
    """Holders of a class are counted so that nobody sees a sum over few of them."""
    for part in crossing.summed:
        if part["kind"] == Kind.METRIC.name:
            return (
                f"part {part['name']!r} has the test records of every class, also of one that fewer"
                " than min_holders silos hold; take it out of [metrics]"
            )
    return ""


@CROSSING.broken_where(
    _mixes, lambda crossing: len(crossing.job.silos) - 1 < crossing.job.min_cohort
)
def _mixed_from_too_few(crossing: Crossing) -> str:
    """Every recipient of a mix can have a row at all (security rule 4)."""
    return (
        f"part {crossing.mixed!r} is mixed for each silo from at least min_cohort ="
        f" {crossing.job.min_cohort} others, and there are {len(crossing.job.silos) - 1}: nobody"
        " would get anything; lower min_cohort, or name more silos"
    )


# security rule 19: weights of 32 bits leave so many bits of a word for the values.
@CROSSING.broken_where(_mixes, lambda crossing: crossing.security.clip_exponent > LARGEST_MIX_CLIP)
def _mixed_beyond_words(crossing: Crossing) -> str:
    """The words of a mix can hold its values."""
    return (
        f"part {crossing.mixed!r} is mixed, in which values are 2^{LARGEST_MIX_CLIP} at most,"
        f" security.clip_exponent = {crossing.security.clip_exponent}; lower it"
    )


# A secret rotation takes 2 d² multiplications, which bounds the length d.
@CROSSING.broken_where()
def _too_long_to_rotate(crossing: Crossing) -> str:
    for part in filter(_is_rotated, crossing.up):
        width = part["tensors"][0]["shape"][-1]
        if width > LONGEST_COMPARED:
            return (
                f"part {part['name']!r} compares vectors of {width} numbers, too long to be"
                " rotated; choose a smaller model, or options by which it compares"
                f" {LONGEST_COMPARED} or fewer"
            )
    return ""


def _is_rotated(part: SchemaPart) -> bool:
    return bool(part["exchange"] == "gram")


@CROSSING.broken_where(_public_weights)
def _idle_weight_bounds(crossing: Crossing) -> str:
    """The bounds of private weights have an effect: only rows keep weights of their own then."""
    idle = changed(crossing.security, "weight_least", "weight_most")
    # A ratio's weights stay private even if counts are public; weights of 0 or 1 need no bound.
    bounded = any(_largest_weight(part) > 1 for part in crossing.summed_by("sum.ratio"))
    if bounded or not idle:
        return ""
    return f"security.{idle} does nothing: this job's weights stand in counts; {OUT}"


@CROSSING.broken_where(_public_weights)
def _counts_each_silo_once(crossing: Crossing) -> str:
    """Public weights are counts of records, not 1 of each silo."""
    for part in crossing.summed_by("sum.mean"):
        if _largest_weight(part) <= 1:
            return (
                f"part {part['name']!r} counts each silo once, so declared counts of records"
                ' cannot stand for its weights; write security.weights = "private"'
            )
    return ""


def _largest_weight(part: SchemaPart) -> float:
    """The largest weight of a part that is summed by weights, which cross last."""
    # ``Part.given`` puts a weight last.
    return float(part["tensors"][-1].get("most", LARGEST))


# Tags, audience and holders.


# A key without effect is refused: a reader of the job could think that it protects something.
@CROSSING.broken_where(
    lambda crossing: crossing.security.audience == "silos",
    lambda crossing: not summed_down(crossing.schema),
)
def _idle_audience(_: Crossing) -> str:
    return f"security.audience does nothing: no sum comes down to silos as it was opened; {OUT}"


@CROSSING.broken_where(lambda crossing: not crossing.security.tags)
def _idle_lack_of_tags(crossing: Crossing) -> str:
    hides = crossing.security.audience == "silos" or keyed_exchanges(crossing.schema)
    if hides or crossing.counted:
        return (
            "security.tags = false does nothing: its silos share a key for what they hide or count,"
            f" and tag by it in any case; {OUT}"
        )
    if not summed_down(crossing.schema):
        return (
            "security.tags = false does nothing: no sum comes down to silos as it was opened, so"
            f" that none is tagged; {OUT}"
        )
    return ""


@CROSSING.broken_where(
    lambda crossing: not crossing.counted, lambda crossing: crossing.security.min_holders > 0
)
def _idle_min_holders(crossing: Crossing) -> str:
    return (
        f"security.min_holders = {crossing.security.min_holders} does nothing: no class is summed;"
        f" {OUT}"
    )


@CROSSING.broken_where(lambda crossing: crossing.counted)
def _never_enough_holders(crossing: Crossing) -> str:
    """Some class can be summed at all (security rule 7)."""
    job, colluders = crossing.job, crossing.security.colluders
    # The error names the key that set the number.
    holders, key = job.min_cohort, "min_cohort"
    if crossing.security.min_holders:
        holders, key = crossing.security.min_holders, "security.min_holders"
    # Holders are silos of the job, so there must be ``Job.fewest_holders`` of them.
    if holders + colluders <= len(job.silos):
        return ""
    return (
        f"a class is summed where as many silos hold it as {key} = {holders} says and colluders ="
        f" {colluders} more, and there are {len(job.silos)}, so none would be; lower one of them,"
        " or name more silos"
    )


# Directed sums.


@CROSSING.broken_where(_mixes_directed, lambda crossing: not _mixes(crossing))
def _idle_mix(_: Crossing) -> str:
    return f"{DIRECTED} does nothing: no part is mixed; {OUT}"


@CROSSING.broken_where(_mixes_directed, lambda crossing: not crossing.method.directed_for)
def _weights_known_too_late(crossing: Crossing) -> str:
    return (
        f"{DIRECTED}: the weights by which part {crossing.mixed!r} is mixed follow from the very"
        " round in which it is given, and a directed sum takes them before; take it out, or choose"
        " fedsimsup or pfedsim"
    )


@CROSSING.broken_where(_mixes_directed, lambda crossing: not READERS.isdisjoint(crossing.job.silos))
def _named_as_other_readers(crossing: Crossing) -> str:
    # ``min``, so that every machine reports the same one.
    first = min(READERS.intersection(crossing.job.silos))
    return (
        f"{DIRECTED}: a silo named {first!r} could not be told from other readers of its sums;"
        f" {OUT}"
    )


@CROSSING.broken_where(
    _mixes_directed, _for_members, lambda crossing: crossing.security.colluders > MOST_READERS
)
def _members_in_league(crossing: Crossing) -> str:
    """The coordinator weighs the rows of members, and could combine those of two colluders."""
    colluders = crossing.security.colluders
    return (
        f"{DIRECTED} with security.colluders = {colluders}: the coordinator weighs the rows of part"
        f" {crossing.mixed!r}, and by rows for {colluders} silos of a round it could solve for a"
        f" single other; lower colluders to {MOST_READERS}, or take mix out"
    )


@CROSSING.broken_where(
    _mixes_directed,
    _for_members,
    lambda crossing: crossing.job.cohort_size - 1 < crossing.job.min_cohort,
)
def _members_from_too_few(crossing: Crossing) -> str:
    return (
        f"part {crossing.mixed!r} is mixed for each silo of a round from at least min_cohort ="
        f" {crossing.job.min_cohort} others of it, and there are {crossing.job.cohort_size - 1}:"
        " nobody would get anything; lower min_cohort, or raise participation"
    )


def _weights_of_rows(crossing: Crossing) -> int:
    return crossing.row_readers * (crossing.job.cohort_size + SPEC_OF_ROW)


# Each row lists a weight for every silo of the round.
@CROSSING.broken_where(_mixes_directed, lambda crossing: _weights_of_rows(crossing) > MOST_DIRECTED)
def _too_many_weights(crossing: Crossing) -> str:
    # Rows go to the members of a round, or to the silos that are away.
    which = "in" if crossing.for_members else "away in"
    return (
        f"{DIRECTED}: {crossing.row_readers} silos are {which} a round, each with its own weights"
        f" of {crossing.job.cohort_size}, more than one specification holds; sign a job for fewer"
        " silos, or take it out"
    )


# Comparisons by shares.


@CROSSING.broken_where(_compares_by_shares, lambda crossing: not any(crossing.compared))
def _idle_compare(_: Crossing) -> str:
    return f"{SHARED} does nothing: no part is compared; {OUT}"


@CROSSING.broken_where(_compares_by_shares)
def _several_compared(crossing: Crossing) -> str:
    for compared in crossing.compared:
        if len(compared) > 1:
            names = ", ".join(part["name"] for part in compared)
            return f"{SHARED}: {names} are compared in one round, by shares one part can be; {OUT}"
    return ""


@CROSSING.broken_where(_compares_by_shares)
def _not_by_shares(crossing: Crossing) -> str:
    for part in chain.from_iterable(crossing.compared):
        fault = _sketched(part) or _too_many_shares(part, crossing)
        if fault:
            return fault
    return ""


def _sketched(part: SchemaPart) -> str:
    # A blind sketch's map comes from a key of all silos, which secret sharing does not have.
    if "sketch_of" not in part:
        return ""
    return (
        f"{SHARED}: part {part['name']!r} crosses as sketches, whose map has to be a secret of the"
        " silos; have whole vectors compared by the method's options, or take it out"
    )


def _too_many_shares(part: SchemaPart, crossing: Crossing) -> str:
    groups, width = part["tensors"][0]["shape"]
    drawn = crossing.method.setting.drawn
    silos = max(len(drawn(phase["from_round"])) for phase in crossing.schema)  # of the largest

    # each silo deals each other one a share of 8 bytes per number, and reveals its shares of the
    # products of all pairs
    shares, products = 8 * silos * groups * (width + silos), 4 * groups * silos * (silos + 1)
    if shares <= MOST_SHARES and products <= MOST_PRODUCTS and width <= LONGEST_COMPARED:
        return ""
    return (
        f"{SHARED}: part {part['name']!r} has {groups} vectors of {width} numbers, of which {silos}"
        f" silos deal {shares:,} bytes to each silo ({MOST_SHARES:,} at most) and reveal"
        f" {products:,} bytes of products ({MOST_PRODUCTS:,} at most); name fewer silos, choose a"
        " smaller model, or take it out"
    )
