"""The key that a job's silos share, over real TLS: a coordinator, and silos of raw calls or with
their own gate.
"""

import asyncio
import contextlib
import os
import re
from dataclasses import replace

import pytest
from support.coordinator_thread import coordinator
from support.ledgers import stored, write_start
from support.raw_silo import SECONDS, Caller, refused
from support.signed_federation import job_document, pfedsim, signed_federation

from staddle import log
from staddle.commands.federation import local_federation
from staddle.coordinator.rounds.events import OperatorStopped, RoundDeadline
from staddle.files import checked_file
from staddle.files.documents import canonical_json
from staddle.proto import federation_pb2 as pb
from staddle.proto import secure_pb2 as secure
from staddle.proto.convert import group_key as messages
from staddle.security.blind import group_key as g
from staddle.security.blind.sealing import SealedSecret, Tree
from staddle.security.identity import roster as rosters
from staddle.security.identity.keys import Role, create_keys, load_keys
from staddle.security.identity.pairwise_keys import public_key
from staddle.security.identity.signers import Signers
from staddle.security.ledger.egress_ledger import Ledger
from staddle.security.policy import policy as policies
from staddle.silo.blind.group_keys import KEY, OWN, SECRET, GroupKeys
from staddle.silo.egress.gate import Gate
from staddle.silo.egress.session import open_client
from staddle.silo.egress.witness import HEADS, Witness

SILOS = ("north", "east", "south", "west")
FIVE = (*SILOS, "elsewhere")  # a silo of the roster, and not of the job


@pytest.fixture
def world(tmp_path):
    """One keyed job, and another that needs no key; a coordinator's configuration, and all keys."""
    keyed = pfedsim(SILOS, rounds=2)
    security = {"secure_aggregation": "required", "tags": False}
    plain = job_document(SILOS, name="plain", rounds=2, min_cohort=3, security=security)
    made = signed_federation(tmp_path, FIVE, keyed, plain, submitted=2, beat_seconds=60)
    made.plain, made.epoch = made.jobs["plain"], g.Epoch.of(made.roster, SILOS, made.job.digest)
    made.at = tmp_path
    return made


class Keyed(Caller):
    """A silo of raw calls that knows what it gives."""

    def __init__(self, address, world, silo, job=None):
        super().__init__(address, world.keys[silo], world.roster, job or world.job)
        self.keys, self.world = world.keys[silo], world
        self.secret, self.ephemeral, self.prekey = (os.urandom(32) for _ in range(3))

    def made(self, epoch=None):
        seeds = self.secret, self.ephemeral, self.prekey
        return g.contribute(epoch or self.world.epoch, self.silo, *seeds, self.keys.sign)

    def message(self, contribution, pieces):
        given = messages.Contributed(self.session, self.job.name, self.digest, contribution, pieces)
        return messages.contributed_to_wire(given)

    async def contribute(self, contribution=None, pieces=()):
        made = (contribution, pieces) if contribution else self.made()
        await self.stub.Contribute(self.message(*made), timeout=SECONDS)

    async def asked(self):
        request = messages.poll_to_wire(messages.KeyPoll(self.session, self.job.name, self.digest))
        reply = await self.stub.GroupKey(request, timeout=SECONDS)
        return messages.secagg_delivery_from_wire(reply)

    async def key(self):
        seed, signers = self.keys.exchange.private_bytes_raw(), Signers.of(self.world.roster, SILOS)
        own, told = (self.made()[0], self.secret), await self.asked()
        return g.make_key(self.world.epoch, self.silo, seed, *own, told, signers)


async def greeted(world, here, silos=SILOS, job=None):
    made = [Keyed(here.address, world, silo, job) for silo in silos]
    for each in made:
        await each.hello()
    return made


def played(world, *scenarios):
    """What these return, each at a coordinator of its own; nothing breaks inside."""
    found = []
    for scenario in scenarios:
        with coordinator(world.config) as here:
            found.append(here.run(scenario(here)))
            assert here.broken == []
    return found


def test_raw_silos_agree_on_one_key_and_nothing_is_told_before_all_gave(world):
    async def scenario(here):
        silos = await greeted(world, here)
        for each in silos:
            await each.told("offer")
        for each in silos[:3]:
            await each.contribute()
            await each.answer("ACCEPT")
            assert await each.asked() == ()
        assert await silos[3].asked() == ()
        await silos[3].contribute()
        keys = {await each.key() for each in silos}
        assert len(keys) == 1
        await silos[3].answer("ACCEPT")
        assert (await silos[0].told("round")).round == 0
        return keys.pop(), [await each.asked() for each in silos]

    async def again(here):
        return [await each.asked() for each in await greeted(world, here)]

    (key, told), later = played(world, scenario, again)
    assert later == told  # it was durable before it was taken
    database = (world.config.directory / "coordinator.sqlite").read_bytes()
    assert key not in database


def test_an_acceptance_needs_a_contribution_and_the_same_one_changes_nothing(world):
    async def scenario(here):
        (north,) = await greeted(world, here, SILOS[:1])
        why = ("ORDER", "gave nothing to the key", "call Contribute")
        await refused(north.answer("ACCEPT"), "SECURE", *why)
        assert (await north.told("offer")).job == "job"
        for _ in range(3):
            await north.contribute()
        kept = here.daemon.contributions.bodies(world.job)
        north.secret = os.urandom(32)
        await refused(
            north.contribute(), "SECURE", "EQUIVOCATION", "a second time, and not the same"
        )
        north.ephemeral = os.urandom(32)
        await refused(north.contribute(), "SECURE", "EQUIVOCATION")
        assert here.daemon.contributions.bodies(world.job) == kept
        await north.answer("ACCEPT")
        assert here.daemon.runs[0].state.answers == {"north": "accepted"}
        await north.hello()  # its answer may have been lost: another session, all of it once more

    played(world, scenario)


def signed(silo, contribution, pieces):
    """A silo that signs these pieces, whatever they are."""
    sealing = replace(contribution.sealing, root=Tree(piece.leaf() for piece in pieces).root())
    payload = g._signed_bytes(silo.world.epoch, sealing, contribution.prekey)
    signature = silo.keys.sign(g.GROUP_CONTRIBUTION, payload)
    return replace(contribution, sealing=sealing, signature=signature), pieces


def another_name(silo, given, pieces):
    return replace(given, sealing=replace(given.sealing, sender="east")), pieces


def a_bad_signature(_, given, pieces):
    return replace(given, signature=bytes(64)), pieces


def anothers_signature(silo, given, pieces):
    sign = silo.world.keys["east"].sign
    payload = g._signed_bytes(silo.world.epoch, given.sealing, given.prekey)
    return replace(given, signature=sign(g.GROUP_CONTRIBUTION, payload)), pieces


def another_prekey(_, given, pieces):
    return replace(given, prekey=given.sealing.ephemeral), pieces


def of_another_job(silo, *_):
    return silo.made(g.Epoch.of(silo.world.roster, SILOS, silo.world.plain.digest))


def of_the_next_epoch(silo, *_):
    return silo.made(g.Epoch.of(silo.world.roster, SILOS, silo.world.job.digest, 1))


def to_all_of_the_roster(silo, *_):
    of_all = g.Epoch.of(silo.world.roster, FIVE, silo.world.job.digest)
    return silo.made(replace(silo.world.epoch, exchange_keys=of_all.exchange_keys))


def a_piece_short(silo, given, pieces):
    return signed(silo, given, pieces[1:])


def to_a_stranger(silo, given, pieces):
    swapped = (replace(pieces[0], recipient="elsewhere"), *pieces[1:])
    return signed(silo, given, tuple(sorted(swapped, key=lambda piece: piece.recipient)))


def pieces_that_it_did_not_sign(_, given, pieces):
    return given, (SealedSecret(pieces[0].recipient, bytes(48)), *pieces[1:])


def garbage(_, given, pieces):
    sealing = replace(given.sealing, ephemeral=b"\xff" * 32, root=bytes(32))
    return replace(given, sealing=sealing), pieces


HARM = {
    another_name: "KEYS: gives to a key in the name of 'east'",
    a_bad_signature: "KEYS: its signature does not fit",
    anothers_signature: "KEYS: its signature does not fit",
    of_another_job: "KEYS: its signature does not fit",
    of_the_next_epoch: "KEYS: its signature does not fit",
    to_all_of_the_roster: "SHARES: sealed 4 pieces",
    a_piece_short: "SHARES: sealed 2 pieces",
    to_a_stranger: "SHARES: sealed 3 pieces",
    pieces_that_it_did_not_sign: "SHARES: its pieces do not lead to the root",
    another_prekey: "KEYS: its signature does not fit",
    garbage: "KEYS: its signature does not fit",
}


def test_what_a_hostile_silo_gives_is_refused_and_not_kept(world):
    async def scenario(here):
        north, east = await greeted(world, here, SILOS[:2])
        for harm, text in HARM.items():
            await refused(north.contribute(*harm(north, *north.made())), "SECURE", text)
        malformed = north.message(*north.made())
        malformed.contribution.ClearField("signature")
        call = north.stub.Contribute(malformed, timeout=SECONDS)
        await refused(call, "SECURE", "KEYS: the signature of")
        data = north.message(*north.made()).SerializeToString() + b"\xf8\x07\x01"
        unknown = secure.Contributed.FromString(data)
        await refused(north.stub.Contribute(unknown, timeout=SECONDS), "MANIFEST", "does not know")
        await refused(north.answer("ACCEPT"), "SECURE", "gave nothing")
        await north.contribute()
        await east.contribute()
        assert set(here.daemon._database.contributions("job")) == {"north", "east"}

    played(world, scenario)


def admitted(here):
    """The time for answers to the offer is over."""
    here.daemon.apply(here.daemon.runs[0], RoundDeadline("admitting", 0))


def test_who_is_no_silo_of_the_job_or_comes_too_late_gives_nothing(world):
    async def scenario(here):
        north, stranger = await greeted(world, here, ("north", "elsewhere"))
        unknown = ("UNKNOWN_JOB", "no job 'job' for this silo")
        await refused(stranger.contribute(*north.made()), *unknown)
        await refused(stranger.asked(), *unknown)
        other = Keyed(here.address, world, "north", world.plain)
        other.session = north.session
        epoch = g.Epoch.of(world.roster, SILOS, world.plain.digest)
        made = g.contribute(epoch, "north", *[bytes(32)] * 3, north.keys.sign)
        await refused(other.contribute(*made), "SECURE", "ORDER", "job 'plain', which needs none")
        admitted(here)
        await refused(north.contribute(), "ROUND_CLOSED", "no longer waits for its share of a key")
        assert here.daemon._database.contributions("job") == {}

    played(world, scenario)


def test_a_keyed_job_fails_without_one_of_its_silos(world):
    async def scenario(here):
        silos = await greeted(world, here)
        for each in silos[:3]:
            await each.contribute()
            await each.answer("ACCEPT")
        await silos[3].answer("DECLINE", code=pb.ErrorCode.Value("ERROR_CODE_POLICY"))
        admitted(here)
        assert not (await silos[0].told("finish")).completed
        assert await silos[0].asked() == ()
        return here.daemon.runs[0].state.reason

    # another job would begin as soon as this one pends
    world.config = world.config.model_copy(update={"jobs": world.config.jobs[:1]})
    (reason,) = played(world, scenario)
    assert (
        reason == "3 of 4 silos accepted, and the key that its silos share takes all of them (west:"
        " POLICY)"
    )


# The roster changes.


def later_roster(world, without=None, renewed="newcomer"):
    """A member more, with other keys, or less, signed anew; the coordinator's file is replaced."""
    if without:
        made = rosters.remove(world.roster, without)
    else:
        entry = create_keys(world.at / renewed, renewed, Role.SILO, "org")
        made = rosters.add(world.roster, entry, replace=True)
    made = rosters.sign(made, load_keys(world.folder / "founder"))
    (world.folder / "roster.json").write_bytes(canonical_json(made.model_dump(mode="json")))
    return made


@pytest.mark.parametrize("stage", ["admitting", "round", "stopped"])
def test_a_job_fails_of_which_a_silo_has_other_keys_since_they_gave(world, stage):
    async def scenario(here):
        silos = await greeted(world, here)
        for each in silos[: 1 if stage == "admitting" else 4]:
            await each.contribute()
            await each.answer("ACCEPT")
        if stage == "stopped":
            here.daemon.apply(here.daemon.runs[0], OperatorStopped())
        assert here.daemon.runs[0].state.stage == stage

    async def after(here):
        state = here.daemon.runs[0].state
        assert here.daemon._database.states()[0] == state  # on the disk before anybody is told
        assert (state.stage, state.outcome) == ("finishing", "failed")
        assert (
            state.reason
            == "a silo or the coordinator has other keys than when its silos made the one they"
            " share; submit it again under a new name"
        )
        (north,) = await greeted(world, here, SILOS[:1])
        finish = await north.told("finish")
        assert (finish.job, finish.completed) == ("job", False)
        await north.answer("DONE")

    played(world, scenario)
    world.roster = later_roster(world, renewed="west")
    played(world, after)


def test_a_job_of_which_a_silo_has_left_the_roster_fails_though_nobody_gave(world):
    with coordinator(world.config) as here:
        assert here.daemon.runs[0].state.stage == "admitting"
    world.roster = later_roster(world, without="west")
    for _ in range(2):
        with coordinator(world.config) as here:
            state = here.daemon.runs[0].state
            assert (state.stage, state.outcome) == ("ended", "failed")
            assert (
                state.reason
                == "the roster no longer has west, and the key that its silos share takes all of"
                " them; submit it again under a new name"
            )
            # the next, which has no key, may begin
            assert here.daemon.runs[1].state.stage == "admitting"
            assert here.broken == []


@pytest.mark.parametrize("given", [0, 1, 4])
def test_a_keyed_job_continues_when_the_roster_has_a_member_more(world, given):
    async def before(here):
        silos = await greeted(world, here)
        for each in silos[:given]:
            await each.contribute()
        assert here.daemon.runs[0].state.stage == "admitting"
        return [(each.secret, each.ephemeral, each.prekey) for each in silos]

    async def scenario(here):
        silos = await greeted(world, here)
        for each, secrets in zip(silos, kept, strict=True):
            each.secret, each.ephemeral, each.prekey = secrets
        for each in silos[given:]:
            await each.contribute()
        assert len({await each.key() for each in silos}) == 1

    (kept,) = played(world, before)
    world.roster = later_roster(world)
    played(world, scenario)


# Silos with their own gate and ledger.


class Tapped:
    """Every message that a client says or hears, as bytes."""

    def __init__(self, client):
        self.client, self.bytes = client, b""

    def __getattr__(self, name):
        call = getattr(self.client, name)

        async def kept(*args):
            reply = await call(*args)
            said = [each for each in (*args, reply) if hasattr(each, "SerializeToString")]
            self.bytes += b"".join(each.SerializeToString() for each in said)
            return reply

        return kept


def test_silos_behind_their_gates_have_the_same_key_and_it_never_crosses(world, caplog):
    caplog.set_level("INFO", "staddle")
    clients = {}

    @contextlib.asynccontextmanager
    async def silo(name):
        folder = world.at / "silos" / name
        (folder / "jobs" / "job").mkdir(parents=True)
        keys = world.keys[name]
        rules = policies.parse(local_federation.policy_text([world.plain]).encode(), "policy.toml")
        with Ledger.open(folder / "ledger", name, world.roster.federation, keys.log) as ledger:
            write_start(ledger, "test", rosters.digest(world.roster), rules.digest)
            witness = Witness(ledger, world.roster, keys, folder / HEADS)
            clients[name] = Tapped(open_client(here.address, keys, world.roster))
            gate = Gate(clients[name], ledger, rules, world.roster, witness)
            await gate.session.hello()
            yield gate, GroupKeys(world.roster, keys, gate.protocol, folder / "jobs")
            await gate.session.close()

    async def scenario():
        async with contextlib.AsyncExitStack() as stack:
            at = {name: await stack.enter_async_context(silo(name)) for name in SILOS}
            for gate, keys in at.values():
                keys.check_new(world.job)
                await keys.contribute(world.job)
                await gate.session.answer("job", world.job.digest, 0, "ACCEPT")
            secrets = {
                name: (world.at / "silos" / name / "jobs/job" / SECRET).read_bytes()
                for name in SILOS
            }
            made = {name: await keys.keys(world.job) for name, (_, keys) in at.items()}
            return secrets, made, repr(at)

    events = []
    with (
        log.followed(lambda event, fields: events.append(repr((event, fields)))),
        coordinator(world.config) as here,
    ):
        secrets, made, printed = asyncio.run(scenario())
        assert here.broken == []
    kept = {name: world.at / "silos" / name / "jobs" / "job" for name in SILOS}
    files = {name: checked_file.read_bytes(folder / KEY) for name, folder in kept.items()}
    for name, file in files.items():
        own = made[name]
        assert file == b"".join((world.epoch.context(), own.key, own.parts, *own.others.values()))
        assert own.others == {
            other: public_key(secrets[other][96:128]) for other in sorted(SILOS) if other != name
        }
        prekeys = checked_file.read_bytes(kept[name] / OWN)
        assert prekeys == b"".join((world.epoch.context(), bytes(8), secrets[name][96:128]))
    assert len({(own.key, own.parts) for own in made.values()}) == 1
    crossed = b"".join(client.bytes for client in clients.values())
    hidden = [
        made["north"].key,
        *(kept[at : at + 32] for kept in secrets.values() for at in (32, 64, 96)),
    ]
    said = "\n".join((printed, repr(made), *events))
    assert "round.opened" in said
    ledgers = b"".join(
        path.read_bytes() for path in (world.at / "silos").rglob("seg-*.jsonl")
    ).decode()
    for each in hidden:
        assert each not in crossed
        assert not re.search(f"{each.hex()}|{re.escape(repr(each))}", said + ledgers)
    assert world.epoch.context().hex() in ledgers
    for name in SILOS:
        (record,) = stored(world.at / "silos" / name / "ledger", "egress.protocol")
        assert (record["kind"], record["round"], record["ctx"]) == (
            "contribution",
            0,
            world.epoch.context().hex(),
        )
        assert record["rpc"] == "/staddle.v1.Federation/Contribute"
