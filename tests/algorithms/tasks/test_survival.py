"""DiscreteSurvival: losses against the likelihood written out, concordance against all pairs."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.counted import tallied

from staddle.algorithms.tasks.measures import concordance
from staddle.algorithms.tasks.metrics_table import MetricsTable
from staddle.algorithms.tasks.survival import DiscreteSurvival

TASK = DiscreteSurvival(cuts=(1.0, 2.0, 4.0))


def slow_loss(logits, time, event):
    """The likelihood, interval by interval."""
    hazards = torch.sigmoid(logits.double()).tolist()
    likelihood, start = 1.0, 0.0
    for hazard, end in zip(hazards, TASK.cuts, strict=True):
        if event and start < time <= end:
            likelihood *= hazard
            break
        if time > (end if event else (start + end) / 2):
            likelihood *= 1 - hazard
        start = end
    return -np.log(likelihood)


CASES = [(0.5, 1), (1.0, 1), (1.1, 1), (4.0, 1), (9.0, 1), (0.4, 0), (0.6, 0), (1.0, 0), (1.5, 0),
    (1.6, 0), (3.0, 0), (3.1, 0), (9.0, 0)]  # fmt: skip


def test_losses_are_the_likelihood_written_out():
    logits = torch.randn(len(CASES), 3, generator=torch.Generator().manual_seed(0))
    y = torch.tensor(CASES)
    wanted = [slow_loss(*own) for own in zip(logits, y[:, 0], y[:, 1], strict=True)]
    assert TASK.losses(logits, y).tolist() == pytest.approx(wanted, rel=1e-5)
    stacked = torch.func.vmap(TASK.losses)(logits[:12].view(3, 4, 3), y[:12].view(3, 4, 2))
    torch.testing.assert_close(stacked.view(-1), TASK.losses(logits, y)[:12])


def test_survival_is_the_product_of_what_is_left():
    logits = torch.tensor([[0.0, 1.0, -2.0]])
    left = torch.cumprod(1 - torch.sigmoid(logits), 1)
    torch.testing.assert_close(TASK.log_survival(logits).exp(), left)
    assert TASK.interval(torch.tensor([0.5, 1.0, 1.5, 4.0, 4.1])).tolist() == [0, 0, 1, 2, 3]


def slow_concordance(records):
    """Won, tied and all pairs (event, interval, bin)."""
    won = tied = pairs = 0
    for one, other in itertools.permutations(records, 2):
        if one[0] and other[1] > one[1]:
            pairs += 1
            won += one[2] > other[2]
            tied += one[2] == other[2]
    return won, tied, pairs


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=25
    )
)
def test_concordance_counts_all_pairs(records):
    table = np.zeros((2, 4, 5), np.int64)
    for event, interval, place in records:
        table[int(event), interval, place] += 1
    won, tied, pairs = slow_concordance(records)
    found = concordance(table)
    if not pairs:
        assert found is None
        return
    assert (found.least, found.value, found.most) == pytest.approx(
        (won / pairs, (won + tied / 2) / pairs, (won + tied) / pairs)
    )


def counted(logits, y, bins=64, pieces=1):
    counting = TASK.counting(3, MetricsTable(risk_bins=bins), noised=False)
    return counting, tallied(counting, logits, y, pieces)


def drawn(n=120, seed=2):
    rng = np.random.default_rng(seed)
    risk = rng.normal(size=n)
    time = rng.exponential(2 * np.exp(-risk)).clip(1e-3, 6)
    y = torch.from_numpy(np.stack([time, time < 6], 1).astype(np.float32))
    return torch.from_numpy((risk[:, None] - 1 + rng.normal(size=(n, 3)) / 2).astype(np.float32)), y


def test_counts_of_a_model():
    logits, y = drawn()
    counting, tally = counted(logits, y, pieces=4)
    assert tally.risks.sum() == tally.records == 120
    assert tally.risks.shape == (2, 4, 1024)
    assert tally.risks[1].sum() == int(y[:, 1].sum())
    assert tally.said()["loss"] == pytest.approx(float(TASK.losses(logits, y).mean()), rel=1e-4)
    # the same order as by the risks themselves, but for ties of a bin
    risk = 1 - TASK.log_survival(logits.double())[:, -1].exp()
    records = list(zip(y[:, 1] > 0, TASK.interval(y[:, 0]), risk, strict=True))
    won, _, pairs = slow_concordance(records)
    bounds = tally.said()["concordance"]
    assert bounds["least"] <= won / pairs <= bounds["most"]
    assert tally.score == bounds["value"] > 0.6
    assert tally.baseline == 0.5
    halves = [counted(logits[own], y[own])[1] for own in (slice(50), slice(50, 120))]
    assert counting.pooled(halves) == tally
    assert halves[0] != tally


def test_what_crosses_says_the_same_and_contradictions_are_told():
    counting, tally = counted(*drawn())
    given = counting.contributions(tally, tally)
    assert [*given] == ["risks", "metrics"]
    assert counting.squared_sensitivity == 1 + 2 + 2
    sums = {"tested": 120, **{k: int(v) for k, v in given["metrics"].tensors.items()}}
    sums |= {f"risks.{model}": table.tolist() for model, table in given["risks"].tensors.items()}
    found = counting.of_sums(sums)["trained"]
    assert found["loss"] == tally.said()["loss"]
    # The silo's own bins are finer than those that cross, and within their bounds.
    own, crossed = tally.said()["concordance"], found["concordance"]
    assert crossed["least"] <= own["least"] < own["most"] <= crossed["most"]
    crossing = given["risks"].tensors["trained"].numpy()
    assert (crossing == tally.risks.reshape(2, 4, 64, 16).sum(3)).all()
    uneven, same = counted(*drawn(), bins=7)
    table = uneven.contributions(same, same)["risks"].tensors["trained"].numpy()
    starts = [math.ceil(k * 1024 / 7) for k in range(8)]
    for k in range(7):
        assert (table[..., k] == same.risks[..., starts[k] : starts[k + 1]].sum(2)).all()
    values = {(p, t): v.clone() for p, part in given.items() for t, v in part.tensors.items()}
    assert counting.fault(values, 120) == ""
    table = values["risks", "trained"]
    event, interval, place = table.nonzero()[0].tolist()
    table[event, interval, place] -= 1
    assert "does not count each of 120 test records once" in counting.fault(values, 120)
    table[1 - event, interval, place] += 1
    assert "has other records by interval" in counting.fault(values, 120)


def test_a_table_that_does_not_cross_is_counted_all_the_same():
    logits, y = drawn()
    counting, tally = counted(logits, y, bins=0)
    assert [part.name for part in counting.parts()] == ["metrics"]
    assert [*counting.contributions(tally, tally)] == ["metrics"]
    assert tally.score > 0.6
    one = counted(logits[:1], y[:1])[1]  # no pair
    assert (one.score, "concordance" in one.said()) == (0.5, False)


@pytest.mark.parametrize(
    ("y", "why"),
    [
        ([[1.0, 0], [0.0, 1]], "the time of record 1 is not a number above 0"),
        ([[1.0, 0], [float("nan"), 1]], "the time of record 1 is not"),
        ([[1.0, 0.5], [2.0, 1]], "the event of record 0 is neither 0 nor 1"),
        ([1.0, 2.0], r"y is float32 \[N\], the job's task takes float32 \[N, 2\]"),
    ],
)
def test_records_without_times_are_told(y, why):
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(TASK.records_fault(torch.tensor(y), 3))


def test_cuts_rise_and_are_as_many_as_outputs():
    with pytest.raises(ValueError, match="2 follows 2; give the ends in order"):
        DiscreteSurvival(cuts=(2.0, 2.0))
    assert "3 intervals, and the model 4 outputs" in TASK.fault(4)
    assert TASK.strata(torch.tensor([[1.0, 1], [2.0, 0]])).tolist() == [1, 0]
