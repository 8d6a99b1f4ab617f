"""What a silo's own people are told of a private job; test_admission.py has what others are."""

from dataclasses import replace
from importlib.metadata import EntryPoint

import pytest
from support.private_jobs import private_job

from staddle.files import packages
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


def test_a_method_of_another_package_is_said_to_be_trusted(made, monkeypatch):
    """Nothing in Python holds back code that means to leak.

    So whoever admits the job is told whose it is.
    """
    job = private_job(made)
    entry = EntryPoint("softper", "softper:SoftPer", packages.METHODS)
    monkeypatch.setattr(packages, "entry_points", lambda **_: [entry])
    (said,) = advice(replace(job, method_name="softper"), 1000)
    assert said.startswith(
        "method 'softper' is code of the installed package unknown, not of Staddle"
    )
    assert list(advice(job, 1000)) == []
