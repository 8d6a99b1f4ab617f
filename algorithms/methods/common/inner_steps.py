"""Inner steps: the job's model at other parameters, the task's loss there, and its gradient.

``parts`` hold the model as ``extractor`` and ``classifier``; ``at`` are parameters of both, by part
and name.
"""

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor
from torch.func import grad, jvp

from ...course import Parts
from ...exchange.parts import Tensors
from ...models.functional import called_with, mapped, on_trial, parameters_of
from ...numerics.devices import uncast
from ...tasks.task import Task
from .second_model import MODEL

Point: TypeAlias = Mapping[str, Tensors]


def point_of(parts: Parts) -> dict[str, dict[str, Tensor]]:
    """The model's own parameters, by which a loss can be differentiated.

    They are not copies, so gradients reach the model through them.
    """
    return {part: parameters_of(parts[part]) for part in MODEL}


def logits_at(parts: Parts, at: Point, x: Tensor) -> Tensor:
    """Logits [B, classes] of the model at these parameters; buffers are the parts' own.

    ``x`` is a batch [B, …]; ``at`` has parameters of both parts.
    """
    extractor, classifier = MODEL
    features = called_with(parts[extractor], at[extractor], x)
    return called_with(parts[classifier], at[classifier], features)


def losses_at(task: Task, parts: Parts, at: Point, x: Tensor, y: Tensor) -> Tensor:
    """The task's losses [B] of the model at these parameters."""
    return task.losses(logits_at(parts, at, x), y)


def gradient_at(task: Task, parts: Parts, at: Point, x: Tensor, y: Tensor) -> Point:
    """The gradient of the mean loss over a batch, by these parameters.

    No buffer changes. The result has the structure of ``at``.
    """

    def mean(at: Point) -> Tensor:
        # ``on_trial`` copies buffers: batch norm would change them, which ``grad`` does not allow.
        own = {part: on_trial(parts[part]) for part in MODEL}
        return losses_at(task, own, at, x, y).mean()

    gradient: Point = grad(mean)(at)
    return gradient


def curvature_at(
    task: Task, parts: Parts, at: Point, direction: Point, x: Tensor, y: Tensor
) -> Point:
    """The Hessian of the mean loss over a batch, at these parameters, times a direction.

    No buffer changes.
    """
    # Forward over reverse: torch 2.13 computes a wrong gradient of a gradient through batch norm
    # under ``vmap``. Nor has every layer a second derivative in another type or memory layout.
    with uncast(x.device):
        product: Point = jvp(
            lambda at: gradient_at(task, parts, at, x, y), (_laid_out(at),), (_laid_out(direction),)
        )[1]
    return product


def _laid_out(at: Point) -> Point:
    """Copies whose channels lie first in memory."""
    # A single channel that lies last counts as contiguous too, but results computed from it do not.
    return mapped(at, lambda value: value.clone(memory_format=torch.contiguous_format))


def sloped(at: Point, direction: Point) -> Tensor:
    """A scalar, 0, whose gradient by these parameters is the direction.

    Added to a loss, it leaves the value and adds the direction to the gradient.
    """
    slopes = []
    for part, named in at.items():
        for name, value in named.items():
            slopes.append(((value - value.detach()) * direction[part][name]).sum())
    return torch.stack(slopes).sum()


def stepped(at: Point, gradient: Point, lr: float) -> dict[str, dict[str, Tensor]]:
    """The parameters after a step of gradient descent.

    ``at`` is not changed, and the result can be differentiated by it.
    """
    after: dict[str, dict[str, Tensor]] = {}
    for part, named in at.items():
        slope = gradient[part]
        after[part] = {name: value - lr * slope[name] for name, value in named.items()}
    return after


def detached(at: Point) -> dict[str, dict[str, Tensor]]:
    """The same numbers, by which nothing is differentiated."""
    return mapped(at, Tensor.detach)
