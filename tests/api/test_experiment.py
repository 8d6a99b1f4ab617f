"""Experiments as objects: plain torch in, the file of ``staddle simulate`` out."""

import sys
import textwrap
import tomllib
from base64 import b64encode
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from support.jobs import make_data
from support.refusals import refused
from torch import nn
from typer.testing import CliRunner

import staddle
from staddle.algorithms.engines.attendance import Attendance
from staddle.algorithms.methods.fedper import FedPer
from staddle.commands.main import app
from staddle.simulator.experiment.experiment import read
from staddle.simulator.experiment.population import populate
from staddle.simulator.report import report

GLM = {"name": "glm"}
TRAINING = {"batch_size": 16, "lr": 0.1}
DATA = make_data(120)


class Pairs(torch.utils.data.Dataset):
    """As torchvision's data sets are: a record and a number."""

    def __len__(self):
        return len(DATA)

    def __getitem__(self, place):
        return DATA.x[place], int(DATA.y[place])


def small(folder, **changes):
    given = {
        "data": (DATA.x.numpy(), DATA.y.numpy()),
        "partition": staddle.Dirichlet(2.0, silos=3),
        "model": GLM,
        "methods": ["local", {"name": "fedavg", "label": "mean"}],
        "rounds": 2,
        "training": TRAINING,
        **changes,
    }
    return staddle.Experiment(folder, **given)


def test_it_writes_the_file_that_simulate_runs_and_reads_it(tmp_path):
    first = small(tmp_path / "exp")
    found = tomllib.loads(first.file.read_text())
    assert found["name"] == "exp"
    assert found["data"] == {"file": "records.npz"}
    assert found["model"] == {"input": [1, 8, 8], "classes": 3, "name": "glm"}
    assert found["training"] == {"epochs": 1, "batch_size": 16, "lr": 0.1}
    assert [method["name"] for method in found["methods"]] == ["local", "fedavg"]
    again = staddle.Experiment.read(first.file)
    assert again.file == first.file
    first.run(workers=1)
    out = tmp_path / "by-command"
    run = CliRunner().invoke(
        app,
        ["simulate", str(first.file), "--out", str(out), "--workers", "1"],
        catch_exceptions=False,
    )
    assert run.exit_code == 0
    for label in ("local", "mean"):
        mine = (first.folder / "results" / label / "seed-1" / "silos.csv").read_bytes()
        assert (out / label / "seed-1" / "silos.csv").read_bytes() == mine


def test_who_is_there_is_a_table_of_the_file(tmp_path):
    who = {"newcomers": ("silo-001",), "join_after": 1, "step_seconds": {}}
    who["step_seconds"] = {f"silo-00{number}": 0.5 + number for number in range(3)}
    experiment = small(tmp_path / "exp", attendance=who)
    assert read(experiment.file).file.attendance == Attendance(**who)
    rows = experiment.run(workers=1).rows()
    assert {type(row["simulated_seconds"]) for row in rows} == {float}
    measures = {row["measure"] for row in rows}
    assert {"newcomers/aggregated/accuracy.macro", "others/trained/accuracy.macro"} <= measures


def test_a_torch_data_set_and_arrays_are_the_same_records(tmp_path):
    digests = set()
    for name, data in {
        "pairs": Pairs(),
        "arrays": (DATA.x.numpy(), DATA.y.numpy()),
        "tensors": (DATA.x, DATA.y),
        "ours": DATA,
    }.items():
        digests.add(populate(read(small(tmp_path / name, data=data).file)).digest)
    assert len(digests) == 1


def test_index_arrays_say_who_has_what(tmp_path):
    pairs = [
        (np.arange(0, 20), np.arange(20, 30)),
        (np.arange(40, 70)[::-1], [70, 71, 72]),
        (range(80, 100), range(100, 120)),
    ]
    found = populate(read(small(tmp_path / "pairs", partition=pairs).file))
    sizes = [(len(own.train), len(own.test)) for own in found.records.values()]
    assert sizes == [(20, 10), (30, 3), (20, 20)]
    assert torch.equal(list(found.records.values())[1].test.x, DATA.x[70:73])
    triples = [(own, own[:0], tested) for own, tested in pairs[1:]]
    triples.append((range(30), [30, 31], range(32, 39)))
    found = populate(read(small(tmp_path / "triples", partition=triples).file))
    last = list(found.records.values())[-1]
    assert [len(last.train), len(last.validation), len(last.test)] == [30, 2, 7]
    alone = [range(40), range(40, 80), range(80, 120)]
    found = populate(read(small(tmp_path / "alone", partition=alone).file))
    assert [(len(own.train), len(own.test)) for own in found.records.values()] == [(30, 10)] * 3


def test_the_file_of_another_program_says_who_has_what(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arrays = {"train_a": np.arange(20), "test_a": [20], "train_b": [30, 33], "test_b": [31, 32]}
    np.savez(tmp_path / "p.npz", **arrays)
    for number, given in enumerate(("p.npz", tmp_path / "p.npz", {"file": "../p.npz"})):
        file = small(tmp_path / str(number), partition=given, silos=["a", "b"]).file
        found = populate(read(file)).records
        assert {silo: (len(own.train), len(own.test)) for silo, own in found.items()} == {
            "a": (20, 1), "b": (2, 2),
        }  # fmt: skip


def test_other_tasks_have_their_own_records(tmp_path):
    y = DATA.x.mean((1, 2, 3)).numpy()
    experiment = small(
        tmp_path / "exp",
        data=(DATA.x.numpy(), y),
        model={"name": "mlp", "outputs": 1},
        task={"kind": "regression", "range": [-5.0, 5.0]},
        partition=[range(40), range(40, 80), range(80, 120)],
    )
    results = experiment.run(workers=1)
    assert {row["measure"] for row in results.rows()} >= {"all/trained/mae.macro"}


def test_results_are_rows_frames_text_and_pictures(tmp_path):
    experiment = small(tmp_path / "exp", seeds=[1, 2])
    assert repr(experiment.results).endswith("no run is finished")
    assert experiment.results._repr_html_().endswith("no run is finished")
    with refused("no run is finished; call run"):
        experiment.results.frame()
    results = experiment.run(workers=1)
    frame = results.frame()
    assert isinstance(frame, pd.DataFrame)
    assert set(frame.label) == {"local", "mean"}
    assert set(frame.seed) == {1, 2}
    assert frame["round"].max() == 2
    assert frame.value.dtype == float
    last = frame[(frame.measure == "all/trained/accuracy.macro") & (frame["round"] == 2)]
    assert len(last) == 4
    assert f"{100 * last[last.label == 'mean'].value.mean():.2f} ±" in repr(results)
    assert "What training took" in results.summary()
    assert Path(results.plot()).read_bytes() == results.plot()._repr_png_()
    assert results.plot()._repr_png_().startswith(b"\x89PNG")
    picture = b64encode(results.plot()._repr_png_()).decode()
    assert f'src="data:image/png;base64,{picture}"' in results._repr_html_()
    Path(results.plot()).unlink()
    assert "<img" not in results._repr_html_()
    assert [run.label for run in results.runs] == ["local", "local", "mean", "mean"]


def test_a_sweep_is_in_the_file_and_its_table_in_the_results(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "can_draw", lambda: False)
    given = {"training.lr": [0.001, 0.1], "training.schedule": [{"kind": "cosine"}]}
    experiment = small(tmp_path / "exp", methods=["fedavg"], sweep=given)
    assert [method.training for method in read(experiment.file).file.all_methods] == [
        {"lr": rate, "schedule": {"kind": "cosine"}} for rate in (0.001, 0.1)
    ]
    assert experiment.results.sweep() == []
    results = experiment.run(workers=1)
    # The best score of several says what chose it.
    for shown in (repr(results), results._repr_html_()):
        assert "best variant of each method, by test records" in shown
        assert "best score too good" in shown
    found = results.sweep()
    assert [row["rank"] for row in found] == [1, 2]
    assert found[0]["label"] == f"fedavg+lr={found[0]['training.lr']}+schedule=kind-cosine"
    assert found[0]["validation"] is None
    assert found[0]["test"] >= found[1]["test"]
    assert found[0]["label"] in repr(results)
    assert found[1]["label"] not in repr(results)
    assert {row["label"] for row in results.rows()} == {row["label"] for row in found}
    longer = small(tmp_path / "exp", methods=["local"], rounds=3)
    assert longer.run(workers=1).frame()["round"].max() == 3
    assert small(tmp_path / "exp", methods=["local"], rounds=4).run(workers=1).runs[-1].rounds == 4
    drawn = {"draws": 2, "training.lr": {"low": 1e-4, "high": 0.1, "log": True}}
    again = small(tmp_path / "exp", methods=["fedavg"], sweep=drawn)
    assert len(read(again.file).variants) == 2


def test_a_model_of_a_run_is_ready_to_use(tmp_path):
    experiment = small(tmp_path / "exp")
    experiment.run(workers=1)
    with refused("name one run by its method and seed"):
        experiment.model("silo-000")
    model = experiment.model("silo-001", method="mean")
    own = populate(read(experiment.file)).records["silo-001"].test
    right = (model.module.answers(own.held).argmax(1) == own.y).double().mean().item()
    assert model.description.measured.said["accuracy"] == right
    assert experiment.model("silo-001", method="mean").folder.path == model.folder.path
    # A longer run has another model, though the folder of the shorter one's is there.
    small(tmp_path / "exp", rounds=3).run(workers=1)
    assert experiment.model("silo-001", method="mean").description.job["rounds"] == 3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"methods": ["fedpre"]}, "did you mean"),
        ({"training": {"epoch": 2}}, "epoch"),
        ({"data": "nothing"}, "unknown set 'nothing'; known: digits"),
        ({"data": 5}, "data: int; give a torch data set of pairs"),
        ({"data": DATA.x.numpy()}, "data: ndarray; give a torch data set of pairs"),
        ({"data": (DATA.x.numpy(),)}, "data: an item is ndarray; give pairs of a record"),
        ({"methods": "fedavg"}, r"methods = 'fedavg': give a list of texts, \['fedavg'\]"),
        ({"sweep": ["training.lr"]}, "sweep"),
        ({"partition": iter([range(9), range(9)])}, "record 0 is given to '0' and '1'"),
        ({"partition": [range(5), (range(5), range(5))]}, "give each silo an array, or each"),
        ({"partition": [(range(5),) * 4]}, r"or each a pair \(training, test\), or each a triple"),
        ({"partition": [[0.5, 1.5]]}, r"an array of float64 \[2\]; give whole numbers"),
        ({"data": {"kind": "bundled", "name": "digits"}, "partition": [range(9)]}, "index arrays"),
        ({"model": lambda: nn.Linear(1, 1)}, "cannot be found by its name"),
        ({"rounds": 0}, "rounds"),
    ],
)
def test_what_is_wrong_is_told_before_anything_runs(tmp_path, changes, said):
    with refused(said):
        small(tmp_path / "exp", **changes).run(workers=1)
    assert not (tmp_path / "exp" / "results").exists()


@pytest.mark.parametrize("given", [{"track": "mlflow"}, {"settings": "rounds=1"}])
def test_a_text_is_no_list_of_them(tmp_path, given):
    with refused("give a list of texts"):
        small(tmp_path / "exp").run(**given)


PROGRAM = """
    import sys
    import numpy as np
    import staddle
    from torch import nn

    def net():
        return nn.Sequential(nn.Flatten(), nn.Linear(64, {width}), nn.ReLU(), nn.Linear({width}, 3))

    print("begun")
    given = np.load(sys.argv[1])
    experiment = staddle.Experiment(
        sys.argv[2], data=(given["x"], given["y"]), model={model}, methods=["fedavg", "fedper"],
        partition=staddle.Dirichlet(2.0, silos=3), rounds=2,
    )
    print(experiment.run())
"""


@pytest.fixture
def program(tmp_path, fork_server):
    """Runs a program of a user's, with this model, in a process of its own."""

    def run(model, width=8):
        np.savez(tmp_path / "given.npz", x=DATA.x.numpy(), y=DATA.y.numpy())
        file = tmp_path / "program.py"
        text = textwrap.dedent(PROGRAM).replace("{width}", str(width))
        file.write_text(text.replace("{model}", model))
        given = [str(file), str(tmp_path / "given.npz"), str(tmp_path / "exp")]
        return fork_server.run([sys.executable, "-P", *given])

    return run


def test_a_function_of_a_program_is_a_model(program):
    """And the same program resumes, or says that another model is another experiment."""
    first = program("net")
    assert first.returncode == 0, first.stderr
    assert "fedper" in first.stdout
    again = program("net")
    assert again.returncode == 0, again.stderr
    assert "begins" not in again.stdout  # all of it was there
    other = program("net", width=4)
    assert other.returncode == 1
    assert "holds another run" in other.stderr


def test_a_program_without_a_main_guard_runs_once(program):
    """Worker processes do not run it again."""
    found = program('"cnn-digits"')
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("begun") == 1
    assert "worker processes" in found.stdout


class Other(FedPer):
    """A method of this module."""

    name = "other"
    version = 1


def test_a_class_of_a_module_is_a_method(tmp_path):
    model = {"name": "cnn-digits", "classes": 3}
    results = small(tmp_path / "exp", methods=[Other, "fedper"], model=model).run(workers=1)
    rows = results.rows()
    assert {row["label"] for row in rows} == {"other", "fedper"}
    values = {
        label: [row["value"] for row in rows if row["label"] == label]
        for label in ("other", "fedper")
    }
    assert values["other"] == values["fedper"]
