"""The federation over the network gives the tensors that the simulator gives, bit for bit."""

import json

import pytest
import safetensors.torch
import torch

from staddle.algorithms.data.dataset import split
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.training.record_checks import counts_by_class
from staddle.algorithms.training.silo_round import state_from_bytes
from staddle.errors import AbortedError
from staddle.files.documents import canonical_json
from staddle.security.identity import roster as rosters
from staddle.security.identity.domains import JOB
from staddle.security.identity.keys import load_keys
from staddle.security.identity.signed_document import sign_document
from staddle.security.ledger.audit import ledger_folder, verify
from staddle.security.ledger.messages import messages, summary
from staddle.silo.job_folder import split_key

SILOS = ("north", "east", "south", "west")


PARTIAL = 0.75  # three of four silos a round
JOBS = (
    ("local", "cnn-digits", {}, PARTIAL),
    ("fedavg", "cnn-digits", {}, PARTIAL),
    ("fedper", "cnn-digits", {}, PARTIAL),
    ("pfedsim", "cnn-digits", {"rho": 0.4, "similarity": "per_class"}, PARTIAL),
    (
        "fedsimsup",
        "cnn-digits",
        {"tau_theta": 1, "supervisor": ["lenet", "cnn", "transformer"]},
        PARTIAL,
    ),
    ("fedssa", "cnn-digits", {"t_stable": 3, "stale_inclusive": True}, PARTIAL),
    ("ppfl", "cnn-digits", {"models": 2, "lam": 0.0, "release_membership": "last"}, PARTIAL),
    ("ppfl", "cnn-digits", {"models": 2, "release_membership": "always"}, 1.0),
    ("fedaims", "convnet-digits", {"sampling": "algorithm2"}, PARTIAL),
)


@pytest.mark.timeout(400)
def test_every_method_gives_one_result(start, document):
    """Over the network and in the simulator: what each silo keeps, and what the coordinator knows
    in the end.
    """
    torch.set_num_threads(1)
    running = start(*SILOS)
    for number, (method, model, options, participation) in enumerate(JOBS):
        running.job(
            document(
                f"run-{number}-{method}",
                SILOS,
                method,
                rounds=4,
                participation=participation,
                min_cohort=3,
                model=model,
                options=options,
            )
        )
    coordinator = running.start_coordinator()
    for silo in SILOS:
        running.write_silo(silo)
        running.start_silo(silo)
    for job in running.jobs:
        ended = coordinator.wait_for("job.ended", 120)
        assert (ended["job"], ended["outcome"]) == (job.name, "completed")
    running.stop()
    fraction = 0.25
    shards = {
        silo: split(running.data[silo], split_key(running.federation.state(silo)), fraction)
        for silo in SILOS
    }
    for job in running.jobs:
        expected = simulate(job, shards)
        for silo in SILOS:
            folder = running.federation.state(silo) / "jobs" / job.name
            found = state_from_bytes((folder / "model.safetensors").read_bytes())
            wanted = expected.states[silo]
            assert found.parts.keys() == wanted.parts.keys()
            assert found.extra.keys() == wanted.extra.keys()
            for name, value in wanted.extra.items():
                assert torch.equal(found.extra[name], value), (job.name, silo, name)
            for part, tensors in wanted.parts.items():
                for name, value in tensors.items():
                    assert torch.equal(found.parts[part][name], value), (job.name, silo, part, name)
            report = json.loads((folder / "report.json").read_text())
            last = expected.history[silo][-1]
            assert report["final"]["correct_delivered"] == last.correct_delivered
            assert report["final"]["correct_trained"] == last.correct_trained
        check_result(running, job, expected.coordinator)
    check_ledgers(running)
    check_logs(running, shards)


def check_logs(running, shards):
    """Each silo's own log says by class what it trains and tests on."""
    for silo in SILOS:
        events = [json.loads(line) for line in running.daemons[silo].log.read_text().splitlines()]
        for job in running.jobs:
            (said,) = (e for e in events if e["event"] == "job.records" and e["job"] == job.name)
            assert counts_by_class(job, *shards[silo]).items() <= said.items()


def check_result(running, job, known):
    """The coordinator's file holds what the simulator's coordinator half knows, bit for bit."""
    path = running.federation.state("coordinator") / "jobs" / job.name / "result.safetensors"
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
                        declared[part.name] = declared.get(part.name, 0) + sum(
                            spec.nbytes for spec in part.wire
                        )
            assert {
                part: total.bytes for (name, part), total in left.items() if name == job.name
            } == declared
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
    signed = sign_document(
        altered, rosters.load(folder / "roster.json"), load_keys(folder / "operator"), JOB
    )
    (folder / "jobs" / "odd.json").write_bytes(canonical_json(signed))
    with pytest.raises(AbortedError, match=r"odd\.json.*schema"):
        running.start_coordinator()
