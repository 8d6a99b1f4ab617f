"""``staddle health`` next to daemons that are ready, start, hang and are gone."""

import asyncio
import re
import time

import pytest
from typer import Typer
from typer.testing import CliRunner

from staddle import log
from staddle.commands.federation import health
from staddle.commands.federation.systemd import COORDINATOR, supervised
from staddle.errors import LocalError
from staddle.security.log.lock import locked

app = Typer()
app.command()(health.health)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "state").mkdir()
    (tmp_path / "silo.toml").write_text('directory = "state"\n')
    return tmp_path


def asked(folder):
    """The exit code, and what is said."""
    answer = CliRunner().invoke(app, ["--config", str(folder / "silo.toml")])
    return answer.exit_code, str(answer.exception if answer.exit_code else answer.output)


def run(folder, serving):
    log.setup("json")
    state = folder / "state"
    with locked(state):
        asyncio.run(supervised(serving(), state, COORDINATOR, {}))


async def until_written(folder):
    async with asyncio.timeout(60):
        while not (folder / "state" / health.BEAT).exists():  # noqa: ASYNC110 a file, no event
            await asyncio.sleep(0.01)


def test_a_daemon_is_well_once_it_is_ready_and_not_after_its_end(folder):
    async def serving():
        assert "not ready yet" in asked(folder)[1]
        log.event("ready")
        await until_written(folder)
        assert re.fullmatch(r"ready, \d+ s ago\n", asked(folder)[1])

    assert "no daemon runs" in asked(folder)[1]
    run(folder, serving)
    code, said = asked(folder)
    assert (code, "no daemon runs" in said) == (1, True)
    assert not (folder / "state" / health.BEAT).exists()


def test_a_loop_that_hangs_is_found(folder, monkeypatch):
    monkeypatch.setattr(health, "LATE_SECONDS", 0.05)

    async def serving():
        log.event("ready")
        await until_written(folder)
        time.sleep(0.1)  # noqa: ASYNC251 it hangs
        assert re.search(r"has not responded for \d+ s", asked(folder)[1])

    run(folder, serving)


def test_what_a_dead_daemon_left_is_no_sign_of_life(folder):
    health._write(folder / "state" / health.BEAT)
    assert "no daemon runs" in asked(folder)[1]


def test_a_disk_that_takes_nothing_ends_no_daemon(folder):
    (folder / "state" / health.BEAT).mkdir()

    async def serving():
        log.event("ready")
        await asyncio.sleep(0)

    run(folder, serving)


@pytest.mark.parametrize("text", ["", "directory = 7"])
def test_a_file_without_a_directory_is_named(folder, text):
    (folder / "silo.toml").write_text(text)
    code, said = asked(folder)
    assert (code, "no directory" in said) == (1, True)


def test_errors_are_ours(folder):
    with pytest.raises(LocalError):
        health.health(folder / "none.toml")
