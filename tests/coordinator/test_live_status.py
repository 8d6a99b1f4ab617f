"""The file that says which silos are here; what a silo says of itself is bounded."""

import os
import time

import pytest

from staddle.coordinator import live_status
from staddle.coordinator.live_status import FARTHEST, FILE, Greeting, LiveStatus, SiloSeen

NOW = 1_800_000_000.0


@pytest.mark.parametrize(
    "software",
    [
        *("", " staddle", "<b>staddle</b>", "staddle\n1", "staddle\x1b[2J", "städdle", "a" * 65),
        *("staddle 1\n", "\u202estaddle", "{{ 7*7 }}"),
    ],
)
def test_a_version_that_is_no_name_and_number_is_not_kept(software):
    assert Greeting.of(software, int(NOW), NOW) == Greeting("", 0)


def test_what_a_silo_says_of_its_clock_is_bounded():
    said = {clock: Greeting.of("staddle 0.1.0", clock, NOW).ahead for clock in (0, 1, 2**64 - 1)}
    assert said == {0: None, 1: 1 - int(NOW), 2**64 - 1: FARTHEST}
    seen = SiloSeen(connected=True, **vars(Greeting.of("staddle 0.1.0", 2**64 - 1, NOW)))
    assert (seen.software, seen.clock) == ("staddle 0.1.0", "115740 days, 17:46:40 ahead")


@pytest.mark.parametrize(
    ("ahead", "clock"),
    [(None, ""), (0, "right"), (-5, "right"), (-6, "0:00:06 behind"), (7200, "2:00:00 ahead")],
)
def test_a_clock_is_off_by_more_than_a_greeting_takes(ahead, clock):
    assert SiloSeen(connected=True, ahead=ahead).clock == clock


def test_the_file_is_for_one_user_and_whole_or_not_there(tmp_path):
    assert live_status.read(tmp_path) == LiveStatus()
    silos = {
        "north": SiloSeen(connected=True, seen=live_status.ago(3), software="x 1", ahead=-2),
        "south": SiloSeen(connected=False),
    }
    before = os.umask(0)
    try:
        live_status.write(tmp_path, silos)
    finally:
        os.umask(before)
    found = live_status.read(tmp_path)
    assert found.silos == silos
    assert time.strptime(found.at, "%Y-%m-%dT%H:%M:%SZ")
    path = tmp_path / FILE
    assert (path.stat().st_mode & 0o777, [*tmp_path.iterdir()]) == (0o600, [path])
    for damaged in (b"", path.read_bytes()[:-1], b'{"silos":{"north":{"connected":1}}}', b"\xff"):
        path.write_bytes(damaged)
        assert live_status.read(tmp_path) == LiveStatus()
    live_status.remove(tmp_path)
    live_status.remove(tmp_path)
    # A folder that is gone ends nothing.
    live_status.write(tmp_path / "none", silos)
    assert [*tmp_path.iterdir()] == []
