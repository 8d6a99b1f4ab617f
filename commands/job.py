"""``staddle job``: job files, and jobs at a coordinator."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..coordinator.rounds.events import in_words
from ..errors import LocalError
from ..files.documents import canonical_json, parse_json, read_bytes, write_atomic
from ..proto.channel import require_tls13
from ..security.identity import roster as rosters
from ..security.identity.domains import JOB
from ..security.identity.keys import Role, load_keys
from ..security.identity.signed_document import sign_document, verify_document
from .console import examples, printer

if TYPE_CHECKING:
    from ..proto import operations_pb2 as pb

app = typer.Typer(no_args_is_help=True, help="Write and sign job files; submit, watch and stop jobs.")

OperatorFile = Annotated[Path, typer.Option("--operator", metavar="FILE", help="The operator's TOML file.")]
UNTOLD = "the silos keep their test counts to themselves"  # zeros leave of a private job without metrics_sigma

AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The job's name.")]


@app.command("init")
def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The new file, such as job.toml.")],
    method: Annotated[str, typer.Option(help="The method, whose options are written out.")] = "fedavg",
    private: Annotated[bool, typer.Option("--private", help=r"With differential privacy: a \[privacy] table.")] = False,
) -> None:
    """Write a commented example of a job, for one method and a small model that works with it."""
    from .privacy.noise import drafted_noise  # noqa: PLC0415 torch and opacus take seconds to import

    examples.write(file, examples.job_text(method, private=private), 0o644)
    printer.show(f"{file}: edit it, then run: staddle job sign {file} --keys DIR --roster ROSTER.json --out JOB.json")
    cost = drafted_noise(method)
    if private:
        printer.show(f"as drafted it is {cost}")
    else:
        printer.show(
            "if its sums are to be blind, use [privacy] beside them: blind sums do not bound what a model that is made "
            f"to leak shows of single records. As --private drafts it, a job is {cost}"
        )


@app.command("sign")
def sign(
    job_file: Annotated[Path, typer.Argument(metavar="JOB.toml", help="The job as a person wrote it.")],
    keys: Annotated[Path, typer.Option(help="The operator's key folder.")],
    roster: Annotated[Path, typer.Option(help="The roster file.")],
    out: Annotated[Path, typer.Option(help="Where the signed job goes.")],
) -> None:
    """Check a job file, write out its wire schema, and sign it with an operator's key.

    The noise of a private job is planned, unless the file names it: then it is checked against the job's target.
    """
    from ..algorithms.job.job import Job  # noqa: PLC0415 torch takes seconds to import
    from ..security.blind.plan import JobPlan  # noqa: PLC0415
    from ..security.blind.weight_checks import weights_fault  # noqa: PLC0415 as it imports numpy
    from .policy.visibility import seen, together, told_by_likeness, unbounded  # noqa: PLC0415

    signer = load_keys(keys)
    if signer.entry.role is not Role.OPERATOR:
        raise LocalError(f"{keys}: {signer.entry.id!r} is a {signer.entry.role}; only an operator signs jobs")
    members = rosters.load(roster)
    job = Job.from_toml(job_file).for_federation()
    for silo in job.silos:
        if silo not in members or members[silo].role is not Role.SILO:
            raise LocalError(f"{job_file}: silos names {silo!r}, which is no silo of {roster}; add it or take it out")
    told = ""
    if job.privacy is not None:
        from .privacy.noise import check_fits_sums, noise, planned  # noqa: PLC0415 as it imports opacus

        check_fits_sums(job, str(job_file))
        job = planned(job, str(job_file))
        told = noise(job)
    document = job.document()
    if fault := weights_fault(job.weighing, job.summed_sets(), job.min_cohort):
        raise LocalError(f"{job_file}: security.counts: {fault}")
    signed = sign_document(document, members, signer, JOB)
    write_atomic(out, canonical_json(signed) + b"\n", 0o644)
    printer.show(f"{out}: job {job.name!r}, method {job.method_name}, digest {job.digest}")
    printer.show(seen(job))
    plan = JobPlan(job)
    if batches := together(job):
        printer.show(batches)
    if open_still := unbounded(plan):
        printer.show(open_still)
    if likeness := told_by_likeness(plan):
        printer.show(likeness)
    if told:
        printer.show(told)


@app.command("show")
def show(
    job: Annotated[str, typer.Argument(metavar="JOB.json|NAME", help="A signed job, or a job's name with --operator.")],
    roster: Annotated[Path | None, typer.Option(help="The roster that a file's signature is checked against.")] = None,
    operator: Annotated[Path | None, typer.Option(metavar="FILE", help="The operator's TOML file.")] = None,
    as_json: AsJson = False,
) -> None:
    """What a job file says, once its signature was checked; or how a job at the coordinator stands."""
    if (roster is None) == (operator is None):
        raise LocalError("give --roster for a signed job file, or --operator for the name of a job at the coordinator")
    if roster is not None:
        signed = parse_json(read_bytes(Path(job)), job)
        printer.show_json(verify_document(signed, rosters.load(roster), Role.OPERATOR, JOB), indent=1)
        return
    require_tls13()
    from .federation.operator_client import connected  # noqa: PLC0415

    with connected(_given(operator)) as here:
        report = here.show(job)
    if as_json:
        printer.show_json({**status_fields(report.status), "rounds": round_fields(report.rounds)}, indent=1)
        return
    fields = status_fields(report.status)
    fields["failed"] = {silo: in_words(code) for silo, code in fields["failed"].items()}
    for key, value in fields.items():
        printer.show(f"{key:<10} {_shown(value)}")
    for closed in round_fields(report.rounds):
        printer.show(f"round {closed['round']}: {_shown(closed['members'])}: {_counts(closed['metrics'])}")


@app.command("submit")
def submit(
    signed_job: Annotated[Path, typer.Argument(metavar="JOB.json", help="A signed job.")], operator: OperatorFile
) -> None:
    """Queue a signed job at the coordinator; the same file again changes nothing, and fails once it has ended."""
    require_tls13()
    from .federation.operator_client import connected  # noqa: PLC0415

    signed = read_bytes(signed_job)
    with connected(operator) as here:
        status = here.submit(signed)
    printer.show(_line(status))
    if status.stage == "ended":
        raise LocalError(
            f"{signed_job}: job {status.job!r} has ended; to run it again, have it signed under a new name"
        )


@app.command("list")
def list_(operator: OperatorFile, as_json: AsJson = False) -> None:
    """All jobs of the coordinator, in the order in which they run."""
    require_tls13()
    from .federation.operator_client import connected  # noqa: PLC0415

    with connected(operator) as here:
        jobs = here.jobs()
    if as_json:
        printer.show_json([status_fields(status) for status in jobs], indent=1)
        return
    printer.show(*map(_line, jobs) if jobs else ("no jobs",))


@app.command("watch")
def watch(job: Name, operator: OperatorFile, as_json: AsJson = False) -> None:
    """Follow a job until it has ended; exit code 1 if it failed."""
    require_tls13()
    from .federation.operator_client import connected  # noqa: PLC0415

    with connected(operator) as here:
        for report in here.watch(job):
            if as_json:
                document = {**status_fields(report.status), "closed": round_fields(report.rounds)}
                printer.show_json(document)
                continue
            for closed in round_fields(report.rounds):
                said = f"{_shown(closed['members'])}: {_counts(closed['metrics'])}"
                printer.show(f"round {closed['round']} closed: {said}")
            printer.show(_line(report.status))
    if report.status.outcome != "completed":
        raise typer.Exit(1)


@app.command("stop")
def stop(job: Name, operator: OperatorFile) -> None:
    """Stop a job until it is resumed: silos stop training, what was given stays given."""
    require_tls13()
    from .federation.operator_client import connected  # noqa: PLC0415

    with connected(operator) as here:
        printer.show(_line(here.stop(job)))


@app.command("resume")
def resume(job: Name, operator: OperatorFile) -> None:
    """Let a stopped job go on when its turn comes."""
    require_tls13()
    from .federation.operator_client import connected  # noqa: PLC0415

    with connected(operator) as here:
        printer.show(_line(here.resume(job)))


@app.command("results")
def results(
    job: Name,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the files go.")],
    operator: Annotated[Path | None, typer.Option(metavar="FILE", help="The operator's TOML file: sums only.")] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The coordinator's TOML file, on its machine: also the tensors.")
    ] = None,
) -> None:
    """Rounds as CSV and JSON; on the coordinator's machine also the shared parts as safetensors."""
    if (operator is None) == (config is None):
        raise LocalError("give --operator (rounds only), or --config of the coordinator on its own machine")
    require_tls13()
    from ..coordinator import config as configs  # noqa: PLC0415
    from ..coordinator.storage import results as files  # noqa: PLC0415

    if config is not None:
        kept = files.read(configs.load(config).directory, job)
        if kept.relayed:
            printer.show(
                f"not among them: {', '.join(kept.relayed)}, which the coordinator passed on and cannot open; every "
                f"silo of the job has it, in jobs/{job}/model.safetensors of its own folder",
                err=True,
            )
    else:
        from .federation.operator_client import connected  # noqa: PLC0415

        with connected(_given(operator)) as here:
            report = here.show(job)
        kept = files.Kept(status_fields(report.status), round_fields(report.rounds))
    printer.show(*map(str, files.write(out, kept)))


def status_fields(status: "pb.JobStatus") -> dict[str, Any]:
    """A job's status as plain values."""
    return {
        "job": status.job,
        "method": status.method,
        "digest": status.job_digest.hex(),
        "stage": status.stage,
        "round": status.round,
        "rounds": status.rounds,
        "outcome": status.outcome,
        "reason": status.reason,
        "answers": {silo: status.answers.get(silo, "") for silo in status.silos},
        "cohort": list(status.cohort),
        "given": list(status.given),
        "failed": dict(status.failed),
        "unheard": list(status.unheard),
    }


def round_fields(rounds: "Sequence[pb.ClosedRound]") -> list[dict[str, Any]]:
    """Closed rounds as plain values."""
    return [{"round": r.round, "members": list(r.members), "metrics": dict(r.metrics)} for r in rounds]


def _line(status: "pb.JobStatus") -> str:
    given = f", {len(status.given)} of {len(status.cohort)} silos gave" if status.stage == "round" else ""
    done = f"{status.round} of {status.rounds} rounds"
    ended = f" {status.outcome}" if status.stage == "ended" else ""
    reason = f": {status.reason}" if status.reason else ""
    unheard = f"; not heard of since the coordinator started: {', '.join(status.unheard)}" if status.unheard else ""
    return f"{status.job:<24} {status.stage + ended:<18} {done}{given}{reason}{unheard}"


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {'-' if item == '' else item}" for key, item in sorted(value.items())) or "-"
    return ", ".join(value) or "-" if isinstance(value, list) else str(value) or "-"


def _counts(metrics: Mapping[str, Any]) -> str:
    return UNTOLD if metrics.get("tested") == 0 else _shown(metrics)


def _given(path: Path | None) -> Path:
    if path is None:
        raise LocalError("--operator is missing")
    return path
