"""Blind rounds in which either side dies at every durable step, or at random: the sum is that of an
undisturbed one.
"""

import json
import signal
import socket
from collections import Counter

import pytest
import torch

from staddle.algorithms.data.dataset import split
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.job.job import Job
from staddle.algorithms.training.silo_round import state_from_bytes
from staddle.commands.federation import local_federation
from staddle.commands.ledger.reconcile import compare
from staddle.security.blind.plan import JobPlan
from staddle.security.blind.sum import Quantised, given, group
from staddle.security.identity import roster as rosters
from staddle.security.ledger.audit import ledger_folder
from staddle.security.secagg.masked_sum import Accumulator, masked_chunks
from staddle.security.secagg.spec import specify
from staddle.silo.job_folder import split_key

SILOS = ("north", "east", "south", "west")
SECURITY = {"secure_aggregation": "required", "weight_most": 2000}
# lost after 30 s: who restarts is not
TIMING = {"admission_seconds": 120, "beat_seconds": 5, "hold_seconds": 2}
# what a silo says once in an attempt, whatever happens
ONCE = ("keys", "shares", "header", "survival", "reveal")


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def begin(
    running, document, plans, *, method="fedavg", timing=TIMING, security=SECURITY, **changes
):
    made = document(
        "blind",
        SILOS,
        method,
        **{"min_cohort": 3, "round_timeout": 120, "security": security, **changes},
    )
    running.job(made)
    running.address = f"127.0.0.1:{free_port()}"
    local_federation.write_coordinator(running.federation, ["blind"], timing, running.address)
    for silo in SILOS:
        running.write_silo(silo)
    for name in ("coordinator", *SILOS):
        running.start_daemon(name, plans.get(name, "never"))


def finished(running, silos=SILOS):
    for silo in silos:
        while (ended := running.daemons[silo].event(150) or {}).get(
            "event", "job.finished"
        ) != "job.finished":
            running.daemons["coordinator"].check()
        assert (ended.get("job"), ended.get("completed")) == ("blind", True), running.daemons[
            silo
        ].tail()


def events(running, name):
    """What a daemon has logged, and ``crashing.py`` of its deaths."""
    lines = running.daemons[name].log.read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


class Announced(Quantised):
    """The sums of a cohort of all silos, of which some did not survive."""

    def opened(self, part, members, read):
        spec = specify(self._frame(group(part, self._bounds)), SILOS, 0)
        accumulator = Accumulator(spec)
        for silo in members:
            contribution = given(
                part, spec.groups[0], {each.name: read(silo, each.name) for each in part.wire}
            )
            accumulator.add(
                words.tobytes() for words in masked_chunks(spec, silo, [contribution], ())
            )
        return spec, accumulator.open((), members)[0]


def check_result(running, silos=SILOS, exchanges=Quantised):
    torch.set_num_threads(1)
    (job,) = running.jobs
    shards = {
        silo: split(running.data[silo], split_key(running.federation.state(silo)), 0.25)
        for silo in SILOS
    }
    expected = simulate(job, shards, exchanges=exchanges(JobPlan(job).bounds, job.security.counts))
    for silo in silos:
        path = running.federation.state(silo) / "jobs" / job.name / "model.safetensors"
        found = state_from_bytes(path.read_bytes())
        for part, tensors in expected.states[silo].parts.items():
            for name, value in tensors.items():
                assert torch.equal(found.parts[part][name], value), (silo, part, name)


def records_of(running, silo):
    path = ledger_folder(running.federation.state(silo))
    return [
        json.loads(line)
        for file in sorted(path.glob("seg-*.jsonl"))
        for line in file.read_text().splitlines()
    ]


def check_said_once(running, dying, silos=SILOS):
    """No silo signs other survivors of a round than before, or says anything twice in an attempt.

    Where the coordinator died, or turned the silo away, what it may not have had is given again; it
    refuses what is not the same. A silo that begins anew many times a second is turned away.
    """
    refused = [line for line in events(running, "coordinator") if line.get("code") == "SECURE"]
    for silo in silos:
        kept = records_of(running, silo)
        # nobody broke a rule
        assert {record["blame"] for record in kept if record["type"] == "secagg.end"} <= {""}
        records = [record for record in kept if record["type"] == "egress.protocol"]
        said = Counter(
            (record["ctx"], record["kind"]) for record in records if record["kind"] in ONCE
        )
        away = any(
            line["event"] in ("turned.away", "coordinator.lost") for line in events(running, silo)
        )
        assert set(said.values()) == {1} or "coordinator" in dying or away, (silo, said)
        signed = {
            (each["round"], *each["survivors"]) for each in kept if each["type"] == "secagg.signed"
        }
        assert len(signed) == len({round_ for round_, *_ in signed}), (silo, signed)
    assert refused == [] or set(dying) - {"coordinator"}


def check_ledgers(running, silos=SILOS):
    roster, state = (
        rosters.load(running.federation.folder / "roster.json"),
        running.federation.state,
    )
    for silo in silos:
        assert (
            compare(state(silo) / "ledger", state("coordinator") / "ledger", roster).differences
            == ()
        )


def left_over(running):
    """Files of the coordinator that hold masked words, or their sum."""
    folder = running.federation.coordinator_config.parent / "state"
    return [
        path.name
        for path in folder.rglob("*")
        if path.suffix in (".part", ".upload", ".masked") or "@sum" in path.name
    ]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("plans", "changes", "fewest"),
    [
        ({"coordinator": "every"}, {"rounds": 1}, 45),
        ({"north": "every"}, {"rounds": 2}, 45),
        (  # while the holders of each class are counted, and around the words of their sum
            {"coordinator": "every:rename 0.holders", "north": "every:intent blind 0|0 survival"},
            {"rounds": 1, "method": "fedssa", "options": {"t_stable": 3}},
            3,
        ),
        (
            {"coordinator": "seed:1:8", "north": "seed:2:6", "east": "seed:3:6"},
            {"rounds": 2, "method": "fedssa", "options": {"t_stable": 3}},
            20,
        ),
        # both signed survivors of the round, and too few are left to open the sum: it is made again
        (
            {
                "north": "every:egress.protocol blind 0 reveal",
                "east": "every:egress.protocol blind 0 reveal",
            },
            {"rounds": 1},
            2,
        ),
    ],
    ids=[
        "coordinator at every step",
        "silo at every step",
        "both in the count",
        "all at random",
        "two who signed",
    ],
)
def test_killed_again_and_again(start, document, plans, changes, fewest):
    running = start(*SILOS)
    begin(running, document, plans, **changes)
    finished(running)
    codes = {name: daemon.stop() for name, daemon in running.daemons.items()}
    assert -signal.SIGKILL not in codes.values(), codes  # all of them stop when asked
    check_result(running)
    check_said_once(running, plans)
    check_ledgers(running)
    assert left_over(running) == []
    died = [
        line["at"] for name in plans for line in events(running, name) if line["event"] == "killed"
    ]
    assert len(died) >= fewest


WORDS = (
    "sync 0.model.words.tmp",
    "rename 0.model.words",
    "sync 1.model.words.tmp",
    "rename 1.model.words",
)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("plan", "security"),
    [
        ("every:words", {"tags": True}),
        ("every:blind folding", {"tags": True}),
        ("full:words", {"tags": True}),
        ("every:words|blind folding", {"audience": "silos"}),
    ],
)
def test_killed_around_the_words_of_sums_that_come_down(start, document, plan, security):
    """Silos check each result by their tags, so what they get after a death is the very sum that
    was opened before.
    """
    running = start(*SILOS)
    begin(running, document, {"coordinator": plan}, rounds=3, security={**SECURITY, **security})
    finished(running)
    running.stop()
    check_result(running)
    check_said_once(running, {"coordinator"})
    check_ledgers(running)
    assert left_over(running) == []
    seen = events(running, "coordinator")
    assert {
        line["round"] for line in seen if line["event"] == "delivered" and line.get("sums") == 1
    } == {1, 2, 3}
    kept = {
        path.name
        for path in (running.federation.coordinator_config.parent / "state").rglob("*.words")
    }
    assert {"2.model.words"} <= kept <= {"1.model.words", "2.model.words"}
    died = [at for line in seen if line["event"] == "killed" for at in line["at"]]
    if plan.startswith("every:words"):
        assert set(WORDS) <= set(died)
        assert len(died) >= (10 if "folding" in plan else 4)
    elif plan == "full:words":
        assert len([line for line in seen if line["event"] == "fold.waits"]) == 3
    else:
        assert len(died) >= 6  # before and after each COMMIT that a sum is open


@pytest.mark.timeout(120)
def test_with_declared_counts_a_round_goes_on_without_a_silo_that_is_gone(
    start, document, monkeypatch
):
    """It dies when its masks are agreed on, right before its first masked byte.

    In the next round it is not there.
    """
    running, gone = start(*SILOS), "east"
    others = tuple(silo for silo in SILOS if silo != gone)
    security = {
        "secure_aggregation": "required",
        "weights": "public",
        "dropouts": "any",
        "counts": dict.fromkeys(SILOS, 100),
    }
    begin(
        running,
        document,
        {gone: "once:egress.intent blind 0"},
        timing={**TIMING, "secure_seconds": 6},
        security=security,
        round_timeout=6,
        rounds=2,
    )
    finished(running, others)
    running.stop()
    (died,) = [line["at"] for line in events(running, gone) if line["event"] == "killed"]
    assert died == ["sync seg-00000001.jsonl egress.intent blind 0 masked"]
    seen = events(running, "coordinator")
    dropped = [
        (line["silo"], line["round"], line["code"])
        for line in seen
        if line["event"] == "silo.dropped"
    ]
    codes = {(silo, round_): code for silo, round_, code in dropped if code in ("deadline", "lost")}
    assert codes.keys() >= {(gone, 0), (gone, 1)}
    assert [line["members"] for line in seen if line["event"] == "round.closed"] == [
        list(others)
    ] * 2
    for silo in others:
        sums = [record for record in records_of(running, silo) if record["type"] == "secagg.sum"]
        assert [record["survivors"] for record in sums] == [sorted(others)] * 2
    monkeypatch.setattr(Job, "cohort", lambda *_: others)
    check_result(running, others, Announced)
    check_said_once(running, {gone}, others)
    check_ledgers(running)
    assert left_over(running) == []
