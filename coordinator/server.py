"""Start and stop: configuration, roster, keys, jobs, the gRPC server, signals."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import grpc
import torch
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from .. import log
from ..algorithms.job.job import Job
from ..errors import LocalError, StaddleError
from ..files.documents import parse_json, read_bytes, unwritable
from ..files.portable import check_runs_daemons, resource
from ..metrics import exporter as metrics
from ..metrics.exporter import TlsFiles
from ..proto.channel import SERVER_OPTIONS, require_tls13, software
from ..proto.federation_pb2_grpc import add_FederationServicer_to_server
from ..proto.membership_pb2_grpc import (
    add_EnrolmentServicer_to_server,
    add_MembershipServicer_to_server,
    add_RenewalServicer_to_server,
)
from ..proto.operations_pb2_grpc import add_OperationsServicer_to_server
from ..security import preflight
from ..security.identity import roster as rosters
from ..security.identity.certificate import utc_now
from ..security.identity.guest import GUEST_CERTIFICATE
from ..security.identity.roster_in_use import RosterInUse
from ..security.ledger import kept_rosters
from ..security.ledger.audit import LEDGER
from ..security.ledger.ingress_ledger import ReceivingLedger
from ..security.ledger.records import Serving, StopRecord
from ..security.log import note as notes
from ..security.log.tree_head import TreeHead
from . import config as configs
from . import heap
from .daemon import Daemon
from .enrolment import Enrolments, Renewals
from .gauges import gauges
from .rpc.guard import Guard
from .rpc.membership import MembershipService
from .rpc.operations import Operations, job_of
from .rpc.service import Service
from .rpc.start_weights import check_start_file, missing_file
from .storage.backup import Owner
from .storage.database import DATABASE, Database, StoredJob
from .storage.lease import Lease, leased, vacant

OPEN_MAX = 10_240  # files of a process, on macOS
GRACE_SECONDS = 5.0  # for calls that are running when we stop
GRPC_CALL = "_schedule_rpc_coro"  # gRPC's name of the coroutine that serves a call


def most_open_files() -> tuple[int, int]:
    """Raise this process's limit of open files as far as the system lets it; before and after.

    Idle connections of strangers must not use them up.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError):
        # macOS names no hard limit, and then refuses more than OPEN_MAX.
        hard = max(soft, OPEN_MAX)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, resource.RLIM_INFINITY))
    return soft, hard


async def serve(config: configs.CoordinatorConfig, *, standby: bool = False) -> None:
    """Run until SIGTERM or SIGINT; LocalError before anything listens if something is wrong.

    ``standby``: begin once nobody else serves from the folder.

    It returns once all is closed; LocalError, too, if an error stopped the coordinator. It changes
    the process's umask, heap and limit of open files.
    """
    check_runs_daemons("a coordinator")
    # Uploads in the clear, the database and the ledger are for this user alone.
    os.umask(0o077)
    heap.one_heap()
    before, files = most_open_files()
    log.event("starting", files=files, files_before=before)
    stopped = stop_signal()
    await vacant(config.directory, stopped, standby=standby)
    if stopped.done():
        return
    with opened(config) as state:
        while not stopped.done():
            renewed = asyncio.Event()
            async with serving(state, renewed) as address:
                # The service manager hears it (commands/federation/systemd.py).
                log.event("ready")
                waits = asyncio.ensure_future(renewed.wait())
                both: set[asyncio.Future[Any]] = {stopped, waits}
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                waits.cancel()
                log.event("stopping", why="" if stopped.done() else "a new roster")
            state.config = continued(state.config, address)
    log.event("stopped")
    if broken := stopped.result():
        raise LocalError(f"the coordinator stopped: {broken}")


def continued(config: configs.CoordinatorConfig, address: str) -> configs.CoordinatorConfig:
    """The configuration with which this process continues under another roster.

    Silos look for it at the same port. Its jobs are in the database, and their files may be gone.
    """
    return config.model_copy(update={"listen": address, "jobs": ()})


@dataclass
class OpenState:
    """What a coordinator holds open while rosters change: reading its ledger may take minutes."""

    config: configs.CoordinatorConfig
    in_use: RosterInUse
    database: Database
    ledger: ReceivingLedger
    lease: Lease
    recorded: set[str]  # digests of the rosters that the ledger keeps
    counts: metrics.ProcessMetrics


@contextmanager
def opened(config: configs.CoordinatorConfig) -> Iterator[OpenState]:
    """The state of a coordinator, open and locked while the block runs.

    LocalError for keys, roster, database or ledger that do not fit together, or a folder that
    another process has locked.
    """
    in_use = _identity(config)
    try:
        config.directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LocalError(f"{config.directory}: cannot create it: {unwritable(error)}") from error

    counts = metrics.ProcessMetrics("coordinator", metrics.COORDINATOR)
    # The lock comes first: two processes would write into one database and one ledger.
    with (
        leased(config.directory) as lease,
        log.kept(config.directory / log.KEPT),
        closing(Database(config.directory / DATABASE, fence=lease.check)) as database,
        _ledger(config, in_use, database, lease) as ledger,
        metrics.served(config.metrics, counts, TlsFiles(*in_use.keys.tls_files)),
    ):
        # No transaction of whoever had the lease before is open after this one.
        with database.transaction():
            pass
        # From now on an older one in the configuration's place does not count.
        in_use.keep(in_use.present)
        recorded = set(map(rosters.digest, kept_rosters.kept(config.directory / LEDGER)))
        torch.set_num_threads(1)  # one order of every sum
        yield OpenState(config, in_use, database, ledger, lease, recorded, counts)


@asynccontextmanager
async def running(config: configs.CoordinatorConfig) -> AsyncIterator[str]:
    """A coordinator that serves under one roster while the block runs; gives its address."""
    with opened(config) as state:
        async with serving(state, asyncio.Event()) as address:
            yield address


@asynccontextmanager
async def serving(state: OpenState, renewed: asyncio.Event) -> AsyncIterator[str]:
    """Serve under the present roster while the block runs; gives the address that it listens on.

    ``renewed`` is set once the founders have handed in another roster, which counts from the next
    time on. LocalError before the block for a job that cannot begin, or a taken port.
    """
    config, database, ledger = state.config, state.database, state.ledger
    keys, roster = state.in_use.keys, state.in_use.present
    # Its silos fail in the handshake, of which nothing else is logged here.
    if why := preflight.clock_fault(roster, utc_now()):
        log.problem("clock.wrong", why=why)
    _record_start(state)
    daemon = Daemon(config, keys, roster, database, ledger)
    daemon.generation = state.lease.generation
    # The database first: its jobs were verified when they came.
    stored = list(filter(None, (_stored(kept, config) for kept in database.jobs())))
    known = {job.name: kept.signed for job, kept in stored}
    jobs = [_job(path, config, roster, known) for path in config.jobs]
    new = [(job, signed) for job, signed in jobs if job.name not in known]

    for job, kept in stored:
        if kept.state.stage != "ended" and (why := missing_file(job)):
            log.problem("weights.missing", job=job.name, why=why)

    # Before the port is open: what keeps a job from starting is said before a silo calls.
    daemon.check_known(stored)
    for job, _ in new:
        check_start_file(job)
        daemon.check_new(job)
    guard = Guard(roster)
    server = _server(daemon, guard, state.in_use, renewed)
    port = _listen(server, config, state.in_use)
    health_service = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    await server.start()
    await health_service.set("", health_pb2.HealthCheckResponse.SERVING)
    address = f"{config.listen.rpartition(':')[0]}:{port}"
    names = [job.name for job, _ in (*stored, *new)]
    log.event("listening", address=address, roster=roster.version, jobs=names)

    # New jobs stand behind restored ones: jobs run in the order in which they came.
    daemon.restore(stored)
    for job, signed in new:
        daemon.add(job, signed)
    state.counts.show(partial(gauges, daemon, guard.limits), TlsFiles(*keys.tls_files))
    watching = [*map(asyncio.create_task, (daemon.watch_silos(), state.lease.renew()))]
    # If a watch fails, the daemon stops: silent silos would stay in their rounds for ever.
    for watch in watching:
        watch.add_done_callback(_raise)
    try:
        yield address
    finally:
        for watch in watching:
            watch.cancel()
        await health_service.enter_graceful_shutdown()
        # Polls end now: they wait for longer than the grace of the server.
        daemon.stopping = True
        daemon.tell()
        await server.stop(GRACE_SECONDS)
        # gRPC returns while some calls are about to end, and prints a traceback for each that
        # the end of the loop cancels.
        if calls := calls_open():
            await asyncio.wait(calls, timeout=GRACE_SECONDS)
        # Last: an upload that ends within the grace may begin a fold.
        await daemon.stop()
    ledger.append(StopRecord(reason="roster changed" if renewed.is_set() else "asked to stop"))


def calls_open() -> set["asyncio.Task[object]"]:
    """The tasks of this loop in which gRPC serves calls."""
    tasks = asyncio.all_tasks()
    return {task for task in tasks if getattr(task.get_coro(), "__qualname__", "") == GRPC_CALL}


def _ledger(
    config: configs.CoordinatorConfig, in_use: RosterInUse, database: Database, lease: Lease
) -> ReceivingLedger:
    """Ours; LocalError where it is not the one whose head is in the database.

    A new log key begins a new one.
    """
    own = in_use.present.coordinator
    kept = database.heads().get(own.id)
    known = (
        TreeHead.parse(notes.parse(kept.note).text)
        if kept and kept.log_key == own.log_key
        else None
    )
    return ReceivingLedger.open(
        config.directory / LEDGER,
        own.id,
        config.trust.federation,
        in_use.keys.log,
        known,
        lease.check,
    )


def _record_start(state: OpenState) -> None:
    roster = state.in_use.present
    digest = rosters.digest(roster)
    state.ledger.append(
        Serving(coordinator=roster.coordinator.id, software=software(), roster=digest)
    )
    # The roster of a very large federation is in its file alone.
    record = kept_rosters.record_of(roster)
    if record is not None and digest not in state.recorded:
        state.ledger.append(record)
        state.recorded.add(digest)


def owner(config: configs.CoordinatorConfig) -> Owner:
    """Whose state is backed up and restored; LocalError for keys and roster that do not fit."""
    in_use = _identity(config)
    return Owner(config.directory, in_use.keys, in_use.present)


def _identity(config: configs.CoordinatorConfig) -> RosterInUse:
    in_use = config.roster_in_use()
    own, entry = in_use.present.coordinator, in_use.keys.entry
    # Compare the whole entry: silos accept only the roster's certificate and keys.
    if own != entry:
        raise LocalError(
            f"{config.keys}: these keys are {entry.id!r} ({entry.tls_fingerprint}), the"
            f" roster's coordinator is {own.id!r} ({own.tls_fingerprint}); use its keys, or have it"
            " re-added"
        )
    return in_use


def _stored(kept: StoredJob, config: configs.CoordinatorConfig) -> tuple[Job, StoredJob] | None:
    """A job of the database; None for one that ended and that this release reads differently."""
    origin = f"job {kept.state.job!r} in coordinator.sqlite"
    try:
        document = parse_json(kept.signed, origin)["document"]
        job = Job.from_document(document, origin, config.packages)
        return job.with_weights(config.directory), kept
    except LocalError as error:
        # An ended job must not keep the coordinator from starting.
        if kept.state.stage != "ended":
            raise
        log.problem("job.left_out", job=kept.state.job, why=str(error))
        return None


def _job(
    path: Path,
    config: configs.CoordinatorConfig,
    roster: rosters.Roster,
    known: Mapping[str, bytes],
) -> tuple[Job, bytes]:
    """A job file of the configuration, verified unless the database has it already."""
    signed = read_bytes(path)
    if signed in known.values():
        document = parse_json(signed, str(path))["document"]
        job = Job.from_document(document, str(path), config.packages)
        return job.with_weights(config.directory), signed
    job = job_of(signed, roster, config.packages, str(path), config.directory)
    if job.name in known:
        raise LocalError(
            f"{path}: another job {job.name!r} was run here; have this one signed under a new name"
        )
    return job, signed


def _server(
    daemon: Daemon, guard: Guard, in_use: RosterInUse, renewed: asyncio.Event
) -> grpc.aio.Server:
    require_tls13()
    server = grpc.aio.server(interceptors=(guard,), options=list(SERVER_OPTIONS))
    add_FederationServicer_to_server(Service(daemon), server)  # type: ignore[no-untyped-call]
    add_OperationsServicer_to_server(Operations(daemon), server)  # type: ignore[no-untyped-call]
    enrolments = Enrolments(daemon.config.directory, daemon.roster)
    renewals = Renewals(daemon.config.directory, daemon.roster)
    enrolments.forget(utc_now().timestamp())
    renewals.forget(utc_now())
    membership = MembershipService(daemon, in_use, enrolments, renewals, renewed)
    add_MembershipServicer_to_server(membership, server)  # type: ignore[no-untyped-call]
    add_RenewalServicer_to_server(membership, server)  # type: ignore[no-untyped-call]
    if daemon.config.enrolment:
        add_EnrolmentServicer_to_server(membership, server)  # type: ignore[no-untyped-call]
    return server


def _listen(server: grpc.aio.Server, config: configs.CoordinatorConfig, in_use: RosterInUse) -> int:
    # Where the guest is not trusted, no stranger completes a handshake.
    trusted = in_use.present.bundle() + (GUEST_CERTIFICATE if config.enrolment else "")
    # The present certificate last: a silo with an older roster asks for one before by its name
    # (``server_name``), and learns of the newest roster. Names without tag lead to the oldest.
    held = in_use.held(in_use.present)
    present = list(map(attrgetter("entry"), held)).index(in_use.keys.entry)
    shown = held[: present + 1]
    pairs = [(each.tls_key, each.entry.certificate.encode()) for each in shown]
    # Each member's own certificate is a root of trust: there is no CA.
    # Not dynamic_ssl_server_credentials: two handshakes at a time then free one another's memory
    # (grpc issue 36693).
    credentials = grpc.ssl_server_credentials(pairs, trusted.encode(), require_client_auth=True)
    try:
        return server.add_secure_port(config.listen, credentials)
    except RuntimeError as error:
        raise LocalError(
            f"cannot listen on {config.listen}: is the port taken, or the address not of this host?"
        ) from error


def _raise(task: asyncio.Task[None]) -> None:
    """Hand the error of a task that should never end to the loop's handler."""
    if not task.cancelled():
        task.result()


def stop_signal() -> asyncio.Future[str]:
    """Done by SIGTERM or SIGINT (empty string), or by an error that nobody handled (its text)."""
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[str] = loop.create_future()

    def stop(why: str) -> None:
        if not stopped.done():
            stopped.set_result(why)
            log.event("stop.asked")

    def bug(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        ours = isinstance(error, StaddleError)  # such as a full disk; anything else is a bug
        why = str(error) if ours else f"this is a bug in Staddle: {context['message']}: {error!r}"
        # The callers of what failed fail as well, with the same text.
        if not (stopped.done() and stopped.result() == why):
            log.problem("broken", why=why)
        stop(why)

    loop.set_exception_handler(bug)
    # Handlers of the loop: a future may only be set in its thread.
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, "")
    return stopped
