"""Measures the cost of a round, relative to a bare stream.

``python benchmarks/round.py [--side 324] [--silos 2] [--blind] [--mix]``

One run measures two things on the same machine, one after the other, with the same bytes:

- *round*: a real coordinator process and real gates (roster, policy, ledger with fsync, digests,
  finite, fold), each silo in a process of its own, without training: fetch what is delivered, give
  it back. Time from ``round.opened`` to ``round.closed`` in the coordinator's own events, the first
  round left out (nothing is delivered in it).
- *bare*: one gRPC server and one client process a silo, mutual TLS, 1 MiB messages, SHA-256 on both
  ends: the upload down and up again, all silos at once.

Prints seconds (median over rounds), their ratio, CPU seconds of a round (of coordinator and silos,
all threads, mean over rounds), and the coordinator's memory: idle, that is when it listens, and the
peak while the job runs; the difference also in uploads; then the peak of the silo that took most,
and what lay in the coordinator's folder when a round closed. What the model took while the job was
read is not in it. Below that, what gate and ledger take of a round at a silo (its checks and its
own copy; records, proofs and their fsyncs), measured in the silos around the calls, median over
rounds and silos. SHA-256 is in both streams and not in it. With ``--blind``, of four silos or more,
the same rounds are measured once more with secure aggregation (private weights, 32 bits a word):
all of its steps, with no training to hide the setup behind. With ``--mix`` the rounds are
pFedSim's, whose extractors are mixed for each silo (and compared by their classifiers), instead of
FedAvg's.
``--side`` is the edge of LeNet-5's square input: 324 gives 46.7 MB of parameters, 60 gives 1 MB.
"""

import argparse
import asyncio
import hashlib
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from staddle.proto.channel import CHUNK_BYTES, OPTIONS, SERVER_OPTIONS, require_tls13
from staddle.security.blind.plan import JobPlan

require_tls13()


import grpc  # noqa: E402 its variables must be set before it is imported
import numpy as np  # noqa: E402
import torch  # noqa: E402

from staddle.algorithms.data.dataset import Dataset  # noqa: E402
from staddle.algorithms.exchange.parts import Part  # noqa: E402
from staddle.algorithms.job.job import Job  # noqa: E402
from staddle.commands.federation import local_federation  # noqa: E402
from staddle.commands.federation.processes import ChildProcess  # noqa: E402
from staddle.files.documents import parse_json, read_bytes  # noqa: E402
from staddle.security.arithmetic.fixedpoint import Flat  # noqa: E402
from staddle.security.identity import roster as rosters  # noqa: E402
from staddle.security.identity.keys import load_keys  # noqa: E402
from staddle.security.ledger.egress_ledger import Ledger  # noqa: E402
from staddle.security.ledger.records import Start  # noqa: E402
from staddle.security.policy import policy as policies  # noqa: E402
from staddle.security.policy.policy import Policy  # noqa: E402
from staddle.silo.blind.group_keys import GroupKeys  # noqa: E402
from staddle.silo.blind.rounds import BlindRounds, OwnValues  # noqa: E402
from staddle.silo.egress import gate as egress  # noqa: E402
from staddle.silo.egress.gate import Gate  # noqa: E402
from staddle.silo.egress.session import (  # noqa: E402
    TurnedAwayError,
    UnreachableError,
    open_client,
)
from staddle.silo.egress.witness import Witness  # noqa: E402
from staddle.silo.ingress.delivery import ReceivedDelivery  # noqa: E402
from staddle.silo.ingress.mix_memory import MixMemory  # noqa: E402
from staddle.silo.parts.contributions import Contributions  # noqa: E402
from staddle.silo.parts.declared import Declared, RecordCount  # noqa: E402

BLIND = {"secure_aggregation": "required", "weight_most": 16}
TIMING = {
    # silos start one after another where cores are few, and late ones are left out
    "admission_seconds": 600,
    "beat_seconds": 10,
    "hold_seconds": 30,
}


# Our round.


GATE = (
    (egress, "exactly"),
    (egress, "value_fault"),
    (egress, "miscounted"),
    (egress, "norms"),
    (Policy, "decide"),
)
LEDGER = (
    (Ledger, "append"),
    (Ledger, "seal"),
    (Witness, "proof"),
)


def timed(places: Any, spent: dict[str, float], name: str) -> None:
    """Add up the seconds that calls of these functions take."""

    def around(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return real(*args, **kwargs)
            finally:
                spent[name] += time.perf_counter() - began

        return call

    for owner, attribute in places:
        setattr(owner, attribute, around(getattr(owner, attribute)))


def silo_process(folder: str, silo: str, address: str, results: Any) -> None:
    """A silo that gives back what it was given."""
    spent = {"gate": 0.0, "ledger": 0.0}
    timed(GATE, spent, "gate")
    timed(LEDGER, spent, "ledger")
    results.put(asyncio.run(echo(Path(folder), silo, address, spent)))


def changed(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The upload: a little different each round, since no model is summed blind twice."""
    return {name: value.add_(2.0**-10) for name, value in tensors.items()}


def given_first(job: Job) -> tuple[str, dict[str, dict[str, torch.Tensor]]]:
    """What every silo gives in the first round, and which part of it comes down and goes up again.

    That is FedAvg's model, or pFedSim's extractor.
    """
    zeros = {
        part.name: {s.name: torch.zeros(s.shape, dtype=getattr(torch, s.dtype)) for s in part.wire}
        for part in job.up(0)
    }
    shared, *_ = zeros
    if shared == "model":
        zeros["model"]["@weight"] = torch.tensor(1.0, dtype=torch.float64)
    else:
        (rows,) = zeros["rows"].values()
        rows[:] = rows.shape[-1] ** -0.5  # of all silos alike, so that all mix with all
        rows[:, ::2] *= -1
    return shared, zeros


async def echo(
    folder: Path, silo: str, address: str, spent: dict[str, float], training: float = 0.0
) -> list[tuple[float, float]]:
    """Accept, then fetch and give until the job is over.

    Seconds of gate and ledger in each round but the first.

    ``training``: seconds that pass between the two.
    """
    took = []
    roster = rosters.load(folder / "roster.json")
    keys = load_keys(folder / silo / "keys")
    policy = policies.load(folder / silo / "policy.toml")
    document = parse_json(read_bytes(folder / "jobs" / "bench.json"), "job")["document"]
    job, declared = (
        Job.from_document(document, "job", policy.file.packages),
        Declared.of(document, RecordCount(train=1, test=0)),
    )
    plan = JobPlan(job)
    shared, zeros = given_first(job)
    place = folder / silo / "jobs" / "bench"
    place.mkdir(parents=True)
    with Ledger.open(folder / silo / "ledger", silo, roster.federation, keys.log) as ledger:
        ledger.append(
            Start(
                silo=silo,
                software="benchmark",
                roster=rosters.digest(roster),
                policy=policy.digest,
            )
        )
        ledger.put_in_force(policy.digest, policy.text)
        witness = Witness(ledger, roster, keys, folder / silo / "heads.json")
        gate = Gate(open_client(address, keys, roster), ledger, policy, roster, witness)
        group_keys = GroupKeys(roster, keys, gate.protocol, place.parent)
        blind = BlindRounds(roster, policy, gate, keys, group_keys)
        last: dict[str, torch.Tensor] = {}

        async def trained(delivered: ReceivedDelivery) -> Contributions:
            await asyncio.sleep(training)
            last.update({**zeros[shared], **changed(delivered.tensors.get(shared, {}))})
            return Contributions({**zeros, shared: last})

        def own(_: Part) -> Flat:
            return tuple(value.reshape(-1).numpy() for value in last.values())

        async def worked() -> bool:
            """Do what the coordinator asks; whether the job goes on."""
            task = await gate.session.poll()
            match task.WhichOneof("body"):
                case "offer":
                    if job.keyed:
                        MixMemory(place).begin(job)
                        await group_keys.contribute(job)
                    await gate.session.answer(job.name, job.digest, 0, "ACCEPT")
                case "round":
                    spent.update({"gate": 0.0, "ledger": 0.0})
                    if job.security.required:
                        cohort = tuple(sorted(task.round.cohort))
                        local = OwnValues(place, task.round.counted, own)
                        await blind.take_part(
                            declared, plan.round(task.round.round), cohort, local, None, trained
                        )
                    else:
                        contributions = await trained(
                            await gate.session.fetch(plan.round(task.round.round))
                        )
                        await gate.upload_plain(
                            declared, task.round.round, contributions, tuple(task.round.cohort)
                        )
                    if task.round.round:
                        took.append((spent["gate"], spent["ledger"]))
                case "finish":
                    await gate.session.answer(job.name, job.digest, job.rounds, "DONE")
                    return False
            return True

        await until_over(gate, worked)
    return took


async def until_over(gate: Gate, worked: Callable[[], Awaitable[bool]]) -> None:
    """Work in sessions, one after another, until the job is over.

    As with an agent, a call that took too long ends a session, and no more: a blind round in memory
    continues where it was. So does one that came too late for a round which closed without it.
    """
    goes_on = True
    while goes_on:
        await greeted(gate)
        try:
            while goes_on := await worked():
                pass
        except (UnreachableError, TurnedAwayError):
            continue
    await gate.session.close()


async def greeted(gate: Gate) -> None:
    """Open a session; hundreds of silos of one process may take longer than a call has."""
    while True:
        try:
            await gate.session.hello()
        except UnreachableError:
            continue
        return


def closed_rounds(
    coordinator: ChildProcess, silos: Sequence[Any]
) -> Iterator[tuple[Mapping[str, Any], float, float]]:
    """Each round as it closes, and when it opened and closed, in seconds since 1970.

    SystemExit once a process of the silos has failed.
    """
    opened = 0.0
    while (event := coordinator.event(5)) is None or event["event"] != "job.ended":
        if any(process.exitcode for process in silos):
            raise SystemExit("the silos of the benchmark ended; their error stands above")
        if event is None:
            continue
        at = datetime.fromisoformat(str(event["time"])).timestamp()
        if event["event"] == "round.opened":
            opened = at
        elif event["event"] == "round.closed":
            yield event, opened, at


def memory(pid: int, key: str) -> int:
    """Bytes of VmHWM (peak) or VmRSS of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/{pid}/status has no {key}; this benchmark needs Linux")


def size(folder: Path) -> int:
    """Bytes of all files in a folder; files may go meanwhile."""
    told = subprocess.run(["du", "-sb", str(folder)], capture_output=True, text=True)  # noqa: PLW1510, S603, S607
    return int(told.stdout.split()[0])


def cpu(pid: int) -> float:
    """CPU seconds that a process has taken, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Rounds:
    """What the rounds of a job took but the first."""

    took: list[float]  # seconds of each
    upload_bytes: int  # bytes
    cpu: tuple[float, float]  # seconds of a round: at the coordinator, at all silos together
    memory: tuple[int, int]  # of the coordinator in bytes: idle, at its peak
    largest_silo: int  # bytes: the peak of the silo that took most
    disk: int  # bytes: the most that the coordinator's folder had as a round closed
    gate: float  # seconds of a round at one silo, in the clear
    ledger: float

    def told(self) -> str:
        """CPU and memory, for people."""
        (coordinator, silos), (idle, peak) = self.cpu, self.memory
        return (
            f"CPU of a round {coordinator:.2f} s at the coordinator, {silos:.2f} s at the silos; "
            f"coordinator {idle / 1e6:.0f} MB idle, {peak / 1e6:.0f} MB at peak, "
            f"{(peak - idle) / self.upload_bytes:.2f} uploads more;"
            f" a silo {self.largest_silo / 1e6:.0f} MB at peak;"
            f" {self.disk / 1e6:.0f} MB on the coordinator's disk"
        )


def our_rounds(
    names: Sequence[str], rounds: int, side: int, *, blind: bool = False, mix: bool = False
) -> Rounds:
    """Run a job of these silos, in any order."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "federation"
        federation = local_federation.make(folder, names)
        job = local_federation.sign_job(
            federation,
            {
                "version": 1,
                "name": "bench",
                "seed": 1,
                "purpose": "For a benchmark",
                "rounds": rounds,
                "silos": list(names),
                "method": (
                    {"name": "pfedsim", "options": {"rho": 0.0}} if mix else {"name": "fedavg"}
                ),
                "model": {"name": "lenet5", "classes": 10, "input": [3, side, side]},
                "training": {"epochs": 1, "lr": 0.1},
                **({"min_cohort": 3, "security": BLIND} if blind else {}),
            },
        )
        upload_bytes = sum(spec.nbytes for part in job.up(0) for spec in part.wire)
        local_federation.write_coordinator(federation, ["bench"], TIMING)
        coordinator = ChildProcess(
            "coordinator", ("-m", "staddle.coordinator"), federation.coordinator_config
        )
        try:
            address = str(coordinator.wait_for("listening", 60)["address"])
            Path(f"/proc/{coordinator.pid}/clear_refs").write_text("5")  # the peak counts from here
            idle = memory(coordinator.pid, "VmRSS")
            record = Dataset(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64))
            # the silos fork from one process that imports for all of them
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["staddle.silo.daemon", "staddle.silo.blind.rounds"])
            children, results = [], context.Queue()
            for name in names:
                local_federation.write_silo(federation, name, address, record, [job])
                policy = folder / name / "policy.toml"
                policy.write_text(policy.read_text().replace("64MiB", "4GiB"))
                children.append(
                    context.Process(target=silo_process, args=(str(folder), name, address, results))
                )
                children[-1].start()
            took, began, ended = [], [], []
            largest_silo = disk = 0
            pids = [child.pid for child in children]
            for event, opened, closed in closed_rounds(coordinator, children):
                ended = [cpu(pid) for pid in (coordinator.pid, *pids)]
                largest_silo = max(memory(pid, "VmHWM") for pid in pids)
                disk = max(disk, size(federation.coordinator_config.parent))
                if event["round"]:
                    took.append(closed - opened)
                else:
                    began = ended
            spent = [pair for _ in children for pair in results.get(timeout=60)]
            for child in children:
                child.join(60)
            peak = memory(coordinator.pid, "VmHWM")
        finally:
            coordinator.stop()
    gate, ledger = (statistics.median(column) for column in zip(*spent, strict=True))
    shares = [(after - before) / len(took) for before, after in zip(began, ended, strict=True)]
    each = shares[0], sum(shares[1:])
    return Rounds(took, upload_bytes, each, (idle, peak), largest_silo, disk, gate, ledger)


# The bare stream.


def bare_server(pipe: Any, key: bytes, certificate: bytes, roots: bytes, size: int) -> None:
    """Streams ``size`` bytes down, takes a stream up; hashes both."""

    async def down(_: bytes, __: Any) -> AsyncIterator[bytes]:
        digest, piece = hashlib.sha256(), np.random.default_rng(1).bytes(CHUNK_BYTES)
        for start in range(0, size, CHUNK_BYTES):
            part = piece[: size - start]
            digest.update(part)
            yield part

    async def up(requests: AsyncIterator[bytes], _: Any) -> bytes:
        digest = hashlib.sha256()
        async for part in requests:
            digest.update(part)
        return digest.digest()

    async def serve() -> None:
        server = grpc.aio.server(options=list(SERVER_OPTIONS))
        handlers = {
            "down": grpc.unary_stream_rpc_method_handler(down),
            "up": grpc.stream_unary_rpc_method_handler(up),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", handlers),))
        credentials = grpc.ssl_server_credentials(
            [(key, certificate)], roots, require_client_auth=True
        )
        pipe.send(server.add_secure_port("127.0.0.1:0", credentials))
        await server.start()
        await asyncio.to_thread(pipe.recv)
        await server.stop(0)

    asyncio.run(serve())


def bare_client(pipe: Any, port: int, pair: tuple[bytes, bytes], root: bytes, size: int) -> None:
    """On each message of the pipe: the upload down and up again."""

    async def run() -> None:
        credentials = grpc.ssl_channel_credentials(root, *pair)
        options = [*OPTIONS, ("grpc.ssl_target_name_override", "coordinator.staddle")]
        piece = np.random.default_rng(2).bytes(CHUNK_BYTES)
        async with grpc.aio.secure_channel(
            f"127.0.0.1:{port}", credentials, options=options
        ) as channel:
            await channel.channel_ready()
            pipe.send("ready")
            while await asyncio.to_thread(pipe.recv):
                digest = hashlib.sha256()
                async for part in channel.unary_stream("/bare/down")(b""):
                    digest.update(part)
                call = channel.stream_unary("/bare/up")()
                for start in range(0, size, CHUNK_BYTES):
                    part = piece[: size - start]
                    digest.update(part)
                    await call.write(part)
                await call.done_writing()
                await call
                pipe.send("done")

    asyncio.run(run())


def bare_rounds(silos: int, rounds: int, size: int) -> list[float]:
    """Seconds of each round but the first."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "federation"
        local_federation.make(folder, ["silo-0"])
        roster = rosters.load(folder / "roster.json")
        keys, own = (
            load_keys(folder / "coordinator" / "keys"),
            load_keys(folder / "silo-0" / "keys"),
        )
        root = roster.coordinator.certificate.encode()
        ours, theirs = context.Pipe()
        pair = (keys.tls_key, root)
        server = context.Process(
            target=bare_server, args=(theirs, *pair, roster.bundle().encode(), size)
        )
        server.start()
        port = ours.recv()
        pipes, children = [], [server]
        for _ in range(silos):
            mine, other = context.Pipe()
            arguments = (other, port, (own.tls_key, own.entry.certificate.encode()), root, size)
            children.append(context.Process(target=bare_client, args=arguments))
            children[-1].start()
            pipes.append(mine)
        for pipe in pipes:
            pipe.recv()
        took = []
        for _ in range(rounds):
            started = time.perf_counter()
            for pipe in pipes:
                pipe.send(True)
            for pipe in pipes:
                pipe.recv()
            took.append(time.perf_counter() - started)
        for pipe in (*pipes, ours):
            pipe.send(False)
        for child in children:
            child.join(30)
    return took[1:]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--side", type=int, default=324)
    parser.add_argument("--silos", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--blind", action="store_true")
    parser.add_argument("--mix", action="store_true")
    chosen = parser.parse_args()
    names = [f"silo-{n}" for n in range(chosen.silos)]
    plain = our_rounds(names, chosen.rounds, chosen.side, mix=chosen.mix)
    bare = statistics.median(bare_rounds(chosen.silos, chosen.rounds, plain.upload_bytes))
    ours = statistics.median(plain.took)
    sys.stdout.write(
        f"{plain.upload_bytes / 1e6:.1f} MB x {chosen.silos} silos: round {ours:.3f} s,"
        f" bare {bare:.3f} s, ratio {ours / bare:.2f}; {plain.told()}\n"
        f"at a silo: gate {plain.gate * 1e3:.1f} ms,"
        f" ledger {plain.ledger * 1e3:.1f} ms, {(plain.gate + plain.ledger) / ours:.1%} of a"
        " round\n"
    )
    if chosen.blind:
        hidden = our_rounds(names, chosen.rounds, chosen.side, blind=True, mix=chosen.mix)
        blind = statistics.median(hidden.took)
        sys.stdout.write(
            f"blind: round {blind:.3f} s, {blind / ours:.2f} times the plain one; {hidden.told()}\n"
        )


if __name__ == "__main__":
    main()
