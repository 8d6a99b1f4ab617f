"""What a round gives, on its way to the gate: tensors by part and name, and what each was computed from.

In a plain job nothing is said of that: all of it is private. In a private one the runner says it tensor by tensor, and
it is kept beside them in the outbox; what it says nothing of is private there, too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import safetensors
import safetensors.torch
from torch import Tensor

from ..algorithms.exchange import WEIGHT
from ..algorithms.taint import PRIVATE, Taint, worst
from ..errors import LocalError
from ..files import canonical_json, parse_json
from ..security.release import MASKED, Release

TAINTS = "taints"  # in the metadata of the file
LOST = "restore the silo's folder from a backup"


@dataclass(frozen=True)
class Bundle:
    """Tensors by part and name, the weights of sums among them, and their taints."""

    tensors: Mapping[str, Mapping[str, Tensor]]
    taints: Mapping[str, Mapping[str, Taint]] = field(default_factory=dict)

    def taint(self, part: str, name: str) -> Taint:
        """What a tensor was computed from; private unless something else was said."""
        return self.taints.get(part, {}).get(name, PRIVATE)


def tainted(releases: Sequence[Release], bundle: Bundle) -> tuple[Release, ...]:
    """What leaves, in whatever form, with what it was computed from; what is masked is so with its weight in it."""
    found = []
    for release in releases:
        names = [release.name]
        if release.form == MASKED and WEIGHT in bundle.tensors[release.part]:
            names.append(WEIGHT)
        taint = worst(bundle.taint(release.part, name) for name in names)
        ids = tuple(sorted(taint.ids)) if taint.name == "dp" else ()
        found.append(replace(release, taint=taint.name, ledger_ids=ids))
    return tuple(found)


# As the outbox has it: safetensors, of a private job with {"taints": "{\"model/w\":[12,19],\"metrics/tested\":[]}"}.


def to_bytes(bundle: Bundle) -> bytes:
    """The file; of what is private nothing is said in it."""
    flat = {f"{part}/{name}": value for part, values in bundle.tensors.items() for name, value in values.items()}
    said = {
        f"{part}/{name}": sorted(taint.ids)
        for part, taints in bundle.taints.items()
        for name, taint in taints.items()
        if not taint.private
    }
    return safetensors.torch.save(flat, {TAINTS: canonical_json(said).decode()} if said else None)


def read(path: Path) -> Bundle:
    """The bundle of a file; LocalError for one that was not written here."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
        flat = safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, OSError) as error:
        raise LocalError(f"{path}: cannot read it: {error}; {LOST}") from error
    said = parse_json(metadata.get(TAINTS, "{}").encode(), str(path))
    if not isinstance(said, dict) or not all(map(_ids, said.values())):
        raise LocalError(f"{path}: its metadata do not say what paid for which tensor; {LOST}")
    tensors: dict[str, dict[str, Tensor]] = {}
    taints: dict[str, dict[str, Taint]] = {}
    for key, value in flat.items():
        part, _, name = key.partition("/")
        tensors.setdefault(part, {})[name] = value
        if key in said:
            taints.setdefault(part, {})[name] = Taint(ids=frozenset(said[key]))
    return Bundle(tensors, taints)


def _ids(value: object) -> bool:
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)
