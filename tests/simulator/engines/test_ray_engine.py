"""The engine for Ray: how it deals silos out, with a stand-in; and real actors on two machines."""

import os
import random
import signal
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from support.engine_runs import RECORDS, job_of, run
from support.refusals import refused

from staddle.algorithms.course import SiloState
from staddle.algorithms.engines.engine import Serial, SiloWork
from staddle.algorithms.engines.simulation import Simulation
from staddle.errors import CancelledError, LocalError
from staddle.simulator.engines import ray_engine
from staddle.simulator.engines.ray_engine import RayCrew

MANY = {f"silo-{number}": RECORDS["abcd"[number % 4]] for number in range(12)}
WORK = [SiloWork(silo, SiloState({}), {}) for silo in MANY]


class GoneError(Exception):
    pass


@dataclass
class Job:
    name: str
    privacy: None = None
    training: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(epochs=1))


class Echo:
    """Trains nothing, and says what it was given."""

    def __init__(self, job, held):
        self.job, self.held = job, held

    def train(self, round_, work, done):
        if self.job.name == "broken":
            raise LocalError(f"silo {work[0].silo!r} is broken")
        return {one.silo: (self.job.name, round_, len(self.held[one.silo].train)) for one in work}

    def close(self):
        pass


class Ref:
    """The reference of an answer."""

    def __init__(self, made, call):
        self.made, self.call = made, call


class StandIn:
    """What the engine uses of Ray: actors that answer in any order, and die, by a fixed seed."""

    exceptions = SimpleNamespace(RayActorError=GoneError, ObjectLostError=GoneError)

    def __init__(self, seed, cores, deaths=0):
        self.draws, self.cores, self.deaths = random.Random(seed), cores, deaths
        self.alive, self.busy, self.given, self.up = [], set(), [], True

    def is_initialized(self):
        return self.up

    def shutdown(self):
        self.up = False

    def put(self, value):
        return value

    def cluster_resources(self):
        return {"CPU": self.cores, "GPU": self.cores}

    def remote(self, **needs):
        return lambda worker: SimpleNamespace(remote=partial(self.actor, worker))

    def actor(self, worker, *arguments):
        made = worker(*arguments)
        self.alive.append(made)
        assert len(self.alive) <= self.cores
        calls = ("software", "begin", "carry_out")
        remote = {name: SimpleNamespace(remote=partial(self.asked, made, name)) for name in calls}
        return SimpleNamespace(made=made, **remote)

    def asked(self, made, name, *arguments):
        assert made in self.alive
        assert made not in self.busy
        if name == "begin":
            return made.begin(*arguments)
        self.busy.add(made)
        return Ref(made, partial(getattr(made, name), *arguments))

    def wait(self, refs, timeout):
        some = self.draws.sample(refs, self.draws.randint(1, len(refs)))
        return some, [ref for ref in refs if ref not in some]

    def get(self, ref):
        self.busy.discard(ref.made)
        if self.deaths and self.draws.random() < 0.3:
            self.deaths -= 1
            raise GoneError("the machine is gone")
        return ref.call()

    def kill(self, actor):
        self.alive.remove(actor.made)


@pytest.fixture
def crew(monkeypatch):
    def made(ray, **options):
        monkeypatch.setattr(ray_engine, "_connected", lambda _: ray)
        return RayCrew(MANY, Echo, **options)

    return made


@pytest.mark.parametrize("resource", ["CPU", "GPU"])
def test_each_silo_trains_once_in_whatever_order_and_whoever_dies(crew, resource):
    for seed in range(40):
        ray = StandIn(seed, cores=1 + seed % 5, deaths=seed % 3)
        one = crew(ray, resource=resource)
        for round_, job in enumerate((Job("one"), Job("other"))):
            told = []
            found = one.run(job, "train", round_, WORK, partial(told.append, 1))
            expected = {silo: (job.name, round_, len(own.train)) for silo, own in MANY.items()}
            assert (list(found), found, len(told)) == (list(MANY), expected, len(MANY))


def test_on_gpus_each_actor_has_a_share_of_about_as_many_records(crew):
    one = crew(StandIn(0, cores=5), resource="GPU", count=3)
    shares = [
        sum(len(MANY[each.silo].train) for each in batch)
        for batch in one._batches(Job("one"), "train", WORK)
    ]
    assert len(shares) == 3
    assert max(shares) - min(shares) <= max(len(own.train) for own in MANY.values())


def test_the_error_of_a_silo_ends_the_round_and_what_ends_each_actor_is_named(crew):
    one = crew(StandIn(0, cores=2))
    with refused("silo 'silo-[37]|11' is broken"):
        one.run(Job("broken"), "train", 0, WORK, pytest.fail)
    assert len(one.run(Job("whole"), "train", 0, WORK, lambda: None)) == len(MANY)

    ray = one._ray
    ray.deaths, ray.draws.random = 100, lambda: 0.0
    with refused(r"3 Ray actors died that had (silo 'silo-\d+'|no silo yet)"):
        one.run(Job("whole"), "train", 1, WORK, lambda: None)
    with refused("the Ray actors have ended"):
        one.run(Job("whole"), "train", 1, WORK, lambda: None)


def test_what_cannot_begin_is_said(crew, monkeypatch):
    with refused("the Ray cluster has no CPU that is free: 0 were wanted"):
        crew(StandIn(0, cores=0)).run(Job("one"), "train", 0, WORK, lambda: None)
    waits = crew(StandIn(0, cores=1))
    waits._ray.wait = lambda refs, **_: ([], refs)
    with refused("the Ray cluster has no CPU that is free: 1 were wanted"):
        waits.run(Job("one"), "train", 0, WORK, lambda: None)
    with refused(r"has a \[privacy\] table"):
        crew(StandIn(0, cores=1)).engine(Job("one", privacy=True))
    other = crew(StandIn(0, cores=1))
    monkeypatch.setattr(
        ray_engine.RayWorker, "software", lambda _: {**ray_engine._software(), "torch": "1.0"}
    )
    with refused("a machine of the Ray cluster has torch 1.0, and this one"):
        other.run(Job("one"), "train", 0, WORK, lambda: None)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "head", "ray://127.0.0.1:1", "head:port"])
def test_a_cluster_that_cannot_be_reached_is_said_at_once(address):
    with refused(f"no Ray cluster at {address}: .*; docs/simulate.md says how one is begun"):
        RayCrew(RECORDS, Serial, address=address)


@pytest.mark.parametrize(
    ("said", "kind", "text"),
    [
        ("The current node timed out during startup. This could happen because", LocalError,
            "no Ray cluster on this machine: .* within Ray's 30 s, .*; run the same command when"),
        ("a mistake of Ray's", Exception, "a mistake of Ray's"),
    ],
)  # fmt: skip
def test_a_node_that_does_not_start_in_time_is_said(monkeypatch, said, kind, text):
    import ray  # noqa: PLC0415 as the engine does

    def late(*_, **__):
        raise Exception(said)  # noqa: TRY002 as Ray does

    monkeypatch.setattr(ray, "init", late)
    with pytest.raises(kind, match=text) as told:
        RayCrew(RECORDS, Serial)
    assert type(told.value) is kind


@pytest.fixture
def cluster(monkeypatch):
    """Two machines of one core."""
    variables = {"AUTH_MODE": "token", "AUTH_TOKEN": "0" * 32, "USAGE_STATS_ENABLED": "0"}
    for name, value in {**variables, "worker_niceness": "0"}.items():
        monkeypatch.setenv(f"RAY_{name}", value)
    # Only now: Ray reads its variables when it is imported.
    from ray.cluster_utils import Cluster  # noqa: PLC0415

    cluster = Cluster()
    for _ in range(2):
        patiently(partial(cluster.add_node, num_cpus=1))
    yield cluster
    cluster.shutdown()


def patiently(begin):
    """Ray gives up on a node after 30 s, whatever else the machine does."""
    for _ in range(9):
        try:
            return begin()
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
    return begin()


def test_a_cluster_gives_the_bits_of_one_process_also_where_machines_die(cluster, tmp_path):
    torch.set_num_threads(1)
    before = signal.getsignal(signal.SIGTERM)
    died = tmp_path / "died"

    def make(job, held):
        """An engine whose process is killed at its first silo; once, in a job of its own."""
        engine = Serial(job, held)
        train = engine.train

        def killed(*arguments):
            if job.training.lr == 0.25 and not died.exists():
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return train(*arguments)

        engine.train = killed
        return engine

    crew = RayCrew(RECORDS, make, address=cluster.address)
    assert signal.getsignal(signal.SIGTERM) is before
    assert crew.wanted == 2
    for job in (job_of("fedavg"), job_of("pfedsim", lr=0.25)):
        assert run(job, crew.engine(job)) == run(job, Serial(job, RECORDS))
    assert died.exists()

    # A machine dies in mid-round, with whatever it has.
    job, ends = job_of("fedavg"), []
    for engine in (crew.engine(job), Serial(job, RECORDS)):
        simulation = Simulation(job, engine)

        # It dies once.
        def done(engine=engine):
            if not isinstance(engine, Serial) and cluster.worker_nodes:
                cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)

        while simulation.round < job.length:
            simulation.step(done)
        ends.append({silo: state.flat for silo, state in simulation.states.items()})
    assert not cluster.worker_nodes
    for silo, state in ends[0].items():
        assert all(torch.equal(state[name], value) for name, value in ends[1][silo].items())

    # An interrupt ends the actors at once.
    def interrupted():
        raise CancelledError("stopped")

    with pytest.raises(CancelledError):
        Simulation(job, crew.engine(job)).step(interrupted)
    with refused("the Ray actors have ended"):
        Simulation(job, crew.engine(job)).step()
