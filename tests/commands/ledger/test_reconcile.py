"""``staddle ledger reconcile`` with real keys.

And the coordinator's ledger in the other commands.
"""

import json
from types import SimpleNamespace

import pytest
from support.ledgers import (
    DIGESTS,
    HASH,
    copied,
    intend,
    message_digest,
    put_back,
    stored,
    write_digest,
    write_outcome,
    write_refused,
    write_serving,
    write_start,
)
from typer.testing import CliRunner

from staddle.commands.federation import local_federation
from staddle.commands.main import app
from staddle.errors import LocalError, StaddleError
from staddle.files.documents import canonical_json
from staddle.security.identity import roster as rosters
from staddle.security.identity.keys import Role, create_keys, load_keys
from staddle.security.ledger import audit
from staddle.security.ledger.egress_ledger import Ledger
from staddle.security.ledger.ingress_ledger import ReceivingLedger
from staddle.security.ledger.receipt import Receipt
from staddle.security.ledger.records import Received
from staddle.security.log import head
from staddle.security.log.append_log import AppendLog
from staddle.security.log.chain import FRAME
from staddle.security.log.head import Signer
from staddle.silo.egress.witness import HEADS

SILO = "silo-a"


def invoke(*arguments):
    return CliRunner().invoke(app, ["ledger", *map(str, arguments)])


def run(*arguments, code=0):
    result = invoke(*arguments)
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def receiving(folder, keys):
    return ReceivingLedger.open(folder, "coordinator", "local", keys.log)


@pytest.fixture
def world(tmp_path):
    """Both ledgers after two uploads, with receipts under the roster.

    ``before`` is the silo's after the first.
    """
    files = local_federation.make(tmp_path / "federation", [SILO])
    roster = rosters.load(files.folder / "roster.json")
    keys = {member: load_keys(files.folder / member / "keys") for member in (SILO, "coordinator")}
    ours, theirs = files.state(SILO) / "ledger", files.state("coordinator") / "ledger"
    before = {}
    with (
        Ledger.open(ours, SILO, "local", keys[SILO].log) as silo,
        receiving(theirs, keys["coordinator"]) as coordinator,
    ):
        write_start(silo, "staddle", rosters.digest(roster), HASH)
        write_serving(coordinator, "coordinator", "staddle", rosters.digest(roster))
        for round_ in range(2):
            ref = intend(silo, round_number=round_)
            sealed = write_digest(silo, ref, DIGESTS, message_digest())
            place = {"ledger_seq": sealed.place.seq, "ledger_leaf": sealed.place.leaf}
            fields = {"silo": SILO, "round": round_, **place}
            members = rosters.members_digest(roster, (SILO,))
            signed = {"federation": "local", "members": members, "job": HASH}
            signed |= {"size": message_digest().bytes, "sha256": HASH}
            receipt = Receipt(**fields, **signed, ledger_root=sealed.head.root.hex())
            receipt = receipt.sign(keys["coordinator"])
            fields |= {"job": "j1", "job_digest": HASH, "message": message_digest()}
            note = bytes(sealed.checkpoint).decode()
            coordinator.seal(Received(**fields, checkpoint=note, receipt=receipt.hex()))
            write_outcome(silo, ref, "sent", message_digest().bytes, receipt.hex())
            silo.checkpoint()
            before = before or copied(ours)
    folder = files.folder
    return SimpleNamespace(
        files=files, keys=keys, ours=ours, theirs=theirs, before=before, folder=folder
    )


def sides(world):
    return ("--silo", world.folder / SILO, "--coordinator", world.folder / "coordinator")


def test_two_ledgers_that_agree(world):
    said = run("reconcile", *sides(world), "--roster", world.folder / "roster.json")
    both = "silo-a and coordinator both have 2 uploads of 368 bytes and 0 deliveries"
    assert f"reconciled: {both}" in said
    assert "receipts and heads checked" in said
    assert "not checked (give --roster)" in run("reconcile", *sides(world))
    found = json.loads(run("reconcile", *sides(world), "--json"))
    assert (found["ok"], found["uploads"], found["differences"]) == (True, 2, [])


def test_a_silos_ledger_that_was_rolled_back(world):
    put_back(world.ours, world.before)
    said = run("reconcile", *sides(world), "--roster", world.folder / "roster.json", code=1)
    assert "DIFFERENCE: the coordinator received 184 bytes of job 'j1', round 1" in said
    assert "NOT RECONCILED" in said
    assert json.loads(run("reconcile", *sides(world), "--json", code=1))["ok"] is False


def test_a_receipt_or_head_that_does_not_hold_under_the_roster(world, tmp_path):
    """A roster in which both have other keys than signed here."""
    entries = {"f": create_keys(tmp_path / "f", "f", Role.FOUNDER, "F")}
    roster = rosters.new("local", [entries["f"]], 1)
    for member, role in ((SILO, Role.SILO), ("coordinator", Role.COORDINATOR)):
        roster = rosters.add(roster, create_keys(tmp_path / member, member, role, "Org"))
    rosters.save(rosters.sign(roster, load_keys(tmp_path / "f")), tmp_path / "other.json")
    result = invoke("reconcile", *sides(world), "--roster", tmp_path / "other.json")
    assert isinstance(result.exception, LocalError)
    assert "does not hold" in str(result.exception)
    assert "signed by none of the keys" in str(result.exception)


def test_a_ledger_that_does_not_hold_is_not_compared(world):
    path = next(world.theirs.glob("seg-*.jsonl"))
    path.write_bytes(path.read_bytes().replace(b'"round":1', b'"round":2'))
    result = invoke("reconcile", *sides(world))
    assert "does not hold" in str(result.exception)
    assert "staddle ledger verify" in str(result.exception)


def test_what_a_coordinators_ledger_shows(world):
    folder = world.folder / "coordinator"
    said = run("show", folder)
    assert said.count(" received ") == 2
    assert "received: 2, 368 bytes" in said
    one = json.loads(run("show", folder, "--round", 1, "--json"))
    found = [(record["type"], record["silo"], record["round"]) for record in one]
    assert found == [("received", SILO, 1)]
    assert json.loads(run("show", folder, "--recipient", "nobody", "--json")) == []
    for command, why in (("summary", "is the coordinator's ledger"), ("report", "is the coord")):
        assert why in str(invoke(command, folder).exception)
    assert "does not name parts" in str(invoke("show", folder, "--part", "model").exception)


def test_the_coordinators_ledger_goes_on_under_new_keys_like_a_silos(world, tmp_path):
    folder = world.folder / "coordinator"
    assert "verified: 3 records" in run("verify", folder, "--roster", world.folder / "roster.json")
    create_keys(tmp_path / "new", "coordinator", Role.COORDINATOR, "Org")
    run("rekey", folder, "--old", folder / "keys", "--new", tmp_path / "new")
    key = Signer.of("local", "coordinator", load_keys(tmp_path / "new").log).public
    assert audit.verify(world.theirs, key=key).ok
    with receiving(world.theirs, load_keys(tmp_path / "new")):
        pass


def other_roster(world, **entries):
    """The same members, but for these."""
    old = rosters.load(world.folder / "roster.json")
    roster = rosters.new("local", [create_keys(world.folder / "f", "f", Role.FOUNDER, "F")], 1)
    for entry in old.entries:
        if entry.role in (Role.SILO, Role.COORDINATOR):
            roster = rosters.add(roster, entries.get(entry.id.replace("-", "_"), entry))
    rosters.save(rosters.sign(roster, load_keys(world.folder / "f")), world.folder / "other.json")
    return world.folder / "other.json"


def test_a_silo_that_went_on_under_new_keys(world, tmp_path):
    roster = other_roster(world, silo_a=create_keys(tmp_path / "new", SILO, Role.SILO, "Org"))
    run("rekey", world.ours, "--old", world.folder / SILO / "keys", "--new", tmp_path / "new")
    said = run("reconcile", *sides(world), "--roster", roster)
    assert "both have 2 uploads" in said
    assert "2 receipts are under other rosters, not checked" in said


def test_receipts_of_an_older_roster_hold_under_a_newer_one_with_the_same_keys(world):
    """Somebody else came or went: the members that a receipt is bound to are the same."""
    said = run("reconcile", *sides(world), "--roster", other_roster(world))
    assert "both have 2 uploads" in said
    assert "receipts and heads checked\n" in said
    assert "other rosters" not in said


def test_a_silo_that_began_anew_under_new_keys(world, tmp_path):
    roster = other_roster(world, silo_a=create_keys(tmp_path / "new", SILO, Role.SILO, "Org"))
    put_back(world.ours, {})
    with Ledger.open(world.ours, SILO, "local", load_keys(tmp_path / "new").log) as silo:
        write_start(silo, "staddle", HASH, HASH)
    said = run("reconcile", *sides(world), "--roster", roster)
    assert "gap: 2 records of the coordinator are of a ledger under another log key" in said
    # whose key it is only a roster says
    assert "DIFFERENCE" in run("reconcile", *sides(world), code=1)


def written_anew(world, records, member):
    """The coordinator's ledger of these records, under a member's key."""
    put_back(world.theirs, {})
    with AppendLog.open(world.theirs, Signer.of("local", member, world.keys[member].log)) as log:
        for record in records:
            log.append({name: value for name, value in record.items() if name not in FRAME})


def test_a_ledger_that_another_member_signed_is_not_the_coordinators(world):
    """Whoever has a silo's log key could make one that says what its own does."""
    written_anew(world, stored(world.theirs), SILO)
    result = invoke("reconcile", *sides(world), "--roster", world.folder / "roster.json")
    assert isinstance(result.exception, LocalError)
    assert "is the ledger of 'silo-a'; the coordinator is 'coordinator'" in str(result.exception)


def test_what_the_silo_holds_of_the_coordinators_ledger_is_compared(world):
    """The coordinator's ledger signed without its last record, of which the silo has no receipt."""
    why = "so the coordinator must not say any more"
    with receiving(world.theirs, world.keys["coordinator"]) as ledger:
        write_refused(ledger, SILO, head.stored(world.ours), why)
    kept = {"forks": {}, "heads": {"coordinator": bytes(head.stored(world.theirs)).decode()}}
    (world.ours.parent / HEADS).write_bytes(canonical_json(kept))
    for roster in (("--roster", world.folder / "roster.json"), ()):
        run("reconcile", *sides(world), *roster)
    written_anew(world, stored(world.theirs)[:-1], "coordinator")
    for roster in (("--roster", world.folder / "roster.json"), ()):
        said = run("reconcile", *sides(world), *roster, code=1)
        cut = "records were cut off: there are 3, and silo-a holds"
        assert f"DIFFERENCE: the coordinator's ledger: {cut}" in said


def test_a_head_that_the_coordinator_did_not_sign_blames_nobody(world):
    """Whoever can write the silo's files cannot make the coordinator's ledger look altered."""
    note = Signer.of("local", "coordinator", world.keys["coordinator"].log).sign(99, bytes(32))
    text = bytes(note).decode().replace("\n99\n", "\n98\n")
    heads = canonical_json({"forks": {}, "heads": {"coordinator": text}})
    (world.ours.parent / HEADS).write_bytes(heads)
    result = invoke("reconcile", *sides(world), "--roster", world.folder / "roster.json")
    assert isinstance(result.exception, LocalError)
    assert "heads.json: what it has of 'coordinator'" in str(result.exception)


def test_a_roster_that_its_founders_did_not_sign_says_nothing(world, tmp_path):
    roster = other_roster(world)
    fingerprint = load_keys(world.folder / "f").entry.protocol_fingerprint
    said = run("reconcile", *sides(world), "--roster", roster, "--founder", fingerprint)
    assert "signed by f" in said
    said = run("reconcile", *sides(world), "--roster", roster)
    assert "for who vouches for it, give --founder" in said
    stranger = create_keys(tmp_path / "stranger", "f", Role.FOUNDER, "F").protocol_fingerprint
    edited = tmp_path / "edited.json"
    signatures = dict.fromkeys(rosters.load(roster).signatures, "00" * 64)
    rosters.save(rosters.load(roster).model_copy(update={"signatures": signatures}), edited)
    for file, *more in ((edited,), (roster, "--founder", stranger)):
        result = invoke("reconcile", *sides(world), "--roster", file, *more)
        assert isinstance(result.exception, StaddleError), result.output
