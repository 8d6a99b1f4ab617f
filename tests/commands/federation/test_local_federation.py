"""Which jobs of a federation on one machine are blind, and with what declared."""

from pathlib import Path

import pytest

from staddle.algorithms.data.dataset import split
from staddle.algorithms.job.job import Job, JobFile
from staddle.commands.federation import local_federation
from staddle.commands.federation.demo import Demo
from staddle.commands.terminal.printer import Screen
from staddle.errors import LocalError
from staddle.files.documents import validate
from staddle.silo.job_folder import split_key


def made_jobs(folder: Path, method: str, silos: int | None) -> tuple[Demo, list[dict]]:
    """Of silos whose splits are the same in each run."""
    demo = Demo(Screen(), folder, method, silos, 4)
    for silo in demo._federation.silos:
        demo._federation.state(silo).mkdir()
        (demo._federation.state(silo) / "split.key").write_bytes(silo.encode().ljust(32))
    shards, documents = demo._shards(), [demo._job(name) for name in demo._methods]
    return demo, [
        local_federation.blind_where_it_can(demo._federation, each, shards) for each in documents
    ]


def job(document) -> Job:
    return Job.from_file(validate(document, JobFile, "the job"), "the job")


def test_fedsimsups_demo(tmp_path):
    """It is blind over batches, with the records of the silos' own splits.

    Once, it and the two jobs it is compared with ran in the clear, and nothing said so.
    """
    demo, documents = made_jobs(tmp_path / "made", "fedsimsup", None)
    jobs = [job(document) for document in documents]
    assert [each.method_name for each in jobs] == ["local", "fedavg", "fedsimsup"]
    assert all(e.security.required and len(e.batches) == 2 and e.cohort_size == 4 for e in jobs)
    assert [each.security.weights for each in jobs] == ["private", "private", "public"]
    assert jobs[2].security.mix == "directed"
    for silo, shard in zip(jobs[2].silos, demo._shards(), strict=True):
        train, _ = split(
            shard, split_key(demo._federation.state(silo)), local_federation.TEST_FRACTION
        )
        assert jobs[2].security.counts[silo] == len(train)
        counts = [int((train.y == digit).sum()) for digit in range(10)]
        assert list(jobs[2].security.class_counts[silo]) == counts


@pytest.mark.parametrize(("method", "silos"), [("fedsimsup", 4), ("pfedsim", 3)])
def test_jobs_of_too_few_silos_stay_in_the_clear(tmp_path, method, silos):
    _, documents = made_jobs(tmp_path / "made", method, silos)
    assert not any(job(document).security.required for document in documents)


def test_a_folder_that_holds_something_is_left_as_it_is(tmp_path):
    (tmp_path / "precious").write_text("x")
    with pytest.raises(LocalError, match="not empty"):
        local_federation.make(tmp_path, ["a"])
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]
