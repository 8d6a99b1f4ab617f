"""The local loop for many silos at once: their values lie along a first axis, and each call of the model is of all.

The modules are of one architecture, the stages of one course (alike.py). Silos do not meet: the losses of each are its
own, so the gradient of the sum of their means is each one's own, and one backward pass gives all. A silo that has no
batch in a step is left out of the step: its parameters, momentum and buffers stand still. Batches of fewer records
are filled up with records that count nothing, where a record's output depends on no other; elsewhere silos with as many
records go together. So each silo gets what ``training`` gives it, but for the last bits of floating-point sums.

Modules hold no values, they lie on torch's device "meta"; and nothing waits for the device between two steps.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import LocalError
from .exchange import Tensors
from .method import Method, Optimiser, Parts, Stage
from .training import EVALUATION_CHUNK, Modules, mirror_step, sgd_step

Values: TypeAlias = dict[str, dict[str, Tensor]]  # by part and name, [S, …] each
Pieces: TypeAlias = Sequence[NDArray[np.int64]]  # of one silo: the places of the records of each call, in turn
Rows: TypeAlias = slice | Tensor

FILLED_CHUNK = 128  # records of a silo at once where the rest are filled up
LOSS_TOLERANCE = 1e-3  # by which a batch's losses may differ, of the largest, where other records are added to it


@dataclass(frozen=True, eq=False)
class Silos:
    """The values of S silos of one architecture, and the device's records x [N, …], y [N] of all silos."""

    modules: Modules
    values: Values
    x: Tensor
    y: Tensor

    @property
    def count(self) -> int:
        """S."""
        return next(len(tensor) for named in self.values.values() for tensor in named.values())


@dataclass(frozen=True, eq=False)
class Batch:
    """One call: the silos ``rows``, the places of their records [m, L], and how many count where not all do [m]."""

    step: int  # how many of these silos' pieces came before
    rows: Rows
    places: Tensor
    lengths: Tensor | None
    shortest: tuple[int, int]  # (a silo of ``rows``, how many of its records count)


def called(module: nn.Module, values: Mapping[str, Tensor], *args: object) -> Tensor:
    """The module as a function of values that stand for its own."""
    output: Tensor = functional_call(module, dict(values), args)
    return output


def parts_of(modules: Modules, values: Mapping[str, Mapping[str, Tensor]]) -> Parts:
    """The parts of one silo as a method calls them."""
    return {part: partial(called, module, values[part]) for part, module in modules.items()}


def couples(modules: Modules) -> bool:
    """Whether a record's output depends on the others of its batch, in the modes that the modules are in."""
    leaves = (leaf for module in modules.values() for leaf in module.modules() if isinstance(leaf, _BatchNorm))
    return any(leaf.training or leaf.running_mean is None for leaf in leaves)


def together(pieces: Sequence[Pieces], exact: bool, device: torch.device) -> list[Batch]:
    """The calls that go through the pieces of all silos; where it is ``exact``, of equally long pieces each."""
    groups: list[tuple[int, list[int]]] = []
    for step in range(max(map(len, pieces), default=0)):
        alive = [silo for silo, own in enumerate(pieces) if len(own) > step]
        groups += [(step, rows) for rows in (_by_length(pieces, step, alive) if exact else [alive])]
    made = [[pieces[silo][step] for silo in rows] for step, rows in groups]
    wide = [_filled(own) for own in made]
    flat = torch.from_numpy(np.concatenate([np.empty(0, np.int64), *(each.ravel() for each in wide)])).to(device)
    sizes = torch.tensor([len(piece) for own in made for piece in own]).to(device)
    batches, at, silo = [], 0, 0
    for (step, rows), own, each in zip(groups, made, wide, strict=True):
        places = flat[at : at + each.size].view(each.shape)
        ragged = len({len(piece) for piece in own}) > 1
        lengths = sizes[silo : silo + len(rows)] if ragged else None
        shortest = min((len(piece), row) for row, piece in enumerate(own))
        index = slice(0, len(rows)) if rows == list(range(len(rows))) else torch.tensor(rows).to(device)
        batches.append(Batch(step, index, places, lengths, (shortest[1], shortest[0])))
        at, silo = at + each.size, silo + len(rows)
    return batches


def _by_length(pieces: Sequence[Pieces], step: int, alive: Sequence[int]) -> Iterator[list[int]]:
    for length in sorted({len(pieces[silo][step]) for silo in alive}):
        yield [silo for silo in alive if len(pieces[silo][step]) == length]


def _filled(own: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Rows of one length [m, L]: behind a silo's own, its first record again."""
    filled = np.empty((len(own), max(map(len, own))), np.int64)
    for row, piece in zip(filled, own, strict=True):
        row[: len(piece)], row[len(piece) :] = piece, piece[0]
    return filled


def train(silos: Silos, stage: Stage, context: Tensors, pieces: Sequence[Pieces]) -> Tensor:
    """Run one stage in place; ``context`` [S, …] stands for the stage's own, ``pieces`` are each silo's batches.

    Gives the mean loss of each batch [steps, S] in float64, NaN where a silo has no batch. LocalError for a loss that
    gives a record another value in another batch.
    """
    modules, device = silos.modules, silos.x.device
    for part, module in modules.items():
        module.train(part in stage.trains)
    trained = [(part, name) for part in stage.trains for name, _ in modules[part].named_parameters()]
    buffers = [(part, name) for part in stage.trains for name, _ in modules[part].named_buffers()]
    velocity = [torch.zeros_like(t) for t in _of(silos.values, trained)] if stage.optimiser.momentum else []
    batches = together(pieces, stage.coupled or couples(modules), device)
    means = torch.full((max(map(len, pieces)), silos.count), torch.nan, dtype=torch.float64, device=device)
    odd, unchecked = torch.zeros((), device=device), True
    for batch in batches:
        rows = batch.rows
        values = _rows(silos, rows)
        leaves = [tensor.detach().requires_grad_() for tensor in _of(values, trained)]
        for (part, name), leaf in zip(trained, leaves, strict=True):
            values[part][name] = leaf
        for part, name in buffers:
            values[part][name] = values[part][name].clone()  # the call changes it in place
        own = {name: tensor[rows] for name, tensor in context.items()}
        x, y = silos.x[batch.places], silos.y[batch.places]  # [m, L, …], [m, L]
        losses = _losses(modules, stage, values, own, x, y)  # [m, L]
        if batch.lengths is not None and unchecked:
            odd, unchecked = _oddness(modules, stage, values, own, x, y, losses, batch.shortest), False
        mean = _means(losses, batch.lengths)  # [m]
        if stage.penalty is not None:
            mean = mean + vmap(stage.penalty)(_parameters(modules, values), own)
        gradients = torch.autograd.grad(mean.sum(), leaves, materialize_grads=True)
        moved = [v[rows] for v in velocity]
        _apply(leaves, gradients, moved, stage.optimiser)
        if isinstance(rows, Tensor):  # what moved was a copy, not a view
            for whole, new in zip([*_of(silos.values, trained), *velocity], [*leaves, *moved], strict=True):
                whole[rows] = new.detach()
        for whole, new in zip(_of(silos.values, buffers), _of(values, buffers), strict=True):
            whole[rows] = new
        means[batch.step, rows] = mean.detach().double()
    if float(odd) > LOSS_TOLERANCE:
        raise LocalError("the loss of a record depends on its batch, and the stage does not say that it is coupled")
    return means


def _of(values: Values, names: Sequence[tuple[str, str]]) -> list[Tensor]:
    return [values[part][name] for part, name in names]


def _losses(modules: Modules, stage: Stage, values: Values, context: Tensors, x: Tensor, y: Tensor) -> Tensor:
    def loss(values: Values, context: Tensors, x: Tensor, y: Tensor) -> Tensor:
        return stage.loss(parts_of(modules, values), x, y, context)

    losses: Tensor = vmap(loss)(values, context, x, y)
    return losses


def _means(losses: Tensor, lengths: Tensor | None) -> Tensor:
    """Each silo's mean [m] of losses [m, L], of which as many count as ``lengths`` says."""
    if lengths is None:
        return losses.mean(1)
    counts = torch.arange(losses.shape[1], device=losses.device) < lengths[:, None]
    return torch.where(counts, losses, 0).sum(1) / lengths


@torch.no_grad()
def _oddness(
    modules: Modules,
    stage: Stage,
    values: Values,
    context: Tensors,
    x: Tensor,
    y: Tensor,
    losses: Tensor,
    shortest: tuple[int, int],
) -> Tensor:
    """By how much the losses of a batch that was filled up differ from those of it alone."""
    row, length = shortest
    one = slice(row, row + 1)
    of = {part: {name: tensor[one].detach() for name, tensor in named.items()} for part, named in values.items()}
    own = {name: tensor[one] for name, tensor in context.items()}
    alone = _losses(modules, stage, of, own, x[one, :length], y[one, :length])
    return (losses[one, :length] - alone).abs().max() / (1 + alone.abs().max())


def _parameters(modules: Modules, values: Values) -> Values:
    return {part: {name: values[part][name] for name, _ in m.named_parameters()} for part, m in modules.items()}


def _apply(
    parameters: Sequence[Tensor], gradients: Sequence[Tensor], velocity: list[Tensor], optimiser: Optimiser
) -> None:
    """Move the parameters [m, …] of each silo by one step of the optimiser's rule, in place."""
    if optimiser.rule != "sgd":
        mirror_step(parameters, gradients, optimiser)
    else:
        sgd_step(parameters, clipped_each(gradients, optimiser.clip), velocity, optimiser)


def clipped_each(gradients: Sequence[Tensor], limit: float | None) -> Sequence[Tensor]:
    """``training.clipped`` of each silo's gradients [m, …]."""
    if limit is None:
        return gradients
    squares = [gradient.double().square().reshape(len(gradient), -1).sum(1) for gradient in gradients]
    norm = torch.stack(squares).sum(0).sqrt()  # [m]
    factor = torch.where(norm <= limit, 1.0, limit / norm)
    return [g * factor.to(g.dtype).reshape(-1, *(1,) * (g.ndim - 1)) for g in gradients]


@torch.no_grad()
def evaluate(method: Method, silos: Silos, ranges: Sequence[range]) -> list[int]:
    """How many of its records in a range of places each silo's model classifies correctly, in evaluation mode."""
    _evaluating(silos.modules)
    exact = couples(silos.modules)
    chunk = EVALUATION_CHUNK if exact else FILLED_CHUNK
    batches = together([_cut(places, chunk) for places in ranges], exact, silos.x.device)
    correct = torch.zeros(silos.count, dtype=torch.int64, device=silos.x.device)

    def right(values: Values, x: Tensor, y: Tensor) -> Tensor:
        return method.predict(parts_of(silos.modules, values), x).argmax(dim=1) == y

    for batch in batches:
        hits = vmap(right)(_rows(silos, batch.rows), silos.x[batch.places], silos.y[batch.places])  # [m, L]
        if batch.lengths is not None:
            hits &= torch.arange(hits.shape[1], device=hits.device) < batch.lengths[:, None]
        correct[batch.rows] += hits.sum(1)
    counts: list[int] = correct.tolist()
    return counts


@torch.no_grad()
def measure(method: Method, silos: Silos, ranges: Sequence[range]) -> list[dict[str, Tensor]]:
    """What ``method.measure`` adds up over each silo's training records, in float64, in evaluation mode.

    What is added up cannot be left out again, so no batch is filled up.
    """
    _evaluating(silos.modules)
    coupled = couples(silos.modules)
    pieces = [_cut(places, EVALUATION_CHUNK) if coupled else _halved(places) for places in ranges]
    sums: dict[str, Tensor] = {}

    def measured(values: Values, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        found = method.measure(parts_of(silos.modules, values), x, y)
        return {name: tensor.double() for name, tensor in found.items()}

    for batch in together(pieces, True, silos.x.device):
        found = vmap(measured)(_rows(silos, batch.rows), silos.x[batch.places], silos.y[batch.places])
        for name, tensor in found.items():
            if name not in sums:
                sums[name] = tensor.new_zeros(silos.count, *tensor.shape[1:])
            sums[name][batch.rows] += tensor
        if not found:
            break
    host = {name: tensor.cpu() for name, tensor in sums.items()}
    return [{name: tensor[silo].clone() for name, tensor in host.items()} for silo in range(silos.count)]


def _evaluating(modules: Modules) -> None:
    for module in modules.values():
        module.eval()


def _rows(silos: Silos, rows: Rows) -> Values:
    return {part: {name: tensor[rows] for name, tensor in named.items()} for part, named in silos.values.items()}


def _cut(places: range, chunk: int) -> list[NDArray[np.int64]]:
    return [np.asarray(places[start : start + chunk]) for start in range(0, len(places), chunk)]


def _halved(places: range) -> list[NDArray[np.int64]]:
    """Pieces whose lengths are powers of two, so that silos of any size have some of the same length."""
    cut = [np.asarray(places[start : start + EVALUATION_CHUNK]) for start in range(0, len(places), EVALUATION_CHUNK)]
    whole, rest = [piece for piece in cut if len(piece) == EVALUATION_CHUNK], len(places) % EVALUATION_CHUNK
    at = len(places) - rest
    while rest:
        length = 1 << (rest.bit_length() - 1)
        whole.append(np.asarray(places[at : at + length]))
        at, rest = at + length, rest - length
    return whole


def saved_bytes(predict: Callable[[Parts, Tensor], Tensor], modules: Modules, shape: Sequence[int]) -> int:
    """About what a backward pass keeps of one record's forward pass, of modules without values."""
    kept = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.nbytes
        return tensor

    _evaluating(modules)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        predict(modules, torch.empty(2, *shape, device="meta"))
    return kept // 2
