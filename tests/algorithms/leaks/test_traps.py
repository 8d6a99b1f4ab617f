"""What a silo looks at before it trains on what came down."""

from math import inf, sqrt

import pytest
import torch

from staddle.algorithms.leaks.traps import (
    Caution,
    LongestSteps,
    TrapError,
    lengthened,
    parallel_rows,
    replaced,
)

BEGAN = {
    "extractor": {"w": torch.zeros(2, 2), "seen": torch.tensor(3)},
    "head": {"b": torch.zeros(3)},
}
TRAINED = {
    "extractor": {"w": torch.tensor([[3.0, 0], [0, 4]]), "seen": torch.tensor(9)},
    "head": {"b": torch.ones(3)},
}
STEPS = LongestSteps(4, {"extractor": 5.0, "head": sqrt(3)})
BOTH = frozenset(BEGAN)


def moved(by, part="extractor"):
    (name,) = [name for name, value in BEGAN[part].items() if value.is_floating_point()]
    value = torch.zeros_like(BEGAN[part][name])
    value.view(-1)[0] = by
    return {**BEGAN, part: {**BEGAN[part], name: value}}


def test_a_step_is_the_euclidean_distance_of_a_part_without_its_counters():
    found = lengthened(None, 4, BEGAN, TRAINED)
    assert (found.round, found.longest) == (4, pytest.approx(STEPS.longest))


def test_the_longest_step_is_kept_and_one_that_is_not_finite_is_none():
    longer = LongestSteps(2, {"extractor": 7.0, "head": 1.0, "gone": 2.0})
    assert lengthened(longer, 4, BEGAN, TRAINED).longest == pytest.approx(
        {"extractor": 7.0, "head": sqrt(3), "gone": 2.0}
    )
    broken = {**TRAINED, "head": {"b": torch.tensor([torch.inf, 0, 0])}}
    assert lengthened(None, 4, BEGAN, broken).longest == pytest.approx(
        {"extractor": 5.0, "head": 0.0}
    )


def test_steps_survive_their_text_and_nothing_else_is_read():
    assert LongestSteps.from_text(STEPS.to_text()) == STEPS
    for bad in ("[]", '{"round": 1}', '{"round": "x", "longest": {}}', "{"):
        with pytest.raises((ValueError, KeyError)):
            LongestSteps.from_text(bad)


@pytest.mark.parametrize(("part", "step"), [("extractor", 5.0), ("head", sqrt(3))])
@pytest.mark.parametrize("rounds", [1, 2])
def test_a_part_moves_by_so_many_of_its_longest_steps_and_no_farther(part, step, rounds):
    caution = Caution(max_step=3.0)
    most = 3 * rounds * step
    caution.check(STEPS, BEGAN, moved(most * 0.999, part), BOTH, STEPS.round + rounds)
    said = f"moves part '{part}' by .*, 3.0 times the longest step .*max_step = 3"
    with pytest.raises(TrapError, match=said):
        caution.check(STEPS, BEGAN, moved(most * 1.001, part), BOTH, STEPS.round + rounds)


def test_what_is_not_replaced_never_trained_or_not_bounded_passes():
    far = moved(1000.0)
    Caution(max_step=3.0).check(STEPS, BEGAN, far, frozenset({"head"}), 5)
    Caution(max_step=3.0).check(None, BEGAN, far, BOTH, 5)
    Caution(max_step=3.0).check(LongestSteps(4, {"extractor": 0.0}), BEGAN, far, BOTH, 5)
    Caution().check(STEPS, BEGAN, far, BOTH, 5)
    for by in (1000.0, torch.nan):
        with pytest.raises(TrapError):
            Caution(max_step=3.0).check(STEPS, BEGAN, moved(by), BOTH, 5)


def test_parts_are_replaced_by_tensors_of_their_own_names():
    delivered = {"model": {"extractor.fc.weight": torch.ones(1)}, "header": {"rows": torch.ones(1)}}
    assert replaced(delivered) == {"extractor"}


def layer(alike, rows=8, width=16):
    drawn = torch.randn(rows, width, generator=torch.Generator().manual_seed(0))
    drawn[:alike] = (
        drawn[0] * torch.arange(1.0, alike + 1)[:, None] * (-1) ** torch.arange(alike)[:, None]
    )
    return drawn


def test_rows_that_are_multiples_of_others_are_counted():
    assert [parallel_rows(layer(alike)) for alike in (1, 2, 5, 8)] == [0, 2, 5, 8]
    assert parallel_rows(layer(5).reshape(8, 1, 4, 4)) == 5  # filters
    assert [parallel_rows(layer(5) * scale) for scale in (1e-30, 1e30)] == [5, 5]
    assert parallel_rows(torch.zeros(8, 16)) == 0
    for other in (layer(8, width=9), torch.ones(16), torch.ones(8, 16, dtype=torch.int64)):
        assert parallel_rows(other) == 0
    assert parallel_rows(layer(3, rows=2500)) == 3  # more than are compared at once
    almost = layer(1)
    almost[1] = almost[0] + 0.2 * almost[0].norm() / almost[2].norm() * almost[2]
    assert parallel_rows(almost) == 0


def test_more_parallel_rows_than_the_silo_had_are_refused():
    def held(alike):
        return {"extractor": {"fc.weight": layer(alike)}}

    caution, parts = Caution(max_parallel=2), frozenset({"extractor"})
    caution.check(None, held(1), held(2), parts, 1)
    caution.check(None, held(6), held(5), parts, 1)  # an architecture that has them
    caution.check(None, held(1), held(5), frozenset(), 1)
    Caution(max_parallel=inf).check(None, held(1), held(5), parts, 1)
    said = r"has 5 rows of extractor\.fc\.weight .* limits\.max_parallel = 2"
    with pytest.raises(TrapError, match=said):
        caution.check(None, held(4), held(5), parts, 1)
