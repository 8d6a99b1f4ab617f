"""What a silo shows to others, on the command line; they check it with nothing but its key."""

import json
import re
from dataclasses import replace

import pytest
from support.ledgers import (
    FEDERATION,
    HASH,
    WORDS,
    copied,
    full,
    intend,
    intend_masked,
    open_ledger,
    private,
    put_back,
    stored,
    write_outcome,
    write_start,
    write_stop,
)
from support.report_ledgers import contribute
from typer.testing import CliRunner

from staddle.commands.main import app
from staddle.errors import LocalError, PeerError, ProofError
from staddle.files.documents import canonical_json
from staddle.security.dp.budget import Budget, rekey_all
from staddle.security.identity import roster as rosters
from staddle.security.identity.keys import Role, create_keys, load_keys
from staddle.security.ledger import audit
from staddle.security.ledger import export as ledger_export
from staddle.security.ledger.receipt import Receipt
from staddle.security.ledger.records import Peer
from staddle.security.log import head


def invoke(*arguments):
    return CliRunner().invoke(app, ["ledger", *map(str, arguments)])


def run(*arguments, code=0):
    result = invoke(*arguments)
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def fails(*arguments):
    error = invoke(*arguments).exception
    assert isinstance(error, LocalError | PeerError | ProofError), error
    return str(error)


class World:
    """A silo's ledger, the roster, and a checkpoint of five records that somebody else holds."""

    def __init__(self, folder):
        members = {"f": Role.FOUNDER, "coordinator": Role.COORDINATOR}
        members |= {"silo-a": Role.SILO, "silo-b": Role.SILO}
        founder, *entries = (create_keys(folder / n, n, r, f"Org {n}") for n, r in members.items())
        roster = rosters.new(FEDERATION, [founder], 1)
        for entry in entries:
            roster = rosters.add(roster, entry)
        self.roster = folder / "roster.json"
        rosters.save(rosters.sign(roster, load_keys(folder / "f")), self.roster)
        self.folder = folder
        self.silo = folder / "state"
        self.ledger = self.silo / "ledger"
        self.key = load_keys(folder / "silo-a").log
        self.vkey = head.own_log_key(FEDERATION, folder / "silo-a")
        self.held = folder / "held.checkpoint"
        with self.open() as opened:
            for _ in range(5):
                write_start(opened, "staddle", HASH, HASH)
            self.held.write_bytes(bytes(opened.checkpoint()))
        full(self.ledger, key=self.key)
        with self.open() as opened:
            intend(opened, job="j2")

    def open(self):
        return open_ledger(self.ledger, key=self.key)

    def line(self, seq):
        return canonical_json(stored(self.ledger)[seq])


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def test_verify_takes_unsigned_records_from_an_agent_that_runs_alone(world):
    with world.open() as opened:
        write_stop(opened, "asked to stop")
        assert "ledger of silo-a" in (running := run("verify", world.silo))
        assert "17 of 18 records signed" in running
        assert running.endswith(f"verified: 18 records, head 17:{opened.head.leaf}\n")
        killed = copied(world.ledger)
    run("verify", world.silo)
    put_back(world.ledger, killed)
    said = run("verify", world.silo, code=1)
    alone = "the last 1 records are signed by nobody, and no agent is running to sign them"
    assert f"problem: {alone}" in said
    assert "17 of 18 records signed" in said
    document = json.loads(run("verify", world.silo, "--json", code=1))
    assert (document["ok"], document["running"]) == (False, False)
    assert (document["silo"], document["unsigned"]) == ("silo-a", 1)
    with world.open():
        pass
    assert "18 of 18 records signed" in run("verify", world.silo)


def test_verify_wants_the_ledger_of_the_silo_that_is_named(world):
    assert "verified" in run("verify", world.silo, "--silo", "silo-a")
    said = run("verify", world.silo, "--silo", "silo-b", code=1)
    other = "it is the ledger of silo silo-a, not of silo-b; name the folder of silo-b"
    assert f"problem: {other}" in said
    assert "NOT VERIFIED" in said


def test_verify_says_who_signed_and_finds_what_another_partys_checkpoint_shows(world):
    plain = "17 of 17 records signed, by whom was not checked (give --founder)"
    assert f"ledger of silo-a, federation {FEDERATION}\n{plain}" in run("verify", world.silo)
    shown = run("verify", world.silo, "--roster", world.roster, "--checkpoint", world.held)
    assert f"17 of 17 records signed, by {world.vkey}\n" in shown
    assert "\nverified: 17 records" in shown
    document = json.loads(run("verify", world.silo, "--roster", world.roster, "--json"))
    assert (document["ok"], document["checkpoint"], document["signed"]) == (True, 17, True)
    assert "--checkpoint needs --roster" in fails("verify", world.silo, "--checkpoint", world.held)
    note = world.folder / "newest"
    note.write_bytes((world.ledger / "checkpoint").read_bytes())
    put_back(world.ledger, {})
    with world.open() as opened:  # begun anew, by who has the key
        write_start(opened, "staddle", HASH, HASH)
    assert "verified: 1 records" in run("verify", world.silo, "--roster", world.roster)
    found = run("verify", world.silo, "--roster", world.roster, "--checkpoint", note, code=1)
    assert f"records were cut off: there are 1, and {note} holds a signed checkpoint of 17" in found


def fingerprint(world, member="f"):
    return load_keys(world.folder / member).entry.protocol_fingerprint


def test_a_roster_is_checked_and_its_founders_if_they_are_named(world):
    commands = [("verify", world.silo), ("summary", world.silo)]
    commands += [("report", world.silo, "--out", world.folder / "page.html")]
    proof = world.folder / "proof"
    run("prove", 3, world.silo, "--out", proof)
    (world.folder / "line").write_bytes(world.line(3))
    commands.append(("verify-proof", proof, "--record", world.folder / "line"))
    signed = world.roster.read_bytes()
    for command in commands:
        shown = run(*command, "--roster", world.roster, "--founder", fingerprint(world))
        if command[0] in ("verify", "summary"):
            assert "roster version 4: signed by f, whose keys were named" in shown
            plain = run(*command, "--roster", world.roster)
            said = "signed by founders that it names itself; for who vouches for it, give --founder"
            assert said in plain
        other = fails(*command, "--roster", world.roster, "--founder", fingerprint(world, "silo-b"))
        assert f"a pin does not fit: {fingerprint(world, 'silo-b')} after --founder" in other
        alone = fails(*command, "--founder", fingerprint(world))
        assert "no roster here is signed by SHA256:" in alone
        more = ("--founder", fingerprint(world), "--threshold", 2)
        assert "but 1 founders are named" in fails(*command, "--roster", world.roster, *more)
        for old, new, said in (
            (b'"version":4', b'"version":5', "its signature does not fit roster version 5"),
            (b'"f":"', b'"silo-b":"', "silo-b: its signature does not fit roster version 4"),
        ):
            world.roster.write_bytes(signed.replace(old, new))
            assert said in fails(*command, "--roster", world.roster)
        rosters.save(rosters.load(world.roster).model_copy(update={"signatures": {}}), world.roster)
        assert "signed: nobody; missing: f;" in fails(*command, "--roster", world.roster)
        world.roster.write_bytes(signed)


def test_receipts_are_checked_with_the_roster_of_their_time(world):
    """A message and its receipt, then one with a receipt that is for another round."""
    roster, coordinator = rosters.load(world.roster), load_keys(world.folder / "coordinator")
    peer = Peer(id="coordinator", spki=coordinator.entry.spki_sha256)

    def send(opened, number, signed):
        ref = contribute(opened, round_number=number, recipient=peer, status="silent")
        message = opened.unsettled[-1]
        place, root = message.place, opened.root(message.place.seq + 1).hex()
        members = rosters.members_digest(roster, ("silo-a",))
        fields = {"federation": FEDERATION, "members": members, "silo": "silo-a"}
        fields |= {"job": HASH, "size": message.digest.message.bytes, "sha256": HASH}
        fields |= {"ledger_seq": place.seq, "ledger_leaf": place.leaf, "ledger_root": root}
        receipt = Receipt(**fields, round=signed).sign(coordinator)
        write_outcome(opened, ref, "sent", message.intent.message.bytes, receipt.hex())

    with world.open() as opened:
        write_start(opened, "staddle", rosters.digest(roster), HASH)
        send(opened, 5, 5)
    options = ("--roster", world.roster, "--founder", fingerprint(world))
    page = world.folder / "page.html"
    others = "1 are under rosters that were not given"
    told = f"1 receipts hold; 0 messages that were sent have none; {others}"
    assert told in run("verify", world.silo, *options)
    assert told in run("summary", world.silo, *options)
    document = json.loads(run("verify", world.silo, *options, "--json"))
    assert document["receipts"] == {"good": 1, "without": 0, "unchecked": 1}
    assert document["rosters"] == {"4": ["f"]}
    run("report", world.silo, *options, "--out", page)
    text = page.read_text()
    for part in (
        f"Federation</dt><dd>{FEDERATION} (roster version 4, signed by f, whose keys were named",
        "1 hold: the coordinator of the roster signed that it received just these bytes",
        "under another roster than was given, and so not checked: 1",
    ):
        assert part in text
    assert (text.count("<td>holds</td>"), text.count("<td>not checked</td>")) == (1, 1)
    run("report", world.silo, "--out", page)
    assert "Receipts</dt><dd>not checked: no roster was given" in page.read_text()
    with world.open() as opened:
        send(opened, 6, 7)
    said = "is not what 'coordinator' signs for the digest at seq"
    shown = run("verify", world.silo, *options, code=1)
    assert f"problem: the receipt at seq 23 {said} 22" in shown
    assert "NOT VERIFIED" in shown
    assert said in run("summary", world.silo, *options, code=1)
    assert "does NOT hold" in run("report", world.silo, *options, "--out", page, code=1)
    assert "This ledger does not hold" in page.read_text()
    assert "NOT" not in run("verify", world.silo)  # without a roster nobody knows
    result = invoke("summary", world.silo, *options, "--json")
    assert (result.exit_code, said in result.stderr) == (1, True)
    assert {row["job"] for row in json.loads(result.stdout)} == {"j1", "j2", "lung-1", "(control)"}


def test_verify_with_a_roster_refuses_another_silos_signature(world):
    note = copied(world.ledger)["checkpoint"].decode()
    path, verify = world.ledger / "checkpoint", ("verify", world.silo, "--roster", world.roster)
    path.write_text(note.replace("silo-a", "silo-b"))
    assert "signed by none of the keys" in run(*verify, code=1)
    path.write_text(note.replace("/lung/", "/lungs/"))
    assert "of federation 'lungs', the roster of 'lung'" in fails(*verify)
    path.write_text(note.replace("/egress", "/ingress"))
    assert "which is not a silo's egress ledger" in fails(*verify)


def test_a_record_is_proven_to_who_has_the_key_alone(world):
    proof = world.folder / "12.tlog-proof"
    run("prove", 12, world.silo, "--out", proof)
    assert proof.read_text() == run("prove", 12, world.silo)
    line = world.folder / "line"
    line.write_bytes(world.line(12) + b"\n")
    for record in (line, world.line(12).decode()):
        for key in (("--key", world.vkey), ("--roster", world.roster)):
            shown = run("verify-proof", proof, "--record", record, *key)
            log = "staddle.example/lung/silo-a/egress"
            assert f"proven: this is record 12 of {log}, under its checkpoint of 17" in shown
    record = world.line(11).decode()
    assert "leads to" in fails("verify-proof", proof, "--record", record, "--key", world.vkey)
    other = head.own_log_key(FEDERATION, world.folder / "silo-b")
    assert "none of the keys" in fails("verify-proof", proof, "--record", line, "--key", other)
    assert "either --key VKEY or --roster ROSTER" in fails("verify-proof", proof, "--record", line)
    assert "record 17 is not under the checkpoint, which has 17" in fails("prove", 17, world.silo)
    assert "exists already" in fails("prove", 1, world.silo, "--out", proof)
    nothing = fails("prove", 1, world.folder / "silo-b")
    assert "no ledger here, in 'ledger' or in 'state/ledger'" in nothing


def test_growth_is_proven_to_who_holds_the_old_checkpoint(world):
    new, proof = world.ledger / "checkpoint", world.folder / "proof"
    run("consistency", world.held, new, world.silo, "--out", proof)
    text = proof.read_text()
    assert text.startswith("old 5\n")
    assert text.endswith("\n\n" + new.read_text())
    shown = run("verify-consistency", proof, "--old", world.held, "--roster", world.roster)
    assert "proven: staddle.example/lung/silo-a/egress only grew, from 5 records to 17" in shown
    hashes = text.split("\n\n")[0].split("\n")[1:]
    wrong = world.folder / "wrong"
    for change, said in [
        ("\n".join(["old 5", *hashes[::-1], "", new.read_text()]), "leads to"),
        ("\n".join(["old 5", *hashes[1:], "", new.read_text()]), "too short|leads to|too long"),
        (text.replace("old 5", "old 6"), "from 6 records, the old checkpoint has 5"),
        (text.replace("old 5", "old 05"), "is not a decimal"),
        (text.replace("old 5", "odd 5"), "its first line is 'odd 5'"),
        (text.replace(hashes[0], hashes[0][:-4]), "not 32 bytes|base64|padding"),
        ("old 5\n" + "\n".join([hashes[0]] * 64) + "\n\n" + new.read_text(), "over 63"),
        ("old 5\né\n\n" + new.read_text(), "consistency proof"),
    ]:
        wrong.write_text(change)
        assert change != text
        assert re.search(
            said, fails("verify-consistency", wrong, "--old", world.held, "--key", world.vkey)
        ), change
    assert "name them in order" in fails("consistency", new, world.held, world.silo)
    files = copied(world.ledger)
    put_back(world.ledger, {})
    with world.open() as opened:
        write_start(opened, "staddle", HASH, HASH)
    (world.folder / "new").write_bytes(files["checkpoint"])
    said = fails("consistency", world.held, world.folder / "new", world.silo)
    assert "the old checkpoint, of 5 records, is not of this ledger, which has 1" in said


def export(world, *options):
    path = world.folder / "export"
    path.unlink(missing_ok=True)
    run("export", world.silo, *options, "--out", path)
    return path, path.read_bytes().splitlines(keepends=True)


def test_a_redacted_export_tells_no_more_than_number_type_and_hash(world):
    path, (_, *lines) = export(world, "--redact")
    assert len(lines) == 17
    assert {tuple(json.loads(line)) for line in lines} == {("leaf", "proof", "seq", "type")}
    assert b"staddle 0.1.0" not in path.read_bytes()
    shown = run("verify-export", path, "--key", world.vkey)
    assert "proven: 17 leaf hashes, which are all, of " in shown


def test_an_export_of_a_job_has_its_records_and_what_became_of_its_messages(world):
    path, (_, *lines) = export(world, "--job", "j1")
    kinds = [json.loads(line)["type"] for line in lines]
    message = ["egress.intent", "egress.digest", "egress.outcome"]
    assert kinds == ["job.accept", "ingress", *message, "policy.deny"]
    shown = run("verify-export", path, "--roster", world.roster)
    assert "proven: 6 records, of job 'j1', of staddle.example/lung/silo-a/egress" in shown
    records = stored(world.ledger)
    wanted = [records[number] for number in (6, 9, 10, 11, 12, 13)]
    assert [json.loads(line)["record"] for line in lines] == wanted


def test_an_export_of_a_job_has_what_paid_and_nothing_of_what_others_spent(tmp_path):
    private(tmp_path / "ledger")
    exported = ledger_export.export(tmp_path / "ledger", redact=False, job="j1")
    _, *lines = map(json.loads, exported)
    assert {line["type"] for line in lines} == {"egress.intent", "egress.digest", "egress.outcome"}
    intents = [line["record"] for line in lines if line["type"] == "egress.intent"]
    assert [intent["dp"]["ids"] for intent in intents] == [[2, 4], [2, 4, 6]]
    _, *lines = map(json.loads, ledger_export.export(tmp_path / "ledger", redact=True))
    assert [line["type"] for line in lines].count("privacy.head") == 4
    assert not any("record" in line for line in lines)


def test_what_is_changed_in_an_export_is_found(world):
    path, lines = export(world)
    whole = b"".join(lines)
    assert "proven: 17 records, which are all" in run("verify-export", path, "--key", world.vkey)
    start = b'"seq":0,"type":"start"}'
    other = whole.replace(b'"software":"staddle"', b'"software":"stapple"', 1)
    of_job = whole.replace(b'"job":null', b'"job":"j1"')
    swapped = [*lines[:3], lines[4], lines[3], *lines[5:]]
    for change, said in [
        (other, "another leaf hash than it says"),
        (b"".join([*lines[:3], *lines[4:]]), "16 records, not each of the 17"),
        (b"".join([*lines[:4], lines[3], *lines[4:]]), "18 records, not each of the 17"),
        (b"".join(swapped), "not each of the 17 of its checkpoint once"),
        (whole.replace(start, start.replace(b"0", b"1"), 2), "another|leads to"),
        (whole.replace(b'"redacted":false', b'"redacted":true'), "line 2: unknown key 'record'"),
        (of_job.replace(lines[3], lines[3] * 2), "a record twice, or not in order"),
        (b"".join([lines[0], b"[]\n"]), "line 2: "),
        (b"".join([lines[0], b"{}\n"]), "line 2: missing key"),
        (whole.replace(start, start.replace(b"0", b'"0"')), "line 2: seq = '0': give a whole"),
        (whole.replace(b'"proof":["', b'"proof":["A', 1), "line 2: proof is not base64"),
        (lines[1], "line 1: missing key 'checkpoint'|line 1: "),
        (b"", "not valid JSON"),
    ]:
        path.write_bytes(change)
        assert re.search(said, fails("verify-export", path, "--key", world.vkey)), said


def rekey(world, old, new):
    return ("rekey", world.silo, "--old", world.folder / old, "--new", world.folder / new)


def test_a_ledger_goes_on_under_new_keys(world):
    create_keys(world.folder / "keys-2", "silo-a", Role.SILO, "Org silo-a")
    new = load_keys(world.folder / "keys-2").log
    with pytest.raises(LocalError, match="use the keys that it was signed with"):
        open_ledger(world.ledger, key=new)
    assert "the keys are of 'silo-a' and 'silo-b'" in fails(*rekey(world, "silo-a", "silo-b"))
    assert "signed by none of the keys" in fails(*rekey(world, "keys-2", "silo-a"))
    shown = run(*rekey(world, "silo-a", "keys-2"))
    key = head.own_log_key(FEDERATION, world.folder / "keys-2")
    assert f"record 17 names the new key, {key}" in shown
    with open_ledger(world.ledger, key=new) as opened:
        write_start(opened, "staddle", HASH, HASH)
    assert audit.verify(world.ledger, key=key).records == 19
    assert stored(world.ledger)[17]["old"] == str(world.vkey)


def test_privacy_budgets_go_on_under_new_keys_and_only_once(world):
    create_keys(world.folder / "keys-2", "silo-a", Role.SILO, "Org silo-a")
    old, new = (load_keys(world.folder / keys).log for keys in ("silo-a", "keys-2"))
    folder = world.ledger.parent / "privacy"

    def opened(dataset, key):
        return Budget.open(folder / dataset, dataset, FEDERATION, "silo-a", key, known=False)

    for dataset in ("first", "second"):
        with opened(dataset, old) as budget:
            budget.set_limit("8", "0.00001", HASH)
    assert rekey_all(folder / "none", FEDERATION, "silo-a", old, new) == ()
    with opened("first", old) as budget:
        budget.rekey(new)  # as if killed before the second
    shown = run(*rekey(world, "silo-a", "keys-2"))
    assert "the budget of data set 'second' continues under the new key" in shown
    for dataset in ("first", "second"):
        with pytest.raises(LocalError, match="use the keys that it was signed with"):
            opened(dataset, old)
        with opened(dataset, new) as budget:
            assert budget.limit.epsilon == "8"


def test_show_says_what_was_held_back(world):
    """It also says who reads a part that not everybody can open."""
    (denied,) = stored(world.ledger, "policy.deny")
    shown = json.loads(run("show", world.silo, "--json"))
    reasons = [each["reasons"] for each in shown if each.get("type") == "policy.deny"]
    assert reasons == [denied["reasons"]]
    shown = run("show", world.silo)
    said = " ".join(shown.replace("│", " ").split())
    assert f"held back by the policy: {denied['reasons'][0]}" in said
    assert max(len(line) for line in shown.splitlines()) <= 200
    assert "held back" not in run("show", world.silo, "--job", "j2")
    assert "read by" not in shown
    with world.open() as opened:
        words = [replace(WORDS[0], readers=("silos",)), *WORDS[1:]]
        intend_masked(opened, releases=words, readers=("silos", "sum"))
    shown = " ".join(run("show", world.silo).replace("│", " ").split())
    assert f"{WORDS[0].part} read by silos" in shown


def test_show_and_summary_by_part_and_recipient(world):
    assert "1 message, 184 bytes; at most 184 bytes more" in run(
        "show", world.silo, "--part", "metric"
    )
    assert "0 messages" in run("show", world.silo, "--part", "head")
    assert "1 message, 184 bytes" in run("show", world.silo, "--recipient", "coordinator")
    assert "0 messages" in run("show", world.silo, "--recipient", "silo-b")
    rows = json.loads(run("summary", world.silo, "--json"))
    assert {(row["method"], row["recipient"]) for row in rows} == {
        ("fedavg", "coordinator"),
        ("(control)", "coordinator"),
    }
