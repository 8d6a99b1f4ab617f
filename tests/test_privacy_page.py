"""The table of docs/privacy.md names the methods that a private job may have, and no other."""

import re
from pathlib import Path

import pytest
from support.jobs import make_job

from staddle.algorithms.catalog import METHODS, configure, method_options
from staddle.algorithms.job.privacy_table import PrivacyTable
from staddle.commands.privacy import promise
from staddle.security.policy.file import PolicyFile

PAGE = Path(__file__).parents[1] / "docs" / "privacy.md"
EPOCHS = 7  # which no option's default is
MODELS = {"fedaims": "convnet-digits"}  # the others train any

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="docs are not beside the tests")


def rows():
    """By method, the option that the table asks for, and how many steps a round it says."""
    text = PAGE.read_text(encoding="utf-8")
    lines = (
        text.partition("\n## What each method trains and releases\n")[2]
        .partition("\n## ")[0]
        .splitlines()
    )
    found = {}
    for first, *cells in (
        line.strip("| ").split(" | ") for line in lines if line.startswith("| `")
    ):
        name, asked = re.fullmatch(r"`([a-z-]+)`(?:, with `(\w+ = \w+)`)?", first).groups()
        assert name not in found
        found[name] = (asked, cells)
    return found


def method(name, options):
    model = {"name": MODELS.get(name, "cnn-digits"), "norm": "group"}
    # which exchanges nothing where none is away
    fields = {"participation": 0.6 if name == "fedsimsup" else 1.0, "min_cohort": 3, "rounds": 3}
    job = make_job("local", None, model, {"epochs": EPOCHS}, silos=list("abcde"), **fields)
    setting = job.setting()
    return configure(name, method_options(name, options), setting)


def options(asked):
    key, _, value = (asked or "").partition(" = ")
    return {key: float(value)} if key else {}


@pytest.mark.parametrize("name", METHODS)
def test_the_table_has_the_methods_that_accept_privacy_and_no_other(name):
    asked, _ = rows().get(name, (None, []))
    fault = method(name, options(asked)).private_fault
    assert bool(fault) == (name not in rows()), fault
    if asked:
        assert method(name, {}).private_fault, "it is accepted without that option, too"


def test_every_row_is_a_method_and_has_all_columns():
    assert rows().keys() <= METHODS.keys()
    assert len(rows()) == 32
    assert {len(cells) for _, cells in rows().values()} == {3}


@pytest.mark.parametrize("name", rows() if PAGE.exists() else ())
def test_a_method_that_takes_more_or_less_than_the_jobs_epochs_says_so(name):
    asked, (_, steps, _) = rows()[name]
    made = method(name, options(asked))
    efforts = {made.effort(round_) for round_ in range(made.setting.rounds + made.tunes)}
    assert ({(e.epochs, e.whole) for e in efforts} == {(EPOCHS, 0)}) == (steps == "`epochs` epochs")


def test_the_figures_that_a_plan_shows_are_those_of_the_page():
    text = (PAGE.parent / "private-training.md").read_text(encoding="utf-8")
    section = text.partition("\n## Accuracy with shared noise\n")[2].partition("\n## ")[0]
    table = section.partition("\n### MNIST")[2].partition("\n###")[0]
    (head,) = re.findall(r"^\| method \|(.*) no privacy \|$", table, re.MULTILINE)
    epsilons = [int(found) for found in re.findall(r"ε = (\d+)", head)]
    assert epsilons == [1, 2, 4, 8]
    for row, figures in (
        ("alone", promise.ALONE),
        ("fedavg, local", promise.LOCAL),
        ("fedavg, shared", promise.SHARED),
    ):
        (cells,) = re.findall(rf"^\| {row} \|(.*)\|$", table, re.MULTILINE)
        means = [round(float(cell.split()[0])) for cell in cells.split("|")[:4]]
        assert figures == dict(zip(epsilons, means, strict=True)), row


def test_the_figures_that_a_plan_for_whole_silos_shows_are_those_of_the_page():
    text = (PAGE.parent / "private-training.md").read_text(encoding="utf-8")
    section = text.partition("\n### Whole silos\n")[2].partition("\n###")[0]
    alone, shared, _ = re.findall(r"\| ([0-9.]+) \(", section)
    assert f"FedAvg reached {float(shared):.0f} %" in promise.WHOLE_SILOS
    assert f"training alone {float(alone):.0f} %" in promise.WHOLE_SILOS


def test_the_table_of_shared_noise_has_the_methods_that_sum_steps():
    text = PAGE.read_text(encoding="utf-8")
    table = text.partition('| methods | with `noise = "shared"` |\n')[2].partition("\n\n")[0]
    named = re.findall(r"`([a-z-]+)`", "".join(line.split("|")[1] for line in table.splitlines()))
    assert len(named) == len(set(named))
    assert set(named) == {name for name, method in METHODS.items() if method.sums_steps}


BUDGET = PolicyFile.model_fields["dataset"].annotation.__args__[1]


@pytest.mark.parametrize(
    ("table", "model"), [("[privacy]", PrivacyTable), ("[dataset.data]", BUDGET)]
)
def test_the_page_shows_which_settings_are_required(table, model):
    lines = PAGE.read_text().partition(f"```toml\n{table}\n")[2].partition("```")[0].splitlines()
    given = {re.match(r"(?:# )?([a-z_]+) = ", line)[1]: line for line in lines}
    assert given.keys() == model.model_fields.keys()
    required = {name for name, field in model.model_fields.items() if field.is_required()}
    assert {name for name, line in given.items() if not line.startswith("# ")} == required
    assert {name for name, line in given.items() if "  # required: " in line} == required
