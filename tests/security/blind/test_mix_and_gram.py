"""Blind silos' rows and inner products: the pure core's bits, and their error to plain ones."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.blind_mixes import Mixing

from staddle.algorithms.exchange import parts as p
from staddle.algorithms.exchange.plain import PLAIN
from staddle.errors import LocalError
from staddle.security.arithmetic.masks import Keystream
from staddle.security.blind.mix_and_gram import (
    FLOAT32,
    MixRows,
    compared,
    gram_deviation,
    row_deviation,
)
from staddle.security.blind.mix_context import mix_group
from staddle.security.blind.rotated_sketch import sketched
from staddle.security.blind.rotation import Use, rotate
from staddle.security.blind.sum import Bounds, Quantised
from staddle.security.secagg import shared_gram
from staddle.security.secagg.shared_gram import compared_of
from staddle.security.secagg.spec import Terms

FIVE = ("a", "b", "c", "d", "e")
EVEN = dict.fromkeys(FIVE, 1.0)
# beside "a" or "d" they count as 2.75 equal ones, and none as half
UNEVEN = {**EVEN, "b": 3.0, "c": 2.5, "e": 0.2}
KEY = b"of the silos".ljust(32)
DIGEST = "ab" * 32


def mix_part(dtype="float32", shapes=((4, 3), (5,)), name="extractor"):
    specs = tuple(p.TensorSpec(f"t{i}", dtype, s) for i, s in enumerate(shapes))
    return p.Part(name, p.Kind.BACKBONE, p.Mix(), specs)


def gram_part(groups=3, width=40, kind=p.Kind.CLASSIFIER_ROWS, dtype="float32"):
    return p.Part("rows", kind, p.Gram(), (p.TensorSpec("rows", dtype, (groups, width)),))


def values(part, silos=FIVE, seed=0, scale=1.0):
    rng = torch.Generator().manual_seed(seed)
    drawn = {}
    for silo in silos:
        for spec in part.tensors:
            value = torch.randn(spec.shape, generator=rng, dtype=torch.float64) * scale
            drawn[silo, spec.name] = value.to(getattr(torch, spec.dtype))
    return lambda silo, name: drawn[silo, name]


def rows_of(part, read, members=FIVE, clip=3, terms=Terms()):  # noqa: B008 - it is frozen
    made = MixRows(clip, terms)
    made.gave(part, members, read)
    return made


@pytest.mark.parametrize("own", [0.0, 2.5])
def test_a_row_has_the_bits_of_one_that_was_hidden_sent_and_opened(own):
    part = mix_part("float64", ((20,),))
    made = Mixing(5)
    read = values(part, made.silos)
    for silo in made.silos:
        made.contribute(silo, read(silo, "t0").numpy())
    recipient, *others = made.silos
    weights = {recipient: own, **{silo: 1.0 + 0.1 * n for n, silo in enumerate(others)}}
    found = rows_of(part, read, made.silos).row(part, recipient, weights, read)["t0"].numpy()
    integers = p.integer_weights(list(weights.values()))
    row, _ = made.row(recipient, dict(zip(weights, integers, strict=True)))
    assert (row.own_weight > 0) == (own > 0)
    assert np.array_equal(found, made.open(row))


@settings(max_examples=60)
@given(
    st.lists(st.floats(0.5, 1.0), min_size=5, max_size=5),
    st.integers(-3, 30),
    st.integers(0, 2**31),
    st.sampled_from(["float32", "float64"]),
)
def test_a_row_is_within_its_bound_of_the_plain_one(raw, clip, seed, dtype):
    part = mix_part(dtype)
    read, weights = values(part, seed=seed, scale=2.0**clip / 16), dict(zip(FIVE, raw, strict=True))
    blind = rows_of(part, read, clip=clip).row(part, "a", weights, read)
    plain = PLAIN.mix(part, "a", weights, read)
    own = mix_group("extractor", 17, clip)
    for spec in part.tensors:
        assert blind[spec.name].dtype == plain[spec.name].dtype
        assert blind[spec.name].shape == plain[spec.name].shape
        off = float((blind[spec.name].double() - plain[spec.name].double()).abs().max())
        rounding = float(plain[spec.name].abs().max()) * (FLOAT32 if dtype == "float32" else 0)
        folding = len(FIVE) * 2.0 ** (clip - 52)  # of the plain one, in float64
        assert off <= row_deviation(own) + rounding + folding
        # the bound is no more than it need be
        assert dtype == "float32" or off > row_deviation(own) / 1000


def test_the_largest_values_do_not_wrap():
    part = mix_part("float64", ((3,),))
    ends = torch.tensor([8.0, -8.0, 8.0], dtype=torch.float64)
    read = lambda *_: ends
    assert torch.equal(rows_of(part, read).row(part, "a", EVEN, read)["t0"], ends)


def test_values_beyond_the_clip_are_refused_when_they_are_given():
    part = mix_part()
    why = r"group 'extractor': its largest magnitude is .* above its clip 8"
    with pytest.raises(LocalError, match=why):
        rows_of(part, values(part, scale=100.0))


REFUSED = {
    "one has more than half of what the others have": ({**EVEN, "b": 3.5}, FIVE, Terms()),
    "they count as too few": (UNEVEN, FIVE, Terms(min_cohort=4)),
    "fewer than min_cohort gave": (EVEN, ("a", "b", "c"), Terms()),
    "too few are honest": (EVEN, FIVE, Terms(colluders=4)),
    "there is nobody else": ({"a": 1.0}, FIVE, Terms()),
    "the others weigh nothing": ({"a": 1.0, "b": 1e-12}, FIVE, Terms()),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_row_that_shows_too_much_is_none(why):
    weights, members, terms = REFUSED[why]
    part = mix_part()
    read = values(part)
    made = rows_of(part, read, members, terms=terms)
    among = {silo: w for silo, w in weights.items() if silo in members}
    assert made.row(part, "a", among, read) is None
    good = rows_of(part, read)
    assert good.row(part, "a", EVEN, read) is not None


def test_a_row_comes_again_and_no_other_over_the_same_versions():
    part = mix_part()
    one, other = values(part), values(part, seed=1)
    made = rows_of(part, one)
    first = made.row(part, "a", EVEN, one)
    again = made.row(part, "a", EVEN, one)
    assert all(torch.equal(again[name], value) for name, value in first.items())
    assert made.row(part, "a", {**EVEN, "b": 1.5}, one) is None
    # Who had none may have one, and so may the first of another part.
    assert made.row(part, "b", {**EVEN, "b": 1.5}, one) is not None
    second = mix_part(name="second")
    made.gave(second, FIVE, one)
    assert made.row(second, "a", {**EVEN, "b": 1.5}, one) is not None
    # New versions of three others do, of two and of its own not.
    made.gave(part, ("a", "b", "c"), other)
    assert made.row(part, "a", EVEN, other) is None
    made.gave(part, ("d",), other)
    assert made.row(part, "a", EVEN, other) is not None


def test_a_gram_is_within_its_bound_and_has_the_bits_of_its_key():
    part = gram_part()
    read = values(part)
    plain = PLAIN.collect(part, FIVE, read)["gram"]
    lengths = plain.diagonal(dim1=1, dim2=2).sqrt()
    bound = gram_deviation(40) * lengths[:, :, None] * lengths[:, None, :]
    uses = ((KEY, DIGEST, 3), (KEY, DIGEST, 4), (bytes(32), DIGEST, 3))
    found = [compared(part, FIVE, read, *use) for use in uses]
    for gram in found:
        assert (gram.dtype, gram.shape) == (torch.float64, (3, 5, 5))
        assert bool(((gram - plain).abs() <= bound).all())
        # the bound is no more than it need be
        assert float(((gram - plain).abs() / bound).max()) > 0.01
    assert torch.equal(compared(part, FIVE, read, KEY, DIGEST, 3), found[0])
    assert not torch.equal(found[0], found[1])  # every round has its own rotation
    assert not torch.equal(found[0], found[2])  # every key has


def test_a_gram_is_that_of_vectors_which_each_silo_rotates_by_itself():
    part = gram_part(2, 7)
    read, sent = values(part), {}
    for silo in FIVE:
        keys = [Use(0, DIGEST, 3, 0, "rows", row).key(KEY) for row in range(2)]
        own = read(silo, "rows").double().numpy()
        turned = [rotate(own[row : row + 1], key)[0].astype("f4") for row, key in enumerate(keys)]
        sent[silo] = torch.from_numpy(np.stack(turned))
    expected = PLAIN.collect(part, FIVE, lambda silo, _: sent[silo])["gram"]
    assert torch.equal(compared(part, FIVE, read, KEY, DIGEST, 3), expected)


def test_a_gram_of_sketches():
    """It is the Gram matrix of what each silo sketches under the round's secret map."""
    part = p.Part(
        "rows", p.Kind.SKETCH, p.Gram(8, seed=1), (p.TensorSpec("rows", "float64", (2, 300)),)
    )
    read, sent = values(part), {}
    for silo in FIVE:
        keys = [Use(0, DIGEST, 3, 0, "rows", row).key(KEY) for row in range(2)]
        own = read(silo, "rows").numpy()
        given = Quantised(Bounds()).contribute(part, p.Contribution({"rows": read(silo, "rows")}))
        assert (given["rows"].numpy() == own).all()
        made = [sketched(own[r : r + 1], 8, key)[0].astype("f4") for r, key in enumerate(keys)]
        sent[silo] = torch.from_numpy(np.stack(made))
    expected = PLAIN.collect(part, FIVE, lambda silo, _: sent[silo])["gram"]
    assert torch.equal(compared(part, FIVE, read, KEY, DIGEST, 3), expected)
    other = [compared(part, FIVE, read, *use) for use in ((KEY, DIGEST, 4), (bytes(32), DIGEST, 3))]
    # every round and key has its own map
    assert not any(torch.allclose(expected, gram, atol=0.1) for gram in other)


def test_the_cosines_of_sketches_are_off_as_the_docs_say():
    """Of 25 random vectors: the root mean square is √((1 + c²) / k), and none is off six times."""
    silos, size = tuple(f"s{n}" for n in range(25)), 256
    part = p.Part(
        "rows", p.Kind.SKETCH, p.Gram(size), (p.TensorSpec("rows", "float64", (1, 20_000)),)
    )
    read = values(part, silos)
    common = torch.randn(1, 20_000, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    # cosines of about a half
    unit = {silo: v / v.norm() for silo in silos for v in [read(silo, "rows") + common]}
    rows = torch.cat(list(unit.values()))
    exact = rows @ rows.T
    found = compared(part, silos, lambda silo, _: unit[silo], KEY, DIGEST, 0)[0]
    away = (found - exact) / ((1 + exact.square()) / size).sqrt()
    away = away[~torch.eye(25, dtype=torch.bool)]
    assert 0.6 < away.square().mean().sqrt() < 1.4
    assert away.abs().max() < 6


def test_vectors_that_inner_products_tell_are_refused():
    part = gram_part(1, 4)
    with pytest.raises(LocalError, match="part 'rows': vector 0 has entries of one sign only"):
        compared(part, FIVE, lambda *_: torch.ones(1, 4), KEY, DIGEST, 0)
    counts = gram_part(1, 4, p.Kind.COUNTS)
    with pytest.raises(LocalError, match="is of kind counts: its inner products disclose it"):
        compared(counts, FIVE, values(counts), KEY, DIGEST, 0)


def test_the_metrics_of_a_round_turn_the_rotation_to_the_next():
    rows = gram_part()
    counts = p.Part("m", p.Kind.METRIC, p.Sum("total"), (p.TensorSpec("n", "int64", ()),))
    read = values(rows)
    exchanges = Quantised(Bounds(), group_key=KEY, job=DIGEST)
    for round_ in range(3):
        found = exchanges.collect(rows, FIVE, read)["gram"]
        assert torch.equal(found, compared(rows, FIVE, read, KEY, DIGEST, round_))
        for name in ("confusion", "metrics"):
            part = replace(counts, name=name)
            assert exchanges.collect(part, FIVE, lambda *_: torch.tensor(2))["n"] == 10


def test_quantised_mixes_what_it_collected():
    part = mix_part()
    read, exchanges = values(part), Quantised(Bounds(clip_exponent=4), terms=Terms(min_cohort=4))
    assert exchanges.collect(part, FIVE, read) == {}
    found = exchanges.mix(part, "c", EVEN, read)
    slow = rows_of(part, read, clip=4).row(part, "c", EVEN, read)
    assert all(torch.equal(found[name], value) for name, value in slow.items())
    assert exchanges.mix(part, "d", UNEVEN, read) is None  # by terms of four
    assert rows_of(part, read).row(part, "d", UNEVEN, read) is not None
    each = p.Part("e", p.Kind.MEMBERSHIP, p.Each(), part.tensors)
    assert exchanges.collect(each, FIVE, read)["t1"].shape == (5, 5)


def directed_part():
    return replace(mix_part(), exchange=p.Mix(directed=True))


@pytest.mark.parametrize(
    "weights", [{"a": 3.0, "b": 2.0, "c": 2.5}, {"a": 0.1, "b": 0.12, "c": 0.1, "d": 0.09}]
)
def test_a_directed_row_is_near_the_one_in_the_clear(weights):
    part, terms = directed_part(), Terms(min_cohort=3)
    read = values(part)
    made = Quantised(Bounds(3, "public"), terms=terms)
    assert made.collect(part, FIVE, read) == {}
    row = made.mix(part, "e", weights, read)
    plain = PLAIN.mix(part, "e", weights, read)
    for name, value in row.items():
        assert value.dtype == plain[name].dtype
        # clip 2^3 in 32 bits
        assert torch.allclose(value, plain[name], rtol=0, atol=len(weights) * 2.0**-27 + 1e-7)


def test_a_directed_row_that_shows_too_much_is_none_and_rounds_are_for_themselves():
    part, terms = directed_part(), Terms(min_cohort=3)
    made, read = Quantised(Bounds(3, "public"), terms=terms), values(part)
    for weights in ({"a": 1.0}, {"a": 1.0, "b": 1.0}, {"a": 9.0, "b": 1.0, "c": 1.0}, {}):
        assert made.mix(part, "e", weights, read) is None
    row = made.mix(part, "e", dict.fromkeys("abcd", 1.0), read)
    # no memory: who may have it is asked round by round
    again = made.mix(part, "e", dict.fromkeys("abcd", 1.0), read)
    assert all(torch.equal(row[name], again[name]) for name in row)


# By shares.


def shared_part(groups=3, width=40, **how):
    part = gram_part(groups, width, **how)
    return replace(part, exchange=p.Gram(shared=True))


def unit(part, silos=FIVE):
    read = values(part, silos)
    return lambda silo, name: read(silo, name) / read(silo, name).norm(dim=1, keepdim=True)


def test_a_comparison_by_shares_has_the_bits_of_shares_that_were_dealt_and_opened():
    part = shared_part()
    read, own = unit(part), compared_of(part, 3)
    found = Quantised(Bounds()).collect(part, FIVE, read)["gram"]
    dealt = {}
    for number, silo in enumerate(FIVE, start=1):
        numbers = shared_gram.quantise(own, read(silo, "rows").double().numpy())
        stream = Keystream(bytes([number] * 32), 0)
        dealt[number] = shared_gram.deal(own, numbers, 5, 1, stream)
    told = {k: shared_gram.multiply({i: dealt[i][k - 1] for i in dealt}) for k in (1, 3, 4)}
    products = shared_gram.dequantise(own, shared_gram.opened(told, 1).products)
    assert np.array_equal(found.numpy(), shared_gram.squares(own, products, 5))
    assert found.dtype == torch.float64
    exact = PLAIN.collect(part, FIVE, read)["gram"]
    bound = shared_gram.deviation(own, 1.0 + FLOAT32, 1.0 + FLOAT32)
    assert float((found - exact).abs().max()) <= bound


def test_a_comparison_by_shares_follows_from_no_key_and_is_ordered_as_its_members():
    part = shared_part()
    read = unit(part)
    found = Quantised(Bounds()).collect(part, FIVE, read)["gram"]
    keyed = Quantised(Bounds(), group_key=KEY, job=DIGEST).collect(part, FIVE, read)
    assert torch.equal(found, keyed["gram"])
    back = Quantised(Bounds()).collect(part, FIVE[::-1], read)["gram"]
    assert torch.equal(back, found.flip(1, 2))


def test_what_a_comparison_discloses_is_not_compared_by_shares_either():
    part = shared_part()
    with pytest.raises(LocalError, match="has entries of one sign only"):
        Quantised(Bounds()).collect(part, FIVE, lambda silo, name: unit(part)(silo, name).abs())
    counts = shared_part(kind=p.Kind.COUNTS)
    with pytest.raises(LocalError, match="its inner products disclose it"):
        Quantised(Bounds()).collect(counts, FIVE, unit(counts))
