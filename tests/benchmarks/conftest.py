"""Programs of benchmarks/, which only a checkout has; each test file has its program's name."""

import importlib
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

if not BENCHMARKS.is_dir():  # the wheel's tests run without the repository
    collect_ignore_glob = ["test_*.py"]
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def program(request):
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module(request.path.stem.removeprefix("test_"))
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name, module in tuple(sys.modules.items()):
            if Path(getattr(module, "__file__", None) or "/").parent == BENCHMARKS:
                del sys.modules[name]


@pytest.fixture
def forking(program, monkeypatch):
    """All processes of the program are forked from one, which imports what they need once."""
    forked = importlib.import_module("forked")
    # what the programs import, too, or each silo would take seconds for it
    forked.FORKS.set_forkserver_preload(
        [
            "staddle.coordinator.server",
            "staddle.silo.daemon",
            "staddle.commands.federation.local_federation",
        ]
    )
    forks = SimpleNamespace(get_context=lambda _: forked.FORKS)
    monkeypatch.setattr(program, "multiprocessing", forks)
    launched = partial(program.ChildProcess, launch=forked.Forked)
    monkeypatch.setattr(program, "ChildProcess", launched)
    return program
