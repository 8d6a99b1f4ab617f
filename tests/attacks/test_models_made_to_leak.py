"""A coordinator alone, and a silo alone, read the others' records by a model that is made to leak: real agents, TLS.

The measure is how many records come out above 25 dB. Each attack is made on silos whose policy bounds nothing of what
comes down too: there it has to succeed.
"""

import re
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import traps
from federation.conftest import job_document
from federation.test_blind import records_of
from hostile import SILO, delivery, offer, play, records, round_of
from hostile_sums import OTHERS, Attempted, Blind, make_world

from staddle.algorithms.data import digits, split
from staddle.algorithms.local_round import local_round
from staddle.algorithms.method import initial_state
from staddle.commands.local_federation import policy_text
from staddle.proto.blind import model_digest, round_frame
from staddle.proto.wire import delivered_items
from staddle.security import roster as rosters
from staddle.security.masked_sum import Given
from staddle.silo.state import split_key

pytestmark = [pytest.mark.actor("coordinator"), pytest.mark.usefixtures("hurried")]

SECURITY = {"blind": {"secure_aggregation": "required", "weight_most": 2000, "tags": False}}
TRAINING = {"epochs": 1, "batch_size": 64, "lr": 0.05}
OTHERS_EACH = 12
BOUNDS = re.compile(r"^max_(step|parallel) = .*\n", re.MULTILINE)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("leaking"), SECURITY, model=traps.MODEL, training=TRAINING)


class Trapped(Attempted):
    """Round 1 of the job: its model is the trap, from which the other silos train honestly."""

    def __init__(self, world):
        self.data = {
            s: digits().take(np.arange(n, n + OTHERS_EACH)) for n, s in zip((200, 300, 400), OTHERS, strict=True)
        }
        self.trap = traps.trap(traps.others_records())
        super().__init__(world, "blind", 1)

    def frames(self):
        specs = [item.spec.name for item in delivered_items(self.job.down(1))]

        def change(values):
            for value, name in zip(values, specs, strict=True):
                value.copy_(self.trap[name])

        return delivery(self.world, self.job.name, 1, change=change)

    def framed(self, round_):
        end = self.frames()[-1].end
        items = delivered_items(self.job.down(round_))
        model = model_digest(self.job, round_, items, list(end.tensor_sha256))
        return round_frame(self.job, round_, self.world.roster.federation, rosters.digest(self.world.roster), model)

    def gift(self, group, silo):
        if group.name != "model":
            return super().gift(group, silo)
        method, own = self.job.method(), self.data[silo]
        began = initial_state(method, silo)
        trained = local_round(method, self.job, began, 1, {"model": self.trap}, own, own, silo).state
        flat = [trained.parts[name.partition(".")[0]][name.partition(".")[2]].ravel() for name in self.trap]
        return Given(torch.cat(flat).double().numpy(), np.full(group.rows, float(len(own))))


def opened_model(attempted):
    """The mean of the models that were trained, by name; None where no sum was opened."""
    if attempted.opened is None:
        return None
    values = torch.from_numpy(attempted.opened[0].mean(np.float64))
    pieces = values.split([tensor.numel() for tensor in attempted.trap.values()])
    return {name: piece.reshape(attempted.trap[name].shape) for name, piece in zip(attempted.trap, pieces, strict=True)}


@pytest.mark.parametrize(
    ("taken_out", "why"),
    [
        pytest.param("max_(step|parallel)", "", marks=pytest.mark.control),  # drafted policies have both
        ("max_step", "that are multiples of others"),
        ("max_parallel", "times the longest step of this silo's own training"),
    ],
    ids=["unbounded", "rows", "steps"],
)
def test_a_coordinator_alone_hands_down_a_trap(world, tmp_path, taken_out, why):
    """One round of 95 records: 40 are read where nothing is bounded, and none where the one bound or the other is."""
    (tmp_path / "split.key").write_bytes(bytes(32))
    trapped = Trapped(world)
    tasks = [offer(world, "blind"), *(round_of(world, number, "blind", counted=number) for number in range(2))]
    hostile = Blind(world, tasks, {0: [Attempted(world, "blind")], 1: [trapped]})
    hostile.script["fetch"] = [lambda: delivery(world, "blind", 0), trapped.frames]
    drafted = policy_text(list(world.jobs.values()))
    play(hostile, tmp_path, policy=re.sub(f"^{taken_out} = [0-9.]+\n", "", drafted, flags=re.MULTILINE))
    own = split(digits().take(np.arange(80)), bytes(32), 0.25)[0].x
    every = torch.cat([own, *(data.x for data in trapped.data.values())])
    trained = opened_model(trapped)
    count = 0 if trained is None else traps.read(trapped.trap, trained, every)
    denied = [record for record in records(tmp_path) if record["type"] == "policy.deny"]
    if not why:
        assert count > 20, f"{count} of {len(every)} records were read: the attack does not work as it should"
        assert denied == []
        return
    assert count == 0, f"{count} of {len(every)} records were read"
    assert [(record["round"], record["purpose"]) for record in denied] == [(1, "delivery")]
    assert why in denied[0]["reasons"][0]


# One silo alone; the coordinator and the other silos are honest.

TRAPPING = str(Path(__file__).with_name("trapping.py"))


@pytest.mark.timeout(300)
@pytest.mark.actor("silo")
@pytest.mark.parametrize("bounded", [pytest.param(False, marks=pytest.mark.control), True])
def test_a_silo_alone_makes_the_mean_a_trap(start, tmp_path, bounded):
    """Three rounds with tags, 36 records of three silos: 15 are read where nothing is bounded, else none."""
    running = start(SILO, *OTHERS)
    starts = dict(zip(running.data, (0, 100, 200, 300), strict=True))
    running.data = {silo: digits().take(np.arange(at, at + 16)) for silo, at in starts.items()}
    security = {**SECURITY["blind"], "tags": True}
    document = job_document("job", (SILO, *OTHERS), rounds=3, min_cohort=3, security=security)
    job = running.job({**document, "model": traps.MODEL, "training": TRAINING})
    coordinator = running.start_coordinator()
    (tmp_path / "read").mkdir()
    for silo in (SILO, *OTHERS):
        running.write_silo(silo)
        policy = running.federation.folder / silo / "policy.toml"
        if not bounded or silo == SILO:
            policy.write_text(BOUNDS.sub("", policy.read_text()))
    running.launch(SILO, (TRAPPING, str(tmp_path / "read")), running.federation.silo_config(SILO))
    for silo in OTHERS:
        running.start_silo(silo)
    ended = coordinator.wait_for("job.ended", 120)
    assert (ended["job"], ended["outcome"]) == (job.name, "failed" if bounded else "completed")
    running.stop()
    shards = [split(running.data[s], split_key(running.federation.state(s)), 0.25)[0].x for s in OTHERS]
    before, after = ((tmp_path / "read" / name) for name in ("before", "after"))
    count = 0
    if after.exists():
        count = traps.read(*(safetensors.torch.load_file(path) for path in (before, after)), torch.cat(shards))
    if not bounded:
        assert count > 8, f"{count} of {sum(map(len, shards))} records were read: the attack does not work as it should"
        return
    assert count == 0, f"{count} of {sum(map(len, shards))} records were read"
    for silo in OTHERS:
        denied = [record for record in records_of(running, silo) if record["type"] == "policy.deny"]
        assert [(record["round"], record["purpose"]) for record in denied] == [(2, "delivery")]
