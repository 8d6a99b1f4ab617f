"""Two processes of torchrun against one: a launch that goes through all methods, and what ends one.

Of tests that start processes this is one of the longest, so there are few launches.
"""

import json
import os
from collections import Counter
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from subprocess import PIPE, Popen

import psutil
import pytest
from support import ranked_runs
from support.jobs import make_data, make_job
from support.ranked_runs import Seeded
from support.texts import texts

from staddle.algorithms.catalog import METHODS
from staddle.algorithms.method import initial_state
from staddle.algorithms.training.accountant import MemoryAccount, PrivateSilo
from staddle.algorithms.training.paid_ahead import pay
from staddle.errors import CancelledError, LocalError
from staddle.silo.training import launched
from staddle.silo.training.launched import OF_TORCHRUN, PROGRAM, TORCHRUN, TrainerProcesses
from staddle.silo.training.order import DeviceTable, OrderedRecords, OrderFolder
from staddle.silo.training.ranks import own_device
from staddle.silo.training.trainer import SiloRound, TrainingDevice

TESTS = Path(__file__).parents[2]
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join((str(TESTS), os.environ["PYTHONPATH"]))}
NOISE = {"epsilon": 60.0, "delta": 1e-5, "sample_rate": 0.25, "sigma": "0.8"}
NOISE |= {"clip": 0.5, "histogram_sigma": 0.5}
# what is added up in floats differs in the last bits, and in integers not at all
NEAR, EQUAL = 1e-5, 0.0

pytestmark = pytest.mark.timeout(600)


def ordered(method, **fields):
    """A round of a silo, as its agent orders it, and what was set aside for it."""
    model = {"name": "ppfl-mlp", "input": [1, 8, 8]}
    job = make_job(method, model=model, **fields).for_federation()
    of = OrderedRecords(job, make_data(21), make_data(8, 1))
    asked, paid = SiloRound(of, "a", 0, initial_state(job.method(), "a"), {}), None
    if job.privacy is not None:
        private = PrivateSilo(MemoryAccount(job), Seeded)
        paid, _ = pay(job, "a", 0, of.train, private)
        asked = replace(asked, private=PrivateSilo(paid, Seeded))
    return asked, paid


def adapted(**training):
    """The same of a transformer with adapters."""
    own = ranked_runs.ADAPTED_TRAINING | training
    job = make_job("fedavg", model=ranked_runs.ADAPTED_TEXT, training=own).for_federation()
    of = OrderedRecords(job, texts(21), texts(8, 1))
    return SiloRound(of, "a", 0, initial_state(job.method(), "a"), {}), None


def words(*program, folder):
    command = *TORCHRUN, "--nproc-per-node=2", *program
    return [str(word).replace("{order}", str(folder)) for word in command]


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """What came of the one launch: results by process, and the outcomes of two orders."""
    folder = tmp_path_factory.mktemp("launch")
    orders = {"plain": ordered("fedper"), "private": ordered("fedavg", privacy=NOISE)}
    orders["sharded"] = adapted()
    folders = {name: OrderFolder(folder / "orders" / name) for name in orders}
    for name, (asked, paid) in orders.items():
        folders[name].path.mkdir(parents=True)
        folders[name].put(asked, DeviceTable(shard=name == "sharded"), paid)
    program = words(ranked_runs.__file__, folder / "orders", folder / "result", folder=folder)
    # Its standard input ends with this process, and it with that.
    environment = os.environ | OF_TORCHRUN | ENVIRONMENT
    with Popen(program, stdin=PIPE, env=environment) as running:
        assert running.wait() == 0
    results = [json.loads((folder / f"result.{rank}").read_text()) for rank in (0, 1)]
    return results, {
        name: (orders[name][0], folders[name].outcome(orders[name][0])) for name in orders
    }


def test_two_processes_equal_one_in_every_method(launch):
    """After three rounds, in all that silos and the coordinator hold; private jobs to the bit."""
    results, _ = launch
    apart = results[0]["apart"] | results[1]["apart"]
    assert METHODS.keys() <= {name.partition(",")[0] for name in apart}
    far = {
        name: own for name, own in apart.items() if own > (NEAR, EQUAL)[name.endswith("private")]
    }
    assert not far


@pytest.mark.parametrize("name", ["plain", "private", "sharded"])
def test_an_order_that_two_processes_compute_comes_out_as_of_one(launch, name):
    asked, (found, taken) = launch[1][name]
    Seeded.number = count()
    expected = TrainingDevice().outcome(asked)
    for own, value in expected.state.flat.items():
        assert (found.state.flat[own] - value).abs().max() <= (NEAR, EQUAL)[name == "private"]
    assert found.contributions.keys() == expected.contributions.keys()
    assert found.report.trained == expected.report.trained
    assert Counter(taken) == (expected.spending.taken if name == "private" else Counter())


def test_each_process_holds_half_of_what_stands_still(launch):
    """Bytes of pieces, of sharded weights: all but the norms, the biases and the places."""
    for result in launch[0]:
        own, whole = result["held"]
        assert own == whole / 2
        assert whole > 12 * 128 * 128 * 4


def test_processes_that_gather_different_weights_are_stopped(launch):
    """Before they move by what came of it."""
    for result in launch[0]:
        assert "have used other weights than one another" in result["apart ways"]


def test_noise_is_that_of_one_process(launch):
    """40,000 numbers: each figure lies within ten of its standard deviations."""
    for result in launch[0]:
        deviation, kurtosis = result["noise"]
        assert deviation == pytest.approx(1, abs=10 / 80_000**0.5)
        assert kurtosis == pytest.approx(3, abs=10 * (24 / 40_000) ** 0.5)


def test_processes_of_one_machine_listen_on_loopback_alone(launch):
    heard = list(chain.from_iterable(result["listens"] for result in launch[0]))
    assert heard
    assert {address.removeprefix("::ffff:") for address in heard} == {"127.0.0.1"}


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))

    def make(*program):
        orders = tmp_path / "orders"
        return TrainerProcesses(
            tuple(words(*program, folder="{order}")), orders, DeviceTable(shard=True), {}, "data"
        )

    yield make
    # whatever came of it, no record stays, and no folder that torchrun makes for each round
    for name in ("orders", "temporary"):
        assert not list((tmp_path / name).glob("*"))


class Watched:
    """All processes that were begun under this one since, and what is done to the second rank.

    It is asked again and again whether to stop; it says so once ``then`` was done.
    """

    def __init__(self, when, then, stops):
        self.when, self.then, self.stops, self.done, self.seen = when, then, stops, False, set()
        # of other tests, such as the tracker of shared memory
        self.before = set(psutil.Process().children(recursive=True))

    def __call__(self):
        for process in set(psutil.Process().children(recursive=True)) - self.before:
            self.seen.add(process)
            if not self.done and ranked(process) == "1" and self.when(process):
                self.then(process)
                self.done = True
        return self.done and self.stops


def ranked(process):
    try:
        return process.environ().get("RANK")
    except psutil.Error:  # it has ended
        return None


def talking(process):
    return any(own.status == "ESTABLISHED" for own in process.net_connections())


def test_a_process_that_is_killed_costs_the_round_and_ends_the_others(place):
    asked, _ = adapted(epochs=10_000)
    watched = Watched(talking, psutil.Process.kill, stops=False)
    with pytest.raises(LocalError, match="ended"):
        place(*PROGRAM).outcome(replace(asked, cancelled=watched))
    assert watched.done
    _, alive = psutil.wait_procs(watched.seen, timeout=60)
    assert not alive


def test_a_stop_ends_a_process_that_hangs(place, monkeypatch):
    """Of one that takes no signal but a kill."""
    monkeypatch.setattr(launched, "GRACE_SECONDS", 600)
    hanging = "if [ $RANK = 1 ]; then kill -STOP 0; fi; exec sleep 1000"
    stopped = lambda process: process.status() == psutil.STATUS_STOPPED
    watched = Watched(stopped, lambda _: None, stops=True)
    with pytest.raises(CancelledError):
        place("--no-python", "sh", "-c", hanging).outcome(
            replace(ordered("fedper")[0], cancelled=watched)
        )
    assert len(watched.seen) >= 3
    _, alive = psutil.wait_procs(watched.seen, timeout=60)
    assert not alive


DEVICES = [("cpu", "cpu"), ("cuda", "cuda:1"), ("cuda:2", "cuda:3")]


@pytest.mark.parametrize(("device", "own"), DEVICES)
def test_each_process_has_the_next_gpu(monkeypatch, device, own):
    assert own_device(device) == device
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert own_device(device) == own
