"""The folder of a model: its files, their digests, and the signature over these.

::

    model.json           what it is (description.py)
    model.safetensors    its values, as a silo keeps them between rounds
    MODEL_CARD.md        the description for people
    signature.json       SHA-256 of the other files; who signed them, and the signature

A simulation has no keys: its models are not signed, and the digests alone show accidents. Whoever
can write to the folder can sign it with keys of its own, so a signature is worth what the reader
knows of the signer's key: ``verify`` compares it with a roster.
"""

import contextlib
import hashlib
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from pydantic import Field

from ..errors import LocalError, PeerError, UnwritableError, reason
from ..files.documents import (
    Strict,
    canonical_json,
    parse_json,
    read_bytes,
    sync_directory,
    unwritable,
    validate,
    write_new,
)
from ..files.file_bounds import open_regular
from ..security.identity.domains import MODEL
from ..security.identity.keys import Hex32, Hex64, Keys, Role, RosterEntry
from ..security.identity.roster import Roster
from .description import Description

DESCRIPTION, WEIGHTS, CARD, SIGNATURE = (
    "model.json",
    "model.safetensors",
    "MODEL_CARD.md",
    "signature.json",
)
FILES = (DESCRIPTION, WEIGHTS, CARD)
MOST_DESCRIPTION = 2**26  # bytes
AT_ONCE = 2**20  # bytes that are hashed at a time


class FolderSignature(Strict):
    """The file ``signature.json``; without a signer the digests alone."""

    files: Annotated[dict[str, Hex32], Field(max_length=len(FILES))]
    signer: RosterEntry | None = None
    signature: Hex64 | None = None

    @property
    def fault(self) -> str:
        """Why the signature does not hold; empty if it does, or nobody signed."""
        if set(self.files) != set(FILES):
            return f"names {', '.join(sorted(self.files))}, and a model has {', '.join(FILES)}"
        match self.signer, self.signature:
            case None, None:
                return ""
            case RosterEntry() as signer, str(signature):
                signed = _signed_bytes(self.files, signer.id)
                if signer.has_signed(MODEL, signed, bytes.fromhex(signature)):
                    return ""
                return f"its signature is not that of {signer.id!r}; it was changed since"
        return "has a signer and no signature, or a signature and no signer"


@dataclass(frozen=True)
class VerifiedFolder:
    """A folder whose files are those that its signature names."""

    path: Path
    description: Description
    signer: RosterEntry | None

    def check_signer(self, roster: Roster) -> None:
        """LocalError or PeerError unless a member of the roster signed it, with the roster's key.

        The member must be what the model says of its maker, in the roster's federation.
        """
        if self.signer is None:
            raise LocalError(f"{self.path}: nobody signed it: it comes from a simulation")
        known = roster[self.signer.id]
        if known != self.signer:
            raise PeerError(
                known.id,
                f"{self.path}: signed with another key than this member's in the roster; ask for"
                " the model again, and where it comes from",
            )
        if known.role is not Role(self.description.origin.kind):
            raise PeerError(
                known.id,
                f"{self.path}: its signer has the role {known.role.value}, and says that it was"
                f" made by a {self.description.origin.kind}; ask for the model again",
            )
        # Founders may give one key to members of two federations.
        if (own := self.description.origin.federation) != roster.federation:
            raise LocalError(
                f"{self.path}: made in federation {own!r}, and the roster is that of"
                f" {roster.federation!r}; give the roster of the model's federation"
            )

    def check_named(self, silo: str) -> None:
        """LocalError unless the model says that this silo made it."""
        origin = self.description.origin
        if origin.kind != "silo" or origin.name != silo:
            raise LocalError(
                f"{self.path}: made by {origin.kind} {origin.name}, not by silo {silo}; take the"
                " folder of that silo"
            )


def write(path: Path, files: Mapping[str, bytes], keys: Keys | None) -> None:
    """Make the folder, as a whole or not at all; UnwritableError where the disk does not take it.

    ``files`` are all but the signature. LocalError if something lies there already, or the
    description is longer than any that is read.
    """
    if path.exists():
        raise LocalError(f"{path}: exists already; move it away or choose another folder")
    if len(files.get(DESCRIPTION, b"")) > MOST_DESCRIPTION:
        raise LocalError(f"{path / DESCRIPTION}: larger than {MOST_DESCRIPTION:,} bytes")
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    signed = FolderSignature(files=digests)
    if keys is not None:
        signature = keys.sign(MODEL, _signed_bytes(digests, keys.entry.id)).hex()
        signed = FolderSignature(files=digests, signer=keys.entry, signature=signature)
    found = {**files, SIGNATURE: canonical_json(signed.model_dump(mode="json")) + b"\n"}

    # What a crash left of an earlier attempt.
    for left in path.parent.glob(f".{path.name}.*.tmp"):
        shutil.rmtree(left, ignore_errors=True)
    # Under another name first: whoever finds the folder finds all of it.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        temporary.mkdir(mode=0o700, parents=True)
        for name, data in found.items():
            write_new(temporary / name, data)
        temporary.rename(path)
        sync_directory(path.parent)
    except OSError as error:
        raise UnwritableError(f"{path}: cannot write it: {unwritable(error)}") from error
    finally:
        # Of no use to anybody, and the error is the one to tell.
        with contextlib.suppress(OSError):
            shutil.rmtree(temporary)


def read(path: Path) -> VerifiedFolder:
    """The folder, all of whose files are as they were signed; LocalError says which is not."""
    if not (path / DESCRIPTION).exists():
        raise LocalError(
            f"{path}: no model there; a model is a folder with {DESCRIPTION}, such as"
            " jobs/<job>/model of a silo's state"
        )
    signature = _signature(path / SIGNATURE)
    if fault := signature.fault:
        raise LocalError(f"{path / SIGNATURE}: {fault}; restore the folder, or ask for it again")
    for name, digest in signature.files.items():
        if _digest(path / name) != digest:
            raise LocalError(
                f"{path / name}: is not the file that was signed: it was changed since; restore the"
                " folder, or ask for it again"
            )
    document = parse_json(read_bytes(path / DESCRIPTION, MOST_DESCRIPTION), str(path / DESCRIPTION))
    description = validate(document, Description, str(path / DESCRIPTION))
    if hashlib.sha256(canonical_json(description.job)).hexdigest() != description.job_digest:
        raise LocalError(
            f"{path / DESCRIPTION}: job_digest is not that of its job; ask for the folder again"
        )
    # The same member made and signed it: else a silo's model could pass for another's.
    signer = signature.signer
    maker = None if description.origin.kind == "simulation" else description.origin.name
    if maker != (signer and signer.id):
        raise LocalError(
            f"{path}: made by {maker or 'a simulation'}, and signed by"
            f" {signer.id if signer else 'nobody'}; ask for it again"
        )
    return VerifiedFolder(path, description, signer)


def _signature(path: Path) -> FolderSignature:
    # To read a FIFO would be to wait for ever.
    with _opened(path):
        return validate(parse_json(read_bytes(path), str(path)), FolderSignature, str(path))


def _signed_bytes(files: Mapping[str, Any], signer: str) -> bytes:
    return canonical_json({"files": dict(files), "signer": signer})


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with _opened(path) as file:
        while piece := file.read(AT_ONCE):
            digest.update(piece)
    return digest.hexdigest()


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """A file of the folder, which may be from elsewhere; LocalError for a FIFO or a device."""
    try:
        with open_regular(path) as file:
            yield file
    except OSError as error:
        raise LocalError(f"{path}: cannot read it: {reason(error)}") from error
