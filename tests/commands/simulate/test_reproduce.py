"""``staddle reproduce`` from the command line, on a table of its own.

What single modules do is tested with them.
"""

import csv
import json
import os
import re
import shutil
import signal

import numpy as np
import pytest
import typer
from sklearn.datasets import load_digits
from typer.testing import CliRunner

from staddle.algorithms.engines.engine import Serial
from staddle.commands.simulate import published as reproduce_tables
from staddle.commands.simulate import published_runs, reproduce
from staddle.errors import LocalError
from staddle.simulator.reproduce import published
from staddle.simulator.reproduce.costs import parse_costs

TABLE = b"""\
citation = "A, B, 'Toys', 2026"
seeds = 2

[common]
rounds = 2
participation = 0.5
training = { batch_size = 16, lr = 0.1 }
model = { name = "cnn-digits", classes = 10 }

[settings.easy]
title = "Easy digits"
data = { file = "digits.npz" }
partition = { kind = "dirichlet", silos = 8, alpha = 1.0, minimum = 8 }

[settings.hard]
title = "Hard digits"
data = { file = "hard/digits.npz" }
partition = { kind = "dirichlet", silos = 8, alpha = 0.5, minimum = 8 }

[[tables]]
name = "table1"
title = "Accuracy on toys"
unit = "percent"
score = { measure = "all/trained", average = "micro", choice = "last" }
columns = [{ setting = "easy" }, { setting = "hard" }]
notes = ["[R] made up"]

[[tables.rows]]
title = "Local-Only"
method = { name = "local" }
published = ["50.0 (1.5)", "40.0 (2.5)"]

[[tables.rows]]
title = "FedPer [9]"
method = { name = "fedper" }
published = ["60.0", "50.0"]

[[tables.rows]]
title = "FedFuture [7]"
method = { name = "fedfuture" }
published = ["99.9", "99.8"]

[[tables.rows]]
title = "Ours"
method = { name = "fedavg", label = "mean" }
published = ["61.0", "51.0"]

[[costs]]
name = "table2"
title = "Costs of toys"
of = "table1"
columns = [{ setting = "easy" }]
notes = ["[P] in MB"]

[[costs.rows]]
title = "Model Size"
row = "Ours"
quantity = "bytes of the model"
published = ["0.07"]
"""
SMALL = ("--clients", "4", "--rounds", "1", "--seed", "3", "--setting", "easy", "--workers", "1")

app = typer.Typer()
app.command()(reproduce.reproduce)


@pytest.fixture(autouse=True)
def toys(monkeypatch):
    """The tables; and a disk that is never waited for."""
    tables, costs = published.parse("toys", TABLE), parse_costs("toys", TABLE)
    found = {table.path: table for table in (*tables, *costs)}
    for module in (reproduce, reproduce_tables):
        monkeypatch.setattr(module, "find_any", found.__getitem__)
    monkeypatch.setattr(reproduce_tables, "published", lambda: tables)
    monkeypatch.setattr(reproduce_tables, "published_costs", lambda: costs)
    monkeypatch.setattr(reproduce, "all_tables", lambda: tables)
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def data(tmp_path):
    x, y = load_digits(return_X_y=True)
    pictures = (x[:200] / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    np.savez(tmp_path / "digits.npz", x=pictures, y=y[:200])
    return tmp_path


@pytest.fixture
def reported(monkeypatch):
    """Settings whose summary and pictures would be written: simulate's tests have them."""
    names = []
    monkeypatch.setattr(published_runs, "report", lambda prepared: names.append(prepared.out.name))
    return names


def asked(*arguments):
    return CliRunner().invoke(app, ["toys/table1", *map(str, arguments)])


def said(*arguments):
    result = asked(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def refused(*arguments):
    result = asked(*arguments)
    assert isinstance(result.exception, LocalError), (result.output, result.exception)
    return str(result.exception)


def rows(output):
    """Method and what follows of the table that was printed."""
    lines = [
        [cell.strip() for cell in line.split("│")[2:-1]]
        for line in output.splitlines()
        if line.startswith("│")
    ]
    return {line[0]: line[1:] for line in lines}


def test_a_table_is_run_at_a_smaller_scale_and_nothing_twice(data, monkeypatch, reported):
    monkeypatch.chdir(data)
    shown = said(*SMALL, "--data", data, "--method", "fedper").output
    begun = [line for line in shown.splitlines() if "begins" in line]
    assert begun == [f"{label}, seed 3: begins, of 1" for label in ("local", "fedper", "fedrep")]
    assert "4 silos with" in shown
    found = rows(shown)
    assert list(found) == ["Local-Only", "FedPer [9]", "FedFuture [7]", "Ours", "fedrep"]
    assert (found["FedFuture [7]"], found["Ours"]) == (
        ["99.9", "–", "–", "–"],
        ["61.0", "–", "–", "–"],
    )
    published_value, ours, seeds, difference = found["Local-Only"]
    assert (published_value, seeds) == ("50.0 ± 1.5", "1")
    assert float(difference) == pytest.approx(float(ours) - 50, abs=0.006)
    assert (found["fedrep"][0], found["fedrep"][2:]) == ("–", ["1", "–"])
    warned = "Reduced: 4 instead of 8 clients, 1 instead of 2 rounds. These values do not compare"
    assert shown.count(warned) == 2  # before and after
    text = (data / "toys" / "table1.md").read_text()
    assert warned in text
    assert "4 silos, 3 drawn for a round, 1 rounds." in text
    assert reported == ["easy"]
    with (data / "toys" / "table1.csv").open() as file:
        local, *_ = csv.DictReader(file)
    assert (local["label"], local["silos"], local["rounds"]) == ("local", "4", "1")

    again = said(*SMALL, "--data", data, "--json")
    told = json.loads(again.stdout)
    assert [line for line in again.stderr.splitlines() if "begins" in line] == [
        "mean, seed 3: begins, of 1"
    ]
    assert (told["table"], told["reduced"][0]) == ("toys/table1", "4 instead of 8 clients")
    values = {value["method"]: value for value in told["values"]}
    assert values["Local-Only"]["ours"]["score"]["mean"] == float(local["ours"])
    assert values["Local-Only"]["published"] == {
        "text": "50.0 (1.5)",
        "mean": 0.5,
        "deviation": 0.015,
    }
    assert values["Ours"]["ours"]["rounds"] == 1
    assert values["FedFuture [7]"]["label"] is None

    fault = refused(
        *SMALL[:2], "--setting", "easy", "--seed", "3", "--workers", "1", "--data", data
    )
    assert "rounds is 1 there and 2 here; choose another --out" in fault
    # what is there is not told as if it were at full scale
    assert warned in (data / "toys" / "table1.md").read_text()


@pytest.mark.usefixtures("reported")
def test_where_it_is_stopped_what_is_finished_is_shown_and_it_goes_on(data, monkeypatch):
    trained, train_all = [], Serial.train

    def train(self, *work):
        trained.append(work)
        if len(trained) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_all(self, *work)

    small = (*SMALL, "--data", data, "--out", data / "out")
    with monkeypatch.context() as patch:
        patch.setattr(Serial, "train", train)
        stopped = asked(*small)
    assert isinstance(stopped.exception, LocalError)
    assert (
        str(stopped.exception)
        == "fedper, seed 3: stopped; the same command resumes after round 0 of 1"
    )
    before = rows(stopped.output)
    assert (before["Local-Only"][2], before["FedPer [9]"][2]) == ("1", "–")
    shown = said(*small).output
    assert "local, seed 3: begins" not in shown
    after = rows(shown)
    assert after["Local-Only"] == before["Local-Only"]
    assert after["FedPer [9]"][2] == after["fedrep"][2] == "1"


@pytest.mark.usefixtures("reported")
def test_a_run_that_fails_is_told_with_its_setting(data, monkeypatch):
    def train(self, *_):
        raise LocalError("it cannot")

    monkeypatch.setattr(Serial, "train", train)
    fault = refused(*SMALL, "--data", data, "--method", "local", "--out", data / "out")
    assert (
        fault
        == "2 runs of 2 could not continue: easy, local, seed 3: it cannot; easy, fedrep, seed 3:"
        " it cannot"
    )
    assert not (data / "out" / "table1.md").exists()


def test_what_is_missing_is_told_of_all_settings_before_anything_runs(data):
    fault = refused("--data", data / "nowhere", "--out", data / "out")
    assert fault.startswith(
        f"{data / 'nowhere'}: lacks records of easy, hard; put there the official files"
    )
    assert f"\ndigits.npz: {data / 'nowhere' / 'digits.npz'}\n" in fault
    fault = refused("--data", data, "--out", data / "out")
    assert "lacks records of hard; " in fault
    assert "or choose other settings with --setting" in fault
    assert not (data / "out").exists()
    assert "--data DIR is missing" in refused()
    result = CliRunner().invoke(app, ["--data", str(data)])
    assert str(result.exception).startswith("which table? Name it, such as pfedsim/table3")


def test_the_list_says_what_there_is_and_what_is_missing(data):
    shown = CliRunner().invoke(app, ["--list", "--data", str(data)]).output
    (row,) = [line for line in shown.splitlines() if line.startswith("│ toys/table1")]
    cells = [cell.strip() for cell in row.split("│")[1:-1]]
    assert cells == [
        "toys/table1", "Accuracy on toys", "2", "3 of 4", "digits.npz, digits.npz (missing)",
    ]  # fmt: skip
    assert "missing)" not in CliRunner().invoke(app, ["--list"]).output


def test_one_table_is_listed_with_its_settings_its_values_and_notes(data):
    shown = said("--list", "--data", data).output
    assert "in all settings\n  rounds = 2\n" in shown
    assert '[hard] Hard digits\n  data = { file = "hard/digits.npz" }\n  partition' in shown
    assert f"  missing digits.npz: {data / 'hard' / 'digits.npz'}\n" in shown
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines()]
    assert ["Ours", "mean", "61.0", "51.0"] in cells
    assert "\n[R] made up\nseeds: 2\n" in shown
    assert "  needs digits.npz: DIR/digits.npz\n" in said("--list").output
    (told,) = json.loads(said("--list", "--json").stdout)
    assert (told["table"], [own["name"] for own in told["settings"]]) == (
        "toys/table1",
        ["easy", "hard"],
    )
    assert told["settings"][0]["needs"] == ["digits.npz: DIR/digits.npz"]
    assert told["rows"][3]["labels"] == {"easy": "mean", "hard": "mean"}
    assert told["rows"][2]["published"]["hard"] == {
        "text": "99.8",
        "mean": 0.998,
        "deviation": None,
    }


def asked_of_costs(*arguments):
    return CliRunner().invoke(app, ["toys/table2", *map(str, arguments)])


def test_a_table_of_costs_needs_neither_data_nor_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = asked_of_costs()
    assert printed.exit_code == 0, printed.exception
    quantity, published_value, ours, difference = rows(printed.output)["Model Size"]
    assert (quantity, published_value) == ("bytes of the model", "0.07")
    assert float(difference) == pytest.approx(float(ours) - 0.07, abs=0.006)
    assert "toys/table2.md, toys/table2.csv" in printed.output
    assert "- \\[P\\] in MB\n" in (tmp_path / "toys" / "table2.md").read_text()

    told = json.loads(asked_of_costs("--json", "--out", tmp_path / "out").stdout)
    (value,) = told["values"]
    assert (told["table"], value["row"], value["label"]) == ("toys/table2", "Model Size", "mean")
    with (tmp_path / "out" / "table2.csv").open() as file:
        (line,) = csv.DictReader(file)
    assert int(line["bytes"]) == value["bytes"] == round(value["ours"] * 2**20)


@pytest.mark.parametrize(
    "option", ["--setting=easy", "--method=mean", "--clients=4", "--rounds=1", "--seed=3"]
)
def test_a_table_of_costs_is_counted_whole(option):
    assert "costs is computed whole, and nothing runs" in str(asked_of_costs(option).exception)


def test_a_table_of_costs_is_listed_with_its_values_and_notes():
    shown = CliRunner().invoke(app, ["--list"]).output
    (row,) = [line for line in shown.splitlines() if line.startswith("│ toys/table2")]
    cells = [cell.strip() for cell in row.split("│")[1:-1]]
    assert cells == ["toys/table2", "Costs of toys", "1", "–", "–"]
    shown = asked_of_costs("--list").output
    assert "from the jobs of toys/table1, in MB\n" in shown
    assert rows(shown)["bytes of the model"] == ["0.07"]
    assert "\n[P] in MB\n" in shown
    (told,) = json.loads(asked_of_costs("--list", "--json").stdout)
    assert (told["table"], told["of"]) == ("toys/table2", "toys/table1")
    assert told["rows"][0]["published"] == {"easy": "0.07"}


def test_costs_cannot_be_written_where_a_file_is(tmp_path):
    (tmp_path / "file").touch()
    assert "file: cannot use it: " in str(asked_of_costs("--out", tmp_path / "file").exception)


def everything(*arguments):
    return CliRunner().invoke(app, ["--resume-all", *map(str, arguments)])


@pytest.fixture
def both(data):
    """The records of both settings."""
    (data / "hard").mkdir()
    shutil.copy(data / "digits.npz", data / "hard")
    return data


def counted(output):
    """The table's line: how many runs are finished, and of how many."""
    (line,) = [line for line in output.splitlines() if line.startswith("│ toys/table1")]
    return [cell.strip() for cell in line.split("│")[1:-1]]


def begun(output):
    """Settings and runs, as they began."""
    named = [line for line in output.splitlines() if re.match(r"(easy|hard): |.*: begins", line)]
    return [re.sub(r"(: begins.*|: .*)", "", line) for line in named]


@pytest.mark.usefixtures("reported")
def test_all_tables_are_run_seed_by_seed_and_go_on_after_a_stop(both, monkeypatch):
    small = (
        "--clients",
        "4",
        "--rounds",
        "1",
        "--workers",
        "1",
        "--data",
        both,
        "--out",
        both / "o",
    )
    trained, train_all = [], Serial.train

    def train(self, *work):
        trained.append(work)
        if len(trained) == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_all(self, *work)

    with monkeypatch.context() as patch:
        patch.setattr(Serial, "train", train)
        stopped = everything(*small)
    assert "stopped; the same command resumes" in str(stopped.exception)
    # the first seed of both settings comes before the second seed of any
    each = ["local, seed 1", "fedper, seed 1", "mean, seed 1", "fedrep, seed 1"]
    assert begun(stopped.output) == ["easy", *each, "hard", *each[:2]]
    assert counted(stopped.output) == ["toys/table1", "5", "16"]

    finished = everything(*small)
    assert finished.exit_code == 0, finished.exception
    later = [name.replace("1", "2") for name in each]
    assert begun(finished.output) == [
        "easy", "hard", *each[1:], "easy", *later, "hard", *later,
    ]  # fmt: skip
    assert counted(finished.output) == ["toys/table1", "16", "16"]
    with (both / "o" / "toys" / "table1.csv").open() as file:
        found = {(row["column"], row["label"]): row["seeds"] for row in csv.DictReader(file)}
    assert found["hard", "mean"] == found["easy", "fedrep"] == "2"
    assert (both / "o" / "toys" / "table1.png").read_bytes().startswith(b"\x89PNG")

    (told,) = json.loads(everything(*small, "--json").stdout)
    scored = [value["ours"]["score"] for value in told["values"] if value["ours"]]
    assert (told["table"], [score["seeds"] for score in scored]) == ("toys/table1", [2] * 8)


@pytest.mark.usefixtures("reported")
def test_of_all_tables_what_cannot_run_ends_nothing_else(both, monkeypatch):
    (both / "digits.npz").unlink()
    train_all = Serial.train

    def train(self, *work):
        if type(self._method).__name__ == "FedPer":
            raise LocalError("it cannot")
        return train_all(self, *work)

    monkeypatch.setattr(Serial, "train", train)
    small = ("--clients", "4", "--rounds", "1", "--seed", "3", "--workers", "1", "--data", both)
    ended = everything(*small, "--out", both / "o")
    assert f"left out, since {both} lacks their records: toys/table1 easy." in ended.output
    assert str(ended.exception) == (
        "1 run of 4 could not continue: toys/table1, hard, fedper, seed 3: it cannot"
    )
    assert counted(ended.output) == ["toys/table1", "3", "4"]

    ended = everything("--rounds", "2", *small[:2], *small[4:], "--out", both / "o")
    assert "toys/table1, hard, seed 3: " in str(ended.exception)
    assert "is at another scale" in str(ended.exception)


@pytest.mark.parametrize("named", [["toys/table1"], ["--setting", "easy"], ["--method", "local"]])
def test_all_tables_are_not_some(data, named):
    result = everything("--data", data, *named)
    assert "--resume-all runs all tables" in str(result.exception)


def test_without_any_records_nothing_is_run(data):
    result = everything("--data", data / "nowhere")
    assert "has the records of no table" in str(result.exception)
    assert "--resume-all: --data DIR is missing" in str(everything().exception)
