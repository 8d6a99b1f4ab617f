"""What a coordinator reads of a sum if it knows by what each record was changed at random.

Noise of augmentation that follows from the job is a code for each record: the steps of all silos,
added up, fall apart into those of single records.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.jobs import make_data, make_job

from staddle.algorithms.method import initial_state
from staddle.algorithms.numerics.torch_draws import drawing
from staddle.algorithms.training.loop import batches
from staddle.algorithms.training.silo_round import local_round, stage_stream
from staddle.silo.training.trainer import TrainingDevice

pytestmark = pytest.mark.actor("coordinator")

SHAPE, COUNTS = (1, 48, 48), {"a": 60, "b": 70, "c": 80}


@pytest.fixture
def job():
    noise = {"kind": "GaussianNoise", "sigma": 5.0}
    training = {"lr": 1.0, "epochs": 1, "batch_size": 128, "augment": [noise]}
    return make_job("fedavg", model={"name": "glm", "input": list(SHAPE)}, training=training)


def labels_of(job, blind):
    """The labels that the coordinator computes from the sum of the silos' steps, and the true
    ones.
    """
    method, total, codes, truth = job.method(), 0, [], []
    for number, (silo, count) in enumerate(COUNTS.items()):
        train, test = make_data(count, number, shape=SHAPE), make_data(9, 99, shape=SHAPE)
        at = SimpleNamespace(security=SimpleNamespace(required=blind), privacy=None)
        way = TrainingDevice().of(SimpleNamespace(job=at, train=train, test=test)).way
        state = initial_state(method, silo)
        end = local_round(method, job, state, 0, {}, train, test, silo, way=way).state
        moved = end.parts["classifier"]["weight"] - state.parts["classifier"]["weight"]
        total = total + count * moved.double()
        # All that follows computes from the signed job and the number of records.
        (order,) = batches(count, 128, stage_stream(method, job, silo, 0, 0), wrap=False)
        with drawing(stage_stream(method, job, silo, 0, 0, "draw")):
            augment = job.paced(method.stages(state, None), 0)[0].augment
            codes.append(augment(torch.zeros(count, *SHAPE), train.y)[0])
        truth.append(train.y[torch.from_numpy(order)])
    known = torch.cat(codes).flatten(1).double().numpy()
    # Σ of each record's error [classes] times its pixels and its noise; the noise is known.
    errors = np.linalg.lstsq(known.T, total.numpy().T, rcond=None)[0]
    return errors.argmax(1), torch.cat(truth).numpy()


@pytest.mark.control
def test_labels_are_read_where_the_noise_follows_from_the_job(job):
    """As in a plain job, in which the coordinator reads each silo's step anyway."""
    found, truth = labels_of(job, blind=False)
    assert (found == truth).sum() > 160


def test_a_blind_jobs_noise_is_known_to_nobody(job):
    found, truth = labels_of(job, blind=True)
    # Of 210 labels of three, by chance 140 are right once in 10^24.
    assert (found == truth).sum() < 140
