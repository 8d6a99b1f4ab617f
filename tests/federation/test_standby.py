"""A standby takes over from a coordinator that died in a round; silos resume by themselves.

Real processes.
"""

import json

import pytest

from staddle.algorithms.engines.simulation import simulate
from staddle.coordinator.storage.lease import FILE

SILOS = ("north", "east", "south")
TIMING = {"admission_seconds": 60, "beat_seconds": 2, "hold_seconds": 2}


def generation(running):
    return json.loads((running.kept / FILE).read_bytes())["generation"]


@pytest.mark.timeout(300)
def test_a_standby_serves_once_the_first_was_killed(start, document):
    running = start(*SILOS)
    job = running.job(document("job", SILOS, rounds=3, round_timeout=120))
    running.configure(TIMING)
    first = running.start_daemon("coordinator")
    first.wait_for("listening", 60)
    before = generation(running)
    program = ("-m", "staddle.coordinator", "--standby")
    standby = running.launch("standby", program, running.federation.coordinator_config)
    standby.wait_for("lease.waits", 60)
    for silo in SILOS:
        running.start_silo(silo)
    # In the middle of a round: one upload has its receipt, others have not.
    while first.wait_for("receipt", 60)["round"] != 1:
        pass
    first.kill()
    assert standby.wait_for("lease.taken", 60)["generation"] > before
    running.daemons["coordinator"] = standby
    running.completed()
    running.finished("job")
    assert standby.stop() == 0
    running.check_models(job, simulate(job, running.shards()))
    running.check_ledgers()
    for silo in SILOS:
        assert running.events(silo, "coordinator.lost")
        heads = json.loads((running.federation.state(silo) / "heads.json").read_bytes())
        assert heads["generation"] == generation(running)


@pytest.mark.timeout(300)
def test_a_standby_whose_first_stops_in_order_takes_over_at_once(start, document):
    running = start(*SILOS)
    running.configure(TIMING)
    first = running.start_daemon("coordinator")
    first.wait_for("listening", 60)
    program = ("-m", "staddle.coordinator", "--standby")
    standby = running.launch("standby", program, running.federation.coordinator_config)
    standby.wait_for("lease.waits", 60)
    assert first.stop() == 0
    standby.wait_for("listening", 60)
