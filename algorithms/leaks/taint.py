"""What a tensor was computed from: nothing of a silo's records, what was paid for, or records
themselves.

A private job's state tensors and contributions each have a taint, and what is computed from several
has the worst of theirs. Only a mechanism that adds noise and is paid for
(algorithms/job/privacy.py) makes what is DP of what is private.

``Tracker`` follows a method's own code, ``deliver`` and ``give``: every call of torch inside it is
seen, and what comes of it has the worst taint of what went in. Taints lie by storage, so a view has
that of its tensor, and a tensor that is written to, whole or in part, takes over that of what was
written. A value that leaves torch, as a number, a list, an array, by the length of what was
selected or because a call failed, is followed no further: one in which records show is refused, and
all that comes of the same call of the method has the taint of the others. What was refused stays
refused, whatever the method catches. A tensor that was never seen is a constant of the method,
which so must hold no tensor of a silo from one call to the next.

This is against mistakes, not against a method that means to leak: code that runs in this process
reaches all of its memory, and Python closes no way for good. Calls are not seen in another thread,
in what ``torch.jit`` compiled, through ``to_dlpack``, or where torch's overriding is switched off
(``DisableTorchFunction``). So methods are trusted code. Of one that is not of Staddle's own catalog
a silo is told so when it admits a private job (silo/admission/private_jobs.py).
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from ...errors import LocalError

DESCRIBES = (  # what tells of a tensor its form alone, or the tensors within it
    *(
        "__get__",
        "__set__",
        "__delete__",
        "__len__",
        "__hash__",
        "__iter__",
        "size",
        "dim",
        "ndimension",
        "numel",
    ),
    *(
        "nelement",
        "stride",
        "storage_offset",
        "element_size",
        "is_contiguous",
        "is_floating_point",
        "is_complex",
    ),
    *("is_same_size", "get_device", "result_type"),
)
# as many as values say
SELECTS = ("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount")
# to code, or on to tensors that the call does not name
HANDS = ("apply_", "map_", "map2_", "backward")
SIZED = (
    "arange",
    "zeros",
    "ones",
    "full",
    "empty",
    "eye",
    "expand",
    "repeat",
    "tile",
    "view",
    "reshape",
    "narrow",
)


@dataclass(frozen=True, slots=True)
class Taint:
    """``private``: records show in it unprotected.

    ``ids``: reservations of the data set's budget that paid for it.
    """

    private: bool = False
    ids: frozenset[int] = frozenset()

    @property
    def name(self) -> Literal["public", "dp", "private"]:
        """As ledger and policy have it."""
        return "private" if self.private else "dp" if self.ids else "public"


PUBLIC = Taint()
PRIVATE = Taint(private=True)


def paid(*ids: int) -> Taint:
    """Of what these reservations paid for."""
    return Taint(ids=frozenset(ids))


def worst(taints: Iterable[Taint]) -> Taint:
    """Of what is computed from all of these."""
    found = tuple(taints)
    return Taint(
        any(taint.private for taint in found), frozenset().union(*(taint.ids for taint in found))
    )


class Tracker(TorchFunctionMode):
    """A context in which taints follow tensors: what goes in is entered before it, what came out is
    asked for after.
    """

    def __init__(self) -> None:
        super().__init__()
        # held weakly, an address is not used again
        self._taints: dict[int, tuple[StorageWeakRef, Taint]] = {}
        self._told = PUBLIC
        self._refused: LocalError | None = None

    def __exit__(self, *raised: object) -> None:
        """What was refused inside is refused here, if the method went on all the same."""
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        if self._refused is not None and raised[0] is None:
            raise self._refused

    def enter(self, tensor: Tensor, taint: Taint) -> Tensor:
        """A tensor, with its taint, as a method may have it: a copy where another one lies in the
        same memory.
        """
        if self._key(tensor) in self._taints:
            tensor = tensor.clone()
        self._add(tensor, taint)
        return tensor

    def of(self, tensor: Tensor) -> Taint:
        """The taint of what came of the tracked code."""
        return worst((self._own(tensor), self._told))

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """One call of torch."""
        kwargs = kwargs or {}
        given = list(_tensors((args, kwargs)))
        versions = [tensor._version for tensor in given]  # noqa: SLF001 - torch has no other name
        taint = worst(map(self._own, given))
        name = getattr(func, "__name__", "")
        failed = True
        try:
            result = func(*args, **kwargs)
            failed = False
        finally:
            if failed:
                self._tell(taint, f"{name}, which fails")
        made = list(_tensors((result,)))
        written = (
            one
            for one, before in zip(given, versions, strict=True)
            if one._version != before  # noqa: SLF001
        )
        for tensor in (*made, *written):
            self._add(tensor, taint)
        if _tells(name, args, kwargs) or not (made or result is None or name in DESCRIBES):
            self._tell(taint, name)
            if self._refused is not None:
                raise self._refused
        return result

    def _tell(self, taint: Taint, name: str) -> None:
        """A value of tensors of this taint is known outside."""
        self._told = worst((self._told, taint))
        if taint.private and self._refused is None:
            self._refused = LocalError(
                "the method takes a value out of a tensor in which records show unprotected"
                f" ({name}), and what it does by it would show them too; compute with tensors, or"
                " train that part with noise"
            )

    def _own(self, tensor: Tensor) -> Taint:
        found = self._taints.get(self._key(tensor))
        return PUBLIC if found is None else found[1]

    def _add(self, tensor: Tensor, taint: Taint) -> None:
        key, own = self._key(tensor), self._own(tensor)
        held = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._taints[key] = held, worst((own, taint))

    @staticmethod
    def _key(tensor: Tensor) -> int:
        try:
            return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - what StorageWeakRef holds, too
        except NotImplementedError as error:
            raise LocalError(
                f"the method computes with a tensor that has no memory of its own ({error}), so"
                " what it is made of cannot be followed; use neither torch.func nor sparse tensors"
                " in deliver and give"
            ) from error


def _tells(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the form of what a call makes may depend on values, or values go where no call is
    seen.
    """
    match name:
        case "where":
            return len(args) + len(kwargs) == 1
        case "repeat_interleave":
            return any(isinstance(each, Tensor) for each in (*args[1:], *kwargs.values()))
        case _ if name in SIZED:
            return any(
                not each.ndim and not each.is_floating_point() for each in _tensors((args, kwargs))
            )
        case "__getitem__":
            return any(
                each.dtype in (torch.bool, torch.uint8) or not each.ndim
                for each in _tensors(args[1:])
            )
        case _:
            return name in (*SELECTS, *HANDS)


def _tensors(values: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists, dictionaries and slices."""
    match values:
        case Tensor():
            yield values
        case tuple() | list():
            for each in values:
                yield from _tensors(each)
        case dict():
            yield from _tensors(tuple(values.values()))
        case slice():
            yield from _tensors((values.start, values.stop, values.step))


def taints_to_text(taints: Mapping[str, Taint]) -> str:
    """Taints by name, for a file: names by taint, which is a list of ids, or null where records
    show.

    ``[[[], ["part/extractor/weight"]], [[3, 5], ["part/classifier/weight"]], [null,
    ["extra/last"]]]``
    """
    names: dict[Taint, list[str]] = {}
    for name, taint in taints.items():
        names.setdefault(PRIVATE if taint.private else taint, []).append(name)
    return json.dumps(
        [[None if taint.private else sorted(taint.ids), held] for taint, held in names.items()]
    )


def taints_from_text(text: str) -> dict[str, Taint]:
    """Read what ``taints_to_text`` wrote; ValueError for anything else."""
    taints: dict[str, Taint] = {}
    if not isinstance(entries := json.loads(text), list):
        raise ValueError(f"no taints: {entries!r}")  # noqa: TRY004 - as of text that is no JSON
    for entry in entries:
        match entry:
            case [None | list() as ids, list() as names] if all(
                type(each) is int for each in ids or ()
            ):
                taint = PRIVATE if ids is None else paid(*ids)
                taints |= {str(name): taint for name in names}
            case _:
                raise ValueError(f"no taint: {entry!r}")
    return taints
