"""The open sums of one delivery: checked as their words come, and made into tensors.

A part that is published as it was summed comes down in the words of its sum, never as tensors
(``in_words`` of security/blind/plan.py). By the silos' linear tags nobody but they could have made
them (security/blind/open_sum.py), and they are of the one round that can be meant: that which
summed the part last. An older sum, handed down again, is refused like an altered one. So is a sum
of an attempt other than the one whose survivors this silo signed in that round.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ...errors import RefusedError
from ...proto import secure_pb2 as pb
from ...proto.convert.open_sum import sums_from_wire
from ...security.arithmetic.fixedpoint import Group, Words
from ...security.blind.open_sum import Claim, check_claim, open_group
from ...security.blind.plan import RoundPlan, SumDown
from ...security.blind.sum import folded, group
from ...security.faults import COORDINATOR, Code, check
from ...security.secagg.evidence import Misdealing
from ...security.secagg.memory import NO_STATE, Memory
from ...security.secagg.spec import RoundSpec, Terms, context_of
from .keyed_job import Sharing
from .word_reader import WordReader

NO_MODEL = "0" * 64  # of a round in which this silo need not have been


@dataclass(frozen=True)
class Refusal:
    """A rejected sum for the ledger: its round, what its attempt is said to be, and why.

    ``ctx`` is computed from the bytes that came, which may not be a specification.
    """

    round: int
    ctx: bytes
    error: RefusedError


@dataclass(frozen=True)
class _AwaitedSum:
    """A sum whose words are awaited."""

    place: SumDown
    claim: Claim
    spec: RoundSpec

    @property
    def group(self) -> Group:
        """The group of the sum's words."""
        return self.spec.groups[self.place.group]


class IncomingSums:
    """The sums of one delivery: call ``announced``, ``admit``, ``write``, then ``delivered``."""

    def __init__(self, sharing: Sharing, plan: RoundPlan, memory: Memory) -> None:
        """``memory`` is what this silo remembers of the job's sums, later these too."""
        self.refused: Refusal | None = None
        # The caller saves it once the whole delivery is valid.
        self.memory = memory
        # against dealers of the job, whom its sums may lack
        self.proofs: tuple[Misdealing, ...] = ()
        self._sharing = sharing
        self._down = {part.name: part for part in plan.down}
        self._expected = {each.part.name: each for each in plan.sums_down}
        self._claims: dict[str, Claim] = {}
        self._words = WordReader(self._finish)
        self._made: dict[str, dict[str, Tensor]] = {}

    @property
    def parts(self) -> tuple[str, ...]:
        """The announced parts, in the order of their words and digests."""
        return tuple(self._claims)

    def announced(self, peer: str, messages: Sequence[pb.OpenSum]) -> list[int]:
        """The bytes of each sum's words; RefusedError for impossible sums."""
        self._claims = sums_from_wire(peer, messages, tuple(self._expected))
        bounds = self._sharing.plan.bounds
        return [group(self._expected[name].part, bounds).nbytes for name in self._claims]

    def admit(self) -> None:
        """Check what is said of all of them, before a word is taken in.

        RefusedError says what is wrong.
        """
        coming: list[_AwaitedSum] = []
        for name, claim in self._claims.items():
            place = self._expected[name]
            try:
                coming.append(_AwaitedSum(place, claim, self._checked(place, claim)))
            except RefusedError as error:
                # The session records it in the ledger, with the culprit.
                self._refuse(place, claim.document, error)
                raise
        self._words.begin((each, each.group) for each in coming)

    def refuse_tensors(self, peer: str, name: str, why: str) -> None:
        """Record a part that comes as tensors as a sum without a specification, if any is due."""
        if name in self._expected:
            self._refuse(self._expected[name], b"", RefusedError(peer, Code.SUM, why))

    def write(self, chunk: memoryview) -> None:
        """Take the next bytes of the words, in order; not more than were announced.

        RefusedError for an invalid sum.
        """
        self._words.write(chunk)

    def delivered(self) -> dict[str, dict[str, Tensor]]:
        """The opened sums as tensors by part, complete once all announced bytes are written."""
        return self._made

    @property
    def _terms(self) -> Terms:
        """The terms by which sums of the job are opened, also sums that this silo is not in."""
        return replace(self._sharing.plan.terms, excused=self._sharing.proven(self.proofs))

    def _checked(self, place: SumDown, claim: Claim) -> RoundSpec:
        sharing, terms = self._sharing, self._terms
        plan = sharing.plan.round(place.round)
        # NO_MODEL: this silo may have missed that round and not know its model.
        frame = plan.frame(sharing.federation, sharing.members, NO_MODEL, sharing.parts)
        spec = check_claim(claim, frame, terms, sharing.signers)

        # Its cohort was drawn for that round: the coordinator does not choose who is in a sum.
        drawn = set(spec.cohort) <= set(plan.job.cohort(place.round))
        check(
            drawn,
            COORDINATOR,
            Code.SPEC,
            f"sums over {', '.join(spec.cohort)}: not all were drawn for its round",
        )

        # In a round in which this silo signed survivors, it is the very sum that was signed
        # (security rule 34), or one of other batches, which was made without this silo's values.
        without = terms.regroups(spec) and sharing.silo not in claim.survivors
        why = (
            f"delivers the sum of another attempt at round {place.round} than the one that this"
            " silo signed"
        )
        held = without or self.memory.may_be_opened(place.round, spec.context())
        check(held, COORDINATOR, Code.SUM, why)

        # Where this silo's values are in it, the round counts for it.
        start = self.memory.start
        counts = sharing.silo not in claim.survivors or start == NO_STATE or start > place.round
        why = (
            f"delivers a sum of round {place.round} with values of this silo, and does not count"
            " the round for it"
        )
        check(counts, COORDINATOR, Code.SUM, why)
        return spec

    def _finish(self, coming: _AwaitedSum, words: Words) -> None:
        place, own = coming.place, coming.group
        try:
            opened = open_group(coming.spec, place.group, coming.claim, self._sharing.key, words)
        except RefusedError as error:
            self._refuse(place, coming.claim.document, error)
            raise

        # The tags prove that this sum was opened, which settles the attempts next to it.
        ctx, survivors = coming.spec.context().hex(), coming.claim.survivors
        # If other batches may be summed in the same round, its other attempts stay open.
        alone = not self._terms.regroups(coming.spec)
        self.memory = self.memory.settled(
            place.round, ctx, survivors, self._sharing.silo, alone=alone
        )
        # Folded as the coordinator of a plain job would.
        made = folded(place.part, own, opened, words)
        self._made[place.part.name] = {
            spec.name: made[spec.name] for spec in self._down[place.part.name].tensors
        }

    def _refuse(self, place: SumDown, document: bytes, error: RefusedError) -> None:
        self.refused = Refusal(place.round, context_of(document), error)


def largest_sums(plan: RoundPlan) -> int:
    """Bytes of all words of sums that a round's delivery can have."""
    return sum(group(each.part, plan.whole.bounds).nbytes for each in plan.sums_down)
