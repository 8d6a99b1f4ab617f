"""Measuring a loaded model on labelled records."""

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, confusion_matrix, roc_auc_score
from support.jobs import make_data
from support.refusals import refused
from support.trained_models import HEADER, table_rows

from staddle.bundle.evaluating import evaluate
from staddle.bundle.trained import load


@pytest.fixture
def labelled(tmp_path):
    (tmp_path / "labelled.csv").write_text(HEADER + "".join(table_rows(300, 40)))
    return tmp_path / "labelled.csv"


def test_figures_are_scikit_learns(table, labelled, tmp_path):
    model = load(table)
    found = evaluate(model, labelled)
    answers = [piece.answers for piece in model.answer(labelled)]
    chances = np.concatenate([own.numpy() for own in answers])
    y = np.array([row.rstrip().endswith("yes") for row in table_rows(300, 40)])
    said = found.measured.said
    assert said["accuracy"] == pytest.approx(accuracy_score(y, chances.argmax(1)))
    bounds = said["auroc"]
    assert bounds["least"] - 1e-9 <= roc_auc_score(y, chances[:, 1]) <= bounds["most"] + 1e-9
    (cut,), (own,) = model.thresholds, found.thresholds
    (right, wrong), (missed, caught) = confusion_matrix(y, chances[:, 1] >= cut)
    assert own.sensitivity == pytest.approx(caught / (caught + missed))
    assert own.specificity == pytest.approx(right / (right + wrong))
    assert own.measured_on == 300


def test_values_far_out_are_those_that_predict_takes(table, tmp_path):
    """Both move them to the same place, where the model would say something else of them."""
    rows, model = table_rows(100), load(table)
    rows[7] = "p7,1000000,f,300,yes\n"
    (tmp_path / "far.csv").write_text(HEADER + "".join(rows))
    contract = model.contract
    again = contract.at(tmp_path / "far.csv").load(model.job.model, model.job.features, wary=True)
    (piece,) = contract.new_records(tmp_path / "far.csv", (1, 1, 4), 200)
    assert torch.equal(again.held, piece.x)
    assert piece.x[7, 0, 0, 0] == 50.0


def test_calibration_is_how_often_it_is_true(table, labelled):
    model = load(table)
    (curve,) = evaluate(model, labelled).curves.values()
    chances = np.concatenate([piece.answers[:, 1].numpy() for piece in model.answer(labelled)])
    y = np.array([row.rstrip().endswith("yes") for row in table_rows(300, 40)])
    assert sum(one.records for one in curve) == 300
    for one in curve:
        own = (chances >= one.least) & (chances < one.most)
        if own.sum() == one.records:  # none lies on an edge
            assert one.observed == pytest.approx(y[own].mean())


def test_records_of_another_contract_are_refused(table, arrays, tmp_path):
    (tmp_path / "bare.csv").write_text("patient,age,sex,chol\np1,44,f,300\np2,44,f,300\n")
    with refused("has no column 'ill'"):
        evaluate(load(table), tmp_path / "bare.csv")
    (tmp_path / "other.csv").write_text(HEADER + "p1,44,f,300,maybe\n")
    with refused("is not one of data.classes"):
        evaluate(load(table), tmp_path / "other.csv")
    data = make_data(9)
    np.savez(tmp_path / "many.npz", x=data.x.numpy(), y=data.y.numpy() + 1)
    with refused("the job's model knows classes 0 to 2"):
        evaluate(load(arrays), tmp_path / "many.npz")


def test_each_of_several_classes_has_a_curve(arrays, tmp_path):
    data = make_data(50)
    np.savez(tmp_path / "new.npz", x=data.x.numpy(), y=data.y.numpy())
    found = evaluate(load(arrays), tmp_path / "new.npz")
    assert list(found.curves) == ["0", "1", "2"]  # one against the others
    assert found.thresholds == ()
