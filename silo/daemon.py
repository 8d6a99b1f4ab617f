"""Start and stop of the agent: configuration, roster, keys, policy, ledger, signals."""

import asyncio
import os
import signal
from collections.abc import Iterator
from importlib.metadata import version

from .. import log, metrics
from ..algorithms import sources
from ..errors import LocalError
from ..security import policy as policies
from ..security import roster as rosters
from ..security.identity import Role, load_keys
from ..security.ledger import Ledger
from ..security.ledger_audit import LEDGER
from ..security.lock import locked
from .agent import Agent
from .config import SiloConfig
from .egress import Gate, checked_address, open_client
from .witness import HEADS, Witness


async def serve(config: SiloConfig) -> None:
    """Run until SIGTERM or SIGINT, or until the coordinator bars us (LocalError says why)."""
    os.umask(0o077)
    address = checked_address(config.coordinator)
    keys = load_keys(config.keys)
    roster = rosters.load(config.roster)
    rosters.verify(roster, config.trust)
    entry = keys.entry
    if entry.id not in roster or roster[entry.id] != entry or entry.role is not Role.SILO:
        raise LocalError(
            f"{config.keys}: {entry.id!r} ({entry.tls_fingerprint}) is no silo of roster version {roster.version}; "
            "have its entry.json added and the roster signed"
        )
    policy = policies.load(config.policy, config.dataset)
    sources.check_present(config.data)
    ledger_folder = config.directory / LEDGER
    ledger_folder.mkdir(parents=True, exist_ok=True)
    with locked(config.directory), Ledger.open(ledger_folder, entry.id, roster.federation, keys.log) as ledger:
        for left in config.directory.rglob(".*.tmp"):  # of a process that died while it wrote
            left.unlink()
        ledger.start(f"staddle {version('staddle')}", rosters.digest(roster), policy.digest)
        ledger.put_in_force(policy.digest, policy.text)
        witness = Witness(ledger, roster, keys, config.directory / HEADS)
        gate = Gate(open_client(address, keys, roster), ledger, policy, roster, witness)
        agent = Agent(config, entry.id, roster, policy, gate, keys)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, agent.stop)
        log.event("started", silo=entry.id, roster=roster.version, policy=policy.digest)
        with metrics.served(config.metrics, "silo", metrics.SILO, lambda: gauges(agent, ledger)):
            barred = await agent.run()
        ledger.stop("barred" if barred else "asked to stop")
    log.event("stopped")
    if barred:
        raise LocalError(f"the coordinator bars this silo: {barred}")


def gauges(agent: Agent, ledger: Ledger) -> Iterator[metrics.Gauge]:
    """What the silo's metrics show as it is now."""
    yield metrics.Gauge("connected", "Whether a session with the coordinator is open.", (), {(): agent.connected})
    head = ledger.head
    yield metrics.Gauge("ledger_records", "Records of the egress ledger.", (), {(): head.seq + 1 if head else 0})
    yield metrics.Gauge("ledger_head_seq", "Number of its last record.", (), {(): head.seq if head else -1})
