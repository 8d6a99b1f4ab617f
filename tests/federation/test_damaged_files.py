"""One bit that a disk changes in a file of tensors: it is made or asked for again, or the job ends
and names it.

Real processes. One of them dies where files wait for what comes next, and the others wait for it; a
bit changes meanwhile.
"""

import pytest
from federation.keyed import TIMING

from staddle.algorithms.engines.simulation import simulate
from staddle.errors import AbortedError

SILOS = ("north", "east")


def flip(path):
    """The last bit of a tensor."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.timeout(200)
def test_what_a_silo_can_give_again_is_asked_for_again_and_the_result_is_the_same(start, document):
    """An upload that waits to be folded is given again.

    An outbox of which nothing left is trained again.
    """
    running = start(*SILOS)
    job = running.job(document("job", SILOS, rounds=2, round_timeout=60))
    running.configure(TIMING)
    running.start_daemon("coordinator", f"once:after COMMIT of {job.name} folding 0")
    running.start_daemon("east")
    # that of round 0, once that of round 1 is there
    running.start_daemon("north", "once:remove outbox")
    with pytest.raises(AbortedError, match="coordinator ended with code"):
        running.daemons["coordinator"].wait_for("job.ended", 100)
    flip(running.federation.state("coordinator") / "jobs" / job.name / "0.north.upload")
    running.start_daemon("coordinator")
    with pytest.raises(AbortedError, match="north ended with code"):
        running.daemons["north"].wait_for("job.finished", 100)
    flip(running.federation.state("north") / "jobs" / job.name / "outbox-2.safetensors")
    running.start_daemon("north")
    running.finished(job.name)
    running.stop()
    (trained,) = running.events("north", "outbox.damaged")
    assert "outbox-2.safetensors: is not as it was written: the disk changed it" in trained["why"]
    (asked,) = running.events("coordinator", "upload.damaged")
    assert (asked["silos"], "the disk changed 0.north.upload" in asked["why"]) == (["north"], True)
    running.check_models(job, simulate(job, running.shards()))
    running.check_ledgers()


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("step", "file"), [("drawing 1", "0.model.safetensors"), ("finishing 2", "1.model.safetensors")]
)
def test_a_file_that_the_disk_changed_ends_the_job_by_its_name(start, document, step, file):
    """Before: the job went on, to another result."""
    running = start(*SILOS)
    job = running.job(document("job", SILOS, rounds=2, round_timeout=60))
    running.configure(TIMING)
    running.start_daemon("coordinator", f"once:after COMMIT of {job.name} {step}")
    for silo in SILOS:
        running.start_silo(silo)
    with pytest.raises(AbortedError, match="coordinator ended with code"):
        running.daemons["coordinator"].wait_for("job.ended", 100)
    flip(running.kept / "jobs" / job.name / file)
    coordinator = running.start_daemon("coordinator")
    ended = coordinator.wait_for("job.ended", 100)
    assert file in ended["reason"]
    assert "the disk changed" in ended["reason"]
    assert ended["outcome"] == "failed"
