"""Several jobs at a time, at the coordinator and at silos that take part in two."""

import os
import sys

import pytest
from federation.conftest import TIMING as QUICK
from federation.keyed import SECURITY, TIMING
from federation.test_blind_kill import check_result

from staddle.algorithms.engines.simulation import simulate
from staddle.commands.federation import local_federation
from staddle.commands.federation.operator_client import connected

SILOS = ("north", "east", "south", "west")
TABLE = """
[training]
jobs = 2
launcher = "{launcher}"
"""
# The first training of each job says so, and waits for a line.
SCRIPT = """
for job in first second; do
  if grep -q '"'$job'"' "$1/order.json" && mkdir {folder}/$job 2> /dev/null; then
    echo $job > {folder}/begun
    read _ < {folder}/gate
  fi
done
exec {python} -m staddle.silo.training "$1" --tied
"""


def opened(path):
    """A new FIFO with both ends open: nobody waits for one who opens it, and no line is lost."""
    os.mkfifo(path)
    return os.fdopen(os.open(path, os.O_RDWR), "rb+", buffering=0)


@pytest.mark.timeout(300)
def test_a_silo_trains_in_two_jobs_and_is_killed_in_both(start, document):
    """They end in the same bits as one after another, the one plain and the other blind."""
    running = start(*SILOS)
    first = running.job(document("first", SILOS[:2], rounds=1))
    blind = {"min_cohort": 3, "round_timeout": 120, "security": SECURITY}
    second = running.job(document("second", SILOS, rounds=1, **blind))
    running.configure(TIMING)
    folder = running.federation.silo_config("north").parent
    begun, gate = (opened(folder / name) for name in ("begun", "gate"))
    script = folder / "train.sh"
    script.write_text(SCRIPT.format(folder=folder, python=sys.executable))
    command = f'command = ["sh", "{script}", "{{order}}"]\n'
    for silo, launcher, more in (("north", "command", command), ("east", "process", "")):
        with running.federation.silo_config(silo).open("a") as file:
            file.write(TABLE.format(launcher=launcher) + more)
    for name in ("coordinator", *SILOS):
        running.start_daemon(name)

    # Both have begun at north, whose agent dies; those that it left behind train for nobody.
    assert {begun.readline().strip() for _ in range(2)} == {b"first", b"second"}
    running.daemons["north"].kill()
    gate.write(b"\n\n")
    running.start_silo("north")
    running.completed()
    for silo in SILOS:
        own = [job.name for job in (first, second) if silo in job.silos]
        ended = {running.daemons[silo].wait_for("job.finished", 60)["job"] for _ in own}
        assert ended == set(own)
    running.stop()

    running.check_models(first, simulate(first, running.shards(first.silos)))
    running.jobs = [second]
    check_result(running)
    running.check_ledgers()
    left = running.records("north", "egress.intent")
    assert {record["job"] for record in left} == {"first", "second"}


def test_a_job_waits_for_those_before_it_at_its_silos_alone(start, document):
    running = start(*SILOS, "up")
    for name, silos, rounds in (
        ("long", ("north", "east"), 2000),
        ("behind", ("east", "south"), 1),
        ("elsewhere", ("west", "up"), 1),
        ("last", ("south", "west"), 1),
    ):
        running.job(document(name, silos, "local", rounds=rounds))
    running.configure({**QUICK, "beat_seconds": 5, "hold_seconds": 2})
    for name in ("coordinator", *running.data):
        running.start_daemon(name)
    coordinator = running.daemons["coordinator"]
    while (ended := coordinator.wait_for("job.ended", 60))["job"] != "elsewhere":
        raise AssertionError(ended)
    with connected(local_federation.write_operator(running.federation, running.address)) as calls:
        stages = {job.job: job.stage for job in calls.jobs()}
        assert stages["behind"] == stages["last"] == "queued"
        assert stages["long"] not in ("queued", "ended")
        calls.stop("long")
    assert [coordinator.wait_for("job.ended", 60)["job"] for _ in range(2)] == ["behind", "last"]
    running.stop()
    running.check_ledgers()
