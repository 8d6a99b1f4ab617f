"""A coordinator whose folder lies on a read-only file system says so, in one line."""

import shutil
import subprocess
import sys

import pytest

from staddle.commands.federation import local_federation

# for this one command alone
MOUNTED = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'


def read_only(folder, *command):
    """Run a command to which a folder is read-only."""
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", MOUNTED, str(folder), *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


@pytest.mark.parametrize("where", ["state", "state/below"])
def test_a_read_only_file_system_is_said_with_what_to_do(tmp_path, where):
    mounted = tmp_path / "federation" / "coordinator" / "state"
    federation = local_federation.make(tmp_path / "federation", ["north", "east"])
    local_federation.write_coordinator(federation, [], {})
    mounted.mkdir(exist_ok=True)
    if shutil.which("unshare") is None or read_only(mounted, "true").returncode:
        pytest.skip("this user may not mount file systems")
    config = federation.coordinator_config
    config.write_text(config.read_text().replace('directory = "state"', f'directory = "{where}"'))
    ended = read_only(
        mounted, sys.executable, "-P", "-m", "staddle.coordinator", "--config", str(config)
    )
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    said = (
        f"{mounted}/LOCK: cannot write it: "
        if where == "state"
        else f"{mounted}/below: cannot create it: "
    )
    assert (
        f"{said}Read-only file system; mount it writable, or name a folder on another"
        in " ".join(ended.stderr.split())
    )
