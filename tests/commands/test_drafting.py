import json

import pytest
from typer.testing import CliRunner

from staddle.algorithms.catalog import METHODS
from staddle.algorithms.exchange import Kind
from staddle.algorithms.job import Job
from staddle.commands import examples, local_federation
from staddle.commands.drafting import WHAT, draft
from staddle.commands.policy import app
from staddle.errors import LocalError, RefusedError
from staddle.files import parse_json
from staddle.security import policy as policies
from staddle.security import roster as rosters
from staddle.silo.admission import outflows

SILOS = ["a", "b", "c"]


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    return local_federation.make(tmp_path_factory.mktemp("drafting") / "federation", SILOS)


@pytest.fixture(scope="module")
def jobs(federation, tmp_path_factory):
    """The example job of each method."""
    folder, found = tmp_path_factory.mktemp("jobs"), {}
    for name in METHODS:
        path = folder / f"{name}.toml"
        path.write_text(examples.job_text(name))
        found[name] = Job.from_toml(path)
    return found


@pytest.mark.parametrize("method", METHODS)
def test_a_draft_allows_its_job_and_no_other_method(federation, jobs, method):
    roster = rosters.load(federation.folder / "roster.json")
    policy = policies.parse(draft([jobs[method]]).encode(), "policy.toml")
    assert all(outflow.decision.allow for outflow in outflows(jobs[method], roster, policy))
    for other, job in jobs.items():
        allowed = [verdict for flow in outflows(job, roster, policy) for verdict in flow.decision.tensors]
        assert other == method or all(verdict.reasons for verdict in allowed)


def test_a_draft_is_of_the_largest_round_twice(federation, jobs):
    """One round's bytes, and once more what a broken upload sends again; a byte more does not leave."""
    roster, job = rosters.load(federation.folder / "roster.json"), jobs["pfedsim"]
    flows = outflows(job, roster, policies.parse(draft([job]).encode(), "policy.toml"))
    largest = max(flow.size for flow in flows)
    limit = policies.parse(draft([job, jobs["local"]]).encode(), "p").file.limits.max_bytes_per_round
    assert 2 * largest <= limit < 2 * largest + 1024


def test_a_draft_of_several_jobs_has_each_rule_once_with_the_larger_tensors(jobs, federation):
    small, large = (
        local_federation.sign_job(
            federation,
            {
                "version": 1,
                "name": name,
                "seed": 1,
                "rounds": 3,
                "silos": SILOS,
                "method": {"name": "fedper"},
                "model": {"name": "lenet5", "classes": 10, "input": [3, side, side]},
                "training": {"lr": 0.1},
            },
        )
        for name, side in (("small", 32), ("large", 48))
    )
    for pair in ([small, large], [large, small]):
        policy = policies.parse(draft(pair).encode(), "policy.toml")
        rules = {rule.name: rule for rule in policy.file.allow}
        assert set(rules) == {"fedper-extractor", "fedper-metrics"}
        most = max(spec.elements for part in large.up(0) if part.name == "extractor" for spec in part.tensors)
        assert rules["fedper-extractor"].max_elements == most
        assert "'small', 'large'" in draft([small, large])


def test_a_draft_says_of_each_rule_what_it_is(jobs):
    assert set(WHAT) == set(Kind)
    text = draft([jobs["fedssa"]])
    flowing = " ".join(text.replace("\n# ", " ").split())
    assert "'rows': the last layer's rows of the classes seen here; they tell which classes this silo has." in flowing
    assert all(len(line) <= 100 for line in text.splitlines() if line.startswith("#"))


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_policy_new_writes_a_file_that_check_accepts(federation, tmp_path):
    job = local_federation.sign_job(
        federation,
        {
            "version": 1,
            "name": "one",
            "seed": 1,
            "rounds": 3,
            "silos": SILOS,
            "method": {"name": "pfedsim"},
            "model": {"name": "cnn-digits", "classes": 10},
            "training": {"lr": 0.1},
        },
    )
    signed, roster = federation.folder / "jobs" / "one.json", federation.folder / "roster.json"
    out = tmp_path / "policy.toml"
    done = run("new", signed, "--roster", roster, "--out", out)
    assert done.exit_code == 0, done.output
    assert f"{len(policies.load(out).file.allow)} rules" in done.output
    assert run("check", signed, "--policy", out, "--roster", roster).exit_code == 0
    before = out.read_bytes()
    assert isinstance(run("new", signed, "--roster", roster, "--out", out).exception, LocalError)  # it is there
    assert out.read_bytes() == before
    document = parse_json(signed.read_bytes(), "job")
    document["document"]["rounds"] = job.rounds + 1
    (tmp_path / "forged.json").write_text(json.dumps(document))
    assert isinstance(
        run("new", tmp_path / "forged.json", "--roster", roster, "--out", tmp_path / "other").exception, RefusedError
    )
    assert not (tmp_path / "other").exists()
