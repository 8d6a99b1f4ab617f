"""The notebooks of ``examples/notebooks``: each runs, and what it shows stems from its own code."""

import os
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from jupyter_client.manager import KernelManager

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="examples are not in the wheel")
PATHS = sorted(FOLDER.glob("*.ipynb"))
ROUNDS = re.compile(r"""(\brounds"?[=:] ?)\d+""")  # of an experiment or a job

# Before each notebook: nothing is left of the one before, and daemons are forked.
BEGIN = """
%reset -f
import os, sys
import torch
os.chdir({folder!r})
sys.path[:0] = [] if {tests!r} in sys.path else [{tests!r}]
torch.set_num_threads(1)
from functools import partial
from pathlib import Path
from federation.fork_server import ForkServer
from staddle.api import federation
from staddle.commands.federation.processes import ChildProcess
federation.ChildProcess = partial(ChildProcess, launch=ForkServer(Path({server!r})).launch)
%reset -f
"""


@pytest.fixture(scope="module")
def tool():
    """The program that wrote the outputs."""
    return SimpleNamespace(**runpy.run_path(str(FOLDER / "execute.py")))


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """One for all notebooks: its imports take 5 s. Settings of whoever runs the tests are none."""
    own = tmp_path_factory.mktemp("jupyter")
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    places = dict.fromkeys(("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "MPLCONFIGDIR"), str(own))
    manager = KernelManager()
    manager.start_kernel(cwd=str(own), env={**os.environ, **places, "PATH": path})
    yield manager
    manager.shutdown_kernel(now=True)


def kinds(cell):
    """What kinds of output a cell has, without warnings of libraries."""
    return {
        (output.output_type, output.get("name"), *sorted(output.get("data", ())))
        for output in cell.outputs
        if output.get("name") != "stderr"
    }


def codes(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_it_is_kept_with(
    path, kernel, tool, fork_server, tmp_path_factory
):
    kept, found = (nbformat.read(path, as_version=4) for _ in range(2))
    folder = tmp_path_factory.mktemp("runs")  # which the kernel does not lose when this test ends
    begin = BEGIN.format(
        folder=str(folder),
        tests=str(Path(__file__).parents[1]),
        server=str(fork_server.folder),
    )
    found.cells.insert(0, nbformat.v4.new_code_cell(begin))
    for cell in codes(found):
        cell.source = ROUNDS.sub(r"\g<1>2", cell.source)
    tool.execute(found, folder, kernel)
    del found.cells[0]
    assert list(map(kinds, codes(found))) == list(map(kinds, codes(kept)))
    assert not list(FOLDER.glob("runs"))
    if path.stem == "1-first-simulation":
        # Progress in a notebook: a line per run, as the run ended.
        (shown,) = (one for one in codes(found)[1].outputs if one.output_type == "display_data")
        lines = shown.data["text/plain"].splitlines()
        assert len(lines) == 6
        assert all("round 2 of 2" in line and "accuracy trained" in line for line in lines)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_outputs_are_of_the_code_above_them_and_of_no_machine(path, tool):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata[tool.DIGEST] == tool.code_digest(notebook), (
        f"python examples/notebooks/execute.py {path.name} renews the outputs"
    )
    numbers = [cell.execution_count for cell in codes(notebook)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert tool.machine_paths(notebook) == []
    assert not any(
        output.get("name") == "stderr" for one in codes(notebook) for output in one.outputs
    )
    assert path.stat().st_size < 300_000


def test_what_a_changed_cell_and_a_path_would_show(tool):
    """The checks above can fail."""
    cell = nbformat.v4.new_code_cell("print(1)")
    notebook = nbformat.v4.new_notebook(cells=[cell])
    first = tool.code_digest(notebook)
    cell.source = "print(2)"
    assert tool.code_digest(notebook) != first
    cell.outputs = [nbformat.v4.new_output("stream", text="see /home/someone/x\n")]
    assert tool.machine_paths(notebook) == ["/home/someone/x"]


def test_five_notebooks_are_listed():
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert len(PATHS) == 5
    assert all(f"]({path.name})" in page for path in PATHS)
