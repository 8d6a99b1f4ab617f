"""A federation on the disk with signed jobs: for a coordinator as it ships, and raw silos."""

import contextlib
from types import SimpleNamespace

from support.raw_silo import Caller

from staddle.commands.federation import local_federation
from staddle.coordinator import config as configs
from staddle.security.identity import roster as rosters
from staddle.security.identity.keys import load_keys


def job_document(silos, /, **changes):
    """A job of three rounds of FedAvg."""
    document = {
        "version": 1,
        "name": "job",
        "seed": 11,
        "purpose": "For a test",
        "rounds": 3,
        "silos": list(silos),
    }
    document |= {"round_timeout": 60, "method": {"name": "fedavg"}}
    document |= {"model": {"name": "cnn-digits", "classes": 10}}
    return {**document, "training": {"epochs": 1, "lr": 0.05}, **changes}


def pfedsim(silos, /, **changes):
    """The same of pFedSim, whose silos share a key."""
    method = {"name": "pfedsim", "options": {"rho": 0.0}}
    security = {"secure_aggregation": "required", **changes.pop("security", {})}
    return job_document(silos, **{"min_cohort": 3, "method": method, **changes}, security=security)


def signed_federation(folder, silos, *documents, submitted=1, **timing):
    """Keys of these silos, and a coordinator that has the first jobs of these documents."""
    federation = local_federation.make(folder / "federation", silos)
    jobs = [local_federation.sign_job(federation, document) for document in documents]
    timing = {"admission_seconds": 20, "beat_seconds": 20, "hold_seconds": 1, **timing}
    names = [job.name for job in jobs[:submitted]]
    local_federation.write_coordinator(federation, names, timing)
    return SimpleNamespace(
        federation=federation,
        folder=federation.folder,
        job=jobs[0],
        jobs={job.name: job for job in jobs},
        roster=rosters.load(federation.folder / "roster.json"),
        keys={silo: load_keys(federation.folder / silo / "keys") for silo in silos},
        config=configs.load(federation.coordinator_config),
    )


@contextlib.asynccontextmanager
async def raw_silos(address, world, accepted=True):
    """One caller for each silo of the job; all have ``accepted`` it."""
    callers = [Caller(address, world.keys[silo], world.roster, world.job) for silo in world.keys]
    for caller in callers if accepted else ():
        await caller.accept()
    yield callers
    for caller in callers:
        await caller.channel.close()
