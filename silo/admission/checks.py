"""May this job run here? Numbered checks in running order, before anything trains or leaves."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain, pairwise

from ...algorithms.data.dataset import Dataset, split
from ...algorithms.exchange.parts import Gram, Mix, Part, Tensors
from ...algorithms.job.foreign_code import Allowed, not_listed, unlisted
from ...algorithms.job.job import Job
from ...algorithms.models.pretrained import load_weights
from ...algorithms.training.record_checks import check_records, check_testing, check_training
from ...errors import LocalError, PeerError, RefusedError
from ...files.documents import parse_json
from ...security.arithmetic.fixedpoint import scale_exponent
from ...security.blind.plan import JobPlan
from ...security.blind.sum import group
from ...security.blind.weight_checks import weights_fault
from ...security.identity.domains import JOB
from ...security.identity.keys import Role
from ...security.identity.roster import Roster
from ...security.identity.selection import among
from ...security.identity.signed_document import verify_document
from ...security.policy.policy import Decision, Policy, SiloPolicy, Verdict
from ...security.policy.release import Release
from ...security.secagg.spec import Terms
from ..config import SiloConfig, Weights
from ..parts.declared import Declared, RecordCount
from ..parts.releases import readers_of_message, upload_releases
from .approvals import UNRULED
from .private_jobs import check_signed, privacy_objections
from .start_weights import check_start, weights_objections

SUMS_ALONE = "for a method that only sums"  # what to ask for in place of a job that takes trust
TRUSTED = "non-colluding-coordinator"  # secure_aggregation.trust


@dataclass(frozen=True)
class Admitted:
    """A job that this silo takes part in, with its own data and its own initial weights.

    ``declared`` is read from the signed document alone; ``signer`` is the operator's id.
    """

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
    """Uploads of a silo in each round from ``first`` to ``last``, and the policy's decision."""

    first: int
    last: int
    readers: tuple[str, ...]  # of all that it gives
    decision: Decision

    @property
    def size(self) -> int:
        """Bytes uploaded in one such round."""
        return sum(verdict.release.nbytes for verdict in self.decision.tensors)


def read_job(
    signed: bytes, roster: Roster, allowed: Allowed, origin: str = "the offered job"
) -> tuple[Job, str]:
    """The job of a signed file and its signer; checks (1) and (2) of ``admit``.

    ``allowed`` are the installed packages whose code may run. RefusedError with the code
    JOB_SIGNATURE, POLICY or JOB_INVALID.
    """
    coordinator = roster.coordinator.id
    # (1) An operator of our roster signed it.
    try:
        signed_document = parse_json(signed, origin)
        document = verify_document(signed_document, roster, Role.OPERATOR, JOB)
    except (LocalError, PeerError) as error:
        raise RefusedError(coordinator, "JOB_SIGNATURE", str(error)) from error

    # (2) Our code gives the same schema: same method, model and versions; what it spends is what it
    # says; and it says what it is for.
    try:
        if names := unlisted(document, allowed):
            raise RefusedError(coordinator, "POLICY", not_listed(names))
        job = Job.from_document(document, origin, allowed)
        check_signed(job)
        job.check_purpose(origin)
        return job, signed_document["signer"]
    except LocalError as error:
        raise RefusedError(coordinator, "JOB_INVALID", str(error)) from error


def check_member(job: Job, silo: str, roster: Roster) -> None:
    """Check (3) of ``admit``: we are one of the job's silos.

    RefusedError with the code JOB_INVALID.
    """
    if silo not in job.silos:
        raise RefusedError(
            roster.coordinator.id, "JOB_INVALID", f"job {job.name!r} is not for silo {silo!r}"
        )


def checked_cohort(
    cohort: Sequence[str], job: Job, round_: int, silo: str, roster: Roster
) -> tuple[str, ...]:
    """The silos of a round, sorted.

    PeerError for a cohort that the job does not draw for it (security rule 36). Some of those
    drawn may be missing, because they left the roster or declined the job.
    """
    where = f"asks for round {round_} of job {job.name!r} with a cohort"
    # (1) The job draws each of them for this round, and each is still in the roster.
    drawn = roster.silo_ids.intersection(job.cohort(min(round_, job.length)))
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
    """What the policy says to all that silos upload in the job's rounds."""
    return [
        Outflow(first, last, *_decided(plan.job, roster, policy, releases))
        for first, last, releases in uploads(plan)
    ]


def uploads(plan: JobPlan) -> Iterator[tuple[int, int, tuple[Release, ...]]]:
    """All that a silo uploads in each round from a first to a last one, both included.

    Rounds in a row with equal uploads are one.
    """
    found: dict[int, tuple[Release, ...]] = {}
    last: tuple[Release, ...] | None = None
    for phase in plan.phases:
        releases = upload_releases(phase)
        if releases != last:  # a phase may begin for what comes down alone
            found[phase.round] = last = releases
    # Each ends where the next begins, the last one with the job.
    for first, following in pairwise((*found, plan.job.length)):
        yield first, following - 1, found[first]


def _decided(
    job: Job, roster: Roster, policy: Policy, releases: Sequence[Release]
) -> tuple[tuple[str, ...], Decision]:
    """What the policy says to a round's messages, one of each form.

    Those who can open one cannot open another.
    """
    # What earlier messages of the round sent counts against its bytes, as it does at the gate.
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


def asked_of_rows(made: Terms, policy: SiloPolicy) -> Terms:
    """The terms of each row that this silo opens: the stricter of the job's and its policy's.

    The larger number for each term.
    """
    terms = policy.terms
    return Terms(
        max(made.min_cohort, terms.min_cohort),
        max(made.min_honest, terms.min_honest),
        max(made.colluders, terms.colluders),
    )


def sum_objections(plan: JobPlan, policy: Policy, roster: Roster) -> tuple[str, ...]:
    """Every objection of the policy to a blind job, each with its fix, whatever its cohorts are.

    Empty for a plain job. signed_sets.py judges what its cohorts reveal.
    """
    objections: list[str] = []
    if plan.job.security.required:
        objections += _objections(plan, policy)
    if plan.job.keyed:
        objections += _keyed_objections(plan, policy, roster)
    return tuple(objections)


def _objections(plan: JobPlan, policy: Policy) -> Iterator[str]:
    job, security, terms = plan.job, plan.job.security, policy.terms
    # (1) The job assumes at least as many colluders as the policy does.
    if security.colluders < terms.colluders:
        yield (
            f"the job has colluders = {security.colluders}, this silo's policy {terms.colluders};"
            " have it signed with a higher security.colluders, or lower"
            " secure_aggregation.assumed_colluders"
        )

    # (2) What its sums tell over many rounds is of silos enough, and enough that collude with
    # nobody.
    yield from _batch_objections(job, terms)

    # (3) Its sums are not over changing silos, which tell single ones over many rounds.
    if security.dropouts == "any" and policy.file.secure_aggregation.dropouts != "any":
        yield (
            'the job sums whichever silos are left (security.dropouts = "any"), which over many'
            " rounds reveals single contributions; the policy has secure_aggregation.dropouts ="
            ' "batches"; have the job signed without dropouts, or set the policy to "any"'
        )

    # (4) Counts stand in it only if they are no secret, and (5) then no silo outweighs the others.
    if security.weights == "public":
        yield from _count_objections(job, policy)

    # (6) The sum of so many silos fits into its ring.
    yield from _rings(plan)

    # (7) What is summed class by class is not of fewer silos than the policy asks (rule 7).
    if job.counted:
        yield from _holder_objections(job, policy)
    # Other methods count holders, or share no rows by class.
    elif job.method_name == "fedssa":
        yield from _uncounted_objections(policy)


def smallest_sum(job: Job) -> int:
    """Silos of the smallest sum that a blind job's rounds together reveal."""
    # Over many rounds the sums tell those of single batches, so the smallest batch is what counts.
    return min(map(len, job.batches), default=job.cohort_size)


def _batch_objections(job: Job, terms: Terms) -> Iterator[str]:
    smallest = smallest_sum(job)
    honest = smallest - job.security.colluders
    fix = "have it signed for more silos"
    if smallest < len(job.silos):
        fix = "have it signed with a higher min_cohort"
    if smallest < terms.min_cohort:
        yield (
            f"the job sums batches of {smallest} silos; the policy has"
            f" secure_aggregation.min_cohort = {terms.min_cohort}; {fix}, or lower the policy's"
        )
    if honest < terms.min_honest:
        yield (
            f"a batch of {smallest} silos has only {honest} that the job assumes to be honest; the"
            f" policy has secure_aggregation.min_honest = {terms.min_honest}; {fix}, or lower"
            " min_honest"
        )


def _holders_asked(policy: Policy) -> tuple[int, str]:
    """Silos that a policy asks behind a row of a class, and where it says so if not by its key."""
    holders = policy.file.secure_aggregation.min_holders
    return (holders, "") if holders else (policy.terms.min_cohort, " (by default, its min_cohort)")


def _uncounted_objections(policy: Policy) -> Iterator[str]:
    # A silo that lacks a class keeps its row near the common beginning, so the mean over all shows
    # the row of a single holder.
    holders, of = _holders_asked(policy)
    yield (
        "the job averages the row of a class over all silos, also if one alone holds it (m1 ="
        f" false); the policy has secure_aggregation.min_holders = {holders}{of}; have the job"
        " signed without m1 = false"
    )


def _holder_objections(job: Job, policy: Policy) -> Iterator[str]:
    holders, of = _holders_asked(policy)
    if job.min_holders < holders:
        yield (
            f"the job sums rows of a class that {job.min_holders} silos hold; the policy has"
            f" secure_aggregation.min_holders = {holders}{of}; have the job signed with a higher"
            " security.min_holders, or lower the policy's (neither figure"
            f" includes the {job.security.colluders} assumed to collude)"
        )


def _count_objections(job: Job, policy: Policy) -> Iterator[str]:
    if not policy.file.secure_aggregation.public_counts:
        known, instead = " is", ', or have the job signed with security.weights = "private"'
        if job.security.class_counts:
            known = ", in all and per class, is"
        if _mixes(job):
            instead = ""
        yield (
            "the job's weights are public; the policy has secure_aggregation.public_counts = false;"
            f" set it to true if the number of this silo's records{known} no secret{instead}"
        )

    # Rule 5, before the job begins: a silo that outweighs the others is nearly the sum.
    fewest = max(job.min_cohort, policy.terms.min_cohort)
    fault = weights_fault(job.weighing, job.summed_sets(), fewest)
    if fault:
        yield fault


def _rings(plan: JobPlan) -> Iterator[str]:
    sums = chain.from_iterable(phase.sums for phase in plan.phases)
    for own in dict.fromkeys(group(part, plan.bounds) for part in sums):
        try:
            # With all silos of the job, the largest possible sum.
            scale_exponent(own.ring, len(plan.job.silos), own.clip_exponent, own.weights)
        except LocalError as error:
            yield f"part {own.name!r}: {error}"


def _mixes(job: Job) -> bool:
    up = chain.from_iterable(map(job.up, job.phase_starts))
    return any(isinstance(part.exchange, Mix) for part in up)


def trusting(plan: JobPlan) -> bool:
    """Whether the coordinator and any one silo of a job together could open something hidden.

    Directed sums they cannot open. Nor do tags alone take that trust: whoever can forge them alters
    what comes down of a sum, as any coordinator can where there are none, and reads no more than
    the sum (security/secagg/linear_tags.py).
    """
    job = plan.job
    if not job.keyed:
        return False
    return any((job.for_silos, job.counted, plan.uploads))


def _hidden_by_key(plan: JobPlan) -> tuple[str, str]:
    """What the key of all silos hides: as names, and as what its holder could open."""
    parts, sums = ", ".join(plan.uploads), []
    if plan.job.for_silos:
        sums = [f"the sum of {', '.join(sorted(plan.job.for_silos))}"]
    if parts:
        return " and ".join((parts, *sums)), " and ".join((f"{parts} of every silo", *sums))
    names = " and ".join(sums) or "the tags of its counts"
    return names, names


def _instead_of_key(plan: JobPlan) -> str:
    """What to ask for in place of a job whose silos all have its key."""
    parts = plan.uploads.values()
    keyless = {_keyless(part, plan.job) for part in parts}
    # One part that nothing but the key can hide is enough.
    if "" in keyless:
        return SUMS_ALONE
    if keyless:
        return f"to have it signed with {' and '.join(sorted(keyless))}, which needs no such key"
    if plan.job.counted:
        return "for a method that sums nothing per class"
    return "to have it signed without security.audience"


def _keyless(part: Part, job: Job) -> str:
    """What a job may say so that it hides a part without such a key; empty if nothing does."""
    match part.exchange:
        case Mix() if job.method().directed_for:
            return 'security.mix = "directed"'
        # Sketches take the key; shares can only compare whole vectors.
        case Gram(sketch=0):
            return 'security.compare = "shared"'
        case _:
            return ""


def _keyed_objections(plan: JobPlan, policy: Policy, roster: Roster) -> Iterator[str]:
    """Only jobs with a key: all of their silos can open what is hidden by it (rules 8, 10, 12)."""
    trust, coordinator = policy.file.secure_aggregation.trust, roster.coordinator
    names, opened = _hidden_by_key(plan)
    instead, takes_trust = _instead_of_key(plan), trusting(plan)

    # (8) This silo trusts that the coordinator colludes with no silo of the job.
    if takes_trust and trust != TRUSTED:
        yield (
            f"only a key that every silo of the job has would hide {names} from {coordinator.id};"
            f' the policy has secure_aggregation.trust = "{trust}"; set it to "{TRUSTED}" if you'
            f" trust that none of them colludes with the coordinator, or ask {instead}"
        )

    # (9) And there is no reason to think that it is: whoever runs it runs no silo of the job. Any
    # other silo has no key of the job, and no message of it.
    runs = {coordinator.organisation, coordinator.host_operator}
    both = among(roster.in_one_hand, plan.job.silos)
    if takes_trust and both:
        yield (
            f"the organisations behind {coordinator.id} ({' and '.join(sorted(runs))}) also run"
            f" {', '.join(both)}, so they can open {opened}, whatever trust says; let another"
            f" organisation run one of them, or ask {instead}"
        )

    if _mixes(plan.job):
        yield from _row_objections(plan.job, policy)


def _row_objections(job: Job, policy: Policy) -> Iterator[str]:
    terms = policy.terms
    # (10) Rows are made of as many silos as the policy asks of a sum, and enough of them collude
    # with nobody.
    if job.min_cohort < terms.min_cohort:
        yield (
            f"rows of the job may sum as few as min_cohort = {job.min_cohort} other silos; the"
            f" policy has secure_aggregation.min_cohort = {terms.min_cohort}; have the job signed"
            " with a higher min_cohort, or lower the policy's"
        )
    size = job.min_cohort + 1  # so many others, and the reader
    honest = size - job.security.colluders
    if honest < terms.min_honest:
        yield (
            f"a row over {size} silos may have only {honest} honest ones; the policy has"
            f" secure_aggregation.min_honest = {terms.min_honest}; have the job signed with a"
            " higher min_cohort, or lower min_honest"
        )


def job_objections(plan: JobPlan, policy: Policy, roster: Roster) -> tuple[str, ...]:
    """Every objection of the policy to a job as a whole, each with its fix."""
    return (
        *privacy_objections(plan.job, policy),
        *sum_objections(plan, policy, roster),
        *weights_objections(plan.job, policy),
        *_cell_objections(plan.job, policy),
    )


def _cell_objections(job: Job, policy: Policy) -> Iterator[str]:
    smallest, least = job.method().smallest_cell, policy.file.limits.min_cell
    if smallest is not None and smallest < least:
        yield (
            f"the job counts cells of {smallest} records; the policy has limits.min_cell = {least};"
            f" have it signed with method.options.fewest = {least}, or lower the policy's"
        )


def admit(
    signed: bytes, silo: str, roster: Roster, policy: SiloPolicy, config: SiloConfig, key: bytes
) -> Admitted:
    """The admitted job; RefusedError with the code of the first check that fails.

    It reads the whole data set and writes nothing.
    """
    coordinator = roster.coordinator.id
    # (1) An operator of our roster signed it. (2) Our code gives the same schema, and may run.
    job, signer = read_job(signed, roster, policy.file.packages)
    job = job.with_weights(config.directory)
    plan = JobPlan(job)

    # (3) We are one of its silos, and have the data set that it asks for.
    check_member(job, silo, roster)
    policy = on_data_set(job, policy, coordinator)

    # (4) The policy has rules for all that any of its rounds uploads, agrees to what it spends and
    # to how blind it is, and allows it.
    found = outflows(plan, roster, policy)
    unruled = dict.fromkeys(chain.from_iterable(outflow.decision.unruled for outflow in found))
    # One sentence for all of them, whatever they are: whoever reviews the job sees each tensor.
    missing = UNRULED.format(what=", ".join(unruled), job=job.name)
    objections = (*[missing] * bool(unruled), *job_objections(plan, policy, roster))
    if objections:
        # All at once, so that they can be fixed in one go.
        raise RefusedError(coordinator, "POLICY", "; ".join(objections))
    for outflow in found:
        if not outflow.decision.allow:
            why = f"from round {outflow.first} on: " + "; ".join(outflow.decision.reasons)
            raise RefusedError(coordinator, "POLICY", why)

    # (5) The weights that all silos begin with are here and fit the job, and so do (6) our data and
    # (7) the weights that we bring along.
    try:
        check_start(job, policy, coordinator)
        with config.naming(job.dataset or config.dataset):
            train, test = _own_records(job, silo, config, key)
        weights, digests, public = _own_weights(job, silo, config)
    except LocalError as error:
        raise RefusedError(coordinator, "DATA", str(error)) from error

    # From the signed document, not from the job: no code of a method changes later what may leave.
    document = parse_json(signed, "the offered job")["document"]
    declared = Declared.of(document, RecordCount(len(train), len(test)))
    return Admitted(plan, declared, signer, train, test, weights, digests, public)


def on_data_set(job: Job, policy: SiloPolicy, coordinator: str) -> Policy:
    """The policy for the data set that a job asks for; RefusedError where this silo has none."""
    try:
        return policy.on(job.dataset)
    except LocalError as error:
        # As of a data set of which nothing may leave: the answer does not tell which exist here.
        raise RefusedError(coordinator, "POLICY", str(error)) from error


def _own_records(job: Job, silo: str, config: SiloConfig, key: bytes) -> tuple[Dataset, Dataset]:
    # The split follows from a secret of this silo: the coordinator cannot tell on which records a
    # model was tested.
    source = config.sources[job.dataset or config.dataset]
    where = source.where
    records = source.load(job.model, job.features, wary=job.method().trains)
    check_records(job, records, where)
    train, test = split(records, key, source.test_fraction)
    check_training(job, train, silo, where)
    check_testing(job, test, where)
    return train, test


def _own_weights(
    job: Job, silo: str, config: SiloConfig
) -> tuple[dict[str, Tensors], dict[str, str], frozenset[str]]:
    """The weights and the digests of their files by part, and the parts with public weights."""
    meant = (own for own in config.weights if _is_meant(own, job, config))
    # The last of several files for one part counts.
    chosen = {own.part: own for own in meant}
    weights, digests = {}, {}
    for part, own in chosen.items():
        weights[part], digests[part] = load_weights(own.file, job.method(), silo, part, own.sha256)
    return weights, digests, frozenset(part for part, own in chosen.items() if own.public)


def _is_meant(own: Weights, job: Job, config: SiloConfig) -> bool:
    # What was trained on one data set would leave under the rules and the budget of another.
    apart = config.names.of(own.dataset) != config.names.of(job.dataset)
    if apart and not own.public:
        return False
    # ``fnmatch`` would ignore case on some systems.
    return any(map(partial(fnmatchcase, job.name), own.jobs))
