"""What ``staddle privacy show`` says of a silo's data sets."""

from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import typer

from ...security.dp.budget_view import BudgetView
from ...security.dp.prv import NONE, Question, opinions
from ...security.dp.rdp import group, shown
from ...silo import config as configs
from ...silo.admission import budget
from ...silo.admission.budget import BudgetReport
from ..terminal import printer
from ..terminal.output import number

# What a job protects by its noise, where its reservations do not say it.
UNITS = {"local": "record", "shared": None}
PROTECTS = {"record": "each record", "silo": "the whole silo", None: "not recorded"}  # by unit
OPEN = "open reservations, for a round that is running or that a crash ended, count as spent"
ADDING = (
    "epsilons do not add up: all jobs together cost less than the sum, and a job may fit although"
    " it seems too expensive on its own"
)
SHARED = (
    'noise "shared": what is spent on these jobs holds as long as the other silos of the job add'
    " their shares of the noise and tell them to nobody; docs/privacy.md says how many may not"
)


def show(
    config: Annotated[Path, typer.Option(metavar="SILO.toml", help="The silo's configuration.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Show what jobs have spent of the budgets of this silo's data sets, and what is left.

    Reads and checks the disk, while an agent runs too. Exit code 1 if a budget does not hold or is
    gone.
    """
    found = documents(config)
    if as_json:
        printer.show_json(found)
    else:
        tell(found)
    # Scripts read the exit code; a lost budget stops private jobs.
    if any("lost" in each for each in found):
        raise typer.Exit(1)


def documents(config: Path) -> list[dict[str, Any]]:
    """Each data set as plain values.

    Epsilons and deltas are decimal strings; epsilons are rounded up.
    """
    found = budget.read(configs.load(config))

    # all questions at once: the answers come in their order
    questions: list[Question] = []
    for each in found:
        if each.budget:
            questions += _questions(each.budget)
    answers = iter(opinions(questions))
    return [_document(each, answers) for each in found]


def tell(found: Sequence[Mapping[str, Any]]) -> None:
    """Print the result of ``documents`` as text."""
    for each in found:
        _tell(each)
    if not found:
        printer.show(
            "no data set has a budget: the policy has no [dataset.NAME], and nothing was spent"
        )


def _questions(view: BudgetView) -> Iterator[Question]:
    """The whole first, then job by job: the answers come in this order."""
    # The budget is enforced at its own delta, not at those of the jobs.
    delta = float(view.limit.delta)
    yield Question(view.events, delta)
    for job in view.jobs:
        yield Question(job.events, delta)


def _document(each: BudgetReport, answers: Iterator[float | None]) -> dict[str, Any]:
    policy, view = each.policy, each.budget
    document: dict[str, Any] = {
        "dataset": each.dataset,
        "unit": "record",
        "policy": None,
    }
    if policy is not None:
        document["policy"] = {"epsilon": f"{policy.epsilon:f}", "delta": f"{policy.delta:f}"}
    if each.lost:
        document["lost"] = each.lost
    if view is None:
        return {**document, "limit": None, "jobs": []}

    # the answers come in the order of the questions: the whole first, then job by job
    limit = view.limit
    document |= {
        "limit": {"epsilon": limit.epsilon, "delta": limit.delta, "policy": limit.policy},
        "spent": shown(view.spent),
        "spent_prv": _opinion(next(answers)),
        "left": str(view.left),
        "records": view.records,
    }
    jobs = []
    for job in view.jobs:
        noise = "shared" if any(event.shared for event in job.events) else "local"
        row = {
            "job": job.job,
            "digest": job.job_digest,
            "epsilon": job.epsilon,
            "epsilon_prv": _opinion(next(answers)),
            "noise": noise,
            "unit": UNITS[noise],
            "open": job.reserved,
        }
        if job.sharing:
            row |= job.sharing.model_dump()
        jobs.append(row)
    document["jobs"] = jobs

    # the budget is of one record: a person with several is protected less
    if policy is not None and policy.records_per_person > 1:
        document["person"] = _person(view, policy.records_per_person)
    return document


def _person(view: BudgetView, records: int) -> dict[str, Any]:
    # Group privacy: epsilon grows linearly with the records of a person, delta faster.
    epsilon, delta = group(view.spent, float(view.limit.delta), records)
    promised = None
    if delta < 1:  # a larger one bounds nothing
        promised = f"{delta:.3g}"
    return {
        "records": records,
        "epsilon": shown(epsilon),
        "delta": promised,
    }


def _opinion(found: float | None) -> str | None:
    if found is None:
        return None
    return shown(found)


def _tell(each: Mapping[str, Any]) -> None:
    name, limit, policy = each["dataset"], each["limit"], each["policy"]

    # a budget that is gone says nothing of what was spent, and no private job runs on it
    lost = each.get("lost")
    if lost:
        printer.show(f"data set {name!r}: {lost}")
        return
    if limit is None:
        printer.show(
            f"data set {name!r}: nothing spent of epsilon {policy['epsilon']} at delta ="
            f" {policy['delta']}"
        )
        return

    # what counts is the bound by which jobs are accepted, even where the other is tighter
    by_prv = f"{each['spent_prv']} by PRV, a tighter bound, for information only"
    if each["spent_prv"] is None:
        by_prv = "PRV, a tighter bound, was not computed"
    printer.show(
        f"data set {name!r}: epsilon {each['spent']} of {limit['epsilon']} spent at delta ="
        f" {limit['delta']}, {each['left']} left; {by_prv}"
    )
    _tell_policy(policy, limit)
    printer.show("  unit: one record more or less; in jobs that say so, the whole silo")
    person = each.get("person")
    # The bound above is for one record; a person may have several.
    if person:
        _tell_person(person)
    if each["jobs"]:
        _tell_jobs(each["jobs"])


def _tell_policy(policy: Mapping[str, str] | None, limit: Mapping[str, str]) -> None:
    """Say what the policy changed since the budget was opened."""
    if policy is None:
        printer.show(
            "  the policy has no table for this data set any more, so no private job runs on it"
        )
    # Compared as numbers: 8.0 and 8 are the same limit.
    elif any(Decimal(policy[key]) != Decimal(limit[key]) for key in policy):
        printer.show(
            f"  the policy now says epsilon {policy['epsilon']} at delta = {policy['delta']}, which"
            " takes effect when the agent restarts"
        )


def _tell_person(person: Mapping[str, Any]) -> None:
    delta = f"delta = {person['delta']}"
    if person["delta"] is None:
        delta = "at no delta below 1, so there is no guarantee"
    printer.show(
        f"  a person with up to {person['records']} records: epsilon {person['epsilon']},"
        f" {delta} (group privacy, derived from the line above)"
    )


def _noise(job: Mapping[str, Any]) -> str:
    """``local``, or ``shared, 1 dishonest`` where it is recorded how many silos may be."""
    dishonest = job.get("dishonest")
    return job["noise"] if dishonest is None else f"{job['noise']}, {dishonest} dishonest"


def _tell_jobs(jobs: Sequence[Mapping[str, Any]]) -> None:
    columns = ("job", "digest", "protects", "epsilon", "by PRV", "noise", "open reservations")
    rows, opened = [], 0
    for job in jobs:
        # The PRV accountant has limits of time and memory, so it may give no answer.
        by_prv = job["epsilon_prv"] or NONE
        known = [job["job"], job["digest"][:12], PROTECTS[job["unit"]], job["epsilon"], by_prv]
        rows.append([*known, _noise(job), str(job["open"])])
        opened += job["open"]
    printer.show(printer.PrintedTable(columns, rows), ADDING)
    if "shared" in {job["noise"] for job in jobs}:
        printer.show(SHARED)
    if opened:
        printer.show(f"{number(opened, 'reservation')} open; {OPEN}")
