"""``staddle policy``: what would leave this silo, before it joins a job."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import typer

from ...algorithms.job.job import Job
from ...errors import LocalError, RefusedError
from ...security.blind.plan import JobPlan
from ...security.identity import roster as rosters
from ...security.identity.keys import ENTRY_FILE, load_entry
from ...security.identity.signed_document import read_signed
from ...security.policy import policy as policies
from ...security.policy.data_sets import DATASET
from ...security.policy.policy import Policy, SiloPolicy, Verdict
from ...security.policy.release import MASKED
from ...silo import config as configs
from ...silo.admission import checks
from ...silo.admission.checks import Outflow
from ..privacy import budget_text
from ..terminal import printer
from ..terminal.output import number
from .overview import WIDTH, blind, census, heading, part_line, rounds, wrapped
from .visibility import revealed_by_likeness, starts_from, together, unbounded

UNDER_SHARED_NOISE = {  # what becomes of limits.max_step, a bound in a silo's own steps (traps.py)
    "record": (
        "; limits.max_step has no effect on what silos sum under shared noise, because no silo"
        " steps there by itself"
    ),
    "silo": (
        "; limits.max_step has no effect on what silos sum under shared noise, because a refusal"
        " would tell of the silo's own steps, which have no noise"
    ),
}


def check(
    signed_job: Annotated[Path, typer.Argument(metavar="JOB.json", help="The signed job.")],
    config: Annotated[
        Path | None, typer.Option(help="The silo's TOML file, which names policy and roster.")
    ] = None,
    policy: Annotated[
        Path | None, typer.Option(help="A policy file, where there is no configuration yet.")
    ] = None,
    roster: Annotated[
        Path | None, typer.Option(help="The roster file that goes with --policy.")
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(help="Without a configuration: the name of the silo's data set."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Show, tensor by tensor, what would leave this silo in a job.

    Exit code 1 if the silo would decline it.

    The agent decides by the same rules when the job is offered. Nothing is sent, and no record is
    opened.
    """
    found, members, silo = _sources(config, policy, roster, dataset)
    try:
        # The agent's checks of an offered job, in its order.
        job, signer = checks.read_job(
            read_signed(signed_job), members, found.file.packages, str(signed_job)
        )
        # Only a configuration says which silo this is.
        if silo:
            checks.check_member(job, silo, members)
        found = checks.on_data_set(job, found, members.coordinator.id)
    except RefusedError as error:
        if as_json:
            printer.show_json({"accept": False, "code": error.code, "why": error.why})
        else:
            printer.show(f"this silo would DECLINE the job, {error.code}: {error.why}")
        # A refusal is this command's answer, not an error.
        raise typer.Exit(1) from error

    # The functions below are the agent's own, so that this command cannot decide otherwise.
    plan = JobPlan(job)
    outflows = checks.outflows(plan, members, found)
    objections = checks.job_objections(plan, found, members)
    # A job is accepted whole: one tensor that may not leave declines it.
    accepts = not objections and all(outflow.decision.allow for outflow in outflows)
    if as_json:
        document = {
            **_document(job, signer, found, outflows, accepts),
            "reasons": objections,
            "declared": _declared(job, silo),
            "privacy": budget_text.document(job, found),
        }
        printer.show_json(document)
    else:
        printer.show(*lines(plan, signer, silo, found, outflows), *_objections(objections))
        printer.show(*_ending(outflows, accepts))
    if not accepts:
        raise typer.Exit(1)


def _sources(
    config: Path | None, policy: Path | None, roster: Path | None, dataset: str | None
) -> tuple[SiloPolicy, rosters.Roster, str]:
    """Policy, roster and, from a configuration, our id.

    What the configuration names can be named otherwise.
    """
    if config is None:
        if policy is None or roster is None:
            raise LocalError(
                "say --config SILO.toml, or both --policy POLICY.toml and --roster ROSTER.json"
            )
        # For a silo without a configuration yet, which is still deciding whether to join.
        return policies.load_alone(policy, dataset or DATASET), rosters.load(roster), ""

    if dataset is not None:
        raise LocalError("--dataset: the configuration names the data sets; leave it out")
    loaded = configs.load(config)
    members = loaded.roster_in_use().present
    if roster is not None:
        members = rosters.load(roster)
        # Otherwise, whoever can write the file could add an operator who signs the job.
        rosters.verify(members, loaded.trust)
    found = policies.load(policy or loaded.policy, loaded.names)
    return found, members, load_entry(loaded.keys / ENTRY_FILE).id


# For people.


def lines(
    plan: JobPlan, signer: str, silo: str, policy: Policy, outflows: Sequence[Outflow]
) -> Iterator[str]:
    """The job, facts about all rounds, and each tensor that leaves with its rule and readers."""
    job = plan.job
    yield from heading(job, signer)
    # First the facts about all rounds, then the tensors of each phase.
    for fact in filter(None, _facts(plan, silo, policy, outflows)):
        yield from wrapped(fact)
    for outflow in outflows:
        yield from _phase(job, policy, outflow)
    yield ""


def _facts(plan: JobPlan, silo: str, policy: Policy, outflows: Sequence[Outflow]) -> Iterator[str]:
    """Facts about all rounds; empty texts for those that do not apply."""
    job = plan.job
    yield _on(job, policy)
    yield blind(job)
    yield together(job)
    yield starts_from(job)
    yield unbounded(plan)
    yield _looked_at(job, policy)
    if job.privacy is not None:
        yield from budget_text.budget_lines(job, policy)
    yield _declaration(job, silo)
    yield census(job)
    yield _trust(plan, policy, outflows)
    yield revealed_by_likeness(plan)


def _on(job: Job, policy: Policy) -> str:
    if job.dataset is None:
        return ""
    alias = job.dataset != policy.dataset
    whose = f", whose records are those of {policy.dataset!r}" if alias else ""
    return f"on data set {job.dataset!r}{whose}"


def _trust(plan: JobPlan, policy: Policy, outflows: Sequence[Outflow]) -> str:
    """What one silo that colludes with the coordinator would reveal to it."""
    if not checks.trusting(plan):
        return ""
    # The form decides what a colluding silo could open: masked parts stay hidden.
    forms = {verdict.release.form for outflow in outflows for verdict in outflow.decision.tensors}
    hidden = []
    if forms - {MASKED}:
        hidden.append("what it mixes and compares")
    if plan.job.for_silos:
        hidden.append(f"the sum of {', '.join(sorted(plan.job.for_silos))}")
    what, it = f"{' and '.join(hidden)} is", "it"
    if not hidden:
        what, it = "the tags of its counts are", "them"
    return (
        f"{what} hidden by a key that the job's silos share: if any one of them colludes with the"
        f" coordinator, the two can read {it}; the policy has trust ="
        f" {policy.file.secure_aggregation.trust!r}"
    )


def _phase(job: Job, policy: Policy, outflow: Outflow) -> Iterator[str]:
    """What leaves in each round of one phase."""
    yield ""
    yield f"{rounds(outflow.first, outflow.last)}:"
    # Only announced: norms are checked on the values of each round.
    norms = _max_norms(job, policy, outflow)
    tensors, limits = outflow.decision.tensors, policy.file.limits
    for part, verdicts in groupby(tensors, key=lambda verdict: verdict.release.part):
        yield from _part(list(verdicts), outflow, norms.get(part))
    most = f"at most {limits.max_bytes_per_round:,}, in {limits.max_attempts_per_round} attempts"
    yield from wrapped(
        f"{number(len(tensors), 'tensor')}, {outflow.size:,} bytes per round; the policy allows"
        f" {most}",
        "  ",
    )
    for reason in outflow.decision.whole:
        yield from wrapped(f"HELD BACK: {reason}", "  ")


def _looked_at(job: Job, policy: Policy) -> str:
    """Which deliveries the policy rejects."""
    limits, bounds, but = policy.file.limits, [], ""
    if limits.max_step is not None:
        bounds.append(
            f"moves a part of the model by more than {limits.max_step:g} of this silo's longest"
            " steps"
        )
        if job.shares_noise:
            but = UNDER_SHARED_NOISE[job.private.unit]
    if limits.max_parallel is not None:
        bounds.append(f"has more than {limits.max_parallel} rows that are multiples of others")
    # Say it either way: without a bound, the silo would train a model that was made to leak.
    if bounds:
        return f"this silo does not train on a delivery that {' or '.join(bounds)}{but}"
    return (
        "this silo trains on deliveries without a check; limits.max_step and limits.max_parallel"
        " look for models made to leak"
    )


def _declared(job: Job, silo: str) -> dict[str, Any]:
    """What the job says of this silo's records.

    Nothing where it says nothing, or no configuration says who we are.
    """
    security = job.security
    found: dict[str, Any] = {}
    # All parties of the job read these numbers.
    if silo in security.counts:
        found["records"] = security.counts[silo]
    if silo in security.class_counts:
        found["classes"] = list(security.class_counts[silo])
    return found


def _declaration(job: Job, silo: str) -> str:
    declared = _declared(job, silo)
    if not declared:
        return ""
    facts = []
    if "records" in declared:
        facts.append(number(declared["records"], "record"))
    if "classes" in declared:
        facts.append(f"by class {', '.join(map(str, declared['classes']))}")
    return (
        f"it tells all its silos that {silo!r} trains on {', '.join(facts)}; compare with your own"
        " records"
    )


def _objections(objections: Sequence[str]) -> Iterator[str]:
    for objection in objections:
        yield from wrapped(f"DECLINED: {objection}")
    if objections:
        yield ""


def _part(verdicts: Sequence[Verdict], outflow: Outflow, longest: float | None) -> Iterator[str]:
    """One part, a line per tensor; all tensors of a part leave in one form."""
    norm = ""
    if longest is not None:
        norm = f"; held back in a round in which its norm exceeds {longest:g}"
    releases = list(map(attrgetter("release"), verdicts))
    yield from wrapped(f"{part_line(releases, outflow.readers)}{norm}", "  ")

    # columns, so that a person can run an eye down shapes and sizes
    cells = list(map(_cells, verdicts))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for verdict, (name, dtype, shape, count, rule) in zip(verdicts, cells, strict=True):
        row = (
            f"    {name:<{widths[0]}}  {dtype:<{widths[1]}}  {shape:<{widths[2]}} "
            f" {count:>{widths[3]}}"
        )
        if len(f"{row}  {rule}") > WIDTH:  # after a long name, the rule has a line of its own
            yield row
            yield f"      {rule}"
        else:
            yield f"{row}  {rule}"
        # The line above names the tensor.
        for reason in verdict.reasons:
            yield from wrapped(
                reason.removeprefix(f"tensor {verdict.release.part}/{name}: "), "      "
            )


def _cells(verdict: Verdict) -> tuple[str, str, str, str, str]:
    release = verdict.release
    rule = "HELD BACK:" if verdict.reasons else f"leaves by rule {verdict.rule}"
    return release.name, release.dtype, str(list(release.shape)), f"{release.nbytes:,}", rule


def _ending(outflows: Sequence[Outflow], accepts: bool) -> tuple[str, ...]:
    total = held = 0
    for outflow in outflows:
        # An outflow stands for consecutive rounds that upload the same.
        total += outflow.size * (outflow.last - outflow.first + 1)
        held += sum(bool(verdict.reasons) for verdict in outflow.decision.tensors)
    if accepts:
        return (
            f"At most {total:,} bytes in all rounds. This silo would ACCEPT the job,",
            "if its records and its earlier jobs allow it: staddle silo check --job looks at them.",
        )
    # No tensor is held back: the job as a whole is declined, for instance for its sums.
    if not held:
        return ("This silo would DECLINE the job.",)
    are = "is" if held == 1 else "are"
    return (f"This silo would DECLINE the job; {number(held, 'tensor')} {are} held back.",)


# For scripts.


def _document(
    job: Job, signer: str, policy: Policy, outflows: Sequence[Outflow], accepts: bool
) -> dict[str, Any]:
    return {
        "accept": accepts,
        "job": job.name,
        "digest": job.digest,
        "method": job.method_name,
        "signer": signer,
        "policy": policy.digest,
        "max_bytes_per_round": policy.file.limits.max_bytes_per_round,
        "max_attempts_per_round": policy.file.limits.max_attempts_per_round,
        "max_step": policy.file.limits.max_step,
        "max_parallel": policy.file.limits.max_parallel,
        "phases": [_outflow(job, policy, outflow) for outflow in outflows],
    }


def _outflow(job: Job, policy: Policy, outflow: Outflow) -> dict[str, Any]:
    tensors = outflow.decision.tensors
    return {
        "first_round": outflow.first,
        "last_round": outflow.last,
        "bytes": outflow.size,
        "readers": outflow.readers,
        "allow": outflow.decision.allow,
        "reasons": outflow.decision.whole,
        "max_norms": _max_norms(job, policy, outflow),
        "tensors": [_tensor(verdict, outflow.readers) for verdict in tensors],
    }


def _max_norms(job: Job, policy: Policy, outflow: Outflow) -> dict[str, float]:
    """By part, where the policy has one."""
    norms = {}
    for verdict in outflow.decision.tensors:
        part = verdict.release.part
        rule = policy.rule(job.method_name, part)
        if rule and rule.max_norm is not None:
            norms[part] = rule.max_norm
    return norms


def _tensor(verdict: Verdict, readers: Sequence[str]) -> dict[str, Any]:
    release = verdict.release
    return {
        "part": release.part,
        "kind": release.kind,
        "name": release.name,
        "dtype": release.dtype,
        "shape": release.shape,
        "form": release.form,
        "taint": release.taint,
        "bytes": release.nbytes,
        "readers": release.readers or readers,
        "rule": verdict.rule,
        "leaves": not verdict.reasons,
        "reasons": verdict.reasons,
    }
