"""``staddle job init`` and ``sign``: job files."""

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from ..algorithms.job.job import Job, JobFile
from ..algorithms.leaks.traps import parallel_rows
from ..algorithms.models.lora import computed
from ..algorithms.models.pretrained import StartValues, listed
from ..errors import LocalError, check_local
from ..files.documents import canonical_json, parse_toml, read_bytes, write_atomic
from ..security.blind.plan import JobPlan
from ..security.blind.weight_checks import weights_fault
from ..security.identity import roster as rosters
from ..security.identity.domains import JOB
from ..security.identity.keys import Keys, Role, load_keys
from ..security.identity.signed_document import sign_document
from .federation.jobs import OperatorFile, follow, given_file
from .federation.operator_client import access, connected
from .federation.results import results
from .poc.tables import SiloTables, TableForm, read_table
from .policy.draft import MAX_PARALLEL
from .policy.visibility import revealed_by_likeness, seen, starts_from, together, unbounded
from .privacy.noise import check_fits_sums, drafted_noise, noise, planned
from .terminal import examples, printer
from .terminal.job_example import TaskKind, job_text
from .terminal.printer import Screen
from .terminal.toml import to_toml

FEWEST_BLIND = 4  # silos of a job that is drafted blind


def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The new file, such as job.toml.")],
    method: Annotated[
        str, typer.Option(help="The method, whose options are written out.")
    ] = "fedavg",
    task: Annotated[
        TaskKind, typer.Option(help="The task, for which a model is drafted.")
    ] = "classification",
    private: Annotated[
        bool,
        typer.Option("--private", help="With differential privacy: write a [privacy] table."),
    ] = False,
    blind: Annotated[
        bool,
        typer.Option(
            "--blind", help="The coordinator reads sums alone; with [privacy] as --private."
        ),
    ] = False,
    no_privacy: Annotated[
        bool, typer.Option("--no-privacy", help="With --blind: without [privacy].")
    ] = False,
    purpose: Annotated[
        str, typer.Option(help="What the job is for, in one line; people at the silos read it.")
    ] = "",
    data: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A CSV file of records like those of the silos."),
    ] = None,
    label: Annotated[str, typer.Option(metavar="COLUMN", help="Its column with the classes.")] = "",
    operator: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --data: the operator's TOML file.")
    ] = None,
) -> None:
    """Write a commented example of a job, for one method, a task and a small model that works.

    With --data, --label and --operator it is a whole job, for the silos of the roster and records
    like those of the file; blind where four silos or more are there.
    """
    if data is not None:
        check_local(operator is not None, "--data: give --operator, whose roster has the silos")
        check_local(bool(purpose), "--purpose is missing: people at the silos decide by it")
        _, members = access(given_file(operator), alone=True)
        document = {**_for_silos(sorted(members.silo_ids)), **_for_records(data, label)}
        text = to_toml({**document, "name": file.stem, "purpose": purpose})
        examples.write(file, text, 0o644)
        printer.show(f"{file}: look at it, then run: staddle job run {file} --operator {operator}")
        return
    if no_privacy and (private or not blind):
        raise LocalError("--no-privacy goes with --blind alone, whose draft is private without it")
    private = private or (blind and not no_privacy)
    text = job_text(method, task, private=private, blind=blind, purpose=purpose)
    parse_toml(text.encode(), JobFile, str(file))
    examples.write(file, text, 0o644)
    missing = "" if purpose else ": say in purpose what the job is for"
    printer.show(f"{file}: edit it{missing}; then run: staddle job run {file} --operator FILE")
    # Also without --private, so that nobody decides against it without knowing the cost.
    cost = drafted_noise(method, task, blind=blind)
    if private:
        printer.show(f"as drafted, the job is {cost}")
    else:
        printer.show(
            "for blind sums, add [privacy]: blind sums do not bound what a model made to leak"
            f" reveals of single records. As --private drafts it, the job is {cost}"
        )


def _for_silos(silos: Sequence[str]) -> dict[str, Any]:
    """The tables of a job for these silos; LocalError for fewer than two."""
    check_local(len(silos) > 1, f"the roster has {len(silos)} silos; admit two or more first")
    plain = {
        "version": 1,
        "seed": 1,
        "rounds": 20,
        "silos": list(silos),
        "method": {"name": "fedavg"},
        "training": {"epochs": 1, "batch_size": 16, "lr": 0.05},
        "metrics": {"confusion": True},
    }
    # Of three silos two would read the third one's update from the sum.
    blind = {"min_cohort": 3, "security": {"secure_aggregation": "required"}}
    return {**plain, **blind} if len(silos) >= FEWEST_BLIND else plain


def _for_records(data: Path, label: str) -> dict[str, Any]:
    """The tables of a job that say what a record is, and a model for it."""
    form = TableForm(target=label)
    tables = SiloTables(form, {data.name: read_table(data, form)})
    tables.check()
    printer.show(*tables.notes())
    printer.show(
        f"center (mean), scale (deviation) and missing of numbers are those of {data}, rounded;"
        " least and most are its range, as wide again at either end, rounded. Every silo reads"
        " them. Where they must not be told, or do not fit all silos, write in others that all"
        " agree on (docs/statistics.md)"
    )
    described = tables.described
    # Other silos may lack values where this file lacks none.
    described["features"] = [
        {"missing": repr(own["center"]), **own} if "center" in own else own
        for own in described["features"]
    ]
    return described


def run(
    job_file: Annotated[
        Path, typer.Argument(metavar="JOB.toml", help="The job file that you wrote.")
    ],
    operator: OperatorFile,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where the results go (default: results/NAME)."),
    ] = None,
) -> None:
    """Sign a job, submit it, follow it until it has ended, and write its results.

    Stop it at any time: the same command follows the same job again. The signed job lies next to
    the job file, as JOB.json.
    """
    signer, members = access(operator)
    path = job_file.with_suffix(".json")
    job = signed(job_file, signer, members, path)
    with connected(operator) as here:
        data = read_bytes(path)
        weights = job.weights_file
        status = here.submit_weights(data, Path(weights)) if weights else here.submit(data)
        printer.show(f"{status.job}: submitted; each silo's people accept it or their policy does")
        follow(Screen(), here, job.name)
    results(job.name, out or Path("results", job.name), operator)


def sign(
    job_file: Annotated[
        Path, typer.Argument(metavar="JOB.toml", help="The job file that you wrote.")
    ],
    out: Annotated[Path, typer.Option(help="The file for the signed job.")],
    operator: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The operator's TOML file: keys, and the newest roster."),
    ] = None,
    keys: Annotated[
        Path | None, typer.Option(help="Without it: the operator's key folder.")
    ] = None,
    roster: Annotated[Path | None, typer.Option(help="And the roster file.")] = None,
) -> None:
    """Check a job file, write out its wire schema, and sign it with an operator's key.

    With --keys and --roster nothing dials out. The noise of a private job is planned, unless the
    file names it: then it is checked against the job's target.
    """
    if operator is not None:
        signer, members = access(operator, alone=True)
    elif keys is not None and roster is not None:
        members = rosters.load(roster)
        signer = load_keys(keys, members.entries)
    else:
        raise LocalError("say --operator FILE, or both --keys DIR and --roster ROSTER.json")
    signed(job_file, signer, members, out)


def signed(job_file: Path, signer: Keys, members: rosters.Roster, out: Path) -> Job:
    """Sign a job file as ``sign`` does, and say what it is; the job."""
    # Silos would decline a job that somebody else signed; say so here.
    if signer.entry.role is not Role.OPERATOR:
        raise LocalError(
            f"{signer.entry.id!r} is a {signer.entry.role}; only an operator signs jobs"
        )
    # In a federation, draws follow from the whole job, not from its seed alone: two jobs that
    # differ by one silo must not train alike (security rule 35).
    job = Job.from_toml(job_file).for_federation()
    start = job.start_values()
    # The coordinator would refuse it, too, but only at submission.
    for silo in job.silos:
        if silo not in members or members[silo].role is not Role.SILO:
            raise LocalError(
                f"{job_file}: silos names {silo!r}, which is not a silo of roster version"
                f" {members.version}; remove it here. If it has joined since, sign with --operator,"
                " which takes over the newest roster"
            )

    # Silos compute the cost of a job from its noise, so the noise is planned before it is signed.
    if job.privacy is not None:
        check_fits_sums(job, str(job_file))
        job = planned(job, str(job_file))
    # The document has the wire schema. Silos compute it again and decline the job if theirs
    # differs.
    document = job.document()
    # Silos would decline it: one silo's share would be so large that the sum reveals its model
    # (security rule 5).
    if fault := weights_fault(job.weighing, job.summed_sets(), job.min_cohort):
        raise LocalError(f"{job_file}: security.counts: {fault}")
    envelope = sign_document(document, members, signer, JOB)
    write_atomic(out, canonical_json(envelope) + b"\n", 0o644)
    printer.show(f"{out}: job {job.name!r}, method {job.method_name}, digest {job.digest}")
    plan = JobPlan(job)
    # The signer reads the same sentences as the silos (``policy check``).
    facts = (seen(job), together(job), unbounded(plan), revealed_by_likeness(plan), noise(job))
    printer.show(*filter(None, (*facts, starts_from(job), *_left_over(start, job))))
    if job.weights_file is not None:
        printer.show(f"submit the job with --weights {job.weights_file}")
    return job


def _left_over(start: StartValues, job: Job) -> Iterator[str]:
    """What the file of weights and the model do not share."""
    if start.drawn:
        yield f"the file lacks {listed(start.drawn)}, which begin as in a new model"
    parts = (computed(own, job.model.lora) for own in start.parts.values())
    for name, value in chain.from_iterable(own.items() for own in parts):
        if (count := parallel_rows(value)) > MAX_PARALLEL:
            yield (
                f"{count} rows of {name!r} are multiples of others, as in a model that is made to"
                f" leak: silos with limits.max_parallel below that, such as {MAX_PARALLEL} in a"
                " drafted policy, decline the job"
            )
    if start.unused:
        yield f"not taken from the file: {listed(start.unused)}"
