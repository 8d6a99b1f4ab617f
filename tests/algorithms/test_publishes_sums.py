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
from staddle.algorithms.job.security import summed_down
from staddle.algorithms.tasks.table_counting import RIGHT
from staddle.security.blind.sum import Bounds, Quantised

OPTIONS = {
    "cfl": {"sketch": 64},
    "fedamp": {"sketch": 64},
    "fedala": {"start_epochs": 1},
    "fedavg-ft": {"tuning_epochs": 1},
    "fedbabu": {"tuning_epochs": 1},
    "fedrep": {"head_epochs": 1},
    "pfedsim": {"rho": 0.5},
    "fedsimsup": {"tau_s": 1, "tau_theta": 1},
    "fedssa": {"t_stable": 3},
    "ppfl": {"models": 2, "lam": 0.5},
    "fedaims": {"sampling": "algorithm2"},
    "per-fedavg": {"variant": "fo"},
    "pfedme": {"steps": 1, "beta": 0.5},
    "fedpac": {"variances": "pooled"},
}
# what they publish of sums has a name of its own
NAMED = ("fedadam", "fedas", "fedavgm", "feddyn", "fednova", "fedssa", "fedyogi")
MODEL = {"name": "ppfl-mlp", "input": [1, 8, 8]}
MODELS = {"fedaims": {"name": "convnet-digits"}, "fedbn": {"norm": "group"}}
SILOS = ["a", "b", "c", "d"]
LARGE = {"batch_size": 30}  # few steps: nothing here depends on how much is learnt
# by default they sum metrics alone
SUMLESS = ("cfl", "fedamp", "fedfomo", "fedgh", "fedsimsup", "local", "pfedhn")


class Watched:
    """Exchanges that keep the fold of each Sum; the results of those that are ``hidden`` are empty,
    as they are for others.
    """

    def __init__(self, own, hidden=()):
        self.own, self.hidden, self.folds = own, hidden, {}
        self.contribute, self.mix = own.contribute, own.mix

    def collect(self, part, members, read):
        found = self.own.collect(part, members, read)
        if isinstance(part.exchange, Sum) and part != RIGHT:
            self.folds[part.name] = found
        return {} if part.name in self.hidden else found


class Publishing(MemoryArchive):
    """An archive that keeps what a method publishes in a round, by part."""

    def __init__(self, *begun):
        super().__init__(*begun)
        self.made = {}

    def publish(self, part, tensors):
        self.made[part] = {name: value.clone() for name, value in tensors.items()}
        super().publish(part, tensors)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_publishes_its_sums_as_they_are(name, make_job, monkeypatch):
    """In the clear, blind, and not at all where silos alone read them; all else is then the same.

    Each round is closed in these three ways, of the same contributions.
    """
    model = {"classes": 10, **MODELS.get(name, MODEL)}
    share = 0.75 if name == "fedsimsup" else 1.0
    job = make_job(
        name, OPTIONS.get(name), model, LARGE, silos=SILOS, rounds=4, participation=share
    )
    clip = 20 if name == "fedas" else 6  # which weights by sums over records
    quantised, blind = Quantised(Bounds(clip_exponent=clip, most=100)), Publishing()
    down = {part.name for round_ in range(job.length + 1) for part in job.down(round_)}
    hidden = summed_down(job.document()["schema"])
    close, ways = simulation.close_round, {"clear": [], "blind": []}

    def closed(rest, exchanges, archive):
        """One way to close a round: what was folded of its sums, published, and returned."""
        archive.made = {}
        method, *others = rest
        made = close(method, exchanges, *others, archive)
        return exchanges.folds, archive.made, made

    def closing(method, exchanges, *others):
        *rest, archive = (method, *others)
        _, published, unread = closed(rest, Watched(exchanges, hidden), Publishing())
        assert not published.keys() & hidden
        ways["blind"].append(closed(rest, Watched(quantised), blind))
        ways["clear"].append(closed(rest, Watched(exchanges), archive))
        made = ways["clear"][-1][-1]
        for one, other in zip(unread, made, strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[key], other[key]) for key in one)
        return made

    monkeypatch.setattr(simulation, "MemoryArchive", Publishing)
    monkeypatch.setattr(simulation, "close_round", closing)
    data = digits()
    shards = {
        silo: (data.take(np.arange(n, n + 30)), data.take(np.arange(n + 30, n + 40)))
        for n, silo in zip(range(0, 160, 40), SILOS, strict=True)
    }
    simulation.simulate(job, shards)
    for rounds in ways.values():
        assert len(rounds) == job.length
        checked = set()
        for folds, published, _ in rounds:
            for part in folds.keys() & down:
                wanted = {name: value for name, value in folds[part].items() if name != WEIGHT}
                assert published[part].keys() == wanted.keys()
                assert all(torch.equal(published[part][each], wanted[each]) for each in wanted)
                checked.add(part)
        assert checked == hidden
        assert any(folds for folds, *_ in rounds) == (name not in SUMLESS)
    assert bool(hidden) == (name not in (*SUMLESS, *NAMED))
