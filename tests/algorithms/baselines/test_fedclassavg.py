from math import e, log

import pytest
import torch
from support.banded_records import banded_shards
from support.whole_jobs import check_states, check_tensors, trained
from torch import nn

from staddle.algorithms.baselines.fedclassavg import contrasted
from staddle.algorithms.course import Facts
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.exchange.parts import WEIGHT
from staddle.algorithms.method import initial_state

SMALL = {"name": "digits-cnn-c", "input": [1, 8, 8]}
TWO = {"extractors": ["digits-cnn-a", "digits-cnn-c"]}
PRIVACY = {"epsilon": 8.0, "delta": 1e-5, "sample_rate": 0.5, "sigma": "1.0"}
FACTS = Facts("a", 0, 5, torch.tensor([2, 2, 1]))


def test_eq_1_by_hand():
    """Directions →, ↑, ↑, ↑ of classes 0, 1, 0, 1 and τ = 1: each has one other of its class.

    1: its other is at 0, all three are: 1/3. 2 and 4: their other is at 1, of 0, 1 and 1: e / (1 +
    2e). 3: its other is at 0, of 0, 1 and 1: 1 / (1 + 2e). Lengths take no part.
    """
    features = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 0.5], [0.0, 1.0]])
    found = contrasted(features, torch.tensor([0, 1, 0, 1]), 1.0)
    both = log(1 + 2 * e) - 1
    assert found.tolist() == pytest.approx([log(3), both, log(1 + 2 * e), both], abs=1e-5)


def test_eq_1_takes_the_mean_over_all_of_the_class():
    """→, →, ↑ of one class, τ = 1/2. 1: the others are at 2 and 0: log(e² + 1) less (2 + 0)/2.

    3: both at 0: log 2.
    """
    features = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    found = contrasted(features, torch.zeros(3), 0.5)
    assert found.tolist() == pytest.approx([log(e**2 + 1) - 1] * 2 + [log(2)], abs=1e-5)


@pytest.mark.parametrize(("view", "first"), [("mirrored", 1.620624), ("same", 0.913169)])
def test_views_and_eq_4_by_hand(make_job, view, first):
    """Records (1, 0) and (1, 1) of classes 0 and 1, mirrored (0, 1) and (1, 1), τ = 1, κ = 2.

    Directions of the two
    records are at cos 45° = 0.7071 in any view.

    Record 1: its other view is at 0, or as it is at 1: log(2 e^0.7071 + 1), or log(2 e^0.7071 + e)
    - 1. Record 2: its other view is at 1: log(2 e^0.7071 + e) - 1 = 0.913169. ℓ_CE of the logits
    (1, 0) and (1, 1): log(1 + e^-1) = 0.313262 and log 2.
    """
    method = make_job("fedclassavg", {"contrast": 2, "temperature": 1, "view": view}).method()
    parts = {"extractor": nn.Flatten(), "classifier": nn.Identity()}
    x = torch.tensor([[1.0, 0.0], [1.0, 1.0]])[:, None, None]
    loss = method.objective(parts, x, torch.tensor([0, 1]), {})
    assert loss.tolist() == pytest.approx([0.313262 + 2 * first, log(2) + 2 * 0.913169], abs=1e-5)


def test_eq_3_by_hand(make_job):
    """Mean squares (1 + 9) / 2 of the weights and 4 of the biases: ρ/2 · 9 with ρ = 0.1."""
    method = make_job("fedclassavg").method()
    own = {"weight": torch.tensor([[1.0, 4.0]]), "bias": torch.tensor([0.0])}
    common = {"weight": torch.tensor([[2.0, 1.0]]), "bias": torch.tensor([2.0])}
    assert method.proximal({"extractor": {}, "classifier": own}, common).item() == pytest.approx(
        0.45
    )


def test_the_delivered_classifier_replaces_the_own_and_holds_it(make_job):
    method = make_job("fedclassavg").method()
    start = initial_state(method, "a")
    down = {"classifier": {s.name: torch.full(s.shape, 2.0) for s in method.down(1)[0].tensors}}
    state = method.deliver(start, down, FACTS)
    assert state.parts["classifier"]["weight"].unique().tolist() == [2.0]
    assert state.parts["extractor"] is start.parts["extractor"]
    (stage,) = method.stages(state, FACTS)
    check_tensors(stage.context, state.parts["classifier"])
    assert stage.coupled


@pytest.mark.parametrize("options", [{}, TWO])
def test_the_classifier_alone_crosses(make_job, options):
    """10 x 64 weights and 10 biases."""
    job = make_job("fedclassavg", options, {**SMALL, "classes": 10})
    for part in (*job.method().up(0), *job.method().down(1)):
        expected = [("classifier.weight", (10, 64)), ("classifier.bias", (10,))]
        assert [(s.name, s.shape) for s in part.tensors] == expected
    assert sum(spec.elements for spec in job.method().up(0)[0].wire if spec.name != WEIGHT) == 650


def test_without_contrast_and_rho_it_is_lg_fedavg_to_the_bit(make_job):
    plain = {"contrast": 0, "rho": 0}
    jobs = [
        make_job(*given, SMALL, rounds=2) for given in (("fedclassavg", plain), ("lg-fedavg", {}))
    ]
    mine, theirs = (simulate(job, banded_shards(job.silos)) for job in jobs)
    assert mine.history == theirs.history
    check_states(mine.states, theirs.states)


def test_rho_holds_the_classifier_to_the_delivered_one(make_job):
    """A very large one, with a step that stays stable, hardly lets it move."""
    moved = []
    for rho in (0, 1000):
        job = make_job("fedclassavg", {"contrast": 0, "rho": rho}, SMALL)
        before = initial_state(job.method(), "a").parts["classifier"]["weight"]
        after = trained(job, banded_shards(job.silos), 1).states["a"].parts["classifier"]["weight"]
        moved.append((after - before).norm().item())
    assert moved[1] < 0.7 * moved[0]


def test_classifiers_are_averaged_by_samples(make_job):
    job = make_job("fedclassavg", {}, SMALL, rounds=1)
    method, states = job.method(), trained(job, banded_shards(job.silos)).states
    for silo, n in (("a", 8), ("b", 24), ("c", 24)):
        facts = Facts(silo, 0, n, torch.tensor([n, 0, 0]))
        contribution = method.contribute(states[silo], facts)["classifier"]
        assert contribution.weight == n
        own = states[silo].parts["classifier"]
        check_tensors(contribution.tensors, {f"classifier.{name}": own[name] for name in own})


def test_it_learns_with_models_that_differ(make_job):
    job = make_job("fedclassavg", TWO, SMALL, {"epochs": 2}, rounds=3)
    result = simulate(job, banded_shards(job.silos, mostly=0.6))
    assert min(result.scores("trained").values()) > 0.8


def test_contrast_parts_the_classes(make_job):
    """Cosine of the mean features of classes 0 and 1, after two rounds."""
    likeness = []
    for contrast in (0, 1):
        options = {"contrast": contrast, "temperature": 0.5}
        job = make_job("fedclassavg", options, SMALL, {"epochs": 2}, rounds=2)
        data = banded_shards(job.silos)["a"][0]
        extractor = job.method().modules("a")["extractor"]
        extractor.load_state_dict(
            simulate(job, banded_shards(job.silos)).states["a"].parts["extractor"]
        )
        means = [extractor(data.x)[data.y == label].mean(0) for label in (0, 1)]
        likeness.append(torch.cosine_similarity(*means, dim=0).item())
    assert likeness[1] < likeness[0] - 0.3


def test_a_private_job_takes_it_without_contrast_alone(make_job):
    """With contrast it is refused: ``test_every_method``."""
    assert make_job("fedclassavg", {"contrast": 0}, privacy=PRIVACY).document()
