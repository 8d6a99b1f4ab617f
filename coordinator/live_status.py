"""What only the coordinator's process knows of its silos, in a file for status and console.

The daemon writes it at each beat and each greeting, and never reads it. ``staddle status`` and the
console do. ``<directory>/silos.json``, for the daemon's user alone::

    {"at":"2026-11-20T21:30:05Z","silos":{"north":{"ahead":-2,"connected":true,
    "seen":"2026-11-20T21:30:05Z","software":"staddle 0.1.0"}}}
"""

import contextlib
import datetime as dt
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pydantic

from ..errors import LocalError
from ..files.documents import canonical_json, read_bytes
from ..proto.channel import MOST_LANES
from ..security.identity.certificate import utc_now

FILE = "silos.json"
# A silo chooses the text: it is a name and a number, or it is not shown.
SOFTWARE = re.compile(r"[A-Za-z0-9][A-Za-z0-9 .+_-]{0,63}")
FARTHEST = 10**10  # seconds between two clocks: about three centuries
EXACT_SECONDS = 5  # a greeting that took longer on its way would look like a wrong clock


@dataclass(frozen=True)
class Greeting:
    """What a silo said of itself when it opened its session.

    ``ahead``: seconds by which its clock was ahead of the coordinator's; None where it told none.
    ``jobs``: in how many jobs it takes part at a time.
    """

    software: str = ""
    ahead: int | None = None
    jobs: int = 1

    @classmethod
    def of(cls, software: str, clock: int, now: float, jobs: int = 0) -> "Greeting":
        """From the fields of ``HelloRequest``; ``clock`` and ``now`` in seconds since 1970."""
        known = software if SOFTWARE.fullmatch(software) else ""
        ahead = max(-FARTHEST, min(clock - round(now), FARTHEST))
        return cls(known, ahead if clock else None, max(1, min(jobs, MOST_LANES)))


@dataclass(frozen=True)
class SiloSeen:
    """One silo, as the process sees it; without ``seen`` if it was not heard of since its start."""

    connected: bool
    seen: str = ""
    software: str = ""
    ahead: int | None = None
    jobs: int = 1

    @property
    def clock(self) -> str:
        """Its clock in words, by the coordinator's; empty if it told none."""
        if self.ahead is None:
            return ""
        if abs(self.ahead) <= EXACT_SECONDS:
            return "right"
        off = dt.timedelta(seconds=abs(self.ahead))
        return f"{off} {'ahead' if self.ahead > 0 else 'behind'}"


@dataclass(frozen=True)
class LiveStatus:
    """All silos of the roster, at one time; without any if no coordinator told."""

    at: str = ""
    silos: Mapping[str, SiloSeen] = field(default_factory=dict)


_FORM = pydantic.TypeAdapter(LiveStatus)


def ago(seconds: float) -> str:
    """The time so many seconds ago as it stands in the file: in UTC, to the second."""
    then = utc_now() - dt.timedelta(seconds=seconds)
    return then.strftime("%Y-%m-%dT%H:%M:%SZ")


def write(directory: Path, silos: Mapping[str, SiloSeen]) -> None:
    """Replace the file at once; a disk that does not take it ends nothing.

    There is no fsync: after a power cut nobody needs it.
    """
    path = directory / FILE
    new = path.with_name(f".{FILE}.tmp")
    with contextlib.suppress(OSError):
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(canonical_json(asdict(LiveStatus(ago(0), silos))))
        new.replace(path)


def remove(directory: Path) -> None:
    """Leave no file that speaks of a process that ended."""
    with contextlib.suppress(OSError):
        (directory / FILE).unlink(missing_ok=True)


def read(directory: Path) -> LiveStatus:
    """The file; an empty status where there is none, or the disk changed it."""
    try:
        return _FORM.validate_json(read_bytes(directory / FILE), strict=True)
    except (LocalError, pydantic.ValidationError):
        return LiveStatus()
