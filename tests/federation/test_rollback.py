"""A ledger that was put back to an older copy: its silo stops, whoever still holds a head.

Real processes.
"""

import copy
import json
import shutil
from dataclasses import replace

import pytest
from federation.conftest import TIMING, running, small_document

from staddle.commands.federation import local_federation
from staddle.commands.federation.operator_client import connected
from staddle.commands.ledger.reconcile import compare
from staddle.coordinator.storage.database import Database
from staddle.errors import AbortedError
from staddle.security.ledger import audit

SILOS = ("north", "east", "south")


@pytest.fixture(scope="module")
def two_jobs(tmp_path_factory, fork_server):
    """Three silos after two jobs; all daemons are stopped.

    A copy of north lies beside, from after the first job.
    """
    with running(tmp_path_factory.mktemp("rollback"), SILOS, fork_server.launch) as made:
        for number in (1, 2):
            made.job(small_document(f"job-{number}", SILOS))
        made.configure(TIMING, ["job-1"])
        for name in ("coordinator", *SILOS):
            made.start_daemon(name)
        ended(made, "job-1")
        made.daemons["north"].wait_for("job.finished", 60)
        made.daemons["north"].kill()  # as a snapshot of a virtual machine would have it
        made.daemons["north"].stop()
        copied = made.federation.folder / "copy"
        shutil.copytree(made.federation.state("north"), copied, symlinks=True)
        made.start_silo("north")
        operator = local_federation.write_operator(made.federation, made.address)
        with connected(operator) as here:
            here.submit((made.federation.folder / "jobs" / "job-2.json").read_bytes())
        ended(made, "job-2")
        for silo in SILOS:
            made.daemons[silo].stop()
    made.job(small_document("job-3", SILOS, round_timeout=20, min_cohort=2))
    return made


@pytest.fixture
def federation(two_jobs, tmp_path):
    """The two jobs' federation in a folder of the test's own."""
    made, folder = copy.copy(two_jobs), tmp_path / "federation"
    shutil.copytree(two_jobs.federation.folder, folder, symlinks=True)
    made.federation, made.daemons = replace(two_jobs.federation, folder=folder), {}
    yield made
    made.stop()


def ended(running, job):
    while (event := running.daemons["coordinator"].wait_for("job.ended", 120))["job"] != job:
        pass
    return event


def roll_back(running):
    """North's whole state, as a restored backup has it."""
    state = running.federation.state("north")
    shutil.rmtree(state)
    shutil.copytree(running.federation.folder / "copy", state, symlinks=True)


def begin_anew(running):
    """A coordinator without jobs, and policies that have the third one."""
    local_federation.write_coordinator(running.federation, [], {**TIMING, "admission_seconds": 8})
    running.restart_coordinator()
    for silo in SILOS:  # it listens on another port
        running.write_silo(silo)


def submit(running, *silos):
    """The third job, once these silos are there: whoever has stopped takes no part."""
    for silo in silos:
        running.start_silo(silo)
    for silo in silos:
        running.daemons[silo].wait_for("connected", 60)
    operator = local_federation.write_operator(running.federation, running.address)
    with connected(operator) as here:
        here.submit((running.federation.folder / "jobs" / "job-3.json").read_bytes())


def stopped(running, holder):
    """North's agent has ended, and says why."""
    with pytest.raises(AbortedError) as caught:
        running.daemons["north"].wait_for("job.finished", 60)
    text = str(caught.value)
    assert "was rolled back or altered: records were cut off" in text
    assert f"and {holder} holds a signed checkpoint" in text
    assert "Restore the newest copy" in text


def reconciled(running, silo):
    state = running.federation.state
    return compare(state(silo) / "ledger", running.kept / "ledger", running.roster)


@pytest.mark.timeout(300)
def test_a_rolled_back_silo_stops_at_the_greeting_and_the_others_go_on(federation):
    before = reconciled(federation, "north")
    assert (before.differences, before.uploads) == ((), 4)
    roll_back(federation)
    begin_anew(federation)
    federation.start_silo("north")
    stopped(federation, "coordinator")
    submit(federation, "east", "south")
    assert ended(federation, "job-3")["outcome"] == "completed"
    found = reconciled(federation, "north")
    assert len(found.differences) == 2  # the second job's rounds
    assert all(
        "which has no such record" in each or "has there" in each for each in found.differences
    )
    assert reconciled(federation, "east").differences == ()


@pytest.mark.timeout(300)
def test_another_silo_tells_where_the_coordinator_does_not(federation):
    """The coordinator has forgotten all heads; east and south have not."""
    database = Database(federation.kept / "coordinator.sqlite")
    with database.transaction():
        database._connection.execute("DELETE FROM heads")
    database.close()
    heads = json.loads((federation.federation.state("east") / "heads.json").read_bytes())
    roll_back(federation)
    begin_anew(federation)
    federation.start_silo("east")
    federation.daemons["east"].wait_for("connected", 60)
    federation.start_silo("north")
    stopped(federation, "east")
    ledger = audit.verify(federation.federation.state("north") / "ledger")
    assert ledger.ok
    assert int(heads["heads"]["north"].split("\n")[1]) > ledger.records


@pytest.mark.timeout(300)
def test_a_silo_that_was_not_rolled_back_is_told_so_by_all(federation):
    begin_anew(federation)
    submit(federation, *SILOS)
    assert ended(federation, "job-3")["outcome"] == "completed"
    for silo in SILOS:
        federation.daemons[silo].stop()
    said = [record["by"] for record in federation.records("north", "witness")]
    assert said.count("coordinator") == 2  # at the second and the third greeting
    assert {"east", "south"} <= set(said)
