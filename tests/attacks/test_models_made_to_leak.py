"""A coordinator alone, and a silo alone, read the others' records by a model that is made to leak:
real agents, TLS.

The measure is how many records come out above 25 dB. Each attack is made on silos whose policy
bounds nothing of what comes down too: there it has to succeed.
"""

import re
from functools import cache
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from federation.conftest import Running, job_document
from support import leaky_models
from support.hostile_coordinator import SILO, delivery, ends, offer, play, records, round_of
from support.hostile_keyed_coordinator import Keyed, Tagged
from support.hostile_sum_coordinator import OTHERS, SILOS, Attempted, Blind, make_world

from staddle.algorithms.data.dataset import digits, split
from staddle.algorithms.engines.engine import Records, Serial
from staddle.algorithms.engines.simulation import Simulation
from staddle.algorithms.exchange.parts import delivered_items
from staddle.algorithms.job.job import Job, JobFile
from staddle.algorithms.method import initial_state
from staddle.algorithms.training.silo_round import local_round
from staddle.commands.federation.local_federation import policy_text
from staddle.files.documents import validate
from staddle.security.arithmetic.fixedpoint import SIGNED, WORD, dequantise, weight_exponent
from staddle.security.blind.plan import JobPlan, simulated
from staddle.security.faults import COORDINATOR_OR_SILO
from staddle.security.identity import roster as rosters
from staddle.security.secagg.masked_sum import GroupValues

pytestmark = [pytest.mark.actor("coordinator"), pytest.mark.usefixtures("hurried")]

SECURITY = {"blind": {"secure_aggregation": "required", "weight_most": 2000, "tags": False}}
TRAINING = {"epochs": 1, "batch_size": 64, "lr": 0.05}
OTHERS_EACH = 12
LAYER = leaky_models.LAYERS["dense"]
BOUNDS = re.compile(r"^max_(step|parallel) = .*\n", re.MULTILINE)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(
        tmp_path_factory.mktemp("leaking"), SECURITY, model=leaky_models.MODEL, training=TRAINING
    )


class Trapped(Attempted):
    """Round 1 of the job: its model is the trap, from which the other silos train honestly."""

    def __init__(self, world):
        takes = zip(OTHERS, (200, 300, 400), strict=True)
        self.data = {s: digits().take(np.arange(n, n + OTHERS_EACH)) for s, n in takes}
        self.trap = LAYER.bins({})
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
        plan = JobPlan(self.job).round(round_)
        model = plan.model_digest(items, list(end.tensor_sha256))
        members = rosters.members_digest(self.world.roster, self.job.silos)
        return plan.frame(self.world.roster.federation, members, model)

    def contribution(self, group, silo):
        if group.name != "model":
            return super().contribution(group, silo)
        method, own = self.job.method(), self.data[silo]
        began = initial_state(method, silo)
        trained = local_round(
            method, self.job, began, 1, {"model": self.trap}, own, own, silo
        ).state
        names = [name.split(".", 1) for name in self.trap]
        flat = [trained.parts[part][name].ravel() for part, name in names]
        return GroupValues(torch.cat(flat).double().numpy(), np.full(group.rows, float(len(own))))


def opened_model(attempted):
    """The mean of the models that were trained, by name; None where no sum was opened."""
    if attempted.opened is None:
        return None
    values = torch.from_numpy(attempted.opened[0].mean(np.float64))
    pieces = values.split([tensor.numel() for tensor in attempted.trap.values()])
    named = zip(attempted.trap.items(), pieces, strict=True)
    return {name: piece.reshape(tensor.shape) for (name, tensor), piece in named}


@pytest.mark.parametrize(
    ("taken_out", "why"),
    [
        # drafted policies have both
        pytest.param("max_(step|parallel)", "", marks=pytest.mark.control),
        ("max_step", "that are multiples of others"),
        ("max_parallel", "times the longest step of this silo's own training"),
    ],
    ids=["unbounded", "rows", "steps"],
)
def test_a_coordinator_alone_hands_down_a_trap(world, tmp_path, taken_out, why):
    """One round of 95 records: 40 are read where nothing is bounded, and none where the one bound
    or the other is.
    """
    (tmp_path / "split.key").write_bytes(bytes(32))
    trapped = Trapped(world)
    rounds = [round_of(world, number, "blind", counted=number) for number in range(2)]
    tasks = [offer(world, "blind"), *rounds]
    hostile = Blind(world, tasks, {0: [Attempted(world, "blind")], 1: [trapped]})
    hostile.script["fetch"] = [lambda: delivery(world, "blind", 0), trapped.frames]
    drafted = policy_text(list(world.jobs.values()))
    policy = re.sub(f"^{taken_out} = [0-9.]+\n", "", drafted, flags=re.MULTILINE)
    play(hostile, tmp_path, policy=policy)
    own = split(digits().take(np.arange(80)), bytes(32), 0.25)[0].x
    every = torch.cat([own, *(data.x for data in trapped.data.values())])
    trained = opened_model(trapped)
    count = 0 if trained is None else len(LAYER.read(trapped.trap, trained, every, bins=True))
    denied = records(tmp_path, "policy.deny")
    if not why:
        told = "the attack does not work as it should"
        assert count > 20, f"{count} of {len(every)} records were read: {told}"
        assert denied == []
        return
    assert count == 0, f"{count} of {len(every)} records were read"
    assert [(record["round"], record["purpose"]) for record in denied] == [(1, "delivery")]
    assert why in denied[0]["reasons"][0]


class Handed(Tagged):
    """What comes down of the sum is the trap in words, with its own weights, and with the tag of
    the sum.
    """

    def down(self):
        group, trap = self.spec.groups[0], LAYER.bins({})
        words = np.frombuffer(self.words, WORD[group.ring]).copy()
        weight = dequantise(
            words[group.elements :], group.ring, weight_exponent(group.ring, len(SILOS))
        )
        names = next(part for part in self.job.up(0) if part.name == "model").tensors
        flat = torch.cat([trap[spec.name].ravel() for spec in names]).double().numpy()
        scaled = np.rint(flat * weight * 2.0**group.scale_exponent)
        words[: group.elements] = scaled.astype(SIGNED[group.ring]).view(words.dtype)
        self.words = words.tobytes()
        return super().down()


def test_a_coordinator_alone_hands_down_a_trap_where_sums_are_tagged(tmp_path):
    """The default. Without tags 40 of 95 records are read (above).

    Here nothing is bounded either, and none is.
    """
    security = {"secure_aggregation": "required", "weight_most": 2000}
    world = make_world(
        tmp_path / "leaking", {"first": security}, model=leaky_models.MODEL, training=TRAINING
    )
    (tmp_path / "silo").mkdir()
    drafted = policy_text(list(world.jobs.values()))
    hostile = play(Keyed(world, kind=Handed), tmp_path / "silo", policy=BOUNDS.sub("", drafted))
    assert hostile.calls["fetch"] == 2
    given = [record["round"] for record in records(tmp_path / "silo", "egress.intent")]
    assert given == [0], f"what was trained on the trap left in round {given[-1]}"
    assert records(tmp_path / "silo", "ingress") == []
    assert ends(tmp_path / "silo", "round") == [(0, "SUM", COORDINATOR_OR_SILO)]


# One silo alone; the coordinator and the other silos are honest.

TRAPPING = str(Path(__file__).with_name("trapping.py"))
ROUNDS = 16
ALL = (SILO, *OTHERS)
RECORDS = {silo: digits().take(np.arange(100 * n, 100 * n + 16)) for n, silo in enumerate(ALL)}
NOBODY = {silo: [] for silo in OTHERS}
AT_ONCE = {silo: [(2, "delivery")] for silo in OTHERS}
SEED = 1  # records that are read of a dozen a silo depend on what is drawn


def document(layer, **changes):
    """A job with tags in which one silo sets a trap."""
    security = {"secure_aggregation": "required", "weight_most": 2000}
    fields = {"min_cohort": 3, "security": security, "seed": SEED, **changes}
    made = job_document(fields.pop("name", layer), ALL, **fields)
    return {**made, "model": leaky_models.LAYERS[layer].model, "training": TRAINING}


# the job that is led to rare units, and what an honest silo would be in its place
LED = document("dense", name="job", rounds=ROUNDS) | {"training": {**TRAINING, "lr": 0.5}}


@pytest.fixture(scope="module")
def trapped(fork_server, tmp_path_factory):
    """Federations in which one silo sets a trap in each job (trapping.py), by whether they are
    bounded: the outcome, the denials and the records that were read, round by round, by job.

    ``bounded``: the other silos' policies are as they are drafted, else without bounds on what
    comes down.
    """
    made = []

    @cache
    def played(bounded):
        folder = tmp_path_factory.mktemp("trapped")
        made.append(running := Running(folder / "federation", ALL, fork_server.launch))
        running.data = RECORDS
        bins = [document(layer, rounds=3) for layer in leaky_models.LAYERS]
        for each in [*bins, LED] if bounded else bins:
            assert running.job(each).keyed
            (folder / each["name"]).mkdir()
        coordinator = running.start_coordinator()
        for silo in ALL:
            running.write_silo(silo)
            policy = running.federation.folder / silo / "policy.toml"
            assert len(BOUNDS.findall(policy.read_text())) == 2
            if not bounded or silo == SILO:
                policy.write_text(BOUNDS.sub("", policy.read_text()))
        running.launch(SILO, (TRAPPING, str(folder)), running.federation.silo_config(SILO))
        for silo in OTHERS:
            running.start_silo(silo)
        ends = [coordinator.wait_for("job.ended", 240) for _ in running.jobs]
        running.stop()
        outcomes = {ended["job"]: ended["outcome"] for ended in ends}
        return {job.name: (outcomes[job.name], *seen(running, job, folder)) for job in running.jobs}

    yield played
    for running in made:
        running.stop()


def seen(running, job, folder):
    """What the other silos denied in a job, and how many records were read round by round."""
    denied = {silo: [] for silo in OTHERS}
    for silo, found in denied.items():
        of_job = [r for r in running.records(silo, "policy.deny") if r["job"] == job.name]
        found += [(record["round"], record["purpose"]) for record in of_job]
    shards = {silo: train for silo, (train, _) in running.shards().items()}
    share = len(shards[SILO]) / sum(map(len, shards.values()))
    return denied, counts(job, steps_of(folder / job.name, job.length, share), shards)


def counts(job, steps, shards):
    """How many of the others' records stand in each step from a model to the others' mean."""
    layer = leaky_models.LAYERS["dense" if job.name == "job" else job.name]
    every = torch.cat([shards[silo].x for silo in OTHERS])
    assert len(every) == 37
    return [len(layer.read(*step, every, bins=job.name != "job")) for step in steps]


def steps_of(folder, rounds, share):
    """By round what the model was, and the mean of what the others made of it.

    Its own share of the weights the liar knows: their sum comes down beside the mean.
    """
    load = safetensors.torch.load_file
    for round_ in range(1, rounds):
        if not (after := folder / f"down-{round_ + 1}").exists():
            break
        paths = folder / f"down-{round_}", folder / f"given-{round_}", after
        before, given, mean = map(load, paths)
        others = {
            name: (value.double() - share * given[name].double()) / (1 - share)
            for name, value in mean.items()
        }
        yield before, others


@pytest.mark.timeout(300)
@pytest.mark.actor("silo")
@pytest.mark.parametrize("layer", leaky_models.LAYERS)
@pytest.mark.parametrize("bounded", [pytest.param(False, marks=pytest.mark.control), True])
def test_a_silo_alone_makes_the_mean_a_trap(trapped, layer, bounded):
    """Three rounds with tags, 37 records of three silos.

    Where nothing is bounded 15 are read, behind convolutions 13; else the others train on no trap.
    Of the honest model before it the same reading gives none.
    """
    outcome, denied, read = trapped(bounded)[layer]
    if not bounded:
        assert (outcome, denied) == ("completed", NOBODY)
        least = {"dense": 8, "convolved": 2}[layer]
        assert read[-1] > least, f"{read[-1]} were read: the attack does not work as it should"
        return
    assert (outcome, denied) == ("failed", AT_ONCE)
    # of the round before the trap
    assert len(read) == 1, f"{read[-1]} records were read"


@pytest.mark.timeout(300)
@pytest.mark.actor("silo")
@pytest.mark.succeeds
def test_a_silo_alone_leads_the_mean_to_rare_units(trapped):
    """What neither bound sees, nor tags: no round goes far, and no row is another one's multiple.

    9 of 37 records are read in the last of 16 rounds, of an honest model 6 at most (below). Other
    processors round otherwise, so the bound is between the two.
    """
    outcome, denied, read = trapped(True)["job"]
    assert (outcome, denied) == ("completed", NOBODY)
    assert 7 <= read[-1] <= 37, f"{read[-1]} records were read in the last round"


@pytest.mark.actor("silo")
@pytest.mark.control
def test_an_honest_mean_in_its_place_shows_few_records():
    """Silos of a dozen records are so small that an honest model shows some, too: 3.

    The simulation gives the federation's bits.
    """
    keys = {silo: sha256(silo.encode()).digest() for silo in ALL}  # as support.split_keys has them
    shards = {silo: split(RECORDS[silo], keys[silo], 0.25) for silo in ALL}
    train = {silo: own for silo, (own, _) in shards.items()}
    job = Job.from_file(validate(LED, JobFile, "job"), "job").for_federation()
    records_of = {silo: Records(*sides) for silo, sides in shards.items()}
    simulation = Simulation(job, Serial(job, records_of), exchanges=simulated(job))
    while simulation.round < ROUNDS - 1:
        simulation.step()
    before = mean_of(simulation, train, ALL)
    simulation.step()
    (read,) = counts(job, [(before, mean_of(simulation, train, OTHERS))], train)
    assert read <= 6, f"{read} records were read in the last round"


def mean_of(simulation, train, silos):
    """The mean of what these silos trained in the last round."""
    every = sum(len(train[silo]) for silo in silos)
    found = dict.fromkeys(("extractor.fc.weight", "extractor.fc.bias"), 0.0)
    for name in found:
        part, _, tensor = name.partition(".")
        for silo in silos:
            given = simulation.states[silo].parts[part][tensor].double()
            found[name] = found[name] + given * (len(train[silo]) / every)
    return found
