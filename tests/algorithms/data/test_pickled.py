"""Pickles of peers' data are read without being run, whatever they ask for."""

import os
import pickle
import random

import numpy as np
import pytest
from support.refusals import refused

from staddle.algorithms.data import pickled
from staddle.algorithms.data.arrays import read_object
from staddle.algorithms.data.pickled import read_pickled
from staddle.errors import LocalError
from staddle.files import file_bounds

PLAIN = {
    "numbers": [0, 255, -1, 2**31, 2**70, -(2**40), 1.5, True, False, None],
    "texts": ["", "ö", "x" * 300, b"raw", (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
    "lists": [list(range(2000)), {}, [], [{"a": [1]}]],
}
ARRAYS = {
    "c": np.arange(6, dtype=np.int32).reshape(2, 3),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "big-endian": np.arange(3, dtype=">i2"),
    "strided": np.arange(10, dtype=np.float32)[::3],
    "bools": np.array([True, False]),
    "bytes": np.arange(3, dtype=np.uint8),
    "empty": np.zeros((0, 4), np.float16),
    "none": np.array(5),
}
# This very array is in the pickle twice.
ARRAYS["again"] = ARRAYS["c"]


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_plain_data_is_what_pickle_makes_of_it(protocol):
    assert read_pickled(pickle.dumps(PLAIN, protocol), "x") == PLAIN
    found = read_pickled(pickle.dumps({**ARRAYS, "scalar": np.int64(7)}, protocol), "x")
    assert found.pop("scalar") == 7
    assert found["again"] is found["c"]
    for name, array in ARRAYS.items():
        own = found[name].numbers
        assert (own.dtype, own.shape) == (array.dtype, array.shape)
        assert np.array_equal(own, array)


def test_an_object_of_a_npz_file(tmp_path):
    np.savez_compressed(tmp_path / "0.npz", data={"x": ARRAYS["c"]})
    found = read_pickled(read_object(tmp_path / "0.npz", "data"), "x")
    assert np.array_equal(found.objects[0]["x"].numbers, ARRAYS["c"])
    np.savez(tmp_path / "plain.npz", data=np.zeros(3))
    with refused(r"plain\.npz: data is float64 \[3\], and one pickled object is needed"):
        read_object(tmp_path / "plain.npz", "data")
    np.savez(tmp_path / "several.npz", data=np.array([{}, None]))
    with refused(r"several\.npz: data is object \[2\]"):
        read_object(tmp_path / "several.npz", "data")
    with refused(r"plain\.npz: has no array 'x', only \['data'\]; save x"):
        read_object(tmp_path / "plain.npz", "x")


class Command:
    def __reduce__(self):
        return os.system, ("touch run",)


class Own:
    """An instance of a program's class."""


def stored(code, data, shape=(2,), state=None):
    """An array's pickle with a state that numpy would not write."""
    reconstruct = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R"
    plain = pickle.dumps(code)[2:-1]
    dtype = b"cnumpy\ndtype\n" + plain + b"\x89\x88\x87R"
    if state is not None:
        dtype += pickle.dumps(state)[2:-1] + b"b"
    rest = b"".join(pickle.dumps(each, 3)[2:-1] for each in (False, data))
    # What pickle.dumps remembers by number does not matter, as nothing is fetched.
    whole = b"(K\x01" + pickle.dumps(shape, 3)[2:-1] + dtype + rest + b"tb"
    return b"\x80\x03" + reconstruct + whole + b"."


POINTERS = stored("O8", b"\x00" * 16, state=(3, "|", None, None, None, -1, -1, 0))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (pickle.dumps(Command()), "it asks for 'posix system'; none of it was run"),
        (pickle.dumps([np.array([Command()])]), "it asks for 'posix system'"),
        (pickle.dumps(Own()), "it asks for '.* Own'"),
        (b"cbuiltins\neval\n(S'1'\ntR.", "it asks for 'builtins eval'"),
        (b"cnumpy\nload\n.", "it asks for 'numpy load'"),
        (b"cnumpy.core.multiarray\nscalar\nX\x00\x00\x00\x00\x85R.", "arrays; none"),
        # Python's own machine would take 32 GiB to remember by this number.
        (b"\x80\x04Nr\xff\xff\xff\xff0.", "it has the instruction POP"),
        (b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.", "arrays; none"),
        (b"\x80\x04]]\x85a", "arrays; none"),
        (b"", "arrays; none"),
        (b".", "arrays; none"),
        (b"text", "arrays; none"),
        (b"\x80\x04}()K\x01u.", "a dictionary has keys of another type"),
        (b"\x80\x04\x93.", "arrays; none"),
        (b"\x80\x04Nh\x07.", "arrays; none"),
        (b"\x80\x04K\x01K\x02R.", "arrays; none"),
        # Bytes where numpy expects pointers, which it would follow.
        (POINTERS, "an array is not of plain numbers"),
        (stored("i8", b"\x00" * 15), "an array of 15 bytes has another shape"),
        (stored("i8", b"", (0, 2**62, 2**62)), "arrays; none"),
        (stored("i8", b"", (-1, 0)), "an array has an impossible shape"),
        (stored("i8", b"\x00" * 16, (2.0,)), "an array has an impossible shape"),
        (stored("U2", b"\x00" * 16), "an array is not of plain numbers"),
        (stored("i8,i8", b"\x00" * 32), "an array is not of plain numbers"),
        (stored("i8", b"\x00" * 16, state=(3, "<", ("i4", 2), None, None, -1, -1, 0)),
            "an array is not of plain numbers"),
        (stored("i8", b"\x00" * 16, state=(3, "x", None, None, None, -1, -1, 0)),
            "an array is not of plain numbers"),
    ],
)  # fmt: skip
def test_hostile_pickles_are_refused(content, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refused(rf"^p\.pkl: not a pickle of plain numbers, lists and (arrays: )?{text}"):
        read_pickled(content, "p.pkl")
    assert not (tmp_path / "run").exists()


def test_what_is_nested_deeply_ends_no_process():
    deep = b"\x80\x04)" + b"\x85" * 300_000
    # A key of such a tuple, and a name, would have the interpreter run out of its stack.
    for end in (b"K\x01s.", b"\x8c\x01x\x93.", b"."):
        content = deep.replace(b"\x80\x04", b"\x80\x04}", 1) + end
        if end == b".":
            assert type(read_pickled(content, "x")) is tuple
            continue
        with refused("not a pickle of plain numbers"):
            read_pickled(content, "x")


def test_numbers_with_one_hash_take_no_longer_than_others():
    """They would be compared with each other, each with each."""
    alike = {number * (2**61 - 1): None for number in range(3)}
    assert len(set(map(hash, alike))) == 1
    assert read_pickled(pickle.dumps(alike), "x") == dict.fromkeys(map(str, alike))


def test_what_a_few_bytes_make_is_asked_for(monkeypatch):
    monkeypatch.setattr(pickled, "ASKED_EVERY", 100)
    asked = []
    available = iter([10**6, 10**4])
    monkeypatch.setattr(file_bounds, "available_memory", lambda: asked.append(1) or next(available))
    with refused("x: what it makes would take 20,000 bytes of memory, 10,000 are available"):
        read_pickled(b"\x80\x04(" + b"}" * 1000 + b"t.", "x")
    assert len(asked) == 2


def test_a_bound_of_instructions(monkeypatch):
    monkeypatch.setattr(pickled, "MOST_STEPS", 10)
    with refused("more than 10 instructions; none of it was run"):
        read_pickled(pickle.dumps(list(range(20))), "x")


@pytest.mark.filterwarnings("ignore:invalid escape sequence")
def test_a_damaged_pickle_is_read_or_refused():
    rng = random.Random(3)
    whole = pickle.dumps({**PLAIN, **ARRAYS})
    read = 0
    for _ in range(400):
        content = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            content[rng.randrange(len(content))] = rng.randrange(256)
        try:
            read_pickled(bytes(content), "x")
        except LocalError:
            continue
        read += 1
    assert 0 < read < 400
