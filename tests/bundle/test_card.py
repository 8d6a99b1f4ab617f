"""The card says what the description does, and nothing that others wrote becomes Markdown."""

import json

from support.jobs import make_data, make_job
from support.other_tasks import document, records
from support.trained_models import CSV, made, table_job

from staddle.algorithms.course import SiloState
from staddle.algorithms.data.sources.formats.csv_file import Csv
from staddle.algorithms.job.job import Job, JobFile
from staddle.algorithms.leaks.taint import EXACT, Taint
from staddle.algorithms.method import initial_state
from staddle.bundle import folder
from staddle.bundle.card import MOST_ROWS, plain
from staddle.bundle.figure_tables import figure


def test_figures_of_the_description_are_in_the_card(table):
    found = folder.read(table).description
    card = (table / folder.CARD).read_text()
    measured = found.measured
    accuracy = measured.said["accuracy"]
    assert f"| accuracy | {figure(accuracy, measured.intervals['accuracy'])} |" in card
    (cut,) = found.thresholds
    assert f"| yes | {cut.value:.4f} | {cut.chosen_on} | {cut.measured_on} |" in card
    assert "| age | years | 18 to 100 | 50 | 12.5 | may not be missing |" in card
    assert "one of: f, m" in card
    assert "- It predicts: ill\n- It answers, for each record: p(no), p(yes)\n" in card
    assert 'delimiter ",", decimal ".", encoding "utf-8"' in card
    assert found.job_digest in card
    assert "It comes from a simulation" in card


def test_texts_of_others_are_shown_as_they_are():
    assert plain("a|b\n# c <img> [x](y)") == r"a\|b \# c \<img\> \[x\](y)"


def test_a_class_cannot_forge_a_line_of_the_card(tmp_path):
    names = ["fine|1.0", "# Approved"]
    job = make_job(model={"classes": 2, "class_names": names})
    path = made(tmp_path / "model", job, make_data(20, classes=2), {"kind": "npz"})
    card = (path / folder.CARD).read_text()
    assert "\n# Approved" not in card
    assert "| fine\\|1.0 | " in card


def test_a_private_job_says_what_it_covers(tmp_path):
    """Parts that stay at the silo are trained without noise."""
    private = {"epsilon": 3.0, "delta": 1e-5, "sample_rate": 0.5, "sigma": "1.5"}
    job = make_job("fedper", privacy=private, model={"norm": "group"})
    state = initial_state(job.method(), "a")
    taints = {name: EXACT if name.startswith("part/classifier") else Taint() for name in state.flat}
    state = SiloState(state.parts, state.extra, taints)
    path = made(tmp_path / "model", job, make_data(20), {"kind": "npz"}, state=state)
    assert json.loads((path / folder.DESCRIPTION).read_text())["privacy"] == {
        "epsilon": 3.0,
        "delta": 1e-5,
        "exact": ["classifier"],
    }
    card = (path / folder.CARD).read_text()
    assert "at most ε = 3 at δ = 1e-05" in card
    assert "Not covered either: classifier, trained without noise" in card


def test_the_card_of_a_job_that_protects_whole_silos_says_so(tmp_path):
    private = {"epsilon": 8.0, "delta": 0.01, "sample_rate": 1.0, "sigma": "2.5"}
    private |= {"unit": "silo", "noise": "shared"}
    security = {"secure_aggregation": "required", "weight_most": 1000}
    silos = ["a", "b", "c", "d"]
    fields = {"model": {"norm": "group"}, "security": security, "silos": silos, "min_cohort": 3}
    job = make_job("fedavg", privacy=private, **fields)
    path = made(tmp_path / "model", job, make_data(20), {"kind": "npz"})
    card = (path / folder.CARD).read_text()
    assert "The job cost the whole of the silo, all its records together, at most ε = 8" in card


def test_a_feature_without_a_contract_has_no_table(arrays):
    card = (arrays / folder.CARD).read_text()
    assert "Records are read as kind npz, and have the shape [1, 8, 8]." in card
    assert Csv.model_validate({**CSV, "file": "x.csv"}).contract() == CSV
    assert table_job().features[0].name == "age"


def test_a_number_has_its_unit_and_a_class_its_name(tmp_path):
    for kind, row in (
        ("regression", "| mean absolute error (days) of the best constant answer |"),
        ("segmentation", "| Dice score of 2 |"),
    ):
        job = Job.from_file(JobFile.model_validate(document(kind)), "job.toml")
        path = made(tmp_path / kind, job, records(kind, 20, 3), {"kind": "npz"})
        assert row in (path / folder.CARD).read_text(), kind


def test_the_card_says_how_csv_files_are_written(tmp_path):
    own = {"delimiter": ";", "dates": {"seen": "%d.%m.%Y"}, "missing_marks": {"chol": ["", "NA"]}}
    job = table_job()
    data = make_data(20, classes=2, shape=(1, 1, 4))
    path = made(tmp_path / "model", job, data, {**CSV, **own})
    card = (path / folder.CARD).read_text()
    assert 'delimiter ";", decimal ".", encoding "utf-8", seen "%d.%m.%Y"' in card
    assert r'written as \{"chol": \["", "NA"\]\}' in card


def test_figures_keep_the_digits_of_their_size():
    assert figure(0.5, (0.4999, 0.75)) == "0.500 (0.500 to 0.750)"
    assert figure(48.87, (9.5, 1050.2)) == "48.87 (9.50 to 1,050.20)"
    assert figure(12345.6) == "12,346"
    assert figure(None) == "–"


def test_a_long_table_says_where_the_rest_is(tmp_path):
    names = [f"class {place}" for place in range(MOST_ROWS + 1)]
    job = make_job(model={"classes": len(names), "class_names": names})
    path = made(tmp_path / "model", job, make_data(20), {"kind": "npz"})
    card = (path / folder.CARD).read_text()
    assert f"| class {MOST_ROWS - 1} | 0 |" in card
    assert f"| class {MOST_ROWS} | 0 |" not in card
    assert "1 more rows are in model.json." in card
