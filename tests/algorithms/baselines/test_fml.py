"""FML: its losses by hand, what stays, and the two limits in which neither model learns from the
other.
"""

import math

import pytest
import torch
from support.refusals import refused
from support.whole_jobs import check_states, check_tensors, trained

from staddle.algorithms.course import SiloState
from staddle.algorithms.engines.aggregation import MemoryArchive
from staddle.algorithms.engines.simulation import Snapshot, simulate
from staddle.algorithms.method import initial_state
from staddle.algorithms.models.build import ModelOptions, build
from staddle.algorithms.training.silo_round import local_round, to_modules

OWN = ("personal_extractor", "personal_classifier")


def constant(value):
    """A part that gives these logits for every record."""
    return lambda x: torch.tensor([value] * len(x)).log()


def parts_of(meme, personal):
    same = {"extractor": lambda x: x, OWN[0]: lambda x: x}
    return {**same, "classifier": constant(meme), OWN[1]: constant(personal)}


def test_eqs_1_and_2_by_hand(make_job):
    """meme (½, ½), personalised (¼, ¾), label 1: CE are log 2 and log 4/3."""
    method = make_job("fml", {"alpha": 0.75, "beta": 0.5}).method()
    parts, x = parts_of([0.5, 0.5], [0.25, 0.75]), torch.zeros(1, 1)
    loss = method.mutual(parts, x, torch.tensor([1]), {})
    personal = 0.75 * math.log(4 / 3) + 0.25 * (0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    meme = 0.5 * math.log(2) + 0.5 * (0.25 * math.log(0.5) + 0.75 * math.log(1.5))
    assert loss.tolist() == pytest.approx([personal + meme], abs=1e-6)
    assert method.predict(parts, x).softmax(1).tolist() == [pytest.approx([0.25, 0.75])]


def test_no_gradient_goes_through_a_target(make_job, make_data):
    """With α = β = 0 each model is pulled towards the other: p − q by logit, q a constant."""
    method, points = make_job("fml", {"alpha": 0.0, "beta": 0.0}).method(), make_data(1)
    modules = to_modules(method, "a", initial_state(method, "a"))
    method.mutual(modules, points.x, points.y, {}).sum().backward()
    meme = modules["classifier"](modules["extractor"](points.x)).softmax(1)[0]
    personal = modules[OWN[1]](modules[OWN[0]](points.x)).softmax(1)[0]
    assert (meme - personal).abs().max() > 1e-3
    assert torch.allclose(modules["classifier"].bias.grad, meme - personal, atol=1e-6)
    assert torch.allclose(modules[OWN[1]].bias.grad, personal - meme, atol=1e-6)


def test_what_crosses_and_what_stays(make_job, make_data):
    job, points = make_job("fml"), make_data(20)
    method = job.method()
    (meme,) = method.up(0)
    assert meme.tensors == make_job("fedavg").method().model.tensors
    assert method.down(4) == (meme,)
    state = initial_state(method, "a")
    assert not torch.equal(state.parts["classifier"]["weight"], state.parts[OWN[1]]["weight"])
    down = {
        name: tensor + 1 for name, tensor in method.flat(state, "extractor", "classifier").items()
    }
    outcome = local_round(method, job, state, 1, {"meme": down}, points, points, "a")
    assert outcome.contributions["meme"].tensors.keys() == {spec.name for spec in meme.tensors}
    assert outcome.contributions["meme"].weight == 20
    taken = method.deliver(state, {"meme": down}, None)
    assert torch.equal(taken.parts["classifier"]["bias"], state.parts["classifier"]["bias"] + 1)
    check_tensors(taken.parts, {part: state.parts[part] for part in OWN})


@pytest.mark.parametrize("norm", ["none", "batch"])
def test_without_distillation_the_meme_is_fedavg_and_the_other_is_local_training(
    make_job, make_shards, norm
):
    """α = β = 1, bit for bit: the personalised model is what local training makes of its initial
    values.
    """
    job, average, local = (
        make_job(name, options, {"norm": norm}, rounds=2)
        for name, options in (("fml", {"alpha": 1.0, "beta": 1.0}), ("fedavg", {}), ("local", {}))
    )
    start, shards = initial_state(job.method(), "a").parts, make_shards(job)
    own = SiloState({part.removeprefix("personal_"): start[part] for part in OWN})
    begun = Snapshot(0, dict.fromkeys(job.silos, own), frozenset(), {}, MemoryArchive().shelved())
    ours = trained(job, shards).states
    check_states(ours, trained(average, shards).states)
    for silo, alone in trained(local, shards, begun=begun).states.items():
        personal = {part: ours[silo].parts[f"personal_{part}"] for part in alone.parts}
        check_tensors(personal, alone.parts)


def test_personalised_models_may_have_an_architecture_of_their_own(make_job, make_shards):
    job = make_job("fml", {"personal": "digits-cnn-b"}, {"norm": "batch"}, rounds=2)
    result = simulate(job, make_shards(job))
    parts = result.states["a"].parts
    assert "norm1.weight" in parts["extractor"]
    assert list(parts[OWN[0]]) == list(
        build(ModelOptions(name="digits-cnn-b", classes=3), 7)["extractor"].state_dict()
    )
    for name, said in (("lenet6", "no such model"), ("lenet5", "needs at least 16 x 16 pixels")):
        with refused(rf"fml: personal = '{name}'.* {said}.*; choose one"):
            make_job("fml", {"personal": name}).document()
