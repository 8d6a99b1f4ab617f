"""Classification: weights, smoothing and focal loss by hand."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from staddle.algorithms.tasks.classification import Classification
from staddle.algorithms.tasks.task import histogram

LOGITS = torch.tensor([[2.0, 0.0, -1.0], [0.0, 0.0, 0.0], [-3.0, 1.0, 0.5], [9.0, -9.0, 0.0]])
Y = torch.tensor([0, 2, 0, 0])


def test_a_job_without_a_task_has_torchs_cross_entropy_bit_by_bit():
    assert torch.equal(
        Classification().losses(LOGITS, Y), cross_entropy(LOGITS, Y, reduction="none")
    )


def test_focal_loss_is_that_of_its_paper_and_keeps_digits_near_one():
    logits = LOGITS.double() * 2  # the last p is 1 - 2e-8
    p = torch.softmax(logits, 1).gather(1, Y[:, None])[:, 0]
    for gamma in (None, 0.5):
        found = Classification(loss="focal", gamma=gamma).losses(logits, Y)
        power = 2.0 if gamma is None else gamma
        wanted = (1 - p) ** power * -p.log()
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)


def test_a_record_that_is_surely_right_has_a_gradient_that_is_a_number():
    logits = torch.tensor([[200.0, 0.0]], requires_grad=True)
    losses = Classification(loss="focal", gamma=0.5).losses(logits, torch.tensor([0]))
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    assert gradient.isfinite().all()


def test_weights_and_smoothing():
    weighted = Classification(class_weights=(1.0, 5.0, 0.5)).losses(LOGITS, Y)
    plain = Classification().losses(LOGITS, Y)
    assert torch.equal(weighted, plain * torch.tensor([1.0, 0.5, 1.0, 1.0]))
    smooth = Classification(label_smoothing=0.3).losses(LOGITS, Y)
    logs = torch.log_softmax(LOGITS, 1)
    wanted = -0.7 * logs.gather(1, Y[:, None])[:, 0] - 0.3 * logs.mean(1)
    torch.testing.assert_close(smooth, wanted)


def test_tables_that_cannot_be_are_told():
    with pytest.raises(ValueError, match="gamma does nothing without"):
        Classification(gamma=1.0)
    with pytest.raises(ValueError, match="label_smoothing does nothing with a focal"):
        Classification(loss="focal", label_smoothing=0.1)
    assert "has 2 numbers, and the model 3 outputs" in Classification(
        class_weights=(1.0, 2.0)
    ).fault(3)
    assert Classification().fault(3) == ""


def test_labels_that_are_no_classes_are_told():
    assert "label 2 in 1 of 4 records" in Classification().records_fault(Y, 2)
    assert "label -1" in Classification().records_fault(Y - 1, 3)
    wrong = Classification().records_fault(Y.float(), 3)
    assert wrong == (
        "y is float32 [N], the job's task takes int64 [N]: a class number per record (data.label"
        " of a CSV table)"
    )
    assert Classification().records_fault(Y, 3) == ""
    assert histogram(Classification(), Y, 4).tolist() == [3, 0, 1, 0]
