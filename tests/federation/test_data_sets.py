"""Two silos that have two data sets each, and jobs on either."""

import pytest

from staddle.algorithms.data.dataset import save_npz, split
from staddle.algorithms.data.sources.public.bundled import Bundled
from staddle.algorithms.engines.simulation import simulate
from staddle.security.ledger import messages
from staddle.security.ledger.audit import ledger_folder
from staddle.silo import config as configs
from staddle.silo.admission import budget as budgets
from staddle.silo.job_folder import split_key

SILOS = ("north", "east")
FURTHER = """
[datasets.tumours]

[datasets.tumours.data]
file = "tumours.npz"
"""
GLM = {"name": "glm", "classes": 2, "input": [1, 1, 30]}
PRIVATE = {"epsilon": 50.0, "delta": 1e-5, "sample_rate": 0.2, "sigma": "1.2"}


def tumours(silo):
    """A silo's half of the records."""
    share = (SILOS.index(silo) + 1, len(SILOS))
    return Bundled(kind="bundled", name="breast-cancer", share=share).read()


@pytest.mark.timeout(180)
def test_each_job_trains_on_the_data_set_that_it_asks_for_and_costs_that_one_alone(start, document):
    running = start(*SILOS)
    digits = running.job(document("digits", SILOS, rounds=2))
    asked = {"model": GLM, "dataset": "tumours", "rounds": 2}
    plain = running.job({**document("tumours", SILOS), **asked})
    private = running.job({**document("private", SILOS), **asked, "privacy": PRIVATE})
    absent = running.job({**document("absent", SILOS), **asked, "dataset": "scans"})
    running.start_coordinator()
    running.jobs.remove(absent)
    for silo in SILOS:
        running.write_silo(silo)
        path = running.federation.silo_config(silo)
        path.write_text(path.read_text() + FURTHER)
        save_npz(path.parent / "tumours.npz", tumours(silo))
        running.start_silo(silo)
    running.completed()
    running.withdrawn(absent, *SILOS)
    running.stop()

    for silo in SILOS:
        (told,) = running.events(silo, "job.declined")
        assert "the job is for data set 'scans', and this silo has data, tumours" in told["why"]
    running.check_models(digits, simulate(digits, running.shards(SILOS)))
    shards = {
        silo: split(tumours(silo), split_key(running.federation.state(silo)), 0.25)
        for silo in SILOS
    }
    running.check_models(plain, simulate(plain, shards))

    # the ledger says whose records left, and a budget has what they cost alone
    expected = {digits.name: "data", plain.name: "tumours", private.name: "tumours"}
    for silo in SILOS:
        intents = running.records(silo, "egress.intent")
        assert {each["job"]: each["dataset"] for each in intents} == expected
        paid = [each for each in intents if each["dp"]]
        assert {(each["job"], each["dp"]["dataset"]) for each in paid} == {("private", "tumours")}
        totals = messages.summary(ledger_folder(running.federation.state(silo)), ("job", "dataset"))
        assert {key for key in totals if key[1]} == set(expected.items())
        config = configs.load(running.federation.silo_config(silo))
        found = {each.dataset: each.budget for each in budgets.read(config)}
        assert list(found) == ["tumours"]
        assert [spent.job for spent in found["tumours"].jobs] == ["private"]
    running.check_ledgers()


def test_a_silo_with_a_budget_for_each_opens_both(start, document):
    """A private job on one data set leaves the budget of the other as it is."""
    running = start(*SILOS)
    asked = {"model": GLM, "rounds": 1, "privacy": PRIVATE}
    first = running.job({**document("first", SILOS), **asked, "dataset": "tumours"})
    small = {**document("second", SILOS, rounds=1), "privacy": PRIVATE}
    second = running.job(small)
    running.start_coordinator()
    for silo in SILOS:
        running.write_silo(silo)
        path = running.federation.silo_config(silo)
        path.write_text(path.read_text() + FURTHER)
        save_npz(path.parent / "tumours.npz", tumours(silo))
        running.start_silo(silo)
    running.completed(120)
    running.stop()
    for silo in SILOS:
        paid = {
            each["job"]: each["dp"]["dataset"] for each in running.records(silo, "egress.intent")
        }
        assert paid == {first.name: "tumours", second.name: "data"}
        config = configs.load(running.federation.silo_config(silo))
        found = {each.dataset: each.budget.jobs for each in budgets.read(config)}
        assert {name: [spent.job for spent in jobs] for name, jobs in found.items()} == {
            "data": ["second"],
            "tumours": ["first"],
        }
    running.check_ledgers()
