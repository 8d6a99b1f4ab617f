"""The sets of silos over which this silo lets sums be opened, next to all that it signed before.

The memory is the ledger: ``secagg.signed`` is durable before a signature over survivors leaves.
security/ledger/sum_history.py says what all sums on the same data set reveal together, when a job
is offered and again for the survivors of each round.
"""

import asyncio
from collections.abc import Collection, Iterable, Sequence
from hashlib import sha256
from itertools import chain, filterfalse
from pathlib import Path

from ...algorithms.exchange.parts import Part, Sum
from ...algorithms.job.batches import Batches, without
from ...algorithms.job.job import Job
from ...algorithms.tasks.table_counting import RIGHT
from ...errors import LocalError
from ...files import checked_file
from ...files.documents import canonical_json, parse_json, read_bytes
from ...proto.convert.secagg_sent import Attempt
from ...security.blind.plan import summed
from ...security.faults import NOBODY, Code, check
from ...security.identity.roster import Roster
from ...security.identity.signers import Signers
from ...security.ledger.egress_ledger import Ledger
from ...security.ledger.records import SumSigned
from ...security.ledger.sum_history import ImpliedSum, SignedSet, choices, find_implied, signed_sets
from ...security.policy.policy import Policy, SiloPolicy
from ...security.secagg.evidence import Misdealing, proven
from ...security.secagg.memory import Memory

MOST_CHOICES = 100_000  # of silos, that are examined for one sum: seconds
SHOWN = 12  # silos of a set that an error names


class SignedSets:
    """The signed sets of one silo.

    Sets are judged under the agent's roster and policy.
    """

    def __init__(self, ledger: Ledger, roster: Roster, policy: SiloPolicy) -> None:
        self._ledger = ledger
        self._roster = roster
        self._policy = policy
        # job digest → a set that this silo let pass, and is about to sign if it has not yet
        self._passed: dict[str, SumSigned] = {}

    def left(self, job_digest: str) -> bool:
        """True if anything of this job left the silo, whatever became of it."""
        return self._ledger.left(job_digest)

    def objection_to(self, job: Job) -> str:
        """Why sums of a job that is offered may not be opened over its silos; empty if they may.

        All sets that the job draws with this silo are judged in turn.
        """
        policy, signed = self._policy.on(job.dataset), self._signed_next_to(job)
        return objection_to(job, self._ledger.silo, signed, self._roster, policy)

    def objection(self, job: Job, silos: Collection[str], proven: Collection[str] = ()) -> str:
        """Why no sum of this job may be opened over these silos; empty if it may.

        Silos that are ``proven`` to have misdealt in it count as if they had left the federation.
        A set that passes counts as signed for all other jobs, so that two at a time cannot both
        pass next to what was signed before them.
        """
        policy, signed = self._policy.on(job.dataset), self._signed_next_to(job)
        why = objection(job, silos, signed, self._roster, policy, proven)
        if not why:
            self._passed[job.digest] = self._record(job, silos, proven)
        return why

    def forget(self, job: str) -> None:
        """Let sets that passed count no more, unless they were signed: this job has ended.

        By its name, under which its rounds were left: the coordinator could say any digest.
        """
        others = filterfalse(lambda own: own.job == job, self._passed.values())
        self._passed = {own.job_digest: own for own in others}

    def _signed_next_to(self, job: Job) -> tuple[SumSigned, ...]:
        passed = (own for digest, own in self._passed.items() if digest != job.digest)
        return (*self._ledger.signed, *passed)

    def proven(self, job: Job, proofs: Sequence[Misdealing]) -> frozenset[str]:
        """The silos against which there is evidence.

        RefusedError for evidence that shows nothing in this job, and where more silos broke the
        rules than a job with shared noise takes for dishonest: what they added is no noise.
        """
        signers = Signers.of(self._roster, job.silos)
        found = proven(proofs, self._roster.federation, job.digest, signers)
        if job.shares_noise:
            most = job.private.dishonest
            why = (
                f"{', '.join(sorted(found))} broke the rules, and the job has noise enough only"
                f" while no more than privacy.dishonest = {most} silos do; have"
                " another signed without them"
            )
            check(len(found) <= most, NOBODY, Code.POLICY, why)
        return found

    async def sign(
        self, job: Job, attempt: Attempt, survivors: Sequence[str], proven: Collection[str] = ()
    ) -> None:
        """Record that a sum over these may be open from now on; durable when it returns."""
        record = self._record(job, survivors, proven).model_copy(
            update={"round": attempt.round, "ctx": attempt.ctx.hex()}
        )
        await asyncio.to_thread(self._ledger.secagg_signed, record)

    def _record(
        self, job: Job, survivors: Collection[str], proven: Collection[str] = ()
    ) -> SumSigned:
        """The record of a set, as of no attempt yet."""
        # With ``absent`` the record shows all silos when the job was accepted: whoever joined since
        # could not be in it, whatever a coordinator or an operator did.
        silos = self._ledger.silos_then(job.digest) or self._roster.silo_ids
        return SumSigned(
            job=job.name,
            job_digest=job.digest,
            round=0,
            ctx=bytes(32).hex(),
            dataset=self._policy.on(job.dataset).dataset,
            survivors=tuple(survivors),
            absent=tuple(sorted(silos.difference(survivors))),
            values="fixed" if tells_fixed(job) else "varying",
            batches=tuple(",".join(sorted(batch)) for batch in _batches(job, proven)),
        )


def tells_fixed(job: Job) -> bool:
    """Whether sums of a job reveal what those of another job do too: counts of records, or classes.

    Sums with noise do not. Neither do those of a job that declares its counts, sums nothing by
    class and has ``dropouts = "any"``: sums over changing silos reveal more than test counts, and
    the policy allows that or does not.
    """
    security = job.security
    if not security.required or job.privacy is not None:
        return False
    if security.weights == "public" and security.dropouts == "any":
        return not _sums_means_alone(job)
    return True


def _sums_means_alone(job: Job) -> bool:
    parts = chain.from_iterable(summed(job.up(start)) for start in job.phase_starts)
    return all(part == RIGHT or _is_mean(part) for part in parts)


def _is_mean(part: Part) -> bool:
    return isinstance(part.exchange, Sum) and part.exchange.form == "mean"


def objection_to(
    job: Job, silo: str, signed: Sequence[SumSigned], roster: Roster, policy: Policy
) -> str:
    """What is against the sets of silos that a job draws with this one in each, in turn.

    Empty for nothing.
    """
    if not tells_fixed(job):
        return ""
    # In the order of the rounds, in which the silo would sign them.
    own = (cohort for cohort in job.cohorts() if silo in cohort)
    return _first_objection(job, dict.fromkeys((*own, *_batches(job))), signed, roster, policy)


def objection(
    job: Job,
    silos: Collection[str],
    signed: Iterable[SumSigned],
    roster: Roster,
    policy: Policy,
    proven: Collection[str] = (),
) -> str:
    """What a silo that signed these sums has against one over ``silos``, with what to do.

    Empty for nothing.
    """
    if not tells_fixed(job):
        return ""
    # Sums over many rounds may reveal those of single batches, so each batch counts as signed.
    sets = (silos, *_batches(job, proven))
    return _first_objection(job, sets, signed, roster, policy, proven)


def _first_objection(
    job: Job,
    sets: Iterable[Collection[str]],
    signed: Iterable[SumSigned],
    roster: Roster,
    policy: Policy,
    proven: Collection[str] = (),
) -> str:
    """Each set is judged next to those before it: the silo would sign them in turn."""
    # Under which names the records stood then does not matter.
    names, members = policy.datasets.aliases(policy.dataset), roster.silo_ids
    history = list(signed_sets(signed, names))
    for silos in sets:
        fault = _against(job, silos, history, members.difference(proven), policy)
        if fault:
            return fault
        history.append(SignedSet(job.name, frozenset(silos), members))
    return ""


def _batches(job: Job, proven: Collection[str] = ()) -> Batches:
    """The batches that may be summed on their own, without silos proven to have misdealt."""
    # One batch is the whole sum, which is judged itself.
    if len(job.batches) <= 1:
        return ()
    return without(job.batches, proven, job.least_batch)


def _against(
    job: Job,
    silos: Collection[str],
    history: Sequence[SignedSet],
    members: Collection[str],
    policy: Policy,
) -> str:
    # Bounded before the search: a job could be made to keep a silo busy for hours.
    least = policy.file.secure_aggregation.least_difference
    if choices(history, silos, least) > MOST_CHOICES:
        return (
            f"data set {policy.dataset!r} is in sums over {_listed(silos)} and {len(history)} other"
            f" sets, too many to compute what they reveal about fewer than {least} silos; lower"
            " secure_aggregation.min_difference, or use the same silos in all jobs"
        )
    found = find_implied(history, silos, members, least)
    if found is None:
        return ""
    return _objection_text(job, silos, found, policy, least)


def _objection_text(
    job: Job, silos: Collection[str], found: ImpliedSum, policy: Policy, least: int
) -> str:
    of, sums = ", ".join(found.silos), " and ".join(map(_named, found.by))
    have = "have together" if len(found.silos) > 1 else "alone has"
    default = left = ""
    if not policy.file.secure_aggregation.min_difference:
        default = " (by default, min_honest + assumed_colluders)"
    gone = ", ".join(filterfalse(silos.__contains__, found.silos))
    if gone:
        left = f"if {gone} left the federation, have its founders sign a roster without it; "
    return (
        f"sums of job {job.name!r} over {_listed(silos)}, together with those of {sums} on data set"
        f" {policy.dataset!r}, would reveal how many records, and of which classes, {of} {have};"
        f" the policy has secure_aggregation.min_difference = {least}{default}. Have the job signed"
        f" for the same silos as before, or for silos of which more differ; {left}or lower"
        " min_difference if these numbers are no secret"
    )


def _named(each: SignedSet) -> str:
    return f"job {each.job!r} over {_listed(each.silos)}"


def _listed(silos: Collection[str]) -> str:
    names = sorted(silos)
    listed = ", ".join(names[:SHOWN])
    if len(names) > SHOWN:
        listed += f" and {len(names) - SHOWN} more"
    return listed


def check_remembered(jobs: Path, ledger: Ledger) -> None:
    """LocalError where a job's folder says that a sum was signed, and the ledger does not.

    Whoever puts an older ledger back, or removes it, would make this silo forget over whom its sums
    were opened.
    """
    for path in sorted(jobs.glob("*/secagg-*.json")):
        signed = path.parent / "job.json"
        if not checked_file.read_json(path, Memory).signed_ctx or not signed.exists():
            continue
        document = parse_json(read_bytes(signed), str(signed))["document"]
        # By digest, so that jobs which this release cannot read count, too.
        if not ledger.summed(sha256(canonical_json(document)).hexdigest()):
            raise LocalError(
                f"{path}: this silo signed a sum of job {path.parent.name!r}, but its ledger has no"
                " record of it: the ledger was removed or replaced by an older copy, and so this"
                " silo forgot over which silos sums were opened. Restore the"
                f" newest copy of the whole state folder; if there is none, move {path.parent}"
                " away, and take part only in jobs for the silos of those before"
            )
