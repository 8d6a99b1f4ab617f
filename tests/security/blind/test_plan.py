"""What silo and coordinator both make of a blind round before its cohort."""

from dataclasses import replace

import pytest
from support.jobs import make_job

from staddle.algorithms.exchange.parts import delivered_items
from staddle.algorithms.job.job import Job
from staddle.algorithms.tasks.metrics_table import MetricsTable
from staddle.security.blind.plan import JobPlan

SILOS = ["a", "b", "c", "d"]
GIVEN = {
    "fedssa": {"t_stable": 3}, "fedaims": {"sampling": "algorithm2"}, "pfedsim": {"rho": 0.5},
    "fedavg": {},
}  # fmt: skip


def job_of(method):
    model = {"name": "convnet-digits"} if method == "fedaims" else {}
    blind = {"min_cohort": 3, "security": {"secure_aggregation": "required"}}
    return make_job(method, GIVEN[method], model, silos=SILOS, **blind)


def digest(method, round_, changed=""):
    """Of a round's delivery, with other values in one part."""
    job = job_of(method)
    items = delivered_items(job.down(round_))
    digests = [bytes([item.part == changed]) * 32 for item in items]
    return JobPlan(job).round(round_).model_digest(items, digests)


@pytest.mark.parametrize(
    ("method", "part"), [("fedssa", "header"), ("fedaims", "backbone"), ("fedavg", "model")]
)
def test_a_model_that_comes_down_to_all_is_part_of_the_digest(method, part):
    """Else a coordinator may hand silos different ones: FedSSA's header is no part of a sum."""
    assert digest(method, 2) != digest(method, 2, part)


def test_the_same_values_are_not_summed_a_second_time():
    assert digest("fedavg", 2) == digest("fedavg", 3)


def test_where_holders_are_counted_a_header_that_stays_the_same_ends_no_job():
    """Classes that too few hold come down empty; sums are over all silos, so none is left out."""
    assert digest("fedssa", 2) != digest("fedssa", 3)


@pytest.mark.parametrize(("method", "part"), [("fedaims", "block"), ("pfedsim", "extractor")])
def test_what_one_silo_gets_is_no_part_of_it(method, part):
    assert part in {item.part for item in delivered_items(job_of(method).down(3))}
    assert digest(method, 3) == digest(method, 3, part)


def test_a_round_that_sums_metrics_alone_is_known_by_its_number():
    assert digest("pfedsim", 3) == digest("pfedsim", 3, "model")
    assert digest("pfedsim", 3) != digest("pfedsim", 2)
    assert digest("pfedsim", 1) != digest("pfedsim", 1, "model")  # its first phase sums the model


def test_tables_of_test_counts_are_no_model():
    whole = replace(job_of("pfedsim"), metrics=MetricsTable(confusion=True, score_bins=4))
    first, later = (JobPlan(whole).round(round_) for round_ in (0, 3))
    assert [part.name for part in later.sums] == ["confusion", "scores", "metrics"]
    assert later.sums_no_model
    assert later.sums_metrics_alone
    assert not first.sums_no_model
    assert not JobPlan(whole).round(whole.length).sums_no_model  # which sums nothing


@pytest.mark.parametrize("method", GIVEN)
def test_each_part_crosses_in_one_way(method):
    plan = JobPlan(job_of(method))
    for round_ in range(plan.job.length + 1):
        now = plan.round(round_)
        ways = [part.name for way in (now.sums, now.rows, now.shared, now.uploads) for part in way]
        assert sorted(ways) == sorted(part.name for part in now.up)
        assert now.groups[0] == now.sums  # nothing of these jobs is a row
        before = {part.name for part in plan.round(round_ - 1).sums} if round_ else set()
        assert set(now.summed_before) == {part.name for part in now.down} & before


def test_a_round_is_planned_once(monkeypatch):
    """Its method is asked once per round, however many read the plan."""
    job, asked = job_of("fedavg"), []
    up = Job.up
    monkeypatch.setattr(Job, "up", lambda self, round_: asked.append(round_) or up(self, round_))
    plan = JobPlan(job)
    first = plan.round(2)
    asked.clear()
    assert plan.round(2) is first
    assert first.sums_down == first.sums_down
    assert first.published == ("model",)
    assert first.groups[0] == first.sums
    again = len(asked)
    assert first.sums_down[0].round == 1
    assert len(asked) == again
