import os
import sys

import pytest
from mlflow.environment_variables import MLFLOW_DISABLE_TELEMETRY
from mlflow.tracking import MlflowClient
from support.refusals import refused
from support.simulated_jobs import make_run
from support.tracked_points import SCORE, point

from staddle.simulator.run.folder import folder_of
from staddle.simulator.tracking.mlflow import MlflowRun, check_installed


@pytest.fixture(autouse=True)
def nowhere_else(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    # Remembered, since a run sets it.
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "false")
    monkeypatch.delenv("MLFLOW_DISABLE_TELEMETRY")


@pytest.mark.parametrize("package", ["mlflow", "sqlalchemy"])
def test_without_the_package_the_extra_is_named(monkeypatch, package):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with refused(r"pip install 'staddle\[tracking\]'"):
        check_installed()


def test_a_run_that_goes_on_stands_there_once(tmp_path):
    run, other = make_run("pfedsim", rounds=3), make_run("fedavg")
    folder, beside = folder_of(tmp_path, run), folder_of(tmp_path, other)
    for each in (folder, beside):
        each.mkdir(parents=True)
    killed = MlflowRun(tmp_path, folder, run, ())
    killed.add([point(1, 0.1), point(2, 0.2)])
    killed.add([point(3, 0.3)])  # after the last snapshot
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    MlflowRun(tmp_path, beside, other, ()).close()

    resumed = MlflowRun(tmp_path, folder, run, [point(1, 0.1)])
    resumed.add([point(2, 0.2), point(3, 0.3)])
    resumed.add([point(4, 0.4)])
    resumed.close()

    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name(run.job.name)
    found = {one.info.run_name: one for one in client.search_runs([experiment.experiment_id])}
    assert found.keys() == {"pfedsim, seed 7", "fedavg, seed 7"}
    own = found["pfedsim, seed 7"]
    assert own.info.status == "FINISHED"
    steps = client.get_metric_history(own.info.run_id, SCORE)
    assert [(one.step, one.value) for one in steps] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    assert own.data.params["method.name"] == "pfedsim"
    assert own.data.params["rounds"] == "3"
    assert own.data.tags["staddle.seed"] == "7"

    # of another database, or edited
    for kept in (b"0" * 32, b"\xff' OR '1"):
        (folder / "mlflow-run").write_bytes(kept)
        again = MlflowRun(tmp_path, folder, run, [point(1, 0.1)])
        again.close()
    assert len(client.search_runs([experiment.experiment_id])) == 4


def test_its_makers_are_told_nothing_unless_somebody_asks(monkeypatch):
    check_installed()
    assert MLFLOW_DISABLE_TELEMETRY.get() is True
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "false")
    check_installed()
    assert MLFLOW_DISABLE_TELEMETRY.get() is False


def test_a_place_that_cannot_be_used_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://there")
    with refused("MLflow at nonsense://there failed: .*without --track mlflow"):
        MlflowRun(tmp_path, tmp_path, make_run(), ())


def test_a_password_is_in_no_error(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://me:secret@there")
    with refused("MLflow at nonsense://there failed: ") as caught:
        MlflowRun(tmp_path, tmp_path, make_run(), ())
    assert "secret" not in str(caught.value)
