"""Which sums come down in words, and of which round, as both sides know from the job alone."""

import pytest
from support.jobs import make_job

from staddle.algorithms.exchange.parts import Sum
from staddle.algorithms.tasks.table_counting import RIGHT
from staddle.errors import LocalError
from staddle.security.blind.plan import JobPlan
from staddle.silo.parts.declared import Declared, RecordCount

SILOS = ["a", "b", "c", "d", "e"]
NOTHING = "0" * 64
TAGGED = {"secure_aggregation": "required"}
COUNTS = {"weights": "public", "dropouts": "any", "counts": dict.fromkeys(SILOS, 40)}
JOBS = {
    "fedavg": ({}, TAGGED, 1.0),
    "fedper": ({}, {**TAGGED, **COUNTS}, 0.8),
    "ppfl": ({"models": 2}, {"secure_aggregation": "required", "audience": "silos"}, 1.0),
    "pfedsim": ({"rho": 0.5}, {"secure_aggregation": "required"}, 1.0),
    "fedssa": ({"t_stable": 3}, {"secure_aggregation": "required"}, 1.0),
    "fedaims": ({"sampling": "algorithm2"}, {"secure_aggregation": "required"}, 1.0),
    "fedsimsup": ({"similarity": "samples"}, {"secure_aggregation": "required", **COUNTS}, 0.8),
}


def made(method, options, security, participation=1.0):
    model = {"name": "convnet-digits" if method == "fedaims" else "cnn-digits", "classes": 10}
    training = {"batch_size": 32, "lr": 0.05}
    fields = {"seed": 11, "rounds": 6, "silos": SILOS, "min_cohort": 3, "security": security}
    job = make_job(method, options, model, training, participation=participation, **fields)
    job.document()
    return job


def slowly(job, round_):
    """Part by part, back from the round before."""
    found = []
    for part in job.down(round_):
        for before in reversed(range(round_)):
            sums = [each for each in job.up(before) if isinstance(each.exchange, Sum)]
            names = [each.name for each in sums]
            if part.name in names:
                found.append((sums[names.index(part.name)], before, names.index(part.name)))
                break
    return found


@pytest.mark.parametrize("name", JOBS)
def test_a_sum_that_comes_down_is_of_the_last_round_that_had_it(name):
    job = made(name, *JOBS[name])
    assert job.keyed
    plan = JobPlan(job)
    for round_ in range(job.length + 1):
        now = plan.round(round_)
        found = [(each.part, each.round, each.group) for each in now.sums_down]
        assert found == slowly(job, round_)
        assert {each.part.name for each in now.sums_down} <= set(now.in_words)
    for round_ in range(job.length):
        assert plan.round(round_).frame("lung", NOTHING, NOTHING).tagged
        later = {
            (each.part.name, each.round)
            for after in range(job.length + 1)
            for each in plan.round(after).sums_down
        }
        due = {part for part, before in later if before == round_}
        published, up = set(plan.round(round_).published), {part.name for part in job.up(round_)}
        assert due <= published <= up - {RIGHT.name}
    words = {
        each.part.name for round_ in range(job.length + 1) for each in plan.round(round_).sums_down
    }
    wanted = {
        "fedavg": {"model"}, "fedper": {"extractor"}, "ppfl": {"holders", "model", "coupling"},
        "pfedsim": {"model"}, "fedssa": {"holders"},
        "fedaims": {"holders", "backbone", "prototypes"},
    }  # fmt: skip
    assert words == wanted.get(name, set())


@pytest.mark.parametrize("name", JOBS)
def test_what_silos_alone_read_is_what_comes_down_in_words(name):
    options, security, participation = JOBS[name]
    quiet = {key: value for key, value in security.items() if key != "tags"} | {"audience": "silos"}
    if name == "fedsimsup":
        why = r"security\.audience does nothing: no sum comes down to silos as it was"
        with pytest.raises(LocalError, match=why):
            made(name, options, quiet, participation)
        return
    job = made(name, options, quiet, participation)
    assert job.keyed
    for round_ in range(job.length):
        frame = JobPlan(job).round(round_).frame("lung", NOTHING, NOTHING)
        readers = {own.name: own.reader for own in frame.groups}
        assert frame.tagged
        assert readers.pop(RIGHT.name) == "coordinator"
        if name == "fedssa":
            readers.pop("rows", None)  # of them its coordinator half makes what it publishes
        assert readers == dict.fromkeys(JobPlan(job).round(round_).published, "silos")
        declared = Declared.of(job.document(), RecordCount(30, 10)).groups(round_)[1]
        assert declared == frame.groups  # the gate reads the same from the signed document


def test_a_part_never_comes_as_tensors_before_its_first_sum():
    job = made("fedavg", *JOBS["fedavg"])
    first = JobPlan(job).round(0)
    assert (first.sums_down, first.in_words) == ((), ("model",))


def test_what_is_counted_once_comes_down_in_every_later_round():
    job = made("fedssa", *JOBS["fedssa"])
    plan = JobPlan(job)
    found = [
        [(each.part.name, each.round) for each in plan.round(n).sums_down]
        for n in range(job.length + 1)
    ]
    assert found == [[]] + [[("holders", 0)]] * job.length
    seen = [plan.round(n).published for n in range(job.length)]
    assert seen == [("holders",)] + [()] * (job.length - 1)


def test_without_a_key_nothing_is_tagged_and_all_comes_as_tensors():
    job = made("fedavg", {}, {"secure_aggregation": "required", "tags": False})
    assert not job.keyed
    rounds = [JobPlan(job).round(n) for n in range(job.length + 1)]
    assert all((each.sums_down, each.in_words) == ((), ()) for each in rounds)
    assert rounds[0].published == ()
    assert not rounds[0].frame("lung", NOTHING, NOTHING).tagged


@pytest.mark.parametrize("key", ["tags", "audience"])
def test_to_go_without_tags_that_are_there_and_an_audience_without_a_sum_are_refused(key):
    own = {"tags": False} if key == "tags" else {"audience": "silos"}
    said = {
        "tags": r"tags = false does nothing: its silos share a key",
        "audience": r"audience does nothing: no sum",
    }
    with pytest.raises(LocalError, match=rf"security\.{said[key]}"):
        # it never sums but its metrics
        made("pfedsim", {"rho": 0.0}, {"secure_aggregation": "required", **own})


def test_to_go_without_tags_in_the_clear_is_refused():
    why = 'tags = False does nothing with secure_aggregation = "off"'
    with pytest.raises(ValueError, match=why):
        made("fedavg", {}, {"tags": False})
