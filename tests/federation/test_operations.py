"""An operator submits, watches, stops and resumes jobs with the command line.

Real processes, real TLS.
"""

import csv
import json

import numpy as np
import pytest
import safetensors.torch
import torch
from federation.conftest import TIMING
from typer.testing import CliRunner

from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.tasks.counting import flattened
from staddle.bundle.trained import load
from staddle.commands.federation import local_federation
from staddle.commands.main import app
from staddle.errors import LocalError, RefusedError

SILOS = ("north", "east", "south")
# nobody is held for lost within 30 s: silos come back in up to ten
PATIENT = {**TIMING, "beat_seconds": 5, "hold_seconds": 2}


@pytest.fixture
def staddle(start):
    """A coordinator without jobs or silos, and ``call`` for the operator's command line."""
    running = start(*SILOS)
    made = [running]

    def call(*arguments, code=0):
        result = CliRunner().invoke(app, ["job", *map(str, arguments), "--operator", str(made[1])])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, result.output
        return result.output

    def begin(*documents):
        for document in documents:
            running.job(document)
        running.configure(PATIENT, [])
        coordinator = running.restart_coordinator()
        made.append(local_federation.write_operator(running.federation, running.address))
        return running, coordinator, call

    return begin


def check_tables(running, call, tmp_path):
    """What job "two" counts: the simulation's sums, and the same words everywhere."""
    metrics = same_as_simulated(running, "two").metrics
    shown = json.loads(call("show", "two", "--json"))["rounds"]
    assert shown[-1]["metrics"] == {name: value.tolist() for name, value in metrics[-1].items()}
    assert np.shape(shown[-1]["metrics"]["confusion.trained"]) == (10, 10)
    assert np.shape(shown[-1]["metrics"]["scores.trained"]) == (10, 2, 8)
    assert "confusion.trained" not in shown[0]["metrics"]  # tables of the newest round alone
    counting = running.jobs[1].counting
    said = counting.of_sums(shown[-1]["metrics"])
    assert shown[-1]["measures"] == flattened(said)
    assert shown[0]["measures"].keys() == {"accuracy.delivered", "accuracy.trained"}
    lines = call("show", "two").splitlines()
    balanced = f"balanced {said['trained']['balanced_accuracy']:.1%}, AUROC "
    assert [line for line in lines if line.startswith("round 1: ") and balanced in line]
    rows = [line for line in lines if line.startswith("│ 9 ")]
    assert f"{said['trained']['classes'][9]['records']:,}" in rows[0].split()
    arguments = ["job", "results", "two", "--config", str(running.federation.coordinator_config)]
    found = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "two")])
    assert found.exit_code == 0
    assert found.stderr == (
        "no model among them: by method fedper, the values of classifier stay at silos; each silo"
        " has its own model, in jobs/two/model of its folder\n"
    )
    assert not (tmp_path / "two" / "model").exists()
    beside = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "near")])
    assert "model: is a model of job 'one'; choose another --out for 'two'" in str(beside.exception)
    with (tmp_path / "two" / "rounds.csv").open() as file:
        table = list(csv.DictReader(file))
    majority = [
        counting.of_sums({name: value.tolist() for name, value in sums.items()})["trained"][
            "majority"
        ]
        for sums in metrics
    ]
    assert [float(row["majority.trained"]) for row in table] == majority
    kept = json.loads((tmp_path / "two" / "job.json").read_text())["rounds"]
    assert kept[0]["metrics"] == {name: value.tolist() for name, value in metrics[0].items()}
    report = json.loads((running.job_folder(running.jobs[1], "north") / "report.json").read_text())
    final = report["final"]["trained"]
    assert np.array(final["confusion"]).sum() == report["final"]["tested"]
    assert final["measures"]["balanced_accuracy"] == report["final"]["balanced_trained"]


def check_shared_model(running, path, told):
    """The coordinator's folder: signed by it, and the values that each silo has at the end."""
    assert told.splitlines()[-1] == str(path)
    roster = running.federation.folder / "roster.json"
    arguments = ["model", "verify", "--model", str(path), "--roster", str(roster)]
    found = CliRunner().invoke(app, arguments).stdout
    assert f"made by    coordinator coordinator of federation {running.federation.name}" in found
    assert "signed by  coordinator (" in found
    shared, kept = load(path), running.model(running.jobs[0], "north")
    for part, module in shared.module.parts.items():
        for name, value in module.state_dict().items():
            assert torch.equal(value, kept.parts[part][name])
    reported = shared.description.reported
    assert (reported.round, reported.silos, reported.measures.keys()) == (1, SILOS, {"accuracy"})


def signed(running, name):
    return running.federation.folder / "jobs" / f"{name}.json"


def same_as_simulated(running, name):
    (job,) = (job for job in running.jobs if job.name == name)
    expected = simulate(job, running.shards())
    running.check_models(job, expected)
    return expected


def test_jobs_are_submitted_watched_and_give_results(staddle, document, tmp_path):
    tables = {"confusion": True, "score_bins": 8}
    running, _, call = staddle(
        document("one", SILOS), document("two", SILOS, "fedper", metrics=tables)
    )
    assert call("list") == "no jobs\n"
    assert "one" in call("submit", signed(running, "one"))
    assert "two" in call("submit", signed(running, "two"))
    call("submit", signed(running, "one"))  # again: nothing changes
    for silo in SILOS:
        running.start_silo(silo)
    watched = call("watch", "one").splitlines()
    assert "completed" in watched[-1]
    assert [line for line in watched if line.startswith("round 1 closed: north, east, south: ")]
    assert json.loads(call("watch", "two", "--json").splitlines()[-1])["outcome"] == "completed"
    assert [job["job"] for job in json.loads(call("list", "--json"))] == ["one", "two"]
    shown = json.loads(call("show", "one", "--json"))
    expected = same_as_simulated(running, "one")
    sums = [{name: int(value) for name, value in metrics.items()} for metrics in expected.metrics]
    assert [closed["metrics"] for closed in shown["rounds"]] == sums
    call("results", "one", "--out", tmp_path / "far")
    assert sorted(path.name for path in (tmp_path / "far").iterdir()) == ["job.json", "rounds.csv"]
    arguments = ["job", "results", "one", "--config", str(running.federation.coordinator_config)]
    near = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "near")])
    assert near.exit_code == 0
    check_shared_model(running, tmp_path / "near" / "model", near.stdout)
    again = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "near")])
    assert "no model among them: " in again.stderr
    assert "near/model: exists already; move it away" in again.stderr
    with (tmp_path / "near" / "rounds.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["correct.trained"]) for row in rows] == [s["correct.trained"] for s in sums]
    assert rows[0]["members"] == "north east south"
    model = safetensors.torch.load_file(tmp_path / "near" / "model.safetensors")
    kept = running.model(running.jobs[0], "north")
    assert model.keys() == {
        f"{part}.{name}" for part, values in kept.parts.items() for name in values
    }
    check_tables(running, call, tmp_path)
    with pytest.raises(RefusedError, match="no job 'nosuch'"):
        call("stop", "nosuch")
    arguments[2] = "nosuch"
    failed = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "no")]).exception
    assert isinstance(failed, LocalError)
    assert "has no job 'nosuch'; it has one, two" in str(failed)


def test_a_stopped_job_resumes_after_a_restart_to_the_same_result(staddle, document):
    running, coordinator, call = staddle(
        document("long", SILOS, "fedper", rounds=3), document("next", SILOS, rounds=1)
    )
    running.start_silo("north")
    running.start_silo("east")
    south = running.start_daemon("south", "once:egress.intent long 1")
    call("submit", signed(running, "long"))
    south.wait_for("killed", 60)  # without it this round does not end
    assert "stopped" in call("stop", "long")
    running.start_daemon("south")
    call("submit", signed(running, "next"))  # its turn has come
    assert "completed" in call("watch", "next").splitlines()[-1]
    stopped = json.loads(call("show", "long", "--json"))
    assert stopped["stage"] == "stopped"
    assert stopped["round"] == 1
    assert coordinator.stop() == 0
    running.restart_coordinator()
    assert json.loads(call("show", "long", "--json"))["stage"] == "stopped"
    call("resume", "long")
    assert "completed" in call("watch", "long").splitlines()[-1]
    same_as_simulated(running, "long")


def test_what_is_not_signed_by_an_operator_is_refused(staddle, document):
    running, _, call = staddle(document("one", SILOS))
    path = signed(running, "one")
    altered = json.loads(path.read_bytes())
    altered["document"]["rounds"] = 99
    bad = path.with_name("bad.json")
    bad.write_text(json.dumps(altered))
    with pytest.raises(RefusedError) as caught:
        call("submit", bad)
    assert caught.value.code == "JOB_SIGNATURE"
    bad.write_bytes(b"[]")
    # Said before anybody is asked.
    with pytest.raises(LocalError, match="not a signed job, which staddle job sign makes"):
        call("submit", bad)
    assert call("list") == "no jobs\n"
