"""May this job run here? Numbered checks in running order, before anything trains and before
anything is told.
"""

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...algorithms.data.dataset import Dataset, split
from ...algorithms.exchange.parts import Gram, Mix, Tensors
from ...algorithms.job.job import Job
from ...algorithms.models.pretrained import load_weights
from ...algorithms.training.record_checks import check_records, check_training
from ...errors import LocalError, PeerError, RefusedError
from ...files.documents import parse_json
from ...security.arithmetic.fixedpoint import scale_exponent
from ...security.blind.plan import JobPlan
from ...security.blind.sum import group
from ...security.blind.weight_checks import weights_fault
from ...security.identity.domains import JOB
from ...security.identity.keys import Role
from ...security.identity.roster import Roster
from ...security.identity.signed_document import verify_document
from ...security.policy.policy import Decision, Policy, Verdict
from ...security.policy.release import Release
from ...security.secagg.spec import Terms
from ..config import SiloConfig
from ..parts.declared import Declared, RecordCount
from ..parts.releases import readers_of_message, upload_releases
from .private_jobs import check_signed, privacy_objections

SUMS_ALONE = "for a method that only sums"  # what to ask for in place of a job that takes trust
TRUSTED = "non-colluding-coordinator"  # secure_aggregation.trust


@dataclass(frozen=True)
class Admitted:
    """A job that this silo takes part in, with its own data and its own initial weights."""

    plan: JobPlan
    declared: Declared
    signer: str
    train: Dataset
    test: Dataset
    weights: Mapping[str, Tensors]  # by part
    digests: Mapping[str, str]  # of their files, SHA-256 in hex
    # parts whose weights were trained on none of this silo's records
    public: frozenset[str] = frozenset()

    @property
    def job(self) -> Job:
        """The job itself."""
        return self.plan.job


@dataclass(frozen=True)
class Outflow:
    """What each of some rounds in a row would give, and what the policy says to it."""

    first: int
    last: int
    readers: tuple[str, ...]  # of all that it gives
    decision: Decision

    @property
    def size(self) -> int:
        """Bytes that one such round gives."""
        return sum(verdict.release.nbytes for verdict in self.decision.tensors)


def read_job(signed: bytes, roster: Roster, origin: str = "the offered job") -> tuple[Job, str]:
    """The job of a signed file and its signer; checks (1) and (2) of ``admit``."""
    coordinator = roster.coordinator.id
    # (1) An operator of our roster signed it.
    try:
        envelope = parse_json(signed, origin)
        document = verify_document(envelope, roster, Role.OPERATOR, JOB)
    except (LocalError, PeerError) as error:
        raise RefusedError(coordinator, "JOB_SIGNATURE", str(error)) from error
    # (2) Our code gives the same schema: same method, model and versions; and what it spends is
    # what it says.
    try:
        job = Job.from_document(document, origin)
        check_signed(job)
        return job, envelope["signer"]
    except LocalError as error:
        raise RefusedError(coordinator, "JOB_INVALID", str(error)) from error


def check_member(job: Job, silo: str, roster: Roster) -> None:
    """Check (3) of ``admit``: we are one of the job's silos."""
    if silo not in job.silos:
        raise RefusedError(
            roster.coordinator.id, "JOB_INVALID", f"job {job.name!r} is not for silo {silo!r}"
        )


def checked_cohort(
    cohort: Sequence[str], job: Job, round_: int, silo: str, roster: Roster
) -> tuple[str, ...]:
    """The silos of a round, sorted.

    PeerError for a cohort that the job does not draw for it (SECURITY.md rule 36).

    Some of those drawn may be missing, because they left the roster or declined the job.
    """
    where = f"asks for round {round_} of job {job.name!r} with a cohort"
    # (1) The job draws each of them for this round, and each is still in the roster.
    drawn = {entry.id for entry in roster.silos}.intersection(job.cohort(min(round_, job.length)))
    for member in cohort:
        if member not in drawn:
            raise PeerError(
                roster.coordinator.id,
                f"{where} that names {member[:64]!r}; the job draws {', '.join(sorted(drawn))} for"
                " this round",
            )
    # (2) None comes twice. (3) We are among them.
    if len(set(cohort)) != len(cohort):
        raise PeerError(roster.coordinator.id, f"{where} that has a silo twice")
    if silo not in cohort:
        raise PeerError(
            roster.coordinator.id, f"{where} of {len(cohort)} silos that lacks {silo!r}, this one"
        )
    return tuple(sorted(cohort))


def outflows(plan: JobPlan, roster: Roster, policy: Policy) -> list[Outflow]:
    """What the policy says to all that the job's rounds give.

    Rounds in a row that give the same are one.
    """
    found: dict[int, tuple[Release, ...]] = {}
    job = plan.job
    for phase in plan.phases:
        releases = upload_releases(phase)
        if not found or releases != list(found.values())[-1]:  # what comes down begins phases, too
            found[phase.round] = releases
    return [
        Outflow(first, following - 1, *_decided(job, roster, policy, releases))
        for (first, releases), following in zip(
            found.items(), (*list(found)[1:], job.length), strict=True
        )
    ]


def _decided(
    job: Job, roster: Roster, policy: Policy, releases: Sequence[Release]
) -> tuple[tuple[str, ...], Decision]:
    """What the policy says to a round's messages, one of each form.

    Those who can open one cannot open another.
    """
    readers, sent = dict[str, None](), 0
    verdicts: list[Verdict] = []
    whole = dict[str, None]()
    for form in dict.fromkeys(release.form for release in releases):
        own = [release for release in releases if release.form == form]
        of_message = readers_of_message(own, roster)
        decision = policy.decide(job.method_name, own, roster.coordinator.id, of_message, sent)
        readers |= dict.fromkeys(of_message)
        verdicts += decision.tensors
        whole |= dict.fromkeys(decision.whole)
        sent += sum(release.nbytes for release in own)
    return tuple(readers), Decision(tuple(verdicts), tuple(whole))


def asked_of_rows(made: Terms, policy: Policy) -> Terms:
    """What this silo asks of each row that it opens: of the job, as ``made``, and of its policy,
    what is stricter.
    """
    terms = policy.terms
    return Terms(
        max(made.min_cohort, terms.min_cohort),
        max(made.min_honest, terms.min_honest),
        max(made.colluders, terms.colluders),
    )


def sum_objections(plan: JobPlan, policy: Policy, roster: Roster) -> tuple[str, ...]:
    """All that the policy has against a blind job, each with its fix.

    It asks the same of every cohort.
    """
    if not plan.job.security.required:
        return ()
    return (
        *_objections(plan, policy),
        *(_keyed_objections(plan, policy, roster) if plan.job.keyed else ()),
    )


def _objections(plan: JobPlan, policy: Policy) -> Iterator[str]:
    job, security, terms = plan.job, plan.job.security, policy.terms
    # (1) The job takes as many silos to be in league with the coordinator as the policy does.
    if security.colluders < terms.colluders:
        yield (
            f"the job has colluders = {security.colluders}, this silo's policy {terms.colluders};"
            " have it signed with a higher security.colluders, or lower"
            " secure_aggregation.assumed_colluders"
        )
    # (2) What its sums tell over many rounds is of silos enough, and enough that are in league with
    # nobody.
    smallest = min(map(len, job.batches), default=job.cohort_size)
    fix = (
        "have it signed with a higher min_cohort"
        if smallest < len(job.silos)
        else "it takes more silos"
    )
    if smallest < terms.min_cohort:
        yield (
            f"the job sums batches of {smallest} silos, secure_aggregation.min_cohort ="
            f" {terms.min_cohort}; {fix}, or lower that of the policy"
        )
    if (honest := smallest - security.colluders) < terms.min_honest:
        yield (
            f"of {smallest} silos of a batch {honest} are in league with nobody, "
            f"secure_aggregation.min_honest = {terms.min_honest}; {fix}, or lower min_honest"
        )
    # (3) Its sums are not over changing silos, which tell single ones over many rounds.
    if security.dropouts == "any" and policy.file.secure_aggregation.dropouts != "any":
        yield (
            'the job sums whichever silos are left (security.dropouts = "any"), which over many'
            ' rounds tells what single silos gave, secure_aggregation.dropouts = "batches"; have it'
            ' signed without dropouts, or set that of the policy to "any"'
        )
    # (4) Counts stand in it only if they are no secret, and (5) then no silo outweighs the others.
    if security.weights == "public":
        if not policy.file.secure_aggregation.public_counts:
            known = ", in all and of each class, is" if security.class_counts else " is"
            instead = (
                "" if _mixes(job) else ', or have the job signed with security.weights = "private"'
            )
            yield (
                "the job's weights are public, secure_aggregation.public_counts = false; set it to"
                f" true if the number of this silo's records{known} no secret{instead}"
            )
        fewest = max(job.min_cohort, terms.min_cohort)
        if fault := weights_fault(job.weighing, job.summed_sets(), fewest):
            yield fault
    # (6) The sum of so many silos fits into its ring.
    yield from _rings(plan)
    # (7) What is summed class by class is not of fewer silos than the policy asks (rule 7).
    asked = policy.file.secure_aggregation.min_holders or terms.min_cohort
    if job.counted and job.min_holders < asked:
        of = "" if policy.file.secure_aggregation.min_holders else " (left out: its min_cohort)"
        yield (
            f"rows of a class that {job.min_holders} silos hold may be summed,"
            f" secure_aggregation.min_holders = {asked}{of}; have the job signed with a higher"
            f" security.min_holders, or lower that of the policy (the {security.colluders} that may"
            " collude are counted besides)"
        )


def _rings(plan: JobPlan) -> Iterator[str]:
    sums = [part for phase in plan.phases for part in phase.sums]
    for own in dict.fromkeys(group(part, plan.bounds) for part in sums):
        try:
            scale_exponent(own.ring, len(plan.job.silos), own.clip_exponent, own.weights)
        except LocalError as error:
            yield f"part {own.name!r}: {error}"


def _mixes(job: Job) -> bool:
    return any(
        isinstance(part.exchange, Mix) for start in job.phase_starts for part in job.up(start)
    )


def trusting(plan: JobPlan) -> bool:
    """Whether something of a job is hidden, or held, by what the coordinator and any one of its
    silos have together.

    What is mixed by directed sums is not. Nor is what tags alone are for: who can forge them alters
    what comes down of a sum, as any coordinator can where there are none, and reads no more than
    the sum (security/secagg/linear_tags.py).
    """
    job = plan.job
    return job.keyed and (bool(job.for_silos) or job.counted or bool(plan.uploads))


def _without_key(plan: JobPlan) -> list[str]:
    """What a job may say instead, for each part that it hides by a key of all its silos and need
    not.
    """
    parts = plan.uploads.values()
    mixed = [part for part in parts if isinstance(part.exchange, Mix)]
    compared = [part for part in parts if isinstance(part.exchange, Gram) and not part.sketch]
    directed = ['security.mix = "directed"'] * len(mixed) if plan.job.method().directed_for else []
    return [*directed, *['security.compare = "shared"'] * len(compared)]


def _keyed_objections(plan: JobPlan, policy: Policy, roster: Roster) -> Iterator[str]:
    """What only jobs with a key are asked: all of their silos can open what is hidden by it (rules
    8, 10 and 12).
    """
    asked, terms, coordinator = policy.file.secure_aggregation, policy.terms, roster.coordinator
    job, parts = plan.job, plan.uploads
    hidden = [f"the sum of {', '.join(sorted(job.for_silos))}"] if job.for_silos else []
    names = (
        " and ".join((", ".join(parts), *hidden) if parts else hidden) or "the tags of its counts"
    )
    opened = " and ".join((f"{', '.join(parts)} of every silo", *hidden)) if parts else names
    instead = "to have it signed without security.audience"
    if parts:
        instead = SUMS_ALONE
        keys = _without_key(plan)
        if len(keys) == len(parts):
            instead = (
                f"to have it signed with {' and '.join(sorted(set(keys)))}, by which no such key"
                " hides anything"
            )
    elif job.counted:
        instead = "for a method that sums nothing class by class"
    rows = _mixes(job)
    # (8) This silo trusts that the coordinator is in league with no silo of the job.
    if trusting(plan) and asked.trust != TRUSTED:
        yield (
            f"{names} would be hidden from {coordinator.id} by a key that every silo of the job"
            " has, "
            f'secure_aggregation.trust = "{asked.trust}"; set it to "{TRUSTED}" if you trust that'
            " the coordinator is "
            f"in league with none of them, or ask {instead}"
        )
    # (9) And there is no reason to think that it is: whoever runs it runs no silo.
    runs = {coordinator.organisation, coordinator.host_operator}
    both = [entry.id for entry in roster.in_one_hand]
    if trusting(plan) and both:
        yield (
            f"whoever runs {coordinator.id} ({' and '.join(sorted(runs))}) also runs"
            f" {', '.join(both)}, and so can open {opened}, whatever trust says; another"
            f" organisation must run the one or the other, or ask {instead}"
        )
    if not rows:
        return
    # (10) Rows are made of as many silos as the policy asks of a sum, and enough of them are in
    # league with nobody.
    if job.min_cohort < terms.min_cohort:
        yield (
            f"rows of the job may be over min_cohort = {job.min_cohort} other silos,"
            f" secure_aggregation.min_cohort = {terms.min_cohort}; have it signed with a higher"
            " min_cohort, or lower that of the policy"
        )
    if (honest := job.min_cohort + 1 - job.security.colluders) < terms.min_honest:
        yield (
            f"of {job.min_cohort + 1} silos in a row of the job {honest} may be in league with"
            f" nobody, secure_aggregation.min_honest = {terms.min_honest}; have it signed with a"
            " higher min_cohort, or lower min_honest"
        )


def admit(
    signed: bytes, silo: str, roster: Roster, policy: Policy, config: SiloConfig, key: bytes
) -> Admitted:
    """The admitted job; RefusedError with the code of the first check that fails."""
    coordinator = roster.coordinator.id
    # (1) An operator of our roster signed it. (2) Our code gives the same schema.
    job, signer = read_job(signed, roster)
    plan = JobPlan(job)
    # (3) We are one of its silos.
    check_member(job, silo, roster)
    # (4) The policy agrees to what it spends and to how blind it is, and allows all that any of its
    # rounds gives.
    if objections := (*privacy_objections(job, policy), *sum_objections(plan, policy, roster)):
        raise RefusedError(coordinator, "POLICY", "; ".join(objections))
    for outflow in outflows(plan, roster, policy):
        if not outflow.decision.allow:
            why = f"from round {outflow.first} on: " + "; ".join(outflow.decision.reasons)
            raise RefusedError(coordinator, "POLICY", why)
    # (5) Our data fit the job.
    try:
        where = config.data.where
        records = config.data.load(job.model)
        check_records(job, records, where)
        train, test = split(records, key, config.data.test_fraction)
        check_training(job, train, silo, where)
        # (6) So do the weights that we bring along.
        own_weights = {
            own.part: own
            for own in config.weights
            if any(fnmatch.fnmatchcase(job.name, each) for each in own.jobs)
        }
        loaded = {
            part: load_weights(own.file, job.method(), silo, part, own.sha256)
            for part, own in own_weights.items()
        }
    except LocalError as error:
        raise RefusedError(coordinator, "DATA", str(error)) from error
    weights = {part: tensors for part, (tensors, _) in loaded.items()}
    digests = {part: digest for part, (_, digest) in loaded.items()}
    public = frozenset(part for part, own in own_weights.items() if own.public)
    declared = Declared.of(
        parse_json(signed, "the offered job")["document"], RecordCount(len(train), len(test))
    )
    return Admitted(plan, declared, signer, train, test, weights, digests, public)
