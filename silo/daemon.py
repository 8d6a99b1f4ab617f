"""Start and stop of the agent: configuration, roster, keys, policy, ledger, signals."""

import asyncio
import contextlib
import os
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from operator import attrgetter
from typing import Any, TypeAlias

from .. import log
from ..errors import LocalError
from ..files import checked_file
from ..files.documents import read_bytes
from ..files.portable import check_runs_daemons
from ..files.watched_file import WatchedFile
from ..metrics import exporter as metrics
from ..proto.channel import checked_address, software
from ..security.identity import roster as rosters
from ..security.identity.certificate import end_timestamp
from ..security.identity.keys import (
    Keys,
    Role,
    RosterEntry,
)
from ..security.identity.roster import Roster
from ..security.ledger.audit import LEDGER
from ..security.ledger.egress_ledger import Ledger
from ..security.ledger.records import Start, StopRecord
from ..security.log.lock import locked
from ..security.policy import policy as policies
from ..security.policy.policy import SiloPolicy
from .admission import approvals
from .admission import budget as budgets
from .admission.budget import DatasetBudget
from .admission.signed_sets import check_remembered
from .agent import Agent
from .check import before_start
from .config import SiloConfig
from .egress.gate import Gate
from .egress.session import open_client
from .egress.witness import HEADS, Witness
from .job_folder import check_same_records, kept_split_key
from .session import Exit, Reload

NOT_KEPT = "the roster is too large for a record of the ledger; keep the file for an audit"
# by what they are: files that are read again once they change
WatchedFiles: TypeAlias = Mapping[str, WatchedFile[Any]]

# events about each file that is read again once it changes
RELOADED = {
    "policy": "policy.reloaded",
    "roster": "roster.reloaded",
    "approvals": "approvals.reloaded",
}
INVALID = {
    "policy": "policy.invalid",
    "roster": "roster.invalid",
    "approvals": "approvals.invalid",
}


async def serve(config: SiloConfig) -> None:
    """Run until SIGTERM or SIGINT, or until the coordinator bars us (LocalError says why).

    LocalError also if keys, roster, policy or ledger do not fit together. The folder is locked
    meanwhile, so that no second agent can use it. Policy and roster are read again once their
    files change, without an end of the process; an invalid one is logged, and changes nothing.
    """
    check_runs_daemons("a silo")
    # Keys, ledger and personal parts are for this user's eyes alone.
    os.umask(0o077)
    checked_address(config.coordinator)
    # All that is wrong is said at once. What keeps the agent from running ends it below.
    for finding in before_start(config).findings:
        if not finding.ok:
            log.problem("check.failed", check=finding.name, why=finding.text)
    watched = WatchedRoster(config)
    keys, federation = watched.in_use.keys, config.trust.federation

    # Whatever is missing is said before the ledger has a start.
    policy = policies.load(config.policy, config.names)
    for name, source in config.sources.items():
        with config.naming(name):
            source.check_present()
    ledger_folder = config.directory / LEDGER
    ledger_folder.mkdir(parents=True, exist_ok=True)
    with (
        locked(config.directory),
        log.kept(config.directory / log.KEPT),
        Ledger.open(ledger_folder, keys.entry.id, federation, keys.log) as ledger,
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

        parse = partial(budgets.checked_policy, config)
        files: dict[str, WatchedFile[Any]] = {
            "policy": WatchedFile(config.policy, policy.text.encode(), policy, parse),
            "roster": watched,
        }
        # A person's decision is a file that changes, too.
        if config.admission.approve == "ask":
            made = approvals.begin(config.directory)
            path = config.directory / approvals.FOLDER / approvals.DECISIONS
            files["approvals"] = WatchedFile(path, made, approvals.parse(made), approvals.parse)
        stops = Stops()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stops.ask)
        counts = metrics.ProcessMetrics("silo", metrics.SILO)
        with metrics.served(config.metrics, counts, metrics.TlsFiles(*keys.tls_files)):
            end = await _run(config, ledger, watched, files, stops, counts)
            while isinstance(end, Reload):
                # The records say until when the old files counted, and from when the new ones do.
                ledger.append(StopRecord(reason=f"{end.why} changed"))
                end = await _run(config, ledger, watched, files, stops, counts)
        # Only after an orderly end: an error leaves no such record.
        ledger.append(StopRecord(reason="barred" if end.why else "asked to stop"))
    log.event("stopped")
    if end.why:
        raise LocalError(f"the coordinator bars this silo: {end.why}")


class Stops:
    """Whether this process was asked to stop, whichever agent runs."""

    def __init__(self) -> None:
        self._asked = False
        self._agent: Agent | None = None

    def ask(self) -> None:
        """Stop the agent that runs, and any later one."""
        log.event("stop.asked")
        self._asked = True
        if self._agent is not None:
            self._agent.stop()

    def watch(self, agent: Agent) -> None:
        """From now on this agent runs; it is stopped at once if that was asked for before."""
        self._agent = agent
        if self._asked:
            agent.stop()


class WatchedRoster(WatchedFile[Roster]):
    """The roster in use, until the configuration's file or the coordinator has a later one."""

    def __init__(self, config: SiloConfig) -> None:
        """LocalError unless it names our keys."""
        content, self.in_use = read_bytes(config.roster), config.roster_in_use()
        roster, entry = self.in_use.present, self.in_use.keys.entry
        # Checked here, since the coordinator would end the handshake without a reason.
        if entry not in roster.entries or entry.role is not Role.SILO:
            raise LocalError(
                f"{config.keys}: {entry.id!r} ({entry.tls_fingerprint}) is not a silo of roster"
                f" version {roster.version}; have its entry.json added and the roster signed"
            )
        self._origin = str(config.roster)
        super().__init__(config.roster, content, roster, self._following)

    def _following(self, data: bytes) -> Roster:
        roster = rosters.parse(data, self._origin)
        # It lies there: it is kept once an agent begins with it.
        if self.in_use.offered(roster):
            self.in_use.present = roster
        return self.in_use.present

    def follow(self, roster: Roster) -> None:
        """Take over a roster from anybody; LocalError or PeerError where it may not follow.

        UnwritableError where the disk does not take it.
        """
        if self.in_use.offered(roster):
            self.in_use.keep(roster)
            self.put(roster)
            log.event("roster.received", version=roster.version)


async def _run(
    config: SiloConfig,
    ledger: Ledger,
    watched: WatchedRoster,
    files: WatchedFiles,
    stops: Stops,
    counts: metrics.ProcessMetrics,
) -> Exit | Reload:
    """Run one agent by the files of now, until it ends."""
    reloaded = [name for name, file in files.items() if file.changed]
    policy: SiloPolicy = files["policy"].take()
    roster, in_use = watched.take(), watched.in_use
    # From now on an older one in the configuration's place does not count.
    in_use.keep(roster)
    # With the TLS key that this roster has: taking it over is all that a renewal needs.
    keys = in_use.keys
    silo = keys.entry.id
    digests = {"policy": policy.digest, "roster": rosters.digest(roster)}
    if "approvals" in files:
        digests["approvals"] = sha256(checked_file.to_json(files["approvals"].take())).hexdigest()
    # The ledger says under which policy everything behind this record left.
    start = Start(silo=silo, software=software(), roster=digests["roster"], policy=policy.digest)
    ledger.append(start)
    ledger.put_in_force(policy.digest, policy.text)
    if not ledger.keep_roster(roster):
        log.problem("roster.not_kept", why=NOT_KEPT)

    witness = Witness(ledger, roster, keys, config.directory / HEADS)
    with _budgets(config, policy, ledger, roster, keys) as opened:
        # Without a budget nothing counts as paid for, so no private job can upload.
        paid = budgets.paid_by(opened)
        address = checked_address(config.coordinator)
        client = open_client(address, keys, roster, config.proxy)
        gate = Gate(client, ledger, policy, roster, witness, paid)
        agent = Agent(config, silo, roster, policy, gate, keys, watched.follow, opened)
        stops.watch(agent)
        log.event("started", silo=silo, roster=roster.version, policy=policy.digest)
        for name in reloaded:
            log.event(RELOADED[name], sha256=digests[name])
        members = (keys.entry, roster.coordinator)
        now = partial(gauges, config, agent, ledger, members)
        counts.show(now, metrics.TlsFiles(*keys.tls_files))
        return await agent.run(partial(_changed, files), partial(_settling, files))


def _settling(files: WatchedFiles) -> bool:
    return any(file.settling for file in files.values())


def _changed(files: WatchedFiles) -> str:
    """Which files have changed since they were taken; empty for none."""
    now = time.monotonic()
    for name, file in files.items():
        if fault := file.look(now):
            log.problem(INVALID[name], why=f"{fault}; the {name} of before stays in force")
    return ", ".join(name for name, file in files.items() if file.changed)


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


def gauges(
    config: SiloConfig, agent: Agent, ledger: Ledger, members: Sequence[RosterEntry]
) -> Iterator[metrics.Gauge]:
    """The silo's metrics as they are now; ``members`` are those whose certificates matter to it.

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
    # By the ledger, which has a head of every data set on which something was spent.
    heads = ledger.privacy_heads.items()
    yield metrics.Gauge(
        "budget_spent_epsilon",
        "What is spent or reserved of a data set's privacy budget.",
        ("dataset",),
        {(name,): float(head.epsilon) for name, head in heads},
    )
    yield metrics.Gauge(
        "budget_limit_epsilon",
        "What its owner lets be spent of it.",
        ("dataset",),
        {(name,): float(head.limit) for name, head in heads},
    )
    free = shutil.disk_usage(config.directory).free
    yield metrics.Gauge("disk_free_bytes", "Free bytes where the state lies.", (), {(): free})
    yield metrics.Gauge(
        "certificate_end_timestamp_seconds",
        "When a member's certificate ends: the silo's own, and the coordinator's.",
        ("member",),
        {(entry.id,): end_timestamp(entry.certificate) for entry in members},
    )
