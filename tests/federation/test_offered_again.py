"""A job that a silo declined pends, is overtaken, offered again, withdrawn, and submitted again.

Real processes, real TLS, the operator's command line.
"""

import json
import shutil

import pytest
from federation.conftest import TIMING
from typer.testing import CliRunner

from staddle.algorithms.engines.simulation import simulate
from staddle.commands.federation import local_federation
from staddle.commands.main import app
from staddle.errors import RefusedError

SILOS = ("north", "south")


@pytest.fixture
def staddle(start, document, tmp_path):
    """A coordinator, silos that allow any of two jobs of one name and a third, and the operator's
    calls.

    ``files``: the two signed jobs. The third is long, and of another method.
    """
    running = start(*SILOS)
    files = []
    running.job(document("long", SILOS, "fedper", rounds=2000))
    for seed in (1, 2):
        running.job(document("lung", SILOS, seed=seed, rounds=1))
        files.append(tmp_path / f"{seed}.json")
        shutil.copy(running.federation.folder / "jobs" / "lung.json", files[-1])
    running.configure({**TIMING, "beat_seconds": 5, "hold_seconds": 2}, [])
    running.restart_coordinator()
    operator = local_federation.write_operator(running.federation, running.address)

    def call(*arguments):
        found = CliRunner().invoke(app, ["job", *map(str, arguments), "--operator", str(operator)])
        if found.exception is not None and not isinstance(found.exception, SystemExit):
            raise found.exception
        return found.output

    running.call, running.files = call, files
    return running


def shown(running):
    return json.loads(running.call("show", "lung", "--json"))


def answers(coordinator):
    """Wait until both silos answered one offer, in whichever order; each silo's event and code."""
    found = {}
    while set(found) != set(SILOS):
        event = coordinator.event(60)
        assert event is not None, coordinator.tail()
        if event["event"] in ("job.accepted", "job.declined"):
            found[event["silo"]] = (event["event"], event.get("code"))
    return found


def test_a_declined_job_pends_and_its_name_is_free_until_it_begins(staddle):
    running, call = staddle, staddle.call
    south = running.federation.silo_config("south").parent / "policy.toml"
    allowed = south.read_text()
    declining = allowed.replace('["fedavg"]', '["fedprox"]')  # no job but the long one
    south.write_text(declining)
    for silo in SILOS:
        running.start_silo(silo)
    coordinator = running.daemons["coordinator"]

    # It pends without south, which keeps its code, and is withdrawn.
    call("submit", running.files[0])
    pending = {"north": ("job.accepted", None), "south": ("job.declined", "POLICY")}
    assert answers(coordinator) == pending
    with pytest.raises(RefusedError, match="it has not ended yet"):
        call("submit", running.files[1])
    assert "lung" in call("withdraw", "lung")
    ended = coordinator.wait_for("job.ended", 60)
    assert (ended["outcome"], ended["reason"]) == ("failed", "withdrawn by an operator")

    # Another job of its name: south is asked again once it has read its new policy.
    assert "admitting" in call("submit", running.files[1])
    assert answers(coordinator) == pending
    assert (shown(running)["stage"], shown(running)["answers"]["south"]) == ("admitting", "POLICY")

    # The job behind it runs meanwhile, and the first one waits for its turn once south accepts.
    call("submit", running.federation.folder / "jobs" / "long.json")
    assert coordinator.wait_for("job.pends", 60)["silos"] == ["south"]
    assert coordinator.wait_for("round.opened", 60)["job"] == "long"
    assert shown(running)["stage"] == "admitting"
    # Its people have the policy allow what was offered: the agent reads that by itself.
    own = ["silo", "accept", "lung", "--config", str(running.federation.silo_config("south"))]
    told = CliRunner().invoke(app, [*own, "--yes"])
    assert "allows job 'lung'" in told.output, told.output
    assert "hold for later jobs, too: one of any operator" in told.output
    assert (south.parent / "policy.before.toml").read_text() == declining
    accepted = coordinator.wait_for("job.accepted", 60)
    assert (accepted["job"], accepted["silo"]) == ("lung", "south")
    assert shown(running)["stage"] == "queued"
    call("stop", "long")
    ended = coordinator.wait_for("job.ended", 60)
    assert (ended["job"], ended["outcome"], ended["reason"]) == ("lung", "completed", "")
    job = running.jobs[2]
    assert shown(running)["digest"] == job.digest
    for silo in SILOS:
        running.daemons[silo].wait_for("job.finished", 60)
    running.check_models(job, simulate(job, running.shards()))

    # From now on the name is taken, also after a restart.
    coordinator.stop()
    running.restart_coordinator()
    for file, why in zip(
        running.files, ("another job has the name", "its name stays taken"), strict=True
    ):
        with pytest.raises(Exception, match=why):
            call("submit", file)
    running.stop()
    running.check_ledgers()
    decisions = [(r["type"], r["job_digest"]) for r in running.records("north", "job.accept")]
    long, first, second = (each.digest for each in running.jobs)
    assert decisions == [("job.accept", each) for each in (first, second, long)]
