from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.refusals import refused

from staddle.algorithms.data.dataset import Dataset, _draw, digits, load_npz, save_npz, split

X = np.zeros((4, 1, 8, 8), np.float32)
Y = np.array([0, 1, 2, 1])


def written(tmp_path, **arrays):
    path = tmp_path / "data.npz"
    np.savez(path, **arrays)
    return path


def test_what_is_saved_is_loaded(tmp_path, make_data):
    data, path = make_data(9), tmp_path / "d.npz"
    save_npz(path, data)
    back = load_npz(path)
    assert torch.equal(back.x, data.x)
    assert torch.equal(back.y, data.y)
    assert back.class_names is None
    save_npz(path, replace(data, class_names=("benign", "großzellig", "α")))
    assert load_npz(path).class_names == ("benign", "großzellig", "α")
    assert load_npz(path).take(np.array([2])).class_names == ("benign", "großzellig", "α")


@pytest.mark.parametrize(
    ("y", "dtype"),
    [
        (np.array([0.5, 1, 2, -3]), torch.float32),
        (np.array([[0.5, 1], [2, 0], [3, 1], [4, 0]], np.float32), torch.float32),
        (np.array([[0, 1], [1, 0], [1, 1], [0, 0]], np.uint8), torch.int64),
    ],
)
def test_other_targets_than_classes_are_loaded_as_they_are(tmp_path, y, dtype):
    data = load_npz(written(tmp_path, x=X, y=y))
    assert (data.y.dtype, data.y.tolist()) == (dtype, y.tolist())
    save_npz(tmp_path / "again.npz", data)
    assert torch.equal(load_npz(tmp_path / "again.npz").y, data.y)
    assert data.take(np.array([2, 0])).y.tolist() == y[[2, 0]].tolist()
    train, test = split(data, bytes(32), 0.25)
    assert (train.y.shape[1:], len(train) + len(test)) == (y.shape[1:], 4)


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.int16, np.int64])
def test_classes_of_positions_are_kept_in_a_byte_each(tmp_path, dtype):
    y = np.arange(4 * 2 * 3).reshape(4, 2, 3) % 2 * (1 if dtype is bool else 100)
    data = load_npz(written(tmp_path, x=X, y=y.astype(dtype)))
    kept = torch.uint8 if np.dtype(dtype).itemsize == 1 else torch.int64
    assert (data.y.dtype, data.y.tolist()) == (kept, y.tolist())
    save_npz(tmp_path / "again.npz", data)
    assert torch.equal(load_npz(tmp_path / "again.npz").y, data.y)
    assert load_npz(tmp_path / "again.npz").y.dtype == kept


@pytest.mark.parametrize("dtype", [np.int16, np.uint16, np.int32, np.int64])
def test_tokens_are_kept_as_they_are(tmp_path, dtype):
    tokens = np.array([[1, 2, 0], [2**14, 3, 7], [0, 0, 0], [9, 9, 9]], dtype)
    data = load_npz(written(tmp_path, x=tokens, y=Y))
    assert (data.x.dtype, data.x.tolist()) == (torch.float32, tokens.tolist())


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_a_file_may_have_an_array_per_input(tmp_path, dtype):
    rng = np.random.default_rng(1)
    note, ages = rng.integers(0, 9, (4, 3)).astype(dtype), rng.normal(size=4)
    image = rng.normal(size=(4, 1, 2, 2)).astype(np.float32)
    apart = {"x.note": note, "x.image": image, "x.age": ages}
    data = load_npz(written(tmp_path, y=Y, **apart))
    assert data.inputs == {"age": (), "image": (1, 2, 2), "note": (3,)}
    rows = [ages.astype(np.float32)[:, None], image.reshape(4, -1), note]
    assert torch.equal(data.x, torch.from_numpy(np.concatenate(rows, 1).astype(np.float32)))
    save_npz(tmp_path / "again.npz", data)
    with np.load(tmp_path / "again.npz") as kept:
        assert {*kept} == {*apart, "y"}
    again = load_npz(tmp_path / "again.npz")
    assert torch.equal(again.x, data.x)
    assert again.inputs == data.take(np.array([2, 0])).inputs == data.inputs
    with refused("has 'x', and 'x.note' in place of it; leave one of both out"):
        load_npz(written(tmp_path, y=Y, x=X, **apart))


@pytest.mark.parametrize(
    ("arrays", "complaint"),
    [
        ({"x.a": X, "x.b": X[:3], "y": Y}, r"x.b is \[3, 1, 8, 8\] and y \[4\]; give one target"),
        ({"x.a": X, "x.b": X.astype(np.uint8), "y": Y}, "x.b is uint8; store float32"),
        ({"x.a": X.astype(object), "y": Y}, "not a .npz file of plain arrays"),
        ({"x.a": X}, "has no array 'y'"),
        ({"xa": X, "y": Y}, "has no array 'x'"),
        ({"x": X}, "has no array 'y'"),
        ({"x": X.astype(np.uint8), "y": Y}, "x is uint8; store float32 .* tokens as int32"),
        ({"x": X.astype(bool), "y": Y}, "x is bool; store float32"),
        ({"x": np.full(X.shape, 2**24 + 1, np.int32), "y": Y}, "whole numbers beyond 16,777,216"),
        ({"x": np.full(X.shape, -(2**24) - 1), "y": Y}, "whole numbers beyond 16,777,216"),
        ({"x": X, "y": Y.astype(complex)}, "y is complex128; store class numbers"),
        ({"x": X, "y": Y.astype(str)}, "y is <U21; store class numbers"),
        ({"x": np.float32(1), "y": Y}, "one target per record"),
        ({"x": np.float32(1), "y": np.int64(1)}, "one target per record"),
        ({"x": X, "y": Y[:3]}, "one target per record"),
        ({"x": X, "y": Y[None]}, "one target per record"),
        ({"x": X[:1], "y": Y[:1]}, "holds 1 records"),
        ({"x": X[:0], "y": Y[:0]}, "holds 0 records"),
        ({"x": np.array([{}] * 4, dtype=object), "y": Y}, "not a .npz file of plain arrays"),
        ({"x": X, "y": Y, "class_names": np.array(["a", "b"], dtype=object)},
            "class_names is not a plain array; store"),
        ({"x": X, "y": Y, "class_names": np.array([b"a", b"b"])},
            r"class_names is \|S1 \[2\]; store numpy.array"),
        ({"x": X, "y": Y, "class_names": np.array([1, 2])}, r"class_names is int64 \[2\]; store"),
        ({"x": X, "y": Y, "class_names": np.array([["a", "b"]])},
            r"class_names is <U1 \[1, 2\]; store"),
        ({"x": X, "y": Y, "ids": np.array([*"abcd"], dtype=object)},
            "ids is not a plain array; store numpy.array"),
        ({"x": X, "y": Y, "ids": np.array([*"abc"])},
            r"ids is <U1 \[3\] for 4 records; store .* one id a record"),
        ({"x": X, "y": Y, "ids": np.array([[*"abcd"]])}, r"ids is <U1 \[1, 4\] for 4 records"),
        ({"x": X, "y": Y, "ids": np.array([1.0, 2, 3, 4])}, r"ids is float64 \[4\] for 4 records"),
        ({"x": X, "y": Y, "ids": np.array([True, False, True, True])},
            r"ids is bool \[4\] for 4 records"),
        ({"x": X, "y": Y, "sources": np.array([*"abc"])},
            r"sources is <U1 \[3\] .* one source a record"),
        ({"x": X, "y": Y, "groups": np.array([1.0, 2, 3, 4])},
            r"groups is float64 \[4\] .* one group a record"),
    ],
)  # fmt: skip
def test_load_names_what_is_wrong(tmp_path, arrays, complaint):
    path = written(tmp_path, **arrays)
    with refused(complaint) as caught:
        load_npz(path)
    assert str(caught.value).startswith(str(path))


def test_load_names_files_that_are_no_archive(tmp_path):
    with refused("cannot read it: No such file"):
        load_npz(tmp_path / "none.npz")
    for name, data in [
        ("empty", b""),
        ("text", b"hello"),
        ("torn", written(tmp_path, x=X, y=Y).read_bytes()[:300]),
    ]:
        (tmp_path / name).write_bytes(data)
        with refused(r"not a \.npz file"):
            load_npz(tmp_path / name)
    np.save(tmp_path / "one.npy", X)
    with refused("holds one array"):
        load_npz(tmp_path / "one.npy")


def test_what_float32_cannot_hold_is_loaded_as_infinity_for_the_fit_to_find(tmp_path):
    assert load_npz(written(tmp_path, x=X.astype(np.float64) + 1e300, y=Y)).x.isinf().all()


def test_a_data_set_checks_its_own_types():
    for dtype in (torch.float64, torch.int32, torch.bool):
        with refused("give float32, and int64, float32 or uint8"):
            Dataset(torch.zeros(2, 1), torch.zeros(2, dtype=dtype))
    with refused("give float32, and int64, float32 or uint8"):
        Dataset(torch.zeros(2, 1).double(), torch.zeros(2, dtype=torch.int64))
    for y in (torch.zeros(3, dtype=torch.int64), torch.tensor(1), torch.zeros(1, 2)):
        with refused("one target per record"):
            Dataset(torch.zeros(2, 1), y)


def test_digits_are_bundled():
    data = digits()
    assert data.x.shape == (1797, 1, 8, 8)
    assert (data.x.min(), data.x.max()) == (0, 1)
    assert sorted(set(data.y.tolist())) == list(range(10))


def numbered(n):
    return Dataset(torch.arange(n, dtype=torch.float32)[:, None], torch.zeros(n, dtype=torch.int64))


def sides(n, key, fraction=0.3):
    train, test = split(numbered(n), key, fraction)
    return {int(v) for v in train.x.flatten()}, {int(v) for v in test.x.flatten()}


def test_a_records_side_does_not_depend_on_the_others():
    train, test = sides(500, b"key")
    more_train, more_test = sides(2000, b"key")
    assert train | test == set(range(500))
    assert not train & test
    assert train == {i for i in more_train if i < 500}
    assert test == {i for i in more_test if i < 500}
    assert len(more_test) == pytest.approx(600, abs=100)  # 5 standard deviations
    assert sides(500, b"other")[1] != test


@pytest.mark.parametrize(
    ("fraction", "complaint"),
    [(1e-6, "no test record out of 50; raise"), (1 - 1e-6, "no training record out of 50; lower")],
)
def test_a_split_with_an_empty_side_names_the_fix(fraction, complaint):
    with refused(complaint):
        split(numbered(50), b"key", fraction)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -1.0, float("nan")])
def test_a_split_needs_a_fraction_and_a_key(fraction):
    with refused("between 0 and 1"):
        split(numbered(50), b"key", fraction)
    with refused("needs a key"):
        split(numbered(50), b"", 0.5)


def test_the_sides_of_records_without_ids_are_those_of_the_first_release():
    assert sides(40, b"key")[1] == {0, 1, 3, 5, 18, 21, 22, 23, 24, 25, 37}


# Records with ids.

PINNED_IDS = {"a", "17", "train/0", "p0", "p1", "p2", "p5", "p8", "p10"}
IDS = ("a", "b", "17", "ä", "benign/0001.png", "train/0", *(f"p{n}" for n in range(20)))


def with_ids(ids):
    return replace(numbered(len(ids)), ids=tuple(ids))


def held_out(ids, key=b"key", fraction=0.3):
    train, test = split(with_ids(ids), key, fraction)
    assert sorted(train.ids + test.ids) == sorted(ids)
    return set(test.ids)


def test_the_sides_of_records_with_ids_are_pinned():
    assert held_out(IDS) == PINNED_IDS
    assert held_out(IDS, b"other") != PINNED_IDS


@settings(max_examples=50)
@given(
    st.lists(st.text(max_size=5), min_size=2, max_size=30, unique=True),
    st.randoms(use_true_random=False),
)
def test_a_record_keeps_its_side_when_the_others_are_reordered_added_or_removed(ids, random):
    # so that no side is empty
    both = [f"train {n}" for n in range(20)] + [f"test {n}" for n in range(20)]
    before = held_out([*both, *ids], fraction=0.5)
    kept = random.sample(ids, random.randrange(len(ids)))
    changed = [*kept, *both, "another", "and another"]
    random.shuffle(changed)
    assert held_out(changed, fraction=0.5) & {*both, *kept} == before & {*both, *kept}


def test_records_of_one_id_are_never_on_both_sides():
    train, test = split(with_ids([f"patient {n % 20}" for n in range(200)]), b"key", 0.5)
    assert not set(train.ids) & set(test.ids)
    assert len(train) + len(test) == 200


def test_an_id_is_another_thing_than_an_index():
    draws = {_draw(b"key", index) for index in range(300)}
    as_text = {_draw(b"key", index.to_bytes(8, "little").decode("latin-1")) for index in range(300)}
    assert len(draws | as_text | {_draw(b"key", str(index)) for index in range(300)}) == 900


def test_ids_are_saved_loaded_and_taken(tmp_path):
    path = tmp_path / "d.npz"
    save_npz(path, with_ids(IDS))
    assert load_npz(path).ids == IDS
    assert load_npz(path).take(np.array([3, 0])).ids == ("ä", "a")
    numbers = written(tmp_path, x=X, y=Y, ids=np.array([7, 3, 17, -1]))
    # as a CSV file of the same records has them
    assert load_npz(numbers).ids == ("7", "3", "17", "-1")
    assert load_npz(written(tmp_path, x=X, y=Y)).ids is None


def test_a_data_set_has_an_id_for_each_record_or_none():
    with refused("1 ids for 2 records; give one id per record"):
        replace(numbered(2), ids=("a",))


# Sources and groups.


def test_sources_and_groups_are_saved_loaded_and_taken(tmp_path):
    path = tmp_path / "d.npz"
    save_npz(path, replace(numbered(3), sources=("b", "a", "b"), groups=("1", "1", "2")))
    taken = load_npz(path).take(np.array([2, 1]))
    assert (taken.ids, taken.sources, taken.groups) == (None, ("b", "a"), ("2", "1"))


@pytest.mark.parametrize("name", ["source", "group"])
def test_there_is_one_source_and_one_group_a_record(name):
    with refused(f"1 {name}s for 2 records; give one {name} per record"):
        replace(numbered(2), **{f"{name}s": ("a",)})


@settings(max_examples=50)
@given(groups=st.lists(st.integers(0, 40), max_size=50))
def test_a_group_is_on_one_side_wherever_its_records_are(groups):
    named = tuple(f"recording {n}" for n in [*range(20), *groups])  # so that no side is empty
    data = replace(numbered(len(named)), ids=tuple(map(str, range(len(named)))), groups=named)
    train, test = split(data, b"key", 0.5)
    assert not set(train.groups) & set(test.groups)
    assert len(train) + len(test) == len(data)
    reverse = data.take(np.arange(len(data))[::-1])
    assert set(test.ids) == set(split(reverse, b"key", 0.5)[1].ids)
