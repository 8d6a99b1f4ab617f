"""What happens in a round's secure sum, as rows of the database: durable before it takes effect,
replayed in order.

::

    kind      body
    begun     the specification of an attempt: canonical JSON, as it is signed
    given     what a silo gave: SecureUpload of proto/secure.proto, without its session
    spooled   {"sha256":"9a0b…","silo":"a","size":248200}, an upload that is here whole
    failed    {"code":"lost","silo":"a"}
    deadline  {"stage":"keys"}
    opened    {"sha256":"e3b0…"}
    unopened  {"spoiled":true,"why":"canaries of chunk 0 …"}

Of closed rounds there may be a row of kind "settled": coordinator/blind/settled.py.
"""

from dataclasses import dataclass, replace
from typing import TypeAlias

from ...files.documents import canonical_json, parse_canonical, parse_json
from ...proto import secure_pb2 as pb
from ...proto.convert.secagg_sent import (
    SecaggUpload,
    secagg_upload_from_wire,
    secagg_upload_to_wire,
)
from ...security.secagg.coordinator_events import (
    AttemptDeadline,
    OpenFailed,
    SiloDropped,
    SumPublished,
)
from ...security.secagg.spec import RoundSpec

SETTLED = "settled"  # the kind of a row that outlives its round
NO_SESSION = b"-"  # in place of one: what is kept holds none


@dataclass(frozen=True)
class Begun:
    """The cohort is asked into an attempt."""

    spec: RoundSpec


@dataclass(frozen=True)
class Said:
    """A silo gave a message; ``given`` without its session."""

    silo: str
    given: SecaggUpload


@dataclass(frozen=True)
class Spooled:
    """A silo's masked words are here whole; ``sha256`` is of all of them."""

    silo: str
    size: int
    sha256: bytes


Entry: TypeAlias = (
    Begun | Said | Spooled | SiloDropped | AttemptDeadline | SumPublished | OpenFailed
)


@dataclass(frozen=True)
class ReplayEntry:
    """One entry as it is kept; ``silo`` is empty but for what a silo gave."""

    attempt: int
    kind: str
    silo: str
    body: bytes


def said(silo: str, given: SecaggUpload) -> Said:
    """What a silo gave, as it may be kept."""
    return Said(silo, replace(given, session=NO_SESSION))


def dumped(attempt: int, entry: Entry) -> ReplayEntry:
    """The row of an entry."""
    match entry:
        case Begun(spec):
            return ReplayEntry(attempt, "begun", "", spec.payload())
        case Said(silo, given):
            message = secagg_upload_to_wire(given)
            message.ClearField("session")
            return ReplayEntry(
                attempt, "given", silo, message.SerializeToString(deterministic=True)
            )
        case Spooled(silo, size, sha256):
            return _plain(attempt, "spooled", sha256=sha256.hex(), silo=silo, size=size)
        case SiloDropped(silo, code):
            return _plain(attempt, "failed", code=code, silo=silo)
        case AttemptDeadline(stage):
            return _plain(attempt, "deadline", stage=stage)
        case SumPublished(sha256):
            return _plain(attempt, "opened", sha256=sha256.hex())
        case OpenFailed(why, spoiled):
            return _plain(attempt, "unopened", spoiled=spoiled, why=why)


def loaded(row: ReplayEntry) -> Entry:
    """The entry of a row that ``dumped`` made.

    LocalError or RefusedError for one that something else did.
    """
    origin = "a row of table secure in coordinator.sqlite"
    if row.kind == "begun":
        return Begun(parse_canonical(row.body, RoundSpec, origin))
    if row.kind == "given":
        message = pb.SecureUpload.FromString(row.body)
        message.session = NO_SESSION
        return Said(row.silo, secagg_upload_from_wire(row.silo, message))
    kept = parse_json(row.body, origin)
    match row.kind:
        case "spooled":
            return Spooled(kept["silo"], kept["size"], bytes.fromhex(kept["sha256"]))
        case "failed":
            return SiloDropped(kept["silo"], kept["code"])
        case "deadline":
            return AttemptDeadline(kept["stage"])
        case "opened":
            return SumPublished(bytes.fromhex(kept["sha256"]))
        case _:
            return OpenFailed(kept["why"], kept["spoiled"])


def _plain(attempt: int, kind: str, **fields: str | int) -> ReplayEntry:
    return ReplayEntry(attempt, kind, "", canonical_json(fields))
