import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

pytestmark = pytest.mark.skipif(
    not BENCHMARKS.is_dir(), reason="the wheel's tests run without the repository"
)


def test_all_silos_of_one_process_take_part_in_each_round(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import many_silos  # noqa: PLC0415 it is there in a checkout only

    try:
        found = many_silos.cost(5, 3, 0.1)
        assert found.cpu > 0
        assert found.per_silo == found.cpu / 5
        double = many_silos.Cost(10, 4 * found.cpu)
        assert many_silos.told([found, double]).endswith("2.00 times that of 5\n")
    finally:
        del sys.modules["many_silos"], sys.modules["round"]
