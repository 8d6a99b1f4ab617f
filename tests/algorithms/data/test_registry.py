import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.refusals import refused

import staddle
from staddle.algorithms.data import registry
from staddle.algorithms.data.dataset import save_npz, split
from staddle.algorithms.data.sources.formats.npz import Npz
from staddle.algorithms.training.record_checks import check_records
from staddle.errors import LocalError
from staddle.files.documents import Strict, validate

OPERATE = Path(__file__).resolve().parents[3] / "docs" / "operate.md"


class File(Strict):
    data: registry.Source


def parsed(**table):
    return validate({"data": table}, File, "silo.toml").data


def test_a_kind_is_what_its_table_says_and_npz_without_a_word():
    assert parsed(file="a.npz") == Npz(file=Path("a.npz")) == parsed(kind="npz", file="a.npz")
    tables = {
        "images": {"folder": "a"},
        "masks": {"folder": "a"},
        "listed": {"file": "a", "folder": "b", "image": "c", "label": "d"},
        "csv": {"file": "a", "features": ["x"], "label": "y"},
        "parquet": {"file": "a", "features": ["x"], "label": "y"},
        "sql": {"file": "a", "database": "b", "id": "i", "features": ["x"], "label": "y"},
        "huggingface": {"folder": "a", "image": "x", "label": "y"},
        "torchvision": {"folder": "a", "name": "MNIST"},
        "tiny-imagenet": {"folder": "a"},
        "natural": {"folder": "a", "name": "har"},
        "bundled": {"name": "digits"},
        "package": {"name": "scans", "folder": "a"},
    }
    for kind, table in tables.items():
        found = parsed(kind=kind, **table, test_fraction=0.5)
        assert type(found) is registry.KINDS[kind]
        assert (found.kind, found.test_fraction) == (kind, 0.5)
    assert {"npz", *tables} == set(registry.KINDS)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"kind": "cvs"},
            ("data: kind = 'cvs': no such kind; did you mean 'csv'? known: npz, images, masks,"
            " listed, csv, parquet, sql, huggingface,")),
        ({"kind": ["csv"]}, "data: kind = ['csv']: no such kind; did you mean 'csv'?"),
        ({"kind": 3}, "data: kind = 3: no such kind; known: npz"),
        ({}, "missing key 'data.file'"),
        ({"file": "a", "label": "y"},
            ("'label' is a key of kind listed or csv or parquet or sql or huggingface, this is"
            " kind 'npz'")),
        ({"kind": "images", "file": "a"},
            "'file' is a key of kind npz or listed or csv or parquet or sql or package,"),
        ({"kind": "bundled", "name": "digits", "foldr": "a"},
            "unknown key 'data.foldr'; did you mean 'folder'?"),
        ({"kind": "bundled", "name": "digit"},
            "data.name = 'digit': give 'digits', 'breast-cancer' or 'diabetes'"),
        ({"kind": "images", "folder": "a", "test_fraction": 1},
            "data.test_fraction = 1: give a value below 1"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(table, said):
    with pytest.raises(LocalError) as caught:
        parsed(**table)
    assert said in str(caught.value)
    assert str(caught.value).startswith("silo.toml: ")


def test_only_the_registry_names_the_kinds():
    """So that a kind is added by its file and its entry there.

    What is drawn silo by silo, or holds whole clients, is the simulator's alone.
    """
    root = Path(str(staddle.__file__)).resolve().parent
    room = root / "algorithms" / "data"
    outside = [
        path
        for folder in ("algorithms", "silo", "simulator", "commands")
        for path in (root / folder).rglob("*.py")
    ]
    found = {
        line
        for path in outside
        if not path.is_relative_to(room / "sources") and path != room / "registry.py"
        for line in path.read_text().splitlines()
        if re.search(r"\bimport\b.*\bsources\b|\bsources\b.*\bimport\b", line) and "data" in line
    }
    assert found
    assert all("synthetic" in line or "pfllib" in line for line in found)


def test_a_table_is_a_table():
    with refused("data = 3: give a table"):
        validate({"data": 3}, File, "silo.toml")


@pytest.fixture
def folder(tmp_path):
    """The same six records of one number as .npz and CSV, and as images of one pixel."""
    x, y = np.arange(6, dtype=np.float32) / 255, np.arange(6) % 2
    np.savez(
        tmp_path / "d.npz", x=x.reshape(6, 1, 1, 1), y=y, ids=np.array([f"p{n}" for n in range(6)])
    )
    rows = [f"p{n},{v!r},{k}" for n, (v, k) in enumerate(zip(x.tolist(), y, strict=True))]
    (tmp_path / "d.csv").write_text("\n".join(["id,v,y", *rows]))
    for n, k in enumerate(y):
        (tmp_path / "images" / str(k)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((1, 1), n, np.uint8)).save(
            tmp_path / "images" / str(k) / f"p{n}.png"
        )
    return tmp_path


TABLES = {
    "npz": {"file": "d.npz"},
    "csv": {"file": "d.csv", "features": ["v"], "label": "y", "id": "id"},
    "images": {"folder": "images"},
    "bundled": {"name": "breast-cancer", "share": [1, 20]},
}


@pytest.mark.parametrize("kind", TABLES)
def test_records_of_every_kind_fit_a_job_and_split(folder, make_job, kind):
    source = parsed(kind=kind, **TABLES[kind]).below(folder)
    source.check_present()
    job = make_job(
        model={"name": "glm", "classes": 2, "input": [1, 1, 30 if kind == "bundled" else 1]}
    )
    data = source.load(job.model)
    check_records(job, data, source.where)
    train, test = split(data, b"key", 0.5)
    assert len(set(train.ids) | set(test.ids)) == len(data)
    assert source.where == ("bundled breast-cancer" if kind == "bundled" else str(source.path))


def test_one_record_has_one_side_in_every_file_that_has_its_id(folder, make_job):
    model = make_job(model={"name": "glm", "classes": 2, "input": [1, 1, 1]}).model
    found = [parsed(kind=kind, **TABLES[kind]).below(folder).load(model) for kind in ("npz", "csv")]
    assert torch.equal(found[0].x, found[1].x)
    assert torch.equal(found[0].y, found[1].y)
    assert split(found[0], b"key", 0.5)[1].ids == split(found[1], b"key", 0.5)[1].ids


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"file": "none.npz"}, "none.npz: no such file; data.file in the configuration"),
        ({"file": "images"}, "images: no such file"),
        ({"kind": "csv", "file": "none.csv", "features": ["v"], "label": "y"},
            "none.csv: no such file; data.file"),
        ({"kind": "images", "folder": "none"},
            "none: no such folder; correct the path, or data.folder"),
        ({"kind": "torchvision", "folder": "d.npz", "name": "MNIST"},
            "d.npz: no such folder; correct the path"),
        ({"kind": "natural", "folder": "none", "name": "har"}, "none: no such folder; correct"),
        ({"kind": "tiny-imagenet", "folder": "none"}, "none: no such folder; correct the path"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_said_before_any_job(folder, table, said):
    source = parsed(**table).below(folder)
    with pytest.raises(LocalError) as caught:
        source.check_present()
    assert str(caught.value).startswith(f"{folder}/{said}")


@pytest.mark.parametrize("kind", ["images", "masks", "tiny-imagenet"])
def test_images_are_read_in_the_size_of_a_jobs_model(folder, kind):
    with refused("in the size that a job's model takes; give a job"):
        parsed(kind=kind, folder=str(folder)).load(None)


def test_what_is_saved_for_a_silo_is_loaded_by_its_table(tmp_path, make_data, make_job):
    data = make_data(9)
    save_npz(tmp_path / "d.npz", data)
    assert torch.equal(parsed(file=str(tmp_path / "d.npz")).load(make_job().model).x, data.x)


@pytest.mark.skipif(not OPERATE.exists(), reason="the tests run without docs/ beside them")
def test_the_examples_of_the_documentation_are_tables_of_every_kind():
    section = OPERATE.read_text().partition("\n## 7. Data")[2]
    section = section.partition("\n### Several data sets")[0]
    blocks = re.findall(r"(?:^    .*\n|^\n)+", section, re.MULTILINE)
    examples = [block for block in blocks if "[data]" in block]
    found = [
        parsed(**tomllib.loads("\n".join(line[4:] for line in e.split("\n")))["data"])
        for e in examples
    ]
    assert [table.kind for table in found] == list(registry.KINDS)
