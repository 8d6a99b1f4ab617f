"""Any record of a ledger, from a verified line: whether its form is right, and typed."""

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import pydantic
from pydantic import Field

from ...errors import LocalError
from ...files.documents import Strict
from ..log.chain import FRAME, Line
from .protocol_records import ProtocolMessage, SumEnd, SumOpened, SumSigned
from .records import (
    ControlClose,
    ControlOpen,
    Delivered,
    Deny,
    Digest,
    HeadRefused,
    Ingress,
    Intent,
    JobAccept,
    JobDecline,
    KeyRotate,
    Outcome,
    PolicyChange,
    PrivacyHead,
    Received,
    Recovery,
    Serving,
    Start,
    Stop,
    Witness,
)

Record = (
    Start
    | Stop
    | Recovery
    | KeyRotate
    | JobAccept
    | JobDecline
    | PolicyChange
    | Intent
    | Digest
    | Outcome
    | ControlOpen
    | ControlClose
    | PrivacyHead
    | Witness
    | Ingress
    | Deny
    | Serving
    | Received
    | Delivered
    | HeadRefused
    | ProtocolMessage
    | SumEnd
    | SumOpened
    | SumSigned
)
_RECORDS: pydantic.TypeAdapter[Record] = pydantic.TypeAdapter(Annotated[Record, Field(discriminator="type")])
RecordT = TypeVar("RecordT", bound=Strict)


def checked(line: Line) -> dict[str, Any]:
    """The record of a verified line, whose form is right; LocalError names its seq and what is wrong with it."""
    if not line.typed:
        _validated(line, _RECORDS.validate_python)
    return line.record


def parse_record(line: Line, model: type[RecordT]) -> RecordT:
    """The typed record of a verified line of this type; LocalError names its seq and what is wrong with it."""
    return _validated(line, model.model_validate)


def parse_any(line: Line) -> Record:
    """The typed record of a verified line, whatever its type."""
    return _validated(line, _RECORDS.validate_python)


def _validated(line: Line, validate: Callable[[Any], RecordT]) -> RecordT:
    body = {key: value for key, value in line.record.items() if key not in FRAME}
    try:
        return validate(body)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "type"
        raise LocalError(f"seq {line.seq}: {where}: {first['msg']}") from None
