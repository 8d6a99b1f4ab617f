"""Answers as a file: whole or not there at all, and piece by piece."""

import csv

import numpy as np
import pytest
import torch
from support.jobs import make_data, make_job
from support.other_tasks import document, records
from support.refusals import refused
from support.trained_models import CSV, made, table_job, table_rows

from staddle.algorithms.data.dataset import Dataset
from staddle.algorithms.job.job import Job, JobFile
from staddle.bundle import answers_file
from staddle.bundle.trained import load


def written(model, data, out):
    return list(answers_file.write(out, model, model.answer(data)))


def new_rows(count):
    return ["patient,age,sex,chol\n", *(f"{row.rpartition(',')[0]}\n" for row in table_rows(count))]


def test_a_line_per_record(table, tmp_path):
    (tmp_path / "new.csv").write_text("".join(new_rows(1100)))
    model = load(table)
    pieces = written(model, tmp_path / "new.csv", tmp_path / "out.csv")
    assert len(pieces) > 1  # it was not read at once
    assert sum(pieces) == 1100
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))
    assert list(rows[0]) == ["record", "predicted", "p(no)", "p(yes)", "outside"]
    assert [row["record"] for row in rows] == [f"p{n}" for n in range(1100)]
    (cut,) = model.thresholds
    for row in rows:
        chance = float(row["p(yes)"])
        assert float(row["p(no)"]) + chance == pytest.approx(1, abs=1e-5)
        if abs(chance - cut) > 1e-5:
            assert row["predicted"] == ("yes" if chance >= cut else "no")


def test_a_fault_in_the_last_line_leaves_what_was_there(table, tmp_path):
    (tmp_path / "new.csv").write_text("".join(new_rows(1100)) + "last,old,f,300\n")
    (tmp_path / "out.csv").write_text("before")
    with refused("line 1102, column 'age'"):
        written(load(table), tmp_path / "new.csv", tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_text() == "before"
    (tmp_path / "new.csv").write_text("".join(new_rows(2)))
    written(load(table), tmp_path / "new.csv", tmp_path / "out.csv")
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.csv", "out.csv"]


def test_the_memory_does_not_grow_with_the_file(table, tmp_path):
    """Pieces are asked for one at a time: the second is not made before the first is written."""
    (tmp_path / "new.csv").write_text("".join(new_rows(1100)))
    model, made_of = load(table), []

    def watched():
        for piece in model.answer(tmp_path / "new.csv"):
            made_of.append(len(piece.names))
            yield piece

    out = answers_file.write(tmp_path / "out.csv", model, watched())
    next(out)
    assert len(made_of) == 1
    list(out)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("regression", ["record", "value (days)"]),
        ("multilabel", ["record", "0", "1", "2", "p(0)", "p(1)", "p(2)"]),
        ("survival", ["record", "survival(1)", "survival(2)", "survival(4)"]),
    ],
)
def test_columns_of_other_tasks(kind, names, tmp_path):
    job = Job.from_file(JobFile.model_validate(document(kind)), "job.toml")
    data = records(kind, 40, 3)
    model = load(made(tmp_path / "model", job, data, {"kind": "npz"}))
    np.savez(tmp_path / "new.npz", x=data.held[:5].numpy())
    written(model, tmp_path / "new.npz", tmp_path / "out.csv")
    rows = list(csv.reader((tmp_path / "out.csv").open()))
    assert rows[0] == names
    assert len(rows) == 6
    assert {len(row) for row in rows} == {len(names)}
    with refused(r"a line for each record; name a file that ends in \.csv"):
        written(model, tmp_path / "new.npz", tmp_path / "out.npz")


def test_positions_are_arrays(tmp_path):
    job = Job.from_file(JobFile.model_validate(document("segmentation")), "job.toml")
    data = records("segmentation", 12, 3)
    model = load(made(tmp_path / "model", job, data, {"kind": "npz"}))
    np.savez(tmp_path / "new.npz", x=data.held.numpy(), ids=np.array([f"v/{n}" for n in range(12)]))
    with refused(r"a class for each position; name a file that ends in \.npz"):
        written(model, tmp_path / "new.npz", tmp_path / "out.csv")
    written(model, tmp_path / "new.npz", tmp_path / "out.npz")
    (piece,) = model.answer(tmp_path / "new.npz")
    found = np.load(tmp_path / "out.npz")
    assert sorted(found) == sorted(piece.names)
    for name, own in zip(piece.names, piece.decisions.numpy(), strict=True):
        assert found[name].dtype == np.uint8
        assert (found[name] == own).all()


def test_no_text_is_computed_by_a_spreadsheet(tmp_path):
    """Names come from a job, and ids from a file, which others wrote."""
    names = ["=1+1", "-"]
    job = make_job(model={"classes": 2, "class_names": names})
    data = make_data(20, classes=2)
    model = load(made(tmp_path / "model", job, data, {"kind": "npz"}))
    ids = ["@SUM(A1)", "-12.5", "+x", "\ud800", "p-1"]
    np.savez(tmp_path / "new.npz", x=data.x[:5].numpy(), ids=np.array(ids))
    written(model, tmp_path / "new.npz", tmp_path / "out.csv")
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))
    assert [row["record"] for row in rows] == ["'@SUM(A1)", "-12.5", "'+x", "\\ud800", "p-1"]
    assert {row["predicted"] for row in rows} <= {"'=1+1", "-"}
    assert list(rows[0]) == ["record", "predicted", "p(=1+1)", "p(-)"]


@pytest.mark.parametrize(
    "odd", ["../../x", "/etc/x", "a/..", "a\\x", "same", "\ud800", "a\nb", "a" * 2000]
)
def test_names_of_arrays_stay_below_a_folder(odd, tmp_path):
    job = Job.from_file(JobFile.model_validate(document("segmentation")), "job.toml")
    data = records("segmentation", 12, 3)
    model = load(made(tmp_path / "model", job, data, {"kind": "npz"}))
    np.savez(tmp_path / "new.npz", x=data.held[:3].numpy(), ids=np.array(["same", "a..b/c", odd]))
    with refused("cannot name an array of the file"):
        written(model, tmp_path / "new.npz", tmp_path / "out.npz")
    assert not (tmp_path / "out.npz").exists()


def test_a_label_may_be_called_like_a_column_of_ours(tmp_path):
    names = ["record", "outside", "record_"]
    model = {"name": "mlp", "input": [1, 1, 4], "classes": 3, "class_names": names}
    job = table_job(task={"kind": "multilabel"}, model=model)
    contract = {key: value for key, value in CSV.items() if key not in {"label", "classes"}}
    truth = torch.tensor([[0, 1, 0], [1, 0, 1]] * 10)
    data = Dataset(torch.zeros(20, 1, 1, 4), truth, class_names=tuple(names))
    path = made(tmp_path / "model", job, data, {**contract, "labels": names})
    (tmp_path / "new.csv").write_text("".join(new_rows(3)))
    written(load(path), tmp_path / "new.csv", out := tmp_path / "out.csv")
    header, first, *_ = csv.reader(out.open())
    chances = [f"p({name})" for name in names]
    assert header == ["record", "record_", "outside_", "record__", *chances, "outside"]
    assert (first[0], first[-1]) == ("p0", "")
