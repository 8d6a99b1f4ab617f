r"""Rows of a directed Mix: groups of a round's open sum that one silo each can read.

They are kept until it fetches them. The words of each lie in a file of their own from when the sum
is opened (unmask.py). A fold puts a list of them aside for a silo, in the order of their rounds, as
canonical JSON with its digest::

    {"rows":[{"keep":"0.5","round":7},{"keep":"0.25","round":9}]}

Under their pads they are noise to the coordinator (security/blind/directed_mix.py): it need not
remember who had which. For a silo that was away rows of several rounds wait, for a member of a
round that of its last round alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from ... import log
from ...algorithms.exchange.delivery import Delivery, Mail, Post
from ...algorithms.exchange.parts import Part
from ...files.checked_file import from_json, to_json
from ...files.documents import Strict, parse_canonical
from ...proto.convert.mix import Mixed
from ...security.blind.plan import JobPlan, RoundPlan
from ...security.blind.sum import row_group, row_name
from ...security.identity.selection import among
from ...security.secagg.spec import RoundSpec, kept
from ..storage.store import JobStore, summed_words
from .unmask import KeptSum, kept_sum

# Bytes of what stands next to the words that wait for a silo: a manifest has less than 4 MiB.
MOST_DOCUMENTS = 3 << 20


class _DirectedAside(Strict):
    keep: str
    round: Annotated[int, Field(strict=True, ge=0)]


class _DirectedAsides(Strict):
    rows: tuple[_DirectedAside, ...]


@dataclass(frozen=True)
class DirectedRow:
    """One row that waits for a silo; ``keep`` as in ``method.Post``.

    ``kept`` is the file of its words, which only the silo's pads open.
    """

    kept: KeptSum
    keep: float

    def mixed(self) -> Mixed:
        """The row as it goes down, without its words."""
        claim = self.kept.claim
        return Mixed(
            self.kept.part,
            claim.document,
            claim.signature,
            (),
            claim.tag,
            self.keep,
            survivors=claim.survivors,
        )


class Directed:
    """The directed rows of one job.

    It has no state of its own: waiting rows are listed in files of the job's folder.
    """

    def __init__(self, plan: JobPlan, store: JobStore) -> None:
        self._job = plan.job
        self._bounds = plan.bounds
        self._store = store
        self._parts = {part.name: part for phase in plan.phases for part in phase.rows}

    def rows(
        self, deliveries: Sequence[Delivery], down: Sequence[Part], silo: str
    ) -> list[DirectedRow]:
        """Rows that a silo gets, in the order of the parts and, within one, of rounds."""
        mailed = {delivery.part for delivery in deliveries if isinstance(delivery, Mail)}
        # Mail of a Mix by padded uploads is for mix_rows.py.
        mailed &= self._parts.keys()
        names = among((part.name for part in down), mailed)
        found = []
        for name in names:
            for each in self._waiting(name, silo):
                kept = self._kept(name, silo, each.round)
                found.append(DirectedRow(kept, float(each.keep)))
        return found

    def posting(self, round_: int) -> Callable[[Post, bool], bytes | None]:
        """The function that puts a post's row of this round aside, behind those not cleared.

        None for a silo of which the round has no row, as where nobody is mixed.
        """
        members = self._job.method().directed_for == "members"

        def rows(post: Post, cleared: bool) -> bytes | None:
            # Words are written only of rows in which somebody is mixed (unmask.py).
            if not self._store.path(_name(round_, post.part, post.silo)).exists():
                return None
            before = () if cleared else self._waiting(post.part, post.silo)
            keep = post.keep
            # It follows from the signed specification, whatever ``combine`` made of it.
            if members:
                keep = _kept_share(self._kept(post.part, post.silo, round_), post.silo)
            waiting = (*before, _DirectedAside(keep=repr(keep), round=round_))

            # Else the manifest of the next delivery would not fit into one message.
            kept = (self._kept(post.part, post.silo, each.round) for each in waiting)
            if sum(len(each.claim.document) for each in kept) > MOST_DOCUMENTS:
                log.problem(
                    "row.withheld",
                    job=self._job.name,
                    part=post.part,
                    silo=post.silo,
                    why="too many wait",
                )
                return None
            return to_json(_DirectedAsides(rows=waiting))

        return rows

    def files(self, part: str, silo: str, data: bytes) -> frozenset[str]:
        """The files of words that such a list names; none of a part that is no directed one."""
        if part not in self._parts:
            return frozenset()
        return frozenset(_name(each.round, part, silo) for each in self._asides(part, silo, data))

    def has(self, part: str) -> bool:
        """True if a part is mixed by directed rows."""
        return part in self._parts

    def _waiting(self, part: str, silo: str) -> tuple[_DirectedAside, ...]:
        data = self._store.put_aside(part, silo)
        return () if data is None else self._asides(part, silo, data)

    def _asides(self, part: str, silo: str, data: bytes) -> tuple[_DirectedAside, ...]:
        origin = f"job {self._job.name!r}: rows of {part!r} for {silo!r}"
        return from_json(data, _DirectedAsides, origin).rows

    def _kept(self, part: str, silo: str, round_: int) -> KeptSum:
        own = row_group(self._parts[part], self._bounds, silo)
        return kept_sum(part, self._store.path(_name(round_, part, silo)), own.nbytes)


def row_words(plan: RoundPlan) -> tuple[str, ...]:
    """Names of all files of rows that the sum of a round can have; some may not exist."""
    return tuple(_name(plan.round, part.name, silo) for part in plan.rows for silo in plan.readers)


def _kept_share(row: KeptSum, silo: str) -> float:
    spec = parse_canonical(row.claim.document, RoundSpec, str(row.path))
    group = next(group for group in spec.groups if group.name == row_name(row.part, silo))
    return kept(spec, group, row.claim.survivors)


def _name(round_: int, part: str, silo: str) -> str:
    return summed_words(round_, row_name(part, silo))
