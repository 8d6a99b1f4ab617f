import errno
import fcntl
import os
import subprocess
import sys

import pytest

from staddle.errors import LocalError
from staddle.security.log import lock
from staddle.security.log.lock import held, hold, locked

ASK = (
    "import sys, pathlib; from staddle.security.log.lock import held;"
    " print(held(pathlib.Path(sys.argv[1])))"
)


def test_a_lock_is_held_while_the_block_runs_and_asking_makes_no_file(tmp_path):
    assert not held(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with locked(tmp_path):
        assert held(tmp_path)
        asked = subprocess.run(
            [sys.executable, "-c", ASK, str(tmp_path)], capture_output=True, text=True, check=True
        )
        assert asked.stdout == "True\n"
    assert not held(tmp_path)


def test_a_second_process_is_refused(tmp_path):
    with (
        locked(tmp_path),
        pytest.raises(LocalError, match="another process runs"),
        locked(tmp_path),
    ):
        pass


def test_whoever_asks_keeps_nobody_from_the_lock(tmp_path, monkeypatch):
    asking = os.open(tmp_path / "LOCK", os.O_RDWR | os.O_CREAT)
    fcntl.flock(asking, fcntl.LOCK_SH)
    monkeypatch.setattr(lock.time, "sleep", lambda _: os.close(asking))
    with locked(tmp_path):
        assert held(tmp_path)
    assert not held(tmp_path)


def run_alone(folder):
    with locked(folder):
        pass


@pytest.mark.parametrize("take", [run_alone, held, lambda folder: hold(folder / "LOCK")])
def test_a_disk_without_locks_is_not_taken_for_another_process(tmp_path, monkeypatch, take):
    def refuses(_descriptor, _how):
        raise OSError(errno.ENOLCK, "No locks available")

    (tmp_path / "LOCK").touch()
    monkeypatch.setattr(fcntl, "flock", refuses)
    with pytest.raises(LocalError, match=r"LOCK: cannot lock it: No locks available; move"):
        take(tmp_path)
