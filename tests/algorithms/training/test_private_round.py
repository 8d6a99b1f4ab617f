"""A private round: what a method learns, what leaves with which taint, what is spent, and where it
fails closed.
"""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from support.jobs import make_data, make_job
from support.numbered import lazily
from support.other_tasks import TASKS, document, shards
from support.refusals import refused
from torch import nn
from torch.testing import assert_close

from staddle.algorithms.course import ContributionsAndState, Effort, SiloState, Stage
from staddle.algorithms.data.dataset import Dataset
from staddle.algorithms.engines import engine
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.exchange.parts import Contribution, Kind
from staddle.algorithms.job.job import Job, JobFile
from staddle.algorithms.job.privacy import round_spends
from staddle.algorithms.job.privacy_table import PrivacyTable
from staddle.algorithms.leaks.taint import EXACT, PUBLIC, paid, taints_to_text, worst
from staddle.algorithms.method import initial_state
from staddle.algorithms.methods.fedper import FedPer
from staddle.algorithms.training import silo_round as rounds
from staddle.algorithms.training.accountant import Counts, MemoryAccount, PrivateSilo
from staddle.algorithms.training.loop import evaluate
from staddle.algorithms.training.private_round import (
    PrivateRound,
    noisy_facts,
    noisy_measure,
    release_counts,
)
from staddle.algorithms.training.silo_round import (
    final_round,
    local_round,
    state_from_bytes,
    state_to_bytes,
)
from staddle.errors import CancelledError, ExhaustedError
from staddle.files import tensor_file

PRIVACY = {"epsilon": 8.0, "delta": 1e-5, "sample_rate": 0.5, "sigma": "1.0"}
PRIVACY["histogram_sigma"] = 0.5
SIX = ["a", "b", "c", "d", "e", "f"]


class Seeded:
    """Random numbers that are no secret, other ones at each silo."""

    def __init__(self, seed=0):
        self.random = np.random.default_rng(seed)

    def normal(self, count):
        return self.random.normal(size=count)

    def drawn(self, records, q):
        return np.flatnonzero(self.random.uniform(size=records) < q)


class Still:
    """No noise, or as much as it is told, and everybody is drawn."""

    def __init__(self, each=0.0):
        self.each = each

    def normal(self, count):
        return np.full(count, self.each)

    def drawn(self, records, q):
        return np.arange(records)


class Free(MemoryAccount):
    """An account that pays for anything, also for steps without noise."""

    def reserve(self, round_, spends):
        self._free = Counter({spend.purpose: spend.steps for spend in spends})
        return super().reserve(round_, spends)


@pytest.fixture
def make_private(make_job):
    def make(method="fedavg", options=None, privacy=None, **fields):
        if method == "fedsimsup":
            fields = {"silos": SIX, "participation": 0.5, "min_cohort": 3, **fields}
        if method == "fedaims":
            fields = {"model": {"name": "convnet-digits"}, **fields}
        if method == "fedbn":
            fields = {"model": {"norm": "group"}, **fields}
        return make_job(
            method, options, privacy={**PRIVACY, **(privacy or {})}, **{"rounds": 3, **fields}
        )

    return make


def silo_of(job, random=None, account=None):
    random = random or Seeded()
    return PrivateSilo(account or MemoryAccount(job), lambda: random)


@pytest.fixture
def recorded(monkeypatch):
    """Outcomes by silo and round of what is simulated."""
    found = {}

    def watched(method, job, state, round_, delivered, train, test, client, **more):
        found[client, round_] = local_round(
            method, job, state, round_, delivered, train, test, client, **more
        )
        return found[client, round_]

    monkeypatch.setattr(engine, "local_round", watched)
    return found


def simulated(job, shards, seed=1):
    """A private job's end, and the accounts of its silos."""
    accounts = {silo: MemoryAccount(job) for silo in job.silos}
    randoms = {silo: Seeded(seed + place) for place, silo in enumerate(job.silos)}
    end = simulate(job, shards, private=lambda s: silo_of(job, randoms[s], accounts[s]))
    return end, accounts


def one_round(job, method=None, private=None, state=None, round_=0, train=24, test=9):
    """A round of silo a, on as many records as are said or on those that are given."""
    method = method or job.method()
    state = state or initial_state(method, "a", public=())
    train, test = (data if isinstance(data, Dataset) else make_data(data) for data in (train, test))
    private = private or silo_of(job)
    return local_round(method, job, state, round_, {}, train, test, "a", private=private)


def with_noisy(job, counts, random=None, account=None):
    """A silo whose noisy counts are known already."""
    account = account or MemoryAccount(job)
    account.keep_counts(Counts(torch.tensor(counts), 0))
    return silo_of(job, random, account)


# Method by method: what paid for each tensor that leaves. In these jobs the counts are reservation
# 0 of a silo and its n-th round is reservation n. "all" are 0 and all rounds that trained, "now" 0
# and the present one, "counts" 0 alone.

FEDAIMS = {
    "backbone": "all", "backbone/@weight": "counts", "prototypes": "all",
    "prototypes/@weight": "counts", "direction": "all",
}  # fmt: skip
PPFL = {  # θ comes down in each round, c stays and moves in the rounds of its block
    "model": "now+c", "model/@weight": "counts", "coupling": "counts", "coupling/m": "c",
    "membership": "c",
}  # fmt: skip
MODEL = {"model": "now", "model/@weight": "counts"}
EXTRACTOR = {"extractor": "all", "extractor/@weight": "counts"}
CENSUS = {"census": "counts", "theta": "all"}
LEAVING = {  # case: method, options, what paid
    "local": ("local", {}, {}),
    "fedavg": ("fedavg", {}, MODEL),
    "fedavg-equal": ("fedavg", {"weights": "equal"}, MODEL),
    "feddyn": ("feddyn", {"alpha": 0.5}, {**MODEL, "model": "all"}),
    "scaffold": (
        "scaffold", {},
        {"model": "all", "model/@weight": "counts", "control": "all", "control/@weight": "counts"},
    ),
    "fednova": (
        "fednova", {},
        {"direction": "now", "direction/steps": "counts", "direction/@weight": "counts"},
    ),
    "fedavgm": ("fedavgm", {}, MODEL),
    "fedadam": ("fedadam", {}, MODEL),
    "fedyogi": ("fedyogi", {}, MODEL),
    "fedntd": ("fedntd", {}, MODEL),
    "fedamp": ("fedamp", {}, {"model": "all", "moved": "all"}),
    "fml": ("fml", {}, {"meme": "all", "meme/@weight": "counts"}),
    # as if a stage could reach v
    "ditto": ("ditto", {}, {**MODEL, "model": "all"}),
    "fedavg-ft": ("fedavg-ft", {"tuning_epochs": 2}, MODEL),
    "fedbabu": ("fedbabu", {"tuning_epochs": 2}, {**EXTRACTOR, "extractor": "now"}),
    "fedbabu-full": (
        "fedbabu", {"tuned": "full", "tuning_epochs": 2}, {**EXTRACTOR, "extractor": "now"}
    ),
    "fedbn": ("fedbn", {}, {**MODEL, "model": "all"}),
    "fedper": ("fedper", {}, EXTRACTOR),
    "fedprox": ("fedprox", {}, MODEL),
    "fedrep": ("fedrep", {"head_epochs": 2}, EXTRACTOR),
    "lg-fedavg": ("lg-fedavg", {}, {"layers": "all", "layers/@weight": "counts"}),
    "moon": ("moon", {}, {**MODEL, "model": "all"}),
    "fedrod": ("fedrod", {}, {**MODEL, "model": "all"}),
    "fedclassavg": (
        "fedclassavg", {"contrast": 0}, {"classifier": "all", "classifier/@weight": "counts"}
    ),
    "pfedsim": ("pfedsim", {"rho": 0}, {"extractor": "all", "rows": "all"}),
    "pfedsim-classes": (
        "pfedsim", {"rho": 0, "similarity": "per_class"}, {"extractor": "all", "rows": "all"}
    ),
    "pfedsim-warm": ("pfedsim", {"rho": 1}, MODEL),
    "cfl": ("cfl", {"start": 1}, {"model": "now", "update": "now"}),
    "fedssa": ("fedssa", {}, {"rows": "all", "rows/@weight": "counts"}),
    "fedssa-clip": (
        "fedssa", {"clip": 1.0, "t_stable": 2}, {"rows": "all", "rows/@weight": "counts"}
    ),
    "fedssa-stale": (
        "fedssa", {"stale_inclusive": True}, {"deltas": "all", "deltas/presence": "counts"}
    ),
    "fedsimsup": ("fedsimsup", {"tau_s": 1, "tau_theta": 1}, CENSUS),
    "fedsimsup-samples": (
        "fedsimsup",
        {"tau_s": 1, "tau_theta": 1, "similarity": "samples", "supervisor": ["transformer", "cnn"]},
        CENSUS,
    ),
    "fedaims": ("fedaims", {}, FEDAIMS),
    "fedaims-clusters": (
        "fedaims",
        {"sampling": "algorithm2", "aux_ce": "prototype", "prototype_weights": "paper_p"},
        FEDAIMS,
    ),
    "fedaims-raw": (
        "fedaims",
        {"sampling": "algorithm2", "similarity": "raw", "aux_ce": "none", "sketch": 0},
        FEDAIMS,
    ),
    "fedaims-full": ("fedaims", {"sampling": "full"}, FEDAIMS),
    "ppfl": ("ppfl", {"release_membership": "always"}, PPFL),
    "ppfl-batches": (
        "ppfl", {"membership_batches": True, "variant": "ppfl2", "weights": "samples"}, PPFL
    ),
    "ppfl-code": (
        "ppfl",
        {"schedule": "theta_then_c", "no_affinity": True, "double_exponential": True}
        | {"canonical": "mlp", "hidden": 4},
        PPFL,
    ),
    "ppfl-rbcd": (
        "ppfl", {"schedule": "rbcd", "mixture": "logits", "release_membership": "always"}, PPFL
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEAVING)
def test_all_that_leaves_is_paid_for_by_what_its_taint_says(
    make_private, make_shards, recorded, name
):
    method, options, leaving = LEAVING[name]
    fields = {} if method == "fedsimsup" else {"silos": ["a", "b"]}
    if method not in ("fedaims", "fedbn"):
        fields["model"] = {"name": "ppfl-mlp", "input": [1, 8, 8]}
    job = make_private(method, options, {"metrics_sigma": 2.0}, **fields)
    _, accounts = simulated(job, make_shards(job))
    for (silo, round_), outcome in recorded.items():
        now = outcome.spending.id
        every = paid(0, *range(1 + job.method().census, now + 1))
        ids = {"counts": paid(0), "now": paid(0, now), "all": every}
        if method == "ppfl":
            ids["c"] = paid(0, *(r + 1 for r in range(round_ + 1) if "c" in job.method().blocks(r)))
            ids["now+c"] = worst([ids["now"], ids["c"]])
        for part in job.up(round_)[:-1]:
            given = outcome.contributions[part.name]
            names = {*given.tensors, *(() if given.weight is None else ("@weight",))}
            assert outcome.taints[part.name].keys() == names
            for tensor, taint in outcome.taints[part.name].items():
                said = leaving.get(f"{part.name}/{tensor}", leaving[part.name])
                assert taint == ids[said], (part.name, tensor, silo, round_)
        (metrics,) = set(outcome.taints["metrics"].values())
        assert metrics.name == "noised"
        assert now in metrics.ids
        assert set(outcome.taints) == {part.name for part in job.up(round_)}
        assert set(outcome.state.taints) == set(outcome.state.flat)
        spent = {spend.purpose: spend.steps for spend in round_spends(job, round_, "1.0")}
        assert accounts[silo].spendings[now].taken == spent, "effort() is what the stages take"
        assert not accounts[silo].spendings[now].left.keys(), "it is committed"


@pytest.mark.parametrize("schedule", ["alternating", "theta_then_c", "rbcd"])
@pytest.mark.parametrize("batches", [False, True])
def test_effort_is_known_before_the_rounds_of_any_schedule(make_private, schedule, batches):
    options = {"schedule": schedule, "membership_batches": batches}
    job = make_private("ppfl", options, rounds=12, training={"epochs": 3})
    method, found = job.method(), set()
    for round_ in range(job.length):
        facts = noisy_facts(job, "a", round_, Counts(torch.tensor([4, 0, 9]), 0))
        stages = method.stages(initial_state(method, "a"), facts)
        whole = sum(stage.epochs for stage in stages if stage.full_batch)
        effort = method.effort(round_)
        assert effort == Effort(sum(stage.epochs for stage in stages) - whole, whole)
        found.add(effort)
    assert len(found) == 1 + (schedule == "theta_then_c" or (schedule == "rbcd" and not batches))


def test_a_method_that_sums_by_class_is_told_noisy_presence(make_private, make_shards, recorded):
    """A blind job's count of holders (counted.py) is of the noisy counts as well."""
    security = {"secure_aggregation": "required", "min_holders": 3}
    blind = {"security": security, "silos": SIX, "min_cohort": 4}
    job = make_private("fedssa", {}, {"histogram_sigma": 2.0}, **blind)
    assert job.counted
    simulated(job, make_shards(job))
    for (_, round_), outcome in recorded.items():
        part = "rows" if round_ else "holders"
        assert {taint.name for taint in outcome.taints[part].values()} == {"noised"}
        assert outcome.spending is None or round_ > 0
        assert set(outcome.taints["metrics"].values()) == {PUBLIC}
        assert not any(count.any() for count in outcome.contributions["metrics"].tensors.values())


# The classic mistake: a head without noise that feeds a gradient that is shared.


class Heads(FedPer):
    """FedPer with a private head that trains without noise, before or after the shared part."""

    reads = None
    head_first = True

    def stages(self, state, facts):
        own = replace(self.stage("classifier"), noiseless=True)
        shared = replace(self.stage("extractor"), reads=self.reads, loss=self.loss)
        return (own, shared) if self.head_first else (shared, own)

    def loss(self, parts, x, y, context):
        if "classifier" in parts:
            return self.task_loss(parts, x, y, context)
        return parts["extractor"](x).square().mean(1)


def run(job, method, rounds_=2):
    """Outcomes of some rounds of one silo."""
    private, outcomes, state = silo_of(job), [], None
    for round_ in range(rounds_):
        outcomes.append(one_round(job, method, private, state, round_))
        state = outcomes[-1].state
    return outcomes


@pytest.mark.parametrize("head_first", [True, False])
def test_a_head_without_noise_makes_what_reads_it_private(make_private, head_first):
    job = make_private("fedper", rounds=4)
    method = type("Wrong", (Heads,), {"head_first": head_first})(job.setting())
    outcomes = run(job, method)
    taints = [set(outcome.taints["extractor"].values()) for outcome in outcomes]
    assert all(taint.exact for taint in taints[1] if taint != paid(0))  # but for the weight
    # in round 0 the head is as the job made it
    assert any(taint.exact for taint in taints[0]) is head_first
    head = [outcomes[0].state.taints[f"part/classifier/{name}"] for name in ("weight", "bias")]
    assert head == [EXACT, EXACT]
    metrics = make_private("fedper", {}, {"metrics_sigma": 2.0})
    (seen,) = set(run(metrics, method)[1].taints["metrics"].values())
    assert seen.exact, "a private head shows in which test records are right"


@pytest.mark.parametrize("head_first", [True, False])
def test_a_head_without_noise_that_nothing_reads_stays_at_the_silo_and_harms_nothing(
    make_private, head_first
):
    job = make_private("fedper", rounds=4)
    method = type("Right", (Heads,), {"head_first": head_first, "reads": ()})(job.setting())
    for round_, outcome in enumerate(run(job, method)):
        weight = outcome.taints["extractor"].pop("@weight")
        assert weight == paid(0)
        assert set(outcome.taints["extractor"].values()) == {paid(*range(round_ + 2))}
        assert outcome.spending.taken == {"training": 2}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_head_without_noise_ends_no_round_however_it_diverges(make_private, make_data, value):
    """That a round failed would be seen, and by what records it failed has no noise."""

    class Diverges(Heads):
        reads = ()

        def stages(self, state, facts):
            own, shared = super().stages(state, facts)
            return replace(own, loss=lambda *given: self.task_loss(*given) * value), shared

    job = make_private("fedper", rounds=2)
    first, _ = run(job, Diverges(job.setting()))
    assert not any(taint.exact for taint in first.taints["extractor"].values())
    assert math.isfinite(first.report.loss)


def test_a_head_trained_after_all_has_left_is_free(make_private, make_data):
    class Last(Heads):
        """The head trains once, when no shared stage follows."""

        head_first = False

        def stages(self, state, facts):
            both = super().stages(state, facts)
            return both if facts.round == 1 else both[:1]

    job = make_private("fedper", rounds=2)
    outcomes = run(job, Last(job.setting()))
    assert not any(
        taint.exact for outcome in outcomes for taint in outcome.taints["extractor"].values()
    )


def test_a_stage_sees_what_it_names_and_no_more(make_private, make_job):
    class Peeks(Heads):
        reads = ()

        def stages(self, state, facts):
            frozen = state.parts["classifier"]["weight"]

            def penalty(parameters, context):
                return (frozen.sum() * parameters["extractor"]["fc1.weight"]).sum()

            own, shared = super().stages(state, facts)
            return own, replace(shared, penalty=penalty)

    job = make_private("fedper", rounds=4)
    with refused("stages with part 'classifier', in which records show"):
        run(job, Peeks(job.setting()))
    plain, data = make_job("fedper"), make_data(9)
    reaches = type("Reaches", (Heads,), {"reads": (), "loss": Heads.task_loss})(plain.setting())
    with pytest.raises(KeyError):  # in a plain job too: what is not named is not there
        local_round(reaches, plain, initial_state(reaches, "a"), 0, {}, data, data, "a")


def test_a_method_cannot_contribute_or_decide_by_what_has_no_noise(make_private):
    class Looks(Heads):
        reads = ()

        def contribute(self, state, facts):
            contribution = super().contribute(state, facts)["extractor"]
            factor = 2.0 if float(state.parts["classifier"]["weight"].sum()) > 0 else 1.0
            return {"extractor": Contribution(contribution.tensors, factor)}

    class Adds(Heads):
        reads = ()

        def contribute(self, state, facts):
            contribution = super().contribute(state, facts)["extractor"]
            first, value = next(iter(contribution.tensors.items()))
            added = torch.zeros_like(value)
            added.view(-1)[:1] += state.parts["classifier"]["bias"][:1]
            tensors = {**contribution.tensors, first: value + added}
            return {"extractor": Contribution(tensors, contribution.weight)}

    job = make_private("fedper", rounds=4)
    with refused(r"takes a value out of a tensor in which records show unprotected \(__float__"):
        run(job, Looks(job.setting()))
    outcome = run(job, Adds(job.setting()))[0]
    assert [taint.exact for taint in outcome.taints["extractor"].values()].count(True) == 1


def test_pre_trained_weights_are_private_unless_they_are_said_to_be_public(make_private):
    job = make_private("fedssa")
    method = job.method()
    weights = {"extractor": initial_state(method, "b").parts["extractor"]}
    for public, expected in (((), True), (("extractor",), False)):
        state = initial_state(method, "a", weights, public)
        assert state.taint("part/extractor/conv1.weight").exact is expected
        assert state.taint("part/classifier/weight") == PUBLIC
        assert one_round(job, state=state).taints["rows"]["rows"].exact is expected
    # a state whose taints are not known
    lost = replace(initial_state(method, "a", public=()), taints={})
    assert one_round(job, state=lost).taints["rows"]["rows"].exact


def test_a_state_that_contribute_returns_has_the_taints_of_what_it_was_computed_of(make_private):
    """The number of steps is that of the rate, whatever the records."""

    class Keeping(FedPer):
        def initial_extra(self, silo):
            return {"bias": torch.zeros(3), "still": torch.zeros(3)}

        def contribute(self, state, facts):
            bias = state.parts["classifier"]["bias"] / facts.steps
            extra = {**state.extra, "bias": bias + state.extra["still"]}
            made = super().contribute(state, facts)
            return ContributionsAndState(made, SiloState(state.parts, extra))

    job = make_private("fedper")
    method = Keeping(job.setting())
    outcome = one_round(job, method)
    found = outcome.state.taints
    assert found.keys() == outcome.state.flat.keys()
    assert found["extra/bias"] == found["part/classifier/bias"] == paid(0, 1)
    assert found["extra/still"] == PUBLIC
    steps = math.ceil(1 / job.private.sample_rate)
    held = outcome.state.parts["classifier"]["bias"]
    assert torch.allclose(outcome.state.extra["bias"], held / steps)


def test_a_buffer_that_training_changes_is_private(make_private):
    """No noise reaches it; batch norm's are refused with the job."""

    class Buffered(FedPer):
        def modules(self, silo):
            modules = super().modules(silo)
            for name in ("seen", "fixed"):
                modules["extractor"].register_buffer(name, torch.zeros(1))
            return modules

    job = make_private("fedper")
    method = Buffered(job.setting())
    private = PrivateRound(method, job, "a", 0, make_data(24), silo_of(job))
    state = private.deliver(initial_state(method, "a", public=()), {})
    modules = rounds.to_modules(method, "a", state)
    buffers = modules["extractor"].named_buffers()
    before = {f"extractor.{name}": buffer.clone() for name, buffer in buffers}
    modules["extractor"].seen += 1
    (stage,) = private.stages(state)
    private.trained(stage, modules, before)
    taints = private.keep(rounds.to_state(modules, state)).taints
    expected = {"seen": EXACT, "fixed": PUBLIC, "fc1.weight": paid(0, 1)}
    assert {name: taints[f"part/extractor/{name}"] for name in expected} == expected
    with pytest.raises(ValidationError, match="batch"):
        make_private("fedper", model={"norm": "batch"})


def test_taints_are_kept_with_the_state(make_private, make_job):
    job = make_private("fedper", rounds=4)
    state = run(job, type("Right", (Heads,), {"reads": ()})(job.setting()), 1)[0].state
    kept = state_from_bytes(state_to_bytes(state)).taints
    private = {name: EXACT for name, taint in state.taints.items() if taint.exact}
    assert kept == {**state.taints, **private}
    assert {taint.name for taint in kept.values()} == {"noised", "exact"}
    plain = state_to_bytes(initial_state(make_job("fedper").method(), "a"))
    assert rounds.TAINTS not in tensor_file.metadata_of(plain)
    assert state_from_bytes(plain).taints == {}
    lies = {rounds.TAINTS: taints_to_text(state.taints).replace("[null,", "[true,")}
    with refused("not a state file: no taint"):
        state_from_bytes(tensor_file.to_bytes(state.flat, lies))


# What a method learns, and what is released of the counts.


def with_counts(*counts):
    """Records with so many of each class."""
    y = torch.cat([torch.full((n,), c) for c, n in enumerate(counts)])
    return Dataset(torch.zeros(len(y), 1, 8, 8) + y.reshape(-1, 1, 1, 1), y)


def test_counts_are_drawn_once_kept_and_sent_again_for_free(make_private, make_data):
    job = make_private("fedsimsup", {"tau_s": 1, "tau_theta": 1})
    account = MemoryAccount(job)
    first = release_counts(job, 0, make_data(24), silo_of(job, Seeded(1), account))
    assert account.spendings[0].taken == {"histogram": 1}
    again = release_counts(job, 2, make_data(60), silo_of(job, Seeded(2), account))
    assert again is first
    assert len(account.spendings) == 1


@pytest.mark.parametrize("record", range(3))
def test_counts_differ_by_one_record_by_one(make_private, record):
    """Sensitivity by brute force: the same noise on neighbouring data sets."""
    job = make_private("fedavg", {}, {"histogram_sigma": 0.25})
    counts = [5, 6, 7]
    one = release_counts(job, 0, with_counts(*counts), silo_of(job, Still(1.0)))
    counts[record] -= 1
    other = release_counts(job, 0, with_counts(*counts), silo_of(job, Still(1.0)))
    assert (one.counts - other.counts).double().norm() == 1
    assert one.counts.tolist() == [5, 6, 7]
    noisy = release_counts(job, 0, with_counts(5, 6, 7), silo_of(job, Still(8.0)))
    assert noisy.counts.tolist() == [7, 8, 9]


def test_a_class_is_absent_below_three_standard_deviations(make_private):
    job = make_private("fedavg", {}, {"histogram_sigma": 2.0})
    found = release_counts(job, 0, with_counts(0, 5, 6), silo_of(job, Still(0.0)))
    assert found.counts.tolist() == [0, 0, 6]
    noise = Seeded(3)
    shown = [
        bool(release_counts(job, 0, with_counts(0, 40), silo_of(job, noise)).counts[[0, 2]].any())
        for _ in range(400)
    ]
    assert sum(shown) <= 5  # 2 in 741 are expected


def test_too_few_records_for_the_noise_are_said_to_be(make_private):
    job = make_private("fedavg", {}, {"histogram_sigma": 100.0})
    account = MemoryAccount(job)
    with refused(r"histogram_sigma = 100, no count of training records reaches the 300"):
        one_round(job, private=silo_of(job, Still(), account), train=9)
    assert [dict(spending.taken) for spending in account.spendings] == [{"histogram": 1}]


def test_nothing_but_the_noisy_counts_reaches_a_method(make_private):
    """Security rule 21: whatever the records are, a method is handed the same."""
    seen = []

    class Recording(FedPer):
        """Its facts are the last argument of each of these."""

        def __getattribute__(self, name):
            found = super().__getattribute__(name)
            if name not in ("deliver", "stages", "contribute"):
                return found
            return lambda *given: (
                seen.append((name, given[-1].samples, given[-1].class_counts.tolist()))
                or found(*given)
            )

    job = make_private("fedper")
    method, heard = Recording(job.setting()), []
    for records in (with_counts(3, 30, 2), with_counts(50)):
        private = with_noisy(job, [4, 0, 9])
        outcome = one_round(job, method, private, train=records, test=records)
        final_round(method, job, outcome.state, {}, records, records, "a", private=private)
        heard.append(list(seen))
        seen.clear()
        assert outcome.contributions["extractor"].weight == 13.0
    assert heard[0] == heard[1]
    assert {(samples, tuple(counts)) for _, samples, counts in heard[0]} == {(13, (4, 0, 9))}
    assert [name for name, *_ in heard[0]] == ["deliver", "stages", "contribute", "deliver"]


def test_a_step_is_divided_by_the_noisy_counts(make_private):
    """Security rule 22: by q times their sum, whatever the number of records is."""
    job, moved = make_private("fedavg", {}, {"sigma": "0", "sample_rate": 1.0}), []
    state = initial_state(job.method(), "a", public=())
    for counts in ([10, 2, 0], [20, 1, 3]):
        private = with_noisy(job, counts, Still(), Free(job))
        after = one_round(job, private=private, state=state, train=17).state
        moved.append(after.parts["classifier"]["weight"] - state.parts["classifier"]["weight"])
    assert torch.allclose(moved[0], 2 * moved[1], atol=1e-7)
    assert moved[0].abs().max() > 1e-3


def test_a_silo_that_never_trained_spends_nothing_for_the_last_delivery(make_private, make_data):
    job, data = make_private("fedssa"), make_data(9)
    method, account = job.method(), MemoryAccount(job)
    state, private = initial_state(method, "a", public=()), silo_of(job, account=account)
    header = {"rows": torch.ones_like(method.initial), "status": torch.full((3,), 2)}
    end = final_round(method, job, state, {"header": header}, data, data, "a", False, private).state
    # no class seen
    assert torch.equal(end.parts["classifier"]["bias"], state.parts["classifier"]["bias"])
    assert not account.spendings
    assert account.counts() is None
    assert set(end.taints.values()) == {PUBLIC}


# Sensitivities and sizes of noise.


def test_what_a_record_adds_to_a_statistic_is_cut(make_private, make_data):
    """FedAIMS's sums of features: with a record and without, all classes together."""
    job = make_private("fedaims")
    method, data = job.method(), make_data(10)
    modules = rounds.to_modules(method, "a", initial_state(method, "a"))
    bound = 0.4
    whole = measured(method, modules, data, bound)
    uncut = measured(method, modules, data, 64.0)
    with torch.no_grad():
        expected = method.measure(modules, data.x, data.y)["sums"]
    assert torch.allclose(uncut["sums"], expected, atol=1e-6)
    moved = []
    for record in range(10):
        less = measured(method, modules, data.take(np.delete(np.arange(10), record)), bound)
        moved.append(float((whole["sums"] - less["sums"]).norm()))
    assert max(moved) <= bound * (1 + 1e-12)
    assert max(moved) > 0.99 * bound


def measured(method, modules, data, clip):
    """The sums without noise."""
    table = PrivacyTable(
        **{**PRIVACY, "statistics_clip": clip, "statistics_sigma": 1.0, "physical_batch": 16}
    )
    return noisy_measure(method, modules, data, table, Still())


def test_test_records_are_classified_in_calls_of_one_size(make_private, make_data):
    """So that no record's class, which may hang on a last bit, depends on how many others there
    are.
    """
    sizes = set()

    class Watched(FedPer):
        def predict(self, parts, x):
            if not any(module.training for module in parts.values()):
                sizes.add(len(x))
            return super().predict(parts, x)

    job = make_private("fedper", privacy={"physical_batch": 16})
    method, tests = Watched(job.setting()), make_data(37, 1)
    outcome = one_round(job, method, test=tests)
    assert sizes == {16}
    modules = rounds.to_modules(method, "a", outcome.state)
    assert outcome.report.trained.correct == evaluate(method, modules, tests, job.counting).correct


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_record_whose_share_is_no_number_adds_nothing(make_private, make_data, value):
    class Sums(FedPer):
        def measure(self, parts, x, y):
            return {"x": x.sum((0, 1)), "y": y.sum()}

    method, data = Sums(make_private("fedper").setting()), make_data(5)
    data.x[2, 0, 3, 3] = value
    found = measured(method, {}, data, 128.0)
    others = data.take(np.array([0, 1, 3, 4]))
    assert torch.allclose(found["x"], others.x.double().sum((0, 1)))
    assert found["y"] == others.y.sum()


def test_noise_of_statistics_and_metrics_has_the_size_that_is_said(make_private):
    more = {"statistics_clip": 3.0, "statistics_sigma": 7.0, "metrics_sigma": 4.0}
    job = make_private("fedaims", {}, {**more, "sigma": "0.001"})
    silos = [with_noisy(job, [4, 4, 4], Still(each), Free(job)) for each in (0.0, 1.0)]
    made = [one_round(job, private=private, train=12, test=50) for private in silos]
    still, shifted = (outcome.contributions["prototypes"].tensors["mean"] * 4 for outcome in made)
    assert torch.allclose(shifted - still, torch.full_like(still, 21.0), atol=1e-4)
    assert made[0].contributions["metrics"].tensors["tested"] == 50
    assert made[1].contributions["metrics"].tensors["tested"] == 50 + round(4 * 3**0.5)
    assert made[1].report.tested == 50


def test_a_class_that_seems_absent_gives_no_prototype(make_private):
    job = make_private("fedaims")
    made = one_round(job, private=with_noisy(job, [4, 0, 9])).contributions["prototypes"]
    assert made.tensors["mean"].any(1).tolist() == [True, False, True]
    assert made.weight.tolist() == [4.0, 0.0, 9.0]


def test_noisy_metrics_are_counts_still(make_private):
    job = make_private("local", {}, {"metrics_sigma": 30.0}, rounds=40)
    private, seen = silo_of(job), []
    for round_ in range(25):
        made = one_round(job, private=private, round_=round_, train=9, test=4)
        counts = made.contributions["metrics"].tensors
        assert {count.dtype for count in counts.values()} == {torch.int64}
        assert all(0 <= int(counts[name]) <= int(counts["tested"]) for name in counts)
        seen.append(int(counts["tested"]))
    assert 0 in seen
    assert max(seen) > 4


def test_each_count_has_noise_for_all_that_one_record_changes(make_private):
    """Every draw is 1, so the noise is its standard deviation: 4 · √(3 + 2 + 2 · 3)."""
    tables = {"confusion": True, "score_bins": 5}
    job = make_private("local", {}, {"metrics_sigma": 4.0}, metrics=tables)
    made = one_round(job, private=silo_of(job, Still(1.0)), test=9)
    exact = made.report.trained
    noise = 4.0 * math.sqrt(3 + 2 + 2 * 3)
    tested = round(9 + noise)
    assert int(made.contributions["metrics"].tensors["tested"]) == tested
    for name in ("confusion", "scores"):
        found = made.contributions[name].tensors["trained"].numpy()
        assert (found == np.round(exact.asked[name] + noise)).all()
        assert set(made.taints[name].values()) == set(made.taints["metrics"].values())
    assert made.taints["confusion"].keys() == {"delivered", "trained"}
    kept = make_private("local", {}, {}, metrics=tables)
    quiet = one_round(kept, private=silo_of(kept, Still(1.0)), test=9).contributions
    assert not any(
        count.any() for name in tables_of(kept) for count in quiet[name].tensors.values()
    )


@pytest.mark.parametrize("kind", TASKS)
def test_each_sum_of_other_tasks_has_noise_in_its_unit(kind):
    """Every draw is 1: a sum's noise is the standard deviation, times what one record adds."""
    privacy = {**PRIVACY, "metrics_sigma": 4.0}
    job = Job.from_file(JobFile.model_validate(document(kind, privacy=privacy)), "test")
    train, test = shards(kind)["a"]
    made = one_round(job, private=silo_of(job, Still(1.0)), train=train, test=test)
    exact = job.counting.contributions(made.report.delivered, made.report.trained)
    noise = 4.0 * math.sqrt(job.counting.squared_sensitivity)
    tested = len(test) + noise
    for part, contribution in exact.items():
        for name, value in contribution.tensors.items():
            unit = job.counting.unit(part, name)
            wanted = value.double() + noise * unit
            if part == "metrics":
                wanted = wanted.clamp(max=round(tested) * unit)
            found = made.contributions[part].tensors[name]
            assert torch.equal(found, wanted.round().long()), (part, name)


def test_large_sums_are_not_rounded_before_the_noise(make_private):
    """In float32 a record could move a sum of so many by two."""
    job = make_private("local", {}, {"metrics_sigma": 4.0})
    side = PrivateRound(job.method(), job, "a", 0, make_data(9), silo_of(job, Still(0.0)))
    side.stages(side.deliver(initial_state(job.method(), "a", public=()), {}))
    many = 2**24 + 1
    names = ("correct.delivered", "correct.trained", "tested")
    found, _ = side.metrics({"metrics": Contribution(dict.fromkeys(names, torch.tensor(many)))})
    assert {int(count) for count in found["metrics"].tensors.values()} == {many}


def test_cells_of_a_private_table_may_fall_below_zero(make_private):
    """Set to zero silo by silo, the noise of many empty cells would add up to many records."""
    job = make_private("local", {}, {"metrics_sigma": 4.0}, metrics={"confusion": True})
    made = one_round(job, private=silo_of(job, Still(-1.0)), test=9)
    table = made.contributions["confusion"].tensors["trained"]
    assert table.min() == -round(4.0 * 5**0.5)
    assert int(made.contributions["metrics"].tensors["tested"]) == 0  # those stay shares


def tables_of(job):
    """The names of a job's parts of test counts."""
    return [part.name for part in job.up(0) if part.kind is Kind.METRIC]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("method", ["fedavg", "pfedsim", "fedaims"])
def test_lazy_records_give_the_same_private_round(make_private, make_shards, method, workers):
    """Records are drawn step by step however many processes read them."""
    job = make_private(method, rounds=2)
    shards = make_shards(job)
    lazy = {silo: [lazily(side, workers) for side in sides] for silo, sides in shards.items()}
    (one, paid), (other, paid_again) = simulated(job, shards), simulated(job, lazy)
    assert one.history == other.history
    assert all(state_to_bytes(one.states[s]) == state_to_bytes(other.states[s]) for s in job.silos)
    taken = [
        [[dict(spending.taken) for spending in own.spendings] for own in accounts.values()]
        for accounts in (paid, paid_again)
    ]
    assert taken[0] == taken[1]


def test_what_was_paid_for_is_kept_whoever_asks_to_stop_after_the_last_step(make_private):
    job, done = make_private("fedavg", rounds=1), []
    asks = {
        "cancelled": lambda: bool(done),
        "progress": lambda n, all_: done.extend([1] * (n == all_)),
    }
    outcome = local_round(
        job.method(), job, initial_state(job.method(), "a", public=()), 0, {}, make_data(24),
        make_data(9), "a", private=silo_of(job), **asks,
    )  # fmt: skip
    assert done
    assert outcome.spending is not None
    plain = make_job("fedavg")
    done.clear()
    with pytest.raises(CancelledError):
        local_round(
            plain.method(), plain, initial_state(plain.method(), "a"), 0, {}, make_data(24),
            make_data(9), "a", **asks,
        )  # fmt: skip


@pytest.mark.parametrize("workers", [0, 1])
def test_a_record_that_cannot_be_read_adds_nothing_and_ends_no_round(
    make_private, make_shards, workers
):
    """A round that failed would tell that the record was drawn."""
    job = make_private("fedavg", rounds=2)
    shards = make_shards(job)
    spoilt, lazy = {}, {}
    for silo, sides in shards.items():
        spoilt[silo], lazy[silo] = [], []
        for data in sides:
            x = data.x.clone()
            x[[1, 4]] = torch.nan
            spoilt[silo].append(replace(data, x=x))
            lazy[silo].append(lazily(data, workers, unreadable=(1, 4)))
    outcomes = []
    for sides in (spoilt, lazy):
        train, test = sides["a"]
        private = silo_of(job, Seeded(3), MemoryAccount(job))
        outcomes.append(
            local_round(
                job.method(), job, initial_state(job.method(), "a", public=()), 0, {}, train, test,
                "a", private=private,
            )
        )  # fmt: skip
    one, other = outcomes
    assert state_to_bytes(one.state) == state_to_bytes(other.state)
    assert one.report == other.report
    # Elsewhere it is told.
    plain = make_job("fedavg")
    with refused("record [14] cannot be read"):
        local_round(
            plain.method(), plain, initial_state(plain.method(), "a"), 0, {}, *lazy["a"], "a"
        )


def test_the_noise_of_a_job_is_never_the_same(make_private, make_shards):
    """The seed of the job has no part in it; that of these tests' random numbers has."""
    from staddle.security.dp.noise import Randomness  # noqa: PLC0415 - algorithms do not know it

    job = make_private("fedavg", rounds=1)
    fresh = lambda _: PrivateSilo(MemoryAccount(job), Randomness)
    ends = [simulate(job, make_shards(job), private=fresh).states["a"] for _ in range(2)]
    one, other = (end.parts["extractor"]["conv1.weight"] for end in ends)
    assert (one != other).all()


@pytest.mark.parametrize(
    ("name", "options", "optimiser"),
    [
        ("fedavg", {}, {}),
        # Adam divides by the gradient, and so makes much of its last bits where eps is small.
        ("fedavg", {}, {"optimiser": "adam", "eps": 0.01}),
        ("fedavg", {}, {"optimiser": "adamw", "eps": 0.01, "weight_decay": 0.1, "clip": 0.1}),
        ("pfedsim", {"rho": 0}, {}),
        ("fedssa", {"stale_inclusive": True}, {}),
        ("fedaims", {"sampling": "full"}, {}),
        ("fedsimsup", {"tau_s": 1, "tau_theta": 1}, {}),
        ("ppfl", {"lam": 0}, {}),
    ],
)
def test_without_noise_and_clip_a_round_is_a_plain_one(make_private, name, options, optimiser):
    """Security rule 26: within 1e-8 in float64 on the same batches, all that leaves and all that
    stays.

    Sums are in fixed point, and what FedAIMS gives of them in float32.
    """
    privacy = {"sigma": "0", "clip": 64.0, "statistics_clip": 64.0, "sample_rate": 1.0}
    privacy["metrics_sigma"] = 1e-9
    private = make_private(name, options, privacy, training={"epochs": 2, **optimiser})
    training = private.training.model_copy(update={"batch_size": 24})
    plain = replace(private, privacy=None, training=training)
    records, outcomes = make_data(24), []
    data = Wide(records.x.double(), records.y)
    for job in (private, plain):
        method = job.method()
        members = {"modules": in_float64, "initial_extra": extra_in_float64}
        method = type("Wide", (type(method),), members)(job.setting(), method.options)
        paying = silo_of(job, Still(), Free(job)) if job is private else None
        state = initial_state(method, "a", public=() if paying else None)
        outcomes.append(local_round(method, job, state, 1, {}, data, data, "a", private=paying))
    one, other = outcomes
    assert_close(one.state.flat, other.state.flat, atol=1e-8, rtol=0)
    moved = [(value - state.flat[name]).abs().max() for name, value in one.state.flat.items()]
    assert max(moved) > 1e-4
    for part, contribution in one.contributions.items():
        expected = other.contributions[part]
        assert_close(contribution.tensors, expected.tensors, atol=1e-7, rtol=0)
        weights = [each.weight for each in (contribution, expected)]
        assert torch.equal(*(torch.as_tensor(0.0 if w is None else w) for w in weights))
    assert one.report == replace(other.report, loss=one.report.loss, work=None)
    assert one.report.loss == pytest.approx(other.report.loss, rel=1e-9)


def in_float64(self, silo):
    return {part: module.double() for part, module in super(type(self), self).modules(silo).items()}


def extra_in_float64(self, silo):
    extra = super(type(self), self).initial_extra(silo)
    return {n: v.double() if v.is_floating_point() else v for n, v in extra.items()}


class Wide:
    """A data set in float64."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.y)

    def take(self, index):
        return Wide(self.x[index], self.y[index])


# What is refused.


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda stages: stages * 2,
            r"take 2 epochs, 0 steps on all records and 0 with.* effort\(\).* says 1, 0 and 0"),
        (lambda stages: tuple(replace(stage, coupled=True) for stage in stages),
            r"'fedper' trains a stage that is coupled: there a record moves"),
    ],
)  # fmt: skip
def test_stages_that_cannot_be_paid_for_are_refused_before_they_train(make_private, change, said):
    """More than the method says, and coupled ones."""

    class Changed(FedPer):
        def stages(self, state, facts):
            return change(super().stages(state, facts))

    job = make_private("fedper")
    account = MemoryAccount(job)
    with refused(said):
        one_round(job, Changed(job.setting()), silo_of(job, account=account))
    assert not account.spendings[-1].taken


def test_an_account_holds_a_job_to_what_it_planned(make_private):
    job = make_private("fedavg", rounds=5)  # and one more for what a crash interrupts
    account = MemoryAccount(job)
    private = silo_of(job, account=account)
    for _ in range(6):
        outcome = one_round(job, private=private)
        account.commit(outcome.spending)
    said = r"round 0 of job 'test' takes 2 steps for 'training', of those planned 0"
    with pytest.raises(ExhaustedError, match=said):
        one_round(job, private=private)
    with pytest.raises(ExhaustedError, match="holds no more steps for 'training'"):
        outcome.spending.take("training")


def test_what_was_not_taken_is_free_again(make_private):
    job = make_private("fedavg", rounds=1)
    account, spends = MemoryAccount(job), round_spends(job, 0, "1.0")
    for taken in (0, 1):  # 2 steps and one more are planned
        spending = account.reserve(0, spends)
        for _ in range(taken):
            spending.take("training")
        account.commit(spending)
    account.reserve(0, spends)
    with pytest.raises(ExhaustedError):
        account.reserve(0, spends)


def test_a_private_job_and_no_other_takes_accounts(make_private, make_job, make_shards):
    private, plain = make_private("fedavg"), make_job("fedavg")
    with refused(r"has a \[privacy\] table; pass simulate\(\) the accounts"):
        simulate(private, make_shards(private))
    with refused(r"has no \[privacy\] table; pass no accounts"):
        simulate(plain, make_shards(plain), private=lambda _: silo_of(private))
    data = make_shards(plain)["a"]
    state = initial_state(plain.method(), "a")
    for job, paying in ((private, None), (plain, silo_of(private))):
        with refused("a bug in Staddle"):
            local_round(job.method(), job, state, 0, {}, *data, "a", private=paying)
        with refused("a bug in Staddle"):
            final_round(job.method(), job, state, {}, *data, "a", private=paying)
    unsigned = replace(private, privacy=private.private.model_copy(update={"sigma": None}))
    with refused(r"job 'test' has no privacy\.sigma yet; sign the job"):
        MemoryAccount(unsigned)


def test_an_option_that_bounds_no_influence_is_refused(make_private):
    with refused(r'\[privacy\] with method \'fedaims\': reduction = "sum" lets a record'):
        make_private("fedaims", {"reduction": "sum"}).method()


def test_a_method_that_cannot_be_measured_record_by_record_says_so(make_private, make_data):
    class Odd(FedPer):
        def effort(self, round_):
            return Effort(epochs=1, measures=True)

        def measure(self, parts, x, y):
            return {"sums": x.sum() if x.sum() > 0 else -x.sum()}

    job = make_private("fedper")
    method = Odd(job.setting())
    modules = rounds.to_modules(method, "a", initial_state(method, "a"))
    with refused("method 'fedper' cannot measure record by record"):
        measured(method, modules, make_data(3), 1.0)


def test_a_stage_names_what_it_reads():
    stage = Stage(("a",), 1, lambda *_: None, None, reads=("b",))
    modules = {name: nn.Identity() for name in "abc"}
    assert set(rounds.handed(modules, stage)) == {"a", "b"}
    assert set(rounds.handed(modules, replace(stage, reads=None))) == {"a", "b", "c"}
