"""What a silo signs about another one's ledger."""

from dataclasses import fields, replace

import pytest

from staddle.errors import PeerError
from staddle.security.identity.keys import Role, create_keys, load_keys
from staddle.security.log.attestation import Attestation

SAID = Attestation("lung", "ab" * 32, "silo-b", "silo-a", "cd" * 32, "origin\n3\nroot\n")


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys") / "silo-b"
    create_keys(folder, "silo-b", Role.SILO, "Hospital B")
    return load_keys(folder)


def test_it_is_what_was_signed_and_nothing_else(keys):
    signature = SAID.sign(keys)
    SAID.verify(keys.entry, signature)
    for field in fields(SAID):
        other = replace(SAID, **{field.name: getattr(SAID, field.name) + "0"})
        with pytest.raises(PeerError, match="silo-b: did not sign what it is said to hold"):
            other.verify(keys.entry, signature)
    with pytest.raises(PeerError):
        SAID.verify(keys.entry, signature[:-1] + bytes([signature[-1] ^ 1]))
    with pytest.raises(PeerError):
        SAID.verify(keys.entry, b"")
