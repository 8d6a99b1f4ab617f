import numpy as np
import pytest
from secure_sums import Run, attempt, frame, group, names

from staddle.errors import LocalError
from staddle.security import masked_sum
from staddle.security.masked_sum import Given
from staddle.security.ratio_rows import hide_rows, shown_rows
from staddle.security.round_spec import specify

TEN = names(10)
ROWS = group("header", 12, rows=4, ring=64, weights="private", weight_most=50, weight_least=1)


def test_enough_holders_stay_whoever_drops_out_and_colludes():
    """Ten silos, threshold 7, one colluder: 3 + 3 + 1 = 7 holders leave three honest ones after three are lost."""
    spec = attempt(10)
    assert shown_rows(spec, TEN, np.array([6.0, 6.99, 7.0, 10.0]), 3).tolist() == [False, False, True, True]
    assert shown_rows(spec, TEN[:7], np.array([3.0, 4.0]), 3).tolist() == [False, True]
    with pytest.raises(LocalError, match="not finite"):
        shown_rows(spec, TEN, np.array([np.nan]), 3)


def test_hidden_rows_are_zeros_in_values_and_weights():
    given = Given(np.arange(1.0, 13.0), np.array([2.0, 3.0, 0.0, 5.0]))
    hidden = hide_rows(ROWS, given, np.array([True, False, True, False]))
    assert hidden.values.tolist() == [1, 2, 3, 0, 0, 0, 7, 8, 9, 0, 0, 0]
    assert hidden.weights.tolist() == [2, 0, 0, 0]
    assert given.values.tolist() == list(range(1, 13))  # the silo's own copy stays
    with pytest.raises(LocalError, match="fit no ratio"):
        hide_rows(ROWS, given, np.array([True]))
    with pytest.raises(LocalError, match="fit no ratio"):
        hide_rows(ROWS, Given(given.values), np.array([True] * 4))


def test_a_count_round_and_then_the_ratio():
    """Class 1 is at two of ten silos: its row never leaves; the others come back as weighted means over survivors."""
    random = np.random.default_rng(0)
    counts = {silo: random.integers(1, 50, 4).astype(float) for silo in TEN}
    for silo in TEN[2:]:
        counts[silo][1] = 0
    own = frame(purpose="presence", groups=(group("presence", 4, clip_exponent=0),))
    presence = {silo: [Given((counts[silo] > 0).astype(np.float64))] for silo in TEN}
    holders = Run(specify(own, TEN, 0), presence, own=own).finish().opened[0].total
    assert holders.tolist() == [10, 2, 10, 10]
    own = frame(groups=(ROWS,))
    spec = specify(own, TEN, 0)
    shown = shown_rows(spec, TEN, holders, 3)
    values = {silo: random.uniform(-8, 8, 12) for silo in TEN}
    sent = {silo: [hide_rows(ROWS, Given(values[silo], counts[silo]), shown)] for silo in TEN}
    run = Run(spec, sent, own=own, drops={TEN[4]: "SendHeader"}).finish()
    found, left = run.opened[0], [silo for silo in TEN if silo != TEN[4]]
    assert found.weight.tolist() == pytest.approx([sum(counts[s][r] for s in left) * (r != 1) for r in range(4)])
    expected = sum(np.repeat(counts[s], 3) * values[s] for s in left) / np.repeat(sum(counts[s] for s in left), 3)
    expected[3:6] = 0
    assert found.mean(np.float64) == pytest.approx(expected, abs=1e-9)
    assert isinstance(found, masked_sum.Opened)
