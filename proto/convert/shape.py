"""Messages as tables: one line per field, which says how it is written and what it must be.

::

    SURVIVAL = Shape(
        Survival,
        pb.Survival,
        Code.NOTES,
        silo=member("a survivor's signature of"),
        signature=sized(SIGNATURE_BYTES, "the survivor's signature of {silo!r}"),
    )
    SURVIVAL.to_wire(survival)          # pb.Survival
    SURVIVAL.from_wire(peer, message)   # Survival; or RefusedError(peer, NOTES, why)

Fields are read in the order of the table. A text may name what was read before it, of this message
or of those around it. A table that lacks a field of its protobuf message, or has one more, fails
when its module is imported.

``peer``, who sent the message here, is blamed: whoever passes on what is malformed could have seen
it. Counts and lengths are checked before anything is made of them.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Any, Generic, NoReturn, TypeAlias, TypeVar

from google.protobuf.message import Message

from ...errors import LocalError, RefusedError
from ...security.arithmetic.field import NUMBER_BYTES
from ...security.identity.keys import ID_PATTERN
from ...security.log.merkle import HASH_BYTES
from ...security.secagg.linear_tags import TAG_BYTES
from ...security.secagg.spec import MOST_SILOS

SIGNATURE_BYTES = 64  # Ed25519
MOST_GROUPS = 4096  # of a specification
# One hash per level of the tree, ceil(log2 n).
MOST_HASHES = (MOST_SILOS - 1).bit_length()  # of an inclusion proof

ID = re.compile(ID_PATTERN).fullmatch

Known: TypeAlias = Mapping[str, Any]  # fields that were read already, by name
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sender:
    """The sender of what is read, and the code with which it is refused.

    The code is a ``Code``, or a name of ``ErrorCode``.
    """

    peer: str
    code: str

    def check(self, holds: bool, why: str) -> None:
        """RefusedError unless it holds."""
        if not holds:
            raise RefusedError(self.peer, self.code, why)

    def check_whole(self, message: Message) -> None:
        """RefusedError where a message, or one in it, has fields that its table lacks."""
        # A table has all fields of its schema, so what was not read is unknown to protobuf as well.
        known = type(message)()
        known.CopyFrom(message)
        known.DiscardUnknownFields()
        whole = known.ByteSize() == message.ByteSize()
        self.check(whole, "has fields that its protocol version does not know")

    def refuse(self, why: str, known: Known, **found: object) -> NoReturn:
        """RefusedError; ``why`` may name fields, and what was found.

        ``why`` is a constant of this code with names in braces, which are filled in here.
        """
        # A peer's text is only ever an argument of ``format_map``, so braces in it do nothing.
        raise RefusedError(self.peer, self.code, why.format_map({**known, **found}))

    def ascending(self, keys: Iterable[Any], what: str, shown: int = 80) -> None:
        """RefusedError unless these ascend, each once: a set has one spelling."""
        for before, after in pairwise(keys):
            if not before < after:
                names = f"{before!r:.{shown}} before {after!r:.{shown}}"
                self.check(False, f"{what} of {names}: not ascending, each once")

    def few(self, found: Collection[object], most: int, what: str) -> None:
        """RefusedError for more entries than there can be."""
        self.check(len(found) <= most, f"{len(found)} {what}, at most {most} there can be")


def itself(value: Any) -> Any:
    """A value that protobuf takes as it is."""
    return value


@dataclass(frozen=True, slots=True)
class WireField:
    """One field: how it is read and written, and where the value has it (``path``).

    ``read`` takes the sender, the protobuf value and the fields that were read before. It returns
    our value, or refuses. ``write`` is its inverse.
    """

    read: Callable[[Sender, Any, Known], Any]
    write: Callable[[Any], Any] = itself
    path: str = ""  # dotted; empty: under the field's own name


class Shape(Generic[T]):
    """One kind of message, as a dataclass of ours and in protobuf."""

    def __init__(
        self, make: Callable[..., T], message: type[Message], code: str, /, **fields: WireField
    ) -> None:
        """``make`` takes all fields by their names in protobuf; ``code`` refuses a message."""
        # A field without a rule would cross unchecked.
        declared = {field.name for field in message.DESCRIPTOR.fields}
        if declared != fields.keys():
            odd = ", ".join(sorted(declared ^ fields.keys()))
            raise LocalError(f"{message.DESCRIPTOR.name}: its table and its schema differ in {odd}")
        self.code = code
        self.fields = fields
        self._make, self._message = make, message
        # A dotted path: a field of the message may be nested deeper in our value.
        self._places = [(name, attrgetter(field.path or name)) for name, field in fields.items()]
        self._writes = [
            (name, field.write) for name, field in fields.items() if field.write is not itself
        ]

    def to_wire(self, value: T) -> Any:
        """The protobuf message.

        Nothing is checked here: the other end reads it by the same table.
        """
        return self._message(**self.written(value))

    def written(self, value: T) -> dict[str, Any]:
        """The fields of the message; messages in it are such fields as well.

        protobuf makes them in place, while it would copy messages that were made before.
        """
        found = {name: place(value) for name, place in self._places}
        for name, write in self._writes:
            found[name] = write(found[name])
        return found

    def from_wire(self, peer: str, message: Any, /, **around: Any) -> T:
        """The value; ``around`` are fields of the messages that this one is in."""
        # In the order of the table: a reason may name what was read before.
        sent, known = Sender(peer, self.code), around
        for name, field in self.fields.items():
            known[name] = field.read(sent, getattr(message, name), known)
        return self._make(**{name: known[name] for name in self.fields})

    def whole_from_wire(self, peer: str, message: Any, /, **around: Any) -> T:
        """Like ``from_wire``, and the message holds nothing else: it has one spelling."""
        # Unknown fields would be signed, stored or passed on without anybody having read them.
        value = self.from_wire(peer, message, **around)
        Sender(peer, self.code).check_whole(message)
        return value


def plain(path: str = "") -> WireField:
    """Any value that protobuf takes: the machines judge it."""
    return WireField(lambda _, found, __: found, path=path)


def member(what: str, path: str = "") -> WireField:
    """A roster id."""

    def read(sent: Sender, found: str, known: Known) -> str:
        # Form only; the state machines check that there is a member of this id.
        if ID(found) is None:
            # Cut at 65 characters, one more than an id may have, so that the error stays short.
            sent.refuse(what + " {found!r} is not an id of a member", known, found=found[:65])
        return found

    return WireField(read, path=path)


def members(what: str, entries: str, path: str = "") -> WireField:
    """Roster ids, no more than there are silos."""
    return _listed(member(what), MOST_SILOS, entries, path)


def _listed(entry: WireField, most: int, entries: str, path: str = "") -> WireField:
    """Values of one kind, at most ``most``."""

    def read(sent: Sender, found: Sequence[Any], known: Known) -> tuple[Any, ...]:
        sent.few(found, most, entries)
        return tuple(entry.read(sent, value, known) for value in found)

    return WireField(read, path=path)


def sized(size: int | Callable[[Known], int], what: str, path: str = "") -> WireField:
    """Exactly this many bytes."""

    def read(sent: Sender, found: bytes, known: Known) -> bytes:
        # Some sizes depend on earlier fields: a dealer's portion to itself has empty ones.
        wanted = size if isinstance(size, int) else size(known)
        if len(found) != wanted:
            why = what + " has {length} bytes, not {wanted}"
            sent.refuse(why, known, length=len(found), wanted=wanted)
        return found

    return WireField(read, path=path)


def within(low: int, high: int, why: str, path: str = "") -> WireField:
    """A number in this range, both ends included; ``why`` has it as ``found``."""

    def read(sent: Sender, found: float, known: Known) -> float:
        # Written this way round, NaN is refused: it compares as False.
        if not low <= found <= high:
            sent.refuse(why, known, found=found)
        return found

    return WireField(read, path=path)


def length_within(low: int, high: int, why: str, path: str = "") -> WireField:
    """A text or bytes of a length in this range; ``why`` has it as ``length``."""

    def read(sent: Sender, found: str | bytes, known: Known) -> str | bytes:
        if not low <= len(found) <= high:
            sent.refuse(why, known, length=len(found), low=low, high=high)
        return found

    return WireField(read, path=path)


def tags(what: str) -> WireField:
    """Whole tags, no more than there may be groups."""
    why = f"{what} has tags of {{length}} bytes, not {TAG_BYTES} for each of 0 to {MOST_GROUPS}"
    return _whole(TAG_BYTES, TAG_BYTES * MOST_GROUPS, why)


def numbers(most: int, what: str) -> WireField:
    """Numbers of 8 bytes, or sealed ones, which are 16 bytes longer: at most ``most`` bytes.

    They stay bytes; the state machines decode them.
    """
    return _whole(NUMBER_BYTES, most, f"{what} has {{length}} bytes, not {NUMBER_BYTES} per number")


def _whole(size: int, most: int, why: str) -> WireField:
    """Values of ``size`` bytes, at most ``most`` bytes together; ``why`` has the ``length``."""

    def read(sent: Sender, found: bytes, known: Known) -> bytes:
        # Refused here, where the error can name the field, rather than where it is decoded.
        if len(found) % size or len(found) > most:
            sent.refuse(why, known, length=len(found))
        return found

    return WireField(read)


def coded(codes: Mapping[Any, Any], why: str, path: str = "") -> WireField:
    """A value of ours by its number in protobuf; ``why`` has the number as ``found``."""
    # An enum of proto3 keeps numbers that the schema lacks, so each is looked up.
    values = {number: value for value, number in codes.items()}

    def read(sent: Sender, found: int, known: Known) -> Any:
        if found not in values:
            sent.refuse(why, known, found=found)
        return values[found]

    return WireField(read, codes.__getitem__, path)


def proof(what: str) -> WireField:
    """The hashes of an inclusion proof.

    Each has 32 bytes, and there are no more than a tree over MOST_SILOS leaves needs.
    """
    return _listed(sized(HASH_BYTES, what), MOST_HASHES, "hashes of a proof")


def one(
    shape: Shape[Any],
    own: str = "",
    why: str = "gives a message in the name of {named!r}",
    path: str = "",
) -> WireField:
    """A message in this one.

    ``own`` is the path of the id that it names, which must be the sender's: a silo speaks for
    itself, and a message that does not hold drops whom it names out of the attempt.
    """
    named = attrgetter(own) if own else None

    def read(sent: Sender, found: Any, known: Known) -> Any:
        # Fields of the outer message go in too, since error texts may name them.
        value = shape.from_wire(sent.peer, found, **known)
        if named and named(value) != sent.peer:
            Sender(sent.peer, shape.code).refuse(why, {}, named=named(value))
        return value

    return WireField(read, shape.written, path)


def each(
    shape: Shape[Any], key: str, what: str, most: int = MOST_SILOS, code: str = ""
) -> WireField:
    """A set of messages: counted, then read one by one; each once, ascending by ``key``.

    ``code`` is with what the set is refused, if not with that of the message that it is in.
    """
    # Several paths make a tuple: sorted by the first, then by the second.
    key_of = attrgetter(*key.split())

    def read(sent: Sender, found: Sequence[Any], known: Known) -> tuple[Any, ...]:
        blamed = Sender(sent.peer, code or sent.code)
        made: tuple[Any, ...] = _listed(one(shape), most, what).read(blamed, found, known)
        # One spelling of a set: what parties sign and compare is its bytes.
        blamed.ascending(map(key_of, made), what)
        return made

    return WireField(read, lambda values: list(map(shape.written, values)))


def every(shape: Shape[Any], what: str) -> WireField:
    """Messages in an order of their own, no more than there are silos.

    Unlike in ``each`` they may be unsorted: the caller compares their order with a document.
    """
    listed = _listed(one(shape), MOST_SILOS, what)
    return WireField(listed.read, lambda values: list(map(shape.written, values)))


class OneOf:
    """The bodies of a message that holds one of several: by field, the type of the value.

    A field with a ``path`` is all that its value holds.
    """

    def __init__(self, missing: str, **bodies: tuple[type, WireField]) -> None:
        """``missing`` is why a message without a body is refused."""
        self._missing, self._bodies = missing, bodies
        # No two bodies have one type, so the type of a value determines its field.
        self._names = {kind: name for name, (kind, _) in bodies.items()}

    def to_wire(self, value: object) -> dict[str, Any]:
        """The one field of the message."""
        name = self._names[type(value)]
        _, field = self._bodies[name]
        part = attrgetter(field.path)(value) if field.path else value
        return {name: field.write(part)}

    def from_wire(self, sent: Sender, message: Message, oneof: str = "body") -> Any:
        """The value; RefusedError for a message without a body."""
        name = message.WhichOneof(oneof)
        # ``name`` is None for a message without a body.
        if name not in self._bodies:
            raise RefusedError(sent.peer, sent.code, self._missing)
        kind, field = self._bodies[name]
        part = field.read(sent, getattr(message, name), {})
        return kind(part) if field.path else part
