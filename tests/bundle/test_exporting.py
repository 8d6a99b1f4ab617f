"""Models in other forms: read by what reads these, they answer alike."""

import json

import numpy as np
import pytest
import safetensors.torch
import torch
from support.refusals import refused

from staddle.bundle import exporting
from staddle.bundle.exporting import TEXT, export
from staddle.bundle.trained import load

PATIENTS = torch.tensor([[44.0, 0.0, 300.0], [71.0, 1.0, float("nan")], [33.0, 1.0, 180.0]])
ROWS = ["p1,44,f,300\n", "p2,71,m,\n", "p3,33,m,180\n"]


@pytest.fixture(scope="module")
def answers(table, tmp_path_factory):
    """What predict says of these patients."""
    path = tmp_path_factory.mktemp("new") / "new.csv"
    path.write_text("patient,age,sex,chol\n" + "".join(ROWS))
    (piece,) = load(table).answer(path)
    return piece.answers


def test_a_program_of_torch(table, answers, tmp_path):
    assert export(load(table), tmp_path / "model.pt2", "torch-export") < 1e-6
    told = {TEXT: ""}
    found = torch.export.load(tmp_path / "model.pt2", extra_files=told)
    assert torch.allclose(found.module()(PATIENTS), answers, atol=1e-6)
    inputs = json.loads(told[TEXT])["inputs"]
    assert [own["name"] for own in inputs] == ["age", "sex", "chol"]
    assert inputs[1]["categories"] == ["f", "m"]


def test_torchscript(table, answers, tmp_path):
    export(load(table), tmp_path / "model.pt", "torchscript")
    told = {TEXT: ""}
    found = torch.jit.load(str(tmp_path / "model.pt"), _extra_files=told)
    assert torch.allclose(found(PATIENTS), answers, atol=1e-6)
    assert json.loads(told[TEXT])["answers"] == ["p(no)", "p(yes)"]


def test_onnx(table, answers, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    export(load(table), tmp_path / "model.onnx", "onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    (found,) = session.run(None, {"records": PATIENTS.numpy()})
    assert np.allclose(found, answers.numpy(), atol=1e-6)
    told = json.loads(session.get_modelmeta().custom_metadata_map[TEXT])
    assert told["task"] == "classification"
    assert set(told["thresholds"]) == {"yes"}


def test_values_alone(table, tmp_path):
    model = load(table)
    export(model, tmp_path / "values.safetensors", "safetensors")
    found = safetensors.torch.load_file(tmp_path / "values.safetensors")
    wanted = model.module.parts["classifier"].state_dict()
    assert all(torch.equal(found[f"classifier.{name}"], own) for name, own in wanted.items())
    assert not any(name.startswith("part/") for name in found)


@pytest.mark.parametrize("form", ["torch-export", "torchscript", "onnx"])
def test_images_are_normalised_inside(image, form, tmp_path):
    assert export(load(image), tmp_path / "model", form) < 1e-5


def test_a_file_that_answers_otherwise_gets_no_name(table, tmp_path, monkeypatch):
    def other(whole, raw, path, text):
        path.touch()
        return lambda records: whole(records) + 0.01

    (tmp_path / "model.pt").write_text("what was there before")
    monkeypatch.setattr(exporting, "_script", other)
    with refused("read again, the file gives other answers than the model"):
        export(load(table), tmp_path / "model.pt", "torchscript")
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]
    assert (tmp_path / "model.pt").read_text() == "what was there before"


def test_a_model_that_has_no_such_form_is_told(table, tmp_path, monkeypatch):
    def fails(*_):
        raise RuntimeError("Could not guard on data-dependent expression\nand a long text")

    monkeypatch.setattr(exporting, "_program", fails)
    said = "cannot be exported as torch-export: .*Could not guard .* choose another --format"
    with refused(said):
        export(load(table), tmp_path / "model.pt2", "torch-export")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_takes_no_other_number_of_records_gets_no_name(table, tmp_path, monkeypatch):
    """A trace may have kept the number of records that it was made with."""

    def other(whole, raw, path, text):
        path.touch()
        return lambda records: whole(records)[: len(raw)] + 0.01 * (len(records) != len(raw))

    monkeypatch.setattr(exporting, "_script", other)
    with refused("read again, the file gives other answers than the model"):
        export(load(table), tmp_path / "model.pt", "torchscript")
    assert list(tmp_path.iterdir()) == []
