"""A federation of real processes for a notebook, and the operator's client."""

import os
from functools import partial

import numpy as np
import pytest
from support.jobs import make_data
from support.refusals import refused

import staddle
from staddle.api import federation as federations
from staddle.commands.federation.processes import ChildProcess
from staddle.errors import RefusedError

MODEL = {"name": "cnn-digits", "classes": 3}


@pytest.fixture(scope="module")
def begun(tmp_path_factory, fork_server):
    """Two silos, and a job that ended well; each daemon is forked where torch is imported."""
    folder = tmp_path_factory.mktemp("local") / "federation"
    # Of fewer records an honest model may lie beyond the limit of the drafted policies.
    data = {"north": make_data(160, 1), "east": (make_data(120, 2).x, make_data(120, 2).y)}
    forked = partial(ChildProcess, launch=fork_server.launch)
    with (
        pytest.MonkeyPatch.context() as patch,
        staddle.Federation.local(data=data, folder=folder) as federation,
    ):
        patch.setattr(federations, "ChildProcess", forked)
        job = federation.submit("first", method="fedper", model=MODEL, rounds=2)
        yield federation, job, job.wait()
        pids = [daemon.pid for daemon in federation._daemons]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_rounds_come_as_they_close(begun):
    federation, job, rounds = begun
    assert [closed["round"] for closed in rounds] == [0, 1]
    assert all(sorted(closed["members"]) == ["east", "north"] for closed in rounds)
    assert 0 <= rounds[-1]["measures"]["accuracy.trained"] <= 1
    assert job.status()["outcome"] == "completed"
    assert federation.silos == ("north", "east")


def test_each_silo_has_a_signed_model(begun):
    federation, job, _ = begun
    model = job.model("north")
    assert model.folder.signer.id == "north"
    x = federation.records["east"].held
    assert np.allclose(np.stack(list(model.predict(x).values())[2:]).sum(0), 1)


def test_the_operators_verbs_are_those_of_the_command(begun):
    federation, _, _ = begun
    with staddle.connect(federation.folder / "operator.toml") as operator:
        (status,) = operator.jobs()
        assert (status["job"], status["stage"], status["outcome"]) == (
            "first",
            "ended",
            "completed",
        )
        assert operator.show("first")["rounds"] == federation.operator.show("first")["rounds"]
        assert [report["outcome"] for report in operator.watch("first")][-1] == "completed"
        with refused("job 'first' has ended; to run it again"):
            operator.submit(federation.folder / "jobs" / "first.json")
        with pytest.raises(RefusedError, match="no job 'second' here"):
            operator.stop("second")


def test_what_is_wrong_with_a_job_is_told_before_any_process_begins(tmp_path):
    with staddle.Federation.local(silos=2, data="digits", folder=tmp_path / "new") as federation:
        with refused("unknown method 'fedpre'"):
            federation.submit("first", method="fedpre", model=MODEL)
        with refused("call submit"):
            _ = federation.operator
        assert federation._daemons == []


def test_records_are_dealt_out(tmp_path):
    made = staddle.Federation.local(
        silos=["north", "east"],
        data=make_data(120),
        partition=staddle.Dirichlet(5.0, silos=2, minimum=20),
        folder=tmp_path / "new",
    )
    assert sum(len(own) for own in made.records.values()) == 120
    assert set(made.records) == {"north", "east"}
    with refused("deals out 3 shares to 2 silos"):
        staddle.Federation.local(
            silos=2,
            data=make_data(120),
            partition=staddle.Dirichlet(5.0, silos=3),
            folder=tmp_path / "other",
        )
