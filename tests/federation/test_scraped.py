"""A real Prometheus reads real daemons over mutual TLS, as deploy/prometheus has it."""

import json
import re
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from contextlib import contextmanager

import pytest
import yaml
from support.deployed import RULES, SCRAPES, beside, board_queries, needs

from staddle.commands.federation import local_federation
from staddle.security.identity.keys import Role, create_keys

pytestmark = [beside, needs("prometheus")]
SILOS = ("north", "south")
TIMING = {"admission_seconds": 600, "beat_seconds": 1, "hold_seconds": 5}
METRICS = '\n[metrics]\nlisten = "127.0.0.1:0"\nclients = ["../prometheus/tls.crt"]\n'
SECONDS = 120


@contextmanager
def prometheus(folder, configuration):
    """A Prometheus that runs with this configuration; where its API is."""
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(configuration))
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={path}",
            f"--storage.tsdb.path={folder / 'data'}",
            "--web.listen-address=127.0.0.1:0",
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    reader = None
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "Server is ready" in line:
                break
        found = re.search(r'msg="Listening on" address=([0-9.:]+)', "".join(lines))
        assert found, "".join(lines)
        # What it writes later must not fill the pipe.
        reader = threading.Thread(target=process.stderr.read)
        reader.start()
        yield f"http://{found[1]}/api/v1"
    finally:
        process.terminate()
        process.wait(SECONDS)
        if reader:
            reader.join()
        process.stderr.close()


def asked(api, what, **query):
    with urllib.request.urlopen(f"{api}/{what}?{urllib.parse.urlencode(query)}") as answer:
        found = json.load(answer)
    assert found["status"] == "success"
    return found["data"]


def until(ask):
    """What this answers, once it is not empty: Prometheus scrapes when it likes."""
    end = time.monotonic() + SECONDS
    while not (found := ask()):
        assert time.monotonic() < end, "nothing came"
        time.sleep(0.2)
    return found


def scraped(api):
    """Targets by job, once each was scraped."""
    found = {each["labels"]["job"]: each for each in asked(api, "targets")["activeTargets"]}
    return found if all(each["health"] != "unknown" for each in found.values()) else {}


@pytest.fixture
def daemons(start, document):
    """A coordinator with a job, and one of its silos: where each has its metrics."""
    running = start(*SILOS)
    running.job(document("scraped", SILOS, rounds=1))
    files = running.federation
    create_keys(files.folder / "prometheus", "prometheus", Role.OPERATOR, "IT")
    local_federation.write_coordinator(files, ["scraped"], TIMING)
    files.coordinator_config.write_text(files.coordinator_config.read_text() + METRICS)
    coordinator = running.start_daemon("coordinator")
    places = {"coordinator": coordinator.wait_for("metrics.listening", SECONDS)["address"]}
    running.address = str(coordinator.wait_for("listening", SECONDS)["address"])
    running.write_silo("north")
    config = files.silo_config("north")
    config.write_text(config.read_text() + METRICS)
    agent = running.start_silo("north")
    places["north"] = agent.wait_for("metrics.listening", SECONDS)["address"]
    return files, places


def configured(files, places):
    """The configuration of deploy/, with the addresses and files of this federation."""
    whole = yaml.safe_load(SCRAPES.read_text())
    whole["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    whole["rule_files"] = [str(RULES)]
    for scrape, member in zip(whole["scrape_configs"], places, strict=True):
        scrape["static_configs"] = [{"targets": [places[member]]}]
        scrape["tls_config"] |= {
            "cert_file": str(files.folder / "prometheus" / "tls.crt"),
            "key_file": str(files.folder / "prometheus" / "tls.key"),
            "ca_file": str(files.keys(member) / "tls.crt"),
            "server_name": f"{member}.staddle",
        }
    return whole


def test_both_daemons_are_up_and_the_board_has_what_it_asks_for(daemons, tmp_path):
    whole = configured(*daemons)
    stranger = {**whole["scrape_configs"][0], "job_name": "stranger"}
    own = {"cert_file", "key_file"}
    stranger["tls_config"] = {k: v for k, v in stranger["tls_config"].items() if k not in own}
    whole["scrape_configs"].append(stranger)
    with prometheus(tmp_path, whole) as api:
        found = until(lambda: scraped(api))
        health = {name: each["health"] for name, each in found.items()}
        assert health == {"staddle-coordinator": "up", "staddle-silo": "up", "stranger": "down"}, (
            found
        )
        assert "certificate required" in found["stranger"]["lastError"]

        # A target is up an instant before its values are there.
        for metric in ("staddle_coordinator_jobs", "staddle_silo_connected"):
            until(lambda metric=metric: asked(api, "query", query=metric)["result"])
        answers = {
            panel: asked(api, "query", query=query)["result"] for panel, query in board_queries()
        }
        # The job waits for its second silo.
        for panel in ("Silos connected", "Jobs that run", "Open round", "Free disk", "Connected"):
            (full,) = [result for name, result in answers.items() if name.startswith(panel + " A")]
            assert full, panel
        waits = "Time that the present stage has waited for a silo A"
        (south,) = answers[waits]
        assert south["metric"]["silo"] == "south"
        assert south["metric"]["exported_job"] == "scraped"
        rules = [rule for group in asked(api, "rules")["groups"] for rule in group["rules"]]
        assert {rule["health"] for rule in rules} <= {"ok", "unknown"}
