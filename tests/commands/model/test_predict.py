"""A file that is written otherwise than the silo's: ``predict`` and ``evaluate`` are told how."""

import csv
import json

import pytest
from support.jobs import make_data, make_job
from support.refusals import refused
from support.trained_models import CSV, HEADER, made, table_job, table_rows
from typer.testing import CliRunner

from staddle.algorithms.data.sources.formats.csv_file import Csv
from staddle.commands.main import app


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of a table, and its records as another hospital writes them."""
    path = tmp_path_factory.mktemp("predict")
    (path / "records.csv").write_text(HEADER + "".join(table_rows(40)))
    own = {key: value for key, value in CSV.items() if key != "kind"}
    job, source = table_job(), Csv(kind="csv", file=path / "records.csv", **own)
    made(path / "model", job, source.load(job.model, job.features), source.contract())
    made(path / "arrays", make_job(), make_data(30), {"kind": "npz"})
    others = (HEADER + "".join(table_rows(40))).replace(",", ";")
    (path / "others.csv").write_text(others.replace("150", "150,5"), encoding="utf-16")
    return path


def call(*arguments):
    found = CliRunner().invoke(app, ["model", *map(str, arguments)], catch_exceptions=False)
    assert found.exit_code == 0
    return found.stdout


WRITTEN = ("--delimiter", ";", "--decimal", ",", "--encoding", "utf-16")


def test_records_that_are_written_otherwise(folder, tmp_path):
    given = ("--model", folder / "model", "--data", folder / "others.csv", *WRITTEN)
    call("predict", *given, "--out", tmp_path / "out.csv")
    assert len(list(csv.reader((tmp_path / "out.csv").open()))) == 41
    assert json.loads(call("evaluate", *given, "--json"))["records"] == 40
    with refused("others.csv: is not UTF-8; save it as UTF-8, or name its encoding"):
        call("predict", *given[:4], "--out", tmp_path / "none.csv")


def test_what_does_not_fit_together(folder, tmp_path):
    out = ("--out", tmp_path / "out.csv")
    given = ("predict", "--model", folder / "model", *out, "--data", folder / "records.csv")
    for delimiter, why in ((";;", "delimiter"), (",", "decimal and delimiter are both ','")):
        with refused(f"contract, with delimiter {delimiter!r}, with decimal ','.*{why}"):
            call(*given, "--delimiter", delimiter, "--decimal", ",")
    parquet = (*given[:5], "--data", folder / "records.parquet")
    with refused(
        "records.parquet: only CSV files are read by --delimiter and --decimal; leave that out"
    ):
        call(*parquet, *WRITTEN[:4])
    arrays = ("predict", "--model", folder / "arrays", *out, "--data", folder / "x.npz")
    with refused("x.npz: only CSV files are read by --encoding; leave"):
        call(*arrays, *WRITTEN[4:])


def test_what_holds_of_a_model_for_programs(folder):
    found = json.loads(call("verify", "--model", folder / "model", "--json"))
    assert found["maker"] == {"kind": "simulation", "name": "a", "federation": ""}
    assert (found["job"], found["job_digest"]) == ("heart", table_job().digest)
    assert found["files"] == ["model.json", "model.safetensors", "MODEL_CARD.md"]
    assert (found["signer"], found["head"], found["ledger"], found["rosters"]) == (
        None,
        None,
        None,
        {},
    )
