"""What a round gives on its way to the gate: its taints, and the file that keeps both."""

import pytest
import torch

from staddle.algorithms.leaks.taint import EXACT, PUBLIC, Taint, paid
from staddle.algorithms.training.silo_round import TAINTS
from staddle.errors import LocalError
from staddle.files import tensor_file
from staddle.security.policy.release import Release
from staddle.silo.parts import contributions as bundles
from staddle.silo.parts.contributions import Contributions, tainted

TENSORS = {
    "model": {"w": torch.ones(2, 3), "@weight": torch.tensor(7.0, dtype=torch.float64)},
    "metrics": {"tested": torch.tensor(3)},
}
SAID = {"model": {"w": paid(4, 2), "@weight": paid(2)}, "metrics": {"tested": PUBLIC}}


def release(part="model", name="w", form="plain"):
    return Release(part, "whole_model", name, "float32", (2, 3), form)


def test_what_nothing_is_said_of_is_private_and_names_nothing_that_paid():
    for taints in ({}, {"other": {"w": PUBLIC}}, {"model": {"v": PUBLIC}}):
        found = tainted([release()], Contributions(TENSORS, taints))
        assert [(each.taint, each.ledger_ids) for each in found] == [("exact", ())]
    (found,) = tainted(
        [release()], Contributions(TENSORS, {"model": {"w": Taint(True, frozenset({3}))}})
    )
    assert (found.taint, found.ledger_ids) == ("exact", ())


def test_a_release_has_its_tensors_taint_and_ids_in_order():
    found = tainted(
        [release(), release(name="@weight"), release("metrics", "tested")],
        Contributions(TENSORS, SAID),
    )
    assert [(each.taint, each.ledger_ids) for each in found] == [
        ("noised", (2, 4)),
        ("noised", (2,)),
        ("public", ()),
    ]
    assert [each.form for each in found] == ["plain"] * 3


@pytest.mark.parametrize(
    ("tensor", "weight", "wanted"),
    [
        (paid(4), paid(2), ("noised", (2, 4))),
        (PUBLIC, paid(2), ("noised", (2,))),
        (paid(4), EXACT, ("exact", ())),
        (EXACT, paid(2), ("exact", ())),
        (PUBLIC, PUBLIC, ("public", ())),
    ],
)
def test_what_is_masked_is_masked_with_its_weight_in_it(tensor, weight, wanted):
    bundle = Contributions(TENSORS, {"model": {"w": tensor, "@weight": weight}})
    (found,) = tainted([release(form="masked")], bundle)
    assert (found.taint, found.ledger_ids) == wanted
    for form in ("plain", "padded", "rotated"):
        (alone,) = tainted([release(form=form)], bundle)
        assert alone.taint == tensor.name


def kept(path, bundle):
    path.write_bytes(bundles.to_bytes(bundle))
    return bundles.read(path)


def test_the_file_keeps_tensors_and_taints(tmp_path):
    for taints in ({}, SAID, {"model": {"w": EXACT}}):
        found = kept(tmp_path / "outbox", Contributions(TENSORS, taints))
        assert found.taints == taints
        assert {part: set(own) for part, own in found.tensors.items()} == {
            p: set(own) for p, own in TENSORS.items()
        }
        assert all(
            torch.equal(found.tensors[p][name], value)
            for p in TENSORS
            for name, value in TENSORS[p].items()
        )


def test_the_file_of_a_plain_job_has_the_tensors_and_where_they_began(tmp_path):
    flat = {f"{part}/{name}": value for part, own in TENSORS.items() for name, value in own.items()}
    assert bundles.to_bytes(Contributions(TENSORS, start=3)) == tensor_file.to_bytes(
        flat, {bundles.START: "3", bundles.JOB: ""}
    )
    assert kept(tmp_path / "outbox", Contributions(TENSORS, start=3)).start == 3
    (tmp_path / "older").write_bytes(tensor_file.to_bytes(flat))
    assert bundles.read(tmp_path / "older").start == bundles.UNSAID


def test_a_private_jobs_file_without_taints_is_private(tmp_path):
    found = kept(tmp_path / "outbox", Contributions(TENSORS))
    assert {each.taint for each in tainted([release(), release("metrics", "tested")], found)} == {
        "exact"
    }


@pytest.mark.parametrize(
    "said", ["", "{", "null", "{}", "[[1]]", '[[[1.5],["model/w"]]]', '[[true,["model/w"]]]']
)
def test_taints_that_are_none_are_refused(tmp_path, said):
    path = tmp_path / "outbox"
    path.write_bytes(tensor_file.to_bytes({"model/w": torch.ones(1)}, {TAINTS: said}))
    with pytest.raises(LocalError, match=r"outbox: cannot read it: .*restore the silo's folder"):
        bundles.read(path)
