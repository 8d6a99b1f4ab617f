"""How long a federation stands still when its coordinator dies: ``python benchmarks/failover.py``.

Real processes on this machine: a coordinator, a standby on the same folder, silos with the digits.
The coordinator is killed with SIGKILL in the middle of a round, after the first receipt of it. It
prints, in seconds since the kill, when the standby had the lease, when it listened, when each silo
was connected again, and when the next round was closed.
"""

import argparse
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from staddle.algorithms.data.dataset import digits
from staddle.algorithms.partition.draw import dirichlet
from staddle.commands.federation import local_federation
from staddle.commands.federation.processes import ChildProcess

TIMING = {"admission_seconds": 60, "beat_seconds": 2, "hold_seconds": 5}
LONGEST = 120.0  # seconds to wait for an event
STANDBY = ("-m", "staddle.coordinator", "--standby")


def failover(folder: Path, number: int) -> list[tuple[str, float]]:
    """What happened after the kill, and when."""
    silos = [f"silo-{each + 1}" for each in range(number)]
    made = local_federation.make(folder / "federation", silos)
    job = local_federation.sign_job(made, _document(silos))
    address = f"127.0.0.1:{_free_port()}"
    local_federation.write_coordinator(made, [job.name], TIMING, address)
    records, daemons = digits(), {}
    parts = dirichlet(records.y.numpy(), number, 100.0, 3, minimum=20)
    for silo, part in zip(silos, parts, strict=True):
        local_federation.write_silo(made, silo, address, records.take(part), [job])
    config = made.coordinator_config
    first = daemons["first"] = ChildProcess("first", STANDBY[:2], config)
    try:
        first.wait_for("listening", LONGEST)
        standby = daemons["standby"] = ChildProcess("standby", STANDBY, config)
        standby.wait_for("lease.waits", LONGEST)
        for silo in silos:
            program = ("-m", "staddle.silo")
            daemons[silo] = ChildProcess(silo, program, made.silo_config(silo))
        while first.wait_for("receipt", LONGEST)["round"] != 1:
            pass
        first.kill()
        return _followed(standby, [daemons[silo] for silo in silos])
    finally:
        for daemon in daemons.values():
            daemon.stop()


def _followed(standby: ChildProcess, silos: Sequence[ChildProcess]) -> list[tuple[str, float]]:
    killed, found = time.monotonic(), []

    def note(what: str) -> None:
        found.append((what, time.monotonic() - killed))

    for event in ("lease.taken", "listening"):
        standby.wait_for(event, LONGEST)
        note(event)
    for silo in silos:
        silo.wait_for("coordinator.lost", LONGEST)
        silo.wait_for("connected", LONGEST)
    note("all silos connected")
    for _ in range(2):
        standby.wait_for("round.closed", LONGEST)
        note("round.closed")
    return found


def _document(silos: Sequence[str]) -> dict[str, object]:
    return {
        "version": 1,
        "name": "failover",
        "seed": 11,
        "purpose": "To measure a failover",
        "rounds": 4,
        "silos": list(silos),
        "round_timeout": 120,
        "method": {"name": "fedavg"},
        "model": {"name": "cnn-digits", "classes": 10},
        "training": {"epochs": 1, "lr": 0.05},
    }


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line per run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--silos", type=int, default=3, help="3 by default")
    parser.add_argument("--runs", type=int, default=3, help="3 by default")
    given = parser.parse_args(arguments)
    for _ in range(given.runs):
        with tempfile.TemporaryDirectory(prefix="failover-") as folder:
            found = failover(Path(folder), given.silos)
        print("; ".join(f"{what} {seconds:.1f}" for what, seconds in found), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
