"""What a round gives, on its way to the gate: tensors by part and name, and what each was computed
from.

In a plain job nothing is said of that: all of it is private. In a private one the runner says it
tensor by tensor, and it is kept beside them in the outbox; what it says nothing of is private
there, too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from ...algorithms.exchange.parts import WEIGHT
from ...algorithms.leaks.taint import PRIVATE, Taint, taints_from_text, taints_to_text, worst
from ...algorithms.training.silo_round import TAINTS
from ...errors import LocalError
from ...files import tensor_file
from ...security.policy.release import MASKED, Release

T = TypeVar("T")

START = "staddle.start"  # in the metadata of an outbox
UNSAID = -1


@dataclass(frozen=True)
class Contributions:
    """Tensors by part and name, the weights of sums among them, and their taints.

    ``start`` is how many rounds are behind the state that it was trained from; UNSAID where no
    outbox says it.
    """

    tensors: Mapping[str, Mapping[str, Tensor]]
    taints: Mapping[str, Mapping[str, Taint]] = field(default_factory=dict)
    start: int = UNSAID

    def taint(self, part: str, name: str) -> Taint:
        """What a tensor was computed from; private unless something else was said."""
        return self.taints.get(part, {}).get(name, PRIVATE)


def tainted(releases: Sequence[Release], bundle: Contributions) -> tuple[Release, ...]:
    """What leaves, in whatever form, with what it was computed from.

    What is masked is so with its weight in it.
    """
    found = []
    for release in releases:
        names = [release.name]
        if release.form == MASKED and WEIGHT in bundle.tensors[release.part]:
            names.append(WEIGHT)
        taint = worst(bundle.taint(release.part, name) for name in names)
        ids = tuple(sorted(taint.ids)) if taint.name == "dp" else ()
        found.append(replace(release, taint=taint.name, ledger_ids=ids))
    return tuple(found)


# As the outbox has it: safetensors, of a private job with the taints in their metadata.


def to_bytes(bundle: Contributions) -> bytes:
    """The file."""
    said = _flat(bundle.taints)
    metadata = {START: str(bundle.start), **({TAINTS: taints_to_text(said)} if said else {})}
    return tensor_file.to_bytes(_flat(bundle.tensors), metadata)


def read(path: Path) -> Contributions:
    """The bundle of a file; LocalError for one that was not written here, or that the disk
    changed.
    """
    tensors, metadata = tensor_file.read(path)
    try:
        taints, start = (
            taints_from_text(metadata.get(TAINTS, "[]")),
            int(metadata.get(START, UNSAID)),
        )
    except ValueError as error:
        raise LocalError(
            f"{path}: cannot read it: {error}; restore the silo's folder from a backup"
        ) from error
    return Contributions(_by_part(tensors), _by_part(taints), start)


def _flat(values: Mapping[str, Mapping[str, T]]) -> dict[str, T]:
    """By ``part/name``."""
    return {f"{part}/{name}": value for part, own in values.items() for name, value in own.items()}


def _by_part(flat: Mapping[str, T]) -> dict[str, dict[str, T]]:
    found: dict[str, dict[str, T]] = {}
    for key, value in flat.items():
        part, _, name = key.partition("/")
        found.setdefault(part, {})[name] = value
    return found
