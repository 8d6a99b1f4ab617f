"""A silo's round with surveys and changes between its stages, and a round that tunes, by each
engine.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.refusals import refused
from support.whole_jobs import trained

from staddle.algorithms import catalog
from staddle.algorithms.course import Change, ContributionsAndState, Optimiser, Survey
from staddle.algorithms.engines.engine import Records, Serial
from staddle.algorithms.engines.simulation import Simulation, simulate
from staddle.algorithms.engines.vmap_engine import Stacked
from staddle.algorithms.exchange.parts import Contribution, Kind, Part, Sum, TensorSpec
from staddle.algorithms.job.class_census import COUNTED, SAID
from staddle.algorithms.method import Method
from staddle.algorithms.methods.fedavg import FedAvg
from staddle.algorithms.tasks.table_counting import RIGHT
from staddle.algorithms.training.accountant import MemoryAccount, PrivateSilo


class Surveying(Method):
    """Trains; sums its classifier's biases over its records; halves them; surveys again; trains.

    Gives the sums.
    """

    name, version = "surveying", 1
    specs = tuple(TensorSpec(name, "float64", ()) for name in ("one", "two", "all"))
    sums = Part("sums", Kind.COUNTS, Sum("total"), specs)

    def up(self, round_):
        return (self.sums,)

    def down(self, round_):
        return ()

    def stages(self, state, facts):
        still = replace(self.stage("extractor", "classifier"), optimiser=Optimiser(1e-30), epochs=1)
        rise = replace(
            still, trains=("classifier",), loss=self.bias, optimiser=Optimiser(1.0), full_batch=True
        )
        seen = (Survey(self.first), Change(self.halved), Survey(self.second))
        return (rise, *seen, still, Change(self.noted))

    def bias(self, parts, x, y, context):
        return self.predict(parts, x).sum(1) * 0 - self.biases(parts).expand(len(x))

    def first(self, parts, x, y):
        return {"one": self.biases(parts) * len(x), "all": torch.ones(()) * len(x)}

    def second(self, parts, x, y):
        return {"two": self.biases(parts) * len(x)}

    def biases(self, parts):
        return parts["classifier"](torch.zeros(1, 64)).sum()

    def halved(self, state, facts):
        assert facts.measured.keys() == {"one", "all"}
        classifier = {**state.parts["classifier"], "bias": state.parts["classifier"]["bias"] / 2}
        return replace(state, parts={**state.parts, "classifier": classifier})

    def noted(self, state, facts):
        return replace(state, extra={"seen": facts.measured["all"].clone()})

    def contribute(self, state, facts):
        assert state.extra["seen"] == facts.samples
        return {"sums": Contribution({n: facts.measured[n].clone() for n in ("one", "two", "all")})}


class Keeping(FedAvg):
    """FedAvg that keeps how far it came, and how it was trained, next to what it gives."""

    name = "keeping"

    def initial_extra(self, silo):
        return {"steps": torch.tensor(0), "lr": torch.tensor(0.0), "bias": torch.zeros(3)}

    def contribute(self, state, facts):
        bias = state.parts["classifier"]["bias"]
        extra = {
            "steps": state.extra["steps"] + facts.steps,
            "lr": torch.tensor(facts.lr),
            "bias": bias + state.extra["bias"],
        }
        made = super().contribute(state, facts)
        return ContributionsAndState(made, replace(state, extra=extra))


class Losing(FedAvg):
    """Returns a state as well, in a form that nobody takes."""

    name = "losing"

    def contribute(self, state, facts):
        return super().contribute(state, facts), state


class Tuning(FedAvg):
    """FedAvg that every silo trains for itself in the end."""

    name, tunes, product = "tuning", True, "trained"

    def up(self, round_):
        return () if self.tuning(round_) else super().up(round_)

    def contribute(self, state, facts):
        return {} if self.tuning(facts.round) else super().contribute(state, facts)


class ByClass(Surveying):
    """The same, with a row a class, which a blind job counts first."""

    name = "by-class"

    def by_class(self, round_):
        return ("sums",)


class CountedKeeping(Keeping):
    """The same, with a part that is summed class by class."""

    name = "counted-keeping"
    rows = Part("rows", Kind.COUNTS, Sum("total"), (TensorSpec("rows", "float64", (3,)),))

    def up(self, round_):
        return (self.model, self.rows)

    def contribute(self, state, facts):
        made = super().contribute(state, facts)
        rows = {"rows": Contribution({"rows": facts.class_counts.double()})}
        return replace(made, contributions={**made.contributions, **rows})

    def by_class(self, round_):
        return ("rows",)


@pytest.fixture(autouse=True)
def known(monkeypatch):
    for method in (Surveying, Keeping, Losing, CountedKeeping, Tuning, ByClass):
        monkeypatch.setitem(catalog.METHODS, method.name, method)


@pytest.fixture(params=[Serial, Stacked], ids=["one by one", "at once"])
def engine(request):
    return request.param


def test_surveys_see_the_model_as_it_is_then_and_changes_take_part_in_it(
    make_job, make_shards, engine
):
    """The loss falls by 1 for each of three biases: one step of 1 raises their sum by 3; then it is
    halved.
    """
    told = {}

    class Listening(Surveying):
        def combine(self, state, round_, cohort, results):
            told.update({name: value.item() for name, value in results["sums"].items()})
            return super().combine(state, round_, cohort, results)

    catalog.METHODS["surveying"] = Listening
    job = make_job("surveying", rounds=1)
    records = {silo: Records(*sides) for silo, sides in make_shards(job).items()}
    simulation = Simulation(job, engine(job, records))
    start = simulation.states["a"].parts["classifier"]["bias"].double().sum().item()
    simulation.step()
    for silo, state in simulation.states.items():
        held = state.parts["classifier"]["bias"].double().sum().item()
        assert held == pytest.approx((start + 3) / 2, rel=1e-5)
        assert state.extra["seen"].item() == len(records[silo].train)
    n = sum(len(own.train) for own in records.values())
    expected = {"one": n * (start + 3), "two": n * (start + 3) / 2, "all": n}
    assert told == pytest.approx(expected, rel=1e-5)


def test_a_counted_method_changes_its_state_as_if_nothing_was_counted(make_job, make_shards):
    security = {"secure_aggregation": "required"}
    job = make_job("by-class", rounds=1, silos=list("abcd"), min_cohort=3, security=security)
    assert job.counted
    for state in trained(job, make_shards(job)).states.values():
        assert state.extra.keys() == {"seen", SAID, COUNTED}


def test_what_contribute_returns_next_to_its_contributions_is_kept(make_job, make_shards, engine):
    """24, 29 and 34 records in batches of 8, at a rate that falls by half."""
    schedule = {"kind": "exponential", "factor": 0.5}
    job = make_job("keeping", rounds=3, training={"schedule": schedule})
    records = {silo: Records(*sides) for silo, sides in make_shards(job).items()}
    simulation, biases = Simulation(job, engine(job, records)), []
    for _ in range(3):
        simulation.step()
        biases.append({s: own.parts["classifier"]["bias"] for s, own in simulation.states.items()})
    for silo, steps in {"a": 9, "b": 12, "c": 15}.items():
        kept = simulation.states[silo].extra
        assert kept["steps"].item() == steps
        assert kept["lr"].item() == pytest.approx(0.1 * 0.25)
        assert torch.allclose(kept["bias"], sum(each[silo] for each in biases))


def test_a_counted_method_keeps_it_too(make_job, make_shards):
    security = {"secure_aggregation": "required"}
    job = make_job("counted-keeping", rounds=2, silos=list("abcd"), min_cohort=3, security=security)
    assert job.counted
    state = trained(job, make_shards(job)).states["a"]
    assert state.extra.keys() == {"steps", "lr", "bias", SAID, COUNTED}
    assert state.extra["steps"].item() == 6


def test_what_nobody_takes_is_an_error_and_says_what_to_return(make_job, make_shards, engine):
    job = make_job("losing", rounds=1)
    records = {silo: Records(*sides) for silo, sides in make_shards(job).items()}
    with refused(
        r"contribute of method 'losing' returned a tuple; .*"
        r"ContributionsAndState\(contributions, state\)"
    ):
        Simulation(job, engine(job, records)).step()


def test_a_state_without_the_models_parts_is_an_error(make_job, make_shards, monkeypatch):
    def emptied(self, state, facts):
        return ContributionsAndState({}, replace(state, parts={}))

    monkeypatch.setattr(Keeping, "contribute", emptied)
    job = make_job("keeping", rounds=1)
    with refused(r"returned a state with parts \[\], the model has \['classifier', 'extractor'\]"):
        trained(job, make_shards(job))


def test_a_private_job_refuses_what_it_does_not_pay_for(make_job, make_shards):
    class Still:
        def normal(self, count):
            return np.zeros(count)

        def drawn(self, records, q):
            return np.arange(records)

    privacy = {"epsilon": 8.0, "delta": 1e-5, "sample_rate": 0.5, "sigma": "1.0"}
    privacy["histogram_sigma"] = 0.5
    job = make_job("surveying", rounds=1, privacy=privacy)
    with refused("'surveying' surveys records or changes the model between two stages"):
        simulate(job, make_shards(job), private=lambda _: PrivateSilo(MemoryAccount(job), Still))


def test_a_round_that_tunes_takes_all_silos_and_uploads_nothing(make_job, make_shards, engine):
    fields = {"rounds": 2, "participation": 0.34, "min_cohort": 1}
    job, average = (make_job(name, **fields) for name in ("tuning", "fedavg"))
    assert (job.length, [len(job.cohort(round_)) for round_ in range(3)]) == (3, [1, 1, 3])
    names = [[part.name for part in job.up(round_)] for round_ in range(4)]
    assert names == [["model", RIGHT.name], ["model", RIGHT.name], [RIGHT.name], []]
    records = {silo: Records(*sides) for silo, sides in make_shards(job).items()}
    simulation, weight = Simulation(job, engine(job, records)), "part/classifier/weight"
    for _ in range(3):
        simulation.step()
    last = simulation.look()
    shared = last["a"].delivered.flat[weight]
    plain = simulate(average, make_shards(job)).states["a"]
    assert torch.allclose(shared, plain.flat[weight], atol=1e-6)
    own = [simulation.states[silo].flat[weight] for silo in job.silos]
    assert not any(torch.allclose(shared, each) for each in own)  # each trained it on
    simulation.finish(last)
    assert torch.equal(simulation.states["b"].flat[weight], own[1])  # and keeps it


def test_rounds_before_count_those_that_train(make_job):
    census = make_job("fedsimsup", silos=list("abcdef"), participation=0.5, rounds=3)
    tunes = make_job("tuning", rounds=3)
    assert [census.rounds_before(round_) for round_ in range(5)] == [0, 0, 1, 2, 3]
    assert [tunes.rounds_before(round_) for round_ in range(5)] == [0, 1, 2, 3, 3]


def test_what_is_trained_stays_within_its_bounds(make_job, make_shards, engine):
    class Bounded(Tuning):
        def stages(self, state, facts):
            (stage,) = super().stages(state, facts)
            far = replace(stage.optimiser, lr=100.0, momentum=0.9, within=(-0.5, 0.25))
            return (replace(stage, optimiser=far),)

    catalog.METHODS["tuning"] = Bounded
    job = make_job("tuning", rounds=1)
    records = {silo: Records(*sides) for silo, sides in make_shards(job).items()}
    simulation = Simulation(job, engine(job, records))
    simulation.step()
    values = torch.cat([tensor.flatten() for name, tensor in simulation.states["a"].flat.items()])
    assert (values.min().item(), values.max().item()) == (-0.5, 0.25)
