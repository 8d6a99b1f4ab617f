"""What one record changes of all sums that cross, in every task, against the sensitivity."""

import pytest
import torch
from support.counted import tallied
from support.other_tasks import TASKS, document, records

from staddle.algorithms.job.job import Job, JobFile

ODD = [float("nan"), float("inf"), -float("inf"), 1e38, -1e38, 0.0]


def sums_of(job, outputs, y):
    """All sums of both models, in units, by place."""
    counting = job.counting
    tallies = [tallied(counting, own, y) for own in outputs]
    return {
        (part, name): value.double() / counting.unit(part, name)
        for part, contribution in counting.contributions(*tallies).items()
        for name, value in contribution.tensors.items()
    }


@pytest.mark.parametrize("kind", TASKS)
def test_one_record_changes_no_more_than_the_sensitivity(kind):
    job = Job.from_file(JobFile.model_validate(document(kind)), "test")
    y = records(kind, 12, 3).y
    if kind == "regression":
        y[0], y[1] = 1e9, -1e9
    random = torch.Generator().manual_seed(0)
    sides = y.shape[1:] if job.task.dense else ()
    outputs = torch.randn(2, 12, job.model.width, *sides, generator=random) * 4
    outputs[:, :6] = torch.tensor(ODD).reshape(6, 1, *[1] * len(sides))
    whole, largest = sums_of(job, outputs, y), 0.0
    for record in range(12):
        others = torch.arange(12) != record
        less = sums_of(job, outputs[:, others], y[others])
        apart = {place: (whole[place] - less[place]).abs() for place in whole}
        assert max(float(change.max()) for change in apart.values()) <= 1
        largest = max(largest, sum(float(change.square().sum()) for change in apart.values()))
    assert 0 < largest <= job.counting.squared_sensitivity
