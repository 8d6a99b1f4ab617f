"""Start and stop of the agent: configuration, roster, keys, policy, ledger, signals."""

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from operator import attrgetter

from .. import log, metrics
from ..errors import LocalError
from ..files.portable import check_runs_daemons
from ..proto.channel import checked_address
from ..security.identity import roster as rosters
from ..security.identity.keys import Keys, Role, load_keys
from ..security.identity.roster import Roster
from ..security.ledger.audit import LEDGER
from ..security.ledger.egress_ledger import Ledger
from ..security.ledger.records import Start, StopRecord
from ..security.log.lock import locked
from ..security.policy import policy as policies
from ..security.policy.policy import SiloPolicy
from .admission import budget as budgets
from .admission.budget import DatasetBudget
from .admission.signed_sets import check_remembered
from .agent import Agent
from .config import SiloConfig
from .egress.gate import Gate
from .egress.session import open_client
from .egress.witness import HEADS, Witness
from .job_folder import check_same_records, kept_split_key


async def serve(config: SiloConfig) -> None:
    """Run until SIGTERM or SIGINT, or until the coordinator bars us (LocalError says why).

    LocalError also if keys, roster, policy or ledger do not fit together. The folder is locked
    meanwhile, so that no second agent can use it.
    """
    check_runs_daemons("a silo")
    # Keys, ledger and personal parts are for this user's eyes alone.
    os.umask(0o077)
    address = checked_address(config.coordinator)
    keys = load_keys(config.keys)
    roster = rosters.load(config.roster)
    rosters.verify(roster, config.trust)
    entry = keys.entry
    # Checked here, since the coordinator would end the handshake without a reason.
    if entry.id not in roster or roster[entry.id] != entry or entry.role is not Role.SILO:
        raise LocalError(
            f"{config.keys}: {entry.id!r} ({entry.tls_fingerprint}) is not a silo of roster version"
            f" {roster.version}; have its entry.json added and the roster signed"
        )

    # Whatever is missing is said before the ledger has a start.
    policy = policies.load(config.policy, config.names)
    for name, source in config.sources.items():
        with config.naming(name):
            source.check_present()
    ledger_folder = config.directory / LEDGER
    ledger_folder.mkdir(parents=True, exist_ok=True)
    with (
        locked(config.directory),
        Ledger.open(ledger_folder, entry.id, roster.federation, keys.log) as ledger,
    ):
        for left in list(config.directory.rglob(".*.tmp")):  # of a process that died while it wrote
            # The folder of a model that it was making.
            if left.is_dir():
                shutil.rmtree(left)
            left.unlink(missing_ok=True)
        # An older ledger put back would make this silo forget which sums it signed.
        check_remembered(config.directory / "jobs", ledger)
        check_same_records(config.directory / "jobs", config.names)
        kept_split_key(config.directory)  # lost, it is said now and not when a job is offered

        # The ledger says under which policy everything behind this record left.
        software = f"staddle {version('staddle')}"
        roster_digest = rosters.digest(roster)
        start = Start(silo=entry.id, software=software, roster=roster_digest, policy=policy.digest)
        ledger.append(start)
        ledger.put_in_force(policy.digest, policy.text)

        witness = Witness(ledger, roster, keys, config.directory / HEADS)
        with _budgets(config, policy, ledger, roster, keys) as opened:
            # Without a budget nothing counts as paid for, so no private job can upload.
            paid = budgets.paid_by(opened)
            gate = Gate(open_client(address, keys, roster), ledger, policy, roster, witness, paid)
            agent = Agent(config, entry.id, roster, policy, gate, keys, opened)
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, agent.stop)
            log.event("started", silo=entry.id, roster=roster.version, policy=policy.digest)
            with metrics.served(
                config.metrics, "silo", metrics.SILO, lambda: gauges(agent, ledger)
            ):
                barred = await agent.run()
        # Only after an orderly end: an error leaves no such record.
        ledger.append(StopRecord(reason="barred" if barred else "asked to stop"))
    log.event("stopped")
    if barred:
        raise LocalError(f"the coordinator bars this silo: {barred}")


@contextlib.contextmanager
def _budgets(
    config: SiloConfig, policy: SiloPolicy, ledger: Ledger, roster: Roster, keys: Keys
) -> Iterator[Mapping[str, DatasetBudget]]:
    """The open privacy budgets by data set.

    Where the policy sets none, the data set has none, and private jobs on it are declined.
    """
    budgets.check_names(config.names, ledger.privacy_heads)
    named = config.names.own
    asked = list(filter(attrgetter("budget"), map(policy.on, named)))
    # A data set under another name begins with an empty budget: nobody but the silo's own people
    # can tell whether its records are the same.
    spent_on = sorted(ledger.privacy_heads.keys() - map(attrgetter("dataset"), asked))
    if spent_on:
        why = (
            "these data sets have budgets in the ledger, but the policy sets others or none;"
            " if they share records, the privacy already spent on them would be forgotten: name the"
            " data set as before, here and in the policy"
        )
        log.problem("budget.elsewhere", dataset=", ".join(named), spent_on=spent_on, why=why)
    with contextlib.ExitStack() as stack:
        opened = {}
        for own in asked:
            budget = budgets.opened(config.directory, own, ledger, roster.federation, keys)
            opened[own.dataset] = stack.enter_context(budget)
        yield opened


def gauges(agent: Agent, ledger: Ledger) -> Iterator[metrics.Gauge]:
    """The silo's metrics as they are now.

    Called for each request, in the thread that answers it.
    """
    yield metrics.Gauge(
        "connected", "Whether a session with the coordinator is open.", (), {(): agent.connected}
    )
    head = ledger.head
    yield metrics.Gauge(
        "ledger_records", "Records of the egress ledger.", (), {(): head.seq + 1 if head else 0}
    )
    yield metrics.Gauge(
        "ledger_head_seq", "Number of its last record.", (), {(): head.seq if head else -1}
    )
