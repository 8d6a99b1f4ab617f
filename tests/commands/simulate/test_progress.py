from types import SimpleNamespace

import pytest
from rich.console import Console
from support.counted import of_counts, of_scores

from staddle.algorithms.tasks.class_counting import ACCURACY
from staddle.algorithms.tasks.counting import ScoreForm
from staddle.commands.simulate.progress import Bars, Lines, ReplacedLines, scores, shown
from staddle.commands.terminal.printer import Screen
from staddle.simulator.experiment.plan import Run

DAYS = ScoreForm("mae", "MAE", "always the median", share=False, higher=False, unit="days")


def run(label="pfedsim", seed=1, rounds=4, form=ACCURACY):
    job = SimpleNamespace(rounds=rounds, counting=SimpleNamespace(score=form))
    return Run(label, seed, job)


def seen(rounds, measure="all/trained", correct=1):
    return of_counts(rounds, measure, {"a": correct, "b": 4}, {"a": 2, "b": 8})


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def told():
    lines = []
    clock = Clock()
    return lines, clock, Lines(lines.append, clock)


def test_a_line_every_ten_seconds_and_at_the_end(told):
    lines, clock, watch = told
    watch.begin(run(), 0)
    for number, seconds in enumerate((6, 6, 6, 1), 1):
        watch.work("training", 2)
        watch.silo()
        clock.now += seconds
        watch.round(number, (seen(number),) if number == 2 else ())
    accuracies = "accuracy trained 50.0%, the same answer for all 100.0% (macro)"
    assert lines == [
        "pfedsim, seed 1: begins, of 4",
        f"pfedsim, seed 1: round 2 of 4, 6 s/round, 0:00:12 left; {accuracies}",
        f"pfedsim, seed 1: round 4 of 4, 4.75 s/round; {accuracies}",
    ]


def test_a_run_that_goes_on_is_timed_from_there_and_a_finished_one_says_nothing(told):
    lines, clock, watch = told
    watch.begin(run(), 4)
    assert lines == []
    watch.begin(run(seed=2), 3)
    clock.now += 0.5
    watch.round(4, ())
    assert lines == [
        "pfedsim, seed 2: resumes after round 3, of 4",
        "pfedsim, seed 2: round 4 of 4, 2 rounds/s",
    ]


def test_a_score_has_the_words_of_each_runs_task(told):
    lines, _, watch = told
    look = of_scores(1, "all/trained", {"a": 2.0, "b": 4.5}, {"a": 2, "b": 8})
    for one in (run(form=DAYS, rounds=1), run("local", rounds=1)):
        watch.begin(one, 0)
        watch.round(1, (look if one.label == "pfedsim" else seen(1),))
    assert lines[1].endswith("; MAE trained 3.25 days, the same answer for all 5 days (macro)")
    assert lines[3].endswith("; accuracy trained 50.0%, the same answer for all 100.0% (macro)")


def test_bars_on_a_terminal_count_what_was_done_before():
    console = Console(force_terminal=True, width=150, height=30)
    runs, clock = [run(rounds=4), run("local", rounds=4)], Clock()
    with console.capture() as said, Screen(console=console).progress() as progress:
        watch = Bars(progress, runs, clock)
        for one, begun in zip(runs, (4, 2), strict=True):
            watch.begin(one, begun)
            for number in range(begun + 1, 4):
                watch.work("looking", 2)
                watch.silo()
                clock.now += 60
                watch.round(number, (seen(number), seen(number, "all/aggregated", 2)))
    last = said.get().splitlines()
    assert any("all 2 runs" in line and "7/8" in line and "0:01:00 left" in line for line in last)
    assert any(
        "local, seed 1" in line
        and "3/4" in line
        and "accuracy trained 50.0%, aggregated 75.0%" in line
        for line in last
    )
    assert any("looking" in line and "1/2" in line for line in last)


def test_in_a_notebook_each_run_has_a_line_that_is_replaced():
    shown_last, clock = [], Clock()

    def replace(lines):
        shown_last[:] = lines

    watch = ReplacedLines(replace, clock)
    watch.begin(run("local", rounds=1), 1)
    watch.begin(run("fedavg", rounds=1), 0)
    assert shown_last == ["fedavg, seed 1: begins, of 1"]
    clock.now += 0.1
    watch.round(1, (seen(1),))
    fedavg = (
        "fedavg, seed 1: round 1 of 1, 10 rounds/s; accuracy trained 50.0%, the same answer for all"
        " 100.0% (macro)"
    )
    watch.begin(run(), 3)
    watch.work("training", 2)
    clock.now += 0.4
    watch.silo()
    begun = "pfedsim, seed 1: resumes after round 3, of 4"
    assert shown_last == [fedavg, begun]  # too soon
    clock.now += 0.1
    watch.silo()
    assert shown_last == [fedavg, f"{begun}; training 2 of 2 silos"]
    watch.round(4, ())
    assert shown_last == [fedavg, "pfedsim, seed 1: round 4 of 4, 2 rounds/s"]


def test_a_terminal_has_bars_a_log_lines_and_scores_are_of_all_silos_or_none():
    for terminal, kind in ((True, Bars), (False, Lines)):
        screen = Screen(console=Console(force_terminal=terminal, quiet=True))
        with shown(screen, [run()]) as watch:
            assert isinstance(watch, kind)
    assert scores((seen(1, "selected/after"),), ACCURACY) == ""
