"""Measures the coordinator's CPU per round and per silo.

``python benchmarks/many_silos.py [--silos 20 50 100] [--rounds 6]``

A real coordinator process serves as many silos as are asked for, one number of them after another
in one run. All silos live in one other process and have real gates, ledgers and TLS connections of
their own, without training: each fetches what is delivered, waits as if it trained, and uploads it
again (``echo`` of round.py). The waits spread over ``--spread`` seconds, so that silos finish one
after another, as silos do. The model is small: what a silo costs is not bytes, but calls, records,
receipts, transactions and tasks.

Prints the coordinator's CPU seconds per round (all threads, mean over the rounds but the first
two), per silo, and how many times the CPU per silo is that of the first number of silos: 1 is flat.
In the first two rounds silos of a new federation still ask one another what they hold of each
other's ledgers: once for each pair of silos, not per round. ``--profile FILE`` writes cProfile's
statistics of the coordinator's event loop for the last number of silos; the figures of such a run
are larger.
"""

import argparse
import asyncio
import multiprocessing
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import round as rounds
import torch

from staddle.algorithms.data.dataset import Dataset
from staddle.commands.federation import local_federation
from staddle.commands.federation.processes import ChildProcess

FIRST = 2  # rounds that are left out
MODEL = {"name": "lenet5", "classes": 10, "input": [1, 28, 28]}  # 0.2 MB


@dataclass(frozen=True)
class Cost:
    """What a round cost the coordinator."""

    silos: int
    cpu: float  # seconds, mean over the rounds but the first ones

    @property
    def per_silo(self) -> float:
        """CPU seconds per round and silo."""
        return self.cpu / self.silos


def silos_process(folder: str, names: list[str], address: str, spread: float) -> None:
    """All silos of the job."""

    async def all_of_them() -> None:
        spent = {"gate": 0.0, "ledger": 0.0}
        # seconds
        trains = {name: spread * (place + 1) / len(names) for place, name in enumerate(names)}
        await asyncio.gather(
            *(rounds.echo(Path(folder), name, address, spent, trains[name]) for name in names)
        )

    asyncio.run(all_of_them())


def cost(silos: int, count: int, spread: float, profile: Path | None = None) -> Cost:
    """Run a job of ``count`` rounds; training times of the silos spread over ``spread`` seconds."""
    names = [f"silo-{n:03}" for n in range(silos)]
    document: dict[str, Any] = {
        "version": 1,
        "name": "bench",
        "seed": 1,
        "purpose": "For a benchmark",
        "rounds": count,
        "silos": names,
        "method": {"name": "fedavg"},
        "model": MODEL,
        "training": {"epochs": 1, "lr": 0.1},
    }
    with tempfile.TemporaryDirectory() as place:
        federation = local_federation.make(Path(place) / "federation", names)
        job = local_federation.sign_job(federation, document)
        local_federation.write_coordinator(federation, ["bench"], rounds.TIMING)
        recorded = () if profile is None else ("-m", "cProfile", "-o", str(profile.absolute()))
        coordinator = ChildProcess(
            "coordinator", (*recorded, "-m", "staddle.coordinator"), federation.coordinator_config
        )
        try:
            address = str(coordinator.wait_for("listening", 60)["address"])
            record = Dataset(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64))
            for name in names:
                local_federation.write_silo(federation, name, address, record, [job])
            arguments = (str(federation.folder), names, address, spread)
            process = multiprocessing.get_context("spawn").Process(
                target=silos_process, args=arguments
            )
            process.start()
            at: list[float] = []  # CPU seconds so far when each round closed
            while (event := coordinator.event(5)) is None or event["event"] != "job.ended":
                if process.exitcode:
                    raise SystemExit("the silos of the benchmark ended; their error stands above")
                if event is not None and event["event"] == "round.closed":
                    if len(event["members"]) < silos:
                        raise SystemExit(
                            f"round {event['round']} closed without some silos; its cost says"
                            " nothing"
                        )
                    at.append(rounds.cpu(coordinator.pid))
            process.join(60)
        finally:
            coordinator.stop()
    return Cost(silos, (at[-1] - at[FIRST - 1]) / (count - FIRST))


def told(costs: list[Cost]) -> str:
    """One line per number of silos."""
    lines = [
        f"{each.silos:>4} silos: {each.cpu:.2f} s of CPU per round, {each.per_silo * 1e3:.1f} ms"
        f" per silo, {each.per_silo / costs[0].per_silo:.2f} times that of {costs[0].silos}\n"
        for each in costs
    ]
    return "".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--silos", type=int, nargs="+", default=[20, 50, 100])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--spread", type=float, default=5.0)
    parser.add_argument("--profile", type=Path)
    chosen = parser.parse_args()
    last = len(chosen.silos) - 1
    costs = [
        cost(silos, chosen.rounds, chosen.spread, chosen.profile if place == last else None)
        for place, silos in enumerate(chosen.silos)
    ]
    sys.stdout.write(told(costs))


if __name__ == "__main__":
    main()
