"""Two silos that hold the same columns in different kinds of files, one job."""

import csv

import pytest
import torch

from staddle.algorithms.data.dataset import split
from staddle.algorithms.data.sources.public.bundled import Bundled
from staddle.algorithms.engines.simulation import simulate
from staddle.errors import AbortedError
from staddle.silo import config as configs
from staddle.silo.job_folder import JobFolder, split_key

SILOS = ("north", "east")
TUMOURS = {
    "name": "glm",
    "classes": 2,
    "input": [1, 1, 30],
    "class_names": ["malignant", "benign"],
}
CSV = """kind = "csv"
file = "records.csv"
id = "patient"
label = "diagnosis"
classes = ["M", "B"]
class_names = ["malignant", "benign"]
features = [{features}]
"""


def test_silos_agree_on_a_contract_and_another_declines(start, document):
    """One silo lacks a column of the job; another has them all, in another order."""
    silos = (*SILOS, "west")
    running = start(*silos)
    running.data = {
        silo: Bundled(kind="bundled", name="breast-cancer", share=(k, 3)).read()
        for k, silo in enumerate(silos, 1)
    }
    job = {**document("tumours", silos, min_cohort=2), "model": TUMOURS}
    job["features"] = [{"name": f"feature {n}", "least": -10, "most": 20} for n in range(30)]
    running.job(job)
    coordinator = running.start_coordinator()
    for silo in silos:
        running.write_silo(silo)
        write_csv(running, silo)
    names = [f'"feature {n}"' for n in range(30)]
    there = f"[{', '.join(names)}]"
    for silo, own in (("north", reversed(names)), ("west", names[1:])):
        config = running.federation.silo_config(silo)
        assert there in config.read_text()
        config.write_text(config.read_text().replace(there, f"[{', '.join(own)}]"))
    for silo in silos:
        running.start_silo(silo)
    declined = coordinator.wait_for("job.declined", 60)
    assert (declined["silo"], declined["code"]) == ("west", "DATA")
    running.completed(60)
    running.stop()
    (told,) = running.events("west", "job.declined")
    assert "the job has 'feature 0', which this data set lacks" in told["why"]


def test_a_csv_file_and_an_npz_file_train_together(start, document):
    running = start(*SILOS)
    running.data = {
        silo: Bundled(kind="bundled", name="breast-cancer", share=(k, 2)).read()
        for k, silo in enumerate(SILOS, 1)
    }
    job = document("tumours", SILOS)
    job["model"] = TUMOURS
    running.job(job)
    running.start_coordinator()
    for silo in SILOS:
        running.write_silo(silo)
    write_csv(running, "north")
    for silo in SILOS:
        running.start_silo(silo)
    running.completed(60)
    running.stop()

    shards = {}
    for silo in SILOS:
        data = configs.load(running.federation.silo_config(silo)).data.load(running.jobs[0].model)
        assert torch.equal(data.x, running.data[silo].x)
        assert data.ids == running.data[silo].ids
        shards[silo] = split(data, split_key(running.federation.state(silo)), 0.25)
    expected = simulate(running.jobs[0], shards)
    running.check_models(running.jobs[0], expected)
    assert expected.history["north"][-1].delivered.correct / len(shards["north"][1]) > 0.85


PACKAGE = """kind = "package"
name = "rows"
file = "data.npz"
lazy = true
workers = {}
"""


@pytest.mark.timeout(180)
def test_silos_whose_records_are_read_when_they_are_used_have_the_same_models(start, document):
    """One with a process that reads, one without; a plain job, and a private one."""
    silos = ("north", "east", "south")
    running = start(*silos)
    running.data = {
        silo: Bundled(kind="bundled", name="breast-cancer", share=(k, 3)).read()
        for k, silo in enumerate(silos, 1)
    }
    job = {**document("tumours", silos), "model": TUMOURS}
    plain = running.job(job)
    private = {"epsilon": 50.0, "delta": 1e-5, "sample_rate": 0.2, "sigma": "1.2"}
    running.job({**job, "name": "private", "privacy": private})
    running.start_coordinator()
    for place, silo in enumerate(silos):
        running.write_silo(silo)
        if place < 2:
            config = running.federation.silo_config(silo)
            table = PACKAGE.format(place)
            config.write_text(config.read_text().replace('file = "data.npz"\n', table))
        running.start_silo(silo)
    running.completed(120)
    running.stop()
    running.check_models(plain, simulate(plain, running.shards(silos)))
    running.check_ledgers()


def test_a_silo_that_is_stopped_in_its_last_tests_takes_the_result_when_it_returns(
    start, document, tmp_path
):
    """Large sets take long to test, and nobody waits for that to stop an agent."""
    running = start(*SILOS)
    running.data = {
        silo: Bundled(kind="bundled", name="breast-cancer", share=(k, 2)).read()
        for k, silo in enumerate(SILOS, 1)
    }
    job = running.job({**document("tumours", SILOS), "model": TUMOURS, "rounds": 1})
    coordinator = running.start_coordinator()
    running.write_silo("north")
    train, test = running.shards(["north"])["north"]
    # Seven when the set is opened; tests, training, tests; then the last tests.
    last = 7 + len(test) * 2 + len(train) * job.training.epochs + 5
    armed = tmp_path / "armed"
    armed.touch()
    config = running.federation.silo_config("north")
    table = (
        'kind = "package"\nname = "stopping"\nfile = "data.npz"\nlazy = true\n'
        f'options = {{ last = {last}, armed = "{armed}" }}\n'
    )
    config.write_text(config.read_text().replace('file = "data.npz"\n', table))
    north = running.start_silo("north")
    running.start_silos("east")
    assert north.wait_for("stopped", 60)
    assert not armed.exists()
    assert running.events("north", "round.given")
    assert running.events("north", "job.finished") == []
    assert running.events("north", "job.finish_failed") == []
    assert not JobFolder(running.job_folder(job, "north")).finished
    with pytest.raises(AbortedError, match="ended with code 0"):
        north.event(60)
    running.start_silo("north").wait_for("job.finished", 60)
    coordinator.wait_for("job.ended", 60)
    running.stop()
    running.check_models(job, simulate(job, running.shards(SILOS)))


def write_csv(running, silo):
    """In place of the silo's .npz file: the same records, and the table that reads them."""
    data, folder = running.data[silo], running.federation.folder / silo
    features = [f"feature {n}" for n in range(30)]
    with (folder / "records.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["patient", *features, "diagnosis"])
        for own, x, y in zip(data.ids, data.x.flatten(1).tolist(), data.y.tolist(), strict=True):
            writer.writerow([own, *map(repr, x), "MB"[y]])
    (folder / "data.npz").unlink()
    config = running.federation.silo_config(silo)
    table = CSV.format(features=", ".join(f'"{name}"' for name in features))
    config.write_text(config.read_text().replace('file = "data.npz"\n', table))
