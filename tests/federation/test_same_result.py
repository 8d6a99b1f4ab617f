"""The federation over the network gives the tensors that the simulator gives, bit for bit."""

import json

import pytest
import safetensors.torch
import torch

from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.training.record_checks import counts_by_class
from staddle.errors import AbortedError
from staddle.files.documents import canonical_json
from staddle.security.identity.domains import JOB
from staddle.security.identity.keys import load_keys
from staddle.security.identity.signed_document import sign_document
from staddle.security.ledger.audit import ledger_folder, verify
from staddle.security.ledger.messages import messages, summary

SILOS = ("north", "east", "south", "west")

SUPERVISED = {"tau_theta": 1, "supervisor": ["lenet", "cnn", "transformer"]}
ALWAYS = {"models": 2, "release_membership": "always"}
ADAMW = {
    "optimiser": "adamw",
    "lr": 0.003,
    "weight_decay": 0.01,
    "clip": 1.0,
    "warmup": 1,
    "schedule": {"kind": "cosine"},
}
AUGMENT = [{"kind": "RandomCrop", "padding": 1}, {"kind": "RandomHorizontalFlip"}]
BFLOAT16, INT8 = {"codec": "bfloat16"}, {"codec": "int8"}
DROPOUT = {"options": {"dropout": 0.25}}
JOBS = (  # methods, and what their documents say else; three of four silos a round
    ("local", {}),
    ("fedavg", {"model": "cnn-digits"}),
    ("fedavg", {"training": {**ADAMW, "augment": AUGMENT}}),
    ("fedper", {}),
    ("pfedsim", {"options": {"rho": 0.4, "similarity": "per_class"}}),
    ("fedsimsup", {"options": SUPERVISED}),
    ("fedssa", {"options": {"t_stable": 3, "stale_inclusive": True}}),
    ("ppfl", {"options": {"models": 2, "lam": 0.0, "release_membership": "last"}}),
    ("ppfl", {"options": ALWAYS, "participation": 1.0}),
    ("fedaims", {"options": {"sampling": "algorithm2"}, "model": "convnet-digits"}),
    ("scaffold", {"options": {"global_lr": 0.5}}),
    ("fedyogi", {}),
    ("fedgen", {"options": {"server_steps": 5}}),
    ("knn-per", {"options": {"capacity": 20}}),
    ("fedavg", {"transport": BFLOAT16}),
    ("feddyn", {"transport": INT8}),
    ("fedavg", {"transport": {"codec": "top-k", "keep": 0.1}}),
    ("pfedsim", {"options": {"rho": 0.4}, "transport": INT8}),
    ("pfedsim", {"options": {"rho": 0.4}, "transport": BFLOAT16}),
    ("fedper", {"model": {"name": "mixed", "head": "fc", "input": [1, 8, 8], **DROPOUT}}),
)


@pytest.mark.timeout(400)
def test_every_method_gives_one_result(start, document):
    """Over the network and in the simulator: what each silo keeps, and what the coordinator knows
    in the end.
    """
    running = start(*SILOS)
    for number, (method, changes) in enumerate(JOBS):
        fields = {"rounds": 4, "min_cohort": 3, "participation": 0.75, **changes}
        running.job(document(f"run-{number}-{method}", SILOS, method, **fields))
    running.start_coordinator()
    running.start_silos()
    running.completed()
    running.stop()
    shards = running.shards()
    for job in running.jobs:
        expected = simulate(job, shards)
        running.check_models(job, expected)
        running.check_reports(job, expected)
        for silo in SILOS:
            found, wanted = running.model(job, silo), expected.states[silo]
            assert found.parts.keys() == wanted.parts.keys()
            assert found.extra.keys() == wanted.extra.keys()
            for name, value in wanted.extra.items():
                assert torch.equal(found.extra[name], value), (job.name, silo, name)
        check_result(running, job, expected.coordinator)
    check_ledgers(running)
    for silo in SILOS:  # each silo's own log says by class what it trains and tests on
        for job in running.jobs:
            (said,) = (e for e in running.events(silo, "job.records") if e["job"] == job.name)
            assert counts_by_class(job, *shards[silo]).items() <= said.items()


def check_result(running, job, known):
    """The coordinator's file holds what the simulator's coordinator half knows, bit for bit."""
    path = running.job_folder(job, "coordinator") / "result.safetensors"
    assert path.exists() == bool(known)
    found = safetensors.torch.load_file(path) if known else {}
    assert found.keys() == known.keys()
    for name, value in known.items():
        assert torch.equal(found[name], value), (job.name, name)


def check_ledgers(running):
    """Every ledger holds, and the bytes that left are those that the schema declares, no more."""
    for silo in SILOS:
        path = ledger_folder(running.federation.state(silo))
        assert verify(path).ok
        left = summary(path)
        for job in running.jobs:
            declared = {}
            for round_ in range(job.length):
                if silo in job.cohort(round_):
                    for part in job.up(round_):
                        size = sum(spec.nbytes for spec in part.wire)
                        declared[part.name] = declared.get(part.name, 0) + size
            found = {part: total.bytes for (name, part), total in left.items() if name == job.name}
            assert found == declared
        jobs = {job.name: job for job in running.jobs}
        for message in messages(path):
            assert (message.status, bool(message.receipt)) == ("sent", True)
            intent = message.intent
            assert intent.cohort == tuple(sorted(jobs[intent.job].cohort(intent.round)))


def test_a_job_that_our_code_reads_differently_does_not_start(start, document):
    running = start(*SILOS[:2])
    job = running.job(document("odd", SILOS[:2]))
    altered = json.loads(json.dumps(job.document()))
    altered["schema"][0]["up"][0]["tensors"][0]["shape"][0] += 1
    folder = running.federation.folder
    signed = sign_document(altered, running.roster, load_keys(folder / "operator"), JOB)
    (folder / "jobs" / "odd.json").write_bytes(canonical_json(signed))
    with pytest.raises(AbortedError, match=r"odd\.json.*schema"):
        running.start_coordinator()
