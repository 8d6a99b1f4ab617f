"""A class that one silo alone holds: its row in a sum class by class (security rule 7), done and
refused.

Five silos, three classes: all hold class 0, three hold class 1, the victim alone holds class 2.
Four holders are needed: ``min_cohort`` = 3, and one that may be in league with the coordinator.
"""

import numpy as np
import pytest
import torch
from support.keyed_jobs import KEY, SILOS
from support.open_sums import ME, Recipient, Summed, delivery, make_tagged

from staddle.algorithms.course import Facts
from staddle.algorithms.data.dataset import Dataset
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.exchange.parts import WEIGHT, Contribution
from staddle.algorithms.job.class_census import HOLDERS, SAID
from staddle.algorithms.method import initial_state
from staddle.algorithms.methods.fedssa.method import FedSSA, rows_of
from staddle.algorithms.training.silo_round import local_round
from staddle.errors import LocalError, PeerError, RefusedError
from staddle.security.blind.plan import JobPlan, simulated
from staddle.security.blind.sum import Quantised
from staddle.security.faults import COORDINATOR_OR_SILO
from staddle.security.secagg.linear_tags import PRIME, Tagger

pytestmark = pytest.mark.actor("coordinator")

VICTIM = SILOS[4]
CLASSES = dict(zip(SILOS, ((0, 1), (0, 1), (0,), (0, 1), (0, 2)), strict=True))


@pytest.fixture(scope="module")
def tagged(tmp_path_factory):
    return make_tagged(tmp_path_factory.mktemp("rare"))


@pytest.fixture(scope="module")
def job(tagged):
    return tagged.jobs["rare"]


@pytest.fixture
def recipient(tagged, tmp_path):
    found = Recipient(tagged, tmp_path)
    yield found
    found.world.ledger.close()


@pytest.fixture(scope="module")
def shards():
    made = {}
    for number, (silo, classes) in enumerate(CLASSES.items()):
        y = torch.tensor([label for label in classes for _ in range(8)])
        x = torch.randn(len(y), 1, 8, 8, generator=torch.Generator().manual_seed(number))
        made[silo] = (Dataset(x, y), Dataset(x[:4], y[:4]))
    return made


class Opened(Quantised):
    """A coordinator that keeps each opened sum of a part, and what the victim gave of it."""

    def __init__(self, job, part="rows"):
        super().__init__(JobPlan(job).bounds)
        self.part, self.sums, self.own = part, [], []

    def collect(self, part, members, read):
        found = super().collect(part, members, read)
        if part.name == self.part:
            self.sums.append(found)
            self.own.append(read(VICTIM, part.tensors[0].name))
        return found


def facts(silo, round_):
    counts = torch.tensor([8 * (label in CLASSES[silo]) for label in range(3)])
    return Facts(silo, round_, int(counts.sum()), counts)


# What the coordinator reads.


@pytest.mark.control
def test_a_row_that_is_withheld_after_the_sum_was_opened_was_read(tagged, shards):
    """FedSSA's own ``min_holders`` is of what is published: the coordinator has opened the row of
    the victim alone.
    """
    naive = tagged.job("naive", "fedssa", SILOS, {"min_holders": 4}, min_cohort=3)
    coordinator = Opened(naive)
    made = simulate(naive, shards, exchanges=coordinator)
    for found, own in zip(coordinator.sums, coordinator.own, strict=True):
        assert found[WEIGHT].tolist() == [5, 3, 1]
        assert own[2].any()
        assert torch.allclose(found["rows"][2], own[2], atol=1e-5)
    # nobody else has it, which does not help
    assert made.coordinator["status"].tolist() == [2, 1, 1]


def test_a_row_that_few_hold_is_never_summed(job, shards):
    coordinator = Opened(job)
    made = simulate(job, shards, exchanges=coordinator)
    assert len(coordinator.sums) == job.rounds
    for found, own in zip(coordinator.sums, coordinator.own, strict=True):
        assert own[0].any()
        assert not own[1:].any()  # at the victim, before it is quantised and masked
        assert found[WEIGHT].tolist() == [5, 0, 0]
        assert not found["rows"][1:].any()
    rows = rows_of(made.states[VICTIM].parts["classifier"])
    # it has its own
    assert not torch.equal(rows[2], rows_of(made.states[ME].parts["classifier"])[2])


def test_class_sums_of_ppfl_are_the_membership_of_who_alone_has_a_class(tagged, shards):
    """Naive: Σ h c / Σ h of class 2 is the victim's c; ours: neither is given."""
    security = {"secure_aggregation": "required"}
    naive = tagged.job("naive-ppfl", "ppfl", SILOS, {"models": 2}, min_cohort=3)
    ours = tagged.job("ppfl", "ppfl", SILOS, {"models": 2}, min_cohort=3, security=security)
    coordinator = Opened(naive, "coupling")
    made = simulate(naive, shards, exchanges=coordinator)
    last = coordinator.sums[-1]
    true = made.states[VICTIM].parts["membership"]["c"]
    assert torch.allclose((last["m"][2] / last["b"][2]).float(), true, atol=1e-5)
    coordinator = Opened(ours, "coupling")
    simulate(ours, shards, exchanges=coordinator)
    assert len(coordinator.sums) == ours.rounds
    for found in coordinator.sums:
        assert found["b"][0] > 0
        assert not found["b"][1:].any()
        assert not found["m"][1:].any()


# A coordinator that lies about the holders, so that the victim gives its row.


class Counted(Summed):
    """The sum of the count round, of what the silos hold."""

    def values(self, part, silo):
        if part.name != HOLDERS:
            return super().values(part, silo)
        return {"holders": torch.tensor([int(label in CLASSES[silo]) for label in range(3)])}

    @property
    def unit(self):
        return 1 << self.spec.groups[0].scale_exponent


def raised(made, by=4):
    """Four more holders of class 2."""

    def change(words):
        changed = np.frombuffer(words, "<u8").copy()
        changed[2] += np.uint64(by * made.unit)
        return changed.tobytes()

    return change


@pytest.mark.control
def test_the_holders_come_down_as_they_were_summed(recipient, tagged, job):
    made = Counted(tagged, job, 0)
    found = recipient.take(job, 1, delivery(job, 1, [made.down(HOLDERS)]))
    assert found.tensors[HOLDERS]["holders"].tolist() == [5, 3, 1]


def test_holders_that_were_altered_are_refused_with_blame(recipient, tagged, job):
    made = Counted(tagged, job, 0)
    with pytest.raises(RefusedError, match="brings a sum of group 0 that was altered") as caught:
        recipient.take(job, 1, delivery(job, 1, [made.down(HOLDERS, words=raised(made))]))
    assert (caught.value.peer, caught.value.code) == (COORDINATOR_OR_SILO, "SUM")
    (ended,) = recipient.recorded("secagg.end")
    assert (ended["code"], ended["blame"], ended["round"]) == ("SUM", COORDINATOR_OR_SILO, 0)


def test_holders_as_tensors_are_refused(recipient, job):
    plain = {HOLDERS: {"holders": torch.tensor([5, 5, 5])}}
    with pytest.raises(RefusedError, match="it has to come in the words of its sum"):
        recipient.take(job, 1, delivery(job, 1, [], plain))


def test_the_holders_of_fewer_silos_are_refused(recipient, tagged, job):
    made = Counted(tagged, job, 0, SILOS[:4], SILOS[:4])
    told = "the cohort lacks silo-e, without whom silo-a, silo-b, silo-c, silo-d are"
    with pytest.raises(RefusedError, match=told):
        recipient.take(job, 1, delivery(job, 1, [made.down(HOLDERS)]))


def test_where_some_get_no_holders_nobody_gives_a_row(job, shards):
    """Withheld from four silos, which would then give zeros: the fifth would be alone in its row,
    of any class.
    """
    method = job.method()
    for silo in SILOS[:4]:
        state = method.deliver(initial_state(method, silo), {}, facts(silo, 0))
        with pytest.raises(PeerError, match="delivered no 'holders' in round 1") as caught:
            local_round(method, job, state, 1, {}, *shards[silo], silo)
        assert caught.value.peer == "coordinator"


@pytest.mark.actor("coordinator and silos")
@pytest.mark.succeeds
def test_with_the_key_of_one_silo_the_coordinator_can_forge_them(recipient, tagged, job):
    """It makes the tag that fits: what tags cannot withstand (docs/threat-model.md)."""
    made = Counted(tagged, job, 0)
    words = raised(made)(made.words[HOLDERS])
    tagger = Tagger(KEY, made.spec.context(), len(made.spec.groups))
    shift = np.frombuffer(words, "<u8") - np.frombuffer(made.words[HOLDERS], "<u8")
    tagger.add(0, shift)
    tag = (int.from_bytes(made.tags[:8]) + tagger.sums[0]) % PRIME
    forged = made.down(HOLDERS, words=lambda _: words, tag=tag.to_bytes(8))
    found = recipient.take(job, 1, delivery(job, 1, [forged]))
    assert found.tensors[HOLDERS]["holders"].tolist() == [5, 3, 5]


# A method that gives more than it may.


@pytest.mark.actor("installed method")
def test_a_method_that_gives_rows_of_classes_that_it_lacks_fails_the_round(
    job, shards, monkeypatch
):
    """Rows that nobody counted would be alone in a sum, and could hold anything."""

    def smuggling(self, state, facts):
        rows = {"rows": rows_of(state.parts["classifier"])}
        return {"rows": Contribution(rows, torch.ones(3, dtype=torch.float64))}

    monkeypatch.setattr(FedSSA, "contribute", smuggling)
    told = "part 'rows' has rows of other classes than this silo has records of"
    with pytest.raises(LocalError, match=told):
        simulate(job, shards, exchanges=simulated(job))


@pytest.mark.actor("installed method")
def test_a_method_that_gives_rows_that_are_not_shown_gives_zeros(job, shards, monkeypatch):
    def smuggling(self, state, facts):
        held = [float(label in CLASSES[facts.silo]) for label in range(3)]
        weight = torch.tensor(held, dtype=torch.float64)
        return {"rows": Contribution({"rows": torch.full((3, self.width + 1), 7.0)}, weight)}

    monkeypatch.setattr(FedSSA, "contribute", smuggling)
    coordinator = Opened(job)
    made = simulate(job, shards, exchanges=coordinator)
    assert made.states[VICTIM].extra[SAID].tolist() == [1, 0, 1]
    for found, own in zip(coordinator.sums, coordinator.own, strict=True):
        assert (own[0] == 7).all()
        assert not own[1:].any()
        assert found[WEIGHT].tolist() == [5, 0, 0]
