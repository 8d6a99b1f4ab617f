"""The egress policy: what may leave a silo. Deny by default; the first rule for a method and part decides.

::

    version = 1

    [limits]
    max_bytes_per_round = "512MiB"
    max_attempts_per_round = 100    # uploads of one round that are begun, with those that broke off

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

    [secure_aggregation]            # left out: these
    required = false                # true: nothing leaves in the form "plain"
    min_cohort = 3                  # silos of a blind sum at least
    min_honest = 2                  # of those behind an opened sum, so many are in league with nobody
    assumed_colluders = 1           # silos that a job must take to be in league with the coordinator, at least
    public_counts = false           # true: how many records this silo has may stand in a job

Globs are those of globs.py: ``*`` within one dotted segment, ``**`` for any number of segments.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ..errors import LocalError
from ..files import Strict, parse_toml, read_bytes
from .globs import check_glob, matches
from .release import ITEM_BYTES, PLAIN, Release

if TYPE_CHECKING:
    from .round_spec import Terms

UNITS = {"B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4}
MAX_FILE = 256 * 1024  # bytes; as a text in a record at most twice as many, which fit into its line (chain.py)
DEFAULT_DENY = "default-deny"  # the rule that stands where none matches

Dtype = Literal["float32", "float64", "int64", "uint32", "uint64"]
Form = Literal["plain", "masked", "padded", "rotated", "dp"]
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
]


def _bytes(value: object) -> object:
    """``"512MiB"`` to 536870912; integers pass."""
    if not isinstance(value, str):
        return value
    for unit, factor in reversed(UNITS.items()):
        number = value.removesuffix(unit).strip()
        if value.endswith(unit) and number.isascii() and number.isdecimal():
            return int(number) * factor
    raise ValueError("is no size; write bytes as an integer, or a whole number with B, KiB, MiB, GiB or TiB")


Bytes = Annotated[int, BeforeValidator(_bytes), Field(strict=True, ge=0)]
Count = Annotated[int, Field(strict=True, ge=0)]
Glob = Annotated[str, AfterValidator(check_glob)]
Some = Field(min_length=1)


class Limits(Strict):
    """``[limits]``."""

    max_bytes_per_round: Bytes
    max_attempts_per_round: Annotated[int, Field(strict=True, ge=1)] = 100


class Control(Strict):
    """``[control]``: caps on one session of polls and heartbeats."""

    max_messages: Count
    max_bytes: Bytes


class SecureAggregation(Strict):
    """``[secure_aggregation]``: what this silo asks of jobs, and of every blind sum."""

    required: Annotated[bool, Field(strict=True)] = False
    min_cohort: Annotated[int, Field(strict=True, ge=2)] = 3
    min_honest: Annotated[int, Field(strict=True, ge=1)] = 2
    assumed_colluders: Count = 1
    public_counts: Annotated[bool, Field(strict=True)] = False


class Rule(Strict):
    """One ``[[allow]]``."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,64}$")]
    methods: Annotated[tuple[str, ...], Some]
    parts: Annotated[tuple[str, ...], Some]
    kinds: Annotated[tuple[KindName, ...], Some]
    tensors: Annotated[tuple[Glob, ...], Some]
    never: tuple[Glob, ...] = ()
    dtypes: Annotated[tuple[Dtype, ...], Some]
    max_elements: Count
    max_norm: Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)] | None = None
    recipients: Annotated[tuple[str, ...], Some]
    readers: Annotated[tuple[str, ...], Some]
    forms: Annotated[tuple[Form, ...], Some] = ("plain",)

    def refusals(self, release: Release, recipient: str, readers: Sequence[str]) -> Iterator[str]:
        """Every reason why this rule lets a tensor not pass, each with its fix."""
        if not any(matches(glob, release.name) for glob in self.tensors):
            yield f"no glob of tensors = {list(self.tensors)} matches; add one if it may leave"
        for glob in self.never:
            if matches(glob, release.name):
                yield f"never has {glob!r}; keep it out of the job's part"
        yield from _outside("kinds", (release.kind,), self.kinds)
        yield from _outside("dtypes", (release.dtype,), self.dtypes)
        yield from _outside("forms", (release.form,), self.forms)
        if release.elements > self.max_elements:
            yield f"{release.elements} elements are over max_elements = {self.max_elements}; raise it if they may leave"
        yield from _outside("recipients", (recipient,), self.recipients)
        yield from _outside("readers", readers, self.readers)
        if not readers:
            yield "nobody says who can read it; name its readers"


class PolicyFile(Strict):
    """The whole file."""

    version: Literal[1]
    limits: Limits
    control: Control
    allow: tuple[Rule, ...] = ()
    secure_aggregation: SecureAggregation = SecureAggregation()

    @model_validator(mode="after")
    def _unique(self) -> Self:
        names = [rule.name for rule in self.allow]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"rules share the name {twice[0]!r}; the ledger tells rules by name, so rename one")
        return self


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the policy says about one tensor: by which rule it leaves, or every reason why it does not."""

    release: Release
    rule: str
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether a message may leave, by which rules, and, if not, every reason.

    ``tensors`` has the verdicts one by one, ``whole`` the reasons that are of no single tensor.
    """

    tensors: tuple[Verdict, ...]
    whole: tuple[str, ...]

    @property
    def allow(self) -> bool:
        """Whether nothing stands against it."""
        return not self.reasons

    @property
    def rule(self) -> str:
        """The rules that decided, in the order of the tensors."""
        return ", ".join(dict.fromkeys(verdict.rule for verdict in self.tensors)) or DEFAULT_DENY

    @property
    def reasons(self) -> tuple[str, ...]:
        """All reasons, those of single tensors first."""
        return (*(reason for verdict in self.tensors for reason in verdict.reasons), *self.whole)


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy, the SHA-256 (hex) of its file, and the text of the file, as it goes into the ledger."""

    file: PolicyFile
    digest: str
    text: str

    def rule(self, method: str, part: str) -> Rule | None:
        """The first rule for a method and part, which alone decides."""
        return next((rule for rule in self.file.allow if method in rule.methods and part in rule.parts), None)

    def decide(
        self,
        method: str,
        releases: Sequence[Release],
        recipient: str,
        readers: Sequence[str],
        sent: int = 0,
        attempts: int = 0,
        norms: Mapping[str, float] | None = None,
    ) -> Decision:
        """Whether one message may leave in a round in which ``sent`` bytes have left in ``attempts`` messages.

        ``norms`` are those of its parts, weights left out; None where there are no values yet, before a job runs. The
        steps run in order.
        """
        # (1) There is something to decide on.
        whole = [] if releases else ["message declares no tensor; declare what leaves"]
        # (2) Each tensor passes the rule of its part.
        verdicts = tuple(self._verdict(method, release, recipient, readers) for release in releases)
        # (3) No tensor comes twice.
        names = [(release.part, release.name) for release in releases]
        twice = [name for name, times in Counter(names).items() if times > 1]
        whole += [f"tensor {part}/{name} is declared twice; declare it once" for part, name in twice]
        # (4) The round stays within its bytes.
        total = sent + sum(release.nbytes for release in releases if release.dtype in ITEM_BYTES)
        if total > (most := self.file.limits.max_bytes_per_round):
            whole.append(f"{total} bytes this round are over max_bytes_per_round = {most}; raise it if they may leave")
        # (5) It was not tried too often: a coordinator that cuts every upload gets no further ones.
        if attempts >= (most := self.file.limits.max_attempts_per_round):
            whole.append(
                f"{attempts} uploads of this round were begun, max_attempts_per_round = {most}; if the line is bad and "
                "the coordinator honest, raise it"
            )
        # (6) No part is longer than its rule lets it be.
        if norms is not None:
            whole += self._too_long(method, releases, norms)
        # (7) Nothing is in the clear where sums have to be blind.
        if self.file.secure_aggregation.required:
            whole += self._in_the_clear(releases)
        return Decision(verdicts, tuple(whole))

    @property
    def terms(self) -> "Terms":
        """What it asks of the cohort and the survivors of a blind sum."""
        from .round_spec import Terms  # noqa: PLC0415 numpy takes a tenth of a second, commands read policies without

        asked = self.file.secure_aggregation
        return Terms(asked.min_cohort, asked.min_honest, asked.assumed_colluders)

    @property
    def bounds_norms(self) -> bool:
        """Whether a rule bounds the norm of a part, so that the norms are wanted."""
        return any(rule.max_norm is not None for rule in self.file.allow)

    def _too_long(self, method: str, releases: Sequence[Release], norms: Mapping[str, float]) -> Iterator[str]:
        for part in dict.fromkeys(release.part for release in releases):
            rule = self.rule(method, part)
            if rule is None or rule.max_norm is None or norms.get(part, math.inf) <= rule.max_norm:
                continue
            yield (
                f"part {part!r}: rule {rule.name!r}: its norm is {norms.get(part, math.inf):.6g}, over max_norm = "
                f"{rule.max_norm:g}; raise it if longer ones may leave, or look why training went so far"
            )

    def _in_the_clear(self, releases: Sequence[Release]) -> Iterator[str]:
        if parts := list(dict.fromkeys(release.part for release in releases if release.form == PLAIN)):
            yield (
                f"{', '.join(parts)} would leave in the form {PLAIN!r}, and secure_aggregation.required = true; ask "
                'for a job with security.secure_aggregation = "required", or set it to false'
            )

    def _verdict(self, method: str, release: Release, recipient: str, readers: Sequence[str]) -> Verdict:
        rule = self.rule(method, release.part)
        reasons = tuple(self._refusals(rule, method, release, recipient, readers))
        return Verdict(release, rule.name if rule else DEFAULT_DENY, reasons)

    def _refusals(
        self, rule: Rule | None, method: str, release: Release, recipient: str, readers: Sequence[str]
    ) -> Iterator[str]:
        name = f"tensor {release.part}/{release.name}"
        if rule is None:
            yield f"{name}: no [[allow]] has method {method!r} and part {release.part!r}; add one if it may leave"
            return
        for reason in rule.refusals(release, recipient, readers):
            yield f"{name}: rule {rule.name!r}: {reason}"


def load(path: Path) -> Policy:
    """Read a policy file; the digest is of the very bytes that were parsed."""
    return parse(read_bytes(path), str(path))


def parse(data: bytes, origin: str) -> Policy:
    """Check the bytes of a policy file; LocalError for one that the ledger cannot hold, too."""
    if len(data) > MAX_FILE:
        raise LocalError(f"{origin}: {len(data)} bytes, at most {MAX_FILE} fit into the ledger; use globs, fewer rules")
    file = parse_toml(data, PolicyFile, origin)
    return Policy(file, hashlib.sha256(data).hexdigest(), data.decode())


def _outside(key: str, values: Sequence[str], allowed: Sequence[str]) -> Iterator[str]:
    for value in values:
        if value not in allowed:
            yield f"{value!r} is not in {key} = {list(allowed)}; add it if it may be"
