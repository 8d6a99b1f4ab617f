import json
import weakref
from dataclasses import replace

import pytest
from support.refusals import refused
from support.simulated_jobs import SCHEDULE, make_population, make_run, results

from staddle.algorithms import catalog
from staddle.algorithms.engines import simulation
from staddle.algorithms.engines.attendance import EVERYONE, Attendance
from staddle.algorithms.engines.engine import Serial
from staddle.algorithms.methods.fedavg import FedAvg
from staddle.errors import CancelledError, LocalError
from staddle.simulator.engines.signals import StopSignal
from staddle.simulator.run import snapshot
from staddle.simulator.run.folder import HISTORY, folder_of
from staddle.simulator.run.history import read
from staddle.simulator.run.progress import Unwatched
from staddle.simulator.run.runner import complete

POPULATION = make_population(validation=False)

pytestmark = pytest.mark.usefixtures("quick")


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


def run_it(out, run, watch=None, stop=None, engine=Serial):
    """Its results, by file."""
    watch, stop = watch or Unwatched(), stop or StopSignal()
    complete(out, run, POPULATION, SCHEDULE, lambda j: engine(j, POPULATION.records), watch, stop)
    return results(folder_of(out, run))


def test_rounds_looks_and_results_come_in_their_order(tmp_path):
    watch, run = Asks(), make_run()
    files = run_it(tmp_path, run, watch)
    selected, looks = ["selected/before", "selected/after"], ["all/aggregated", "all/trained"]
    training, looking = ("training", 2), ("looking", 4)
    one_look = [training, (1, selected), training, looking, (2, selected + looks)]
    last_look = [training, (3, selected), training, looking, (4, looks)]
    assert watch.told == [("begin", 0), *one_look, *last_look]
    history = [(one.rounds, one.measure) for one in read(folder_of(tmp_path, run) / HISTORY)]
    assert history == [
        (n, m) for n in range(1, 5) for m in selected + (looks if n % 2 == 0 else [])
    ]
    assert {"work.jsonl", "silos.csv", "models/a.safetensors"} <= set(files)
    again = Asks()
    assert run_it(tmp_path, run, again) == files
    assert again.told == [("begin", 4)]


@pytest.mark.parametrize("method", ["fedavg", "pfedsim"])
def test_states_that_find_no_room_in_memory_end_in_the_same_bytes(tmp_path, monkeypatch, method):
    """They lie in the snapshot's files, also where a run is resumed, and come one by one."""
    run = make_run(method)
    plain = run_it(tmp_path / "plain", run)
    for module in (simulation, snapshot):
        monkeypatch.setattr(module, "IN_MEMORY", 1)
    monkeypatch.setattr(simulation, "AT_ONCE", 1)
    asked, batches = [], simulation.Simulation._batches
    monkeypatch.setattr(
        simulation.Simulation,
        "_batches",
        lambda self: asked.extend(some := list(batches(self))) or iter(some),
    )
    read = []
    call = snapshot.StateOnDisk.__call__
    monkeypatch.setattr(
        snapshot.StateOnDisk, "__call__", lambda self: read.append(self.silo) or call(self)
    )
    stop = StopSignal()
    with pytest.raises(CancelledError):
        run_it(tmp_path / "resting", run, Asks(stop, at=9), stop)
    resting = run_it(tmp_path / "resting", run)
    assert resting.keys() == plain.keys()
    assert {name for name in plain if resting[name] != plain[name]} <= {"snapshot.json"}
    assert {len(silos) for silos in asked} == {1}
    assert set(read) == set(run.job.silos)


@pytest.mark.parametrize("keep_models", [True, False])
def test_models_of_a_look_are_gone_before_the_next_are_made(tmp_path, monkeypatch, keep_models):
    """And where none are kept, no state is loaded for that."""
    monkeypatch.setattr(simulation, "AT_ONCE", 1)
    looked, look, kept, asked = [], simulation.Simulation._look, simulation.kept, []

    def watched(self, silos, done):
        assert all(held() is None for held in looked)
        found = look(self, silos, done)
        looked.extend(weakref.ref(each) for each in found.values())
        return found

    monkeypatch.setattr(simulation.Simulation, "_look", watched)
    monkeypatch.setattr(simulation, "kept", lambda *given: asked.append(1) or kept(*given))
    run, schedule = make_run(), replace(SCHEDULE, keep_models=keep_models)
    make = lambda job: Serial(job, POPULATION.records)
    complete(tmp_path, run, POPULATION, schedule, make, Unwatched(), StopSignal())
    assert len(looked) == 2 * len(run.job.silos)
    assert len(asked) == keep_models * len(run.job.silos)


def test_a_census_is_a_round_that_measures_nothing(tmp_path):
    watch, run = Asks(), make_run("fedsimsup", rounds=2)
    assert run.job.length == 3
    run_it(tmp_path, run, watch)
    told = [step for step, *_ in watch.told]
    assert told == ["begin", "training", "training", 1, "training", "looking", 2]
    assert {one.rounds for one in read(folder_of(tmp_path, run) / HISTORY)} == {1, 2}


def test_what_tunes_after_the_last_round_is_seen_in_the_last_look(tmp_path, monkeypatch):
    class Tuning(FedAvg):
        tunes, product = True, "trained"

        def up(self, round_):
            return () if self.tuning(round_) else super().up(round_)

        def contribute(self, state, facts):
            return {} if self.tuning(facts.round) else super().contribute(state, facts)

    monkeypatch.setitem(catalog.METHODS, "fedavg", Tuning)
    watch, run = Asks(), make_run(rounds=2)
    whole = run_it(tmp_path / "whole", run, watch)
    told = [step for step, *_ in watch.told]
    assert told == ["begin", "training", 1, "training", "training", "looking", 2]
    history = read(folder_of(tmp_path / "whole", run) / HISTORY)
    found = [(one.rounds, one.measure) for one in history if one.measure == "selected/after"]
    assert found == [(1, "selected/after"), (2, "selected/after")]
    last = {one.measure: one.scores for one in history if one.rounds == 2}
    assert last["all/trained"] != last["all/aggregated"]
    for at in (1, 3, 5, 7, 2):
        stop = StopSignal()
        with pytest.raises(CancelledError):
            run_it(tmp_path / "stopped", run, Asks(stop, at), stop)
    assert run_it(tmp_path / "stopped", run) == whole


WHO = Attendance(newcomers=1, join_after=3, absent=0.2, step_seconds=1.0, spread=0.5)
LACKING = {"seed": 1, "rounds": 4, "participation": 1.0, "min_cohort": 1, "round_timeout": 4.0}


@pytest.mark.parametrize(
    ("method", "who", "fields"),
    [("pfedsim", EVERYONE, {}), ("fedsimsup", EVERYONE, {}), ("pfedsim", WHO, LACKING)],
)
def test_stopped_anywhere_and_gone_on_with_it_ends_in_the_same_bytes(tmp_path, method, who, fields):
    run = replace(make_run(method, **fields), attendance=who)
    whole = run_it(tmp_path / "whole", run)
    for at in (1, 4, 3, 5, 2, 6):  # silos until it is stopped, in training and in looks
        stop = StopSignal()
        said = f"^{method}, seed {run.seed}: stopped; the same command resumes after round "
        with pytest.raises(CancelledError, match=said):
            run_it(tmp_path / "stopped", run, Asks(stop, at), stop)
    assert run_it(tmp_path / "stopped", run) == whole


def test_newcomers_absent_and_late_silos_are_written_down(tmp_path):
    """A round that is lacking is shown as such, and newcomers are evaluated as they join."""
    watch, run = Asks(), replace(make_run(**LACKING), attendance=WHO)
    files = run_it(tmp_path, run, watch)
    lines = [json.loads(line) for line in files["work.jsonl"].splitlines()]
    seen = [{*line["silos"], *line.get("absent", ()), *line.get("late", ())} for line in lines]
    assert ["c" in silos for silos in seen] == [False, False, False, True, False]
    present = [len(WHO.present(run.job, round_)) for round_ in range(4)]
    assert [told[1] for told in watch.told if told[0] == "training"] == present
    assert present[:3] == [3 - len(line.get("absent", ())) for line in lines[:3]]
    assert any("absent" in line for line in lines)
    assert any("late" in line for line in lines)
    assert all(line["simulated"] <= 4.0 for line in lines[:4])
    looked = {one.rounds for one in read(folder_of(tmp_path, run) / HISTORY)}
    assert looked >= {2, 3, 4}
    looks = [step for step in watch.told if step[0] == "looking"]
    assert len(looks) == 3


def test_a_run_that_is_lengthened_ends_in_the_bytes_of_a_longer_one(tmp_path):
    """Its last look is one of the longer run's, which is taken again; also after a stop in it."""
    long = make_run(rounds=4)
    whole = run_it(tmp_path / "whole", long)
    run_it(tmp_path / "grown", make_run(rounds=2))
    stop = StopSignal()
    with pytest.raises(CancelledError, match="after round 2 of 4"):
        run_it(tmp_path / "grown", long, Asks(stop, 3), stop)
    assert not (folder_of(tmp_path / "grown", long) / "models" / "a.safetensors").exists()
    watch = Asks()
    assert run_it(tmp_path / "grown", long, watch) == whole
    assert watch.told[:3] == [("begin", 2), ("looking", 4), ("training", 2)]


def test_what_was_whole_when_it_was_stopped_is_not_run_again(tmp_path):
    run, stop = make_run(), StopSignal()
    with pytest.raises(CancelledError, match="after round 1 of 4"):
        run_it(tmp_path, run, Asks(stop, 4), stop)
    watch = Asks()
    run_it(tmp_path, run, watch)
    assert watch.told[0] == ("begin", 1)


def test_asked_between_two_rounds_it_ends_before_the_next(tmp_path):
    stop = StopSignal()
    stop.ask()
    with pytest.raises(CancelledError, match="after round 0 of 4"):
        run_it(tmp_path, make_run(), stop=stop)


def test_the_engine_is_closed_whatever_happens(tmp_path):
    closed = []

    class Broken(Serial):
        def train(self, round_, work, done):
            raise LocalError("broken")

        def close(self):
            closed.append(True)

    with refused("broken"):
        run_it(tmp_path, make_run(), engine=Broken)
    assert closed == [True]
