"""``staddle coordinator check``: all that the daemon needs, tried before it starts.

Nothing is changed.
"""

import errno
import socket
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from pathlib import Path

from ..algorithms.job.job import Job
from ..errors import LocalError, reason
from ..files.documents import parse_json, read_bytes
from ..security import preflight
from ..security.blind.plan import JobPlan
from ..security.identity.keys import ENTRY_FILE, Role, load_entry
from ..security.identity.roster import Roster
from ..security.log import note as notes
from ..security.log.lock import locked
from ..security.preflight import PreflightReport
from . import config as configs
from .blind.mixing import part_bytes
from .blind.unmask import masked_bytes
from .config import CoordinatorConfig
from .disk_need import check_room, plain_bytes
from .rpc.operations import job_of
from .rpc.start_weights import check_start_file
from .storage.database import DATABASE, Database
from .storage.store import check_folder


def check(path: Path) -> PreflightReport:
    """Findings in running order; what needs a thing that failed is not tried.

    Errors become findings; none is raised. The disk must have room for a round of each job, since a
    stopped job keeps its uploads while the next one runs.
    """
    report = PreflightReport()
    config = report.look("configuration", lambda: (configs.load(path), f"{path}"))
    if config is None:
        return report
    places = config.keys, config.directory
    _, roster = preflight.identity(
        report, *places, config.roster_in_use, config.trust, Role.COORDINATOR
    )
    known = report.look("database", partial(_database, config))
    report.look("ledger", partial(_ledger, config))
    uploads = 0
    for job in config.jobs:
        if roster is None or known is None:
            report.skip("job", "roster and database")
            continue
        found = report.look("job", partial(_job, job, config, roster, known))
        uploads += largest_round(found) if found else 0
    report.look("disk", partial(preflight.disk, config.directory, uploads, "a round of each job"))
    report.look("listen", partial(_listen, config))
    return report


def _database(config: CoordinatorConfig) -> tuple[Mapping[str, bytes], str]:
    """The jobs that it holds, as they were signed."""
    path = config.directory / DATABASE
    if not path.exists():
        # Opening would create the file.
        return {}, f"{path}: none yet; the coordinator makes it"
    # Read-only, as for the ledger: opened for writing, a file of an older release would be changed.
    with closing(Database(path, read_only=True)) as database:
        jobs = database.jobs()
    running = sum(kept.state.stage != "ended" for kept in jobs)
    return {
        kept.state.job: kept.signed for kept in jobs
    }, f"{path}: {len(jobs)} jobs, {running} of them not ended"


def _ledger(config: CoordinatorConfig) -> tuple[bool, str]:
    """It holds, and has all records that the database knows."""
    path, kept = config.directory / DATABASE, None
    own = load_entry(config.keys / ENTRY_FILE)
    if path.exists():
        # Read-only and without the lock: a coordinator may be running on this folder.
        with closing(Database(path, read_only=True)) as database:
            kept = database.heads().get(own.id)
    # A head under another log key belongs to the ledger before the keys were rotated.
    known = notes.parse(kept.note) if kept and kept.log_key == own.log_key else None
    return preflight.ledger(config.directory, config.trust.federation, config.keys, known)


def _job(
    path: Path, config: CoordinatorConfig, roster: Roster, known: Mapping[str, bytes]
) -> tuple[Job, str]:
    """The job and what is said of it; LocalError where it could not begin here.

    An operator signed it under this roster, which has its silos, its name is new and there is room
    for it; or the database has it.
    """
    signed = read_bytes(path)
    # Its signature was checked when it came, maybe under an older roster.
    if signed in known.values():
        document = parse_json(signed, str(path))["document"]
        job = Job.from_document(document, str(path), config.packages)
        return job, f"{path}: {job.name!r}, {job.method_name}, stands in the database"
    job = job_of(signed, roster, config.packages, str(path), config.directory)
    if job.name in known:
        raise LocalError(
            f"{path}: another job {job.name!r} was run here; have this one signed under a new name"
        )
    check_start_file(job)
    # Like ``Daemon.check_new``, except for the weights.
    check_folder(config.directory / "jobs" / job.name, -1)
    whole = check_room(job, config.limits.max_job_bytes)
    given = f"{len(job.silos)} silos upload {preflight.size(largest_round(job))} per round"
    return job, f"{path}: {job.name!r}, {job.method_name}, {given}; at most {whole} on the disk"


def largest_round(job: Job) -> int:
    """Bytes that all silos of the job together upload in the largest round.

    Blind jobs upload masked words, and some parts on their own.
    """
    if job.security.required:
        given = [
            masked_bytes(phase) + sum(map(part_bytes, phase.uploads))
            for phase in JobPlan(job).phases
        ]
    else:
        given = [plain_bytes(job.up(start)) for start in job.phase_starts]
    return max(given) * len(job.silos)


def _listen(config: CoordinatorConfig) -> tuple[bool, str]:
    """The address is of this host and free, or a coordinator with this very folder serves it."""
    host, _, port = config.listen.rpartition(":")
    try:
        found = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, place = found[0]
        with socket.socket(family, kind, protocol) as listening:
            # Connections of a daemon that has just ended do not block the port.
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(place)
            listening.listen()  # what only bind()s next to a listener may pass on some systems
    except OSError as error:
        # The running daemon of this folder may have the port.
        if error.errno == errno.EADDRINUSE and _runs(config.directory):
            return (
                True,
                f"{config.listen} is taken by the coordinator that runs with {config.directory}",
            )
        raise LocalError(
            f"{config.listen}: {reason(error)}; free the port, or listen on an address of this host"
        ) from error
    return True, f"{config.listen} is free"


def _runs(folder: Path) -> bool:
    """Whether a process holds the folder."""
    if not folder.exists():
        return False
    try:
        with locked(folder):
            return False
    except LocalError:
        return True
