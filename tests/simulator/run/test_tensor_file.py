import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from support.refusals import refused

from staddle.simulator.run.tensor_file import TensorEntry, pack, unpack

DTYPES = (torch.float32, torch.float64, torch.int64, torch.bool, torch.float16, torch.uint8)
SHAPES = ((), (0,), (3,), (2, 0), (2, 3), (1, 2, 1))
ODD = st.text(max_size=3) | st.sampled_from(["__metadata__", "a/b", "0", "@weight", "é\0\n"])


@st.composite
def tensors(draw):
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(SHAPES))
    size = torch.Size(shape).numel()
    values = draw(st.binary(min_size=size * 8, max_size=size * 8))
    if not size:
        return torch.empty(shape, dtype=dtype)
    raw = torch.frombuffer(bytearray(values), dtype=torch.uint8)
    return ((raw > 127) if dtype == torch.bool else raw.view(dtype))[:size].reshape(shape)


ENTRIES = st.dictionaries(
    st.tuples(ODD, ODD),
    st.builds(
        TensorEntry,
        st.dictionaries(ODD, st.dictionaries(ODD, tensors(), max_size=2), max_size=2),
        ODD,
    ),
    max_size=2,
)


def bits(entries):
    """Everything of them, in its order; NaN has many bits."""
    return [
        (
            key,
            one.note,
            [(room, [told(*item) for item in held.items()]) for room, held in one.rooms.items()],
        )
        for key, one in entries.items()
    ]


def told(name, tensor):
    return name, tensor.dtype, tuple(tensor.shape), tensor.numpy().tobytes()


@settings(max_examples=40)
@given(ENTRIES)
def test_what_is_packed_comes_back_bit_for_bit(entries):
    assert bits(unpack(pack(entries), "x")) == bits(entries)


def test_tensors_that_share_memory_or_lie_otherwise_come_back():
    whole = torch.arange(12.0).reshape(3, 4)
    held = {
        "whole": whole, "row": whole[1], "turned": whole.T, "wide": whole[:1].expand(5, 4),
        "one": whole[0, 0],
    }  # fmt: skip
    entry = unpack(pack({("a",): TensorEntry({"r": held}), ("b",): TensorEntry({"r": held})}), "x")[
        "b",
    ]
    assert all(torch.equal(entry.rooms["r"][name], tensor) for name, tensor in held.items())
    entry.rooms["r"]["whole"].zero_()
    assert entry.rooms["r"]["row"].tolist() == [4, 5, 6, 7]
    assert entry.nbytes == 4 * (12 + 4 + 12 + 20 + 1)
    # where torch itself puts them
    assert all(tensor.data_ptr() % 64 == 0 for tensor in entry.rooms["r"].values())


@pytest.mark.parametrize(
    "data",
    [b"", b"\1" * 99, pack({})[:-1], save({"0": torch.ones(1)})],
    ids=["empty", "other", "cut", "no table"],
)
def test_what_is_no_pack_is_refused(data):
    with refused(r"here: not a file of a snapshot: .*; remove the run's folder"):
        unpack(data, "here")
