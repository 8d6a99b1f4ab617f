"""May this job run here? Numbered checks in running order, before anything trains and before anything is told."""

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass

from ..algorithms import sources
from ..algorithms.data import Dataset, split
from ..algorithms.exchange import Tensors
from ..algorithms.fit import check_records, check_training
from ..algorithms.job import Job
from ..algorithms.weights import load_weights
from ..errors import LocalError, PeerError, RefusedError
from ..files import parse_json
from ..proto.wire import given_items
from ..security.envelope import verify_document
from ..security.identity import Role
from ..security.labels import JOB
from ..security.policy import Policy
from ..security.roster import Roster
from .config import SiloConfig
from .payload import readers_of, release_of


@dataclass(frozen=True)
class Admitted:
    """A job that this silo takes part in, with its own data and its own initial weights."""

    job: Job
    signer: str
    train: Dataset
    test: Dataset
    weights: Mapping[str, Tensors]  # by part
    digests: Mapping[str, str]  # of their files, SHA-256 in hex


def admit(signed: bytes, silo: str, roster: Roster, policy: Policy, config: SiloConfig, key: bytes) -> Admitted:
    """The admitted job; RefusedError with the code of the first check that fails."""
    coordinator = roster.coordinator.id
    # (1) An operator of our roster signed it.
    try:
        envelope = parse_json(signed, "the offered job")
        document = verify_document(envelope, roster, Role.OPERATOR, JOB)
    except (LocalError, PeerError) as error:
        raise RefusedError(coordinator, "JOB_SIGNATURE", str(error)) from error
    # (2) Our code gives the same schema: same method, model and versions.
    try:
        job = Job.from_document(document, "the offered job")
    except LocalError as error:
        raise RefusedError(coordinator, "JOB_INVALID", str(error)) from error
    # (3) We are one of its silos.
    if silo not in job.silos:
        raise RefusedError(coordinator, "JOB_INVALID", f"job {job.name!r} is not for silo {silo!r}")
    # (4) The policy allows all that any of its rounds gives.
    for phase in job.phase_starts:
        releases = [release_of(item) for item in given_items(job.up(phase))]
        decision = policy.decide(job.method_name, releases, coordinator, readers_of(roster))
        if not decision.allow:
            raise RefusedError(coordinator, "POLICY", f"from round {phase} on: " + "; ".join(decision.reasons))
    # (5) Our data fit the job.
    try:
        where = sources.where(config.data)
        records = sources.load(config.data, job.model)
        check_records(job, records, where)
        train, test = split(records, key, config.data.test_fraction)
        check_training(job, train, silo, where)
        # (6) So do the weights that we bring along.
        loaded = {
            own.part: load_weights(own.file, job.method(), silo, own.part, own.sha256)
            for own in config.weights
            if any(fnmatch.fnmatchcase(job.name, pattern) for pattern in own.jobs)
        }
    except LocalError as error:
        raise RefusedError(coordinator, "DATA", str(error)) from error
    weights = {part: tensors for part, (tensors, _) in loaded.items()}
    digests = {part: digest for part, (_, digest) in loaded.items()}
    return Admitted(job, envelope["signer"], train, test, weights, digests)
