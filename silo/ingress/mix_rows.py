"""The rows of a Mix in one delivery: checked, opened as their words come, and put together.

A row that breaks a rule is refused before a seed is opened, and what it was made of is remembered
before that, durable: opened twice, with other weights, rows would tell a single silo's contribution
(security rules 4 to 6, mix_row.py). The same rows again, as after a lost connection, tell
nothing new.

Where a part of the job's delivery has ``@keep``, its rows are those of the rounds that this silo
was away, in order::

    m ← keep m + (1 - keep) row,   @keep ← keep @keep      from m = 0, @keep = 1

as the coordinator puts them together where it can read them (algorithms/engines/aggregation.py),
bit for bit.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from ...algorithms.exchange.delivery import KEEP
from ...algorithms.exchange.parts import DTYPES, MIX_BITS, Mix, Part, elements_of
from ...proto import secure_pb2 as pb
from ...proto.convert.mix import Mixed, rows_from_wire, words_from_wire
from ...security.arithmetic.fixedpoint import Flat, Floats, check_values
from ...security.blind.mix_context import WORD_BYTES, MixContext
from ...security.blind.mix_row import RecipientRow, RowMemory, admit, check_uploads
from ...security.blind.padded_mix import Opening, Summand, check_sent, open_seed
from ...security.blind.plan import RoundPlan
from ...security.blind.prekeys import Known, Word
from ...security.faults import COORDINATOR, Code, check
from ...security.identity.domains import MIX_ROW, framed
from ...security.secagg.spec import Terms
from .keyed_job import Sharing
from .mix_memory import OpenedRows

DIRECTED_BYTES = 4  # of a word of a directed row

Own = Callable[[Part], Flat]  # the values of a part that this silo mixes in itself


@dataclass(frozen=True)
class Expected:
    """A part that comes down in rows: as it was uploaded, and the most rows that there can be.

    ``mailed``: the rows are of rounds that this silo was away.
    """

    part: Part
    most: int
    mailed: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the words of one row; directed rows have narrower words."""
        directed = self.part.exchange == Mix(directed=True)
        return (DIRECTED_BYTES if directed else WORD_BYTES) * elements_of(self.part.tensors)


def expected_rows(plan: RoundPlan) -> dict[str, Expected]:
    """The parts of a round's delivery that come down in rows, by name.

    Mail has one row for each round that there was.
    """
    found, job = {}, plan.job
    one = job.method().directed_for == "members"  # a silo's own round clears what waited for it
    # In a job without a key, the coordinator mixes and delivers tensors.
    for part in plan.down if job.keyed else ():
        if isinstance(part.exchange, Mix):  # directed or not
            mailed = KEEP in part.tensors
            # ``@keep`` is a field of each row, not part of its words.
            given = replace(part, tensors=tuple(spec for spec in part.tensors if spec != KEEP))
            found[part.name] = Expected(given, plan.round if mailed and not one else 1, mailed)
    return found


def largest_rows(plan: RoundPlan) -> int:
    """Bytes of all rows that a round's delivery can have."""
    return sum(each.most * each.nbytes for each in expected_rows(plan).values())


def announced_rows(
    peer: str, messages: Sequence[pb.MixedRow], expected: Mapping[str, Expected]
) -> tuple[Mixed, ...]:
    """The rows of a manifest; RefusedError unless they are of these parts and not too many.

    They come in the order of the parts.
    """
    # Counted before they are parsed: each row costs memory and signatures to check.
    mixed = rows_from_wire(peer, messages, sum(each.most for each in expected.values()))
    names, places = [each.part for each in mixed], list(expected)
    for name in dict.fromkeys(names):
        check(
            name in expected,
            COORDINATOR,
            Code.SPEC,
            f"brings rows of part {name[:64]!r}, which has none",
        )
        most = expected[name].most
        check(
            names.count(name) <= most,
            COORDINATOR,
            Code.SPEC,
            f"brings {names.count(name)} rows of {name!r}",
        )

    # The words come without names: in another order they would be read as another part's.
    in_order = names == sorted(names, key=places.index)
    check(
        in_order, COORDINATOR, Code.SPEC, "brings rows that are not in the order of the job's parts"
    )
    return mixed


@dataclass(frozen=True)
class _Admitted:
    """A row that may be opened."""

    mixed: Mixed
    row: RecipientRow
    line: MixContext
    expected: Expected


class IncomingRows:
    """The rows of one delivery: call ``announced``, ``admit``, ``write``, then ``delivered``."""

    def __init__(self, sharing: Sharing, plan: RoundPlan, terms: Terms, own: Own) -> None:
        """``terms`` are what this silo asks of a row.

        ``own`` is asked only for a row that it has a part in.
        """
        self._sharing = sharing
        self._terms = terms
        self._own = own
        self._round = plan.round
        self._expected = expected_rows(plan)
        self._mixed: tuple[Mixed, ...] = ()
        self._words: tuple[tuple[str, Word], ...] = ()
        self._openings: Iterator[tuple[_Admitted, Opening]] = iter(())
        self._now: tuple[_Admitted, Opening] | None = None
        self._left = 0  # bytes of the row that comes now
        self._rest = bytearray()  # of a word that is cut in two by the chunks
        self._made: dict[str, dict[str, Tensor]] = {}

    def announced(
        self, peer: str, messages: Sequence[pb.MixedRow], prekeys: Sequence[pb.DeliveredPrekey]
    ) -> list[int]:
        """The bytes of each row; RefusedError for impossible rows, before any is used.

        ``prekeys`` are those of the other silos that come next to them.
        """
        self._words = words_from_wire(peer, prekeys)
        self._mixed = mixed = announced_rows(peer, messages, self._expected)
        names = [each.part for each in mixed]
        check(
            not any(each.survivors for each in mixed),
            COORDINATOR,
            Code.SPEC,
            "brings directed rows, there are none",
        )
        return [self._expected[name].nbytes for name in names]

    def admit(self) -> None:
        """Check all rows, remember them, open their seeds.

        RefusedError says what is wrong and who is to blame.

        The steps run in order.
        """
        # (1) Each row is one that this silo may open, on top of those that it has opened.
        admitted: list[_Admitted] = []
        memories: dict[str, OpenedRows] = {}
        for name, of_part in groupby(self._mixed, key=lambda each: each.part):
            before = self._sharing.memory.rows(name)
            found, memory = self._admitted(self._expected[name], before, list(of_part))
            admitted += found
            memories[name] = OpenedRows(
                memory=memory, delivered=tuple(each.row.digest() for each in found)
            )

        # (2) Prekeys of other silos are theirs, and no upload is sealed to an earlier one of ours
        # than those before it.
        known = self._heard(admitted)

        # (3) All of it is remembered.
        for name, opened in memories.items():
            self._sharing.memory.save_rows(name, opened)
        if known != self._sharing.prekeys.known():
            self._sharing.prekeys.save(known)

        # (4) Their seeds are opened, all of them now, because step (5) may erase the prekeys.
        own = self._sharing.prekeys.own()
        ready = [(each, self._summands(each, own)) for each in admitted]
        self._openings = ((each, self._opening(each, summands)) for each, summands in ready)

        # (5) Prekeys of ours that nothing is sealed to any more are erased. This delivery may come
        # again.
        sealed = [
            summand.letter.sealed.generation for each in admitted for summand in each.mixed.summands
        ]
        self._sharing.prekeys.erase_before(known.floor(self._coming(), sealed))

    def write(self, chunk: memoryview) -> None:
        """Take the next bytes of the rows, in order; not more than were announced."""
        view = chunk
        while view:
            if self._now is None:
                # its words are allocated here, for one row after another
                self._now = next(self._openings)
                self._left = self._now[0].line.nbytes
            here, view = view[: self._left], view[self._left :]
            self._left -= len(here)
            self._add(self._now[1], here)
            if not self._left:
                self._finish(*self._now)
                self._now = None

    def delivered(self) -> dict[str, dict[str, Tensor]]:
        """The mixed tensors by part, complete once all announced bytes are written."""
        return self._made

    def _admitted(
        self, expected: Expected, before: OpenedRows, mixed: Sequence[Mixed]
    ) -> tuple[list[_Admitted], RowMemory]:
        """The rows of one part, and the memory of having opened them."""
        # A delivery may come again after a crash: rows that were remembered from it pass again, and
        # no others.
        sharing, memory = self._sharing, before.memory
        line = sharing.line(expected.part)
        found: list[_Admitted] = []
        for each in mixed:
            # ``admit`` accepts the last row again, so a remembered row is passed as the last.
            digest = hashlib.sha256(framed(MIX_ROW, each.document)).hexdigest()
            again = (
                memory.model_copy(update={"last": digest}) if digest in before.delivered else memory
            )
            row, memory = admit(
                line,
                sharing.silo,
                each.document,
                each.signature,
                again,
                self._terms,
                sharing.signers,
            )

            # A row comes once, and mail that waited for this silo has no part of its own in it.
            check(
                all(row != other.row for other in found),
                COORDINATOR,
                Code.SPEC,
                "brings a row twice",
            )
            if expected.mailed:
                check(
                    not row.own_weight,
                    COORDINATOR,
                    Code.SPEC,
                    "brings mail that has a part of its recipient in it",
                )
                self._check_posted(row, each.keep, found)
            else:
                check(
                    not each.keep,
                    COORDINATOR,
                    Code.SPEC,
                    f"brings a row with keep = {each.keep}, which is not mail",
                )
            # The uploads delivered with a row must be the versions that the signed row names.
            check_uploads(row, [summand.upload for summand in each.summands])
            found.append(_Admitted(each, row, line, expected))
        return found, memory

    def _heard(self, admitted: Sequence[_Admitted]) -> Known:
        """The known prekeys after this delivery."""
        # Which of our prekeys a seed is sealed to is the sender's signed word, so what may be
        # erased does not depend on the coordinator.
        sharing, known = self._sharing, self._sharing.prekeys.known()
        for each in admitted:
            for share, summand in zip(each.row.shares, each.mixed.summands, strict=True):
                check_sent(each.line, summand.upload, summand.letter, sharing.silo, sharing.signers)
                known = known.seen(each.mixed.part, share.version, summand.letter.sealed.generation)
        for name, word in self._words:
            check(
                name in self._expected,
                COORDINATOR,
                Code.KEYS,
                f"brings a prekey for {name[:64]!r}, which is no mixed part",
            )
            word.check(sharing.line(self._expected[name].part), sharing.silo, sharing.signers)
            known = known.heard(name, word)
        return known

    def _coming(self) -> set[str]:
        """The parts of which rows may still come down."""
        plan = self._sharing.plan
        # Deliveries change only with a phase, and once more after the last round.
        starts = (*plan.job.phase_starts, plan.job.length)
        coming = [self._round, *(start for start in starts if start > self._round)]
        return {name for start in coming for name in expected_rows(plan.round(start))}

    def _check_posted(self, row: RecipientRow, keep: float, found: Sequence[_Admitted]) -> None:
        """RefusedError unless a row of mail is of one round, after that of the row before.

        It must be as the method posts it.
        """
        # Mail of a round comes once and in turn, by weights that the method fixes before it.
        posted, *more = {share.version.round for share in row.shares}
        check(
            not more,
            COORDINATOR,
            Code.SPEC,
            f"brings mail over uploads of rounds {posted} and {more}",
        )
        before = found[-1].row.shares[0].version.round if found else -1
        in_turn = before < posted < self._round
        check(
            in_turn,
            COORDINATOR,
            Code.SPEC,
            f"brings mail of round {posted} in {self._round}, after that of {before}",
        )
        shares = {silo: weight / (1 << MIX_BITS) for silo, weight in row.sent().items()}
        fault = self._sharing.job.method().mail_fault(posted, self._sharing.silo, shares, keep)
        check(not fault, COORDINATOR, Code.SPEC, f"brings mail that {fault}")

    def _summands(self, admitted: _Admitted, own: Mapping[int, bytes]) -> list[Summand]:
        sharing, pairs = (
            self._sharing,
            zip(admitted.row.shares, admitted.mixed.summands, strict=True),
        )
        return [
            Summand(
                each.upload,
                share.weight,
                open_seed(
                    admitted.line, each.upload, each.letter, sharing.silo, own, sharing.signers
                ),
            )
            for share, each in pairs
        ]

    def _opening(self, admitted: _Admitted, summands: Sequence[Summand]) -> Opening:
        part, own_weight = admitted.expected.part, admitted.row.own_weight

        # Our own part is mixed in here and never sent (security rule 5).
        own: Flat = ()
        if own_weight:
            own = self._own(part)
            check_values(admitted.line.group, own)
        # float32 takes half the memory.
        narrow = all(spec.dtype == "float32" for spec in part.tensors)
        dtype = np.float32 if narrow else np.float64
        return Opening(admitted.line, self._sharing.key, summands, own_weight, own, dtype)

    def _add(self, opening: Opening, piece: memoryview) -> None:
        # A chunk may end in the middle of a word.
        if self._rest:
            missing = WORD_BYTES - len(self._rest)
            self._rest += piece[:missing]
            piece = piece[missing:]
            if len(self._rest) == WORD_BYTES:
                opening.add(bytes(self._rest))
                self._rest.clear()
        whole = len(piece) // WORD_BYTES * WORD_BYTES
        opening.add(piece[:whole])
        self._rest += piece[whole:]

    def _finish(self, admitted: _Admitted, opening: Opening) -> None:
        part = admitted.expected.part
        # ``finish`` checks the tags over the whole row before any value is used.
        opened = _cut(part, opening.finish(admitted.mixed.tag))
        if admitted.expected.mailed:
            opened = mailed(part, self._made.get(part.name), opened, admitted.mixed.keep)
        self._made[part.name] = opened


def _cut(part: Part, values: Floats) -> dict[str, Tensor]:
    """A row as the part's tensors, in their dtypes; they share its memory where it has theirs."""
    found, at = {}, 0
    for spec in part.tensors:
        found[spec.name] = (
            torch.from_numpy(values[at : at + spec.elements])
            .reshape(spec.shape)
            .to(DTYPES[spec.dtype])
        )
        at += spec.elements
    return found


def mailed(
    part: Part, before: Mapping[str, Tensor] | None, row: Mapping[str, Tensor], keep: float
) -> dict[str, Tensor]:
    """The mix so far with one row more; ``keep`` is the share of the mix that stays.

    ``before`` is None for the first row. Tensors come in the part's dtypes, ``@keep`` in float64.
    """
    found: dict[str, Tensor] = {}
    for spec in part.tensors:
        # The same operations as at the coordinator of a plain job, for the same bits.
        share = row[spec.name].double() * (1 - keep)
        if before is not None:
            share += before[spec.name].double() * keep
        found[spec.name] = share.to(DTYPES[spec.dtype])
    # Before the first row, the silo's own share is 1.
    kept = 1.0 if before is None else float(before[KEEP.name])
    return {**found, KEEP.name: torch.tensor(kept * keep, dtype=torch.float64)}
