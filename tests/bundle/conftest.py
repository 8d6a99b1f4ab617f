"""A model for a table under a contract, and one for images."""

import pytest
from support.jobs import make_data, make_job
from support.trained_models import CSV, HEADER, made, table_job, table_rows

from staddle.algorithms.data.sources.formats.csv_file import Csv


@pytest.fixture(scope="session")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("table")
    (path / "records.csv").write_text(HEADER + "".join(table_rows(40)))
    own = {key: value for key, value in CSV.items() if key != "kind"}
    job = table_job()
    source = Csv(kind="csv", file=path / "records.csv", **own)
    return made(path / "model", job, source.load(job.model, job.features), source.contract())


@pytest.fixture(scope="session")
def image(tmp_path_factory):
    contract = {"kind": "images", "mean": [0.5], "std": [0.25]}
    path = tmp_path_factory.mktemp("image") / "model"
    return made(path, make_job(), make_data(30), contract)


@pytest.fixture(scope="session")
def arrays(tmp_path_factory):
    path = tmp_path_factory.mktemp("arrays") / "model"
    return made(path, make_job(), make_data(30), {"kind": "npz"})
