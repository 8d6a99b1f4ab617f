"""The console of a silo."""

import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from ..commands.ledger import roster_files
from ..commands.report import report
from ..commands.report.page import RosterSources
from ..commands.silo.approval import reviewed
from ..errors import LocalError
from ..files.documents import disk
from ..log import KEPT
from ..security.identity.certificate import utc_now
from ..security.identity.keys import ENTRY_FILE, load_entry
from ..security.ledger.audit import LEDGER
from ..security.log.lock import held
from ..security.preflight import PreflightReport
from ..silo import status
from ..silo.admission import approvals
from ..silo.check import check
from ..silo.config import SiloConfig
from ..silo.job_folder import JobFolder
from ..silo.status import SiloJobStatus
from . import contracts
from . import silo_facts as facts
from . import silo_page as page
from .changes import SlowReading, Stamp, StampedValue, stamp_of
from .silo_facts import SiloFacts
from .site import FileDownload, FormAction, Parameters, ShownPage, log_page

FILES_OF_A_JOB = ("job.json", "report.json", "failed", "dataset")


class SiloSite:
    """Pages: what left, jobs, privacy, data, models, checks, and the report to download."""

    def __init__(self, path: Path, config: SiloConfig, *, decides: bool) -> None:
        """``path`` is that of the configuration, which checks read again.

        ``decides``: whoever sees the page may approve and decline jobs, as the user of this process
        may by the command line.
        """
        self._path = path
        self._config = config
        self._jobs: StampedValue[tuple[SiloJobStatus, ...]] = StampedValue(
            self._job_files, lambda: status.jobs(config)
        )
        self._facts: SlowReading[SiloFacts] = SlowReading(self._ledger, lambda: facts.read(config))
        self._checked: PreflightReport | None = None
        self._checked_at = ""
        self._differences: dict[str, list[str]] = {}  # from the jobs' contracts, by job
        self.heading = f"{config.trust.federation}: {load_entry(config.keys / ENTRY_FILE).id}"
        self.pages: tuple[ShownPage, ...] = (
            ShownPage("/", "What left", "left.html", self._left),
            ShownPage("/jobs", "Jobs", "silo_jobs.html", self._job_list),
            ShownPage("/jobs/{job}", "", "offered.html", self._offered),
            ShownPage("/privacy", "Privacy", "privacy.html", self._privacy),
            ShownPage("/data", "Data", "data.html", self._data),
            ShownPage("/models", "Models", "models.html", self._models),
            ShownPage("/checks", "Checks", "checks.html", self._checks),
            ShownPage("/report", "Report", "report.html", lambda _: {}),
            log_page(config.directory, "'staddle-silo@*'"),
        )
        reads = (
            FormAction("/verify", self._verify),
            FormAction("/checks", self._check, "/checks"),
        )
        acts = (
            FormAction("/jobs/{job}/approve", self._approve, "/jobs"),
            FormAction("/jobs/{job}/decline", self._decline, "/jobs"),
        )
        self._decides = decides
        self.actions: tuple[FormAction, ...] = (*reads, *acts) if decides else reads
        self.downloads: tuple[FileDownload, ...] = (
            FileDownload("/report/file", "ledger-report.html", self._report),
        )

    def refresh(self) -> None:
        """Read the ledger again if it grew."""
        self._facts.refresh()

    def look(self) -> Stamp:
        """What differs where a page would."""
        log = stamp_of([self._config.directory / KEPT])
        here = (self._runs(), self._facts.count, self._checked_at, self._day())
        return (*self._job_files(), *here, *log)

    def summary(self) -> str:
        """One sentence."""
        waiting = approvals.waiting(self._config)
        return page.summary(self._runs(), self._jobs.get(), self._facts.found, waiting)

    def _day(self) -> str:
        return utc_now().strftime("%Y-%m-%d")

    def _runs(self) -> bool:
        folder = self._config.directory
        return folder.is_dir() and held(folder)

    def _job_files(self) -> Stamp:
        directory = self._config.directory
        folders = sorted((directory / "jobs").glob("*"))
        offers = sorted((directory / approvals.FOLDER).rglob("*.json"))
        return stamp_of(offers) + stamp_of(
            path
            for folder in folders
            for path in (folder, *(folder / name for name in FILES_OF_A_JOB))
        )

    def _ledger(self) -> Stamp:
        folder = self._config.directory / LEDGER
        return stamp_of([*sorted(folder.glob("seg-*.jsonl")), folder / "checkpoint"])

    def _verdict(self) -> dict[str, Any]:
        found = self._facts.found
        return {
            "facts": found,
            "verdict": page.verdict(found),
            "verifying": self._facts.is_running,
        }

    def _left(self, _: Parameters) -> Mapping[str, Any]:
        found, folder = self._facts.found, self._config.directory
        lines = page.left_lines(found, self._day()) if found else []
        return {
            **self._verdict(),
            "lines": lines,
            "day": self._day(),
            "today": page.total([line.today for line in lines]),
            "ever": page.total([line.ever for line in lines]),
            "running": self._runs(),
            "directory": folder,
            "disk": disk(folder) if folder.is_dir() else None,
        }

    def _job_list(self, _: Parameters) -> Mapping[str, Any]:
        waiting = approvals.waiting(self._config)
        gone = approvals.gone(self._config.directory)
        found = self._facts.found
        # Before the ledger was read, nobody knows which of them the policy declined.
        unruled = approvals.declined(self._config.directory) if found else {}
        lines = page.job_lines(self._jobs.get(), found, waiting, gone, unruled)
        return {"jobs": lines, **self._verdict()}

    def _offered(self, parameters: Parameters) -> Mapping[str, Any]:
        """What ``staddle silo approve`` shows, of exactly the bytes that the form names."""
        name = parameters["job"]
        if name not in {each.job for each in approvals.waiting(self._config)}:
            raise KeyError(name)
        signed, policy, lines = reviewed(self._config, name)
        return {
            "title": f"Job {name}",
            "name": name,
            "lines": lines,
            "signed": sha256(signed).hexdigest(),
            "policy": policy.digest,
            "decides": self._decides,
        }

    def _approve(self, parameters: Parameters) -> str:
        seen = self._seen(parameters)
        approvals.approve(self._config, seen)
        return f"Approved: the agent accepts job {seen.job} when it connects next."

    def _decline(self, parameters: Parameters) -> str:
        seen = self._seen(parameters)
        approvals.decline(self._config, seen, parameters.get("reason", ""))
        return f"Declined: this silo stays out of job {seen.job}. The reason does not leave it."

    def _seen(self, parameters: Parameters) -> approvals.ShownJob:
        """What the page showed; LocalError where other bytes are offered by now."""
        job = parameters["job"]
        signed = approvals.offered(self._config, job)
        digest, policy = parameters.get("signed", ""), parameters.get("policy", "")
        if sha256(signed).hexdigest() != digest or not re.fullmatch("[0-9a-f]{64}", policy):
            raise LocalError(f"another job named {job!r} is offered by now; look at it first")
        return approvals.ShownJob(job, signed, policy)

    def _privacy(self, _: Parameters) -> Mapping[str, Any]:
        found = self._facts.found
        return {"gauges": page.gauges(found.budgets if found else ()), **self._verdict()}

    def _data(self, _: Parameters) -> Mapping[str, Any]:
        jobs: dict[str, list[str]] = {}
        for job in self._jobs.get():
            name = JobFolder(self._config.directory / "jobs" / job.job).dataset
            jobs.setdefault(name or self._config.dataset, []).append(job.job)
        lines = contracts.contract_lines(self._config, self._jobs.get(), self._differences)
        return {"sets": list(page.data_lines(self._config, jobs)), "contracts": list(lines)}

    def _models(self, _: Parameters) -> Mapping[str, Any]:
        return {"models": list(page.model_lines(self._config, self._jobs.get()))}

    def _checks(self, _: Parameters) -> Mapping[str, Any]:
        return self._found()

    def _found(self) -> dict[str, Any]:
        findings = self._checked.findings if self._checked else []
        return {"findings": findings, "checked_at": self._checked_at}

    def _check(self, _: Parameters) -> str:
        """What ``staddle silo check`` does; it reads the records and calls the coordinator."""
        self._checked = check(self._path)
        lines = contracts.contract_lines(self._config, self._jobs.get(), {})
        compared = {line.job: contracts.differences(self._config, line) for line in lines}
        self._differences = {job: found for job, found in compared.items() if found is not None}
        self._checked_at = utc_now().strftime("%Y-%m-%d %H:%M:%S UTC")
        failed = sum(not finding.ok for finding in self._checked.findings)
        return f"{failed} checks failed." if failed else "All is well."

    def _verify(self, _: Parameters) -> str:
        self._facts.forget()
        return "The ledger is verified again."

    def _report(self) -> bytes:
        ledger, trust = self._config.directory / LEDGER, self._config.trust
        # The present one may be too large for the ledger; earlier ones check earlier receipts.
        kept = roster_files.of_ledger(ledger, trust.founders, trust.threshold)
        present = self._config.roster_in_use().present
        sources = RosterSources((present, *kept), trust.founders)
        made = utc_now().strftime("%Y-%m-%d %H:%M UTC")
        return report.html(report.read(ledger, made, sources))
