"""The egress policy: what may leave a silo. Deny by default.

The first rule for a method and part decides.

file.py shows the file.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, filterfalse
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import LocalError
from ...files.documents import parse_toml, read_bytes
from .data_sets import DATASET, DataSets
from .file import AllowRule, BudgetTable, PolicyFile
from .release import ITEM_BYTES, PLAIN, Reasons, Release, shown_exact

if TYPE_CHECKING:
    from ..secagg.spec import Terms

# Bytes; as a text in a record at most twice as many, which fit into its line (security/log/).
MAX_FILE = 256 * 1024
DEFAULT_DENY = "default-deny"  # the rule that stands where none matches


@dataclass(frozen=True, slots=True)
class Verdict:
    """The policy's decision on one tensor: its rule, and every reason why it may not leave.

    ``rule`` is the rule's name, or "default-deny" if no rule has the method and part.
    """

    release: Release
    rule: str
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision on one message: its rules, and every reason why it may not leave.
    ``tensors`` has the verdicts one by one, ``whole`` the reasons that are of no single tensor.
    """

    tensors: tuple[Verdict, ...]
    whole: tuple[str, ...]

    @property
    def allow(self) -> bool:
        """True if there is no reason against it."""
        return not self.reasons

    @property
    def rule(self) -> str:
        """The rules that decided, in the order of the tensors."""
        names = dict.fromkeys(verdict.rule for verdict in self.tensors)
        return ", ".join(names) or DEFAULT_DENY

    @property
    def unruled(self) -> tuple[str, ...]:
        """The parts that no rule has."""
        denied = (verdict for verdict in self.tensors if verdict.rule == DEFAULT_DENY)
        return tuple(dict.fromkeys(verdict.release.part for verdict in denied))

    @property
    def reasons(self) -> tuple[str, ...]:
        """All reasons, those of single tensors first."""
        of_tensors = chain.from_iterable(verdict.reasons for verdict in self.tensors)
        return (*of_tensors, *self.whole)


@dataclass(frozen=True, slots=True)
class SiloPolicy:
    """A silo's policy, and its file as it goes into the ledger: SHA-256 (hex) and text."""

    file: PolicyFile
    digest: str
    text: str
    datasets: DataSets = field(default_factory=DataSets.one)

    def on(self, asked: str | None) -> "Policy":
        """The policy for a job that asks for this data set, or for none.

        LocalError where the silo has no such data set.
        """
        dataset = self.datasets.of(asked)
        return Policy(self.file, self.digest, self.text, self.datasets, dataset)

    @property
    def terms(self) -> "Terms":
        """Its conditions on the cohort and the survivors of a blind sum."""
        from ..secagg.spec import (  # noqa: PLC0415 numpy takes a tenth of a second, commands read policies without
            Terms,
        )

        table = self.file.secure_aggregation
        return Terms(table.min_cohort, table.min_honest, table.assumed_colluders)

    @property
    def bounds_norms(self) -> bool:
        """True if any rule bounds the norm of a part, so that norms must be computed."""
        return any(rule.max_norm is not None for rule in self.file.allow)


@dataclass(frozen=True, slots=True)
class Policy(SiloPolicy):
    """A silo's policy for the jobs on one of its data sets, which decides what may leave."""

    dataset: str = DATASET

    def rule(self, method: str, part: str) -> AllowRule | None:
        """The first rule for a method, a part and the data set, which alone decides."""
        # Only the first: a wider rule further down must not allow what this one forbids.
        for rule in self.file.allow:
            if rule.covers(method, part) and self.dataset in (rule.datasets or self.datasets.own):
                return rule
        return None

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
        """Decide whether one message may leave in a round.

        In that round ``sent`` bytes left already, and the message was tried ``attempts`` times.
        ``norms`` are those of its parts, weights left out; None where there are no values yet,
        before a job runs. The steps run in order.
        """
        limits = self.file.limits
        whole = Reasons()

        # (1) There is something to decide on: without a tensor no rule would be asked.
        whole.require(bool(releases), "message declares no tensor; declare what leaves")

        # (2) Each tensor passes the rule of its part.
        verdicts = tuple(self._verdict(method, release, recipient, readers) for release in releases)

        # (3) No tensor comes twice: the ledger could not say which of the two left.
        names = Counter((release.part, release.name) for release in releases)
        for (part, name), times in names.items():
            whole.require(times == 1, f"tensor {part}/{name} is declared twice; declare it once")

        # (4) The round stays within its bytes; a dtype without a size was refused by (2).
        total = sent + sum(release.nbytes for release in releases if release.dtype in ITEM_BYTES)
        whole.require(
            total <= limits.max_bytes_per_round,
            f"{total} bytes this round are over max_bytes_per_round ="
            f" {limits.max_bytes_per_round}; raise it if they may leave",
        )

        # (5) It was not tried too often: a coordinator that cuts every upload gets no further ones.
        whole.require(
            attempts < limits.max_attempts_per_round,
            f"{attempts} uploads of this round were begun, max_attempts_per_round ="
            f" {limits.max_attempts_per_round}; if the line is bad and the coordinator honest,"
            " raise it",
        )

        # (6) No part is longer than its rule lets it be.
        if norms is not None:
            self._check_norms(method, releases, norms, whole)

        # (7) Nothing is in the clear where sums have to be blind.
        if self.file.secure_aggregation.required:
            self._check_blind(releases, whole)

        # (8) Nothing is computed without noise from records of a data set that has to be protected.
        if self.budget is not None and self.budget.required:
            self._check_noised(releases, whole)
        return Decision(verdicts, tuple(whole.found))

    @property
    def budget(self) -> BudgetTable | None:
        """The privacy budget of this silo's data set; None where the file has no table for it."""
        return self.file.dataset.get(self.dataset)

    def _verdict(
        self, method: str, release: Release, recipient: str, readers: Sequence[str]
    ) -> Verdict:
        # Deny by default: what no rule names does not leave.
        tensor = f"tensor {release.part}/{release.name}"
        rule = self.rule(method, release.part)
        if rule is None:
            on = f" for data set {self.dataset!r}" if len(self.datasets.own) > 1 else ""
            missing = (
                f"{tensor}: no [[allow]]{on} has method {method!r} and part {release.part!r}; add"
                " one if it may leave"
            )
            return Verdict(release, DEFAULT_DENY, (missing,))
        reasons = Reasons(f"{tensor}: rule {rule.name!r}: ")
        # A tensor with readers of its own, such as a row, is judged by those.
        rule.check(release, recipient, release.readers or readers, reasons)
        return Verdict(release, rule.name, tuple(reasons.found))

    def _check_norms(
        self,
        method: str,
        releases: Sequence[Release],
        norms: Mapping[str, float],
        whole: Reasons,
    ) -> None:
        for part in dict.fromkeys(release.part for release in releases):
            rule = self.rule(method, part)
            if rule is None or rule.max_norm is None:
                continue
            norm = norms.get(part, math.inf)  # a part that was not measured is over every limit
            whole.require(
                norm <= rule.max_norm,
                f"part {part!r}: rule {rule.name!r}: its norm is {norm:.6g}, over max_norm ="
                f" {rule.max_norm:g}; raise it if longer ones may leave, or look why training went"
                " so far",
            )

    def _check_blind(self, releases: Sequence[Release], whole: Reasons) -> None:
        parts = dict.fromkeys(release.part for release in releases if release.form == PLAIN)
        whole.require(
            not parts,
            f"{', '.join(parts)} would leave in the form {PLAIN!r}, and"
            " secure_aggregation.required = true; ask for a job with"
            ' security.secure_aggregation = "required", or set it to false',
        )

    def _check_noised(self, releases: Sequence[Release], whole: Reasons) -> None:
        names = shown_exact(releases)
        whole.require(
            not names,
            f"{names} would leave as computed from records without noise, and"
            f" [dataset.{self.dataset}] has required = true; ask for a job that is signed with"
            " [privacy] and gives nothing else, or set it to false",
        )


def load(path: Path, datasets: str | DataSets = DATASET) -> SiloPolicy:
    """Read a policy file for these data sets; the digest is of the very bytes that were parsed.

    LocalError if the file cannot be read, or ``parse`` refuses it.
    """
    return parse(read_bytes(path), str(path), datasets)


def load_alone(path: Path, first: str = DATASET) -> SiloPolicy:
    """Read a policy file where no silo's configuration names its data sets.

    They are ``first``, that of [data], and those that rules are for.
    """
    file = parse_toml(read_bytes(path), PolicyFile, str(path))
    ruled = chain.from_iterable(rule.datasets for rule in file.allow)
    names = tuple(dict.fromkeys((first, *ruled)))
    return load(path, DataSets(dict(zip(names, names, strict=True))))


def parse(data: bytes, origin: str, datasets: str | DataSets = DATASET) -> SiloPolicy:
    """Check the bytes of a policy file, for the data set of this name or for these.

    LocalError also for a file that the ledger cannot hold, or that does not name the data sets as
    the silo does.
    """
    if len(data) > MAX_FILE:
        raise LocalError(
            f"{origin}: {len(data)} bytes, at most {MAX_FILE} fit into the ledger; use globs, fewer"
            " rules"
        )
    # Unknown keys are errors, since a mistyped bound would bound nothing.
    file = parse_toml(data, PolicyFile, origin)

    if isinstance(datasets, str):
        datasets = DataSets.one(datasets)
    _check_named(file, datasets, origin)
    digest = hashlib.sha256(data).hexdigest()
    return SiloPolicy(file, digest, data.decode(), datasets)


def _check_named(file: PolicyFile, datasets: DataSets, origin: str) -> None:
    """LocalError where a name would protect nothing, and nobody would see it."""
    ruled = set(chain.from_iterable(map(attrgetter("datasets"), file.allow)))
    tables, own = file.dataset.keys(), set(datasets.own)
    if aliases := (ruled | tables) & (datasets.records.keys() - own):
        alias = min(aliases)
        raise LocalError(
            f"{origin}: names data set {alias!r}, whose records are those of"
            f" {datasets.of(alias)!r} by the silo's configuration (records_of); write"
            f" {datasets.of(alias)!r}, whose rules and budget count for both"
        )
    # A silo that adds a data set must say of each rule whose it is: none opens the new one unasked.
    unsaid = next(filterfalse(attrgetter("datasets"), file.allow), None)
    if unsaid is not None and len(own) > 1:
        raise LocalError(
            f"{origin}: rule {unsaid.name!r} names no data set, and this silo has"
            f' {", ".join(datasets.own)}; add datasets = ["{datasets.own[0]}"] to it, or those'
            " that it is for"
        )
    # A rule that is for no data set here would leave what it forbids to a wider one further down.
    unknown = ruled - own
    # A table may be of another silo's data set, unless one here has none.
    if own - tables:
        unknown |= tables - own
    if unknown:
        raise LocalError(
            f"{origin}: names data set {min(unknown)!r}, and this silo has"
            f" {', '.join(datasets.own)}; name it alike here and in the silo's configuration"
            " (dataset = …, or [datasets.…])"
        )
