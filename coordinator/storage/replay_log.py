"""The events of a round's secure sum as rows: durable before they take effect, replayed in order.

::

    kind      body
    begun     the specification of an attempt: canonical JSON, as it is signed
    given     a silo's message: SecureUpload of proto/secure.proto, without its session
    spooled   {"sha256":"9a0b…","silo":"a","size":248200}, an upload that is here whole
    failed    {"code":"lost","silo":"a"}
    deadline  {"stage":"keys"}
    opened    {"sha256":"e3b0…"}
    unopened  {"spoiled":true,"why":"canaries of chunk 0 …"}

Of closed rounds there may be a row of kind "settled": coordinator/blind/settled.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from ...files.documents import canonical_json, parse_canonical, parse_json
from ...proto import secure_pb2 as pb
from ...proto.convert.secagg_sent import SecaggUpload, secagg_upload_from_wire
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
    """The cohort is asked to join an attempt; its first entry."""

    spec: RoundSpec


@dataclass(frozen=True)
class Said:
    """A silo's message; ``given`` without its session, and the bytes of its row.

    Messages to the silo are not logged: they follow from earlier entries.
    """

    silo: str
    given: SecaggUpload
    row: bytes


@dataclass(frozen=True)
class Spooled:
    """A silo's masked words arrived whole; ``sha256`` is of all of them."""

    silo: str
    size: int
    sha256: bytes


# Entries whose body is their fields in JSON, digests in hex.
Plain: TypeAlias = Spooled | SiloDropped | AttemptDeadline | SumPublished | OpenFailed
Entry: TypeAlias = Begun | Said | Plain
_PLAIN: Mapping[str, type[Plain]] = {
    "spooled": Spooled,
    "failed": SiloDropped,
    "deadline": AttemptDeadline,
    "opened": SumPublished,
    "unopened": OpenFailed,
}
_KINDS = {entry: kind for kind, entry in _PLAIN.items()}


@dataclass(frozen=True)
class ReplayEntry:
    """One entry as it is kept; ``silo`` is empty but for a silo's message.

    The table at the top of this module lists the bodies.
    """

    attempt: int
    kind: str
    silo: str
    body: bytes


def said(silo: str, given: SecaggUpload, message: pb.SecureUpload) -> Said:
    """A silo's message, read from ``message``, as it may be kept."""
    # A session is a secret between this process and the silo, and void after a restart.
    kept = pb.SecureUpload()
    kept.CopyFrom(message)
    kept.ClearField("session")
    row = kept.SerializeToString(deterministic=True)
    return Said(silo, replace(given, session=NO_SESSION), row)


def dumped(attempt: int, entry: Entry) -> ReplayEntry:
    """The row of an entry.

    The same entry gives the same bytes.
    """
    match entry:
        case Begun(spec):
            return ReplayEntry(attempt, "begun", "", spec.signed_bytes())
        case Said(silo, _, row):
            return ReplayEntry(attempt, "given", silo, row)
        case plain:
            fields = vars(plain).items()
            body = {name: each.hex() if isinstance(each, bytes) else each for name, each in fields}
            return ReplayEntry(attempt, _KINDS[type(plain)], "", canonical_json(body))


def loaded(row: ReplayEntry) -> Entry:
    """The entry of a row that ``dumped`` made.

    LocalError or RefusedError for one that something else did.
    """
    origin = "a row of table secure in coordinator.sqlite"
    if row.kind == "begun":
        return Begun(parse_canonical(row.body, RoundSpec, origin))
    if row.kind == "given":
        message = pb.SecureUpload.FromString(row.body)
        # The reader refuses a message without a session.
        message.session = NO_SESSION
        return Said(row.silo, secagg_upload_from_wire(row.silo, message), row.body)
    fields = parse_json(row.body, origin)
    # Only digests are bytes; JSON has them in hex.
    if "sha256" in fields:
        fields["sha256"] = bytes.fromhex(fields["sha256"])
    return _PLAIN[row.kind](**fields)
