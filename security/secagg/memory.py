"""A silo's memory of one secure sum across rounds, attempts and restarts.

Security rules 17, 18, 33 and 34. Kept by instance (``Frame.instance``), and durable before the
message that it is about leaves; canonical JSON, here cut::

    {"abandoned":false,"attempt":1,"ctx":"5c1f…","pending":[{"colluders":1,"ctx":"5c1f…","members":["a","b","c","d"],
     "model":"e3b0…","round":17,"start":17,"threshold":3}],"round":17,"signed_attempt":0,"signed_ctx":"77ab…",
     "signed_models":["9a0b…"],"signed_round":16,"signed_survivors":["a","b","c","d"],"start":17}

The secrets of an attempt are not in it: a process that restarts has dropped out of its attempt.

A silo trains from one of its own states: ``start`` is how many rounds are behind that state. Values
from one state enter one opened sum, whatever the coordinator says of earlier rounds and whatever it
delivers in between (rule 34). Otherwise a coordinator that sets a silo back to the same state,
round after round, opens sums over other sets of silos and solves them for each silo.

One signed sum may be repeated: where evidence shows that a dealer dealt shares which do not join
(evidence.py), so that nobody could open it. It is made over the very survivors that were signed,
without that dealer. The dealer may have told the coordinator its secret, and so opened the first
sum. Then both sums show the same honest silos together, and no difference of them shows one.
Evidence names no honest dealer, and no two sets of survivors have t signatures.

Where silos are summed in whole batches alone, values of one round may be in further sums over whole
batches. When an opened sum is no sum of values, the round is summed without the batch of whoever
contributed others; when silos die before it is open, the round is summed again. All sums of a round
are over unions of batches then, and tell at most the sums of single batches
(algorithms/job/batches.py); with one batch, they are the same sum again. That needs no word of the
coordinator, so it may ask for them at any time.

This holds within one round only. In a later round the silos of a batch that signed before begin
from later states, and one that was not asked to sign could be kept at the state before. Of nine
silos in three batches, seven sign; so two of a batch could be kept, and the difference of that
batch's two sums would be what one round changed in the third silo. So attempts stay pending when
the next one of their round is entered, until this silo signs one of that round. What may be open of
an earlier round is settled first, by one of:

- abandon notes of so many of its members that nobody finds t signatures any more
  (``Pending.check_abandoned``);
- t signatures over its survivors, this silo not among them (``SurvivorsShown``);
- a delivered sum of that attempt, which the silos' tags prove, without these values; in a round
  that is summed once, of any attempt (``Memory.settled``).
"""

from collections.abc import Sequence
from typing import Annotated, Protocol, Self

from pydantic import Field

from ...errors import LocalError, RefusedError
from ...files.documents import Strict
from ..faults import COORDINATOR, NOBODY, Code, check
from ..identity.keys import Hex32, Id
from ..identity.selection import all_but
from ..identity.signers import Signers
from .evidence import Misdealing
from .messages import Abandon, SurvivorsShown, silos_of
from .spec import RoundSpec, Terms

Number = Annotated[int, Field(strict=True, ge=-1)]
ANY_SILOS = Terms()
NO_STATE = -1  # the start of a round that sums nothing of a model


class Pending(Strict):
    """An attempt whose masked bytes may have left and whose survivors this silo has not signed.

    ``start`` is the state that the values were trained from. ``threshold`` and ``colluders`` are
    those of its specification, which is not kept: they tell who may still open the attempt.
    """

    round: Number
    start: Number
    model: Hex32
    ctx: Hex32
    members: tuple[Id, ...]  # U1
    threshold: Number
    colluders: Number

    @property
    def notes_needed(self) -> int:
        """Abandon notes after which no t members of U1 can sign, whatever c colluders do."""
        return len(self.members) - self.threshold + self.colluders + 1

    def check_abandoned(self, notes: Sequence[Abandon], signers: Signers) -> None:
        """RefusedError unless enough members of U1 abandoned it; other attempts' notes are void."""
        # Counted by silo: one member that sends its note many times stands for one.
        ctx = bytes.fromhex(self.ctx)
        of_members = [note for note in notes if note.silo in self.members]
        held = {note.silo for note in of_members if note.holds(ctx, signers)}
        why = (
            f"asks for values that an earlier attempt of round {self.round} may still show, and"
            f" brings abandon notes of {len(held)} silos, not {self.notes_needed}, nor"
            f" {self.threshold} signatures over survivors without this silo; the coordinator may"
            " not have them, and nobody is to blame"
        )
        check(len(held) >= self.notes_needed, NOBODY, Code.ABANDON, why)

    def is_without(self, shown: SurvivorsShown, silo: str, signers: Signers) -> bool:
        """True if t members of U1 signed survivors of this attempt without ``silo``, this one.

        Then nobody finds t signatures over others: with fewer than n/3 colluders an honest silo
        would be in both sets, and it signs one per attempt.
        """
        if shown.ctx.hex() != self.ctx or silo in silos_of(shown.headers):
            return False
        return len(shown.signers(self.members, signers)) >= self.threshold


class Memory(Strict):
    """The newest attempt entered, what was signed, and what others may still open.

    Before the first attempt or signature, rounds and attempts are -1 and texts are empty.
    ``signed_models`` are of all signed sums, the other ``signed_`` fields of the newest. Methods
    return a changed copy; it is durable only after ``MemoryStore.save``.
    """

    round: Number = -1
    attempt: Number = -1
    ctx: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    abandoned: bool = False  # the newest attempt
    start: Number = 0
    signed_round: Number = -1
    signed_ctx: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    signed_attempt: Number = -1
    signed_survivors: tuple[Id, ...] = ()
    signed_models: tuple[Hex32, ...] = ()
    pending: tuple[Pending, ...] = ()

    def starting(self, start: int) -> Self:
        """Memory of training from the state that ``start`` rounds of this silo led to.

        RefusedError for a state whose values a signed sum holds already: the coordinator sets this
        silo back.
        """
        # Rolled back to one state each round, with another silo left out of each sum, five sums
        # gave five models to 6e-8 (security rule 33).
        why = (
            f"says that this silo's rounds count up to round {start - 1}, and this silo signed the"
            f" survivors of round {self.signed_round}, whose sum may be open; no second sum is made"
            " from an earlier state"
        )
        check(start == NO_STATE or start > self.signed_round, COORDINATOR, Code.ATTEMPT, why)
        return self._with(start=start)

    def settled(
        self, round_: int, ctx: str, survivors: Sequence[str], silo: str, *, alone: bool
    ) -> Self:
        """Memory of which sum was opened in a round, as all survivors' tags prove.

        ``alone``: no other of that round ever is. Where a round may be summed again, others may be
        open next to it. ``silo`` is this one; ``start`` says whether its values are in that sum.
        """

        # The attempt that was opened is settled if this silo's values are not in it. The others of
        # its round are settled where no second sum of that round is ever opened.
        def stays(attempt: Pending) -> bool:
            if attempt.round != round_:
                return True
            return silo in survivors if attempt.ctx == ctx else not alone

        return self._keeping(tuple(filter(stays, self.pending)))

    def shown(self, survivors: Sequence[SurvivorsShown], silo: str, signers: Signers) -> Self:
        """Memory without the attempts that were shown to be signed without ``silo``, this one.

        A signature counts if its silo is in U1 of that attempt and signed exactly those survivors.
        With fewer than t signatures, the attempt stays pending.
        """

        def stays(attempt: Pending) -> bool:
            return not any(attempt.is_without(shown, silo, signers) for shown in survivors)

        return self._keeping(tuple(filter(stays, self.pending)))

    def repeated(
        self,
        spec: RoundSpec,
        evidence: Misdealing | None,
        signers: Signers,
        terms: Terms = ANY_SILOS,
    ) -> tuple[str, ...]:
        """The one set of survivors over which a round that was signed may be summed again.

        Empty for any other round; the cohort, where other whole batches may be summed. RefusedError
        for a round that was signed where nothing shows that its sum could not be opened.
        """
        if spec.round != self.signed_round:
            return ()

        # Sums over whole batches tell at most the sums of single batches, however often.
        if terms.regroups(spec):
            return spec.cohort
        why = f"asks for {_named(spec)} after its survivors were signed"
        if evidence is None:
            raise RefusedError(COORDINATOR, Code.ATTEMPT, why)

        # (1) All but the number of the attempt is as it was.
        signed = spec.model_copy(update={"attempt": self.signed_attempt})
        same = signed.context().hex() == self.signed_ctx
        check(same, COORDINATOR, Code.ATTEMPT, f"{why}, and specifies another sum than was signed")

        # (2) A dealer of the attempt that was signed dealt shares which do not join.
        proven = evidence.proves(signed, signers)
        check(
            proven,
            COORDINATOR,
            Code.ATTEMPT,
            f"{why}, and what it brings proves nothing of {evidence.dealer!r}",
        )
        return all_but(self.signed_survivors, evidence.dealer)

    def is_signed(self, ctx: bytes) -> bool:
        """True if this silo signed the survivors of this attempt, the newest that it signed."""
        return self.signed_ctx == ctx.hex()

    def may_be_opened(self, round_: int, ctx: bytes) -> bool:
        """True if a sum opened in a round can be of this attempt: the one signed, or a repeat."""
        if round_ != self.signed_round or self.is_signed(ctx):
            return True
        return (round_, ctx.hex()) in {(attempt.round, attempt.ctx) for attempt in self.pending}

    def entered(
        self,
        spec: RoundSpec,
        notes: Sequence[Abandon],
        signers: Signers,
        evidence: Misdealing | None = None,
        terms: Terms = ANY_SILOS,
    ) -> Self:
        """Memory of entering an attempt.

        The steps run in order, RefusedError says why it may not be entered.
        """
        # (1) It is later than all that was entered: messages of an earlier attempt may be replayed.
        newer = (spec.round, spec.attempt) > (self.round, self.attempt)
        check(
            newer,
            COORDINATOR,
            Code.ATTEMPT,
            f"asks for {_named(spec)} after round {self.round}, attempt {self.attempt}",
        )

        # (2) No survivors were signed in this round, or of this model; or that round is repeated.
        if not self.repeated(spec, evidence, signers, terms):
            fresh = spec.model_digest not in self.signed_models
            why = f"asks for {_named(spec)} from model {spec.model_digest[:12]}…, summed before"
            check(fresh, COORDINATOR, Code.ATTEMPT, why)

        # (3) What may have left of the same values, or of others from the same state, can never be
        # opened any more.
        same = [attempt for attempt in self.pending if self._collides(attempt, spec, terms)]
        for attempt in same:
            attempt.check_abandoned(notes, signers)
        return self._with(
            round=spec.round,
            attempt=spec.attempt,
            ctx=spec.context().hex(),
            abandoned=False,
            pending=tuple(attempt for attempt in self.pending if attempt not in same),
        )

    def _collides(self, attempt: Pending, spec: RoundSpec, terms: Terms) -> bool:
        """True if two sums, of that attempt and of this one, could show a silo by their difference.

        Attempts of one round over whole batches cannot, so they may still be open.
        """
        if attempt.round == spec.round:
            return not terms.regroups(spec)
        # Rounds that sum nothing of a model start from NO_STATE, which is no common state.
        same_state = attempt.start == self.start != NO_STATE
        return same_state or attempt.model == spec.model_digest

    def uploading(self, spec: RoundSpec, members: Sequence[str]) -> Self:
        """Memory of the first masked byte, before it leaves; ``members`` are U1.

        From here on the attempt is pending, until it is settled in one of the ways that the module
        docstring lists.
        """
        pending = Pending(
            round=spec.round,
            start=self.start,
            model=spec.model_digest,
            ctx=spec.context().hex(),
            members=tuple(members),
            threshold=spec.threshold,
            colluders=spec.colluders,
        )
        return self._with(pending=(*self.pending, pending))

    def signed(self, spec: RoundSpec, survivors: Sequence[str]) -> Self:
        """Memory of signing survivors, before the signature leaves.

        LocalError for an abandoned attempt: other silos may rely on the note and enter another
        attempt over the same values.
        """
        if self.abandoned:
            raise LocalError(
                "survivors of an abandoned attempt are never signed; this is a bug in Staddle"
            )
        return self._with(
            signed_round=spec.round,
            signed_ctx=spec.context().hex(),
            signed_attempt=spec.attempt,
            signed_survivors=tuple(survivors),
            # Models of all rounds: the coordinator may deliver an old one again at any time.
            signed_models=tuple(dict.fromkeys((*self.signed_models, spec.model_digest))),
            # What this silo trains next begins from a later state.
            pending=tuple(p for p in self.pending if p.round != spec.round),
        )

    def given_up(self) -> Self:
        """Memory of an abandon note for the newest attempt, before the note leaves.

        LocalError if this silo signed its survivors: with t signatures the sum may be opened.
        """
        if self.signed_ctx == self.ctx:
            raise LocalError(
                "an attempt whose survivors were signed is never abandoned; this is a bug in"
                " Staddle"
            )
        return self._with(abandoned=True)

    def _keeping(self, pending: tuple[Pending, ...]) -> Self:
        return self if pending == self.pending else self._with(pending=pending)

    def _with(self, **fields: object) -> Self:
        # ``model_copy`` does not validate, and a memory that does not parse stops the next start.
        return type(self).model_validate({**self.model_dump(), **fields})


def _named(spec: RoundSpec) -> str:
    return f"round {spec.round}, attempt {spec.attempt}"


class MemoryStore(Protocol):
    """Where a silo's shell keeps memories."""

    def load(self, instance: str) -> Memory:
        """The newest memory of an instance; ``Memory()`` before the first."""
        ...

    def save(self, instance: str, memory: Memory) -> None:
        """Durable before it returns; what depends on it leaves after."""
        ...
