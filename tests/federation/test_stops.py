"""Silos hear that a job was stopped, or failed, and why, in real processes."""

import json

import pytest
from federation.conftest import TIMING
from typer.testing import CliRunner

from staddle.commands.federation import local_federation
from staddle.commands.federation.operator_client import connected
from staddle.commands.main import app

SILOS = ("north", "south")


@pytest.mark.timeout(300)
def test_silos_hear_why_a_job_stopped_or_failed(start, document):
    running = start(*SILOS)
    long = running.job(document("long", SILOS, "fedper", rounds=2000))
    later = running.job(document("later", SILOS, "fedper", rounds=2000))
    running.configure({**TIMING, "hold_seconds": 2})
    coordinator = running.restart_coordinator()
    north, south = map(running.start_silo, SILOS)
    operator = local_federation.write_operator(running.federation, running.address)

    def rows(silo):
        config = str(running.federation.silo_config(silo))
        found = CliRunner().invoke(app, ["silo", "jobs", "--json", "--config", config]).output
        return {row["job"]: (row["state"], row["why"]) for row in json.loads(found)}

    coordinator.wait_for("round.metrics", 120)
    assert rows("north")["long"][0] == "runs"
    south.stop()

    # One is there when the job is stopped, the other hears of it once it is back.
    with connected(operator) as calls:
        calls.stop(long.name)
        stopped = north.wait_for("job.stopped", 60)
        assert (stopped["job"], stopped["why"]) == ("long", "stopped by operator 'operator'")
        # The next job has its turn. It was accepted, and ends without a round.
        while (told := coordinator.wait_for("job.accepted", 60))["job"] != later.name:
            pass
        assert told["silo"] == "north"
        calls.withdraw(later.name)
    failed = north.wait_for("job.finished", 60)
    assert (failed["job"], failed["completed"]) == ("later", False)
    assert failed["why"] == "withdrawn by an operator"
    found = rows("north")
    assert found["long"][0] == "stopped"
    assert found["long"][1].endswith("; the coordinator says: stopped by operator 'operator'")
    why = "round 0 of 2000; the coordinator says: withdrawn by an operator"
    assert found["later"] == ("failed", why)
    assert rows("south")["long"][0] == "runs"
    south = running.start_silo("south")
    assert south.wait_for("job.stopped", 60)["why"] == stopped["why"]
    assert rows("south")["long"][0] == "stopped"

    # It runs again at both.
    with connected(operator) as calls:
        calls.resume(long.name)
    for silo, daemon in zip(SILOS, (north, south), strict=True):
        daemon.wait_for("round.given", 120)
        assert rows(silo)["long"][0] == "runs"
    running.stop()
    running.check_ledgers()
