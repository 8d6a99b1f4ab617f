"""One silo fails in some way; its error is clear, nobody hangs, the other silos go on.

Real processes.
"""

import asyncio
import contextlib

import numpy as np
from support.ledgers import stored

from staddle.commands.federation import local_federation
from staddle.coordinator import config as configs
from staddle.coordinator import server
from staddle.errors import AbortedError
from staddle.files.documents import canonical_json
from staddle.security.identity import roster as rosters
from staddle.security.identity.domains import JOB
from staddle.security.identity.keys import load_keys
from staddle.security.identity.signed_document import sign_document
from staddle.security.ledger.audit import ledger_folder, verify
from staddle.security.ledger.messages import summary

SILOS = ("north", "east", "south")


def launch(start, document, silos=SILOS, timing=None, shipped=False, **job):
    running = start(*silos, shipped=shipped)
    running.job(document("go", silos, **job))
    coordinator = running.start_coordinator(**(timing or {}))
    for silo in silos:
        running.write_silo(silo)
    return running, coordinator


def events_until(coordinator, name, seconds=90):
    seen = []
    while not seen or seen[-1]["event"] != name:
        event = coordinator.event(seconds)
        assert event is not None, f"no {name} within {seconds} s; seen {[e['event'] for e in seen]}"
        seen.append(event)
    return seen


def codes(seen, event):
    return sorted((each["silo"], each["code"]) for each in seen if each["event"] == event)


def changed_records(running, silo, change):
    path = running.federation.folder / silo / "data.npz"
    with np.load(path) as arrays:
        x, y = change(arrays["x"], arrays["y"])
    np.savez(path, x=x, y=y)


def until_its_end(daemon):
    with contextlib.suppress(AbortedError):
        while daemon.event(60) is not None:
            pass


def test_sigterm_stops_everybody_cleanly(start, document, fork_server):
    """The coordinator and one silo are the shipped commands."""
    silos = SILOS[:2]
    running, coordinator = launch(start, document, silos, rounds=1, shipped=True)
    running.start_silo(silos[0])
    running.launcher = fork_server.launch
    running.start_silo(silos[1])
    events_until(coordinator, "job.ended")
    for daemon in running.daemons.values():
        assert daemon.stop() == 0, daemon.tail()
    for silo in silos:
        path = ledger_folder(running.federation.state(silo))
        assert verify(path).ok
        assert stored(path)[-1]["type"] == "stop"


def test_sigterm_reaches_a_silo_in_the_middle_of_training(start, document):
    """Training runs in a worker: heartbeats go on beside it, and a stop is not kept waiting for its
    end.

    When north is lost, east has trained for longer than it takes to be lost without heartbeats.
    """
    silos = SILOS[:2]
    running = start(*silos)
    table = document("long", silos, rounds=1, round_timeout=120)
    table["training"]["epochs"] = 10_000
    running.job(table)
    coordinator = running.start_coordinator(beat_seconds=1)
    running.write_silo("north")
    running.write_silo("east")
    north, east = running.start_silo("north"), running.start_silo("east")
    coordinator.wait_for("round.opened", 60)
    for _ in ("north", "east"):
        coordinator.wait_for("delivered", 60)
    assert north.stop() == 0, north.tail()
    seen = events_until(coordinator, "silo.dropped", 30)
    assert (seen[-1]["silo"], seen[-1]["code"]) == ("north", "lost")
    assert east.stop() == 0, east.tail()
    assert coordinator.stop() == 0, coordinator.tail()
    dropped = running.events("coordinator", "silo.dropped")
    assert [each["silo"] for each in dropped] == ["north"]  # east went on


def test_a_killed_silo_is_dropped_and_the_others_go_on(start, document):
    running, coordinator = launch(
        start, document, rounds=3, timing={"beat_seconds": 1, "hold_seconds": 1}
    )
    running.start_daemon("north", "once:egress.intent go 1")
    for silo in SILOS[1:]:
        running.start_silo(silo)
    seen = events_until(coordinator, "job.ended")
    assert seen[-1]["outcome"] == "completed"
    last = [e for e in seen if e["event"] == "round.closed"][-1]
    assert (last["round"], set(last["members"])) == (2, {"east", "south"})
    running.stop()
    # at most a torn line, which is reported apart
    assert verify(ledger_folder(running.federation.state("north"))).ok


def test_silos_that_cannot_take_part_say_why_and_the_others_go_on(start, document):
    """Of one the policy denies the job, one trains until it diverges; a label does not fit, or a
    file is none.
    """
    failing = ("denies", "diverges", "mislabels", "garbles")
    timing = {"beat_seconds": 5}  # nobody is lost where so many share the processors
    running, coordinator = launch(start, document, (*SILOS, *failing), timing, rounds=1)
    policy = running.federation.folder / "denies" / "policy.toml"
    policy.write_text(policy.read_text().replace('"classifier.**"', '"nothing.**"'))
    changed_records(running, "diverges", lambda x, y: (x * np.float32(1e30), y))
    changed_records(running, "mislabels", lambda x, y: (x, y + 5))
    (running.federation.folder / "garbles" / "data.npz").write_bytes(b"not an npz file")
    for silo in running.data:
        running.start_silo(silo)
    seen = events_until(coordinator, "job.ended")
    declined = [("denies", "POLICY"), ("garbles", "DATA"), ("mislabels", "DATA")]
    assert codes(seen, "job.declined") == declined
    assert codes(seen, "silo.dropped") == [("diverges", "TRAINING")]
    assert {e["level"] for e in seen if e["event"] == "silo.dropped"} == {"warning"}
    assert seen[-1]["outcome"] == "completed"
    running.stop()
    log = running.daemons["denies"].log.read_text()
    assert "classifier.weight" in log
    assert "fedavg-model" in log
    for silo in failing:  # nothing but control messages has left
        left = summary(ledger_folder(running.federation.state(silo)))
        assert {part for _, part in left} == {"(control)"}, silo


def test_too_few_silos_end_the_job_with_a_reason(start, document):
    running, coordinator = launch(start, document, timing={"admission_seconds": 1}, min_cohort=3)
    for silo in SILOS[:2]:
        running.start_silo(silo)
    ended = events_until(coordinator, "job.ended")[-1]
    assert ended["outcome"] == "failed"
    assert "min_cohort is 3" in ended["reason"]
    assert "south: no answer" in ended["reason"]


async def test_silos_check_the_operators_signature_themselves(start, document, monkeypatch):
    """A coordinator that invents a job, or signs one itself, gets nothing from a silo."""
    running = start(*SILOS)
    job = running.job(document("forged", SILOS))
    folder = running.federation.folder
    roster = rosters.load(folder / "roster.json")
    own = sign_document(job.document(), roster, load_keys(folder / "coordinator" / "keys"), JOB)
    # this coordinator believes anything
    monkeypatch.setattr(server, "_job", lambda *_: (job, canonical_json(own)))
    local_federation.write_coordinator(
        running.federation,
        ["forged"],
        {"admission_seconds": 30, "beat_seconds": 1, "hold_seconds": 2},
    )
    config = configs.load(running.federation.coordinator_config)
    async with server.running(config) as address:
        running.address = address
        running.write_silo("north")
        north = running.start_silo("north")
        declined = await asyncio.to_thread(north.wait_for, "job.declined", 60)
        assert declined["code"] == "JOB_SIGNATURE"
        assert "role coordinator" in declined["why"]


def test_a_silo_whose_roster_differs_is_told_and_stops(start, document):
    running, coordinator = launch(start, document, rounds=1)
    folder = running.federation.folder
    newer = rosters.remove(rosters.load(folder / "roster.json"), "south")
    rosters.save(
        rosters.sign(newer, load_keys(folder / "founder")), folder / "north" / "roster.json"
    )
    config = running.federation.silo_config("north")
    config.write_text(config.read_text().replace("../roster.json", "roster.json"))
    north = running.start_silo("north")
    for silo in SILOS[1:]:
        running.start_silo(silo)
    until_its_end(north)
    assert north.returncode == 1
    assert "another roster" in north.tail()
    assert coordinator.returncode is None


def test_missing_data_are_noticed_at_the_start(start, document):
    running = start(*SILOS)
    running.job(document("go", SILOS))
    running.address = "127.0.0.1:1"  # nobody is asked
    running.write_silo("north")
    (running.federation.folder / "north" / "data.npz").unlink()
    north = running.start_silo("north")
    until_its_end(north)
    assert north.returncode == 1
    assert "data.npz: no such file" in north.tail()
    assert running.events("north", "started") == []


def test_second_process_on_one_state_folder_is_refused(start, document):
    running, _ = launch(start, document)
    first = running.start_silo("north")
    first.wait_for("connected", 60)
    second = running.start_silo("north")
    until_its_end(second)
    assert second.returncode == 1
    assert "another process runs with this folder" in second.tail()
    assert first.returncode is None
    first.stop()
