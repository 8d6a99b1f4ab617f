"""``staddle privacy``: jobs before they run, and budgets next to a running agent."""

import json
import shutil
import sys
from decimal import Decimal

import pytest
import torch
from support.ledgers import write_privacy_head
from support.private_jobs import undrafted
from support.refusals import refused
from support.signed_federation import job_document
from typer.testing import CliRunner

from staddle.algorithms.data.dataset import Dataset
from staddle.algorithms.job.job import Job
from staddle.algorithms.job.privacy import job_spends
from staddle.commands.federation import local_federation
from staddle.commands.main import app
from staddle.commands.privacy import plan as privacy_plan
from staddle.commands.privacy import promise
from staddle.commands.privacy import show as privacy_show
from staddle.errors import LocalError, PeerError
from staddle.security.dp.budget import Budget
from staddle.security.dp.budget_records import MechanismSteps, NoiseSharing
from staddle.security.dp.rdp import Event, cost, group, shown
from staddle.security.identity.keys import load_keys
from staddle.security.ledger.egress_ledger import Ledger
from staddle.security.log.segments import segments

JOB = """
version = 1
name = "first"
seed = 7
purpose = "For a test"
rounds = 20
silos = ["a", "b", "c", "d"]

[method]
name = "fedaims"

[model]
name = "convnet-digits"
classes = 10
norm = "group"

[training]
lr = 0.1

[privacy]
epsilon = 8
delta = 1e-5
sample_rate = 0.05
metrics_sigma = 40
"""
DELTA = 1e-5
RECORDS = Dataset(torch.zeros(4, 1, 8, 8), torch.arange(4))
PRIVATE = {"privacy": {"epsilon": 8.0, "delta": DELTA, "sample_rate": 0.1}}


@pytest.fixture(autouse=True)
def no_other_process(monkeypatch):
    """What the second opinion says is tested where it is.

    Here it is of one mind with the first, or has none.
    """

    def opinion(events, delta):
        return cost(events, delta) * 0.9

    monkeypatch.setattr(privacy_plan, "opinion", opinion)
    monkeypatch.setattr(privacy_show, "opinions", lambda a: [opinion(e.events, e.delta) for e in a])


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    folder = tmp_path_factory.mktemp("privacy") / "federation"
    made = local_federation.make(folder, ["a", "b", "c", "d"])
    document = job_document(made.silos, name="signed")
    local_federation.sign_job(made, {**document, **PRIVATE})
    plain = local_federation.sign_job(made, {**document, "name": "plain"})
    local_federation.write_silo(made, "a", "127.0.0.1:1", RECORDS, [plain])
    return made


def call(*arguments):
    result = CliRunner().invoke(app, ["privacy", *(str(argument) for argument in arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def planned(tmp_path):
    def run(*options, old="", new=""):
        assert old in JOB
        path = tmp_path / "job.toml"
        path.write_text(JOB.replace(old, new))
        return call("plan", path, *options).output

    return run


def test_a_signed_job_runs_code_of_the_packages_that_are_named(federation):
    model = {"name": "typed", "classes": 3, "head": "fc", "input": [1, 8, 8]}
    model["options"] = {"option": 1}
    document = job_document(federation.silos, name="outside", model=model)
    local_federation.sign_job(federation, {**document, **PRIVATE})
    path = federation.folder / "jobs" / "outside.json"
    sys.modules.pop("other_models", None)
    with refused("code of the installed package other-models, which .* name it with --package"):
        call("plan", path)
    assert "other_models" not in sys.modules
    assert "job 'outside' (fedavg)" in call("plan", path, "--package", "other-models").output


def test_each_purpose_and_all_together(planned, tmp_path):
    found = json.loads(planned("--json"))
    spends = job_spends(Job.from_toml(tmp_path / "job.toml"), found["sigma"])
    purposes = [release["purpose"] for release in found["releases"]]
    assert purposes == ["histogram", "training", "statistics", "metrics"]
    for release, one in zip(found["releases"], spends, strict=True):
        wanted = {name: getattr(one, name) for name in ("purpose", "sigma", "q", "steps")}
        assert release == {**wanted, "epsilon": shown(cost([one], DELTA))}
    assert found["epsilon"] == shown(cost(spends, DELTA))
    assert Decimal("7.9") < Decimal(found["epsilon"]) <= 8
    assert found["epsilon_prv"] == shown(cost(spends, DELTA) * 0.9)
    assert (found["rounds"], found["spare_rounds"], found["planned_here"]) == (20, 1, True)
    a_round = [Event(found["sigma"], "0.05", 20), Event("20", "1", 1), Event("40", "1", 1)]
    assert found["round_epsilon"] == shown(cost(a_round, DELTA))
    assert (found["count_sigma"], found["class_shows_from"]) == ("10.0", "30.0")
    assert "batch" not in found


def test_the_same_in_words(planned):
    said = planned("--records", "500")
    planned_ = "noise 0.983 clips per step, planned"
    often = "covers 20 rounds of the silo that is drawn most often"
    mean = "from 500 records, a step draws 25 on average; their mean gradient, of norm 1 at most"
    for part in (
        f"epsilon 8.0 at delta = 0.00001 of each silo's data set; {planned_}",
        "by RDP, the bound that is enforced",
        "by PRV, a tighter bound, for information only",
        f"{often}, and 1 more that crashes may interrupt",
        "noise of standard deviation 10.0: a class counts as present from 30.0",
        f"{mean}, gets noise of 0.0393",
    ):
        assert part in said
    given = planned(old="sample_rate", new='sigma = "2"\nsample_rate')
    assert "noise 2 clips per step, as the job names it" in given


def test_at_another_delta_the_cost_is_another_and_records_may_not_suffice(planned):
    one, other = json.loads(planned("--json")), json.loads(planned("--json", "--delta", "1e-6"))
    assert one["sigma"] == other["sigma"]
    assert other["delta"] == "0.000001"
    assert Decimal(other["epsilon"]) > 8 > Decimal(one["epsilon"])
    with pytest.raises(LocalError, match="--delta 1: give a number between 0 and 1"):
        planned("--delta", "1")
    with refused(r"would draw 0\.5 of them .* from 0\.05 to at least 0\.1, better 1, or leave"):
        planned("--records", "10")
    with pytest.raises(LocalError, match=r"delta = 1e-05 would allow .*; lower it below 5e-06"):
        planned("--records", "200000")


def test_what_is_not_private_or_costs_too_much_has_no_plan(planned, federation):
    with refused(r"job\.toml: \[privacy\] no noise of its steps .* raise statistics_sigma"):
        planned(old="epsilon = 8", new="epsilon = 0.5")
    with refused(r"plain\.toml: job 'plain' has no \[privacy\] table.*staddle job init --private"):
        call("plan", federation.folder / "jobs" / "plain.toml")


def test_a_signed_job_and_its_signature(federation, tmp_path):
    signed, roster = federation.folder / "jobs" / "signed.json", federation.folder / "roster.json"
    assert call("plan", signed).output.endswith("signature not checked (give --roster)\n")
    checked = call("plan", signed, "--roster", roster).output
    assert "signature" not in checked
    assert "as the job names it" in checked
    altered = tmp_path / "altered.json"
    altered.write_text(signed.read_text().replace('"epsilon":"8.0"', '"epsilon":"80.0"'))
    with pytest.raises(PeerError, match="changed after it was signed"):
        call("plan", altered, "--roster", roster)


# Budgets.
DIGEST = "ab" * 32
TABLE = '\n[dataset.data]\nunit = "record"\nepsilon = 6.0\ndelta = 1e-5\nrecords_per_person = 3\n'


class Silo:
    """A silo's folder, with a budget as the agent keeps it."""

    def __init__(self, federation, place):
        self.folder = place / "a"
        shutil.copytree(federation.folder / "a", self.folder)
        shutil.copy(federation.folder / "roster.json", place)
        self.config, self.policy = self.folder / "silo.toml", self.folder / "policy.toml"
        self.policy.write_text(undrafted(self.policy.read_text()) + TABLE)
        self.keys = load_keys(self.folder / "keys")
        self.budgets = self.folder / "state" / "privacy"

    def open(self, dataset="data", known=False):
        return Budget.open(
            self.budgets / dataset, dataset, "local", "a", self.keys.log, known=known
        )

    def ledger(self):
        return Ledger.open(self.folder / "state" / "ledger", "a", "local", self.keys.log)

    def shown(self):
        return json.loads(call("show", "--config", self.config, "--json").output)


@pytest.fixture
def silo(federation, tmp_path):
    return Silo(federation, tmp_path)


def spend(budget, digest=DIGEST, name="first", steps=100, taken=None):
    one = budget.reserve(
        name, digest, 0, "training", [MechanismSteps(sigma="1.1", q="0.02", steps=steps)]
    )
    if taken is not None:
        budget.commit(one, [taken])


def test_before_anything_was_spent(silo):
    assert silo.shown() == [
        {
            "dataset": "data", "unit": "record", "policy": {"epsilon": "6.0", "delta": "0.00001"},
            "limit": None, "jobs": [],
        }
    ]  # fmt: skip
    assert (
        "data set 'data': nothing spent of epsilon 6.0 at delta = 0.00001"
        in call("show", "--config", silo.config).output
    )
    silo.policy.write_text(silo.policy.read_text().replace(TABLE, ""))
    assert silo.shown() == []
    assert "no data set has a budget" in call("show", "--config", silo.config).output


def test_what_was_spent_is_read_while_it_is_written(silo):
    with silo.open() as budget:
        budget.set_limit("8", "0.00001", "e3" * 32)
        spend(budget, taken=40)
        spend(budget)
        spend(budget, "cd" * 32, "second")
        (found,) = silo.shown()
        first, second = Event("1.1", "0.02", 140), Event("1.1", "0.02", 100)
        total = cost([first, second], DELTA)
        assert found["spent"] == shown(budget.epsilon()) == shown(total)
        assert Decimal(found["left"]) == 8 - Decimal(found["spent"])
        assert found["spent_prv"] == shown(total * 0.9)
        assert found["jobs"] == [
            {
                "job": name, "digest": digest, "epsilon": shown(cost([event], DELTA)),
                "epsilon_prv": shown(cost([event], DELTA) * 0.9), "noise": "local",
                "unit": "record", "open": 1,
            }
            for name, digest, event in (("first", DIGEST, first), ("second", "cd" * 32, second))
        ]  # fmt: skip
        epsilon, delta = group(total, DELTA, 3)
        assert found["person"] == {"records": 3, "epsilon": shown(epsilon), "delta": f"{delta:.3g}"}
        said = call("show", "--config", silo.config).output
    assert (
        f"data set 'data': epsilon {found['spent']} of 8 spent at delta = 0.00001, {found['left']}"
        " left" in said
    )
    assert (
        "the policy now says epsilon 6.0 at delta = 0.00001, which takes effect when the"
        " agent restarts" in said
    )
    assert (
        f"a person with up to 3 records: epsilon {shown(epsilon)}, delta = {delta:.3g} (group"
        " privacy" in said
    )
    assert (
        "2 reservations open; open reservations, for a round that is running or that a crash"
        " ended, count as spent" in " ".join(said.split())
    )


def test_each_job_says_what_it_protects(silo):
    """A record, or the whole silo; budgets of earlier releases do not say it of shared noise."""
    steps = MechanismSteps(sigma="2", q="1", steps=3, shared=True)
    with silo.open() as budget:
        budget.set_limit("800", "0.00001", "e3" * 32)
        spend(budget, taken=40)
        for number, sharing in enumerate(
            (
                NoiseSharing(unit="silo", dishonest=2),
                NoiseSharing(unit="record", dishonest=0),
                None,
            )
        ):
            digest = f"{number:02}" * 32
            one = budget.reserve(f"j{number}", digest, 0, "shared", [steps], sharing=sharing)
            budget.commit(one, [3])
    jobs = silo.shown()[0]["jobs"]
    assert [(job["noise"], job["unit"], job.get("dishonest")) for job in jobs] == [
        ("local", "record", None),
        ("shared", "silo", 2),
        ("shared", "record", 0),
        ("shared", None, None),
    ]
    said = call("show", "--config", silo.config).output
    rows = [list(map(str.strip, line.split("│")))[1:-1] or [""] for line in said.splitlines()]
    found = {row[0]: (row[2], row[5]) for row in rows if row[0] in {"first", "j0", "j1", "j2"}}
    assert found == {
        "first": ("each record", "local"),
        "j0": ("the whole silo", "shared, 2 dishonest"),
        "j1": ("each record", "shared, 0 dishonest"),
        "j2": ("not recorded", "shared"),
    }


def test_an_unfinished_line_is_no_fault_and_a_data_set_without_policy_is_shown(silo):
    with silo.open() as budget, silo.open("older") as older:
        for each in (budget, older):
            each.set_limit("6", "0.00001", "e3" * 32)
            spend(each, taken=100)
        with segments(silo.budgets / "data")[-1].open("ab") as file:
            file.write(b'{"type":"budget.rese')
        data, other = silo.shown()
        assert data["spent"] == other["spent"]
        assert (other["dataset"], other["policy"]) == ("older", None)
        said = call("show", "--config", silo.config).output
    assert "the policy has no table for this data set any more" in said
    assert "the policy now says" not in said


def gone(silo):
    shutil.rmtree(silo.budgets / "data")


def cut(silo):
    (path,) = segments(silo.budgets / "data")
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def altered(silo):
    (path,) = segments(silo.budgets / "data")
    path.write_bytes(path.read_bytes().replace(b'"steps":100', b'"steps":101'))


def unsigned(silo):
    (silo.budgets / "data" / "checkpoint").unlink()


def of_another(silo):
    shutil.move(silo.budgets / "data", silo.budgets / "other")


def rolled_back(silo):
    shutil.rmtree(silo.budgets / "data")
    shutil.copytree(silo.folder / "old", silo.budgets / "data")


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (cut, "records were cut off: there are 2, and the folder itself holds"),
        (altered, "records were rewritten: the folder itself holds a signed checkpoint of 3"),
        (unsigned, "checkpoint: is missing; restore"),
        (of_another, "privacy/other/checkpoint: "),
        (rolled_back,
            ("was rolled back or altered: records were cut off: there are 2, and the silo's"
            " ledger holds")),
    ],
)  # fmt: skip
def test_a_budget_that_does_not_hold_is_not_shown(silo, harm, said):
    with silo.open() as budget:
        budget.set_limit("8", "0.00001", "e3" * 32)
    shutil.copytree(silo.budgets / "data", silo.folder / "old")
    with silo.open(known=True) as budget, silo.ledger() as ledger:
        spend(budget)
        write_privacy_head(
            ledger, "data", budget.head(), epsilon="1.0000", delta="0.00001", limit="8"
        )
    assert silo.shown()[0]["jobs"]
    harm(silo)
    with pytest.raises(LocalError, match=said):
        silo.shown()


def test_a_budget_that_is_gone_is_told_beside_those_that_are_not(silo):
    with silo.open() as budget, silo.ledger() as ledger:
        budget.set_limit("8", "0.00001", "e3" * 32)
        spend(budget)
        write_privacy_head(
            ledger, "data", budget.head(), epsilon="1.0000", delta="0.00001", limit="8"
        )
    with silo.open("older") as budget:
        budget.set_limit("2", "0.00001", "e3" * 32)
    gone(silo)
    lost, there = silo.shown()
    said = (
        "privacy/data: gone, and with it what was spent on data set 'data', epsilon 1.0000 of 8 by"
        " the ledger; restore"
    )
    assert said in lost["lost"]
    assert (there["dataset"], there["spent"]) == ("older", "0.0000")
    result = CliRunner().invoke(app, ["privacy", "show", "--config", str(silo.config)])
    assert result.exit_code == 1
    assert said in " ".join(result.output.split())
    assert "data set 'older': " in result.output


def test_a_key_of_another_silo_signs_no_budget(silo, federation):
    with silo.open() as budget:
        budget.set_limit("8", "0.00001", "e3" * 32)
    shutil.rmtree(silo.folder / "keys")
    shutil.copytree(federation.keys("b"), silo.folder / "keys")
    with pytest.raises(LocalError, match="checkpoint"):
        silo.shown()


def test_the_bound_for_a_group():
    assert group(1.0, 1e-5, 1) == (1.0, 1e-5)
    assert group(2.0, 1e-6, 3) == pytest.approx((6.0, 3e-6 * 2.718281828459045**4))
    assert group(500.0, 1e-6, 3)[1] == float("inf")


def test_a_plan_says_in_three_lines_what_whom_and_how_well(tmp_path):
    path = tmp_path / "blind.toml"
    call_job = CliRunner().invoke(
        app, ["job", "init", str(path), "--blind", "--purpose", "For a test"]
    )
    assert call_job.exit_code == 0, call_job.output
    text = path.read_text().replace("\nepsilon = 8.0\n", "\nepsilon = 3.0\n")
    found = {}
    for noise, written in (("shared", text), ("local", text.replace('"shared"', '"local"'))):
        path.write_text(written)
        document = json.loads(call("plan", path, "--records", "500", "--json").output)
        assert document["noise"] == noise
        # under shared noise the step is one of four silos, of which three have noise enough
        silos, shares = (4, 4 / 3) if noise == "shared" else (1, 1)
        drawn = silos * 50
        deviation = float(document["sigma"]) * shares**0.5 / drawn
        assert document["batch"]["expected"] == str(drawn)
        assert document["batch"]["noise"] == f"{deviation:.3g}"
        found[noise] = document["promise"]
        said = " ".join(call("plan", path).output.split())
        assert all(f"{what}: {text}" in said for what, text in found[noise].items())
    assert found["shared"]["protects"] == found["local"]["protects"]
    assert (
        "at most e^3 = 20.1 times likelier, but for a probability of 1e-05"
        in (found["local"]["protects"])
    )
    assert "on 3 of 4 silos that add their share" in found["shared"]["from whom"]
    assert "whoever works together" in found["local"]["from whom"]
    for noise, figures in (("shared", promise.SHARED), ("local", promise.LOCAL)):
        nearest = max([known for known in figures if known <= 3] or [min(figures)])
        expected = (
            f"FedAvg reached {figures[nearest]:.0f} % with {noise} noise at epsilon {nearest}"
        )
        assert expected in found[noise]["expect"]
        assert ("(less at 3)" in found[noise]["expect"]) == (nearest > 3)


def test_a_plan_says_that_a_whole_silo_is_protected_by_twice_the_noise(tmp_path):
    path = tmp_path / "whole.toml"
    assert (
        CliRunner()
        .invoke(app, ["job", "init", str(path), "--blind", "--purpose", "For a test"])
        .exit_code
        == 0
    )
    text = path.read_text().replace('\n# unit = "record"\n', '\nunit = "silo"\n')
    path.write_text(text.replace("\nsample_rate = 0.1\n", "\nsample_rate = 1.0\n"))
    document = json.loads(call("plan", path, "--json").output)
    assert Decimal(document["noise_in_clips"]) == 2 * Decimal(document["sigma"])
    assert [row["purpose"] for row in document["releases"]] == ["training-shared"]
    assert not {"count_sigma", "class_shows_from"} & document.keys()
    said = " ".join(call("plan", path).output.split())
    assert "of all that a silo uploads; noise" in said
    assert f"{document['noise_in_clips']} clips (2 sigma) per update, planned" in said
    assert "protects: all records of a silo together" in said
    assert "far worse than training alone, which reveals nothing" in said
    # the figures of jobs that protect records promise too much
    assert "93 %" not in document["promise"]["expect"]
    assert "counts per class" not in said
    with refused("no step draws records"):
        call("plan", path, "--records", "500")
