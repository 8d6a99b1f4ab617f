"""The coordinator's half of a round: deliveries to the silos, and folding their contributions.

The same two functions run in the simulator and in the coordinator, which differ in where the
tensors lie (``Archive``, ``Read``) and in how the exchanges run (``Exchanges``, in the clear or
blind).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from ...errors import LocalError
from ..exchange.codec import Decoded, base_of
from ..exchange.delivery import KEEP, CoordinatorState, Delivery, Latest, Mail, Post, Row, Value
from ..exchange.parts import DTYPES, Exchanges, Kind, Mix, Part, Read, Tensors, all_finite, picked
from ..method import Method
from ..numerics.devices import CPU
from ..tasks.counting import METRICS

# in the header of a coordinator's result file: the silos as a JSON list, in the order of its rows
SILOS = "silos"

ReadContribution: TypeAlias = Callable[
    [str, str, str], Tensor
]  # (part, silo, tensor name) → that tensor of the silo's contribution in this round
Delivered: TypeAlias = dict[str, dict[str, Tensor]]


class Shelf(Protocol):
    """The results of earlier rounds: published parts, each silo's last version of a Mix, mail."""

    def latest(self, part: str) -> Tensors | None:
        """The last published value; None before the first.

        Readers must not change its tensors.
        """
        ...

    def has(self, part: str, silo: str) -> bool:
        """True if a silo has uploaded a version."""
        ...

    def version(self, part: str, silo: str, name: str) -> Tensor:
        """One tensor of a silo's version, as it crossed.

        Only for silos for which ``has`` is true.
        """
        ...

    def mail(self, part: str, silo: str) -> Tensors | None:
        """The mail for a silo, with ``@keep``; None where there is none.

        It has the tensors of the mixed part, and ``@keep`` [] float64.
        """
        ...


class Archive(Shelf, Protocol):
    """A shelf that a fold changes."""

    def publish(self, part: str, tensors: Tensors) -> None:
        """Replace the published value.

        ``tensors`` are all of the part's; the older value is dropped.
        """
        ...

    def store(self, part: Part, silo: str, read: Read) -> None:
        """Replace a silo's version of a Mix part by its contribution, which ``read`` reads."""
        ...

    def put_mail(self, post: Post, tensors: Tensors | None) -> bool:
        """Replace the mail for a silo; ``tensors`` is None where the exchanges made no row.

        True where the mail is there after the call: an archive may have its own way to make a row.
        ``tensors`` include ``@keep``, as in ``mail``.
        """
        ...

    def clear_mail(self, silo: str) -> None:
        """Remove all mail for a silo."""
        ...


@dataclass(frozen=True, eq=False)
class Shelved:
    """The content of an archive: published values by part, versions and mail by part and silo.

    The archive never changes it afterwards.
    """

    published: Mapping[str, Tensors]
    versions: Mapping[tuple[str, str], Tensors]
    mail: Mapping[tuple[str, str], Tensors]


class MemoryArchive:
    """An archive in memory, for the simulator; ``shelved`` is its initial content.

    Versions lie on the ``device`` on which a Mix is folded.
    """

    def __init__(self, shelved: Shelved | None = None, device: torch.device = CPU) -> None:
        self._device = device
        shelved = shelved or Shelved({}, {}, {})
        self._published: dict[str, Tensors] = dict(shelved.published)
        self._versions: dict[tuple[str, str], Tensors] = dict(shelved.versions)
        self._mail: dict[tuple[str, str], Tensors] = dict(shelved.mail)
        if device != CPU:
            # Versions of a snapshot from a file are on the host.
            for key, held in shelved.versions.items():
                self._versions[key] = {name: tensor.to(device) for name, tensor in held.items()}

    def shelved(self) -> Shelved:
        """The content as it is now; no later change of the archive reaches it.

        The tensors are shared: the archive replaces tensors, and never writes into them.
        """
        return Shelved(dict(self._published), dict(self._versions), dict(self._mail))

    def latest(self, part: str) -> Tensors | None:
        """The last published value; None before the first."""
        return self._published.get(part)

    def publish(self, part: str, tensors: Tensors) -> None:
        """Replace the published value."""
        self._published[part] = dict(tensors)

    def store(self, part: Part, silo: str, read: Read) -> None:
        """Replace a silo's version of a Mix part by its contribution in this round."""
        self._versions[part.name, silo] = {
            s.name: read(silo, s.name).to(self._device) for s in part.tensors
        }

    def has(self, part: str, silo: str) -> bool:
        """True if a silo has uploaded a version."""
        return (part, silo) in self._versions

    def version(self, part: str, silo: str, name: str) -> Tensor:
        """One tensor of a silo's version."""
        return self._versions[part, silo][name]

    def mail(self, part: str, silo: str) -> Tensors | None:
        """The mail for a silo, with ``@keep``; None where there is none."""
        return self._mail.get((part, silo))

    def put_mail(self, post: Post, tensors: Tensors | None) -> bool:
        """Replace the mail for a silo where there is a row; whether there is one."""
        if tensors is not None:
            self._mail[post.part, post.silo] = dict(tensors)
        return tensors is not None

    def clear_mail(self, silo: str) -> None:
        """Remove all mail for a silo."""
        self._mail = {key: mail for key, mail in self._mail.items() if key[1] != silo}


def close_round(
    method: Method,
    exchanges: Exchanges,
    state: CoordinatorState,
    round_: int,
    members: Sequence[str],
    up_parts: Sequence[Part],
    read: ReadContribution,
    archive: Archive,
) -> tuple[CoordinatorState, dict[str, Tensor]]:
    """Fold the members' contributions into the next state and the sums of test counts.

    The sums of METRICS have its names, those of other such parts also the part's, such as
    ``confusion.trained``.

    Members are folded in job order, whatever their order in ``members``. ``up_parts`` are the
    round's parts with the job's exchanges. LocalError, with the archive unchanged, for members that
    are not silos of the job, and for results that hold NaN or infinity.
    """
    # Sums of floats depend on their order; the job's is the same in simulator and coordinator.
    ordered = in_job_order(method, members)
    results: dict[str, dict[str, Tensor]] = {}
    for part in up_parts:
        results[part.name] = exchanges.collect(part, ordered, _reader(read, part, archive))
    # They are for people: a method must not be steered by test records.
    metrics = _taken_metrics(up_parts, results)
    combined = method.combine(state, round_, ordered, results)
    for name, tensors in combined.published.items():
        _check_finite(round_, name, tensors)
    posted: list[tuple[Post, dict[str, Tensor] | None]] = []
    for post in combined.posts:
        cleared = post.silo in ordered
        mailed = _posted(method, exchanges, post, up_parts, read, archive, cleared=cleared)
        posted.append((post, mailed))

    # The archive changes only now that every exchange and the method have succeeded: a round that
    # fails leaves it as it was.
    stored = [part for part in up_parts if part.exchange == Mix()]  # a directed one is not kept
    for part, silo in product(stored, ordered):
        archive.store(part, silo, _reader(read, part, archive))
    for name, tensors in combined.published.items():
        archive.publish(name, tensors)

    # A member's mail was delivered at the start of the round to which it contributed now.
    for silo in ordered:
        archive.clear_mail(silo)
    unposted = []
    # If no mail is there, the method's state must not count the row as posted.
    for post, mailed in posted:
        if not archive.put_mail(post, mailed):
            unposted.append(post.silo)
    return method.unposted(combined.state, tuple(unposted)), metrics


def _taken_metrics(
    up_parts: Sequence[Part], results: dict[str, dict[str, Tensor]]
) -> dict[str, Tensor]:
    """The sums of test counts, which are taken out of the results."""
    found: dict[str, Tensor] = {}
    for part in up_parts:
        if part.kind is Kind.METRIC:
            prefix = "" if part.name == METRICS else f"{part.name}."
            for name, total in results.pop(part.name).items():
                found[prefix + name] = total
    return found


def _check_finite(round_: int, part: str, tensors: Tensors) -> None:
    """LocalError if a result holds NaN or infinity: every silo would train from it."""
    if not all(map(all_finite, tensors.values())):
        raise LocalError(
            f"round {round_}: the result of part {part!r} holds NaN or infinity; it is not"
            " published"
        )


def deliver(
    method: Method,
    exchanges: Exchanges,
    state: CoordinatorState,
    round_: int,
    silo: str,
    archive: Shelf,
) -> Delivered:
    """The delivery to one silo at the start of a round, part by part.

    Parts that have no value yet are left out. Tensors are in the order of the part's specs.
    LocalError if the method delivers a part that its wire list lacks, or one twice.
    """
    return deliver_all(method, exchanges, state, round_, (silo,), archive)[silo]


def deliver_all(
    method: Method,
    exchanges: Exchanges,
    state: CoordinatorState,
    round_: int,
    silos: Sequence[str],
    archive: Shelf,
) -> dict[str, Delivered]:
    """``deliver`` to each of the silos; the rows of a Mix are folded together."""
    planned: dict[str, list[tuple[Part, Delivery]]] = {}
    rows: dict[str, tuple[Part, dict[str, Mapping[str, float]]]] = {}
    for silo in silos:
        planned[silo] = _planned(method, state, round_, silo)
        for part, delivery in planned[silo]:
            if isinstance(delivery, Row) and (weights := _present(part, delivery, archive)):
                rows.setdefault(part.name, (part, {}))[1][silo] = weights
    mixed: dict[str, Mapping[str, Tensors | None]] = {}
    for name, (part, asked) in rows.items():
        mixed[name] = exchanges.mix_rows(part, asked, Decoded(partial(archive.version, name)))

    delivered: dict[str, Delivered] = {}
    for silo, own in planned.items():
        delivered[silo] = {}
        for part, delivery in own:
            tensors = _delivered(part, silo, delivery, archive, mixed.get(part.name, {}))
            if tensors is not None:
                delivered[silo][part.name] = picked(part.tensors, tensors)
    return delivered


def _planned(
    method: Method, state: CoordinatorState, round_: int, silo: str
) -> list[tuple[Part, Delivery]]:
    """What the method delivers to a silo, checked."""
    # A silo rejects what its signed job does not let come down; so a method's mistake shows where
    # the method runs, and not as every silo's complaint about the coordinator. ``pop`` because a
    # part that comes down twice would overwrite itself.
    allowed = {part.name: part for part in method.down(round_)}
    planned: list[tuple[Part, Delivery]] = []
    for delivery in method.deliveries(state, round_, silo):
        part = allowed.pop(delivery.part, None)
        if part is None:
            raise LocalError(
                f"method {method.name!r} delivers part {delivery.part!r} in round {round_}, "
                f"its wire list allows each of {[part.name for part in method.down(round_)]} once"
            )

        # Blind, the silos compare digests of their deliveries before they sum, and leave addressed
        # parts out (security/blind/plan.py): one that is not declared would stop every round.
        if not isinstance(delivery, Latest) and part.name not in method.addressed:
            raise LocalError(
                f"method {method.name!r} delivers part {part.name!r} to each silo in a value of its"
                " own, but does not list it in addressed"
            )
        planned.append((part, delivery))
    return planned


def _delivered(
    part: Part,
    silo: str,
    delivery: Delivery,
    archive: Shelf,
    rows: Mapping[str, Tensors | None],
) -> Tensors | None:
    match delivery:
        case Latest():
            return archive.latest(part.name)
        case Row():
            # A silo that gets no row keeps its own.
            return rows.get(silo)
        case Mail():
            return archive.mail(part.name, silo)
        case Value():
            return delivery.tensors


def in_job_order(method: Method, members: Sequence[str]) -> tuple[str, ...]:
    """The members in the order of every fold; LocalError for strangers and duplicates.

    Silos upload in any order, but sums of floats depend on the order.
    """
    # A duplicate would count twice in a sum.
    distinct = set(members)
    strangers = sorted(distinct.difference(method.setting.silos))
    if strangers or len(distinct) != len(members):
        raise LocalError(
            f"members {list(members)} are not distinct silos of the job; strangers: {strangers}"
        )
    return tuple(filter(distinct.__contains__, method.setting.silos))


def _present(part: Part, row: Row, archive: Shelf) -> dict[str, float]:
    """The weights of the silos that have a version; none where none of these is positive."""
    # The exchange normalises the weights of those that are left.
    present = {silo: weight for silo, weight in row.weights.items() if archive.has(part.name, silo)}
    return present if any(weight > 0 for weight in present.values()) else {}


def _posted(
    method: Method,
    exchanges: Exchanges,
    post: Post,
    up_parts: Sequence[Part],
    read: ReadContribution,
    archive: Shelf,
    *,
    cleared: bool,
) -> dict[str, Tensor] | None:
    """keep·m + (1 − keep)·row in float64, and the factor of what the silo itself keeps.

    None where the silo gets no row. ``cleared``: the silo contributed in this round, so its mail m
    counts as empty.
    """
    # Only a ``keep`` from 0 to 1 makes a mean of the mail and the row.
    mixes = {part.name: part for part in up_parts if isinstance(part.exchange, Mix)}
    part = mixes.get(post.part)
    if part is None or post.silo not in method.setting.silos or not 0 <= post.keep <= 1:
        raise LocalError(
            f"method {method.name!r} posts {post.part!r} to {post.silo!r} with keep = {post.keep}"
        )
    row = exchanges.mix(part, post.silo, post.weights, _reader(read, part, archive))
    # The exchange makes no row that would show too much of one silo.
    if row is None:
        return None  # as if nobody were alike

    # What an absent silo has missed is folded into one pair (k, m), so that it downloads one model
    # however many rounds it was away: θ ← k·θ + m (``Post``).
    before = None if cleared else archive.mail(post.part, post.silo)
    # Without older mail k starts at 1.
    kept = 1.0 if before is None else float(before[KEEP.name])
    mailed: dict[str, Tensor] = {}
    for spec in part.tensors:
        share = row[spec.name].double() * (1 - post.keep)
        if before is not None:
            share.add_(before[spec.name].double() * post.keep)
        mailed[spec.name] = share.to(DTYPES[spec.dtype])
    return {**mailed, KEEP.name: torch.tensor(kept * post.keep, dtype=torch.float64)}


def _reader(read: ReadContribution, part: Part, archive: Shelf) -> Read:
    # What was published last came down to all silos of this round.
    compares = part.codec is not None and part.codec.compares
    base = base_of(part, archive.latest(part.name)) if compares else {}
    return Decoded(partial(read, part.name), base)
