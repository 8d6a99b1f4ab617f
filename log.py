"""Structured events of the daemons, one line each on standard error: JSON, or text for people.

Never a value of data, a parameter or a secret: names, counts, sizes and codes only. JSON:
``{"time":"2026-11-20T21:30:05.123Z","level":"info","event":"round.opened","job":"demo","round":3}``

Either form is one line of printable characters, whatever a peer put into a field: the others are
escaped.
"""

import json
import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Literal, TypeAlias

Format = Literal["text", "json"]
Follower: TypeAlias = Callable[[str, Mapping[str, object]], None]  # name of an event, its fields
KEPT = "daemon.log"  # in a daemon's folder: its newest events, for who looks at the folder
KEPT_BYTES = 256 * 1024
# All modules log events through this one.
_LOGGER = logging.getLogger("staddle")


class _Lines(logging.Formatter):
    def __init__(self, form: Format) -> None:
        super().__init__()
        self._form = form

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        # The wall clock in UTC, for people.
        time = (
            datetime.fromtimestamp(record.created, UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z")
        )
        if self._form == "json":
            head = {"time": time, "level": record.levelname.lower(), "event": record.getMessage()}
            # Twice: first for the order of the keys, last so that no field can replace them.
            return json.dumps({**head, **{k: _finite(v) for k, v in fields.items()}, **head})
        shown = " ".join(f"{k}={_plain(v)}" for k, v in fields.items())
        return f"{time} {record.levelname.lower():7} {record.getMessage()} {shown}".rstrip()


def _finite(value: object) -> object:
    """A number that JSON has, or its name: "nan", "inf"."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _plain(value: object) -> str:
    if isinstance(value, list | tuple):
        return ",".join(_plain(v) for v in value)
    text = str(value)
    # A value that a peer chose must not look like another field, or break the line.
    one_word = text.isprintable() and " " not in text
    return text if one_word else repr(text)


class _Libraries(logging.Handler):
    """Makes an event of a library's warning, such as asyncio's of a task that failed.

    So its text is escaped as ours is.
    """

    def emit(self, record: logging.LogRecord) -> None:
        # Our own events have their own handler.
        if record.name != _LOGGER.name:
            fields = {"logger": record.name, "text": self.format(record)}
            _LOGGER.log(record.levelno, "library", extra={"fields": fields})


class _Kept(RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 logging's name
        """A disk that does not take a line ends nothing: standard error has it."""


@contextmanager
def kept(path: Path) -> Iterator[None]:
    """Keep the newest events of this process in a file, too, while the block runs.

    At most two files of KEPT_BYTES, in the form for people. What a process before has written
    stays at their beginning.
    """
    keeping = _Kept(path, maxBytes=KEPT_BYTES, backupCount=1, encoding="utf-8", delay=True)
    keeping.setFormatter(_Lines("text"))
    keeping.setLevel(logging.INFO)
    _LOGGER.addHandler(keeping)
    try:
        yield
    finally:
        _LOGGER.removeHandler(keeping)
        # What the disk did not take is written once more here.
        with suppress(OSError):
            keeping.close()


class _Following(logging.Handler):
    def __init__(self, follower: Follower) -> None:
        super().__init__()
        self._follower = follower

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._follower(record.getMessage(), getattr(record, "fields", {}))
        except Exception:  # noqa: BLE001 what is done with an event must not stop the daemon that tells it
            self.handleError(record)


@contextmanager
def followed(follower: Follower) -> Iterator[None]:
    """Tell ``follower`` every event of this process while the block runs.

    It runs in the thread that logs the event. Its errors are printed, not raised.
    """
    following = _Following(follower)
    _LOGGER.handlers.insert(0, following)  # before what writes: who reads a line finds it counted
    try:
        yield
    finally:
        _LOGGER.removeHandler(following)


def setup(form: Format) -> None:
    """Send this process's events to standard error, and what libraries log as events "library".

    Earlier handlers of ours are replaced.
    """
    others = logging.getLogger()
    # A library that is imported may have added one (Opacus does). It would write each of their
    # lines once more, and unescaped.
    own = [handler for handler in others.handlers if type(handler) is not logging.StreamHandler]
    others.handlers[:] = own
    # ``setup`` may be called again in one process, as in tests.
    if not any(isinstance(handler, _Libraries) for handler in others.handlers):
        others.addHandler(_Libraries())
    stream = logging.StreamHandler(sys.stderr)
    stream.setFormatter(_Lines(form))
    stream.setLevel(logging.INFO)
    _LOGGER.handlers[:] = [stream]
    _LOGGER.setLevel(logging.DEBUG)  # for those who follow, such as the metrics
    # Otherwise each event would also go to the root logger's handlers.
    _LOGGER.propagate = False


def event(name: str, **fields: object) -> None:
    """Something happened.

    ``fields`` are names, counts, sizes and codes; never data, parameters or secrets.
    """
    _LOGGER.info(name, extra={"fields": fields})


def unwritten(name: str, **fields: object) -> None:
    """Something happened once more, of which no line is written: it could fill the disk.

    Whoever follows the events is told. ``fields`` as for ``event``.
    """
    _LOGGER.debug(name, extra={"fields": fields})


def problem(name: str, **fields: object) -> None:
    """Something went wrong.

    ``fields`` as for ``event``.
    """
    _LOGGER.warning(name, extra={"fields": fields})
