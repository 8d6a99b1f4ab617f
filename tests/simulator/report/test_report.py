import csv

import pytest
from support.pictures import pixels
from support.refusals import refused
from support.simulated_jobs import conduct, make_population, make_run

from staddle.simulator.report import curves
from staddle.simulator.report.report import write_report

POPULATION = make_population()


@pytest.fixture(scope="module")
def out(tmp_path_factory, quick):
    """Two methods with two seeds, one of which has heat maps, and a run that was cut off."""
    out = tmp_path_factory.mktemp("out")
    for run, until in (
        (make_run("ppfl", 2, rounds=1), None),
        (make_run("ppfl", 1, rounds=1), None),
        (make_run("local", 1, rounds=1), None),
        (make_run("fedavg", 1), 2),
    ):
        conduct(out, run, POPULATION, until)
    return out


@pytest.fixture
def undrawn(monkeypatch):
    """Without the pictures that take longest."""
    monkeypatch.setattr(curves, "curves", lambda _, **__: b"curves")
    monkeypatch.setattr(curves, "spread", lambda _, **__: b"spread")


def test_all_that_is_finished_is_compared(out):
    written = write_report(out, POPULATION, ["ppfl", "local"])
    names = [path.relative_to(out).as_posix() for path in written]
    assert names == [
        "summary.md", "results.csv", "curves.png", "bytes.png", "seconds.png", "spread.png",
        "partition.png", "ppfl/seed-1/heatmap.png", "ppfl/seed-2/heatmap.png",
    ]  # fmt: skip
    text = written[0].read_text()
    assert text.index("- **ppfl**") < text.index("- **local**")
    assert "fedavg" not in text
    for name in names[2:8]:
        assert f"]({name})" in text
        assert pixels((out / name).read_bytes()).size
    assert "- [Heat map of ppfl, seed 2](ppfl/seed-2/heatmap.png)" in text


def test_the_same_runs_give_the_same_bytes(out, undrawn):
    before = {path: path.read_bytes() for path in write_report(out, POPULATION)}
    assert {path: path.read_bytes() for path in write_report(out, POPULATION)} == before


def test_without_a_population_it_is_what_the_runs_say(out, undrawn):
    names = [path.relative_to(out).as_posix() for path in write_report(out)]
    assert names == [
        "summary.md", "results.csv", "curves.png", "bytes.png", "seconds.png", "spread.png",
        "ppfl/seed-1/heatmap.png", "ppfl/seed-2/heatmap.png",
    ]  # fmt: skip


def test_without_the_seconds_of_a_run_there_is_no_picture_over_time(out, undrawn):
    """And all else stays."""
    (out / "ppfl" / "seed-1" / "seconds.csv").unlink()
    names = [path.relative_to(out).as_posix() for path in write_report(out)]
    assert names[:4] == ["summary.md", "results.csv", "curves.png", "bytes.png"]
    assert "seconds.png" not in names
    rows = list(csv.DictReader((out / "results.csv").open()))
    assert {row["seconds"] for row in rows if (row["label"], row["seed"]) == ("ppfl", "1")} == {""}
    assert "" not in {row["seconds"] for row in rows if row["seed"] == "2"}


def test_nothing_is_written_where_nothing_can_be_compared(tmp_path, out, undrawn):
    with refused("no run in it is finished"):
        write_report(tmp_path)
    assert not list(tmp_path.iterdir())
    write_report(out)
    before = (out / "summary.md").read_bytes()
    with refused("its silos held other records than now"):
        write_report(out, make_population("6a" * 32))
    assert (out / "summary.md").read_bytes() == before
