import math

import pytest
import torch
from support.refusals import refused
from support.whole_jobs import check_states

from staddle.algorithms.course import SiloState
from staddle.algorithms.data.dataset import Dataset
from staddle.algorithms.engines.aggregation import MemoryArchive, deliver
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.exchange.plain import PLAIN
from staddle.algorithms.method import initial_state
from staddle.algorithms.training.silo_round import local_round

LINE = {"name": "glm", "input": [1, 1, 1], "classes": 2}  # logits W x + b of one number x
ONE = Dataset(torch.ones(1, 1, 1, 1), torch.tensor([1]))  # x = 1 of class 1
ZERO = {"weight": torch.zeros(2, 1), "bias": torch.zeros(2)}
WHOLE = {"batch_size": 64}  # a batch of all records, in whatever order


def head(*weight):
    return {"weight": torch.tensor(weight).reshape(2, 1), "bias": torch.zeros(2)}


def stacked(*heads):
    return {
        f"classifier.{name}": torch.stack([each[name] for each in heads])
        for name in ("weight", "bias")
    }


def played(make_job, own, others, known, start=ZERO):
    """A round of a silo that began its last one at ``start`` and ended it at ``own``."""
    job = make_job("fedfomo", {"models": 3}, LINE, {"lr": 1e-12})
    state = initial_state(job.method(), "a")
    state = SiloState({**state.parts, "classifier": own, "start_classifier": start}, state.extra)
    down = {"others": {**stacked(*others), "known": torch.tensor(known)}}
    return local_round(job.method(), job, state, 1, down, ONE, ONE, "a")


def mixture(outcome):
    """The model that was trained by nothing, and the weights given."""
    weights = outcome.contributions["weights"].tensors["weights"].tolist()
    return outcome.state.parts["classifier"]["weight"].flatten().tolist(), weights


def test_eqs_1_to_4_by_hand(make_job):
    """θ_i = 0 has a loss of log 2 = 0.693147.

    θ_i' = (0, 1): 0.313262, at a distance of 1, w = 0.379885. (0, 2): 0.126928, at 2, w = 0.283110.
    (3, 0): 3.048587, at 3, w = -0.785147. So v = 0.379885 / 0.662995 = 0.572983 and 0.427017, and
    Σ|w| = 1.448142.
    """
    outcome = played(make_job, head(0.0, 1.0), (head(0.0, 2.0), head(3.0, 0.0)), 2)
    mixed, weights = mixture(outcome)
    assert mixed == pytest.approx([0.0, 0.572983 + 2 * 0.427017], abs=1e-5)
    assert weights == pytest.approx([0.283110 / 1.448142, -0.785147 / 1.448142], abs=1e-5)
    assert torch.equal(
        outcome.contributions["model"].tensors["classifier.weight"].flatten(), torch.tensor(mixed)
    )
    began = outcome.state.parts["start_classifier"]["weight"].flatten().tolist()
    assert began == pytest.approx(mixed)  # the next round compares with this


def test_models_that_there_are_not_weigh_nothing(make_job):
    mixed, weights = mixture(played(make_job, head(0.0, 1.0), (head(0.0, 2.0), head(0.0, 9.0)), 1))
    assert mixed == pytest.approx([0.0, 0.572983 + 2 * 0.427017], abs=1e-5)
    assert weights == pytest.approx([0.283110 / 0.662995, 0.0], abs=1e-5)
    mixed, weights = mixture(played(make_job, head(0.0, 1.0), (head(0.0, 2.0), head(0.0, 9.0)), 0))
    assert mixed == pytest.approx([0.0, 1.0])
    assert weights == [0.0, 0.0]


def test_a_model_is_kept_where_none_is_better(make_job):
    """Where no model is better than the one that the last round began with it is kept."""
    mixed, weights = mixture(played(make_job, head(1.0, 0.0), (head(3.0, 0.0), head(1.0, 0.0)), 2))
    assert mixed == pytest.approx([0.0, 0.0], abs=1e-9)
    assert all(weight < 0 for weight in weights)
    mixed, weights = mixture(played(make_job, ZERO, (ZERO, ZERO), 2))
    assert mixed == pytest.approx([0.0, 0.0], abs=1e-9)
    assert weights == [0.0, 0.0]


def known(method, gave, affinity=()):
    """A coordinator that has models of some silos, model n full of n + 1, and affinities of the
    first.
    """
    state = method.begin()
    state["gave"][list(gave)] = 1
    for n, value in affinity:
        state["affinity"][0, n] = value
    n = len(method.setting.silos)
    for spec in method.model.tensors:
        state[spec.name] = (
            torch.arange(1.0, n + 1).reshape(-1, *(1 for _ in spec.shape)).expand(n, *spec.shape)
        )
    return state


def six(make_job, **options):
    return make_job(
        "fedfomo", {"models": 4, **options}, LINE, silos=list("abcdef"), rounds=40
    ).method()


def test_eq_5_takes_those_of_the_highest_affinity(make_job):
    method = six(make_job, epsilon=0.0)
    state = known(method, range(6), [(0, 9.0), (1, -0.5), (2, 0.3), (3, 0.9), (4, 0.2), (5, 0.1)])
    # never oneself
    assert all(method.chosen(state, round_, "a") == [3, 2, 4] for round_ in range(40))
    state = known(method, [0, 1, 5], [(1, -0.5)])
    assert method.chosen(state, 3, "a") == [5, 1]
    assert method.chosen(known(method, [0]), 3, "a") == []


def test_eq_5_takes_any_with_probability_epsilon_which_falls(make_job):
    method = six(make_job, epsilon=1.0, epsilon_decay=0.1)
    state = known(method, range(6), [(3, 0.9), (2, 0.3), (4, 0.2)])
    early = [method.chosen(state, 0, silo) for silo in "abcdef"]
    assert all(len(set(found)) == 3 for found in early)
    assert all(n not in found for n, found in enumerate(early))
    drawn = [method.chosen(state, round_, "a") for round_ in range(40)]
    assert drawn[0] != [3, 2, 4]
    assert all(found == [3, 2, 4] for found in drawn[10:])  # 1 - 10 · 0.1
    even = six(make_job, epsilon=1.0, epsilon_decay=0.0)
    times = [n for round_ in range(200) for n in even.chosen(state, round_, "a")]
    assert all(times.count(n) == pytest.approx(120, abs=30) for n in range(1, 6))  # 200 · 3 / 5
    ties = [
        six(make_job, epsilon=0.0).chosen(known(method, range(6)), round_, "a")[0]
        for round_ in range(40)
    ]
    assert len(set(ties)) == 5  # at random


def test_affinities_add_up_for_those_who_were_sent(make_job):
    method = six(make_job, epsilon=1.0)  # any three
    state = known(method, range(6), [(n, n / 10) for n in range(6)])
    rows = torch.tensor([[0.5, -0.25, 0.125], [0.1, 0.2, 0.3]], dtype=torch.float64)
    model = {spec.name: torch.full((2, *spec.shape), 7.0) for spec in method.model.tensors}
    after = method.combine(
        state, 1, ("a", "c"), {"model": model, "weights": {"weights": rows}}
    ).state
    for silo, row in zip((0, 2), rows, strict=True):
        sent = method.chosen(state, 1, "abcdef"[silo])
        assert (
            after["affinity"][silo, sent].tolist() == (state["affinity"][silo, sent] + row).tolist()
        )
    assert (after["affinity"] != state["affinity"]).sum() == 6
    # the last of each
    assert after["classifier.bias"][:, 0].tolist() == [7.0, 2.0, 7.0, 4.0, 5.0, 6.0]
    # states are values
    assert state["classifier.bias"][:, 0].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_a_silo_gets_the_models_of_the_chosen_and_zeros_behind(make_job):
    method = six(make_job, epsilon=1.0)
    state = known(method, [0, 1, 4, 5])
    down = deliver(method, PLAIN, state, 3, "a", MemoryArchive())["others"]
    assert down["known"] == 3
    assert down["classifier.weight"].shape == (3, 2, 1)
    assert down["classifier.bias"][:, 0].tolist() == [n + 1.0 for n in method.chosen(state, 3, "a")]
    state = known(method, [0, 1, 5], [(1, 1.0)])
    few = deliver(six(make_job, epsilon=0.0), PLAIN, state, 3, "a", MemoryArchive())["others"]
    assert few["known"] == 2
    assert few["classifier.bias"].tolist() == [[2.0, 2.0], [6.0, 6.0], [0.0, 0.0]]
    assert deliver(method, PLAIN, method.begin(), 1, "a", MemoryArchive()) == {}


def test_what_crosses(make_job):
    job = make_job("fedfomo", {"models": 9})
    (down,) = job.down(1)
    assert len(job.method().others) == 2  # of three silos
    model = sum(spec.nbytes for spec in job.up(1)[0].tensors)
    assert sum(spec.nbytes for spec in down.tensors) == 2 * model + 8


def test_models_that_the_coordinator_cannot_keep_are_refused(make_job):
    """resnet18 has 11 million parameters."""
    model = {"name": "resnet18", "norm": "group"}
    assert make_job("fedfomo", {}, model, silos=[f"s{n}" for n in range(20)]).document()
    with refused(r"would keep 9[0-9]{2},[0-9,]* bytes of models of 22 silos, 950,000,000 are"):
        make_job("fedfomo", {}, model, silos=[f"s{n}" for n in range(22)]).document()


def turned(sides, by):
    return tuple(Dataset(side.x, (side.y + by) % 3) for side in sides)


def test_silos_of_no_use_to_one_another_train_alone(make_job, make_shards):
    """Each calls the classes otherwise: others' models are worse than the one that a round began
    with.
    """
    job, alone = (make_job(name, training=WHOLE, rounds=3) for name in ("fedfomo", "local"))
    shards = {silo: turned(sides, i) for i, (silo, sides) in enumerate(make_shards(job).items())}
    found = simulate(job, shards)
    check_states(found.states, simulate(alone, shards).states, 1e-5)
    assert (found.coordinator["affinity"] <= 0).all()


@pytest.mark.parametrize("buffers", [None, "local", "global"])
def test_silos_find_those_of_their_kind(make_job, make_data, buffers):
    """a and c call the classes alike, b and d otherwise.

    0.97 and 0.85 of them are right where each trains alone.
    """
    model = {"norm": "batch", "buffers": buffers} if buffers else {}
    training, rounds = {"lr": 0.05, "momentum": 0.5, "epochs": 2}, 2 if buffers else 4
    job = make_job("fedfomo", {"models": 4}, model, training, silos=list("abcd"), rounds=rounds)
    sides = {silo: (make_data(40, i), make_data(100, 100 + i)) for i, silo in enumerate(job.silos)}
    found = simulate(job, {silo: turned(own, silo in "bd") for silo, own in sides.items()})
    p = found.coordinator["affinity"]
    assert min(p[0, 2], p[2, 0], p[1, 3], p[3, 1]) > max(p[::2, 1::2].max(), p[1::2, ::2].max())
    crossed = {spec.name for spec in job.up(0)[0].tensors}
    assert ("extractor.norm1.running_var" in crossed) == (buffers == "global")
    if not buffers:
        assert min(found.scores("trained").values()) > 0.6


def test_losses_are_those_of_the_records(make_job, make_data):
    method = make_job("fedfomo", {"models": 3}, LINE).method()
    parts = method.modules("a")
    x, y = torch.tensor([1.0, -2.0]).reshape(2, 1, 1, 1), torch.tensor([1, 0])
    for name, weight in (
        ("start_classifier", (0.0, 0.0)),
        ("classifier", (0.0, 1.0)),
        ("other2_classifier", (1.0, 0)),
    ):
        parts[name].load_state_dict(head(*weight))
    losses = method.losses(parts, x, y)["losses"]
    # logits (0, 1) and (0, -2): log(1 + e^-1) + log(1 + e^-2); (1, 0) and (-2, 0): log(1 + e) +
    # log(1 + e^2)
    assert losses[0].item() == pytest.approx(2 * math.log(2))
    assert losses[1].item() == pytest.approx(0.313262 + 0.126928, abs=1e-5)
    assert losses[3].item() == pytest.approx(1.313262 + 2.126928, abs=1e-5)
