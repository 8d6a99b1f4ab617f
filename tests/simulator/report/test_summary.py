"""The summary of runs whose histories are a few numbers: each cell is worked out by hand."""

from dataclasses import replace
from importlib.metadata import version
from pathlib import PurePosixPath

import torch
from support import jobs
from support.counted import of_counts, of_scores
from support.finished_runs import POPULATION, finished
from support.refusals import refused
from support.simulated_jobs import SILOS, SMALL, make_population, make_run

from staddle.algorithms.partition.file import PartitionFile
from staddle.simulator.experiment.plan import Run
from staddle.simulator.report.finished_runs import by_label
from staddle.simulator.report.summary import Link, check_comparable, drawn, summary

RECORDS = {"d": 10, "b": 10, "a": 10, "c": 30}  # of a made-up test side
PARTITION = PartitionFile.model_construct(
    data="digits|2",
    records=1797,
    seed=3,
    how={"minimum": 10, "kind": "dirichlet", "split": {"ratio": "8:1:1"}},
)


def measured(rounds, measure, *correct):
    return of_counts(rounds, measure, dict(zip(RECORDS, correct, strict=True)), RECORDS)


def recorded(label, seed, history, method="fedavg", seconds=None, **fields):
    return finished(make_run(method, seed, label, **fields), history, seconds=seconds)


def groups(*runs):
    return by_label(runs)


def row(text, table, label):
    """The cells of a method's row in the table under a heading."""
    lines = text.split(table, 1)[1].splitlines()
    (found, *_) = (line for line in lines if line.startswith(f"| {label} "))
    return [cell.strip() for cell in found.strip("|").split("|")][1:]


LOCAL = [measured(4, "all/aggregated", 5, 5, 5, 15), measured(4, "all/trained", 5, 5, 5, 15)]
FIRST = [
    measured(2, "all/aggregated", 9, 9, 9, 27),
    measured(2, "all/trained", 1, 1, 1, 3),
    measured(2, "validation/trained", 3, 3, 3, 3),
    measured(4, "selected/after", 1, 1, 1, 1),
    measured(4, "all/aggregated", 4, 5, 6, 30),  # 40 %, 50 %, 60 %, 100 %
    measured(4, "all/trained", 2, 2, 2, 12),
    measured(4, "validation/trained", 2, 2, 2, 2),
]
SECOND = [measured(4, "all/aggregated", 4, 5, 6, 18), measured(4, "all/trained", 2, 2, 2, 6)]
TWICE = {"epochs": 2, "batch_size": 8, "lr": 0.1}
TEXT = summary(
    groups(
        recorded("local", 1, LOCAL, "local"),
        recorded("local", 3, LOCAL, "local"),
        recorded("fedavg", 1, FIRST, seconds=10.0, training=TWICE),
        recorded("fedavg", 2, SECOND, seconds=6.0, training=TWICE),
    ),
    PARTITION,
    [
        Link(PurePosixPath("curves.png"), "Accuracy"),
        Link(PurePosixPath("a b/heatmap.png"), "Heat map", shown=False),
    ],
)


def test_what_was_run_and_what_differs():
    lines = {tuple(c.strip() for c in line.strip("|").split(" | ")) for line in TEXT.splitlines()}
    assert ("data", r"digits\|2: 1,797 records") in lines
    assert ("partition", "kind = dirichlet, minimum = 10, seed = 3") in lines
    assert ("split", "ratio = 8:1:1") in lines
    assert ("training records per silo", "16 to 28, median 22; 88 in all") in lines
    assert ("validation records per silo", "7 to 7, median 7; 28 in all") in lines
    assert ("silos drawn per round", "2") in lines
    assert ("training.lr", "0.1") in lines
    assert ("seeds", "1, 2, 3") in lines
    assert ("all silos evaluated", "after every 2 rounds and after the last") in lines
    assert not any(name == r"training.epochs" for name, *_ in lines)
    (told,) = (line for line in TEXT.splitlines() if line.startswith("- **fedavg**"))
    assert told.endswith(
        "a silo keeps the model delivered last (all/aggregated); training.epochs = 2"
    )


def test_what_rounds_and_rates_depend_on_is_told():
    falls = {"kind": "steps", "factor": "0.5", "at": ["0.25", "0.5"]}
    training = {"batch_size": 8, "lr": 0.1, "schedule": falls}
    own = recorded("local", 1, LOCAL, "local", training=training)
    device = "cuda (NVIDIA H200), one by one, bf16"
    gpu = own.identity.made_with.model_copy(update={"device": device})
    identity_ = own.identity.model_copy(update={"made_with": gpu})
    text = summary(groups(own, replace(own, label="fedavg", identity=identity_)), PARTITION, [])
    (told,) = row(text, "## What was run", "training.schedule")
    expected = ["kind = steps", "factor = 0.5", "at = [0.25", "0.5]"]
    assert sorted(told.replace("\\", "").split(", ")) == sorted(expected)
    release = f"with Staddle {version('staddle')} and torch {torch.__version__}"
    (made,) = row(text, "## What was run", "made")
    assert made == f"on cpu {release}; on {device} {release}"


def test_the_last_scores_over_seeds_of_measures_that_are_defined():
    cells = row(TEXT, "### Last", "fedavg")
    aggregated = ["57.50 ± 7.07", "65.00 ± 14.14", "57.50 ± 7.07"]  # records of one class
    assert cells[:6] == [*aggregated, "22.50 ± 3.54", "25.00 ± 7.07", "22.50 ± 3.54"]
    assert row(TEXT, "### Last", "local")[:6] == ["50.00 ± 0.00"] * 6
    # the second seed has none
    assert "selected" not in TEXT.split("### Last", 1)[1].split("###", 1)[0]
    meaning = TEXT.split("## What the numbers mean")[1]
    for measure in ("all/aggregated", "all/trained", "selected/before", "selected/after"):
        assert f"**{measure}**" in meaning
    for word in ("macro", "micro", "balanced", "spread"):
        assert f"**{word}**" in meaning


def test_the_best_by_test_and_by_validation_of_one_seed():
    text = summary(groups(recorded("fedavg", 1, FIRST)))
    last = ["62.50", "75.00", "62.50", "25.00", "30.00", "25.00", "8.33", "6.67", "8.33"]
    assert row(text, "### Last", "fedavg") == last
    best = ["90.00", "90.00", "90.00", "25.00", "30.00", "25.00"]
    assert row(text, "### Best by test", "fedavg")[:6] == best
    assert row(text, "### Best by validation", "fedavg") == ["10.00"] * 3  # after two rounds
    alone = summary(groups(recorded("local", 1, LOCAL, "local")))
    shown, lone = (one.split("## What the numbers mean")[0] for one in (text, alone))
    assert "better" not in (shown + lone).lower()
    assert "±" not in shown


def test_the_weakest_and_who_does_better_than_alone():
    cells = row(TEXT, "### The model that each silo keeps", "fedavg")
    assert cells[:3] == ["57.50 ± 7.07", "65.00 ± 14.14", "57.50 ± 7.07"]
    assert cells[3:5] == ["40.00 ± 0.00"] * 2
    assert cells[5:8] == ["55.00 ± 0.00", "80.00 ± 28.28", "80.00 ± 28.28"]
    assert cells[8:10] == ["15.53 ± 10.24", "293.75 ± 318.20"]  # of squared points
    # each silo's records are of one class
    majority = row(TEXT, "### The model that each silo keeps", "*always the most frequent class*")
    assert majority == [*["100.00"] * 2, "–", *["100.00"] * 5, *["0.00"] * 2, *["–"] * 3]
    assert cells[-3:] == ["2", "1", "1"]  # of the one seed that both have
    assert row(TEXT, "### The model that each silo keeps", "local")[-3:] == ["–"] * 3
    assert row(TEXT, "(all/trained)\n", "fedavg")[-3:] == ["0", "0", "4"]


REGRESSION = {"kind": "regression", "range": [0, 90], "unit": "days"}


def days(method, *scores):
    """A run of a regression whose last model misses by so many days, silo by silo."""
    history = [
        of_scores(
            rounds,
            f"all/{model}",
            {silo: score + 4 - rounds for silo, score in zip(RECORDS, scores, strict=True)},
            RECORDS,
        )
        for rounds in (2, 4)
        for model in ("aggregated", "trained")
    ]
    model = {**SMALL, "classes": None}
    job = jobs.make_job(method, model=model, silos=SILOS, seed=1, task=REGRESSION)
    return finished(Run(method, 1, job), history)


def test_of_a_regression_everything_is_in_its_unit_and_less_is_better():
    alone, other = days("local", 3.0, 3.0, 3.0, 3.0), days("fedavg", 2.0, 3.0, 3.5, 1.25)
    text = summary(groups(alone, other))
    assert "After the last round, on test records, in days.\n" in text
    assert "have a better, the same and a worse MAE than with **local**" in " ".join(text.split())
    assert row(text, "## What was run", "task.unit") == ["days"]
    heading = "### The model that each silo keeps"
    assert row(text, heading, "method")[:3] == ["macro", "micro", "worst silo"]
    assert "balanced" not in text.split("## What the numbers mean")[0]
    cells = row(text, heading, "fedavg")
    # the worst silo, the worst tenth, the median, the best tenth and the best silo
    assert cells[:7] == ["2.438", "2.042", "3.5", "3.5", "2.5", "1.25", "1.25"]
    assert cells[-3:] == ["2", "1", "1"]
    constant = row(text, heading, "*always the silo's median*")
    assert constant == [*["5"] * 7, *["0"] * 2, *["–"] * 3]
    assert row(text, "### Best by test", "fedavg") == ["2.438", "2.042"] * 2
    meaning = text.split("## What the numbers mean")[1]
    assert "is the MAE of a model on its own records, on the side named; less is better" in meaning
    assert "%" not in text


def test_what_it_took_and_pictures_are_shown_or_named():
    # four rounds each, in 16 s
    assert row(TEXT, "## What it took", "fedavg") == ["2", "8.0", "0.5"]
    assert row(TEXT, "## What it took", "local") == ["2", "–", "–"]
    fast = summary(groups(recorded("local", 1, LOCAL, "local", 0.002)))
    assert row(fast, "## What it took", "local") == ["1", "0.0", "2,000"]
    assert "![Accuracy](curves.png)\n" in TEXT
    assert "\n- [Heat map](a%20b/heatmap.png)\n" in TEXT
    assert "![Heat map]" not in TEXT
    assert "## Pictures" not in summary(groups(recorded("fedavg", 1, FIRST)))


def test_a_silo_in_no_cohort_keeps_what_was_delivered():
    run = recorded("pfedsim", 7, FIRST, "pfedsim", rounds=1)
    (away, *_) = set(RECORDS) - drawn(run)
    text = summary(groups(run))
    shares = {"d": (2, 4), "b": (2, 5), "a": (2, 6), "c": (12, 30)}  # right by own and by delivered
    kept = sum(d if silo not in drawn(run) else own for silo, (own, d) in shares.items())
    assert away in RECORDS
    assert row(text, "### The model that each silo keeps", "pfedsim")[1] == f"{100 * kept / 60:.2f}"
    assert drawn(recorded("x", 7, FIRST, "pfedsim", participation=1.0)) == set(RECORDS)


def started(run, sha256, **versions):
    """The run, as if its model began from values of this digest."""
    start = {"sha256": sha256, "made_with": {"torch": "2.13", "lung": "0.1", **versions}}
    job = run.identity.job | {"start": start}
    return replace(run, identity=run.identity.model_copy(update={"job": job}))


def test_what_cannot_be_compared_is_refused():
    one, other = recorded("fedavg", 1, FIRST), recorded("fedavg", 2, FIRST)
    check_comparable(groups(one, other), POPULATION)
    with refused("out/fedavg/seed-1: its silos held other records than now"):
        check_comparable(groups(one), make_population("6a" * 32))
    moved = replace(other, identity=other.identity.model_copy(update={"population": "6a" * 32}))
    with refused(r"out/fedavg/seed-2: its silos hold other records than those of out/fedavg/s"):
        check_comparable(groups(one, moved))
    # Initial values of a package's model follow from the seed, but not what made them.
    begun = [started(run, str(run.seed)) for run in (one, other)]
    check_comparable(groups(*begun), POPULATION)
    with refused("though both are labelled 'fedavg'; remove the one that is out of date"):
        check_comparable(groups(begun[0], started(other, "2", torch="2.14")))
    lacking = other.identity.model_copy(update={"attendance": {"absent": "0.1"}})
    with refused(r"out/fedavg/seed-2: has another \[attendance\] than out/fedavg/seed-1"):
        check_comparable(groups(one, replace(other, identity=lacking)))
    changed = recorded("fedavg", 2, FIRST, training=TWICE)
    with refused("though both are labelled 'fedavg'; remove the one that is out of date"):
        check_comparable(groups(one, changed))
