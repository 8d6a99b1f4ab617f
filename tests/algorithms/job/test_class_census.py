"""A count of holders before what is summed class by class: four silos a to d, classes 0 to 2, four
holders needed.

Class 0 is at all four, class 1 at a, b and c, class 2 at d alone.
"""

from dataclasses import replace

import pytest
import torch
from support.jobs import make_data
from support.refusals import refused
from support.rounds_by_hand import closed
from support.whole_jobs import check_states, check_tensors
from torch.testing import assert_close

from staddle.algorithms.course import Facts
from staddle.algorithms.data.dataset import Dataset
from staddle.algorithms.engines.aggregation import MemoryArchive, deliver
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.exchange.delivery import Latest
from staddle.algorithms.exchange.parts import Contribution
from staddle.algorithms.exchange.plain import PLAIN
from staddle.algorithms.job.class_census import (
    COUNTED,
    SAID,
    ClassCensus,
    by_class,
    hide_rows,
    shown_rows,
)
from staddle.algorithms.job.job import Job
from staddle.algorithms.method import initial_state
from staddle.algorithms.tasks.table_counting import RIGHT
from staddle.algorithms.training.silo_round import local_round, take_delivery
from staddle.errors import PeerError
from staddle.files.documents import canonical_json, parse_json
from staddle.security.blind.plan import simulated

FOUR = ["a", "b", "c", "d"]
BLIND = {"secure_aggregation": "required"}
COUNTS = {"a": (3, 1, 0), "b": (2, 4, 0), "c": (1, 1, 0), "d": (5, 0, 2)}
MLP = {"name": "ppfl-mlp", "input": [1, 8, 8]}
MODELS = {"fedaims": {"name": "convnet-digits", "norm": "none"}}


@pytest.fixture
def blind(make_job):
    def make(method="fedssa", options=None, security=BLIND, **fields):
        changes = {"silos": FOUR, "min_cohort": 3, "security": security} | fields
        job = make_job(method, options, MODELS.get(method, MLP), **changes)
        job.document()
        return job

    return make


def facts(silo, round_, counts=COUNTS):
    return Facts(silo, round_, sum(counts[silo]), torch.tensor(counts[silo]))


def holders(*counts):
    return {"holders": {"holders": torch.tensor(counts)}}


def counted(job, silo="a", round_=1, told=(4, 3, 1)):
    """State of a silo that was told the holders at the start of a round."""
    method = job.method()
    state = method.deliver(initial_state(method, silo), {}, facts(silo, 0))
    return method.deliver(state, holders(*told), facts(silo, round_))


# Which jobs.


@pytest.mark.parametrize(
    ("method", "part"), [("fedssa", "rows"), ("fedaims", "prototypes"), ("ppfl", "coupling")]
)
def test_a_blind_job_that_sums_by_class_counts_first_and_has_a_key(blind, make_job, method, part):
    job = blind(method)
    assert isinstance(job.method(), ClassCensus)
    assert (job.counted, job.keyed, job.length) == (True, True, job.rounds + 1)
    assert [p.name for p in job.up(0)] == ["holders", RIGHT.name]
    assert part in [p.name for p in job.up(1)]
    clear = make_job(method, None, MODELS.get(method, MLP), silos=FOUR, min_cohort=3)
    assert not isinstance(clear.method(), ClassCensus)
    assert (clear.counted, clear.keyed, clear.length) == (False, False, clear.rounds)


@pytest.mark.parametrize("method", ["local", "fedavg", "fedper", "ppfl"])
def test_other_blind_jobs_count_nothing(blind, method):
    options = {"lam": 0.0} if method == "ppfl" else {}
    assert not blind(method, options).counted
    with refused(r"security\.min_holders = 3 does nothing: no class is summed; take it out"):
        blind(method, options, security={**BLIND, "min_holders": 3})


def test_a_job_goes_round_through_its_signed_document(blind):
    job = blind(security={**BLIND, "min_holders": 3})
    back = Job.from_document(parse_json(canonical_json(job.document()), "wire"), "wire", ())
    assert (back, back.digest) == (job, job.digest)
    assert job.digest != blind().digest


def test_fewest_holders_are_min_cohort_unless_the_job_says_otherwise(blind):
    five = [*FOUR, "e"]
    assert (blind().min_holders, blind(silos=five, min_cohort=4).min_holders) == (3, 4)
    assert blind(silos=five, min_cohort=5, security={**BLIND, "min_holders": 4}).min_holders == 4
    with refused(r"min_cohort = 4 says and colluders = 1 more, and there are 4, so none"):
        blind(min_cohort=4)
    with refused(r"security\.min_holders = 4 says and colluders = 1 more, and there are 4"):
        blind(security={**BLIND, "min_holders": 4})
    few = "min_holders = {} would reveal too few; write 3 or more"
    off = r'min_holders = 3 does nothing with secure_aggregation = "off"'
    for table, said in (
        ({**BLIND, "min_holders": 1}, few.format(1)),
        ({**BLIND, "min_holders": 2}, few.format(2)),
        ({"min_holders": 3}, off),
    ):
        with pytest.raises(ValueError, match=said):
            blind(security=table)


def test_rows_are_withheld_by_one_rule_before_the_sum_or_after_it(blind, make_job):
    with refused(r"option min_holders = 2 withholds rows after they are summed, in a blind"):
        blind(options={"min_holders": 2})
    assert make_job("fedssa", {"min_holders": 2}).document()


# Rounds are the method's own, one earlier.


def test_rounds_are_shifted_by_one(blind, make_job):
    method = blind("fedaims").method()
    inner = make_job("fedaims", None, MODELS["fedaims"], silos=FOUR).method()
    assert method.down(0) == ()
    known = initial_state(inner, "b")
    for round_ in range(4):
        assert method.up(round_ + 1) == inner.up(round_)
        down = [part.name for part in method.down(round_ + 1)]
        assert down == ["holders", *(part.name for part in inner.down(round_))]
        own = inner.stages(known, facts("b", round_))[0]
        later = method.stages(known, facts("b", round_ + 1))[0]
        assert (later.optimiser, later.trains) == (own.optimiser, own.trains)
        assert method.stream_round(round_ + 1) == round_
    assert method.deliveries({}, 0, "a") == ()
    assert method.deliveries({}, 2, "a") == (Latest("holders"), *inner.deliveries({}, 1, "a"))
    assert method.stages(initial_state(method, "a"), facts("a", 0)) == ()


def test_what_a_silo_is_dealt_in_a_round_of_its_own_is_dealt_a_round_later(blind):
    """Algorithm 2 of FedAIMS deals out blocks in each round that trains, and none at the end."""
    job = blind("fedaims", {"sampling": "algorithm2"})
    dealt = [
        [each.part for each in job.method().deliveries(job.method().begin(), n, "a")]
        for n in range(6)
    ]
    assert [("holders" in parts, "block" in parts) for parts in dealt] == [
        (False, False), *[(True, True)] * 4, (True, False),
    ]  # fmt: skip


def test_the_method_is_asked_about_its_own_rounds(blind):
    """Each round number that reaches the method is one less than that on the wire."""
    asked = []

    class Asked:
        def __getattr__(self, name):
            asked.append(name)
            return getattr(inner, name)

        def mail_fault(self, round_, *rest):
            return f"round {round_}"

        def unposted(self, state, silos):
            return {"unposted": torch.tensor(len(silos))}

        def combine(self, state, round_, cohort, results):
            return round_

    job = blind()
    inner = job.method()._inner
    method = ClassCensus(Asked(), job.setting(), 4)
    assert method.mail_fault(3, "a", {}, 1.0) == "round 2"
    assert method.combine({}, 5, (), {}) == 4
    assert method.unposted({}, ("a",)) == {"unposted": torch.tensor(1)}
    assert method.compares_labels is False
    assert asked.count("compares_labels") == 1


def test_the_cohort_of_a_round_is_that_of_the_wire(blind):
    job = blind("fedaims")
    assert job.method()._inner.setting.drawn(job.rounds - 1) == job.cohort(job.rounds)
    with refused("round 6 of job"):
        job.method()._inner.setting.drawn(job.rounds + 1)


# The rule.


@pytest.mark.parametrize("fewest", range(1, 6))
def test_rows_of_enough_holders_are_shown(fewest):
    """3 + 1 = 4 by default: of four holders three are honest, whoever the one in league with the
    coordinator is.
    """
    assert shown_rows(torch.arange(6), fewest).tolist() == [n >= fewest for n in range(6)]


def test_hidden_rows_are_zeros_in_values_and_weight():
    rows, weight = torch.arange(1.0, 7.0).reshape(3, 2), torch.tensor([2.0, 5.0, 0.0])
    held, shown = torch.tensor([True, True, False]), torch.tensor([True, False, True])
    hidden = hide_rows("rows", Contribution({"rows": rows}, weight), held, shown)
    assert hidden.tensors["rows"].tolist() == [[1, 2], [0, 0], [5, 6]]
    assert hidden.weight.tolist() == [2, 0, 0]
    assert rows.tolist() == [[1, 2], [3, 4], [5, 6]]  # the silo's own stay
    total = hide_rows("deltas", Contribution({"n": torch.tensor([7, 8, 0])}), held, shown)
    assert (total.tensors["n"].tolist(), total.weight) == ([7, 0, 0], None)
    sums = Contribution({"b": torch.ones(3) * held, "silos": torch.tensor(1.0)})
    tensors = hide_rows("coupling", sums, held, shown).tensors
    assert tensors["b"].tolist() == [1, 0, 0]
    assert tensors["silos"] == 1  # which is no row


@pytest.mark.parametrize(
    "contribution",
    [
        # class 2 is not held
        Contribution({"rows": torch.zeros(3, 2)}, torch.tensor([1.0, 0.0, 0.5])),
        Contribution({"n": torch.tensor([1, 1, -1])}),
        Contribution({"n": torch.tensor([0, 0, 0]), "wide": torch.eye(3)}),
    ],
)
def test_rows_that_this_silo_does_not_hold_are_a_bug_of_the_method(contribution):
    held, shown = torch.tensor([True, True, False]), torch.tensor([True, True, True])
    with refused("part 'p' has rows of other classes than this silo has records of"):
        hide_rows("p", contribution, held, shown)


# The silo half.


def test_a_silo_says_what_it_holds_and_gives_shown_rows_alone(blind):
    method = blind().method()
    for silo, said in (("a", [1, 1, 0]), ("d", [1, 0, 1])):
        state = method.deliver(initial_state(method, silo), {}, facts(silo, 0))
        assert (
            method.contribute(state, facts(silo, 0))["holders"].tensors["holders"].tolist() == said
        )
        contribution = method.contribute(counted(blind(), silo), facts(silo, 1))["rows"]
        assert contribution.weight.tolist() == [1, 0, 0]
        assert contribution.tensors["rows"][0].any()
        assert not contribution.tensors["rows"][1:].any()


def test_rows_of_a_class_that_is_not_shown_stay_the_silos_own(blind):
    job = blind(options={"mu_0": 0.0})
    state = counted(job, "a")
    classifier = {**state.parts["classifier"], "bias": torch.tensor([10.0, 20.0, 30.0])}
    state = replace(state, parts={**state.parts, "classifier": classifier})
    width = state.parts["classifier"]["weight"].shape[1] + 1
    header = {"rows": torch.full((3, width), 7.0), "status": torch.tensor([2, 0, 0])}
    taken = job.method().deliver(state, {**holders(4, 3, 1), "header": header}, facts("a", 2))
    assert taken.parts["classifier"]["bias"].tolist() == [7, 20, 30]


def test_a_stale_inclusive_header_leaves_them_out_too(blind):
    method = blind(options={"stale_inclusive": True}).method()
    state = method.deliver(initial_state(method, "d"), {}, facts("d", 0))
    state = method.deliver(state, holders(4, 3, 1), facts("d", 1))
    change = method.contribute(state, facts("d", 1))["deltas"].tensors
    assert change["presence"].tolist() == [1, 0, 0]
    assert change["rows"][0].any()
    assert not change["rows"][1:].any()


def test_without_holders_a_silo_gives_nothing(blind):
    """If it gave zeros, a coordinator would keep them from three silos, and the fourth would be
    alone in its row.
    """
    job = blind()
    method = job.method()
    state = method.deliver(initial_state(method, "a"), {}, facts("a", 0))
    for round_ in (1, job.length):
        with pytest.raises(PeerError, match=rf"delivered no 'holders' in round {round_}"):
            method.deliver(counted(job), {}, facts("a", round_))
    with pytest.raises(PeerError, match="delivered 0 holders of class 1, but this silo is one"):
        method.deliver(state, holders(4, 0, 4), facts("a", 1))
    for beyond in (5, -1):
        with pytest.raises(PeerError, match="holds a value"):
            take_delivery(method, job, state, facts("a", 1), holders(4, beyond, 4))


def test_a_silo_whose_classes_changed_contributes_nothing(blind):
    """Of a class that it said it holds, the others' rows would be summed without its own."""
    method = blind().method()
    for counts in ((1, 0, 0), (1, 1, 1)):
        with refused("of other classes than it reported when the job counted holders"):
            method.deliver(counted(blind()), holders(4, 3, 1), facts("a", 2, {"a": counts}))
    with refused("the job counted holders"):
        # it was not there
        method.deliver(initial_state(method, "a"), holders(4, 3, 1), facts("a", 1))


def test_a_method_does_not_see_the_count(blind):
    job = blind()
    seen = []

    class Seeing:
        def __getattr__(self, name):
            return getattr(inner, name)

        def __getattribute__(self, name):
            if name in ("deliver", "stages", "contribute"):
                return lambda state, *rest: (
                    seen.append((state, rest)) or getattr(inner, name)(state, *rest)
                )
            return object.__getattribute__(self, name)

    inner = job.method()._inner
    method = ClassCensus(Seeing(), job.setting(), 4)
    state = method.deliver(counted(job), holders(4, 3, 1), facts("a", 2))
    method.stages(state, facts("a", 2))
    method.contribute(state, facts("a", 2))
    assert {SAID, COUNTED} <= state.extra.keys()
    assert [set(own.extra) & {SAID, COUNTED} for own, _ in seen] == [set()] * 3
    assert [(own.round, own.class_counts.tolist()) for _, (*_, own) in seen] == [
        (1, [3, 0, 0]), (1, [3, 1, 0]), (1, [3, 1, 0]),
    ]  # fmt: skip
    assert "holders" not in seen[0][1][0]


# The coordinator half.


def test_holders_that_there_cannot_be_are_not_published(blind):
    method = blind().method()
    made = method.combine({}, 0, tuple(FOUR), holders(4, 0, 1))
    assert made.published["holders"]["holders"].tolist() == [4, 0, 1]
    for wrong in (5, -1):
        with refused("one of them does not count as the job says"):
            method.combine({}, 0, tuple(FOUR), holders(4, wrong, 1))


# Whole jobs.


def shards(counts=COUNTS):
    """Records of these classes alone."""
    found = {}
    for number, (silo, own) in enumerate(counts.items()):
        y = torch.tensor([label for label, count in enumerate(own) for _ in range(count * 4)])
        x = make_data(len(y), number).x + y.reshape(-1, 1, 1, 1)
        found[silo] = (Dataset(x, y), Dataset(x[:8], y[:8]))
    return found


class Recorded:
    """Exchanges that keep what each silo contributed, before it is quantised."""

    def __init__(self, own):
        self.own, self.gave = own, []
        self.collect, self.mix = own.collect, own.mix

    def contribute(self, part, contribution):
        self.gave.append((part, self.own.contribute(part, contribution)))
        return self.gave[-1][1]


WHOLE = [("fedssa", {}), ("fedssa", {"stale_inclusive": True}), ("fedaims", {}), ("fedproto", {}),
    ("ppfl", {"models": 2})]  # fmt: skip


@pytest.mark.parametrize(("method", "options"), WHOLE)
def test_in_a_whole_job_nobody_contributes_a_row_that_few_hold(blind, method, options):
    job = blind(method, options)
    exchanges = Recorded(simulated(job))
    made = simulate(job, shards(), exchanges=exchanges)
    names = {"rows", "deltas", "prototypes", "coupling"}
    rows = [given for part, given in exchanges.gave if part.name in names]
    assert len(rows) == 4 * job.rounds
    for value in (v for given in rows for v in given.values() if v.ndim):
        assert bool(value[0].any()) or method == "fedssa"
        assert not bool(value[1:].any())
    for silo, own in COUNTS.items():
        assert made.states[silo].extra[SAID].tolist() == [int(count > 0) for count in own]
        assert made.states[silo].extra[COUNTED].tolist() == [4, 3, 1]
    assert made.metrics[0]["tested"] == made.metrics[-1]["tested"]


@pytest.mark.parametrize(("method", "options"), WHOLE)
def test_where_all_hold_all_it_is_the_job_in_the_clear_bit_for_bit(
    blind, make_job, method, options
):
    records = shards(dict.fromkeys(FOUR, (3, 2, 1)))
    clear = make_job(method, options, MODELS.get(method, MLP), silos=FOUR, min_cohort=3)
    one, other = (simulate(job, records) for job in (blind(method, options), clear))
    for silo in FOUR:
        right = [[r.trained.correct for r in each.history[silo]] for each in (one, other)]
        assert right[0][1:] == right[1]
    check_states(one.states, other.states)
    assert_close(one.coordinator, other.coordinator, atol=0, rtol=0)


def test_the_round_that_counts_trains_nothing(blind):
    job, data = blind("fedaims"), shards()
    method, archive, contributions = job.method(), MemoryArchive(), {}
    for silo in FOUR:
        before = initial_state(method, silo)
        down = deliver(method, PLAIN, {}, 0, silo, archive)
        made = local_round(method, job, before, 0, down, *data[silo], silo)
        assert made.report.loss is None
        assert made.report.delivered.correct == made.report.trained.correct
        assert made.report.tested == 8
        check_tensors(made.state.parts, before.parts)
        contributions[silo] = made.contributions
    assert closed(method, {}, 0, contributions, archive) == {}
    assert archive.latest("holders")["holders"].tolist() == [4, 3, 1]


@pytest.mark.parametrize(
    ("method", "options", "names"),
    [
        ("fedssa", {}, ("rows",)),
        ("fedssa", {"stale_inclusive": True}, ("deltas",)),
        ("fedaims", {}, ("prototypes",)),
        ("fedproto", {}, ("prototypes",)),
        ("ppfl", {}, ("coupling",)),
        ("ppfl", {"lam": 0.0}, ()),
        ("fedavg", {}, ()),
    ],
)
def test_ratios_are_by_class_whatever_a_method_says(make_job, method, options, names):
    """And totals: FedSSA's differences, and PPFL's class sums."""
    inner = make_job(method, options, MODELS.get(method, MLP)).method()
    assert by_class(inner, 0) == names
    specs = [spec for part in inner.up(0) if part.name in names for spec in part.wire]
    assert {spec.shape[:1] for spec in specs} <= {(3,), ()}
