"""FedSSA, rounds of the whole method: Algorithm 1 and Eq. 3 to 6 of its paper in float64.

The ablations of its Tables 4 and 5 and what its authors' code does otherwise are forms of it.
"""

from math import cos, pi

import pytest
import torch
from support import whole_methods as whole
from torch.nn.functional import conv2d, max_pool2d

MU_0, T_STABLE = 0.5, 4
PAPER = {"m1": True, "m2": "fuse", "stale_inclusive": False, "clip": None}
CNNS = {"digits-cnn-a": [8, 16], "digits-cnn-b": [12, 24], "digits-cnn-c": [16]}  # and filters
CODE = {"stale_inclusive": True, "clip": 2.0, "extractors": list(CNNS)}


def loss(values, x, y):
    """Of a model of any architecture: its layers in turn, each with a ReLU, then the header."""
    names = [name for name in whole.of_parts(values, "extractor") if name.endswith(".weight")]
    for name in names:
        weight, bias = values[name], values[name.replace("weight", "bias")]
        if weight.ndim == 4:
            x = max_pool2d(conv2d(x, weight, bias, padding=1).clamp(min=0), 2)
        else:
            x = (x.flatten(1) @ weight.T + bias).clamp(min=0)
    logits = x.flatten(1) @ values["classifier.weight"].T + values["classifier.bias"]
    return whole.cross_entropies(logits, y).mean()


def rounds_by_hand(job, shards, form, training):
    """All silos' models and the global header, weights [C, d] and biases [C], after each round."""
    values, parts = whole.begun(job), ["extractor", "classifier"]
    seen = {silo: torch.bincount(data.y, minlength=4) > 0 for silo, (data, _) in shards.items()}
    # a reading: at first the global header is the common initial one
    header = whole.of_parts(values["a"], "classifier")
    gave, averaged = [], torch.zeros(whole.CLASSES, dtype=bool)
    for t in range(job.rounds):
        mu = MU_0 * cos(t * pi / (2 * T_STABLE)) if t < T_STABLE else 0.0
        mu = mu if form["m2"] == "fuse" else 0.0
        drawn = job.cohort(t)
        for k in drawn:
            # case A of Table 5; a reading: a row that nobody gave yet replaces none
            rows_of = seen[k] | averaged if form["m2"] == "all" else seen[k]
            fused = {}
            for name, rows in header.items():
                fused[name] = values[k][name].clone()
                fused[name][rows_of] = (rows + mu * values[k][name])[rows_of]  # Eq. 4
            start = {**values[k], **fused}  # Eq. 5
            batches, lr = whole.steps(job, shards, k, t), job.training.lr
            clip = form["clip"]
            values[k] = whole.descended(start, loss, batches, parts, lr, *training, clip)  # Eq. 6
        gave += [k for k in drawn if k not in gave]
        header = {name: rows.clone() for name, rows in header.items()}
        for s in range(whole.CLASSES):
            # the code's average is over the last rows of all that ever gave; case B of Table 4
            # is over all, whatever they hold
            silos = gave if form["stale_inclusive"] else drawn
            holders = [k for k in silos if seen[k][s] or not form["m1"]]
            averaged[s] |= bool(holders)
            for name in header if holders else ():
                header[name][s] = sum(values[k][name][s] for k in holders) / len(holders)  # Eq. 3
        yield values, header


def check(population, options, model=whole.MLP, momentum=0.0, decay=0.0):
    """Six rounds, of which each draws three of the six silos."""
    # without Eq. 4 there is no μ
    mu = {} if "m2" in options else {"mu_0": MU_0, "t_stable": T_STABLE}
    training = {"momentum": momentum, "weight_decay": decay}
    job = whole.job_of("fedssa", {**mu, **options}, model, **training)
    shards = whole.shards_of(population)
    by_hand = rounds_by_hand(job, shards, {**PAPER, **options}, training.values())
    for simulation, (values, header) in zip(whole.simulated(job, shards), by_hand, strict=True):
        for silo, state in simulation.states.items():
            whole.check_same(state, values[silo])
        rows = torch.cat([header["classifier.weight"], header["classifier.bias"][:, None]], 1)
        assert torch.allclose(simulation.coordinator["rows"], rows, atol=1e-8, rtol=0)
    return job


@pytest.mark.parametrize("population", whole.POPULATIONS.values(), ids=whole.POPULATIONS)
def test_six_silos_are_algorithm_1(population):
    check(population, {})


@pytest.mark.parametrize("options", [{"m1": False}, {"m2": "seen"}, {"m2": "all"}], ids=str)
def test_the_ablations_are_those_of_tables_4_and_5(options):
    """On silos of one class each, of which some are not there in the first rounds."""
    check(whole.ONE_CLASS, options)


@pytest.mark.parametrize("options", [{}, {"m1": False}, {"m2": "seen"}, {"m2": "all"}], ids=str)
def test_silos_of_three_architectures_are_the_authors_code(options):
    """Gradients are cut, with momentum, and who is away stays in the average."""
    model = {"name": "digits-cnn-a", "input": [1, 8, 8], "classes": whole.CLASSES}
    job = check(whole.UNEVEN, {**CODE, **options}, model, momentum=0.9, decay=5e-5)
    convolutions = [[v for v in own.values() if v.ndim == 4] for own in whole.begun(job).values()]
    assert [[len(filters) for filters in own] for own in convolutions] == 2 * list(CNNS.values())
