"""A silo whose people have the last word, with real processes and the commands that they run."""

import json
import os
import pwd
import shutil
from hashlib import sha256

from typer.testing import CliRunner

from staddle.commands.federation import local_federation
from staddle.commands.main import app

SILOS = ("north", "south")
PURPOSE = "Predict digits for a test of approvals"


def call(*arguments, code=0, **options):
    found = CliRunner().invoke(app, list(map(str, arguments)), **options)
    assert found.exit_code == code, (found.output, found.exception)
    return found.output


def test_a_job_waits_for_a_person_who_sees_what_leaves_and_approves_this_file_alone(
    start, document, tmp_path
):
    running = start(*SILOS)
    files = []
    for seed in (1, 2):
        running.job(document("lung", SILOS, seed=seed, rounds=1, purpose=PURPOSE))
        files.append(tmp_path / f"{seed}.json")
        shutil.copy(running.federation.folder / "jobs" / "lung.json", files[-1])
    timing = {"admission_seconds": 600, "beat_seconds": 5, "hold_seconds": 2}
    running.configure(timing, [])
    coordinator = running.restart_coordinator()
    operator = local_federation.write_operator(running.federation, running.address)
    config = running.federation.silo_config("north")
    config.write_text(f'{config.read_text()}\n[admission]\napprove = "ask"\n')
    for silo in SILOS:
        running.start_silo(silo)

    def state():
        return {
            row["job"]: row["state"] for row in json.loads(call("silo", "jobs", "--json", *own))
        }

    def submitted(file):
        call("job", "submit", file, "--operator", operator)
        north.wait_for("job.waits", 60)

    own, north = ("--config", config), running.daemons["north"]
    submitted(files[0])
    assert coordinator.wait_for("job.waits", 60)["silo"] == "north"
    assert state() == {"lung": "waits for a person"}

    # Approved while the coordinator is away, but the policy changes before the silo accepts.
    shown = call("silo", "approve", "lung", *own, input="n\n", code=1)
    for text in ("signed by operator", PURPOSE, "part 'model'", "risk: the coordinator reads each"):
        assert text in " ".join(shown.split()), shown
    assert state() == {"lung": "waits for a person"}
    coordinator.stop()
    north.wait_for("coordinator.lost", 60)
    call("silo", "approve", "lung", *own, "--yes")
    north.wait_for("approvals.reloaded", 60)
    assert state() == {"lung": "approved"}
    policy = config.parent / "policy.toml"
    policy.write_text(f"# another\n{policy.read_text()}")
    north.wait_for("policy.reloaded", 60)
    assert state() == {"lung": "waits for a person"}
    coordinator = running.restart_coordinator()
    north.wait_for("job.waits", 60)

    # What is withdrawn waits for nobody; offered again, it does.
    call("job", "withdraw", "lung", "--operator", operator)
    assert north.wait_for("job.gone", 60)["job"] == "lung"
    assert state() == {"lung": "no longer offered"}
    call("silo", "approve", "lung", *own, "--yes", code=1)
    submitted(files[0])
    assert state() == {"lung": "waits for a person"}
    call("job", "withdraw", "lung", "--operator", operator)
    north.wait_for("job.gone", 60)

    # Nor does the approval of one file hold for another of its name.
    submitted(files[1])
    call("silo", "decline", "lung", *own, "--reason", "Why?", "--by", "the officer", "--yes")
    declined = coordinator.wait_for("job.declined", 60)
    assert (declined["silo"], declined["code"]) == ("north", "NOT_APPROVED")
    assert state() == {"lung": "declined"}
    assert "Why?" in call("silo", "jobs", *own)

    # A person may think better of it, and then the job begins.
    call("silo", "approve", "lung", *own, "--yes")
    ended = coordinator.wait_for("job.ended", 60)
    assert (ended["outcome"], ended["reason"]) == ("completed", "")
    north.wait_for("job.finished", 60)
    assert state() == {"lung": "finished"}
    running.stop()
    running.check_ledgers()
    (accepted,) = running.records("north", "job.accept")
    assert accepted["job_digest"] == running.jobs[1].digest
    digest = sha256(files[1].read_bytes()).hexdigest()
    assert accepted["person"]["by"] == pwd.getpwuid(os.getuid()).pw_name
    assert accepted["person"]["signed"] == digest
    (refused,) = running.records("north", "job.decline")
    assert refused["reasons"] == ["a person at this silo declined it"]
    assert (refused["person"]["by"], refused["person"]["signed"]) == ("the officer", digest)
    shown = " ".join(call("ledger", "show", config.parent).split())
    assert "declined by the officer" in shown, shown
    assert f"approved by {accepted['person']['by']}" in shown, shown
    kept = json.loads((config.parent / "state" / "approvals" / "decisions.json").read_text())
    assert kept["jobs"]["lung"]["signed"] == digest
    assert "Why?" not in (config.parent / "north.log").read_text()
