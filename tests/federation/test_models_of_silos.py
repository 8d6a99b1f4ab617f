"""What a silo keeps when a job ends is used as a hospital would: by the commands, on new records."""

import pytest
from federation.test_data_kinds import SILOS, TUMOURS, write_csv

from staddle.algorithms.data.sources.public.bundled import Bundled


@pytest.fixture(scope="module")
def x():
    return None


def test_try(start, document, tmp_path):
    running = start(*SILOS)
    running.data = {
        silo: Bundled(kind="bundled", name="breast-cancer", share=(k, 2)).read()
        for k, silo in enumerate(SILOS, 1)
    }
    job = document("tumours", SILOS)
    job["model"] = TUMOURS
    job["features"] = [{"name": f"feature {n}", "least": -10, "most": 20} for n in range(30)]
    job = running.job(job)
    running.start_coordinator()
    for silo in SILOS:
        running.write_silo(silo)
        write_csv(running, silo)
        running.start_silo(silo)
    running.completed(60)
    running.stop()
    import shutil

    shutil.copytree(running.federation.folder, "/tmp/d/fed")
