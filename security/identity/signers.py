"""The signers of a secure sum: the protocol keys of one roster's coordinator and silos."""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from .domains import framed
from .roster import Roster

# (domain, signed bytes) -> 64 bytes: ``Keys.sign`` of a member
Sign: TypeAlias = Callable[[bytes, bytes], bytes]


@dataclass(frozen=True, slots=True)
class Signers:
    """Raw Ed25519 keys, 32 bytes each; nobody else's signature holds."""

    coordinator: bytes
    silos: Mapping[str, bytes]

    @classmethod
    def of(cls, roster: Roster, among: Container[str] | None = None) -> "Signers":
        """The signers of a verified, complete roster; of its silos only those ``among``, if given.

        A sum is of one job, so a silo that is not of the job must not vouch for a survivor of it.
        """
        keys = {entry.id: bytes.fromhex(entry.protocol_key) for entry in roster.silos}
        if among is not None:
            keys = {silo: key for silo, key in keys.items() if silo in among}
        return cls(bytes.fromhex(roster.coordinator.protocol_key), keys)

    def by_coordinator(self, domain: bytes, signed_bytes: bytes, signature: bytes) -> bool:
        """True if the coordinator signed ``framed(domain, signed_bytes)``."""
        return _holds(self.coordinator, domain, signed_bytes, signature)

    def by_silo(self, silo: str, domain: bytes, signed_bytes: bytes, signature: bytes) -> bool:
        """True if this silo did; False for a stranger."""
        return silo in self.silos and _holds(self.silos[silo], domain, signed_bytes, signature)


def _holds(public: bytes, domain: bytes, signed_bytes: bytes, signature: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, framed(domain, signed_bytes))
    except (InvalidSignature, ValueError):
        return False
    return True
