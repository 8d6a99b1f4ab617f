import copy
import math
import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.jobs import make_job
from support.refusals import refused

from staddle.algorithms.course import Facts, SiloState
from staddle.algorithms.data import dataset
from staddle.algorithms.engines.aggregation import MemoryArchive, close_round, deliver
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.exchange.parts import WEIGHT, Contribution, Kind
from staddle.algorithms.exchange.plain import PLAIN
from staddle.algorithms.job.job import Job
from staddle.algorithms.method import initial_state
from staddle.algorithms.methods.fedssa.method import rows_of
from staddle.algorithms.models.build import ModelOptions, build
from staddle.algorithms.models.registry import NETWORKS
from staddle.algorithms.training.silo_round import local_round, state_to_bytes

DIGITS = ("digits-cnn-a", "digits-cnn-b", "digits-cnn-c")


def new_job(options=None, *, model="digits-cnn-a", classes=3, **fields):
    model = {"classes": classes, **({"name": model} if isinstance(model, str) else model)}
    return make_job("fedssa", options, model, **fields)


def new_method(**options):
    return new_job(options).method()


def facts(round_=0, counts=(2, 0, 1), silo="a"):
    return Facts(silo, round_, sum(counts), torch.tensor(counts))


def with_rows(state, values):
    """The state with header row s filled with values[s], bias included."""
    head = state.parts["classifier"]
    column = torch.tensor([float(v) for v in values])
    filled = {"weight": column[:, None].expand_as(head["weight"]).clone(), "bias": column.clone()}
    return SiloState({**state.parts, "classifier": filled}, state.extra)


def row_values(state):
    """The one number that fills each header row."""
    head = state.parts["classifier"]
    rows = torch.cat([head["weight"], head["bias"][:, None]], dim=1)
    assert torch.equal(rows, rows[:, :1].expand_as(rows))
    return [round(v, 6) for v in rows[:, 0].tolist()]


def filled(values, width=65):
    return torch.tensor([[float(v)] * width for v in values])


def header(values, status=(2, 2, 2)):
    return {"header": {"rows": filled(values), "status": torch.tensor(status)}}


class Bench:
    """A method with its coordinator half and the silos' states, without training: header rows are
    set by hand.
    """

    def __init__(self, method):
        self.method, self.archive, self.coordinator = method, MemoryArchive(), method.begin()
        self.silos = {s: initial_state(method, s) for s in method.setting.silos}

    def play(self, round_, gave, lost=()):
        """One round: {silo: (rows, counts)}; the contributions of the ``lost`` never arrive."""
        parts, spool = self.method.up(round_), {}
        for silo, (values, counts) in gave.items():
            now = facts(round_, counts, silo)
            down = deliver(self.method, PLAIN, self.coordinator, round_, silo, self.archive)
            after = with_rows(self.method.deliver(self.silos[silo], down, now), values)
            contributions = self.method.contribute(after, now)
            if silo not in lost:  # a round that does not count leaves no trace at a silo
                self.silos[silo] = after
            for part in parts:
                spool[part.name, silo] = PLAIN.contribute(part, contributions[part.name])
        self.coordinator, _ = close_round(
            self.method, PLAIN, self.coordinator, round_, [s for s in gave if s not in lost], parts,
            lambda part, silo, name: spool[part, silo][name], self.archive,
        )  # fmt: skip
        return [round(v, 5) for v in self.coordinator["rows"][:, 0].tolist()]


# The silo step.


@pytest.mark.parametrize(
    ("mu_0", "t_stable", "round_", "expected"),
    [
        (0.5, 20, 0, 0.5),
        (0.5, 20, 10, 0.353553),
        (0.5, 20, 19, 0.039230),
        (0.5, 20, 20, 0.0),
        (0.5, 20, 30, 0.0),  # the cosine itself is negative here
        (0.5, 20, 79, 0.0),
        (1.0, 40, 20, 0.707107),
        (0.5, 2, 1, 0.353553),
        (0.9, 0, 0, 0.0),
        (0.0, 20, 3, 0.0),
    ],
)
def test_the_stabilisation_schedule(mu_0, t_stable, round_, expected):
    assert new_method(mu_0=mu_0, t_stable=t_stable).mu(round_) == pytest.approx(expected, abs=1e-6)


def test_eq_4_adds_for_seen_classes_and_leaves_the_others():
    method = new_method(mu_0=0.5, t_stable=2)
    before = with_rows(initial_state(method, "a"), [1, 2, 3])
    for round_, expected in [(0, [10.5, 2, 31.5]), (1, [10.353553, 2, 31.06066]), (2, [10, 2, 30])]:
        # classes 0 and 2 are seen
        after = method.deliver(before, header([10, 20, 30]), facts(round_))
        assert row_values(after) == pytest.approx(expected, abs=1e-5)
    assert row_values(before) == [1, 2, 3]  # states are values
    assert after.parts["extractor"] is before.parts["extractor"]


def test_before_the_first_average_the_global_header_is_the_initial_one():
    method = new_method()
    start = initial_state(method, "a")
    after = method.deliver(start, {}, facts())
    ratio = after.parts["classifier"]["weight"] / start.parts["classifier"]["weight"]
    assert torch.allclose(ratio.mean(1), torch.tensor([1.5, 1.0, 1.5]))


def test_without_training_seen_rows_grow_by_one_plus_mu_a_round(make_shards):
    """METHODS.md 1.2: ‖h‖(1 + μ)^t.

    A learning rate of 1e-30 moves nothing, so T rounds of μ = 1 double it T times.
    """
    job = new_job({"mu_0": 1.0, "t_stable": 1_000_000}, training={"lr": 1e-30}, rounds=6)
    result, start = simulate(job, make_shards(job)), initial_state(job.method(), "a")
    for state in result.states.values():
        for name in ("weight", "bias"):
            growth = state.parts["classifier"][name].norm() / start.parts["classifier"][name].norm()
            assert growth.item() == pytest.approx(2**6, rel=1e-5)
    assert torch.allclose(result.coordinator["rows"], 2.0**6 * job.method().initial, rtol=1e-5)


def test_the_schedule_starts_at_mu_0_and_only_falls():
    for mu_0, t_stable in [(0.5, 20), (1.0, 7), (0.3, 1)]:
        values = [new_method(mu_0=mu_0, t_stable=t_stable).mu(t) for t in range(3 * t_stable)]
        assert values[0] == mu_0
        assert values[:t_stable] == sorted(set(values[:t_stable]), reverse=True)
        assert values[t_stable:] == [0.0] * 2 * t_stable


def test_the_first_holder_of_a_class_starts_from_the_initial_row():
    """Nobody has given class 1 (status 0): its global row is the initial one, and Eq. 4 holds for
    who has records.
    """
    before = with_rows(initial_state(new_method(), "a"), [1, 2, 3])
    after = new_method(mu_0=0.5, t_stable=9).deliver(
        before, header([10, 20, 30], (2, 0, 1)), facts(0, (1, 1, 1))
    )
    assert row_values(after) == [10.5, 21, 3]  # class 2 is withheld


def test_three_points_by_hand():
    """One round of one batch on a linear model: Eq. 4, then softmax regression on both weights and
    bias, all C rows.

    The silo has no class 2: Eq. 4 leaves that row, training does not, and the row that it gives is
    zero.
    """
    x, y = [[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]], [0, 1, 1]
    job = new_job(
        {"mu_0": 0.5, "t_stable": 4},
        model={"name": "glm", "input": [1, 1, 2]},
        training={"lr": 0.3},
    )
    method, records = job.method(), dataset.Dataset(torch.tensor(x)[:, None, None], torch.tensor(y))
    local = np.array([[1.0, -1, 2], [0, 1, 0], [3, 2, 1]])
    common = np.array([[2.0, 0, 1], [1, 1, -1], [0, 5, 5]])
    start = initial_state(method, "a")
    classifier = {
        "weight": torch.tensor(local[:, :2]).float(),
        "bias": torch.tensor(local[:, 2]).float(),
    }
    start = SiloState({**start.parts, "classifier": classifier}, start.extra)
    down = {"header": {"rows": torch.tensor(common).float(), "status": torch.tensor([2, 2, 2])}}
    outcome = local_round(method, job, start, 2, down, records, records, "a")
    fused = np.array([*(common[:2] + 0.5 * math.cos(math.pi / 4) * local[:2]), local[2]])
    inputs = np.hstack([x, np.ones((3, 1))])
    odds = np.exp(inputs @ fused.T)
    slope = (odds / odds.sum(1, keepdims=True) - np.eye(3)[y]).T @ inputs / 3
    rows = fused - 0.3 * slope
    assert np.allclose(rows_of(outcome.state.parts["classifier"]), rows, atol=1e-6)
    assert np.allclose(
        outcome.contributions["rows"].tensors["rows"], rows * [[1], [1], [0]], atol=1e-6
    )
    assert outcome.contributions["rows"].weight.tolist() == [1, 1, 0]


NUMBERS = st.lists(st.floats(-5, 5, width=32), min_size=3, max_size=3)


@settings(max_examples=40)
@given(
    NUMBERS,
    NUMBERS,
    st.tuples(*[st.integers(0, 3)] * 3),
    st.tuples(*[st.integers(0, 2)] * 3),
    st.integers(0, 30),
)
def test_rows_of_unseen_and_of_withheld_classes_do_not_change_by_a_bit(
    method, own, common, counts, status, round_
):
    before = with_rows(initial_state(method, "a"), own)
    after = method.deliver(before, header(common, status), facts(round_, counts)).parts[
        "classifier"
    ]
    for s in range(3):
        same = torch.equal(after["weight"][s], before.parts["classifier"]["weight"][s])
        expected = torch.tensor(common[s]) + method.mu(round_) * torch.tensor(own[s])
        if counts[s] and status[s] != 1:
            assert torch.allclose(after["weight"][s], expected, atol=1e-5)
            assert torch.allclose(after["bias"][s], expected, atol=1e-5)
        else:
            assert same
            assert torch.equal(after["bias"][s], before.parts["classifier"]["bias"][s])


@pytest.fixture(scope="module")
def method():
    return new_method()


# The server step.


def test_eq_3_by_hand_counts_each_holder_once():
    bench = Bench(new_method(mu_0=0, t_stable=0))
    initial = bench.coordinator["rows"][1].clone()
    bench.play(
        0, {"a": ([1, 9, 9], (50, 0, 0)), "b": ([3, 9, 5], (1, 0, 2)), "c": ([8, 9, 7], (0, 0, 9))}
    )
    rows = bench.coordinator["rows"]
    # class 0: (1 + 3)/2, whatever the records; class 2: (5 + 7)/2
    assert torch.equal(rows[[0, 2]], filled([2, 6]))
    assert torch.equal(rows[1], initial)  # nobody holds class 1
    assert bench.coordinator["status"].tolist() == [2, 0, 2]
    # class 2 stays
    assert bench.play(1, {"b": ([4, 6, 5], (1, 3, 0)), "c": ([8, 2, 7], (0, 1, 0))}) == [4, 4, 6]
    down = deliver(bench.method, PLAIN, bench.coordinator, 2, "a", bench.archive)
    assert down.keys() == {"header"}
    assert row_values(bench.method.deliver(bench.silos["a"], down, facts(2))) == [4, 9, 6]


@settings(max_examples=40)
@given(
    st.lists(st.tuples(NUMBERS, st.tuples(*[st.integers(0, 3)] * 3)), min_size=1, max_size=3),
    st.integers(1, 3),
)
def test_the_header_from_zero_filled_rows_is_the_mean_over_the_holders(silos, fewest):
    """For any class sets, and without a row that fewer than ``min_holders`` gave."""
    bench = Bench(new_method(min_holders=fewest))
    gave = dict(zip("abc", silos, strict=False))
    initial = bench.coordinator["rows"]
    bench.play(0, gave)
    for s in range(3):
        held = [rows[s] for rows, counts in gave.values() if counts[s]]
        enough, row = len(held) >= fewest, bench.coordinator["rows"][s]
        assert torch.allclose(
            row, torch.tensor(statistics.mean(held)) if enough else initial[s], atol=1e-5
        )
        assert bench.coordinator["status"][s] == (2 if enough else bool(held))


@pytest.mark.parametrize("stale", [False, True])
def test_a_round_leaves_the_states_before_it_as_they_were(stale):
    """Both halves' states are values: a round is closed again after a crash, and a silo may have to
    repeat its own.
    """
    bench = Bench(new_method(stale_inclusive=stale))
    everyone = {"a": ([1, 4, 0], (1, 1, 0)), "b": ([3, 0, 5], (1, 0, 1))}
    bench.play(0, everyone)
    before = [bench.coordinator, bench.silos["a"].extra]
    copies = [{name: tensor.clone() for name, tensor in state.items()} for state in before]
    silo = state_to_bytes(bench.silos["a"])
    kept = bench.silos["a"]
    bench.play(1, everyone | {"a": ([7, 7, 7], (1, 0, 1))})
    assert state_to_bytes(kept) == silo
    for state, kept_state in zip(before, copies, strict=True):
        assert state.keys() == kept_state.keys()
        assert all(torch.equal(state[name], value) for name, value in kept_state.items())


def test_what_crosses_does_not_depend_on_the_classes_held():
    for options in ({}, {"stale_inclusive": True}):
        method = new_method(**options)
        (part,) = method.up(0)
        sizes = set()
        for counts in [(0, 0, 0), (1, 0, 0), (3, 4, 5)]:
            state = method.deliver(initial_state(method, "a"), {}, facts(0, counts))
            given = PLAIN.contribute(part, method.contribute(state, facts(0, counts))[part.name])
            sizes.add(tuple((name, t.dtype, tuple(t.shape)) for name, t in given.items()))
            zero = [bool((row == 0).all()) for row in given["rows"]]
            assert zero == [count == 0 for count in counts]
        assert len(sizes) == 1
        assert part.kind is Kind.HEADER_ROWS


def test_the_extractor_is_in_no_part():
    for options in ({"extractors": list(DIGITS)}, {"stale_inclusive": True}):
        job = new_job(options)
        shapes = {
            s.shape
            for r in (0, job.length)
            for part in (*job.up(r), *job.down(r))
            for s in part.wire
        }
        assert shapes <= {(3, 65), (3,), ()}


def test_presence_is_at_most_one_and_the_signed_schema_says_so():
    for options, name, dtype, least in (
        ({}, WEIGHT, "float64", "0.0"),
        ({"stale_inclusive": True}, "presence", "int64", "-1.0"),
    ):
        part = new_job(options).document()["schema"][0]["up"][0]
        bounds = {"least": least, "most": "1.0"}
        assert part["tensors"][-1] == {"name": name, "dtype": dtype, "shape": [3], **bounds}
    (part,) = new_method().up(0)
    with refused("part 'rows': its weight holds a value above 1"):
        PLAIN.contribute(
            part, Contribution({"rows": torch.ones(3, 65)}, torch.tensor([0.0, 2.0, 1.0]).double())
        )


def test_a_schema_with_another_largest_weight_is_not_ours():
    """An operator's release without the bound, or with another one: both sides would not refuse the
    same.
    """
    document = new_job({}).document()
    for most in ("2.0", None):
        changed = copy.deepcopy(document)
        weight = changed["schema"][0]["up"][0]["tensors"][-1]
        weight.pop("most")
        weight |= {} if most is None else {"most": most}
        with refused(r"fedssa version differs \(schema\[0\].up\[0\].tensors\[1\].most\)"):
            Job.from_document(changed, "f", ())


def test_bytes_of_the_paper_s_header():
    method = new_job({}, model="fedssa-cnn-5", classes=10).method()
    (part,) = method.up(0)
    # 5,020 words
    assert [(s.name, s.elements) for s in part.wire] == [("rows", 5010), (WEIGHT, 10)]


def test_a_class_of_too_few_holders_is_withheld_and_its_silo_keeps_its_row():
    bench = Bench(new_method(mu_0=0, t_stable=0, min_holders=2))
    bench.play(0, {"a": ([1, 5, 9], (1, 1, 0)), "b": ([3, 9, 9], (1, 0, 0))})
    assert bench.coordinator["status"].tolist() == [2, 1, 0]
    assert not bool((bench.coordinator["rows"] == 5).any())  # the lone row is nowhere
    down = deliver(bench.method, PLAIN, bench.coordinator, 1, "a", bench.archive)
    expected = [2, 5, 9]
    assert row_values(bench.method.deliver(bench.silos["a"], down, facts(1, (1, 1, 0)))) == expected
    assert bench.play(1, {"a": ([7, 5, 9], (1, 1, 0)), "b": ([3, 7, 9], (0, 1, 0))})[:2] == [2, 6]
    assert bench.coordinator["status"].tolist() == [2, 2, 0]  # class 0 keeps its older average


# The stale-inclusive average.


def test_the_stale_inclusive_average_by_hand():
    bench = Bench(new_method(stale_inclusive=True))
    one = bench.play(0, {"a": ([1, 4, 0], (1, 1, 0)), "b": ([3, 0, 5], (1, 0, 1))})
    assert one == [2, 4, 5]
    # class 0: (1 + 9)/2 with a away
    assert bench.play(1, {"b": ([9, 0, 7], (1, 0, 1))}) == [5, 4, 7]
    assert bench.play(2, {"c": ([2, 2, 2], (1, 1, 1))}) == [4, 3, 4.5]
    assert bench.coordinator["holders"].tolist() == [3, 2, 2]
    # b has no class 2 any more, but class 1
    assert bench.play(3, {"b": ([9, 6, 7], (1, 1, 0))}) == [4, 4, 2]
    plain = Bench(new_method())
    plain.play(0, {"a": ([1, 4, 0], (1, 1, 0)), "b": ([3, 0, 5], (1, 0, 1))})
    # the paper's average is over the round
    assert plain.play(1, {"b": ([9, 0, 7], (1, 0, 1))}) == [9, 4, 7]


# The paper's ablations.


@pytest.mark.parametrize(
    ("m2", "expected"),
    [("fuse", [10.5, 2, 31.5]), ("seen", [10, 2, 30]), ("all", [10, 20, 30])],
)
def test_m2_fuses_seen_rows_or_replaces_them_or_all(m2, expected):
    """Cases C, B and A of Table 5; classes 0 and 2 are seen."""
    method = new_method(m2=m2)
    before = with_rows(initial_state(method, "a"), [1, 2, 3])
    after = method.deliver(before, header([10, 20, 30]), facts())
    assert row_values(after) == pytest.approx(expected)
    # Class 1 is withheld, or nobody held it.
    for status in (0, 1):
        after = method.deliver(before, header([10, 20, 30], (2, status, 2)), facts())
        assert row_values(after) == pytest.approx([expected[0], 2, expected[2]])


def test_m2_seen_is_mu_0_of_zero(make_shards):
    ends = []
    for options in ({"m2": "seen"}, {"mu_0": 0.0}):
        job = new_job(options, rounds=3)
        ends.append(simulate(job, make_shards(job)))
    one, other = ends
    assert one.history == other.history


@pytest.mark.parametrize("stale", [False, True])
def test_without_m1_a_row_is_the_mean_of_all_silos(stale):
    """Case B of Table 4: all count once, whatever they hold; class 1 has no record."""
    method = new_method(m1=False, stale_inclusive=stale)
    bench = Bench(method)
    gave = {"a": ([1, 9, 9], (50, 0, 0)), "b": ([3, 6, 6], (1, 0, 2)), "c": ([8, 9, 3], (0, 0, 9))}
    assert bench.play(0, gave) == [4, 8, 6]
    assert bench.coordinator["status"].tolist() == [2, 2, 2]
    # b and c are away, and count with their last rows where the average is stale-inclusive
    assert bench.play(1, {"a": ([4, 0, 6], (1, 0, 0))}) == ([5, 5, 5] if stale else [4, 0, 6])
    down = deliver(method, PLAIN, bench.coordinator, 2, "a", bench.archive)
    mu = method.mu(2)
    # M2 is Eq. 4 still, on the one class that a holds
    assert row_values(method.deliver(bench.silos["a"], down, facts(2, (1, 0, 0)))) == (
        pytest.approx([(5 if stale else 4) + 4 * mu, 0, 6], abs=1e-5)
    )
    # nothing to count class by class
    assert method.by_class(0) == ()
    assert [part.exchange.schema_name for part in method.up(0)] == (
        ["sum.total" if stale else "sum.mean"]
    )


def test_without_m1_a_silo_gives_all_its_rows():
    method = new_method(m1=False)
    state = with_rows(initial_state(method, "a"), [1, 2, 3])
    given = method.contribute(state, facts())["rows"]
    assert torch.equal(given.tensors["rows"], filled([1, 2, 3]))
    assert given.weight == 1.0


@pytest.mark.parametrize("options", [{"mu_0": 0.1}, {"t_stable": 4}])
def test_what_fuses_nothing_takes_no_schedule(options):
    with refused("mu_0 and t_stable do nothing with m2 = 'all', which fuses nothing; take them"):
        new_job({"m2": "all", **options})
    job = new_job({"m2": "all"})
    assert Job.from_document(job.document(), "document", ()) == job


def test_a_lost_upload_is_not_taken_off_again():
    bench = Bench(new_method(stale_inclusive=True))
    bench.play(0, {"a": ([2, 2, 2], (1, 1, 1)), "b": ([4, 4, 4], (1, 1, 1))})
    assert bench.play(
        1, {"a": ([90, 90, 90], (1, 0, 1)), "b": ([4, 4, 4], (1, 1, 1))}, lost=["a"]
    ) == [3, 3, 3]
    assert bench.play(2, {"a": ([6, 6, 6], (1, 1, 1)), "c": ([5, 5, 5], (0, 0, 1))}) == [5, 5, 5]
    assert bench.coordinator["holders"].tolist() == [2, 2, 3]


COUNTS = st.lists(st.integers(0, 2), min_size=3, max_size=3)
# comes, is lost, records
DRAW = st.lists(st.tuples(st.booleans(), st.booleans(), COUNTS), min_size=3, max_size=3)


@settings(max_examples=15)
@given(st.lists(DRAW, min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_running_totals_equal_the_average_of_the_last_rows_that_arrived(rounds, random):
    bench, last = Bench(new_method(stale_inclusive=True)), {}
    expected = bench.coordinator["rows"][:, 0].tolist()
    for round_, draw in enumerate(rounds):
        gave, lost = {}, []
        for silo, (comes, loses, counts) in zip("abc", draw, strict=True):
            if comes:
                gave[silo] = ([random.uniform(-3, 3) for _ in range(3)], tuple(counts))
                lost += [silo] if loses else []
        arriving = {s: g for s, g in gave.items() if s not in lost}
        if not arriving:
            continue
        found, last = bench.play(round_, gave, lost), last | arriving
        for s in range(3):
            held = [values[s] for values, counts in last.values() if counts[s]]
            expected[s] = statistics.mean(held) if held else expected[s]
        assert found == pytest.approx(expected, abs=2e-5)


def test_stale_inclusive_equals_the_paper_at_full_participation(make_shards):
    one, other = new_job(), new_job({"stale_inclusive": True})
    mine, theirs = simulate(one, make_shards(one)), simulate(other, make_shards(other))
    assert torch.allclose(mine.coordinator["rows"], theirs.coordinator["rows"], atol=1e-5)
    for silo in one.silos:
        head, same = mine.states[silo].parts["classifier"], theirs.states[silo].parts["classifier"]
        assert torch.allclose(head["weight"], same["weight"], atol=1e-4)


# Networks and extractors.


@pytest.mark.parametrize(
    ("name", "parameters", "mebibytes"),
    [
        ("fedssa-cnn-1", 2_621_558, 10.00),
        ("fedssa-cnn-2", 1_815_142, 6.92),
        ("fedssa-cnn-3", 1_320_558, 5.04),
        ("fedssa-cnn-4", 1_060_358, 4.04),
        ("fedssa-cnn-5", 670_058, 2.56),
    ],
)
def test_sizes_of_table_3(name, parameters, mebibytes):
    with torch.device("meta"):
        parts = NETWORKS[name].build((3, 32, 32), 10, "none")
        assert parts["classifier"](parts["extractor"](torch.empty(2, 3, 32, 32))).shape == (2, 10)
        small = NETWORKS[name].build((1, 28, 28), 10, "none")
        assert small["extractor"](torch.empty(2, 1, 28, 28)).shape == (2, 500)
    count = sum(p.numel() for part in parts.values() for p in part.parameters())
    assert count == parameters
    assert count * 4 / 2**20 == pytest.approx(mebibytes, abs=0.005)


@pytest.mark.parametrize("name", DIGITS)
@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 9, 12)])
def test_small_networks_end_in_one_width(name, shape):
    parts = build(ModelOptions(name=name, classes=10, input=shape), 7)
    assert parts["extractor"](torch.zeros(2, *shape)).shape == (2, 64)


def test_extractors_are_dealt_in_job_order_below_one_header():
    method = new_job({"extractors": list(DIGITS)}, silos=["z", "b", "y", "a"]).method()
    states = [initial_state(method, silo) for silo in method.setting.silos]
    layers = [sum(name.endswith("weight") for name in s.parts["extractor"]) for s in states]
    assert layers == [3, 4, 2, 3]
    assert all(torch.equal(s.parts["classifier"]["weight"], method.initial[:, :-1]) for s in states)
    assert torch.equal(
        states[0].parts["extractor"]["fc1.weight"], states[3].parts["extractor"]["fc1.weight"]
    )


def test_the_job_s_own_model_as_the_only_extractor_changes_nothing(make_shards):
    one, other = new_job(rounds=2), new_job({"extractors": ["digits-cnn-a"]}, rounds=2)
    assert simulate(one, make_shards(one)).history == simulate(other, make_shards(other)).history


# Bad input.


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"min_holders": 4}, "min_holders = 4, but there are 3 silos; lower it"),
        ({"min_holders": 2, "m1": False}, "m1 = false averages over all; leave min_holders out"),
        ({"mu0": 1.0}, "did you mean 'mu_0'"),
        ({"extractors": ["digits-cnn-z"]}, "no such model: digits-cnn-z; known: lenet5"),
        (
            {"extractors": ["digits-cnn-a", "lenet5"]},
            "extractor 'lenet5' needs at least 16 x 16 pixels",
        ),
    ],
)
def test_bad_options_are_refused_at_admission(options, complaint):
    with refused(complaint):
        new_job(options).document()


def test_more_holders_than_a_round_draws():
    """They are refused, unless silos that are away count."""
    drawn = {"silos": list("abcd"), "participation": 0.5}  # two of four
    assert new_job({"min_holders": 2}, **drawn).document()
    assert new_job({"min_holders": 4, "stale_inclusive": True}, **drawn).document()
    with refused(r"min_holders = 3, but a round draws 2 of 4 silos.*stale_inclusive = true"):
        new_job({"min_holders": 3}, **drawn).document()
    with refused("min_holders = 5, but there are 4 silos"):
        new_job({"min_holders": 5, "stale_inclusive": True}, **drawn).document()


def test_extractors_of_another_width_are_refused():
    job = new_job({"extractors": ["fedssa-cnn-5", "lenet5"]}, model="fedssa-cnn-1")
    with refused("extractor 'lenet5' ends in 84 units, the job's model in 500"):
        job.document()
    new_job(
        {"extractors": [f"fedssa-cnn-{i}" for i in range(1, 6)]}, model="fedssa-cnn-5"
    ).document()


# Whole jobs.


def test_the_training_of_the_authors_code_reaches_the_optimiser():
    options = {"clip": 50.0, "mu_0": 0.5, "t_stable": 45}
    code = {"lr": 0.005, "momentum": 0.9, "weight_decay": 5e-5, "batch_size": 512, "epochs": 10}
    method = new_job(options, training=code).method()
    (stage,) = method.stages(initial_state(method, "a"), facts())
    o = stage.optimiser
    assert (o.lr, o.momentum, o.weight_decay, o.clip) == (0.005, 0.9, 5e-5, 50.0)
    assert (stage.trains, stage.epochs) == (("extractor", "classifier"), 10)
    (paper,) = new_job(training={"lr": 0.01}).method().stages(initial_state(method, "a"), facts())
    assert paper.optimiser == replace(o, lr=0.01, momentum=0.0, weight_decay=0.0, clip=None)
