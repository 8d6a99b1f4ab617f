import pytest
import torch
from support.refusals import refused
from support.simulated_jobs import SCHEDULE, conduct, make_population, make_run

from staddle.algorithms.training.silo_round import state_to_bytes
from staddle.simulator.report.finished_runs import load_runs
from staddle.simulator.run.folder import opened
from staddle.simulator.run.scores import over_seeds, scores

POPULATION = make_population()


@pytest.fixture(scope="module")
def out(tmp_path_factory, quick):
    """Two finished runs, one cut off after its second round, and one that has just begun."""
    out = tmp_path_factory.mktemp("out")
    for run, until in (
        (make_run("local", 10, rounds=2), None),
        (make_run("local", 9, rounds=2), None),
        (make_run("pfedsim", rounds=4), 3),
        (make_run("fedavg"), 0),
    ):
        conduct(out, run, POPULATION, until)
    (out / "summary.md").write_text("not a run")
    (out / "notes" / "seed-1").mkdir(parents=True)
    return out


def test_all_runs_are_found_by_label_and_seed(out):
    runs = load_runs(out)
    assert [(run.label, run.seed, run.method, run.rounds, run.finished) for run in runs] == [
        ("fedavg", 7, "fedavg", 4, False),
        ("local", 9, "local", 2, True),
        ("local", 10, "local", 2, True),
        ("pfedsim", 7, "pfedsim", 4, False),
    ]
    assert [one.name for one in runs[0].silos] == ["d", "b", "a", "c"]
    assert {run.product for run in runs} == {"delivered", "trained"}
    assert load_runs(out / "nowhere") == ()


def test_a_history_is_read_as_far_as_it_is_and_then_there_are_no_models(out):
    begun, done, _, cut = load_runs(out)
    assert begun.history == ()
    found = [(one.rounds, one.measure) for one in done.history if one.measure.startswith("all")]
    assert found == [(2, "all/aggregated"), (2, "all/trained")]
    assert max(one.rounds for one in cut.history) == 3  # beyond its snapshot
    run = load_runs(out)[-1]
    with refused(r"models/a\.safetensors: cannot read it: No such file .*; run the same again"):
        run.model("a")
    with refused(r"coordinator\.safetensors: cannot read it"):
        run.coordinator()


def test_scores_go_over_seeds(out):
    runs = [run for run in load_runs(out) if run.label == "local"]
    found = over_seeds([scores(run.history) for run in runs])
    values = [run.history[-3].macro for run in runs]
    assert runs[0].history[-3].measure == "all/trained"
    spread = found["all/trained", "macro", "last"]
    assert (spread.seeds, spread.mean) == (2, pytest.approx(sum(values) / 2))
    assert spread.deviation == pytest.approx(abs(values[0] - values[1]) / 2**0.5)


def test_models_and_coordinator_of_a_finished_run(out):
    run = load_runs(out)[1]
    with opened(out, make_run("local", 9, rounds=2), POPULATION, SCHEDULE) as folder:
        kept = folder.begun().held
    assert kept.keys() < {silo.name for silo in run.silos}  # those that trained
    assert all(state_to_bytes(run.model(one)) == state_to_bytes(kept[one]) for one in kept)
    assert run.coordinator() == {}


def test_the_coordinators_tensors_come_back(tmp_path, quick):
    conduct(tmp_path, make_run("pfedsim", rounds=2), POPULATION)
    (run,) = load_runs(tmp_path)
    (weights,) = (tensor for tensor in run.coordinator().values() if tensor.shape == (4, 4))
    assert torch.equal(weights, weights.T)
    (run.folder / "coordinator.safetensors").write_bytes(b"broken")
    with refused(r"coordinator\.safetensors: not a file of tensors"):
        run.coordinator()


def one_bit(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_one_bit_of_what_a_run_left_is_found_where_it_is_read(tmp_path, quick):
    """Of a finished run the last and a middle byte of each file.

    Of another what its last snapshot is about.
    """
    reads = {
        "run.json": lambda: load_runs(tmp_path),
        "history.jsonl": lambda: load_runs(tmp_path),
        "snapshot.json": lambda: load_runs(tmp_path),
        "coordinator.safetensors": lambda: dict(load_runs(tmp_path)[0].coordinator()),
        "models/a.safetensors": lambda: load_runs(tmp_path)[0].model("a"),
    }
    for until in (None, 3):
        folder = conduct(tmp_path, make_run("pfedsim", rounds=4), POPULATION, until).path
        for name in reads if until is None else list(reads)[:3]:
            whole = (folder / name).read_bytes()
            for at in (len(whole) - 2, len(whole) // 2) if until is None else (5, len(whole) // 4):
                one_bit(folder / name, at)
                with refused(name.replace(".", r"\.")):
                    reads[name]()
                (folder / name).write_bytes(whole)
            reads[name]()
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()


def test_a_history_that_was_altered_is_refused(tmp_path, quick):
    path = conduct(tmp_path, make_run("local", rounds=2), POPULATION).path / "history.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"rounds":1', b'"rounds":2'))
    with refused(r"history\.jsonl: its first \d+ bytes are not those"):
        load_runs(tmp_path)
