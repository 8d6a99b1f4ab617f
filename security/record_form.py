"""Whether a line is one of the ledger's records, in one pass: what makes a ledger of a million lines quick to check.

The validator below is made from the models of records.py and the frame of chain.py, with the fields of each object in
sorted order. It parses a line into plain dictionaries in that order, so writing them out again gives the same bytes
exactly if the line was canonical: sorted keys, none twice, no space, shortest escapes. No field takes a float or an
integer beyond 2^53. It can only be stricter than chain.py's own way, which decides whenever this one says no.
"""

from functools import lru_cache
from typing import Annotated, Any, get_args, get_origin

import pydantic
from pydantic import Field, TypeAdapter
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, SchemaValidator, ValidationError, core_schema, to_json

from .chain import FRAME
from .records import Count, Record, Tensor


def well_formed(line: bytes) -> dict[str, Any] | None:
    """The record of a canonical line with its frame and all fields of its type; None for any other line."""
    tensors, whole = None, line
    # The tensors of an intent are those of the round before: most of the line need not be read again. In JSON that is
    # valid, ',"' cannot stand inside of a string, so what is cut out is one value; each half must be right by itself.
    if line.endswith(_INTENT) and (start := line.find(_TENSORS)) > 0:
        start, end = start + len(_TENSORS), line.rfind(_AFTER) + 1
        tensors = _tensors(line[start:end])
        if tensors is None:
            return None
        whole = line[:start] + b"[]" + line[end:]
    try:
        record: dict[str, Any] = _LINE.validate_json(whole)
    except ValidationError:
        return None
    if to_json(record) != whole:
        return None
    if tensors is not None:
        record["tensors"] = tensors
    return record


_TENSORS, _AFTER, _INTENT = b',"tensors":', b'],"time":', b',"type":"egress.intent","v":1}'


@lru_cache(maxsize=32)
def _tensors(data: bytes) -> list[dict[str, Any]] | None:
    try:
        found: list[dict[str, Any]] = _LIST.validate_json(data)
    except ValidationError:
        return None
    return found if to_json(found) == data else None


def _frame(name: str, pattern: str) -> Any:
    if name == "v":
        return Annotated[int, Field(strict=True, ge=1, le=1)]
    return Count if pattern == "[0-9]+" else Annotated[str, Field(pattern=f"^{pattern[1:-1]}$")]


def _leaf(annotation: Any) -> CoreSchema:
    return TypeAdapter(annotation).core_schema


def _table(fields: dict[str, tuple[CoreSchema, bool]]) -> CoreSchema:
    """An object of these fields and no other, in sorted order."""
    return core_schema.typed_dict_schema(
        {name: core_schema.typed_dict_field(schema, required=required) for name, (schema, required) in fields.items()},
        extra_behavior="forbid",
    )


def _fields(model: type[pydantic.BaseModel], more: dict[str, tuple[CoreSchema, bool]]) -> CoreSchema:
    fields = {
        name: (_schema(_annotated(info)), info.is_required() or name == "type")
        for name, info in model.model_fields.items()
    }
    return _table(dict(sorted({**fields, **more}.items())))


def _annotated(info: FieldInfo) -> Any:
    return Annotated[(info.annotation, *info.metadata)] if info.metadata else info.annotation


def _schema(annotation: Any) -> CoreSchema:
    """A model becomes an object, a tuple a list; all else is as the model has it."""
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return _fields(annotation, {})
    if get_origin(annotation) is tuple:
        return core_schema.list_schema(_schema(get_args(annotation)[0]))
    return _leaf(annotation)


_FRAMED = {name: (_leaf(_frame(name, pattern)), True) for name, pattern in FRAME.items()}
_LINE = SchemaValidator(
    core_schema.tagged_union_schema(
        {model.model_fields["type"].default: _fields(model, _FRAMED) for model in get_args(Record)},
        discriminator="type",
    )
)
_LIST = SchemaValidator(_schema(tuple[Tensor, ...]))
