import io
import json
import sys

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
