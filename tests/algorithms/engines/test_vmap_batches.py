import numpy as np
import pytest
import torch

from staddle.algorithms.engines.vmap_batches import together

CPU = torch.device("cpu")


def drawn(seed):
    """Silos with up to five pieces of one to six records, places of their own."""
    rng = np.random.default_rng(seed)
    counts = sorted(rng.integers(0, 6, rng.integers(1, 7)).tolist(), reverse=bool(seed % 2))
    return [
        [np.arange(n) + 100 * silo + 10 * step for step, n in enumerate(rng.integers(1, 7, count))]
        for silo, count in enumerate(counts)
    ]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_each_piece_is_in_one_call_in_its_turn(seed, exact):
    pieces = drawn(seed)
    found = [[] for _ in pieces]
    for batch in together(pieces, exact, CPU):
        rows = torch.arange(len(pieces))[batch.rows].tolist()
        lengths = (
            [batch.places.shape[1]] * len(rows) if batch.lengths is None else batch.lengths.tolist()
        )
        assert len(set(rows)) == len(rows) == len(batch.places)
        assert not exact or batch.lengths is None
        assert batch.shortest[1] == min(lengths) == lengths[batch.shortest[0]]
        for row, places, length in zip(rows, batch.places.tolist(), lengths, strict=True):
            assert batch.step == len(found[row])
            assert set(places[length:]) <= {places[0]}
            found[row].append(places[:length])
        if batch.lengths is not None:
            assert batch.counts.sum(1).tolist() == lengths
            assert all(sorted(row, reverse=True) == row for row in batch.counts.int().tolist())
    assert found == [[piece.tolist() for piece in own] for own in pieces]


def test_silos_go_together_as_far_as_they_can():
    sizes = [[4, 4, 2], [4, 3], [4, 2], []]
    pieces = [[np.arange(n) for n in own] for own in sizes]
    filled, exact = (together(pieces, one, CPU) for one in (False, True))
    assert [len(batch.places) for batch in filled] == [3, 3, 1]
    expected = [(0, (3, 4)), (1, (1, 2)), (1, (1, 3)), (1, (1, 4)), (2, (1, 2))]
    assert [(batch.step, batch.places.shape) for batch in exact] == expected
    assert all(isinstance(batch.rows, slice) for batch in filled)  # the first ones: no copies


def test_nothing_to_do_is_no_call():
    assert together([], False, CPU) == together([[], []], True, CPU) == []
