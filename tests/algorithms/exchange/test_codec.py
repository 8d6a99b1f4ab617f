"""Coded tensors: what crosses, and what the coordinator reads in its place."""

import numpy as np
import pytest
import torch

from staddle.algorithms.exchange import codec as c
from staddle.algorithms.exchange import parts as p
from staddle.algorithms.exchange.plain import PLAIN
from staddle.algorithms.training.left_out import encoded
from staddle.coordinator.storage.spool import SpooledUpload
from staddle.errors import LocalError, RefusedError
from staddle.proto.wire import tensor_bytes

MATRIX = p.TensorSpec("layer.weight", "float32", (3, 5))
CODECS = {"bfloat16": c.Bfloat16(), "int8": c.Int8(), "top-k": c.TopK(0.25)}
BIAS = p.TensorSpec("layer.bias", "float32", (3,))


def part(codec, *specs):
    return p.Part("model", p.Kind.WHOLE_MODEL, p.Sum(), specs or (MATRIX, BIAS), codec)


def drawn(seed, specs=(MATRIX, BIAS)):
    rng = torch.Generator().manual_seed(seed)
    return {spec.name: torch.randn(spec.shape, generator=rng) for spec in specs}


BASE = drawn(77)


def crossed(made, tensors, weight=3.0):
    laid = PLAIN.contribute(made, p.Contribution(tensors, weight))
    return encoded([made], {made.name: laid}, {}, {"model": BASE})[0][made.name]


@pytest.mark.parametrize(
    "spec",
    [
        BIAS,
        p.TensorSpec("x", "float32", ()),
        p.TensorSpec("x", "float64", (2, 2)),
        p.TensorSpec("x", "int64", (2, 2)),
        p.TensorSpec("x", "float32", (2, 0)),
        p.TensorSpec("x", "float32", (2, 2), 0.0),
    ],
)
def test_what_is_no_float32_matrix_crosses_as_it_is(spec):
    assert not c.codable(spec)
    assert {codec.specs(spec) for codec in CODECS.values()} == {(spec,)}


def test_bfloat16_is_the_nearest_of_the_upper_halves():
    made, tensors = part(c.Bfloat16()), drawn(1)
    given = crossed(made, tensors)
    assert [(spec.name, spec.dtype, spec.nbytes) for spec in made.wire] == [
        ("layer.weight", "bfloat16", 30), ("layer.bias", "float32", 12), ("@weight", "float64", 8),
    ]  # fmt: skip
    assert list(given) == [spec.name for spec in made.wire]
    bits = tensors["layer.weight"].numpy().view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000  # ties to even
    read = c.Decoded(lambda _, name: given[name])
    assert (read("a", "layer.weight").numpy().view(np.uint32) == rounded).all()
    assert torch.equal(read("a", "layer.bias"), tensors["layer.bias"])


def test_a_value_that_rounds_to_infinity_does_not_leave():
    tensors = {**drawn(1), "layer.weight": torch.full((3, 5), torch.finfo(torch.float32).max)}
    with pytest.raises(LocalError, match=r"'layer\.weight' holds NaN or infinity once it is coded"):
        crossed(part(c.Bfloat16()), tensors)


def test_int8_counts_steps_of_a_row():
    """Against the obvious computation, row by row."""
    made, tensors = part(c.Int8()), drawn(2)
    tensors["layer.weight"][1] = 0.0
    given = crossed(made, tensors)
    assert [(spec.name, spec.dtype, spec.nbytes) for spec in made.wire] == [
        ("layer.weight", "int8", 15), ("layer.weight@scale", "float32", 12),
        ("layer.bias", "float32", 12), ("@weight", "float64", 8),
    ]  # fmt: skip
    assert list(given) == [spec.name for spec in made.wire]
    found = c.Decoded(lambda _, name: given[name])("a", "layer.weight")
    for row, steps, value in zip(
        tensors["layer.weight"], given["layer.weight"], found, strict=True
    ):
        scale = float(row.abs().max()) / 127
        assert torch.equal(value, steps.float() * torch.tensor(scale, dtype=torch.float32))
        assert float((value - row).abs().max()) <= scale * 0.5001
        assert int(steps.abs().max()) == (127 if scale else 0)


@pytest.mark.parametrize("size", [1e-45, 1e-40, 1e-30, 1.0, 1e37])
def test_numbers_of_any_size_are_steps(size):
    spec = p.TensorSpec("x", "float32", (2, 3))
    value = torch.tensor([[1.0, -0.5, 0.25], [0.0, -1.0, 1.0]]) * size
    coded, stands_for = c.Int8().encode(spec, value)
    for each in c.Int8().specs(spec):
        assert coded[each.name].dtype == p.WIRE_DTYPES[each.dtype]
        assert p.value_fault(each, coded[each.name]) == ""
    assert p.all_finite(stands_for)
    assert float((stands_for - value).abs().max()) <= max(size / 127, 1e-43)


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_a_large_tensor_is_decoded_region_by_region(codec, monkeypatch):
    """The fold of regions is that of whole tensors, decoded at once."""
    large = p.TensorSpec("layer.weight", "float32", (3, p.REGION // 2 + 1))
    monkeypatch.setitem(globals(), "BASE", drawn(78, [large]))
    made = part(codec, large)
    given = {silo: crossed(made, drawn(n, [large]), n + 1.0) for n, silo in enumerate("ab")}
    base = BASE if codec.compares else {}
    read = c.Decoded(lambda silo, name: given[silo][name], base)
    found = PLAIN.collect(made, ("a", "b"), read)["layer.weight"]
    whole = [read(silo, "layer.weight").double() for silo in "ab"]
    assert torch.equal(found, ((whole[0] * 1.0 + whole[1] * 2.0) / 3.0).float())


def test_top_k_adds_what_changed_most_to_what_came_down():
    """Against the obvious search; of ties the first ones cross."""
    made, value = part(c.TopK(0.2)), drawn(3)
    change = value["layer.weight"] - BASE["layer.weight"]
    change[0, 1], change[0, 2], change[2, 3] = 9.0, 7.0, -7.0
    change[1, 1] = 7.0  # a tie: three places for four
    exact = {**value, "layer.weight": BASE["layer.weight"] + change}
    given = crossed(made, exact)
    assert [(spec.name, spec.dtype, spec.nbytes) for spec in made.wire] == [
        ("layer.weight@indices", "int32", 12), ("layer.weight@values", "float32", 12),
        ("layer.bias", "float32", 12), ("@weight", "float64", 8),
    ]  # fmt: skip
    moved = (exact["layer.weight"] - BASE["layer.weight"]).reshape(-1)
    best = sorted(sorted(range(15), key=lambda i: (-abs(float(moved[i])), i))[:3])
    assert given["layer.weight@indices"].tolist() == best
    found = c.Decoded(lambda _, name: given[name], c.base_of(made, BASE))("a", "layer.weight")
    for i in range(15):
        wanted = BASE["layer.weight"].reshape(-1)[i] + (moved[i] if i in best else 0.0)
        assert found.reshape(-1)[i] == wanted


def test_without_anything_to_compare_with_nothing_is_coded():
    with pytest.raises(LocalError, match="and nothing of it did"):
        c.base_of(part(c.TopK(0.2)), None)


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("seed", range(40))
def test_whatever_a_silo_uploads_is_refused_or_stands_for_finite_numbers(codec, seed, tmp_path):
    """Random bytes, and honest uploads with some bytes of others."""
    rng, items = np.random.default_rng(seed), p.upload_items([part(codec)])
    size = sum(item.spec.nbytes for item in items)
    given = crossed(part(codec), drawn(seed))
    data = bytearray(b"".join(bytes(tensor_bytes(given[item.spec.name])) for item in items))
    for place in rng.integers(0, size, 1 + seed % 4 * size):
        data[place] = rng.integers(256)
    path = tmp_path / "upload"
    path.write_bytes(data)
    upload = SpooledUpload(path, items)
    try:
        upload.check_values("a")
    except RefusedError:
        return
    base = BASE if codec.compares else {}
    read = c.Decoded(lambda _, name: upload.read("model", name), base)
    found = read("a", "layer.weight")
    assert found.shape == (3, 5)
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("places", [[1, 1, 2], [2, 1, 3], [0, 1, 15], [-1, 1, 2]])
def test_places_twice_or_in_no_order_or_outside_are_refused(places, tmp_path):
    made = part(c.TopK(0.2))
    given = {**crossed(made, drawn(1)), "layer.weight@indices": torch.tensor(places).int()}
    path, items = tmp_path / "upload", p.upload_items([made])
    path.write_bytes(b"".join(bytes(tensor_bytes(given[item.spec.name])) for item in items))
    with pytest.raises(RefusedError, match=r"layer\.weight@indices"):
        SpooledUpload(path, items).check_values("a")


def test_a_region_of_what_is_not_coded_is_a_view_of_it():
    value = torch.arange(6.0)
    for read in (lambda *_: value, c.Decoded(lambda *_: value)):
        region = c.region_of(read, "a", "x", slice(2, 4))
        assert region.data_ptr() == value[2:].data_ptr()
        assert region.tolist() == [2.0, 3.0]


def test_a_change_at_the_largest_number_stays_finite():
    base = torch.full((2, 2), torch.finfo(torch.float32).max)
    given = {
        "w@indices": torch.tensor([3], dtype=torch.int32),
        "w@values": torch.tensor([2.0**120]),
    }
    decoded = c.Decoded(lambda _, name: given[name], {"w": base})
    assert torch.equal(decoded("a", "w"), base)
