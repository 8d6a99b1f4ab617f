"""``staddle job``: job files."""

import json
from pathlib import Path
from typing import Annotated

import typer

from ..errors import LocalError
from ..files import canonical_json, parse_json, read_bytes, write_atomic
from ..security import roster as rosters
from ..security.envelope import sign_document, verify_document
from ..security.identity import Role, load_keys
from ..security.labels import JOB
from . import examples

app = typer.Typer(no_args_is_help=True, help="Write, sign and show job files.")


@app.command("init")
def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The new file, such as job.toml.")],
    method: Annotated[str, typer.Option(help="The method, whose options are written out.")] = "fedavg",
) -> None:
    """Write a commented example of a job, for one method and a small model that works with it."""
    examples.write(file, examples.job_text(method), 0o644)
    typer.echo(f"{file}: edit it, then run: staddle job sign {file} --keys DIR --roster ROSTER.json --out JOB.json")


@app.command("sign")
def sign(
    job_file: Annotated[Path, typer.Argument(metavar="JOB.toml", help="The job as a person wrote it.")],
    keys: Annotated[Path, typer.Option(help="The operator's key folder.")],
    roster: Annotated[Path, typer.Option(help="The roster file.")],
    out: Annotated[Path, typer.Option(help="Where the signed job goes.")],
) -> None:
    """Check a job file, write out its wire schema, and sign it with an operator's key."""
    from ..algorithms.job import Job  # noqa: PLC0415 torch takes seconds to import

    signer = load_keys(keys)
    if signer.entry.role is not Role.OPERATOR:
        raise LocalError(f"{keys}: {signer.entry.id!r} is a {signer.entry.role}; only an operator signs jobs")
    members = rosters.load(roster)
    job = Job.from_toml(job_file)
    for silo in job.silos:
        if silo not in members or members[silo].role is not Role.SILO:
            raise LocalError(f"{job_file}: silos names {silo!r}, which is no silo of {roster}; add it or take it out")
    signed = sign_document(job.document(), members, signer, JOB)
    write_atomic(out, canonical_json(signed) + b"\n", 0o644)
    typer.echo(f"{out}: job {job.name!r}, method {job.method_name}, digest {job.digest}")


@app.command("show")
def show(
    signed_job: Annotated[Path, typer.Argument(metavar="JOB.json", help="A signed job.")],
    roster: Annotated[Path, typer.Option(help="The roster file that its signature is checked against.")],
) -> None:
    """Check the signature of a job and print the document that was signed."""
    signed = parse_json(read_bytes(signed_job), str(signed_job))
    document = verify_document(signed, rosters.load(roster), Role.OPERATOR, JOB)
    typer.echo(json.dumps(document, indent=1))
