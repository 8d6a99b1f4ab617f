import pytest
import torch
from support.refusals import refused

from staddle.algorithms.engines.engine import Records
from staddle.algorithms.engines.vmap_batches import Resident


def test_each_record_lies_there_once(make_data):
    shared = make_data(6, 9)
    records = {
        "a": Records(make_data(5, 1), shared, make_data(2, 2)),
        "b": Records(make_data(3, 3), shared),
    }
    resident = Resident(records, "cpu")
    assert len(resident.x) == len(resident.y) == 5 + 6 + 2 + 3
    for own in records.values():
        for data in (own.train, own.test, own.validation):
            places = resident.places(data)
            assert len(places) == (0 if data is None else len(data))
            if data is not None:
                assert torch.equal(resident.x[places.start : places.stop], data.x)
                assert torch.equal(resident.y[places.start : places.stop], data.y)


@pytest.mark.parametrize("device", ["nowhere", "cuda:99"])
def test_a_device_that_is_not_there_is_named(make_data, device):
    with refused(rf"device '{device}' cannot hold the 8 records of all silos: .*; choose"):
        Resident({"a": Records(make_data(5), make_data(3))}, device)
