"""FedKD: its losses and what is left of an update by hand; what crosses.

That all of an update is FedAvg of mentees.
"""

import math

import pytest
import torch
from support.refusals import refused
from support.whole_jobs import check_tensors

from staddle.algorithms.baselines.fedkd import truncated
from staddle.algorithms.course import Facts
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.method import initial_state
from staddle.algorithms.training.silo_round import local_round, to_modules

MENTOR = ("mentor_extractor", "mentor_classifier")


def facts(round_):
    return Facts("a", round_, 5, torch.tensor([2, 2, 1]))


def test_what_is_left_of_an_update_by_hand():
    """Singular values 4, 2, 1 have 16, 4 and 1 of an energy of 21: .762, .952 and all of it."""
    turn = torch.tensor([[0.6, -0.8, 0.0], [0.8, 0.6, 0.0], [0.0, 0.0, 1.0]])
    update = turn @ torch.diag(torch.tensor([1.0, 4.0, 2.0]))
    for energy, kept in (
        (0.5, [0, 4, 0]),
        (0.76, [0, 4, 0]),
        (0.77, [0, 4, 2]),
        (0.95, [0, 4, 2]),
        (0.96, [1, 4, 2]),
    ):
        by_hand = turn @ torch.diag(torch.tensor(kept, dtype=torch.float32))
        assert torch.allclose(truncated(update, energy), by_hand, atol=1e-5), energy


def test_kernels_are_matrices_of_their_outputs_and_vectors_are_given_whole():
    one = torch.arange(1.0, 9.0).reshape(1, 2, 2, 2)
    kernel = torch.cat([3 * one, -one, torch.zeros_like(one)])  # [3, 2, 2, 2], of rank one
    assert torch.allclose(truncated(kernel, 0.5), kernel, atol=1e-4)
    assert torch.equal(truncated(torch.zeros(2, 3), 0.5), torch.zeros(2, 3))
    for whole in (torch.tensor([1.0, 2.0]), torch.tensor([[math.nan, 1.0]])):
        assert truncated(whole, 0.5) is whole


def test_eq_4_by_hand(make_job):
    method = make_job("fedkd", {"t_start": 0.5, "t_end": 0.9}, rounds=4).method()
    assert [method.energy(round_) for round_ in range(4)] == pytest.approx([0.6, 0.7, 0.8, 0.9])
    assert make_job("fedkd", rounds=10).method().energy(9) == pytest.approx(0.98)


def fixed(value):
    return lambda _: torch.tensor(value)


def test_eqs_1_and_2_by_hand(make_job):
    """Two records of label 1. Mentor: (¼, ¾) and (½, ½).

    Mentee: (½, ½) twice, so D = ½ (log 4/3 + 3 log 2).
    """
    method = make_job("fedkd").method()
    parts = {
        "extractor": fixed([[1.0], [2.0]]), "mentor_extractor": fixed([[1.0, 3.0], [0.0, 0.0]]),
        "classifier": fixed([[0.0, 0.0], [0.0, 0.0]]),
        "mentor_classifier": fixed([[0.0, math.log(3)], [0.0, 0.0]]),
        "map": lambda hidden: torch.cat([hidden, hidden], 1),
    }  # fmt: skip
    found = method.mutual(parts, torch.zeros(2, 1), torch.tensor([1, 1]), {})
    d = (math.log(4 / 3) + 3 * math.log(2)) / 2
    # KL both ways
    apart = 0.25 * math.log(0.5) + 0.75 * math.log(1.5) + 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    first = math.log(4 / 3) + math.log(2) + (apart + (0 + 4) / 2) / d  # (1, 3) − (1, 1)
    second = 2 * math.log(2) + (4 + 4) / 2 / d  # (0, 0) − (2, 2)
    assert found.tolist() == pytest.approx([first, second], rel=1e-6)
    assert torch.equal(method.predict(parts, None), parts["mentor_classifier"](None))


def test_d_and_targets_take_no_gradient(make_job, make_data):
    """At the mentee's logits of one record: p_s − e_y of CE and (p_s − p_t) / D.

    The classifier's bias sees no more.
    """
    method, points = make_job("fedkd").method(), make_data(1)
    modules = to_modules(method, "a", initial_state(method, "a"))
    method.mutual(modules, points.x, points.y, {}).mean().backward()
    mentee = modules["classifier"](modules["extractor"](points.x)).softmax(1)[0]
    mentor = modules[MENTOR[1]](modules[MENTOR[0]](points.x)).softmax(1)[0]
    label = torch.nn.functional.one_hot(points.y, 3)[0]
    d = -(mentee @ label.float()).log() - (mentor @ label.float()).log()
    assert torch.allclose(
        modules["classifier"].bias.grad, mentee - label + (mentee - mentor) / d, atol=1e-6
    )
    assert torch.allclose(
        modules[MENTOR[1]].bias.grad, mentor - label + (mentor - mentee) / d, atol=1e-6
    )
    assert modules["map"].weight.grad.abs().max() > 0


def test_the_mentee_crosses_after_its_truncated_update_and_the_rest_stays(make_job, make_data):
    model, points = {"norm": "batch", "buffers": "global"}, make_data(20)
    job = make_job("fedkd", {"t_start": 0.6, "t_end": 0.6}, model)
    method = job.method()
    (mentee,) = method.up(0)
    assert method.down(4) == (mentee,)
    assert mentee.tensors == make_job("fedavg", model=model).method().model.tensors
    start = initial_state(method, "a")
    down = {
        name: tensor + 0.5 for name, tensor in method.flat(start, "extractor", "classifier").items()
    }
    outcome = local_round(method, job, start, 1, {"mentee": down}, points, points, "a")
    contribution = outcome.contributions["mentee"]
    assert contribution.tensors.keys() == {spec.name for spec in mentee.tensors}
    assert contribution.weight == 20
    fewer = 0
    for name, value in method.flat(outcome.state, "extractor", "classifier").items():
        if value.ndim < 2:
            assert torch.allclose(contribution.tensors[name], value, atol=1e-6)
            continue
        own, given = (
            (tensor - down[name]).flatten(1) for tensor in (value, contribution.tensors[name])
        )
        fewer += int(torch.linalg.matrix_rank(given, 1e-4) < torch.linalg.matrix_rank(own, 1e-4))
        assert 0.6 - 1e-4 <= given.square().sum() / own.square().sum() <= 1
    assert fewer >= 3
    taken = method.deliver(start, {"mentee": down}, facts(1))
    check_tensors(taken.parts, {part: start.parts[part] for part in (*MENTOR, "map")})


def test_with_all_of_an_update_a_mentee_crosses_as_it_is(make_job, make_data):
    job, points = make_job("fedkd", {"t_start": 1.0, "t_end": 1.0}), make_data(9)
    method = job.method()
    outcome = local_round(method, job, initial_state(method, "a"), 0, {}, points, points, "a")
    model = method.flat(outcome.state, "extractor", "classifier")
    check_tensors(outcome.contributions["mentee"].tensors, model, 1e-5)


def test_mentor_and_map_have_the_widths_of_both(make_job, make_shards):
    job = make_job("fedkd", {"mentor": "convnet-digits"}, rounds=1)
    parts = simulate(job, make_shards(job)).states["b"].parts
    wide = parts["mentor_classifier"]["weight"].shape[1]
    assert {name: tensor.shape for name, tensor in parts["map"].items()} == {"weight": (wide, 64)}
    assert wide != 64
    with refused(r"fedkd: mentor = 'lenet5' needs at least 16 x 16 pixels.*; choose one"):
        make_job("fedkd", {"mentor": "lenet5"}).document()
