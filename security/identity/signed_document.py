"""A signed document: from an operator to silos that do not trust the coordinator with it.

Canonical JSON, here with line breaks; the signature is over everything else in it, so it names its
signer, and by a digest the coordinator and silos that its signer meant::

    {"document":{"rounds":20,"silos":["a","b"]},"members":"9f86d0…","signature":"a1b2…","signer":"operator-1"}
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import LocalError, PeerError, check_local
from ...files.documents import Strict, canonical_json, read_bytes, validate
from . import roster as rosters
from .keys import Hex32, Hex64, Id, Keys, Role


class SignedDocument(Strict):
    """A document, who signed it, and the digest of the members that it is for."""

    document: dict[str, Any]
    signer: Id
    members: Hex32  # ``rosters.members_digest`` of the document's ``silos``
    signature: Hex64

    def signed_bytes(self) -> bytes:
        """The bytes that are signed, behind the label.

        Canonical JSON of all fields but the signature: the signer and the members are signed, too.
        """
        return canonical_json(self.model_dump(exclude={"signature"}))


def read_signed(path: Path) -> bytes:
    """A file that may be a signed job; LocalError for one of another kind, such as a job file."""
    data = read_bytes(path)
    check_local(
        data.startswith(b"{"),
        f"{path}: not a signed job, which staddle job sign makes of a job file",
    )
    return data


def sign_document(
    document: Mapping[str, Any], roster: rosters.Roster, keys: Keys, domain: bytes
) -> dict[str, Any]:
    """Sign a document under a roster that knows these keys.

    ``domain`` is the kind of document (domains.py). LocalError for keys that the roster does not
    list.
    """
    # Under a roster that does not list these very keys nobody could verify the signature.
    signer = keys.entry
    if signer.id not in roster or roster[signer.id] != signer:
        raise LocalError(
            f"{signer.id!r} with these keys is not in roster version {roster.version}; have it"
            " added first"
        )
    found = SignedDocument(
        document=dict(document),
        signer=signer.id,
        members=_members(document, roster),
        # A placeholder of the right form, which the signed bytes leave out.
        signature="0" * 128,
    )
    return {
        **found.model_dump(),
        "signature": keys.sign(domain, found.signed_bytes()).hex(),
    }


def verify_document(
    signed: Any, roster: rosters.Roster, role: Role, domain: bytes
) -> dict[str, Any]:
    """Check a signed document, as parsed, and return what was signed; the steps run in order.

    ``roster`` must itself be verified. PeerError names the signer once it is known, LocalError
    what is no signed document.
    """
    # (1) It is a signed document.
    found = validate(signed, SignedDocument, "signed document")

    # (2) A member signed it, whose role may.
    signer = roster[found.signer]
    if signer.role is not role:
        raise PeerError(
            signer.id,
            f"has role {signer.role}, and only a member of role {role} may sign this document",
        )

    # (3) The signature holds, over these bytes and for this purpose.
    if not signer.has_signed(domain, found.signed_bytes(), bytes.fromhex(found.signature)):
        raise PeerError(
            signer.id, "its signature does not fit the document; it was changed after it was signed"
        )

    # (4) Its signer meant the same coordinator and silos, with the same keys, as our roster does.
    # Other members may have come or gone since.
    if found.members != _members(found.document, roster):
        raise PeerError(
            signer.id,
            "signed for a coordinator and silos that are not those of our roster, version"
            f" {roster.version}: one of them came, went or has other keys. If our roster is older"
            " than the signer's, take over the newest (staddle silo check does); otherwise the"
            " document has to be signed again",
        )
    return found.document


def _members(document: Mapping[str, Any], roster: rosters.Roster) -> str:
    silos = document.get("silos")
    # Others check what it says; a malformed list names nobody.
    return rosters.members_digest(roster, silos if isinstance(silos, list | tuple) else ())
