"""One bit that a disk changes in a file of tensors: the job ends, and says in which. Real processes.

The coordinator dies where files wait for what comes next, and silos wait for it; a bit changes meanwhile.
"""

import pytest
from federation.keyed import configure

from staddle.errors import AbortedError

SILOS = ("north", "east")


def flip(path):
    """The last bit of a tensor."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("step", "file"),
    [
        ("drawing 1", "0.model.safetensors"),
        ("finishing 2", "1.model.safetensors"),
    ],
)
def test_a_file_that_the_disk_changed_ends_the_job_by_its_name(start, document, step, file):
    """Before: the job went on, to another result."""
    running = start(*SILOS)
    job = running.job(document("job", SILOS, rounds=2, round_timeout=60))
    configure(running, SILOS)
    running.start_impatient("coordinator", f"once:after COMMIT of {job.name} {step}")
    for silo in SILOS:
        running.start_silo(silo)
    with pytest.raises(AbortedError, match="coordinator ended with code"):
        running.daemons["coordinator"].wait_for("job.ended", 100)
    flip(running.federation.coordinator_config.parent / "state" / "jobs" / job.name / file)
    coordinator = running.start_impatient("coordinator")
    ended = coordinator.wait_for("job.ended", 100)
    assert file in ended["reason"]
    assert "the disk changed" in ended["reason"]
    assert ended["outcome"] == "failed"
