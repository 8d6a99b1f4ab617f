import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from staddle.algorithms.exchange import parts as p
from staddle.errors import RefusedError
from staddle.proto import tensor_pb2 as pb
from staddle.proto import wire as w

PARTS = (
    p.Part("model", p.Kind.WHOLE_MODEL, p.Sum("mean"),
        (p.TensorSpec("w", "float32", (2, 3)), p.TensorSpec("none", "float32", (0, 5)),
            p.TensorSpec("b", "float64", (2,)))),
    p.Part("counts", p.Kind.COUNTS, p.Mix(), (p.TensorSpec("n", "int64", ()),)),
)  # fmt: skip
ITEMS = p.upload_items(PARTS)
SIZE = 24 + 0 + 16 + 8 + 8
VALUES = {
    "float32": [0.0, -0.0, 1.5, float("inf"), float("-inf"), 1e-45, 3.4028234663852886e38],
    "float64": [0.0, -0.0, 0.1, float("inf"), 5e-324, 1.7976931348623157e308],
    "int64": [0, -1, 2**63 - 1, -(2**63)],
    "int32": [0, -1, 2**31 - 1, -(2**31)],
    "int8": [0, -1, 127, -128],
    "bfloat16": [0.0, -0.0, 1.5, float("inf"), float("-inf"), 9.2e-41, 3.3895e38],
}


def oracle(dtype, value):
    """The bytes of a number, by NumPy; a bfloat16 is the upper half of a float32."""
    if dtype == "bfloat16":
        rounded = torch.tensor(value, dtype=torch.bfloat16).float().item()
        return np.array(rounded, "<f4").tobytes()[2:]
    return np.array(value, w.LITTLE_ENDIAN[dtype]).tobytes()


def manifest(headers=None, size=SIZE):
    return pb.Manifest(
        job="j", round=1, size=size, tensors=w.to_wire(ITEMS) if headers is None else headers
    )


def refused(headers=None, size=SIZE, items=ITEMS):
    with pytest.raises(RefusedError) as caught:
        w.check_manifest("silo-a", manifest(headers, size), items)
    assert (caught.value.code, caught.value.peer) == ("MANIFEST", "silo-a")
    return caught.value.why


# Bytes.


@pytest.mark.parametrize("dtype", p.WIRE_DTYPES)
@pytest.mark.parametrize("offset", [0, 1, 4, 7, 8])
@pytest.mark.parametrize("container", [bytes, bytearray, lambda b: memoryview(bytearray(b))])
def test_a_tensor_comes_back_bit_for_bit_from_any_offset(dtype, offset, container):
    values = VALUES[dtype]
    sent = torch.tensor(values * 2, dtype=p.WIRE_DTYPES[dtype]).reshape(2, -1)
    raw = bytes(w.tensor_bytes(sent))
    assert raw == b"".join(oracle(dtype, value) for value in values * 2)
    spec = p.TensorSpec("x", dtype, (2, len(values)))
    back = w.tensor_from(container(b"\xa5" * offset + raw + b"\x5a" * 3), spec, offset)
    assert (back.dtype, tuple(back.shape)) == (p.WIRE_DTYPES[dtype], spec.shape)
    assert bytes(w.tensor_bytes(back)) == raw
    assert back.is_contiguous()


@pytest.mark.parametrize("dtype", p.WIRE_DTYPES)
def test_a_scalar_keeps_its_shape(dtype):
    sent = torch.tensor(VALUES[dtype][2], dtype=p.WIRE_DTYPES[dtype])
    back = w.tensor_from(bytes(w.tensor_bytes(sent)), p.TensorSpec("x", dtype, ()))
    assert back.shape == ()
    assert back.item() == sent.item()


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0, 2)])
@pytest.mark.parametrize("dtype", p.WIRE_DTYPES)
def test_an_empty_tensor_takes_no_bytes(dtype, shape):
    assert len(w.tensor_bytes(torch.empty(shape, dtype=p.WIRE_DTYPES[dtype]))) == 0
    for buffer in (b"", bytearray(), memoryview(b"")):
        back = w.tensor_from(buffer, p.TensorSpec("x", dtype, shape))
        assert (back.dtype, tuple(back.shape)) == (p.WIRE_DTYPES[dtype], shape)


def test_a_nan_keeps_its_payload():
    raw = np.array([0x7FC0BEEF], dtype="<u4").tobytes()
    assert bytes(w.tensor_bytes(w.tensor_from(raw, p.TensorSpec("x", "float32", (1,))))) == raw


def test_bytes_are_row_major_whatever_the_strides():
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    for view in (base.T, base[:, ::2], base[1:3], base[:1].expand(3, 6), base.requires_grad_()):
        wanted = np.array(view.tolist(), dtype="<f4").tobytes()
        assert bytes(w.tensor_bytes(view)) == wanted


def test_memory_is_shared_only_where_it_is_writable_and_aligned():
    spec = p.TensorSpec("x", "float32", (2,))
    writable = bytearray(12)
    shared = w.tensor_from(writable, spec, 4)
    writable[4:8] = np.array(2.0, "<f4").tobytes()
    assert shared.tolist() == [2.0, 0.0]
    odd = w.tensor_from(writable, spec, 1)
    before = odd.clone()
    writable[:] = b"\xff" * 12
    assert torch.equal(odd, before)
    constant = bytes(8)
    copied = w.tensor_from(constant, spec)
    copied += 1  # must not write through to the bytes
    assert constant == bytes(8)


def test_too_short_a_buffer_is_no_tensor():
    with pytest.raises(ValueError, match="buffer"):
        w.tensor_from(bytes(7), p.TensorSpec("x", "float64", (1,)))


@settings(max_examples=50)
@given(data=st.data())
def test_any_tensors_back_to_back_come_back(data):
    shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
    specs = data.draw(
        st.lists(
            st.builds(p.TensorSpec, st.just("x"), st.sampled_from(sorted(p.WIRE_DTYPES)), shapes)
        )
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    raw = [rng.bytes(spec.nbytes) for spec in specs]
    buffer, offset = bytearray(b"".join(raw)), 0
    for spec, wanted in zip(specs, raw, strict=True):
        assert bytes(w.tensor_bytes(w.tensor_from(buffer, spec, offset))) == wanted
        offset += spec.nbytes


# Names and numbers.


def test_kinds_are_those_of_the_protocol():
    wire = {k.removeprefix("PART_KIND_"): v for k, v in pb.PartKind.items()}
    assert wire.pop("UNSPECIFIED") == 0
    assert wire == {kind.name: int(kind) for kind in p.Kind}


def test_dtypes_are_those_of_the_protocol():
    wire = {k.removeprefix("DTYPE_").lower(): v for k, v in pb.DType.items()}
    assert wire.pop("unspecified") == 0
    assert wire == w.DTYPE_TO_WIRE
    assert set(wire) == set(p.WIRE_DTYPES) == set(w.LITTLE_ENDIAN)
    for name, little in w.LITTLE_ENDIAN.items():
        assert little[0] == "<"
        assert np.dtype(little) == np.dtype({"bfloat16": "int16"}.get(name, name))
        assert np.dtype(little).itemsize == p.WIRE_DTYPES[name].itemsize


def test_given_items_hold_the_weight_and_delivered_items_do_not():
    named = [(item.part, item.kind, item.spec.name) for item in ITEMS]
    kind = p.Kind.WHOLE_MODEL
    model = [
        ("model", kind, "w"), ("model", kind, "none"), ("model", kind, "b"),
        ("model", kind, "@weight"),
    ]  # fmt: skip
    assert named == [*model, ("counts", p.Kind.COUNTS, "n")]
    assert [item.spec.name for item in p.delivered_items(PARTS)] == ["w", "none", "b", "n"]
    assert ITEMS[3] == p.Item("model", kind, p.TensorSpec("@weight", "float64", (), 0.0, 2.0**53))


def test_headers_say_all_of_an_item():
    first, *_, last = w.to_wire(ITEMS)
    assert first == pb.TensorHeader(
        part="model", kind=pb.PART_KIND_WHOLE_MODEL, name="w", dtype=pb.DTYPE_FLOAT32, shape=[2, 3],
        size=24,
    )  # fmt: skip
    assert last == pb.TensorHeader(
        part="counts", kind=pb.PART_KIND_COUNTS, name="n", dtype=pb.DTYPE_INT64, shape=[], size=8
    )


# Manifests.


def test_the_declared_manifest_passes():
    w.check_manifest("silo-a", manifest(), ITEMS)
    w.check_manifest("silo-a", pb.Manifest(), ())


def test_a_manifest_passes_its_own_serialisation():
    w.check_manifest("silo-a", pb.Manifest.FromString(manifest().SerializeToString()), ITEMS)


@pytest.mark.parametrize("place", range(len(ITEMS)))
@pytest.mark.parametrize(
    "change",
    [{"part": "other"}, {"kind": pb.PART_KIND_KEY}, {"kind": 99}, {"kind": 0}, {"name": "other"},
        {"name": ""}, {"dtype": pb.DTYPE_UNSPECIFIED}, {"dtype": 77}, {"shape": [1, 6]},
        {"shape": [6]}, {"shape": [2**64 - 1] * 20}, {"size": 1}, {"size": 2**64 - 1}],
    ids=str,
)  # fmt: skip
def test_each_difference_of_a_header_is_refused_and_named(place, change):
    headers = w.to_wire(ITEMS)
    for field, value in change.items():
        if field == "shape":
            del headers[place].shape[:]
            headers[place].shape.extend(value)
        else:
            setattr(headers[place], field, value)
    why = refused(headers)
    assert f"tensor {place}:" in why
    assert f"{ITEMS[place].part}/{ITEMS[place].spec.name}" in why
    assert len(why) < 1000


@pytest.mark.parametrize("place", [0, 3])
def test_another_dtype_of_the_same_size_is_refused(place):
    headers = w.to_wire(ITEMS)
    headers[place].dtype = pb.DTYPE_INT64
    assert "DTYPE_INT64" in refused(headers)


def test_a_tensor_too_many_is_refused():
    extra = pb.TensorHeader(
        part="model", kind=pb.PART_KIND_WHOLE_MODEL, name="secret", dtype=pb.DTYPE_FLOAT32
    )
    assert "model/secret" in refused([*w.to_wire(ITEMS), extra])
    assert "model/w" in refused([*w.to_wire(ITEMS), w.to_wire(ITEMS)[0]])
    assert "model/secret" in refused([extra], items=())


def test_an_empty_tensor_too_many_is_refused_although_the_bytes_add_up():
    extra = pb.TensorHeader(
        part="counts", kind=pb.PART_KIND_COUNTS, name="x", dtype=pb.DTYPE_INT64, shape=[0]
    )
    assert "counts/x" in refused([*w.to_wire(ITEMS), extra])


@pytest.mark.parametrize("kept", range(len(ITEMS)))
def test_a_missing_tensor_is_refused_and_named(kept):
    why = refused(w.to_wire(ITEMS)[:kept])
    assert f"{ITEMS[kept].part}/{ITEMS[kept].spec.name}" in why
    assert "missing" in why


def test_another_order_is_refused():
    headers = w.to_wire(ITEMS)
    headers[0], headers[2] = headers[2], headers[0]
    assert "tensor 0" in refused(headers)


@pytest.mark.parametrize("size", [0, SIZE - 1, SIZE + 1, 2**64 - 1])
def test_another_total_is_refused(size):
    assert str(size) in refused(size=size)


def test_an_empty_schema_declares_no_bytes():
    assert "1 bytes" in refused([], size=1, items=())


def test_hostile_names_are_cut_in_the_text():
    headers = w.to_wire(ITEMS)
    headers[0].part = headers[0].name = "x" * 100_000
    assert len(refused(headers)) < 1000


def test_a_header_with_an_unknown_field_is_refused():
    headers = w.to_wire(ITEMS)
    # field 31, which no schema has
    smuggled = headers[0].SerializeToString() + b"\xfa\x01\x06secret"
    headers[0] = pb.TensorHeader.FromString(smuggled)
    assert "tensor 0" in refused(headers)


def test_items_are_values():
    assert dataclasses.replace(ITEMS[0]) == ITEMS[0]
    assert len(set(ITEMS)) == len(ITEMS)
