import pytest

from staddle.coordinator.jobs.blind_collector import _due
from staddle.errors import RefusedError
from staddle.proto import tensor_pb2 as tensor


@pytest.mark.parametrize("size", [0, 15, 17, 2**40])
def test_masked_and_padded_words_are_exactly_those_that_are_due(size):
    assert _due("a", tensor.Manifest(size=16), 16, "masked") == 16
    with pytest.raises(RefusedError, match=f"declared {size} bytes of masked words") as caught:
        _due("a", tensor.Manifest(size=size), 16, "masked")
    assert caught.value.code == "MANIFEST"
