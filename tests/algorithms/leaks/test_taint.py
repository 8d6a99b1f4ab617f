"""Taints follow tensors through torch; what records show in cannot be taken out of it unseen."""

import contextlib
import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.refusals import refused
from torch import nn

from staddle.algorithms.leaks.taint import (
    EXACT,
    PUBLIC,
    Taint,
    Tracker,
    paid,
    taints_from_text,
    taints_to_text,
    worst,
)


def tracked(compute, private=None, dp=None, public=None):
    """What a computation on three tensors gives, private, dp and public, and the tracker."""
    tracker = Tracker()
    entered = (
        tracker.enter(torch.arange(6.0) if private is None else private, EXACT),
        tracker.enter(torch.arange(6.0) if dp is None else dp, paid(3)),
        tracker.enter(torch.ones(6) if public is None else public, PUBLIC),
    )
    with tracker:
        made = compute(SimpleNamespace(p=entered[0], d=entered[1], q=entered[2]))
    return made, tracker


def test_worst_of_several():
    assert worst([]) == PUBLIC
    assert worst([PUBLIC, paid(1), paid(2, 5)]) == paid(1, 2, 5)
    assert worst([paid(1), EXACT]) == Taint(True, frozenset({1}))
    expected = ["public", "noised", "exact"]
    assert [taint.name for taint in (PUBLIC, paid(0), Taint(True, frozenset({1})))] == expected


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        (lambda t: t.q + 1, PUBLIC),
        (lambda t: torch.zeros(len(t.p)), PUBLIC),
        (lambda t: t.d * t.q, paid(3)),
        (lambda t: torch.stack([t.q, t.d]).sum(), paid(3)),
        (lambda t: torch.cat((t.q, t.p, t.d)), worst([EXACT, paid(3)])),
        (lambda t: torch.where(t.p > 2, t.d, t.q)[:1], worst([EXACT, paid(3)])),
        (lambda t: torch.max(t.p.reshape(2, 3), dim=1).indices, EXACT),
        (lambda t: (nn.functional.normalize(t.d, dim=0).double().numpy(force=False) is None or
            t.d), paid(3)),
        (lambda t: copy.deepcopy(t.d), paid(3)),
        (lambda t: nn.Parameter(t.p), EXACT),
        (lambda t: list(t.p.reshape(2, 3))[1], EXACT),
        (lambda t: torch.func.functional_call(nn.Linear(6, 2), {}, (t.d,)), paid(3)),
    ],
)  # fmt: skip
def test_what_is_computed_has_the_worst_of_what_went_in(compute, expected):
    made, tracker = tracked(compute)
    assert tracker.of(made) == expected


def by_index(target, source):
    target[1:] = source[1:]


def by_view(target, source):
    target[2:].view(2, 2)[0].copy_(source[:2])


def by_out(target, source):
    torch.add(source, 1, out=target)


def by_slot(target, source):
    target.data = source * 2


WRITES = [by_index, by_view, by_out, by_slot]
WRITES += [torch.Tensor.add_, torch.Tensor.copy_, torch.Tensor.__iadd__]


@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_to_takes_over_the_taint(write):
    """Whether it was tracked, or is new, or is only seen by another view."""
    for target_of in (lambda q: q, torch.zeros_like, torch.clone):

        def compute(t, target_of=target_of):
            target = target_of(t.q)
            other = target[:]
            write(target, t.p)
            return target, other + 0

        (target, other), tracker = tracked(compute)
        assert tracker.of(target).exact
        # which leaves the other view its old values
        assert tracker.of(other).exact or write is by_slot


def test_a_module_takes_over_what_is_loaded_into_it():
    def compute(t):
        layer = nn.Linear(6, 1)
        layer.load_state_dict({"weight": t.p[None], "bias": t.q[:1]})
        return layer.state_dict()

    made, tracker = tracked(compute)
    assert (tracker.of(made["weight"]), tracker.of(made["bias"])) == (EXACT, PUBLIC)


READS = {
    "item": lambda t: t[0].item(),
    "float": lambda t: float(t[0]),
    "int": lambda t: int(t[0]),
    "bool": lambda t: bool((t > 9).any()),
    "branch": lambda t: 1 if (t > 9).any() else 0,
    "index": lambda t: [1, 2][t.long()[0]],
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "array": np.asarray,
    "text": lambda t: f"{t[0]}",
    "equal": lambda t: torch.equal(t, t),
    "allclose": lambda t: torch.allclose(t, t),
    "in": lambda t: 3.0 in t,
    "storage": lambda t: t.untyped_storage(),
    "address": lambda t: t.data_ptr(),
    "count": lambda t: len(torch.nonzero(t)),
    "mask": lambda t: len(t[t > 2]),
    "masked_select": lambda t: t.masked_select(t > 2).shape,
    "unique": lambda t: t.unique().shape,
    "bincount": lambda t: t.long().bincount().shape,
    "where": lambda t: torch.where(t > 2)[0].shape,
    "slice": lambda t: torch.ones(9)[: t.long()[1]].shape,
    "zeros": lambda t: torch.zeros(t.long()[1]).shape,
    "expand": lambda t: torch.ones(1).expand(t.long()[2]).shape,
    "repeat": lambda t: torch.ones(6).repeat_interleave(t.long()).shape,
    "sorted": sorted,
    "apply": lambda t: torch.clone(t).apply_(lambda value: value),
    "hook": lambda t: torch.clone(t).requires_grad_().register_hook(print),
    "dlpack": np.from_dlpack,
    "from dlpack": torch.from_dlpack,
    "backward": lambda t: (torch.ones(6, requires_grad=True) * t).sum().backward(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_value_in_which_records_show_is_not_taken_out(read):
    with refused("takes a value out of a tensor in which records show unprotected"):
        tracked(lambda t: read(t.p))


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_method_that_catches_the_refusal_is_refused_all_the_same(read):
    def compute(t):
        with contextlib.suppress(Exception):
            read(t.p)
        return torch.ones(2)

    with refused("takes a value out of a tensor in which records show unprotected"):
        tracked(compute)


def fails(t):
    """One thing where a matrix is positive definite, another where it is not."""
    try:
        torch.linalg.cholesky(t[:4].reshape(2, 2))
    except RuntimeError:
        return torch.ones(1)
    return torch.zeros(1)


def test_whether_a_call_fails_is_a_value():
    with refused(r"records show unprotected \(linalg_cholesky, which fails\)"):
        tracked(lambda t: fails(t.p))
    made, tracker = tracked(lambda t: fails(t.d))
    assert tracker.of(made) == paid(3)
    made, tracker = tracked(lambda t: fails(t.q))
    assert tracker.of(made) == PUBLIC


def test_what_fails_by_mistake_says_what_it_was():
    with pytest.raises(RuntimeError, match="shape"):
        tracked(lambda t: t.p.reshape(5))


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_what_comes_of_a_value_that_was_paid_for_has_its_taint(read):
    def compute(t):
        read(t.d)
        return torch.ones(2)

    made, tracker = tracked(compute)
    assert tracker.of(made) == paid(3)
    made, tracker = tracked(lambda t: (read(t.q), torch.ones(2))[1])
    assert tracker.of(made) == PUBLIC


def test_the_form_of_a_tensor_is_no_value():
    def compute(t):
        assert t.p.shape == (6,)
        assert len(t.p) == 6
        assert t.p.dim() == 1
        assert t.p.numel() == 6
        assert t.p.dtype == torch.float32
        return torch.zeros(t.p.shape, dtype=t.p.dtype)

    made, tracker = tracked(compute)
    assert tracker.of(made) == PUBLIC


def test_two_tensors_in_one_memory_keep_their_own_taints():
    whole = torch.arange(12.0)
    (one, other), tracker = tracked(lambda t: (t.p, t.d), private=whole[:6], dp=whole[6:])
    assert (tracker.of(one), tracker.of(other)) == (EXACT, paid(3))
    assert torch.equal(torch.cat([one, other]), whole)


def test_memory_that_is_used_again_has_no_taint_of_before():
    def compute(t):
        made = t.q
        for _ in range(200):
            assert (t.p * 2).shape == (6,)  # gone at once
            made = made * 1.5
        return made

    made, tracker = tracked(compute)
    assert tracker.of(made) == PUBLIC


def test_what_has_no_memory_of_its_own_is_refused():
    for compute in (lambda t: torch.vmap(lambda one: one * 2)(t.p), lambda t: t.p.to_sparse()):
        with refused("cannot be followed"):
            tracked(compute)


def test_taints_in_a_file():
    taints = {"a": PUBLIC, "b": paid(7, 3), "c": EXACT, "d": PUBLIC}
    taints["e"] = Taint(True, frozenset({1}))
    text = taints_to_text(taints)
    assert text == '[[[], ["a", "d"]], [[3, 7], ["b"]], [null, ["c", "e"]]]'
    assert taints_from_text(text) == {**taints, "e": EXACT}
    shapes = ['[[[], "a"]]', '[[["1"], ["a"]]]', '[[true, ["a"]]]', "[[[]]]", '[[[true], ["a"]]]']
    for wrong in ("", "{}}", "[1]", *shapes):
        with pytest.raises(ValueError):  # noqa: PT011 - JSON's own, or ours
            taints_from_text(wrong)
