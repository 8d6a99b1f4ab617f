"""The secure sum of one round at the coordinator: all attempts, and messages to silos in them.

Every event goes through the pure machine of an attempt (security/secagg/coordinator.py), and is
durable before it takes effect. Two tables run the effects of the machine: messages go to the end of
the silos' lists, all else to the shell. A silo asks for the n-th entry of its list. After a restart
the stored rows are replayed into the same lists; the shell does nothing a second time.

::

    an attempt  ends when                                   then
    done        its sum is open                             ``summed``
    ended       too few are left, or masks do not come off  ``failed``, once enough abandoned it
                                                            for good, all of them did, or
                                                            ``secure_seconds`` are over; at once
                                                            where no masked words may have left

Unless sums are over whole batches, silos that signed survivors take part in no other attempt of the
round: where too few others are left, it was the last. Where evidence shows why nothing could be
opened (security/secagg/evidence.py), the very survivors repeat the sum without the dealers at
fault, and it takes all of them. With each attempt silos receive all evidence of the job: they take
part in sums that lack the dealers it is against. In a job of whole batches
(algorithms/job/batches.py) whoever signed may sign again, for whole batches: a sum that could not
be opened is made again, and one that decodes to no valid values is made over some of them. Such an
attempt is followed at once, without abandon notes.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ... import log
from ...errors import LocalError, RefusedError
from ...proto import secure_pb2 as pb
from ...proto.convert.secagg_received import DeliveryBody, SecaggDelivery, SignedSpec
from ...proto.convert.secagg_sent import (
    MALFORMED,
    Attempt,
    Over,
    SecaggUpload,
    secagg_upload_from_wire,
)
from ...security.faults import Code
from ...security.identity.selection import with_codes, without
from ...security.secagg import coordinator as machine
from ...security.secagg import coordinator_events as c
from ...security.secagg import silo_events as s
from ...security.secagg.coordinator import CoordinatorState
from ...security.secagg.evidence import Misdealing
from ...security.secagg.messages import Abandon, silos_of
from ...security.secagg.spec import RoundSpec, Terms, check_survivors
from ..rounds.events import GUILTY, in_words
from ..storage.replay_log import Begun, Entry, ReplayEntry, Said, Spooled, loaded, said
from .replay_events import Happened, event_of, taken, unneeded
from .secure_sum_shell import Shell, SumSetting, nothing
from .settled import SettledRound, settled

NOTES = "notes"  # next to the machine's stages: an attempt has ended, and abandon notes are awaited
UP_TO_UPLOADS = ("keys", "shares", "masked")  # nobody has signed survivors


class SecureSum:
    """All attempts at one round's secure sum; only the latest is active.

    To be used from the event loop only. Each event is durable before the shell or a silo hears of
    it.
    """

    def __init__(self, setting: SumSetting, shell: Shell, kept: Iterable[ReplayEntry] = ()) -> None:
        """``kept``: the rows of what happened before this process began, in order.

        Call ``resume`` next.
        """
        self._setting = setting
        self._shell = shell
        self._states: list[CoordinatorState] = []
        self._lists: dict[str, list[SecaggDelivery]] = {silo: [] for silo in setting.silos}
        # Only the last attempt's: words of an earlier one were masked with other keys.
        self._spooled: dict[str, Spooled] = {}  # by silo, of the last attempt
        self._opening: c.Open | None = None
        self._why = ""  # the last attempt ended
        self._over = False  # the shell has heard of its end
        self._waiting = False  # the shell is to say when its abandon notes are overdue

        # These fill the lists, and so run again when rows are replayed; the shell's run once, since
        # what they did is on the disk or is done again by ``resume``.
        self._replayed: dict[type[c.Effect], Callable[[Any], None]] = {
            c.Ask: self._ask,
            c.Tell: lambda e: self._tell(e.silos, e.message),
            c.Open: self._remember_opening,
            c.EndAttempt: self._tell_end,
        }
        self._done_once: dict[type[c.Effect], Callable[[Any], None]] = {
            c.StartTimer: lambda e: shell.watch(self.attempt, e.stage),
            c.Discard: lambda e: shell.discard(e.silo),
            c.Open: lambda e: shell.open(self.attempt, self.spec, e),
            c.EndAttempt: self._log_end,
        }
        # Into the same lists as before: a silo asks by number, and may have seen only some of them.
        for row in kept:
            self._replay(row.attempt, loaded(row))

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
        """The stage of the last attempt; "waiting" before the first."""
        return self._states[-1].stage if self._states else "waiting"

    @property
    def goes_on(self) -> bool:
        """True while an attempt is under way."""
        return self.stage not in ("waiting", "done", "ended")

    @property
    def ctx(self) -> bytes:
        """The context of the last attempt; empty before the first."""
        return self._states[-1].ctx if self._states else b""

    @property
    def spec(self) -> RoundSpec:
        """The specification of the last attempt; LocalError before the first."""
        if not self._states:
            raise LocalError("no attempt was begun; this is a bug in Staddle")
        return self._states[-1].spec

    def next_message(self, silo: str, had: int) -> SecaggDelivery | None:
        """The next message for a silo that has received ``had``; None where there is none yet."""
        messages = self._lists[silo]
        # A message is durable before it is sent, so an honest silo never had more.
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
        # Sealed shares stay in the survivors' uploads until they are asked for: in the lists they
        # would be in memory once for each pair of silos.
        shares = self._shell.shares(spec, silo, silos_of(found.body.headers))
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
        # A specification that silos would refuse is refused before it is durable.
        state, effects = self._begun(spec)
        self._shell.keep(spec.attempt, Begun(spec), nothing)
        self._enter(state, effects)
        self._call_shell(effects)

    def accept(self, silo: str, message: pb.SecureUpload) -> None:
        """Take a message from a silo; the steps run in order. RefusedError says why not.

        The message is durable when this returns. A silo whose answer was lost may send the same
        message again; the second one changes nothing.
        """
        # (1) It is of an attempt of this sum.
        number = self._attempt_of(silo, message.attempt.context)
        current = number == self.attempt

        # (2) It is well formed; else its sender drops out.
        upload = self._read(silo, message, number)

        # (3) It was not taken already (its answer was lost on the way), and is still needed.
        state, body = self._states[number], upload.body
        if taken(state, silo, body) or unneeded(state, silo, body):
            return

        # (4) It is of the active attempt, unless it gives up an earlier one.
        entry = said(silo, upload, message)
        if isinstance(body, s.SendAbandon):
            self._take_note(number, entry, body)
        elif isinstance(body, Over):
            self._leave(silo, body, current=current)
        elif current:
            self._take(number, entry)
        else:
            raise RefusedError(
                silo, "SECURE", f"ORDER: sends a message of attempt {number}, which is over"
            )

    def _take_note(self, number: int, entry: Said, note: s.SendAbandon) -> None:
        self._take(number, entry)
        if not taken(self._states[number], entry.silo, note):
            raise RefusedError(
                entry.silo,
                "SECURE",
                "ABANDON: its note is invalid, or it was not among those asked",
            )

    def _leave(self, silo: str, over: Over, *, current: bool) -> None:
        # An earlier attempt is over anyway: it may still say so of that one.
        if current:
            self.drop(silo, _said(over.code))

    def _attempt_of(self, silo: str, ctx: bytes) -> int:
        for number, state in enumerate(self._states):
            if state.ctx == ctx:
                return number
        raise RefusedError(
            silo,
            "SECURE",
            f"sends a message that belongs to no attempt of round {self._setting.round}",
        )

    def _read(self, silo: str, message: pb.SecureUpload, number: int) -> SecaggUpload:
        try:
            upload = secagg_upload_from_wire(silo, message)
        except RefusedError as error:
            if error.code == MALFORMED:
                raise
            if number == self.attempt:
                self.drop(silo, _said(error.code))
            raise RefusedError(silo, "SECURE", f"{error.code}: {error.why}") from error
        # The context is a hash of the specification; the names next to it
        # must not say something else.
        if upload.attempt != self._named(number):
            raise RefusedError(
                silo, "SECURE", "names another job, round or attempt than its context"
            )
        return upload

    def check_upload(self, silo: str, ctx: bytes) -> None:
        """RefusedError ROUND_CLOSED unless this silo's masked words are awaited in this attempt."""
        if not self.awaits(silo, ctx):
            why = (
                f"round {self._setting.round} does not await masked words of it now, or not of this"
                " attempt"
            )
            raise RefusedError(silo, "ROUND_CLOSED", why)

    def awaits(self, silo: str, ctx: bytes) -> bool:
        """True while this silo's masked words are still to come in the attempt of this context."""
        if (self.ctx, self.stage) != (ctx, "masked"):
            return False
        state = self._states[-1]
        return silo in set(state.u2).difference(self._spooled, state.failed)

    def spooled(
        self, silo: str, size: int, sha256: bytes, also: Callable[[], None] = nothing
    ) -> None:
        """Note that a silo's masked words, which were awaited, have arrived whole.

        ``also`` is written in the same transaction. The words count once the silo's signed header
        has come, too.
        """
        entry = Spooled(silo, size, sha256)
        self._shell.keep(self.attempt, entry, also)
        self._spooled[silo] = entry

    @property
    def digests(self) -> dict[str, bytes]:
        """SHA-256 of the masked words of the last attempt, by silo.

        They are of the bytes that arrived; the files are compared with them when the sum is opened.
        """
        return {silo: entry.sha256 for silo, entry in self._spooled.items()}

    def has_words(self, silo: str) -> bool:
        """True once a silo's masked words of the last attempt have arrived."""
        return silo in self._spooled

    def drop(self, silo: str, code: str) -> None:
        """Let a silo, which cannot take part any more, drop out of the active attempt."""
        self._drop(silo, code)
        # Where it was restarted, an attempt that has lost too many ends at once: else others
        # that refuse or are away meanwhile would count against the attempts, which are limited.
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
        """End the attempt, unless survivors may have signed already.

        Survivors who may have signed are not stopped: their sum is finished.
        """
        cohort = self.spec.cohort if self._states else ()
        for silo in cohort:
            # Asked for each: the one that drops out before may have ended the attempt.
            if self.stage in UP_TO_UPLOADS:
                self._drop(silo, "stopped")

    def deadline(self, attempt: int, stage: str) -> None:
        """Time is up; stale for all but the present stage of the last attempt."""
        waiting = NOTES if self._waiting else self.stage
        if (attempt, stage) != (self.attempt, waiting):
            return
        if stage == NOTES:
            self._finished()
        elif stage in UP_TO_UPLOADS:
            # Each late silo is named, so that the next attempt can be made without it; the last of
            # them closes the stage.
            for silo in self._late():
                self._drop(silo, "deadline")
        else:
            self._take(attempt, c.AttemptDeadline(stage))

    def opened(self, attempt: int, sha256: bytes) -> None:
        """Note that the sum is open and durable; ``sha256`` is that of its file.

        The members learn its digest; the sum cannot be taken back.
        """
        self._take(attempt, c.SumPublished(sha256))

    def unopened(self, attempt: int, why: str, *, spoiled: bool = False) -> None:
        """Note that the sum could not be opened; or that it is none of values, ``spoiled``.

        The attempt ends, and another may follow.
        """
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
        # The process may have died between the row and the event of the job. Of an attempt that is
        # over, only guilt still matters to the job.
        for silo, code in state.failed.items():
            if self.goes_on or code in GUILTY:
                self._shell.dropped(silo, code)
        # The sum was not open yet, or its row was not written: it is
        # opened again, from the same words.
        if state.stage == "opening" and self._opening is not None:
            self._shell.open(self.attempt, state.spec, self._opening)
        self._conclude()
        if Code.STOPPED in state.failed.values():
            self._close_hopeless()

    # How it takes effect.

    def _late(self) -> tuple[str, ...]:
        """Silos that have yet to answer in a stage that waits for all."""
        state = self._states[-1]
        due: Mapping[str, tuple[Sequence[str], Mapping[str, object]]] = {
            "keys": (state.spec.cohort, state.bundles),
            "shares": (state.u1, state.dealings),
            "masked": (state.u2, state.headers),
        }
        expected, answered = due[state.stage]
        return without(expected, {*answered, *state.failed})

    def _replay(self, attempt: int, entry: Entry) -> None:
        """Take a row in again: silos' lists grow as they did, and the shell hears nothing."""
        match entry:
            case Begun(spec):
                self._enter(*self._begun(spec))
            case Spooled(silo):
                self._spooled[silo] = entry
            case _:
                self._turn(attempt, *self._advanced(attempt, entry))

    def _begun(self, spec: RoundSpec) -> machine.Step:
        signed = self._unopened
        out = machine.NOBODY
        if signed is not None:
            # Whoever signed survivors signs no others in this round: only they can repeat the sum.
            excused = dict.fromkeys(self._terms.excused, Code.MISDEALT.value)
            failed = {**signed.failed, **excused}
            # The specification names the old cohort, but only those who
            # can repeat the sum are asked.
            strangers = without(spec.cohort, self._repeating)
            out = {silo: failed.get(silo, Code.SURVIVORS.value) for silo in strangers}
        return machine.begin(spec, self._setting.signers, self._terms, self._setting.sign, out)

    def _enter(self, state: CoordinatorState, effects: Sequence[c.Effect]) -> None:
        self._states.append(state)
        # Nothing of an attempt that is over may be taken for the new one's.
        self._spooled, self._opening, self._why = {}, None, ""
        self._over = self._waiting = False
        self._turn(self.attempt, state, effects)

    def _advanced(self, number: int, entry: Happened) -> machine.Step:
        return machine.advance(self._states[number], event_of(entry, self._spooled))

    def _turn(self, number: int, state: CoordinatorState, effects: Sequence[c.Effect]) -> None:
        """Turn to a state that is durable; silos' lists grow."""
        self._states[number] = state
        for effect in effects:
            self._replayed.get(type(effect), _ignore)(effect)

    def _take(self, number: int, entry: Happened) -> None:
        """One entry into its attempt, durably; RefusedError where the machine refuses it."""
        before = self._states[number]
        state, effects = self._advanced(number, entry)
        # Durable before anybody hears of it: replayed, the rows make the lists that silos saw.
        if state != before:
            # Evidence is for the life of the job, while the other rows go with the round.
            new = without(state.proofs, before.proofs)
            self._shell.keep(number, entry, nothing, [state.proofs[dealer] for dealer in new])
        self._turn(number, state, effects)
        self._call_shell(effects)

        # Only now: the shell makes events of the job of it, which may begin the next attempt.
        for silo, code in state.failed.items():
            if before.failed.get(silo) != code:
                self._shell.dropped(silo, code)
        # Before the refusal is raised: the message may have ended the attempt.
        self._conclude()
        _raise_refused(effects)

    def _call_shell(self, effects: Sequence[c.Effect]) -> None:
        for effect in effects:
            self._done_once.get(type(effect), _ignore)(effect)
        if effects:
            self._shell.wake()

    def _tell(self, silos: Sequence[str], body: DeliveryBody) -> None:
        delivery = SecaggDelivery(self._named(self.attempt), body)
        for silo in silos:
            self._lists[silo].append(delivery)

    def _named(self, number: int) -> Attempt:
        of = self._setting
        return Attempt(of.job, of.job_digest, of.round, number, self._states[number].ctx)

    def _ask(self, effect: c.Ask) -> None:
        brought = self._notes(), self._proofs, self._setting.shown
        self._tell(effect.silos, SignedSpec(effect.document, effect.signature, *brought))

    def _notes(self) -> tuple[Abandon, ...]:
        """Abandon notes of earlier rounds, and of all attempts before the last."""
        notes = list(self._setting.notes)
        # Over whole batches attempts follow one another without notes.
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
        """The terms on which silos take part in the next attempt."""
        return replace(
            self._setting.terms, excused=frozenset(proof.dealer for proof in self._proofs)
        )

    @property
    def settled(self) -> SettledRound | None:
        """What silos that have been away since receive in later rounds.

        None for nothing, or while no sum is open.

        For the collector, which stores it when the round is over (settled.py).
        """
        return settled(self._states) if self.stage == "done" else None

    @property
    def _regroups(self) -> bool:
        """Whether silos that signed a sum of the round may sign another, over whole batches."""
        return self._setting.terms.regroups(self._states[-1].spec)

    @property
    def _unopened(self) -> CoordinatorState | None:
        """The last attempt that was signed and not opened, as evidence shows.

        It binds those that follow.
        """
        if not self._states or self._regroups:
            return None
        # The newest: those before it were repeated by it.
        return next((state for state in reversed(self._states) if state.evidence is not None), None)

    @property
    def repeats(self) -> tuple[str, ...]:
        """The cohort that the next attempt has to name again, as silos signed it.

        Empty where another cohort may follow.
        """
        signed = self._unopened
        return () if signed is None else signed.spec.cohort

    @property
    def _repeating(self) -> tuple[str, ...]:
        """Silos that have to survive in every further attempt; empty where none is bound."""
        state = self._unopened
        if state is None:
            return ()
        return without(state.u3, self._terms.excused)

    def _remember_opening(self, effect: c.Open) -> None:
        self._opening = effect

    def _tell_end(self, effect: c.EndAttempt) -> None:
        state = self._states[-1]
        self._why = f"{effect.code}: {self._why_ended(effect)}"
        self._tell(without(state.spec.cohort, state.failed), Over(effect.code))

    def _why_ended(self, effect: c.EndAttempt) -> str:
        failed = self._states[-1].failed
        lost = ", ".join(f"{silo}: {in_words(code)}" for silo, code in failed.items())
        return f"{effect.why} ({lost})" if lost else effect.why

    def _log_end(self, effect: c.EndAttempt) -> None:
        # The machine discards words with a header; it does not know of the others.
        for silo in self._spooled.keys() - self._states[-1].headers.keys():
            self._shell.discard(silo)
        blame = {"blame": effect.blame} if effect.blame else {}
        log.problem(
            "sum.ended",
            job=self._setting.job,
            round=self._setting.round,
            attempt=self.attempt,
            code=effect.code,
            why=self._why_ended(effect),
            **blame,
        )

    def _conclude(self) -> None:
        """Tell the shell once that the last attempt is over, when another may follow."""
        state = self._states[-1]
        # The shell hears of the end once, though the last notes may still come in.
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
        """Whether the next attempt may begin, or no more silos can give up this one."""
        # Notes show that no sum with words that left can be opened any more (security rule 17).
        # Evidence, a spoiled sum and whole batches allow the next attempt without them.
        if state.evidence or state.spoiled or self._regroups:
            return True
        return not state.notes_missing or set(state.u1) <= state.notes.keys()

    @property
    def _final(self) -> bool:
        """Whether no further attempt could be opened, whoever comes back."""
        state = self._states[-1]
        guilty = with_codes(state.failed, GUILTY)
        if self._regroups:
            return self._is_final_regrouped(state, guilty)
        if only := self._repeating:
            return self._is_final_repeated(state, guilty, only)

        # Whoever signed survivors takes part in no other attempt (security rule 17).
        left = without(state.spec.cohort, {*state.survivals, *guilty})
        if not self._setting.together:
            return not self._can_survive(left)
        # The next attempt may be made without some of the batches.
        terms = replace(self._terms, batches=self._setting.together)
        return self._too_few(terms.whole(state.spec, left))

    def _is_final_regrouped(self, state: CoordinatorState, guilty: Collection[str]) -> bool:
        """The case of whole batches, whose signers may sign again."""
        # Over its only batch a spoiled sum would be none of values again.
        if state.spoiled and len(self._setting.terms.batches) == 1:
            return True
        # The next attempt asks all of the round again, lost silos among them.
        cohort = without(self._states[0].spec.cohort, guilty)
        return self._too_few(self._terms.whole(state.spec, cohort))

    def _is_final_repeated(
        self, state: CoordinatorState, guilty: Collection[str], only: Sequence[str]
    ) -> bool:
        """The case in which the very survivors repeat the sum without the dealers at fault."""
        # Signed a second time, it could be repeated only by evidence against one more dealer.
        if state.survivals and state.evidence is None:
            return True
        return not set(only).isdisjoint(guilty) or not self._can_survive(only)

    def _too_few(self, whole: Sequence[str]) -> bool:
        """Whether these are fewer than a sum takes."""
        # Rule 6: silos refuse a cohort of which a third may collude.
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
        # Without whole batches its signers sign no other, so nobody makes it again without some.
        spoiled = state.u3 if state.spoiled and self._regroups else ()
        self._shell.failed(self.attempt, self._why, self._final, spoiled, state.u3)


def _ignore(_: c.Effect) -> None:
    """An effect that is in the other table, or a refusal."""


def _raise_refused(effects: Sequence[c.Effect]) -> None:
    for effect in effects:
        if isinstance(effect, c.Refuse):
            raise RefusedError(effect.silo, "SECURE", f"{effect.code}: {effect.why}")


def _said(code: str) -> str:
    """A code for which nobody is out of the job: what a silo says of itself is no evidence."""
    return Code.ORDER.value if code in GUILTY else str(code)
