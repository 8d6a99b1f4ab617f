"""Inner steps: the job's model at parameters that are not its own, its cross-entropy there, and the
gradient of that.

``parts`` hold the model as ``extractor`` and ``classifier``; ``at`` are parameters of both, by part
and name.
"""

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor
from torch.func import grad, jvp
from torch.nn.functional import cross_entropy

from ...course import Parts
from ...exchange.parts import Tensors
from ...models.functional import called_with, on_trial, parameters_of
from ...numerics.devices import uncast
from .second_model import MODEL

Point: TypeAlias = Mapping[str, Tensors]


def point_of(parts: Parts) -> dict[str, dict[str, Tensor]]:
    """The parameters that the model has, as the loss is to be differentiated by them."""
    return {part: parameters_of(parts[part]) for part in MODEL}


def logits_at(parts: Parts, at: Point, x: Tensor) -> Tensor:
    """Logits [B, classes] of the model at these parameters; buffers are the parts' own."""
    extractor, classifier = MODEL
    features = called_with(parts[extractor], at[extractor], x)
    return called_with(parts[classifier], at[classifier], features)


def losses_at(parts: Parts, at: Point, x: Tensor, y: Tensor) -> Tensor:
    """Their cross-entropy [B]."""
    return cross_entropy(logits_at(parts, at, x), y, reduction="none")


def gradient_at(parts: Parts, at: Point, x: Tensor, y: Tensor) -> Point:
    """The gradient of the mean cross-entropy over a batch, by these parameters.

    No buffer changes.
    """

    def mean(at: Point) -> Tensor:
        return losses_at({part: on_trial(parts[part]) for part in MODEL}, at, x, y).mean()

    gradient: Point = grad(mean)(at)
    return gradient


def curvature_at(parts: Parts, at: Point, direction: Point, x: Tensor, y: Tensor) -> Point:
    """The Hessian of the mean cross-entropy over a batch, at these parameters, times a direction.

    No buffer changes.

    Forward over reverse: what torch 2.13 gives for a gradient's gradient through batch norm is
    wrong under ``vmap``.
    """
    # nor has every layer a second derivative in another type, or laid out otherwise
    with uncast(x.device):
        product: Point = jvp(
            lambda at: gradient_at(parts, at, x, y), (_laid_out(at),), (_laid_out(direction),)
        )[1]
    return product


def _laid_out(at: Point) -> Point:
    """Copies, channels first: one channel that lies last counts as contiguous too, and what comes
    of it is not.
    """
    first = torch.contiguous_format
    return {
        part: {name: value.clone(memory_format=first) for name, value in of.items()}
        for part, of in at.items()
    }


def sloped(at: Point, direction: Point) -> Tensor:
    """A scalar, 0, whose gradient by these parameters is the direction."""
    slopes = [
        ((value - value.detach()) * direction[p][k]).sum()
        for p, of in at.items()
        for k, value in of.items()
    ]
    return torch.stack(slopes).sum()


def stepped(at: Point, gradient: Point, lr: float) -> dict[str, dict[str, Tensor]]:
    """The parameters after a step of gradient descent."""
    return {
        part: {name: value - lr * gradient[part][name] for name, value in named.items()}
        for part, named in at.items()
    }


def detached(at: Point) -> dict[str, dict[str, Tensor]]:
    """The same numbers, by which nothing is differentiated."""
    return {
        part: {name: value.detach() for name, value in named.items()} for part, named in at.items()
    }
