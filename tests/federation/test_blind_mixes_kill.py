"""A coordinator that dies around each durable step of padded and rotated uploads: rows and files
agree all the same.
"""

import pytest

SILOS = ("north", "east", "south", "west")
SECURITY = {"secure_aggregation": "required"}
TIMING = {"admission_seconds": 120, "beat_seconds": 5, "hold_seconds": 2}
ROUNDS = 2


@pytest.mark.timeout(200)
def test_killed_around_each_durable_step_it_goes_on_with_what_it_has(start, document):
    running = start(*SILOS)
    changes = {"options": {"rho": 0.0}, "min_cohort": 3, "rounds": ROUNDS, "round_timeout": 120}
    job = running.job(document("job", SILOS, "pfedsim", security=SECURITY, **changes))
    running.start_all(TIMING, {"coordinator": "every:padded"})
    for silo in SILOS:
        assert running.daemons[silo].wait_for("job.finished", 180)["completed"]
    running.daemons["coordinator"].wait_for("job.ended", 60)
    running.stop()
    # the last may have died as it deleted what the ended job left
    running.start_daemon("coordinator")
    running.daemons["coordinator"].wait_for("listening", 60)
    running.daemons["coordinator"].stop()

    died = [at for places in running.killed("coordinator") for at in places]
    for round_ in range(ROUNDS):
        for step in (
            "padded or rotated {}: extractor",
            "padded or rotated {}: rows",
            "word on padded {}: extractor",
        ):
            name = f"COMMIT of job {step.format(round_)}"
            assert {f"before {name}", f"after {name}"} <= set(died), died
        assert {f"rename {round_}.{silo}.extractor.padded" for silo in SILOS} <= set(died)
    folder = running.job_folder(job, "coordinator")
    hidden = running.rows("SELECT file FROM hidden WHERE signed != x''")
    versions = running.rows("SELECT file FROM files WHERE room = 'version'")
    ((rest,),) = running.rows("SELECT count(*) FROM hidden WHERE signed = x''")
    memories = running.rows("SELECT silo FROM mixed")
    assert hidden == versions == []
    assert rest == 0
    assert [path.name for path in folder.glob("*.padded")] == []
    assert any(at.startswith(f"remove {ROUNDS - 1}.") and at.endswith(".padded") for at in died)
    assert {silo for (silo,) in memories} == set(SILOS)
    for silo in SILOS:
        log = running.daemons[silo].log.read_text()
        assert "job.failed" not in log
        assert job.name in log
