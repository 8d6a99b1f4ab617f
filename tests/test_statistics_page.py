"""docs/statistics.md: its job can be signed, and its drafted feature is one of the next job."""

import tomllib
from pathlib import Path

import pytest

from staddle.algorithms.data.features import Feature
from staddle.algorithms.job.job import Job, JobFile

PAGE = Path(__file__).parents[1] / "docs" / "statistics.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="docs are not beside the tests")


def test_the_job_and_the_drafted_feature_are_read():
    text = PAGE.read_text(encoding="utf-8")
    document = tomllib.loads(text.partition("```toml\n")[2].partition("```")[0])
    job = Job.from_file(JobFile.model_validate(document), "page")
    assert job.document()["method"]["name"] == "statistics"
    drafted = text.partition("    [[features]]\n")[2].partition("\n\n")[0]
    feature = Feature.model_validate(tomllib.loads(drafted.replace("    ", "")))
    chol = next(one for one in job.features if one.name == feature.name)
    assert (feature.low, feature.high, feature.unit) == (chol.low, chol.high, chol.unit)
    assert feature.constants()["missing"] == feature.center
