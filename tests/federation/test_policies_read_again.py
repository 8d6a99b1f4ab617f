"""A silo's people change its policy while its agent runs, with real processes."""

import hashlib
import json

import typer
from typer.testing import CliRunner

from staddle.algorithms.engines.simulation import simulate
from staddle.commands.federation import status

SILOS = ("east", "north", "south")


def shown(config, *options):
    app = typer.Typer()
    app.command()(status.status)
    found = CliRunner().invoke(app, ["--config", str(config), *options])
    assert found.exit_code == 0, found.exception
    return found.output


def test_a_changed_policy_counts_without_a_restart_and_a_broken_one_changes_nothing(
    start, document
):
    running = start(*SILOS)
    running.job(document("before", ("east", "north")))
    job = running.job(document("lung", ("north", "south")))
    running.start_coordinator()
    running.start_silos("east", "north")
    # The second job waits for south, which does not run yet.
    north = running.daemons["north"]
    while north.wait_for("job.accepted", 60)["job"] != "lung":
        pass

    # Half a word too many: the silo goes on under the policy of before.
    config = running.federation.silo_config("north")
    policy = config.parent / "policy.toml"
    text = policy.read_text()
    policy.write_text(f"{text}\nmax_bites = 3\n")
    told = north.wait_for("policy.invalid", 60)
    assert f"{policy}: " in told["why"]
    assert "max_bites" in told["why"]
    assert told["why"].endswith("the policy of before stays in force")
    said = shown(config)
    assert "policy NOT USED: " in said
    assert "max_bites" in said

    changed = f"# read again\n{text}"
    policy.write_text(changed)
    digest = hashlib.sha256(changed.encode()).hexdigest()
    assert north.wait_for("policy.reloaded", 60)["sha256"] == digest
    running.start_silos("south")
    running.finished("lung", ["north", "south"])
    running.completed()
    assert json.loads(shown(config, "--json"))["policy"] == {
        "in_force": digest, "file": digest, "problem": "",
    }  # fmt: skip

    # The ledger says which policy decided: what left before the change names the old one.
    records = running.records("north")
    place = next(n for n, each in enumerate(records) if each.get("after") == digest)
    assert records[place - 2]["reason"] == "policy changed"
    assert records[place - 1]["policy"] == digest
    old = hashlib.sha256(text.encode()).hexdigest()
    for n, each in enumerate(records):
        if each["type"] == "egress.intent":
            assert each["policy"]["file"] == (old if n < place else digest)
    assert len(running.events("north", "policy.invalid")) == 1
    running.check_models(job, simulate(job, running.shards(job.silos)))
    running.stop()
    running.check_ledgers()
