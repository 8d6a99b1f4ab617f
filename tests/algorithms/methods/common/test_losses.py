import torch

from staddle.algorithms.methods.common.losses import centre, proximal


def test_the_term_and_its_gradient_by_hand():
    held = {
        "one": {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(0.0)},
        "two": {"a": torch.tensor([[3.0]])},
    }
    near = centre(
        {
            "one": {"a": torch.tensor([0.0, 4.0]), "b": torch.tensor(0.0)},
            "two": {"a": torch.tensor([[0.0]])},
        }
    )
    assert near.keys() == {"one.a", "one.b", "two.a"}
    leaf = held["one"]["a"].requires_grad_()
    term = proximal(3.0, held, near)
    assert term.item() == 1.5 * (1 + 4 + 9)
    assert torch.autograd.grad(term, [leaf])[0].tolist() == [3.0, -6.0]
