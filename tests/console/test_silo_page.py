"""What a silo's page shows of a folder and a ledger that a test made."""

import json
from decimal import Decimal
from types import SimpleNamespace

import pytest
import torch
from support.counted import counts
from support.ledgers import (
    HASH,
    send,
    write_control_close,
    write_control_open,
    write_job_accept,
    write_job_decline,
    write_start,
)
from support.signed_federation import job_document

from staddle.algorithms.course import SiloState
from staddle.algorithms.data.dataset import Dataset
from staddle.algorithms.training.silo_round import RoundReport
from staddle.commands.federation import local_federation
from staddle.console import contracts, silo_facts, silo_page
from staddle.console.contracts import ContractLine
from staddle.console.silo_facts import SiloFacts
from staddle.console.silo_page import SiloJobLine
from staddle.security.identity.keys import load_keys
from staddle.security.ledger import messages, overview
from staddle.security.ledger.egress_ledger import Ledger
from staddle.security.ledger.messages import Totals
from staddle.security.ledger.records import Peer
from staddle.silo import config as configs
from staddle.silo import status
from staddle.silo.job_folder import JobFolder
from staddle.silo.parts.contributions import Contributions
from staddle.silo.status import SiloJobStatus


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A silo with one job and a ledger."""
    found = local_federation.make(tmp_path_factory.mktemp("made") / "f", ("a", "b"))
    job = local_federation.sign_job(found, job_document(("a", "b"), name="first", rounds=4))
    data = Dataset(torch.zeros(2, 1, 8, 8), torch.zeros(2, dtype=torch.int64))
    local_federation.write_silo(found, "a", "127.0.0.1:1", data, [job])
    folder = JobFolder(found.state("a") / "jobs" / "first")
    folder.accept((found.folder / "jobs" / "first.json").read_bytes(), "data")
    for round_, right in enumerate((4, 8)):
        folder.save_round(round_, round_, SiloState({}), Contributions({}))
        folder.add_round(RoundReport(round_, 30, counts(10, 5), counts(10, right), 0.5), {})
    key = load_keys(found.keys("a")).log
    with Ledger.open(found.state("a") / "ledger", "a", found.name, key) as ledger:
        write_start(ledger, "staddle 9", HASH, HASH)
        write_job_accept(ledger, "first", HASH, "operator")
        write_job_decline(ledger, "second", HASH, "operator", ["no rule", "<b>"])
        write_job_decline(ledger, "third", HASH, "operator", ["no rule"])
        write_job_accept(ledger, "third", HASH, "operator")
        send(ledger, job="first")
        ref = write_control_open(ledger, "a-1", Peer(id="coordinator", spki=HASH), 10, 1000).seq
        write_control_close(ledger, ref, 3, 120)
    return SimpleNamespace(
        federation=found,
        config=configs.load(found.silo_config("a")),
        ledger=found.state("a") / "ledger",
    )


@pytest.fixture(scope="module")
def facts(made):
    return silo_facts.read(made.config)


def test_what_left_is_counted_by_job_part_and_reader_today_and_ever(facts):
    assert (facts.verified.ok, facts.verified.signed, facts.software) == (True, True, "staddle 9")
    lines = silo_page.left_lines(facts, facts.day)
    assert {(line.job, line.part, line.readers) for line in lines} == {
        ("(control)", "polls and heartbeats", "coordinator"),
        ("first", "model", "coordinator"),
        ("first", "metric", "coordinator"),
    }
    assert all(line.today == line.ever for line in lines)
    assert {line.ever.bytes for line in lines if line.job == "(control)"} == {120}
    earlier = silo_page.left_lines(facts, "1999-12-31")
    assert [line.today for line in earlier] == [Totals()] * 3
    assert [line.ever for line in earlier] == [line.ever for line in lines]
    assert silo_page.total([line.ever for line in lines]).bytes == sum(
        totals.bytes for totals in facts.ever.values()
    )


def test_only_one_day_counts_as_today(facts, made):
    view = overview.view(facts.verified, messages.records(made.ledger))
    other = silo_facts.of_day(view, "1999-12-31")
    assert (other.messages, other.protocol, other.sessions) == ([], [], [])
    assert silo_facts.of_day(view, facts.day) == view


def test_a_changed_ledger_says_nothing_but_what_is_wrong(made, tmp_path):
    path = made.ledger / "seg-00000001.jsonl"
    kept = path.read_bytes()
    path.write_bytes(kept.replace(b"no rule", b"no RULE", 1))
    try:
        found = silo_facts.read(made.config)
    finally:
        path.write_bytes(kept)
    assert not found.verified.ok
    assert (found.ever, found.today, found.decisions, found.software) == ({}, {}, (), "")
    assert silo_page.verdict(found) == "the ledger does NOT hold"
    gone = made.config.model_copy(update={"directory": tmp_path})
    assert "no such folder" in silo_facts.read(gone).problem
    assert silo_page.verdict(silo_facts.read(gone)) == "the ledger cannot be read"
    assert silo_page.verdict(None) == "the ledger is being verified"


def test_jobs_stand_with_why_they_were_declined(made, facts):
    jobs = status.jobs(made.config)
    first, second = silo_page.job_lines(jobs, facts)
    assert first == SiloJobLine("first", "running", "fedavg", 2, 4)
    # "third" was accepted later
    assert (second.name, second.state, second.reasons) == ("second", "declined", ("no rule", "<b>"))
    assert silo_page.job_lines(jobs, None) == [first]
    gone = {first.name: 2.0, second.name: 3.0, "older": 0.0, "newer": 1.0}
    lines = silo_page.job_lines(jobs, facts, gone=gone)
    assert [line.name for line in lines] == [first.name, second.name, "newer", "older"]
    assert (lines[3].state, lines[3].at) == ("no longer offered", "1970-01-01T00:00:00+00:00")
    *_, line = silo_page.job_lines(jobs, facts, unruled={second.name: 1.0, "fourth": 2.0})
    assert (line.name, line.state) == ("fourth", "waits for a person")
    assert line.reasons == (
        "the policy has no rule for it yet: review it with staddle silo accept fourth",
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "running"),
        ({"finished": True}, "finished"),
        ({"failed": True}, "ended without a result"),
        ({"finished": True, "problem": "x"}, "unreadable"),
    ],
)
def test_a_job_is_in_one_state(fields, said):
    assert silo_page.state_of(SiloJobStatus("x", **fields)) == said


def test_models_stand_next_to_the_constant_answer(made):
    (model,) = silo_page.model_lines(made.config, status.jobs(made.config))
    assert (model.job, model.tested, model.score) == ("first", 10, "accuracy")
    assert (model.delivered, model.trained) == ("50.0%", "80.0%")
    assert model.constant == "always the most frequent class 100.0%"
    assert [line.last for line in model.chart.lines] == ["50.0%", "80.0%"]
    assert model.kept == ""


def test_data_sets_are_named_and_a_missing_one_is_said(made):
    (line,) = silo_page.data_lines(made.config, {"data": ["first"]})
    assert (line.name, line.kind, line.records_of, line.problem) == ("data", "npz", "", "")
    assert line.jobs == ("first",)
    file = made.federation.folder / "a" / "data.npz"
    away = file.rename(file.with_name("away"))
    try:
        (line,) = silo_page.data_lines(made.config, {})
    finally:
        away.rename(file)
    assert "data.npz" in line.problem


def test_a_gauge_is_exact_in_words_and_bounded_as_a_meter():
    policy = SimpleNamespace(epsilon=Decimal(8), delta=Decimal("0.00001"))
    limit = SimpleNamespace(epsilon="8", delta="0.00001")
    budget = SimpleNamespace(
        limit=limit, spent=2.0, jobs=(SimpleNamespace(job="j"),), left=Decimal(6)
    )
    report = SimpleNamespace(dataset="d", policy=policy, budget=budget, lost="")
    none = SimpleNamespace(dataset="e", policy=policy, budget=None, lost="")
    lost = SimpleNamespace(dataset="f", policy=None, budget=None, lost="gone")
    gauge, empty, gone = silo_page.gauges([report, none, lost])
    assert (gauge.spent, gauge.limit, gauge.left, gauge.jobs) == ("2.0000", "8", "6", ("j",))
    assert (gauge.share, empty.share) == (0.25, 0.0)
    assert (empty.spent, empty.limit, empty.delta) == ("0", "8", "0.00001")
    assert gone.problem == "gone"
    budget.spent = 9.0
    assert silo_page.gauges([report])[0].share == 1.0


FEATURES = [{"name": "age", "unit": "years", "least": "0", "most": "120"}, {"name": "dose"}]


def test_a_jobs_features_are_compared_with_a_table(tmp_path):
    file, job = tmp_path / "t.csv", tmp_path / "job.json"
    file.write_text("age,sex,y\n30,f,0\n300,m,1\n")
    job.write_text(json.dumps({"document": {"features": FEATURES, "model": {}}}))
    declared = contracts.contract_of(job).features
    line = ContractLine("j", "data", (), declared=declared)
    csv = SimpleNamespace(kind="csv", file=file, delimiter=",", encoding="utf-8", decimal=".")
    outside, missing = contracts.differences(SimpleNamespace(sources={"data": csv}), line)
    assert "outside 0 to 120 years" in outside
    assert "'dose' is no column" in missing
    assert contracts.differences(SimpleNamespace(sources={}), line) is None
    assert contracts._shown(declared[0]) == "age (0 to 120 years)"
    assert contracts._shown(declared[1]) == "dose (any number)"


def test_the_summary_says_what_runs():
    job = SiloJobStatus("j", done=1, rounds=4)
    facts = SiloFacts("now", 0.0)
    assert silo_page.summary(True, [job], None) == (
        "Agent runs; the ledger is being verified; j: 1 of 4 rounds"
    )
    assert silo_page.summary(False, [], facts) == "Agent does not run; the ledger cannot be read"
