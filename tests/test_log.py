import io
import json
import logging
import sys
from pathlib import Path

import pytest

from staddle import log


def test_who_reads_a_line_finds_it_counted(monkeypatch):
    """What follows the log, such as metrics, has an event before its line is written."""
    told = []

    class Told(io.StringIO):
        def write(self, text):
            told.extend(["line", json.loads(text)["event"]] if text.strip() else [])
            return len(text)

    monkeypatch.setattr(sys, "stderr", Told())
    before = log._LOGGER.handlers[:], log._LOGGER.level, log._LOGGER.propagate
    try:
        log.setup("json")
        with log.followed(lambda event, fields: told.append((event, dict(fields)))):
            log.event("round.opened", round=3)
        log.event("round.closed")
    finally:
        log._LOGGER.handlers[:], log._LOGGER.level, log._LOGGER.propagate = before
    assert told == [("round.opened", {"round": 3}), "line", "round.opened", "line", "round.closed"]


def test_the_newest_events_are_kept_in_a_bounded_file(tmp_path, monkeypatch, written):
    monkeypatch.setattr(log, "KEPT_BYTES", 2000)
    path = tmp_path / log.KEPT
    log.setup("json")
    with log.kept(path):
        for number in range(100):
            log.event("round.opened", round=number, why=HOSTILE)
        log.unwritten("refused")
    log.event("later")
    kept = path.read_text().splitlines()
    assert " info    round.opened round=99 why='a" in kept[-1]
    assert all(line.isprintable() for line in kept)
    files = {file.name: file.stat().st_size for file in tmp_path.iterdir()}
    assert files.keys() == {log.KEPT, f"{log.KEPT}.1"}
    assert max(files.values()) <= 2000
    # The next process writes behind it; a folder that is gone ends nothing.
    with log.kept(path), log.kept(tmp_path / "none" / log.KEPT):
        log.problem("clock.wrong")
    assert path.read_text().splitlines()[-1].endswith(" warning clock.wrong")
    assert [json.loads(line)["event"] for line in written()[-3:-1]] == ["later", "clock.wrong"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_disk_that_takes_no_line_ends_nothing(written):
    log.setup("json")
    with log.kept(Path("/dev/full")):
        log.event("x")
        log.event("y")
    assert [json.loads(line)["event"] for line in written()[:-1]] == ["x", "y"]


HOSTILE = "a\x1b]52;c;eA==\x07b\rc\x9bd\u202ee\udc80f\ng\x7f"


@pytest.fixture
def written(capsys):
    """What a process that set up its log has written to standard error."""
    others = logging.getLogger()
    before = log._LOGGER.handlers[:], log._LOGGER.level, log._LOGGER.propagate, others.handlers[:]
    yield lambda: capsys.readouterr().err.split("\n")
    log._LOGGER.handlers[:], log._LOGGER.level, log._LOGGER.propagate, others.handlers[:] = before


@pytest.mark.parametrize("form", ["text", "json"])
def test_an_event_is_one_printable_line_whatever_a_peer_wrote(written, form):
    log.setup(form)
    log.event("x", silo=HOSTILE, several=[HOSTILE, "é"], table={HOSTILE: HOSTILE})
    log.problem("y", why=HOSTILE)
    lines = written()
    assert len(lines) == 3
    assert all(line.isprintable() for line in lines)
    assert r"\u202e" in lines[0]


@pytest.mark.parametrize("form", ["text", "json"])
def test_what_libraries_log_is_an_event_too(written, form):
    """asyncio logs errors of tasks that nobody awaits; a peer may have written their texts."""
    for _ in range(2):
        log.setup(form)
    why = HOSTILE.replace("\udc80", "")  # pytest sends on what is logged here, as UTF-8
    try:
        raise ValueError(why)
    except ValueError:
        logging.getLogger("asyncio").exception("Task exception was never retrieved: %s", why)
    line, end = written()
    assert (line.isprintable(), end) == (True, "")
    assert "Traceback" in line
    if form == "json":
        found = json.loads(line)
        assert (found["event"], found["level"], found["logger"]) == ("library", "error", "asyncio")


def test_a_handler_that_a_library_brought_writes_nothing(written):
    """As the one that Opacus adds while it is imported: it would write a peer's text as it is."""
    logging.getLogger().addHandler(logging.StreamHandler(sys.stderr))
    log.setup("json")
    logging.getLogger("grpc").error(HOSTILE.replace("\udc80", ""))
    line, end = written()
    assert (json.loads(line)["event"], line.isprintable(), end) == ("library", True, "")


def test_a_field_stands_for_no_other_and_a_number_that_json_lacks_is_text(written):
    log.setup("json")
    log.event("x", event="y", level="z", time=0, accuracy=float("nan"), bound=float("inf"))
    (line, _) = written()
    found = json.loads(line, parse_constant=pytest.fail)
    assert (found["event"], found["level"]) == ("x", "info")
    assert found["time"] != 0
    assert (found["accuracy"], found["bound"]) == ("nan", "inf")
