"""Data sets of installed packages: read as they are, and what is wrong with them is told."""

import other_tasks
import pytest
import torch
from support.refusals import refused

from staddle.algorithms.data.lazy import LazyRecords
from staddle.algorithms.data.registry import KINDS
from staddle.algorithms.data.sources.installed import Installed


def table(name, **fields):
    return Installed(kind="package", name=name, **fields)


def test_records_are_those_of_the_package():
    assert KINDS["package"] is Installed
    data = table("waves", options={"count": 100, "shift": 0.5}).load(None)
    assert (tuple(data.x.shape), tuple(data.y.shape)) == ((100, 1, 1, 6), (100,))
    assert (data.x.dtype, data.y.dtype) == (torch.float32, torch.float32)
    assert data.ids[:2] == ("wave 0", "wave 1")
    assert data.class_names is None
    wanted = torch.sin(torch.arange(6.0) * 71 / 7 + 0.5)
    assert torch.equal(data.x[70, 0, 0], wanted)
    assert data.y[70] == wanted.sum() + 20


def test_workers_read_the_same_in_the_same_order():
    one, other = (table("waves", workers=workers).read() for workers in (0, 2))
    assert torch.equal(one.x, other.x)
    assert torch.equal(one.y, other.y)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("unequal", r"x of record 7 is torch\.float32 \[1, 1, 5\], that of the first torch\.flo"),
        ("bare", "record 0 is no pair of a tensor, or of a dictionary of tensors, and a target"),
        ("doubles", r"record 0 is torch\.float64; give float32"),
        ("one", "1 records; at least 2 are needed"),
        ("failing", "fails: no such scanner; correct the data set"),
        ("gone", r"data set 'gone'"),
    ],
)
def test_what_is_no_data_set_is_told(name, why):
    with refused(why):
        table(name).read()


@pytest.mark.parametrize("lazy", [False, True])
def test_tokens_may_be_whole_numbers(lazy):
    x = table("tokens", lazy=lazy).read().x
    x = x.whole() if lazy else x
    assert (x.dtype, x[8].tolist()) == (torch.float32, [1.0, 300.0, 0.0])
    with refused(r"record 0 is torch\.int64; give float32, or tokens up to 16,777,216 as int64"):
        table("tokens", options={"most": 2**24 + 1}).read()


@pytest.mark.parametrize("lazy", [False, True])
def test_a_record_may_be_a_dictionary_of_tensors(lazy):
    data = table("wards", lazy=lazy).read()
    assert data.inputs == {"image": (1, 8, 8), "labs": (3,), "note": (5,)}
    x = data.x.whole() if lazy else data.x
    patients = other_tasks.wards(None)
    for number in (0, 5, 59):
        own, truth = patients[number]
        row = torch.cat([own["image"].reshape(-1), own["labs"], own["note"].float()])
        assert torch.equal(x[number], row)
        assert data.y[number] == truth


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(
    ("mistake", "why"),
    [
        (
            "turned",
            r"record 5 has image \[8, 8, 1\], labs \[3\], note \[5\], the first has image",
        ),
        ("more", r"record 5 has age \[\], image .* the first has image .* are alike"),
        ("double", r"'labs' of record 5 is torch.float64; give float32"),
        ("list", "'labs' of record 5 is list; give a tensor"),
        ("large", "'note' of record 5 is torch.int64; give float32, or tokens up to 16,777,216"),
    ],
)
def test_what_is_wrong_with_one_of_its_tensors_is_told(mistake, why, lazy):
    with refused(why):
        read = table("wards", lazy=lazy, options={"mistake": mistake}).read()
        read.x.whole()


def test_marks_are_numbers():
    data = table("wards", options={"mistake": "marked"}).read()
    assert data.x[5, -5:].tolist() == [1.0] * 5


@pytest.mark.parametrize("name", ["waves", "listed"])
@pytest.mark.parametrize("workers", [0, 1])
def test_lazy_records_and_their_targets(name, workers):
    held, lazy = (table(name, lazy=way, workers=workers).read() for way in (False, True))
    assert isinstance(lazy.x, LazyRecords)
    assert torch.equal(lazy.x.whole(), held.x)
    assert torch.equal(lazy.y, held.y)
    assert lazy.y.dtype == torch.float32
    assert lazy.ids == held.ids


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [
        (torch.uint8, torch.uint8),
        (torch.bool, torch.uint8),
        (torch.int32, torch.int64),
        (torch.float64, torch.float32),
    ],
)
def test_a_target_may_be_a_map_of_classes(monkeypatch, dtype, kept):
    """Whatever numbers it has: record 1 has others than record 0."""

    def drawn(self, index):
        return torch.zeros(1, 2, 3), torch.full((2, 3), index % 2).to(dtype)

    monkeypatch.setattr(other_tasks.Waves, "__getitem__", drawn)
    for lazy in (False, True):
        y = table("waves", lazy=lazy).read().y
        assert (y.dtype, y.shape[1:], y[3].unique().tolist()) == (kept, (2, 3), [1])


def test_targets_that_a_set_says_spare_reading_it(monkeypatch):
    read = []

    def noted(self, index):
        read.append(index)
        return torch.zeros(1, 1, 6), 0.0

    def opened(path):
        dataset = other_tasks.Listed(path)
        dataset.targets = [0.0] * 40
        return dataset

    monkeypatch.setattr(other_tasks.Listed, "__getitem__", noted)
    monkeypatch.setattr(other_tasks, "listed", opened)
    data = table("listed", lazy=True).read()
    # The first shows what they look like; three are compared with what the set says.
    assert read == [0, 0, 0, 20, 20, 39, 39]
    assert len(data.x.take(torch.arange(3).numpy()).whole()) == 3
    assert read[7:] == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("short", {}, r"targets is torch\.float32 \[39\] for 40 records, of which the first has"),
        ("listed", {"lie": 20}, "targets says something else of record 20"),
        (
            "restless",
            {"listed": True},
            "record 0 is another each time it is read; leave random changes out",
        ),
    ],
)
def test_what_is_no_lazy_set_is_told(name, options, why):
    with refused(why):
        table(name, options=options, lazy=True).read()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_target_that_is_another_when_it_is_read_is_told(workers):
    data = table("listed", options={"lie": 7}, lazy=True, workers=workers).read()
    with refused("targets says something else of record 7"):
        data.x.whole()


def test_the_identity_is_of_the_package_and_the_options():
    def identity(**fields):
        return table("waves", lazy=True, **fields).read().x.identity()

    assert identity() == identity(folder="/tmp", workers=1)
    assert identity() != identity(options={"shift": 1.0})
    assert "other-tasks" in identity()


def test_more_than_fits_the_memory_is_not_read(monkeypatch):
    monkeypatch.setattr("staddle.files.file_bounds.available_memory", lambda: 2000)
    with refused(
        "waves: the 40 records would take 2,240 bytes of memory, 2,000 are available; .* or set"
        " data.lazy = true"
    ):
        table("waves").read()
    assert len(table("waves", lazy=True).read()) == 40


def test_options_and_paths(tmp_path):
    with refused("unexpected keyword argument 'colour'; correct the data set, or data.options"):
        table("waves", options={"colour": "red"}).read()
    with pytest.raises(ValueError, match="name one of them, or none"):
        table("waves", file=tmp_path / "a", folder=tmp_path)
    assert table("waves").below(tmp_path).path is None
    moved = Installed(kind="package", name="waves", folder="scans").below(tmp_path)
    assert moved.path == tmp_path / "scans"
    with refused("no such folder"):
        moved.check_present()
    table("waves").check_present()
