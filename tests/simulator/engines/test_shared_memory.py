import errno
import os

import pytest
import torch
from support.refusals import refused

from staddle.algorithms.data.dataset import Dataset
from staddle.algorithms.engines.engine import Records
from staddle.simulator.engines import shared_memory
from staddle.simulator.engines.shared_memory import mapped, written


def data(n, first=0.0):
    return Dataset(
        torch.arange(n * 15.0).reshape(n, 1, 3, 5) + first,
        torch.arange(n),
        ids=tuple("abcdefgh"[:n]),
    )


RECORDS = {"a": Records(data(3), data(2, 0.5), data(1)), "ö": Records(data(5), data(1))}


def test_what_is_written_is_mapped_but_for_what_no_training_looks_at():
    file, table = written(RECORDS)
    with file:
        found = mapped(os.dup(file.fileno()), table)
    assert list(found) == list(RECORDS)
    assert found["ö"].validation is None
    for silo, own in RECORDS.items():
        for side in ("train", "test", "validation"):
            if (one := getattr(own, side)) is not None:
                other = getattr(found[silo], side)
                assert torch.equal(other.x, one.x)
                assert torch.equal(other.y, one.y)
                assert other.ids is None
                assert other.x.data_ptr() % 64 == other.y.data_ptr() % 64 == 0


def test_records_are_written_in_order_and_held_once_where_silos_share_them():
    turned = data(4).x.transpose(2, 3)
    file, table = written({"a": Records(Dataset(turned, torch.arange(4)), data(1))})
    with file:
        assert torch.equal(mapped(os.dup(file.fileno()), table)["a"].train.x, turned)
    common = data(8)
    file, table = written({silo: Records(data(1), common) for silo in "abcdef"})
    with file:
        found = mapped(os.dup(file.fileno()), table)
    assert table < 2 * common.x.nbytes + 6 * 256
    assert all(torch.equal(own.test.x, common.x) for own in found.values())


@pytest.mark.parametrize(
    "y",
    [
        torch.tensor([0.5, -2.0, 7.25]),
        torch.arange(6.0).reshape(3, 2),
        torch.eye(3, dtype=torch.int64),
    ],
    ids=["numbers", "times and events", "labels"],
)
def test_what_is_true_of_a_record_keeps_its_dtype_and_shape(y):
    own = Dataset(data(3).x, y)
    file, table = written({"a": Records(own, own)})
    with file:
        found = mapped(os.dup(file.fileno()), table)["a"].train
    assert (found.y.dtype, found.y.shape) == (y.dtype, y.shape)
    assert torch.equal(found.y, y)
    assert torch.equal(found.x, own.x)


def test_what_one_process_writes_no_other_sees():
    file, table = written(RECORDS)
    with file:
        one, other = (mapped(os.dup(file.fileno()), table) for _ in range(2))
    one["a"].train.x.zero_()
    assert torch.equal(other["a"].train.x, RECORDS["a"].train.x)


def test_memory_that_runs_out_is_said(monkeypatch):
    class Full:
        def tell(self):
            return 0

        def write(self, _):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shared_memory, "_memory", Full)
    with refused(r"records of 2 silos, 0 MB, cannot be held once more .* No space left .* one"):
        written(RECORDS)
