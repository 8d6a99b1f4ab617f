"""Measures the coordinator's cost per round and per silo: time, CPU, memory, files and bytes.

``python benchmarks/many_silos.py [--silos 2 10 50 100 200] [--rounds 6] [--blind] [--agents 10]``

A real coordinator process serves as many silos as are asked for, one number of them after another
in one run. All silos live in one other process and have real gates, ledgers and TLS connections of
their own, without training: each fetches what is delivered, waits as if it trained, and uploads it
again (``echo`` of round.py). The waits spread over ``--spread`` seconds, so that silos finish one
after another, as silos do. The model is small: what a silo costs is not bytes, but calls, records,
receipts, transactions and tasks. With ``--blind`` the job uses secure aggregation, which takes four
silos or more. With ``--agents K`` the first K silos are real agents, each in a process of its own,
which train on a few blank records.

Prints means over the rounds but the first two: seconds of a round beyond the spread, the
coordinator's CPU seconds (all threads) per round and per silo, and how many times the latter is
that of the first number of silos, where 1 is flat; then its resident memory, idle and at its peak,
the files that it has open at most, and the bytes that it sends and receives per silo and round,
TLS included. In the first two rounds silos of a new federation still ask one another what they hold
of each other's ledgers: once for each pair of silos, not per round. ``--profile FILE`` writes
cProfile's statistics of the coordinator's event loop for the last number of silos; the figures of
such a run are larger.
"""

import argparse
import asyncio
import multiprocessing
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import round as rounds
import torch

from staddle.algorithms.data.dataset import Dataset
from staddle.commands.federation import local_federation
from staddle.commands.federation.local_federation import LocalFederation
from staddle.commands.federation.processes import ChildProcess

FIRST = 2  # rounds that are left out
MODEL = {"name": "lenet5", "classes": 10, "input": [1, 28, 28]}  # 0.2 MB
RECORDS = 12  # of an agent
# One processor computes for all silos, so a step takes long.
TIMING = {**rounds.TIMING, "admission_seconds": 7200, "secure_seconds": 3600, "hold_seconds": 300}


@dataclass(frozen=True)
class Used:
    """What the coordinator had used at the end of a round."""

    opened: float  # when the round began, seconds since 1970
    closed: float
    cpu: float  # seconds so far
    files: int  # that are open
    sent: int  # bytes so far, on all connections
    received: int


@dataclass(frozen=True)
class Cost:
    """What a round cost the coordinator: means over the rounds but the first ones."""

    silos: int
    seconds: float
    cpu: float  # seconds
    memory: tuple[int, int]  # bytes: idle, at its peak
    files: int
    sent: float  # bytes
    received: float

    @property
    def per_silo(self) -> float:
        """CPU seconds per round and silo."""
        return self.cpu / self.silos

    @classmethod
    def between(cls, silos: int, memory: tuple[int, int], used: Sequence[Used]) -> "Cost":
        """The cost of the rounds after the first one of ``used``."""
        first, last, later = used[0], used[-1], used[1:]
        seconds = sum(each.closed - each.opened for each in later) / len(later)
        return cls(
            silos,
            seconds,
            (last.cpu - first.cpu) / len(later),
            memory,
            max(each.files for each in used),
            (last.sent - first.sent) / len(later),
            (last.received - first.received) / len(later),
        )

    def told(self, first: "Cost", spread: float) -> str:
        """One line for people."""
        idle, peak = self.memory
        return (
            f"{self.silos:>4} silos: {self.seconds - spread:.2f} s beyond the spread,"
            f" {self.cpu:.2f} s of CPU per round, {self.per_silo * 1e3:.1f} ms per silo,"
            f" {self.per_silo / first.per_silo:.2f} times that of {first.silos};"
            f" {idle / 1e6:.0f} -> {peak / 1e6:.0f} MB, {self.files} files,"
            f" {self.sent / self.silos / 1e3:.0f} kB sent and"
            f" {self.received / self.silos / 1e3:.0f} kB received per silo\n"
        )


def traffic(port: int) -> tuple[int, int]:
    """Bytes sent and received so far on the connections that are open to a port of this machine."""
    command = ["ss", "-Htin", f"sport = :{port}"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603
    sent, received = (
        sum(int(found) for found in re.findall(rf"\b{name}:(\d+)", told))
        for name in ("bytes_acked", "bytes_received")
    )
    return sent, received


def silos_process(folder: str, names: list[str], address: str, spread: float) -> None:
    """All silos of the job that are no agents."""

    async def all_of_them() -> None:
        spent = {"gate": 0.0, "ledger": 0.0}
        # seconds
        trains = {name: spread * (place + 1) / len(names) for place, name in enumerate(names)}
        await asyncio.gather(
            *(rounds.echo(Path(folder), name, address, spent, trains[name]) for name in names)
        )

    asyncio.run(all_of_them())


def document(names: Sequence[str], count: int, *, blind: bool) -> dict[str, Any]:
    """A job of ``count`` rounds."""
    return {
        "version": 1,
        "name": "bench",
        "seed": 1,
        "purpose": "For a benchmark",
        "rounds": count,
        "round_timeout": 3600,
        "silos": list(names),
        "method": {"name": "fedavg"},
        "model": MODEL,
        "training": {"epochs": 1, "lr": 0.1},
        **({"min_cohort": 3, "security": rounds.BLIND} if blind else {}),
    }


def cost(
    silos: int,
    count: int,
    spread: float,
    *,
    blind: bool = False,
    agents: int = 0,
    profile: Path | None = None,
) -> Cost:
    """Run a job of ``count`` rounds; training times of the silos spread over ``spread`` seconds."""
    names = [f"silo-{n:03}" for n in range(silos)]
    with tempfile.TemporaryDirectory() as place:
        federation = local_federation.make(Path(place) / "federation", names)
        job = local_federation.sign_job(federation, document(names, count, blind=blind))
        local_federation.write_coordinator(federation, ["bench"], TIMING)
        recorded = () if profile is None else ("-m", "cProfile", "-o", str(profile.absolute()))
        coordinator = ChildProcess(
            "coordinator", (*recorded, "-m", "staddle.coordinator"), federation.coordinator_config
        )
        daemons = [coordinator]
        try:
            address = str(coordinator.wait_for("listening", 60)["address"])
            # the peak counts from here
            Path(f"/proc/{coordinator.pid}/clear_refs").write_text("5")
            idle = rounds.memory(coordinator.pid, "VmRSS")
            shape = (RECORDS, *MODEL["input"])
            record = Dataset(torch.zeros(shape), torch.arange(RECORDS) % MODEL["classes"])
            for name in names:
                local_federation.write_silo(federation, name, address, record, [job])
            daemons += started(federation, names[:agents])
            process = multiprocessing.get_context("spawn").Process(
                target=silos_process,
                args=(str(federation.folder), names[agents:], address, spread),
            )
            process.start()
            used = watched(coordinator, process, int(address.rpartition(":")[2]), silos)
            process.join(60)
            memory = idle, rounds.memory(coordinator.pid, "VmHWM")
        finally:
            for daemon in daemons:
                daemon.stop()
    return Cost.between(silos, memory, used[FIRST - 1 :])


def started(federation: LocalFederation, names: Sequence[str]) -> list[ChildProcess]:
    """Real agents."""
    program = ("-m", "staddle.silo")
    return [ChildProcess(name, program, federation.silo_config(name)) for name in names]


def watched(coordinator: ChildProcess, process: Any, port: int, silos: int) -> list[Used]:
    """What the coordinator had used when each round closed, until the job has ended."""
    used: list[Used] = []
    for event, opened, closed in rounds.closed_rounds(coordinator, [process]):
        if len(event["members"]) < silos:
            raise SystemExit(
                f"round {event['round']} closed without some silos; its cost says nothing"
            )
        files = len([*Path(f"/proc/{coordinator.pid}/fd").iterdir()])
        used.append(Used(opened, closed, rounds.cpu(coordinator.pid), files, *traffic(port)))
    return used


def told(costs: Sequence[Cost], spread: float) -> str:
    """One line per number of silos."""
    return "".join(each.told(costs[0], spread) for each in costs)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--silos", type=int, nargs="+", default=[20, 50, 100])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--spread", type=float, default=5.0)
    parser.add_argument("--blind", action="store_true")
    parser.add_argument("--agents", type=int, default=0)
    parser.add_argument("--profile", type=Path)
    chosen = parser.parse_args()
    costs: list[Cost] = []
    for silos in chosen.silos:
        costs.append(
            cost(
                silos,
                chosen.rounds,
                chosen.spread,
                blind=chosen.blind,
                agents=min(chosen.agents, silos),
                profile=chosen.profile if silos == chosen.silos[-1] else None,
            )
        )
        sys.stdout.write(costs[-1].told(costs[0], chosen.spread))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
