"""The secure sum of one round at the coordinator: all attempts, and messages to silos in them.

What happens goes through the pure machine of an attempt (security/secagg/coordinator.py), and is
durable before it takes effect. What the machine asks for is done by one table: what tells silos
something goes to the end of their lists, all else to the shell. A silo asks for the n-th entry of
its list; replayed, the same rows give the same lists.

::

    an attempt  ends when                                   then
    done        its sum is open                             ``summed``
    ended       too few are left, or masks do not come off  ``failed``, once enough silos gave it up
                                                            for good, all of them did, or
                                                            ``secure_seconds`` are over; at once
                                                            where no masked words may have left

Unless sums are over whole batches, silos that signed survivors take part in no other attempt of the
round: where too few others are left, it was the last. Where evidence shows why nothing could be
opened (security/secagg/evidence.py), the very survivors repeat the sum without the dealers at
fault, and it takes all of them. With each attempt silos are shown all evidence of the job: they
take part in sums that lack the dealers it is against. In a job of whole batches
(algorithms/job/batches.py) whoever signed may sign again, for whole batches: a sum that could not
be opened is made again, and one that is none of values is made over some of them. Such an attempt
is followed at once, without abandon notes.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ... import log
from ...errors import LocalError, RefusedError
from ...proto import secure_pb2 as pb
from ...proto.convert.secagg_received import DeliveryBody, SecaggDelivery, SignedSpec
from ...proto.convert.secagg_sent import (
    ENVELOPE,
    Attempt,
    Over,
    SecaggUpload,
    secagg_upload_from_wire,
)
from ...security.faults import Code
from ...security.secagg import coordinator as machine
from ...security.secagg import coordinator_events as c
from ...security.secagg import silo_events as s
from ...security.secagg.coordinator import CoordinatorState
from ...security.secagg.evidence import Misdealing
from ...security.secagg.messages import Abandon
from ...security.secagg.spec import RoundSpec, Terms, check_survivors
from ..rounds.events import GUILTY, in_words
from ..storage.replay_log import Begun, Entry, ReplayEntry, Spooled, loaded, said
from .replay_events import Happened, event_of, taken, unneeded
from .secure_sum_shell import Shell, SumSetting, nothing
from .settled import SettledRound, settled

NOTES = "notes"  # beside the machine's stages: an attempt has ended, and abandon notes are awaited
UP_TO_UPLOADS = ("keys", "shares", "masked")  # nobody has signed survivors


class SecureSum:
    """All attempts at the sum of one round; the last one goes on."""

    def __init__(self, setting: SumSetting, shell: Shell, kept: Iterable[ReplayEntry] = ()) -> None:
        """``kept``: what happened before this process began, in order; then ``resume``."""
        self._setting = setting
        self._shell = shell
        self._states: list[CoordinatorState] = []
        self._lists: dict[str, list[SecaggDelivery]] = {silo: [] for silo in setting.silos}
        self._spooled: dict[str, Spooled] = {}  # by silo, of the last attempt
        self._opening: c.Open | None = None
        self._why = ""  # the last attempt ended
        # the shell has heard of its end; is to tell when notes are overdue
        self._over = self._waiting = False
        self._table: dict[type[c.Effect], Callable[[Any], None]] = {
            c.Ask: self._ask,
            c.DeliverKeys: lambda e: self._tell((e.silo,), s.KeysReceived(e.bundles, e.keys)),
            c.DeliverShares: lambda e: self._tell((e.silo,), s.SharesReceived(e.deliveries)),
            c.DeliverSurvivors: lambda e: self._tell(e.silos, s.SurvivorsReceived(e.headers)),
            c.DeliverNotes: lambda e: self._tell(e.silos, s.NotesReceived(e.survivals)),
            c.DeliverResult: lambda e: self._tell(e.silos, s.ResultReceived(e.sha256, e.tags)),
            c.AskAbandon: lambda e: self._tell(e.silos, s.AbandonAsked()),
            c.StartTimer: self._watch,
            c.Discard: self._discard,
            c.Open: self._open,
            c.EndAttempt: self._end,
        }
        self._live = False
        for row in kept:
            self._replay(row.attempt, loaded(row))
        self._live = True

    @property
    def round(self) -> int:
        """The round whose sum it is."""
        return self._setting.round

    @property
    def attempt(self) -> int:
        """The attempt that was begun last; -1 before the first."""
        return len(self._states) - 1

    @property
    def stage(self) -> str:
        """Where that one stands."""
        return self._states[-1].stage if self._states else "waiting"

    @property
    def ctx(self) -> bytes:
        """Its context; empty before the first."""
        return self._states[-1].ctx if self._states else b""

    @property
    def spec(self) -> RoundSpec:
        """Its specification; LocalError before the first."""
        if not self._states:
            raise LocalError("no attempt was begun; this is a bug in Staddle")
        return self._states[-1].spec

    def told(self, silo: str, had: int) -> SecaggDelivery | None:
        """The next message for a silo that has had so many; None where there is none yet."""
        messages = self._lists[silo]
        if had > len(messages):
            why = (
                f"says that it had {had} messages of round {self._setting.round}, and was told"
                f" {len(messages)}"
            )
            raise RefusedError(silo, "SECURE", why)
        if had == len(messages):
            return None
        found = messages[had]
        if not isinstance(found.body, s.SurvivorsReceived):
            return found
        spec = self._states[found.attempt.attempt].spec
        if not spec.compared:
            return found
        # Sealed shares stay in the survivors' uploads until they are asked for.
        survivors = [header.silo for header in found.body.headers]
        shares = self._shell.shares(spec, silo, survivors)
        return replace(found, body=replace(found.body, shares=shares))

    # What happens, in the order of an attempt.

    def begin(self, spec: RoundSpec) -> None:
        """Ask the cohort into the next attempt.

        RefusedError for one that silos with these terms would not join.
        """
        if spec.attempt != len(self._states):
            raise LocalError(
                f"attempt {spec.attempt} after {len(self._states)}; this is a bug in Staddle"
            )
        step = self._begun(spec)
        self._shell.keep(spec.attempt, Begun(spec), nothing)
        self._enter(*step)

    def give(self, silo: str, message: pb.SecureUpload) -> None:
        """Take a message of a silo; the steps run in order. RefusedError says why not."""
        # (1) It is of an attempt of this sum.
        number = self._attempt_of(silo, message.attempt.context)
        current = number == self.attempt

        # (2) It is well formed; else its sender drops out.
        given = self._read(silo, message, number)

        # (3) It was not taken already (its answer was lost on the way), and is still needed.
        state, body = self._states[number], given.body
        if taken(state, silo, body) or unneeded(state, silo, body):
            return

        # (4) It is of the active attempt, unless it gives up an earlier one.
        if isinstance(body, Over):
            if current:
                self.drop(silo, _said(body.code))
            return
        abandons = isinstance(body, s.SendAbandon)
        if not current and not abandons:
            raise RefusedError(
                silo, "SECURE", f"ORDER: gives a message of attempt {number}, which is over"
            )
        self._take(number, said(silo, given))
        if abandons and not taken(self._states[number], silo, body):
            raise RefusedError(
                silo, "SECURE", "ABANDON: its note does not hold, or it was not among those asked"
            )

    def _attempt_of(self, silo: str, ctx: bytes) -> int:
        for number, state in enumerate(self._states):
            if state.ctx == ctx:
                return number
        raise RefusedError(
            silo, "SECURE", f"gives a message of no attempt of round {self._setting.round}"
        )

    def _read(self, silo: str, message: pb.SecureUpload, number: int) -> SecaggUpload:
        try:
            given = secagg_upload_from_wire(silo, message)
        except RefusedError as error:
            if error.code == ENVELOPE:
                raise
            if number == self.attempt:
                self.drop(silo, _said(error.code))
            raise RefusedError(silo, "SECURE", f"{error.code}: {error.why}") from error
        if given.attempt != self._named(number):
            raise RefusedError(
                silo, "SECURE", "names another job, round or attempt than its context is of"
            )
        return given

    def check_upload(self, silo: str, ctx: bytes) -> None:
        """RefusedError ROUND_CLOSED unless masked words of a silo are awaited in this attempt."""
        if not self.awaits(silo, ctx):
            why = (
                f"round {self._setting.round} does not await masked words of it now, or not of this"
                " attempt"
            )
            raise RefusedError(silo, "ROUND_CLOSED", why)

    def awaits(self, silo: str, ctx: bytes) -> bool:
        """Whether this silo's masked words are still to come in the attempt of this context."""
        if not self._states or self._states[-1].ctx != ctx:
            return False
        state = self._states[-1]
        if state.stage != "masked" or silo in self._spooled:
            return False
        return silo in state.u2 and silo not in state.failed

    def spooled(
        self, silo: str, size: int, sha256: bytes, also: Callable[[], None] = nothing
    ) -> None:
        """A silo's masked words, which were awaited, are here whole.

        ``also`` is written with that.
        """
        entry = Spooled(silo, size, sha256)
        self._shell.keep(self.attempt, entry, also)
        self._spooled[silo] = entry

    @property
    def digests(self) -> dict[str, bytes]:
        """SHA-256 of the masked words that are here of the last attempt, by silo."""
        return {silo: entry.sha256 for silo, entry in self._spooled.items()}

    def has_words(self, silo: str) -> bool:
        """Whether a silo's masked words of the last attempt are here."""
        return silo in self._spooled

    def drop(self, silo: str, code: str) -> None:
        """A silo cannot take part any more.

        Where it began anew, an attempt that has lost too many ends at once: else others that refuse
        or are away meanwhile would count against the next attempts, which are limited.
        """
        self._drop(silo, code)
        if code == Code.STOPPED:
            self._close_hopeless()

    def _close_hopeless(self) -> None:
        """Wait for nobody in an attempt that has lost too many."""
        if self.goes_on and machine.hopeless(self._states[-1]):
            self._take(self.attempt, c.AttemptDeadline(self._states[-1].stage))

    def _drop(self, silo: str, code: str) -> None:
        if not self.goes_on or silo in self._states[-1].failed:
            return
        if silo in self.spec.cohort:
            self._take(self.attempt, c.SiloDropped(silo, str(code)))

    def halt(self) -> None:
        """End the attempt, unless survivors may have signed already."""
        cohort = self.spec.cohort if self._states else ()
        for silo in cohort:
            if self.stage in UP_TO_UPLOADS:
                self._drop(silo, "stopped")

    def deadline(self, attempt: int, stage: str) -> None:
        """Time is up; stale for all but the present stage of the last attempt."""
        if attempt != self.attempt:
            return
        if stage == NOTES and self._waiting:
            self._finished()
        if stage != self.stage:
            return
        if stage not in UP_TO_UPLOADS:
            self._take(attempt, c.AttemptDeadline(stage))
            return
        late = list(filter(self._awaited, self.spec.cohort))
        for silo in late:  # the last of them closes the stage
            self._drop(silo, "deadline")

    def opened(self, attempt: int, sha256: bytes) -> None:
        """The sum is open and durable; SHA-256 of its file."""
        self._take(attempt, c.SumPublished(sha256))

    def unopened(self, attempt: int, why: str, *, spoiled: bool = False) -> None:
        """The sum could not be opened; or it is none of values, ``spoiled``."""
        self._take(attempt, c.OpenFailed(why, spoiled))

    def resume(self) -> None:
        """Do again what may not have been done before this process began.

        A stage gets its whole time once more.
        """
        if not self._states:
            return
        state = self._states[-1]
        if state.stage in machine.WATCHED:
            self._shell.watch(self.attempt, state.stage)
        for silo, code in state.failed.items():
            if self.goes_on or code in GUILTY:
                self._shell.dropped(silo, code)
        if state.stage == "opening" and self._opening is not None:
            self._shell.open(self.attempt, state.spec, self._opening)
        self._conclude()
        if Code.STOPPED in state.failed.values():
            self._close_hopeless()

    # How it takes effect.

    @property
    def goes_on(self) -> bool:
        """Whether an attempt is under way."""
        return bool(self._states) and self._states[-1].stage not in ("done", "ended")

    def _awaited(self, silo: str) -> bool:
        state = self._states[-1]
        due: Mapping[str, tuple[Sequence[str], Mapping[str, object]]] = {
            "keys": (state.spec.cohort, state.bundles),
            "shares": (state.u1, state.dealings),
            "masked": (state.u2, state.headers),
        }
        expected, answered = due[state.stage]
        heard = silo in answered or silo in state.failed
        return silo in expected and not heard

    def _replay(self, attempt: int, entry: Entry) -> None:
        match entry:
            case Begun(spec):
                self._enter(*self._begun(spec))
            case Spooled(silo):
                self._spooled[silo] = entry
            case _:
                self._take(attempt, entry)

    def _begun(self, spec: RoundSpec) -> machine.Step:
        signed = self._unopened
        out = machine.NOBODY
        if signed is not None:
            # Whoever signed survivors signs no others in this round: only they can repeat the sum.
            excused = dict.fromkeys(self._terms.excused, Code.MISDEALT.value)
            failed = {**signed.failed, **excused}
            strangers = set(spec.cohort).difference(self._repeating)
            out = {silo: failed.get(silo, Code.SURVIVORS.value) for silo in spec.cohort}
            out = {silo: code for silo, code in out.items() if silo in strangers}
        return machine.begin(spec, self._setting.signers, self._terms, self._setting.sign, out)

    def _enter(self, state: CoordinatorState, effects: Sequence[c.Effect]) -> None:
        self._states.append(state)
        self._spooled, self._opening, self._why = {}, None, ""
        self._over = self._waiting = False
        self._do(effects)

    def _take(self, number: int, entry: Happened) -> None:
        """One entry into its attempt; RefusedError where the machine refuses it."""
        before = self._states[number]
        state, effects = machine.advance(before, event_of(entry, self._spooled))
        if self._live and state != before:
            new = [state.proofs[dealer] for dealer in state.proofs if dealer not in before.proofs]
            self._shell.keep(number, entry, nothing, new)
        self._states[number] = state
        self._do(effects)
        if not self._live:
            return

        # Only now: the shell makes events of the job of it, which may begin the next attempt.
        for silo, code in state.failed.items():
            if before.failed.get(silo) != code:
                self._shell.dropped(silo, code)
        self._conclude()
        refused = next((effect for effect in effects if isinstance(effect, c.Refuse)), None)
        if refused is not None:
            raise RefusedError(refused.silo, "SECURE", f"{refused.code}: {refused.why}")

    def _do(self, effects: Sequence[c.Effect]) -> None:
        for effect in effects:
            if not isinstance(effect, c.Refuse):
                self._table[type(effect)](effect)
        if self._live and effects:
            self._shell.told()

    def _tell(self, silos: Sequence[str], body: DeliveryBody) -> None:
        told = SecaggDelivery(self._named(self.attempt), body)
        for silo in silos:
            self._lists[silo].append(told)

    def _named(self, number: int) -> Attempt:
        of = self._setting
        return Attempt(of.job, of.job_digest, of.round, number, self._states[number].ctx)

    def _ask(self, effect: c.Ask) -> None:
        brought = self._notes(), self._proofs, self._setting.shown
        self._tell(effect.silos, SignedSpec(effect.document, effect.signature, *brought))

    def _notes(self) -> tuple[Abandon, ...]:
        """Of all attempts before the last, unless nobody asks for them, and of earlier rounds."""
        notes = list(self._setting.notes)
        earlier = () if self._regroups else self._states[:-1]
        for state in earlier:
            notes += state.notes.values()
        return tuple(sorted(notes, key=lambda note: (note.silo, note.signature)))

    @property
    def _proofs(self) -> tuple[Misdealing, ...]:
        """All evidence of the job, ascending by dealer; against each the first."""
        found = {proof.dealer: proof for proof in self._setting.proofs}
        for state in self._states:
            found = {**state.proofs, **found}
        return tuple(found[dealer] for dealer in sorted(found))

    @property
    def _terms(self) -> Terms:
        """By which silos take part in the next attempt."""
        return replace(
            self._setting.terms, excused=frozenset(proof.dealer for proof in self._proofs)
        )

    @property
    def settled(self) -> SettledRound | None:
        """What silos that were away since are brought in later rounds.

        None for nothing, or while no sum is open.
        """
        return settled(self._states) if self.stage == "done" else None

    @property
    def _regroups(self) -> bool:
        """Whether who signed a sum of the round may sign another, over whole batches."""
        return self._setting.terms.regroups(self._states[-1].spec)

    @property
    def _unopened(self) -> CoordinatorState | None:
        """The last attempt that was signed and not opened, as evidence shows.

        It binds those that follow.
        """
        if not self._states or self._regroups:
            return None
        return next((state for state in reversed(self._states) if state.evidence is not None), None)

    @property
    def repeats(self) -> tuple[str, ...]:
        """The cohort that the next attempt has to name again, as silos signed it.

        Empty where it may be another.
        """
        signed = self._unopened
        return () if signed is None else signed.spec.cohort

    @property
    def _repeating(self) -> tuple[str, ...]:
        """Those who have to survive in every further attempt.

        Empty where they are not bound to a signed one.
        """
        state = self._unopened
        if state is None:
            return ()
        excused = self._terms.excused
        return tuple(silo for silo in state.u3 if silo not in excused)

    def _watch(self, effect: c.StartTimer) -> None:
        if self._live:
            self._shell.watch(self.attempt, effect.stage)

    def _discard(self, effect: c.Discard) -> None:
        if self._live:
            self._shell.discard(effect.silo)

    def _open(self, effect: c.Open) -> None:
        self._opening = effect
        if self._live:
            self._shell.open(self.attempt, self.spec, effect)

    def _end(self, effect: c.EndAttempt) -> None:
        state = self._states[-1]
        failed = [f"{silo}: {in_words(code)}" for silo, code in state.failed.items()]
        lost = f" ({', '.join(failed)})" if failed else ""
        why = f"{effect.why}{lost}"
        self._why = f"{effect.code}: {why}"
        left = _but(state.spec.cohort, state.failed)
        self._tell(left, Over(effect.code))
        if not self._live:
            return

        # the others are discarded by the machine
        for silo in self._spooled.keys() - state.headers.keys():
            self._shell.discard(silo)
        blame = {"blame": effect.blame} if effect.blame else {}
        log.problem(
            "sum.ended",
            job=self._setting.job,
            round=self._setting.round,
            attempt=self.attempt,
            code=effect.code,
            why=why,
            **blame,
        )

    def _conclude(self) -> None:
        """Tell the shell once that the last attempt is over, when another may follow."""
        state = self._states[-1]
        if self._over or self.goes_on:
            return
        if state.stage == "done":
            self._over = True
            self._shell.summed(state.u3)
        elif self._needs_no_notes(state) or self._final:
            self._finished()
        elif not self._waiting:
            self._waiting = True
            self._shell.watch(self.attempt, NOTES)

    def _needs_no_notes(self, state: CoordinatorState) -> bool:
        """Whether the next attempt may begin, or no more silos can give up this one.

        Abandon notes show that no sum with words that left can be opened any more. Evidence, a
        spoiled sum and whole batches allow the next attempt without them.
        """
        if state.evidence or state.spoiled or self._regroups:
            return True
        return not state.notes_missing or set(state.u1) <= state.notes.keys()

    @property
    def _final(self) -> bool:
        """Whether no further attempt could be opened, whoever comes back."""
        state = self._states[-1]
        guilty = _guilty(state)
        if self._regroups:  # who signed may sign again, for whole batches
            # over its only batch it would be none of values again
            if state.spoiled and len(self._setting.terms.batches) == 1:
                return True
            asked = _but(self._states[0].spec.cohort, guilty)
            return self._too_few(self._terms.whole(state.spec, asked))
        if only := self._repeating:
            unexplained = bool(state.survivals) and state.evidence is None
            return unexplained or bool(guilty.intersection(only)) or not self._can_survive(only)
        left = _but(state.spec.cohort, {*state.survivals, *guilty})
        if batches := self._setting.together:  # the next attempt may be made without some of them
            terms = replace(self._terms, batches=batches)
            return self._too_few(terms.whole(state.spec, left))
        return not self._can_survive(left)

    def _too_few(self, whole: Sequence[str]) -> bool:
        """Whether these are fewer than a sum takes."""
        spec = self._states[-1].spec
        return len(whole) < max(spec.min_cohort, 3 * spec.colluders + 1)

    def _can_survive(self, silos: Sequence[str]) -> bool:
        try:
            check_survivors(self._states[-1].spec, self._terms, silos)
        except RefusedError:
            return False
        return True

    def _finished(self) -> None:
        self._over, self._waiting = True, False
        state = self._states[-1]
        # else who signed it signs no other
        spoiled = state.u3 if state.spoiled and self._regroups else ()
        self._shell.failed(self.attempt, self._why, self._final, spoiled, state.u3)


def _guilty(state: CoordinatorState) -> set[str]:
    return {silo for silo, code in state.failed.items() if code in GUILTY}


def _but(silos: Sequence[str], out: Collection[str]) -> list[str]:
    return [silo for silo in silos if silo not in out]


def _said(code: str) -> str:
    """A code for which nobody is out of the job: what a silo says of itself is no evidence."""
    return Code.ORDER.value if code in GUILTY else str(code)
