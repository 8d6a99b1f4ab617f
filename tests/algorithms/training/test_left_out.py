"""Error feedback: what an upload is short of comes with the next one, and with nothing else."""

import pytest
import torch

from staddle.algorithms.course import SiloState
from staddle.algorithms.exchange import parts as p
from staddle.algorithms.exchange.codec import Bfloat16, Decoded, Int8
from staddle.algorithms.leaks.taint import EXACT, paid
from staddle.algorithms.training.left_out import LEFT, apart, encoded, with_left
from staddle.algorithms.training.silo_round import state_from_bytes, state_to_bytes
from staddle.silo.parts.contributions import Contributions
from staddle.silo.parts.tensors import norms

SPECS = (p.TensorSpec("w.weight", "float32", (2, 3)), p.TensorSpec("w.bias", "float32", (2,)))
PART = p.Part("model", p.Kind.WHOLE_MODEL, p.Mix(), SPECS, Int8())
STATE = SiloState({"w": {"weight": torch.ones(2, 3)}}, {"own": torch.zeros(1)})


def laid(value):
    return {"model": {"w.weight": value, "w.bias": torch.ones(2)}}


def read(given):
    return Decoded(lambda _, name: given["model"][name])("a", "w.weight")


def test_the_mean_of_many_uploads_is_the_value():
    """Each is short by up to half a step; all together by no more."""
    value, total, left = (
        torch.tensor([[1.0, 0.303, -0.001], [2.0, 0.5, 1.1]]),
        torch.zeros(2, 3),
        {},
    )
    for _ in range(50):
        given, left = encoded([PART], laid(value), left, {})
        total += read(given)
    assert float((total / 50 - value).abs().max()) < 2 / 127 / 50
    assert float((read(encoded([PART], laid(value), {}, {})[0]) - value).abs().max()) > 2e-3
    assert left.keys() == {f"{LEFT}model/w.weight"}


def test_upload_and_what_is_left_are_the_value_and_what_was_left_before():
    _, left = encoded([PART], laid(torch.randn(2, 3)), {}, {})
    before = dict(left)
    value = torch.randn(2, 3)
    second, after = encoded([PART], laid(value), left, {})
    assert left == before  # a round that fails changes nothing
    key = f"{LEFT}model/w.weight"
    assert torch.equal(value + before[key] - read(second), after[key])


def test_other_codecs_and_parts_leave_nothing_out():
    plain = p.Part("model", p.Kind.WHOLE_MODEL, p.Mix(), SPECS)
    half = p.Part("model", p.Kind.WHOLE_MODEL, p.Mix(), SPECS, Bfloat16())
    for part in (plain, half):
        assert encoded([part], laid(torch.randn(2, 3)), {}, {})[1] == {}
    assert with_left(STATE, {}) is STATE
    assert apart(STATE) == (STATE, {})


def test_what_is_left_lies_in_the_state_apart_from_what_the_method_has():
    left = {f"{LEFT}model/w.weight": torch.randn(2, 3)}
    kept = state_from_bytes(state_to_bytes(with_left(STATE, left)))  # as on the disk
    own, found = apart(kept)
    assert own.extra.keys() == {"own"}
    assert torch.equal(found[f"{LEFT}model/w.weight"], left[f"{LEFT}model/w.weight"])


def test_a_part_that_does_not_go_up_keeps_what_it_left_out():
    left = {f"{LEFT}other/x": torch.ones(1, 1)}
    assert encoded([PART], laid(torch.randn(2, 3)), left, {})[1].keys() == {
        *left,
        f"{LEFT}model/w.weight",
    }


def test_the_gate_measures_and_judges_what_coded_tensors_stand_for():
    """``max_norm`` of a policy, and what a private job's tensors were computed from."""
    given, _ = encoded([PART], laid(torch.randn(2, 3)), {}, {})
    items = p.upload_items([PART])
    values = [given["model"][item.spec.name] for item in items]
    wanted = torch.cat([read(given).reshape(-1), torch.ones(2)]).double().norm()
    assert norms(items, values)["model"] == pytest.approx(float(wanted))
    noised = paid(4)
    made = Contributions(given, {"model": {"w.weight": noised}})
    assert made.taint("model", "w.weight@scale") == made.taint("model", "w.weight") == noised
    assert made.taint("model", "w.bias") == made.taint("model", "@weight") == EXACT
