import math
import re
from dataclasses import replace

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from staddle.algorithms.exchange.parts import (
    Item,
    Kind,
    Part,
    Sum,
    TensorSpec,
    upload_items,
    value_fault,
)
from staddle.algorithms.job.job import DERIVED, Job, JobFile
from staddle.algorithms.tasks.class_counting import ClassCounting
from staddle.algorithms.tasks.regression import Regression
from staddle.algorithms.tasks.value_counting import UNIT, ValueCounting
from staddle.errors import LocalError, RefusedError
from staddle.proto import stream
from staddle.proto import tensor_pb2 as pb
from staddle.proto.stream import Digester, Inbound, chunks
from staddle.security.blind.plan import JobPlan
from staddle.security.blind.sum import Bounds, group
from staddle.security.policy.release import Release
from staddle.silo.parts.declared import RecordCount
from staddle.silo.parts.releases import (
    bytes_by_kind,
    masked_releases,
    padded_releases,
    readers_of,
    readers_of_message,
    release_of,
    rotated_releases,
    upload_releases,
)
from staddle.silo.parts.tensors import Buffer, exactly, miscounted, norms, unpack

ITEMS = (
    Item("model", Kind.WHOLE_MODEL, TensorSpec("w", "float32", (2, 2))),
    Item("metrics", Kind.METRIC, TensorSpec("n", "int64", ())),
    Item("model", Kind.WHOLE_MODEL, TensorSpec("@weight", "float64", ())),
    Item("model", Kind.WHOLE_MODEL, TensorSpec("none", "float32", (0,))),
)


def payload(**changes):
    """What these items give; ``changes`` replaces tensors by name, None leaves one out."""
    weight = torch.tensor(2.0, dtype=torch.float64)
    model = {"@weight": weight, "none": torch.empty(0), "w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
    model = {name: value for name, value in {**model, **changes}.items() if value is not None}
    return {"metrics": {"n": torch.tensor(7)}, "model": model}


@pytest.mark.parametrize(
    ("offset", "model", "metric"),
    [(0, 24, 8), (10, 14, 8), (16, 8, 8), (20, 8, 4), (24, 8, 0), (30, 2, 0), (32, 0, 0)],
)
def test_bytes_behind_an_offset_are_told_by_kind(offset, model, metric):
    found = bytes_by_kind([release_of(item) for item in ITEMS], offset)
    assert found == {"whole_model": model, "metric": metric}


# exactly.
def test_values_are_copies_in_wire_order_without_gradients():
    given = payload()
    assert [v.tolist() for v in exactly(ITEMS, given)] == [[[1.0, 2.0], [3.0, 4.0]], 7, 2.0, []]
    assert exactly((), {}) == []
    first, *_ = exactly(ITEMS, payload(w=torch.ones(2, 2, requires_grad=True)))
    assert not first.requires_grad
    given = payload(w=torch.arange(8.0)[::2].reshape(2, 2))
    first, *_ = exactly(ITEMS, given)
    given["model"]["w"].fill_(9)
    assert first.tolist() == [[0.0, 2.0], [4.0, 6.0]]
    assert first.untyped_storage().nbytes() == 16


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"extra": torch.zeros(1)}, "model/extra is not in the job's schema"),
        ({"": torch.zeros(1)}, "model/ is not in"),
        ({"w": None}, "model/w is missing"),
        ({"none": None}, "model/none is missing"),
        ({"@weight": None}, "model/@weight is missing"),
        ({"w": torch.zeros(4)},
            r"model/w is float32 \[4\], the job's schema says float32 \[2, 2\]"),
        ({"w": torch.zeros(2, 2, 1)}, r"float32 \[2, 2, 1\]"),
        ({"w": torch.zeros(2, 2, dtype=torch.float64)}, r"model/w is float64 \[2, 2\]"),
        ({"w": torch.zeros(2, 2, dtype=torch.int32)}, "model/w is int32"),
        ({"w": torch.zeros(2, 2, dtype=torch.bfloat16)}, "model/w is bfloat16"),
        ({"@weight": torch.zeros(1, dtype=torch.float64)}, r"@weight is float64 \[1\]"),
        ({"none": torch.empty(0, 1)}, r"model/none is float32 \[0, 1\]"),
    ],
)  # fmt: skip
def test_what_is_not_the_schema_is_refused_and_named(changes, named):
    with pytest.raises(LocalError, match=named):
        exactly(ITEMS, payload(**changes))


def test_a_part_too_many_or_too_few_or_with_anothers_tensor_is_refused():
    with pytest.raises(LocalError, match="secret/w is not in"):
        exactly(ITEMS, {**payload(), "secret": {"w": torch.zeros(1)}})
    with pytest.raises(LocalError, match="metrics/n is missing"):
        exactly(ITEMS, {"model": payload()["model"]})
    with pytest.raises(LocalError, match="metrics/n is not in"):
        exactly((), payload())
    given = payload(w=None)
    with pytest.raises(LocalError, match="metrics/w is not in"):
        exactly(ITEMS, {**given, "metrics": {**given["metrics"], "w": torch.zeros(2, 2)}})


# Counts.
TESTED = RecordCount(9, 4)
COUNTING = ClassCounting(2, confusion=True, bins=3)
RIGHT = {
    ("metrics", "correct.delivered"): 2,
    ("metrics", "correct.trained"): 3,
    ("metrics", "tested"): 4,
    ("confusion", "delivered"): [[1, 1], [1, 1]],
    ("confusion", "trained"): [[2, 0], [1, 1]],
    ("scores", "delivered"): [[[2, 0, 0], [0, 0, 2]]],
    ("scores", "trained"): [[[0, 2, 0], [1, 1, 0]]],
}


def faults(changes, records):
    parts = replace(COUNTING, noised=records is None).parts()
    items = [Item(part.name, part.kind, spec) for part in parts for spec in part.tensors]
    counts = RIGHT | changes
    values = [torch.tensor(counts[item.part, item.spec.name]) for item in items]
    return miscounted(items, values, records, COUNTING)


@pytest.mark.parametrize(
    ("name", "table", "why"),
    [
        (("confusion", "trained"), [[2, 0], [1, 2]], "does not count each of 4 test records once"),
        (
            ("confusion", "trained"),
            [[2, 1], [1, 0]],
            "has 2 on its diagonal, and metrics 3 that are right",
        ),
        (
            ("confusion", "delivered"),
            [[3, 0], [0, 1]],
            "has 4 on its diagonal, and metrics 2 that are r",
        ),
        (("confusion", "trained"), [[4, -1], [2, -1]], "is -1, of 4 that were tested"),
        (
            ("confusion", "trained"),
            [[2, 1], [0, 1]],
            "has 3 test records of class 0, another",
        ),
        (("scores", "trained"), [[[0, 3, 0], [1, 0, 0]]], "has 1 test records of class 1, another"),
        (("scores", "trained"), [[[0, 2, 0], [1, 2, 0]]], "does not count each of 4 test records"),
        (("scores", "delivered"), [[[5, -1, 0], [0, 0, 0]]], "is 5, of 4 that were tested|is -1"),
    ],
)
def test_tables_of_test_counts_add_up(name, table, why):
    assert faults({}, RecordCount(9, 4)) == ""
    found = faults({name: table}, RecordCount(9, 4))
    assert found.startswith("/".join(name))
    assert re.search(why, found)


def test_noisy_tables_need_not_add_up_and_are_bounded_all_the_same():
    assert faults({("confusion", "trained"): [[4, 4], [0, 1]]}, None) == ""
    assert faults({("scores", "trained"): [[[0, -2, 0], [1, 99, 0]]]}, None) == ""
    assert "correct.trained is 5, of 4" in faults({("metrics", "correct.trained"): 5}, None)
    plain, noised = (replace(COUNTING, noised=noised).parts()[0] for noised in (False, True))
    for part, least in ((plain, 0), (noised, -(2**40))):
        values = torch.tensor([[least - 1, 0], [0, 0]])
        assert "below" in value_fault(part.tensors[0], values)
        assert not value_fault(part.tensors[0], values.clamp(min=least))


REGRESSION = Regression(range=(0, 10))
SUMS = {
    ("targets", "target"): 3 * UNIT,
    ("targets", "target_squared"): 0,
    ("metrics", "absolute.delivered"): 4 * UNIT,
    ("metrics", "absolute.trained"): 0,
    ("metrics", "squared.delivered"): 1,
    ("metrics", "squared.trained"): 2 * UNIT,
    ("metrics", "tested"): 4,
}


def sum_faults(changes, known=True, records=TESTED):
    counting = ValueCounting(REGRESSION, targets=True, noised=records is None)
    items = [Item(part.name, part.kind, spec) for part in counting.parts() for spec in part.tensors]
    values = [torch.tensor((SUMS | changes)[item.part, item.spec.name]) for item in items]
    return miscounted(items, values, records, counting if known else None)


@pytest.mark.parametrize("known", [True, False])
def test_sums_are_bounded_by_a_unit_a_record(known):
    """Also where the task is an installed package's, whose code has no say."""
    assert sum_faults({}, known) == ""
    for place in [place for place in SUMS if place[1] != "tested"]:
        for value in (4 * UNIT + 1, -1):
            said = f"{'/'.join(place)} is {value}, in units of 1/{UNIT}, of 4 that were tested"
            assert sum_faults({place: value}, known) == said
    for value in (5, -1):
        found = sum_faults({("metrics", "tested"): value}, known)
        assert found == f"metrics/tested is {value}, this silo has 4 test records"


def test_noisy_sums_of_targets_may_be_below_zero_and_those_of_errors_may_not():
    assert sum_faults({("targets", "target"): -UNIT}, records=None) == ""
    found = sum_faults({("metrics", "absolute.trained"): 4 * UNIT + 1}, records=None)
    assert found.startswith("metrics/absolute.trained is ")
    assert sum_faults({("metrics", "squared.trained"): -1}, records=None)


# Norms.
@given(
    hnp.arrays(np.float32, (2, 2), elements=st.floats(-(2.0**90), 2.0**90, width=32)),
    st.integers(-(2**62), 2**62),
)
def test_the_norm_of_a_part_is_over_its_tensors_together_without_the_weight(values, count):
    items = (*ITEMS, Item("metrics", Kind.METRIC, TensorSpec("m", "int64", ())))
    weight = torch.tensor(1e9).double()
    given = [torch.from_numpy(values), torch.tensor(count), weight, torch.empty(0), torch.tensor(2)]
    found = norms(items, given)
    exact = math.sqrt(sum(float(v) ** 2 for v in values.reshape(-1)))
    assert found["model"] == pytest.approx(exact, rel=1e-12)
    assert found["metrics"] == pytest.approx(math.sqrt(float(count) ** 2 + 4), rel=1e-12)


def test_a_norm_too_large_for_a_number_is_infinite():
    items = (Item("model", Kind.WHOLE_MODEL, TensorSpec("w", "float64", (2,))),)
    assert norms(items, [torch.tensor([1e300, 1e300], dtype=torch.float64)]) == {"model": math.inf}


# unpack.
@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(stream, "CHUNK_BYTES", 5)


def arrived(values, items=ITEMS):
    """The items, and the buffer that an Inbound filled with their values."""
    buffer = Buffer()
    buffer.reserve(sum(item.spec.nbytes for item in items))
    inbound = Inbound("coordinator", lambda _: [item.spec.nbytes for item in items], buffer.write)
    digester = Digester([item.spec.nbytes for item in items])
    inbound.feed(pb.Frame(manifest=pb.Manifest()))
    for chunk in chunks(values, stream.CHUNK_BYTES):
        digester.update(chunk.content)
        inbound.feed(chunk)
    found = digester.digests()
    inbound.feed(pb.Frame(end=pb.End(sha256=found.total, tensor_sha256=found.tensors)))
    inbound.finish()
    return items, buffer.bytes


def test_a_delivery_is_unpacked_by_part_and_name(small_chunks):
    sent = exactly(ITEMS, payload())
    delivered = unpack("coordinator", *arrived(sent))
    names = {part: set(values) for part, values in delivered.items()}
    assert names == {"model": {"w", "@weight", "none"}, "metrics": {"n"}}
    for item, value in zip(ITEMS, sent, strict=True):
        found = delivered[item.part][item.spec.name]
        assert (found.dtype, tuple(found.shape)) == (value.dtype, item.spec.shape)
        assert torch.equal(found, value)


def test_nothing_delivered_is_nothing_and_a_release_says_what_the_item_is():
    assert unpack("coordinator", *arrived([], ())) == {}
    metric = Release("metrics", "metric", "n", "int64", (), "plain", "exact")
    assert release_of(ITEMS[1]) == metric
    assert release_of(ITEMS[0]).kind == "whole_model"
    for item in ITEMS:
        assert release_of(item).nbytes == item.spec.nbytes


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("place", "named"), [(0, "model/w"), (2, "model/@weight")])
def test_a_delivered_value_that_is_not_finite_is_refused(small_chunks, bad, place, named):
    values = exactly(ITEMS, payload())
    values[place].reshape(-1)[-1] = bad
    with pytest.raises(RefusedError) as caught:
        unpack("coordinator", *arrived(values))
    assert (caught.value.code, caught.value.peer) == ("NOT_FINITE", "coordinator")
    assert named in caught.value.why


# What policy and ledger read.
def test_the_reader_is_the_coordinator(made):
    assert readers_of(made.roster) == ("coordinator",)
    plain = [release_of(item) for item in ITEMS]
    assert readers_of_message(plain, made.roster) == ("coordinator",)


PARTS = (
    Part("mean", Kind.BACKBONE, Sum("mean"),
        (TensorSpec("w", "float32", (2, 3)), TensorSpec("b", "float64", (2,)))),
    Part("rows", Kind.HEADER_ROWS, Sum("ratio", most=1.0), (TensorSpec("r", "float32", (4, 3)),)),
    Part("sums", Kind.COUNTS, Sum("total"), (TensorSpec("n", "int64", ()),)),
)  # fmt: skip


def masked(part, kind, name, dtype, shape, reader="sum"):
    return Release(part, kind, name, dtype, shape, "masked", readers=(reader,))


@pytest.mark.parametrize(
    ("bounds", "mean"),
    [
        (Bounds(3, "private", 1, 16), ("uint32", True, "sum")),
        (Bounds(3, "private", 1, 17), ("uint64", True, "sum")),
        (Bounds(3, "public", 1, 17), ("uint32", False, "sum")),
        (Bounds(3, "private", 1, 17, frozenset({"mean"})), ("uint64", True, "silos")),
    ],
)
def test_a_masked_round_has_words_and_a_weight_only_where_it_is_private(made, bounds, mean):
    dtype, weighted, reader = mean
    weight = [masked("mean", "backbone", "@weight", dtype, (), reader)] if weighted else []
    releases = masked_releases(PARTS, [group(part, bounds) for part in PARTS])
    assert list(releases) == [
        masked("mean", "backbone", "w", dtype, (2, 3), reader),
        masked("mean", "backbone", "b", dtype, (2,), reader),
        *weight,
        masked("rows", "header_rows", "r", "uint32", (4, 3)),
        masked("rows", "header_rows", "@weight", "uint32", (4,)),
        masked("sums", "counts", "n", "uint64", ()),
    ]
    assert readers_of_message(releases, made.roster) == tuple(dict.fromkeys((reader, "sum")))


@pytest.mark.parametrize("method", ["fedavg", "fedssa", "local"])
def test_a_masked_round_declares_as_many_numbers_as_its_sums_have(made, method):
    """Of each part, those of the secure sum's own group: nothing else crosses but canaries."""
    security = {"secure_aggregation": "required", "weight_most": 50}
    simple = made.jobs["simple"]
    document = {key: value for key, value in simple.document().items() if key not in DERIVED}
    blind = {"silos": list("abcd"), "min_cohort": 3, "method": {"name": method}}
    blind["security"] = security
    job = Job.from_file(JobFile.model_validate(document | blind), "job.toml")
    releases = upload_releases(JobPlan(job).round(0))
    for part in job.up(0):
        own = group(part, Bounds(3, "private", 1, 50))
        mine = [release for release in releases if release.part == part.name]
        assert sum(release.elements for release in mine) == own.body
        assert all(release.nbytes * 8 == release.elements * own.ring for release in mine)
    assert readers_of_message(releases, made.roster) == ("sum",)
    own = job.up(0)[0]
    assert readers_of_message(padded_releases(own), made.roster) == ("mix",)
    assert readers_of_message(rotated_releases(own), made.roster) == ("gram",)
    plain = tuple(map(release_of, upload_items(simple.up(0))))
    assert upload_releases(JobPlan(simple).round(0)) == plain
