"""Metrics of real daemons agree with their logs and ledgers.

``status`` beside them disturbs nobody.
"""

import json
import time
import urllib.request

from typer import Typer
from typer.testing import CliRunner

from staddle.commands.federation import local_federation, status
from staddle.security.ledger.audit import ledger_folder
from staddle.security.ledger.messages import CONTROL, summary

SILOS = ("north", "south")
TIMING = {"admission_seconds": 60, "beat_seconds": 1, "hold_seconds": 5}
METRICS = '\n[metrics]\nlisten = "127.0.0.1:0"\n'

app = Typer()
app.command()(status.status)


def scrape(address):
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if line.startswith("staddle_"))
    return {name.partition("_")[2]: float(value) for name, _, value in pairs}


def status_of(config):
    return json.loads(CliRunner().invoke(app, ["--config", str(config), "--json"]).output)


def launch(running, name, module, config):
    config.write_text(config.read_text() + METRICS)
    return running.launch(name, ("-m", module), config)


def test_both_sides_count_what_happened(start, document):
    running = start(*SILOS)
    job = running.job(document("counted", SILOS, rounds=1))
    files = running.federation
    local_federation.write_coordinator(files, ["counted"], TIMING)
    coordinator = launch(running, "coordinator", "staddle.coordinator", files.coordinator_config)
    ours = coordinator.wait_for("metrics.listening", 60)["address"]
    running.address = str(coordinator.wait_for("listening", 60)["address"])
    coordinator.wait_for("ready", 60)
    idle = scrape(ours)
    assert idle['coordinator_silo_connected{silo="north"}'] == 0
    assert idle['coordinator_jobs{stage="admitting"}'] == 1
    assert idle["coordinator_disk_free_bytes"] > 0
    limit = idle['coordinator_job_stage_limit_seconds{job="counted"}']
    assert (
        limit == TIMING["admission_seconds"] > idle['coordinator_job_stage_seconds{job="counted"}']
    )
    # Nobody has come yet.
    assert idle['coordinator_silo_awaited_seconds{job="counted",silo="north"}'] > 0
    assert idle['coordinator_silo_silent_seconds{silo="north"}'] > 0
    assert idle['coordinator_silo_rounds_behind{job="counted",silo="north"}'] == 0
    assert not [name for name in idle if name.startswith("coordinator_job_measure")]
    years = (
        idle['coordinator_certificate_end_timestamp_seconds{member="north"}'] - time.time()
    ) / 3e7
    assert 1.9 < years < 2.2
    theirs = {}
    for silo in SILOS:
        running.write_silo(silo)
        agent = launch(running, silo, "staddle.silo", files.silo_config(silo))
        theirs[silo] = agent.wait_for("metrics.listening", 60)["address"]
    coordinator.wait_for("round.opened", 60)
    assert status_of(files.coordinator_config)["running"]
    coordinator.wait_for("job.ended", 60)

    found = scrape(ours)
    assert found['coordinator_jobs{stage="ended"}'] == 1
    assert found['coordinator_jobs_ended_total{outcome="completed"}'] == 1
    assert found['coordinator_rounds_closed_total{job="counted"}'] == 1
    assert found['coordinator_fold_seconds_count{job="counted"}'] == 1
    (last,) = [job["last"] for job in status_of(files.coordinator_config)["jobs"]]
    for model in ("delivered", "trained"):
        accuracy = f'coordinator_job_measure{{job="counted",measure="accuracy",model="{model}"}}'
        assert found[accuracy] == last["measures"][model]["accuracy"] > 0
    for silo in SILOS:
        assert found[f'coordinator_silo_connected{{silo="{silo}"}}'] == 1
        assert found[f'coordinator_uploads_accepted_total{{silo="{silo}"}}'] == 1
        assert found[f'coordinator_sent_bytes_total{{silo="{silo}"}}'] > 0
        own = scrape(theirs[silo])
        assert own["silo_connected"] == 1
        assert own['silo_rounds_given_total{job="counted"}'] == 1
        assert own['silo_training_seconds_count{job="counted"}'] == 1
        left = sum(value for name, value in own.items() if name.startswith("silo_sent_bytes_total"))
        totals = summary(ledger_folder(files.state(silo)))
        assert left == found[f'coordinator_received_bytes_total{{silo="{silo}"}}']
        assert left == sum(total.bytes for (name, _), total in totals.items() if name == job.name)
        assert (
            own['silo_sent_bytes_total{job="counted",kind="metric"}']
            == totals["counted", "metrics"].bytes
        )
        assert own['silo_last_round{job="counted"}'] == 0
        began = own["silo_session_timestamp_seconds"]
        assert began <= own['silo_last_round_timestamp_seconds{job="counted"}'] <= time.time()
        members = {name for name in own if name.startswith("silo_certificate_end")}
        assert len(members) == 2
        assert own["silo_disk_free_bytes"] > 0
        assert own["silo_ledger_records"] == own["silo_ledger_head_seq"] + 1 > 5
        at_silo = status_of(files.silo_config(silo))
        assert at_silo["running"]
        assert at_silo["ledger"]["ok"]
    assert (CONTROL, CONTROL) in totals

    coordinator.stop()
    for _ in range(2):
        assert running.daemons["north"].wait_for("coordinator.lost", 60)
    assert scrape(theirs["north"])["silo_connected"] == 0
    # What the last round said is known to the next process, too.
    again = running.launch("coordinator", ("-m", "staddle.coordinator"), files.coordinator_config)
    address = again.wait_for("metrics.listening", 60)["address"]
    again.wait_for("ready", 60)
    found = scrape(address)
    assert found[accuracy] == last["measures"][model]["accuracy"]
