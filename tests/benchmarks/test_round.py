import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

pytestmark = pytest.mark.skipif(
    not BENCHMARKS.is_dir(), reason="the wheel's tests run without the repository"
)


def test_blind_rounds_of_silos_whose_names_are_not_sorted(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import round as measured  # noqa: PLC0415 it is there in a checkout only

    try:
        found = measured.our_rounds(["silo-2", "silo-10", "silo-9", "silo-1"], 2, 32, blind=True)
        assert len(found.took) == 1
        assert found.gate > 0
    finally:
        del sys.modules["round"]
