import json

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from staddle.algorithms.data.dataset import Dataset, save_npz
from staddle.commands.main import app
from staddle.errors import LocalError

FILE = """\
version = 1
name = "small"
seed = 1
rounds = 1

[data]
file = "data.npz"

[partition]
{partition}

[method]
name = "local"

[model]
name = "glm"
classes = {classes}
input = [1, 1, 1]

[training]
lr = 0.1
"""
COLUMN = 'kind = "column"\nminimum = 2'


@pytest.fixture
def small(tmp_path):
    """A simulation's file over records of some hospitals."""

    def make(silos=3, classes=4, partition=COLUMN, name="small.toml"):
        y = np.arange(silos * 8) % classes
        names = tuple(f"class {number}" for number in range(classes))
        sources = tuple(f"clinic {1000 + record // 8}" for record in range(len(y)))
        data = Dataset(torch.zeros(len(y), 1, 1, 1), torch.from_numpy(y), names, None, sources)
        save_npz(tmp_path / "data.npz", data)
        file = tmp_path / name
        file.write_text(FILE.format(partition=partition, classes=classes))
        return file

    return make


def run(*arguments):
    done = CliRunner().invoke(app, ["partition", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


def test_a_partition_is_written_shown_and_read_again(small, tmp_path):
    out, png = tmp_path / "p.json", tmp_path / "p.png"
    made = run("make", small(), "--out", out, "--picture", png)
    assert "class 3" in made
    assert "3 silos with 24 records, 8 each: 18 training, 6 test\n4 classes, 4 at each" in made
    assert 'p.json: read it with [partition] file = "p.json"' in made
    with Image.open(png) as image:
        assert image.format == "PNG"
    shown = run("show", out)
    assert "clinic-1002" in shown
    assert 'made from 24 records of data.npz: {"minimum": 2, "seed"' not in shown
    assert '"kind": "column", "split": {"kind": "merged", "ratio": "75/25"}}, seed 0' in shown
    again = small(partition='file = "p.json"', name="again.toml")
    assert run("show", again, "--json") == run("show", small(), "--json")
    with pytest.raises(LocalError, match=r"p\.json: exists already"):
        run("make", small(), "--out", out)


def test_a_partition_of_another_program_is_shown_with_its_records(small, tmp_path):
    (tmp_path / "p.csv").write_text(
        "record,client,side\n7,a,train\n2,a,test\n3,b,train\n1,b,test\n"
    )
    shown = run("show", small(partition='file = "p.csv"'))
    assert "2 silos with 4 records, 2 each: 2 training, 2 test" in shown
    assert "20 of 24 records are given to no silo" in shown
    with pytest.raises(LocalError, match=r"of another program \(format 'csv'\), which is only"):
        run("show", tmp_path / "p.csv")


def test_the_counts_of_all_silos_are_json(small):
    found = json.loads(run("show", small(classes=2), "--json"))
    assert found == {
        "silos": {
            f"clinic-{number}": {"training": 6, "validation": 0, "test": 2, "by_class": [4, 4]}
            for number in (1000, 1001, 1002)
        },
        "class_names": ["class 0", "class 1"],
        "notes": [],
    }


def test_many_silos_and_classes_are_cut_short(small):
    short = run("show", small(silos=50, classes=16))
    assert "the 10 smallest and the 10 largest of 50 silos; --all shows every one" in short
    assert short.count("clinic-") == 20
    assert "class 0: 1, class 1: 1, class 2: 1, class 3: 1, class 4: 1 and 3 more" in short
    assert run("show", small(silos=50, classes=16), "--all").count("clinic-") == 50


def test_a_task_without_classes_has_no_picture(small, tmp_path):
    file = small(classes=2)
    values = Dataset(torch.zeros(24, 1, 1, 1), torch.arange(24.0), None, None, ("a", "b") * 12)
    save_npz(tmp_path / "data.npz", values)
    task = '[task]\nkind = "regression"\nrange = [0.0, 24.0]\n\n[model]'
    file.write_text(file.read_text().replace("[model]", task).replace("classes = 2", "outputs = 1"))
    assert "2 silos with 24 records" in run("show", file)
    with pytest.raises(LocalError) as caught:
        run("show", file, "--picture", tmp_path / "p.png")
    assert str(caught.value) == (
        "--picture: pictures show records by class, and exist only for tasks with one class per"
        ' record, such as task.kind = "classification"; leave it out'
    )


def test_what_cannot_be_drawn_or_written_is_refused(small, tmp_path):
    out = tmp_path / "p.json"
    run("make", small(), "--out", out)
    with pytest.raises(
        LocalError,
        match=r"no classes are known: show a simulation's file that reads it, .* whose task has",
    ):
        run("show", out, "--picture", tmp_path / "p.png")
    synthetic = (
        small()
        .read_text()
        .replace('file = "data.npz"', 'kind = "synthetic"\nsilos = 2\ndimension = 1')
    )
    (tmp_path / "s.toml").write_text(synthetic.replace(f"[partition]\n{COLUMN}\n", ""))
    assert "2 silos with" in run("show", tmp_path / "s.toml")
    with pytest.raises(
        LocalError,
        match="synthetic records are drawn silo by silo from a seed, so there is nothing",
    ):
        run("make", tmp_path / "s.toml", "--out", tmp_path / "s.json")
