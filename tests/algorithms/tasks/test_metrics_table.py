"""The [metrics] table: the parts that it adds to what crosses, and what they ask of a job."""

import pytest
from pydantic import ValidationError
from support.refusals import refused

from staddle.algorithms.exchange.parts import Kind, Part, Sum, TensorSpec
from staddle.algorithms.job.job import Job
from staddle.algorithms.methods.fedavg import FedAvg
from staddle.algorithms.tasks.table_counting import RIGHT

BOTH = {"confusion": True, "score_bins": 4}


def test_what_it_asks_for_crosses_in_every_round_before_the_counts(make_job):
    job = make_job("fedavg", metrics=BOTH)
    assert [part.name for part in job.up(3)] == ["model", "confusion", "scores", RIGHT.name]
    assert job.up(4) == ()
    (phase, _) = job.document()["schema"]
    confusion, scores, _ = phase["up"][1:]
    assert (confusion["kind"], confusion["exchange"]) == ("METRIC", "sum.total")
    table = {"name": "trained", "dtype": "int64", "shape": [3, 3]}
    bounds = {"least": "0.0", "most": "1099511627776.0"}
    assert {**table, **bounds} in confusion["tensors"]
    assert [tensor["shape"] for tensor in scores["tensors"]] == [[3, 2, 4]] * 2
    again = Job.from_document(job.document(), "job.json", None)
    assert again.counting == job.counting
    assert make_job("fedavg").up(0)[-2].name == "model"


@pytest.mark.parametrize(
    ("classes", "metrics", "why"),
    [
        (3, {"score_bins": 1}, "_bins = 1 tells no scores apart; write 64, or 0 for none"),
        (3, {"risk_bins": 1}, "_bins = 1 tells no scores apart; write 64, or 0 for none"),
        (257, {"confusion": True},
            r"metrics.confusion takes 66,049 numbers per model, \[257, 257\], at most 65,536"),
        (200, {"score_bins": 200},
            r"metrics.score_bins takes 80,000 numbers per model, \[200, 2, 200\], at most"),
        (3, {"targets": True},
            "metrics.targets does nothing where the task is classification; take it out"),
        (3, {"risk_bins": 8}, "metrics.risk_bins does nothing where the task is classification"),
        (3, {"roc": True}, "roc"),
    ],
)  # fmt: skip
def test_tables_without_use_or_too_large_are_refused(make_job, classes, metrics, why):
    with pytest.raises(ValidationError, match=why):
        make_job("fedavg", model={"classes": classes}, metrics=metrics)


def test_blind_they_are_summed_over_all_silos(make_job):
    """Test records by class hardly change, so sums over several sets would reveal single silos."""
    blind = {"secure_aggregation": "required", "colluders": 0}
    fields = {"silos": list("abcdefgh"), "min_cohort": 3, "security": blind}
    assert len(make_job("fedavg", **fields).batches) > 1
    assert make_job("fedavg", **fields, metrics=BOTH).batches == (tuple("abcdefgh"),)
    with refused("part 'confusion' .*write participation = 1.0"):
        make_job("fedavg", **fields, metrics=BOTH, participation=0.5).document()


def test_where_holders_are_counted_no_table_shows_classes_of_few(make_job):
    blind = {"secure_aggregation": "required", "min_holders": 4, "colluders": 0}
    fields = {"silos": list("abcdef"), "min_cohort": 3, "security": blind}
    assert make_job("fedproto", **fields).counted
    with refused("part 'confusion' has the test records of every class, also of one that fewer"):
        make_job("fedproto", **fields, metrics={"confusion": True}).document()


def test_a_method_has_no_part_of_this_kind(make_job, monkeypatch):
    own = Part("own", Kind.METRIC, Sum("total"), (TensorSpec("n", "int64", ()),))
    monkeypatch.setattr(FedAvg, "up", lambda *_: (own,))
    with refused(
        "part 'own' has kind METRIC, .* that Staddle adds; choose another, such as COUNTS"
    ):
        make_job("fedavg").document()
