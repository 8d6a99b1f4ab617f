"""The file of an egress policy: its tables, and what one rule has against a tensor.

::

    version = 1
    packages = ["lung-models"]      # installed packages whose code jobs may run; left out: none
    weights = ["3f79bb7b…"]         # SHA-256 of files that jobs may begin with; left out: none

    [limits]
    max_bytes_per_round = "512MiB"
    max_attempts_per_round = 100    # uploads begun of one message of a round, broken ones included
    max_step = 3.0                  # how far a delivery may move a part of the model, in units of
                                    # the longest step of this silo's own training; left out: any
    max_parallel = 2                # rows of a delivered layer that may be multiples of others;
                                    # left out: any
    min_cell = 5                    # fewest records that an exact number of statistics is of

    [control]                       # polls and heartbeats, per session
    max_messages = 100_000
    max_bytes = "16MiB"

    [[allow]]
    name = "round-update"
    methods = ["fedavg", "fedprox"]
    parts = ["model"]
    kinds = ["whole_model"]
    tensors = ["features.**", "@weight"]
    never = ["**.running_*"]
    dtypes = ["float32", "float64"]
    max_elements = 12_000_000       # of one tensor
    max_norm = 50.0                 # Euclidean, of a part's tensors together; left out: any
    recipients = ["coordinator"]
    readers = ["coordinator"]
    forms = ["plain"]
    datasets = ["cxr-2024"]         # whose records it is for; only a silo with one data set may
                                    # leave it out

    [secure_aggregation]   # left out: these
    required = false       # true: nothing leaves in the form "plain"
    min_cohort = 3         # fewest silos of a blind sum
    min_honest = 2         # fewest silos behind an opened sum that collude with nobody
    assumed_colluders = 1  # fewest silos that a job must assume to collude with the
                           # coordinator
    min_holders = 3        # silos that hold a class before its rows are summed; left out:
                           # min_cohort
    min_difference = 3     # fewest silos whose record count the sums of all jobs over this data set
                           # may tell; 1: any. Left out: min_honest + assumed_colluders
    dropouts = "batches"   # "any": sums may be over whichever silos are left, which over many
                           # rounds tells what single ones contributed
    public_counts = false  # true: a job may state how many records this silo has, by class too
    trust = "none"         # "non-colluding-coordinator": jobs may rely on a key of their silos,
                           # which holds only while the coordinator colludes with no silo

    [dataset.cxr-2024]      # budget of a data set, shared by all jobs; the silo's configuration
                            # names the data set: dataset = "cxr-2024"
    unit = "record"
    epsilon = 8.0
    delta = 1e-5
    required = true         # nothing leaves that is computed from its records without noise; left
                            # out: false
    min_sigma = 0.5         # least noise of a job's steps, in clips; left out: as its epsilon needs
    noise = "local"         # "shared": the silos of a blind job may share the noise of its sums
    dishonest = 1           # with noise = "shared": fewest silos whose shares a job may not count
    records_per_person = 1  # at most; for the report of what a person's records cost together

Globs are those of globs.py: ``*`` within one dotted segment, ``**`` for any number of segments.
"""

from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ...files.documents import Strict
from ..identity.keys import Hex32
from .globs import check_glob, matches
from .release import Reasons, Release

# The search for so few silos among many takes seconds; for more it would take hours.
MOST_DIFFERENCE = 8
UNITS = {"B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4}

Dtype = Literal["float32", "float64", "int64", "uint32", "uint64", "bfloat16", "int8", "int32"]
Form = Literal["plain", "masked", "padded", "rotated"]
KindName = Literal[  # exchange.Kind in lower case; a test compares the two
    "whole_model",
    "backbone",
    "inter_learning_model",
    "header_rows",
    "prototypes",
    "canonical_models",
    "classifier_rows",
    "membership",
    "counts",
    "metric",
    "sketch",
    "key",
    "share",
    "statistics",
]


def _bytes(value: object) -> object:
    """``"512MiB"`` to 536870912; integers pass."""
    if not isinstance(value, str):
        return value
    # "B" also ends every other unit, so it is tried last.
    unit = next((unit for unit in reversed(UNITS) if value.endswith(unit)), "")
    number = value.removesuffix(unit).strip()
    if not unit or not number.isascii() or not number.isdecimal():
        raise ValueError(
            "is not a size; write bytes as an integer, or a whole number with B, KiB, MiB, GiB or"
            " TiB"
        )
    return int(number) * UNITS[unit]


def _decimal(value: object) -> object:
    """A TOML number as the decimal that was written, or as the float that is nearest to it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("is not a number; write it without quotes")  # noqa: TRY004 - pydantic reports ValueError only
    # ``repr`` is the shortest text of a float, so 1e-5 becomes the decimal that was written.
    return Decimal(repr(value))


Bytes = Annotated[int, BeforeValidator(_bytes), Field(strict=True, ge=0)]
Real = Annotated[Decimal, BeforeValidator(_decimal)]
Count = Annotated[int, Field(strict=True, ge=0)]
# of a Python distribution, as its metadata have it
PackageName = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,126}[A-Za-z0-9])?$")]
DatasetName = Annotated[str, Field(pattern=r"^[a-z0-9-]{1,64}$")]
Glob = Annotated[str, AfterValidator(check_glob)]
Some = Field(min_length=1)


class PolicyLimits(Strict):
    """``[limits]``: bounds on what leaves in a round, and on deliveries before training.

    ``max_bytes_per_round`` counts all messages of a round, begun ones in full and protocol
    messages of secure sums included. ``max_step`` and ``max_parallel`` are None for no bound.
    ``min_cell`` bounds what a job of the method ``statistics`` counts without noise.
    """

    max_bytes_per_round: Bytes
    max_attempts_per_round: Annotated[int, Field(strict=True, ge=1)] = 100
    max_step: Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)] | None = None
    max_parallel: Count | None = None
    min_cell: Count = 5


class ControlCaps(Strict):
    """``[control]``: caps on one session of polls and heartbeats.

    The ledger has no record per poll or heartbeat, so these caps bound what could hide in them.
    """

    max_messages: Count
    max_bytes: Bytes


class SecureAggregation(Strict):
    """``[secure_aggregation]``: what this silo asks of jobs, and of every blind sum.

    The module docstring explains each key. A job that does not meet them is declined.
    """

    required: Annotated[bool, Field(strict=True)] = False
    # A sum over one silo would be that silo's values.
    min_cohort: Annotated[int, Field(strict=True, ge=2)] = 3
    min_honest: Annotated[int, Field(strict=True, ge=1)] = 2
    assumed_colluders: Count = 1
    # The sum of a row that only one silo holds would be that silo's row.
    min_holders: Annotated[int, Field(strict=True, ge=2)] | None = None
    min_difference: Annotated[int, Field(strict=True, ge=1, le=MOST_DIFFERENCE)] | None = None
    dropouts: Literal["batches", "any"] = "batches"
    public_counts: Annotated[bool, Field(strict=True)] = False
    trust: Literal["none", "non-colluding-coordinator"] = "none"

    @property
    def least_difference(self) -> int:
        """``min_difference``, or what a single sum must have."""
        return self.min_difference or self._least_sum

    @property
    def least_steps(self) -> int:
        """Fewest silos whose steps the sums of all jobs may tell.

        ``min_difference`` does not lower it: a silo whose counts are no secret still hides its
        model.
        """
        return max(self.least_difference, self._least_sum)

    @property
    def _least_sum(self) -> int:
        # The difference of two sums reveals a sum, so by default it needs as many silos as one.
        return min(self.min_honest + self.assumed_colluders, MOST_DIFFERENCE)


class BudgetTable(Strict):
    """``[dataset.NAME]``: the privacy budget of a data set, which all jobs on it share.

    With ``required``, every job must spend from it.
    """

    # All accounting is per record; ``records_per_person`` is for the report on several together.
    unit: Literal["record"]
    epsilon: Annotated[Real, Field(gt=0, le=1000)]
    # A δ of 1 would promise nothing.
    delta: Annotated[Real, Field(ge=Decimal("1e-20"), lt=1)]
    required: Annotated[bool, Field(strict=True)] = False
    min_sigma: Annotated[Real, Field(gt=0, le=100_000)] | None = None
    # What protects the data set: noise of this silo alone, or also that of others.
    noise: Literal["local", "shared"] = "local"
    # Fewest silos that a job with shared noise must take for dishonest.
    dishonest: Annotated[int, Field(strict=True, ge=0, le=1000)] = 1
    records_per_person: Annotated[int, Field(strict=True, ge=1)] = 1

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if self.noise == "local" and self.dishonest != 1:
            raise ValueError(
                f"dishonest = {self.dishonest} does nothing with local noise, which needs nobody"
                ' else; take it out, or write noise = "shared"'
            )
        return self


class AllowRule(Strict):
    """One ``[[allow]]``: the methods and parts that it covers, and which tensors may leave.

    Only the first rule with a method, part and data set decides. ``max_elements`` is per tensor,
    ``max_norm`` per part.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,64}$")]
    # Whole names, no globs, so that a method installed later is not allowed by accident.
    methods: Annotated[tuple[str, ...], Some]
    parts: Annotated[tuple[str, ...], Some]
    kinds: Annotated[tuple[KindName, ...], Some]
    tensors: Annotated[tuple[Glob, ...], Some]
    # It overrides ``tensors``: a name that matches both may not leave.
    never: tuple[Glob, ...] = ()
    dtypes: Annotated[tuple[Dtype, ...], Some]
    max_elements: Count
    max_norm: Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)] | None = None
    recipients: Annotated[tuple[str, ...], Some]
    readers: Annotated[tuple[str, ...], Some]
    forms: Annotated[tuple[Form, ...], Some] = ("plain",)
    datasets: tuple[DatasetName, ...] = ()  # none, where a silo has but one

    def covers(self, method: str, part: str) -> bool:
        """Whether the rule is for this part of this method."""
        return method in self.methods and part in self.parts

    def check(
        self, release: Release, recipient: str, readers: Sequence[str], reasons: Reasons
    ) -> None:
        """Add every reason why this rule blocks a tensor, each with its fix."""
        reasons.require(
            any(matches(glob, release.name) for glob in self.tensors),
            f"no glob of tensors = {list(self.tensors)} matches; add one if it may leave",
        )
        for glob in self.never:
            reasons.require(
                not matches(glob, release.name),
                f"never has {glob!r}; keep it out of the job's part",
            )

        _check_listed("kinds", (release.kind,), self.kinds, reasons)
        _check_listed("dtypes", (release.dtype,), self.dtypes, reasons)
        _check_listed("forms", (release.form,), self.forms, reasons)
        reasons.require(
            release.elements <= self.max_elements,
            f"{release.elements} elements are over max_elements = {self.max_elements}; raise it if"
            " they may leave",
        )

        # The recipient may only carry the message, so readers are checked on their own: without any
        # the list of readers would check nothing.
        _check_listed("recipients", (recipient,), self.recipients, reasons)
        _check_listed("readers", readers, self.readers, reasons)
        reasons.require(bool(readers), "nobody says who can read it; name its readers")


class PolicyFile(Strict):
    """The whole file, checked: unknown keys, and two rules of one name, are errors.

    Without any rule no tensor leaves.
    """

    version: Literal[1]
    limits: PolicyLimits
    control: ControlCaps
    allow: tuple[AllowRule, ...] = ()
    secure_aggregation: SecureAggregation = SecureAggregation()
    dataset: dict[DatasetName, BudgetTable] = Field(default_factory=dict)
    packages: tuple[PackageName, ...] = ()
    weights: tuple[Hex32, ...] = ()

    @model_validator(mode="after")
    def _unique(self) -> Self:
        names = Counter(rule.name for rule in self.allow)
        twice = sorted(name for name, times in names.items() if times > 1)
        if twice:
            raise ValueError(
                f"rules share the name {twice[0]!r}; the ledger tells rules by name, so rename one"
            )
        return self


def _check_listed(
    key: str, values: Sequence[str], allowed: Sequence[str], reasons: Reasons
) -> None:
    for value in values:
        reasons.require(
            value in allowed, f"{value!r} is not in {key} = {list(allowed)}; add it if it may be"
        )
