import csv
import io

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from support.counted import of_counts, of_scores

from staddle.algorithms.course import SiloState
from staddle.algorithms.tasks.class_counting import ClassCounting, ClassTally
from staddle.algorithms.tasks.metrics_table import MetricsTable
from staddle.algorithms.tasks.regression import Regression
from staddle.algorithms.training.silo_round import Seen, state_from_bytes, state_to_bytes
from staddle.commands.simulate import membership
from staddle.errors import UnwritableError
from staddle.simulator.run.export import measures, model_file, silos_csv, write, write_models
from staddle.simulator.run.manifest import SiloRecords

SILOS = (
    SiloRecords(name="b", train=30, test=4, validation=2),
    SiloRecords(name="a", train=7, test=2, validation=None),
)
HISTORY = (
    of_counts(1, "selected/after", {"a": 1}, {"a": 2}),
    of_counts(1, "all/trained", {"b": 4, "a": 2}, {"b": 4, "a": 2}),
    of_counts(2, "all/trained", {"b": 3, "a": 1}, {"b": 4, "a": 2}),
    of_counts(2, "validation/trained", {"b": 1, "a": 1}, {"b": 1, "a": 3}),
)
MODELS = {
    "b": SiloState({"classifier": {"w": torch.ones(2)}}, {"n": torch.tensor(3)}),
    "a": SiloState({}),
}


def tally(confusion, scores=None):
    confusion = np.array(confusion)
    by_class = np.stack([confusion.diagonal(), confusion.sum(1), confusion.sum(0)])
    return ClassTally(by_class, confusion, scores)


COUNTING = ClassCounting(2, confusion=True, bins=2)
SEEN = {
    "b": Seen(tally([[1, 1], [0, 2]]), tally([[2, 0], [0, 2]], np.array([[[0, 2], [2, 0]]]))),
    "a": Seen(tally([[2, 0], [0, 0]]), tally([[0, 2], [0, 0]], np.array([[[2, 0], [0, 0]]]))),
}


def test_measures_are_of_all_records_together_and_silo_by_silo():
    found = measures(SEEN, COUNTING)
    assert found["trained"]["all"]["confusion"] == [[2, 2], [0, 2]]
    assert (found["trained"]["all"]["accuracy"], found["trained"]["all"]["majority"]) == (
        4 / 6,
    ) * 2
    assert found["trained"]["all"]["balanced_accuracy"] == 0.75
    assert found["trained"]["all"]["auroc"]["value"] == (2 * 0 + 2 * 0.5) / 4
    assert "auroc" not in found["trained"]["silos"]["a"]  # of one class alone
    assert found["delivered"]["silos"]["b"]["classes"][1]["sensitivity"] == 1
    assert "auroc" not in found["delivered"]["all"]
    assert [*found["trained"]["silos"]] == ["b", "a"]


def test_silos_as_a_table_of_the_last_look():
    rows = list(csv.reader(io.StringIO(silos_csv(SILOS, HISTORY, "accuracy"))))
    assert rows == [
        ["silo", "training", "measure", "records", "accuracy", "balanced", "constant"],
        ["b", "30", "all/trained", "4", "0.75", "0.75", "1.0"],
        ["b", "30", "validation/trained", "1", "1.0", "1.0", "1.0"],
        ["a", "7", "all/trained", "2", "0.5", "0.5", "1.0"],
        ["a", "7", "validation/trained", "3", str(1 / 3), str(1 / 3), "1.0"],
    ]
    (header,) = silos_csv(SILOS, HISTORY[:1], "accuracy").splitlines()
    assert header.split(",") == rows[0]


def test_without_classes_nothing_is_balanced_and_the_score_has_its_own_name():
    one = of_scores(2, "all/trained", {"b": 4.5, "a": 2.5}, {"b": 3, "a": 1}, {"b": 6.0, "a": 3.0})
    assert silos_csv(SILOS, [one], "mae").splitlines() == [
        "silo,training,measure,records,mae,balanced,constant",
        "b,30,all/trained,3,4.5,,6.0",
        "a,7,all/trained,1,2.5,,3.0",
    ]


def test_measures_of_a_regression_are_those_of_all_its_records():
    counting = Regression(range=(0, 10), unit="days").counting(1, MetricsTable(), noised=False)

    def seen(wanted, answers):
        y, outputs = torch.tensor(wanted), torch.tensor(answers)[:, None] / 5 - 1
        marks = counting.marks(outputs, y)
        own = counting.count({name: [mark.numpy()] for name, mark in marks.items()}, [y.numpy()])
        return Seen(own, own)

    own = {"a": seen([1.0, 2.0], [2.0, 4.0]), "b": seen([7.5], [4.5])}
    found = measures(own, counting)["delivered"]
    assert found["silos"]["a"] == pytest.approx({"mae": 1.5, "rmse": 2.5**0.5, "r2": -9}, rel=1e-4)
    assert found["silos"]["b"] == pytest.approx({"mae": 3, "rmse": 3}, rel=1e-4)
    assert found["all"]["mae"] == pytest.approx(2, rel=1e-4)
    assert "sums" not in found["all"]


def test_models_and_coordinator_are_files_that_others_read(tmp_path):
    weights = torch.arange(4.0).reshape(2, 2)
    write_models(tmp_path, MODELS.items())
    made = write(
        tmp_path, SILOS, HISTORY, {"weights": weights, "turned": weights.T}, SEEN, COUNTING
    )
    made += tuple(model_file(tmp_path, silo) for silo in MODELS)
    assert [path.relative_to(tmp_path).as_posix() for path in made] == [
        "silos.csv", "measures.json", "coordinator.safetensors",
        "models/b.safetensors", "models/a.safetensors",
    ]  # fmt: skip
    assert all(path.exists() for path in made)
    assert {path.stat().st_mode & 0o777 for path in made} <= {0o644}
    assert load_file(model_file(tmp_path, "b")).keys() == {"part/classifier/w", "extra/n"}
    read = state_from_bytes(model_file(tmp_path, "b").read_bytes())
    assert state_to_bytes(read) == state_to_bytes(MODELS["b"])
    assert torch.equal(load_file(tmp_path / "coordinator.safetensors")["turned"], weights.T)
    with safe_open(tmp_path / "coordinator.safetensors", "pt") as file:
        assert file.metadata().keys() == {"silos", "sha256"}
        assert file.metadata()["silos"] == '["b", "a"]'


def test_a_coordinator_that_knows_nothing_leaves_no_file(tmp_path):
    assert not any(
        "coordinator" in path.name for path in write(tmp_path, SILOS, HISTORY, {}, SEEN, COUNTING)
    )


def test_a_file_in_the_way_is_told(tmp_path):
    (tmp_path / "models").write_text("")
    with pytest.raises(UnwritableError, match="models: cannot make it: File exists"):
        write_models(tmp_path, MODELS.items())


def test_memberships_are_read_as_those_of_a_federation(tmp_path):
    own = {
        silo: SiloState({"membership": {"c": torch.tensor([p, 1 - p])}})
        for silo, p in (("b", 0.25), ("a", 0.5))
    }
    write_models(tmp_path, own.items())
    write(
        tmp_path,
        SILOS,
        HISTORY,
        {"memberships": torch.tensor([[1.0, 0], [0, 1]])},
        SEEN,
        COUNTING,
    )
    rows = membership.read_all([model_file(tmp_path, "b"), model_file(tmp_path, "a")])
    assert (rows.silos, rows.memberships.tolist()) == (("b", "a"), [[0.25, 0.75], [0.5, 0.5]])
    rows = membership.read_all([tmp_path / "coordinator.safetensors"])
    assert (rows.silos, rows.memberships.tolist()) == (("b", "a"), [[1, 0], [0, 1]])
