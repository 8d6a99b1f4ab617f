"""Trainer processes apart from the agent: how they are begun and ended, and what they see."""

import json
import os
import signal
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE, Popen

import pytest
from support.jobs import make_data, make_job
from support.private_jobs import opened, policy_for, private_job, steps_of
from support.recording_gate import World
from support.refusals import refused

from staddle.algorithms.method import initial_state
from staddle.algorithms.training.accountant import PrivateSilo
from staddle.algorithms.training.silo_round import state_to_bytes
from staddle.errors import CancelledError, ExhaustedError, LocalError
from staddle.security.dp.noise import Randomness
from staddle.silo.admission.accountant import JobAccount
from staddle.silo.job_folder import JobFolder
from staddle.silo.training import launched
from staddle.silo.training.launched import PROCESS, TrainerProcesses, dealt
from staddle.silo.training.order import DeviceTable, OrderedRecords
from staddle.silo.training.trainer import SiloRound, TrainingDevice

from ..conftest import records


@pytest.fixture
def asked():
    job = make_job("fedper", model={"name": "ppfl-mlp", "input": [1, 8, 8]}).for_federation()
    of = OrderedRecords(job, make_data(20), make_data(8, 1))
    return SiloRound(of, "a", 0, initial_state(job.method(), "a"), {})


@pytest.fixture
def place(tmp_path):
    def make(*command, **fields):
        return TrainerProcesses(command, tmp_path / "orders", DeviceTable(), {}, "data", **fields)

    yield make
    # whatever came of it, no record stays
    assert not list((tmp_path / "orders").glob("*"))


def test_a_process_of_its_own_trains_as_the_thread_does(asked, place):
    found, expected = place(*PROCESS).outcome(asked), TrainingDevice().outcome(asked)
    assert state_to_bytes(found.state) == state_to_bytes(expected.state)
    assert found.report == expected.report
    assert found.contributions.keys() == expected.contributions.keys()


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        ("echo of the trainer; kill -9 $$", "was ended by SIGKILL, as Linux does where memory"),
        ("echo of the trainer; exit 3", "ended with code 3 and left no outcome; it printed: of"),
        ("exit 0", "ended with code 0 and left no outcome$"),
    ],
)
def test_a_process_that_leaves_no_outcome_costs_the_round(asked, place, script, complaint):
    with refused(f"the trainer {complaint}"):
        place("sh", "-c", script, "{order}").outcome(asked)


def test_no_two_trainers_see_one_gpu_at_a_time(asked, place):
    """The first ends once the second has begun: neither could end with a GPU of the other's."""
    with tempfile.TemporaryDirectory() as folder:
        os.mkfifo(met := Path(folder) / "met")
        script = f'if [ "$CUDA_VISIBLE_DEVICES" = 0,1 ]; then cat {met}; else echo > {met}; fi'
        told = f"{script}; echo sees $CUDA_VISIBLE_DEVICES; exit 3"
        both = place("sh", "-c", told, "{order}", free=dealt(("0,1", "2")))

        def seen(_):
            with pytest.raises(LocalError, match="it printed: ") as failed:
                both.outcome(asked)
            return str(failed.value).rpartition("sees ")[2]

        with ThreadPoolExecutor(2) as pool:
            assert sorted(pool.map(seen, range(2))) == ["0,1", "2"]
    assert len(both.free) == 2
    with refused("it printed: sees$"):  # without a list its environment says nothing
        place("sh", "-c", "echo sees $CUDA_VISIBLE_DEVICES; exit 3", "{order}").outcome(asked)


def test_a_command_that_is_not_there_is_named(asked, place):
    with refused("training.command: no program 'no-such-program'; install it"):
        place("no-such-program", "{order}").outcome(asked)


def test_a_stop_ends_all_that_a_command_began(asked, place, tmp_path):
    """Of a child that ignores its parent's end, too."""
    os.mkfifo(tmp_path / "begun")
    began = threading.Event()

    def listen():
        # The child has it open as long as it lives: the end of its file is the child's end.
        with (tmp_path / "begun").open() as line:
            line.readline()
            began.set()
            line.read()

    listening = threading.Thread(target=listen)
    listening.start()
    script = f"(echo; exec sleep 1000) > {tmp_path / 'begun'} & wait"
    with pytest.raises(CancelledError):
        place("sh", "-c", script, "{order}").outcome(replace(asked, cancelled=began.is_set))
    listening.join(60)
    assert not listening.is_alive()


def test_what_ignores_a_stop_is_killed(asked, place, tmp_path, monkeypatch):
    monkeypatch.setattr(launched, "GRACE_SECONDS", 0.1)
    script = f"trap '' TERM; echo > {tmp_path / 'deaf'}; while :; do sleep 1000; done"
    deaf = (tmp_path / "deaf").exists
    with pytest.raises(CancelledError):
        place("sh", "-c", script, "{order}").outcome(replace(asked, cancelled=deaf))


def test_a_trainer_ends_with_the_agent(tmp_path):
    """Its standard input ends when the agent is gone, however that ended."""
    os.mkfifo(tmp_path / "order.json")  # which it would wait for for ever
    program = [word.replace("{order}", str(tmp_path)) for word in PROCESS]
    with Popen(program, stdin=PIPE) as process:
        process.stdin.close()
        assert process.wait(120) == 1


SPY = """
import json, os, sys
order, to = sys.argv[1:]
files = {name: open(os.path.join(order, name), "rb").read().hex() for name in os.listdir(order)}
said = {"environment": dict(os.environ), "arguments": sys.argv, "files": files}
open(to, "w").write(json.dumps(said))
"""


def test_no_secret_is_in_its_order_environment_or_arguments(made, place, tmp_path, monkeypatch):
    """Of a silo with keys, a ledger and a budget, whose environment has a password."""
    for name in ("DATABASE_PASSWORD", "AWS_SECRET_ACCESS_KEY", "TRAINER_MAY_SEE"):
        monkeypatch.setenv(name, f"value-of-{name}")
    job = private_job(made, "watched", method="fedper", privacy={"histogram_sigma": 1.0})
    world = World(made, tmp_path, policy_for(made, job))
    of = OrderedRecords(job, records(), records(12, seed=1))
    folder = JobFolder(tmp_path / "jobs" / "watched")
    folder.accept(b"{}", "data")
    spy = place(sys.executable, "-c", SPY, "{order}", str(tmp_path / "seen"),
        environment=("TRAINER_MAY_SEE",))  # fmt: skip
    with opened(world) as budget:
        private = PrivateSilo(JobAccount(budget, job, folder), Randomness)
        state = initial_state(job.method(), "silo-a")
        with refused("ended with code 0 and left no outcome"):
            spy.outcome(SiloRound(of, "silo-a", 0, state, {}, private=private))
        # as after a crash: nobody can know what was drawn
        assert steps_of(budget, job) == {("2", "0.25"): 4, ("1.0", "1"): 1}

    seen = json.loads((tmp_path / "seen").read_text())
    assert seen["environment"]["TRAINER_MAY_SEE"] == "value-of-TRAINER_MAY_SEE"
    text = json.dumps([seen["environment"], seen["arguments"]])
    assert "PASSWORD" not in text
    assert "SECRET" not in text
    keys = [*made.files.folder.rglob("*.key"), *world.path.parent.rglob("*.key")]
    assert len(keys) > 5
    held = [bytes.fromhex(content) for content in seen["files"].values()]
    for path in keys:
        for secret in filter(lambda line: len(line) >= 32, path.read_bytes().split(b"\n")):
            assert not any(secret in content for content in held), path
            assert secret.decode(errors="replace") not in text
    # nor the way to them, or to the coordinator
    order = json.loads(bytes.fromhex(seen["files"]["order.json"]))
    assert order.keys() == {
        *("version", "silo", "round", "trained", "threads", "job", "packages", "weights"),
        *("limits", "paid", "source", "on"),
    }
    assert str(made.files.folder) not in json.dumps(order)


def test_an_exhausted_budget_begins_no_process(made, place, tmp_path):
    job = private_job(made, "dear", method="fedper", privacy={"histogram_sigma": 1.0})
    world = World(made, tmp_path, policy_for(made, job, epsilon=0.001))
    of = OrderedRecords(job, records(), records(12, seed=1))
    folder = JobFolder(tmp_path / "jobs" / "dear")
    folder.accept(b"{}", "data")
    with opened(world) as budget:
        private = PrivateSilo(JobAccount(budget, job, folder), Randomness)
        state = initial_state(job.method(), "silo-a")
        with pytest.raises(ExhaustedError):
            place("sh", "-c", f"touch {tmp_path / 'ran'}", "{order}").outcome(
                SiloRound(of, "silo-a", 0, state, {}, private=private)
            )
    assert not (tmp_path / "ran").exists()


def test_orders_of_an_agent_that_was_killed_are_removed(place, tmp_path):
    (tmp_path / "orders" / "order-1").mkdir(parents=True)
    (tmp_path / "orders" / "order-1" / "records.safetensors").touch()
    place("true").clear()
    assert not list((tmp_path / "orders").iterdir())


def test_an_order_is_open_to_whom_the_folder_of_orders_is_open(asked, place, tmp_path):
    (tmp_path / "orders").mkdir()
    (tmp_path / "orders").chmod(0o2770)
    script = f'stat -c %a "$1" "$1/order.json" "$1/records.safetensors" > {tmp_path / "modes"}'
    with pytest.raises(LocalError):
        place("sh", "-c", script, "sh", "{order}").outcome(asked)
    folder, *files = (int(mode, 8) for mode in (tmp_path / "modes").read_text().split())
    assert folder == 0o2770
    assert all(mode & 0o040 and not mode & 0o007 for mode in files)


def test_a_kill_of_the_process_alone_is_told(asked, place, tmp_path):
    """By kill -9 from outside, as of the system where memory runs out."""
    pid = tmp_path / "pid"

    def kill_once():
        if pid.exists() and pid.read_text().endswith("\n"):
            os.kill(int(pid.read_text()), signal.SIGKILL)
        return False

    script = f"echo $$ > {pid}; exec sleep 1000"
    with refused("was ended by SIGKILL"):
        place("sh", "-c", script, "{order}").outcome(replace(asked, cancelled=kill_once))
