"""States that are made, held, or read when somebody asks for them."""

import pytest
import torch

from staddle.algorithms.course import SiloState
from staddle.algorithms.engines.states import Beginnings, States


def state(value, size=1):
    return SiloState({"model": {"w": torch.full((size,), float(value))}})


def test_a_state_is_the_one_held_or_read_or_that_of_the_beginning():
    held, calls = state(1), []
    states = States(("c", "a", "b"), lambda silo: calls.append(silo) or state(0), {"a": held})
    assert (list(states), len(states), states["a"]) == (["c", "a", "b"], 3, held)
    assert states["b"].parts["model"]["w"].item() == 0
    assert calls == ["b"]
    read = states.replaced({"c": lambda: state(3)})
    assert read["c"].parts["model"]["w"].item() == 3
    assert read["c"] is not read["c"]  # read again: it is not kept
    assert (list(read.held), list(states.held)) == (["c", "a"], ["a"])
    assert calls == ["b"]
    with pytest.raises(KeyError):
        states["stranger"]


def test_beginnings_are_kept_where_there_is_room_for_all():
    """Of 40 bytes each."""
    kept, made = (
        Beginnings(lambda silo: state(len(silo), size=10), silos=3, most=most)
        for most in (120, 119)
    )
    for silo in ("a", "bb", "ccc"):
        assert kept(silo) is kept(silo)
        assert made(silo) is not made(silo)
        assert torch.equal(made(silo).parts["model"]["w"], kept(silo).parts["model"]["w"])
