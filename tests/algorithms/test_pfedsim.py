import math
from dataclasses import replace

import pytest
import torch

from staddle.algorithms.aggregation import MemoryArchive, close_round, deliver
from staddle.algorithms.exchange import PLAIN, Gram, Mix, Sum
from staddle.algorithms.method import Facts, Latest, Row, SiloState, initial_state
from staddle.algorithms.pfedsim import CODE_SELF_WEIGHT
from staddle.errors import LocalError

FACTS = Facts("a", 0, 5, torch.tensor([2, 2, 1]))


@pytest.fixture
def make(make_job):
    return lambda rounds=4, silos=("a", "b", "c"), **options: make_job(
        "pfedsim", options, rounds=rounds, silos=list(silos)
    ).method()


def with_rows(method, rows, bias=0.0):
    """A silo state whose classifier rows start with the given numbers and are zero elsewhere."""
    state = initial_state(method, "a")
    weight = torch.zeros_like(state.parts["classifier"]["weight"])
    weight[:, : len(rows[0])] = torch.tensor(rows)
    head = {**state.parts["classifier"], "weight": weight, "bias": torch.full((3,), bias)}
    return SiloState({**state.parts, "classifier": head}, state.extra)


def gram_of(method, round_, *states):
    part = method.up(round_)[1]
    given = [PLAIN.give(part, method.give(state, replace(FACTS, round=round_))["rows"]) for state in states]
    return PLAIN.collect(part, range(len(states)), lambda i, name: given[i][name])


# Rows of two silos: class 0 at 60 degrees (cos .5), class 1 opposite (cos -1), class 2 equal (cos 1).
ONE = [[2.0, 0.0], [0.0, 3.0], [1.0, 1.0]]
OTHER = [[0.5, 0.5 * 3**0.5], [0.0, -0.1], [7.0, 7.0]]


def test_eq_3_by_hand(make):
    method = make(rho=0, similarity="per_class")
    results = {"rows": gram_of(method, 0, with_rows(method, ONE), with_rows(method, OTHER, bias=9.0))}
    combined = method.combine(method.begin(), 0, ("a", "b"), results)
    state, published = combined.state, combined.published
    by_hand = (-math.log(1 - 0.5) + 0 - math.log(1e-4)) / 3  # clamp and log class by class; 1 is cut to 1 - 1e-4
    assert published == {}
    assert state["phi"][0, 1].item() == pytest.approx(by_hand, rel=1e-3)
    assert torch.equal(state["phi"], state["phi"].T)
    assert method.weights(state, "a") == {"a": 1.0, "b": pytest.approx(by_hand, rel=1e-3)}


def test_the_mean_form_by_hand(make):
    method = make(rho=0)
    results = {"rows": gram_of(method, 0, with_rows(method, ONE), with_rows(method, OTHER, bias=9.0))}
    state = method.combine(method.begin(), 0, ("a", "b"), results).state
    mean = (0.5 - 1 + 1) / 3  # the clamp comes after the mean
    assert state["phi"][0, 1].item() == pytest.approx(mean, abs=1e-6)
    assert method.weights(state, "b")["a"] == pytest.approx(-math.log(1 - mean), abs=1e-6)


def test_a_neighbour_of_similarity_one_half_weighs_seven_percent(make):
    method = make(rho=0)
    rows, turned = [[1.0, 0.0]] * 3, [[0.5, 0.5 * 3**0.5]] * 3
    results = {"rows": gram_of(method, 0, with_rows(method, rows), with_rows(method, turned))}
    state = method.combine(method.begin(), 0, ("a", "b"), results).state
    weights = method.weights(state, "a")
    assert weights["b"] / sum(weights.values()) == pytest.approx(0.6931 / (9.2103 + 0.6931), abs=1e-5)
    assert weights["b"] / sum(weights.values()) == pytest.approx(0.0700, abs=5e-5)


@pytest.mark.parametrize("similarity", ["mean", "per_class"])
def test_equal_classifiers_stay_finite(make, similarity):
    method = make(rho=0, similarity=similarity)
    twin = with_rows(method, ONE)
    state = method.combine(method.begin(), 0, ("a", "b"), {"rows": gram_of(method, 0, twin, twin)}).state
    assert method.weights(state, "a")["b"] == pytest.approx(CODE_SELF_WEIGHT, rel=1e-9)
    assert pytest.approx(9.2103, abs=5e-5) == CODE_SELF_WEIGHT


@pytest.mark.parametrize("similarity", ["mean", "per_class"])
def test_the_vectors_are_unit_and_a_zero_row_is_similar_to_nothing(make, similarity):
    method = make(rho=0, similarity=similarity)
    rows = method.give(with_rows(method, ONE), replace(FACTS, round=0))["rows"].tensors["rows"]
    assert rows.shape == ((1, 192) if similarity == "mean" else (3, 64))
    assert torch.allclose(rows.norm(dim=1), torch.ones(len(rows)))
    dead = with_rows(method, [[0.0]] * 3)
    state = method.combine(method.begin(), 0, ("a", "b"), {"rows": gram_of(method, 0, dead, dead)}).state
    assert method.weights(state, "a").keys() == {"a"}


@pytest.mark.parametrize("similarity", ["mean", "per_class"])
@pytest.mark.parametrize("scale", [1e-6, 1e3, 1e6, 1e18])
def test_rows_of_another_length_get_no_larger_weight(make, similarity, scale):
    """The coordinator cannot see that a silo gives unit vectors; a longer one must not buy influence."""
    method = make(rho=0, similarity=similarity)
    part = method.up(0)[1]
    states = [with_rows(method, rows) for rows in (ONE, OTHER, [[1.0, 2.0], [3.0, 1.0], [0.5, 1.0]])]
    honest = [PLAIN.give(part, method.give(state, FACTS)["rows"]) for state in states]
    scaled = [honest[0], {name: value * scale for name, value in honest[1].items()}, honest[2]]

    def weights(given):
        results = {"rows": PLAIN.collect(part, range(3), lambda i, name: given[i][name])}
        state = method.combine(method.begin(), 0, ("a", "b", "c"), results).state
        return [method.weights(state, silo) for silo in "abc"]

    for found, fair in zip(weights(scaled), weights(honest), strict=True):
        assert found.keys() == fair.keys()
        assert found == pytest.approx(fair, rel=1e-4)


def test_self_weight_defaults_and_is_an_option(make):
    assert make().self_weight == pytest.approx(9.21034037)
    assert make(similarity="per_class").self_weight == 1.0
    assert make(self_weight=0.25).self_weight == 0.25
    state = {"phi": torch.full((3, 3), 0.5, dtype=torch.float64), "gave": torch.ones(3, dtype=torch.int64)}
    assert make(self_weight=0.0, rho=0).weights(state, "b").keys() == {"a", "c"}


def set_phi(method, pairs, gave):
    state = method.begin()
    for (i, j), value in pairs.items():
        state["phi"][i, j] = state["phi"][j, i] = value
    state["gave"][gave] = 1
    return state


def test_eq_4_mixes_last_given_extractors_with_integer_weights(make):
    method, archive = make(rho=0), MemoryArchive()
    (part, _) = method.up(0)
    versions = {}
    for i, silo in enumerate("abc"):
        versions[silo] = {s.name: torch.full(s.shape, float(i + 1)) for s in part.tensors}
        archive.store("extractor", silo, versions[silo])
    state = set_phi(method, {(0, 1): 0.5, (0, 2): 0.2}, [0, 1, 2])
    down = deliver(method, PLAIN, state, 1, "a", archive)["extractor"]
    w = [CODE_SELF_WEIGHT, -math.log(0.5), -math.log(0.8)]
    expected = (1 * w[0] + 2 * w[1] + 3 * w[2]) / sum(w)
    assert all(torch.allclose(t, torch.full_like(t, expected), atol=1e-6) for t in down.values())
    after = method.deliver(initial_state(method, "a"), {"extractor": down}, FACTS)
    assert torch.equal(after.parts["extractor"]["conv1.weight"], down["extractor.conv1.weight"])
    assert torch.equal(after.parts["classifier"]["weight"], initial_state(method, "a").parts["classifier"]["weight"])


def test_only_pairs_of_the_same_round_move_and_older_entries_stay(make):
    method = make(rho=0, silos=("a", "b", "c", "d"))
    turned = lambda degrees: with_rows(  # noqa: E731
        method, [[math.cos(math.radians(degrees)), math.sin(math.radians(degrees))]] * 3
    )
    at = lambda *degrees: {"rows": gram_of(method, 0, *map(turned, degrees))}  # noqa: E731
    first = method.combine(method.begin(), 0, ("a", "c"), at(0, 60)).state
    assert first["phi"][0, 2].item() == pytest.approx(0.5, abs=1e-6)
    assert first["gave"].tolist() == [1, 0, 1, 0]
    second = method.combine(first, 1, ("b", "c"), at(0, 0)).state
    assert second["phi"][0, 2] == first["phi"][0, 2]  # stale, kept
    assert second["phi"][1, 2].item() == pytest.approx(1 - 1e-4, abs=1e-9)
    assert second["phi"][0, 1] == 0  # never trained in the same round
    assert method.weights(second, "a").keys() == {"a", "c"}
    assert method.weights(second, "c").keys() == {"a", "b", "c"}
    third = method.combine(second, 2, ("a", "c"), at(0, 120)).state
    assert third["phi"][0, 2] == 0  # moved again, and a negative cosine counts as none
    assert first["phi"][1, 2] == 0  # states are values: the earlier one did not change
    alone = method.combine(third, 3, ("d",), at(0)).state
    assert torch.equal(alone["phi"], third["phi"])


def test_deliveries_by_phase(make):
    method = make(rounds=6, rho=0.5)
    nobody, a_and_b = method.begin(), set_phi(method, {(0, 1): 0.5}, [0, 1])
    for round_ in range(4):
        assert method.deliveries(nobody, round_, "a") == (Latest("model"),)
    for round_ in (4, 5, 6):  # 6 is the final delivery
        (row,) = method.deliveries(a_and_b, round_, "a")
        assert isinstance(row, Row)
        assert list(row.weights) == ["a", "b"]
        assert method.deliveries(a_and_b, round_, "c") == (Latest("model"),)  # a newcomer
    assert method.deliveries(set_phi(method, {}, [0]), 5, "a") == ()  # no neighbour: keeps its own
    cold = make(rounds=6, rho=0)
    assert cold.deliveries(cold.begin(), 3, "c") == ()
    warm = make(rounds=6, rho=1)
    assert warm.deliveries(warm.begin(), 6, "c") == (Latest("model"),)


@pytest.mark.parametrize(
    ("rho", "rounds", "warmup"), [(0.5, 10, 5), (0.5, 9, 4), (0, 5, 0), (1, 5, 5), (0.29, 100, 29), (0.99, 3, 2)]
)
def test_the_phase_switches_at_floor_rho_t(make, rho, rounds, warmup):
    method = make(rounds=rounds, rho=rho)
    kinds = [[type(part.exchange) for part in method.up(r)] for r in range(rounds)]
    assert kinds == [[Sum]] * warmup + [[Mix, Gram]] * (rounds - warmup)
    assert all("classifier" not in s.name for part in method.up(rounds - 1) for s in part.tensors) or rho == 1


def test_a_silo_absent_through_the_generalisation_phase_starts_from_its_model(make):
    method, archive = make(rounds=4, rho=0.5), MemoryArchive()
    state, silo = method.begin(), initial_state(method, "a")
    for round_ in range(3):  # two rounds of generalisation and one of personalisation, always without c
        parts = method.up(round_)
        given = {
            part.name: PLAIN.give(part, method.give(silo, replace(FACTS, round=round_))[part.name]) for part in parts
        }
        read = lambda part, _, name, given=given: given[part][name]  # noqa: E731
        state, _ = close_round(method, PLAIN, state, round_, ("a", "b"), parts, read, archive)
    assert deliver(method, PLAIN, state, 3, "a", archive).keys() == {"extractor"}
    down = deliver(method, PLAIN, state, 3, "c", archive)
    assert down.keys() == {"model"}
    assert "classifier.weight" in down["model"]


def test_running_statistics_are_in_no_part(make_job):
    method = make_job("pfedsim", model={"norm": "batch"}, rounds=4).method()
    for round_ in (0, 3):
        names = [spec.name for part in (*method.up(round_), *method.down(round_)) for spec in part.tensors]
        assert "extractor.norm1.weight" in names
        assert not any("running" in name or "tracked" in name for name in names)


def test_one_silo_a_round_is_refused_where_silos_should_meet(make_job):
    def job(rho, **fields):
        return make_job("pfedsim", {"rho": rho}, participation=0.1, **fields)

    for rho in (0, 0.5, 0.99):
        with pytest.raises(LocalError, match=r"draws 1 of 3 silos.*min_cohort.*rho = 1"):
            job(rho, min_cohort=1).document()
    assert job(1, min_cohort=1).document()  # FedAvg throughout
    assert job(0.5, min_cohort=2).document()
