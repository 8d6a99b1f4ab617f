from dataclasses import replace

import pytest
from pydantic import ValidationError
from support.refusals import refused
from support.simulated_jobs import SCHEDULE, make_population, make_run

from staddle.algorithms.engines.attendance import EVERYONE, Attendance
from staddle.simulator.experiment.plan import Run, Schedule
from staddle.simulator.run import manifest
from staddle.simulator.run.manifest import RunManifest, differences

POPULATION = make_population()


def made(run=None, population=POPULATION, schedule=SCHEDULE):
    return manifest.identity(run or make_run(), population, schedule)


def away(**keys):
    return replace(make_run(), attendance=Attendance(**keys))


def told(**changed):
    return differences(made(), made(**changed))


def test_it_says_what_run_this_is():
    here = made()
    assert (here.label, here.seed, here.population, here.look_every) == ("fedavg", 7, "5f" * 32, 2)
    assert here.job == make_run().job.document()
    expected = [("d", 16, 9, 7), ("b", 20, 9, 7)]
    assert [(one.name, one.train, one.test, one.validation) for one in here.silos][:2] == expected
    without = made(population=make_population(validation=False))
    assert [one.validation for one in without.silos] == [None] * 4


def test_it_is_read_as_it_was_written(tmp_path):
    (tmp_path / "run.json").write_bytes(made().to_bytes())
    assert manifest.read(tmp_path) == made()


def test_who_is_there_is_kept_and_left_out_where_it_is_everyone(tmp_path):
    who = {"newcomers": ("d",), "join_after": 2, "step_seconds": {"d": 0.1, "b": 2.0}}
    (tmp_path / "run.json").write_bytes(made(away(**who)).to_bytes())
    assert manifest.read(tmp_path).who == Attendance(**who)
    assert made().who == EVERYONE
    assert b"attendance" not in made().to_bytes()


def test_it_cannot_be_edited_unseen(tmp_path):
    path = tmp_path / "run.json"
    path.write_bytes(made().to_bytes().replace(b'"seed":7', b'"seed":8 '))
    with refused(r"run\.json: is not canonical JSON, so it was edited"):
        manifest.read(tmp_path)
    path.write_bytes(b"{}")
    with refused(r"run\.json: missing key 'label'; add it.*restore it from a backup, or remove"):
        manifest.read(tmp_path)
    path.write_bytes(made().to_bytes()[:99])
    with refused(r"run\.json: not valid JSON: .*restore it from a backup, or remove the run's"):
        manifest.read(tmp_path)


def test_the_same_run_differs_in_nothing():
    assert told() == []
    # how often a snapshot is written changes no result
    assert told(schedule=Schedule(2, 99)) == []
    gpu = manifest.MadeWith(device="cuda (NVIDIA H200)", staddle="9", torch="9")
    other = made().model_copy(update={"made_with": gpu})
    assert differences(made(), other) == []


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ({"run": make_run(seed=8)}, ["seed is 7 there and 8 here"]),
        ({"run": make_run(rounds=5)}, ["rounds is 4 there and 5 here"]),
        ({"run": make_run(training={"epochs": 1, "batch_size": 8, "lr": 0.05})},
            ["training.lr is 0.1 there and 0.05 here"]),
        ({"run": Run("other", 7, make_run().job)}, ["label is fedavg there and other here"]),
        ({"run": away(absent=0.25)}, ["attendance.absent is 0.0 there and 0.25 here"]),
        ({"schedule": Schedule(3, 2)}, ["look_every is 2 there and 3 here"]),
        ({"population": make_population("6a" * 32)},
            ["the records, or who holds which, are others"]),
        ({"population": make_population("6a" * 32, validation=False)},
            ["the silos have other numbers of records"]),
    ],
)  # fmt: skip
def test_what_differs_is_named(changed, wanted):
    assert told(**changed) == wanted


def test_a_table_that_one_lacks_other_silos_and_another_release_are_named_or_counted():
    one, other = made(), made()
    other.job["privacy"] = {"epsilon": "1"}
    assert differences(one, other) == ["privacy is left out there and {'epsilon': '1'} here"]
    four = made()
    three = RunManifest(**made().model_dump() | {"job": made().job | {"silos": ["d", "b", "a"]}})
    assert differences(four, three) == ["silos are 4 there and 3 here"]
    job = made().job | {"silos": ["d", "b", "x", "c"]}
    renamed = RunManifest(**made().model_dump() | {"job": job})
    assert differences(four, renamed) == ["silos[2] is a there and x here"]
    fields = {"rounds": 9, "min_cohort": 3, "quorum": 0.9, "round_timeout": 5}
    found = told(run=make_run("pfedsim", seed=8, **fields))
    assert len(found) == 6
    assert found[-1].startswith("and ")
    there = made()
    changed = RunManifest(**there.model_dump() | {"job": there.job | {"method_digest": "0" * 64}})
    assert differences(changed, there) == ["this release has another fedavg, or another model"]


@pytest.mark.parametrize(
    ("device", "fits"),
    [
        ("cpu", True), ("cuda (NVIDIA H200)", True), ("cuda (NVIDIA H200), one by one, tf32", True),
        ("cuda (NVIDIA H200), on 2 GPUs, bf16", True), ("cuda (NVIDIA H200), on GPUs", False),
        ("cuda (NVIDIA H200), bf16, one by one", False), ("cuda", False), ("cpu, bf16", False),
    ],
)  # fmt: skip
def test_what_trains(device, fits):
    said = {"device": device, "staddle": "1", "torch": "2"}
    if fits:
        assert manifest.MadeWith.model_validate(said).device == device
    else:
        with pytest.raises(ValidationError):
            manifest.MadeWith.model_validate(said)


def started(seed, sha256, **versions):
    """A run whose model begins from values of this digest, which other code made."""
    start = {"sha256": sha256, "made_with": {"lung": "1", **versions}}
    here = made()
    return here.model_copy(update={"seed": seed, "job": {**here.job, "seed": seed, "start": start}})


def test_initial_values_of_other_code_follow_from_the_seed():
    one, other = started(1, "aa"), started(2, "bb")
    assert differences(other, one.seeded_like(other)) == []
    # The code that made them does not, nor do values under one seed.
    assert differences(started(2, "bb", lung="2"), one.seeded_like(other)) != []
    again = started(1, "cc")
    assert differences(again, one.seeded_like(again)) != []
    assert differences(made(), one.seeded_like(made())) != []
