"""The exchanges in the clear."""

from fractions import Fraction

import pytest
import torch
from support.meta_device import OneDevice
from support.refusals import refused

from staddle.algorithms.exchange import plain
from staddle.algorithms.exchange.count_sketch import count_sketch
from staddle.algorithms.exchange.parts import (
    DTYPES,
    WEIGHT,
    Contribution,
    Each,
    Gram,
    Kind,
    Mix,
    Part,
    Sum,
    TensorSpec,
    integer_weights,
    laid_out,
)
from staddle.algorithms.exchange.plain import PLAIN, PlainExchange

SILOS = ("a", "b", "c")
TWO = (TensorSpec("w", "float32", (2, 3)), TensorSpec("b", "float32", (2,)))


def drawn(specs, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        (s, spec.name): torch.randn(spec.shape, generator=generator)
        for s in SILOS
        for spec in specs
    }


def test_folds_run_in_float64_and_round_once():
    """(2^24 + 1)·x is no float32 product: each fold equals that in fractions, rounded to float32 at
    the end.
    """
    values = {"a": 1 + 2**-23, "b": -1.0, "c": 2**-12}
    given_ = {(s, "w"): torch.full((2,), v) for s, v in values.items()}
    weights = {"a": 2.0**24 + 1, "b": 2.0**24 + 1, "c": 3.0}
    given_ |= {(s, WEIGHT): torch.tensor(w, dtype=torch.float64) for s, w in weights.items()}
    spec = (TensorSpec("w", "float32", (2,)),)
    whole = sum(Fraction(w) for w in weights.values())
    exact = sum(Fraction(weights[s]) * Fraction(v) for s, v in values.items()) / whole
    read = lambda s, n: given_[s, n]
    mean = PLAIN.collect(Part("m", Kind.WHOLE_MODEL, Sum("mean"), spec), SILOS, read)["w"]
    assert mean.tolist() == [torch.tensor(float(exact)).item()] * 2
    integers = dict(zip(weights, integer_weights(list(weights.values())), strict=True))
    exact = sum(Fraction(integers[s], 2**32) * Fraction(v) for s, v in values.items())
    row = PLAIN.mix(Part("m", Kind.WHOLE_MODEL, Mix(), spec), "r", weights, read)["w"]
    assert row.tolist() == [torch.tensor(float(exact)).item()] * 2


def test_mix_row_equals_an_oracle_in_fractions():
    part, given_ = Part("ω", Kind.BACKBONE, Mix(), TWO), drawn(TWO)
    weights = {"a": 9.2103, "b": 0.6931, "c": 0.0}
    row = PLAIN.mix(part, "r", weights, lambda silo, name: given_[silo, name])
    integers = dict(zip(weights, integer_weights(list(weights.values())), strict=True))
    for spec in TWO:
        flat = [given_[s, spec.name].flatten().tolist() for s in SILOS]
        for k, value in enumerate(row[spec.name].flatten().tolist()):
            exact = sum(
                Fraction(integers[s], 2**32) * Fraction(flat[i][k]) for i, s in enumerate(SILOS)
            )
            assert abs(Fraction(value) - exact) <= abs(exact) * Fraction(1, 2**23)
        assert row[spec.name].dtype == torch.float32


def test_mix_never_reads_a_silo_of_zero_weight():
    part, asked = Part("ω", Kind.BACKBONE, Mix(), TWO), set()

    def read(silo, name):
        asked.add(silo)
        return torch.ones({s.name: s.shape for s in TWO}[name])

    PLAIN.mix(part, "r", {"a": 1.0, "b": 0.0}, read)
    assert asked == {"a"}


def test_mean_weighs_by_the_weight_and_returns_the_total():
    part = Part("m", Kind.WHOLE_MODEL, Sum("mean"), (TensorSpec("w", "float32", (2,)),))
    given_ = {
        ("a", "w"): torch.tensor([1.0, 0.0]),
        ("b", "w"): torch.tensor([4.0, 3.0]),
        ("a", WEIGHT): torch.tensor(1.0, dtype=torch.float64),
        ("b", WEIGHT): torch.tensor(2.0, dtype=torch.float64),
    }
    folded = PLAIN.collect(part, ("a", "b"), lambda s, n: given_[s, n])
    assert folded["w"].tolist() == [3.0, 2.0]
    assert folded[WEIGHT].item() == 3.0


def test_ratio_works_row_by_row_and_leaves_rows_without_weight_at_zero():
    part = Part("rows", Kind.HEADER_ROWS, Sum("ratio"), TWO)
    assert part.wire[-1] == TensorSpec(WEIGHT, "float64", (2,), 0.0, 2.0**53)
    given_ = drawn(TWO)
    weights = {"a": [1.0, 0.0], "b": [3.0, 0.0], "c": [0.0, 0.0]}
    read = lambda s, n: (
        torch.tensor(weights[s], dtype=torch.float64) if n == WEIGHT else given_[s, n]
    )
    folded = PLAIN.collect(part, SILOS, read)
    for name in ("w", "b"):
        expected = (given_["a", name][0].double() + 3 * given_["b", name][0].double()) / 4
        assert torch.equal(folded[name][0], expected.float())
        assert not folded[name][1].any()
    assert folded[WEIGHT].tolist() == [4.0, 0.0]


def test_total_keeps_integers_exact_beyond_float64():
    part = Part("n", Kind.METRIC, Sum("total"), (TensorSpec("n", "int64", ()),))
    folded = PLAIN.collect(part, ("a", "b"), lambda s, _: torch.tensor(2**53 if s == "a" else 1))
    assert folded["n"].item() == 2**53 + 1


def test_gram_holds_the_inner_products_group_by_group():
    part = Part("v", Kind.CLASSIFIER_ROWS, Gram(), (TensorSpec("v", "float32", (2, 5)),))
    given_ = drawn(part.tensors)
    gram = PLAIN.collect(part, SILOS, lambda s, n: given_[s, n])["gram"]
    assert gram.shape == (2, 3, 3)
    for g in range(2):
        for i, one in enumerate(SILOS):
            for j, other in enumerate(SILOS):
                rows = (given_[silo, "v"][g].tolist() for silo in (one, other))
                slow = sum(a * b for a, b in zip(*rows, strict=True))
                assert gram[g, i, j].item() == pytest.approx(slow, abs=1e-12)


def test_vectors_cross_as_sketches():
    """Vectors cross as sketches by the public map of their seed and are laid out whole."""
    part = Part("v", Kind.SKETCH, Gram(4, seed=9), (TensorSpec("v", "float64", (2, 50)),))
    assert part.given == part.tensors
    assert part.wire == (TensorSpec("v", "float32", (2, 4)),)
    rng = torch.Generator().manual_seed(0)
    given_ = {silo: torch.randn(2, 50, generator=rng, dtype=torch.float64) for silo in "ab"}
    sent = {
        silo: PLAIN.contribute(part, Contribution({"v": vectors}))["v"]
        for silo, vectors in given_.items()
    }
    for silo, vectors in given_.items():
        assert torch.equal(
            sent[silo], torch.stack([count_sketch(v, 4, 9) for v in vectors]).float()
        )
        assert torch.equal(laid_out(part, Contribution({"v": vectors}))["v"], vectors)
    gram = PLAIN.collect(part, ("a", "b"), lambda silo, _: sent[silo])["gram"]
    assert gram[1, 0, 1].item() == pytest.approx(
        float(sent["a"][1].double() @ sent["b"][1].double()), abs=1e-12
    )
    with refused(r"tensor 'v' is float32 \[2, 50\], its schema says float64 \[2, 50\]"):
        PLAIN.contribute(part, Contribution({"v": given_["a"].float()}))
    with refused("tensor 'v' holds NaN or infinity"):  # once it is float32
        PLAIN.contribute(part, Contribution({"v": given_["a"] * 1e200}))


def test_each_stacks_in_the_order_of_the_members():
    part = Part("c", Kind.MEMBERSHIP, Each(), (TensorSpec("c", "float32", (2,)),))
    folded = PLAIN.collect(part, ("b", "a"), lambda s, _: torch.full((2,), float(ord(s))))
    assert folded["c"].tolist() == [[98.0, 98.0], [97.0, 97.0]]


def test_collect_refuses_an_empty_round():
    with refused("no silo uploaded it"):
        PLAIN.collect(Part("m", Kind.BACKBONE, Mix(), TWO), (), lambda *_: torch.zeros(0))


@pytest.mark.parametrize(
    ("region", "block"), [(1, 1), (7, 3), (64, 64), (1000, 10), (1000, 100), (1000, 1000)]
)
def test_regions_blocks_and_packs_change_no_bit(monkeypatch, region, block):
    """Each tensor as if it were alone, element after element and silo after silo, whatever lies
    side by side.
    """
    shapes = {"w": ("float32", (9, 11)), "s": ("float32", ())}
    shapes |= {"d": ("float64", (2, 3)), "b": ("float32", (1, 4))}
    specs = tuple(TensorSpec(name, *of) for name, of in shapes.items())
    rng = torch.Generator().manual_seed(3)
    given = {
        silo: {s.name: torch.randn(s.shape, generator=rng, dtype=DTYPES[s.dtype]) for s in specs}
        for silo in "abc"
    }
    for n, held in enumerate(given.values()):
        held[WEIGHT] = torch.tensor(n + 0.3).double()
    read = lambda silo, name: given[silo][name]
    mean = Part("m", Kind.BACKBONE, Sum("mean"), specs)
    mixed = Part("x", Kind.BACKBONE, Mix(), specs)
    shares = {"a": 0.2, "b": 0.0, "c": 3.0}
    monkeypatch.setattr(plain, "REGION", region)
    monkeypatch.setattr(plain, "BLOCK", block)
    row = PLAIN.mix(mixed, "r", shares, read)
    monkeypatch.setattr(plain, "GPU_BLOCK", block)
    monkeypatch.setattr(plain, "GPU_LEAST", 1)
    elsewhere = PlainExchange(torch.device("cpu:0"))  # as if it were another device
    there = elsewhere.mix(mixed, "r", shares, read)
    assert all(torch.equal(row[name], there[name]) for name in shapes)
    found = PLAIN.collect(mean, tuple("abc"), read)
    folded = elsewhere.collect(mean, tuple("abc"), read)
    assert list(folded) == list(found) == [*shapes, WEIGHT]
    assert all(torch.equal(folded[name], found[name]) for name in found)
    assert list(row) == list(there) == [*shapes]
    integers = dict(zip(shares, integer_weights(list(shares.values())), strict=True))
    for spec in specs:
        total = torch.zeros(spec.shape, dtype=torch.float64)
        mixture = torch.zeros(spec.shape, dtype=torch.float64)
        for silo in "abc":
            total += given[silo][spec.name].double() * float(given[silo][WEIGHT])
            if integers[silo]:
                mixture += given[silo][spec.name].double() * (integers[silo] / 2**32)
        assert torch.equal(found[spec.name], (total / float(found[WEIGHT])).to(DTYPES[spec.dtype]))
        assert torch.equal(row[spec.name], mixture.to(DTYPES[spec.dtype]))
        assert row[spec.name].untyped_storage().nbytes() == row[spec.name].nbytes


@pytest.mark.parametrize(("elements", "device"), [(8, "cpu:0"), (9, "cpu")])
def test_the_mean_of_a_small_part_is_folded_on_the_cpu(monkeypatch, elements, device):
    """The part has 8 elements."""
    seen = []
    fold = plain._weighted
    monkeypatch.setattr(plain, "_weighted", lambda *args: seen.append(args[-1]) or fold(*args))
    monkeypatch.setattr(plain, "GPU_LEAST", elements)
    part = Part("m", Kind.BACKBONE, Sum("mean"), TWO)
    given = drawn((*TWO, TensorSpec(WEIGHT, "float64", ())))
    read = lambda silo, name: given[silo, name].abs().to(given[silo, name].dtype)
    PlainExchange(torch.device("cpu:0")).collect(part, SILOS, read)
    assert seen == [torch.device(device)]


@pytest.mark.parametrize("block", [4, 40, 1 << 16])
def test_rows_side_by_side_have_the_bits_of_each(monkeypatch, block):
    """Some rows lack silos; one row's order is another; one silo was never read."""
    shapes = {"a": ("float32", (7,)), "b": ("float64", (2, 3)), "c": ("float32", ())}
    specs = tuple(TensorSpec(name, *of) for name, of in shapes.items())
    part = Part("x", Kind.BACKBONE, Mix(), specs)
    rng = torch.Generator().manual_seed(4)
    held = {
        (silo, s.name): torch.randn(s.shape, generator=rng, dtype=DTYPES[s.dtype])
        for silo in "abcd"
        for s in specs
    }
    read = lambda silo, name: held[silo, name]
    rows = {
        "a": {"a": 1.0, "b": 0.3, "c": 0.7, "nobody": 0.0},
        "b": {"b": 2.0, "d": 1.0},
        "c": {"a": 0.1, "b": 0.0, "c": 5.0, "d": 1e-3},
    }
    for name in ("BLOCK", "GPU_BLOCK"):
        monkeypatch.setattr(plain, name, block)
    contradicting = {**rows, "d": {"d": 0.1, "c": 0.2, "a": 0.3}}
    for asked in (rows, contradicting, {"a": rows["a"]}):
        for device in ("cpu", "cpu:0"):
            exchange = PlainExchange(torch.device(device))
            found = exchange.mix_rows(part, asked, read)
            assert list(found) == list(asked)
            for recipient, weights in asked.items():
                one = PLAIN.mix(part, recipient, weights, read)
                assert list(found[recipient]) == [*shapes]
                assert all(torch.equal(found[recipient][name], one[name]) for name in shapes)
                own = found[recipient]["a"]
                assert own.untyped_storage().nbytes() == own.nbytes


def test_a_row_is_folded_on_its_device_whatever_lies_there():
    part, given_ = Part("ω", Kind.BACKBONE, Mix(), TWO), drawn(TWO)
    meta = torch.device("meta")
    there = {key: tensor.to(meta) if key[0] == "b" else tensor for key, tensor in given_.items()}
    with OneDevice(), pytest.raises(NotImplementedError, match="Cannot copy out of meta"):
        PlainExchange(meta).mix(
            part, "r", {"a": 1.0, "b": 2.0}, lambda silo, name: there[silo, name]
        )


def test_a_large_tensor_folds_to_the_same_bits_as_its_pieces(monkeypatch):
    """Regions are folded by several threads; who takes which does not show."""
    values = {
        silo: torch.randn(4000, generator=torch.Generator().manual_seed(seed))
        for seed, silo in enumerate("abc")
    }
    weights = {"a": 3.0, "b": 1.0, "c": 1e-3}

    def folded():
        part = Part("model", Kind.WHOLE_MODEL, Sum("mean"), (TensorSpec("w", "float32", (4000,)),))
        given = {
            s: PLAIN.contribute(part, Contribution({"w": values[s]}, weights[s])) for s in "abc"
        }
        return PLAIN.collect(part, "abc", lambda silo, name: given[silo][name])["w"]

    whole = folded()
    monkeypatch.setattr(plain, "BLOCK", 50)
    monkeypatch.setattr(plain, "REGION", 130)  # 31 regions, the last one short
    assert torch.equal(folded(), whole)


def test_an_error_in_one_region_is_the_fold_s(monkeypatch):
    monkeypatch.setattr(plain, "BLOCK", 4)
    monkeypatch.setattr(plain, "REGION", 4)
    part = Part("model", Kind.WHOLE_MODEL, Sum("mean"), (TensorSpec("w", "float32", (10,)),))

    def read(silo, name):
        if name == "w":
            raise OSError("gone")
        return torch.tensor(1.0, dtype=torch.float64)

    with pytest.raises(OSError, match="gone"):
        PLAIN.collect(part, ("a",), read)
