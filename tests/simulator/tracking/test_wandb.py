import socket
import struct
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import wandb
from support.refusals import refused
from support.simulated_jobs import make_run
from support.tracked_points import SCORE, point
from wandb.proto.wandb_internal_pb2 import Record

from staddle.simulator.tracking.wandb import WandbRun, check_installed


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    # Remembered, since a run sets it.
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "true")
    monkeypatch.delenv("WANDB_ERROR_REPORTING")
    # A busy machine may take long to start its service.
    monkeypatch.setenv("WANDB__SERVICE_WAIT", "300")


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with refused(r"pip install 'staddle\[tracking\]'"):
        check_installed()


HEADER, EACH = 7, struct.Struct("<IHB")  # checksum, length, and whether it is whole


def history(path):
    """The rows of a run that was kept: its numbers by name."""
    data, at, rows = path.read_bytes(), HEADER, []
    while at < len(data):
        _, length, whole = EACH.unpack_from(data, at)
        assert whole == 1  # the file is smaller than a block
        at += EACH.size + length
        record = Record.FromString(data[at - length : at])
        if record.HasField("history"):
            rows.append(
                {".".join(one.nested_key) or one.key: one.value_json for one in record.history.item}
            )
    return rows


def test_a_run_that_goes_on_is_kept_once_and_nothing_is_sent(tmp_path):
    run = make_run("pfedsim")
    first = WandbRun(tmp_path, run, ())
    first.add([point(1, 0.125), point(2, 0.75)])  # the second after the last snapshot
    first.close()
    wandb.teardown()  # as at a process's end, when the files are complete
    second = WandbRun(tmp_path, run, [point(1, 0.125)])
    second.add([point(2, 0.25)])
    second.close()
    wandb.teardown()
    (kept,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert [(row["rounds"], row[SCORE]) for row in history(kept)] == [
        ("1", "0.125"),
        ("2", "0.25"),
    ]


def test_nothing_of_the_machine_is_kept(tmp_path, monkeypatch):
    """Whoever sends a kept run later sends what is in it."""
    monkeypatch.setattr(socket, "gethostname", lambda: "the-host-of-a-person")
    kept = WandbRun(tmp_path, make_run(), ())
    kept.add([point(1, 0.5)])
    kept.close()
    wandb.teardown()
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"rounds" in path.read_bytes()
    for own in ("the-host-of-a-person", sys.executable, str(Path.cwd()), sys.argv[0], "psutil"):
        assert own.encode() not in path.read_bytes()
    assert not [one for one in path.parent.rglob("files/*") if one.is_file()]


def test_faults_are_not_told_to_its_maker(monkeypatch):
    check_installed()
    assert wandb.env.error_reporting_enabled() is False
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "true")
    check_installed()
    assert wandb.env.error_reporting_enabled() is True


@pytest.mark.parametrize("edited", ["x/../../../others", "*", "", "\udcff"])
def test_an_edited_id_removes_nothing_of_others(tmp_path, monkeypatch, edited):
    folder = tmp_path / "run"
    others, earlier = tmp_path / "others", folder / "wandb" / "offline-run-1-x"
    for each in (others, earlier):
        each.mkdir(parents=True)
    (folder / "wandb-run").write_bytes(edited.encode(errors="surrogateescape"))
    monkeypatch.setattr("wandb.init", lambda **_: Mock(step=0))
    WandbRun(folder, make_run(), ())
    assert others.exists()
    assert earlier.exists()
    assert len((folder / "wandb-run").read_text()) == 32


def test_what_was_sent_is_not_sent_again(tmp_path, monkeypatch):
    sent = []
    asked = {}

    def init(**settings):
        asked.update(settings)
        return Mock(step=2, log=sent.append)

    monkeypatch.setattr("wandb.init", init)
    monkeypatch.setenv("WANDB_MODE", "online")
    resumed = WandbRun(tmp_path, make_run(), [point(1, 0.1)])
    resumed.add([point(2, 0.2), point(3, 0.3)])
    assert sent == [{"rounds": 3, SCORE: 0.3, "loss": 1 / 3}]
    assert (asked["resume"], asked["mode"]) == ("allow", "online")
    assert asked["id"] == (tmp_path / "wandb-run").read_text()


def test_a_failure_says_how_to_go_on(tmp_path, monkeypatch):
    def init(**settings):
        raise wandb.errors.CommError("no answer")

    monkeypatch.setattr("wandb.init", init)
    with refused("Weights & Biases failed: no answer; .*without --track wandb"):
        WandbRun(tmp_path, make_run(), ())


def test_a_mode_of_another_name_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "sometimes")
    with refused("WANDB_MODE is 'sometimes'; set online, offline or disabled"):
        WandbRun(tmp_path, make_run(), ())
