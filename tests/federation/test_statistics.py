"""Silos count what their records are like, blind; the next job's constants are what they found.

Real processes, real TLS.
"""

import tomllib

import numpy as np
import pytest
from federation.conftest import job_document
from typer.testing import CliRunner

from staddle.algorithms.data.sources.formats.csv_file import Csv
from staddle.algorithms.engines.simulation import simulate
from staddle.commands.main import app
from staddle.commands.terminal.toml import to_toml
from staddle.files import tensor_file
from staddle.security.blind.plan import simulated

SILOS = ("north", "east", "south", "west")
MODEL = {"name": "glm", "classes": 2, "input": [1, 1, 4], "class_names": ["alive", "dead"]}
FEATURES = [
    {"name": "age", "least": 0, "most": 120},
    {"name": "sex", "categories": ["f", "m"]},
    {"name": "bmi", "unit": "kg/m2", "least": 10, "most": 80, "missing": -1},
]
TABLE = {
    "kind": "csv",
    "file": "records.csv",
    "label": "outcome",
    "classes": ["alive", "dead"],
    "features": ["age", "sex", "bmi"],
    "categories": {"sex": ["f", "m"]},
}


def write_records(folder, seed):
    """A silo's own table, of which a fifth lacks the last column; no constant stands in it."""
    rng = np.random.default_rng(seed)
    lines = ["age,sex,bmi,outcome"]
    for age, man, bmi in zip(
        rng.integers(20, 99, 80), rng.random(80) < 0.4, rng.normal(27, 4, 80), strict=True
    ):
        weighed = "" if rng.random() < 0.2 else f"{bmi:.1f}"
        lines.append(f"{age},{'fm'[int(man)]},{weighed},{'dead' if age + bmi > 85 else 'alive'}")
    (folder / "records.csv").write_text("\n".join(lines) + "\n")


def told(file, job):
    result = CliRunner().invoke(app, ["data", "statistics", str(file), "--job", str(job)])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.timeout(300)
def test_what_silos_counted_together_standardises_the_next_job(start):
    running = start(*SILOS)
    count = {"rounds": 1, "features": FEATURES, "security": {"secure_aggregation": "required"}}
    counted = job_document("counted", SILOS, "statistics", min_cohort=3, **count)
    counting = running.job({**counted, "model": MODEL})
    folders = {silo: running.federation.folder / silo for silo in SILOS}
    for seed, folder in enumerate(folders.values()):
        folder.mkdir(exist_ok=True)
        write_records(folder, seed)

    def shards(job):
        for silo, folder in folders.items():
            table = Csv.model_validate(TABLE).below(folder)
            running.data[silo] = table.load(job.model, job.features)
            running.fix_split(silo)
        return running.shards(SILOS)

    expected = simulate(counting, shards(counting), exchanges=simulated(counting))
    file = running.federation.folder / "found.safetensors"
    file.write_bytes(tensor_file.to_bytes(expected.coordinator))
    signed = running.federation.folder / "jobs" / "counted.json"
    said = told(file, signed)
    drafted = tomllib.loads(said[said.index("[[features]]") :])["features"]
    age, sex, bmi = drafted
    assert 50 < age["center"] < 70
    assert 20 < age["scale"] < 26
    assert bmi["missing"] == bmi["center"] == pytest.approx(27, abs=1)
    assert (sex, bmi["unit"]) == ({"name": "sex", "categories": ["f", "m"]}, "kg/m2")
    assert "missing" not in age

    trained = job_document("trained", SILOS, "fedavg", features=drafted)
    training = running.job({**trained, "model": MODEL})
    running.start_coordinator()
    for silo in SILOS:
        running.write_silo(silo)
        config = running.federation.silo_config(silo)
        before, _, after = config.read_text().partition("[data]\n")
        _, *rest = after.partition("\n\n")
        config.write_text(before + to_toml({"data": TABLE}) + "".join(rest))
        running.start_silo(silo)
    running.completed(60)
    running.stop()
    for silo in SILOS:
        model = running.job_folder(counting, silo) / "model.safetensors"
        assert told(model, signed) == said
    running.check_models(training, simulate(training, shards(training)))
    running.check_ledgers()
