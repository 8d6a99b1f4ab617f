"""The terms that a coordinator opens a job's sums by, against those of its silos."""

from types import SimpleNamespace

import pytest

from staddle.algorithms.job import Job, JobFile
from staddle.commands import local_federation
from staddle.coordinator.database import Database
from staddle.coordinator.gathering import Gathering, Means
from staddle.files import validate
from staddle.proto.blind import round_terms
from staddle.security import roster as rosters
from staddle.security.round_spec import Terms

SILOS = ("a", "b", "c", "d", "e", "f", "g", "h")
COUNTS = {"weights": "public", "counts": dict.fromkeys(SILOS, 60)}
BATCHED, ANY = {"dropouts": "batches"}, {"dropouts": "any"}
JOBS = {
    "batches": ({"name": "fedavg"}, BATCHED),
    "changing silos": ({"name": "fedavg"}, ANY),
    "rows for members": ({"name": "pfedsim", "options": {"rho": 0.5}}, {**BATCHED, "mix": "directed"}),
    "rows for changing members": ({"name": "pfedsim", "options": {"rho": 0.5}}, {**ANY, "mix": "directed"}),
}


@pytest.mark.parametrize("name", JOBS)
def test_a_coordinator_has_the_terms_of_its_silos(tmp_path, name):
    """Else it would wait for signatures that they do not give, or let a sum be that they would repeat."""
    method, security = JOBS[name]
    federation = local_federation.make(tmp_path / "federation", SILOS)
    document = {
        "version": 1,
        "name": "job",
        "seed": 11,
        "rounds": 6,
        "silos": list(SILOS),
        "min_cohort": 3,
        "method": method,
        "model": {"name": "cnn-digits", "classes": 10},
        "training": {"lr": 0.05},
        "security": {"secure_aggregation": "required", **COUNTS, **security},
    }
    job = Job.from_file(validate(document, JobFile, "job"), "job")
    roster = rosters.load(federation.folder / "roster.json")
    database = Database(tmp_path / "coordinator.sqlite")
    means = Means(None, roster, SimpleNamespace(sign=None), database, None)
    gathering = Gathering(None, means, SimpleNamespace(job=job, state=SimpleNamespace(round=0)))
    setting = gathering.summing._setting
    assert setting.terms == round_terms(job, Terms(min_cohort=job.min_cohort, colluders=job.security.colluders))
    assert {silo for batch in setting.together for silo in batch} == (set() if name == "changing silos" else set(SILOS))
    database.close()
