"""The terms that a coordinator opens a job's sums by, against those of its silos."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.secure_messages import longest_evidence
from support.secure_sums import attempt
from support.signed_federation import job_document

from staddle.algorithms.job.job import Job, JobFile
from staddle.commands.federation import local_federation
from staddle.coordinator.jobs.secure_sum_runner import SecureSumRunner, SumResources
from staddle.coordinator.rounds.events import Gather
from staddle.coordinator.rounds.machine import JobState
from staddle.coordinator.storage.database import Database
from staddle.files.documents import validate
from staddle.security.blind.plan import JobPlan
from staddle.security.identity import roster as rosters
from staddle.security.secagg.spec import Terms

SILOS = ("a", "b", "c", "d", "e", "f", "g", "h")
COUNTS = {"weights": "public", "counts": dict.fromkeys(SILOS, 60)}
BATCHED, ANY = {"dropouts": "batches"}, {"dropouts": "any"}
JOBS = {
    "batches": ({"name": "fedavg"}, BATCHED),
    "changing silos": ({"name": "fedavg"}, ANY),
    "rows for members": ({"name": "pfedsim", "options": {"rho": 0.5}},
        {**BATCHED, "mix": "directed"}),
    "rows for changing members": ({"name": "pfedsim", "options": {"rho": 0.5}},
        {**ANY, "mix": "directed"}),
}  # fmt: skip


def gathering(tmp_path, name, round_=0, proofs=()):
    """That of one round of a job, of which there is this evidence."""
    method, security = JOBS[name]
    federation = local_federation.make(tmp_path / "federation", SILOS)
    security = {"secure_aggregation": "required", **COUNTS, **security}
    fields = {"rounds": 6, "min_cohort": 3, "method": method, "security": security}
    job = Job.from_file(validate(job_document(SILOS, **fields), JobFile, "job"), "job")
    roster = rosters.load(federation.folder / "roster.json")
    database = Database(tmp_path / "coordinator.sqlite")
    with database.transaction():
        database.add_job(b"{}", JobState("job", SILOS, 6, 3), {})
        for proof in proofs:
            database.add_misdealing("job", proof)
    means = SumResources(None, roster, SimpleNamespace(sign=None), database, None)
    run = SimpleNamespace(job=job, plan=JobPlan(job), state=SimpleNamespace(round=round_))
    found = SecureSumRunner(None, means, run)
    database.close()
    return job, found


@pytest.mark.parametrize("name", JOBS)
def test_a_coordinator_has_the_terms_of_its_silos(tmp_path, name):
    """Else it waits for signatures that silos do not give, or ends a sum they would repeat."""
    job, runner = gathering(tmp_path, name)
    setting = runner.summing._setting
    terms = Terms(min_cohort=job.min_cohort, colluders=job.security.colluders, batches=job.batches)
    assert setting.terms == terms
    assert {silo for batch in setting.together for silo in batch} == (
        set() if name == "changing silos" else set(SILOS)
    )


def test_a_round_has_the_evidence_of_those_before_and_finds_its_own_anew(tmp_path):
    """Replayed, an attempt is told what it was told at first, not what came to light after it."""
    proofs = [
        replace(longest_evidence(4, at), document=attempt(4, round=at).signed_bytes())
        for at in range(3)
    ]
    _, runner = gathering(tmp_path, "batches", 2, proofs)
    summing = runner.summing
    assert summing._setting.proofs == tuple(proofs[:2])
    assert summing._terms.excused == {proof.dealer for proof in proofs[:2]}


@pytest.mark.parametrize(("fruitless", "pause"), [(0, 0.0), (7, 60.0), (8, 60.0), (100, 60.0)])
def test_fruitless_attempts_wait_longer(tmp_path, monkeypatch, fruitless, pause):
    _, runner = gathering(tmp_path, "batches")
    waited = []
    daemon = SimpleNamespace(later=lambda seconds, *_: waited.append(seconds))
    monkeypatch.setattr(runner, "_daemon", daemon)
    runner.gather(Gather(round=0, cohort=SILOS, attempt=0, fruitless=fruitless))
    assert waited == [pause]
