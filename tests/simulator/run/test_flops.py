"""FLOPs of local training, worked out by hand for linear layers."""

import pytest
import torch
from support.simulated_jobs import make_job, make_records

from staddle.algorithms.engines.engine import Serial
from staddle.algorithms.engines.simulation import Simulation
from staddle.simulator.run.flops import FlopMeter

RECORDS = make_records(validation=False)
CPU = torch.device("cpu")
CLASSES, INPUT = 3, 64  # ppfl-mlp on [1, 8, 8]


def counted(job):
    """By round, the records that went through the model and the FLOPs, of all silos."""
    simulation = Simulation(job, Serial(job, RECORDS))
    meter, found = FlopMeter(job, RECORDS, CPU), []
    while simulation.round < job.length:
        before, states = simulation.snapshot(), simulation.states
        reports = simulation.step().reports
        flops = meter.count(before, states, reports)
        records = {silo: report.work.records for silo, report in reports.items()}
        found.append((records, flops))
    return found, simulation


def layers():
    """Multiplications of a record in each linear layer, from below."""
    sketch = make_job().method().setting.sketch()
    shapes = [p.shape for m in sketch.values() for p in m.parameters() if p.ndim == 2]
    return [a * b for a, b in shapes]


def test_a_training_step_is_forward_and_both_gradients_of_each_layer():
    """A multiplication and an addition are two; the first layer passes no gradient down."""
    first, *others = layers()
    each = 2 * (2 * first + 3 * sum(others))
    rounds, _ = counted(make_job(training={"epochs": 2}))
    for records, flops in rounds:
        assert flops == {silo: each * count for silo, count in records.items()}
        assert all(flops.values())


def test_what_is_frozen_costs_no_gradient_and_a_survey_is_a_pass_forward():
    whole, _ = counted(make_job("fedavg", training={"epochs": 2}))
    halves, _ = counted(make_job("fedrep", training={"epochs": 2}))
    (_, most), (_, least) = whole[0], halves[0]
    assert all(least[silo] < most[silo] for silo in most)
    surveyed, _ = counted(make_job("fedas", training={"epochs": 2}))
    records, flops = surveyed[0]
    assert all(records[silo] > whole[0][0][silo] for silo in records)
    assert all(flops[silo] > most[silo] for silo in flops)


@pytest.mark.parametrize("method", ["fedavg", "fedala", "ppfl"])
def test_counting_changes_nothing_that_is_trained(method):
    job = make_job(method)
    _, watched = counted(job)
    plain = Simulation(job, Serial(job, RECORDS))
    while plain.round < job.length:
        plain.step()
    for silo, state in plain.states.items():
        other = watched.states[silo].flat
        assert all(torch.equal(value, other[name]) for name, value in state.flat.items())


def test_training_that_diverges_on_few_records_is_not_counted():
    """The FLOPs are then unknown, and the run goes on."""
    job = make_job(rounds=1)
    simulation = Simulation(job, Serial(job, RECORDS))
    before, states = simulation.snapshot(), simulation.states
    reports = simulation.step().reports
    wild = make_job(rounds=1, training={"lr": 1e38, "epochs": 9})
    assert set(FlopMeter(wild, RECORDS, CPU).count(before, states, reports).values()) == {None}
