"""``staddle simulate init``: what it writes runs, and has the keys of a simulation's own tables."""

import re
import tomllib
from itertools import pairwise

import pytest
from support.refusals import refused
from typer.testing import CliRunner

from staddle.algorithms.catalog import METHODS, method_class
from staddle.algorithms.engines.attendance import Attendance
from staddle.algorithms.partition.options import Dirichlet
from staddle.commands.main import app
from staddle.commands.simulate.example import BASELINES, simulation_text
from staddle.files.documents import parse_toml
from staddle.simulator.experiment.experiment import (
    ChosenMethod,
    ExperimentFile,
    SimulationTable,
    read,
)
from staddle.simulator.experiment.options import Merged
from staddle.simulator.experiment.population import populate
from staddle.simulator.experiment.runs import runs

SETTING = re.compile(r"^# ([a-z0-9_]+ = .*)$", re.MULTILINE)
TRAINED = [name for name in METHODS if name not in BASELINES]


def uncommented(text):
    return SETTING.sub(r"\1", text)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """An example as it was written, and its population: that is the same for every method."""
    path = tmp_path_factory.mktemp("example") / "first.toml"
    done = CliRunner().invoke(app, ["simulate", "init", str(path)])
    assert done.exit_code == 0, done.output
    assert done.output.split()[-1] == str(path)
    return path, populate(read(path))


def test_an_experiment_is_named_like_its_file_where_that_can_be_a_name(digits, tmp_path):
    assert read(digits[0]).name == "first"
    for file, name in (("Lungs-2.toml", "lungs-2"), ("äh.toml", "first")):
        done = CliRunner().invoke(app, ["simulate", "init", str(tmp_path / file)])
        assert done.exit_code == 0, done.output
        assert read(tmp_path / file).name == name


@pytest.mark.parametrize("method", TRAINED)
def test_every_method_has_an_example_of_which_all_jobs_can_begin(digits, method, tmp_path):
    path = tmp_path / "first.toml"
    path.write_text(simulation_text(method))
    made = runs(read(path), digits[1], (), (), None)
    assert [run.label for run in made if run.seed == 1] == [*BASELINES, method]
    options = tomllib.loads(uncommented(path.read_text()))["methods"][-1]["options"]
    assert options.keys() == method_class(method).options_model.model_fields.keys()


def test_it_has_every_key_of_a_simulations_own_tables_with_its_default():
    text = simulation_text("pfedsim")
    assert max(map(len, text.splitlines())) <= 120
    given, everything = tomllib.loads(text), tomllib.loads(uncommented(text))
    parsed = parse_toml(text.encode(), ExperimentFile, "f")
    tables = {"partition": Dirichlet, "split": Merged, "simulation": SimulationTable}
    tables |= {"attendance": Attendance}
    for name, model in tables.items():
        assert everything[name].keys() == model.model_fields.keys()
        for key, field in model.model_fields.items():
            if key not in given.get(name, {}) and field.default is not None:
                assert everything[name][key] == field.default, (name, key)
    assert everything["methods"][-1].keys() == ChosenMethod.model_fields.keys()
    # what a job has as well is in the example of a job
    own = ExperimentFile.model_fields.keys() - {
        "task",
        "features",
        "security",
        "privacy",
        "purpose",
        "transport",
    }
    told = {"seed", "method", "round_timeout", "quorum"}
    assert own - told == everything.keys()
    assert parsed.min_cohort == everything["min_cohort"]


def test_every_setting_is_explained():
    for above, line in pairwise(simulation_text("pfedsim").splitlines()):
        if re.match("(# )?[a-z0-9_]+ = ", line) and not above.startswith("[["):
            assert above.startswith("# "), f"nothing says what {line!r} does"
            assert not SETTING.match(above), f"nothing says what {line!r} does"


def test_it_runs_as_it_stands_and_never_overwrites(digits, tmp_path):
    path, _ = digits
    out = tmp_path / "out"
    few = ["--rounds", "1", "--seed", "1", "--method", "fedavg", "--workers", "1"]
    done = CliRunner().invoke(app, ["simulate", str(path), "--out", str(out), *few])
    assert done.exit_code == 0, done.output
    assert (out / "summary.md").exists()
    with refused(f"{path}: exists already"):
        raise CliRunner().invoke(app, ["simulate", "init", str(path)]).exception


@pytest.mark.parametrize("method", [*BASELINES, "statistics"])
def test_what_is_compared_anyway_or_trains_nothing_is_refused(method):
    with refused(f"--method {method}: choose a method that trains"):
        simulation_text(method)


def test_an_unknown_method_is_told_what_was_meant():
    with refused("did you mean 'fedper'"):
        simulation_text("fedprr")
