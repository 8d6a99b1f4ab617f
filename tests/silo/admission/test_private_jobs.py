"""What a silo's own people are told of a private job; test_admission.py has what others are."""

from dataclasses import replace

import pytest
from support.private_jobs import private_job

from staddle.algorithms.job import job as jobs
from staddle.files.packages import Package
from staddle.silo.admission.private_jobs import advice


@pytest.mark.parametrize(
    ("records", "said"),
    [
        (4, []),  # one a step
        (
            3,
            [
                (
                    "a step draws 0.75 of this silo's 3 training records on average, so most"
                    " steps are pure noise; ask for"
                )
            ],
        ),
        (99_999, []),
        (
            100_000,
            [
                (
                    "delta = 0.00001 is not below 1 / 100000, one per training record of this"
                    " silo: the"
                )
            ],
        ),
    ],
)
def test_advice_is_on_steps_without_records_and_on_a_large_delta(made, records, said):
    job = private_job(made)  # q = 1/4, delta = 1e-5
    found = list(advice(job, records))
    assert len(found) == len(said)
    assert all(text.startswith(begin) for text, begin in zip(found, said, strict=True))
    assert list(advice(replace(job, privacy=None), records)) == []


def test_packages_whose_code_runs_are_said_to_be_trusted(made, monkeypatch):
    """Nothing in Python holds back code that means to leak.

    So whoever admits the job is told whose it is.
    """
    job = private_job(made)
    found = (Package("lung", "0.1", "ab" * 32), Package("softper", "2", "cd" * 32))
    monkeypatch.setattr(jobs, "packages_of", lambda *_: found)
    said = list(advice(replace(job, method_name="softper"), 1000))
    assert [text.partition(", not of")[0] for text in said] == [
        "the job runs code of the installed package lung 0.1",
        "the job runs code of the installed package softper 2",
    ]
    monkeypatch.undo()
    assert list(advice(replace(job), 1000)) == []
