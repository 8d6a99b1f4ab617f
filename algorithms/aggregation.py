"""The coordinator's half of a round: what comes down to a silo, and what the gifts become.

The same two functions run in the simulator and in the coordinator; what differs is where the tensors lie (``Archive``,
``Read``) and how the exchanges run (``Exchanges``, in the clear or blind).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

from torch import Tensor

from ..errors import LocalError
from .exchange import Exchanges, Mix, Part, Tensors, all_finite
from .method import METRICS, CoordinatorState, Latest, Method

ReadGift: TypeAlias = Callable[[str, str, str], Tensor]  # (part, silo, tensor name) → what that silo gave this round
Delivered: TypeAlias = dict[str, dict[str, Tensor]]


class Archive(Protocol):
    """What the coordinator keeps between rounds: the last published parts, and each silo's last version of a Mix."""

    def latest(self, part: str) -> Tensors | None:
        """The last published value; None before the first."""
        ...

    def publish(self, part: str, tensors: Tensors) -> None:
        """Replace the published value."""
        ...

    def store(self, part: str, silo: str, tensors: Tensors) -> None:
        """Replace a silo's version of a Mix part."""
        ...

    def has(self, part: str, silo: str) -> bool:
        """Whether a silo has given a version."""
        ...

    def version(self, part: str, silo: str, name: str) -> Tensor:
        """One tensor of a silo's version."""
        ...


class MemoryArchive:
    """An archive in memory, for the simulator."""

    def __init__(self) -> None:
        self._published: dict[str, Tensors] = {}
        self._versions: dict[tuple[str, str], Tensors] = {}

    def latest(self, part: str) -> Tensors | None:
        """The last published value; None before the first."""
        return self._published.get(part)

    def publish(self, part: str, tensors: Tensors) -> None:
        """Replace the published value."""
        self._published[part] = dict(tensors)

    def store(self, part: str, silo: str, tensors: Tensors) -> None:
        """Replace a silo's version of a Mix part."""
        self._versions[part, silo] = dict(tensors)

    def has(self, part: str, silo: str) -> bool:
        """Whether a silo has given a version."""
        return (part, silo) in self._versions

    def version(self, part: str, silo: str, name: str) -> Tensor:
        """One tensor of a silo's version."""
        return self._versions[part, silo][name]


def close_round(
    method: Method,
    exchanges: Exchanges,
    state: CoordinatorState,
    round_: int,
    members: Sequence[str],
    up_parts: Sequence[Part],
    read: ReadGift,
    archive: Archive,
) -> tuple[CoordinatorState, dict[str, Tensor]]:
    """Fold what the members gave: the next state, and the sums of METRICS.

    Members are folded in job order whatever order they are named in. The archive changes only after every exchange
    and the method have succeeded; doing the same round again after a crash writes the same values again.
    """
    ordered = in_job_order(method, members)
    results: dict[str, dict[str, Tensor]] = {}
    for part in up_parts:
        results[part.name] = exchanges.collect(part, ordered, _reader(read, part.name))
    metrics = results.pop(METRICS.name, {})
    following, published = method.combine(state, round_, ordered, results)
    for name, tensors in published.items():
        if not all(all_finite(tensor) for tensor in tensors.values()):
            raise LocalError(f"round {round_}: the result of part {name!r} holds NaN or infinity; it is not published")
    for part in up_parts:
        if isinstance(part.exchange, Mix):
            for silo in ordered:
                archive.store(part.name, silo, {spec.name: read(part.name, silo, spec.name) for spec in part.tensors})
    for name, tensors in published.items():
        archive.publish(name, tensors)
    return following, metrics


def deliver(
    method: Method, exchanges: Exchanges, state: CoordinatorState, round_: int, silo: str, archive: Archive
) -> Delivered:
    """What one silo gets at the start of a round, part by part; parts of which there is nothing yet are left out."""
    allowed = {part.name: part for part in method.down(round_)}
    delivered: Delivered = {}
    for delivery in method.deliveries(state, round_, silo):
        part = allowed.pop(delivery.part, None)
        if part is None:
            raise LocalError(
                f"method {method.name!r} delivers part {delivery.part!r} in round {round_}, "
                f"its wire list allows each of {[part.name for part in method.down(round_)]} once"
            )
        if isinstance(delivery, Latest):
            tensors = archive.latest(part.name)
        else:
            tensors = _row(exchanges, part, delivery.weights, archive)
        if tensors is not None:
            delivered[part.name] = {spec.name: tensors[spec.name] for spec in part.tensors}
    return delivered


def in_job_order(method: Method, members: Sequence[str]) -> tuple[str, ...]:
    """The members in the order of every fold; LocalError for strangers and duplicates."""
    strangers = sorted(set(members) - set(method.setting.silos))
    if strangers or len(set(members)) != len(members):
        raise LocalError(f"members {list(members)} are not distinct silos of the job; strangers: {strangers}")
    return tuple(silo for silo in method.setting.silos if silo in members)


def _row(exchanges: Exchanges, part: Part, weights: Mapping[str, float], archive: Archive) -> dict[str, Tensor] | None:
    """One recipient's row, over the silos that have a version."""
    present = {silo: weight for silo, weight in weights.items() if archive.has(part.name, silo)}
    if not any(weight > 0 for weight in present.values()):
        return None
    return exchanges.mix(part, present, lambda silo, name: archive.version(part.name, silo, name))


def _reader(read: ReadGift, part: str) -> Callable[[str, str], Tensor]:
    return lambda silo, name: read(part, silo, name)
