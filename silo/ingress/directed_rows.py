"""The rows of a directed Mix in one delivery: checked, unpadded as they come, put together.

Each is the group of an open sum that this silo alone reads (security/blind/directed_mix.py). What
it must be this silo knows itself: which rounds have rows for it, the specification with its own
weights of the row or such as it may be mixed by, what of the survivors it may see, and how much of
its own it keeps. A row for a member of a round is of the last round of this silo that counts: it is
mixed with this silo's contribution of then.

Each round has one sum, so there is one row of it; those of the last delivery may come once more, as
after a lost connection, and older ones do not (``OpenedDirected``, durable before a row is opened).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeAlias

from torch import Tensor

from ...proto import secure_pb2 as pb
from ...proto.convert.mix import Mixed
from ...security.arithmetic.fixedpoint import Group, Words
from ...security.arithmetic.masks import Term
from ...security.blind.directed_mix import open_row, recipient_pads
from ...security.blind.open_sum import Claim, check_claim
from ...security.blind.plan import RoundPlan
from ...security.blind.sum import folded, row_name
from ...security.faults import COORDINATOR, Code, check
from ...security.secagg.evidence import Misdealing
from ...security.secagg.spec import RoundSpec, Terms, kept, signed_spec
from .keyed_job import Sharing
from .mix_memory import OpenedDirected
from .mix_rows import Expected, IncomingRows, announced_rows, expected_rows, mailed
from .open_sums import NO_MODEL
from .word_reader import WordReader


@dataclass(frozen=True)
class _AwaitedRow:
    """A row whose words are awaited."""

    expected: Expected
    claim: Claim
    keep: float
    spec: RoundSpec
    index: int  # of its group
    pads: Mapping[str, Term]

    @property
    def group(self) -> Group:
        """The group of the row's words."""
        return self.spec.groups[self.index]


class DirectedRows:
    """The rows of one delivery: call ``announced``, ``admit``, ``write``, then ``delivered``."""

    def __init__(self, sharing: Sharing, plan: RoundPlan, terms: Terms, counted: int) -> None:
        """``terms`` are what this silo asks of the sum that a row is of.

        ``counted``: one more than the last round of this silo that counts.
        """
        self._sharing = sharing
        self._asked = terms
        # against dealers of the job, whom its sums may lack
        self.proofs: tuple[Misdealing, ...] = ()
        self._round = plan.round
        self._last = counted - 1
        self._members = sharing.job.method().directed_for == "members"
        self._expected = expected_rows(plan)
        self._mixed: tuple[Mixed, ...] = ()
        self._words = WordReader(self._finish)
        self._made: dict[str, dict[str, Tensor]] = {}

    def announced(
        self, peer: str, messages: Sequence[pb.MixedRow], prekeys: Sequence[pb.DeliveredPrekey]
    ) -> list[int]:
        """The bytes of each row; RefusedError for impossible rows, before any is used.

        Directed jobs have no later prekeys and no rows made from padded uploads.
        """
        check(
            not prekeys,
            COORDINATOR,
            Code.KEYS,
            "brings later prekeys, a directed job has the first ones alone",
        )
        self._mixed = announced_rows(peer, messages, self._expected)
        strange = any(each.summands for each in self._mixed)
        check(
            not strange, COORDINATOR, Code.SPEC, "brings rows of uploads, the job has directed ones"
        )
        return [self._expected[each.part].nbytes for each in self._mixed]

    def admit(self) -> None:
        """Check all rows and remember them; RefusedError says what is wrong and who is to blame.

        The steps run in order.
        """
        # (1) Each is one that this silo may open, on top of those that it has opened.
        coming: list[_AwaitedRow] = []
        memories: dict[str, OpenedDirected] = {}
        for name, of_part in groupby(self._mixed, key=lambda each: each.part):
            before = self._sharing.memory.directed(name)
            found: list[_AwaitedRow] = []
            for each in of_part:
                found.append(self._checked(each, before, found))
            coming += found
            specs = [each.spec for each in found]
            # Rows that come again may be older: ``newest`` never goes back.
            newest, contexts = (
                max(before.newest, specs[-1].round),
                tuple(spec.context().hex() for spec in specs),
            )
            memories[name] = OpenedDirected(newest=newest, delivered=contexts)

        # (2) All of it is remembered before a word is taken in: after a crash a row that was opened
        # must not pass for new.
        for name, memory in memories.items():
            self._sharing.memory.save_directed(name, memory)
        self._words.begin((each, each.group) for each in coming)

    def write(self, chunk: memoryview) -> None:
        """Take the next bytes of the rows, in order; not more than were announced.

        RefusedError for an invalid row.
        """
        self._words.write(chunk)

    def delivered(self) -> dict[str, dict[str, Tensor]]:
        """The mixed tensors by part, complete once all announced bytes are written."""
        return self._made

    def _checked(
        self, mixed: Mixed, before: OpenedDirected, found: Sequence[_AwaitedRow]
    ) -> _AwaitedRow:
        """A row that may be opened after these; RefusedError for any other.

        The steps run in order.
        """
        claim = Claim(mixed.document, mixed.signature, mixed.survivors, mixed.tag)
        spec = self._checked_sum(claim, found[-1].spec.round if found else -1)

        # (4) It is new, or one of those that came last.
        again = spec.context().hex() in before.delivered
        why = f"brings a row of round {spec.round} after those up to {before.newest} were opened"
        check(again or spec.round > before.newest, COORDINATOR, Code.SPEC, why)

        # (5) There is such a row for this silo, and (6) it is mixed in as the method says.
        names, own = [group.name for group in spec.groups], row_name(mixed.part, self._sharing.silo)
        check(
            own in names,
            COORDINATOR,
            Code.SPEC,
            f"brings a row of {mixed.part!r} of round {spec.round}, which has none",
        )
        index = names.index(own)
        group = spec.groups[index]
        # Only survivors: the values of others are not in the sum.
        weights = {silo: group.counts[spec.cohort.index(silo)] for silo in claim.survivors}
        check(
            any(weights.values()),
            COORDINATOR,
            Code.SPEC,
            f"brings a row of round {spec.round} in which nobody is mixed",
        )
        whole = sum(weights.values())
        shares = {silo: weight / whole for silo, weight in weights.items() if weight}
        # A member's own share follows from the weights of the sum.
        if self._members:
            own_part = kept(spec, group, claim.survivors)
            why = (
                f"brings a row with keep = {mixed.keep!r}, by the weights of its sum it is"
                f" {own_part!r}"
            )
            check(mixed.keep == own_part, COORDINATOR, Code.SPEC, why)
        fault = self._sharing.job.method().mail_fault(
            spec.round, self._sharing.silo, shares, mixed.keep
        )
        check(not fault, COORDINATOR, Code.SPEC, f"brings mail that {fault}")
        # Made with our private prekey, so nobody else can remove them.
        pads = recipient_pads(spec, group, self._sharing.first_prekey, self._sharing.others)
        return _AwaitedRow(self._expected[mixed.part], claim, mixed.keep, spec, index, pads)

    def _checked_sum(self, claim: Claim, last: int) -> RoundSpec:
        """The sum of a claim, if this silo may have a row of it after one of round ``last``.

        RefusedError for any other.
        """
        sharing, job = self._sharing, self._sharing.job
        # (1) It is of a sum that the coordinator signed, of a round before this one, in turn.
        round_ = signed_spec(claim.document, claim.signature, sharing.signers).round
        in_turn = last < round_ < self._round
        check(
            in_turn,
            COORDINATOR,
            Code.SPEC,
            f"brings a row of round {round_} in {self._round}, after that of {last}",
        )

        # (2) That round has a row for this silo: it was away, or it was drawn and gave in no later
        # round.
        was = "drawn" if sharing.silo in job.cohort(round_) else "not drawn"
        has = sharing.silo in job.row_readers(round_)
        check(
            has,
            COORDINATOR,
            Code.SPEC,
            f"brings a row of round {round_}, for which {sharing.silo!r} was {was}",
        )
        last_own = not self._members or (round_ == self._last and sharing.silo in claim.survivors)
        why = (
            f"brings a row of round {round_}, the last one of {sharing.silo!r} that counts is"
            f" {self._last}"
        )
        check(last_own, COORDINATOR, Code.SPEC, why)

        # (3) The sum is the one that this silo would have written, with its own weights, and may be
        # open.
        frame = sharing.plan.round(round_).frame(
            sharing.federation, sharing.members, NO_MODEL, sharing.parts
        )
        terms = replace(self._asked, batches=job.batches, excused=sharing.proven(self.proofs))
        spec = check_claim(claim, frame, terms, sharing.signers)
        # The job's draw decides who may be in a sum, not the coordinator.
        drawn = set(spec.cohort) <= set(job.cohort(round_))
        check(
            drawn,
            COORDINATOR,
            Code.SPEC,
            f"sums over {', '.join(spec.cohort)}: not all were drawn for its round",
        )
        return spec

    def _finish(self, coming: _AwaitedRow, words: Words) -> None:
        part = coming.expected.part
        opened = open_row(
            coming.spec, coming.index, coming.claim, self._sharing.key, coming.pads, words
        )
        row = folded(part, coming.group, opened, words)
        self._made[part.name] = mailed(part, self._made.get(part.name), row, coming.keep)


AnyRows: TypeAlias = IncomingRows | DirectedRows
