"""Certificates near their end are renewed while a job runs, with real processes and TLS."""

import datetime as dt
import json

import pytest
from federation.conftest import Running
from typer.testing import CliRunner

from staddle.algorithms.engines.simulation import simulate
from staddle.commands.main import app
from staddle.errors import PeerError
from staddle.security.identity import certificate
from staddle.security.identity import roster as rosters
from staddle.security.identity.certificate import utc_now
from staddle.security.identity.keys import held_keys, load_keys
from staddle.silo import connectivity

SILOS = ("east", "north")
AGE = dt.timedelta(days=500)  # of 731


def run(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def person(running: Running, name: str):
    """The file of a founder or operator, who has a copy of the roster."""
    folder = running.federation.folder
    (folder / f"{name}-roster.json").write_bytes((folder / "roster.json").read_bytes())
    path = folder / f"{name}.toml"
    lines = (
        "version = 1", f'coordinator = "{running.address}"', f'keys = "{name}"',
        f'roster = "{name}-roster.json"', "[trust]", 'federation = "local"', "threshold = 1",
        f'founders = ["{running.federation.founder}"]',
    )  # fmt: skip
    path.write_text("\n".join(lines))
    return path


def apart(running: Running, name: str) -> None:
    """Everybody has a roster file of their own, as on machines of their own."""
    folder = running.federation.folder
    path = folder / name / f"{'coordinator' if name == 'coordinator' else 'silo'}.toml"
    path.write_text(path.read_text().replace("../roster.json", "roster.json"))
    (folder / name / "roster.json").write_bytes((folder / "roster.json").read_bytes())


def waiting(coordinator, count):
    """The members whose renewals the coordinator has taken."""
    return {coordinator.wait_for("renewal.waits", 120)["member"] for _ in range(count)}


@pytest.mark.timeout(300)
def test_certificates_are_renewed_while_a_job_runs(start, document, monkeypatch):
    """The silo that comes late has the roster, and trusts the certificate, of before."""
    now = utc_now()
    with monkeypatch.context() as past:
        past.setattr(certificate, "utc_now", lambda: now - AGE)
        running: Running = start(*SILOS)
    before = running.roster
    job = running.job(document("lung", SILOS, rounds=4))
    running.configure({"admission_seconds": 120, "beat_seconds": 1, "hold_seconds": 5})
    for name in ("coordinator", *SILOS):
        apart(running, name)
    founder, operator = person(running, "founder"), person(running, "operator")
    renew = ("federation", "renew", "--founder", founder)
    coordinator = running.start_daemon("coordinator")
    coordinator.wait_for("listening", 60)

    # One silo has accepted; the job waits for the other.
    running.start_daemon("north")
    assert waiting(coordinator, 1) == {"north"}
    coordinator.wait_for("job.accepted", 120)
    assert run("federation", "members", "--founder", founder).count("renews its certificate") == 3
    said = run(*renew)
    for member in ("north", "coordinator", "founder"):
        assert f" {member}, of 'organisation of {member}'" in said
    assert f"version {before.version + 1}, 5 members, signed by founder" in said
    assert waiting(coordinator, 2) == {"founder", "coordinator"}
    assert coordinator.wait_for("listening", 60)["roster"] == before.version + 1
    running.daemons["north"].wait_for("roster.reloaded", 120)
    assert run(*renew) == ""  # by the founder's new certificate; nothing else waits

    running.start_daemon("east")
    assert waiting(coordinator, 1) == {"east"}
    coordinator.wait_for("round.metrics", 120)
    assert json.loads(run("job", "list", "--operator", operator, "--json"))[0]["job"] == "lung"
    said = run(*renew)
    assert " east, of" in said
    assert " operator, of" in said
    # The job may end before the coordinator begins anew, or after it.
    seen = {}
    while not {"job.ended", "listening"} <= seen.keys():
        told = coordinator.event(120)
        assert told is not None, coordinator.tail()
        seen[told["event"]] = told
    assert (seen["job.ended"]["outcome"], seen["job.ended"]["reason"]) == ("completed", "")
    running.finished("lung")
    # The operator has a roster of before, and is let in by the new certificate alone.
    assert json.loads(run("job", "list", "--operator", operator, "--json"))[0]["job"] == "lung"
    running.check_models(job, simulate(job, running.shards(job.silos)))

    # Everybody has the last roster, in which all certificates are others.
    after = rosters.load(running.federation.folder / "coordinator" / "state" / "roster.json")
    assert after.version == before.version + 2
    for name in ("east/state/", "north/state/", "operator-", "founder-"):
        assert rosters.load(running.federation.folder / f"{name}roster.json") == after
    old = {entry.spki_sha256 for entry in before.entries}
    assert old.isdisjoint(entry.spki_sha256 for entry in after.entries)
    assert rosters.members_digest(after, SILOS) == rosters.members_digest(before, SILOS)

    # The old certificate is refused; the coordinator's is shown to those who have no other.
    folder, address = running.federation.keys("north"), running.address
    state = running.federation.state("north")
    first, second = held_keys(folder, state)
    assert load_keys(folder, after.entries, state).folder == second.folder
    for known in (before, after):
        connectivity.handshake(address, second.folder, known.coordinator)
        with pytest.raises(PeerError, match="ended the handshake"):
            connectivity.handshake(address, first.folder, known.coordinator)
    running.stop()
    running.check_ledgers()
