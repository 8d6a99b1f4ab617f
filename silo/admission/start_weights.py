"""Whether a job may begin with the file of weights that it names.

Whoever chooses what a model begins with has the means of a coordinator that delivers a model made
to leak records. So a policy lists such files by digest, and their values are looked at like a
delivery's.

From one start, a silo makes nearly the same first step in every job. So the sums of two blind jobs
that begin with files tell nearly what the silos contributed that are in one of them alone. Draws
that differ from job to job (SECURITY.md rule 35) do not hide that; only noise does.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...algorithms.job.job import Job
from ...algorithms.leaks.traps import Caution
from ...algorithms.models.pretrained import FOLDER, StartWeights
from ...errors import RefusedError
from ...files.documents import parse_json, read_bytes
from ...security.ledger.sum_history import SignedSet, find_implied
from ...security.policy.policy import Policy


class WeightsNeededError(RefusedError):
    """Nothing but the job's file of weights is missing, which the coordinator has."""

    def __init__(self, peer: str, job: Job, weights: StartWeights, path: Path) -> None:
        super().__init__(
            peer, "DATA", f"{path}: missing; job {job.name!r} begins with this file of weights"
        )
        self.job, self.weights, self.path = job, weights, path


def weights_objections(job: Job, policy: Policy) -> Iterator[str]:
    """What the policy has against the file of weights that a job names, with what to do."""
    weights = job.model.weights
    if weights is not None and weights.sha256 not in policy.file.weights:
        yield (
            f"the job's model begins with a file of weights of {weights.size} bytes, SHA-256"
            f" {weights.sha256}, which is not in the policy's weights; if you know where it comes"
            " from, add the digest there"
        )


def check_weights(job: Job, directory: Path, policy: Policy, coordinator: str) -> None:
    """LocalError for a file that does not fit, or looks as if it was made to leak records.

    ``directory`` is the silo's folder. WeightsNeededError where the file is not there.
    """
    weights = job.model.weights
    if weights is None:
        return
    path = directory / FOLDER / weights.name
    if not path.exists():
        raise WeightsNeededError(coordinator, job, weights, path)
    caution = Caution.of(None, policy.file.limits.max_parallel)
    for part, tensors in job.check_weights().parts.items():
        caution.check_rows(part, {}, tensors, "the job's file of weights")


def start_objection(job: Job, jobs: Path, policy: Policy) -> str:
    """Why a job may not begin with a file of weights next to earlier ones; empty if it may.

    ``jobs`` has the folders of all jobs that this silo accepted. Unlike for counts, silos that
    joined or left the federation are no exception: a step is no fact that the founders' roster
    tells. Neither does it matter whether the files are the same: an operator can make two that
    differ a little.
    """
    if not _shows_steps(job.document()):
        return ""
    accepted = sorted(jobs.glob("*/job.json"))
    documents = [parse_json(read_bytes(path), str(path))["document"] for path in accepted]
    others = {own["name"]: frozenset(own["silos"]) for own in filter(_shows_steps, documents)}
    others.pop(job.name, None)
    everybody = frozenset(job.silos).union(*others.values())
    sets = [SignedSet(name, silos, everybody) for name, silos in others.items()]
    least = policy.file.secure_aggregation.least_difference
    found = find_implied(sets, job.silos, everybody, least)
    if found is None:
        return ""
    return (
        f"job {job.name!r} begins with a file of weights, as did"
        f" {' and '.join(repr(each.job) for each in found.by)} with other silos; together their"
        f" sums would reveal nearly what {', '.join(found.silos)} contributed; the policy has"
        f" secure_aggregation.min_difference = {least} (by default, min_honest +"
        " assumed_colluders). Have the job signed for the same silos, with [privacy], or without"
        " model.weights"
    )


def _shows_steps(document: Mapping[str, Any]) -> bool:
    """True for a blind job without noise that begins with a file.

    A plain job hides nothing from the coordinator that its sums could reveal.
    """
    blind = document["security"]["secure_aggregation"] == "required"
    return all((blind, document["privacy"] is None, "weights" in document["model"]))
