"""A federation begins and grows by the commands that people type, with a real coordinator."""

import json
import re
import tomllib

import numpy as np
import pytest
from federation.conftest import free_port
from typer.testing import CliRunner

from staddle.commands.federation.processes import ChildProcess, running
from staddle.commands.main import app
from staddle.files.documents import canonical_json
from staddle.security.identity import roster as rosters
from staddle.security.identity.keys import Role, create_keys, load_keys
from staddle.security.policy import policy as policies
from staddle.silo import config as configs
from staddle.silo.ingress import coordinator_word

RECORDS = "--data FILE.csv --label COLUMN"


def pin(folder):
    return load_keys(folder / "founder" / "keys").entry.protocol_fingerprint


LOG = '# log = "text"', 'log = "json"'


def run(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def fails(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 1, result.output
    return str(result.exception)


@pytest.fixture
def founded(tmp_path, fork_server):
    """A founder's folders; its coordinator runs."""
    port = free_port()
    folder = tmp_path / "lung"
    said = run(
        "federation", "new", folder, "--name", "lung", "--address", f"127.0.0.1:{port}",
        "--organisation", "Northern Hospital",
    )  # fmt: skip
    assert f"staddle coordinator run --config {folder}/coordinator/coordinator.toml" in said
    config = folder / "coordinator" / "coordinator.toml"
    config.write_text(config.read_text().replace(*LOG))
    daemon = ChildProcess("coordinator", ("-m", "staddle.coordinator"), config, fork_server.launch)
    with running([daemon]):
        daemon.wait_for("listening", 60)
        yield folder, daemon


@pytest.mark.timeout(300)
def test_an_institution_joins_and_its_silo_connects(founded, tmp_path, fork_server):
    folder, coordinator = founded
    founder = ("--founder", folder / "founder" / "founder.toml")
    sent = tmp_path / "a.invitation"
    said = run("invite", "hospital-a", *founder, "--out", sent)
    unnamed = "--organisation 'NAME OF YOUR ORGANISATION'"
    # Whoever changes the invitation on its way would change a fingerprint next to it, too.
    assert f"  staddle join a.invitation {unnamed} {RECORDS}\n" in said

    # at the hospital
    place = tmp_path / "hospital-a"
    joining = ("join", sent, "--organisation", "Hospital A", "--out", place, "--no-wait")
    spaced = " ".join(re.findall(".{1,6}", pin(folder).removeprefix("SHA256:")))
    joining = (*joining, "--founder", spaced)
    said = run(*joining)
    assert "run the same command again" in said
    own = re.findall(r"SHA256:\S{43}", said)[-1]
    assert coordinator.wait_for("enrolment.waits", 60)["key"] == own
    assert run(*joining) == said  # nothing is made anew

    # at the founder
    assert "waits, invited by founder" in run("federation", "members", *founder)
    admitting = ("federation", "admit", "hospital-a", *founder, "--fingerprint")
    said = fails(*admitting, own.replace(own[-1], "A" if own[-1] != "A" else "B"))
    assert "Compare it again" in said
    assert own not in said
    assert "'hospital-b' does not wait" in fails(
        "federation", "admit", "hospital-b", *founder, "--fingerprint", own
    )
    assert "version 4, 4 members, signed by founder" in run(*admitting, own)
    assert coordinator.wait_for("listening", 60)["roster"] == 4

    # at the hospital
    assert "Admitted" in run(*joining)
    config = place / "silo.toml"
    for before, after in (LOG, ("my-federation", "lung")):
        config.write_text(config.read_text().replace(before, after))
    rng = np.random.default_rng(0)
    x = rng.random((40, 1, 8, 8), "float32")
    np.savez(place / "data.npz", x=x, y=np.arange(40) % 10)
    silo = ChildProcess("hospital-a", ("-m", "staddle.silo"), config, fork_server.launch)
    with running([silo]):
        silo.wait_for("connected", 60)

    # whoever leaves is let in no more
    assert "version 5, 3 members" in run("federation", "remove", "hospital-a", *founder)
    assert coordinator.wait_for("listening", 60)["roster"] == 5
    silo = ChildProcess("hospital-a", ("-m", "staddle.silo"), config, fork_server.launch)
    with running([silo]):
        lost = silo.wait_for("coordinator.lost", 60)
        assert "no longer has this silo" in lost["why"]
        # Before it asks again, it keeps what `silo jobs` says.
        assert silo.wait_for("coordinator.lost", 60)["times"] == 2
        assert coordinator_word.read(configs.load(config).directory).lost == lost["why"]


def test_one_roster_admits_all_whose_fingerprints_were_read_out(founded, tmp_path, monkeypatch):
    """Enter admits nobody, and another fingerprint is asked for again."""
    folder, coordinator = founded
    monkeypatch.chdir(tmp_path)
    founder = ("--founder", folder / "founder" / "founder.toml")
    assert "nobody waits" in run("federation", "admit", *founder)
    names = ("north", "south", "west")
    own = {}
    said = run("invite", *names, *founder, *(f"--organisation={name} clinic" for name in names))
    for name in names:
        line = f"staddle join {name}.invitation"
        assert f"  {line} {RECORDS}\n" in said
        typed = CliRunner().invoke(app, [*line.split()[1:], "--no-wait"], input=f"{pin(folder)}\n")
        assert typed.exit_code == 0, (typed.output, typed.exception)
        own[name] = re.findall(r"SHA256:\S{43}", typed.output)[-1]
    assert load_keys(tmp_path / "west" / "keys").entry.organisation == "west clinic"

    def admit(*answers):
        typed = "".join(f"{answer}\n" for answer in answers)
        arguments = ["federation", "admit", *map(str, founder)]
        result = CliRunner().invoke(app, arguments, input=typed)
        assert result.exit_code == 0, (result.output, result.exception)
        assert own["north"] not in result.output  # whoever was not asked is not shown
        return result.output

    assert "nobody was admitted" in admit("", "", "")
    bare = own["south"].removeprefix("SHA256:")
    said = admit(own["south"].swapcase(), "", f"sha256: {bare[:20]} {bare[20:]}", own["west"])
    assert "not the fingerprint of the 'north' that waits" in said
    assert "version 4, 5 members" in said
    assert coordinator.wait_for("listening", 60)["roster"] == 4
    # Whoever has the roster of before takes over the new one, and no older one.
    operator = ("job", "list", "--operator", folder / "operator" / "operator.toml")
    mine = folder / "operator" / "roster.json"
    assert "version 4 was taken over, in place of 3" in run(*operator)
    assert rosters.load(mine).version == 4
    newer = rosters.sign(
        rosters.remove(rosters.load(mine), "west"), load_keys(folder / "founder" / "keys")
    )
    rosters.save(newer, mine)
    assert "taken over" not in run(*operator)
    assert rosters.load(mine) == newer
    (tmp_path / "south.csv").write_text("age;sick\n30;no\n40;yes\n")
    records = ("--data", "south.csv", "--label", "sick")
    south = ("join", "south.invitation", "--founder", pin(folder))
    assert "has no column 'ill'" in fails(*south, "--data", "south.csv", "--label", "ill")
    said = run(*south, *records)
    assert "staddle silo accept JOB --config south/silo.toml" in said
    table = tomllib.loads((tmp_path / "south" / "silo.toml").read_text())["data"]
    assert table == {
        "kind": "csv", "file": "../south.csv", "delimiter": ";", "label": "sick",
        "classes": ["no", "yes"], "features": ["age"],
    }  # fmt: skip
    assert not policies.load_alone(tmp_path / "south" / "policy.toml", "data").file.allow
    rosters.save(rosters.load(folder / "coordinator" / "state" / "roster.json"), mine)
    stale = rosters.parse(
        canonical_json(json.loads((tmp_path / "west.invitation").read_bytes())["roster"]), "it"
    )
    rosters.save(stale, tmp_path / "south" / "roster.json")
    checked = CliRunner().invoke(
        app, ["silo", "check", "--config", str(tmp_path / "south" / "silo.toml")]
    )
    assert "roster version 4 of the coordinator counts, in place of 3" in checked.output
    assert "version 4 of 'lung'" in checked.output
    # It changes nothing: the agent takes it over by itself.
    assert rosters.load(tmp_path / "south" / "roster.json") == stale
    assert not (tmp_path / "south" / "state").exists()
    assert "in roster version 4 already" in fails("invite", "east", "west", *founder)
    assert not (tmp_path / "east.invitation").exists()


def test_ids_that_no_member_can_have_are_said(founded, tmp_path, monkeypatch):
    folder, _ = founded
    monkeypatch.chdir(tmp_path)
    founder = ("--founder", folder / "founder" / "founder.toml")
    assert "such as klinik-sud" in fails("invite", "Klinik Süd", *founder)
    assert "such as hospital-a" in fails("invite", "病院", *founder)
    assert "given 1 times for 2 ids" in fails("invite", "a", "b", *founder, "--organisation", "A")
    run("invite", "founder", *founder, "--replace")


def test_an_operator_joins(founded, tmp_path):
    folder, coordinator = founded
    founder = ("--founder", folder / "founder" / "founder.toml")
    sent = tmp_path / "op.invitation"
    run("invite", "op-2", "--operator", *founder, "--out", sent)
    place = tmp_path / "op-2"
    joining = ("join", sent, "--organisation", "Hospital A", "--out", place, "--no-wait")
    joining = (*joining, "--founder", pin(folder))
    own = re.findall(r"SHA256:\S{43}", run(*joining))[-1]
    run("federation", "admit", "op-2", *founder, "--fingerprint", own)
    assert coordinator.wait_for("listening", 60)["roster"] == 4
    assert f"staddle job list --operator {place}/operator.toml" in run(*joining)
    assert json.loads(run("job", "list", "--operator", place / "operator.toml", "--json")) == []
    # another roster that a founder signed by hand comes in the same way
    roster = rosters.load(folder / "founder" / "roster.json")
    path = tmp_path / "next.json"
    rosters.save(rosters.remove(roster, "op-2"), path)
    run("roster", "sign", path, "--keys", folder / "founder" / "keys")
    assert "version 5, 3 members" in run("federation", "publish", *founder, "--roster", path)
    assert coordinator.wait_for("listening", 60)["roster"] == 5
    assert "no answer" in fails("job", "list", "--operator", place / "operator.toml")


def test_what_is_wrong_with_an_invitation_is_said(founded, tmp_path):
    folder, _ = founded
    founder = ("--founder", folder / "founder" / "founder.toml")
    sent = tmp_path / "a.invitation"
    run("invite", "hospital-a", *founder, "--out", sent)
    whole = sent.read_bytes()
    named = ("--no-wait", "--founder", pin(folder), "--out")
    joining = ("join", sent, "--organisation", "A", *named, tmp_path / "a")
    sent.write_bytes(whole.replace(b'"lung"', b'"lunx"'))
    assert "the file was changed" in fails(*joining)
    sent.write_bytes(whole[:-30])
    assert f"{sent}: " in fails(*joining)
    assert not (tmp_path / "a").exists()
    sent.write_bytes(whole)
    run(*joining)
    # somebody else with the same file
    thief = ("join", sent, "--organisation", "A", *named, tmp_path / "thief")
    assert "was used already, with other keys" in fails(*thief)
    # another name in the same folder
    other = ("join", sent, "--organisation", "B", *named, tmp_path / "a")
    assert "give another folder with --out" in fails(*other)
    assert "exists already" in fails("invite", "hospital-a", *founder, "--out", sent)
    assert "not empty" in fails(
        "federation", "new", folder, "--name", "x", "--address", "a:1", "--organisation", "x"
    )
    assert "sent: a file; choose" in fails(
        "federation", "new", sent, "--name", "x", "--address", "a:1", "--organisation", "x"
    ).replace(sent.name, "sent")


def test_an_invitation_that_was_changed_on_its_way_is_found_by_the_founders_fingerprint(
    founded, tmp_path
):
    """Whoever intercepts it can put in founders, pins and a coordinator of their own."""
    folder, _ = founded
    sent = tmp_path / "a.invitation"
    run("invite", "hospital-a", "--founder", folder / "founder" / "founder.toml", "--out", sent)
    document, founder = json.loads(sent.read_bytes()), pin(folder)
    thief = create_keys(tmp_path / "thief", "thief", Role.FOUNDER, "org")
    roster = rosters.parse(canonical_json(document["roster"]), "it")
    # theirs, signed by them alone; the real founder stands in it, too
    forged = rosters.sign(rosters.add(roster, thief), load_keys(tmp_path / "thief"))
    pins = [founder, thief.protocol_fingerprint]
    changes = {
        "their roster": {"roster": forged.model_dump(mode="json"),
                         "trust": {**document["trust"], "founders": pins}},
        "a pin more": {"trust": {**document["trust"], "founders": pins}},
        "their pin": {"trust": {**document["trust"], "founders": pins[1:]}},
    }  # fmt: skip
    joining = ("join", sent, "--organisation", "A", "--no-wait", "--out", tmp_path / "a")
    for change in changes.values():
        sent.write_bytes(canonical_json({**document, **change}) + b"\n")
        fails(*joining, "--founder", founder)
    sent.write_bytes(canonical_json(document) + b"\n")
    said = fails(*joining, "--founder", thief.protocol_fingerprint)
    assert "of a founder with another fingerprint" in said
    assert founder not in said
    assert not (tmp_path / "a").exists()
    run(*joining, "--founder", founder)
