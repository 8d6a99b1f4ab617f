"""What a silo holds of others' ledgers and they of its own: rollbacks stop it, forgeries do not."""

import asyncio

import pytest
from support.ledgers import copied, put_back, stored, write_start
from support.private_jobs import private_job
from support.recording_gate import RECORDS, SILO, SILOS, World

from staddle.errors import LocalError, PeerError
from staddle.files import checked_file
from staddle.proto import federation_pb2 as pb
from staddle.security.blind.plan import JobPlan
from staddle.security.identity import roster as rosters
from staddle.security.identity.certificate import utc_now
from staddle.security.identity.keys import Role, create_keys, load_keys
from staddle.security.log import note as notes
from staddle.security.log.attestation import Attestation
from staddle.security.log.consistency import Consistency
from staddle.security.log.head import Signer
from staddle.security.log.merkle import Tree, leaf_hash
from staddle.security.log.tree_head import TreeHead
from staddle.silo import agent as agents
from staddle.silo.admission.checks import Admitted
from staddle.silo.agent import Agent
from staddle.silo.config import SiloConfig
from staddle.silo.egress.witness import MemberHeads, Witness
from staddle.silo.parts.declared import Declared
from staddle.silo.session import RoundOpened

OTHER = "silo-b"


@pytest.fixture
def world(made, tmp_path):
    return World(made, tmp_path)


def run(work):
    return asyncio.run(work)


def heads_file(world):
    path = world.path.parent / "heads.json"
    return (
        checked_file.read_json(path, MemberHeads).model_dump(exclude={"generation"})
        if path.exists()
        else {"heads": {}, "forks": {}}
    )


def keys_of(world, member):
    return load_keys(world.made.files.folder / member / "keys")


def head_of(world, member, size, word=b"record", keys=None):
    """A checkpoint of some ledger of this member, as bytes."""
    tree = Tree(leaf_hash(b"%s %d" % (word, number)) for number in range(size))
    note = Signer.of("local", member, (keys or keys_of(world, member)).log).sign(size, tree.root())
    return bytes(note)


def growth_of(world, old, size, word=b"record"):
    """Proof that the coordinator's ledger grew."""
    tree = Tree(leaf_hash(b"%s %d" % (word, number)) for number in range(size))
    note = Signer.of("local", "coordinator", world.made.coordinator.log).sign(size, tree.root())
    return bytes(Consistency(old, tree.consistency_proof(old, size), note))


def changed_roster(world, changes):
    """The roster with these changes of members' entries."""
    entries = world.made.roster.entries
    changed = tuple(entry.model_copy(update=changes.get(entry.id, {})) for entry in entries)
    return world.made.roster.model_copy(update={"entries": changed})


def kinds(world):
    return [record["type"] for record in stored(world.path)]


# The coordinator's greeting.
def greeted(world, held):
    seconds = {"beat_seconds": 5, "hold_seconds": 5}
    world.client.greeting = pb.HelloReply(protocol=2, session=b"s" * 16, held=held, **seconds)
    run(world.gate.session.hello())


def test_what_the_coordinator_holds_is_recorded(world):
    world.contribute()
    held = bytes(world.ledger.checkpoint())
    greeted(world, held)
    (record,) = [record for record in stored(world.path) if record["type"] == "witness"]
    head = TreeHead.parse(notes.parse(held).text)
    assert (record["by"], record["size"]) == ("coordinator", head.size)
    assert record["root"] == head.root.hex()
    greeted(world, b"")
    assert kinds(world).count("witness") == 1


def test_another_silo_must_say_what_it_holds_whatever_the_coordinator_says(world):
    greeted(world, b"")
    assert not world.gate.session.witnessed  # nor before anything was ever received
    world.contribute()
    assert not world.gate.session.witnessed
    world.restart()
    greeted(world, bytes(world.ledger.checkpoint()))
    assert not world.gate.session.witnessed
    run(world.witness.attested(attested(world, b"")))
    assert world.gate.session.witnessed  # a silo holds nothing, and says so
    greeted(world, bytes(world.ledger.checkpoint()))
    assert not world.gate.session.witnessed  # it said so in the session before


@pytest.mark.parametrize("field", ["organisation", "host_operator"])
def test_the_word_of_a_silo_that_the_coordinator_runs_is_the_coordinators(world, field):
    """It is recorded, and stops this silo where it does not fit; no private round begins by it."""
    roster = changed_roster(world, {OTHER: {field: world.made.roster.coordinator.organisation}})
    witness = Witness(world.ledger, roster, world.keys, world.path.parent / "other.json")
    witness.reported.add(OTHER)
    assert (witness.independent, witness.answered) == ({"silo-c"}, False)
    witness.reported.add("silo-c")
    assert witness.answered


def private_round(made, world):
    """The agent at the first round of a private job; nothing of it is on the disk."""
    job = private_job(made)
    config = SiloConfig.model_construct(directory=world.path.parent)
    agent = Agent(config, SILO, made.roster, world.policy, world.gate, world.keys, pytest.fail)
    admitted = Admitted(
        JobPlan(job), Declared.of(job.document(), RECORDS), "operator", None, None, {}, {}
    )
    run(agent._round(admitted, RoundOpened(job.name, job.digest, 0, 0, SILOS)))


def test_a_private_round_waits_for_another_silos_word_and_says_so(made, world, monkeypatch, caplog):
    monkeypatch.setattr(agents, "PAUSE_SECONDS", 0)
    world.contribute()
    greeted(world, bytes(world.ledger.checkpoint()))
    uploads = world.client.uploads
    private_round(made, world)
    (said,) = [record.fields["why"] for record in caplog.records if record.message == "round.waits"]
    assert "ask the operators of silo-b, silo-c whether their agents run" in said
    assert world.client.uploads == uploads


def test_a_private_round_that_no_silo_can_ever_answer_for_fails(made, world, monkeypatch):
    monkeypatch.setattr(Witness, "independent", frozenset())
    run(world.gate.session.hello())
    with pytest.raises(LocalError, match="have a silo added that another organisation runs"):
        private_round(made, world)


def test_a_ledger_that_was_rolled_back_leaves_nothing(made, world):
    world.contribute()
    world.ledger.close()
    before = copied(world.path)
    world.restart()
    world.contribute(round_=1)
    held = bytes(world.ledger.checkpoint())
    world.ledger.close()
    put_back(world.path, before)
    again = World(made, world.path.parent)
    write_start(again.ledger, "test", rosters.digest(made.roster), again.policy.digest)
    cut = r"records were cut off: there are \d+, and coordinator holds a signed"
    with pytest.raises(LocalError, match=cut) as said:
        greeted(again, held)
    assert "nothing more leaves" in str(said.value)
    assert [type(message).__name__ for message in again.client.messages] == ["HelloRequest"]


def test_a_ledger_that_was_written_anew_leaves_nothing(world):
    run(world.gate.session.hello())
    held = head_of(world, SILO, 2)
    with pytest.raises(LocalError, match="records were rewritten"):
        greeted(world, held)


@pytest.mark.parametrize(
    "held",
    [
        # signed by another key: as if higher
        lambda world: head_of(world, SILO, 500, keys=keys_of(world, OTHER)),
        lambda world: head_of(world, OTHER, 500),
        lambda _: b"no note at all",
        lambda world: head_of(world, SILO, 500) * 2,
    ],
    ids=["another key", "another ledger", "no note", "two"],
)
def test_a_head_that_we_did_not_sign_stops_nobody(world, held, caplog):
    greeted(world, held(world))
    assert "head.ignored" in caplog.messages
    world.contribute()
    assert Consistency.parse(world.client.end.head).old_size == 0


def test_the_next_upload_proves_growth_from_the_head_that_is_held(world):
    world.contribute()
    first = world.client.end.ledger_seq + 1
    world.contribute(round_=1)
    assert Consistency.parse(world.client.end.head).old_size == first
    world.broken(1)
    world.client.stop_after = None
    world.settle()
    world.contribute(round_=2)
    assert Consistency.parse(world.client.end.head).old_size > first
    greeted(world, bytes(world.ledger.checkpoint()))
    size = TreeHead.parse(notes.parse(world.client.greeting.held).text).size
    world.contribute(round_=3)
    assert Consistency.parse(world.client.end.head).old_size == size


def test_an_upload_that_was_accepted_after_the_greeting_counts_as_held(world):
    """The coordinator greeted while the old upload ran, took it, and says so when asked."""
    world.contribute()
    before = world.client.end.ledger_seq + 1
    world.broken(10**6)
    held = world.client.end.ledger_seq + 1
    world.client.stop_after = None
    world.restart()  # the greeting names no head: as before the upload was taken
    world.client.standing_reply = lambda client: pb.StandingReply(receipt=world.receipt(client))
    assert [upload.status for upload in world.settle()] == ["sent"]
    world.contribute(round_=2)
    assert Consistency.parse(world.client.end.head).old_size == held > before


# Other silos say what they hold.
def attested(world, head=b"", **changes):
    message = {"by": OTHER, "silo": SILO, "challenge": world.witness.challenge}
    fields = {
        **message, "federation": "local", "roster": rosters.digest(world.made.roster),
        "challenge": world.witness.challenge.hex(), "head": head.decode(),
    }  # fmt: skip
    signature = Attestation(**{**fields, **changes.pop("signed", {})}).sign(keys_of(world, OTHER))
    return pb.Attestation(**{**message, "held": head, "signature": signature, **changes})


def told(world, *attestations, asked=()):
    """A poll that brings them, then a poll that brings nothing."""
    tasks = [
        pb.Task(witness=pb.Witness(attestations=attestations, asked=asked)),
        pb.Task(nothing=pb.Nothing()),
    ]

    async def poll(request, hold):
        return tasks.pop(0)

    world.client.poll = poll
    run(world.gate.session.poll())


def test_what_another_silo_holds_is_recorded_once_a_session(world):
    world.contribute()
    said = attested(world, bytes(world.ledger.checkpoint()))
    told(world, said, said)
    (record,) = [record for record in stored(world.path) if record["type"] == "witness"]
    assert (record["by"], world.witness.reported) == (OTHER, {OTHER})
    world.contribute()
    said = attested(world, bytes(world.ledger.checkpoint()))
    for _ in range(2):
        told(world, said, said)
    assert kinds(world).count("witness") == 1


def test_one_that_holds_nothing_has_answered_too(world):
    run(world.gate.session.hello())
    told(world, attested(world))
    assert world.witness.reported == {OTHER}
    assert "witness" not in kinds(world)
    run(world.gate.session.hello())
    assert world.witness.reported == set()  # of the session before


def test_a_head_of_another_silo_that_is_not_of_this_ledger_stops_us(world):
    world.contribute()
    with pytest.raises(LocalError, match=r"records were cut off: .* silo-b holds a signed"):
        told(world, attested(world, head_of(world, SILO, 500)))
    assert world.witness.reported == set()


UNSIGNED = {
    "in another's name": {"by": "silo-c"},
    "with the head left out": {"held": b""},
    "unsigned": {"signature": bytes(64)},
    "of another roster": {"signed": {"roster": "00" * 32}},
    "shown again": {"signed": {"challenge": "00" * 32}},
    "of another": {"signed": {"silo": "silo-c"}},
}


@pytest.mark.parametrize("changes", UNSIGNED.values(), ids=UNSIGNED)
def test_what_another_silo_did_not_sign_counts_for_nothing(world, changes, caplog):
    world.contribute()
    told(world, attested(world, bytes(world.ledger.checkpoint()), **changes))
    assert world.witness.reported == set()
    assert "head.ignored" in caplog.messages


@pytest.mark.parametrize(
    "changes", [{"by": SILO}, {"by": "nobody"}, {"silo": OTHER}, {"challenge": bytes(32)}]
)
def test_what_nobody_asked_for_is_the_coordinators_fault(world, changes):
    run(world.gate.session.hello())
    with pytest.raises(PeerError, match="coordinator: passed on what"):
        told(world, attested(world, **changes))


# We say what we hold.
def relayed(world, *heads):
    async def poll(request, hold):
        return pb.Task(round=pb.Round(job="simple", heads=heads))

    world.client.poll = poll
    run(world.gate.session.poll())
    run(world.witness.flush())


def test_the_largest_head_of_each_silo_is_kept_and_said_on_demand(world):
    run(world.gate.session.hello())
    small = head_of(world, OTHER, 3)
    large = head_of(world, OTHER, 7)
    third = head_of(world, "silo-c", 2)
    relayed(world, large, third)
    relayed(world, small)
    assert heads_file(world)["heads"] == {OTHER: large.decode(), "silo-c": third.decode()}
    world.restart()
    told(world, asked=[pb.Challenge(silo=OTHER, challenge=b"c" * 32)])
    said = world.client.messages[-1]
    assert (said.by, said.silo, said.challenge, said.held) == (SILO, OTHER, b"c" * 32, large)
    roster = rosters.digest(world.made.roster)
    fields = ("local", roster, SILO, OTHER, (b"c" * 32).hex(), large.decode())
    Attestation(*fields).verify(world.made.roster[SILO], said.signature)


def test_a_silo_at_work_says_what_it_holds_with_a_heartbeat(world):
    run(world.gate.session.hello())

    async def beat(request):
        return pb.BeatReply(wanted=True, asked=[pb.Challenge(silo=OTHER, challenge=b"c" * 32)])

    world.client.beat = beat
    assert run(world.gate.session.beat("simple", 0))
    said = world.client.messages[-1]
    assert (said.by, said.silo, said.challenge, said.held) == (SILO, OTHER, b"c" * 32, b"")


def test_two_heads_of_one_size_are_kept_as_evidence(world, caplog):
    run(world.gate.session.hello())
    one, other = head_of(world, OTHER, 3), head_of(world, OTHER, 3, b"other")
    relayed(world, one)
    relayed(world, other)
    relayed(world, head_of(world, OTHER, 3, b"third"))
    assert heads_file(world) == {"heads": {OTHER: one.decode()}, "forks": {OTHER: other.decode()}}
    assert caplog.messages.count("ledger.forked") == 1


@pytest.mark.parametrize(
    "head",
    [
        lambda _: b"",
        lambda world: head_of(world, SILO, 3),  # our own
        lambda world: head_of(world, "coordinator", 3),
        lambda world: head_of(world, OTHER, 3, keys=keys_of(world, "silo-c")),
        lambda world: head_of(world, OTHER, 3).replace(b"local", b"other"),
        lambda world: head_of(world, OTHER, 3) + b"x" * 5000,
    ],
)
def test_a_head_that_its_silo_did_not_sign_is_not_kept(world, head):
    run(world.gate.session.hello())
    relayed(world, head(world))
    assert heads_file(world)["heads"] == {}


@pytest.mark.parametrize(
    "asked", [{"silo": SILO}, {"silo": "coordinator"}, {"silo": "nobody"}, {"challenge": b"short"}]
)
def test_a_question_that_nobody_may_ask_is_not_answered(world, asked):
    run(world.gate.session.hello())
    with pytest.raises(PeerError, match="asks what we hold of"):
        told(world, asked=[pb.Challenge(**{"silo": OTHER, "challenge": b"c" * 32, **asked})])
    assert not [message for message in world.client.messages if isinstance(message, pb.Attestation)]


def test_a_coordinator_that_asks_without_end_does_not_set_our_pace(world):
    run(world.gate.session.hello())
    polls = []

    async def poll(request, hold):
        polls.append(request)
        challenge = pb.Challenge(silo=OTHER, challenge=b"%032d" % len(polls))
        return pb.Task(witness=pb.Witness(asked=[challenge]))

    world.client.poll = poll
    assert run(asyncio.wait_for(world.gate.session.poll(), 60)).WhichOneof("body") == "nothing"
    assert len(polls) == 4 * len(world.made.roster.entries) + 1
    run(world.gate.session.poll())
    assert len(polls) == 4 * len(world.made.roster.entries) + 2  # the agent pauses between


# The coordinator's own ledger.
def given(world, head, round_):
    real = world.receipt

    def receipt(client):
        found = real(client)
        found.head = head
        return found

    world.client.receipt = receipt
    world.contribute(round_=round_)
    return world.client.end.holds


def test_the_coordinators_head_is_kept_while_it_grows(world):
    assert given(world, growth_of(world, 0, 4), 0) == 0
    assert given(world, growth_of(world, 4, 9), 1) == 4
    assert given(world, b"", 2) == 9
    world.restart()
    assert given(world, growth_of(world, 9, 10), 3) == 9
    assert heads_file(world)["forks"] == {}


@pytest.mark.parametrize(
    "head",
    [
        lambda w: growth_of(w, 4, 9, b"other"),
        lambda w: growth_of(w, 0, 3),
        lambda w: growth_of(w, 0, 9, b"other"),
    ],
    ids=["rewritten", "cut", "anew"],
)
def test_a_coordinators_ledger_that_was_altered_is_said_and_kept_as_evidence(world, head, caplog):
    given(world, growth_of(world, 0, 4), 0)
    held = heads_file(world)["heads"]
    given(world, head(world), 1)
    assert "ledger.forked" in caplog.messages
    assert heads_file(world)["heads"] == held
    assert list(heads_file(world)["forks"]) == ["coordinator"]
    assert world.outcome()["status"] == "sent"  # the receipt holds all the same


def test_the_first_altered_head_of_the_coordinators_stays_as_evidence(world):
    given(world, growth_of(world, 0, 4), 0)
    given(world, growth_of(world, 4, 9, b"other"), 1)
    kept = heads_file(world)
    given(world, growth_of(world, 0, 9), 2)  # grown from the one held, with a proof from none
    assert heads_file(world) == kept


def test_a_head_that_the_coordinator_did_not_sign_is_ignored(world, caplog):
    signed = growth_of(world, 0, 4)
    given(world, signed.replace(b"coordinator/egress\n4", b"coordinator/egress\n5"), 0)
    assert "head.ignored" in caplog.messages
    assert heads_file(world)["heads"] == {}


def test_a_ledger_under_a_new_log_key_is_no_fork_of_the_one_before(world, tmp_path, caplog):
    """Both members lost their ledgers: the roster has new keys, and the ledgers begin anew."""
    run(world.gate.session.hello())
    relayed(world, head_of(world, OTHER, 7))
    given(world, growth_of(world, 0, 9), 0)
    entries = {}
    for member, role in ((OTHER, Role.SILO), ("coordinator", Role.COORDINATOR)):
        entries[member] = create_keys(tmp_path / "new" / member, member, role, "Org").log_key
    roster = changed_roster(world, {member: {"log_key": key} for member, key in entries.items()})
    witness = Witness(world.ledger, roster, world.keys, world.path.parent / "heads.json")
    keys = {member: load_keys(tmp_path / "new" / member) for member in entries}
    same, later = (head_of(world, OTHER, size, b"anew", keys[OTHER]) for size in (7, 8))
    run(witness.relayed([same]))
    run(witness.relayed([later]))
    assert witness.holds == 0
    tree = Tree(leaf_hash(b"anew %d" % number) for number in range(3))
    note = Signer.of("local", "coordinator", keys["coordinator"].log).sign(3, tree.root())
    run(witness.coordinator_head(bytes(Consistency(0, (), note))))
    assert heads_file(world) == {
        "heads": {OTHER: later.decode(), "coordinator": bytes(note).decode()},
        "forks": {},
    }
    assert "ledger.forked" not in caplog.messages


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"forks":{},"heads":{"coordinator":"no note"}}',
            r"heads\.json: what it has of 'coordinator' cannot be read"),
        ("{}{}", r"heads\.json"),
    ],
    ids=["edited", "no JSON"],
)  # fmt: skip
def test_heads_that_cannot_be_read_are_refused_at_the_start(world, text, why):
    (world.path.parent / "heads.json").write_text(text)
    with pytest.raises(LocalError, match=why):
        world.make_gate()


def met(world, generation):
    witness = Witness(world.ledger, world.made.roster, world.keys, heads_path(world))
    run(witness.greeted(b"", generation))
    return checked_file.read_json(heads_path(world), MemberHeads).generation


def heads_path(world):
    return world.path.parent / "heads.json"


def test_a_coordinator_that_was_taken_over_from_is_refused_after_a_restart_too(world):
    assert met(world, 41) == 41
    assert met(world, 41) == 41
    assert met(world, 43) == 43
    with pytest.raises(PeerError, match="under generation 42, and one under 43 has taken over"):
        met(world, 42)
    assert met(world, 0) == 43  # a release without leases says none


def test_a_generation_from_a_wrong_clock_shuts_nobody_out_for_long(world):
    day = 86_400_000
    now = int(utc_now().timestamp() * 1000)
    assert now + day <= met(world, 2**60) <= now + 2 * day
