import json

import pytest
import torch
from pydantic import ValidationError
from support.refusals import refused

from staddle.algorithms.course import Change, Optimiser, Stage, Survey
from staddle.algorithms.engines.engine import Records
from staddle.algorithms.engines.simulation import Simulation
from staddle.algorithms.engines.vmap_engine import Stacked
from staddle.algorithms.job.job import Job
from staddle.algorithms.job.lr_schedule import Cosine, Exponential, StepSchedule, paced
from staddle.algorithms.method import initial_state
from staddle.algorithms.training.silo_round import local_round
from staddle.files.documents import canonical_json, parse_json

EXPONENTIAL = {"kind": "exponential", "factor": 0.5}
STEPS = {"kind": "steps", "factor": 0.1, "at": [0.5, 0.75]}


def test_factors():
    each = Exponential(kind="exponential", factor=0.99)
    assert [each.at_round(done, 300) for done in (0, 1, 3, 300)] == [1, 0.99, 0.99**3, 0.99**300]
    drops = StepSchedule(kind="steps", factor=0.1, at=(0.5, 0.75))
    expected = [1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01, 0.01]
    assert [drops.at_round(done, 8) for done in range(9)] == pytest.approx(expected)
    short = [drops.at_round(done, rounds) for rounds in (1, 2, 3) for done in range(rounds)]
    assert short == pytest.approx([1, 1, 0.1, 1, 1, 0.1])


def test_only_the_rates_of_stages_change():
    stage = Stage(("extractor",), 2, len, Optimiser(0.4, 0.9, 1e-4, clip=2.0), full_batch=True)
    survey, change = Survey(len), Change(len)
    less, *others = paced((stage, survey, change), 0.25)
    assert others == [survey, change]
    assert less.optimiser == Optimiser(0.1, 0.9, 1e-4, clip=2.0)
    assert (less.trains, less.epochs, less.loss, less.full_batch) == (("extractor",), 2, len, True)


@pytest.mark.parametrize(
    ("schedule", "complaint"),
    [
        ({"kind": "linear"}, "training.schedule"),
        ({"kind": "exponential"}, "factor"),
        ({"kind": "exponential", "factor": 0}, "factor = 0: give a value above 0"),
        ({"kind": "exponential", "factor": 1.5}, "factor = 1.5: give 1 or less"),
        ({"kind": "exponential", "factor": True}, "factor = True: give a number"),
        ({"kind": "exponential", "factor": 0.9, "at": [0.5]}, "unknown key"),
        ({"kind": "steps", "factor": 0.1}, "at"),
        ({"kind": "steps", "factor": 0.1, "at": []}, "1 or more"),
        ({"kind": "steps", "factor": 0.1, "at": [0.75, 0.5]}, "smaller ones first"),
        ({"kind": "steps", "factor": 0.1, "at": [0.5, 0.5]}, "each share of the rounds once"),
        ({"kind": "steps", "factor": 0.1, "at": [1.0]}, "below 1"),
        ({"kind": "steps", "factor": 0.1, "at": [n / 200 for n in range(1, 102)]}, "100 or fewer"),
    ],
)
def test_what_is_no_schedule_is_refused(tmp_path, schedule, complaint):
    path = tmp_path / "job.toml"
    inline = ", ".join(f"{key} = {json.dumps(value)}" for key, value in schedule.items())
    path.write_text(
        'version = 1\nname = "n"\nseed = 1\nrounds = 2\nsilos = ["a", "b"]\n[method]\nname ='
        ' "fedavg"\n[model]\nname = "cnn-digits"\nclasses = 3\n[training]\nlr = 0.1\nschedule = {'
        f" {inline} }}\n"
    )
    with refused(complaint) as error:
        Job.from_toml(path)
    assert "schedule" in str(error.value)


def test_a_cosine_falls_and_a_warmup_comes_before(make_job):
    cosine = Cosine(kind="cosine")
    last = (1 - 0.5**0.5) / 2
    expected = [1, (1 + 0.5**0.5) / 2, 0.5, last, last]  # a round that tunes is like the last
    assert [cosine.at_round(done, 4) for done in range(5)] == pytest.approx(expected)
    training = {"lr": 2.0, "warmup": 2, "schedule": {"kind": "cosine"}}
    job = make_job("fedavg", training=training, rounds=6)
    stage = Stage(("extractor",), 1, len, job.training.rule)
    rates = [job.paced((stage,), round_)[0].optimiser.lr for round_ in range(6)]
    assert rates == pytest.approx([2 / 3, 4 / 3, 2.0, 1 + 0.5**0.5, 1.0, 1 - 0.5**0.5])
    constant = make_job("fedavg", training={"lr": 2.0, "warmup": 1}, rounds=3)
    assert [constant.training.factor(done, 3) for done in range(3)] == [0.5, 1, 1]
    with pytest.raises(ValidationError, match="warmup = 4, but there are 4 rounds; lower it"):
        make_job("fedavg", training={"warmup": 4})


@pytest.mark.parametrize("schedule", [EXPONENTIAL, STEPS])
def test_the_document_says_it(make_job, schedule):
    job, plain = make_job("fedavg", training={"schedule": schedule}), make_job("fedavg")
    back = Job.from_document(parse_json(canonical_json(job.document()), "wire"), "wire", ())
    assert (back, back.digest) == (job, job.digest)
    assert job.digest != plain.digest
    assert plain.document()["training"]["schedule"] is None
    assert job.document()["training"]["schedule"]["factor"] == str(schedule["factor"])


def test_a_census_and_a_last_tuning_do_not_count(make_job):
    def rates(method, **fields):
        job = make_job(method, training={"lr": 1.0, "schedule": EXPONENTIAL}, rounds=2, **fields)
        stage = Stage(("extractor",), 1, len, job.training.rule)
        return [job.paced((stage,), round_)[0].optimiser.lr for round_ in range(job.length)]

    assert rates("fedavg") == [1, 0.5]
    many = {"silos": [f"s{i}" for i in range(6)], "participation": 0.5}
    assert rates("fedsimsup", **many) == [1, 1, 0.5]
    assert rates("fedavg-ft") == [1, 0.5, 0.25]
    cosine = make_job("fedavg-ft", training={"lr": 1.0, "schedule": {"kind": "cosine"}}, rounds=2)
    stage = Stage(("extractor",), 1, len, cosine.training.rule)
    tuned = [cosine.paced((stage,), round_)[0].optimiser.lr for round_ in range(3)]
    assert tuned == pytest.approx([1, 0.5, 0.5])


@pytest.mark.parametrize("method", ["fedavg", "fedrep"])
def test_a_round_at_a_lower_rate(make_job, make_shards, method):
    """Round 2 of a job whose rate halves is round 2 of one with a quarter of the rate."""
    falling = make_job(method, training={"lr": 0.2, "schedule": EXPONENTIAL})
    constant = make_job(method, training={"lr": 0.05})
    train, test = make_shards(falling)["a"]
    state = initial_state(falling.method(), "a")
    one, other, first = (
        local_round(job.method(), job, state, round_, {}, train, test, "a").state.flat
        for job, round_ in ((falling, 2), (constant, 2), (falling, 0))
    )
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not all(torch.equal(one[name], first[name]) for name in one)


def test_stacked_silos_go_by_it_too(make_job, make_shards):
    jobs = [
        make_job("fedavg", training={"schedule": schedule}, rounds=2)
        for schedule in (EXPONENTIAL, None)
    ]
    records = {silo: Records(*sides) for silo, sides in make_shards(jobs[0]).items()}
    ends = []
    for job in jobs:
        simulation = Simulation(job, Stacked(job, records))
        for _ in range(2):
            simulation.step()
        ends.append(simulation.states["a"].flat)
    train, test = make_shards(jobs[0])["a"]
    falling, constant = ends
    assert not all(torch.equal(falling[name], constant[name]) for name in falling)
    job = jobs[0]
    simulation = Simulation(job, Stacked(job, records))
    simulation.step()
    (down,) = simulation._work(["a"])
    alone = local_round(
        job.method(), job, down.state, 1, down.delivered, train, test, "a"
    ).state.flat
    assert all(torch.allclose(falling[name], alone[name], atol=1e-5) for name in alone)
