"""What evaluation counts, read from documents of this release and of others."""

import pytest
from support.jobs import make_job
from support.refusals import refused

from staddle.algorithms.job.evaluated import evaluated, evaluation_of, form_of


def test_a_document_says_what_its_job_counts():
    job = make_job("fedper", metrics={"confusion": True})
    assert evaluated(evaluation_of(job.document())).counting == job.counting
    assert form_of(job.document()) == job.counting.score


def test_a_document_of_an_earlier_release_is_a_classification():
    document = make_job("fedper").document()
    for key in ("task", "metrics", "privacy"):
        del document[key]
    assert evaluated(evaluation_of(document)).counting.score.key == "accuracy"


@pytest.mark.parametrize(
    "changes",
    [
        {"model": None, "task": {"kind": "multilabel", "later": 3}},
        {"model": [], "metrics": {"later": True}},
        {"model": {"classes": "many"}},
        {"task": {"kind": "survival", "cuts": [1, 2]}},  # the model has three classes
        {"task": {"kind": ["survival"]}},
        {"task": None},
        {"metrics": {"score_bins": 1}},
    ],
)
def test_a_document_of_a_later_release_is_an_error_of_its_own(changes):
    document = {**make_job("fedper").document(), **changes}
    with refused("the job does not say what is evaluated"):
        evaluated(evaluation_of(document))
