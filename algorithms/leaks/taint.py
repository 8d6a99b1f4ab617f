"""Tracks what each tensor was computed from: no records, noised records, or records themselves.

A private job's state tensors and contributions each have a taint, and what is computed from several
has the worst of theirs. Only a mechanism that adds noise and is paid for
(algorithms/job/privacy.py) makes noised values of exact ones.

``Tracker`` follows a method's own code, ``deliver`` and ``contribute``: it sees every call of torch
in there, and what comes of it has the worst taint of what went in. Taints lie by storage, so a view
has that of its tensor, and a tensor that is written to, whole or in part, takes over that of what
was written. A value that leaves torch, as a number, a list, an array, by the length of what was
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

# calls that reveal a tensor's form alone, or the tensors within it
DESCRIBES = (
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
    "nelement",
    "stride",
    "storage_offset",
    "element_size",
    "is_contiguous",
    "is_floating_point",
    "is_complex",
    "is_same_size",
    "get_device",
    "result_type",
)
# calls whose result has as many elements as values say
SELECTS = ("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount")
# calls that hand values to code, or on to tensors that the call does not name
HANDS = ("apply_", "map_", "map2_", "backward")
# calls whose result has a size that a tensor may say
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
    """``exact``: records show in it without noise.

    ``ids``: reservations of the data set's budget that paid for it. With neither it is public.
    """

    exact: bool = False
    ids: frozenset[int] = frozenset()

    @property
    def name(self) -> Literal["public", "noised", "exact"]:
        """The taint's name in ledger and policy.

        Exact comes first: reservations do not pay for records without noise.
        """
        if self.exact:
            return "exact"
        if self.ids:
            return "noised"
        return "public"


PUBLIC = Taint()
EXACT = Taint(exact=True)


def paid(*ids: int) -> Taint:
    """The taint of values that these reservations paid for.

    Such values are noised.
    """
    return Taint(ids=frozenset(ids))


def worst(taints: Iterable[Taint]) -> Taint:
    """The taint of values that are computed from all of these.

    Without any it is PUBLIC.
    """
    exact = False
    ids: frozenset[int] = frozenset()
    for taint in taints:
        exact |= taint.exact
        ids |= taint.ids
    return Taint(exact, ids)


class Tracker(TorchFunctionMode):
    """A context in which taints follow tensors.

    ``enter`` tensors before it, and read the taints of the results with ``of`` after it.
    """

    def __init__(self) -> None:
        super().__init__()
        # By address: a weak reference keeps the address from being used again for another tensor.
        self._taints: dict[int, tuple[StorageWeakRef, Taint]] = {}
        self._known_outside = PUBLIC
        self._refused: LocalError | None = None

    def __exit__(self, *raised: object) -> None:
        """Raise what was refused inside, in case the method caught that error and continued."""
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        # An exception that is being raised already is not replaced.
        if self._refused is not None and raised[0] is None:
            raise self._refused

    def enter(self, tensor: Tensor, taint: Taint) -> Tensor:
        """The tensor, or a clone of it, to hand to a method; its taint is known from now on.

        Hand out the result, not the argument.
        """
        # Two tensors in the same memory would share one taint.
        if self._key(tensor) in self._taints:
            tensor = tensor.clone()
        self._add(tensor, taint)
        return tensor

    def of(self, tensor: Tensor) -> Taint:
        """The taint of a tensor that the tracked code made.

        It includes the taints of values that left torch as Python numbers.
        """
        return worst((self._own(tensor), self._known_outside))

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Follow one call of torch."""
        kwargs = kwargs or {}
        inputs = list(_tensors((args, kwargs)))
        versions = [tensor._version for tensor in inputs]  # noqa: SLF001 - torch has no other name
        # Read before the call, which may write into its inputs.
        taint = worst(map(self._own, inputs))
        name = getattr(func, "__name__", "")

        # That a call fails may depend on values, and the method can see it fail.
        failed = True
        try:
            result = func(*args, **kwargs)
            failed = False
        finally:
            if failed:
                self._note_outside(taint, f"{name}, which fails")

        # torch counts up the version of a tensor that is written to, through a view too.
        outputs = list(_tensors((result,)))
        for tensor, before in zip(inputs, versions, strict=True):
            if tensor._version != before:  # noqa: SLF001
                outputs.append(tensor)
        # An output may share memory with an input; ``_add`` keeps the worst taint.
        for tensor in outputs:
            self._add(tensor, taint)

        # A number, a list or a length that depends on values is followed no further.
        if _returns_value(name, result) or _reveals(name, args, kwargs):
            self._note_outside(taint, name)
            # Raised at once, before the method can use the value.
            if self._refused is not None:
                raise self._refused
        return result

    def _note_outside(self, taint: Taint, name: str) -> None:
        """Note that a value of tensors of this taint has left torch."""
        self._known_outside = worst((self._known_outside, taint))
        if taint.exact and self._refused is None:
            self._refused = LocalError(
                "the method takes a value out of a tensor in which records show unprotected"
                f" ({name}), and what it does by it would show them too; compute with tensors, or"
                " train that part with noise"
            )

    def _own(self, tensor: Tensor) -> Taint:
        # A tensor that was never seen is a constant of the method.
        _, taint = self._taints.get(self._key(tensor), (None, PUBLIC))
        return taint

    def _add(self, tensor: Tensor, taint: Taint) -> None:
        # A taint never gets better: other parts of the same memory may still hold old values.
        key, own = self._key(tensor), self._own(tensor)
        held = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._taints[key] = held, worst((own, taint))

    @staticmethod
    def _key(tensor: Tensor) -> int:
        # By storage, so that views share the taint of their tensor.
        try:
            return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - what StorageWeakRef holds, too
        except NotImplementedError as error:
            raise LocalError(
                f"the method computes with a tensor that has no memory of its own ({error}), so"
                " what it is made of cannot be followed; use neither torch.func nor sparse tensors"
                " in deliver and contribute"
            ) from error


def _returns_value(name: str, result: Any) -> bool:
    """True if a call returns something other than tensors that may depend on values."""
    if name in DESCRIBES:
        return False
    holds_tensors = next(_tensors(result), None) is not None
    return not holds_tensors and result is not None


def _reveals(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """True if the result's form may depend on values, or values go where no call is seen."""
    match name:
        # With a condition alone, ``where`` is ``nonzero``.
        case "where":
            return len(args) + len(kwargs) == 1
        # Numbers of repetitions in a tensor decide the length of the result.
        case "repeat_interleave":
            counts = (*args[1:], *kwargs.values())
            return any(isinstance(each, Tensor) for each in counts)
        case "__getitem__":
            indices = _tensors(args[1:])
            return any(map(_selects_by_value, indices))
        case _ if name in SIZED:
            arguments = _tensors((args, kwargs))
            return any(map(_is_whole_number, arguments))
        case _:
            return name in (*SELECTS, *HANDS)


def _selects_by_value(index: Tensor) -> bool:
    """A mask selects as many elements as it has ones; a number is read to select one."""
    # torch accepts uint8 as a mask, too.
    is_mask = index.dtype in (torch.bool, torch.uint8)
    return is_mask or not index.ndim


def _is_whole_number(tensor: Tensor) -> bool:
    return not tensor.ndim and not tensor.is_floating_point()


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
    """Taints by name, for a file, as a list of [taint, names].

    A taint is a list of ids, or null where records show:
    ``[[[], ["part/extractor/weight"]], [[3, 5], ["part/classifier/weight"]], [null,
    ["extra/last"]]]``
    """
    names: dict[Taint, list[str]] = {}
    for name, taint in taints.items():
        # Where records show, it does not matter what else was paid for: one entry for all.
        kind = EXACT if taint.exact else taint
        names.setdefault(kind, []).append(name)
    entries = []
    for taint, tainted in names.items():
        ids = None if taint.exact else sorted(taint.ids)
        entries.append([ids, tainted])
    return json.dumps(entries)


def taints_from_text(text: str) -> dict[str, Taint]:
    """Read what ``taints_to_text`` wrote; ValueError for anything else.

    The text comes from a state file, which another program may have changed.
    """
    entries = json.loads(text)
    if not isinstance(entries, list):
        raise ValueError(f"no taints: {entries!r}")  # noqa: TRY004 - as of text that is no JSON
    taints: dict[str, Taint] = {}
    for entry in entries:
        taint, names = _taint_and_names(entry)
        taints |= dict.fromkeys(map(str, names), taint)
    return taints


def _taint_and_names(entry: Any) -> tuple[Taint, list[Any]]:
    match entry:
        case [None, list() as names]:
            return EXACT, names
        case [list() as ids, list() as names] if all(type(each) is int for each in ids):
            return paid(*ids), names
    raise ValueError(f"no taint: {entry!r}")
