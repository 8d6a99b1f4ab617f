"""Before any test module: gRPC reads its variables when it is imported.

Test modules import what they share by name.
"""

import asyncio
import gc
import inspect
import logging
import os
import re
import shutil
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from staddle.proto.channel import require_tls13

require_tls13()
# Otherwise each of hundreds of daemons and commands compiles every module that it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
sys.path.insert(0, str(Path(__file__).parent))
# What stands in for installed packages of other projects, here and in the processes of tests.
OTHERS = str(Path(__file__).parent / "packages")
sys.path.append(OTHERS)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (OTHERS, os.environ.get("PYTHONPATH"))))

from federation.fork_server import ForkServer  # noqa: E402

# Each line is a folder, a file or a function; its tests get the marker ``long``.
LONG = frozenset((Path(__file__).parent / "long.txt").read_text().split())
SHARED_MEMORY, ROOM = Path("/dev/shm"), 8 * 2**30

# Each run draws the same, unless told otherwise (--hypothesis-profile default), and a busy machine
# may take its time with it.
patient = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("tests", derandomize=True, database=None, **patient)
settings.load_profile("tests")


def pytest_configure(config: pytest.Config) -> None:
    """Tests write to memory where it is plentiful: a disk takes its time to keep each file for
    good. They crash processes, never the machine, so they test no less.
    """
    meminfo = Path("/proc/meminfo")
    if config.option.basetemp or not (SHARED_MEMORY.is_dir() and meminfo.is_file()):
        return
    (kilobytes,) = re.findall(r"^MemAvailable: +(\d+) kB$", meminfo.read_text(), re.MULTILINE)
    if min(shutil.disk_usage(SHARED_MEMORY).free, int(kilobytes) * 1024) > ROOM:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(SHARED_MEMORY))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collected tests live to the end, so garbage collection need not scan them, nor what they
    import.
    """
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    # what one test makes is small: to search it every 700 objects costs more than to let it wait
    gc.set_threshold(50_000, 20, 20)
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What ``long.txt`` names is marked, and files whose tests wait for daemons come first.

    Whoever runs them waits for most of the time, so the others should have something to compute all
    the while; and none of these, the longest, is left for the end, when nobody else has any.
    """
    for item in items:
        if not LONG.isdisjoint(places(item)):
            item.add_marker(pytest.mark.long)
    forking = {item.path for item in items if "fork_server" in getattr(item, "fixturenames", ())}
    waits = lambda path: path in forking or path.parent.name == "federation"
    items.sort(key=lambda item: not waits(item.path))


def places(item: pytest.Item) -> Iterator[str]:
    """A test's folders, file and function, as ``long.txt`` writes them."""
    path = item.path.relative_to(Path(__file__).parent)
    yield from (above.as_posix() for above in (path, *path.parents))
    yield f"{path.as_posix()}::{getattr(item, 'originalname', item.name)}"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What a test draws, and what it writes, does not depend on which others the same process ran
    before it.
    """
    # The process that hands tests to others does without the seconds of this import.
    if torch := sys.modules.get("torch"):
        # torch.manual_seed also notes for each GPU, with a stack trace, what to do
        torch.default_generator.manual_seed(0)
        # steps this small take several times as long on two threads where others have a core's time
        torch.set_num_threads(1)
    # commands that ran in this process had them written where nobody reads now
    events = logging.getLogger("staddle")
    events.handlers[:] = [
        own for own in events.handlers if not getattr(getattr(own, "stream", None), "closed", False)
    ]


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """One for all workers: its imports take 5 s."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    server = ForkServer(shared / "fork_server")
    yield server
    server.close()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test may be a coroutine: it runs in a loop of its own."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    names = inspect.signature(test).parameters
    asyncio.run(test(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
