"""``staddle simulate`` from the command line; what single modules do is tested with them."""

import hashlib
import json
import os
import re
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import typer
from sklearn.datasets import load_digits
from support.start_weights import extractor, save_start
from typer.testing import CliRunner

from staddle.algorithms.engines.engine import Serial
from staddle.commands.simulate import simulate
from staddle.errors import LocalError
from staddle.security.log.lock import locked
from staddle.simulator.report import curves, heatmaps, report

FILE = """\
version = 1
name = "toy"
seeds = [1, 2]
rounds = {rounds}
participation = 0.75

[data]
file = "digits.npz"

[partition]
kind = "dirichlet"
silos = 4
alpha = 1.0
minimum = 8

[model]
name = "cnn-digits"
classes = 10

[training]
batch_size = 16
lr = 0.1

{methods}

[simulation]
look_every = {looks}
snapshot_every = 2
"""
TWO = (
    '[[methods]]\nname = "fedavg"\n\n[[methods]]\nname = "pfedsim"\nlabel = "early"\noptions = {'
    " rho = 0.3 }"
)
DRAWN = '\n[[methods]]\nname = "fedper"\nlabel = "drawn"\n'
KILLED = Path(__file__).with_name("killed.py")
ONE, RUN = ("--method", "early", "--seed", "2"), "early/seed-2"
FIVE = """\
[[methods]]
name = "pfedsim"

[[methods]]
name = "fedsimsup"
options = { tau_theta = 1 }

[[methods]]
name = "fedssa"

[[methods]]
name = "ppfl"
options = { lam = 0 }

[[methods]]
name = "fedaims"
model = { name = "convnet-digits" }
"""

app = typer.Typer()
app.command()(simulate.simulate)


@pytest.fixture
def quick(monkeypatch):
    """A disk that is never waited for."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def undrawn(quick, monkeypatch):
    """Pictures are the text of what they show: to draw them takes most of a run this short."""
    monkeypatch.setattr(report, "_drawn", lambda population: str([*population.records]).encode())
    for module, name in ((curves, "curves"), (curves, "spread"), (heatmaps, "png")):
        monkeypatch.setattr(module, name, lambda *shown, **form: repr((shown, form)).encode())


@pytest.fixture
def write(tmp_path):
    """Writes the file, and records beside it."""
    x, y = load_digits(return_X_y=True)
    pictures = (x[:160] / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    np.savez(tmp_path / "digits.npz", x=pictures, y=y[:160])

    def write(methods=TWO, rounds=2, looks=1):
        (tmp_path / "toy.toml").write_text(FILE.format(methods=methods, rounds=rounds, looks=looks))
        return tmp_path / "toy.toml"

    return write


def said(file, *arguments):
    result = CliRunner().invoke(app, [str(file), "--workers", "1", *arguments])
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def refused(file, *arguments):
    result = CliRunner().invoke(app, [str(file), "--workers", "1", *arguments])
    assert isinstance(result.exception, LocalError), (result.output, result.exception)
    return str(result.exception)


def results(out):
    """What an experiment came to, by file; without the report's own durations."""
    found = {path.relative_to(out).as_posix(): path for path in out.rglob("*") if path.is_file()}
    own = re.compile("LOCK|snapshot|summary.md|seconds")
    kept = {name: path.read_bytes() for name, path in found.items() if not own.search(name)}
    # Its last column is seconds.
    if "results.csv" in kept:
        lines = kept["results.csv"].splitlines()
        kept["results.csv"] = [line.rpartition(b",")[0] for line in lines]
    return kept


@pytest.mark.usefixtures("quick")
def test_a_setting_of_the_command_line_is_in_the_run_and_checked_as_the_files(write, tmp_path):
    out = tmp_path / "out"
    said(write(), *ONE, "--set", "training.lr=0.125", "--out", str(out))
    (manifest,) = out.glob("*/seed-*/run.json")
    assert json.loads(manifest.read_text())["job"]["training"]["lr"] == "0.125"
    assert "training.lrr" in refused(write(), *ONE, "--set", "training.lrr=1", "--out", str(out))
    assert "training.lr is 0.125 there" in refused(write(), *ONE, "--out", str(out))


@pytest.mark.usefixtures("quick")
def test_methods_and_seeds_one_after_another_and_nothing_twice(write, tmp_path):
    shown = said(write()).output
    out = tmp_path / "toy"
    assert "4 silos with 1" in shown
    runs = [(label, seed) for label in ("fedavg", "early") for seed in (1, 2)]
    begun = [f"{label}, seed {seed}: begins, of 2" for label, seed in runs]
    assert [line for line in shown.splitlines() if "begins" in line] == begun
    assert shown.index("│ fedavg") < shown.index("│ early")  # the file's order
    assert str(out / "summary.md") in shown
    files = results(out)
    assert {"results.csv", "curves.png", "spread.png", "partition.json", "partition.png"} <= set(
        files
    )
    assert {"fedavg/seed-1/work.jsonl", "early/seed-2/silos.csv"} <= set(files)
    assert {"early/seed-2/heatmap.png", "early/seed-1/models/silo-003.safetensors"} <= set(files)
    (out / "curves.png").unlink()
    again = said(write(), "--json")
    told = json.loads(again.stdout)
    assert "begins" not in again.output
    assert results(out) == files
    assert [method["label"] for method in told["methods"]] == ["fedavg", "early"]
    assert [run["seed"] for run in told["methods"][1]["runs"]] == [1, 2]
    last = {"measure": "all/trained", "average": "macro", "choice": "last"}
    (score,) = [one for one in told["methods"][0]["scores"] if last.items() <= one.items()]
    assert score["seeds"] == 2
    assert f"{100 * score['mean']:.2f} ± {100 * score['deviation']:.2f}" in shown
    assert "mean over the silos: accuracy on their test records, in percent, after the" in shown


@pytest.mark.usefixtures("undrawn")
def test_a_sweep_ranks_its_variants_and_a_new_value_runs_alone(write, tmp_path):
    grid = '[[methods]]\nname = "local"\n\n[sweep]\ntraining.lr = [0.001, 0.1]'
    ratio = '\n\n[split]\nratio = "8:1:1"'
    methods = f'[[methods]]\nname = "fedavg"\ntraining = {{ lr = 0.1 }}\n\n{grid}{ratio}'
    said(write(methods), "--seed", "1")
    before = results(tmp_path / "toy")
    more = write(methods.replace("0.001, 0.1", "0.001, 0.1, 0.01"))
    shown = said(more, "--seed", "1").output
    begun = [line for line in shown.splitlines() if "begins" in line]
    assert begun == ["local+lr=0.01, seed 1: begins, of 2"]
    assert "best of the variants: validation records rank them" in shown
    after = results(tmp_path / "toy")
    kept = {name for name in before if "/seed-1/" in name}
    assert all(after[name] == before[name] for name in kept)
    head, *table = [line.split(",") for line in after["sweep.csv"].decode().splitlines()]
    assert head[:4] == ["method", "rank", "label", "training.lr"]
    assert [row[:2] for row in table] == [["local", "1"], ["local", "2"], ["local", "3"]]
    assert {row[2] for row in table} == {f"local+lr={row[3]}" for row in table}
    # The report compares the best; the table of all results has them all.
    best, *others = [row[2] for row in table]
    drawn = after["curves.png"].decode()
    assert f"'{best}'" in drawn
    assert "'fedavg'" in drawn
    assert f"│ {best} " in shown
    for label in others:
        assert f"'{label}'" not in drawn
        assert f"│ {label} " not in shown
        assert any(line.startswith(label.encode()) for line in after["results.csv"])
    told = json.loads(said(more, "--seed", "1", "--json").stdout)
    assert [row["rank"] for row in told["sweep"]] == [1, 2, 3]
    assert len(told["methods"]) == 4
    # Without the table it is no longer a sweep.
    said(write(methods.replace("[sweep]\ntraining.lr = [0.001, 0.1]", "")), "--seed", "1")
    assert not (tmp_path / "toy" / "sweep.csv").exists()


@pytest.mark.usefixtures("undrawn")
def test_finished_runs_are_lengthened_to_the_bytes_of_longer_ones(write, tmp_path):
    """Seed after seed; in looks every second round, that after the third is no longer one."""
    file, local = write(rounds=3, looks=2), ("--method", "fedavg", "--rounds", "4")
    said(file, "--method", "fedavg")
    first = said(file, *local, "--seed", "1").output
    assert "fedavg, seed 1: resumes after round 3, of 4" in first
    # The other seed does not compare with it, until it is as long.
    assert re.search(r"│ fedavg +│ 1 +│ 4 ", first)
    assert re.search(r"│ fedavg +│ 2 +│ 4 ", said(file, *local).output)
    said(file, *local, "--out", str(tmp_path / "whole"))
    assert results(tmp_path / "toy") == results(tmp_path / "whole")
    history = (tmp_path / "toy" / "fedavg" / "seed-1" / "history.jsonl").read_text()
    assert '"rounds":3,"measure":"selected/after"' in history
    assert '"rounds":3,"measure":"all/trained"' not in history
    told = refused(file, "--method", "fedavg")
    assert "a run of 4 rounds, which cannot be shortened to 3; give 4 rounds or more" in told


@pytest.mark.usefixtures("undrawn")
def test_one_method_one_seed_fewer_rounds_elsewhere(write, tmp_path):
    out = tmp_path / "o" / "p"
    one = ("--method", "pfedsim", "--seed", "5", "--rounds", "1", "--out", str(out))
    assert "early, seed 5: round 1 of 1" in said(write(rounds=9), *one).output
    assert [path.name for path in out.glob("*/*") if path.is_dir()] == ["seed-5"]


@pytest.mark.usefixtures("undrawn")
def test_all_five_methods(write):
    shown = said(write(FIVE, rounds=1), "--seed", "1").output
    *rows, majority = [line for line in shown.splitlines() if line.startswith("│")]
    assert "always the most frequent class" in majority
    assert [row.split()[1] for row in rows] == ["pfedsim", "fedsimsup", "fedssa", "ppfl", "fedaims"]
    assert all(len(re.findall(r"\d\.\d\d ", row)) == 4 for row in rows)


@pytest.mark.usefixtures("undrawn")
def test_what_cannot_be_one_experiment_is_refused_before_anything_is_trained(
    write, tmp_path, monkeypatch
):
    file, out = write(), tmp_path / "toy"
    said(file, "--seed", "1", "--method", "fedavg")
    files = results(out)
    text = file.read_text()
    for old, new, fault in (
        ("lr = 0.1", "lr = 0.2", r"training.lr is 0.1 there and 0.2 here; choose another --out"),
        ("alpha = 1.0", "alpha = 2.0", "the silos have other numbers of records"),
        ('name = "toy"', 'name = "other"', "name is toy there and other here"),
    ):
        file.write_text(text.replace(old, new))
        assert fault in refused(file, "--out", str(out))
        # seeds of one label are one method
        assert fault in refused(file, "--out", str(out), "--seed", "3")
    file.write_text(text.replace("alpha = 1.0", "alpha = 2.0"))
    assert "holds a run on other records" in refused(file, "--method", "early")
    file.write_text(text + "\n[attendance]\nabsent = 0.1\n")
    assert "attendance.absent is 0.0 there and 0.1 here" in refused(file, "--method", "fedavg")
    assert "holds a run with another [attendance]" in refused(file, "--method", "early")
    file.write_text(text)
    assert "no method is labelled or named 'late'; " in refused(file, "--method", "late")
    assert "is not a folder; choose another --out" in refused(file, "--out", str(file))
    with locked(out / "fedavg" / "seed-1"):
        assert "another process runs with this folder" in refused(file)
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert "is not installed; pip install" in refused(file, "--track", "wandb")
    assert results(out) == files


@pytest.mark.usefixtures("undrawn")
def test_what_is_for_a_gpu_is_refused_on_a_cpu(write):
    error = refused(write(), "--one-by-one", "--precision", "tf32", "--no-graphs")
    assert error.startswith("--no-graphs and --one-by-one and --precision tf32: for a GPU alone")


def test_the_error_of_many_faults_tells_the_first_ones():
    with pytest.raises(
        LocalError, match=r"^5 runs of 9 could not continue: a; b; c; and 2 more, as shown above$"
    ):
        simulate.raise_faults(list("abcde"), 9)


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_fails_keeps_no_other_from_its_turn(write, tmp_path):
    diverging = '[[methods]]\nname = "fedavg"\ntraining = { lr = 1e30 }'
    file = write(f'{diverging}\n\n[[methods]]\nname = "local"', rounds=1)
    result = CliRunner().invoke(app, [str(file), "--workers", "1", "--seed", "1"])
    assert isinstance(result.exception, LocalError)
    lines = result.output.splitlines()
    fault = next(line for line in lines if line.startswith("fedavg, seed 1: round 0 at silo "))
    assert str(result.exception) == f"1 run of 2 could not continue: {fault}"
    assert "│ local" in result.output
    assert (tmp_path / "toy" / "summary.md").exists()


@pytest.mark.usefixtures("undrawn")
def test_ended_by_a_signal_it_goes_on_where_it_was(write, tmp_path, monkeypatch):
    """SIGTERM in the third round, which is lost; not so the two before it."""
    file, trained = write(rounds=4), []

    def train(self, *work):
        trained.append(work)
        if len(trained) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_all(self, *work)

    with monkeypatch.context() as patch:
        train_all = Serial.train
        patch.setattr(Serial, "train", train)
        told = refused(file, *ONE)
    assert told == "early, seed 2: stopped; the same command resumes after round 2 of 4"
    assert "early, seed 2: resumes after round 2, of 4" in said(file, *ONE).output
    said(file, *ONE, "--out", str(tmp_path / "whole"))
    assert results(tmp_path / "toy") == results(tmp_path / "whole")


@pytest.mark.usefixtures("undrawn")
def test_methods_may_begin_with_files_of_their_own(write, tmp_path, monkeypatch):
    """Stopped after the first of two seeds, with one process; without a stop, with two."""
    save_start(tmp_path / "w.safetensors")
    weights = 'model = { weights = { file = "w.safetensors" } }'
    file = write(f'[[methods]]\nname = "fedper"\nlabel = "early"\n{weights}\n{DRAWN}')
    said(file, "--method", "early", "--seed", "1")
    said(file, "--method", "early")
    run = json.loads((tmp_path / "toy" / RUN / "run.json").read_text())
    assert run["job"]["model"]["weights"]["sha256"] == sha256_of(tmp_path / "w.safetensors")
    whole = ("--out", str(tmp_path / "whole"), "--workers", "2")
    assert CliRunner().invoke(app, [str(file), *whole]).exit_code == 0
    both = results(tmp_path / "toy"), results(tmp_path / "whole")
    models = [name for name in both[0] if name.startswith("early/") and "models/" in name]
    assert len(models) == 8
    assert all(both[0][name] == both[1][name] for name in models)
    assert all(both[1][name] != both[1][name.replace("early", "drawn")] for name in models)
    # another file is another run
    save_start(tmp_path / "w.safetensors", extractor(3))
    assert "model.weights.sha256" in refused(file, "--method", "early", "--seed", "1")
    (tmp_path / "w.safetensors").unlink()
    assert "w.safetensors: cannot read it: No such file" in refused(file)


def sha256_of(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def begin(fork_server):
    """Begins the command as a process of its own, which does not outlive the test.

    It is forked where torch is imported already, and dies once it has done so many rounds.
    """
    with ExitStack() as stack:

        def begin(file, out, workers, rounds):
            command = [str(KILLED), str(rounds), str(file), "--out", str(out), *ONE]
            process = fork_server.launch([sys.executable, "-P", *command, "--workers", workers])
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        yield begin


def test_killed_and_gone_on_with_it_ends_in_the_same_bytes(write, begin, tmp_path, monkeypatch):
    """By kill -9, after the first snapshot, of two workers.

    And in a later round, of one process.
    """
    # it is seen above
    monkeypatch.setattr(simulate, "write_report", lambda out, *_: (out / "summary.md",))
    file, outs = write(rounds=8, looks=8), [tmp_path / "two", tmp_path / "one"]
    dying = begin(file, outs[0], "2", 3), begin(file, outs[1], "1", 5)
    assert [process.wait() for process in dying] == [-signal.SIGKILL] * 2
    for out, rounds in zip(outs, (2, 4), strict=True):
        assert not (out / RUN / "silos.csv").exists()
        again = said(file, *ONE, "--out", str(out)).output
        assert f"resumes after round {rounds}, of 8" in again
    said(file, *ONE, "--out", str(tmp_path / "whole"))
    for out in outs:
        assert results(out) == results(tmp_path / "whole")


def test_results_do_not_lie_among_the_records(tmp_path):
    """Which are all that is in their folder."""
    (tmp_path / "scans" / "benign").mkdir(parents=True)
    text = EXAMPLE_OF_FOLDER.format(name="scans")
    (tmp_path / "scans.toml").write_text(text)
    file = tmp_path / "scans.toml"
    assert "scans: is the folder of the records, or in it; choose another by --out" in refused(file)
    inside = str(tmp_path / "scans" / "benign" / "out")
    assert "out: is the folder of the records, or in it" in refused(file, "--out", inside)


EXAMPLE_OF_FOLDER = """
version = 1
name = "{name}"
rounds = 1
seed = 1
[data]
kind = "images"
folder = "scans"
[partition]
kind = "dirichlet"
alpha = 1.0
silos = 2
[model]
name = "cnn-digits"
classes = 2
[training]
lr = 0.1
[method]
name = "fedavg"
"""
