import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.engine_runs import METHODS, RECORDS, SILOS, job_of, run
from support.refusals import refused

from staddle.algorithms.engines.engine import Serial, SiloWork
from staddle.algorithms.engines.simulation import Simulation
from staddle.algorithms.engines.vmap_engine import Stacked
from staddle.algorithms.method import initial_state
from staddle.algorithms.numerics.devices import CPU
from staddle.errors import LocalError, UnwritableError
from staddle.simulator.engines.deal import Costs, shares
from staddle.simulator.engines.pool import SILO_DONE, Crew, JobTrainer, usable_cores


@pytest.fixture(scope="module")
def crew():
    with Crew(RECORDS, [Serial] * 2) as crew:
        yield crew


@pytest.mark.parametrize("method", METHODS)
def test_workers_give_what_serial_gives_bit_for_bit(crew, method):
    job = job_of(method)
    assert run(job, crew.engine(job)) == run(job, Serial(job, RECORDS))


def always(job):
    return True


@pytest.fixture(scope="module")
def devices():
    """Two devices, each of which has its share of the silos stacked."""
    with Crew(RECORDS, [Stacked] * 2, always, "GPUs") as crew:
        yield crew


class InShares:
    """One device that has one share of the silos after the other stacked."""

    device = CPU

    def __init__(self, job, count):
        self.job, self.count, self.engine = job, count, Stacked(job, RECORDS)

    def _each(self, task, round_, work, done):
        dealt = shares(work, partial(Costs(RECORDS).of, self.job, task), self.count)
        found = {}
        for share in dealt:
            found |= getattr(self.engine, task)(round_, share, done)
        return {one.silo: found[one.silo] for one in work}

    def train(self, *given):
        return self._each("train", *given)

    def look(self, *given):
        return self._each("look", *given)


@pytest.mark.parametrize("method", METHODS)
def test_devices_give_the_bits_of_one_that_has_their_shares_in_turn(devices, method):
    """How far other shares are from these: ``test_in_float32_and_in_slices_too``."""
    job = job_of(method)
    torch.set_num_threads(1)
    assert run(job, devices.engine(job)) == run(job, InShares(job, 2))


def test_the_progress_of_a_share_is_told_silo_by_silo(devices, monkeypatch):
    """Before its answer comes."""
    told, taken = [], Crew._taken

    def noting(self, worker):
        silos, said = taken(self, worker)
        told.append((*silos, said if isinstance(said, str) else sorted(said)))
        return silos, said

    monkeypatch.setattr(Crew, "_taken", noting)
    job, done = job_of("local"), []
    Simulation(job, devices.engine(job)).look(lambda: done.append(1))
    assert len(done) == len(SILOS)
    for share in (("d", "a"), ("b", "c")):
        own = [said for *silos, said in told if tuple(silos) == share]
        assert own == [SILO_DONE, SILO_DONE, sorted(share)]


def test_a_share_that_fails_names_its_silo_and_the_devices_go_on(devices):
    broken = job_of("fedavg", lr=1e38)
    with refused(r"round 0 at silo '[a-d]': the training loss is (nan|inf); lower training.lr"):
        Simulation(broken, devices.engine(broken)).step()
    job = job_of("fedavg")
    assert len(Simulation(job, devices.engine(job)).step().reports) == 3


def test_a_worker_gives_a_device_back_before_it_takes_it_for_another_job():
    told = []

    def make(job, held):
        told.append(("made", job))
        if job == "too large":
            raise UnwritableError("more than the device has")
        return SimpleNamespace(
            close=lambda: told.append(("closed", job)), train=lambda *given: (job, held, *given)
        )

    trainer = JobTrainer(make, RECORDS)
    assert "an order and no job" in str(trainer.carry_out("train", 0, [], None))
    trainer.begin("one")
    assert told == []
    assert trainer.carry_out("train", 3, ["work"], "done") == ("one", RECORDS, 3, ["work"], "done")
    trainer.carry_out("train", 4, [], None)
    trainer.begin("too large")
    found = trainer.carry_out("train", 0, [], None)
    assert (type(found), str(found)) == (LocalError, "more than the device has")
    trainer.begin("other")
    trainer.carry_out("train", 0, [], None)
    assert told == [("made", "one"), ("closed", "one"), ("made", "too large"), ("made", "other")]


def test_answers_keep_the_order_of_the_work_and_one_crew_serves_jobs_in_turn(crew):
    one, other = job_of("fedavg"), job_of("fedavg", lr=0.2)
    engines = [crew.engine(one), crew.engine(other)]
    simulations = [Simulation(one, engines[0]), Simulation(other, engines[1])]
    assert list(simulations[0].look()) == list(SILOS)
    found = [simulations[i].step().reports for i in (0, 1, 0)]
    engines[0].close()
    found.append(simulations[1].step().reports)
    slow = [Simulation(job, Serial(job, RECORDS)) for job in (one, other)]
    assert found == [slow[i].step().reports for i in (0, 1, 0, 1)]


@pytest.fixture
def given(monkeypatch):
    """The silos that workers are given, in turn."""
    silos, contribute = [], Crew._order
    monkeypatch.setattr(
        Crew,
        "_order",
        lambda self, *order: silos.append(order[-1][0].silo) or contribute(self, *order),
    )
    return silos


def test_the_silo_that_takes_longest_is_taken_first(crew, given):
    job = job_of("local")
    simulation = Simulation(job, crew.engine(job))
    assert list(simulation.look()) == list(SILOS)
    # "b" has one test record less than "c", and five to validate.
    assert given == ["d", "b", "c", "a"]
    given.clear()
    simulation.step()
    assert given == sorted(job.cohort(0), reverse=True)


def test_a_state_is_loaded_when_its_silo_has_a_worker():
    """So of thousands, which lie on the disk, as many as there are workers are in memory."""
    job, told = job_of("local"), []
    loading = lambda silo: told.append(silo) or initial_state(job.method(), silo)
    work = [SiloWork(silo, partial(loading, silo), {}) for silo in "ab"]
    with Crew(RECORDS, [Serial]) as crew:
        crew.engine(job).look(1, work, lambda: told.append("done"))
    assert told == ["b", "done", "a", "done"]


def test_the_error_of_a_silo_is_its_own_ends_the_round_and_the_crew_goes_on(crew, given):
    broken = job_of("fedavg", lr=1e38)
    with pytest.raises(LocalError) as serial:
        Simulation(broken, Serial(broken, RECORDS)).step()
    told = []
    with pytest.raises(LocalError) as own:
        Simulation(broken, crew.engine(broken)).step(lambda: told.append(1))
    text = r"round 0 at silo '[a-d]': the training loss is (nan|inf); lower training.lr \(1e\+38\)"
    assert re.match(text, str(serial.value))
    assert re.match(text, str(own.value))
    assert type(own.value) is LocalError
    assert told == []
    assert len(given) == 2  # of three: none is begun after a fault
    job = job_of("fedavg")
    expected = Simulation(job, Serial(job, RECORDS)).step().reports
    assert Simulation(job, crew.engine(job)).step().reports == expected


def test_no_interrupt_reaches_a_worker(crew):
    for pid in crew.pids:
        os.kill(pid, signal.SIGINT)
    job = job_of("local")
    assert len(Simulation(job, crew.engine(job)).look()) == len(SILOS)


def test_a_private_job_is_refused(crew):
    job = replace(job_of("fedavg"), privacy=object())
    with refused("has a \\[privacy\\] table"):
        crew.engine(job)


def test_it_counts_the_cores_that_it_may_use():
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert usable_cores() == len(allowed)


def session(path):
    """Of a process; None where it has just ended."""
    try:
        return int((path / "stat").read_text().rpartition(")")[2].split()[3])
    except (FileNotFoundError, ProcessLookupError):
        return None


def alive(pid):
    """Whether a process is there and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def ended(pids, seconds=60):
    """Wait until none of them is there."""
    until = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    return not any(map(alive, pids))


def test_a_device_whose_worker_is_killed_ends_the_run_with_its_share_named(monkeypatch):
    job, answering = job_of("fedavg", epochs=10_000), Crew._answering
    with Crew(RECORDS, [Stacked] * 2, always, "GPUs") as crew:
        engine, pids = crew.engine(job), crew.pids
        # Both have their shares by then.
        monkeypatch.setattr(
            Crew, "_answering", lambda self: os.kill(pids[0], signal.SIGKILL) or answering(self)
        )
        share = r"silo '[a-d]'( and 1 more)?: the worker process that had it was ended by SIGKILL"
        with refused(f"{share}, as Linux does where memory runs out; .* use fewer GPUs"):
            Simulation(job, engine).step()
        assert ended(pids)
        assert crew.pids == ()


@pytest.mark.parametrize("place", ["_order", "_answering"])
def test_a_worker_that_is_killed_ends_the_run_with_its_silo_named(monkeypatch, place):
    """Killed while it has nothing to do, or while it trains."""
    job = job_of("fedavg", epochs=10_000)
    with Crew(RECORDS, [Serial]) as crew:
        engine, (pid,), real = crew.engine(job), crew.pids, getattr(Crew, place)
        monkeypatch.setattr(
            Crew, place, lambda *order: os.kill(pid, signal.SIGKILL) or real(*order)
        )
        largest = job.cohort(0)[-1]
        with refused(f"silo '{largest}': the worker process that had it was ended by SIGKILL"):
            Simulation(job, engine).step()
        assert ended([pid])
        assert crew.pids == ()
        with refused("the worker processes have ended"):
            Simulation(job, engine).look()


def test_a_mistake_in_a_method_ends_the_worker_that_meets_it():
    job = job_of("fedavg")
    with Crew(RECORDS, [Serial]) as crew:
        mistake = {"model": {"classifier.bias": "no tensor"}}
        work = [SiloWork("d", initial_state(job.method(), "d"), mistake)]
        with refused(r"silo 'd': the worker process .* ended with code 1; what it printed"):
            crew.engine(job).look(1, work, lambda: None)


LONG = """
    import signal
    import sys

    # one started in the background of a script would ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path[:0] = {tests!r}

    def train_long():
        # not in workers, which import this
        from test_pool import RECORDS, Crew, Serial, Simulation, job_of

        with Crew(RECORDS, [Serial] * 2) as crew:
            one = job_of("fedavg")
            Simulation(one, crew.engine(one)).look()  # so they have begun
            job, real = job_of("fedavg", epochs=10_000), Crew._answering
            Crew._answering = lambda self: print(*self.pids,
            flush=True) or real(self)  # they have silos now
            Simulation(job, crew.engine(job)).step()

    if __name__ == "__main__":
        try:
            train_long()
        except KeyboardInterrupt:
            train_long()
"""


def test_an_interrupt_ends_the_workers_and_so_does_the_death_of_their_parent(tmp_path):
    program = tmp_path / "long.py"
    tests = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]
    program.write_text(textwrap.dedent(LONG.format(tests=tests)))
    command = [sys.executable, str(program)]
    with (
        (tmp_path / "errors").open("w") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        ) as process,
    ):
        interrupted = [int(pid) for pid in process.stdout.readline().split()]
        assert len(interrupted) == 2, (tmp_path / "errors").read_text()
        os.killpg(process.pid, signal.SIGINT)  # to all of them, as a terminal's Ctrl-C
        left = [int(pid) for pid in process.stdout.readline().split()]
        assert len(left) == 2, (tmp_path / "errors").read_text()
        assert ended(interrupted)
        descendants = [
            int(path.name) for path in Path("/proc").glob("[0-9]*") if session(path) == process.pid
        ]
        assert {process.pid, *left} < set(descendants)
        process.kill()
    assert ended(descendants)
    assert (tmp_path / "errors").read_text() == ""
