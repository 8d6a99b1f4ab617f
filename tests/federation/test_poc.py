"""``staddle poc``: a federation that outlives its commands, first in processes as shipped.

Each test ends every process that was begun in its folder, however it ends.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from federation.conftest import check_logs, free_port
from federation.fork_server import Forked
from typer.testing import CliRunner

from staddle.commands.federation import background
from staddle.commands.federation.background import BackgroundDaemon
from staddle.commands.federation.processes import ChildProcess, running
from staddle.commands.main import app
from staddle.commands.poc import workspace as workspaces
from staddle.errors import AbortedError, LocalError
from staddle.security.identity import roster as rosters
from staddle.security.ledger.audit import ledger_folder, verify
from staddle.security.log.head import own_log_key
from staddle.security.log.lock import claimed, locked

SESSION = """
import os, runpy, sys
os.setsid()
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
ROWS = [(age, sex, (age + 20 * (sex == "f")) // 61) for age in range(30, 90) for sex in "fm"]


def staddle(*arguments):
    """What a command says; its error, if it has one, is raised."""
    done = CliRunner().invoke(app, [*map(str, arguments)])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the tests' own stay
    monkeypatch.setattr(workspaces, "ROUNDS", 2)
    yield tmp_path / "made"
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if any(str(tmp_path) in word for word in process.cmdline()):
                process.kill()
                process.wait()


@pytest.fixture
def fork(monkeypatch, fork_server):
    """Once called, further daemons are forked, in sessions of their own, but for those of modules
    that are ``shipped``: as shipped each would take the seconds of its imports.

    The call returns the list of those that were forked.
    """
    made, shipped = [], []

    def launch(command, **options):
        assert (command[:3], options["start_new_session"]) == ([sys.executable, "-P", "-m"], True)
        if command[3] in shipped:
            return subprocess.Popen(command, **options)
        forked = [*command[:2], "-c", SESSION, *command[3:]]
        made.append(Forked(fork_server, forked, str(Path.cwd()), [options["stderr"].fileno()] * 2))
        return made[-1]

    def begin(*modules):
        shipped[:] = modules
        popen = SimpleNamespace(Popen=launch, DEVNULL=subprocess.DEVNULL)
        monkeypatch.setattr(background, "subprocess", popen)
        return made

    yield begin
    for process in made:
        process.kill()
        process.wait()


@pytest.fixture
def files(tmp_path):
    """Options for three hospitals; what ``d.csv`` holds is nobody's yet."""
    options = ["--target", "ill"]
    for number, name in enumerate("abcd"):
        own = [f"{age},{sex},{ill}" for age, sex, ill in ROWS[number::4]]
        path = tmp_path / f"{name}.csv"
        path.write_text("\n".join(["age,sex,ill", *own]) + "\n")
        options += ["--data", path] if name != "d" else []
    return options


def states(folder):
    """The state of each daemon, as ``poc status`` tells it, and its process."""
    lines = [line.split() for line in staddle("poc", "status", folder).splitlines()]
    rows = {words[0]: words for words in lines if words and words[-1].endswith(".log")}
    return {name: int(words[-2]) if "runs" in words else None for name, words in rows.items()}


def check_ledger(folder, state, keys):
    roster = rosters.load(folder / "roster.json")
    found = verify(ledger_folder(state), key=own_log_key(roster.federation, keys))
    assert found.ok, found.problems


@pytest.mark.timeout(900)
def test_from_files_to_a_silo_that_moved_away(folder, files, tmp_path, fork, fork_server):
    """Two commands to a result; then a killed agent, one more silo, and one that moves."""
    said = staddle("poc", "up", folder, *files, "--port", free_port())
    assert "All keys and all records lie on this machine" in said
    first = states(folder)
    assert set(first) == {"coordinator", "a", "b", "c"}
    assert all(psutil.Process(pid).ppid() == os.getpid() for pid in first.values())
    assert all(os.getsid(pid) == pid for pid in first.values())

    said = staddle("poc", "run", folder)
    assert "federated" in said
    assert len([line for line in said.splitlines() if "completed" in line]) == 2
    before = (folder / "a" / "policy.toml").read_bytes()

    # another method, which the policies allow once they are told to; agents read them again
    text = (folder / "jobs" / "first.toml").read_text()
    (folder / "jobs" / "other.toml").write_text(
        text.replace('"first"', '"other"').replace('"pfedsim"', '"fedavg"')
    )
    with pytest.raises(LocalError, match="the policy has no rule for model"):
        staddle("poc", "run", folder, "other")
    said = staddle("poc", "run", folder, "other", "--allow")
    assert "other                    completed" in said
    assert (folder / "a" / "policy.before.toml").read_bytes() == before
    assert states(folder) == first

    # the same command changes nothing that runs, and starts what was killed
    fork()
    os.kill(first["b"], signal.SIGKILL)
    psutil.Process(first["b"]).wait()
    assert states(folder) == {**first, "b": None}
    assert "started: b;" in staddle("poc", "up", folder, *files, "--port", workspaces_port(folder))
    again = states(folder)
    assert {name for name in first if first[name] != again[name]} == {"b"}
    assert "everything runs already" in staddle("poc", "up", folder)

    for silo in "ab":
        (folder / silo / "policy.toml").write_bytes(before)
    said = staddle("poc", "add-silo", folder, "d", "--data", tmp_path / "d.csv")
    assert "d is a silo of" in said
    assert "c: its policy was changed by hand" in said
    assert {**states(folder), "d": None} == {**again, "d": None}  # nothing was restarted
    # of four silos jobs are blind, for which the policy of before has no rules
    shutil.copy(folder / "a" / "policy.toml", folder / "c" / "policy.toml")
    said = staddle("poc", "run", folder)
    assert " d " in said
    assert "blind" in said  # four silos, at last

    # one of them moves, with its ledger
    out = tmp_path / "moved.tar.gz"
    length = verify(ledger_folder(folder / "c" / "state")).records
    address = f"127.0.0.1:{workspaces_port(folder)}"
    said = staddle("poc", "export", folder, "c", out, "--coordinator", address)
    assert "two agents with one" in said
    assert out.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in (folder / "c").iterdir()] == ["exported.toml"]
    with pytest.raises(LocalError, match="c was exported before"):
        staddle("poc", "export", folder, "c", tmp_path / "other")
    assert "everything runs already" in staddle("poc", "up", folder)
    with tarfile.open(out) as archive:
        archive.extractall(tmp_path / "elsewhere", filter="tar")
    moved = tmp_path / "elsewhere" / "c"
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in moved.rglob("*.key"))
    text = (folder / "jobs" / "first-7.toml").read_text()
    (folder / "jobs" / "moved.toml").write_text(text.replace('"first-7"', '"moved"'))
    daemons = []
    with running(daemons):
        program = ("-m", "staddle.silo")
        daemons.append(ChildProcess("c", program, moved / "silo.toml", fork_server.launch))
        daemons[0].wait_for("connected", 120)
        staddle("poc", "run", folder, "moved")
        while daemons[0].wait_for("job.finished", 120)["job"] != "moved":
            pass
    check_ledger(folder, moved / "state", moved / "keys")
    assert verify(ledger_folder(moved / "state")).records > length

    assert "stopped: coordinator, a, b, d" in staddle("poc", "down", folder)
    assert not any(states(folder).values())
    assert staddle("poc", "down", folder) == "nothing ran\n"
    for silo in "abd":
        check_ledger(folder, folder / silo / "state", folder / silo / "keys")
    check_logs(folder)


def workspaces_port(folder):
    return json.loads((folder / "poc.json").read_text())["choices"]["port"]


@pytest.mark.timeout(300)
def test_a_port_that_is_taken_leaves_nothing_running(folder, files, fork):
    before = set(psutil.Process().children(recursive=True))  # of other tests, such as fork servers
    silos = fork("staddle.coordinator")  # whose exit code only its parent has
    # Not one that the kernel gives to connections: it must be free again right after.
    with (
        socket.create_server(("127.0.0.1", free_port())) as other,
        pytest.raises(AbortedError) as ended,
    ):
        staddle("poc", "up", folder, *files, "--port", other.getsockname()[1])
    assert "coordinator ended with code 1; the end of" in str(ended.value)
    assert "cannot listen on" in str(ended.value)
    assert not any(states(folder).values())
    assert set(psutil.Process().children(recursive=True)) <= before
    assert len(silos) == 3
    assert None not in [silo.poll() for silo in silos]
    # what was made stays, and the same command starts it
    fork()
    assert "started: coordinator, a, b, c" in staddle("poc", "up", folder)


def test_what_is_refused_before_anything_is_made(folder, files, tmp_path):
    refused = {
        "give --target": ("--data", tmp_path / "a.csv", "--data", tmp_path / "b.csv"),
        "one file; a federation": ("--target", "ill", "--data", tmp_path / "a.csv"),
        "no such file": (*files, "--data", tmp_path / "none.csv"),
        "leave --silos out": (*files, "--silos", "3"),
        "two files have one name": (*files, "--data", tmp_path / "a.csv"),
        r"has no column 'sick' \(--target\)": (*files, "--target", "sick"),
    }
    for why, options in refused.items():
        with pytest.raises(LocalError, match=why):
            staddle("poc", "up", folder, *options)
        assert list(folder.glob("*")) == []
    shutil.copy(tmp_path / "a.csv", tmp_path / "jobs.csv")
    with pytest.raises(LocalError, match="a silo cannot be called jobs"):
        staddle("poc", "up", folder, *files, "--data", tmp_path / "jobs.csv")


def test_a_folder_of_something_else_is_left_as_it_is(folder):
    folder.mkdir()
    (folder / "precious").write_text("x")
    with pytest.raises(LocalError, match=r"not empty, and no workspace"):
        staddle("poc", "up", folder)
    for command in ("status", "down", "run"):
        with pytest.raises(LocalError, match="no workspace of staddle poc up"):
            staddle("poc", command, folder)
    assert [path.name for path in folder.iterdir()] == ["precious"]


def test_two_commands_do_not_work_on_one_folder(folder):
    folder.mkdir()
    with claimed(folder), pytest.raises(LocalError, match="another command is at work here"):
        staddle("poc", "up", folder)


@pytest.fixture
def still(folder, files, monkeypatch):
    """A workspace that was made, and does not run."""
    monkeypatch.setattr(background, "start", lambda daemons: [each.name for each in daemons])
    staddle("poc", "up", folder, *files)
    return folder


def test_other_options_do_not_fit_what_is_there(still, files):
    staddle("poc", "up", still, *files)
    with pytest.raises(LocalError, match="was made with other options"):
        staddle("poc", "up", still, *files, "--id", "age")


def test_another_users_folder_is_not_touched(still, monkeypatch):
    """Its owner would say which process is to be stopped."""
    monkeypatch.setattr(os, "getuid", lambda: still.stat().st_uid + 1)
    with pytest.raises(LocalError, match="belongs to another user"):
        staddle("poc", "down", still)


def test_a_silo_that_does_not_fit_leaves_no_trace(still, tmp_path):
    (tmp_path / "e.csv").write_text("age,sex,ill\n50,f,0\n60,m,7\n")
    before = sorted(still.parent.rglob("*"))
    for name, options, why in (
        ("e", ("--data", tmp_path / "e.csv"), "the jobs know no class '7'"),
        ("e", (), "hold files: give --data FILE"),
        ("a", ("--data", tmp_path / "d.csv"), "exists already"),
        ("../e", ("--data", tmp_path / "d.csv"), "../e: a silo is named by 1 to 64 of a-z"),
        ("founder", ("--data", tmp_path / "d.csv"), "cannot be called founder"),
    ):
        with pytest.raises(LocalError, match=why):
            staddle("poc", "add-silo", still, name, *options)
        assert sorted(still.parent.rglob("*")) == before


def test_nothing_runs_without_a_coordinator(still):
    with pytest.raises(LocalError, match="no coordinator runs; start it with: staddle poc up"):
        staddle("poc", "run", still)


def test_a_silo_moves_into_a_folder_with_a_note_of_records_elsewhere(still, tmp_path):
    (tmp_path / "far.csv").write_bytes((still / "a" / "data.csv").read_bytes())
    config = still / "a" / "silo.toml"
    config.write_text(config.read_text().replace('"data.csv"', f'"{tmp_path / "far.csv"}"'))
    said = staddle("poc", "export", still, "a", tmp_path / "out")
    assert f"not in it: {tmp_path / 'far.csv'}" in said
    assert "No other machine reaches a coordinator on 127.0.0.1:" in said
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o700
    assert 'roster = "roster.json"' in (tmp_path / "out" / "silo.toml").read_text()
    assert "exported" in staddle("poc", "status", still)
    with pytest.raises(LocalError, match="is no silo of"):
        staddle("poc", "export", still, "z", tmp_path / "z")
    with pytest.raises(LocalError, match="exists already"):
        staddle("poc", "export", still, "b", tmp_path / "out")


# One daemon.


def daemon(folder):
    return BackgroundDaemon("x", "none", "none", folder / "x.toml", folder)


def test_who_holds_the_folder_is_its_daemon(tmp_path):
    assert daemon(tmp_path).process() is None
    with locked(tmp_path):
        assert daemon(tmp_path).process().pid == os.getpid()
    assert daemon(tmp_path).process() is None


@pytest.mark.parametrize("number", ["1", "ours", "", "x", "-5", "99999999999"])
def test_no_process_is_taken_for_the_daemon_by_its_number_alone(tmp_path, number):
    """Ours is another's, that has the number of the daemon that ended."""
    program = (
        "import sys, pathlib; from staddle.security.log.lock import locked\n"
        "with locked(pathlib.Path(sys.argv[1])): print(flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program, tmp_path], **pipes) as holding:
        holding.stdout.readline()
        (tmp_path / "LOCK").write_text(str(os.getpid()) if number == "ours" else number)
        with pytest.raises(LocalError, match="which one cannot be told"):
            daemon(tmp_path).process()
        holding.stdin.close()


def test_who_does_not_stop_is_killed(monkeypatch):
    monkeypatch.setattr(background, "STOP_SECONDS", 0.2)
    program = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True)"
    program += "; signal.pause()"
    with ExitStack() as stack:
        stubborn = stack.enter_context(
            subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        )
        stack.callback(stubborn.kill)
        stubborn.stdout.readline()
        background.end([psutil.Process(stubborn.pid)])
        assert not psutil.pid_exists(stubborn.pid)
