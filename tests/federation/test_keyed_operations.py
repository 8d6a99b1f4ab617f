"""Keyed jobs that an operator stops and resumes, of which silos are away for rounds, or that silos
decline.
"""

import json

import pytest
from federation.keyed import (
    SECURITY,
    TIMING,
    check_ledgers,
    check_result,
    counts,
    even,
    group_key,
    seeded,
)
from typer.testing import CliRunner

from staddle.commands.federation import local_federation
from staddle.commands.main import app
from staddle.silo.job_folder import JobFolder

SILOS = ("north", "east", "south", "west", "middle")
# one round of means
PFEDSIM = {"options": {"rho": 0.34}, "rounds": 3, "min_cohort": 3, "security": SECURITY}


@pytest.fixture
def operator(start):
    """A federation of five silos, and ``call`` for the operator's command line."""
    running = start(*SILOS)
    even(running, SILOS)

    def call(*arguments):
        path = running.federation.folder / "operator.toml"
        result = CliRunner().invoke(app, ["job", *map(str, arguments), "--operator", str(path)])
        assert result.exit_code == 0, result.output
        return result.output

    return running, call


def signed(running, name):
    return running.federation.folder / "jobs" / f"{name}.json"


def test_a_keyed_job_stops_and_resumes(operator, document):
    """It stops between its uploads, and resumes after another job and a restart.

    Two keyed jobs of the same silos have two keys.

    Of the second, north is away in its last three rounds.
    """
    running, call = operator
    declared = {"secure_aggregation": "required", "weights": "public", "dropouts": "any"}
    declared["counts"] = counts(running, SILOS)
    away = {"rounds": 4, "min_cohort": 3, "participation": 0.8, "security": declared}
    options = {"similarity": "samples", "tau_theta": 1, "supervisor": "cnn"}
    first = running.job(document("first", SILOS, "pfedsim", **PFEDSIM))
    drawn = [True, True, False, False, False]
    as_drawn = lambda job: ["north" in job.cohort(round_) for round_ in range(5)] == drawn
    wanted = document("second", SILOS, "fedsimsup", options=options, **away)
    second = running.job(seeded(wanted, as_drawn))
    running.configure(TIMING, [])
    local_federation.write_operator(running.federation, running.address)
    # round 1 stays open: one silo dies before it gives anything in it
    dies = {"middle": "once:egress.intent first 1 padded"}
    for name in ("coordinator", *SILOS):
        running.start_daemon(name, dies.get(name, "never"))
    running.daemons["coordinator"].wait_for("listening", 60)

    call("submit", signed(running, "first"))
    given = running.daemons["north"].wait_for("round.part_given", 60)
    assert (given["round"], given["part"]) == (1, "extractor")
    assert "stopped" in call("stop", "first")
    shown = json.loads(call("show", "first", "--json"))
    assert (shown["stage"], shown["round"]) == ("stopped", 1)
    assert running.daemons["middle"].wait_for("killed", 60)["at"]
    running.start_daemon("middle")
    call("submit", signed(running, "second"))
    assert "completed" in call("watch", "second").splitlines()[-1]

    assert running.daemons["coordinator"].stop() == 0
    running.start_daemon("coordinator")
    running.daemons["coordinator"].wait_for("listening", 60)
    call("resume", "first")
    assert "completed" in call("watch", "first").splitlines()[-1]
    running.stop()

    for job in (first, second):
        members = check_result(running, job, SILOS)
        assert members == {round_: job.cohort(round_) for round_ in range(job.length)}
    assert group_key(running, first, SILOS) != group_key(running, second, SILOS)
    rows = json.loads((running.job_folder(second, "north") / "mix-theta.rows.json").read_text())
    assert len(rows["delivered"]) == 3
    words = [
        r for r in running.records("north") if r.get("kind") == "padded" and r["job"] == "first"
    ]
    # one a round: the word that was given before the stop stands
    assert len({record["ctx"] for record in words}) == 2
    check_ledgers(running, SILOS)


def test_a_keyed_job_pends_where_silos_decline_it_and_its_name_stays_taken(operator, document):
    running, call = operator
    job = running.job(document("job", SILOS, "pfedsim", **PFEDSIM))
    assert job.keyed
    running.configure(TIMING)
    trust = 'trust = "non-colluding-coordinator"'
    for silo, asked in (("north", 'trust = "none"'), ("east", f"{trust}\nmin_cohort = 4")):
        policy = running.federation.folder / silo / "policy.toml"
        text = policy.read_text()
        assert text.count(trust) == 1
        policy.write_text(text.replace(trust, asked))
    for name in ("coordinator", *SILOS):
        running.start_daemon(name)
    coordinator = running.daemons["coordinator"]
    running.address = str(coordinator.wait_for("listening", 60)["address"])
    for _ in SILOS:
        while coordinator.event(60)["event"] not in ("job.accepted", "job.declined"):
            pass
    local_federation.write_operator(running.federation, running.address)
    answers = json.loads(call("show", "job", "--json"))["answers"]
    assert [silo for silo in SILOS if answers[silo] == "accepted"] == ["south", "west", "middle"]
    assert (answers["north"], answers["east"]) == ("POLICY", "POLICY")
    call("withdraw", "job")
    assert coordinator.wait_for("job.ended", 60)["outcome"] == "failed"
    path = running.federation.folder / "operator.toml"
    again = ["job", "submit", str(signed(running, "job")), "--operator", str(path)]
    assert "its name stays taken" in str(CliRunner().invoke(app, again).exception)
    running.stop()
    (north,), (east,) = (
        [event["why"] for event in running.events(silo, "job.declined")]
        for silo in ("north", "east")
    )
    assert 'secure_aggregation.trust = "none"; set it to "non-colluding-coordinator"' in north
    assert (
        "rows of the job may sum as few as min_cohort = 3 other silos; the policy has"
        " secure_aggregation.min_cohort = 4" in east
    )
    accepted = [
        silo for silo in SILOS if (running.federation.state(silo) / "jobs" / "job").exists()
    ]
    assert accepted == [silo for silo in SILOS if silo not in ("north", "east")]
    assert all(
        JobFolder(running.federation.state(silo) / "jobs" / "job").failed for silo in accepted
    )
    for silo in SILOS:
        assert not running.records(silo, "egress.intent")
