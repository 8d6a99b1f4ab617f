"""Checks in one pass that a line is one of the ledger's records.

It makes a ledger of a million lines quick to check.

A decoder for each type of record is made from its model and the frame of security/log/chain.py. It
reads a line into plain dictionaries; these, written out again with sorted keys, give the same bytes
exactly if the line was canonical: no key unknown or twice, no space, shortest escapes. No field
takes a float or an integer beyond 2^53. It can only be stricter than chain.py's own way, which
decides whenever this one says no.

Any record of a ledger, from a verified line: whether its form is right, and typed.
"""

import re
import types
from collections.abc import Callable, Mapping
from functools import lru_cache
from operator import itemgetter
from typing import Annotated, Any, Literal, NotRequired, TypedDict, get_args

import msgspec
import pydantic
from pydantic import Field

from ..log.chain import FRAME, VerifiedLine
from .records import (
    ControlClose,
    ControlOpen,
    Count,
    DeliveredRecord,
    Deny,
    Digest,
    HeadRefused,
    Ingress,
    Intent,
    JobAccept,
    JobDecline,
    KeyRotate,
    OutcomeRecord,
    PolicyChange,
    PrivacyHead,
    ProtocolMessage,
    Received,
    RecordT,
    RecoveryRecord,
    RosterChange,
    Serving,
    Start,
    StopRecord,
    SumEnd,
    SumOpened,
    SumSigned,
    Tensor,
    WitnessRecord,
    typed,
)

Record = (
    Start
    | StopRecord
    | RecoveryRecord
    | KeyRotate
    | JobAccept
    | JobDecline
    | PolicyChange
    | RosterChange
    | Intent
    | Digest
    | OutcomeRecord
    | ControlOpen
    | ControlClose
    | PrivacyHead
    | WitnessRecord
    | Ingress
    | Deny
    | Serving
    | Received
    | DeliveredRecord
    | HeadRefused
    | ProtocolMessage
    | SumEnd
    | SumOpened
    | SumSigned
)
_RECORDS: pydantic.TypeAdapter[Record] = pydantic.TypeAdapter(
    Annotated[Record, Field(discriminator="type")]
)


def checked(line: VerifiedLine) -> dict[str, Any]:
    """The record of a verified line, whose form is right.

    LocalError names its seq and what is wrong with it.
    """
    if not line.typed:
        typed(line, _RECORDS.validate_python)
    return line.record


def parse_record(line: VerifiedLine, model: type[RecordT]) -> RecordT:
    """The typed record of a verified line of this type.

    LocalError names its seq and what is wrong with it.
    """
    return typed(line, model.model_validate)


def parse_any(line: VerifiedLine) -> Record:
    """The typed record of a verified line, whatever its type.

    LocalError names its seq and what is wrong with it.
    """
    return typed(line, _RECORDS.validate_python)


Gather = Callable[[Any], str]  # all that must be hexadecimal in a value, one after another


def well_formed(line: bytes) -> dict[str, Any] | None:
    """The record of a canonical line with its frame and all fields of its type.

    None for any other line.
    """
    # In JSON that is valid, ',"' cannot stand inside of a string: what follows is a key, and the
    # last of its name.
    start = line.rfind(_TYPE) + len(_TYPE)
    form = _FORMS.get(line[start : line.find(b'"', start)])
    if form is None:
        return None
    tensors, whole = None, line
    # The tensors of an intent are those of the round before: most of the line need not be read
    # again. What is cut out is one value; each half must be right by itself.
    if line.endswith(_INTENT) and (start := line.find(_TENSORS)) > 0:
        start, end = start + len(_TENSORS), line.rfind(_AFTER) + 1
        tensors = _tensors(line[start:end])
        if tensors is None:
            return None
        whole = line[:start] + b"[]" + line[end:]
    decode, gather = form
    try:
        record: dict[str, Any] = decode(whole)
        digits = gather(record)
        octets = bytes.fromhex(digits)
    except ValueError:  # of msgspec; no UTF-8; no hexadecimal
        return None
    # fromhex reads capitals, and leaves spaces out. One look at all digits together costs a tenth
    # of a pattern each.
    if 2 * len(octets) != len(digits) or digits != digits.lower() or not _TIME(record["time"]):
        return None
    if _ENCODE(record) != whole:
        return None
    # The tensors were compared on their own, so they are put back after the comparison.
    if tensors is not None:
        record["tensors"] = tensors
    return record


_TYPE, _TENSORS, _AFTER, _INTENT = (
    b',"type":"',
    b',"tensors":',
    b'],"time":',
    b',"type":"egress.intent","v":1}',
)
_ENCODE = msgspec.json.Encoder(order="sorted").encode
_TIME = re.compile(FRAME["time"].strip('"')).fullmatch


# Cached, so that equal tensors are one and the same list, which rules.py recognises by identity.
@lru_cache(maxsize=32)
def _tensors(data: bytes) -> list[dict[str, Any]] | None:
    try:
        found: list[dict[str, Any]] = _LIST(data)
    except ValueError:  # of msgspec, or no UTF-8
        return None
    return found if _ENCODE(found) == data else None


def _type(schema: Mapping[str, Any], inner: Mapping[str, Any]) -> tuple[Any, Gather | None]:
    """The type of a JSON schema as pydantic writes it, and how to get at what has to be hexadecimal
    in it.
    """
    if name := schema.get("$ref"):
        return _type(inner[name.rpartition("/")[2]], inner)

    if "const" in schema or "enum" in schema:
        return Literal[tuple(schema.get("enum", (schema.get("const"),)))], None
    match schema.get("type"):
        case "object":
            return _table(schema, inner)
        case "array":
            item, each = _type(schema["items"], inner)
            return types.GenericAlias(list, (item,)), (
                lambda values: "".join(map(each, values))
            ) if each else None
        case "integer":
            return Annotated[int, msgspec.Meta(ge=schema["minimum"], le=schema["maximum"])], None
        # A digest is bounded by its length alone: its digits are looked at together with all others
        # of the record, at a tenth of the time that a pattern for each takes.
        case "string" if hexadecimal := _HEX.fullmatch(schema.get("pattern", "")):
            length = int(hexadecimal[1])
            return Annotated[str, msgspec.Meta(min_length=length, max_length=length)], str
        case "string":
            # Pydantic's ``$`` matches at the end only; in msgspec's regular expressions, which are
            # Python's, it would let a newline at the end pass.
            pattern = schema.get("pattern")
            exact = f"{pattern.removesuffix('$')}\\Z" if pattern else None
            return Annotated[
                str, msgspec.Meta(pattern=exact, max_length=schema.get("maxLength"))
            ], None

    if "anyOf" in schema and schema["anyOf"][1] == {"type": "null"}:
        some, gather = _type(schema["anyOf"][0], inner)
        return some | None, (
            lambda value: gather(value) if value is not None else ""
        ) if gather else None

    # A field that this cannot read would be a field that nothing checks.
    raise TypeError(
        f"{schema}: no field of a record has such a schema; teach fast_decoder.py to read it"
    )


_HEX = re.compile(r"\^\[0-9a-f\]\{([0-9]*[02468])\}\$")


def _table(schema: Mapping[str, Any], inner: Mapping[str, Any]) -> tuple[Any, Gather | None]:
    """An object of these fields; what else a line has is missing in what is written out again."""
    fields: dict[str, Any] = {}
    plain: list[str] = []
    nested: list[tuple[str, Gather]] = []
    lacking: list[tuple[str, Gather]] = []  # in those that have it
    for name, field in schema["properties"].items():
        kind, gather = _type(field, inner)
        required = name in schema["required"]
        fields[name] = kind if required else NotRequired[kind]
        if gather and not required:
            lacking.append((name, gather))
        elif gather is str:
            plain.append(name)
        elif gather:
            nested.append((name, gather))
    due = _gathering(plain, nested)
    if lacking:
        return TypedDict("Table", fields), _gathering_more(due, lacking)  # type: ignore[operator]
    return TypedDict("Table", fields), due  # type: ignore[operator]


def _gathering_more(due: Gather | None, lacking: list[tuple[str, Gather]]) -> Gather:
    def gather(value: Any) -> str:
        more = [inner(value[name]) for name, inner in lacking if name in value]
        return "".join([due(value), *more] if due else more)

    return gather


def _gathering(plain: list[str], nested: list[tuple[str, Gather]]) -> Gather | None:
    if not plain and not nested:
        return None
    get = itemgetter(*plain) if plain else None
    # For a single name ``itemgetter`` returns the value itself, not a tuple.
    if get and len(plain) == 1 and not nested:
        return get
    if get and len(plain) > 1:
        return lambda value: "".join(
            [*get(value), *[gather(value[name]) for name, gather in nested]]
        )
    all_of_it: list[tuple[str, Gather]] = [*((name, str) for name in plain), *nested]
    return lambda value: "".join([gather(value[name]) for name, gather in all_of_it])


def _form(model: type[pydantic.BaseModel]) -> tuple[Callable[[bytes], Any], Gather]:
    """How to decode a record of this type, and to get at its hexadecimal digits."""
    schema = model.model_json_schema()
    frame = {name: _framed(name, pattern) for name, pattern in FRAME.items()}
    schema["properties"] |= frame
    # pydantic does not list ``type`` as required, since it has a default; a line must have it.
    schema["required"] = {*schema.get("required", ()), *frame, "type"}
    kind, gather = _type(schema, schema.get("$defs", {}))
    if gather is None:
        raise TypeError(
            f"{model.__name__}: has no hexadecimal, while a frame has; look into chain.py's FRAME"
        )
    return msgspec.json.Decoder(kind).decode, gather


def _framed(name: str, pattern: str) -> dict[str, Any]:
    if name == "v":
        return {"const": 1}
    if name == "time":  # well_formed looks into it
        return {"type": "string", "maxLength": len("2026-11-20T21:30:05.123456Z")}
    if pattern == "[0-9]+":
        return pydantic.TypeAdapter(Count).json_schema()
    return {"type": "string", "pattern": f"^{pattern[1:-1]}$"}


_FORMS = {model.model_fields["type"].default.encode(): _form(model) for model in get_args(Record)}
_TENSOR, _ = _type(Tensor.model_json_schema(), {})
_LIST = msgspec.json.Decoder(types.GenericAlias(list, (_TENSOR,))).decode
