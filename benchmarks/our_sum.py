"""Our secure sum for secure_sum.py: one attempt among n silos and a coordinator in this process.

One silo's time is taken, and the coordinator's. The silos' states are values, so two endings follow
the same uploads: one in which all survive, and one in which the first silo is lost after it dealt.
"""

import hashlib
import os
from collections.abc import Iterable
from typing import Any

import torch
from clock import Clock, extra_memory
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from staddle.algorithms.exchange.parts import WEIGHT, Kind, Part, Sum, TensorSpec
from staddle.proto.convert.secagg_sent import (
    Attempt,
    SecaggUpload,
    UploadBody,
    secagg_upload_to_wire,
)
from staddle.security.arithmetic.masks import Term
from staddle.security.blind.sum import Bounds, folded, given, group
from staddle.security.identity.domains import framed
from staddle.security.identity.signers import Sign, Signers
from staddle.security.secagg import coordinator
from staddle.security.secagg import coordinator_events as c
from staddle.security.secagg import silo as machine
from staddle.security.secagg import silo_events as s
from staddle.security.secagg.linear_tags import Tagger
from staddle.security.secagg.masked_sum import (
    Accumulator,
    check_group_values,
    masked_chunks,
    upload_bytes,
)
from staddle.security.secagg.memory import Memory
from staddle.security.secagg.spec import Frame, RoundSpec, Terms, specify

LEAST, MOST = 100, 400  # records of a silo
MODES = {
    "public": Bounds(weights="public"),
    "private": Bounds(least=LEAST, most=MOST),  # ring 32: at most 16-fold
    "private, ring 64": Bounds(least=1, most=MOST),
}
SPLIT = (40, 20, 20, 10, 4, 3, 2, 1)  # tensors of a model, in parts of 100


def part_of(elements: int) -> Part:
    """A model of eight tensors."""
    specs = tuple(
        TensorSpec(f"t{i}", "float32", (elements * share // 100,)) for i, share in enumerate(SPLIT)
    )
    return Part("model", Kind.WHOLE_MODEL, Sum("mean"), specs)


def model(elements: int) -> dict[str, torch.Tensor]:
    """An update of a model and its weight, as a silo would give them in the clear."""
    random = torch.Generator().manual_seed(1)
    made = {
        spec.name: torch.randn(spec.shape, generator=random).mul_(0.05)
        for spec in part_of(elements).tensors
    }
    return {**made, WEIGHT: torch.tensor(300.0, dtype=torch.float64)}


def cohort_of(silos: int) -> tuple[str, ...]:
    """Their ids."""
    return tuple(f"silo-{i:03}" for i in range(silos))


def frame_of(elements: int, silos: int, mode: str) -> Frame:
    """A sum of one model, weighted by records; counts are declared where weights are public."""
    counts = tuple((silo, 300) for silo in cohort_of(silos)) if mode == "public" else ()
    digest = "ab" * 32
    return Frame(
        federation="bench",
        members=digest,
        job="bench",
        job_digest=digest,
        round=1,
        exchange="sum",
        purpose="update",
        recipient="coordinator",
        model_digest=digest,
        schema_digest=digest,
        groups=(group(part_of(elements), MODES[mode]),),
        counts=counts,
    )


def mask(
    spec: RoundSpec,
    silo: str,
    tensors: dict[str, torch.Tensor],
    terms: Iterable[Term],
    hashing: Clock | None = None,
    tagger: Tagger | None = None,
) -> bytes:
    """What a silo does between its training and its header: the digest of what it sent."""
    contributions = [given(part_of(spec.groups[0].elements), spec.groups[0], tensors)]
    check_group_values(spec, contributions)
    digest, clock = hashlib.sha256(), hashing or Clock()
    for words in masked_chunks(spec, silo, contributions, tuple(terms), tagger):
        with clock.of("SHA-256"):
            digest.update(words)
    return digest.digest()


class Members:
    """Keys of the coordinator and of the silos, made once."""

    def __init__(self, silos: int) -> None:
        self._keys = {
            name: Ed25519PrivateKey.generate() for name in ("coordinator", *cohort_of(silos))
        }
        public = {name: key.public_key().public_bytes_raw() for name, key in self._keys.items()}
        self.signers = Signers(public.pop("coordinator"), public)

    def sign(self, name: str) -> Sign:
        """``Keys.sign`` of a member."""
        return lambda domain, message: self._keys[name].sign(framed(domain, message))


class OurRound:
    """One secure sum among n silos and a coordinator, step by step.

    One silo's time is taken, and the coordinator's.
    """

    def __init__(self, members: Members, elements: int, silos: int, clock: Clock) -> None:
        self.frame, self.clock, self.members = frame_of(elements, silos, "public"), clock, members
        self.spec = specify(self.frame, cohort_of(silos), 0)
        self.me, self.lost = self.spec.cohort[silos // 2], self.spec.cohort[0]
        self.states: dict[str, machine.SiloAttempt] = {}
        self.sent = upload_bytes(self.spec)

    def run(self, tensors: dict[str, torch.Tensor]) -> int:
        """The bytes that one silo sends."""
        state, dealt = self._setup()
        whole, without = Accumulator(self.spec), Accumulator(self.spec)
        contributions = [given(part_of(self.spec.groups[0].elements), self.spec.groups[0], tensors)]
        told = {each.silos[0]: each.message for each in dealt}
        given_headers: list[c.Event] = []
        for silo in self.spec.cohort:
            upload: Any = self._silo(silo, told[silo], "setup")[-1]
            if silo == self.me:
                with self.clock.of("mask"):
                    mask(self.spec, silo, tensors, upload.terms, self.clock)
                with self.clock.of("mask, tagged"):
                    mask(self.spec, silo, tensors, upload.terms, tagger=self._tagger())
                for mode in [mode for mode in MODES if mode != "public"]:
                    other = specify(
                        frame_of(self.spec.groups[0].elements, len(self.spec.cohort), mode), told, 0
                    )
                    with self.clock.of(f"mask, {mode}"):
                        mask(other, silo, tensors, upload.terms)
            crossed = [
                words.tobytes()
                for words in masked_chunks(self.spec, silo, contributions, upload.terms)
            ]
            digest = hashlib.sha256()
            for chunk in crossed:
                digest.update(chunk)
            header: Any = self._silo(silo, s.Streamed(self.sent, digest.digest()), "unmask")[-1]
            given_headers.append(c.WordsUploaded(header.header, self.sent, digest.digest()))
            with self.clock.of("fold"):
                whole.add(crossed)
            if silo != self.lost:
                with self.clock.of("fold after a dropout"):
                    without.add(crossed)
        self._finish(state, given_headers, whole, "")
        self._finish(
            state,
            [c.SiloDropped(self.lost, "TIMEOUT"), *given_headers[1:]],
            without,
            " after a dropout",
        )
        return self._bytes_sent()

    def _tagger(self) -> Tagger:
        return Tagger(bytes(32), self.spec.context(), len(self.spec.groups))

    def _setup(self) -> tuple[coordinator.CoordinatorState, list[c.Tell]]:
        """Steps 0 and 1, up to what the silos are told of one another's shares."""
        signers, terms, sign = self.members.signers, Terms(), self.members.sign
        self.given: list[UploadBody] = []
        state, effects = coordinator.begin(self.spec, signers, terms, sign("coordinator"))
        ask: Any = effects[0]
        events: list[c.Event] = []
        for silo in self.spec.cohort:
            party = machine.Participant(silo, signers, terms, sign(silo), os.urandom)
            with self.clock.of("setup", counts=silo == self.me):
                entered = machine.begin(party, self.frame, ask.document, ask.signature, Memory())
            self.states[silo], (_, keys) = entered
            self._note(silo, keys)
            events.append(keys)  # type: ignore[arg-type]
        state, effects = self._coordinate(state, events, "")
        told = {e.silos[0]: e.message for e in effects if isinstance(e, c.Tell)}
        shares: list[Any] = [self._silo(silo, told[silo], "setup")[-1] for silo in self.spec.cohort]
        state, effects = self._coordinate(state, shares, "")
        return state, [effect for effect in effects if isinstance(effect, c.Tell)]

    def _finish(
        self,
        state: coordinator.CoordinatorState,
        events: list[c.Event],
        sums: Accumulator,
        name: str,
    ) -> None:
        """Steps 3 and 4 from the silos' headers on, from states that are left as they were.

        Then the sum is opened.
        """
        states, clock = dict(self.states), self.clock
        state, effects = self._coordinate(state, events, name)
        told = next(e for e in effects if isinstance(e, c.Tell))
        phase = "unmask" if not name else "unmask after a dropout"
        signed: list[Any] = [self._silo(silo, told.message, phase)[-1] for silo in told.silos]
        state, effects = self._coordinate(state, signed, name)
        notes = next(e for e in effects if isinstance(e, c.Tell))
        reveals: list[Any] = [self._silo(silo, notes.message, phase)[-1] for silo in notes.silos]
        with clock.of(f"open{name}"):
            for each in reveals[: self.spec.threshold]:
                state, effects = coordinator.advance(state, each)
            left: Any = effects[-1]
            (opened,) = sums.open(left.terms, left.survivors)
        with clock.of(f"check of the tag{name}"):
            tagger = self._tagger()
            for index, words in sums.numbers():
                tagger.add(index, words)
        with clock.of(f"open{name}"):
            folded(part_of(opened.elements), self.spec.groups[0], opened)
        self.states = states

    def _silo(self, silo: str, event: s.Event, phase: str) -> tuple[s.Effect, ...]:
        with self.clock.of(phase, counts=silo == self.me):
            self.states[silo], effects = machine.advance(self.states[silo], event)
        self._note(silo, effects[-1])
        return effects

    def _note(self, silo: str, effect: s.Effect) -> None:
        if silo == self.me and not isinstance(
            effect, s.UploadWords | s.Remember | s.Finish | s.LeaveAttempt
        ):
            self.given.append(effect)

    def _coordinate(
        self, state: coordinator.CoordinatorState, events: list[c.Event], name: str
    ) -> tuple[coordinator.CoordinatorState, tuple[c.Effect, ...]]:
        effects: tuple[c.Effect, ...] = ()
        with self.clock.of(f"messages{name}"):
            for event in events:
                state, more = coordinator.advance(state, event)
                effects += more
        return state, effects

    def _bytes_sent(self) -> int:
        attempt = Attempt(self.frame.job, bytes(32), self.frame.round, 0, self.spec.context())
        # the branch with a dropout gave two of them again
        kinds = {type(body): body for body in self.given}
        messages = [
            secagg_upload_to_wire(SecaggUpload(bytes(32), attempt, body)).ByteSize()
            for body in kinds.values()
        ]
        return self.sent + sum(messages)


def our_memory(elements: int, silos: int, mode: str) -> int:
    """Bytes by which a silo's process grows while it masks."""
    tensors, terms = model(elements), [Term(os.urandom(32)) for _ in range(silos)]
    spec = specify(frame_of(elements, silos, mode), cohort_of(silos), 0)
    small = specify(frame_of(1000, silos, mode), cohort_of(silos), 0)
    # what the first use of anything loads is not of the model's size
    mask(small, spec.cohort[0], model(1000), terms)
    return extra_memory(lambda: mask(spec, spec.cohort[0], tensors, terms))
