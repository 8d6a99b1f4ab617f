"""What ``staddle privacy plan`` says of a job."""

from collections.abc import Collection, Mapping, Sequence
from math import sqrt
from pathlib import Path
from typing import Annotated, Any

import typer

from ...algorithms.job.job import Job
from ...algorithms.job.privacy import (
    Spend,
    count_spends,
    decimal,
    job_spends,
    most_rounds,
    round_spends,
    signed_sigma,
    spare_rounds,
)
from ...algorithms.job.privacy_table import PRESENT
from ...errors import LocalError
from ...files.documents import parse_json, read_bytes, validate
from ...security.dp.noise_planner import by_purpose
from ...security.dp.prv import opinion
from ...security.dp.rdp import cost, shown
from ...security.identity import roster as rosters
from ...security.identity.domains import JOB
from ...security.identity.keys import Role
from ...security.identity.signed_document import SignedDocument, verify_document
from ..terminal import printer
from ..terminal.output import number
from ..terminal.package_option import Packages
from .noise import STEPS, WHOSE, in_clips, planned
from .promise import promise

UNSIGNED = "signature not checked (give --roster)"
TIMES = {"record": "", "silo": " (2 sigma)"}  # the table below has sigma
BATCH = 64  # records a step that are advised where there are too few


def plan(
    job_file: Annotated[
        Path,
        typer.Argument(metavar="JOB.toml|JOB.json", help="A job file, as written or signed."),
    ],
    roster: Annotated[
        Path | None,
        typer.Option(help="The roster that the signature of a signed job is checked against."),
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="Compute at this delta instead of the job's.")
    ] = None,
    records: Annotated[
        int | None,
        typer.Option(min=1, help="Training records of a silo: what a step on them looks like."),
    ] = None,
    package: Packages = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Say what each kind of release of a private job costs, and all of them together.

    The noise of a job that names none is planned, as it is where the job is signed. Nothing is
    written.
    """
    # at 1 and above the promise is empty, at 0 no Gaussian noise keeps it
    if delta is not None and not 0 < delta < 1:
        raise LocalError(
            f"--delta {delta:g}: give a number between 0 and 1, below 1 / the number of records"
        )
    document, lines = explained(job_file, roster, delta, records, package or ())
    if as_json:
        printer.show_json(document)
        return
    tell(document, lines)


def explained(
    path: Path,
    roster: Path | None,
    delta: float | None,
    records: int | None,
    packages: Collection[str] = (),
) -> tuple[dict[str, Any], list[str]]:
    """The plan as plain values, and what is said below its table.

    Without ``delta`` the job's own counts; without ``records`` there is no batch. A signed job runs
    code of these ``packages`` only. LocalError for a job without [privacy].
    """
    job, given = _read(path, roster, packages)
    sigma, at = signed_sigma(job), job.private.delta if delta is None else delta
    batch = {} if records is None else {"batch": _batch(job, sigma, records, at)}

    # the silo that is drawn most often pays most, and budgets must cover it
    spends = job_spends(job, sigma)
    rounds = most_rounds(job)
    document = {
        "job": job.name,
        "method": job.method_name,
        "target": {"epsilon": decimal(job.private.epsilon), "delta": decimal(job.private.delta)},
        "noise": job.private.noise,
        "unit": job.private.unit,
        "noise_in_clips": in_clips(job),
        "promise": promise(job),
        "sigma": sigma,
        "planned_here": not given,
        "delta": decimal(at),
        "releases": [_release(purpose, group, at) for purpose, group in by_purpose(spends).items()],
        "epsilon": shown(cost(spends, at)),
        # For information only: budgets are enforced by ``epsilon``, the RDP bound.
        "epsilon_prv": _opinion(spends, at),
        "rounds": rounds,
        "spare_rounds": spare_rounds(job),
        # The most expensive round: the first one may also release counts.
        "round_epsilon": shown(max(cost(each, at) for each in _rounds(job, sigma))),
    }
    if count_spends(job.private):
        document["count_sigma"] = decimal(job.private.histogram_sigma)
        document["class_shows_from"] = decimal(PRESENT * job.private.histogram_sigma)
    lines = [] if path.suffix != ".json" or roster is not None else [UNSIGNED]
    return document | batch, lines


def tell(document: Mapping[str, Any], lines: Sequence[str]) -> None:
    """Print the result of ``explained`` as text."""
    target, whose = (
        document["target"],
        "planned" if document["planned_here"] else "as the job names it",
    )
    printer.show(
        f"job {document['job']!r} ({document['method']}): epsilon {target['epsilon']} at delta ="
        f" {target['delta']} of {WHOSE[document['unit']]}; noise {document['noise_in_clips']} clips"
        f"{TIMES[document['unit']]} per {STEPS[document['unit']]}, {whose}"
    )
    printer.show(*(f"{what}: {said}" for what, said in document["promise"].items()))
    columns = (
        "purpose",
        "noise (sigma)",
        "drawn with (q)",
        "steps",
        f"epsilon alone at delta = {document['delta']}",
    )
    rows = [list(map(str, release.values())) for release in document["releases"]]
    printer.show(printer.PrintedTable(columns, rows))

    # costs compose: a sum of the column above would overstate what the job takes from a budget
    printer.show(f"together: epsilon {document['epsilon']} by RDP, the bound that is enforced")
    by_prv = f"epsilon {document['epsilon_prv']} by PRV, a tighter bound, for information only"
    if document["epsilon_prv"] is None:
        by_prv = "PRV, a tighter bound, was not computed"
    printer.show(f"          {by_prv}")
    printer.show(
        f"covers {number(document['rounds'], 'round')} of the silo that is drawn most often, and"
        f" {document['spare_rounds']} more that crashes may interrupt; a single round costs at most"
        f" epsilon {document['round_epsilon']}"
    )
    if sigma := document.get("count_sigma"):
        printer.show(
            f"counts per class leave once, with noise of standard deviation {sigma}: a class counts"
            f" as present from {document['class_shows_from']} records"
        )
    if batch := document.get("batch"):
        at_each = f" at each of {batch['silos']} silos" if batch["silos"] > 1 else ""
        printer.show(
            f"from {number(batch['records'], 'record')}{at_each}, a step draws"
            f" {batch['expected']} on average; their mean gradient, of norm {batch['clip']} at"
            f" most, gets noise of {batch['noise']} in each coordinate"
        )
    for line in lines:
        printer.show(line)


def _read(path: Path, roster: Path | None, packages: Collection[str]) -> tuple[Job, bool]:
    """The job with its noise, and whether the file has it."""
    # A signed job is JSON, a job file is TOML.
    if path.suffix == ".json":
        signed = parse_json(read_bytes(path), str(path))
        if roster is not None:
            document = verify_document(signed, rosters.load(roster), Role.OPERATOR, JOB)
        else:
            # No signature was checked: the output says so (UNSIGNED).
            document = validate(signed, SignedDocument, str(path)).document
        job = Job.from_document(document, str(path), packages)
    else:
        job = Job.from_toml(path).for_federation()
    if job.privacy is None:
        raise LocalError(
            f"{path}: job {job.name!r} has no [privacy] table, so it costs no budget and nothing of"
            " it has noise; staddle job init --private writes an example of one"
        )
    # ``job sign`` plans with the same function, so both find the same noise.
    return planned(job, str(path)), job.privacy.sigma is not None


def _release(purpose: str, group: Sequence[Spend], delta: float) -> dict[str, Any]:
    """One row: releases of one purpose have one noise."""
    (one,) = group
    return {
        "purpose": purpose,
        "sigma": one.sigma,
        "q": one.q,
        "steps": one.steps,
        "epsilon": shown(cost(group, delta)),
    }


def _opinion(spends: Sequence[Spend], delta: float) -> str | None:
    found = opinion(spends, delta)
    return None if found is None else shown(found)


def _rounds(job: Job, sigma: str) -> set[tuple[Spend, ...]]:
    return {round_spends(job, round_, sigma) for round_ in range(job.length)}


def _batch(job: Job, sigma: str, records: int, delta: float) -> dict[str, Any]:
    """What a step on so many records looks like.

    LocalError for too few of them, and for more than δ is made for.
    """
    table = job.private
    if table.whole_silos:
        raise LocalError(
            f'--records {records}: with unit = "silo" no step draws records, and the noise does not'
            " depend on how many there are; leave it out"
        )
    # Poisson sampling: records are drawn independently, so the batch size varies.
    expected = table.sample_rate * records
    if expected < 1:
        least, better = 1 / records, min(BATCH / records, 1)
        raise LocalError(
            f"--records {records}: a step would draw {expected:.3g} of them on average, so most"
            f" steps would be pure noise; raise privacy.sample_rate from {table.sample_rate:g} to"
            f" at least {least:.2g}, better {better:.2g}, or leave such a silo out"
        )
    # At delta ≥ 1/n, a mechanism that publishes one random record is still within the bound.
    if delta * records >= 1:
        raise LocalError(
            f"--records {records}: delta = {delta:g} would allow one of these records to leave in"
            f" the clear; lower it below {1 / records:.2g}"
        )
    # Where silos share the noise, a step is one of all their records, under all their shares.
    silos = len(job.silos) if table.shared else 1
    drawn, shares = silos * expected, silos / table.honest(silos)
    return {
        "records": records,
        "silos": silos,
        "expected": f"{drawn:.4g}",
        "noise": f"{float(sigma) * table.clip * sqrt(shares) / drawn:.3g}",
        "clip": f"{table.clip:g}",
    }
