"""Architectures dealt to the silos, by the methods that let them differ."""

import pytest
import torch
from support.other_tasks import MODELS, TASKS
from support.refusals import refused

from staddle.algorithms.methods.common.heterogeneous import dealt, norm_of, sketched
from staddle.algorithms.models.registry import NETWORKS

METHODS = ("fedclassavg", "fedproto", "fedssa")
DIGITS = ["digits-cnn-a", "digits-cnn-b", "digits-cnn-c"]


def test_each_architecture_has_the_norm_that_its_extractor_gets():
    assert norm_of("digits-cnn-a") == norm_of("lenet5") == "none"
    assert all(norm_of(name) in network.norms for name, network in NETWORKS.items())


def test_without_names_it_is_the_jobs_own_model(make_job):
    setting = make_job("fedssa").method().setting
    own, same = dealt((), setting, "a"), setting.build()
    assert torch.equal(own["extractor"].fc1.weight, same["extractor"].fc1.weight)


def test_a_sketch_has_no_values_and_the_shapes_of_what_is_dealt(make_job):
    setting = make_job("fedssa").method().setting
    for name in DIGITS:
        sketch, made = sketched(name, setting), dealt((name,), setting, "b")
        assert all(tensor.is_meta for tensor in sketch["extractor"].parameters())
        for part, module in made.items():
            assert {k: v.shape for k, v in module.state_dict().items()} == {
                k: v.shape for k, v in sketch[part].state_dict().items()
            }


@pytest.mark.parametrize("method", METHODS)
def test_they_are_dealt_in_job_order(make_job, method):
    made = make_job(method, {"extractors": DIGITS}, silos=["z", "b", "y", "a"]).method()
    first = [made.modules(silo)["extractor"].conv1.weight.shape[0] for silo in made.setting.silos]
    assert first == [8, 12, 16, 8]


@pytest.mark.parametrize("method", METHODS)
def test_what_does_not_fit_is_refused(make_job, method):
    with refused("no such model: digits-cnn-z; known: lenet5"):
        make_job(method, {"extractors": ["digits-cnn-z"]}).document()
    with refused(rf"{method}: extractor 'lenet5' needs at least 16 x 16 pixels.*; choose one"):
        make_job(method, {"extractors": ["digits-cnn-a", "lenet5"]}).document()
    wide = {"name": "fedssa-cnn-1", "input": [3, 32, 32]}
    with refused(rf"{method}: extractor 'lenet5' ends in 84 units, the job's model in 500"):
        make_job(method, {"extractors": ["fedssa-cnn-5", "lenet5"]}, wide).document()


@pytest.mark.parametrize("method", ["local", "lg-fedavg"])
def test_dense_tasks_have_no_second_architectures(make_job, method):
    options = {"extractors": ["digits-cnn-a"]}
    with refused(
        f"{method}: a task with outputs for each position, as segmentation is, has no second"
        " architectures; leave method.options.extractors out"
    ):
        make_job(method, options, MODELS["segmentation"], task=TASKS["segmentation"]).document()


@pytest.mark.parametrize("method", METHODS)
def test_running_statistics_stay_with_their_extractor(make_job, method):
    model = {"norm": "batch", "buffers": "global"}
    with refused(f"method '{method}' uploads no running statistics in any round; leave"):
        make_job(method, model=model).document()
