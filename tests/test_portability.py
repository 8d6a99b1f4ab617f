"""Windows and macOS: what they lack is taken away, and what should run there runs.

Processes of their own hide it from Staddle, after the libraries were imported: those have builds
for each system, and look for themselves. One process imports them, and forks the others.
"""

import ast
import json
import os
import resource
import sys
from pathlib import Path

import pytest
from federation.fork_server import ForkServer
from support.product_source import GENERATED, ROOT, sources

from staddle.coordinator import server
from staddle.files import portable
from staddle.security.dp import prv_program

MODULES = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "posix")
NAMES = {
    "os": (
        *("fdatasync", "sysconf", "sched_getaffinity", "memfd_create", "preadv", "getuid", "fork"),
        *("O_DIRECTORY", "O_NONBLOCK", "O_CLOEXEC", "O_NOFOLLOW", "O_SYNC", "O_DSYNC"),
    ),
    "signal": ("SIGHUP", "SIGKILL", "SIGALRM", "pthread_sigmask"),
    "mmap": ("MAP_PRIVATE", "MAP_ANONYMOUS", "MADV_HUGEPAGE"),
    "multiprocessing.context": ("ForkServerContext", "ForkContext"),
    "multiprocessing.reduction": ("DupFd",),
}
LIBRARIES = (
    *("matplotlib.figure", "mmap", "multiprocessing.context", "multiprocessing.reduction", "numpy"),
    *("opacus", "opacus.accountants", "scipy.special", "sklearn.datasets", "torch"),
    *("torch.utils.data", "torch._dynamo", "torch.func", "torch.multiprocessing"),
)
WINDOWS = """
# As Microsoft documents it: a byte is locked for one file, or it is a PermissionError.
import fcntl, types
def locking(descriptor, mode, count):
    assert (mode, count) == (msvcrt.LK_NBLCK, 1)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise PermissionError("locked") from error
msvcrt = types.SimpleNamespace(LK_NBLCK=2, locking=locking)
"""
HIDE = f"""
import importlib, sys
for name in [name for name in sys.modules if name.partition(".")[0] == "staddle"]:
    del sys.modules[name]  # what the process that forks this one imported of it
{WINDOWS}
sys.modules["msvcrt"] = msvcrt
sys.modules.update(dict.fromkeys({MODULES!r}))
for module, names in {NAMES!r}.items():
    for name in names:
        delattr(sys.modules[module], name)
"""
EXPERIMENT = """
version = 1
name = "tiny"
seed = 1
rounds = 2
participation = 1.0

[data]
kind = "bundled"
name = "digits"

[partition]
kind = "dirichlet"
silos = 3
alpha = 5.0

[model]
name = "cnn-digits"
classes = 10

[training]
epochs = 1
batch_size = 64
lr = 0.1

[[methods]]
name = "fedavg"
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """Forks processes that have imported all libraries, and nothing of Staddle's rooms."""
    server = ForkServer(tmp_path_factory.mktemp("libraries"), LIBRARIES)
    yield server
    server.close()


@pytest.fixture(scope="module")
def run(libraries):
    """What a program prints that begins by hiding what Windows lacks."""

    def printed(program, *arguments):
        command = [sys.executable, "-P", "-c", HIDE + program, *map(str, arguments)]
        done = libraries.run(command)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return printed


def test_every_module_is_imported_without_what_windows_lacks(run):
    names = [
        ".".join(("staddle", *path.relative_to(ROOT).with_suffix("").parts))
        for path in sources()
        if path.name not in {"__main__.py", "__init__.py"}
        and path.relative_to(ROOT).as_posix() != "proto/generate.py"  # developers alone run it
    ]
    assert len(names) > 300
    imported = run("for name in sys.argv[1:]: importlib.import_module(name)\nprint('all')", *names)
    assert imported == "all\n"


def test_a_simulation_runs_without_what_windows_lacks_and_comes_to_the_same(
    tmp_path, libraries, run
):
    (tmp_path / "tiny.toml").write_text(EXPERIMENT)
    command = ["simulate", str(tmp_path / "tiny.toml"), "--json", "--out"]
    program = "from staddle.commands.main import main\nmain()"
    here = [*command, str(tmp_path / "here"), "--workers", "1"]
    libraries.run([sys.executable, "-P", "-c", program, *here]).check_returncode()
    there = json.loads(run(program, *command, tmp_path / "there"))
    assert [method["label"] for method in there["methods"]] == ["fedavg"]
    measures = [
        (tmp_path / where / "fedavg" / "seed-1" / "history.jsonl").read_bytes()
        for where in ("here", "there")
    ]
    assert measures[0] == measures[1] != b""


def test_a_folder_is_locked_there_too(tmp_path, run):
    program = """
from staddle.security.log.lock import held, locked
from pathlib import Path
folder = Path(sys.argv[1])
with locked(folder):
    print(held(folder))
    try:
        with locked(folder):
            raise AssertionError
    except Exception as error:
        print(error)
print(held(folder))
"""
    first, refused, last = run(program, tmp_path).splitlines()
    assert (first, last) == ("True", "False")
    assert refused == f"{tmp_path}: another process runs with this folder; stop it first"


def test_what_does_not_run_there_says_so(tmp_path, run):
    (tmp_path / "tiny.toml").write_text(EXPERIMENT)
    program = """
import asyncio
from staddle.errors import LocalError
from staddle.commands.main import app
from staddle.coordinator import server
from staddle.silo import daemon
def simulate():
    app(["simulate", sys.argv[1], "--workers", "2"], standalone_mode=False)
for call in (simulate, lambda: asyncio.run(server.serve(None)),
             lambda: asyncio.run(daemon.serve(None)), lambda: app(["demo"], standalone_mode=False)):
    try:
        call()
    except LocalError as error:
        print("refused:", error)
"""
    lines = run(program, tmp_path / "tiny.toml").splitlines()
    workers, *daemons = [line for line in lines if line.startswith("refused: ")]
    assert "leave --workers out" in workers
    fault = " does not run on this system; use Linux or macOS"
    assert [line.partition(fault)[0] for line in daemons] == [
        "refused: a coordinator", "refused: a silo", "refused: a federation",
    ]  # fmt: skip


def test_no_module_needs_a_name_that_macos_or_windows_lacks():
    """At its top level; inside functions that only a daemon calls Windows may lack it."""
    guarded = {"os.fdatasync", "os.O_DIRECTORY", "os.O_NONBLOCK"}  # files/portable.py has them
    allowed = {"files/portable.py", "files/documents.py"}
    found = []
    for path in sources():
        module = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and module not in allowed:
                name = ast.unparse(node)
                found += [f"{module}:{node.lineno} {name}"] if name in guarded else []
    assert found == []
    assert not any(path.name.endswith(GENERATED) for path in sources())


def test_without_fdatasync_files_are_synced_whole(monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    monkeypatch.setattr(os, "fdatasync", lambda number: synced.append(-number))
    portable.sync_data(7)
    monkeypatch.delattr(os, "fdatasync")
    portable.sync_data(8)
    assert synced == [-7, 8]


def test_a_limit_of_files_that_the_system_refuses_becomes_one_that_it_takes(monkeypatch):
    """macOS names no hard limit, and refuses to set that."""
    taken = []

    def setrlimit(_, limits):
        if limits[0] == resource.RLIM_INFINITY:
            raise ValueError("current limit exceeds maximum limit")
        taken.append(limits)

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", setrlimit)
    assert server.most_open_files() == (256, server.OPEN_MAX)
    assert taken == [(server.OPEN_MAX, resource.RLIM_INFINITY)]


@pytest.mark.parametrize(("system", "bounded"), [("Linux", 2), ("macOS", 0)])
def test_the_accountant_is_bounded_where_the_system_says_what_it_takes(
    monkeypatch, tmp_path, system, bounded
):
    bounds = {}
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: bounds.update({which: limits}))
    if system == "macOS":  # it has no /proc
        monkeypatch.setattr(prv_program, "STATM", tmp_path / "none")
    prv_program.limit(30, 1000)
    assert len(bounds) == bounded
    assert bounds.get(resource.RLIMIT_CPU, (30, 31)) == (30, 31)


def test_the_file_for_auditors_runs_there(run):
    program = "import runpy\nsys.argv[1:] = ['--help']\n"
    program += f"runpy.run_path({str(ROOT / 'staddle_verify.py')!r}, run_name='__main__')"
    assert "FOLDER --founder SHA256:" in run(program)


def test_paths_of_these_tests_are_of_this_system():
    """They run where the names are there to be taken away."""
    missing = [
        f"{module}.{name}"
        for module, names in NAMES.items()
        for name in names
        if not hasattr(sys.modules.get(module) or __import__(module, fromlist=["x"]), name)
    ]
    assert missing == []
    assert Path("/proc/self/statm").exists()
