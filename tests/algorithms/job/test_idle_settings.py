"""A job file with a setting that does nothing is refused; a signed job has all keys."""

import pytest

from staddle.algorithms.job.job import Job
from staddle.errors import LocalError

HEAD = """version = 1
name = "lung"
rounds = 2
seed = 7
purpose = "For a test"
min_cohort = 3
silos = ["a", "b", "c", "d"]
[method]
name = "{method}"
[model]
name = "cnn-digits"
classes = 3
norm = "group"
[training]
lr = 0.1
{training}
"""
RECORD = "[privacy]\nepsilon = 8\ndelta = 0.01\nsample_rate = 0.5\n"
SILO = (
    '[security]\nsecure_aggregation = "required"\n'
    '[privacy]\nunit = "silo"\nnoise = "shared"\nepsilon = 8\ndelta = 0.01\nsample_rate = 1\n'
)


@pytest.fixture
def read(tmp_path):
    def job(tables="", training="", method="fedavg"):
        path = tmp_path / "job.toml"
        path.write_text(HEAD.format(method=method, training=training) + tables)
        return Job.from_toml(path)

    return job


@pytest.mark.parametrize("method", ["fedavg", "fedper-adam"])
@pytest.mark.parametrize("size", [7, 32])
def test_a_private_job_draws_records_by_its_sample_rate(read, method, size):
    """The default of 32 is refused as well where it was written."""
    with pytest.raises(LocalError, match=r"take out training\.batch_size, which"):
        read(RECORD, f"batch_size = {size}", method)
    with pytest.raises(LocalError, match=r"take out training\.batch_size, training\.last_batch, w"):
        read(RECORD, f'batch_size = {size}\nlast_batch = "fill"', method)
    with pytest.raises(LocalError, match=r"take out training\.shuffle, which would do nothing"):
        read(RECORD, "shuffle = false", method)
    assert read(RECORD, method=method).training.batch_size == 32
    assert read("", f"batch_size = {size}", method).training.batch_size == size


@pytest.mark.parametrize(
    "written", ["histogram_sigma = 10.0", "statistics_clip = 2.0", "statistics_sigma = 20.0"]
)
def test_a_job_that_protects_whole_silos_publishes_no_counts_or_statistics(read, written):
    key = written.partition(" ")[0]
    with pytest.raises(LocalError, match=rf'with unit = "silo" .* take out privacy\.{key}, which'):
        read(f"{SILO}{written}\n")
    assert read(f"{RECORD}{written}\n").private.unit == "record"
    assert read(SILO, "batch_size = 7").training.batch_size == 7
    assert read(SILO, 'last_batch = "drop"').training.last_batch == "drop"
    assert not read(SILO, "shuffle = false").training.shuffle


def test_all_of_several_are_named(read):
    with pytest.raises(
        LocalError, match=r"privacy\.histogram_sigma, privacy\.statistics_sigma, which"
    ):
        read(f"{SILO}histogram_sigma = 3.0\nstatistics_sigma = 3.0\n")
