"""What a silo remembers of one secure sum across rounds, attempts and restarts: SECURITY.md rules 17, 18, 33 and 34.

Kept by instance (``Frame.instance``) and durable before the message that it is about leaves; canonical JSON, here cut::

    {"abandoned":false,"attempt":1,"ctx":"5c1f…","pending":[{"colluders":1,"ctx":"5c1f…","members":["a","b","c","d"],
     "model":"e3b0…","round":17,"start":17,"threshold":3}],"round":17,"signed_ctx":"77ab…","signed_models":["9a0b…"],
     "signed_round":16,"start":17}

The secrets of an attempt are not in it: a process that starts again is a dropout in the attempt that it was in.

A silo trains from one of its own states: ``start`` is how many rounds are behind that state. Values from one state
enter one opened sum, whatever the coordinator says of earlier rounds and whatever it delivers in between (rule 34).
Otherwise a coordinator that sets a silo back to the same state, round after round, opens sums over other sets of silos
and solves them for each silo.
"""

from collections.abc import Sequence
from typing import Annotated, Protocol, Self

from pydantic import Field

from ..errors import LocalError
from ..files import Strict
from .identity import Hex32, Id
from .round_spec import RoundSpec
from .secagg_fault import COORDINATOR, Code, check
from .secagg_messages import Abandon
from .signers import Signers

Number = Annotated[int, Field(strict=True, ge=-1)]
NO_STATE = -1  # the start of a round that sums nothing of a model


class Pending(Strict):
    """An attempt for which masked bytes may have left, and whose survivors this silo has not signed."""

    round: Number
    start: Number
    model: Hex32
    ctx: Hex32
    members: tuple[Id, ...]  # U1
    threshold: Number
    colluders: Number

    @property
    def notes_needed(self) -> int:
        """Abandon notes after which no t members of U1 are left to sign, whatever c colluders do."""
        return len(self.members) - self.threshold + self.colluders + 1

    def check_abandoned(self, notes: Sequence[Abandon], signers: Signers) -> None:
        """RefusedError unless enough members of U1 gave their word; notes of other attempts do not count."""
        ctx, held = bytes.fromhex(self.ctx), set()
        for note in notes:
            if note.silo in self.members and note.holds(ctx, signers):
                held.add(note.silo)
        why = (
            f"asks for values that an earlier attempt of round {self.round} may still show, and brings abandon notes "
            f"of {len(held)} silos, not {self.notes_needed}"
        )
        check(len(held) >= self.notes_needed, COORDINATOR, Code.ABANDON, why)


class Memory(Strict):
    """The newest attempt that was entered, what was signed, and what may still be opened without this silo."""

    round: Number = -1
    attempt: Number = -1
    ctx: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    abandoned: bool = False  # the newest attempt
    start: Number = 0
    signed_round: Number = -1
    signed_ctx: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    signed_models: tuple[Hex32, ...] = ()
    pending: tuple[Pending, ...] = ()

    def starting(self, start: int) -> Self:
        """Memory of training from the state that ``start`` rounds of this silo led to.

        RefusedError for a state whose values a signed sum holds already: the coordinator sets this silo back.
        """
        why = (
            f"says that this silo's rounds count up to round {start - 1}, and this silo signed the survivors of round "
            f"{self.signed_round}, whose sum may be open; no second sum is made from an earlier state"
        )
        check(start == NO_STATE or start > self.signed_round, COORDINATOR, Code.ATTEMPT, why)
        return self._with(start=start)

    def settled(self, round_: int, ctx: str, survivors: Sequence[str], silo: str) -> Self:
        """Memory of which sum was opened in a round, as all survivors' tags prove: no other of that round ever is.

        ``silo`` is this one. Where its values are in that sum it was told so by ``start``.
        """
        resolved = [p for p in self.pending if p.round == round_ and (p.ctx != ctx or silo not in survivors)]
        return self._with(pending=tuple(p for p in self.pending if p not in resolved)) if resolved else self

    def entered(self, spec: RoundSpec, notes: Sequence[Abandon], signers: Signers) -> Self:
        """Memory of entering an attempt; the steps run in order, RefusedError says why it may not be entered."""
        here = f"round {spec.round}, attempt {spec.attempt}"
        # (1) It is later than all that was entered.
        newer = (spec.round, spec.attempt) > (self.round, self.attempt)
        check(newer, COORDINATOR, Code.ATTEMPT, f"asks for {here} after round {self.round}, attempt {self.attempt}")
        # (2) No survivors were signed in this round, or of this model.
        check(
            spec.round != self.signed_round,
            COORDINATOR,
            Code.ATTEMPT,
            f"asks for {here} after its survivors were signed",
        )
        fresh = spec.model_digest not in self.signed_models
        check(fresh, COORDINATOR, Code.ATTEMPT, f"asks for {here} from model {spec.model_digest[:12]}…, summed before")
        # (3) What may have left of the same values, or of others from the same state, can never be opened any more.
        same = [
            p
            for p in self.pending
            if p.round == spec.round or p.model == spec.model_digest or p.start == self.start != NO_STATE
        ]
        for attempt in same:
            attempt.check_abandoned(notes, signers)
        return self._with(
            round=spec.round,
            attempt=spec.attempt,
            ctx=spec.context().hex(),
            abandoned=False,
            pending=tuple(p for p in self.pending if p not in same),
        )

    def uploading(self, spec: RoundSpec, members: Sequence[str]) -> Self:
        """Memory of the first masked byte, before it leaves; ``members`` are U1."""
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

    def signed(self, spec: RoundSpec) -> Self:
        """Memory of signing survivors, before the signature leaves."""
        if self.abandoned:
            raise LocalError("survivors of an abandoned attempt are never signed; this is a bug in Staddle")
        return self._with(
            signed_round=spec.round,
            signed_ctx=spec.context().hex(),
            signed_models=(*self.signed_models, spec.model_digest),
            pending=tuple(p for p in self.pending if p.ctx != self.ctx),
        )

    def given_up(self) -> Self:
        """Memory of an abandon note for the newest attempt, before the note leaves."""
        if self.signed_round == self.round:
            raise LocalError("an attempt whose survivors were signed is never abandoned; this is a bug in Staddle")
        return self._with(abandoned=True)

    def _with(self, **fields: object) -> Self:
        return type(self).model_validate({**self.model_dump(), **fields})


class Keeper(Protocol):
    """What a silo's shell keeps memories with."""

    def load(self, instance: str) -> Memory:
        """The newest memory of an instance; ``Memory()`` before the first."""
        ...

    def save(self, instance: str, memory: Memory) -> None:
        """Durable before it returns; what depends on it leaves after."""
        ...
