"""A hostile coordinator of rows, over real TLS, against the agent as it ships: what breaks a rule
is not trained on.

The key that the silos share is given to the agent: how it comes to be is in
test_key_coordinator.py.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.hostile_coordinator import SILO, Hostile, offer, play, records, round_of
from support.hostile_sum_coordinator import Blind
from support.keyed_jobs import WHOLE, Coordinator, even, first_prekey, job_keys
from support.recording_gate import Made

from staddle.algorithms.data.dataset import digits
from staddle.commands.federation import local_federation
from staddle.security.blind.plan import JobPlan
from staddle.security.blind.prekeys import Known
from staddle.security.identity import roster as rosters
from staddle.security.identity.keys import load_keys
from staddle.silo import agent as agents
from staddle.silo import config as configs
from staddle.silo.blind import group_keys
from staddle.silo.ingress import mix_rows
from staddle.silo.ingress.keyed_job import OWN, PrekeyFiles
from staddle.silo.ingress.mix_rows import expected_rows

pytestmark = pytest.mark.actor("coordinator")

OTHERS = ("east", "middle", "outer", "south", "west")
SILOS = (SILO, *OTHERS)


@pytest.fixture(autouse=True)
def hurried(monkeypatch):
    monkeypatch.setattr(agents, "PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(agents, "FIRST_WAIT_SECONDS", 0.02)

    async def contribute(keys, job):
        pass

    async def keys(keys, job):
        own = job_keys(job, SILO)
        files = PrekeyFiles(keys._jobs / job.name, keys._epoch(job).context())
        if not (files.folder / OWN).exists():
            files.begin(first_prekey(SILO), Known.first(own.others))
        return own

    monkeypatch.setattr(group_keys.GroupKeys, "contribute", contribute)
    monkeypatch.setattr(group_keys.GroupKeys, "keys", keys)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("attacked")
    files = local_federation.make(folder / "federation", SILOS)
    roster = rosters.load(files.folder / "roster.json")
    made = Made(files, roster, load_keys(files.folder / "coordinator" / "keys"))
    fields = {"security": {"secure_aggregation": "required", "clip_exponent": 6}, "min_cohort": 3}
    fields |= {"model": {"name": "cnn-digits", "classes": 10}}
    job = made.job("first", "pfedsim", SILOS, {"rho": 0}, **fields)
    local_federation.write_silo(files, SILO, "127.0.0.1:1", digits().take(np.arange(80)), [job])
    part = expected_rows(JobPlan(job).round(1))["extractor"].part
    mixing = Coordinator(made, job, part, folder / "silos")
    for number in range(2):
        mixing.give_all(number)
    return SimpleNamespace(
        jobs=made.jobs,
        silos=SILOS,
        signed={"first": made.signed("first")},
        roster=roster,
        keys=made.coordinator,
        silo_keys=load_keys(files.folder / SILO / "keys"),
        config=configs.load(files.silo_config(SILO)),
        policy=(files.folder / SILO / "policy.toml").read_text(),
        mixing=mixing,
    )


def versions(number, silos=OTHERS):
    return [(silo, number) for silo in silos]


# Old uploads that are weighed again, beside new ones at next to nothing.


@pytest.fixture
def opened(monkeypatch):
    """The rows that the real silo opened, in turn, each in one vector."""
    found, real = [], mix_rows.IncomingRows.delivered

    def delivered(self):
        made = real(self)
        found.extend(vector(part) for part in made.values())
        return made

    monkeypatch.setattr(mix_rows.IncomingRows, "delivered", delivered)
    return found


def vector(tensors):
    return torch.cat([value.double().reshape(-1) for value in tensors.values()])


def test_a_row_of_old_uploads_does_not_give_a_single_silos_part(world, tmp_path, opened):
    """First the mean of three, then that of two of them once more, and three new uploads at 2^-32
    each.

    Before: the third is found to 8e-9.
    """
    mixing, old, new = world.mixing, OTHERS[:2], OTHERS[2:]
    first = even(versions(0, (*old, new[0])))
    again = {**dict.fromkeys(versions(1, new), 1), **even(versions(0, old), len(new))}
    frames = [mixing.delivery(n, [mixing.row(SILO, each)]) for n, each in ((1, first), (2, again))]
    hostile = Blind(world, [offer(world), round_of(world, 1), round_of(world, 2)], {1: [], 2: []})
    hostile.script["fetch"] = [lambda: frames[0], lambda: frames[1]]
    play(hostile, tmp_path)
    assert (opened[0] - vector(mixing.wanted(first))).abs().max() < 1e-6
    if len(opened) > 1:
        found, true = 3 * opened[0] - 2 * opened[1], vector(mixing.values(new[0], 0))
        error = float((found - true).abs().max())
        cosine = float(torch.cosine_similarity(found, true, 0))
        pytest.fail(
            f"two rows were opened: the part of {new[0]} is off by {error:.1e}, cosine {cosine:.4f}"
        )
    assert hostile.answers[-1] == ("FAILED", 2, "POLICY")


def shifted(words):
    return bytes([words[0] ^ 1]) + words[1:]


def halved(words):
    return words[: len(words) // 2]


ATTACKS = {
    "a shifted word": lambda m: [m.row(SILO, even(versions(0)), words=shifted)],
    "weights that do not add up": lambda m: [m.row(SILO, dict.fromkeys(versions(0), WHOLE // 6))],
    "too few silos": lambda m: [m.row(SILO, even(versions(0, OTHERS[:2])))],
    "the row of another": lambda m: [m.row(OTHERS[0], even(versions(0, (*OTHERS[1:], SILO))))],
    "two rows": lambda m: [m.row(SILO, even(versions(number))) for number in range(2)],
    "half a row": lambda m: [m.row(SILO, even(versions(0)), words=halved)],
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_row_that_breaks_a_rule_ends_the_round_here_and_nothing_leaves(world, tmp_path, name):
    code = "POLICY" if name == "too few silos" else "DELIVERY"
    frames = world.mixing.delivery(1, ATTACKS[name](world.mixing))
    hostile = Hostile(world, [offer(world), round_of(world, 1)], fetch=[lambda: frames])
    play(hostile, tmp_path)
    assert hostile.answers == [("ACCEPT", 0, "UNSPECIFIED"), ("FAILED", 1, code)]
    assert hostile.uploads == []
    kinds = {record["type"] for record in records(tmp_path)}
    assert not kinds & {"ingress", "egress.intent", "egress.protocol"}
    assert not (tmp_path / "jobs" / "first" / "state-2.safetensors").exists()


def test_a_second_row_over_the_same_uploads_is_not_opened_after_a_restart(world, tmp_path):
    """The first is asked for in a round that fails for another reason, and the agent begins
    anew.
    """
    first = world.mixing.delivery(1, [world.mixing.row(SILO, even(versions(0)), words=shifted)])
    play(Hostile(world, [offer(world), round_of(world, 1)], fetch=[lambda: first]), tmp_path)
    other = world.mixing.delivery(1, [world.mixing.row(SILO, even(versions(0), 1 << 30), 1 << 30)])
    hostile = Hostile(world, [round_of(world, 1)], fetch=[lambda: other])
    play(hostile, tmp_path)
    assert hostile.answers == [("FAILED", 1, "POLICY")]
    memory = (tmp_path / "jobs" / "first" / "mix-extractor.rows.json").read_bytes()
    assert all(f'"{silo}":0'.encode() in memory for silo in OTHERS)
