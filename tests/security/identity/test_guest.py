"""The TLS identity that everybody has."""

import hashlib

import pytest
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)

from staddle.errors import LocalError
from staddle.files.documents import validate
from staddle.security.identity import keys as members
from staddle.security.identity.certificate import self_signed, subject_key, validity
from staddle.security.identity.domains import ENTRY, framed
from staddle.security.identity.guest import GUEST_CERTIFICATE, GUEST_SPKI, guest_key
from staddle.security.identity.keys import Role, RosterEntry, create_keys, load_keys


def test_the_certificate_has_the_key_and_is_valid_whatever_clocks_say():
    key = load_pem_private_key(guest_key(), None)
    public = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    assert subject_key(GUEST_CERTIFICATE) == public
    assert hashlib.sha256(public).hexdigest() == GUEST_SPKI
    first, last = validity(GUEST_CERTIFICATE)
    assert (first.year, last.year) == (2000, 9999)


def test_no_member_can_have_this_key(tmp_path):
    """Everybody could act as such a member."""
    create_keys(tmp_path / "s", "s", Role.SILO, "o")
    keys = load_keys(tmp_path / "s")
    certificate = self_signed("s", load_pem_private_key(guest_key(), None))
    fields = {"certificate": certificate, "spki_sha256": GUEST_SPKI}
    document = {**keys.entry.model_dump(mode="json"), **fields}
    signed = keys.protocol.sign(framed(ENTRY, members.entry_bytes(document)))
    with pytest.raises(LocalError, match="the TLS key of 's' is the guest's"):
        validate({**document, "signature": signed.hex()}, RosterEntry, "entry")
