"""Jobs that begin with a file of weights: from the operator to the silos, and as simulated.

Real processes, real TLS.
"""

import pytest
import torch
from federation.conftest import TIMING, job_document
from support.start_weights import save_start, start_table
from typer.testing import CliRunner

from staddle.algorithms.engines.simulation import simulate
from staddle.commands.federation import local_federation
from staddle.commands.main import app

SILOS = ("north", "east", "south", "west")
BLIND = {"security": {"secure_aggregation": "required"}, "min_cohort": 3}


def call(running, *words, code=0):
    operator = local_federation.write_operator(running.federation, running.address)
    result = CliRunner().invoke(app, ["job", *map(str, words), "--operator", str(operator)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.timeout(300)
def test_silos_begin_with_the_operators_file_and_end_as_simulated(start):
    """One silo has half of the file already, from before it was killed, and one has all of it. One
    loses it between its answer and the first round. One job trains adapters of the file's values.
    """
    running = start(*SILOS)
    file = save_start(running.federation.folder / "jobs" / "w.safetensors")
    adapted = start_table(lora={"rank": 2})
    jobs = [
        running.job(job_document(f"from-{method}", SILOS, method, model=model))
        for method, model in (("fedper", adapted), ("fedssa", start_table()))
    ]
    blind = running.job(job_document("blind", SILOS, "fedper", model=start_table(), **BLIND))
    running.configure(TIMING, [])
    running.restart_coordinator()
    weights, data = jobs[0].model.weights, file.read_bytes()
    places = {silo: running.federation.state(silo) / "weights" for silo in SILOS}
    for silo in ("north", "east"):
        places[silo].mkdir(parents=True)
    (places["north"] / f"{weights.name}.part").write_bytes(data[: len(data) // 2])
    (places["east"] / weights.name).write_bytes(data)

    signed = {job.name: running.federation.folder / "jobs" / f"{job.name}.json" for job in jobs}
    assert "from-fedper" in call(running, "submit", signed["from-fedper"], "--weights", file)
    assert "from-fedssa" in call(running, "submit", signed["from-fedssa"])  # it has the file
    call(running, "submit", running.federation.folder / "jobs" / "blind.json")
    south = running.start_silo("south")
    south.wait_for("job.accepted", 60)
    south.stop()
    (places["south"] / weights.name).unlink()
    for silo in SILOS:
        running.start_silo(silo)
    for job in (*jobs, blind):
        assert "completed" in call(running, "watch", job.name).splitlines()[-1]
    running.stop()
    for job in jobs:
        running.check_models(job, simulate(job, running.shards()))
    for silo, downloads in {"north": 1, "east": 0, "south": 2, "west": 1}.items():
        assert (places[silo] / weights.name).read_bytes() == data
        assert [path.name for path in places[silo].iterdir()] == [weights.name]
        told = running.events(silo, "weights.downloaded")
        assert [(each["sha256"], each["bytes"]) for each in told] == [
            (weights.sha256, weights.size)
        ] * downloads
    running.check_ledgers()


@pytest.mark.timeout(300)
def test_a_silo_whose_policy_does_not_list_the_file_declines(start):
    running = start(*SILOS)
    file = save_start(running.federation.folder / "jobs" / "w.safetensors")
    job = running.job(job_document("begun", SILOS, "fedper", min_cohort=2, model=start_table()))
    running.configure(TIMING, [])
    running.restart_coordinator()
    policy = running.federation.folder / "south" / "policy.toml"
    line = f'weights = ["{job.model.weights.sha256}"]'
    assert line in policy.read_text()
    policy.write_text(policy.read_text().replace(line, "weights = []"))
    call(running, "submit", running.federation.folder / "jobs" / "begun.json", "--weights", file)
    for silo in SILOS:
        running.start_silo(silo)
    watched = call(running, "watch", "begun")
    assert "completed" in watched.splitlines()[-1]
    assert "declined by south (" in watched
    running.stop()
    (declined,) = running.events("south", "job.declined")
    assert declined["code"] == "POLICY"
    assert (
        f"SHA-256 {job.model.weights.sha256}, which is not in the policy's weights"
        in (declined["why"])
    )
    assert not (running.federation.state("south") / "weights").exists()
    ended = running.model(job, "north").parts["extractor"]
    assert all(torch.isfinite(value).all() for value in ended.values())
