"""Each row of the table of faults, with few seeds; benchmarks/soak.py draws new ones for hours."""

import time

import pytest
from faults.table import AREAS, limited, rows


@pytest.mark.parametrize(
    ("name", "seed"), [(name, seed) for name, row in rows().items() for seed in row.seeds]
)
def test_what_must_hold_holds(tmp_path, name, seed):
    rows()[name].run(tmp_path, seed)


def test_every_area_has_rows():
    assert {row.area for row in rows().values()} == set(AREAS)


def test_a_row_that_waits_for_ever_falls():
    with pytest.raises(TimeoutError, match=r"not over within 0\.05 s"), limited(0.05):
        time.sleep(60)
