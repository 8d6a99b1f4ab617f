import sys
from argparse import Namespace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

pytestmark = pytest.mark.skipif(
    not BENCHMARKS.is_dir(), reason="the wheel's tests run without the repository"
)

OPTIONS = Namespace(device="cpu", precision="float32", silos=2, repeats=1)


def test_the_forms_of_each_convolution_are_timed(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import convolutions  # noqa: PLC0415 it is there in a checkout only

    try:
        found = convolutions.shapes("lenet5")
        expected = [(6, (32, 3, 32, 32)), (16, (32, 6, 14, 14))]
        assert [(leaf.out_channels, tuple(shape)) for leaf, shape in found] == expected
        leaf, shape = found[1]
        times = convolutions.measured(leaf, shape, OPTIONS)
        assert list(times) == ["grouped", "unfolded", "looped"]
        assert all(seconds > 0 for both in times.values() for seconds in both)
    finally:
        del sys.modules["convolutions"]
