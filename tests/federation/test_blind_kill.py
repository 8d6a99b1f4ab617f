"""Blind rounds in which either side dies at every durable step, or at random: the sum is that of an
undisturbed one.
"""

import signal
from collections import Counter

import pytest
import torch
from federation.keyed import SECURITY, TIMING

from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.job.job import Job
from staddle.security.blind.plan import JobPlan
from staddle.security.blind.sum import Quantised, given, group
from staddle.security.secagg.masked_sum import Accumulator, masked_chunks
from staddle.security.secagg.spec import specify

SILOS = ("north", "east", "south", "west")
# what a silo says once in an attempt, whatever happens
ONCE = ("keys", "shares", "header", "survival", "reveal")


def begin(
    running, document, plans, *, method="fedavg", timing=TIMING, security=SECURITY, **changes
):
    fields = {"min_cohort": 3, "round_timeout": 120, "security": security, **changes}
    running.job(document("blind", SILOS, method, **fields))
    running.start_all(timing, plans)


class Announced(Quantised):
    """The sums of a cohort of all silos, of which some did not survive."""

    def opened(self, part, members, read):
        spec = specify(self._frame(group(part, self._bounds)), SILOS, 0)
        accumulator = Accumulator(spec)
        for silo in members:
            tensors = {each.name: read(silo, each.name) for each in part.wire}
            contribution = given(part, spec.groups[0], tensors)
            words = masked_chunks(spec, silo, [contribution], ())
            accumulator.add(each.tobytes() for each in words)
        return spec, accumulator.open((), members)[0]


def check_result(running, silos=SILOS, exchanges=Quantised):
    (job,) = running.jobs
    summed = exchanges(JobPlan(job).bounds, job.security.counts)
    running.check_models(job, simulate(job, running.shards(), exchanges=summed), silos)


def check_said_once(running, dying, silos=SILOS):
    """No silo signs other survivors of a round than before, or says anything twice in an attempt.

    Where the coordinator died, or turned the silo away, what it may not have had is given again; it
    refuses what is not the same. A silo that begins anew many times a second is turned away.
    """
    refused = [line for line in running.events("coordinator") if line.get("code") == "SECURE"]
    for silo in silos:
        # nobody broke a rule
        assert {record["blame"] for record in running.records(silo, "secagg.end")} <= {""}
        records = running.records(silo, "egress.protocol")
        said = Counter((each["ctx"], each["kind"]) for each in records if each["kind"] in ONCE)
        away = running.events(silo, "turned.away", "coordinator.lost")
        assert set(said.values()) == {1} or "coordinator" in dying or away, (silo, said)
        signatures = running.records(silo, "secagg.signed")
        signed = {(each["round"], *each["survivors"]) for each in signatures}
        assert len(signed) == len({round_ for round_, *_ in signed}), (silo, signed)
    assert refused == [] or set(dying) - {"coordinator"}


def left_over(running):
    """Files of the coordinator that hold masked words, or their sum."""
    words = (".part", ".upload", ".masked")
    files = running.kept.rglob("*")
    return [path.name for path in files if path.suffix in words or "@sum" in path.name]


FEDSSA = {"method": "fedssa", "options": {"t_stable": 3}}
SIGNED = "every:egress.protocol blind 0 reveal"
CASES = {  # plans, what the job is, and how often they die at the least
    # but those that are a plain job's as well: test_kill dies at them
    "coordinator at every step": ({"coordinator": "every:blind|0.|part"}, {"rounds": 1}, 33),
    "silo at every step": (
        {"north": "every:blind|group|prekeys|secagg|outbox|state|digest"},
        {"rounds": 2},
        30,
    ),
    # while the holders of each class are counted, and around the words of their sum
    "both in the count": (
        {"coordinator": "every:rename 0.holders", "north": "every:intent blind 0|0 survival"},
        {"rounds": 1, **FEDSSA},
        3,
    ),
    # both signed survivors of the round, and too few are left to open the sum: it is made again
    "two who signed": ({"north": SIGNED, "east": SIGNED}, {"rounds": 1}, 2),
    "all at random": (
        {"coordinator": "seed:1:8", "north": "seed:2:6", "east": "seed:3:6"},
        {"rounds": 2, **FEDSSA},
        20,
    ),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES)
def test_killed_again_and_again(start, document, case):
    plans, changes, fewest = CASES[case]
    running = start(*SILOS)
    begin(running, document, plans, **changes)
    running.finished("blind")
    running.ended()
    codes = {name: daemon.stop() for name, daemon in running.daemons.items()}
    assert -signal.SIGKILL not in codes.values(), codes  # all of them stop when asked
    check_result(running)
    check_said_once(running, plans)
    running.check_ledgers()
    assert left_over(running) == []
    assert sum(len(running.killed(name)) for name in plans) >= fewest


@pytest.mark.timeout(120)
def test_a_silo_that_draws_in_secret_says_nothing_twice_after_it_was_killed(start, document):
    """It trains anew, and otherwise: two words under one mask would show by how much."""
    noise = {"augment": [{"kind": "GaussianNoise", "sigma": 0.5}]}
    plans = {"north": "every:blind 0 header|outbox"}
    running = start(*SILOS)
    begin(running, document, plans, rounds=1, training=noise)
    running.finished("blind")
    running.ended()
    running.stop()
    check_said_once(running, plans)
    running.check_ledgers()
    assert running.killed("north")
    # Nobody can compute it, not even from all records.
    (job,) = running.jobs
    known = simulate(job, running.shards(), exchanges=Quantised(JobPlan(job).bounds))
    for silo in SILOS:
        found = running.model(job, silo).parts["classifier"]
        assert not torch.equal(found["weight"], known.states[silo].parts["classifier"]["weight"])


WORDS = ("rename 0.model.words", "rename 1.model.words")
# before and after each COMMIT that a sum is open
FOLDS = {
    f"{when} COMMIT of blind folding {n} answers given"
    for when in ("before", "after")
    for n in range(3)
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("plan", "security"),
    [
        ("every:words|blind folding", {"tags": True}),
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
    running.finished("blind")
    running.stop()
    check_result(running)
    check_said_once(running, {"coordinator"})
    running.check_ledgers()
    assert left_over(running) == []
    delivered = running.events("coordinator", "delivered")
    assert {line["round"] for line in delivered if line.get("sums") == 1} == {1, 2, 3}
    kept = {path.name for path in running.kept.rglob("*.words")}
    assert {"2.model.words"} <= kept <= {"1.model.words", "2.model.words"}
    died = {at for places in running.killed("coordinator") for at in places}
    if plan == "full:words":
        assert len(running.events("coordinator", "fold.waits")) == 3
    else:
        assert died >= {*WORDS, *FOLDS}


@pytest.mark.timeout(120)
def test_with_declared_counts_a_round_goes_on_without_a_silo_that_is_gone(
    start, document, monkeypatch
):
    """It dies when its masks are agreed on, right before its first masked byte.

    In the next round it is not there.
    """
    running, gone = start(*SILOS), "east"
    others = tuple(silo for silo in SILOS if silo != gone)
    security = {"secure_aggregation": "required", "weights": "public", "dropouts": "any"}
    security["counts"] = dict.fromkeys(SILOS, 100)
    timing, dies = {**TIMING, "secure_seconds": 6}, {gone: "once:egress.intent blind 0"}
    changes = {"security": security, "round_timeout": 6, "rounds": 2}
    begin(running, document, dies, timing=timing, **changes)
    running.finished("blind", others)
    running.stop()
    (died,) = running.killed(gone)
    assert died == ["sync seg-00000001.jsonl egress.intent blind 0 masked"]
    dropped = running.events("coordinator", "silo.dropped")
    late = [line for line in dropped if line["code"] in ("deadline", "lost")]
    assert {(line["silo"], line["round"]) for line in late} >= {(gone, 0), (gone, 1)}
    closed = running.events("coordinator", "round.closed")
    assert [line["members"] for line in closed] == [list(others)] * 2
    for silo in others:
        sums = running.records(silo, "secagg.sum")
        assert [record["survivors"] for record in sums] == [sorted(others)] * 2
    monkeypatch.setattr(Job, "cohort", lambda *_: others)
    check_result(running, others, Announced)
    check_said_once(running, {gone}, others)
    running.check_ledgers()
    assert left_over(running) == []
