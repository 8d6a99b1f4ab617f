import functools
import itertools
import math
import re
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from support.jobs import make_job
from support.refusals import refused
from support.whole_jobs import check_tensors
from torch import nn
from torch.testing import assert_close

from staddle.algorithms.course import Facts, Optimiser
from staddle.algorithms.data import dataset
from staddle.algorithms.engines.aggregation import MemoryArchive, close_round, deliver
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.exchange.parts import Each, Kind
from staddle.algorithms.exchange.plain import PLAIN
from staddle.algorithms.method import initial_state
from staddle.algorithms.methods.fedsimsup.method import (
    beta,
    participation_fault,
    scaled_c,
)
from staddle.algorithms.methods.fedsimsup.supervisors import (
    SUPERVISORS,
    Attention,
    build_supervisor,
)
from staddle.algorithms.models.build import ModelOptions, build
from staddle.algorithms.numerics.streams import stream
from staddle.algorithms.training.loop import train
from staddle.algorithms.training.silo_round import local_round, state_to_bytes

FIVE = ("a", "b", "c", "d", "e")


@pytest.fixture
def make(make_job):
    return lambda silos=FIVE, participation=0.6, **options: make_job(
        "fedsimsup", options, silos=list(silos), participation=participation, rounds=4
    )


class Coordinator:
    """A coordinator half with its archive; every silo's θ is one number in all places."""

    def __init__(self, method, counts):
        self.method, self.archive, self.state = method, MemoryArchive(), method.begin()
        facts = [Facts(s, 0, sum(c), torch.tensor(c)) for s, c in counts.items()]
        part = method.up(0)[0]
        self.close(
            0, {f.silo: PLAIN.contribute(part, method.contribute(None, f)["census"]) for f in facts}
        )

    def close(self, round_, given):
        read = lambda _, silo, name: given[silo][name]
        up = self.method.up(round_)
        self.state, _ = close_round(
            self.method, PLAIN, self.state, round_, tuple(given), up, read, self.archive
        )

    def train(self, round_, **values):
        specs = self.method.theta.tensors
        self.close(
            round_,
            {silo: {s.name: torch.full(s.shape, v) for s in specs} for silo, v in values.items()},
        )

    def model(self, round_, silo, value):
        """θ of a silo that last held ``value`` everywhere, after what was put aside for it."""
        method = self.method
        state = initial_state(method, silo)
        parts = {
            p: {k: torch.full_like(v, value) for k, v in t.items()} for p, t in state.parts.items()
        }
        down = deliver(method, PLAIN, self.state, round_, silo, self.archive)
        after = method.deliver(
            replace(state, parts=parts), down, Facts(silo, round_, 1, torch.ones(3))
        )
        assert all((v == value).all() for v in after.parts["supervisor"].values())
        values = torch.cat(
            [v.flatten() for v in method.flat(after, "extractor", "classifier").values()]
        )
        assert values.min() == values.max()
        return values[0].item()


# Label counts of three classes; e has 40 records, all of class 0.
COUNTS = {"a": [10, 0, 0], "b": [15, 15, 0], "c": [0, 20, 0], "d": [3, 4, 0], "e": [40, 0, 0]}


def test_eq_7_by_hand(make):
    coordinator = Coordinator(make().method(), COUNTS)
    coordinator.train(1, a=1.0, b=2.0, c=3.0)
    lam = (10 + 30 + 20) / (10 + 30 + 20 + 3 * 40)  # M / (M + K m_e) = 1/3, β = 1
    weights = [1, 0.5**0.5, 0]  # cosines of e's labels with those of a, b, c
    mean = (1 * weights[0] + 2 * weights[1]) / sum(weights)
    assert coordinator.model(2, "e", 7.0) == pytest.approx((1 - lam) * 7 + lam * mean, rel=1e-6)
    weights = [0.6, 1.4 * 0.5**0.5, 0.8]  # d: (3, 4)/5
    lam = 60 / (60 + 3 * 7)
    mean = (1 * weights[0] + 2 * weights[1] + 3 * weights[2]) / sum(weights)
    assert coordinator.model(2, "d", 7.0) == pytest.approx((1 - lam) * 7 + lam * mean, rel=1e-6)
    assert coordinator.model(2, "a", 7.0) == 7.0  # Eq. 6: a participant keeps its own
    assert coordinator.state["unmatched"].tolist() == [0] * 5


def test_eq_7_by_hand_of_one_silo_and_of_two(make):
    """Without bounds, as in the paper; e has 40 records, of class 0 alone."""
    coordinator = Coordinator(make(cohorts="any").method(), COUNTS)
    coordinator.train(1, a=1.0)
    lam = 10 / (10 + 1 * 40)
    assert coordinator.model(2, "e", 7.0) == pytest.approx((1 - lam) * 7 + lam * 1, rel=1e-6)
    # a and c have no class in common: Σ s_cj = 0
    assert coordinator.model(2, "c", 7.0) == 7.0
    assert coordinator.state["unmatched"].tolist() == [0, 0, 1, 0, 0]
    coordinator = Coordinator(make(cohorts="any").method(), COUNTS)
    coordinator.train(1, a=1.0, b=2.0)
    lam = 40 / (40 + 2 * 40)
    mean = (1 + 2 * 0.5**0.5) / (1 + 0.5**0.5)
    assert coordinator.model(2, "e", 7.0) == pytest.approx((1 - lam) * 7 + lam * mean, rel=1e-6)
    safe = Coordinator(make().method(), COUNTS)
    safe.train(1, a=1.0, b=2.0)
    assert safe.model(2, "e", 7.0) == 7.0


def test_where_all_train_in_every_round_each_trains_alone(make, make_shards):
    """Eq. 6: nothing ever comes down, so a silo's model is that of its own rounds."""
    job = make(participation=1.0, cohorts="any")
    shards, method = make_shards(job), job.method()
    end = simulate(job, shards)
    assert end.coordinator["unmatched"].tolist() == [0] * 5
    state = initial_state(method, "b")
    for round_ in range(job.length):
        state = local_round(method, job, state, round_, {}, *shards["b"], "b").state
    assert state_to_bytes(state) == state_to_bytes(end.states["b"])


def test_a_blind_job_has_no_rounds_of_any_number(make_job):
    with refused("would show silos each other's models, and a blind job hides them; take it out"):
        make_job(
            "fedsimsup",
            {"cohorts": "any", "similarity": "samples"},
            silos=list(FIVE),
            participation=0.8,
            min_cohort=3,
            security={
                "secure_aggregation": "required",
                "weights": "public",
                "dropouts": "any",
                "counts": dict.fromkeys(FIVE, 20),
            },
        ).document()


@pytest.mark.parametrize("alpha", ["eq8", "one"])
def test_the_ablation_averages_as_fedavg_and_no_proportions_leave(make, alpha):
    """λ_e = 1/3: with "one" an absent silo keeps nothing of its own model."""
    method = make(similarity="samples", alpha=alpha).method()
    coordinator = Coordinator(method, COUNTS)
    assert set(coordinator.state) == {"samples", "unmatched"}
    assert [s.name for s in method.up(0)[0].tensors] == ["samples"]
    coordinator.train(1, a=1.0, b=2.0, c=3.0)
    mean = (10 * 1 + 30 * 2 + 20 * 3) / 60
    kept = {"eq8": 2 / 3, "one": 0}[alpha]
    assert coordinator.model(2, "e", 7.0) == pytest.approx(7 * kept + mean * (1 - kept), rel=1e-6)


@settings(max_examples=8)
@given(
    st.lists(
        st.lists(st.sampled_from(FIVE[:4]), min_size=3, max_size=4, unique=True),
        min_size=4,
        max_size=4,
    ),
    st.integers(0, 2**31),
)
def test_what_is_put_aside_equals_eq_7_round_by_round(method_and_counts, cohorts, seed):
    """The same numbers as a server that holds every θ_i and applies Eq. 7 to all of them in each
    round.
    """
    method, counts = method_and_counts
    coordinator = Coordinator(method, counts)
    numbers = torch.rand(4, 5, generator=torch.Generator().manual_seed(seed)).tolist()
    h = torch.tensor([counts[s] for s in FIVE], dtype=torch.float64)
    cosine = nn.functional.normalize(h) @ nn.functional.normalize(h).T
    m = h.sum(1)
    oracle = dict.fromkeys(FIVE, 0.5)
    held = dict(oracle)  # what each silo has on its own disk
    for t, cohort in enumerate(cohorts, 1):
        present = sorted(cohort)
        for silo in present:
            assert coordinator.model(t, silo, held[silo]) == pytest.approx(oracle[silo], abs=1e-6)
        trained = {silo: float(torch.tensor(numbers[t - 1][FIVE.index(silo)])) for silo in present}
        coordinator.train(t, **trained)
        rows = [FIVE.index(s) for s in present]
        for i, silo in enumerate(FIVE):
            s = cosine[i, rows]
            if silo in trained:
                oracle[silo] = held[silo] = trained[silo]
            elif s.sum() > 0:
                a = (
                    m[rows].sum()
                    / (m[rows].sum() + len(rows) * m[i])
                    * beta(t, 4, scaled_c(4), 3 / 7)
                )
                other = (s * torch.tensor([trained[p] for p in present]).double()).sum() / s.sum()
                oracle[silo] = float((1 - a) * oracle[silo] + a * other)
    for silo in FIVE:  # the final delivery
        assert coordinator.model(5, silo, held[silo]) == pytest.approx(oracle[silo], abs=1e-6)


@pytest.fixture(scope="module")
def method_and_counts():
    return make_job("fedsimsup", silos=list(FIVE), participation=0.6).method(), BY_CLASS


@pytest.mark.parametrize(
    ("rounds", "c", "gamma", "threshold", "last"),
    [
        (100, 40, 3 / 7, 288, 1), (200, 40, 3 / 7, 387, 1), (500, 40, 3 / 7, 574, 1), (636, 40,
        3 / 7, None, 1),
        (1000, 40, 3 / 7, 772, 0.596), (1000, 10, 1 / 3, 100, 0.01),
    ],
)  # fmt: skip
def test_the_beta_table(rounds, c, gamma, threshold, last):
    assert beta(rounds, rounds, c, gamma) == pytest.approx(last, abs=5e-4)
    if threshold:
        assert c * rounds**gamma == pytest.approx(threshold, abs=0.5)
        assert beta(threshold - 1, rounds, c, gamma) == 1


def test_only_long_jobs_reach_the_decay_of_the_papers_schedule():
    assert next(rounds for rounds in range(1, 1000) if beta(rounds, rounds, 40, 3 / 7) < 1) == 637


def test_the_scaled_schedule_decays_in_every_job_and_is_the_papers_at_1000_rounds(make):
    assert scaled_c(1000) == pytest.approx(40)
    for rounds in (1, 2, 10, 100, 5000):
        assert beta(rounds, rounds, scaled_c(rounds), 3 / 7) == pytest.approx(0.596, abs=5e-4)
    method = make().method()  # 4 rounds: C T^γ = 3.09
    assert [method.beta(t) for t in (1, 2, 3)] == [1, 1, 1]
    assert method.beta(4) == pytest.approx((0.772 * 4 / 4) ** 2, abs=1e-3)
    assert make(schedule="paper").method().beta(4) == 1
    given = make(c=1.0, gamma=0.25).method()  # C T^γ = √2
    assert [given.beta(t) for t in (1, 2, 4)] == pytest.approx([1, 0.5, 0.125])


def test_lambda_by_hand(method_and_counts):
    alpha = method_and_counts[0].alpha  # in round 1, of λ alone
    assert alpha(1, M=30, K=3, m_i=10) == 0.5  # equal sizes
    assert alpha(1, M=60, K=3, m_i=40) == pytest.approx(1 / 3)
    # who has more learns less from others
    assert alpha(1, 60, 3, 10) > alpha(1, 60, 3, 20) > alpha(1, 60, 3, 1000)


def test_a_silo_like_nobody_keeps_its_model_and_is_counted(make):
    coordinator = Coordinator(make().method(), {**COUNTS, "e": [0, 0, 40]})
    for round_ in (1, 2):
        coordinator.train(round_, a=1.0, b=2.0, c=3.0)
    assert coordinator.model(3, "e", 7.0) == 7.0
    assert coordinator.state["unmatched"].tolist() == [0, 0, 0, 0, 2]


def test_a_round_that_fewer_than_three_complete_posts_nothing(make):
    coordinator = Coordinator(make().method(), COUNTS)
    coordinator.train(1, a=1.0, b=2.0)
    assert coordinator.model(2, "e", 7.0) == 7.0
    assert coordinator.state["unmatched"].tolist() == [0, 0, 1, 1, 1]


def test_who_missed_the_census_or_lied_in_it_neither_learns_nor_teaches(make):
    counts = {**COUNTS, "b": [-5, 15, 0], "d": [0, 0, 0]}
    coordinator = Coordinator(make().method(), {s: c for s, c in counts.items() if s not in "de"})
    assert coordinator.state["samples"].tolist() == [10, 0, 20, 0, 0]
    assert coordinator.state["proportions"][1].tolist() == [0, 0, 0]
    coordinator = Coordinator(make().method(), {s: c for s, c in counts.items() if s != "d"})
    coordinator.train(1, a=1.0, c=3.0, d=100.0, e=2.0)
    assert coordinator.model(2, "b", 7.0) == 7.0
    coordinator = Coordinator(make().method(), {**COUNTS, "a": [1, 1, 1], "b": [-5, 15, 0]})
    coordinator.train(1, b=1e6, c=3.0, d=3.0, e=3.0)
    lam = (20 + 7 + 40) / (20 + 7 + 40 + 3 * 3)
    assert coordinator.model(2, "a", 1.0) == pytest.approx((1 - lam) * 1 + lam * 3, rel=1e-6)


def test_in_the_ablation_who_missed_the_census_learns_from_nobody_either(make):
    """Without its m_i, λ_i = M / M: the silo would lose its own model."""
    coordinator = Coordinator(
        make(similarity="samples").method(), {s: c for s, c in COUNTS.items() if s != "e"}
    )
    coordinator.train(1, a=1.0, b=2.0, c=3.0)
    assert coordinator.model(2, "e", 7.0) == 7.0
    assert coordinator.state["unmatched"].tolist() == [0, 0, 0, 0, 1]


def test_a_round_leaves_the_coordinators_earlier_state_as_it_was(make):
    """A round is closed again after a crash: what it counts must not have been counted into the
    state before.
    """
    coordinator = Coordinator(make().method(), {**COUNTS, "e": [0, 0, 40]})
    states = [coordinator.method.begin(), coordinator.state]
    copies = [{name: tensor.clone() for name, tensor in state.items()} for state in states]
    samples = torch.tensor([1, 2, 3])
    census = {
        "census": {
            "samples": samples,
            "proportions": torch.full((3, 3), 1 / 3, dtype=torch.float64),
        }
    }
    coordinator.method.combine(states[0], 0, ("a", "b", "c"), census)
    coordinator.train(1, a=1.0, b=2.0, c=3.0)
    assert coordinator.state["unmatched"].tolist() == [0, 0, 0, 0, 1]
    for state, copy in zip(states, copies, strict=True):
        assert all(torch.equal(state[name], value) for name, value in copy.items())


@given(
    st.integers(2, 3000), st.integers(1, 3000), st.integers(1, 3000), st.integers(3, 20), st.data()
)
def test_alpha_is_a_share_that_only_falls(
    method_and_counts, rounds, total, own, contributors, draw
):
    """0 < β ≤ 1 and never rises, without a jump where decay sets in; 0 < λ < 1.

    So Eq. 7 is a convex combination.
    """
    schedule = scaled_c(rounds), 3 / 7
    t = draw.draw(st.integers(1, rounds - 1))
    assert 0 < beta(t + 1, rounds, *schedule) <= beta(t, rounds, *schedule) <= 1
    onset = schedule[0] * rounds ** schedule[1]
    assert (
        beta(onset, rounds, *schedule)
        == 1
        >= beta(onset * (1 + 1e-9), rounds, *schedule)
        > 1 - 1e-8
    )
    alpha = method_and_counts[0].alpha  # in round 1, of λ alone
    assert 0 < alpha(1, total, contributors, own) < 1
    # as many records as the mean of those who trained
    assert alpha(1, contributors * own, contributors, own) == 0.5


def test_the_census_by_hand(make, make_data):
    job = make()
    method = job.method()
    train = dataset.Dataset(torch.rand(8, 1, 8, 8), torch.tensor([0, 0, 0, 0, 2, 2, 1, 0]))
    before = initial_state(method, "a")
    outcome = local_round(method, job, before, 0, {}, train, make_data(4), "a")
    assert outcome.contributions["census"].tensors["proportions"].tolist() == [5 / 8, 1 / 8, 2 / 8]
    assert outcome.contributions["census"].tensors["samples"] == 8
    assert state_to_bytes(outcome.state) == state_to_bytes(before)  # nothing trains
    (part,) = method.up(0)
    assert (part.kind, part.exchange) == (Kind.COUNTS, Each())


def test_the_wire(make):
    assert make().length == 5
    method = make().method()
    for round_ in range(1, 5):
        (part,) = method.up(round_)
        assert part.kind == Kind.INTER_LEARNING_MODEL
        assert not any(s.name.startswith("supervisor") for s in part.tensors)
    assert method.down(1) == ()
    expected = (*method.theta.tensors, method.mail.tensors[-1])
    assert method.down(2)[0].tensors == method.down(5)[0].tensors == expected


def test_one_round_of_a_silo_by_hand(make, make_data):
    """One batch: s moves on the loss of the summed logits, then θ on the same loss with the
    new s.
    """
    job, train = make(tau_s=1, tau_theta=1), make_data(6)
    method = job.method()
    state = initial_state(method, "b")
    after = local_round(method, job, state, 1, {}, train, make_data(4), "b").state.parts
    s, theta = build_supervisor("lenet", (1, 8, 8), 3, 7, "b"), build(job.model, 7)
    logits = lambda: theta["classifier"](theta["extractor"](train.x)) + s(train.x)
    for modules in ((s,), (theta["extractor"], theta["classifier"])):
        parameters = [p for module in modules for p in module.parameters()]
        gradients = torch.autograd.grad(nn.functional.cross_entropy(logits(), train.y), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(0.1 * gradient)
    for part, module in {**theta, "supervisor": s}.items():
        for name, value in module.named_parameters():
            assert torch.allclose(after[part][name], value, atol=1e-6), (part, name)
            assert not torch.equal(after[part][name], state.parts[part][name])


def test_three_points_by_hand(make):
    """Records x = 1, 2, 3 with labels 0, 1, 1, weights s and θ of two classes, all 0 at first, lr
    0.3, one batch.

    ∇_k = mean (p_k − [y = k]) x. For s every p is ½: (−1 + 2 + 3)/6 = 2/3 for class 0, so s = (−.2,
    .2). For θ, which is still 0, the logits differ by .4 x, so p_1 = σ(.4), σ(.8), σ(1.2): what s
    knows is not learned again.
    """
    method, parts = make(tau_s=1, tau_theta=1).method(), {"extractor": nn.Flatten()}
    for part in ("classifier", "supervisor"):
        parts[part] = nn.Linear(1, 2, bias=False)
        nn.init.zeros_(parts[part].weight)
    records = dataset.Dataset(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([0, 1, 1]))
    stages = method.stages(None, Facts("a", 1, 3, torch.tensor([1, 2, 0])))
    for number, stage in enumerate(stages):
        slow = replace(stage, optimiser=Optimiser(0.3))
        train(parts, slow, records, 3, stream(0, "a", 1, f"train/{number}"))
    sigma = lambda z: 1 / (1 + math.exp(-z))
    gradient = (sigma(0.4) + 2 * (sigma(0.8) - 1) + 3 * (sigma(1.2) - 1)) / 3
    for part, moved in (("supervisor", -0.2), ("classifier", 0.3 * gradient)):
        assert parts[part].weight.flatten().tolist() == pytest.approx([moved, -moved])


def test_the_supervisor_trains_tau_s_epochs_and_then_theta_tau_theta(make):
    method = make(tau_s=2, tau_theta=7).method()
    facts = Facts("a", 1, 3, torch.tensor([1, 2, 0]))
    stages = [(stage.trains, stage.epochs) for stage in method.stages(None, facts)]
    assert stages == [(("supervisor",), 2), (("extractor", "classifier"), 7)]
    assert method.stages(None, replace(facts, round=0)) == ()


@pytest.mark.parametrize(("epochs", "expected"), [(5, [2, 3]), (1, [2, 1])])
def test_both_passes_take_the_jobs_epochs(make_job, epochs, expected):
    fields = {"silos": FIVE, "participation": 0.6}
    training = {"epochs": epochs}
    method = make_job("fedsimsup", {"tau_s": 2}, training=training, **fields).method()
    stages = method.stages(None, Facts("a", 1, 3, torch.tensor([1, 2, 0])))
    assert [stage.epochs for stage in stages] == expected


def test_theta_starts_equal_and_supervisors_apart_and_of_their_own_architecture(make):
    method = make(supervisor=["lenet", "cnn", "transformer"]).method()
    assert [method.supervisor(s) for s in FIVE] == ["lenet", "cnn", "transformer", "lenet", "cnn"]
    states = {s: initial_state(method, s).parts for s in FIVE}
    for parts in states.values():
        check_tensors(parts["extractor"], states["a"]["extractor"])
    a, b, d = (states[silo]["supervisor"] for silo in "abd")
    assert a.keys() == d.keys() != b.keys()
    assert not torch.equal(a["extractor.conv1.weight"], d["extractor.conv1.weight"])
    again = make(supervisor="transformer").method()
    assert {again.supervisor(s) for s in FIVE} == {"transformer"}


@pytest.mark.parametrize(
    ("name", "parameters"), [("fedsimsup-lenet", 52_202), ("fedsimsup-lenet-wide", 878_538)]
)
def test_theta_has_the_parameters_of_the_two_readings(name, parameters):
    parts = build(ModelOptions(name=name, classes=10), 0)
    assert sum(p.numel() for m in parts.values() for p in m.parameters()) == parameters
    assert parts["classifier"](parts["extractor"](torch.rand(2, 3, 32, 32))).shape == (2, 10)


@pytest.mark.parametrize(
    ("name", "parameters", "theta"),
    [
        ("lenet", 8_422, 52_202),
        ("lenet-wide", 143_818, 878_538),
        ("cnn", 7_898, 52_202),
        ("transformer", 9_350, 52_202),
    ],
)
def test_supervisors_are_about_a_sixth_of_theta(name, parameters, theta):
    module = build_supervisor(name, (3, 32, 32), 10, 0, "a")
    assert sum(p.numel() for p in module.parameters()) == parameters
    assert 0.14 < parameters / theta < 0.19


@pytest.mark.parametrize("name", SUPERVISORS)
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 8, 8), (1, 28, 28), (2, 4, 6)])
def test_supervisors_train_on_their_inputs_one_record_at_a_time(name, shape):
    module = build_supervisor(name, shape, 5, 1, "a")
    x = torch.rand(3, *shape)
    logits = module(x)
    assert torch.allclose(logits[1:2], module(x[1:2]), atol=1e-5)  # no record sees another
    logits.square().sum().backward()
    assert all(p.grad is not None for p in module.parameters())
    assert logits.std(0).min() > 0
    torch.manual_seed(5)
    twin = build_supervisor(name, shape, 5, 1, "a")
    assert all(
        torch.equal(p, q) for p, q in zip(module.parameters(), twin.parameters(), strict=True)
    )


def test_attention_is_torchs_own():
    ours, oracle = Attention(20, 4), nn.MultiheadAttention(20, 4, batch_first=True)
    oracle.load_state_dict({
        "in_proj_weight": ours.qkv.weight, "in_proj_bias": ours.qkv.bias,
        "out_proj.weight": ours.out.weight, "out_proj.bias": ours.out.bias,
    })  # fmt: skip
    x = torch.randn(2, 7, 20)
    assert torch.allclose(ours(x), oracle(x, x, x)[0], atol=1e-6)


def test_the_transformer_knows_where_a_patch_lies():
    module = build_supervisor("transformer", (1, 8, 8), 3, 0, "a")
    x = torch.rand(1, 1, 8, 8)
    assert not torch.allclose(module(x), module(x.flip(2)), atol=1e-5)


@pytest.mark.parametrize(
    ("samples", "proportions", "kept"),
    [
        (10, [0.5, 0.25, 0.25], True),
        (10, [0.5, 0.25, 0.25 + 9e-7], True),
        (10, [0.5, 0.25, 0.25 + 2e-6], False),
        (10, [0.5, 0.25, 0.2], False),
        (10, [5.0, 2.0, 3.0], False),
        (10, [0.0, 0.0, 0.0], False),
        (10, [1.5, -0.5, 0.0], False),
        (10, [float("inf"), 0.0, 0.0], False),
        (10, [float("nan"), 0.5, 0.5], False),
        (0, [0.5, 0.25, 0.25], False),
        (-3, [0.5, 0.25, 0.25], False),
    ],
)
def test_a_census_whose_counts_disagree_is_left_out(make, samples, proportions, kept):
    method = make().method()
    others = torch.tensor([[1.0, 0, 0]] * 4, dtype=torch.float64)
    given = {
        "samples": torch.tensor([samples, 7, 7, 7, 7]),
        "proportions": torch.cat([torch.tensor([proportions], dtype=torch.float64), others]),
    }
    state = method.combine(method.begin(), 0, FIVE, {"census": given}).state
    assert state["samples"].tolist() == [samples if kept else 0, 7, 7, 7, 7]
    assert state["proportions"][0].tolist() == (proportions if kept else [0, 0, 0])


@pytest.mark.parametrize(
    ("silos", "participation", "complaint"),
    [
        (FIVE, 1.0, "all 5 silos train in every round.*lower participation or min_cohort"),
        (FIVE, 0.9, "all 5 silos"),
        (FIVE[:3], 0.9, "all 3 silos.*with 4 silos or more"),
        (FIVE, 0.4, '2 of 5 silos train.*raise participation.*simulation may say cohorts = "any"'),
        (FIVE[:3], 0.5, "2 of 3"),
    ],
)
def test_participation_that_cannot_work_is_refused_at_admission(
    make, silos, participation, complaint
):
    job = make(silos, participation)
    with refused(complaint):
        job.document()
    assert make(silos, participation, cohorts="any").document()


def test_a_federation_has_no_rounds_of_one_silo(make):
    job = make(FIVE, 0.2, cohorts="any")
    with refused('fedsimsup: cohorts = "any" is for simulations'):
        job.for_federation()
    # A hand may have signed it all the same.
    with refused('the job: cohorts = "any" is for simulations'):
        type(job).from_document(job.document(), "the job", None)
    assert type(job).from_document(job.document(), "the job", None, federated=False)
    assert make(FIVE, 0.6).for_federation().federated


def test_participation_that_works(make):
    assert make(FIVE, 0.6).document()
    assert make(FIVE, 0.7).document()
    assert participation_fault(3, 4) == ""
    assert participation_fault(99, 100) == ""


@pytest.mark.parametrize(
    ("shape", "supervisor", "complaint"),
    [((3, 30, 32), "transformer", "4 x 4 pixels, which"), ((3, 3, 40), "cnn", "at least 4 x 4")],
)
def test_supervisors_that_cannot_take_the_input_are_refused(make, shape, supervisor, complaint):
    job = make(supervisor=supervisor)
    with refused(complaint):
        type(job.method())(replace(job.setting(), input=shape), job.method_options)


def test_all_silos_are_evaluated_and_who_trained_last_keeps_it(make, make_shards):
    job = make(tau_theta=1)
    assert job.method().product == "delivered"
    history = simulate(job, make_shards(job)).history
    assert len({reports[0].round for reports in history.values()}) == 1  # the census
    assert [reports[-1].tested for reports in history.values()] == [12] * 5
    for silo in job.cohort(4):
        assert history[silo][-1].delivered.correct == history[silo][-2].trained.correct


SHARES = {"silos": list(FIVE), "participation": 0.8, "min_cohort": 3}


BY_CLASS = {"a": [5, 1, 0], "b": [0, 9, 0], "c": [0, 2, 8], "d": [1, 1, 1], "e": [0, 0, 4]}


def declaring(similarity, by_class=BY_CLASS, alpha="eq8", **fields):
    """A blind job that declares what the census would say."""
    counts = {silo: sum(own) for silo, own in by_class.items()}
    table = {"secure_aggregation": "required", "weights": "public", "dropouts": "any"}
    by_class = {"class_counts": by_class} if similarity == "labels" else {}
    security = {**table, "counts": counts, **by_class}
    options = {"similarity": similarity, "alpha": alpha, "tau_s": 1, "tau_theta": 1}
    return make_job("fedsimsup", options, security=security, **SHARES, **fields)


@pytest.mark.parametrize("similarity", ["labels", "samples"])
def test_what_a_blind_job_declares_is_what_its_census_would_say(make_job, make_shards, similarity):
    options = {"similarity": similarity, "tau_s": 1, "tau_theta": 1}
    clear = make_job("fedsimsup", options, **SHARES)
    shards = make_shards(clear)
    by_class = {s: torch.bincount(own.y, minlength=3).tolist() for s, (own, _) in shards.items()}
    blind = declaring(similarity, by_class)
    assert [part.name for part in blind.up(0)] == ["metrics"]
    sizes = torch.tensor([len(shards[s][0]) for s in FIVE])
    assert torch.equal(blind.method().begin()["samples"], sizes)
    expected, found = simulate(clear, shards), simulate(blind, shards)
    assert_close(found.coordinator, expected.coordinator, atol=0, rtol=0)
    assert all(state_to_bytes(found.states[s]) == state_to_bytes(expected.states[s]) for s in FIVE)


@pytest.mark.parametrize("similarity", ["labels", "samples"])
def test_a_silo_knows_what_is_posted_to_it_by_what_the_job_declares(similarity):
    """Over all cohorts; where silos may have taken part that are like nobody here, keep is known
    within a range.
    """
    method, ranges = declaring(similarity, rounds=10).method(), set()
    cohorts = [*itertools.combinations(FIVE, 3), *itertools.combinations(FIVE, 4)]
    for cohort, round_ in itertools.product(cohorts, (1, 9)):
        for post in method.combine(method.begin(), round_, cohort, {}).posts:
            fault = functools.partial(method.mail_fault, round_, post.silo)
            total = sum(post.weights.values())
            shares = {silo: weight / total for silo, weight in post.weights.items()}
            assert fault(shares, post.keep) == ""
            least, most = re.search(r"it is (\S+) to (\S+)$", fault(shares, 1)).groups()
            assert float(least) - 1e-6 <= post.keep <= float(most) + 1e-6
            assert "says keep" in fault(shares, float(least) - 1e-5)
            assert "says keep" in fault(shares, float(most) + 1e-5)
            ranges.add(least != most)
            for first, second in itertools.pairwise(shares):
                moved = {**shares, first: shares[first] + 1e-5, second: shares[second] - 1e-5}
                assert f"gives {first!r} a share" in fault(moved, post.keep)
    assert ranges == ({True, False} if similarity == "labels" else {False})
    if similarity == "labels":
        stranger = method.mail_fault(1, "e", {"b": 0.5, "c": 0.5}, 0.5)
        assert "mixes b, which have nothing in common" in stranger


def test_a_silo_for_which_no_row_is_made_is_as_one_like_nobody():
    method = declaring("labels").method()
    before = {**method.begin(), "unmatched": torch.tensor([0, 1, 2, 3, 4])}
    after = method.unposted(before, ("b", "e"))
    assert after["unmatched"].tolist() == [0, 2, 2, 3, 5]
    assert before["unmatched"].tolist() == [0, 1, 2, 3, 4]


def test_of_a_direct_average_a_silo_accepts_no_mail_that_keeps_anything():
    method = declaring("samples", alpha="one").method()
    (post, *_) = method.combine(method.begin(), 1, ("a", "b", "c"), {}).posts
    total = sum(post.weights.values())
    shares = {silo: weight / total for silo, weight in post.weights.items()}
    assert post.keep == 0
    assert method.mail_fault(1, post.silo, shares, 0.0) == ""
    assert "says keep = 0.1" in method.mail_fault(1, post.silo, shares, 0.1)


@pytest.mark.parametrize("similarity", ["labels", "samples"])
def test_weights_of_rows_are_those_that_are_posted_and_known_to_all(similarity):
    job = declaring(similarity)
    method = job.method()
    state = method.begin()
    assert method.directed_for == "away"
    for round_ in range(1, job.length):
        cohort = job.cohort(round_)
        for post in method.combine(state, round_, cohort, {}).posts:
            assert method.row_weights(round_, post.silo) == post.weights
            near = method.similarities(state, post.silo, list(cohort))
            assert post.weights == pytest.approx(near, abs=1e-12)
            # Of whole numbers and one root, so that no machine rounds otherwise: the same whatever
            # the order.
            other = method.declared_similarities(post.silo, cohort[::-1])
            assert other == post.weights
    assert method.row_weights(0, job.silos[0]) == {}


def test_without_declared_counts_no_row_has_weights_beforehand(make):
    method = make().method()
    assert method.row_weights(1, "a") == {}
