import json
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.refusals import refused

from staddle.algorithms.data.dataset import Dataset, digits, save_npz
from staddle.algorithms.partition.file import partition_file, save
from staddle.algorithms.partition.split import Sides
from staddle.simulator.experiment.population import counts, cut, populate, rearrange

REAL = pytest.mark.skipif(
    "STADDLE_DATA" not in os.environ, reason="STADDLE_DATA names no folder with real sets, unpacked"
)
GLM = 'name = "glm"\nclasses = 3\ninput = [1, 1, 2]'
NPZ = 'file = "data.npz"'
COLUMN = '[partition]\nkind = "column"\nminimum = 2'


def some(n=60, classes=3, **named):
    """Records whose first value is their index."""
    x = torch.arange(float(n)).repeat_interleave(2).reshape(n, 1, 1, 2)
    return Dataset(x, torch.arange(n) % classes, **named)


def indices(data):
    return data.x[:, 0, 0, 0].int().tolist()


@given(st.permutations(range(12)))
def test_rows_are_rearranged_in_place(order):
    x = torch.arange(24.0).reshape(12, 2)
    expected = x[list(order)]
    rearrange(x, np.array(order))
    assert torch.equal(x, expected)


@settings(max_examples=25)
@given(st.integers(0, 2**32))
def test_records_are_cut_as_taken_and_lie_in_one_memory(seed):
    rng = np.random.default_rng(seed)
    pieces = np.split(rng.permutation(60)[:50], np.sort(rng.integers(0, 50, 8)))
    sides = {f"silo-{n}": Sides(*map(np.sort, pieces[3 * n : 3 * n + 3])) for n in range(3)}
    data = some()
    records = cut(data, sides)
    own = {data.x.untyped_storage().data_ptr()}
    for silo, taken in sides.items():
        for found, side in ((records[silo].train, taken.train), (records[silo].test, taken.test)):
            assert indices(found) == side.tolist()
            assert found.y.tolist() == (side % 3).tolist()
            assert len(found) == 0 or {found.x.untyped_storage().data_ptr()} == own
        if len(taken.validation):
            assert indices(records[silo].validation) == taken.validation.tolist()
        else:
            assert records[silo].validation is None


def test_every_record_of_the_digits_is_at_one_silo(experiment):
    people = populate(experiment(methods='[method]\nname = "local"\n[split]\nratio = "8:1:1"'))
    original = digits()
    assert people.notes == ()
    assert (people.classes, people.class_names) == (10, None)
    assert np.array_equal(counts(people).sum(0), np.bincount(original.y.numpy()))
    for silo, side in people.partition.sides().items():
        own = people.records[silo]
        for found, taken in (
            (own.train, side.train),
            (own.validation, side.validation),
            (own.test, side.test),
        ):
            assert torch.equal(found.x, original.x[torch.from_numpy(taken)])
    assert (people.partition.data, people.partition.seed) == ("digits", 0)
    assert people.partition.how["split"] == {"kind": "merged", "ratio": "8:1:1"}


def test_the_digest_names_the_records_whose_they_are_and_what_they_are_called(experiment, tmp_path):
    save_npz(tmp_path / "data.npz", some())

    def digest(partition=4, name="pixels", change=0.0, top="seed = 1"):
        data = some(class_names=("a", "b", name))
        data.x[7] += change
        save_npz(tmp_path / "data.npz", data)
        table = f'[partition]\nkind = "dirichlet"\nsilos = 3\nalpha = 1.0\nseed = {partition}'
        return populate(experiment(top, data=NPZ, partition=table, model=GLM)).digest

    assert digest() == digest() == digest(top="seeds = [2, 3]")
    named = digest(top='seed = 1\nsilos = ["a", "b", "c"]')
    assert len({digest(), digest(5), digest(name="other"), digest(change=0.5), named}) == 5


def test_natural_silos_are_called_by_their_sources_in_the_order_of_numbers(experiment, tmp_path):
    def people(top="seed = 1", partition=COLUMN):
        return populate(experiment(top, data=NPZ, partition=partition, model=GLM))

    save_npz(tmp_path / "data.npz", some(sources=tuple(str(n % 12) for n in range(60))))
    records = people().records
    assert list(records) == [f"silo-{n:03}" for n in range(12)]
    own = records["silo-011"]
    assert sorted(indices(own.train) + indices(own.test)) == [11, 23, 35, 47, 59]
    cities = tuple(("Zürich", "Bern")[n % 2] for n in range(60))
    save_npz(tmp_path / "data.npz", some(sources=cities))
    assert list(people().records) == ["bern", "zurich"]
    named = people('seed = 1\nsilos = ["capital", "largest"]')
    assert list(named.records) == ["capital", "largest"]
    sources = '[partition]\nkind = "sources"\nminimum = 2\n[partition.silos]\n"Zürich" = 2'
    found = people(partition=sources)
    assert list(found.records) == ["zurich-0", "zurich-1"]
    assert found.notes == ("30 of 60 records are given to no silo",)


def test_a_group_is_on_one_side_and_at_one_silo(experiment, tmp_path):
    sources, groups = (tuple(str(n // size) for n in range(60)) for size in (20, 4))
    save_npz(tmp_path / "data.npz", some(sources=sources, groups=groups))
    people = populate(experiment(data=NPZ, partition=COLUMN, model=GLM))
    for own in people.records.values():
        assert {n // 4 for n in indices(own.train)}.isdisjoint(n // 4 for n in indices(own.test))
    shards = '[partition]\nkind = "shards"\nsilos = 3\neach = 2'
    with refused(r"records of group '\d+', which belong together, are on two sides, one of"):
        populate(experiment(data=NPZ, partition=shards, model=GLM))


def test_a_partition_is_read_from_a_file_with_its_sides(experiment, tmp_path):
    data = some()
    save_npz(tmp_path / "data.npz", data)
    sides = {
        "Clinic A": Sides(np.arange(5), np.arange(5, 7), np.arange(7, 9)),
        "nobody": Sides(*[np.empty(0, np.int64)] * 3),
        "clinic-b": Sides(np.arange(20, 30), np.empty(0, np.int64), np.arange(30, 35)),
    }
    dealt = partition_file(sides, data.y.numpy(), "three classes", 5, {"by": "hand"})
    save(tmp_path / "p.json", dealt)
    table = '[partition]\nfile = "p.json"'
    people = populate(experiment(data=NPZ, partition=table, model=GLM))
    assert list(people.records) == ["clinic-a", "clinic-b"]
    assert indices(people.records["clinic-b"].test) == [30, 31, 32, 33, 34]
    assert indices(people.records["clinic-a"].validation) == [5, 6]
    assert people.notes == (
        "clients of the partition without any record take no part: nobody",
        "36 of 60 records are given to no silo",
    )
    assert (people.partition.seed, people.partition.how) == (5, {"by": "hand"})
    save_npz(tmp_path / "data.npz", some(61))
    with refused("partition of three classes: made for 60 records, there are 61"):
        populate(experiment(data=NPZ, partition=table, model=GLM))


def test_a_published_split_is_read_and_keeps_its_numbers(experiment, tmp_path):
    save_npz(tmp_path / "data.npz", some())
    train, test = np.arange(40), np.arange(40, 60)
    pointers = {"train_ptr": [0, 10, 10, 40], "test_ptr": [0, 15, 15, 20]}
    np.savez(tmp_path / "split.npz", train_idx=train, test_idx=test, **pointers)
    table = '[partition]\nfile = "split.npz"\nformat = "ppfl"'
    people = populate(experiment(data=NPZ, partition=table, model=GLM))
    assert list(people.records) == ["silo-000", "silo-002"]
    assert indices(people.records["silo-002"].test) == list(range(55, 60))
    assert people.notes == ("clients of the partition without any record take no part: 1",)
    save_npz(tmp_path / "data.npz", some(61))
    with refused(r"split\.npz: deals out 60 records, there are 61; take the data set that it"):
        populate(experiment(data=NPZ, partition=table, model=GLM))


def test_a_client_that_only_trains_or_only_tests_is_refused(experiment, tmp_path):
    save_npz(tmp_path / "data.npz", some())
    table = '[partition]\nfile = "p.json"'
    for client in ({"train": [1, 2]}, {"test": [1], "validation": [2]}):
        whole = {"0": {"train": [5], "test": [6]}, "north": {"train": [], "test": [], **client}}
        (tmp_path / "p.json").write_text(json.dumps(whole))
        with refused(r"p\.json: client 'north' has \d training records and \d test records; give"):
            populate(experiment(data=NPZ, partition=table, model=GLM))


def test_pfllibs_clients_keep_their_records_and_sides(experiment, tmp_path):
    start = 0
    for client, (train, test) in {10: (3, 2), 2: (5, 1), 0: (4, 4)}.items():
        for side, count in (("train", train), ("test", test)):
            (tmp_path / side).mkdir(exist_ok=True)
            x = np.arange(start, start + 2 * count, dtype=np.float32).reshape(count, 1, 1, 2)
            data = {"x": x, "y": np.arange(count) % 3}
            np.savez_compressed(tmp_path / side / f"{client}.npz", data=data)
            start += 2 * count
    data = 'kind = "pfllib"\nfolder = "."'
    people = populate(experiment(data=data, partition="", model=GLM))
    assert list(people.records) == ["silo-000", "silo-002", "silo-010"]
    found = people.records["silo-010"]
    assert found.train.x.flatten().tolist() == list(range(6))
    assert found.test.x.flatten().tolist() == list(range(6, 10))
    assert [len(own.train) for own in people.records.values()] == [4, 5, 3]
    assert people.partition.how["kind"] == "column"
    # Dealt out anew, all records of a client or of the whole set are dealt.
    anew = '[partition]\nkind = "dirichlet"\nsilos = 2\nalpha = 9.0\nminimum = 4'
    assert counts(populate(experiment(data=data, partition=anew, model=GLM))).sum() == 19
    some = '[partition]\nkind = "column"\nminimum = 0\nkeep = 2\n[split]\nkind = "apart"'
    assert list(populate(experiment(data=data, partition=some, model=GLM)).records) == [
        "silo-000", "silo-002",
    ]  # fmt: skip


def test_official_parts_are_kept_apart(experiment, tmp_path):
    rng = np.random.default_rng(1)
    arrays = {f"x_{p}": rng.uniform(-1, 1, (n, 16, 16)) for p, n in (("train", 200), ("test", 40))}
    arrays |= {f"y_{part}": np.arange(n) % 10 for part, n in (("train", 200), ("test", 40))}
    np.savez(tmp_path / "usps.npz", **arrays)
    usps = 'kind = "torchvision"\nname = "USPS"\nfolder = "."'
    model = 'name = "lenet5"\nclasses = 10\ninput = [1, 16, 16]'
    table = (
        '[partition]\nkind = "dirichlet"\nsilos = 4\nalpha = 1.0\n[split]\nkind ='
        ' "apart"\nvalidation = true'
    )
    people = populate(experiment(data=usps, partition=table, model=model))
    for side in people.partition.sides().values():
        assert max(*side.train, *side.validation) < 200 <= side.test.min()
        assert len(side.validation) > 0
    assert counts(people).sum() == 240
    for part in (f'{usps}\npart = "train"', 'kind = "bundled"\nname = "digits"'):
        with refused('kind = "apart" takes official training and test records: data of kind'):
            populate(experiment(data=part, partition=table, model=model))


def test_the_synthetic_population_needs_no_partition(experiment):
    data = 'kind = "synthetic"\nsilos = 3\ndimension = 4\nlargest = 60\ntests = 9'
    model = 'name = "glm"\nclasses = 2\ninput = [1, 1, 4]'
    people = populate(experiment(data=data, partition="", model=model))
    assert list(people.records) == ["silo-000", "silo-001", "silo-002"]
    assert {len(own.test) for own in people.records.values()} == {9}
    assert (people.partition, counts(people).shape) == (None, (3, 2))
    other = populate(experiment(data=data + "\nseed = 3", partition="", model=model))
    assert other.digest != people.digest
    with refused("silos names 2, the partition has 3 clients"):
        populate(experiment('seed = 1\nsilos = ["a", "b"]', data=data, partition="", model=model))


RANGED = 'name = "glm"\ninput = [1, 1, 2]\n[task]\nkind = "regression"\nrange = [0, 59]'
SHARDS = '[partition]\nkind = "shards"\nsilos = 3\neach = 2'


def test_a_task_without_classes_deals_out_by_what_it_says_is_alike(experiment, tmp_path):
    y = torch.arange(60.0)
    save_npz(tmp_path / "data.npz", Dataset(some().x, y))
    people = populate(experiment(data=NPZ, partition=SHARDS, model=RANGED))
    assert (people.classes, people.class_names) == (0, None)
    tenths = []
    for silo, side in people.partition.sides().items():
        own = people.records[silo]
        assert torch.equal(own.train.y, y[torch.from_numpy(side.train)])
        tenths.append({int(target) // 6 for target in torch.cat([own.train.y, own.test.y])})
    # a shard is of records with targets alike
    assert max(map(len, tenths)) <= 4
    with refused("data of kind 'synthetic' have classes, and the task is regression; take other"):
        populate(
            experiment(
                data='kind = "synthetic"\nsilos = 3\ndimension = 2', partition="", model=RANGED
            )
        )


WARDED = """name = "ward"
head = "fc"
[model.inputs]
image = { shape = [1, 8, 8] }
labs = { shape = [3] }
note = { shape = [5], tokens = 20 }
"""


def test_records_of_several_inputs_are_dealt_out(experiment):
    def population(lazy):
        data = f'kind = "package"\nname = "wards"\noptions = {{ count = 60 }}\nlazy = {lazy}'
        return populate(experiment(data=data, partition=SHARDS, model=f"classes = 4\n{WARDED}"))

    held, lazy = population("false"), population("true")
    for own in (*held.records.values(), *lazy.records.values()):
        for side in own.sides:
            assert side.inputs == {"image": (1, 8, 8), "labs": (3,), "note": (5,)}
    for silo, own in held.records.items():
        assert torch.equal(lazy.records[silo].train.x.whole(), own.train.x)


def test_the_digest_names_the_inputs_of_records(experiment, tmp_path):
    """The same numbers in a row are other records by other names or shapes."""

    def digest(**inputs):
        arrays = {f"x.{name}": np.zeros((60, width)) for name, width in inputs.items()}
        np.savez(tmp_path / "data.npz", y=np.arange(60) % 4, **arrays)
        data = 'kind = "npz"\nfile = "data.npz"'
        model = f"classes = 4\n{WARDED}"
        return populate(experiment(data=data, partition=SHARDS, model=model)).digest

    found = {digest(a=2, b=3), digest(a=3, b=2), digest(a=2, c=3), digest(a=2, b=3)}
    assert len(found) == 3


PACKAGED = 'kind = "package"\nname = "{}"\nfile = "data.npz"\nlazy = {}'


def test_lazy_records_are_dealt_out_and_have_a_digest_of_their_own(experiment, tmp_path):
    save_npz(tmp_path / "data.npz", some(ids=tuple(map(str, range(60)))))
    lazily, at_once = (PACKAGED.format("rows", way) for way in ("true", "false"))
    others = SHARDS.replace("each = 2", "each = 1")
    held, lazy, again, other = (
        populate(experiment(data=data, partition=partition, model=GLM))
        for data, partition in (
            (at_once, SHARDS), (lazily, SHARDS), (lazily, SHARDS), (lazily, others),
        )
    )  # fmt: skip
    for silo, own in held.records.items():
        for one, two in zip(own.sides, lazy.records[silo].sides, strict=True):
            assert torch.equal(two.x.whole(), one.x)
            assert torch.equal(two.y, one.y)
            assert (two.ids, one.ids) == (None, None)
    # Of records that nobody read, the digest says which they are.
    assert len({held.digest, lazy.digest, other.digest}) == 3
    assert again.digest == lazy.digest
    # The package and its options are the same, and the records are not.
    moved = some(ids=tuple(map(str, range(60))))
    save_npz(tmp_path / "data.npz", replace(moved, x=moved.x + 1))
    assert populate(experiment(data=lazily, partition=SHARDS, model=GLM)).digest != lazy.digest


def test_records_that_are_not_what_the_task_is_about_are_refused(experiment, tmp_path):
    save_npz(tmp_path / "data.npz", some())
    with refused(r"data\.npz: y is int64 \[N\], the job's task takes float32 \[N\]: a number per"):
        populate(experiment(data=NPZ, partition=SHARDS, model=RANGED))
    save_npz(tmp_path / "data.npz", Dataset(some().x, torch.arange(60.0)))
    with refused(r"data\.npz: y is float32 \[N\], the job's task takes int64 \[N\]: a class"):
        populate(experiment(data=NPZ, partition=SHARDS, model=GLM))


@pytest.mark.parametrize(
    ("data", "partition", "text"),
    [
        (some(classes=4), COLUMN,
            (r"data\.npz: label 3 in 15 of 60 records, the job's model knows classes 0 to 2;"
            r" number the classes from 0, or have the operator correct model\.classes")),
        (some(ids=("same",) * 60), COLUMN, "records 0 and 1 have the same id; give each its own"),
        (some(), COLUMN, "kind 'column' takes one value per record, here none for 60 records"),
        (some(), '[partition]\nkind = "shards"\nsilos = 7\neach = 1',
            "60 records do not give 7 silos 10 each"),
        (None, COLUMN, "no such file"),
    ],
)  # fmt: skip
def test_data_that_cannot_be_dealt_out_are_refused(experiment, tmp_path, data, partition, text):
    if data is not None:
        save_npz(tmp_path / "data.npz", data)
    with refused(text):
        populate(experiment(data=NPZ, partition=partition, model=GLM))


@REAL
def test_persons_and_hospitals_are_silos(experiment):
    har = f'kind = "natural"\nname = "har"\nfolder = "{os.environ["STADDLE_DATA"]}"'
    model = 'name = "glm"\nclasses = 6\ninput = [9, 1, 128]'
    people = populate(experiment(data=har, partition='[partition]\nkind = "column"', model=model))
    assert list(people.records) == [f"silo-{person:03}" for person in range(1, 31)]
    assert people.class_names[5] == "lying"
    for own in people.records.values():
        assert 0.15 < len(own.test) / (len(own.train) + len(own.test)) < 0.35
    with refused("which belong together, are on two sides"):
        populate(experiment(data=har, model=model))
    heart = (
        'kind = "natural"\nname = "heart-disease"\nfolder ='
        f' "{os.environ["STADDLE_DATA"]}/heart_disease"'
    )
    model = 'name = "glm"\nclasses = 2\ninput = [1, 1, 22]'
    people = populate(experiment(data=heart, partition='[partition]\nkind = "column"', model=model))
    assert dict(zip(people.records, counts(people).sum(1).tolist(), strict=True)) == {
        "cleveland": 303, "hungarian": 294, "switzerland": 123, "va": 200,
    }  # fmt: skip


@REAL
def test_the_published_split_with_a_client_of_nothing_has_one_silo_less(experiment):
    folder = os.environ["STADDLE_DATA"]
    split = f"{folder}/ppfl_splits/cifar10_80clients_3domains_alpha0.2.npz"
    data = f'kind = "torchvision"\nname = "CIFAR10"\nfolder = "{folder}"'
    partition = f'[partition]\nfile = "{split}"\nformat = "ppfl"'
    model = 'name = "lenet5"\nclasses = 10'
    people = populate(experiment(data=data, partition=partition, model=model))
    assert len(people.records) == 79
    assert people.notes == ("clients of the partition without any record take no part: 35",)
    assert counts(people).sum(0).tolist() == [6000] * 10


def test_some_of_the_clients_keep_what_they_have_among_all(experiment, tmp_path):
    """Ten clients' partition, of which every third takes part but for the last: 0, 3 and 6."""
    dealt = '[partition]\nkind = "dirichlet"\nsilos = 10\nalpha = 0.5\nminimum = 5\n'
    everyone = populate(experiment(partition=dealt))
    some = populate(experiment(partition=f"{dealt}keep = 3"))
    assert tuple(some.records) == ("silo-000", "silo-003", "silo-006")
    for silo, own in some.records.items():
        assert torch.equal(own.train.x, everyone.records[silo].train.x)
        assert torch.equal(own.test.y, everyone.records[silo].test.y)
    assert (some.partition.how["keep"], "keep" in everyone.partition.how) == (3, False)
    assert some.notes[0] == "3 of the partition's 10 clients take part"
    save(tmp_path / "p.json", everyone.partition)
    from_file = populate(experiment(partition='[partition]\nfile = "p.json"\nkeep = 2'))
    assert tuple(from_file.records) == ("silo-000", "silo-005")
    with refused(r"partition\.keep = 11, there are 10 clients; lower it"):
        populate(experiment(partition=f"{dealt}keep = 11"))


def test_a_method_takes_the_inputs_of_the_file(experiment):
    """As many numbers, in other shapes."""
    note = "{ shape = [3], tokens = 20 }"
    other = f"{{ image = {{ shape = [1, 8, 8] }}, labs = {{ shape = [5] }}, note = {note} }}"
    with refused("its model has inputs .*all methods take the same records"):
        experiment(
            data='kind = "package"\nname = "wards"\noptions = { count = 60 }',
            partition=SHARDS,
            model=f"classes = 4\n{WARDED}",
            methods=f'[method]\nname = "fedavg"\nmodel = {{ inputs = {other} }}',
        )
