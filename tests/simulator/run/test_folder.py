"""A run on disk: gone on with after any round, it ends in the same bytes.

What is not its own is refused.
"""

import errno
import json
import re
import shutil
from dataclasses import replace
from hashlib import sha256

import pytest
import torch
from faults import disk
from faults.disk import Calls, failing, killed
from support.counted import counts as right
from support.counted import of_counts
from support.refusals import refused
from support.simulated_jobs import SCHEDULE, conduct, make_population, make_run, results
from support.snapshots import story, told

from staddle.algorithms.catalog import METHODS
from staddle.algorithms.training.silo_round import Seen, state_to_bytes
from staddle.errors import UnwritableError
from staddle.files.documents import canonical_json
from staddle.simulator.experiment.plan import Run, Schedule
from staddle.simulator.report.finished_runs import load_runs
from staddle.simulator.run.folder import folder_of, opened
from staddle.simulator.run.out_folder import check

POPULATION = make_population()
RUN = make_run()
# Methods that do other things in the first rounds of a longer job, or tune after the last.
OF_ONE_LENGTH = {
    "fedavg-ft", "fedbabu", "fedkd", "fedsimsup", "knn-per", "per-fedavg", "pfedfda",
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory, quick):
    """A finished run, to be looked at only."""
    return conduct(tmp_path_factory.mktemp("whole"), RUN, POPULATION)


@pytest.fixture
def made(tmp_path, whole):
    """A copy of it, in ``tmp_path``."""
    path = folder_of(tmp_path, RUN)
    shutil.copytree(whole.path, path)
    return path


@pytest.mark.parametrize("method", METHODS)
def test_taken_down_after_any_round_and_lengthened_every_method_ends_in_the_same_bytes(
    tmp_path, quick, method
):
    run, every = make_run(method, rounds=3), Schedule(2, 1)
    whole = conduct(tmp_path / "whole", run, POPULATION, schedule=every)
    short = make_run(method, rounds=2)
    for until in (1, 2, None):
        conduct(tmp_path / "parts", short, POPULATION, until, every)
    if method in OF_ONE_LENGTH:
        with refused("a run of 2 rounds that cannot be lengthened to 3: method"):
            conduct(tmp_path / "parts", run, POPULATION, 1, every)
        shutil.rmtree(tmp_path / "parts")
    # Others resume where the shorter run ended.
    for until in range(1, run.job.length + 1):
        conduct(tmp_path / "parts", run, POPULATION, until, every)
    parts = conduct(tmp_path / "parts", run, POPULATION, schedule=every)
    assert whole.finished
    assert parts.finished
    assert parts.history == whole.history
    assert results(parts.path) == results(whole.path)
    assert len(whole.history) == 2 * 3 + 4 * 2


def test_what_came_after_the_last_snapshot_is_measured_again(tmp_path, whole):
    for until in (1, 3, 1):
        conduct(tmp_path, RUN, POPULATION, until)
    assert results(conduct(tmp_path, RUN, POPULATION).path) == results(whole.path)


def test_a_snapshot_as_often_as_one_likes_changes_no_result(tmp_path, whole):
    conduct(tmp_path, RUN, POPULATION, 2, Schedule(2, 1))
    parts = conduct(tmp_path, RUN, POPULATION, schedule=Schedule(2, 50))
    assert results(parts.path) == results(whole.path)


def test_a_finished_run_is_not_run_again(tmp_path, whole, made):
    (made / "snapshot").rename(tmp_path / "away")  # large, and not needed any more
    with opened(tmp_path, RUN, POPULATION, SCHEDULE) as folder:
        assert folder.finished
        assert folder.history == whole.history
    assert results(made) == results(whole.path)


@pytest.mark.parametrize("gone", ["silos.csv", "models/a.safetensors"])
def test_a_result_that_is_missing_is_made_again(tmp_path, whole, made, gone):
    (made / gone).unlink()
    with opened(tmp_path, RUN, POPULATION, SCHEDULE) as folder:
        assert not folder.finished
        assert folder.begun().round == RUN.job.length
    assert conduct(tmp_path, RUN, POPULATION).finished
    assert results(made) == results(whole.path)


# What is not its own.
def test_models_and_snapshot_need_not_be_kept(tmp_path, whole):
    bare = Schedule(2, 2, keep_models=False)
    path = conduct(tmp_path, RUN, POPULATION, schedule=bare).path
    assert list((path / "snapshot").iterdir()) == []
    kept = {name: data for name, data in results(whole.path).items() if "models/" not in name}
    assert results(path) == kept
    (run,) = load_runs(tmp_path)
    assert (run.finished, run.history) == (True, whole.history)
    with refused("kept no models; run it again in another --out"):
        run.model("a")
    with opened(tmp_path, RUN, POPULATION, SCHEDULE) as folder:
        assert folder.finished  # whatever it is opened with
    # Before anything is trained, with all runs of a command.
    with refused("4 rounds that cannot be lengthened to 5: it kept no snapshot to resume from"):
        check(tmp_path, [make_run(rounds=5)], POPULATION, SCHEDULE)
    (path / "silos.csv").unlink()
    with refused("has no silos.csv, and kept no snapshot"):
        conduct(tmp_path, RUN, POPULATION)


def test_the_folder_of_another_run_is_refused_and_stays(tmp_path, made):
    before = {path: path.read_bytes() for path in made.rglob("*") if path.is_file()}
    other = Run(RUN.label, RUN.seed, make_run(rounds=9, participation=1.0).job)
    why = re.escape(
        f"{made}: holds another run: participation is 0.5 there and 1.0 here; choose another"
        " --out, or remove it"
    )
    with refused(why), opened(tmp_path, other, POPULATION, SCHEDULE):
        pass
    with (
        refused("the records, or who holds which, are others"),
        opened(tmp_path, RUN, make_population("6a" * 32), SCHEDULE),
    ):
        pass
    assert {path: path.read_bytes() for path in made.rglob("*") if path.is_file()} == before


def test_a_run_is_never_shortened_and_a_lost_snapshot_costs_no_result(tmp_path, made):
    before = results(made)
    why = "holds a run of 4 rounds, which cannot be shortened to 3; give 4 rounds or more"
    with refused(why), opened(tmp_path, make_run(rounds=3), POPULATION, SCHEDULE):
        pass
    (made / "snapshot").rename(tmp_path / "away")
    with refused("cannot read it"), opened(tmp_path, make_run(rounds=5), POPULATION, SCHEDULE):
        pass
    assert results(made) == before
    (made / "snapshot").rmdir()
    (tmp_path / "away").rename(made / "snapshot")
    cosine = {"epochs": 1, "batch_size": 8, "lr": 0.1, "schedule": {"kind": "cosine"}}
    falling = make_run(seed=8, label="falling", training=cosine)
    conduct(tmp_path, falling, POPULATION)
    longer = make_run(seed=8, label="falling", training=cosine, rounds=5)
    why = r"cannot be lengthened to 5: the learning rates of training\.schedule follow from"
    with refused(why), opened(tmp_path, longer, POPULATION, SCHEDULE):
        pass


def test_a_longer_run_is_of_the_release_that_began_it(tmp_path, made, monkeypatch):
    before = results(made)
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    with refused("was begun on cpu"), opened(tmp_path, make_run(rounds=5), POPULATION, SCHEDULE):
        pass
    assert results(made) == before


def test_two_processes_cannot_have_one_folder(tmp_path):
    with (
        opened(tmp_path, RUN, POPULATION, SCHEDULE),
        refused("another process runs with this folder; stop it first"),
        opened(tmp_path, RUN, POPULATION, SCHEDULE),
    ):
        pass
    with opened(tmp_path, RUN, POPULATION, SCHEDULE) as folder:
        assert folder.begun() is None


def test_another_release_does_not_go_on_and_still_shows_what_is_over(tmp_path, made, monkeypatch):
    cut, anew = make_run(seed=8), make_run(seed=9)
    conduct(tmp_path, cut, POPULATION, 2, Schedule(2, 1))
    conduct(tmp_path, anew, POPULATION, 1)
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    why = (
        r"was begun on cpu with Staddle .*, here it would be on cpu with .* torch 9\.9\.9,"
        r" which may"
    )
    with refused(why), opened(tmp_path, cut, POPULATION, SCHEDULE):
        pass
    with opened(tmp_path, RUN, POPULATION, SCHEDULE) as folder:
        assert folder.finished
    with opened(tmp_path, anew, POPULATION, SCHEDULE) as folder:
        assert (folder.begun(), folder.history) == (None, ())  # nothing is lost with it


def test_a_run_that_a_cpu_began_is_not_gone_on_with_on_a_gpu(tmp_path):
    cut = make_run(seed=8)
    conduct(tmp_path, cut, POPULATION, 2, Schedule(2, 1))
    why = r"was begun on cpu with .*, here it would be on cuda \(NVIDIA H200\) with"
    with refused(why), opened(tmp_path, cut, POPULATION, SCHEDULE, "cuda (NVIDIA H200)"):
        pass


def test_a_folder_of_something_else_is_refused(tmp_path):
    path = folder_of(tmp_path, RUN)
    path.mkdir(parents=True)
    (path / "thesis.tex").write_text("mine")
    with (
        refused(r"has no run\.json, but 'thesis\.tex'; choose another --out, or move that"),
        opened(tmp_path, RUN, POPULATION, SCHEDULE),
    ):
        pass
    assert (path / "thesis.tex").read_text() == "mine"


def test_a_file_where_the_folder_would_be_is_told(tmp_path):
    (tmp_path / "fedavg").write_text("")
    with (
        pytest.raises(UnwritableError, match=r"seed-7: cannot use it: .*; check the folder"),
        opened(tmp_path, RUN, POPULATION, SCHEDULE),
    ):
        pass


@pytest.mark.parametrize("label", ["", ".", "..", "a/b", ".hidden", "nul\0"])
def test_a_label_that_is_no_folder_is_refused(tmp_path, label):
    with refused("cannot name a folder"):
        folder_of(tmp_path, replace(RUN, label=label))


def test_a_label_is_the_folder(tmp_path):
    expected = tmp_path / "pfedsim ρ=0.3" / "seed-7"
    assert folder_of(tmp_path, replace(RUN, label="pfedsim ρ=0.3")) == expected


def test_an_error_of_who_runs_it_comes_through_and_lets_the_folder_go(tmp_path):
    with pytest.raises(BrokenPipeError), opened(tmp_path, RUN, POPULATION, SCHEDULE):
        raise BrokenPipeError
    with opened(tmp_path, RUN, POPULATION, SCHEDULE):
        pass


def test_what_a_dead_process_left_half_written_goes(tmp_path, made):
    left = [
        made / name
        for name in (".silos.csv.00.tmp", "models/.a.safetensors.00.tmp", "snapshot/.x.tmp")
    ]
    for path in left:
        path.write_bytes(b"half")
    (made / "notes.tmp").write_bytes(b"mine")
    conduct(tmp_path, RUN, POPULATION)
    assert not any(path.exists() for path in left)
    assert (made / "notes.tmp").exists()


# A kill at any call that changes the disk, of a run that trains nothing.
LIFE = make_run(silos=("s3", "s1", "s0", "s2"))
ALIVE = make_population(silos=LIFE.job.silos)
STORY = {snapshot.round: snapshot for snapshot in story(LIFE.job.length)}


def measures(rounds):
    return [of_counts(rounds, "selected/after", {"a": rounds}, {"a": 99})]


def live(out, promise, run=LIFE):
    """All of a run's life on disk; ``promise`` is told the round that is kept."""
    with opened(out, run, ALIVE, SCHEDULE) as folder:
        if folder.finished:
            return
        snapshot = folder.begun()
        at = 0 if snapshot is None else snapshot.round
        assert at == 0 or told(snapshot) == told(STORY[at])
        assert [one.rounds for one in folder.history] == list(range(1, at + 1))
        promise(at)
        while at < run.job.length:
            at += 1
            folder.record(measures(at))
            folder.save_snapshot(STORY[at])
            promise(at)
        counts = dict.fromkeys(LIFE.job.silos, 1)
        seen = {silo: Seen(right(1, 1), right(1, 0)) for silo in LIFE.job.silos}
        last = [of_counts(at, "all/aggregated", counts, counts)]
        folder.keep_models(STORY[at].held.items())
        folder.finish(last, {}, seen)


def test_a_kill_at_any_call_of_a_run_changes_no_result(tmp_path, quick, monkeypatch):
    live(tmp_path / "whole", lambda _: None)
    whole = results(folder_of(tmp_path / "whole", LIFE))
    monkeypatch.setattr(disk, "CALLS", (*disk.CALLS, "unlink"))
    nth, promised = 1, 0
    while promised is not None:
        out, seen = tmp_path / str(nth), []
        promised = killed(out, nth, "torn", live)
        live(out, seen.append)
        assert promised is None or seen[0] >= promised
        assert results(folder_of(out, LIFE)) == whole
        assert not list(out.rglob("*.tmp"))
        nth += 5
    assert nth > 60


def test_a_kill_while_it_is_lengthened_changes_no_result(tmp_path, quick, monkeypatch):
    live(tmp_path / "whole", lambda _: None)
    whole = results(folder_of(tmp_path / "whole", LIFE))
    short = make_run(silos=LIFE.job.silos, rounds=2)
    live(tmp_path / "short", lambda _: None, short)
    monkeypatch.setattr(disk, "CALLS", (*disk.CALLS, "unlink"))
    # Results go, snapshot.json and run.json are replaced; what follows is seen above.
    for nth in range(1, 25, 2):
        out, seen = tmp_path / str(nth), []
        shutil.copytree(tmp_path / "short", out)
        killed(out, nth, "torn", live)
        live(out, seen.append)
        assert seen[0] >= 2
        assert results(folder_of(out, LIFE)) == whole


@pytest.mark.parametrize("elsewhere", ["../../own.txt", "models/../../../own.txt", "{}/own.txt"])
def test_an_edited_list_of_results_removes_nothing_elsewhere(made, elsewhere):
    own = made.parents[1] / "own.txt"
    own.write_text("of somebody")
    index = json.loads((made / "snapshot.json").read_text())["index"]
    index["finished"]["results"].append(elsewhere.format(own.parent))
    digest = sha256(canonical_json(index)).hexdigest()
    sealed = canonical_json({"index": index, "sha256": digest})
    (made / "snapshot.json").write_bytes(sealed + b"\n")
    longer = make_run(rounds=RUN.job.rounds + 1)
    with refused(r"snapshot\.json.*finished\.results.*restore it"):
        conduct(made.parents[1], longer, POPULATION)
    assert own.exists()


def test_a_full_disk_at_any_call_is_told_and_changes_no_result(tmp_path, quick, monkeypatch):
    live(tmp_path / "whole", lambda _: None)
    whole = results(folder_of(tmp_path / "whole", LIFE))
    monkeypatch.setattr(disk, "CALLS", (*disk.CALLS, "unlink"))
    nth, failed = 1, True
    while failed:
        out, promised, failed = tmp_path / str(nth), [0], False
        with monkeypatch.context() as patch:
            Calls(patch, nth, failing(errno.ENOSPC))
            try:
                live(out, promised.append)
            except UnwritableError as error:
                failed = "make room" in str(error)
        seen = []
        live(out, seen.append)
        assert not seen or seen[0] >= promised[-1]
        assert results(folder_of(out, LIFE)) == whole
        nth += 2
    assert nth > 60


def test_models_are_those_that_the_silos_keep(tmp_path, quick):
    live(tmp_path, lambda _: None)
    path = folder_of(tmp_path, LIFE) / "models" / "s0.safetensors"
    assert path.read_bytes() == state_to_bytes(STORY[LIFE.job.length].held["s0"])
