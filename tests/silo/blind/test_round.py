"""A blind round at a silo, with the coordinator's SecureSum and a line that fails on demand."""

import asyncio
import hashlib
import inspect
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.secure_sums import frame, names, signer, signers

from staddle.algorithms.exchange.parts import Contribution, Item, Kind, Part, Sum, TensorSpec
from staddle.algorithms.exchange.plain import PLAIN
from staddle.coordinator.blind.secure_sum import SecureSum, SumSetting
from staddle.errors import LocalError, RefusedError, UnwritableError
from staddle.proto import secure_pb2 as pb
from staddle.proto.convert.secagg_received import secagg_delivery_from_wire, secagg_delivery_to_wire
from staddle.proto.convert.secagg_sent import Over, SecaggUpload, secagg_upload_to_wire
from staddle.security.blind.sum import Bounds, Quantised, folded, group
from staddle.security.faults import Code
from staddle.security.secagg.masked_sum import Accumulator, chunks
from staddle.security.secagg.memory import Memory
from staddle.security.secagg.silo import Participant
from staddle.security.secagg.silo_events import SendAbandon, SendHeader, Streamed
from staddle.security.secagg.spec import Terms, specify
from staddle.silo.blind.round import BlindRound
from staddle.silo.egress.client import TurnedAwayError, UnreachableError
from staddle.silo.egress.messages import masked
from staddle.silo.egress.outcomes import DeniedError
from staddle.silo.parts.contributions import Contributions
from staddle.silo.parts.declared import Declared, RecordCount
from staddle.silo.parts.tensors import exactly

JOB = SimpleNamespace(name="j1", digest="bb" * 32)
BOUNDS = Bounds(3, "private", 1, 100)
PARTS = (
    Part("model", Kind.WHOLE_MODEL, Sum("mean"),
        (TensorSpec("w", "float32", (40, 5)), TensorSpec("b", "float32", (5,)))),
    Part("metrics", Kind.METRIC, Sum("total"), (TensorSpec("tested", "int64", ()),)),
)  # fmt: skip
ITEMS = tuple(Item(part.name, part.kind, spec) for part in PARTS for spec in part.wire)
DECLARED = Declared(
    "j1",
    JOB.digest,
    "fedavg",
    ((0, ITEMS), (9, ())),
    RecordCount(100, 50),
    BOUNDS,
    ((0, PARTS), (9, ())),
)
FRAME = frame(groups=tuple(group(part, BOUNDS) for part in PARTS), chunk_bytes=4096)
SILOS = names(4)
SECONDS = 30


def payload(silo):
    """What a silo gives, part by part."""
    rng = torch.Generator().manual_seed(int(silo[-2:]))
    values = {spec.name: torch.randn(spec.shape, generator=rng) for spec in PARTS[0].tensors}
    return {
        "model": PLAIN.contribute(PARTS[0], Contribution(values, 7.0 + int(silo[-2:]))),
        "metrics": PLAIN.contribute(
            PARTS[1], Contribution({"tested": torch.tensor(int(silo[-2:]) + 1)})
        ),
    }


class Hall:
    """The coordinator: a Summing whose shell keeps everything in memory."""

    def __init__(self):
        setting = SumSetting(
            "j1",
            bytes.fromhex(JOB.digest),
            FRAME.round,
            SILOS,
            signers(SILOS),
            Terms(),
            signer("coordinator"),
        )
        self.words, self.opened, self.ends = {}, {}, []
        self.changed = asyncio.Event()
        self.summing = SecureSum(setting, self)

    def begin(self, attempt=0):
        self.summing.begin(specify(FRAME, SILOS, attempt))

    def keep(self, attempt, entry, also, proofs=()):
        also()

    def wake(self):
        self.changed.set()
        self.changed = asyncio.Event()

    def watch(self, attempt, stage):
        pass

    def discard(self, silo):
        self.words.pop(silo, None)

    def open(self, attempt, spec, opening):
        accumulator = Accumulator(spec)
        for silo in opening.survivors:
            at, pieces = 0, []
            for chunk in chunks(spec):
                size = chunk.words * (spec.groups[chunk.group].ring // 8)
                pieces.append(self.words[silo][at : at + size])
                at += size
            accumulator.add(pieces)
        for part, own, opened in zip(
            PARTS, spec.groups, accumulator.open(opening.terms, opening.survivors), strict=True
        ):
            self.opened[part.name] = folded(part, own, opened)
        asyncio.get_running_loop().call_soon(
            self.summing.opened, attempt, hashlib.sha256(b"sum").digest()
        )

    def dropped(self, silo, code):
        self.ends.append(("dropped", silo, code))

    def summed(self, members):
        self.ends.append(("summed", members))

    def failed(self, attempt, why, final, spoiled, signed):
        self.ends.append(("failed", attempt, why))


class Notebook:
    """What a silo's ledger would have."""

    def __init__(self):
        self.ends, self.sums, self.whys = [], [], []

    async def ended(self, attempt, ended):
        self.ends.append((attempt.attempt, ended.code, ended.blame))
        self.whys.append(ended.why)

    async def summed(self, attempt, done):
        self.sums.append((attempt.attempt, done.survivors))


class Anybody:
    """Sums over any silos may be opened."""

    def __init__(self):
        self.signed, self.why = [], ""

    def objection(self, job, silos, proven):
        return self.why

    def proven(self, job, proofs):
        return frozenset(proof.dealer for proof in proofs)

    async def sign(self, job, attempt, survivors, proven):
        self.signed.append((attempt.attempt, tuple(survivors)))


class Door:
    """One silo's gate; call ``fails_at`` fails, before anything crosses or ``after``."""

    def __init__(self, hall, silo):
        self.hall, self.silo = hall, silo
        self.protocol = self
        self.sum_records = Notebook()
        self.signed_sets = Anybody()
        self.given, self.uploads, self.calls = [], [], 0
        self.fails_at, self.after = None, False
        self.refuses = lambda _: None

    def _lost(self, *, after):
        if after == self.after and self.calls == self.fails_at:
            raise UnreachableError("coordinator", "the line is dead")

    async def secure_next(self, job, round_, had):
        self.calls += 1
        self._lost(after=False)
        while (told := self.hall.summing.next_message(self.silo, had)) is None:
            await self.hall.changed.wait()
        self._lost(after=True)
        return secagg_delivery_from_wire(
            pb.SecureDelivery.FromString(secagg_delivery_to_wire(told).SerializeToString())
        )

    async def secure(self, attempt, body):
        self.calls += 1
        self._lost(after=False)
        if why := self.refuses(body):
            raise TurnedAwayError("coordinator", "SECURE", why)
        self.given.append((attempt, body))
        given = secagg_upload_to_wire(SecaggUpload(b"session", attempt, body))
        try:
            self.hall.summing.accept(
                self.silo, pb.SecureUpload.FromString(given.SerializeToString())
            )
        except RefusedError as error:
            raise TurnedAwayError("coordinator", error.code, error.why) from error
        self._lost(after=True)

    async def upload_masked(self, declared, round_, gives, masking):
        self.calls += 1
        self._lost(after=False)
        outgoing = masked(PARTS, ITEMS, exactly(ITEMS, gives.tensors), masking)
        data = b"".join(bytes(chunk.content) for chunk in outgoing.chunks())
        self.uploads.append((outgoing.context, data))
        self.hall.summing.check_upload(self.silo, outgoing.context)
        self.hall.words[self.silo] = data
        self.hall.summing.spooled(self.silo, len(data), hashlib.sha256(data).digest())
        self._lost(after=True)
        return Streamed(len(data), hashlib.sha256(data).digest())


class Kept:
    """A silo's memory; a disk that is full at times."""

    def __init__(self):
        self.memories, self.full = {}, False

    def load(self, instance):
        return self.memories.get(instance, Memory())

    def save(self, instance, memory):
        if self.full:
            raise UnwritableError("memory: no space left on device")
        self.memories[instance] = memory


async def until(holds):
    """Let the others go on until it holds."""
    for _ in range(1_000_000):
        if holds():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never held")


async def trained(silo):
    await asyncio.sleep(0)
    return Contributions(payload(silo))


class Silos:
    """All four at one hall."""

    def __init__(self, hall):
        self.hall = hall
        self.doors = {silo: Door(hall, silo) for silo in SILOS}
        self.kept = {silo: Kept() for silo in SILOS}
        self.rounds = {silo: self.enter(silo) for silo in SILOS}
        self.tasks = []

    def enter(self, silo, own=FRAME, training=None, before=None):
        """A silo's round, as a process that has just begun makes it."""
        participant = Participant(silo, signers(SILOS), Terms(), signer(silo), os.urandom)
        task = asyncio.create_task(training or trained(silo))
        return BlindRound(
            self.doors[silo], participant, own, self.kept[silo], JOB, DECLARED, task, before
        )

    async def enter_again(self, silo, **changes):
        await self.rounds[silo].close()
        self.rounds[silo] = self.enter(silo, **changes)

    async def run(self, silo):
        """Until its sum is open, through lost connections."""
        while True:
            try:
                await self.rounds[silo].run()
            except UnreachableError:
                if self.doors[silo].uploads and self.hall.summing.has_words(silo):
                    self.rounds[silo].accepted(self.doors[silo].uploads[-1][0])
            else:
                return

    def start(self, silos):
        begun = [asyncio.create_task(self.run(silo)) for silo in silos]
        self.tasks += begun
        return asyncio.gather(*begun)

    def start_but(self, odd):
        return self.start(silo for silo in SILOS if silo != odd)

    def gave(self, silo, kind=object):
        return [body for _, body in self.doors[silo].given if isinstance(body, kind)]

    def sent(self, silo):
        return [type(body).__name__ for body in self.gave(silo)]

    async def close(self):
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for each in self.rounds.values():
            await each.close()


def at_a_hall(scenario):
    """Run a scenario with a hall and its four silos; who still runs in the end is cancelled."""

    async def played(**values):
        hall = Hall()
        silos = Silos(hall)
        try:
            async with asyncio.timeout(SECONDS):
                await scenario(hall, silos, **values)
        finally:
            await silos.close()

    def test(**values):
        asyncio.run(played(**values))

    parameters = inspect.signature(scenario).parameters.values()
    test.__signature__ = inspect.Signature(list(parameters)[2:])
    test.__name__, test.__doc__ = scenario.__name__, scenario.__doc__
    return test


def check_sum(hall):
    exchanges = Quantised(BOUNDS)
    for part in PARTS:
        wanted = exchanges.collect(
            part, SILOS, lambda silo, name, part=part: payload(silo)[part.name][name]
        )
        for name, value in wanted.items():
            assert torch.equal(hall.opened[part.name][name], value), (part.name, name)


@at_a_hall
async def test_four_silos_and_a_coordinator_sum(hall, silos):
    hall.begin()
    await silos.start(SILOS)
    check_sum(hall)
    assert hall.ends == [("summed", SILOS)]
    for silo, gate in silos.doors.items():
        assert (gate.sum_records.sums, gate.sum_records.ends) == ([(0, SILOS)], [])
        assert gate.signed_sets.signed == [(0, SILOS)]
        assert silos.sent(silo)[:3] == ["SendKeys", "SendShares", "SendHeader"]
        assert silos.kept[silo].load(FRAME.instance()).signed_round == FRAME.round


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("call", range(1, 12))
@at_a_hall
async def test_a_connection_that_is_lost_at_any_call_changes_nothing(hall, silos, call, after):
    """Whether what was sent had arrived or not: each message is the same the second time."""
    gate = silos.doors[SILOS[1]]
    gate.fails_at, gate.after = call, after
    hall.begin()
    await silos.start(SILOS)
    check_sum(hall)
    assert hall.ends == [("summed", SILOS)]
    assert gate.calls >= call
    assert len({data for _, data in gate.uploads}) == 1  # one payload under one mask
    by_kind = {}
    for _, body in gate.given:
        assert by_kind.setdefault(type(body), body) == body


@at_a_hall
async def test_a_silo_that_begins_anew_is_a_dropout_and_takes_part_in_the_next_attempt(hall, silos):
    away = SILOS[2]
    silos.doors[away].fails_at = 4  # it has given its keys and its shares
    hall.begin()
    others = silos.start_but(away)
    with pytest.raises(UnreachableError):
        await silos.rounds[away].run()
    await silos.enter_again(away)  # nothing but its memory is left
    silos.start([away])
    await until(lambda: hall.ends)
    # It says that it cannot go on in the attempt, and three of four are enough without
    # Terms.whole.
    assert ("dropped", away, Code.STOPPED) in hall.ends
    assert silos.doors[away].sum_records.ends == [(0, Code.STOPPED, "")]
    await others
    assert hall.ends[-1] == ("summed", tuple(silo for silo in SILOS if silo != away))
    assert silos.doors[away].sum_records.sums == []


@at_a_hall
async def test_an_attempt_that_ends_is_abandoned_and_the_next_one_sums(hall, silos):
    for silo in SILOS[:2]:
        silos.doors[silo].refuses = lambda body: "no" if isinstance(body, SendHeader) else None
    hall.begin()
    running = silos.start(SILOS)
    await until(lambda: len(hall.words) == 4 and all(silos.gave(s, SendHeader) for s in SILOS[2:]))
    hall.summing.deadline(0, "masked")
    await until(lambda: ("failed", 0) in [end[:2] for end in hall.ends])
    for silo in SILOS:
        silos.doors[silo].refuses = lambda _: None
    hall.begin(1)
    await running
    check_sum(hall)
    assert all(len(silos.gave(silo, SendAbandon)) == 1 for silo in SILOS)
    first, second = silos.doors[SILOS[3]].uploads
    assert first[0] != second[0]  # another context
    assert first[1] != second[1]  # and other masks over the same values
    assert silos.doors[SILOS[3]].sum_records.sums == [(1, SILOS)]


@at_a_hall
async def test_a_specification_that_is_not_of_this_round_is_refused_and_recorded(hall, silos):
    odd = SILOS[0]
    await silos.enter_again(odd, own=replace(FRAME, model_digest="ee" * 32))
    hall.begin()
    silos.start([odd])
    others = silos.start_but(odd)
    await until(lambda: silos.doors[odd].given)
    assert silos.gave(odd) == [Over(Code.SPEC)]
    assert silos.doors[odd].sum_records.ends == [(0, Code.SPEC, "coordinator")]
    assert silos.kept[odd].memories == {}
    await others


@at_a_hall
async def test_survivors_that_this_silo_has_something_against_are_not_signed(hall, silos):
    """And no memory says that they were; the ledger has the sum in it before any does."""
    odd = SILOS[1]
    gate = silos.doors[odd]
    gate.signed_sets.why = "would tell what one silo alone has"
    hall.begin()
    others = silos.start_but(odd)
    silos.start([odd])
    await until(lambda: gate.sum_records.ends)
    # three of four open it: only what this silo signed is its own to know
    await others
    assert (gate.sum_records.ends, gate.signed_sets.signed) == ([(0, Code.POLICY, "")], [])
    assert silos.sent(odd) == ["SendKeys", "SendShares", "SendHeader", "Over"]
    assert silos.kept[odd].load(FRAME.instance()).signed_round < FRAME.round


@at_a_hall
async def test_a_set_that_cannot_be_recorded_is_not_signed(hall, silos):
    async def full(*_):
        raise UnwritableError("ledger: no space left on device")

    odd = SILOS[1]
    silos.doors[odd].signed_sets.sign = full
    hall.begin()
    silos.start_but(odd)
    with pytest.raises(UnwritableError, match="no space left"):
        await silos.run(odd)
    assert silos.kept[odd].load(FRAME.instance()).signed_round < FRAME.round
    assert "SendSurvival" not in silos.sent(odd)


async def fails():
    raise LocalError("out of memory")


async def beyond_its_clip():
    gives = payload(SILOS[0])
    gives["model"]["w"][0, 0] = 8.5
    return Contributions(gives)


class BeforeFails:
    async def upload_all(self, gives):
        raise LocalError("a value of it is out of range")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (lambda: {"training": fails()}, "out of memory"),
        (lambda: {"training": beyond_its_clip()}, r"largest magnitude is 8\.5, above its clip 8"),
        (lambda: {"before": BeforeFails()}, "a value of it is out of range"),
    ],
    ids=["training fails", "values beyond the declared bounds", "what leaves before fails"],
)  # fmt: skip
@at_a_hall
async def test_what_fails_before_the_masked_words_ends_the_round(hall, silos, changes, why):
    odd = SILOS[0]
    await silos.enter_again(odd, **changes())
    hall.begin()
    silos.start_but(odd)
    with pytest.raises(LocalError, match=why):
        await silos.run(odd)
    assert silos.doors[odd].uploads == []


@at_a_hall
async def test_a_memory_that_cannot_be_kept_lets_nothing_leave(hall, silos):
    silos.kept[SILOS[0]].full = True
    hall.begin()
    with pytest.raises(UnwritableError):
        await silos.run(SILOS[0])
    assert silos.doors[SILOS[0]].given == []


class First:
    """Parts that leave before the masked words; the line breaks at the first calls."""

    def __init__(self, gate, breaks=0):
        self.gate, self.breaks, self.given, self.seen = gate, breaks, 0, None

    async def upload_all(self, gives):
        assert not self.gate.uploads
        if self.breaks:
            self.breaks -= 1
            raise UnreachableError("coordinator", "the line is dead")
        self.seen, self.given = gives, self.given + 1


@pytest.mark.parametrize("breaks", [0, 2])
@at_a_hall
async def test_masked_words_leave_after_the_parts_that_leave_one_by_one(hall, silos, breaks):
    silo = SILOS[1]
    first = First(silos.doors[silo], breaks)
    await silos.enter_again(silo, before=first)
    hall.begin()
    await silos.start(SILOS)
    check_sum(hall)
    assert first.given == 1
    assert first.seen.tensors.keys() == payload(silo).keys()
    assert len(silos.doors[silo].uploads) == 1


@at_a_hall
async def test_words_of_an_earlier_attempt_are_not_taken_for_those_of_this_one(hall, silos):
    silos.rounds[SILOS[0]].accepted(bytes(32))
    hall.begin()
    await silos.start(SILOS)
    check_sum(hall)
    assert len(silos.doors[SILOS[0]].uploads) == 1


@at_a_hall
async def test_an_upload_that_the_policy_holds_back_ends_the_attempt(hall, silos):
    reason = "the policy holds this round back: rule 1: norm 2 of part 'model' is over 0.5"

    async def denied(*_):
        raise DeniedError(reason)

    odd = SILOS[1]
    silos.doors[odd].upload_masked = denied
    hall.begin()
    others = silos.start_but(odd)
    last = silos.start([odd])
    await others
    assert silos.gave(odd, Over) == [Over(Code.POLICY)]
    records = silos.doors[odd].sum_records
    assert [(end[:2], why) for end, why in zip(records.ends, records.whys, strict=True)] == [
        ((0, Code.POLICY), reason)
    ]
    assert ("dropped", odd, Code.POLICY) in hall.ends
    # it goes on with the round, and is told of its next attempt if there is one
    assert not last.done()
