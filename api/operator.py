"""An operator's client for programs, with the verbs of ``staddle job``."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from ..commands.federation.jobs import status_fields
from ..commands.federation.operator_client import connected
from ..commands.federation.round_text import round_fields
from ..errors import LocalError
from ..files.documents import read_bytes


class OperatorClient:
    """Jobs at a coordinator; the connection lasts until ``close``, or the end of a with block.

    RefusedError and PeerError say what the coordinator has against a call, or that it is gone.
    Statuses are plain values, as ``staddle job list --json`` prints them.
    """

    def __init__(self, file: Path | str) -> None:
        """``file`` is the operator's TOML file; LocalError where its keys do not fit."""
        self._stack = ExitStack()
        self._calls = self._stack.enter_context(connected(Path(file)))

    def submit(self, signed_job: Path | str, weights: Path | str | None = None) -> dict[str, Any]:
        """Queue a signed job, with the file of weights that it begins with; returns its status.

        LocalError for a job that has ended: it must be signed again under a new name.
        """
        signed = read_bytes(Path(signed_job))
        if weights is None:
            status = self._calls.submit(signed)
        else:
            status = self._calls.submit_weights(signed, Path(weights))
        if status.stage == "ended":
            raise LocalError(
                f"{signed_job}: job {status.job!r} has ended; to run it again, have it signed under"
                " a new name"
            )
        return status_fields(status)

    def jobs(self) -> list[dict[str, Any]]:
        """All jobs, in the order in which they run."""
        return list(map(status_fields, self._calls.jobs()))

    def show(self, job: str) -> dict[str, Any]:
        """A job's status, and what each of its closed ``rounds`` measured."""
        report = self._calls.show(job)
        return {**status_fields(report.status), "rounds": round_fields(report)}

    def watch(self, job: str) -> Iterator[dict[str, Any]]:
        """Reports until the job has ended, each with the rounds that ``closed`` since the last."""
        for report in self._calls.watch(job):
            yield {**status_fields(report.status), "closed": round_fields(report)}

    def stop(self, job: str) -> dict[str, Any]:
        """Stop a job until it is resumed."""
        return status_fields(self._calls.stop(job))

    def resume(self, job: str) -> dict[str, Any]:
        """Resume a stopped job when its turn comes."""
        return status_fields(self._calls.resume(job))

    def close(self) -> None:
        """End the connection."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(file: Path | str) -> OperatorClient:
    """The client of an operator's TOML file, connected."""
    return OperatorClient(file)
