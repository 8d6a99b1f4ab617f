"""The console of a coordinator."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..commands.federation.operator_client import connected as operator
from ..coordinator import live_status, status
from ..coordinator.config import CoordinatorConfig
from ..coordinator.status import CoordinatorStatus
from ..log import KEPT
from ..security.identity import roster_in_use
from ..security.identity.keys import Role
from ..security.identity.roster import Roster
from ..security.ledger.audit import LEDGER
from ..security.log.lock import held
from . import coordinator_facts as facts
from . import coordinator_page as page
from .changes import SlowReading, Stamp, StampedValue, stamp_of
from .coordinator_facts import CoordinatorFacts
from .site import FileDownload, FormAction, Parameters, ShownPage, log_page


class CoordinatorSite:
    """Pages: the federation, one for each job, and where the log is."""

    def __init__(self, config: CoordinatorConfig, operator_file: Path | None) -> None:
        """``operator_file``: whose keys stop jobs; None where this console stops none.

        LocalError for a roster that its founders did not sign.
        """
        self._config = config
        self._operator = operator_file
        self._status: StampedValue[CoordinatorStatus] = StampedValue(
            self._state, lambda: status.read(config)
        )
        self._facts: SlowReading[CoordinatorFacts] = SlowReading(
            self._ledger, lambda: facts.read(config)
        )
        self.heading = f"{self._roster().federation}: coordinator"
        self.pages: tuple[ShownPage, ...] = (
            ShownPage("/", "Federation", "federation.html", self._federation),
            ShownPage("/jobs/{job}", "", "job.html", self._job),
            log_page(config.directory, "staddle-coordinator"),
        )
        stops = FormAction("/jobs/{job}/stop", self._stop, "/jobs/{job}")
        again = FormAction("/verify", self._verify)
        self.actions: tuple[FormAction, ...] = (again, stops) if operator_file else (again,)
        self.downloads: tuple[FileDownload, ...] = ()

    def refresh(self) -> None:
        """Read the ledger again if it grew."""
        self._facts.refresh()

    def look(self) -> Stamp:
        """What differs where a page would."""
        folder = self._config.directory
        live = live_status.read(folder)
        # The file is written at each beat; a page of a minute ago is new enough.
        silos = (replace(silo, seen=silo.seen[:16]) for silo in live.silos.values())
        return (*self._state(), self._facts.count, *silos, *stamp_of([folder / KEPT]))

    def summary(self) -> str:
        """One sentence."""
        return page.summary(self._status.get())

    def _state(self) -> Stamp:
        folder = self._config.directory
        names = ("coordinator.sqlite", "coordinator.sqlite-wal", roster_in_use.FILE)
        runs = folder.is_dir() and held(folder)
        return (*stamp_of([*(folder / name for name in names), self._config.roster]), runs)

    def _ledger(self) -> Stamp:
        folder = self._config.directory / LEDGER
        return stamp_of([*sorted(folder.glob("seg-*.jsonl")), folder / "checkpoint"])

    def _roster(self) -> Roster:
        """Read again each time, so that the page shows the members of now."""
        return self._config.roster_in_use().present

    def _federation(self, _: Parameters) -> Mapping[str, Any]:
        found, roster = self._status.get(), self._roster()
        return {
            "status": found,
            "facts": self._facts.found,
            "verifying": self._facts.is_running,
            "roster": roster,
            "founders": roster.having(Role.FOUNDER),
            "operators": roster.having(Role.OPERATOR),
            "silos": page.silo_lines(found, roster, self._facts.found),
            "queue": page.queue(found.jobs),
            "missing": {job.job: page.missing(job) for job in found.jobs},
        }

    def _job(self, parameters: Parameters) -> Mapping[str, Any]:
        jobs = {job.job: job for job in self._status.get().jobs}
        job = jobs[parameters["job"]]
        return {
            "title": f"Job {job.job}",
            "job": page.job_details(self._config, job, self._facts.found),
            "may_stop": self._operator is not None,
            "is_stoppable": job.stage not in ("ended", "finishing", "stopped"),
        }

    def _stop(self, parameters: Parameters) -> str:
        """As ``staddle job stop`` does; the keys are read for this call and let go."""
        jobs = {job.job for job in self._status.get().jobs}
        if self._operator is None or parameters["job"] not in jobs:
            raise KeyError(parameters["job"])
        with operator(self._operator) as here:
            found = here.stop(parameters["job"])
        return f"{found.job}: {found.stage}; `staddle job resume` resumes it"

    def _verify(self, _: Parameters) -> str:
        self._facts.forget()
        return "The ledger is verified again."
