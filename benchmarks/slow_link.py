"""Measures rounds of real agents over a slow line with delay and loss: ``python slow_link.py``.

Coordinator and silos are real processes, in two network namespaces. The one line between them is
two TUN devices and a process that passes packets on: each direction carries ``--mbit`` megabits per
second behind a queue of ``QUEUE_SECONDS``, takes half of ``--milliseconds`` and loses ``--loss`` of
all packets, drawn by chance. So the kernel's own TCP runs on both ends, as behind ``tc netem``,
which not every kernel has. ``--congestion`` names the algorithm of TCP on both ends, such as
``cubic`` (most systems' default) or ``bbr``. All silos share the line.

Needs Linux, root and iproute2. Prints the seconds of each round with the packets that were lost in
it, and each line of the logs that tells of a connection or a call that failed.
"""

import argparse
import fcntl
import multiprocessing
import os
import random
import selectors
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from staddle.proto.channel import require_tls13

require_tls13()

import torch  # noqa: E402

from staddle.algorithms.data.dataset import Dataset  # noqa: E402
from staddle.commands.federation import local_federation  # noqa: E402
from staddle.commands.federation.processes import (  # noqa: E402
    ChildProcess,
    exit_on_signals,
    launched,
)

QUEUE_SECONDS = 0.3  # a longer queue drops what comes
MOST_PACKET = 2048  # bytes; the devices have the usual 1500
TUNSETIFF, TUN, NO_INFO = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h
ADDRESSES = ("10.213.7.1", "10.213.7.2")  # of the coordinator's end and of the silos'
RECORDS = 12
TIMING = {"admission_seconds": 600}
NOTABLE = ("coordinator.lost", "upload.resumed", "beat.failed", "silo.dropped", "refused")


@dataclass
class Direction:
    """Packets on their way from one end to the other."""

    source: int  # file descriptors
    target: int
    line: "Line"
    free: float = 0.0  # when the last packet has left the queue
    under_way: deque[tuple[float, bytes]] = field(default_factory=deque)
    lost: int = 0

    def take(self, now: float) -> None:
        """A packet from the source: it is lost, or arrives at its time."""
        packet = os.read(self.source, MOST_PACKET)
        begins = max(now, self.free)
        if begins - now > QUEUE_SECONDS or random.random() < self.line.loss:  # noqa: S311
            self.lost += 1
            return
        self.free = begins + len(packet) / self.line.bytes_per_second
        self.under_way.append((self.free + self.line.seconds, packet))

    def give(self, now: float) -> None:
        """Pass on what has arrived by now."""
        while self.under_way and self.under_way[0][0] <= now:
            os.write(self.target, self.under_way.popleft()[1])


@dataclass(frozen=True)
class Line:
    """One line: bytes per second in each direction, seconds of one way, and the share lost."""

    bytes_per_second: float
    seconds: float
    loss: float

    def carry(self, ends: tuple[int, int], lost: Any) -> None:
        """Pass packets between two TUN devices, for ever; ``lost`` counts those that were lost."""
        ways = [Direction(*ends, self), Direction(*reversed(ends), self)]
        selector = selectors.DefaultSelector()
        for way in ways:
            selector.register(way.source, selectors.EVENT_READ, way)
        while True:
            due = min((way.under_way[0][0] for way in ways if way.under_way), default=None)
            wait = None if due is None else max(0.0, due - time.monotonic())
            for key, _ in selector.select(wait):
                key.data.take(time.monotonic())
            for way in ways:
                way.give(time.monotonic())
            lost.value = sum(way.lost for way in ways)


def run(*command: str) -> None:
    """Run a command of the system; what it says of an error is shown."""
    subprocess.run(command, check=True)  # noqa: S603 our own words


@contextmanager
def line_between(names: Sequence[str], line: Line, congestion: str) -> Iterator[Any]:
    """Two network namespaces with a line between them; gives the number of lost packets so far."""
    ends = []
    try:
        for place, name in enumerate(names):
            run("ip", "netns", "add", name)
            end = os.open("/dev/net/tun", os.O_RDWR)
            fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", name.encode(), TUN | NO_INFO))
            ends.append(end)
            run("ip", "link", "set", name, "netns", name)
            here, there = ADDRESSES[place], ADDRESSES[1 - place]
            run("ip", "-n", name, "address", "add", here, "dev", name)
            for device in ("lo", name):
                run("ip", "-n", name, "link", "set", device, "up")
            run("ip", "-n", name, "route", "add", there, "dev", name, "congctl", congestion)
        lost = multiprocessing.get_context("fork").Value("q", 0)
        carrying = multiprocessing.get_context("fork").Process(
            target=line.carry, args=(tuple(ends), lost), daemon=True
        )
        carrying.start()
        yield lost
        carrying.terminate()
    finally:
        for end in ends:
            os.close(end)
        for name in names[: len(ends)]:
            run("ip", "netns", "delete", name)


def inside(name: str) -> Callable[[Sequence[str]], "subprocess.Popen[bytes]"]:
    """How a daemon is started in a network namespace."""
    return lambda command: launched(["ip", "netns", "exec", name, *command])


def document(silos: Sequence[str], side: int, rounds: int, *, blind: bool) -> dict[str, Any]:
    """A short job with a model as large as its input makes it."""
    security = {"secure_aggregation": "required", "weight_most": RECORDS}
    return {
        "version": 1,
        "name": "bench",
        "seed": 1,
        "purpose": "For a benchmark",
        "rounds": rounds,
        "round_timeout": 7200,
        "silos": list(silos),
        "method": {"name": "fedavg"},
        "model": {"name": "lenet5", "classes": 10, "input": [3, side, side]},
        "training": {"epochs": 1, "lr": 0.01},
        **({"min_cohort": 3, "security": security} if blind else {}),
    }


def measured(folder: Path, job: dict[str, Any], names: Sequence[str], lost: Any) -> Iterator[str]:
    """Run the job; a line per round."""
    made = local_federation.make(folder / "federation", job["silos"])
    signed = local_federation.sign_job(made, job)
    address = f"{ADDRESSES[0]}:7443"
    local_federation.write_coordinator(made, ["bench"], TIMING, address)
    shape = (RECORDS, *job["model"]["input"])
    records = Dataset(torch.rand(shape), torch.arange(RECORDS) % 10)
    program = ("-m", "staddle.coordinator")
    daemons = [ChildProcess("coordinator", program, made.coordinator_config, inside(names[0]))]
    coordinator = daemons[0]
    try:
        coordinator.wait_for("listening", 120)
        for silo in made.silos:
            local_federation.write_silo(made, silo, address, records, [signed])
            policy = made.folder / silo / "policy.toml"
            policy.write_text(policy.read_text().replace("64MiB", "4GiB"))
            config = made.silo_config(silo)
            daemons.append(ChildProcess(silo, ("-m", "staddle.silo"), config, inside(names[1])))
        opened, before = 0.0, 0
        while (event := coordinator.event(5)) is None or event["event"] != "job.ended":
            for daemon in daemons:
                daemon.check()
            if event is None:
                continue
            at = datetime.fromisoformat(str(event["time"])).timestamp()
            if event["event"] == "round.opened":
                opened, before = at, lost.value
            elif event["event"] == "round.closed":
                gone = lost.value - before
                yield f"round {event['round']}: {at - opened:.1f} s, {gone} packets lost"
        yield f"job: {event['outcome']} {event['reason']}"
        for daemon in daemons:
            for told in daemon.log.read_text().splitlines():
                if any(f'"{name}"' in told for name in NOTABLE):
                    yield f"{daemon.name}: {told}"
    finally:
        for daemon in daemons:
            daemon.stop()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mbit", type=float, default=10.0)
    parser.add_argument("--milliseconds", type=float, default=300.0, help="of a round trip")
    parser.add_argument("--loss", type=float, default=0.02)
    parser.add_argument("--congestion", default="cubic")
    parser.add_argument("--silos", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", type=int, default=60, help="60: 1.2 MB, 324: 46.8 MB")
    parser.add_argument("--blind", action="store_true", help="takes four silos or more")
    given = parser.parse_args()
    exit_on_signals()  # so that no namespace is left behind
    line = Line(given.mbit * 1e6 / 8, given.milliseconds / 2000, given.loss)
    names = [f"slow-{os.getpid()}-{end}" for end in "ab"]
    job = document(
        [f"silo-{n}" for n in range(given.silos)], given.side, given.rounds, blind=given.blind
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        line_between(names, line, given.congestion) as lost,
    ):
        for told in measured(Path(folder), job, names, lost):
            sys.stdout.write(told + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
