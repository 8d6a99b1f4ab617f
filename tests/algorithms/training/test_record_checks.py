from dataclasses import replace

import pytest
import torch
from support.numbered import lazily
from support.refusals import refused

from staddle.algorithms.catalog import METHODS
from staddle.algorithms.data.dataset import Dataset
from staddle.algorithms.engines import engine
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.exchange.parts import all_finite
from staddle.algorithms.job.privacy_table import PrivacyTable
from staddle.algorithms.models.build import ModelOptions, build
from staddle.algorithms.training.record_checks import (
    MOST_LISTED,
    check_records,
    check_training,
    counts_by_class,
    withheld_classes,
)
from staddle.errors import LocalError

NAMES = ("benign", "malignant", "other")


@pytest.fixture
def good(make_data):
    return make_data(8)


def labelled(labels, names=None):
    return Dataset(
        torch.zeros(len(labels), 1, 8, 8), torch.tensor(labels, dtype=torch.int64), names
    )


def fault(job, records):
    with pytest.raises(LocalError) as caught:
        check_records(job, records, "here")
    assert str(caught.value).startswith("here: ")
    return str(caught.value)


def test_good_records_fit(make_job, good):
    check_records(make_job(), good, "here")
    check_records(make_job(), labelled([2]), "here")


def test_1_no_records(make_job):
    assert "at least one to train on and one to test on" in fault(make_job(), labelled([]))


@pytest.mark.parametrize(("shape", "fix"), [
    ((8, 1, 7, 8), "reshape it, or have the job say model.input = [1, 7, 8]"),
    ((8, 64),
        "reshape it, or store it as [N, 1, 1, 64] and have the job say model.input = [1, 1, 64]"),
    ((8,), "reshape it, or store it as [N, 1, 1, 1] and have the job say model.input = [1, 1, 1]"),
    ((8, 3, 8, 8), "reshape it, or have the job say model.input = [3, 8, 8]"),
    ((8, 16, 16),
        "reshape it, or store it as [N, 1, 16, 16] and have the job say model.input = [1, 16, 16]"),
    ((8, 8, 8), "store it as [N, 1, 8, 8]"),
    ((8, 1, 8, 8, 8), "reshape it, or have the job say model.input = [1, 8, 8, 8]"),
])  # fmt: skip
def test_2_another_shape_than_the_models(make_job, good, shape, fix):
    job = make_job(model={"name": "mlp", "input": [1, 8, 8]})
    why = fault(job, Dataset(torch.zeros(shape), good.y))
    assert why == f"here: x is {list(shape)}, the job's model takes [N, 1, 8, 8]; {fix}"


@pytest.mark.parametrize("shape", [(8, 1, 16, 16, 16), (8, 5), (8, 1, 9, 9)])
def test_2_an_input_that_the_model_would_refuse_is_not_advised(make_job, shape):
    why = fault(make_job(), Dataset(torch.zeros(shape), torch.zeros(8, dtype=torch.int64)))
    assert why.endswith(
        f"takes [N, 1, 8, 8]; reshape it, or choose a model that takes records of {list(shape[1:])}"
    )


def test_3_labels_that_are_no_class(make_job):
    why = fault(make_job(), labelled([0, 3, 1, 3, -1]))
    said = "the job's model knows classes 0 to 2; number the classes from 0"
    assert f"label 3 in 2 of 5 records, {said}" in why
    assert "label -1 in 1 of 2 records" in fault(make_job(), labelled([2, -1]))


def test_3_targets_of_another_task(make_job, good):
    for y, found in ((good.y.float(), "float32 [N]"), (good.y[:, None], "int64 [N, 1]")):
        why = fault(make_job(), replace(good, y=y))
        assert f"y is {found}, the job's task takes int64 [N]: a class number per record" in why


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_4_values_that_are_no_number(make_job, good, value):
    x = good.x.clone()
    x[5, 0, 3, 3] = value
    assert "NaN or a value beyond float32 in record 5; clean it first" in fault(
        make_job(), replace(good, x=x)
    )


def test_3_a_map_of_other_sides_than_the_record(make_job):
    model = {"name": "unet", "classes": 2, "input": [1, 4, 6]}
    job = make_job("fedavg", model=model, task={"kind": "segmentation"})
    good = Dataset(torch.zeros(3, 1, 4, 6), torch.zeros(3, 4, 6, dtype=torch.uint8))
    check_records(job, good, "here")
    turned = replace(good, y=good.y.transpose(1, 2))
    assert fault(job, turned) == (
        "here: y is [3, 6, 4] and x [3, 1, 4, 6]; give a class for each position, [N, 4, 6]"
    )


def test_6_an_id_that_two_records_have(make_job):
    records = replace(labelled([0, 1, 2]), ids=("x", "secret", "secret"))
    why = fault(make_job(), records)
    assert "records 1 and 2 have the same id; give each record its own" in why
    assert "secret" not in why
    check_records(make_job(), replace(records, ids=("a", "b", "c")), "here")


def test_5_names_that_disagree_with_the_job(make_job):
    job = make_job(model={"class_names": list(NAMES)})
    check_records(job, labelled([0, 1, 2], NAMES), "here")
    check_records(job, labelled([0, 1, 2]), "here")
    check_records(make_job(), labelled([0, 1, 2], NAMES), "here")
    swapped = labelled([0, 1, 2], ("malignant", "benign", "other"))
    assert "class 0 is 'benign' in the job and 'malignant' here; reorder" in fault(job, swapped)
    for one in (job, make_job()):
        said = (
            "data.class_names (or the data's own list) has 2 names, the job's model.classes says 3"
        )
        assert said in fault(one, labelled([0, 1], NAMES[:2]))
        assert "both named 'b'" in fault(one, labelled([0, 1], ("a", "b", "b")))


def test_the_log_counts_by_class_and_tells_what_is_tested_without_training(make_job):
    counts = counts_by_class(make_job(model={"classes": 5}), labelled([0, 0, 3]), labelled([3, 4]))
    assert counts == {
        "training": 3, "test": 2, "training_by_class": [2, 0, 0, 1, 0],
        "classes_not_trained": [1, 2, 4], "classes_tested_not_trained": [4],
    }  # fmt: skip


def test_the_log_stays_short_for_many_classes(make_job):
    counts = counts_by_class(make_job(model={"classes": 1000}), labelled([7]), labelled([8]))
    assert len(counts["training_by_class"]) == MOST_LISTED
    assert counts["classes_not_trained"][-2:] == [100, "and 899 more"]
    assert counts["classes_tested_not_trained"] == [8]


def test_the_log_tells_which_classes_of_its_own_a_silo_withholds(make_job):
    security = {"secure_aggregation": "required", "min_holders": 3, "colluders": 1}
    security["weight_most"] = 100
    fields = {"silos": list("abcd"), "min_cohort": 3, "security": security}
    job = make_job("fedssa", model={"classes": 5}, **fields)
    assert job.counted
    told = withheld_classes(job, labelled([0, 0, 3, 4]), torch.tensor([3, 1, 4, 4, 0]))
    assert told == {"fewest_holders": 4, "classes_withheld": [0, 4]}


# Asked before a simulation too.


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda d: d.take([]),
            "no records; at least one to train on and one to test on are needed"),
        (lambda d: replace(d, x=d.x[..., :7]), "the job's model takes [N, 1, 8, 8]"),
        (lambda d: replace(d, y=d.y + 2), "the job's model knows classes 0 to 2"),
        (lambda d: replace(d, x=d.x / 0), "holds NaN or a value beyond float32"),
        (lambda d: replace(d, class_names=("b", "a", "c")),
            "class 0 is 'a' in the job and 'b' here; reorder"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("side", [0, 1])
def test_bad_records_are_refused_before_anything_trains(
    make_job, make_shards, monkeypatch, side, spoil, complaint
):
    job = make_job("fedavg", model={"class_names": ["a", "b", "c"]})
    shards = make_shards(job)
    shards["b"] = tuple(spoil(d) if i == side else d for i, d in enumerate(shards["b"]))
    monkeypatch.setattr(engine, "local_round", None)
    with pytest.raises(LocalError) as caught:
        simulate(job, shards)
    assert str(caught.value).startswith(f"{('training', 'test')[side]} records of silo 'b': ")
    assert complaint in str(caught.value)


# What no silo can be blamed for: few records, few classes. Labels [training, test] of silos a, b
# and c as far as they are named, and of the others.

FEW = {
    "one training record, one class, a class that is only tested": ({"a": ([1], [0, 1, 2]),
        "b": ([1] * 9, [1] * 4), "c": ([0, 1] * 5, [0, 1, 2])}, [0, 1, 2]),
    "one record, of another class than the test's, and one class at each silo": ({"a": ([1], [2]),
        "b": ([1] * 9, [1] * 4)}, [2]),
    "a class that nobody holds": ({"a": ([0, 1] * 5, [0, 1])}, [1, 0]),
    "a class that is only tested, everywhere": ({"a": ([0, 1] * 5, [0, 1, 2])}, [1, 0]),
}  # fmt: skip
ONE_RECORD, _, UNHELD, _ = FEW
SILOS = ["a", "b", "c", "d"]
SHORT = {
    "fedavg-ft": {"tuning_epochs": 1}, "fedbabu": {"tuning_epochs": 1},
    "fedrep": {"head_epochs": 1}, "per-fedavg": {"variant": "fo"}, "pfedme": {"steps": 1},
    "fedala": {"start_epochs": 1}, "fedsimsup": {"tau_s": 1, "tau_theta": 2},
}  # fmt: skip
SLOW = {"pfedfda": {"lr": 0.01}}  # its steps grow with its features


def records_of(labels, seed):
    generator = torch.Generator().manual_seed(seed)
    y = torch.tensor(labels)
    return Dataset(torch.randn(len(y), 1, 8, 8, generator=generator) + y[:, None, None, None], y)


def few(make_job, method, case, norm="group", rounds=2, **options):
    """A small job of the method on such records."""
    model = {"name": "convnet-digits" if method == "fedaims" else "cnn-digits", "norm": norm}
    if norm == "group" and method not in ("fedaims", "fedbn"):
        model = {"name": "ppfl-mlp", "input": [1, 8, 8]}
    options = {**SHORT.get(method, {}), **options}
    share = 1.0 if method == "ppfl" else 0.75
    fields = {"silos": SILOS, "rounds": rounds, "participation": share}
    job = make_job(method, options, model, SLOW.get(method), **fields)
    own, others = FEW[case]
    assert own.keys() <= {*job.cohort(0), *job.cohort(1)}
    shards = {}
    for i, silo in enumerate(SILOS):
        shards[silo] = (records_of(others * 6, i), records_of(others * 2, 9 + i))
    for silo, (train, test) in own.items():
        shards[silo] = (records_of(train, 20), records_of(test, 21))
    return job, shards


def assert_finite(result):
    for state in result.states.values():
        for tensors in (*state.parts.values(), state.extra):
            assert all(all_finite(tensor) for tensor in tensors.values())
    assert all(all_finite(tensor) for tensor in result.coordinator.values())


# In the last case nobody trains on a class either; one silo tests on it besides.
@pytest.mark.parametrize("case", [case for case in FEW if case != UNHELD])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_works_with_few_records_and_classes(make_job, method, case):
    assert_finite(simulate(*few(make_job, method, case)))


@pytest.mark.parametrize("method", METHODS)
def test_batch_norm_needs_two_training_records_and_works_with_two(make_job, method):
    """And with two classes."""
    job, shards = few(make_job, method, ONE_RECORD, "group" if method == "fedbn" else "none")
    check_training(job, shards["a"][0], "a", "here")
    job, shards = few(make_job, method, ONE_RECORD, "batch")
    with refused(r"^silo 'a': 1 training record, too few for batch norm; add records, or"):
        simulate(job, shards)
    job, shards = few(make_job, method, UNHELD, "batch")
    job = replace(job, model=job.model.model_copy(update={"classes": 2}))
    assert_finite(simulate(job, {**shards, "a": (records_of([1, 0], 20), shards["a"][1])}))


def test_one_training_record_is_judged_by_the_silos_own_architecture(make_job):
    job = make_job("fedssa", {"extractors": ["cnn-digits"]}, {"norm": "batch"})
    check_training(job, labelled([1]), "a", "here")
    with refused(r"^here: 1 training record, too few for batch norm"):
        check_training(make_job("fedssa", model={"norm": "batch"}), labelled([1]), "a", "here")


def test_steps_on_all_records_need_them_in_memory(make_job, make_data):
    job = make_job("ppfl", {"release_membership": "always", "lam": 0.0})
    data = make_data(12)
    check_training(job, data, "a", "here")
    with refused("here: method 'ppfl' takes steps on all records at once"):
        check_training(job, lazily(data), "a", "here")
    batches = make_job("ppfl", {"membership_batches": True})
    check_training(batches, lazily(data), "a", "here")
    check_training(make_job("fedavg"), lazily(data), "a", "here")


def test_at_one_pixel_a_batch_of_one_record_says_nothing_of_it():
    """Why one training record is refused under batch norm, though not every network shrinks that
    far.
    """
    network = build(ModelOptions(name="mobilenet-v2", classes=2, norm="batch"), 7)
    extractor = network["extractor"].train()
    records = torch.randn(2, 1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    alone = [extractor(record.expand(4, -1, -1, -1)) for record in records]
    assert torch.allclose(*alone, atol=1e-4)
    assert not torch.allclose(*extractor(records.flatten(0, 1)), atol=0.1)


def test_a_class_that_nobody_holds_stays_as_it_was(make_job):
    def after(method, **options):
        job, shards = few(make_job, method, UNHELD, rounds=4, **options)
        return job, simulate(job, shards)

    for stale in (False, True):
        job, result = after("fedssa", stale_inclusive=stale)
        initial = job.method().initial
        assert result.coordinator["status"].tolist() == [2, 2, 0]
        assert torch.equal(result.coordinator["rows"][2], initial[2])
        assert not torch.equal(result.coordinator["rows"][0], initial[0])
    _, result = after("fedaims")
    for state in result.states.values():
        assert [bool(row.any()) for row in state.extra["prototypes"]] == [True, True, False]
    _, result = after("ppfl")
    for state in result.states.values():
        assert [bool(total > 0) for total in state.extra["b"]] == [True, True, False]
    _, result = after("fedsimsup")
    assert not result.coordinator["proportions"][:, 2].any()


def declared_job(make_job, own):
    """FedSimSup, blind: with what it says of silo "a" class by class."""
    classes = {silo: own if silo == "a" else [10, 10, 0] for silo in "abcde"}
    security = {"secure_aggregation": "required", "weights": "public", "dropouts": "any"}
    security["counts"] = {silo: sum(each) for silo, each in classes.items()}
    fields = {"silos": list("abcde"), "participation": 0.8, "min_cohort": 3}
    return make_job("fedsimsup", security={**security, "class_counts": classes}, **fields)


# exact, rounded, a half, 5 %
# exact, rounded, a half, 5 %
@pytest.mark.parametrize("own", [[10, 20, 10], [11, 19, 10], [5, 10, 5], [12, 20, 8]])
def test_records_fit_what_a_job_declares_of_them_class_by_class(make_job, own):
    records = labelled([0] * 10 + [1] * 20 + [2] * 10)
    check_training(declared_job(make_job, own), records, "a", "here")


@pytest.mark.parametrize("own", [[10, 20, 13], [20, 10, 10], [40, 0, 0]])
def test_records_of_other_classes_than_a_job_declares_are_refused(make_job, own):
    records = labelled([0] * 10 + [1] * 20 + [2] * 10)
    job = declared_job(make_job, own)
    said = (
        r"here: \d+% of its training records are of other classes than security.class_counts of the"
        r" job says, at most 5% may be; have the job signed with \[10, 20, 10\], or near it"
    )
    with refused(said):
        check_training(job, records, "a", "here")
    # of another silo's records it says nothing
    check_training(job, labelled([0] * 30 + [1] * 30), "b", "here")
    table = PrivacyTable(epsilon=1.0, delta=1e-5, sample_rate=0.5, sigma="9")
    # an answer would be a release of how many there are
    check_training(replace(job, privacy=table), records, "a", "here")
