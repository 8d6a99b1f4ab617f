"""A weight that stands still, of which each of several processes holds an equal piece.

As in FSDP (Zhao et al., 2023, arXiv:2304.11277), a process has the whole weight during an operation
and no longer. Nor does it from the forward to the backward pass: autograd keeps the
``ShardedWeight`` itself, and the backward pass gathers it again. What trains is small next to it,
and stays whole in each process (models/lora.py).

torch's own ``fully_shard`` shards parameters. What stands still is none here: nothing that counts,
sends, clips or moves parameters may see it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from .ranks import Ranks

# numbers of the smallest weight that is sharded: a gather of fewer takes longer than it saves
LEAST = 2**14

View: TypeAlias = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class WeightPiece:
    """The numbers that a process holds of a weight of this shape, as many as any other one has.

    Zeros fill up the last ones. ``views`` are taken of the whole weight, one after another.
    """

    values: Tensor
    shape: torch.Size
    ranks: Ranks
    number: int  # of the weight, among all
    views: tuple[View, ...] = ()

    def form(self) -> Tensor:
        """The tensor without values, on device "meta"."""
        return self._viewed(torch.empty(self.shape, dtype=self.values.dtype, device="meta"))

    def whole(self) -> Tensor:
        """The tensor; all processes must ask for it in turn."""
        gathered = self.ranks.gathered(self.values, self.number)
        return self._viewed(gathered[: self.shape.numel()].view(self.shape))

    def _viewed(self, tensor: Tensor) -> Tensor:
        for view in self.views:
            tensor = view(tensor)
        return tensor


class ShardedWeight(Tensor):
    """A tensor of which this process holds a piece; nobody may write to it.

    All processes must use it in the same operations, in turn.
    """

    piece: WeightPiece
    # Functions of torch take it as any tensor; what they compute comes to ``__torch_dispatch__``.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment] # noqa: SLF001 as torch's docs say

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedWeight({list(self.shape)}, {self.dtype}, {self.device})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch may leave the last two out
        cls,
        operation: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute with whole weights, but for what autograd may keep: views, and another dtype."""
        first, named = args[0], kwargs or {}
        if any(isinstance(value, cls) for value in _written(operation, args, named)):
            raise TypeError(f"{operation} would write to a weight that stands still")
        if isinstance(first, cls):
            # A transpose, of which ``linear`` makes use, must not keep the whole weight.
            if operation.is_view and (seen := _seen(first.piece, operation, args[1:], named)):
                return seen[0]
            if operation is torch.ops.aten._to_copy.default:  # noqa: SLF001
                return _moved(first.piece, named)
        return operation(*tree_map(whole, args), **tree_map(whole, named))


def _written(operation: Any, args: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
    """The tensors that an operation writes to: arguments, or what is in lists of them."""
    declared = operation._schema.arguments  # noqa: SLF001 no other name for it
    given = {**dict(zip((each.name for each in declared), args, strict=False)), **named}
    names = [each.name for each in declared if each.alias_info and each.alias_info.is_write]
    return tree_leaves([given[name] for name in names if name in given])


def _weight(piece: WeightPiece) -> ShardedWeight:
    form, values = piece.form(), piece.values
    made: ShardedWeight = Tensor._make_wrapper_subclass(  # noqa: SLF001 as torch's docs say
        ShardedWeight,
        form.shape,
        strides=form.stride(),
        storage_offset=form.storage_offset(),
        dtype=values.dtype,
        device=values.device,
    )
    made.piece = piece
    return made


def whole(value: Any) -> Any:
    """A weight that is gathered for good, in place of a sharded one; anything else as it is."""
    return value.piece.whole() if isinstance(value, ShardedWeight) else value


def _seen(
    piece: WeightPiece, operation: Any, args: Sequence[Any], named: Mapping[str, Any]
) -> tuple[ShardedWeight, ...]:
    """The view of a weight, yet to be gathered; nothing for an operation that makes several."""

    def view(of: Tensor) -> Any:
        return operation(of, *args, **named)

    if not isinstance(view(piece.form()), Tensor):
        return ()
    return (_weight(replace(piece, views=(*piece.views, view))),)


def _moved(piece: WeightPiece, named: Mapping[str, Any]) -> ShardedWeight:
    """The weight on another device or in another type, whose pieces move; no copy for the same."""
    values = piece.values
    wanted = {key: named[key] for key in ("dtype", "device") if named.get(key) is not None}
    return _weight(replace(piece, values=values.to(**wanted)))


def sharded(weight: Tensor, ranks: Ranks, number: int) -> Tensor:
    """A copy of the weight, of which this process keeps its own piece alone; a small one whole."""
    if weight.numel() < LEAST or ranks.size == 1:
        return weight.clone()
    length = ceil(weight.numel() / ranks.size)
    own = weight.detach().reshape(-1)[ranks.rank * length :][:length]
    values = own.new_zeros(length)
    values[: len(own)] = own
    return _weight(WeightPiece(values, weight.shape, ranks, number))
