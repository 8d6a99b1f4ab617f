"""The key that all silos of a roster share and the coordinator, which relays it, never has: SECURITY.md rule 13.

Each silo gives 32 random bytes, sealed to every other silo (sealing.py) and signed. What they make, in order of ids::

    ctx   SHA-256(framed(GROUP_CONTEXT, federation, roster digest, epoch))
    all   SHA-256(framed(GROUP_ALL, sealing_1, …, sealing_n))
    key   HKDF(secret_1 ‖ … ‖ secret_n, salt = ctx, info = framed(GROUP_KEY, all))

One honest silo's bytes make the key unknown to the coordinator and uniform. A roster of other members has another key:
a new epoch. Where a silo signed two contributions to one epoch, and the coordinator showed each to half of the others,
their keys differ: then no tag fits and no row opens.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import Field

from ..errors import LocalError
from ..files import Strict
from . import roster as rosters
from .labels import GROUP_ALL, GROUP_CONTEXT, GROUP_CONTRIBUTION, GROUP_KEY, GROUP_SEAL, framed
from .pairwise import derive
from .sealing import Letter, Sealed, Sealing, check_sealed, is_secret, open_letter, seal_to_all
from .secagg_fault import COORDINATOR, Code, check, passed_on
from .signers import Sign, Signers

MOST_EPOCHS = 2**53 - 1


@dataclass(frozen=True, slots=True)
class Epoch:
    """One agreement on the key: its number, the roster (digest, hex) and the X25519 key of each silo, 32 bytes."""

    number: int
    federation: str
    roster: str
    exchange_keys: Mapping[str, bytes]

    @classmethod
    def of(cls, roster: rosters.Roster, number: int) -> "Epoch":
        """The epoch of all silos of a verified roster."""
        keys = {entry.id: bytes.fromhex(entry.exchange_key) for entry in roster.silos}
        return cls(number, roster.federation, rosters.digest(roster), keys)

    def context(self) -> bytes:
        """Ctx, 32 bytes."""
        fields = (self.federation.encode(), bytes.fromhex(self.roster), self.number.to_bytes(8))
        return hashlib.sha256(framed(GROUP_CONTEXT, *fields)).digest()

    def others(self, silo: str) -> dict[str, bytes]:
        """The X25519 keys of all silos but this one."""
        if silo not in self.exchange_keys:
            raise LocalError(f"{silo!r} is no silo of the roster, so it has no part in its key; ask the founders")
        return {other: key for other, key in self.exchange_keys.items() if other != silo}


@dataclass(frozen=True, slots=True)
class Contribution:
    """A silo's signed word on what it gives to an epoch."""

    sealing: Sealing
    signature: bytes

    def check(self, epoch: Epoch, signers: Signers) -> None:
        """RefusedError unless a silo of this epoch signed it for this epoch."""
        sender = self.sealing.sender
        check(sender in epoch.exchange_keys, sender, Code.KEYS, "is no silo of the roster that this key is made under")
        signed = signers.by_silo(sender, GROUP_CONTRIBUTION, _payload(epoch, self.sealing), self.signature)
        check(signed, sender, Code.KEYS, f"its signature does not fit what it gives to the key of epoch {epoch.number}")
        self.sealing.check()


@dataclass(frozen=True, slots=True)
class Relayed:
    """Another silo's contribution as the coordinator brings it to one silo."""

    contribution: Contribution
    letter: Letter


def contribute(
    epoch: Epoch, silo: str, secret: bytes, ephemeral: bytes, sign: Sign
) -> tuple[Contribution, tuple[Sealed, ...]]:
    """What a silo sends: two fresh seeds of 32 bytes, used for nothing else; it keeps ``secret`` and what it signed."""
    sealing, pieces = seal_to_all(epoch.context(), GROUP_SEAL, silo, secret, ephemeral, epoch.others(silo))
    return Contribution(sealing, sign(GROUP_CONTRIBUTION, _payload(epoch, sealing))), pieces


def check_contribution(epoch: Epoch, contribution: Contribution, pieces: Sequence[Sealed], signers: Signers) -> None:
    """At the coordinator, before it passes anything on: RefusedError names the silo that sent this."""
    contribution.check(epoch, signers)
    check_sealed(contribution.sealing, pieces, tuple(epoch.others(contribution.sealing.sender)))


def make_key(
    epoch: Epoch, silo: str, seed: bytes, own: Contribution, secret: bytes, relayed: Sequence[Relayed], signers: Signers
) -> bytes:
    """The key, 32 bytes, at one silo; ``seed`` is its raw X25519 key of the roster, ``own`` and ``secret`` it gave.

    The steps run in order; RefusedError says who is to blame.
    """
    ctx, others = epoch.context(), epoch.others(silo)
    # (1) Each other silo contributed once; the coordinator brings neither fewer nor more.
    senders = sorted(each.contribution.sealing.sender for each in relayed)
    missing = sorted(set(others) - set(senders))
    doubled = sorted({sender for sender in senders if senders.count(sender) > 1})
    strangers = sorted(set(senders) - set(others))
    for found, what in ((missing, "lacks those of"), (doubled, "doubles those of"), (strangers, "has some of")):
        why = f"what it brings of contributions to the key of epoch {epoch.number} {what} {', '.join(found)}"
        check(not found, COORDINATOR, Code.KEYS, why)
    # (2) Each is signed for this epoch of this roster; the coordinator could see that itself.
    with passed_on():
        for each in relayed:
            each.contribution.check(epoch, signers)
    # (3) Each letter is for us, and opens to what its sender committed to.
    secrets = {silo: secret}
    if own.sealing.sender != silo or not is_secret(ctx, GROUP_SEAL, own.sealing, secret):
        raise LocalError(f"this is not what {silo!r} gave to the key of epoch {epoch.number}; begin a new epoch")
    for each in relayed:
        sealing = each.contribution.sealing
        ours = each.letter.sealed.recipient == silo
        check(ours, COORDINATOR, Code.SHARES, f"brings {silo!r} a letter for {each.letter.sealed.recipient!r}")
        among = tuple(epoch.others(sealing.sender))
        secrets[sealing.sender] = open_letter(ctx, GROUP_SEAL, sealing, each.letter, among, seed)
    # (4) All of them make the key, in order of ids.
    sealings = {silo: own.sealing, **{each.contribution.sealing.sender: each.contribution.sealing for each in relayed}}
    everything = hashlib.sha256(framed(GROUP_ALL, *(sealings[name].encoded() for name in sorted(sealings)))).digest()
    return derive(b"".join(secrets[name] for name in sorted(secrets)), ctx, framed(GROUP_KEY, everything))


class EpochMemory(Strict):
    """The newest epoch that a silo gave to, durable before its contribution leaves.

    Canonical JSON: ``{"number":3,"roster":"9f86…"}``.
    """

    number: Annotated[int, Field(strict=True, ge=-1, le=MOST_EPOCHS)] = -1
    roster: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""

    def entered(self, epoch: Epoch) -> Self:
        """Memory of giving to an epoch; RefusedError unless it is newer than all before."""
        why = f"asks for a contribution to epoch {epoch.number} after that to epoch {self.number}"
        check(epoch.number > self.number, COORDINATOR, Code.ATTEMPT, why)
        return type(self)(number=epoch.number, roster=epoch.roster)

    def check_current(self, number: int, roster: str) -> None:
        """RefusedError unless what is bound to this epoch and roster (digest, hex) is bound to ours."""
        why = f"names key epoch {number} under roster {roster[:12]}…, ours is {self.number} under {self.roster[:12]}…"
        check((number, roster) == (self.number, self.roster), COORDINATOR, Code.SPEC, why)


def _payload(epoch: Epoch, sealing: Sealing) -> bytes:
    return framed(epoch.context(), sealing.encoded())
