"""Loading a model, and asking it about new records of its contract, and of no other."""

import hashlib
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from support.jobs import make_data, make_job
from support.other_tasks import document, records
from support.refusals import refused
from support.trained_models import CSV, HEADER, made, table_job, table_rows
from support.wards import WARD, wards

from staddle.algorithms.data import rows
from staddle.algorithms.data.dataset import Dataset
from staddle.algorithms.data.sources.formats.csv_file import Csv
from staddle.algorithms.job.job import Job, JobFile
from staddle.algorithms.method import initial_state
from staddle.bundle import folder, trained
from staddle.bundle.evaluating import evaluate
from staddle.bundle.trained import load
from staddle.errors import LocalError
from staddle.files.documents import canonical_json

CONTRACT = {key: value for key, value in CSV.items() if key != "kind"}


def answered(model, path):
    """All answers in one."""
    pieces = list(model.answer(path))
    return (
        [name for piece in pieces for name in piece.names],
        torch.cat([piece.answers for piece in pieces]),
        [text for piece in pieces for text in piece.outside],
    )


def write_rows(path, rows, header="patient,age,sex,chol\n"):
    path.write_text(header + "".join(rows))
    return path


def test_new_records_get_what_training_would_have_given_them(table, tmp_path):
    """The same numbers as the module gives for records that a [data] table reads."""
    rows, model = table_rows(1200), load(table)
    write_rows(tmp_path / "labelled.csv", rows, HEADER)
    new = write_rows(tmp_path / "new.csv", [f"{row.rpartition(',')[0]}\n" for row in rows])
    job = table_job()
    source = Csv(kind="csv", file=tmp_path / "labelled.csv", **CONTRACT)
    x = source.load(job.model, job.features, wary=True).x
    names, answers, outside = answered(model, new)
    assert names == [f"p{place}" for place in range(1200)]
    assert torch.equal(answers, model.module.answers(x))
    assert torch.allclose(answers.sum(1), torch.ones(1200))
    assert set(outside) == {""}


def test_a_file_of_new_records_may_be_larger_than_the_memory(table, tmp_path, monkeypatch):
    def none_is_left(*_):
        raise LocalError("too large")

    model, path = load(table), write_rows(tmp_path / "new.csv", ["p1,44,f,300\n"])
    monkeypatch.setattr(rows, "check_fits", none_is_left)
    assert answered(model, path)[0] == ["p1"]
    labelled = write_rows(tmp_path / "labelled.csv", table_rows(3), HEADER)
    with refused("too large"):
        evaluate(model, labelled)


def test_columns_may_stand_in_any_order_beside_others(table, tmp_path):
    first = write_rows(tmp_path / "first.csv", ["p1,44,f,300\n"])
    other = write_rows(tmp_path / "other.csv", ["x,300,f,44,p1\n"], "note,chol,sex,age,patient\n")
    model = load(table)
    assert torch.equal(answered(model, first)[1], answered(model, other)[1])


def test_a_record_without_an_id_has_its_line(table, tmp_path):
    path = write_rows(tmp_path / "new.csv", ["44,f,300\n", "45,m,200\n"], "age,sex,chol\n")
    assert answered(load(table), path)[0] == ["2", "3"]


def test_what_is_missing_counts_as_the_contract_says(table, tmp_path):
    gaps = write_rows(tmp_path / "gaps.csv", ["p1,44,,\n"])
    whole = write_rows(tmp_path / "whole.csv", ["p1,44,f,240\n"])
    model = load(table)
    assert torch.equal(answered(model, gaps)[1], answered(model, whole)[1])


@pytest.mark.parametrize(
    ("rows", "header", "said"),
    [
        (["p1,44,f,300\n"], "patient,years,sex,chol\n", "has no column 'age'"),
        (["p1,old,f,300\n"], "patient,age,sex,chol\n", "line 2, column 'age': is not a number"),
        (["p1,44,f,300\n", "p2,,f,300\n"], None, "line 3, column 'age': is missing"),
        (["p1,44,x,300\n"], None, "column 'sex': is not one of its categories"),
        (["p1,44,f\n"], None, "line 2: 3 columns, not 4"),
        ([], None, "holds no records"),
        (["p1,1e39,f,300\n"] * 2, None, "outside"),
    ],
)
def test_records_of_another_contract_are_refused(table, tmp_path, rows, header, said):
    path = write_rows(tmp_path / "new.csv", rows, header or "patient,age,sex,chol\n")
    with refused(said):
        list(load(table).answer(path))


def test_values_outside_a_range_are_told_and_many_of_them_refused(table, tmp_path):
    rows = [f"p{n},{30 + n},f,300\n" for n in range(40)]
    rows[3], model = "p3,117,f,300\n", load(table)
    path = write_rows(tmp_path / "new.csv", rows)
    _, _, outside = answered(model, path)
    assert [place for place, text in enumerate(outside) if text] == [3]
    assert outside[3] == "age"
    # In months.
    path = write_rows(tmp_path / "months.csv", [f"p{n},{400 + n},f,300\n" for n in range(40)])
    with refused("feature 'age': 40 of 40 records are outside 18 to 100 years"):
        list(model.answer(path))


def test_a_value_far_outside_counts_as_much_in_every_kind_of_file(table, tmp_path):
    """Fifty scales from the center at most, as in training, since the job chose the scale."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    ages = [44] * 40 + [10_000]
    rows = [f"p{place},{age},f,300\n" for place, age in enumerate(ages)]
    columns = {"age": ages, "sex": ["f"] * 41, "chol": [300.0] * 41}
    pq.write_table(pa.table(columns), tmp_path / "new.parquet")
    text = write_rows(tmp_path / "new.csv", rows)
    model = load(table)
    by_text, by_type = (answered(model, path)[1] for path in (text, tmp_path / "new.parquet"))
    assert torch.equal(by_text, by_type)


def test_a_parquet_file_has_the_same_columns(table, tmp_path):
    """And values far out are moved to the same place."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"patient": ["p1", "p2"], "age": [44, 10**6], "sex": ["f", "m"]}
    columns["chol"] = [300.0, None]
    pq.write_table(pa.table(columns), tmp_path / "new.parquet")
    text = write_rows(tmp_path / "new.csv", ["p1,44,f,300\n", "p2,1000000,m,\n"])
    model = load(table)
    assert torch.equal(answered(model, tmp_path / "new.parquet")[1], answered(model, text)[1])


def test_images_are_found_whatever_their_folders_are_named(image, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (3, 8, 8), dtype=np.uint8)
    for place, name in enumerate(("b.png", "visit-1/a.png", "visit-1/deep/c.png")):
        path = tmp_path / "new" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[place]).save(path)
    model = load(image)
    names, answers, _ = answered(model, tmp_path / "new")
    assert names == ["b.png", "visit-1/a.png", "visit-1/deep/c.png"]
    x = (torch.from_numpy(pixels).float()[:, None] / 255 - 0.5) / 0.25
    assert torch.allclose(answers, model.module.answers(x), atol=1e-6)
    with refused("no such folder"):
        list(model.answer(tmp_path / "nothing"))


def test_arrays_are_taken_as_they_are(arrays, tmp_path):
    x, model = make_data(700, 5).x, load(arrays)
    np.savez(tmp_path / "new.npz", x=x.numpy())
    names, answers, _ = answered(model, tmp_path / "new.npz")
    assert names[:2] == ["0", "1"]
    assert torch.allclose(answers, model.module.answers(x), atol=1e-6)
    np.savez(tmp_path / "scalar.npz", x=np.array(1.0))
    with refused(r"x is \[\]"):
        list(model.answer(tmp_path / "scalar.npz"))
    np.savez(tmp_path / "one.npz", x=x[:1].numpy(), ids=np.array(["a1"]))
    assert answered(model, tmp_path / "one.npz")[0] == ["a1"]
    np.savez(tmp_path / "other.npz", x=np.zeros((2, 1, 9, 9), np.float32))
    with refused(r"x is \[2, 1, 9, 9\], and the model takes \[N, 1, 8, 8\]"):
        list(model.answer(tmp_path / "other.npz"))
    x[3, 0, 0, 0] = torch.nan
    np.savez(tmp_path / "nan.npz", x=x.numpy())
    with refused("record 3 holds NaN"):
        list(model.answer(tmp_path / "nan.npz"))


def test_several_inputs_are_arrays_by_name(tmp_path):
    job = make_job(model={"classes": 4, **WARD})
    path = made(tmp_path / "model", job, wards(30), {"kind": "npz"})
    data = wards(6, 3)
    inputs = {"image": (1, 8, 8), "labs": (3,), "note": (5,)}
    starts = np.cumsum([0, 64, 3, 5])
    arrays = {
        f"x.{name}": data.held[:, start:end].reshape(6, *shape).numpy()
        for (name, shape), start, end in zip(inputs.items(), starts, starts[1:], strict=False)
    }
    np.savez(tmp_path / "new.npz", **arrays)
    with refused("may not run here"):
        load(path)
    model = load(path, None)
    _, answers, _ = answered(model, tmp_path / "new.npz")
    assert torch.equal(answers, model.module.answers(data.held))
    # As many numbers, in other shapes.
    swapped = {**arrays, "x.labs": arrays["x.note"], "x.note": arrays["x.labs"]}
    np.savez(tmp_path / "swapped.npz", **swapped)
    with refused(r"a record here has image \[1, 8, 8\], labs \[5\], note \[3\]"):
        list(model.answer(tmp_path / "swapped.npz"))
    arrays["x.note"][4, 2] = 20
    np.savez(tmp_path / "odd.npz", **arrays)
    with refused("record 4 has numbers that are no tokens from 0 to 19"):
        list(model.answer(tmp_path / "odd.npz"))


class TestDecisions:
    def test_a_threshold_decides_between_two_classes(self, table, tmp_path):
        model = load(table)
        (cut,) = model.thresholds
        path = write_rows(tmp_path / "new.csv", [f"p{n},{20 + n},f,300\n" for n in range(60)])
        (piece,) = model.answer(path)
        assert piece.decisions.tolist() == (piece.answers[:, 1] >= cut).long().tolist()

    def test_a_label_without_a_threshold_is_called_from_half_on(self, tmp_path):
        """A threshold is its label's own, wherever it stands in the list."""
        job = Job.from_file(JobFile.model_validate(document("multilabel")), "job.toml")
        data = records("multilabel", 80, 3)
        path = made(tmp_path / "made", job, data, {"kind": "npz"})

        def fewer(description):
            first, _, last = description["thresholds"]
            description["thresholds"] = [{**last, "value": 0.3}, {**first, "value": 0.2}]

        model = load(edited(path, tmp_path, fewer))
        assert model.thresholds == (0.2, 0.5, 0.3)
        np.savez(tmp_path / "new.npz", x=data.held.numpy(), y=data.y.numpy())
        (piece,) = model.answer(tmp_path / "new.npz")
        wanted = piece.answers >= torch.tensor([0.2, 0.5, 0.3])
        assert piece.decisions.tolist() == wanted.long().tolist()
        found = evaluate(model, tmp_path / "new.npz").thresholds
        assert [(own.of, own.value) for own in found] == [("0", 0.2), ("2", 0.3)]
        caught = piece.decisions[:, 2][data.y[:, 2] == 1].double().mean()
        assert found[1].sensitivity == pytest.approx(caught.item())

    def test_a_threshold_between_neighbours_divides_them(self):
        """Chosen in float64, between two values of float32."""
        low = torch.tensor(1.0) - 2**-23
        answers = torch.tensor([[0.0, 1.0 - 2**-23], [0.0, 1.0 - 2**-24], [0.0, 1.0]])
        for value in answers[:, 1].double().tolist():
            assert value >= low
        cut = (1.0 - 2**-23 + 1.0 - 2**-24) / 2
        assert make_job().task.decisions(answers, (cut,)).tolist() == [0, 1, 1]
        cut = (1.0 - 2**-24 + 1.0) / 2
        assert make_job().task.decisions(answers, (cut,)).tolist() == [0, 0, 1]
        labels = Job.from_file(JobFile.model_validate(document("multilabel")), "job.toml").task
        assert labels.decisions(answers, (0.0, cut)).tolist() == [[1, 0], [1, 0], [1, 1]]

    def test_the_likeliest_of_more_classes_is_called(self, arrays, tmp_path):
        np.savez(tmp_path / "new.npz", x=make_data(20).x.numpy())
        (piece,) = load(arrays).answer(tmp_path / "new.npz")
        assert piece.decisions.tolist() == piece.answers.argmax(1).tolist()

    @pytest.mark.parametrize("kind", ["regression", "multilabel", "survival", "segmentation"])
    def test_other_tasks_answer_in_their_own_terms(self, kind, tmp_path):
        job = Job.from_file(JobFile.model_validate(document(kind)), "job.toml")
        data = records(kind, 80, 3)
        model = load(made(tmp_path / "model", job, data, {"kind": "npz"}))
        np.savez(tmp_path / "new.npz", x=data.held[:5].numpy())
        (piece,) = model.answer(tmp_path / "new.npz")
        outputs = model.module.outputs(model.module.parts, data.held[:5])
        match kind:
            case "regression":
                center, scale = job.task.affine
                assert torch.allclose(piece.answers, center + scale * outputs)
                assert model.answer_names == ("value (days)",)
                assert piece.decisions is None
            case "multilabel":
                assert torch.allclose(piece.answers, torch.sigmoid(outputs))
                cuts = torch.tensor(model.thresholds)
                assert piece.decisions.tolist() == (piece.answers >= cuts).long().tolist()
            case "survival":
                # One minus the hazards, interval by interval.
                kept = (1 - torch.sigmoid(outputs)).cumprod(1)
                assert torch.allclose(piece.answers, kept, atol=1e-6)
                assert model.answer_names == ("survival(1)", "survival(2)", "survival(4)")
            case "segmentation":
                assert piece.answers.shape == (5, 3, 8, 6)
                assert torch.equal(piece.decisions, outputs.argmax(1))

    def test_a_label_that_few_records_have_is_called_from_half_on(self, tmp_path):
        """The other labels keep their thresholds, and each is measured as its own."""
        job = Job.from_file(JobFile.model_validate(document("multilabel")), "job.toml")
        data = records("multilabel", 120, 3)
        data.y[:, 1] = 0
        data.y[:3, 1] = 1
        model = load(made(tmp_path / "model", job, data, {"kind": "npz"}))
        first, middle, last = model.thresholds
        kept = {own.of: own.value for own in model.description.thresholds}
        assert list(kept) == [model.threshold_names[0], model.threshold_names[2]]
        assert (first, last) == tuple(kept.values())
        assert middle == 0.5
        x, y = data.held.numpy(), data.y.numpy()
        np.savez(tmp_path / "labelled.npz", x=x, y=y)
        (_, own) = evaluate(model, tmp_path / "labelled.npz").thresholds
        called = model.module.answers(data.held).numpy()[:, 2] >= last
        assert own.sensitivity == pytest.approx(called[y[:, 2] == 1].mean())


def edited(path, tmp_path, change):
    """The folder with another description, as its maker might have signed it."""
    files = {name: (path / name).read_bytes() for name in folder.FILES}
    description = json.loads(files[folder.DESCRIPTION])
    change(description)
    digest = hashlib.sha256(canonical_json(description["job"])).hexdigest()
    files[folder.DESCRIPTION] = json.dumps({**description, "job_digest": digest}).encode()
    folder.write(tmp_path / "model", files, None)
    return tmp_path / "model"


def _fails(*_):
    raise RuntimeError("can't allocate memory")


class TestWhatIsNotAsItWas:
    def test_a_model_that_computes_something_else_is_refused(self, table, tmp_path):
        def other(description):
            description["self_test"]["outputs"][0] += 0.01

        with refused("computes something else of the model than where it was made"):
            load(edited(table, tmp_path, other))

    def test_a_later_version_of_the_method_is_tried(self, table, tmp_path):
        """A version says that training changed; what the model computes is tried."""

        def other(description):
            description["job"]["method"]["version"] = 99

        assert load(edited(table, tmp_path, other)).job.method_name == "fedper"

    def test_values_of_another_model_are_refused(self, table, arrays, tmp_path):
        files = {name: (table / name).read_bytes() for name in folder.FILES}
        files[folder.WEIGHTS] = (arrays / folder.WEIGHTS).read_bytes()
        folder.write(tmp_path / "model", files, None)
        with refused("does not fit the job's model|the saved state has parts"):
            load(tmp_path / "model")

    @pytest.mark.parametrize(
        ("names", "said"),
        [
            (["no"], "output_names has 1 names, job.model says 2 classes"),
            (["no", "no"], "are both named 'no'"),
            (["no", "y\nes"], "printable"),
            (["no", "\ud800"], "printable"),
        ],
    )
    def test_names_that_are_not_one_per_class_are_refused(self, table, tmp_path, names, said):
        with refused(said):
            load(
                edited(table, tmp_path, lambda description: description.update(output_names=names))
            )

    def test_a_model_that_asks_for_any_memory_is_refused(self, tmp_path, monkeypatch):
        """Values of such a model fit records of any size."""
        model = {"name": "volume-resnet", "classes": 3, "input": [1, 16, 16, 16]}
        data = Dataset(torch.randn(6, 1, 16, 16, 16), torch.arange(6) % 3)
        path = made(tmp_path / "made", make_job(model=model), data, {"kind": "npz"})

        def larger(description):
            description["job"]["model"]["input"] = [1, 4096, 4096, 4096]

        large = edited(path, tmp_path, larger)
        with refused("the model and its trial would take 4,398,0"):
            load(large)
        monkeypatch.setattr(trained, "check_fits", lambda *_: None)
        monkeypatch.setattr(trained, "trial_answers", _fails)
        with refused("the model cannot be rebuilt: can't allocate memory; free memory"):
            load(large)

    def test_a_model_that_diverged_calls_nothing(self, tmp_path):
        job = make_job()
        state = initial_state(job.method(), "a")
        parts = {
            part: {name: torch.full_like(value, torch.nan) for name, value in own.items()}
            for part, own in state.parts.items()
        }
        path = made(
            tmp_path / "m", job, make_data(9), {"kind": "npz"}, state=replace(state, parts=parts)
        )
        np.savez(tmp_path / "new.npz", x=make_data(3).x.numpy())
        with refused("answers with NaN or infinity: its training diverged"):
            list(load(path).answer(tmp_path / "new.npz"))

    def test_an_unknown_contract_is_refused(self, table, tmp_path):
        def other(description):
            description["contract"]["kind"] = "xml"

        with refused("contract: unknown kind"):
            load(edited(table, tmp_path, other)).contract  # noqa: B018

    def test_a_later_change_of_the_records_table_changes_nothing(self, table, tmp_path):
        """The constants are the model's own."""
        path = write_rows(tmp_path / "new.csv", ["p1,44,f,300\n"])
        before = answered(load(table), path)[1]
        copied = shutil.copytree(table, tmp_path / "elsewhere")
        assert torch.equal(answered(load(copied), path)[1], before)


@pytest.mark.parametrize("method", ["fedavg", "fedper", "fedssa", "pfedsim", "fedaims", "ppfl"])
def test_each_method_has_a_model_to_use(method, tmp_path):
    options = {"lam": 0.0} if method == "ppfl" else {}
    model = {"name": "convnet-digits", "norm": "batch"} if method == "fedaims" else {}
    job = make_job(method, options, model)
    data = make_data(20)
    state = initial_state(job.method(), "a")
    trained = load(made(tmp_path / "model", job, data, {"kind": "npz"}, state=state))
    assert trained.module.answers(data.held).shape == (20, 3)
