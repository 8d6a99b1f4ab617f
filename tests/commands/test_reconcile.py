"""``staddle ledger reconcile`` with real keys; and the coordinator's ledger in the other commands."""

import json
from types import SimpleNamespace

import pytest
import typer
from ledgers import DIGESTS, HASH, copied, intend, payload, put_back
from typer.testing import CliRunner

from staddle.commands import ledger as commands
from staddle.commands import local_federation
from staddle.errors import LocalError
from staddle.security import ledger_audit
from staddle.security import roster as rosters
from staddle.security.head import Signer
from staddle.security.identity import Role, create_keys, load_keys
from staddle.security.ledger import Ledger
from staddle.security.receipt import Receipt
from staddle.security.receiving_ledger import ReceivingLedger
from staddle.security.records import Received

app = typer.Typer()
app.add_typer(commands.app, name="ledger")
SILO = "silo-a"


def run(*arguments, code=0):
    result = CliRunner().invoke(app, ["ledger", *map(str, arguments)])
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


@pytest.fixture
def world(tmp_path):
    """Both ledgers after two uploads, with receipts under the roster; ``before`` is the silo's after the first."""
    files = local_federation.make(tmp_path / "federation", [SILO])
    roster = rosters.load(files.folder / "roster.json")
    keys = {member: load_keys(files.folder / member / "keys") for member in (SILO, "coordinator")}
    ours, theirs = files.state(SILO) / "ledger", files.state("coordinator") / "ledger"
    before = {}
    with (
        Ledger.open(ours, SILO, "local", keys[SILO].log) as silo,
        ReceivingLedger.open(theirs, "coordinator", "local", keys["coordinator"].log) as coordinator,
    ):
        silo.start("staddle", rosters.digest(roster), HASH)
        coordinator.serving("coordinator", "staddle", rosters.digest(roster))
        for round_ in range(2):
            ref = intend(silo, round_number=round_)
            sealed = silo.digest(ref, DIGESTS, payload())
            place = {"ledger_seq": sealed.place.seq, "ledger_leaf": sealed.place.leaf}
            receipt = Receipt(
                federation="local",
                roster=rosters.digest(roster),
                silo=SILO,
                job=HASH,
                round=round_,
                size=payload().bytes,
                sha256=HASH,
                ledger_root=sealed.head.root.hex(),
                **place,
            ).sign(keys["coordinator"])
            fields = {"silo": SILO, "job": "j1", "job_digest": HASH, "round": round_, "message": payload(), **place}
            note = bytes(sealed.checkpoint).decode()
            coordinator.received(Received(**fields, checkpoint=note, receipt=receipt.hex()))
            silo.outcome(ref, "sent", payload().bytes, receipt.hex())
            silo.checkpoint()
            before = before or copied(ours)
    folder = files.folder
    return SimpleNamespace(files=files, keys=keys, ours=ours, theirs=theirs, before=before, folder=folder)


def sides(world):
    return ("--silo", world.folder / SILO, "--coordinator", world.folder / "coordinator")


def test_two_ledgers_that_agree(world):
    said = run("reconcile", *sides(world), "--roster", world.folder / "roster.json")
    assert "reconciled: silo-a and coordinator both have 2 uploads of 368 bytes and 0 deliveries" in said
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
    result = CliRunner().invoke(
        app, ["ledger", "reconcile", *map(str, sides(world)), "--roster", str(tmp_path / "other.json")]
    )
    assert isinstance(result.exception, LocalError)
    assert "does not hold" in str(result.exception)
    assert "signed by none of the keys" in str(result.exception)


def test_a_ledger_that_does_not_hold_is_not_compared(world):
    path = next(world.theirs.glob("seg-*.jsonl"))
    path.write_bytes(path.read_bytes().replace(b'"round":1', b'"round":2'))
    result = CliRunner().invoke(app, ["ledger", "reconcile", *map(str, sides(world))])
    assert "does not hold" in str(result.exception)
    assert "staddle ledger verify" in str(result.exception)


def test_what_a_coordinators_ledger_shows(world):
    folder = world.folder / "coordinator"
    said = run("show", folder)
    assert said.count(" received ") == 2
    assert "received: 2, 368 bytes" in said
    one = json.loads(run("show", folder, "--round", 1, "--json"))
    assert [(record["type"], record["silo"], record["round"]) for record in one] == [("received", SILO, 1)]
    assert json.loads(run("show", folder, "--recipient", "nobody", "--json")) == []
    for command, why in ((("summary", folder), "is the coordinator's ledger"), (("report", folder), "is the coord")):
        result = CliRunner().invoke(app, ["ledger", *map(str, command)])
        assert why in str(result.exception)
    result = CliRunner().invoke(app, ["ledger", "show", str(folder), "--part", "model"])
    assert "does not name parts" in str(result.exception)


def test_the_coordinators_ledger_is_verified_and_goes_on_under_new_keys_like_a_silos(world, tmp_path):
    folder = world.folder / "coordinator"
    assert "verified: 3 records" in run("verify", folder, "--roster", world.folder / "roster.json")
    create_keys(tmp_path / "new", "coordinator", Role.COORDINATOR, "Org")
    run("rekey", folder, "--old", folder / "keys", "--new", tmp_path / "new")
    key = Signer.of("local", "coordinator", load_keys(tmp_path / "new").log).public
    assert ledger_audit.verify(world.theirs, key=key).ok
    with ReceivingLedger.open(world.theirs, "coordinator", "local", load_keys(tmp_path / "new").log):
        pass
