"""Jobs whose silos share the noise: real processes, real TLS."""

from collections import Counter

import pytest
import torch
from federation.keyed import TIMING
from federation.test_private import SECURITY, SILOS, budget_of, check_silo, intents_of, private
from support.private_jobs import dataset, undrafted

from staddle.algorithms.job.shared_steps import STEPS
from staddle.algorithms.method import initial_state
from staddle.algorithms.training.silo_round import state_from_bytes
from staddle.coordinator.storage.results import read
from staddle.files.checked_file import read_json
from staddle.silo.admission.accountant import KeptCounts

NOISE, DISHONEST, LR = 1.2, 2, 0.5


def shared(document, name, method, dishonest=DISHONEST, **changes):
    fields = {"min_cohort": 3, "security": SECURITY, "training": {"lr": LR}, **changes}
    metrics = fields.pop("metrics_sigma", None)
    made = private(document, name, method, 60.0, metrics, **fields)
    made["privacy"] |= {"noise": "shared", "dishonest": dishonest}
    return made


def whole(document, name):
    """What a silo gives as a whole is protected."""
    made = shared(document, name, "fedper", rounds=2, training={"lr": 0.05, "epochs": 2})
    made["privacy"] |= {"unit": "silo", "sample_rate": 1.0}
    return made


def model_of(running, silo, job):
    path = running.federation.state(silo) / "jobs" / job / "model" / "model.safetensors"
    return state_from_bytes(path.read_bytes()).parts


def counted(running, silo, job):
    """The noisy number of its records, as the silo released it."""
    path = running.federation.state(silo) / "jobs" / job / "counts.json"
    return sum(read_json(path, KeptCounts).counts)


@pytest.mark.timeout(120)
def test_silos_share_the_noise_of_what_they_sum(start, document):
    """One of them takes more silos for dishonest than the third job does, and declines that."""
    running = start(*SILOS)
    one = running.job(shared(document, "one", "fedavg", rounds=1))
    three = running.job(shared(document, "three", "fedper", rounds=3, metrics_sigma=50.0))
    silos = running.job(whole(document, "silos"))
    running.job(shared(document, "trusting", "fedavg", dishonest=1, rounds=1))
    coordinator = running.start_coordinator(**TIMING)
    for silo in SILOS:
        running.write_silo(silo)
        policy = running.federation.folder / silo / "policy.toml"
        least = DISHONEST if silo == "west" else 1
        table = {"epsilon": 200.0, "noise": '"shared"', "dishonest": least}
        policy.write_text(undrafted(policy.read_text()) + dataset(**table, required="true"))
        running.start_daemon(silo)
    seen, left = [], Counter({"job.ended": 3, "job.accepted": 3 * 4 + 3, "job.declined": 1})
    while left.total() > 0:
        seen.append(coordinator.event(60))
        assert seen[-1] is not None, left
        left -= Counter([seen[-1]["event"]])
    ended = {event["job"]: event["outcome"] for event in seen if event["event"] == "job.ended"}
    assert {ended[job.name] for job in (one, three, silos)} == {"completed"}
    declined = [event for event in seen if event["event"] == "job.declined"]
    assert [(event["job"], event["silo"], event["code"]) for event in declined] == [
        ("trusting", "west", "POLICY")
    ]
    # it pends: its silos are one batch, and west may still change its mind
    assert "trusting" not in ended

    for silo in SILOS:
        running.daemons[silo].stop()
        check_silo(running, silo)
        for job in (one, three, silos):
            for intent in intents_of(running, silo, job):
                assert (intent["form"], intent["dp"]["noise"]) == ("masked", "shared")
                names = {each["name"] for each in intent["tensors"] if each["part"] == STEPS}
                assert any(name.startswith("extractor.") for name in names)
                assert not any(name.startswith("classifier.") for name in names) or job is one
        _, reservations = budget_of(running, silo)
        steps = [each for each in reservations.values() if each["purpose"] != "histogram"]
        assert [(each["job"], each["purpose"]) for each in steps] == [
            ("one", "training-shared"),
            *[("three", "training-shared, metrics-shared")] * 3,
            *[("silos", "training-shared")] * 2,
        ]
        assert steps[-1]["events"] == [
            {"sigma": str(NOISE), "q": "1.0", "steps": 1, "shared": True}
        ]
        assert all(event["shared"] for each in steps for event in each["events"])

    # All have one model, with the noise that two of four shares are, as it came through the sum.
    first, *others = (model_of(running, silo, "one") for silo in SILOS)
    before = initial_state(one.method(), SILOS[0]).parts
    moved = []
    for part, tensors in first.items():
        for name, value in tensors.items():
            assert all(torch.equal(value, other[part][name]) for other in others)
            moved.append((value.double() - before[part][name].double()).flatten())
    records = int(read(running.kept, "one").rounds[0]["metrics"].get("tested", 0))
    assert records == 0  # test counts without noise stay at the silos
    counts = sum(counted(running, silo, "one") for silo in SILOS)
    deviation = LR * NOISE * (len(SILOS) / (len(SILOS) - DISHONEST)) ** 0.5 / (0.2 * counts)
    assert 0.9 < float(torch.cat(moved).std()) / deviation < 1.2

    # extractors are one, classifiers are each silo's own
    models = [model_of(running, silo, "three") for silo in SILOS]
    for name, value in models[0]["extractor"].items():
        assert all(torch.equal(value, other["extractor"][name]) for other in models[1:])
    weights = [model["classifier"]["weight"] for model in models]
    assert not any(torch.equal(weights[0], other) for other in weights[1:])
    assert all(closed["noisy"] for closed in read(running.kept, "three").rounds)
