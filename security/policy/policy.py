"""The egress policy: what may leave a silo. Deny by default.

The first rule for a method and part decides.

file.py shows the file.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import LocalError
from ...files.documents import parse_toml, read_bytes
from .file import AllowRule, BudgetTable, PolicyFile
from .release import ITEM_BYTES, PLAIN, Release, shown_private

if TYPE_CHECKING:
    from ..secagg.spec import Terms

MAX_FILE = (
    256 * 1024
    # bytes; as a text in a record at most twice as many, which fit into its line
    # (security/log/chain.py)
)
DATASET = "data"  # name of a silo's data set where its configuration gives none
DEFAULT_DENY = "default-deny"  # the rule that stands where none matches


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the policy says about one tensor: by which rule it leaves, or every reason why it does
    not.
    """

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
    """A policy, the SHA-256 (hex) of its file, and the text of the file, as it goes into the
    ledger.
    """

    file: PolicyFile
    digest: str
    text: str
    dataset: str = DATASET  # whose records this silo's jobs are on

    def rule(self, method: str, part: str) -> AllowRule | None:
        """The first rule for a method and part, which alone decides."""
        return next(
            (rule for rule in self.file.allow if method in rule.methods and part in rule.parts),
            None,
        )

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
        """Whether one message may leave in a round in which ``sent`` bytes left, tried ``attempts``
        times before.

        ``norms`` are those of its parts, weights left out; None where there are no values yet,
        before a job runs. The steps run in order.
        """
        # (1) There is something to decide on.
        whole = [] if releases else ["message declares no tensor; declare what leaves"]
        # (2) Each tensor passes the rule of its part.
        verdicts = tuple(
            self._verdict(method, each, recipient, each.readers or readers) for each in releases
        )
        # (3) No tensor comes twice.
        names = [(release.part, release.name) for release in releases]
        twice = [name for name, times in Counter(names).items() if times > 1]
        whole += [
            f"tensor {part}/{name} is declared twice; declare it once" for part, name in twice
        ]
        # (4) The round stays within its bytes.
        total = sent + sum(release.nbytes for release in releases if release.dtype in ITEM_BYTES)
        if total > (most := self.file.limits.max_bytes_per_round):
            whole.append(
                f"{total} bytes this round are over max_bytes_per_round = {most}; raise it if they"
                " may leave"
            )
        # (5) It was not tried too often: a coordinator that cuts every upload gets no further ones.
        if attempts >= (most := self.file.limits.max_attempts_per_round):
            whole.append(
                f"{attempts} uploads of this round were begun, max_attempts_per_round = {most}; if"
                " the line is bad and the coordinator honest, raise it"
            )
        # (6) No part is longer than its rule lets it be.
        if norms is not None:
            whole += self._too_long(method, releases, norms)
        # (7) Nothing is in the clear where sums have to be blind.
        if self.file.secure_aggregation.required:
            whole += self._in_the_clear(releases)
        # (8) Nothing is computed without noise from records of a data set that has to be protected.
        if self.budget is not None and self.budget.required:
            whole += self._private(releases)
        return Decision(verdicts, tuple(whole))

    @property
    def budget(self) -> BudgetTable | None:
        """What may be spent on this silo's data set; None where nothing is said of it."""
        return self.file.dataset.get(self.dataset)

    @property
    def terms(self) -> "Terms":
        """What it asks of the cohort and the survivors of a blind sum."""
        from ..secagg.spec import (  # noqa: PLC0415 numpy takes a tenth of a second, commands read policies without
            Terms,
        )

        asked = self.file.secure_aggregation
        return Terms(asked.min_cohort, asked.min_honest, asked.assumed_colluders)

    @property
    def bounds_norms(self) -> bool:
        """Whether a rule bounds the norm of a part, so that the norms are wanted."""
        return any(rule.max_norm is not None for rule in self.file.allow)

    def _too_long(
        self, method: str, releases: Sequence[Release], norms: Mapping[str, float]
    ) -> Iterator[str]:
        for part in dict.fromkeys(release.part for release in releases):
            rule = self.rule(method, part)
            if rule is None or rule.max_norm is None or norms.get(part, math.inf) <= rule.max_norm:
                continue
            yield (
                f"part {part!r}: rule {rule.name!r}: its norm is {norms.get(part, math.inf):.6g},"
                f" over max_norm = {rule.max_norm:g}; raise it if longer ones may leave, or look"
                " why training went so far"
            )

    def _in_the_clear(self, releases: Sequence[Release]) -> Iterator[str]:
        if parts := list(
            dict.fromkeys(release.part for release in releases if release.form == PLAIN)
        ):
            yield (
                f"{', '.join(parts)} would leave in the form {PLAIN!r}, and"
                " secure_aggregation.required = true; ask for a job with"
                ' security.secure_aggregation = "required", or set it to false'
            )

    def _private(self, releases: Sequence[Release]) -> Iterator[str]:
        if names := shown_private(releases):
            yield (
                f"{names} would leave as computed from records without noise, and"
                f" [dataset.{self.dataset}] has required = true; ask for a job that is signed with"
                " [privacy] and gives nothing else, or set it to false"
            )

    def _verdict(
        self, method: str, release: Release, recipient: str, readers: Sequence[str]
    ) -> Verdict:
        rule = self.rule(method, release.part)
        reasons = tuple(self._refusals(rule, method, release, recipient, readers))
        return Verdict(release, rule.name if rule else DEFAULT_DENY, reasons)

    def _refusals(
        self,
        rule: AllowRule | None,
        method: str,
        release: Release,
        recipient: str,
        readers: Sequence[str],
    ) -> Iterator[str]:
        name = f"tensor {release.part}/{release.name}"
        if rule is None:
            yield (
                f"{name}: no [[allow]] has method {method!r} and part {release.part!r}; add one if"
                " it may leave"
            )
            return
        for reason in rule.refusals(release, recipient, release.readers or readers):
            yield f"{name}: rule {rule.name!r}: {reason}"


def load(path: Path, dataset: str = DATASET) -> Policy:
    """Read a policy file, for this data set; the digest is of the very bytes that were parsed."""
    return parse(read_bytes(path), str(path), dataset)


def parse(data: bytes, origin: str, dataset: str = DATASET) -> Policy:
    """Check the bytes of a policy file.

    LocalError for one that the ledger cannot hold, or of other data sets, too.
    """
    if len(data) > MAX_FILE:
        raise LocalError(
            f"{origin}: {len(data)} bytes, at most {MAX_FILE} fit into the ledger; use globs, fewer"
            " rules"
        )
    file = parse_toml(data, PolicyFile, origin)
    # or a name that is mistyped would protect nothing
    if file.dataset and dataset not in file.dataset:
        raise LocalError(
            f"{origin}: has [dataset.{'], [dataset.'.join(file.dataset)}], and this silo's data set"
            f" is {dataset!r}; name it alike here and in the silo's configuration (dataset = …)"
        )
    return Policy(file, hashlib.sha256(data).hexdigest(), data.decode(), dataset)
