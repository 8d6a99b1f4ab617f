"""A round's contributions on their way to the gate: tensors, and what each was computed from.

In a plain job nothing is said of that: all tensors are exact. In a private job the runner says it
tensor by tensor, and the outbox keeps it next to them. A tensor of which it says nothing is exact
there, too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from ...algorithms.exchange.codec import source_of
from ...algorithms.exchange.parts import WEIGHT
from ...algorithms.leaks.taint import EXACT, Taint, taints_from_text, taints_to_text, worst
from ...algorithms.training.silo_round import TAINTS
from ...errors import LocalError
from ...files import tensor_file
from ...security.policy.release import MASKED, Release

T = TypeVar("T")

START, JOB = "staddle.start", "staddle.job"  # in the metadata of an outbox
UNSAID = -1


@dataclass(frozen=True)
class Contributions:
    """Tensors by part and name, the weights of sums among them, and their taints.

    ``start`` is the number of rounds behind the state from which they were trained; UNSAID where no
    outbox says it. ``job`` is the digest of the job that an outbox is of, empty where none says it.
    """

    tensors: Mapping[str, Mapping[str, Tensor]]
    taints: Mapping[str, Mapping[str, Taint]] = field(default_factory=dict)
    start: int = UNSAID
    job: str = ""

    def taint(self, part: str, name: str) -> Taint:
        """The taint of a tensor; exact unless something else was said of it, or its source."""
        return self.taints.get(part, {}).get(source_of(name), EXACT)


def tainted(releases: Sequence[Release], contributions: Contributions) -> tuple[Release, ...]:
    """The releases, in whatever form, each with its taint; without one it is exact."""
    found = []
    for release in releases:
        taint = _taint(release, contributions)
        # reservations paid for what is differentially private, and for nothing else
        ids = sorted(taint.ids) if taint.name == "noised" else ()
        found.append(replace(release, taint=taint.name, ledger_ids=tuple(ids)))
    return tuple(found)


def _taint(release: Release, contributions: Contributions) -> Taint:
    names = [release.name]
    if release.form == MASKED and WEIGHT in contributions.tensors[release.part]:
        names.append(WEIGHT)  # its weight is in what is masked
    return worst(contributions.taint(release.part, name) for name in names)


# As the outbox has it: safetensors, of a private job with the taints in their metadata.


def to_bytes(contributions: Contributions) -> bytes:
    """The outbox file of these contributions.

    The file's metadata has the start, the job, and taints if there are any.
    """
    metadata = {START: str(contributions.start), JOB: contributions.job}
    # Only private jobs have taints.
    taints = flattened(contributions.taints)
    if taints:
        metadata[TAINTS] = taints_to_text(taints)
    return tensor_file.to_bytes(flattened(contributions.tensors), metadata)


def read(path: Path) -> Contributions:
    """The contributions of a file; LocalError for one not written here, or changed by the disk.

    Without a start in the file it is UNSAID.
    """
    return _of_file(*tensor_file.read(path), str(path))


def from_bytes(data: bytes, origin: str) -> Contributions:
    """Like ``read``, for a file's bytes; ``origin`` names it in errors."""
    return _of_file(*tensor_file.from_bytes(data, origin), origin)


def _of_file(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], origin: str
) -> Contributions:
    try:
        taints = taints_from_text(metadata.get(TAINTS, "[]"))
        start = int(metadata.get(START, UNSAID))
    except ValueError as error:
        raise LocalError(
            f"{origin}: cannot read it: {error}; restore the silo's folder from a backup"
        ) from error
    return Contributions(by_part(tensors), by_part(taints), start, metadata.get(JOB, ""))


def flattened(values: Mapping[str, Mapping[str, T]]) -> dict[str, T]:
    """The values by ``part/name``."""
    return {f"{part}/{name}": value for part, own in values.items() for name, value in own.items()}


def by_part(flat: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """The inverse of ``flattened``."""
    found: dict[str, dict[str, T]] = {}
    for key, value in flat.items():
        part, _, name = key.partition("/")
        found.setdefault(part, {})[name] = value
    return found
