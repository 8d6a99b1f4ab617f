"""What silos that were away receive in later rounds, so that they may take part again.

A silo whose masked words may have left, and that does not know what came of them, trains from the
same state again only once it sees that no sum with these words can be opened
(security/secagg/memory.py). The coordinator can show that when the round closes: with enough
abandon notes for an attempt that ended, and with the survivors and their signatures for the one
that was opened. It keeps both until a later round of each such silo counts, and sends them next to
every specification until then.

As a row of table ``secure``, of kind "settled"::

    {"silos":["a","b"],"spec":"1a4f…"}

with the notes and survivors as a ``SignedSpec`` of proto/secure.proto has them, in hex.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ...files.documents import canonical_json, parse_json
from ...proto import secure_pb2 as pb
from ...proto.convert.secagg_received import (
    MOST_NOTES,
    MOST_SHOWN,
    MOST_SHOWN_BYTES,
    SignedSpec,
    spec_from_wire,
    spec_to_wire,
)
from ...security.secagg.coordinator import CoordinatorState
from ...security.secagg.messages import Abandon, SurvivorsShown
from ..storage.replay_log import SETTLED, ReplayEntry

T = TypeVar("T")

# In place of the specification, which is another in each attempt.
DOCUMENT, SIGNATURE = b"-", bytes(64)


@dataclass(frozen=True)
class SettledRound:
    """What silos that were away receive of one round.

    The silos that it is for, abandon notes, and who survived in the attempt that was opened.
    """

    silos: tuple[str, ...]
    notes: tuple[Abandon, ...] = ()
    shown: tuple[SurvivorsShown, ...] = ()

    def is_needed(self, counted: Mapping[str, int], round_: int) -> bool:
        """True while one of its silos has not been in a later round.

        ``counted`` as in the job's state.
        """
        return any(counted.get(silo, 0) <= round_ for silo in self.silos)


def settled(states: Sequence[CoordinatorState]) -> SettledRound | None:
    """The settled round after its last attempt was opened; None if nobody needs it.

    ``states`` are those of all attempts of the round, in order.
    """
    last = states[-1]
    # Masked words may have left from all of U1 once U2 was delivered.
    trained = {silo for state in states if state.u2_sent for silo in state.u1}
    away = trained.difference(last.u3)
    if not away:
        return None

    # Of an attempt that ended, enough abandon notes show that its sum cannot be opened.
    notes: list[Abandon] = []
    for state in states[:-1]:
        if state.u2_sent and not state.notes_missing:
            notes += _first(state.notes, state.notes_needed)

    # Of the one that was opened, its survivors and their signatures show who is not in the sum.
    shown: tuple[SurvivorsShown, ...] = ()
    if not away.isdisjoint(last.u1):
        headers = tuple(last.headers[silo] for silo in last.u3)
        enough = tuple(_first(last.survivals, last.spec.threshold))
        shown = (SurvivorsShown(last.ctx, last.h_u1, last.h_u2, headers, enough),)
    return SettledRound(tuple(sorted(away)), tuple(notes), shown)


def _first(by_silo: Mapping[str, T], most: int) -> list[T]:
    """As many as it takes to show something, in the order of ids: the row is as short as it can."""
    return [by_silo[silo] for silo in sorted(by_silo)[:most]]


def dumped(kept: SettledRound) -> ReplayEntry:
    """The database row of a settled round.

    Notes are sorted, so that the same settled round gives the same bytes.
    """
    notes = tuple(sorted(kept.notes, key=lambda note: (note.silo, note.signature)))
    spec = spec_to_wire(SignedSpec(DOCUMENT, SIGNATURE, notes, (), kept.shown))
    body = {"silos": list(kept.silos), "spec": spec.SerializeToString(deterministic=True).hex()}
    return ReplayEntry(0, SETTLED, "", canonical_json(body))


def loaded(row: ReplayEntry) -> SettledRound:
    """The settled round of a row that ``dumped`` made."""
    kept = parse_json(row.body, "a row of table secure in coordinator.sqlite")
    spec = spec_from_wire(pb.SignedSpec.FromString(bytes.fromhex(kept["spec"])))
    return SettledRound(tuple(kept["silos"]), spec.notes, spec.shown)


def brought(
    rounds: Sequence[SettledRound],
) -> tuple[tuple[Abandon, ...], tuple[SurvivorsShown, ...]]:
    """Notes and survivors for one specification: as many of the newest rounds as fit.

    ``rounds`` in ascending order.
    """
    notes: list[Abandon] = []
    shown: list[SurvivorsShown] = []
    size = 0
    # A specification has room for so much alone. Half of the notes is left to the attempts of the
    # round itself.
    for kept in reversed(rounds):
        size += sum(map(_size, kept.shown))
        if (
            len(notes) + len(kept.notes) > MOST_NOTES // 2
            or len(shown) == MOST_SHOWN
            or size > MOST_SHOWN_BYTES
        ):
            break
        notes += kept.notes
        shown += kept.shown
    return tuple(notes), tuple(sorted(shown, key=lambda each: each.ctx))


def _size(shown: SurvivorsShown) -> int:
    return spec_to_wire(SignedSpec(b"", b"", (), (), (shown,))).ByteSize()
