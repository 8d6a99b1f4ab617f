import math
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from support.jobs import make_job
from support.refusals import refused
from support.rounds_by_hand import closed, collected
from support.whole_jobs import check_tensors

from staddle.algorithms.course import Facts, SiloState
from staddle.algorithms.engines import simulation
from staddle.algorithms.engines.aggregation import MemoryArchive, deliver
from staddle.algorithms.engines.engine import Records, Serial
from staddle.algorithms.engines.simulation import Simulation
from staddle.algorithms.exchange.delivery import Latest, Row
from staddle.algorithms.exchange.parts import Gram, Mix, Sum
from staddle.algorithms.exchange.plain import PLAIN, PlainExchange
from staddle.algorithms.method import initial_state
from staddle.algorithms.methods.pfedsim import CODE_SELF_WEIGHT
from staddle.algorithms.models.build import build
from staddle.algorithms.training.silo_round import local_round
from staddle.security.blind.plan import simulated

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
    facts = replace(FACTS, round=round_)
    return collected(
        method.up(round_)[1], [method.contribute(state, facts)["rows"] for state in states]
    )


def compared(method, *states):
    """The coordinator's state once these states of silos a, b, … were compared."""
    cohort = tuple("abcd"[: len(states)])
    results = {"rows": gram_of(method, 0, *states)}
    return method.combine(method.begin(), 0, cohort, results)


LARGE = (3, 32, 32)
# Rows of two silos: class 0 at 60 degrees (cos .5), class 1 opposite (cos -1), class 2 equal (cos
# 1).
ONE = [[2.0, 0.0], [0.0, 3.0], [1.0, 1.0]]
OTHER = [[0.5, 0.5 * 3**0.5], [0.0, -0.1], [7.0, 7.0]]


def test_eq_3_by_hand(make):
    method = make(rho=0, similarity="per_class")
    combined = compared(method, with_rows(method, ONE), with_rows(method, OTHER, bias=9.0))
    state = combined.state
    # clamp and log class by class; 1 is cut to 1 - 1e-4
    by_hand = (-math.log(1 - 0.5) + 0 - math.log(1e-4)) / 3
    assert combined.published == {}
    assert state["weights"][0, 1].item() == pytest.approx(by_hand, rel=1e-3)
    assert torch.equal(state["weights"], state["weights"].T)
    assert method.weights(state, "a") == {"a": 1.0, "b": pytest.approx(by_hand, rel=1e-3)}


def test_the_mean_form_by_hand(make):
    method = make(rho=0)
    state = compared(method, with_rows(method, ONE), with_rows(method, OTHER, bias=9.0)).state
    mean = (0.5 - 1 + 1) / 3  # the clamp comes after the mean
    assert state["weights"][0, 1].item() == pytest.approx(-math.log(1 - mean), abs=1e-6)
    assert method.weights(state, "b")["a"] == pytest.approx(-math.log(1 - mean), abs=1e-6)


def test_a_neighbour_of_similarity_one_half_weighs_seven_percent(make):
    method = make(rho=0)
    rows, turned = [[1.0, 0.0]] * 3, [[0.5, 0.5 * 3**0.5]] * 3
    state = compared(method, with_rows(method, rows), with_rows(method, turned)).state
    weights = method.weights(state, "a")
    share = weights["b"] / sum(weights.values())
    assert share == pytest.approx(0.6931 / (9.2103 + 0.6931), abs=1e-5)
    assert share == pytest.approx(0.0700, abs=5e-5)


@pytest.mark.parametrize("similarity", ["mean", "per_class"])
def test_equal_classifiers_stay_finite(make, similarity):
    method = make(rho=0, similarity=similarity)
    state = compared(method, with_rows(method, ONE), with_rows(method, ONE)).state
    assert method.weights(state, "a")["b"] == pytest.approx(CODE_SELF_WEIGHT, rel=1e-9)
    assert pytest.approx(9.2103, abs=5e-5) == CODE_SELF_WEIGHT


@pytest.mark.parametrize("similarity", ["mean", "per_class"])
def test_the_vectors_are_unit_and_a_zero_row_is_similar_to_nothing(make, similarity):
    method = make(rho=0, similarity=similarity)
    rows = method.contribute(with_rows(method, ONE), replace(FACTS, round=0))["rows"].tensors[
        "rows"
    ]
    assert rows.shape == ((1, 192) if similarity == "mean" else (3, 64))
    assert torch.allclose(rows.norm(dim=1), torch.ones(len(rows)))
    dead = with_rows(method, [[0.0]] * 3)
    assert method.weights(compared(method, dead, dead).state, "a").keys() == {"a"}


@pytest.mark.parametrize("similarity", ["mean", "per_class"])
@pytest.mark.parametrize("scale", [1e-6, 1e3, 1e6, 1e18])
def test_rows_of_another_length_get_no_larger_weight(make, similarity, scale):
    """The coordinator cannot see that a silo gives unit vectors.

    A longer one must not buy influence.
    """
    method = make(rho=0, similarity=similarity)
    part = method.up(0)[1]
    states = [
        with_rows(method, rows) for rows in (ONE, OTHER, [[1.0, 2.0], [3.0, 1.0], [0.5, 1.0]])
    ]
    honest = [PLAIN.contribute(part, method.contribute(state, FACTS)["rows"]) for state in states]
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
    state = {
        "weights": torch.full((3, 3), 0.5, dtype=torch.float64),
        "gave": torch.ones(3, dtype=torch.int64),
    }
    assert make(self_weight=0.0, rho=0).weights(state, "b").keys() == {"a", "c"}
    for similarity in ("mean", "per_class"):
        assert make(self_weight=0.25, rho=0, similarity=similarity).weights(state, "b")["b"] == 0.25


unit_rows = st.lists(
    st.lists(st.floats(-1, 1, width=32), min_size=3, max_size=3), min_size=3, max_size=3
)


@settings(max_examples=25)
@given(st.lists(unit_rows, min_size=2, max_size=4), st.booleans())
def test_similarities_are_symmetric_bounded_and_leave_no_trace_on_the_diagonal(
    method_by_form, silos, per_class
):
    method = method_by_form[per_class]
    state = compared(method, *(with_rows(method, rows) for rows in silos)).state
    known, copy = state["weights"], state["weights"].clone()
    assert torch.equal(known, known.T)
    assert not known.diagonal().any()
    assert 0 <= known.min() <= known.max() <= CODE_SELF_WEIGHT * (1 + 1e-9)
    for silo in "abcd"[: len(silos)]:
        weights = method.weights(state, silo)
        assert weights[silo] == method.self_weight
        assert all(0 < weight < CODE_SELF_WEIGHT * (1 + 1e-9) for weight in weights.values())
    assert torch.equal(known, copy)  # weights reads the state and changes nothing in it


@pytest.fixture(scope="module")
def method_by_form():
    return [
        make_job("pfedsim", {"rho": 0, "similarity": form}, silos=list("abcd")).method()
        for form in ("mean", "per_class")
    ]


def weight(cosine):
    """Φ of a pair in the mean form."""
    return -math.log(1 - cosine)


def once_compared(method, cosines, gave):
    """A coordinator's state in which these pairs were compared."""
    state = method.begin()
    for (i, j), cosine in cosines.items():
        state["weights"][i, j] = state["weights"][j, i] = weight(cosine)
    state["gave"][gave] = 1
    return state


def test_eq_4_mixes_last_given_extractors_with_integer_weights(make):
    method, archive = make(rho=0), MemoryArchive()
    part, _ = method.up(0)
    versions = {}
    for i, silo in enumerate("abc"):
        versions[silo] = {s.name: torch.full(s.shape, float(i + 1)) for s in part.tensors}
        archive.store(part, silo, lambda silo, name: versions[silo][name])
    state = once_compared(method, {(0, 1): 0.5, (0, 2): 0.2}, [0, 1, 2])
    down = deliver(method, PLAIN, state, 1, "a", archive)["extractor"]
    w = [CODE_SELF_WEIGHT, -math.log(0.5), -math.log(0.8)]
    expected = (1 * w[0] + 2 * w[1] + 3 * w[2]) / sum(w)
    assert all(torch.allclose(t, torch.full_like(t, expected), atol=1e-6) for t in down.values())
    after = method.deliver(initial_state(method, "a"), {"extractor": down}, FACTS)
    assert torch.equal(after.parts["extractor"]["conv1.weight"], down["extractor.conv1.weight"])
    assert torch.equal(
        after.parts["classifier"]["weight"],
        initial_state(method, "a").parts["classifier"]["weight"],
    )


def test_one_personal_round_of_a_silo_with_three_points_by_hand(make_job, make_data):
    """The mixed extractor under the silo's own classifier; one batch moves both.

    The rows given are trained rows.
    """
    job, points = make_job("pfedsim", {"rho": 0}, training={"lr": 0.05}), make_data(3, 1)
    method = job.method()
    start = initial_state(method, "b")
    head = {name: value + 0.1 for name, value in start.parts["classifier"].items()}
    start = SiloState({**start.parts, "classifier": head}, start.extra)
    body = {name: 0.9 * value for name, value in start.parts["extractor"].items()}
    mixed = {f"extractor.{name}": value for name, value in body.items()}
    outcome = local_round(method, job, start, 1, {"extractor": mixed}, points, make_data(4), "b")
    model = build(job.model, job.seed)
    model["extractor"].load_state_dict(body)
    model["classifier"].load_state_dict(head)
    logits = model["classifier"](model["extractor"](points.x))
    torch.nn.functional.cross_entropy(logits, points.y).backward()
    stepped = {
        part: {n: p.detach() - 0.05 * p.grad for n, p in module.named_parameters()}
        for part, module in model.items()
    }
    assert all(p.grad.any() for module in model.values() for p in module.parameters())
    check_tensors(outcome.state.parts, stepped, 1e-6)
    uploaded = outcome.contributions["extractor"].tensors
    assert uploaded.keys() == mixed.keys()
    check_tensors(uploaded, {f"extractor.{n}": v for n, v in stepped["extractor"].items()}, 1e-6)
    unit = torch.nn.functional.normalize(stepped["classifier"]["weight"]).flatten() / 3**0.5
    assert torch.allclose(outcome.contributions["rows"].tensors["rows"][0], unit, atol=1e-6)


def test_in_the_generalisation_phase_a_silo_gives_its_model_weighed_by_its_records(make):
    method = make(rounds=4, rho=0.5)
    state = initial_state(method, "a")
    for round_, parts in ((0, {"model"}), (1, {"model"}), (2, {"extractor", "rows"})):
        facts = replace(FACTS, round=round_)
        (stage,) = method.stages(state, facts)
        assert stage.trains == ("extractor", "classifier")  # in both phases
        assert method.contribute(state, facts).keys() == parts
    assert method.contribute(state, FACTS)["model"].weight == 5.0


def test_only_pairs_of_the_same_round_move_and_older_entries_stay(make):
    method = make(rho=0, silos=("a", "b", "c", "d"))
    turned = lambda degrees: with_rows(
        method, [[math.cos(math.radians(degrees)), math.sin(math.radians(degrees))]] * 3
    )
    at = lambda *degrees: {"rows": gram_of(method, 0, *map(turned, degrees))}
    first = method.combine(method.begin(), 0, ("a", "c"), at(0, 60)).state
    assert first["weights"][0, 2].item() == pytest.approx(weight(0.5), abs=1e-6)
    assert first["gave"].tolist() == [1, 0, 1, 0]
    second = method.combine(first, 1, ("b", "c"), at(0, 0)).state
    assert second["weights"][0, 2] == first["weights"][0, 2]  # stale, kept
    assert second["weights"][1, 2].item() == pytest.approx(weight(1 - 1e-4), abs=1e-9)
    assert second["weights"][0, 1] == 0  # never trained in the same round
    assert method.weights(second, "a").keys() == {"a", "c"}
    assert method.weights(second, "c").keys() == {"a", "b", "c"}
    third = method.combine(second, 2, ("a", "c"), at(0, 120)).state
    assert third["weights"][0, 2] == 0  # moved again, and a negative cosine counts as none
    assert first["weights"][1, 2] == 0  # states are values: the earlier one did not change
    alone = method.combine(third, 3, ("d",), at(0)).state
    assert torch.equal(alone["weights"], third["weights"])


def test_deliveries_by_phase(make):
    method = make(rounds=6, rho=0.5)
    nobody, a_and_b = method.begin(), once_compared(method, {(0, 1): 0.5}, [0, 1])
    for round_ in range(4):
        assert method.deliveries(nobody, round_, "a") == (Latest("model"),)
    for round_ in (4, 5, 6):  # 6 is the final delivery
        (row,) = method.deliveries(a_and_b, round_, "a")
        assert isinstance(row, Row)
        assert list(row.weights) == ["a", "b"]
        assert method.deliveries(a_and_b, round_, "c") == (Latest("model"),)  # a newcomer
    assert (
        method.deliveries(once_compared(method, {}, [0]), 5, "a") == ()
    )  # no neighbour: keeps its own
    cold = make(rounds=6, rho=0)
    assert cold.deliveries(cold.begin(), 3, "c") == ()
    warm = make(rounds=6, rho=1)
    assert warm.deliveries(warm.begin(), 6, "c") == (Latest("model"),)


@pytest.mark.parametrize(
    ("rho", "rounds", "warmup"),
    [(0.5, 10, 5), (0.5, 9, 4), (0, 5, 0), (1, 5, 5), (0.29, 100, 29), (0.99, 3, 2)],
)
def test_the_phase_switches_at_floor_rho_t(make, rho, rounds, warmup):
    method = make(rounds=rounds, rho=rho)
    kinds = [[type(part.exchange) for part in method.up(r)] for r in range(rounds)]
    down = [[part.name for part in method.down(r)] for r in range(rounds + 1)]
    generalised = ["model"] if warmup else []
    assert down == ([["model"]] * (warmup + 1) if warmup else [[]]) + [
        ["extractor", *generalised]
    ] * (rounds - warmup)
    assert kinds == [[Sum]] * warmup + [[Mix, Gram]] * (rounds - warmup)
    assert (
        all("classifier" not in s.name for part in method.up(rounds - 1) for s in part.tensors)
        or rho == 1
    )


def test_a_silo_absent_through_the_generalisation_phase_starts_from_its_model(make):
    method, archive = make(rounds=4, rho=0.5), MemoryArchive()
    state, silo = method.begin(), initial_state(method, "a")
    # two rounds of generalisation and one of personalisation, always without c
    for round_ in range(3):
        contribution = method.contribute(silo, replace(FACTS, round=round_))
        state = closed(method, state, round_, dict.fromkeys("ab", contribution), archive)
    assert deliver(method, PLAIN, state, 3, "a", archive).keys() == {"extractor"}
    down = deliver(method, PLAIN, state, 3, "c", archive)
    assert down.keys() == {"model"}
    assert "classifier.weight" in down["model"]


class Recorder(PlainExchange):
    """The exchanges in the clear, with a list of all that a silo contributed."""

    def __init__(self):
        super().__init__()
        self.given = []

    def contribute(self, part, contribution):
        self.given.append((part.name, super().contribute(part, contribution)))
        return self.given[-1][1]


def played(monkeypatch, job, shards):
    """What was given, what was delivered by round and silo, and the result of a simulated job."""
    recorder, delivered = Recorder(), {}

    def recorded(method, exchanges, state, round_, silos, archive):
        found = {}
        for silo in silos:
            found[silo] = deliver(method, exchanges, state, round_, silo, archive)
            delivered[round_, silo] = found[silo]
        return found

    monkeypatch.setattr(simulation, "PLAIN", recorder)
    monkeypatch.setattr(simulation, "deliver_all", recorded)
    return recorder.given, delivered, simulation.simulate(job, shards)


STATISTICS = [f"extractor.norm{i}.running_{what}" for i in (1, 2) for what in ("mean", "var")]


def test_local_statistics_are_in_no_upload_and_differ_from_silo_to_silo(
    make_job, make_shards, monkeypatch
):
    job = make_job("pfedsim", model={"norm": "batch"})
    given, delivered, result = played(monkeypatch, job, make_shards(job))
    assert {part for part, _ in given} == {"model", "extractor", "rows", "metrics"}
    crossed = [*(t for _, t in given), *(t for parts in delivered.values() for t in parts.values())]
    assert not any(
        "running" in name or "tracked" in name for tensors in crossed for name in tensors
    )
    for name in STATISTICS:
        one, *others = (
            state.parts["extractor"][name.removeprefix("extractor.")]
            for state in result.states.values()
        )
        assert not any(torch.equal(one, other) for other in others)


def test_global_statistics_are_averaged_in_the_first_phase_and_mixed_in_the_second(
    make_job, make_shards, monkeypatch
):
    job = make_job("pfedsim", model={"norm": "batch", "buffers": "global"}, rounds=4)
    shards = make_shards(job)
    given, delivered, _ = played(monkeypatch, job, shards)
    assert not any("tracked" in name for _, tensors in given for name in tensors)
    samples = torch.tensor([float(len(shards[silo][0])) for silo in job.silos])
    models = [tensors for part, tensors in given if part == "model"]
    extractors = [tensors for part, tensors in given if part == "extractor"]
    for name in STATISTICS:
        for round_ in (1, 2):  # the phase changes at round 2; its model comes down there
            means = [delivered[round_, silo]["model"][name] for silo in job.silos]
            values = torch.stack(
                [tensors[name] for tensors in models[3 * (round_ - 1) : 3 * round_]]
            )
            assert all(torch.equal(mean, means[0]) for mean in means)
            assert torch.allclose(means[0], (samples / samples.sum()) @ values, atol=1e-6)
        mixed = torch.stack([delivered[4, silo]["extractor"][name] for silo in job.silos])
        last = torch.stack([tensors[name] for tensors in extractors[-3:]])
        assert len(mixed.unique(dim=0)) == 3
        # each a mean of all, one's own included
        assert bool(((last.amin(0) < mixed) & (mixed < last.amax(0))).all())


@pytest.mark.parametrize("buffers", ["local", "global"])
def test_a_short_job_on_mobilenet_v2_mixes_extractors(make_job, make_data, monkeypatch, buffers):
    model = {"name": "mobilenet-v2", "norm": "batch", "buffers": buffers}
    job = make_job("pfedsim", rounds=2, model=model, training={"batch_size": 4, "lr": 0.01})
    shards = {
        silo: (make_data(8 + 2 * i, i, 3, LARGE), make_data(4, 100 + i, 3, LARGE))
        for i, silo in enumerate(job.silos)
    }
    given, delivered, result = played(monkeypatch, job, shards)
    assert [part for part, _ in given] == (
        ["model", "metrics"] * 3 + ["extractor", "rows", "metrics"] * 3
    )
    held = [tensors for _, tensors in given] + [state.flat for state in result.states.values()]
    assert all(bool(value.isfinite().all()) for tensors in held for value in tensors.values())
    first, *others = (delivered[1, silo]["model"] for silo in job.silos)
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)
    extractors = [tensors for part, tensors in given if part == "extractor"]
    assert any("running" in name for name in extractors[0]) == (buffers == "global")
    for own, silo in enumerate(job.silos):
        weights = job.method().weights(result.coordinator, silo)
        assert list(weights) == list(job.silos)
        shares = torch.tensor(list(weights.values()), dtype=torch.float64) / sum(weights.values())
        for name, mixed in delivered[2, silo]["extractor"].items():
            values = torch.stack([tensors[name].double() for tensors in extractors])
            oracle = torch.tensordot(shares, values, 1)
            assert torch.allclose(mixed.double(), oracle, atol=1e-6, rtol=1e-6)
            assert not torch.equal(mixed, extractors[own][name])


def test_one_silo_a_round_is_refused_where_silos_should_meet(make_job):
    def document(rho, min_cohort=1):
        job = make_job("pfedsim", {"rho": rho}, participation=0.1, min_cohort=min_cohort)
        return job.document()

    for rho in (0, 0.5, 0.99):
        with refused(r"draws 1 of 3 silos.*min_cohort.*rho = 1"):
            document(rho)
    assert document(1)  # FedAvg throughout
    assert document(0.5, min_cohort=2)


# By directed rows.

DIRECTED = {"secure_aggregation": "required", "mix": "directed"}


@pytest.fixture
def directed(make_job):
    """A job of five silos, all in each round, unless ``fields`` say otherwise.

    Two rounds of six are generalisation.
    """

    def make(options=None, **fields):
        common = {"rounds": 6, "silos": list("abcde"), "min_cohort": 3, "security": DIRECTED}
        return make_job("pfedsim", options or {"rho": 0.34}, **{**common, **fields})

    return make


def all_after(method, by_pair):
    """A coordinator's state in which all have trained in the phase and pairs have these cosines."""
    place = method.setting.silos.index
    cosines = {(place(one), place(other)): value for (one, other), value in by_pair.items()}
    return once_compared(method, cosines, list(range(len(method.setting.silos))))


def test_directed_the_first_round_of_the_phase_gives_no_extractor(directed):
    job = directed()
    names = [
        ([p.name for p in job.up(n)][:-1], [p.name for p in job.down(n)]) for n in range(job.length)
    ]
    assert names == [
        (["model"], ["model"]),
        (["model"], ["model"]),
        (["rows"], ["model"]),
        (["extractor", "rows"], ["model"]),
        (["extractor", "rows"], ["extractor", "model"]),
        (["extractor", "rows"], ["extractor", "model"]),
    ]
    assert job.up(3)[0].exchange == job.down(4)[0].exchange == Mix(directed=True)
    assert [spec.name for spec in job.down(6)[0].tensors][-1] == "@keep"
    method = job.method()
    state = initial_state(method, "a")
    contributions = [set(method.contribute(state, replace(FACTS, round=n))) for n in (1, 2, 3)]
    assert contributions == [{"model"}, {"rows"}, {"extractor", "rows"}]


def test_directed_a_round_is_mixed_by_the_likeness_before_it_over_who_gave_in_it(directed):
    method = directed().method()
    before = all_after(method, {("a", "b"): 0.5, ("a", "c"): 0.9, ("a", "e"): 0.7, ("b", "d"): 0.3})
    gram = torch.full((1, 4, 4), 0.99, dtype=torch.float64)
    gram[0].fill_diagonal_(1)
    combined = method.combine(before, 4, ("a", "b", "c", "d"), {"rows": {"gram": gram}})
    b, c = weight(0.5), weight(0.9)  # of this round's 0.99 nothing; e did not give
    posts = {post.silo: post for post in combined.posts}
    assert posts.keys() == {"a", "b", "c", "d"}
    assert posts["a"].weights == {"b": pytest.approx(b), "c": pytest.approx(c), "d": 0.0, "a": 0.0}
    assert posts["a"].keep == pytest.approx(
        CODE_SELF_WEIGHT / (CODE_SELF_WEIGHT + b + c), abs=2**-32
    )
    assert combined.state["weights"][0, 1] == pytest.approx(weight(0.99))
    assert combined.state["weights"][0, 4] == weight(0.7)
    assert method.combine(before, 2, ("a", "b", "c", "d"), {"rows": {"gram": gram}}).posts == ()
    nobody = method.combine(method.begin(), 3, ("a", "b", "c", "d"), {"rows": {"gram": gram}})
    assert nobody.posts == ()


def test_directed_mail_is_eq_4_with_the_silo_s_own_part(directed):
    method = directed().method()
    state = initial_state(method, "a")
    own = method.flat(state, "extractor")
    others = {
        name: torch.randn(value.shape, generator=torch.manual_seed(3))
        for name, value in own.items()
    }
    keep = torch.tensor(0.625, dtype=torch.float64)
    mail = {**{name: 0.375 * value for name, value in others.items()}, "@keep": keep}
    taken = method.deliver(state, {"extractor": mail}, FACTS)
    for name, value in method.flat(taken, "extractor").items():
        assert torch.allclose(value, 0.625 * own[name] + 0.375 * others[name], atol=1e-6)
    assert torch.equal(taken.parts["classifier"]["weight"], state.parts["classifier"]["weight"])
    assert method.deliver(state, {}, FACTS).parts.keys() == state.parts.keys()


@pytest.mark.parametrize(
    ("options", "shares", "least"),
    [
        ({}, {"b": 0.5, "c": 0.3, "d": 0.2}, 1 / 3),
        ({}, {"b": 0.34, "c": 0.33, "d": 0.33}, 0.34 / 1.34),
        ({"similarity": "per_class"}, {"b": 0.5, "c": 0.3, "d": 0.2},
            0.5 / (0.5 + CODE_SELF_WEIGHT)),
    ],
)  # fmt: skip
def test_directed_a_silo_keeps_no_less_of_its_own_than_any_likeness_allows(
    directed, options, shares, least
):
    method = directed({"rho": 0.34, **options}).method()
    assert method.mail_fault(4, "a", shares, least) == ""
    assert method.mail_fault(4, "a", shares, 1.0) == ""
    assert f"it is {least:.6f} to 1" in method.mail_fault(4, "a", shares, least - 2e-6)
    nothing = directed({"rho": 0.34, "self_weight": 0.0}).method()
    assert nothing.mail_fault(4, "a", shares, 0.0) == ""
    assert "to 0" in nothing.mail_fault(4, "a", shares, 1e-3)


@pytest.mark.parametrize("participation", [1.0, 0.8])
def test_directed_the_quantised_rounds_are_eq_4_of_one_round_before(
    directed, make_data, participation
):
    """A round at a time, with rows by hand in float64."""
    silos = tuple("abcde")
    counts = (
        {"weights": "public", "dropouts": "any", "counts": dict.fromkeys(silos, 30)}
        if participation < 1
        else {}
    )
    job = directed(participation=participation, security={**DIRECTED, **counts})
    shards = {
        silo: Records(make_data(40, seed=at), make_data(20, seed=at + 9))
        for at, silo in enumerate(silos)
    }
    run, gave, before = Simulation(job, Serial(job, shards), exchanges=simulated(job)), {}, {}
    method, mixed = job.method(), 0
    while run.round < job.length:
        round_, known = run.round, run.coordinator
        cohort = job.cohort(round_)
        starts = {silo: before.get(silo, (None, {}))[0] for silo in cohort}
        down = {
            silo: deliver(method, PLAIN, known, round_, silo, run._archive).get("extractor")
            for silo in cohort
        }
        run.step()
        for silo in cohort:
            if down[silo] is not None:
                weights, own = before[silo][1], starts[silo]
                assert weights
                total = sum(weights.values())
                rest = {
                    name: sum(
                        w * gave[silo][j][name].double() for j, w in weights.items() if j != silo
                    )
                    for name in own
                }
                keep = weights[silo] / total
                assert float(down[silo]["@keep"]) == pytest.approx(keep, abs=1e-9)
                for name, value in rest.items():
                    assert torch.allclose(down[silo][name].double(), value / total, atol=1e-6)
                mixed += 1
        if method.extractor in method.up(round_):
            flat = {silo: method.flat(run.states[silo], "extractor") for silo in cohort}
            for silo in cohort:
                likeness = {j: w for j, w in method.weights(known, silo).items() if j in cohort}
                before[silo], gave[silo] = (flat[silo], likeness), flat
    assert mixed > 1
