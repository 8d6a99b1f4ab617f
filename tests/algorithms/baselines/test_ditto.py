import pytest
import torch
from support.two_row_model import LINEAR, ONE, line, played, same_model, values_of
from support.whole_jobs import check_tensors

from staddle.algorithms.course import Effort, Facts, SiloState
from staddle.algorithms.method import initial_state
from staddle.algorithms.methods.common.second_model import BEGUN, MODEL
from staddle.algorithms.training.loop import PLAIN

OWN = ("own_extractor", "own_classifier")
FACTS = Facts("a", 1, 1, torch.tensor([1, 0, 0]))


def test_a_step_of_v_by_hand(make_job):
    """Eq. 2 with lr 1 and λ = 1/2, from v = (0, 0) with w^t = (2, -2): the gradient of the record
    is (-1/2, 1/2), that of the pull 1/2 (0 - 2, 0 + 2) = (-1, 1), so v becomes (3/2, -3/2). Without
    the pull it is (1/2, -1/2).
    """
    for lam, expected in ((0.5, [1.5, -1.5]), (0, [0.5, -0.5])):
        method = make_job("ditto", {"lam": lam}, training={"lr": 1.0}).method()
        own, shared = line(0.0, 0.0, name="own_"), line(2.0, -2.0)
        state = SiloState(values_of({**own, **shared}), method.initial_extra("a"))
        _, stage = method.stages(state, FACTS)
        assert (stage.trains, stage.reads) == (OWN, ())
        PLAIN.begin(own, stage)(*ONE)
        assert own["own_classifier"].weight.flatten().tolist() == pytest.approx(expected)


def test_v_is_pulled_to_w_as_it_came_down(make_job):
    method = make_job("ditto").method()
    state = initial_state(method, "a")
    came = {name: value + 1 for name, value in method.flat(state, *MODEL).items()}
    _, stage = method.stages(method.deliver(state, {"model": came}, FACTS), FACTS)
    assert len(stage.context) == len(came)
    check_tensors(stage.context, {f"own_{name}": value for name, value in came.items()})


@pytest.mark.parametrize("buffers", ["local", "global"])
def test_w_is_that_of_fedavg_bit_for_bit_whatever_lambda_is(make_job, make_shards, buffers):
    model = {"norm": "batch", "buffers": buffers}
    average, *jobs = [
        make_job("fedavg", {}, model, rounds=2),
        *(make_job("ditto", {"lam": lam}, model, rounds=2) for lam in (0, 3.0)),
    ]
    trained, delivered = played(average, make_shards(average))
    for job in jobs:
        own, last = played(job, make_shards(job))
        assert all(same_model(own[silo], trained[silo]) for silo in job.silos)
        assert all(same_model(last[silo], delivered[silo]) for silo in job.silos)


def test_without_a_pull_v_is_local_training(make_job, make_shards):
    """With all records in each batch, so that it does not matter how they are shuffled."""
    whole = {"batch_size": 100, "epochs": 2, "momentum": 0.5}
    options = {"lam": 0, "own_epochs": 2}
    job, alone = make_job("ditto", options, LINEAR, whole), make_job("local", {}, LINEAR, whole)
    (own, _), (local, _) = played(job, make_shards(job)), played(alone, make_shards(alone))
    for silo in job.silos:
        found = {part: own[silo].parts[f"own_{part}"] for part in MODEL}
        check_tensors(found, local[silo].parts, 1e-5)


def test_v_begins_at_the_w_that_first_comes(make_job, make_shards):
    job = make_job("ditto", {}, LINEAR, silos=list("abcd"), participation=0.5, rounds=1)
    trained, delivered = played(job, make_shards(job))
    (away, _) = [silo for silo in job.silos if silo not in job.cohort(0)]
    assert not trained[away].extra[BEGUN]
    parts = delivered[away].parts  # who never trained predicts by w
    check_tensors({part: parts[f"own_{part}"] for part in MODEL}, {p: parts[p] for p in MODEL})
    (present, _) = job.cohort(0)  # what comes down changes no v that has begun
    own = "own_classifier"
    check_tensors(delivered[present].parts[own], trained[present].parts[own])


def test_a_silo_predicts_by_v(make_job):
    parts = {**line(1.0, 0.0, 0.0), **line(0.0, 0.0, 1.0, name="own_")}
    assert make_job("ditto").method().predict(parts, ONE[0]).tolist() == [[0, 0, 1]]


@pytest.mark.parametrize(
    ("epochs", "options", "expected"),
    [
        (5, {}, [3, 2]),
        (1, {}, [1, 1]),
        (5, {"own_epochs": 1}, [4, 1]),
        (5, {"model_epochs": 1}, [1, 4]),
        (5, {"model_epochs": 5, "own_epochs": 5}, [5, 5]),
    ],
)
def test_the_epochs_of_both_models_add_up_to_the_jobs(make_job, epochs, options, expected):
    method = make_job("ditto", options, training={"epochs": epochs}).method()
    facts = Facts("a", 0, 3, torch.tensor([1, 1, 1]))
    stages = method.stages(initial_state(method, "a"), facts)
    assert [stage.epochs for stage in stages] == expected
    assert method.effort(0) == Effort(epochs=sum(expected))
