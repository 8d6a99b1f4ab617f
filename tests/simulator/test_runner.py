import pytest
import torch

from staddle.algorithms.data import Dataset
from staddle.algorithms.engine import Records, Serial
from staddle.algorithms.job import Job, JobFile
from staddle.errors import CancelledError, LocalError
from staddle.simulator.history_file import read
from staddle.simulator.plan import Population, Run, Schedule
from staddle.simulator.run_folder import HISTORY, folder_of
from staddle.simulator.runner import complete
from staddle.simulator.stopping import Stop
from staddle.simulator.watch import Unwatched

SILOS = ("a", "b", "c", "d")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def population():
    def data(number, seed):
        rng = torch.Generator().manual_seed(seed)
        y = torch.randint(0, 3, (number,), generator=rng)
        return Dataset(torch.randn(number, 1, 8, 8, generator=rng) + y.view(-1, 1, 1, 1), y)

    records = {silo: Records(data(9, seed), data(5, 50 + seed)) for seed, silo in enumerate(SILOS)}
    return Population(records, 3, None, "00" * 32)


def a_run(method="pfedsim", **fields):
    document = {
        "version": 1,
        "name": "test",
        "seed": 7,
        "rounds": 4,
        "participation": 0.5,
        "silos": list(SILOS),
        "method": {"name": method},
        "model": {"name": "cnn-digits", "classes": 3},
        "training": {"epochs": 1, "batch_size": 8, "lr": 0.1},
        **fields,
    }
    return Run(method, 7, Job.from_file(JobFile.model_validate(document), "job.toml"))


class Asks(Unwatched):
    """Asks to stop when the n-th silo is done; tells what was shown."""

    def __init__(self, stop=None, at=0):
        self.stop, self.at, self.told = stop, at, []

    def begin(self, run, rounds):
        self.told.append(("begin", rounds))

    def work(self, doing, silos):
        self.told.append((doing, silos))

    def silo(self):
        self.at -= 1
        if not self.at:
            self.stop.ask()

    def round(self, rounds, measured):
        self.told.append((rounds, [one.measure for one in measured]))


def run_it(out, run, population, watch=None, stop=None, schedule=Schedule(2, 3), engine=None):  # noqa: B008
    make = engine or (lambda job: Serial(job, population.records))
    complete(out, run, population, schedule, make, watch or Unwatched(), stop or Stop())
    return results(folder_of(out, run))


def results(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "LOCK" and "checkpoint" not in str(path)
    }


def test_rounds_looks_and_results_come_in_their_order(tmp_path, population):
    watch, run = Asks(), a_run()
    files = run_it(tmp_path, run, population, watch)
    selected, looks = ["selected/before", "selected/after"], ["all/aggregated", "all/trained"]
    assert watch.told == [
        ("begin", 0),
        ("training", 2),
        (1, selected),
        ("training", 2),
        ("looking", 4),
        (2, selected + looks),
        ("training", 2),
        (3, selected),
        ("training", 2),
        ("looking", 4),
        (4, looks),
    ]
    history = [(one.rounds, one.measure) for one in read(folder_of(tmp_path, run) / HISTORY)]
    assert history == [(n, m) for n in range(1, 5) for m in selected + (looks if n % 2 == 0 else [])]
    assert {"rounds.csv", "silos.csv", "models/a.safetensors", "coordinator.safetensors"} <= set(files)
    again = Asks()
    assert run_it(tmp_path, run, population, again, engine=None) == files
    assert again.told == [("begin", 4)]


def test_a_census_is_a_round_that_measures_nothing(tmp_path, population):
    watch, run = Asks(), a_run("fedsimsup", rounds=2, participation=0.75)
    assert run.job.length == 3
    run_it(tmp_path, run, population, watch)
    assert [told[0] for told in watch.told] == ["begin", "training", "training", 1, "training", "looking", 2]
    assert {one.rounds for one in read(folder_of(tmp_path, run) / HISTORY)} == {1, 2}


@pytest.mark.parametrize("method", ["pfedsim", "fedsimsup"])
def test_stopped_anywhere_and_gone_on_with_it_ends_in_the_same_bytes(tmp_path, population, method):
    run = a_run(method, participation=0.75)
    whole = run_it(tmp_path / "whole", run, population)
    for at in (1, 4, 3, 5, 2, 6):  # silos until it is stopped, in training and in looks
        stop = Stop()
        with pytest.raises(CancelledError, match=f"^{method}, seed 7: stopped; the same command goes on after round "):
            run_it(tmp_path / "stopped", run, population, Asks(stop, at), stop)
    assert run_it(tmp_path / "stopped", run, population) == whole


def test_what_was_whole_when_it_was_stopped_is_not_run_again(tmp_path, population):
    run, stop = a_run(), Stop()
    with pytest.raises(CancelledError, match="after round 1 of 4"):
        run_it(tmp_path, run, population, Asks(stop, 4), stop)
    watch = Asks()
    run_it(tmp_path, run, population, watch)
    assert watch.told[0] == ("begin", 1)


def test_asked_between_two_rounds_it_ends_before_the_next(tmp_path, population):
    stop = Stop()
    stop.ask()
    with pytest.raises(CancelledError, match="after round 0 of 4"):
        run_it(tmp_path, a_run(), population, stop=stop)


def test_the_engine_is_closed_whatever_happens(tmp_path, population):
    closed = []

    class Broken(Serial):
        def train(self, round_, work, done):
            raise LocalError("broken")

        def close(self):
            closed.append(True)

    with pytest.raises(LocalError, match="broken"):
        run_it(tmp_path, a_run(), population, engine=lambda job: Broken(job, population.records))
    assert closed == [True]
