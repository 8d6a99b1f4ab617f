"""What a private job says and spends, against a slow count of all its rounds."""

from collections import Counter

import pytest
from support.refusals import refused

from staddle.algorithms.job.job import Job
from staddle.algorithms.job.privacy import (
    MOST_STEPS,
    Spend,
    job_spends,
    round_spends,
    slack,
    whole_sigma,
)
from staddle.algorithms.job.privacy_table import LARGEST_SIGMA
from staddle.files.documents import canonical_json, parse_json
from staddle.security.dp import rdp

TEXT = """
version = 1
name = "digits"
seed = 7
purpose = "For a test"
rounds = 30
silos = ["a", "b", "c", "d", "e"]
participation = 0.6

[method]
name = "ppfl"
options = { lam = 0 }

[model]
name = "glm"
classes = 10

[training]
epochs = 2
lr = 0.1

[privacy]
epsilon = 8
delta = 1e-5
sample_rate = 0.3
sigma = "1.37"
metrics_sigma = 30
"""
FEDAVG = (('"ppfl"\noptions = { lam = 0 }', '"fedavg"'), ('"glm"', '"cnn-digits"'))


def read(tmp_path, *changes):
    text = TEXT
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "job.toml"
    path.write_text(text)
    return Job.from_toml(path)


def counted(job, silo):
    """Round by round, and then the spare rounds of each kind."""
    rounds = [round_spends(job, r, "1.37") for r in range(job.length) if silo in job.cohort(r)]
    total = Counter()
    for spends, times in Counter(rounds).items():
        for one in spends:
            total[one.purpose] += one.steps * (times + slack(times))
    return total


@pytest.mark.parametrize(
    "changes",
    [
        (),
        FEDAVG,
        (*FEDAVG, ("participation = 0.6", ""), ("metrics_sigma = 30", "")),
        # with a census, of which the test counts alone cost something
        (*FEDAVG, ('"fedavg"', '"fedsimsup"')),
    ],
)
def test_no_silo_spends_more_than_the_job_says_and_one_as_much_for_each_purpose(tmp_path, changes):
    job = read(tmp_path, *changes)
    spends = job_spends(job, "1.37")
    assert spends[0] == Spend("histogram", "10.0", "1", 1)
    most = Counter()
    for silo in job.silos:
        most |= counted(job, silo)
    assert {one.purpose: one.steps for one in spends[1:]} == dict(most)
    assert len({one.purpose for one in spends}) == len(spends)


def test_what_a_round_spends(tmp_path):
    job = read(tmp_path)
    expected = ["training", "training-whole", "metrics"]
    assert [one.purpose for one in round_spends(job, 1, "1.37")] == expected
    training, whole, metrics = round_spends(job, 1, "1.37")
    assert training == Spend("training", "1.37", "0.3", job.method().effort(1).epochs * 4)
    assert whole == Spend("training-whole", "4.567", "1", job.method().effort(1).whole)
    assert metrics == Spend("metrics", "30.0", "1", 1)
    purposes = [one.purpose for one in round_spends(read(tmp_path, *FEDAVG), 1, "1.37")]
    assert "training-whole" not in purposes


def test_there_is_always_a_round_to_spare():
    assert [slack(rounds) for rounds in (0, 1, 20, 21, 60, 100)] == [0, 1, 1, 2, 3, 5]


def test_the_noise_of_a_whole_step_is_never_less_than_it_should_be():
    assert whole_sigma("1.37", 0.3) == "4.567"
    assert whole_sigma("1.1", 0.1) == "11.000"


def test_what_is_written_can_be_reckoned():
    assert (LARGEST_SIGMA, MOST_STEPS) == (rdp.LARGEST_SIGMA, rdp.MOST_STEPS)


@pytest.mark.parametrize("sigma", ['"1.37"', '"100"'])
def test_a_private_job_survives_the_wire(tmp_path, sigma):
    job = read(tmp_path, ('"1.37"', sigma))
    assert Job.from_document(parse_json(canonical_json(job.document()), "wire"), "wire", ()) == job
    assert job.document()["privacy"]["delta"] == "1e-05"


def test_a_document_without_noise_was_not_signed_by_our_command(tmp_path):
    job = read(tmp_path, ('sigma = "1.37"', ""))
    with refused(r"^wire: privacy\.sigma is missing; `staddle job sign` plans it"):
        Job.from_document(job.document(), "wire", ())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ((("epsilon", "epsilom"),), "unknown key 'privacy.epsilom'; did you mean 'epsilon'"),
        ((("epsilon = 8", ""),), "missing key 'privacy.epsilon'"),
        ((("epsilon = 8", "epsilon = 0"),), "privacy.epsilon = 0: give a value above 0"),
        ((("delta = 1e-5", "delta = 1"),), "privacy.delta = 1: give a value below 1"),
        ((("sample_rate = 0.3", "sample_rate = 1.5"),),
            "privacy.sample_rate = 1.5: give 1 or less"),
        ((("sample_rate = 0.3", "sample_rate = 0.3\nclip = 1e38"),),
            "privacy.clip = 1e[+]38: give 1000000000000.0 or"),
        ((("sample_rate = 0.3", "sample_rate = 0.3\nclip = 1e-45"),),
            "privacy.clip = 1e-45: give 1e-06 or more"),
        ((('"1.37"', "1.37"),), "privacy.sigma = 1.37: give a text in quotes"),
        ((('"1.37"', '"-1"'),), "privacy.sigma = '-1': give a text that matches"),
        ((("metrics_sigma = 30", "metrics_sigma = 0"),),
            "privacy.metrics_sigma = 0: give a value above 0"),
        ((*FEDAVG, ("classes = 10", 'classes = 10\nnorm = "batch"')),
            r'\[privacy\] with batch norm, .* choose norm = "group"'),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_with_what_would(tmp_path, changes, said):
    with refused(said):
        read(tmp_path, *changes)


def test_more_steps_than_are_reckoned_with_are_refused(tmp_path):
    job = read(tmp_path, *FEDAVG, ("sample_rate = 0.3", "sample_rate = 1e-9"))
    with refused(
        r"'digits': privacy.sample_rate = 1e-09 makes [0-9,]+ steps in its rounds,"
        r" 1,000,000,000"
    ):
        job_spends(job, "1")


def test_more_noise_than_is_reckoned_with_is_refused(tmp_path):
    with refused(r"sigma = '40000' by sample_rate = 0.3, .* is over 100,000; lower sigma, or"):
        job_spends(read(tmp_path), "40000")
    assert job_spends(read(tmp_path, *FEDAVG), "40000")  # it has no step on all records
