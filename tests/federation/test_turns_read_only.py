"""A disk that is read-only, or turns so while a daemon runs, as ext4 does with one that has errors.

Real processes and mounts.

The state of one daemon lies on a file system of its own, in a mount namespace of its own.
"""

import asyncio
import shutil
import subprocess
from pathlib import Path

import grpc
import pytest
from federation.conftest import free_port
from support.raw_silo import SECONDS, Caller

from staddle.commands.federation import local_federation
from staddle.errors import AbortedError
from staddle.proto import operations_pb2 as pb
from staddle.proto.operations_pb2_grpc import OperationsStub
from staddle.security.identity import roster as rosters
from staddle.security.identity.keys import load_keys
from staddle.security.ledger.audit import LEDGER, verify

TIMING = {"admission_seconds": 60, "beat_seconds": 20, "hold_seconds": 1}
SILOS = ("north", "east")
IN_MOUNTS = str(Path(__file__).with_name("in_mounts.py"))
MEGABYTES = {"coordinator": 320, "north": 16}  # a coordinator keeps 256 MiB free


class Mounts:
    """A mount namespace, whose daemons start with ``launch``."""

    def __init__(self, fork):
        self._fork = fork
        self._process = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", "echo; read -r _"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.usable = bool(self._process.stdout.readline())
        self._inside = ("nsenter", f"--mount=/proc/{self._process.pid}/ns/mnt")

    def launch(self, command):
        return self._fork([*command[:2], IN_MOUNTS, str(self._process.pid), *command[2:]])

    def run(self, *command):
        return subprocess.run(
            [*self._inside, *command], check=False, capture_output=True, text=True, timeout=60
        )

    def close(self):
        self._process.communicate(b"\n")


@pytest.fixture
def mounts(fork_server):
    needed = ("unshare", "nsenter", "mkfs.ext4", "mount")
    if not all(map(shutil.which, needed)):
        pytest.skip(f"needs {', '.join(needed)}")
    made = Mounts(fork_server.launch)
    yield made
    made.close()


async def asked_to_stop_a_job(running, job):
    """An operator asks for what is not acknowledged, since it cannot be kept."""
    folder = running.federation.folder
    caller = Caller(
        running.address, load_keys(folder / "operator"), rosters.load(folder / "roster.json"), job
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await OperationsStub(caller.channel).Stop(pb.JobRequest(job=job.name), timeout=SECONDS)
    # It ends, is ending (gRPC then drops what it has not begun to serve), or has ended.
    ended = (grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)
    assert caught.value.code() in ended
    await caller.channel.close()


@pytest.mark.parametrize(
    ("where", "said"),
    [("state", "LOCK: cannot write it: "), ("state/below", "below: cannot create it: ")],
)
def test_a_read_only_file_system_is_said_with_what_to_do(start, mounts, where, said):
    running = start(*SILOS)
    local_federation.write_coordinator(running.federation, [], {})
    running.kept.mkdir(exist_ok=True)
    for options in ("bind", "remount,ro,bind"):
        if mounts.run("mount", "-o", options, running.kept, running.kept).returncode:
            pytest.skip("this user may not mount file systems")
    config = running.federation.coordinator_config
    config.write_text(config.read_text().replace('directory = "state"', f'directory = "{where}"'))
    running.launcher = mounts.launch
    daemon = running.start_daemon("coordinator")
    with pytest.raises(AbortedError, match="ended with code 1"):
        daemon.wait_for("listening", 100)
    assert daemon.returncode == 1
    text = " ".join(daemon.log.read_text().split())
    assert "Traceback" not in text
    why = "Read-only file system; mount it writable, or name a folder on another"
    assert f"{running.kept}/{said}{why}" in text


@pytest.mark.parametrize("who", ["coordinator", "north"])
def test_a_daemon_ends_with_a_message_and_goes_on_once_the_disk_is_writable(
    tmp_path, start, mounts, document, fork_server, who
):
    """While the second round waits for a silo that died in it."""
    running = start(*SILOS)
    job = running.job(document("job", SILOS, rounds=3, round_timeout=120))
    running.address = f"127.0.0.1:{free_port()}"
    local_federation.write_coordinator(running.federation, [job.name], TIMING, running.address)
    state = running.federation.state(who)
    state.mkdir(exist_ok=True)
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(MEGABYTES[who] * 2**20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    mount = ("mount", "-o", "loop", str(image), str(state))
    if not mounts.usable or mounts.run(*mount).returncode:
        pytest.skip("this user may not mount file systems")

    def begin(name, plan="never"):
        running.launcher = mounts.launch if name == who else fork_server.launch
        if name == "coordinator":
            running.restart_coordinator()
        else:
            running.start_daemon(name, plan)

    begin("coordinator")
    for silo in SILOS:
        running.write_silo(silo)
    begin("north")
    begin("east", "once:egress.intent job 1")
    while running.daemons["north"].wait_for("round.given", 100)["round"] != 1:
        pass
    running.daemons["east"].wait_for("killed", 100)
    assert mounts.run("mount", "-o", "remount,abort", str(state)).returncode == 0
    if who == "coordinator":
        asyncio.run(asked_to_stop_a_job(running, job))
    begin("east")
    failing = running.daemons[who]
    with pytest.raises(AbortedError, match="ended with code 1"):
        failing.wait_for("job.ended" if who == "coordinator" else "job.finished", 100)
    said = [line for line in failing.log.read_text().splitlines() if not line.startswith("{")]
    assert len(said) == 1, said
    assert said[0].startswith(f"staddle: {state}/")
    assert any(
        why in said[0]
        for why in ("Read-only file system; mount it", "Input/output error; check the disk")
    )

    assert mounts.run("umount", str(state)).returncode == 0
    assert mounts.run(*mount).returncode == 0
    begin(who)
    ended = running.daemons["coordinator"].wait_for("job.ended", 100)
    assert ended["outcome"] == "completed", ended
    running.stop()
    copy = tmp_path / "copy"
    assert mounts.run("cp", "-a", f"{state}/.", str(copy)).returncode == 0
    assert mounts.run("umount", str(state)).returncode == 0
    assert verify(copy / LEDGER).ok
