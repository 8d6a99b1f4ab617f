"""Whether a job may begin with the file of weights that it names.

Whoever chooses what a model begins with has the means of a coordinator that delivers a model made
to leak records. So a policy lists such files by digest, and their rows are looked at like a
delivery's.

From one start, a silo makes nearly the same first step in every job. So the sums of two jobs tell
nearly what the silos contributed that are in one of them alone. Draws that differ from job to job
(security rule 35) do not hide that; only noise does. One file is enough for two jobs to begin
alike: whoever makes it knows what the other job draws.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...algorithms.job.job import Job
from ...algorithms.leaks.traps import Caution
from ...algorithms.models.lora import computed
from ...algorithms.models.pretrained import StartWeights
from ...errors import RefusedError
from ...files.documents import parse_json, read_bytes
from ...security.ledger.sum_history import SignedSet, choices, find_implied
from ...security.policy.policy import SiloPolicy
from .signed_sets import MOST_CHOICES


class WeightsNeededError(RefusedError):
    """The job's file of weights is missing, which the coordinator has.

    The signed job and the policy have nothing against the job.
    """

    def __init__(self, peer: str, job: Job, weights: StartWeights, path: Path) -> None:
        super().__init__(
            peer, "DATA", f"{path}: missing; job {job.name!r} begins with this file of weights"
        )
        self.job, self.weights, self.path = job, weights, path


def weights_objections(job: Job, policy: SiloPolicy) -> Iterator[str]:
    """What the policy has against the file of weights that a job names, with what to do."""
    weights = job.model.weights
    if weights is not None and weights.sha256 not in policy.file.weights:
        yield (
            f"the job's model begins with a file of weights of {weights.size} bytes, SHA-256"
            f" {weights.sha256}, which is not in the policy's weights; if you know where it comes"
            " from, add the digest there"
        )


def check_start(job: Job, policy: SiloPolicy, coordinator: str) -> None:
    """LocalError for a file that does not fit, or looks as if it was made to leak records.

    WeightsNeededError where the signed job's file is not there.
    """
    weights, path = job.model.weights, job.weights_file
    if weights is None or path is None:
        return
    if not weights.is_at(path):
        raise WeightsNeededError(coordinator, job, weights, path)
    caution = Caution.of(None, policy.file.limits.max_parallel)
    for part, tensors in job.start_values().parts.items():
        layers = computed(tensors, job.model.lora)
        caution.check_rows(part, {}, layers, "the job's file of weights")


@dataclass(frozen=True)
class StepSums:
    """Over whom a job without noise shows sums of steps, each alone where it is plain."""

    job: str
    silos: frozenset[str]
    blind: bool
    from_file: bool
    changing: bool  # whichever silos are left are summed

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> "StepSums":
        """Those of a job's document, of any release."""
        security, model = document.get("security", {}), document.get("model", {})
        blind = security.get("secure_aggregation") == "required"
        silos, changing = frozenset(document.get("silos", ())), security.get("dropouts") == "any"
        return cls(str(document.get("name")), silos, blind, "weights" in model, blind and changing)


def start_objection(job: Job, jobs: Path, policy: SiloPolicy) -> str:
    """Why a job may not begin next to earlier ones, where it or they begin with a file of weights.

    Empty if it may. ``jobs`` has the folders of all jobs that this silo accepted; LocalError for a
    damaged one. Unlike for counts, silos that joined or left the federation are no exception: a
    step is no fact that the founders' roster tells.
    """
    if job.privacy is not None:
        return ""
    new, least = StepSums.of(job.document()), policy.file.secure_aggregation.least_steps
    # Whether its own folder is another job's is for another check to say (job_folder.py).
    accepted = sorted({*jobs.glob("*/job.json")} - {jobs / job.name / "job.json"})
    exact = map(StepSums.of, filter(_is_exact, map(_document, accepted)))
    others = [each for each in exact if each.job != new.job and (new.from_file or each.from_file)]

    # Sums over any of the silos show the step of whichever is missing.
    if changing := [each.job for each in others if each.changing or new.changing]:
        return _objection_text(new, changing, ["each silo that one of them loses"], least)

    # A plain job shows each silo's step: what is left of a blind sum is that of the others.
    for each in (other for other in others if other.blind is not new.blind):
        blind, plain = (new, each) if new.blind else (each, new)
        alone = blind.silos - plain.silos
        if 0 < len(alone) < least:
            return _objection_text(new, [each.job], sorted(alone), least)
    return _next_to_sums(new, [other for other in others if other.blind], least)


def _document(path: Path) -> Mapping[str, Any]:
    """A job's document, in a file that this silo wrote."""
    found: Mapping[str, Any] = parse_json(read_bytes(path), str(path))["document"]
    return found


def _is_exact(document: Mapping[str, Any]) -> bool:
    return document.get("privacy") is None


def _next_to_sums(new: StepSums, earlier: Sequence[StepSums], least: int) -> str:
    """What is against a job next to earlier blind ones."""
    if not new.blind:
        return ""
    everybody = new.silos.union(*(each.silos for each in earlier))
    sets = [SignedSet(each.job, each.silos, everybody) for each in earlier]
    # Bounded before the search, like the search for counts.
    if choices(sets, new.silos, least) > MOST_CHOICES:
        return (
            f"job {new.job!r} and {len(sets)} earlier ones begin with files of weights, over too"
            " many sets of silos to compute what their sums reveal; use the same silos in all jobs,"
            " or add [privacy]"
        )
    found = find_implied(sets, new.silos, everybody, least)
    if found is None:
        return ""
    return _objection_text(new, [each.job for each in found.by], found.silos, least)


def _objection_text(new: StepSums, jobs: Sequence[str], silos: Sequence[str], least: int) -> str:
    return (
        f"a file of weights can make job {new.job!r} begin like {' and '.join(map(repr, jobs))},"
        f" and they do not sum the same silos: together they would reveal nearly what"
        f" {', '.join(silos)} contributed, fewer than {least} silos"
        " (secure_aggregation.min_honest + assumed_colluders, or min_difference if it is more)."
        " Have the job signed for the same silos without dropouts, with [privacy], or without"
        " model.weights where no job before had them"
    )
