"""What a person reads before an approval: what is asked and allowed, and what is new."""

import os
import shutil

import pytest
from support.refusals import refused
from support.signed_federation import job_document

from staddle.algorithms.data.dataset import digits
from staddle.commands.federation import local_federation
from staddle.commands.policy.asked import MARK
from staddle.commands.silo.approval import reviewed
from staddle.silo import config as configs
from staddle.silo.admission import approvals

SILOS = ["a", "b", "c", "d"]
PRIVATE = {
    "security": {"secure_aggregation": "required", "weight_most": 2000},
    "min_cohort": 3,
    "training": {"epochs": 1, "lr": 0.05},
    "privacy": {"epsilon": 4.0, "delta": 1e-5, "sample_rate": 0.1},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    federation = local_federation.make(tmp_path_factory.mktemp("review") / "f", [*SILOS, "e"])
    jobs = {
        name: local_federation.sign_job(federation, job_document(silos, name=name, **changes))
        for name, silos, changes in (
            ("scan-1", SILOS, {}),
            ("scan-2", [*SILOS[:3], "e"], {"purpose": "For another test"}),
            ("other", SILOS, {"method": {"name": "fedper"}}),
            ("guarded-7", SILOS, PRIVATE),
        )
    }
    local_federation.write_silo(federation, "a", "localhost:7443", digits(), list(jobs.values()))
    return federation


@pytest.fixture
def read(made, tmp_path):
    """What is shown of an offered job, where these jobs were accepted, the last one last."""
    config = configs.load(made.silo_config("a")).model_copy(update={"directory": tmp_path})
    approvals.begin(tmp_path)

    def call(name, *accepted):
        for age, other in enumerate(reversed(accepted)):
            path = tmp_path / "jobs" / other / "job.json"
            path.parent.mkdir(parents=True)
            shutil.copy(made.folder / "jobs" / f"{other}.json", path)
            os.utime(path, (1000 - age, 1000 - age))
        signed = (made.folder / "jobs" / f"{name}.json").read_bytes()
        (tmp_path / approvals.FOLDER / approvals.OFFERS / f"{name}.json").write_bytes(signed)
        found, _, lines = reviewed(config, name)
        assert found == signed
        return lines

    return call


def rows(lines):
    """By what is asked: the job's, the policy's, and whether the job asks for all of it."""
    begin = next(i for i, line in enumerate(lines) if line.startswith("asked of this silo"))
    table = lines[begin + 1 : lines.index("", begin)]
    second, third = (lines[begin].index(head) for head in ("by the job", "by its policy"))
    return {
        line[:second].strip(): (
            line[second:third].strip(),
            line[third:].removesuffix(MARK).strip(),
            line.endswith(MARK),
        )
        for line in table
    }


def test_what_is_asked_stands_next_to_what_is_allowed(read):
    found = rows(read("scan-1"))
    assert found.pop("bytes per round") == ("54,856", "at most 67,108,864", False)
    assert found.pop("numbers in model/extractor.fc1.weight") == ("8,192", "at most 8,192", True)
    assert found.pop("blind sums") == ("no", "blind or not", True)
    assert found.pop("differential privacy") == ("no", "[privacy] or not", True)
    assert found == {}


def test_of_a_blind_private_job_also_its_sums_and_its_budget(read):
    found = rows(read("guarded-7"))
    assert found["blind sums"] == ("yes", "blind or not", False)
    assert found["silos of a sum"] == ("4", "at least 3", False)
    assert found["of these, honest"] == ("3", "at least 2", False)
    assert found["silos assumed to collude"] == ("1", "at least 1", True)
    assert found["sums over changing silos"] == ("no", "no", False)
    assert found["epsilon"] == ("3.9996", "at most 3.9996 in all jobs", True)
    assert found["delta"] == ("0.00001", "at most 0.00001", True)
    assert found["noise"] == ("local", "local alone", False)


def test_a_job_is_compared_with_the_last_of_a_name_like_its_own(read):
    lines = read("scan-2", "scan-1", "other")
    begin = next(i for i, line in enumerate(lines) if line.startswith("compared with job"))
    assert lines[begin:] == [
        "compared with job 'scan-1', which this silo accepted before, these points are new:",
        "  purpose: For another test (before: For a test)",
        "  silos: new: e; no longer: d",
    ]


def test_without_such_a_name_with_the_last_one(read):
    said = "\n".join(read("guarded-7", "scan-1", "other"))
    assert "compared with job 'other', which this silo accepted before, these points are" in said
    assert "  method: fedavg (before: fedper)" in said
    assert "  blind sums: yes (before: no)" in said
    assert "what leaves: new: " in said
    assert "privacy: epsilon = 4.0 at delta = 0.00001, protects each record, local noise" in said


def test_nothing_to_compare_with_and_nothing_new(read, made, tmp_path):
    assert "this is the first job on this data set here" in read("scan-1", "scan-1")
    again = job_document(SILOS, name="scan-12", seed=5)
    local_federation.sign_job(made, again)
    said = " ".join(" ".join(read("scan-12")).split())
    assert said.endswith("accepted before, nothing is new but its name and its draws")
    with refused("no job 'absent' waits for a person here; those that do: scan-1, scan-12"):
        config = configs.load(made.silo_config("a")).model_copy(update={"directory": tmp_path})
        approvals.offered(config, "absent")
