"""Whole jobs that mix and compare, blind and plain: each exchange and tensor within a bound."""

import hashlib

import pytest
import torch
from support.jobs import make_job

from staddle.algorithms.data.dataset import digits, split
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.exchange.parts import Gram
from staddle.algorithms.exchange.plain import PLAIN
from staddle.algorithms.partition.draw import dirichlet
from staddle.algorithms.training.accountant import MemoryAccount, PrivateSilo
from staddle.security.blind.mix_and_gram import FLOAT32, gram_deviation, row_deviation
from staddle.security.blind.mix_context import mix_group
from staddle.security.blind.plan import JobPlan, simulated
from staddle.security.blind.sum import Quantised
from staddle.security.dp.noise import Randomness
from staddle.security.secagg.spec import Terms

SILOS = tuple(f"silo-{n}" for n in range(1, 7))
KEYS = (bytes(32), b"another".ljust(32))


@pytest.fixture(scope="module")
def shards():
    records = digits().take(torch.arange(360))
    parts = dirichlet(records.y.numpy(), len(SILOS), 0.5, 3, minimum=30)
    return {
        silo: split(records.take(p), bytes(range(32)), 0.25)
        for silo, p in zip(SILOS, parts, strict=True)
    }


PRIVATE = {"secure_aggregation": "required", "clip_exponent": 6, "weight_most": 2000}


def job_of(method, options, security, model="cnn-digits", share=1.0, **changes):
    fields = {"rounds": 5, "silos": SILOS, "participation": share, "min_cohort": 3, **changes}
    training = {"batch_size": 32, "lr": 0.05}
    named = {"name": model, "classes": 10}
    return make_job(method, options, named, training, security=security, **fields)


def jobs(shards, method, options, model="cnn-digits", share=1.0, labels=False, **changes):
    """A blind job and the same one in the clear."""
    by_class = {
        silo: torch.bincount(train.y, minlength=10).tolist() for silo, (train, _) in shards.items()
    }
    counts = {silo: sum(own) for silo, own in by_class.items()}
    public = {
        "secure_aggregation": "required", "clip_exponent": 6, "weights": "public",
        "dropouts": "any", "counts": counts,
    }  # fmt: skip
    blind = {**public, **({"class_counts": by_class} if labels else {})} if share < 1 else PRIVATE
    made = [job_of(method, options, security, model, share, **changes) for security in (blind, {})]
    assert [job.keyed for job in made] == [True, False]
    return made


class Watched(Quantised):
    """Each row and each Gram of a job beside the one in the clear, of the same values."""

    def __init__(self, job, key=KEYS[0]):
        super().__init__(
            JobPlan(job).bounds, job.security.counts, JobPlan(job).terms, key, job.digest
        )
        self.rows, self.grams = [], []

    def mix(self, part, recipient, weights, read):
        found = super().mix(part, recipient, weights, read)
        assert found is not None, "the rules forbid no row of this job"
        plain = PLAIN.mix(part, recipient, weights, read)
        own = mix_group(part.name, sum(spec.elements for spec in part.tensors), 6)
        for name, value in plain.items():
            off = float((found[name].double() - value.double()).abs().max())
            rounding = float(value.abs().max()) * FLOAT32 + len(weights) * 2.0 ** (6 - 52)
            assert off <= row_deviation(own) + rounding, (part.name, name)
        self.rows.append((part.name, recipient))
        return found

    def collect(self, part, members, read):
        found = super().collect(part, members, read)
        if isinstance(part.exchange, Gram):
            plain = PLAIN.collect(part, members, read)["gram"]  # of whole vectors
            lengths = plain.diagonal(dim1=1, dim2=2).sqrt()
            scale = lengths[:, :, None] * lengths[:, None, :]
            bound = gram_deviation(part.tensors[0].shape[1])
            # six standard deviations, where one of 15 pairs a round may be beyond two
            if part.sketch:
                bound = 6 * ((1 + (plain / scale).square()) / part.sketch).sqrt()
            assert bool(((found["gram"] - plain).abs() <= bound * scale).all())
            self.grams.append(found["gram"])
        return found


class Compared(Quantised):
    """What is compared is as in a blind job, what is summed and mixed as in the clear."""

    def collect(self, part, members, read):
        found = super().collect(part, members, read)
        return found if isinstance(part.exchange, Gram) else PLAIN.collect(part, members, read)


def compared_of(blind, run):
    """The exchanges of the job in the clear that FedAims is measured against."""
    own = (JobPlan(blind).bounds, {}, None, KEYS[0], blind.digest)
    return Compared(*own) if run == "fedaims" else None


def furthest(one, other):
    """The largest difference between two simulations' models."""
    for before, after in zip(one.metrics, other.metrics, strict=True):
        assert after["tested"] == before["tested"]
    pairs = [
        (value.double(), other.states[silo].parts[part][name].double())
        for silo in SILOS
        for part, tensors in one.states[silo].parts.items()
        for name, value in tensors.items()
    ]
    return max(float((a - b).abs().max()) for a, b in pairs)


# Method, options and the rest of a job; how many rows and Grams it has; how far a tensor of a
# silo's model may be off in the end. What an exchange is off is below 1e-7; the rest is training
# that begins from slightly other values. What a sketch is off decides who trains which block, so
# "fedaims" is beside a job in the clear of the same sketches.
SUPERVISED = {"supervisor": "cnn", "tau_theta": 2}
RUNS = {
    "pfedsim mean": (("pfedsim", {"rho": 0.4}), {}, 18, 3, 1e-5),
    "pfedsim per class": (("pfedsim", {"rho": 0.4, "similarity": "per_class"}), {}, 18, 3, 1e-5),
    "pfedsim some silos": (("pfedsim", {"rho": 0}), {"share": 0.7, "seed": 2}, 20, 5, 1e-5),
    "fedsimsup samples": (("fedsimsup", {**SUPERVISED, "similarity": "samples"}), {"share": 0.7},
        10, 0, 1e-4),
    "fedsimsup labels": (("fedsimsup", SUPERVISED), {"share": 0.7, "labels": True}, 10, 0, 1e-4),
    "fedssa": (("fedssa", {"t_stable": 2}), {}, 0, 0, 1e-4),
    # with other seeds what the sums are off may be lost where they are rounded to float32
    "fedaims": (("fedaims", {"sampling": "algorithm2"}), {"model": "convnet-digits", "seed": 1},
        0, 5, 1e-5),
}  # fmt: skip


@pytest.mark.parametrize("run", RUNS)
def test_a_whole_job_is_within_its_bound_of_the_one_in_the_clear(shards, run):
    method, more, rows, grams, bound = RUNS[run]
    blind, clear = jobs(shards, *method, **more)
    # where some classes are at few silos; tests/algorithms/job/test_class_census.py has it where
    # none is
    clear = blind if blind.counted else clear
    watched = Watched(blind)
    found = simulate(blind, shards, exchanges=watched)
    plain = simulate(clear, shards, exchanges=compared_of(blind, run))
    assert (len(watched.rows), len(watched.grams)) == (rows, grams)
    off = furthest(plain, found)
    assert 0 < off <= bound
    for name, value in plain.coordinator.items():
        assert float((found.coordinator[name] - value).abs().max()) <= 1e-5, name


class Drawn:
    """Noise of a silo that is the same in each run."""

    def __init__(self, silo):
        self.silo, self.made = silo, 0

    def __call__(self):
        self.made += 1
        name = f"{self.silo} {self.made}".encode()
        return Randomness(lambda size: hashlib.sha256(name).digest()[:size])


NOISY = {
    "epsilon": 100.0, "delta": 1e-4, "sample_rate": 0.5, "sigma": "0.6", "histogram_sigma": 1.0,
    "statistics_sigma": 0.5, "metrics_sigma": 1.0,
}  # fmt: skip
PRIVATE_RUNS = {
    "pfedsim": (("pfedsim", {"rho": 0.5}), {}),
    "fedsimsup": (("fedsimsup", {"supervisor": "cnn"}), {"share": 0.7, "labels": True}),
    "fedssa": (("fedssa", {"t_stable": 2}), {}),
    "fedaims": (("fedaims", {"sampling": "algorithm2", "mu": 0.1}), {"model": "convnet-digits"}),
    "ppfl": (("ppfl", {"models": 2}), {}),
}


@pytest.mark.parametrize("run", PRIVATE_RUNS)
def test_a_private_job_may_be_blind(shards, run):
    """Under the same noise it gives what it gives in the clear."""
    method, more = PRIVATE_RUNS[run]
    changes = {"rounds": 2, "privacy": NOISY}
    blind, clear = jobs(shards, *method, **more, **changes)
    clear = blind if blind.counted else clear

    def ran(job, exchanges):
        private = {silo: PrivateSilo(MemoryAccount(job), Drawn(silo)) for silo in SILOS}
        return simulate(job, shards, exchanges=exchanges, private=private.__getitem__)

    found, plain = ran(blind, simulated(blind, KEYS[0])), ran(clear, compared_of(blind, run))
    assert any(after["tested"] for after in plain.metrics)  # noisy counts cross blind, too
    # A blind FedSimSup compares declared class counts, one in the clear noisy ones. Models under
    # other noise differ by more than 0.01.
    assert furthest(plain, found) <= (5e-3 if run == "fedsimsup" else 1e-5)


def test_under_the_same_key_a_job_gives_the_same_bits_and_under_another_one_nearly(shards):
    job, _ = jobs(shards, "pfedsim", {"rho": 0.4, "similarity": "per_class"}, rounds=3)
    one, again, other = Watched(job), Watched(job), Watched(job, KEYS[1])
    models = [simulate(job, shards, exchanges=exchanges) for exchanges in (one, again, other)]
    assert furthest(models[0], models[1]) == 0
    assert all(torch.equal(a, b) for a, b in zip(one.grams, again.grams, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(one.grams, other.grams, strict=True))
    assert 0 < furthest(models[0], models[2]) <= 1e-5


def test_who_may_have_no_row_keeps_its_own_model(shards):
    """Terms that no row of five others meets: pFedSim trains alone from the phase change on."""
    job, _ = jobs(shards, "pfedsim", {"rho": 0}, rounds=3)
    exchanges = Quantised(JobPlan(job).bounds, {}, Terms(min_cohort=6))
    found = simulate(job, shards, exchanges=exchanges)
    alone = job_of("local", {}, {}, rounds=3)
    assert furthest(simulate(alone, shards), found) == 0


def test_a_post_that_may_not_be_leaves_a_silo_as_one_like_nobody(shards):
    job, _ = jobs(shards, "fedsimsup", {"similarity": "samples"}, share=0.7, rounds=3)
    found = simulate(job, shards, exchanges=Quantised(JobPlan(job).bounds, {}, Terms(min_cohort=5)))
    away = [
        sum(silo not in job.cohort(round_) for round_ in range(1, job.length)) for silo in SILOS
    ]
    assert found.coordinator["unmatched"].tolist() == away
    assert sum(away) > 0


def test_a_jobs_own_exchanges_are_by_its_terms(shards):
    job, _ = jobs(shards, "pfedsim", {"rho": 0}, rounds=3)
    assert JobPlan(job).terms == Terms(min_cohort=3, colluders=1, batches=job.batches)
    found = simulate(job, shards, exchanges=simulated(job, KEYS[1]))
    assert furthest(found, simulate(job, shards, exchanges=Watched(job, KEYS[1]))) == 0
