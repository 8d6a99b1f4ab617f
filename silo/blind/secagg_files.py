"""What this silo remembers of a job's secure sums, in its folder: ``secagg-<exchange>-<purpose>-<recipient>.json``.

Durable before the message that it is about leaves, so that neither a crash nor a restart leads to a second answer
(security/secagg/memory.py). It carries its digest (files/checked_file.py), and holds no secret.
"""

from collections.abc import Callable
from pathlib import Path

from ...errors import LocalError
from ...files import checked_file
from ...security.secagg.memory import Memory


class MemoryFiles:
    """A ``Keeper`` of one job."""

    def __init__(self, folder: Path, entered: Callable[[], bool]) -> None:
        """``entered``: whether the ledger has that this silo gave keys into a sum of the job."""
        self._folder = folder
        self._entered = entered

    def load(self, instance: str) -> Memory:
        """The newest memory of an instance; LocalError where its file was changed, or is gone."""
        path = self._path(instance)
        if not path.exists():
            if self._entered():  # without it, an attempt could be entered twice
                raise LocalError(
                    f"{path}: gone; the ledger says that this silo took part in the job's secure sums: restore its "
                    "folder, or have the job signed under a new name"
                )
            return Memory()
        return checked_file.read_json(path, Memory)

    def save(self, instance: str, memory: Memory) -> None:
        """Durable before it returns."""
        checked_file.write_json(self._path(instance), memory)

    def _path(self, instance: str) -> Path:
        """An instance is ``job/exchange/purpose/recipient``, each an id."""
        return self._folder / f"secagg-{'-'.join(instance.split('/')[1:])}.json"
