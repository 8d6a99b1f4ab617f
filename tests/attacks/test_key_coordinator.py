"""A hostile coordinator of the key that a job's silos share, over real TLS, against the agent as it
ships.

It has all keys but that of ``north``, whose part it does not have: what it brings of the others is
as good as theirs. A round ends here once the silo has the key.
"""

import asyncio
import os
import time

import grpc
import pytest
from support.hostile_coordinator import (
    GARBAGE,
    SILO,
    Hostile,
    finish,
    make_world,
    offer,
    play,
    records,
    round_of,
)
from support.signed_federation import pfedsim

from staddle import log
from staddle.files import checked_file
from staddle.proto import federation_pb2 as pb
from staddle.proto import secure_pb2 as secure
from staddle.proto import tensor_pb2 as tensor
from staddle.proto.channel import ERROR_METADATA
from staddle.proto.convert import group_key as messages
from staddle.security.blind import group_key as g
from staddle.security.blind.sealing import letters
from staddle.security.identity.pairwise_keys import public_key
from staddle.silo import agent as agents
from staddle.silo.blind import group_keys
from staddle.silo.blind.group_keys import KEY, OWN, SECRET

pytestmark = [pytest.mark.actor("coordinator"), pytest.mark.usefixtures("hurried")]

SILOS = (SILO, "east", "south", "west")
OTHERS = ("east", "south", "west")  # ascending


@pytest.fixture(autouse=True, scope="module")
def rounds():
    """In place of what a round does with the key."""
    patch = pytest.MonkeyPatch()

    async def key_alone(agent, admitted, asked):
        await agent._group_keys.keys(admitted.job)
        of = admitted.job.name, admitted.job.digest, asked.round
        await agent._gate.session.answer(*of, "FAILED", "TRAINING")

    patch.setattr(agents.Agent, "_round", key_alone)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    method = {"name": "pfedsim"}
    document = pfedsim(SILOS, name="first", rounds=2, method=method)
    world = make_world(tmp_path_factory.mktemp("attacked"), SILOS, document)
    world.policy = (world.federation.folder / SILO / "policy.toml").read_text()
    world.epoch = g.Epoch.of(world.roster, SILOS, world.jobs["first"].digest)
    return world


class Keying(Hostile):
    """``refuse``: codes with which the next contributions are refused.

    ``bring``: what comes next, then the truth.
    """

    def __init__(self, world, tasks, *, refuse=(), bring=(), **options):
        super().__init__(world, tasks, **options)
        self.refuse, self.bring = list(refuse), list(bring)
        self.given = []  # contributions
        self.calls |= {"group_key": 0}
        self.secrets = {silo: tuple(os.urandom(32) for _ in range(3)) for silo in OTHERS}

    async def contribute(self, request, context):
        self.given.append(messages.contributed_from_wire(SILO, request))
        if self.refuse:
            code = self.refuse.pop(0)
            why = ((ERROR_METADATA, code),)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no", trailing_metadata=why)
        return secure.SecureTaken()

    async def group_key(self, request, context):
        self.calls["group_key"] += 1
        found = self.bring.pop(0)(self) if self.bring else self.relayed()
        return found if isinstance(found, bytes) else messages.secagg_delivery_to_wire(found)

    def relayed(self, epoch=None, to=SILO):
        made = (self.give(silo, epoch or self.world.epoch) for silo in OTHERS)
        return tuple(g.Relayed(given, letters(pieces)[to]) for given, pieces in made)

    def give(self, silo, epoch):
        return g.contribute(epoch, silo, *self.secrets[silo], self.world.others[silo].sign)

    def parts(self):
        """Of what makes that key."""
        others = [self.give(silo, self.world.epoch)[0] for silo in OTHERS]
        return g.parts_of((self.given[0].contribution, *others))

    def key(self):
        """As another silo of the job makes it; the silo's part is the one that it gave."""
        me, *others = OTHERS
        given = {SILO: (self.given[0].contribution, self.given[0].pieces)}
        given |= {silo: self.give(silo, self.world.epoch) for silo in others}
        parts = given.values()
        relayed = [g.Relayed(part, letters(pieces)[me]) for part, pieces in parts]
        seed = self.world.others[me].exchange.private_bytes_raw()
        signers = g.Signers.of(self.world.roster, SILOS)
        made = self.give(me, self.world.epoch)[0]
        return g.make_key(self.world.epoch, me, seed, made, self.secrets[me][0], relayed, signers)


def files(folder):
    paths = (folder / "jobs" / "first").glob("group.*")
    read = lambda path: b"" if path.name == group_keys.ENDED else checked_file.read_bytes(path)
    return {path.name: read(path) for path in paths}


def check_kept(world, hostile, folder):
    """The key, our prekey's private half, and the prekeys of the others.

    Nothing of what the key was made of.
    """
    kept = files(folder)
    assert set(kept) == {KEY, OWN}
    context = world.epoch.context()
    others = b"".join(public_key(hostile.secrets[silo][2]) for silo in OTHERS)
    assert kept[KEY] == context + hostile.key() + hostile.parts() + others
    assert kept[OWN][:40] == context + bytes(8)
    assert public_key(kept[OWN][40:]) == hostile.given[0].contribution.prekey


def answers(hostile, kind):
    return [answer for answer in hostile.answers if answer[0] == kind]


ENDED = ("FAILED", 0, "TRAINING")  # it had the key


def test_offered_again_and_again_it_gives_the_very_same_and_then_has_the_key(world, tmp_path):
    hostile = play(Keying(world, [*[offer(world)] * 5, round_of(world, 0)]), tmp_path)
    assert len(hostile.given) == 5
    assert all(given == hostile.given[0] for given in hostile.given)
    assert answers(hostile, "ACCEPT") == [("ACCEPT", 0, "UNSPECIFIED")] * 5
    assert answers(hostile, "FAILED") == [ENDED]
    check_kept(world, hostile, tmp_path)
    left = records(tmp_path, "egress.protocol")
    assert [record["kind"] for record in left] == ["contribution"] * 5


def test_a_job_that_it_gave_to_is_not_taken_anew_once_its_memory_of_rows_is_gone(world, tmp_path):
    """A folder that was lost, all of it or a file.

    A coordinator that offers the job again would find it empty.
    """
    play(Keying(world, [offer(world)]), tmp_path)
    memory = tmp_path / "jobs" / "first" / "mix-extractor.rows.json"
    kept = memory.read_bytes()
    memory.unlink()
    hostile = play(Keying(world, [offer(world)]), tmp_path)
    assert hostile.answers == [("DECLINE", 0, "JOB_INVALID")]
    assert hostile.given == []
    assert not memory.exists()
    memory.write_bytes(kept)
    assert play(Keying(world, [offer(world)]), tmp_path).answers == [("ACCEPT", 0, "UNSPECIFIED")]


def test_a_refused_contribution_is_no_acceptance(world, tmp_path):
    hostile = play(Keying(world, [offer(world), offer(world)], refuse=["SECURE"]), tmp_path)
    assert hostile.answers == [("DECLINE", 0, "SECURE"), ("ACCEPT", 0, "UNSPECIFIED")]
    assert hostile.given[0] == hostile.given[1]
    decided = [record["type"] for record in records(tmp_path) if record["type"].startswith("job.")]
    assert decided == ["job.accept", "job.decline", "job.accept"]


@pytest.mark.parametrize("code", ["SESSION", "LIMIT", "INTERRUPTED", "ROUND_CLOSED"])
def test_a_contribution_that_was_turned_away_goes_again_with_the_next_offer(world, tmp_path, code):
    hostile = play(Keying(world, [offer(world), offer(world)], refuse=[code]), tmp_path)
    assert hostile.answers == [("ACCEPT", 0, "UNSPECIFIED")]
    assert hostile.given[0] == hostile.given[1]


def without_one(hostile):
    return hostile.relayed()[1:]


def doubled(hostile):
    first, *rest = hostile.relayed()
    return (first, first, *rest)


def with_swapped_letters(hostile):
    first, second, third = hostile.relayed()
    swapped = [(first.contribution, second.letter), (second.contribution, first.letter)]
    return (*(g.Relayed(*each) for each in swapped), third)


def of_another_recipient(hostile):
    first, *rest = hostile.relayed()
    _, pieces = hostile.give("east", hostile.world.epoch)
    return (g.Relayed(first.contribution, letters(pieces)["west"]), *rest)


def of_another_epoch(hostile):
    world = hostile.world
    return hostile.relayed(g.Epoch.of(world.roster, SILOS, world.jobs["first"].digest, 1))


def of_another_job(hostile):
    return hostile.relayed(g.Epoch.of(hostile.world.roster, SILOS, "ab" * 32))


def its_own_back(hostile):
    _, pieces = hostile.give("east", hostile.world.epoch)
    own = g.Relayed(hostile.given[0].contribution, letters(pieces)[SILO])
    all_ = (*hostile.relayed(), own)
    return tuple(sorted(all_, key=lambda each: each.contribution.sealing.sender))


def far_too_many(hostile):
    return hostile.relayed() * 1000


WRONG = (
    without_one, doubled, with_swapped_letters, of_another_recipient, of_another_epoch,
    of_another_job, its_own_back,
)  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_what_it_brings_wrongly_makes_no_key_and_the_round_is_given_up(world, tmp_path, wrong):
    hostile = play(Keying(world, [offer(world), round_of(world, 0)], bring=[wrong]), tmp_path)
    assert answers(hostile, "FAILED") == [("FAILED", 0, "DELIVERY")]
    assert set(files(tmp_path)) == {SECRET}


def test_after_wrong_answers_the_right_one_counts(world, tmp_path):
    tasks = [offer(world), *[round_of(world, 0)] * (len(WRONG) + 1)]
    hostile = play(Keying(world, tasks, bring=WRONG), tmp_path)
    assert answers(hostile, "FAILED") == [*[("FAILED", 0, "DELIVERY")] * len(WRONG), ENDED]
    check_kept(world, hostile, tmp_path)


@pytest.mark.parametrize(
    "wrong", [lambda _: GARBAGE, far_too_many], ids=["garbage", "far too many"]
)
def test_bytes_that_are_no_answer_are_a_lost_coordinator(world, tmp_path, wrong):
    tasks = [offer(world), round_of(world, 0), round_of(world, 0)]
    hostile = play(Keying(world, tasks, bring=[wrong]), tmp_path)
    assert answers(hostile, "FAILED") == [ENDED]
    assert hostile.calls["hello"] == 2


def test_once_it_has_the_key_it_asks_no_more_and_gives_nothing_for_the_job_again(world, tmp_path):
    tasks = [offer(world), round_of(world, 0), round_of(world, 0), round_of(world, 1), offer(world)]
    hostile = play(Keying(world, tasks), tmp_path)
    assert hostile.calls["group_key"] == 1
    assert len(hostile.given) == 1
    assert hostile.answers[-1] == ("DECLINE", 0, "JOB_INVALID")


@pytest.mark.parametrize("completed", [False, True])
def test_once_the_end_is_told_its_keys_are_gone_and_the_same_end_has_the_same_answer(
    world, tmp_path, completed
):
    """Also where it could not take the results: there is nothing to open them with any more."""
    end = finish(world, 2, completed=completed)
    damaged = lambda: [tensor.Frame(chunk=b"no manifest")]
    tasks = [offer(world), round_of(world, 0), end, end, offer(world)]
    hostile = play(Keying(world, tasks, fetch=[damaged]), tmp_path)
    assert hostile.calls["fetch"] == completed
    assert answers(hostile, "DONE") == [("DONE", 2, "DELIVERY" if completed else "UNSPECIFIED")] * 2
    assert files(tmp_path) == {group_keys.ENDED: b""}
    assert hostile.answers[-1] == ("DECLINE", 0, "JOB_INVALID")


def test_keys_are_gone_before_the_end_is_confirmed(world, tmp_path):
    """The coordinator may take the confirmation for the erasure."""
    tasks = [offer(world), round_of(world, 0), finish(world, 2, completed=False)]
    hostile, found = Keying(world, tasks), []
    answer = hostile.answer

    async def looking(request, context):
        found.append((request.kind, set(await asyncio.to_thread(files, tmp_path))))
        return await answer(request, context)

    hostile.answer = looking
    play(hostile, tmp_path)
    assert found == [
        (pb.ANSWER_KIND_ACCEPT, {SECRET}),
        (pb.ANSWER_KIND_FAILED, {KEY, OWN}),
        (pb.ANSWER_KIND_DONE, {group_keys.ENDED}),
    ]


def test_what_is_withheld_for_ever_is_asked_for_at_our_pace(world, tmp_path, monkeypatch):
    monkeypatch.setattr(group_keys, "PAUSE_SECONDS", 0.1)
    monkeypatch.setattr(group_keys, "MOST_ASKED", 3)
    nothing = [lambda _: ()] * 10_000
    hostile = Keying(world, [offer(world)], bring=nothing, endless=round_of(world, 0))
    bring, times = hostile.group_key, []

    async def timed(request, context):
        times.append(time.monotonic())
        if len(times) == 12:
            hostile.told.set()
        return await bring(request, context)

    hostile.group_key = timed
    play(hostile, tmp_path)
    asked = hostile.calls["group_key"]
    assert asked <= (times[-1] - times[0]) / 0.1 + 3
    assert hostile.calls["hello"] >= asked // 3
    assert answers(hostile, "FAILED") == []
    assert set(files(tmp_path)) == {SECRET}


def test_the_key_and_what_it_is_made_of_stay_at_home(world, tmp_path, caplog):
    """In no log and no ledger, and nothing of it in what the coordinator has."""
    caplog.set_level("INFO", "staddle")
    hostile = Keying(world, [offer(world), round_of(world, 0)])
    kept, said = [], []
    give = hostile.contribute

    async def looked_at(request, context):
        secret = await asyncio.to_thread((tmp_path / "jobs" / "first" / SECRET).read_bytes)
        kept.extend((secret[32:64], secret[64:96], secret[96:]))
        kept.append(request.SerializeToString())
        return await give(request, context)

    hostile.contribute = looked_at
    with log.followed(lambda event, fields: said.append(repr((event, fields)))):
        play(hostile, tmp_path)
    *secrets, crossed = kept
    key = files(tmp_path)[KEY][32:64]
    text = "\n".join(said)
    ledger = b"".join(path.read_bytes() for path in tmp_path.rglob("*.jsonl")).decode()
    assert "job.accepted" in text
    for each in (*secrets, key):
        assert each not in crossed
        assert each.hex() not in text + ledger
        assert repr(each)[2:-1] not in text
