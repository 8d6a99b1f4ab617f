"""Execute the notebooks next to this file, and write what they show into them.

::

    python examples/notebooks/execute.py                          # all of them
    python examples/notebooks/execute.py 1-first-simulation.ipynb

It needs ``pip install -e '.[test]'``. Each notebook runs in a kernel and a folder of its own. It
then carries a digest of its code, by which tests/examples/test_notebooks.py knows whose outputs
it has.
"""

import re
import sys
import tempfile
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent
SECONDS = 300  # that a cell may take
DIGEST = "outputs_of"  # in the metadata: the digest of the code that made the outputs


def code_digest(notebook: Any) -> str:
    """SHA-256 of the code of all cells, in their order."""
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return sha256("\0".join(sources).encode()).hexdigest()


def execute(notebook: Any, folder: Path, kernel: KernelManager | None = None) -> None:
    """Run all cells and put what they show into the notebook; CellExecutionError if one fails.

    ``folder`` is the working folder of a new kernel; a running ``kernel`` has its own, and stays.
    """
    NotebookClient(
        notebook,
        km=kernel,
        timeout=SECONDS,
        startup_timeout=SECONDS,
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
    ).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = _joined(cell.outputs)


def texts(output: Any) -> list[str]:
    """What of an output is text: a stream, or its forms without pictures."""
    if output.output_type == "stream":
        return [output.text]
    data = output.get("data", {})
    found = [str(text) for kind, text in data.items() if not kind.startswith("image/")]
    return [re.sub(r"base64,[A-Za-z0-9+/=]*", "", text) for text in found]


def machine_paths(notebook: Any) -> list[str]:
    """Paths of the machine in the outputs, such as of a home; they are nobody else's business."""
    found = []
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            for text in texts(output):
                found += re.findall(r"/(?:tmp|home|root|Users|private|dev|var|opt)/\S*", text)
    return found


def _joined(outputs: list[Any]) -> list[Any]:
    """Neighbouring pieces of one stream as one output: how they come apart is chance."""
    joined = []
    for name, own in groupby(outputs, lambda output: output.get("name")):
        first, *others = own
        if name is not None:
            first.text += "".join(other.text for other in others)
            others = []
        joined += [first, *others]
    return joined


def main() -> None:
    """Execute the notebooks that the command line names, or all."""
    for path in [FOLDER / name for name in sys.argv[1:]] or sorted(FOLDER.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        with tempfile.TemporaryDirectory() as folder:
            execute(notebook, Path(folder))
        if found := machine_paths(notebook):
            sys.exit(f"{path.name}: its outputs name places of this machine: {found}")
        language = notebook.metadata.language_info.name
        notebook.metadata["language_info"] = {"name": language}
        notebook.metadata[DIGEST] = code_digest(notebook)
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
