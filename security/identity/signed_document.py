"""A signed document: from an operator to silos that do not trust the coordinator with it.

Canonical JSON, here with line breaks; the signature is over everything else in it, so it names its
signer and the roster under which it was made::

    {"document":{"method":"fedavg","rounds":20},"roster":"9f86d0…","signature":"a1b2…","signer":"operator-1"}
"""

from collections.abc import Mapping
from typing import Any

from ...errors import LocalError, PeerError
from ...files.documents import Strict, canonical_json, validate
from . import roster as rosters
from .keys import Hex32, Hex64, Id, Keys, Role


class SignedDocument(Strict):
    """A document, who signed it, and under which roster."""

    document: dict[str, Any]
    signer: Id
    roster: Hex32
    signature: Hex64

    def signed_bytes(self) -> bytes:
        """The bytes that are signed, behind the label.

        Canonical JSON of all fields but the signature: the signer and the roster are signed, too.
        """
        return canonical_json(self.model_dump(exclude={"signature"}))


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
        roster=rosters.digest(roster),
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

    # (3) It was made under the roster that we hold: under another one its signer meant other
    # members, or other keys of theirs.
    if found.roster != rosters.digest(roster):
        raise PeerError(
            signer.id,
            f"signed under roster {found.roster[:12]}…, we hold {rosters.digest(roster)[:12]}… "
            f"(version {roster.version}); bring both to one roster and sign again",
        )

    # (4) The signature holds, over these bytes and for this purpose.
    if not signer.has_signed(domain, found.signed_bytes(), bytes.fromhex(found.signature)):
        raise PeerError(
            signer.id, "its signature does not fit the document; it was changed after it was signed"
        )
    return found.document
