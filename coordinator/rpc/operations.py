"""The Operations service: what operators may ask.

Identity, role and limits were checked by the guard.

Operators see names, stages, codes and the sums of test counts. Other tensors are read on the
coordinator's machine (``staddle job results``).
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from ... import log
from ...algorithms.job.evaluated import EVALUATION, evaluation_of
from ...algorithms.job.foreign_code import Allowed
from ...algorithms.job.job import Job
from ...algorithms.job.schema import plain
from ...errors import LocalError, PeerError, RefusedError
from ...files.documents import canonical_json, parse_json
from ...proto import operations_pb2 as pb
from ...security.identity.domains import JOB
from ...security.identity.keys import Role
from ...security.identity.roster import Roster
from ...security.identity.signed_document import verify_document
from ..daemon import Daemon
from ..jobs.job_run import JobRun
from ..rounds.events import OperatorStopped, Resumed, Withdrawn
from .guard import Context, caller
from .start_weights import check_start_file, drop, missing_file, receive, without

MOST_JOBS = 1000  # kept in one coordinator, ended ones included


def job_of(signed: bytes, roster: Roster, allowed: Allowed, origin: str, directory: Path) -> Job:
    """The job of a signed file: an operator of the roster signed it, and its silos stand there.

    It says what it is for. Its file of weights lies in ``directory``, the coordinator's, or will.
    ``allowed`` are the installed packages whose code may run. LocalError or PeerError say what is
    wrong.
    """
    document = verify_document(parse_json(signed, origin), roster, Role.OPERATOR, JOB)
    job = Job.from_document(document, origin, allowed)
    job.check_purpose(origin)
    for silo in job.silos:
        if silo not in roster or roster[silo].role is not Role.SILO:
            raise LocalError(
                f"{origin}: silo {silo!r} is not a silo of the roster; add it or take it out of"
                " the job"
            )
    return job.with_weights(directory)


class Operations:
    """The calls of operations.proto.

    Changes are durable when a call returns. The guard lets only operators in.
    """

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon

    async def Submit(self, request: pb.SubmitRequest, context: Context) -> pb.JobStatus:  # noqa: N802 gRPC's name
        """Queue a job.

        For the same job again, its status is returned. RefusedError JOB_SIGNATURE, JOB_INVALID,
        STORAGE or LIMIT says why it cannot be queued.
        """
        operator = caller(context, self._daemon.roster).id
        job = await self._read(operator, request.signed_job)
        return self._status(await self._queue(operator, job, request.signed_job))

    async def SubmitWeights(  # noqa: N802
        self, frames: AsyncIterator[pb.WeightedJob], context: Context
    ) -> pb.JobStatus:
        """Queue a job with the file of weights that it names.

        The file is not read where this coordinator has it already; for a job that is here without
        it, it is kept. RefusedError as for Submit, and LENGTH, DIGEST, STORAGE or LIMIT for what is
        not the job's file.
        """
        operator = caller(context, self._daemon.roster).id
        first = await anext(frames, pb.WeightedJob())
        job = await self._read(operator, first.signed_job)
        # What cannot be queued is not worth the transfer.
        if self._submitted(operator, job) is None:
            self._check_new(operator, job)
        missing = await asyncio.to_thread(missing_file, job)
        if job.model.weights is None or missing:
            await receive(operator, job, self._daemon.config.directory, frames)
        try:
            return self._status(await self._queue(operator, job, first.signed_job))
        except RefusedError:
            drop(job, (run.job for run in self._daemon.runs))
            raise

    async def _read(self, operator: str, signed: bytes) -> Job:
        try:
            # In a thread, so that other calls run meanwhile.
            return await asyncio.to_thread(
                job_of,
                signed,
                self._daemon.roster,
                self._daemon.config.packages,
                "the submitted job",
                self._daemon.config.directory,
            )
        except PeerError as error:
            raise RefusedError(operator, "JOB_SIGNATURE", str(error)) from error
        except LocalError as error:
            raise RefusedError(operator, "JOB_INVALID", str(error)) from error

    def _submitted(self, operator: str, job: Job) -> JobRun | None:
        """The run of this job, if it was submitted before; RefusedError if another has its name.

        None, too, where the job of this name ended before it began: its name is free again.
        """
        run = self._daemon.run_of(job.name)
        kept = "" if run is None else self._daemon.name_kept(run)
        if run is not None and kept and run.job.digest != job.digest:
            why = (
                f"another job has the name {job.name!r}, and {kept}; have this one signed under a"
                " new name"
            )
            raise RefusedError(operator, "JOB_INVALID", why)
        return run if kept else None

    def _check_new(self, operator: str, job: Job) -> None:
        if len(self._daemon.runs) >= MOST_JOBS:
            raise RefusedError(
                operator, "LIMIT", f"{MOST_JOBS} jobs are kept here; start a new coordinator"
            )
        try:
            self._daemon.check_new(job)
        except LocalError as error:
            raise RefusedError(operator, "STORAGE", str(error)) from error

    async def _queue(self, operator: str, job: Job, signed: bytes) -> JobRun:
        # The answer may have been lost on the way: the same job again is no second one.
        if run := self._submitted(operator, job):
            return run
        try:
            await asyncio.to_thread(check_start_file, job)
        except LocalError as error:
            why = without(self._daemon.config.directory, error)
            raise RefusedError(operator, "JOB_INVALID", why) from error
        # Another call may have queued it meanwhile.
        if run := self._submitted(operator, job):
            return run
        self._check_new(operator, job)
        try:
            log.event("job.submitted", job=job.name, operator=operator, digest=job.digest)
            return self._daemon.add(job, signed)
        except LocalError as error:
            raise RefusedError(operator, "STORAGE", str(error)) from error

    async def List(self, request: pb.ListRequest, context: Context) -> pb.ListReply:  # noqa: N802
        """All jobs.

        In the order in which they run, ended ones included.
        """
        return pb.ListReply(jobs=[self._status(run) for run in self._daemon.runs])

    async def Show(self, request: pb.JobRequest, context: Context) -> pb.JobReport:  # noqa: N802
        """One job and its closed rounds.

        RefusedError UNKNOWN_JOB if there is no such job.
        """
        run = self._run(request, context)
        return pb.JobReport(
            status=self._status(run), rounds=self._rounds(run, 0), evaluation=_evaluation(run)
        )

    async def Watch(self, request: pb.JobRequest, context: Context) -> None:  # noqa: N802
        """Reports until the job has ended, or the coordinator stops.

        The first report has all closed rounds, later ones only new rounds. RefusedError STOPPING if
        the coordinator stops first.
        """
        run, reported = self._run(request, context), 0
        evaluation = _evaluation(run)
        before: pb.JobStatus | None = None
        while not self._daemon.stopping:
            # Taken before the status is read: a change while it is written wakes the wait at once.
            changed, status = self._daemon.changed, self._status(run)
            if status != before:
                rounds = self._rounds(run, reported)
                reported = max([reported, *(closed.round + 1 for closed in rounds)])
                report = pb.JobReport(status=status, rounds=rounds, evaluation=evaluation)
                await context.write(report)
                before = status
            if run.state.stage == "ended":
                return
            await changed.wait()
        operator = caller(context, self._daemon.roster).id
        raise RefusedError(operator, "STOPPING", "this coordinator is stopping; try again later")

    async def Stop(self, request: pb.JobRequest, context: Context) -> pb.JobStatus:  # noqa: N802
        """Stop a job until it is resumed.

        Uploads of an open round stay, and the round resumes with them.
        """
        run = self._run(request, context)
        operator = caller(context, self._daemon.roster).id
        self._daemon.apply(run, OperatorStopped(f"operator {operator!r}"))
        return self._status(run)

    async def Resume(self, request: pb.JobRequest, context: Context) -> pb.JobStatus:  # noqa: N802
        """Queue a stopped job again.

        It continues when its turn comes. A stop that still waits for a fold is withdrawn.
        """
        run = self._run(request, context)
        self._daemon.apply(run, Resumed())
        return self._status(run)

    async def Withdraw(self, request: pb.JobRequest, context: Context) -> pb.JobStatus:  # noqa: N802
        """End a job that has not begun its first round.

        RefusedError ROUND_CLOSED for one that has. What has begun is stopped, not withdrawn: silos
        may have uploaded.
        """
        run = self._run(request, context)
        if run.state.opened:
            operator = caller(context, self._daemon.roster).id
            why = f"job {run.job.name!r} has begun; `staddle job stop` stops it"
            raise RefusedError(operator, "ROUND_CLOSED", why)
        self._daemon.apply(run, Withdrawn())
        return self._status(run)

    def _status(self, run: JobRun) -> pb.JobStatus:
        return status_of(run, self._daemon.unheard(run))

    def _run(self, request: pb.JobRequest, context: Context) -> JobRun:
        run = self._daemon.run_of(request.job)
        if run is None:
            operator = caller(context, self._daemon.roster).id
            raise RefusedError(
                operator,
                "UNKNOWN_JOB",
                f"no job {request.job[:64]!r} here; `staddle job list` has all",
            )
        return run

    def _rounds(self, run: JobRun, first: int) -> Sequence[pb.ClosedRound]:
        closed = self._daemon.rounds(run, first)
        noisy = run.job.privacy is not None
        found = [
            pb.ClosedRound(round=number, members=members, metrics=metrics, noisy=noisy)
            for number, members, metrics in closed
        ]
        # All tables of a long job would be more than a message holds.
        for newest in found[-1:]:
            try:
                tables = run.store.counts(newest.round)
            # A damaged file must not hide the job's status.
            except LocalError as error:
                log.problem("counts.unreadable", job=run.job.name, why=str(error))
                continue
            for name, table in tables.items():
                counts = table.reshape(-1).tolist()
                newest.tables.add(name=name, shape=table.shape, counts=counts)
        return found


def _evaluation(run: JobRun) -> bytes:
    tables = {key: plain(getattr(run.job, key)) for key in EVALUATION}
    return canonical_json(evaluation_of(tables))


def status_of(run: JobRun, unheard: Sequence[str]) -> pb.JobStatus:
    """A job as operators see it.

    ``unheard``: silos of the job of which this process has not heard. Nothing of a silo's tensors
    is in it, not even a digest.
    """
    state = run.state
    fields: dict[str, Any] = {
        name: getattr(state, name) for name in ("stage", "round", "rounds", "outcome")
    }
    fields["reason"] = state.reason or state.blocked
    return pb.JobStatus(
        job=state.job,
        job_digest=bytes.fromhex(run.job.digest),
        method=run.job.method_name,
        answers=state.answers,
        silos=state.silos,
        cohort=state.cohort,
        given=state.given.keys(),
        failed=state.failed,
        unheard=unheard,
        **fields,
    )
