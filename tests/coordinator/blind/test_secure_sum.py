import dataclasses
import functools
import hashlib
import random
from typing import get_args

import pytest
import torch
from safetensors import safe_open
from support.refusals import refused
from support.secure_sums import Drawn, frame, names, signed_dealing, signer, signers, with_portion

from staddle.algorithms.exchange.parts import Contribution, Kind, Part, Sum, TensorSpec
from staddle.algorithms.exchange.plain import PLAIN
from staddle.coordinator.blind.secure_sum import SecureSum
from staddle.coordinator.blind.secure_sum_shell import SumSetting
from staddle.coordinator.blind.unmask import NOTHING_KEPT, Keeping, OpenedSums, open_sum
from staddle.coordinator.rounds.machine import JobState
from staddle.coordinator.storage.database import Database
from staddle.coordinator.storage.replay_log import dumped, loaded
from staddle.coordinator.storage.store import JobStore, summed_words
from staddle.errors import LocalError, RefusedError
from staddle.proto import secure_pb2 as pb
from staddle.proto.convert.secagg_received import (
    SignedSpec,
    secagg_delivery_from_wire,
    secagg_delivery_to_wire,
)
from staddle.proto.convert.secagg_sent import Over, SecaggUpload, secagg_upload_to_wire
from staddle.security.blind.sum import Bounds, Quantised, folded, given, group
from staddle.security.faults import Code
from staddle.security.secagg import coordinator_events, masked_sum
from staddle.security.secagg import silo as machine
from staddle.security.secagg import silo_events as s
from staddle.security.secagg.dealing import seed_commitment
from staddle.security.secagg.evidence import proven
from staddle.security.secagg.masked_sum import masked_chunks, upload_bytes
from staddle.security.secagg.memory import Memory
from staddle.security.secagg.messages import Survival
from staddle.security.secagg.spec import Terms, specify

BOUNDS = Bounds(3, "private", 1, 100)
PARTS = (
    Part("model", Kind.WHOLE_MODEL, Sum("mean"),
        (TensorSpec("w", "float32", (4, 5)), TensorSpec("b", "float32", (5,)))),
    Part("rows", Kind.HEADER_ROWS, Sum("ratio"), (TensorSpec("r", "float64", (3, 2)),)),
    Part("metrics", Kind.METRIC, Sum("total"), (TensorSpec("tested", "int64", ()),)),
)  # fmt: skip
FRAME = frame(groups=tuple(group(part, BOUNDS) for part in PARTS))
TERMS = Terms()


@functools.cache
def contribution(silo):
    """What one silo gives, by part; nobody changes it."""
    rng = torch.Generator().manual_seed(int(silo[-2:]))
    weights = {
        "model": float(3 + int(silo[-2:])),
        "rows": torch.randint(0, 50, (3,), generator=rng).double(),
    }
    made = {}
    for part in PARTS:
        tensors = {spec.name: torch.rand(spec.shape, generator=rng) for spec in part.tensors}
        tensors = {
            spec.name: (tensors[spec.name] * 5).to(getattr(torch, spec.dtype))
            for spec in part.tensors
        }
        made[part.name] = PLAIN.contribute(part, Contribution(tensors, weights.get(part.name)))
    return made


class KilledError(BaseException):
    """The coordinator's process died."""


class World:
    """A Summing on a real database and real files, and silos with the pure machine; nothing waits.

    Silos ask for their next message one after another, in a drawn order. ``silent``: who says
    nothing any more. ``hear(silo, effect)`` may give another effect in the place of one that a silo
    has, or None.
    """

    def __init__(self, folder, n=4, seed=0):
        self.folder, self.silos, self.random = folder, names(n), random.Random(seed)
        self.database = Database(folder / "coordinator.sqlite")
        with self.database.transaction():
            self.database.add_job(b"{}", JobState("j1", self.silos, 5, 3, blind=True, round=3), {})
        self.store = JobStore(folder / "job", lambda _: (), {})
        self.setting = SumSetting(
            "j1", b"\xbb" * 32, 3, self.silos, signers(self.silos), TERMS, signer("coordinator")
        )
        self.hear = lambda _, effect: effect
        self.silent, self.memories = set(), {}
        self.draws = {silo: Drawn(f"{seed}/{silo}") for silo in self.silos}
        self.states, self.had, self.spec_of = {}, dict.fromkeys(self.silos, 0), {}
        self.refusals, self.lost, self.rows, self.dies_at = [], {}, 0, ()
        self.keep_words = NOTHING_KEPT
        self.start()

    def start(self):
        """The coordinator's process begins with nothing but the database."""
        self.watches, self.opens, self.gone, self.ends, self.wakes = [], [], {}, [], 0
        self.summing = SecureSum(self.setting, self, self.kept())
        self.summing.resume()
        self.follower, self.followed = self.replayed(), len(self.kept())

    # What the Summing asks for.

    def keep(self, attempt, entry, also, proofs=()):
        row = dumped(attempt, entry)
        assert loaded(row) == entry
        with self.database.transaction():
            self.database.add_secure("j1", 3, row)
            for proof in proofs:
                self.database.add_misdealing("j1", proof)
            also()
        self.rows += 1
        if self.rows in self.dies_at:
            raise KilledError

    def wake(self):
        self.wakes += 1

    def watch(self, attempt, stage):
        self.watches.append((attempt, stage))

    def discard(self, silo):
        self.store.discard(3, silo)

    def open(self, attempt, spec, opening):
        self.opens.append((attempt, spec, opening))

    def dropped(self, silo, code):
        self.gone[silo] = self.lost[silo] = code  # since this process began, and ever

    def summed(self, members):
        self.ends.append(("summed", members))

    def failed(self, attempt, why, final, spoiled, signed):
        self.ends.append(("failed", attempt, why, final))

    # What happens.

    def begin(self, attempt=0, silos=None):
        spec = specify(FRAME, silos or self.silos, attempt)
        self.surviving(lambda: self.summing.attempt == attempt or self.summing.begin(spec))
        return self

    def all_back(self):
        """All silos say again what they have to say."""
        self.hear, self.silent = (lambda _, effect: effect), set()

    def again(self, attempt, silos=None, guilty=()):
        """The next attempt; who is guilty drops out of it first, as the job has noted."""
        self.ends.clear()
        self.begin(attempt, silos)
        for silo in guilty:
            self.summing.drop(silo, "MISDEALT")
        return self.run()

    def run(self):
        """Until nobody has anything more to say; the sum is opened when it can be."""
        while True:
            self.follow()
            waiting = [silo for silo in self.others(*self.silent) if self.next(silo) is not None]
            if waiting:
                self.step(self.random.choice(waiting))
            elif self.opens:
                self.open_now()
            else:
                assert lists(self.replayed()) == lists(self.summing)
                return self

    def others(self, *out):
        return tuple(silo for silo in self.silos if silo not in out)

    def next(self, silo):
        return self.summing.next_message(silo, self.had[silo])

    def step(self, silo):
        """A silo takes its next message in, and says what follows from it."""
        told = secagg_delivery_from_wire(
            pb.SecureDelivery.FromString(
                secagg_delivery_to_wire(self.next(silo)).SerializeToString()
            )
        )
        self.had[silo] += 1
        match told.body:
            case SignedSpec(document, signature, notes, proofs):
                excused = proven(proofs, FRAME.federation, FRAME.job_digest, self.setting.signers)
                terms = dataclasses.replace(self.setting.terms, excused=excused)
                party = machine.Participant(
                    silo, self.setting.signers, terms, signer(silo), self.draws[silo]
                )
                memory = self.memories.get(silo, Memory())
                evidence = next((each for each in proofs if each.is_of(memory.signed_ctx)), None)
                state, effects = machine.begin(
                    party, FRAME, document, signature, memory, notes, evidence
                )
                self.spec_of[silo] = told.attempt
            case Over(code):
                state, effects = machine.advance(self.states[silo], s.AttemptStopped(code))
                effects = [effect for effect in effects if not isinstance(effect, s.LeaveAttempt)]
            case body:
                state, effects = machine.advance(self.states[silo], body)
        self.states[silo] = state
        self.do(silo, effects)

    def do(self, silo, effects):
        for effect in effects:
            if silo in self.silent or (effect := self.hear(silo, effect)) is None:
                return
            match effect:
                case s.Remember(memory):
                    self.memories[silo] = memory
                case s.UploadWords(terms):
                    self.upload(silo, terms)
                case s.Finish(sha256):
                    assert sha256 == hashlib.sha256(self.store.sum_file(3).read_bytes()).digest()
                case s.LeaveAttempt(code):
                    self.say(silo, Over(code))
                case _:
                    self.say(silo, effect)

    def say(self, silo, body):
        message = wired(self.spec_of[silo], body).SerializeToString()
        try:
            self.surviving(lambda: self.summing.accept(silo, pb.SecureUpload.FromString(message)))
        except RefusedError as error:
            self.refusals.append(
                error.why if (error.peer, error.code) == (silo, "SECURE") else f"another: {error}"
            )

    def upload(self, silo, terms):
        spec, ctx = self.summing.spec, self.summing.ctx
        values = [
            given(part, own, contribution(silo)[part.name])
            for part, own in zip(PARTS, spec.groups, strict=True)
        ]
        data = b"".join(words.tobytes() for words in masked_chunks(spec, silo, values, terms))
        if self.summing.stage == "ended":  # a dealer was named meanwhile
            self.states[silo], _ = machine.advance(self.states[silo], s.AttemptStopped("refused"))
            return
        self.summing.check_upload(silo, ctx)
        self.store.masked(3, silo).write_bytes(data)
        self.surviving(
            lambda: (
                self.summing.has_words(silo)
                or self.summing.spooled(silo, len(data), hashlib.sha256(data).digest())
            )
        )
        with pytest.raises(RefusedError, match="does not await"):
            self.summing.check_upload(silo, ctx)
        self.states[silo], effects = machine.advance(
            self.states[silo], s.Streamed(len(data), hashlib.sha256(data).digest())
        )
        self.do(silo, effects)

    def open_now(self):
        attempt, spec, opening = self.opens.pop(0)
        try:
            opening = dataclasses.replace(opening, tags=bytes(8 * len(spec.groups)))
            sha256 = open_sum(
                self.store, PARTS, spec, opening, self.summing.digests, self.keep_words
            )
            self.surviving(lambda: self.opens or self.ends or self.summing.opened(attempt, sha256))
        except (RefusedError, LocalError) as error:
            self.summing.unopened(attempt, str(error))

    def surviving(self, call):
        """Whoever calls a coordinator that dies calls again once it is back."""
        while True:
            try:
                return call()
            except KilledError:
                self.start()

    def kept(self):
        return list(self.database.secure_rows("j1", 3))

    def replayed(self):
        """What another process would make of what is in the database."""
        # no shell: nothing is asked of it
        return SecureSum(self.setting, None, self.kept())

    def follow(self):
        """After each step, what is in the database makes the lists that silos are told.

        One replay takes the new rows, as a fresh one would in the end: from the first on each time,
        they were most of what these tests did.
        """
        rows = self.kept()
        self.follower._live = False
        for row in rows[self.followed :]:
            self.follower._replay(row.attempt, loaded(row))
        self.followed = len(rows)
        assert lists(self.follower) == lists(self.summing)

    def late(self):
        """Time is up for what is awaited now."""
        self.summing.deadline(*self.watches[-1])
        return self.run()

    def check_failed(self, attempt, *, final=False):
        """The last attempt failed, and no other may follow if this is the final one."""
        assert (self.ends[-1][:2], self.ends[-1][3]) == (("failed", attempt), final)

    def misdealers(self):
        return [proof.dealer for proof in self.database.misdealings("j1")]

    def check_sum(self, members):
        """The open sum is, to the bit, what the same members give without masks."""
        assert self.ends[-1] == ("summed", members)
        opened, plain = OpenedSums(self.store, lambda: 3, BOUNDS), Quantised(BOUNDS)
        for part in PARTS:
            read = lambda silo, name, part=part: contribution(silo)[part.name][name]
            found = opened.collect(part, members[::-1], read)
            wanted = quantised(self.silos, part, members, read, plain)
            assert found.keys() == wanted.keys()
            for name in wanted:
                assert found[name].dtype == wanted[name].dtype
                assert torch.equal(found[name], wanted[name]), (part.name, name)


def wired(attempt, body):
    return secagg_upload_to_wire(SecaggUpload(b"session", attempt, body))


def lists(summing):
    """All that each silo is told."""
    found = {}
    for silo in summing._setting.silos:
        had = iter(range(1000))
        found[silo] = list(
            iter(lambda silo=silo, had=had: summing.next_message(silo, next(had)), None)
        )
    return found


def quantised(silos, part, members, read, plain):
    """As Quantised, over some of a cohort: the others give nothing, with the cohort's scale."""
    if members == silos:
        return plain.collect(part, members, read)
    spec = specify(frame(groups=(group(part, BOUNDS),)), silos, 0)
    accumulator = masked_sum.Accumulator(spec)
    for silo in members:
        values = [given(part, spec.groups[0], {e.name: read(silo, e.name) for e in part.wire})]
        accumulator.add(words.tobytes() for words in masked_chunks(spec, silo, values, ()))
    return folded(part, spec.groups[0], accumulator.open((), members)[0])


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    yield made
    made.database.close()


def test_each_effect_is_in_a_table_or_refuses(world):
    summing = world.summing
    acted_on = {*summing._replayed, *summing._done_once}
    assert set(get_args(coordinator_events.Effect)) == acted_on | {coordinator_events.Refuse}


@pytest.mark.parametrize("seed", range(3))
def test_an_honest_round_is_the_quantised_sum_to_the_bit(tmp_path, seed):
    world = World(tmp_path, n=5, seed=seed).begin().run()
    world.check_sum(world.silos)
    assert (world.refusals, world.gone) == ([], {})
    assert [world.states[silo].stage for silo in world.silos] == ["done"] * 5
    stages = ["keys", "shares", "masked", "survivors", "reveal"]
    assert [stage for _, stage in world.watches] == stages


def test_parts_whose_words_are_kept_are_folded_from_them(world):
    kept = PARTS[0].name
    world.keep_words = Keeping((kept,), bytes(64))
    world.begin().run()
    with safe_open(world.store.sum_file(3), framework="pt") as file:
        assert {name.partition("/")[0] for name in file.keys()} == {part.name for part in PARTS[1:]}  # noqa: SIM118
    world.check_sum(world.silos)
    path = world.store.path(summed_words(3, kept))
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    with refused(rf"{kept}\.words: its words are not those of the open sum"):
        OpenedSums(world.store, lambda: 3, BOUNDS).collect(PARTS[0], world.silos, None)


def stops_at(kind, *silos):
    """These silos are silent from this effect on."""

    def hear(world):
        def heard(silo, effect):
            if silo in silos and isinstance(effect, kind):
                world.silent.add(silo)
                return None
            return effect

        return heard

    return hear


def without(kind):
    """Nobody has this effect."""
    return lambda _, effect: None if isinstance(effect, kind) else effect


@pytest.mark.parametrize(
    ("kind", "members", "watched"),
    [
        (s.SendKeys, 3, "keys"), (s.SendShares, 3, "shares"), (s.UploadWords, 3, "masked"),
        (s.SendHeader, 3, "masked"), (s.SendSurvival, 4, None), (s.SendReveal, 4, None),
    ],
)  # fmt: skip
def test_a_silo_that_falls_silent_does_not_stop_the_sum(world, kind, members, watched):
    last = world.silos[-1]
    world.hear = stops_at(kind, last)(world)
    world.begin().run()
    if watched:
        assert (world.summing.stage, world.ends) == (watched, [])
        world.late()
        assert world.gone == {last: "deadline"}
    world.check_sum(world.silos[:members])


# What is not as it should be.
def test_a_message_that_does_not_hold_drops_its_sender_out_and_nobody_else(world):
    bad = world.silos[1]

    def heard(silo, effect):
        if silo == bad and isinstance(effect, s.SendShares):
            return s.SendShares(effect.dealing, effect.portions[1:])
        return effect

    world.hear = heard
    world.begin().run()
    assert [why.partition(":")[0] for why in world.refusals] == ["SHARES"]
    assert world.gone == {bad: "SHARES"}
    world.check_sum(world.others(bad))


def test_what_is_malformed_drops_its_sender_out(world):
    world.begin()
    silo = world.silos[0]
    world.spec_of[silo] = world.next(silo).attempt
    message = wired(world.spec_of[silo], Over(Code.STOPPED))
    message.keys.CopyFrom(pb.UploadedKeys(bundle=pb.KeyBundle(silo=silo, seal=b"short")))
    with pytest.raises(RefusedError, match="KEYS"):
        world.summing.accept(silo, message)
    assert world.gone == {silo: "KEYS"}


def test_what_names_no_attempt_of_this_sum_changes_nothing(world):
    world.begin()
    silo = world.silos[0]
    real = world.next(silo).attempt
    for changes, why in [
        ({"ctx": b"\0" * 32}, "no attempt of round 3"),
        ({"job": "j2"}, "another job"),
        ({"round": 4}, "another job"),
        ({"attempt": 1}, "another job"),
        ({"job_digest": b"\0" * 32}, "another job"),
    ]:
        message = wired(dataclasses.replace(real, **changes), Over(Code.STOPPED))
        with pytest.raises(RefusedError, match=why) as caught:
            world.summing.accept(silo, message)
        assert caught.value.code == "SECURE"
    assert (world.rows, world.gone) == (1, {})


def test_a_message_that_was_taken_may_come_again_and_another_may_not(world):
    again = {}

    def heard(silo, effect):
        if type(effect).__name__.startswith("Send"):
            again[silo] = effect
            world.say(silo, effect)
            rows = world.rows
            world.say(silo, effect)
            assert (world.rows, world.refusals) == (rows, [])
        return effect

    world.hear = heard
    world.begin().run()
    world.check_sum(world.silos)
    assert len(again) == 4


def test_who_says_that_it_had_more_than_it_was_told_is_refused(world):
    world.begin()
    assert world.summing.next_message(world.silos[0], 1) is None
    with pytest.raises(RefusedError, match="had 2 messages of round 3, and was told 1"):
        world.summing.next_message(world.silos[0], 2)


def test_masked_words_are_awaited_from_members_of_the_attempt_that_goes_on(world):
    late, *others = world.silos
    world.hear = without(s.UploadWords)
    world.begin()
    for silo in world.silos:
        assert not world.summing.awaits(silo, world.summing.ctx)  # keys first
    world.silent = {late}
    world.run()
    world.late()
    world.silent = set()
    world.run()
    ctx = world.summing.ctx
    assert [world.summing.awaits(silo, ctx) for silo in world.silos] == [False, True, True, True]
    assert not world.summing.awaits(others[0], b"\1" * 32)
    world.summing.drop(others[0], "lost")
    assert [world.summing.awaits(silo, ctx) for silo in others] == [False, True, True]


def test_an_attempt_that_lost_too_many_waits_for_nobody(tmp_path):
    """Before survivors sign, for silos that began anew; with enough left it goes on without."""
    for number, stage in enumerate(("SendKeys", "SendShares", "UploadWords")):
        (tmp_path / stage).mkdir()
        world = World(tmp_path / stage, n=7)
        first, second, third, *_ = world.silos
        world.hear = stops_at(getattr(s, stage), *world.silos[:4])(world)
        world.begin().run()
        assert world.summing.stage == ("keys", "shares", "masked")[number]
        for silo in (first, second):
            world.summing.drop(silo, "STOPPED")
            assert world.summing.goes_on  # five of seven are enough
        world.summing.drop(third, "STOPPED")
        assert world.summing.stage == "ended"
        assert world.replayed().stage == "ended"
        assert world.gone == dict.fromkeys((first, second, third), "STOPPED")
        world.database.close()


# Another attempt.
def test_another_attempt_follows_once_enough_gave_the_first_up(world):
    dead = world.silos[2:]
    world.hear = stops_at(s.UploadWords, *dead)(world)
    world.begin().run()
    # two of four are left: the attempt ends, and what they sent can not be opened any more
    world.late()
    assert (world.gone, world.summing.stage) == (dict.fromkeys(dead, "deadline"), "ended")
    assert not list(world.store.masked(3, "x").parent.glob("*.masked"))
    # of the three notes that it takes there are two
    assert (world.ends, world.watches[-1]) == ([], (0, "notes"))
    world.hear, world.silent = (lambda _, effect: effect), {dead[1]}
    world.run()  # one of them comes back
    (end,) = world.ends
    world.check_failed(0)
    assert end[2].startswith("TOO_FEW: stage 'masked' closed with 2 silos")
    assert end[2].endswith(f"({dead[0]}: deadline, {dead[1]}: deadline)")
    world.silent = set()
    world.again(1)
    world.check_sum(world.silos)
    told = [each.body for each in lists(world.summing)[dead[1]]]
    (asked,) = [body for body in told if isinstance(body, SignedSpec) and body.notes]
    assert [note.silo for note in asked.notes] == list(world.silos[:3])


def test_the_third_attempt_brings_the_notes_of_both_before_it(world):
    """A silo that took part in either signs survivors only once it knows that it is over."""
    dead = world.silos[2:]
    for attempt in (0, 1):
        world.hear = stops_at(s.UploadWords, *dead)(world)
        world.begin(attempt).run()
        world.late()
        world.all_back()
        world.run()
        assert [end[:2] for end in world.ends] == [("failed", attempt)]
        world.ends = []
    contexts = [state.ctx for state in world.summing._states]
    world.begin(2).run()
    world.check_sum(world.silos)
    for told in lists(world.summing).values():
        brought = [each.body.notes for each in told if isinstance(each.body, SignedSpec)]
        assert [len(notes) for notes in brought] == [0, 4, 8]
        for ctx in contexts:
            assert sum(note.holds(ctx, world.setting.signers) for note in brought[-1]) == 4


def test_an_attempt_that_ends_for_privacy_budgets_says_so(world):
    world.hear = stops_at(s.SendKeys, *world.silos[2:])(world)
    world.begin().run()
    for silo in world.silos[2:]:
        world.summing.drop(silo, "BUDGET")
    (end,) = world.ends
    spent = (f"{silo}: BUDGET, its privacy budget is spent" for silo in world.silos[2:])
    assert end[2].endswith(", ".join(spent) + ")")


def test_an_attempt_before_any_mask_is_followed_at_once(world):
    world.hear = stops_at(s.SendKeys, *world.silos[2:])(world)
    world.begin().run()
    world.late()
    assert [end[:2] for end in world.ends] == [("failed", 0)]
    world.all_back()
    world.again(1)
    world.check_sum(world.silos)


def test_notes_that_do_not_come_are_waited_for_only_so_long(world):
    world.hear = stops_at(s.UploadWords, *world.silos[1:])(world)
    world.begin().run()
    world.late()
    assert (world.ends, world.watches[-1]) == ([], (0, "notes"))
    world.summing.deadline(0, "masked")  # stale
    assert world.ends == []
    world.late()
    assert [end[:2] for end in world.ends] == [("failed", 0)]
    world.summing.deadline(0, "notes")
    assert len(world.ends) == 1


def test_a_note_of_an_earlier_attempt_is_taken_late_and_nothing_else_is(world):
    slow, said = world.silos[3], []
    stops = stops_at(s.UploadWords, *world.silos[2:])(world)

    def hear(silo, effect):
        said.extend([effect] if silo == slow else [])
        return stops(silo, effect)

    world.hear = hear
    world.begin().run()
    world.late()
    world.late()
    world.begin(1)
    note = machine.make_abandon(world.spec_of[slow].ctx, slow, signer(slow))
    before = lists(world.summing)
    world.say(slow, s.SendAbandon(note))
    assert world.refusals == []
    world.say(slow, s.SendAbandon(dataclasses.replace(note, signature=b"\0" * 64)))
    world.say(slow, next(effect for effect in said if isinstance(effect, s.SendKeys)))
    # its keys were taken before: no harm
    assert [why.partition(":")[0] for why in world.refusals] == ["ABANDON"]
    world.say(slow, s.SendSurvival(Survival(slow, b"\0" * 64)))
    assert "ORDER: sends a message of attempt 0, which is over" in world.refusals[-1]
    assert lists(world.summing) == before == lists(world.replayed())


def test_after_survivors_have_signed_there_is_no_other_attempt(world):
    world.begin()

    def heard(silo, effect):
        if isinstance(effect, s.SendReveal):
            path = world.store.masked(3, world.silos[0])
            path.write_bytes(b"\0" * upload_bytes(world.summing.spec))  # the disk changed them
        return effect

    world.hear = heard
    world.run()
    (end,) = world.ends
    world.check_failed(0, final=True)
    assert ".masked: is not what its silo uploaded: the disk changed it" in end[2]
    assert not world.store.sum_file(3).exists()


@pytest.mark.parametrize(
    ("kind", "stage", "ends"),
    [(s.SendReveal, "reveal", []), (s.SendShares, "ended", [("failed", 0)])],
    ids=["after survivors signed", "in the first stages"],
)
def test_a_halt_drops_all_before_survivors_sign_and_nobody_after_that(world, kind, stage, ends):
    world.hear = without(kind)
    world.begin().run()
    world.summing.halt()
    assert (world.summing.stage, [end[:2] for end in world.ends]) == (stage, ends)
    assert bool(world.gone) == bool(ends)


# A coordinator that dies leaves nothing but the database and files. Each run dies after every
# sixth row: the six runs together die after each row, and the next process lasts for six rows.
DEATHS = [pytest.param(first, id=f"every sixth row from {first}") for first in range(1, 7)]


@pytest.mark.parametrize("first", DEATHS)
def test_a_coordinator_that_dies_after_any_row_goes_on_to_the_same_sum(world, first):
    world.dies_at = range(first, 26, 6)
    world.begin().run()
    assert world.rows >= 25, "there are fewer rows than this test thinks: lower its range"
    world.check_sum(world.silos)
    assert (world.refusals, world.lost) == ([], {})


def test_a_sum_that_was_not_opened_is_opened_by_the_next_process(world):
    world.begin()
    opens = world.open_now
    world.open_now = world.opens.clear  # it died in it
    world.run()
    assert (world.summing.stage, world.ends) == ("opening", [])
    world.start()
    world.open_now = opens
    world.run()
    world.check_sum(world.silos)
    world.start()  # and once more, before the job has heard of it
    assert world.ends == [("summed", world.silos)]


# Dealers at fault.
def rubbish(world, dealer, victim):
    """What the dealer seals to the victim does not open."""

    def hear(silo, effect):
        if silo != dealer or not isinstance(effect, s.SendShares):
            return effect
        sealed = next(p.sealed for p in effect.portions if p.holder == victim)
        portions = with_portion(effect.portions, victim, sealed=bytes(len(sealed)))
        return resigned(world, dealer, effect.dealing, portions)

    return hear


def resigned(world, dealer, dealing, portions):
    signed = signed_dealing(dealing, world.states[dealer].ctx, portions)
    world.states[dealer] = dataclasses.replace(world.states[dealer], dealing=signed)
    return s.SendShares(signed, portions)


def unjoined(world, dealer, _victim=None):
    """The dealer's shares are of another secret than it committed to."""

    def hear(silo, effect):
        if silo != dealer or not isinstance(effect, s.SendShares):
            return effect
        seed = seed_commitment(world.states[dealer].ctx, dealer, b"w" * 32)
        dealing = dataclasses.replace(effect.dealing, seed=seed)
        return resigned(world, dealer, dealing, effect.portions)

    return hear


@pytest.mark.parametrize("n", [4, 7])
@pytest.mark.parametrize("fault", [rubbish, unjoined])
def test_after_a_dealer_at_fault_the_next_attempt_is_summed_without_it(tmp_path, n, fault):
    world = World(tmp_path, n=n)
    dealer = world.silos[1]
    world.hear = fault(world, dealer, world.silos[2])
    world.begin().run()
    (end,) = world.ends
    world.check_failed(0)
    assert world.gone == {dealer: "MISDEALT"}
    assert end[2].endswith(f"({dealer}: MISDEALT, it dealt shares that do not open or do not join)")
    world.again(1, guilty=[dealer] if fault is rubbish else [])
    world.check_sum(world.others(dealer))
    assert all("ORDER" in why for why in world.refusals)  # the dealer, who is not awaited any more


def test_two_that_were_sealed_rubbish_complain_and_neither_is_refused(tmp_path):
    world = World(tmp_path, n=7)
    dealer, *victims = world.silos[:4]
    first = [rubbish(world, dealer, victim) for victim in victims]

    def hear(silo, effect):
        for spoil in first:
            effect = spoil(silo, effect)
        return effect

    world.hear = hear
    world.begin().run()
    assert (world.refusals, world.gone) == ([], {dealer: "MISDEALT"})


def test_a_sum_that_is_repeated_needs_all_who_signed_and_waits_for_them(tmp_path):
    world = World(tmp_path, n=7)
    dealer, lost = world.silos[1], world.silos[2]
    world.hear = unjoined(world, dealer)
    world.begin().run()
    world.hear = stops_at(s.UploadWords, lost)(world)
    world.again(1)
    world.late()
    assert world.summing.stage == "ended"
    world.check_failed(1)
    world.all_back()
    world.again(2)
    world.check_sum(world.others(dealer))


@pytest.mark.parametrize("n", [7, 5], ids=["enough are left", "too few are left"])
def test_a_sum_that_is_repeated_goes_on_without_another_dealer_at_fault(tmp_path, n):
    world = World(tmp_path, n=n)
    dealer, other, victim = world.silos[1:4]
    world.hear = unjoined(world, dealer)
    world.begin().run()
    world.hear = rubbish(world, other, victim)
    world.again(1)
    assert world.gone == {dealer: "MISDEALT", other: "MISDEALT"}
    world.check_failed(1, final=n == 5)
    if n == 7:
        world.all_back()
        world.again(2)
        world.check_sum((world.silos[0], *world.silos[3:]))


def test_one_dealer_after_another_whose_shares_do_not_join_goes(tmp_path):
    world = World(tmp_path, n=7)
    for number, dealer in enumerate(world.silos[:2]):
        world.hear = unjoined(world, dealer)
        world.again(number)
        world.check_failed(number)
    world.all_back()
    world.again(2)
    world.check_sum(world.silos[2:])


def test_where_all_are_needed_one_dealer_at_fault_ends_it(tmp_path):
    """Four silos are the fewest that a sum withstands one colluder with."""
    world = World(tmp_path)
    batched(world, Terms, (tuple(world.silos),))
    world.hear = rubbish(world, world.silos[1], world.silos[2])
    world.begin().run()
    world.check_failed(0, final=True)


def test_one_batch_goes_on_without_those_who_sealed_rubbish_while_enough_are_left(tmp_path):
    """Six silos of one batch, of which two are at fault, one after the other: four sum."""
    world = World(tmp_path, n=6)
    batched(world, Terms, (tuple(world.silos),))
    left = world.silos
    for number, dealer in enumerate(world.silos[:2]):
        world.hear = rubbish(world, dealer, left[-1])
        world.begin(number, left).run()
        world.check_failed(number)
        left = tuple(silo for silo in left if silo != dealer)
        assert world.misdealers() == list(world.silos[: number + 1])
    world.all_back()
    world.again(2, left)
    world.check_sum(left)


class Once(Terms):
    """Of a round that is summed once."""

    def regroups(self, spec):
        return False


@pytest.mark.parametrize("kind", [Terms, Once])
def test_one_batch_is_summed_again_without_a_dealer_whose_shares_do_not_join(tmp_path, kind):
    """Over the very survivors where it is summed once, else over the batch without the dealer."""
    world = World(tmp_path, n=5)
    batched(world, kind, (tuple(world.silos),))
    dealer, bound = world.silos[1], kind is Once
    left = world.others(dealer)
    world.hear = unjoined(world, dealer)
    world.begin().run()
    world.check_failed(0)
    assert world.summing.repeats == (world.silos if bound else ())
    world.again(1, None if bound else left)
    world.check_sum(left)


def test_evidence_of_earlier_rounds_is_told_and_holds(tmp_path):
    """What this round's sum lacks, an earlier one showed."""
    before = World(tmp_path, n=5)
    dealer = before.silos[1]
    before.hear = rubbish(before, dealer, before.silos[2])
    before.begin().run()
    (folder := tmp_path / "later").mkdir()
    world = World(folder, n=5, seed=1)
    left = world.others(dealer)
    batched(world, Terms, (tuple(world.silos),), before.database.misdealings("j1"))
    world.begin(0, left).run()
    world.check_sum(left)
    (folder := tmp_path / "without").mkdir()
    world = World(folder, n=5, seed=1)
    batched(world, Terms, (tuple(world.silos),))
    with pytest.raises(RefusedError, match=f"lacks {dealer}"):
        world.begin(0, left)


@pytest.mark.parametrize("kind", [Terms, Once])
@pytest.mark.parametrize(("fault", "whole"), [(rubbish, True), (rubbish, False), (unjoined, False)])
def test_a_round_of_batches_goes_on_without_a_dealer_at_fault(tmp_path, kind, fault, whole):
    """Also without its whole batch; a signed sum that is summed once keeps its survivors."""
    world = World(tmp_path, n=8)
    first, other = world.silos[:4], world.silos[4:]
    batched(world, kind, (first, other))
    world.hear = fault(world, first[1], first[2])
    world.begin().run()
    world.check_failed(0)
    assert world.gone == {first[1]: "MISDEALT"}
    assert world.summing.repeats == (world.silos if (kind, fault) == (Once, unjoined) else ())
    left = other if whole else world.others(first[1])
    world.all_back()
    world.again(1, world.summing.repeats or left)
    world.check_sum(left)


def test_silos_of_a_sum_of_no_values_are_named_where_they_may_sign_another(tmp_path, monkeypatch):
    """A silo that signed survivors of a round that is summed once signs no others."""
    for kind in (Terms, Once):
        (folder := tmp_path / kind.__name__).mkdir()
        world = World(folder, n=8)
        batched(world, kind, (world.silos[:4], world.silos[4:]))
        named = []
        monkeypatch.setattr(world, "failed", lambda *end, named=named: named.append(end[2:4]))
        world.open_now = lambda world=world: world.summing.unopened(
            world.opens.pop()[0], "beyond", spoiled=True
        )
        world.begin().run()
        assert named == [(False, world.silos) if kind is Terms else (True, ())]


def batched(world, kind, batches, proofs=()):
    terms = kind(batches=batches)
    world.setting = dataclasses.replace(world.setting, terms=terms, together=batches, proofs=proofs)
    world.start()


@pytest.mark.parametrize("first", DEATHS)
def test_a_coordinator_that_dies_while_a_dealer_is_found_out_goes_on(world, first):
    dealer = world.silos[1]
    world.hear = unjoined(world, dealer)
    world.dies_at = range(13 + first, 40, 6)
    world.begin().run()
    assert world.ends[-1][:2] == ("failed", 0)
    assert world.gone == world.lost == {dealer: "MISDEALT"}
    assert world.misdealers() == [dealer]
    world.again(1)
    assert world.rows >= 39, "there are fewer rows than this test thinks: lower its range"
    world.check_sum(world.others(dealer))


@pytest.mark.parametrize("code", [Code.MISDEALT, Code.COMPLAINT])
def test_what_a_silo_says_of_itself_is_no_evidence(world, code):
    world.begin()
    silo = world.silos[0]
    world.spec_of[silo] = world.next(silo).attempt
    world.say(silo, Over(code))
    assert world.gone == {silo: "ORDER"}
    other = world.silos[1]
    message = wired(world.next(other).attempt, Over(Code.STOPPED))
    message.complaint.CopyFrom(pb.Complaint(silo=other, dealer=silo, key=b"short"))
    with pytest.raises(RefusedError, match="COMPLAINT"):
        world.summing.accept(other, message)
    assert world.gone == {silo: "ORDER", other: "ORDER"}
