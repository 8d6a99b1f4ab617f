"""Measures how many rounds a federation closes while its processes die.

``python benchmarks/storm.py [--method pfedsim]``

A federation of real processes on loopback runs one job. At random moments (exponential, ``--mean``
seconds apart) one of its processes, the coordinator among them, is killed with SIGKILL and started
again at once. Prints rounds closed of all, deaths, seconds, why attempts at blind sums ended, why
silos dropped out, and whom silos blamed. Nobody breaks a rule here, so any blame is a defect. Exits
with 1 where the job did not complete, or somebody was blamed.

``storm`` is for other programs: it takes how processes are launched, and returns a ``Report``.
"""

import argparse
import json
import random
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from staddle.proto.channel import require_tls13

require_tls13()

from staddle.algorithms.data.dataset import digits  # noqa: E402
from staddle.algorithms.partition.draw import dirichlet  # noqa: E402
from staddle.commands.federation import local_federation  # noqa: E402
from staddle.commands.federation.local_federation import LocalFederation  # noqa: E402
from staddle.commands.federation.processes import ChildProcess, Launcher, launched  # noqa: E402
from staddle.errors import AbortedError  # noqa: E402

JOB = "storm"
SILOS = ("north", "east", "south", "west")
TIMING = {"admission_seconds": 120, "beat_seconds": 2, "hold_seconds": 2}
BLIND = {"secure_aggregation": "required", "weight_most": 2000}
LOOK_SECONDS = 0.05  # between two looks at whether the job has ended


@dataclass(frozen=True)
class Report:
    """What came of a storm; each counter is by its text."""

    outcome: str  # "completed", "failed", or "running" where time was up
    reason: str
    rounds: int  # closed
    deaths: Mapping[str, int]  # by process
    seconds: float  # from the first round on
    attempts: int  # at blind sums, that ended without one
    ended: Mapping[str, int]  # why attempts ended without a sum
    dropped: Mapping[str, int]  # codes by which silos dropped out
    blamed: Mapping[str, int]  # why silos blamed somebody

    @property
    def sound(self) -> bool:
        """Whether the job completed, and nobody was blamed."""
        return self.outcome == "completed" and not self.blamed

    def lines(self) -> Iterator[str]:
        """For a reader."""
        died = ", ".join(f"{name} {number}" for name, number in sorted(self.deaths.items()))
        yield f"{self.outcome}: {self.rounds} rounds closed in {self.seconds:.0f} s"
        if self.reason:
            yield f"  reason: {self.reason}"
        yield f"  deaths: {sum(self.deaths.values())} ({died})"
        yield f"  attempts at blind sums that ended without one: {self.attempts}"
        for title, counted in (
            ("ended", self.ended),
            ("dropped out", self.dropped),
            ("BLAMED", self.blamed),
        ):
            for why, number in Counter(counted).most_common():
                yield f"  {title} {number} ×: {why}"


def document(
    method: str, silos: Sequence[str], rounds: int, *, blind: bool = True, **changes: Any
) -> dict[str, Any]:
    """A short job on the digits."""
    return {
        "version": 1,
        "name": JOB,
        "seed": 11,
        "purpose": "For a benchmark",
        "rounds": rounds,
        "silos": list(silos),
        "min_cohort": 3 if blind else 2,
        "round_timeout": 120,
        **({"security": BLIND} if blind else {}),
        "method": {"name": method},
        "model": {"name": "cnn-digits", "classes": 10},
        "training": {"epochs": 1, "batch_size": 32, "lr": 0.05},
        **changes,
    }


def storm(
    folder: Path,
    job: Mapping[str, Any],
    *,
    seed: int = 1,
    mean_seconds: float = 1.5,
    longest_seconds: float = 600.0,
    timing: Mapping[str, float] = TIMING,
    launch: Launcher = launched,
) -> Report:
    """Run a job to its end, or until time is up, while processes die.

    ``folder`` is new or empty. Deaths begin with the first round. AbortedError for a process that
    ends by itself.
    """
    federation = local_federation.make(folder, job["silos"])
    signed = local_federation.sign_job(federation, job)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{found.getsockname()[1]}"
    local_federation.write_coordinator(federation, [job["name"]], timing, address)
    parts = dirichlet(digits().y.numpy(), len(federation.silos), 3.0, 3, minimum=20)
    for silo, part in zip(federation.silos, parts, strict=True):
        local_federation.write_silo(federation, silo, address, digits().take(part), [signed])
    drawn = random.Random(seed)  # noqa: S311 who dies when is no secret
    daemons = {
        name: _started(federation, name, launch) for name in ("coordinator", *federation.silos)
    }
    try:
        return _stormed(federation, daemons, drawn, mean_seconds, longest_seconds, launch)
    finally:
        for daemon in daemons.values():
            daemon.stop()


def _started(federation: LocalFederation, name: str, launch: Launcher) -> ChildProcess:
    if name == "coordinator":
        return ChildProcess(
            name, ("-m", "staddle.coordinator"), federation.coordinator_config, launch
        )
    return ChildProcess(name, ("-m", "staddle.silo"), federation.silo_config(name), launch)


def _stormed(
    federation: LocalFederation,
    daemons: dict[str, ChildProcess],
    drawn: random.Random,
    mean_seconds: float,
    longest_seconds: float,
    launch: Launcher,
) -> Report:
    deaths: Counter[str] = Counter()
    daemons["coordinator"].wait_for("round.opened", 180)
    began = time.monotonic()
    due = began + drawn.expovariate(1 / mean_seconds)
    outcome = reason = ""
    while not outcome and time.monotonic() - began < longest_seconds:
        event = daemons["coordinator"].event(LOOK_SECONDS) or {}
        if event.get("event") == "job.ended":
            outcome, reason = str(event["outcome"]), str(event["reason"])
        for daemon in daemons.values():
            daemon.check()
        if time.monotonic() >= due:
            victim = drawn.choice(sorted(daemons))
            daemons[victim].kill()
            deaths[victim] += 1
            outcome = outcome or _ended(daemons[victim])  # what it logged before it died
            daemons[victim] = _started(federation, victim, launch)
            due = time.monotonic() + drawn.expovariate(1 / mean_seconds)
    return _report(federation, outcome or "running", reason, deaths, time.monotonic() - began)


def _ended(killed: ChildProcess) -> str:
    """The outcome of the job, where a killed coordinator logged its end; empty if it did not."""
    try:
        while (event := killed.event(5.0)) is not None:
            if event.get("event") == "job.ended":
                return str(event["outcome"])
    except AbortedError:  # all that it logged was read
        pass
    return ""


def _report(
    federation: LocalFederation, outcome: str, reason: str, deaths: Counter[str], seconds: float
) -> Report:
    told = list(_events(federation.coordinator_config.parent / "coordinator.log"))
    ends = [
        event
        for silo in federation.silos
        for event in _events(federation.silo_config(silo).parent / f"{silo}.log")
    ]
    return Report(
        outcome,
        reason,
        len({event["round"] for event in told if event["event"] == "round.closed"}),
        dict(deaths),
        seconds,
        len([event for event in told if event["event"] == "sum.ended"]),
        Counter(_short(event["why"]) for event in told if event["event"] == "sum.ended"),
        Counter(event["code"] for event in told if event["event"] == "silo.dropped"),
        Counter(
            f"{event['code']}: {event['why']}"
            for event in ends
            if event["event"] == "secagg.ended" and event["blame"]
        ),
    )


def _short(why: str) -> str:
    return why.partition(" (")[0]


def _events(log: Path) -> Iterator[dict[str, Any]]:
    for line in log.read_text(errors="replace").splitlines():
        if line.startswith("{"):
            yield json.loads(line)


def main() -> int:
    """Run one storm and print what came of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--method", default="pfedsim")
    parser.add_argument(
        "--silos",
        type=int,
        default=len(SILOS),
        help="how many; more than five are in several batches",
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--mean", type=float, default=1.5, help="seconds between two deaths, on average"
    )
    parser.add_argument(
        "--longest", type=float, default=600.0, help="seconds after which it is given up"
    )
    parser.add_argument("--seed", type=int, default=1, help="of whom dies when")
    parser.add_argument("--plain", action="store_true", help="without secure aggregation")
    args = parser.parse_args()
    silos = (
        SILOS
        if args.silos == len(SILOS)
        else tuple(f"silo-{number:02d}" for number in range(args.silos))
    )
    job = document(args.method, silos, args.rounds, blind=not args.plain)
    with tempfile.TemporaryDirectory() as folder:
        report = storm(
            Path(folder) / "federation",
            job,
            seed=args.seed,
            mean_seconds=args.mean,
            longest_seconds=args.longest,
        )
    sys.stdout.write("\n".join(report.lines()) + "\n")
    return 0 if report.sound else 1


if __name__ == "__main__":
    sys.exit(main())
