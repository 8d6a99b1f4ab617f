"""What is summed and comes down under the same name is published as it was opened: so silos can
check it.
"""

import numpy as np
import pytest
import torch

from staddle.algorithms.catalog import METHODS
from staddle.algorithms.data.dataset import digits
from staddle.algorithms.engines import simulation
from staddle.algorithms.engines.aggregation import MemoryArchive
from staddle.algorithms.exchange.parts import WEIGHT, Sum
from staddle.algorithms.exchange.plain import PLAIN
from staddle.algorithms.job.security import summed_down
from staddle.algorithms.method import METRICS
from staddle.security.blind.sum import Bounds, Quantised

OPTIONS = {
    "cfl": {"sketch": 64},
    "fedala": {"start_epochs": 1},
    "fedavg-ft": {"tuning_epochs": 1},
    "fedbabu": {"tuning_epochs": 1},
    "fedrep": {"head_epochs": 1},
    "pfedsim": {"rho": 0.5},
    "fedsimsup": {"tau_theta": 1},
    "fedssa": {"t_stable": 3},
    "ppfl": {"models": 2, "lam": 0.5},
    "fedaims": {"sampling": "algorithm2"},
    "per-fedavg": {"variant": "fo"},
    "pfedme": {"steps": 1, "beta": 0.5},
    "fedpac": {"variances": "pooled"},
}
NAMED = ("fedas", "feddyn", "fedssa")  # what they publish of sums has a name of its own
MODELS = {"fedaims": {"name": "convnet-digits"}, "fedbn": {"norm": "group"}}
SILOS = ["a", "b", "c", "d"]
LARGE = {"batch_size": 30}  # few steps: nothing here depends on how much is learnt
SUMLESS = ("cfl", "fedfomo", "fedsimsup", "local")  # by default they sum metrics alone


class Watched:
    """Exchanges that keep the last fold of each Sum."""

    def __init__(self, own):
        self.own, self.folds = own, {}
        self.give, self.mix = own.give, own.mix

    def collect(self, part, members, read):
        found = self.own.collect(part, members, read)
        if isinstance(part.exchange, Sum) and part != METRICS:
            self.folds[part.name] = found
        return found


def published(monkeypatch, job, exchanges):
    """By round: the folds of its sums, and what was published, by part."""
    rounds = []

    class Archive(MemoryArchive):
        def publish(self, part, tensors):
            rounds[-1][1][part] = {name: value.clone() for name, value in tensors.items()}
            super().publish(part, tensors)

    close = simulation.close_round

    def closing(*args):
        watched.folds = {}
        rounds.append(({}, {}))
        made = close(*args)
        rounds[-1][0].update(watched.folds)
        return made

    watched = Watched(exchanges)
    monkeypatch.setattr(simulation, "MemoryArchive", Archive)
    monkeypatch.setattr(simulation, "close_round", closing)
    data = digits()
    shards = {
        silo: (data.take(np.arange(n, n + 60)), data.take(np.arange(n + 60, n + 70)))
        for n, silo in zip(range(0, 400, 70), SILOS, strict=False)
    }
    simulation.simulate(job, shards, exchanges=watched)
    return rounds


@pytest.mark.parametrize("blind", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_publishes_its_sums_as_they_are(name, blind, make_job, monkeypatch):
    model = {"classes": 10, **MODELS.get(name, {})}
    share = 0.75 if name == "fedsimsup" else 1.0
    job = make_job(
        name, OPTIONS.get(name), model, LARGE, silos=SILOS, rounds=4, participation=share
    )
    clip = 20 if name == "fedas" else 6  # which weights by sums over records
    rounds = published(
        monkeypatch, job, Quantised(Bounds(clip_exponent=clip, most=100)) if blind else PLAIN
    )
    assert len(rounds) == job.length
    down = {part.name for round_ in range(job.length + 1) for part in job.down(round_)}
    checked = set()
    for folds, made in rounds:
        for part in folds.keys() & down:
            wanted = {tensor: value for tensor, value in folds[part].items() if tensor != WEIGHT}
            assert made[part].keys() == wanted.keys()
            assert all(torch.equal(made[part][tensor], value) for tensor, value in wanted.items())
            checked.add(part)
    assert checked == summed_down(job.document()["schema"])
    assert any(folds for folds, _ in rounds) == (name not in SUMLESS)
    assert bool(checked) == (name not in (*SUMLESS, *NAMED))


class Unread:
    """Exchanges whose sums are for others: their results are empty."""

    def __init__(self, own, hidden):
        self.own, self.hidden = own, hidden
        self.give, self.mix = own.give, own.mix

    def collect(self, part, members, read):
        return {} if part.name in self.hidden else self.own.collect(part, members, read)


@pytest.mark.parametrize("name", METHODS)
def test_where_silos_alone_read_its_sums_such_a_method_does_the_same_but_publish_them(
    name, make_job, monkeypatch
):
    """In each round, beside a coordinator that reads them."""
    model = {"classes": 10, **MODELS.get(name, {})}
    share = 0.75 if name == "fedsimsup" else 1.0
    job = make_job(
        name, OPTIONS.get(name), model, LARGE, silos=SILOS, rounds=4, participation=share
    )
    hidden = summed_down(job.document()["schema"])
    close, seen = simulation.close_round, []

    def closing(method, exchanges, state, round_, members, parts, read, archive):
        published = set()

        class Blank(MemoryArchive):
            def publish(self, part, tensors):
                published.add(part)

        unread = close(
            method, Unread(exchanges, hidden), state, round_, members, parts, read, Blank()
        )
        made = close(method, exchanges, state, round_, members, parts, read, archive)
        for one, other in zip(unread, made, strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[key], other[key]) for key in one)
        assert not published & hidden
        seen.append(hidden & {part.name for part in parts})
        return made

    monkeypatch.setattr(simulation, "close_round", closing)
    data = digits()
    shards = {
        silo: (data.take(np.arange(n, n + 60)), data.take(np.arange(n + 60, n + 70)))
        for n, silo in zip(range(0, 400, 70), SILOS, strict=False)
    }
    simulation.simulate(job, shards)
    assert any(seen) == bool(hidden)
    assert any(seen) == (name not in (*SUMLESS, *NAMED))
