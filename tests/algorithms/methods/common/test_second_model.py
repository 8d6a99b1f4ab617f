from dataclasses import replace

import torch

from staddle.algorithms.course import SiloState
from staddle.algorithms.methods.common.second_model import (
    begun,
    logits,
    names,
    not_begun,
    taken,
    with_second_models,
)


def test_a_second_model_begins_as_the_first_and_goes_its_own_way(make_job):
    setting = make_job().setting()
    modules = with_second_models(setting, "own", "last")
    assert list(modules) == ["extractor", "classifier", *names("own"), *names("last")]
    x = torch.ones(2, 1, 8, 8)
    assert torch.equal(logits(modules, x), logits(modules, x, "own"))
    with torch.no_grad():
        modules["own_classifier"].bias += 1
    assert torch.allclose(logits(modules, x) + 1, logits(modules, x, "own"))


def test_taken_values_are_copies_with_buffers(make_job):
    modules = with_second_models(make_job(model={"norm": "batch"}).setting(), "own")
    parts = {name: dict(module.state_dict()) for name, module in modules.items()}
    parts["extractor"]["norm1.running_mean"] += 3
    copied = taken(parts, "own")
    assert list(copied) == ["own_extractor", "own_classifier"]
    assert torch.equal(
        copied["own_extractor"]["norm1.running_mean"], parts["extractor"]["norm1.running_mean"]
    )
    assert (
        copied["own_extractor"]["norm1.running_mean"]
        is not parts["extractor"]["norm1.running_mean"]
    )
    assert copied["own_classifier"].keys() == parts["own_classifier"].keys()


def test_a_second_model_begins_where_the_first_is_and_goes_on(make_job):
    state = SiloState(
        {
            name: module.state_dict()
            for name, module in with_second_models(make_job().setting(), "own").items()
        }
    )
    state = replace(state, extra=not_begun())
    moved = replace(state, parts={**state.parts, "classifier": {"bias": torch.ones(3)}})
    first = begun(moved, "own")
    assert first.parts["own_classifier"]["bias"].tolist() == [1, 1, 1]
    again = replace(first, parts={**first.parts, "classifier": {"bias": torch.zeros(3)}})
    assert begun(again, "own").parts["own_classifier"]["bias"].tolist() == [1, 1, 1]
