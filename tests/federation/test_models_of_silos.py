"""What a silo keeps when a job ends, used as a hospital would: by the commands, on new records."""

import csv
import json

import pytest
from federation.test_data_kinds import SILOS, TUMOURS, write_csv
from typer.testing import CliRunner

from staddle.algorithms.data.sources.public.bundled import Bundled
from staddle.bundle.trained import load
from staddle.commands.main import app
from staddle.errors import LocalError

FEATURES = [{"name": f"feature {n}", "least": -10, "most": 20} for n in range(30)]


def said(*arguments):
    found = CliRunner().invoke(app, ["model", *map(str, arguments)], catch_exceptions=False)
    assert found.exit_code == 0
    return found.stdout


def test_each_silo_keeps_a_signed_model_that_answers_for_new_patients(start, document, tmp_path):
    running = start(*SILOS)
    running.data = {
        silo: Bundled(kind="bundled", name="breast-cancer", share=(k, 2)).read()
        for k, silo in enumerate(SILOS, 1)
    }
    job = running.job({**document("tumours", SILOS), "model": TUMOURS, "features": FEATURES})
    coordinator = running.start_coordinator()
    for silo in SILOS:
        running.write_silo(silo)
        write_csv(running, silo)
        running.start_silo(silo)
    coordinator.wait_for("job.ended", 60)
    running.finished(job.name)
    running.stop()

    folders = {silo: running.job_folder(job, silo) / "model" for silo in SILOS}
    roster = running.federation.folder / "roster.json"
    for silo, folder in folders.items():
        text = said("verify", "--model", folder, "--roster", roster, "--silo", silo)
        assert f"made by    silo {silo} of federation {running.federation.name}" in text
        assert job.digest in text
        # The head is one that the silo's ledger had.
        state = running.federation.state(silo)
        assert "and grew from it" in said("verify", "--model", folder, "--ledger", state)
        given = ("--roster", roster, "--ledger", state, "--json")
        found = json.loads(said("verify", "--model", folder, *given))
        assert found["signer"]["id"] == found["maker"]["name"] == silo
        assert found["ledger"]["records"] >= found["head"]["records"]
        assert len(found["rosters"]) == 1
        another = SILOS[silo == SILOS[0]]
        with pytest.raises(LocalError, match=f"made by silo {silo}, not by"):
            said("verify", "--model", folder, "--roster", roster, "--silo", another)
        other = running.federation.state(another)
        with pytest.raises(
            LocalError, match=f"is not what the ledger of silo {silo} can have become"
        ):
            said("verify", "--model", folder, "--ledger", other)
        assert f"# Model of job tumours at silo {silo}" in said("show", "--model", folder)
        running.model(job, silo)  # as later jobs read it

    # The agent's configuration says something else by now, or is gone.
    config = running.federation.silo_config("north")
    config.write_text(config.read_text().replace("feature 0", "another"))
    labelled = running.federation.folder / "east" / "records.csv"
    rows = list(csv.reader(labelled.open()))
    with (tmp_path / "new.csv").open("w", newline="") as file:
        csv.writer(file).writerows(row[:-1] for row in rows)
    out = tmp_path / "out.csv"
    arguments = ("--data", tmp_path / "new.csv", "--out", out)
    told = said("predict", "--model", folders["north"], *arguments)
    assert told.startswith(f"{out}: {len(rows) - 1:,} records\n")
    assert "decided by thresholds: benign from 0." in told
    found = list(csv.DictReader(out.open()))
    assert [row["record"] for row in found] == [row[0] for row in rows[1:]]
    model, data = load(folders["north"]), running.data["east"]
    wanted = model.module.answers(data.held)
    for row, own in zip(found, wanted.tolist(), strict=True):
        assert float(row["p(malignant)"]) == pytest.approx(own[0], abs=1e-5)

    arguments = ("--model", folders["north"], "--data", labelled)
    report = json.loads(said("evaluate", *arguments, "--json"))
    right = (wanted.argmax(1) == data.y).double().mean().item()
    assert report["said"]["accuracy"] == right
    assert report["records"] == len(data)
    said("evaluate", *arguments, "--plot", tmp_path / "calibration.svg")
    assert (tmp_path / "calibration.svg").read_text().startswith("<?xml")
    for form in ("safetensors", "torchscript"):
        exported = tmp_path / form
        text = said("export", "--model", folders["east"], "--format", form, "--out", exported)
        assert "read again: answers differ by at most" in text
        assert exported.exists()

    # The coordinator's folder has the model that both share.
    config = str(running.federation.coordinator_config)
    results = ["job", "results", job.name, "--config", config, "--out", str(tmp_path / "results")]
    assert CliRunner().invoke(app, results).exit_code == 0
    shared = tmp_path / "results" / "model"
    assert "| feature 0 |  | -10 to 20 |" in said("show", "--model", shared)
    told = said("predict", "--model", shared, "--data", tmp_path / "new.csv", "--out", out)
    assert told == f"{out}: {len(rows) - 1:,} records\n"
    own = load(shared).module.answers(data.held)
    for row, answer in zip(csv.DictReader(out.open()), own.tolist(), strict=True):
        assert float(row["p(malignant)"]) == pytest.approx(answer[0], abs=1e-5)
    exported = tmp_path / "shared"
    said("export", "--model", shared, "--format", "torchscript", "--out", exported)
