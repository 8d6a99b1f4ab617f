"""The coordinator's configuration file.

::

    version = 1
    listen = "0.0.0.0:7443"
    directory = "state"               # paths are relative to this file
    keys = "keys"
    roster = "roster.json"            # founders hand in later versions (staddle federation)
    enrolment = true                  # left out: true; false: nobody joins through this coordinator
    jobs = ["jobs/first.json"]        # signed job files, which begin in this order
    packages = ["lung-models"]        # installed packages whose code jobs may run; left out: none
    log = "text"                      # or "json"

    [trust]                           # pinned by hand: a swapped roster file is noticed
    federation = "northern-hospitals"
    founders = ["SHA256:..."]
    threshold = 1

    [timing]
    admission_seconds = 3600  # for all silos to answer an offered job
    beat_seconds = 5
    hold_seconds = 20
    secure_seconds = 60       # for silos to answer a step of a secure sum; keys and masked words
                              # have all of the job's round_timeout

    [limits]                          # optional
    jobs = 4                          # that run at a time, where silos take part in several
    max_job_bytes = "100GiB"          # what one job may take of the disk; refused up front

    [metrics]                         # optional: Prometheus metrics
    listen = "127.0.0.1:9464"
    clients = ["prometheus.crt"]      # optional: over TLS, and only for keys of these certificates
"""

import re
from pathlib import Path
from typing import Annotated, Literal

import pydantic

from ..files.documents import Strict, read_toml
from ..metrics.exporter import MetricsConfig
from ..security.identity import roster_in_use
from ..security.identity.roster import Pins
from ..security.identity.roster_in_use import RosterInUse
from ..security.policy.file import Bytes, PackageName


class Timing(Strict):
    """Waiting times of the coordinator, in seconds.

    The reply to Hello tells silos ``beat_seconds`` and ``hold_seconds``. After six beats of silence
    a silo counts as lost (daemon.py).
    """

    admission_seconds: float = pydantic.Field(default=3600.0, gt=0, le=2_592_000)
    beat_seconds: int = pydantic.Field(default=5, ge=1, le=300)
    hold_seconds: int = pydantic.Field(default=20, ge=1, le=300)
    secure_seconds: float = pydantic.Field(default=60.0, gt=0, le=86_400)


class JobLimits(Strict):
    """Limits of all jobs together, and of one job."""

    jobs: int = pydantic.Field(default=4, ge=1, le=64)
    """Jobs that run at a time. Others wait in the queue (rounds/queue.py)."""

    max_job_bytes: Bytes | None = None
    """Disk space, computed from the job's schema (disk_need.py).

    A submitted job above it is refused; with a configured one the coordinator does not start.
    """


def _address(listen: str) -> str:
    # The last colon, since IPv6 addresses contain others.
    port = listen.rpartition(":")[2]
    known = re.fullmatch(r"[^\s/]+:[0-9]+", listen) and int(port) <= 65535
    if not known:
        raise ValueError("is not host:port with a port up to 65535, such as 0.0.0.0:7443")
    return listen


class CoordinatorConfig(Strict):
    """The file's keys.

    The example at the top of this module shows them. An unknown key is an error.
    """

    version: Literal[1]
    listen: Annotated[str, pydantic.AfterValidator(_address)]
    directory: Path
    keys: Path
    roster: Path
    enrolment: bool = pydantic.Field(default=True, strict=True)
    jobs: tuple[Path, ...] = ()
    packages: tuple[PackageName, ...] = ()
    log: Literal["text", "json"] = "text"
    trust: Pins
    timing: Timing = Timing()
    limits: JobLimits = JobLimits()
    metrics: MetricsConfig | None = None

    def roster_in_use(self) -> RosterInUse:
        """The configuration's roster, or a newer one that its daemon kept; LocalError as there."""
        kept = self.directory / roster_in_use.FILE
        return RosterInUse(self.roster, kept, self.trust, self.keys, self.directory)


def load(path: Path) -> CoordinatorConfig:
    """Read the file; its paths become relative to it.

    LocalError names the file, and the key where one is wrong.
    """
    config = read_toml(path, CoordinatorConfig)
    # Not relative to the working directory, which a service manager chooses.
    base = path.parent
    return config.model_copy(
        update={
            "directory": base / config.directory,
            "keys": base / config.keys,
            "roster": base / config.roster,
            "jobs": tuple(base / job for job in config.jobs),
            "metrics": config.metrics and config.metrics.below(base),
        }
    )
