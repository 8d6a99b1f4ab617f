"""What the coordinator says of this silo's jobs, for its people to read.

::

    <directory>/coordinator.json    {"lost":"","stopped":{"9f86…":"stopped by operator 'olga'"},…}

It is advice. The agent does nothing by it, and no budget, round or file depends on it: a
coordinator that lies here could as well be silent. A file that the disk damaged counts as none.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from pydantic import Field

from ...errors import LocalError, UnwritableError
from ...files import checked_file
from ...files.documents import Strict
from ..job_folder import MOST_REASON, accepted

FILE = "coordinator.json"
MOST_LOST = 1500  # characters, of a text of our own


class CoordinatorWord(Strict):
    """``stopped``: why, by the digests of jobs. ``lost``: why there is no session, if it is so."""

    stopped: dict[
        Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")],
        Annotated[str, Field(max_length=MOST_REASON)],
    ] = Field(default_factory=dict)
    lost: Annotated[str, Field(max_length=MOST_LOST)] = ""


class KeptWord:
    """The file of a silo's folder; each change is durable when the call returns, if it has room."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._word = read(directory)
        self._told: Mapping[str, str] | None = None

    def note_stops(self, told: Mapping[str, str]) -> dict[str, str]:
        """Keep why jobs are stopped, by digest; returns by name those that were not before."""
        # Most polls say the same as the one before.
        if told == self._told:
            return {}
        self._told, before = told, self._word.stopped
        names = accepted(self._directory / "jobs")
        found = {digest: told[digest][:MOST_REASON] for digest in names.keys() & told.keys()}
        self._keep(CoordinatorWord(stopped=found, lost=self._word.lost))
        return {names[digest]: found[digest] for digest in found.keys() - before.keys()}

    def note_lost(self, why: str) -> None:
        """Keep why the coordinator gives no session; empty once it does."""
        self._keep(CoordinatorWord(stopped=self._word.stopped, lost=why[:MOST_LOST]))

    def _keep(self, word: CoordinatorWord) -> None:
        # It is told with each poll: the disk is asked only for what is new.
        if word != self._word:
            self._word = word
            # A full disk ends the agent where something depends on it, which this does not.
            with suppress(UnwritableError):
                checked_file.write_json(self._directory / FILE, word)


def read(directory: Path) -> CoordinatorWord:
    """The file, whether an agent runs or not."""
    try:
        return checked_file.read_json(directory / FILE, CoordinatorWord)
    except LocalError:
        return CoordinatorWord()
