import pytest
import torch

from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.method import initial_state
from staddle.algorithms.training.silo_round import local_round, state_to_bytes


def test_its_rounds(make_job):
    job = make_job("fedavg-ft", {"tuning_epochs": 7}, rounds=2, participation=0.34, min_cohort=1)
    assert [len(job.cohort(round_)) for round_ in range(3)] == [1, 1, 3]
    assert [job.method().effort(round_).epochs for round_ in range(3)] == [1, 1, 7]


@pytest.mark.parametrize("options", [{}, {"weights": "equal"}])
def test_it_is_fedavg_and_then_local_training_of_its_model(make_job, make_shards, options):
    """Bit for bit: FedAvg's model of 2 rounds, then a third of local training, of as many epochs as
    tuning takes.
    """
    job = make_job("fedavg-ft", {"tuning_epochs": 3, **options}, rounds=2)
    average, shards = make_job("fedavg", options, rounds=2), make_shards(job)
    tuned, shared = simulate(job, shards), simulate(average, shards)
    alone = make_job("local", rounds=3, training={"epochs": 3})
    for silo in job.silos:
        own = local_round(alone.method(), alone, shared.states[silo], 2, {}, *shards[silo], silo)
        assert state_to_bytes(tuned.states[silo]) == state_to_bytes(own.state)
        assert tuned.history[silo][2].delivered.correct == shared.history[silo][2].delivered.correct
        assert tuned.history[silo][2].trained.correct == own.report.trained.correct


def test_silos_that_were_never_drawn_before_tune_the_shared_model_too(make_job, make_shards):
    job = make_job("fedavg-ft", rounds=1, participation=0.34, min_cohort=1)
    (drawn,) = job.cohort(0)
    result = simulate(job, make_shards(job))
    start = initial_state(job.method(), drawn).flat["part/classifier/weight"]
    ends = [state.flat["part/classifier/weight"] for state in result.states.values()]
    assert all(len(reports) == 2 + (silo == drawn) for silo, reports in result.history.items())
    assert not any(torch.equal(start, end) for end in ends)
    assert len({end.sum().item() for end in ends}) == 3
