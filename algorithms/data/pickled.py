"""Plain data out of a pickle, without running any of it.

Peers save partitions and records as pickles. ``pickle.load`` runs whatever a file asks for, and
even a loader that only allows numpy's own functions hands numpy a state of the file's choice, such
as bytes in place of pointers. So a small machine of our own follows the instructions here:

(1) it knows the instructions that numbers, texts, lists, dictionaries and arrays need, and refuses
all others;
(2) it calls nothing. The few names that arrays need become descriptions, and an array is made from
its bytes after dtype and shape were checked against their number;
(3) the arrays it makes are views of the file's bytes, and what else it makes of a few instructions
is asked for before; references to one object in many places are for whoever walks through the
result to count.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from pickletools import genops
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import LocalError
from ...files.file_bounds import check_fits

MOST_STEPS = 8_000_000  # an instruction takes a microsecond, a number of a list one of them
STEP_BYTES = 200  # that an instruction makes at most, next to the file's own: an array
ASKED_EVERY = 2**18  # instructions, after which the available memory is checked again
MOST_SIDES = 32  # of an array
LONGEST_NAME = 80  # characters of a foreign name that an error repeats
NUMBERS = re.compile(r"b1|[iu][1248]|f[248]")  # numpy's codes of plain numbers
ORDERS = ("<", ">", "|", "=")


class _HostilePickleError(Exception):
    """The pickle has something that plain data does not need."""


# What a hostile stack makes of Python's own checks: too few values, or values of another type.
FAULTS = (_HostilePickleError, ValueError, IndexError, KeyError, TypeError)


@dataclass(eq=False)
class PickledArray:
    """An array of numbers, or of objects: the one of the two that it holds is not None."""

    numbers: NDArray[Any] | None = None
    objects: list[Any] | None = None


@dataclass(frozen=True)
class _Name:
    """One of numpy's names, which is never called."""

    name: str


@dataclass(eq=False)
class _Dtype:
    """A dtype as the pickle describes it."""

    code: str
    order: str = "|"


def read_pickled(content: bytes, where: str) -> Any:
    """The value: numbers, texts, bytes, None, tuples, lists, dictionaries and ``PickledArray``.

    Keys of dictionaries are texts, also those that were whole numbers. Nested lists may hold
    themselves. LocalError, which names ``where``, for a pickle of anything else, or where what it
    makes would not fit the memory.
    """
    try:
        return _Machine(where).run(content)
    except FAULTS as error:
        detail = f": {error}" if isinstance(error, _HostilePickleError) else ""
        raise LocalError(
            f"{where}: not a pickle of plain numbers, lists and arrays{detail}; none of it was run."
            " Make the file again with the program that it is from"
        ) from None


@dataclass
class _Machine:
    """The stack of a pickle, its marks, and what it remembers by number."""

    where: str
    stack: list[Any] = field(default_factory=list)
    below: list[list[Any]] = field(default_factory=list)  # stacks below each mark
    memo: dict[int, Any] = field(default_factory=dict)

    def run(self, content: bytes) -> Any:
        for number, (code, argument, _) in enumerate(genops(content)):
            if number == MOST_STEPS:
                raise _HostilePickleError(f"more than {MOST_STEPS:,} instructions")
            if number % ASKED_EVERY == 0:
                # Each takes a byte or more, those before too.
                most = min(ASKED_EVERY, len(content) - number)
                check_fits(Path(self.where), most * STEP_BYTES, "what it makes")
            if code.name not in STEPS:
                raise _HostilePickleError(f"it has the instruction {code.name}")
            STEPS[code.name](self, argument)
        return self.stack.pop()

    def mark(self) -> None:
        self.below.append(self.stack)
        self.stack = []

    def since_mark(self) -> list[Any]:
        """The values above the latest mark, which are taken off."""
        found, self.stack = self.stack, self.below.pop()
        return found

    def last(self, count: int) -> list[Any]:
        """The topmost values, which are taken off."""
        if len(self.stack) < count:
            raise IndexError
        found = self.stack[-count:]
        del self.stack[-count:]
        return found

    def append(self, values: list[Any]) -> None:
        _of_type(self.stack[-1], list).extend(values)

    def set_items(self, values: list[Any]) -> None:
        target = _of_type(self.stack[-1], dict)
        for key, value in zip(values[::2], values[1::2], strict=True):
            # A tuple of tuples of tuples would have the interpreter run out of its own stack.
            if type(key) not in (str, int):
                raise _HostilePickleError("a dictionary has keys of another type")
            # Python's hashes of texts are salted; of numbers, many can have the same.
            target[str(key)] = value

    def name(self, module: Any, name: Any) -> None:
        full = " ".join(_of_type(each, str) for each in (module, name))
        if full not in NAMES:
            raise _HostilePickleError(f"it asks for {full[:LONGEST_NAME]!r}")
        self.stack.append(_Name(NAMES[full]))

    def reduce(self) -> None:
        """What a call of one of numpy's names stands for."""
        called, arguments = self.last(2)
        self.stack.append(MADE[_of_type(called, _Name).name](*_of_type(arguments, tuple)))

    def build(self) -> None:
        """The state of a dtype or an array."""
        (state,) = self.last(1)
        target = self.stack[-1]
        if isinstance(target, _Dtype):
            _, order, *rest = state
            # Fields, names and shapes within an item, and metadata.
            if order not in ORDERS or any(each is not None for each in rest[:3]):
                raise _HostilePickleError("an array is not of plain numbers")
            target.order = order
            return
        array = _of_type(target, PickledArray)
        _, shape, dtype, fortran, data = state
        if isinstance(data, list):
            array.objects = data
        else:
            array.numbers = _numbers(dtype, data, shape, "F" if fortran is True else "C")


def _of_type(value: Any, wanted: type[Any]) -> Any:
    if type(value) is not wanted:
        raise TypeError
    return value


def _dtype(code: Any, *_: Any) -> _Dtype:
    return _Dtype(_of_type(code, str))


def _empty_array(*_: Any) -> PickledArray:
    return PickledArray()


def _scalar(dtype: Any, data: Any) -> Any:
    return _numbers(dtype, data, (), "C").item()


def _array(data: Any, dtype: Any, shape: Any, order: Any) -> PickledArray:
    return PickledArray(_numbers(dtype, data, shape, order))


def _numbers(dtype: Any, data: Any, shape: Any, order: Any) -> NDArray[Any]:
    """The array over its bytes, whose number dtype and shape must give."""
    described = _of_type(dtype, _Dtype)
    if not NUMBERS.fullmatch(described.code) or type(data) not in (bytes, bytearray):
        raise _HostilePickleError("an array is not of plain numbers")
    found = np.dtype(described.order + described.code)
    sides = _of_type(shape, tuple)
    if len(sides) > MOST_SIDES or any(type(side) is not int or side < 0 for side in sides):
        raise _HostilePickleError("an array has an impossible shape")
    if math.prod(sides) * found.itemsize != len(data):
        raise _HostilePickleError(f"an array of {len(data):,} bytes has another shape")
    values: NDArray[Any] = np.frombuffer(data, found)
    return values.reshape(sides, order=_of_type(order, str))


MODULES = ("numpy.core", "numpy._core")  # before numpy 2 and since
NAMES = {
    "numpy ndarray": "ndarray",
    "numpy dtype": "dtype",
    **{f"{module}.multiarray _reconstruct": "_reconstruct" for module in MODULES},
    **{f"{module}.multiarray scalar": "scalar" for module in MODULES},
    **{f"{module}.numeric _frombuffer": "_frombuffer" for module in MODULES},
}
MADE: dict[str, Callable[..., Any]] = {
    "dtype": _dtype,
    "_reconstruct": _empty_array,
    "scalar": _scalar,
    "_frombuffer": _array,
}

Step = Callable[[_Machine, Any], None]


def _push(machine: _Machine, value: Any) -> None:
    machine.stack.append(value)


def _remember(machine: _Machine, number: int | None) -> None:
    machine.memo[len(machine.memo) if number is None else number] = machine.stack[-1]


_PUSHED = (
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
)
# By the names of pickletools; what an instruction does is in that module's text.
STEPS: dict[str, Step] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda *_: None),
    **dict.fromkeys(_PUSHED, _push),
    "NONE": lambda machine, _: _push(machine, None),
    "NEWTRUE": lambda machine, _: _push(machine, True),
    "NEWFALSE": lambda machine, _: _push(machine, False),
    "EMPTY_TUPLE": lambda machine, _: _push(machine, ()),
    "EMPTY_LIST": lambda machine, _: _push(machine, []),
    "EMPTY_DICT": lambda machine, _: _push(machine, {}),
    "MARK": lambda machine, _: machine.mark(),
    "TUPLE": lambda machine, _: _push(machine, tuple(machine.since_mark())),
    "TUPLE1": lambda machine, _: _push(machine, tuple(machine.last(1))),
    "TUPLE2": lambda machine, _: _push(machine, tuple(machine.last(2))),
    "TUPLE3": lambda machine, _: _push(machine, tuple(machine.last(3))),
    "APPEND": lambda machine, _: machine.append(machine.last(1)),
    "APPENDS": lambda machine, _: machine.append(machine.since_mark()),
    "SETITEM": lambda machine, _: machine.set_items(machine.last(2)),
    "SETITEMS": lambda machine, _: machine.set_items(machine.since_mark()),
    "BINPUT": _remember,
    "LONG_BINPUT": _remember,
    "MEMOIZE": _remember,
    "BINGET": lambda machine, number: _push(machine, machine.memo[number]),
    "LONG_BINGET": lambda machine, number: _push(machine, machine.memo[number]),
    "GLOBAL": lambda machine, full: machine.name(*full.split(" ", 1)),
    "STACK_GLOBAL": lambda machine, _: machine.name(*machine.last(2)),
    "REDUCE": lambda machine, _: machine.reduce(),
    "BUILD": lambda machine, _: machine.build(),
}
