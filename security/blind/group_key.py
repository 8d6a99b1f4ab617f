"""The key that all silos of a job share and the coordinator, which relays it, never has:
security rule 13.

Each silo contributes 32 random bytes, sealed to every other one (sealing.py), and a prekey: a fresh
X25519 key, public half, for what is sealed to it within the job. It signs both. What they make, in
order of ids::

    ctx   SHA-256(framed(GROUP_CONTEXT, federation, members digest, job digest, epoch))
    all   SHA-256(framed(GROUP_ALL, sealing_1, prekey_1, …, sealing_n, prekey_n))
    key   HKDF(secret_1 ‖ … ‖ secret_n, salt = ctx, info = framed(GROUP_KEY, all))

One honest silo's bytes make the key unknown to the coordinator and uniform. It is of one job and
its members: silos of another job, or with other keys, have nothing of it. Where a silo signed two
contributions to one epoch, and the coordinator showed each to half of the others, their keys
differ. So each round's specification has ``all`` (``RoundSpec.key_parts``): silos sign nothing with
others that made another key, and give nothing under it.

The seeds of a Mix are sealed to prekeys (padded_mix.py), to this first one and then to later
generations (prekeys.py). Silos erase the files of the private halves, all of them by the job's end:
what was uploaded is opened by nobody then, whatever other key of theirs is taken later (security
rules 10 and 11).
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ...errors import LocalError, check_local
from ..faults import COORDINATOR, Code, check, passed_on
from ..identity import roster as rosters
from ..identity.domains import (
    GROUP_ALL,
    GROUP_CONTEXT,
    GROUP_CONTRIBUTION,
    GROUP_KEY,
    GROUP_SEAL,
    framed,
)
from ..identity.pairwise_keys import KEY_BYTES, check_public, derive, public_key
from ..identity.signers import Sign, Signers
from .sealing import (
    Letter,
    SealedSecret,
    Sealing,
    check_sealed,
    is_secret,
    open_letter,
    seal_to_all,
)


@dataclass(frozen=True, slots=True)
class Epoch:
    """One agreement on the key: members and job (digests, hex), and each silo's X25519 key.

    ``exchange_keys`` are raw X25519 public keys of the roster, 32 bytes each, by silo of the job.
    The context covers number, federation, job and members, and those have the keys. So nothing
    that is signed for one epoch holds in another.
    """

    number: int
    federation: str
    members: str  # ``rosters.members_digest`` of the job's silos
    job: str
    exchange_keys: Mapping[str, bytes]

    @classmethod
    def of(
        cls, roster: rosters.Roster, job_silos: Sequence[str], job_digest: str, number: int = 0
    ) -> "Epoch":
        """The epoch of a job under a verified roster.

        LocalError where one of its silos is not of the roster.
        """
        # Nothing can be sealed to a silo that left the roster, so a key without it is refused.
        keys = {
            entry.id: bytes.fromhex(entry.exchange_key)
            for entry in roster.silos
            if entry.id in job_silos
        }
        gone = sorted(set(job_silos) - set(keys))
        check_local(
            not gone,
            f"the job has {', '.join(gone)}, of which roster version {roster.version} has no"
            " silo; sign the job again, for silos of the roster",
        )
        members = rosters.members_digest(roster, job_silos)
        return cls(number, roster.federation, members, job_digest, keys)

    def context(self) -> bytes:
        """Ctx, 32 bytes."""
        digests = (bytes.fromhex(self.members), bytes.fromhex(self.job))
        return hashlib.sha256(
            framed(GROUP_CONTEXT, self.federation.encode(), *digests, self.number.to_bytes(8))
        ).digest()

    def others(self, silo: str) -> dict[str, bytes]:
        """The X25519 keys of all its silos but this one."""
        check_local(
            silo in self.exchange_keys,
            f"{silo!r} is not a silo of the job, so it has no part in its key; ask who signed"
            " the job",
        )
        return {other: key for other, key in self.exchange_keys.items() if other != silo}


@dataclass(frozen=True, slots=True)
class KeyContribution:
    """A silo's signed word on what it gives to an epoch.

    ``prekey`` is a public X25519 key, 32 bytes.
    """

    sealing: Sealing
    prekey: bytes
    signature: bytes

    def check(self, epoch: Epoch, signers: Signers) -> None:
        """RefusedError unless a silo of this epoch signed it for this epoch."""
        sender = self.sealing.sender
        check(
            sender in epoch.exchange_keys,
            sender,
            Code.KEYS,
            "is not a silo of the job that this key is of",
        )
        signed = signers.by_silo(
            sender,
            GROUP_CONTRIBUTION,
            _signed_bytes(epoch, self.sealing, self.prekey),
            self.signature,
        )
        check(
            signed,
            sender,
            Code.KEYS,
            f"its signature does not fit what it contributes to the key of epoch {epoch.number}",
        )
        self.sealing.check()
        # A seed sealed to a key of low order would open for everybody.
        check(
            len(self.prekey) == KEY_BYTES,
            sender,
            Code.KEYS,
            f"its prekey has {len(self.prekey)} bytes",
        )
        check_public(self.prekey, sender)


@dataclass(frozen=True, slots=True)
class Relayed:
    """Another silo's contribution as the coordinator brings it to one silo.

    ``letter`` is this silo's sealed piece, with its proof under the signed root.
    """

    contribution: KeyContribution
    letter: Letter


@dataclass(frozen=True, slots=True)
class JobKeys:
    """A silo's keys of a job, 32 bytes each.

    The private halves of its prekeys are kept apart, since they are erased one by one.
    """

    key: bytes = field(repr=False)  # that all its silos share
    parts: bytes  # ``parts_of`` it, public
    others: Mapping[str, bytes]  # the first prekeys of the others, public


def contribute(
    epoch: Epoch, silo: str, secret: bytes, ephemeral: bytes, prekey: bytes, sign: Sign
) -> tuple[KeyContribution, tuple[SealedSecret, ...]]:
    """A silo's contribution, made of three fresh seeds of 32 bytes that are used for nothing else.

    The caller has made all three durable before the contribution leaves. It keeps ``secret`` until
    it has the key, and ``prekey``, the private half, while something may be sealed to it.
    """
    sealing, pieces = seal_to_all(
        epoch.context(), GROUP_SEAL, silo, secret, ephemeral, epoch.others(silo)
    )
    public = public_key(prekey)
    return (
        KeyContribution(
            sealing, public, sign(GROUP_CONTRIBUTION, _signed_bytes(epoch, sealing, public))
        ),
        pieces,
    )


def check_contribution(
    epoch: Epoch, contribution: KeyContribution, pieces: Sequence[SealedSecret], signers: Signers
) -> None:
    """At the coordinator, before it passes anything on: RefusedError names the sender.

    It checks the signature, sizes, and that there is one piece for each other silo of the job.
    Only its recipient can check what a piece seals.
    """
    contribution.check(epoch, signers)
    sender = contribution.sealing.sender
    check_sealed(contribution.sealing, pieces, tuple(epoch.others(sender)))
    # Generation 0 means the recipient's key of the roster: there are no prekeys before the job's
    # key is made.
    late = [piece.recipient for piece in pieces if piece.generation]
    check(
        not late, sender, Code.SHARES, f"sealed its part in a key to prekeys of {', '.join(late)}"
    )


def parts_of(given: Iterable[KeyContribution]) -> bytes:
    """``all`` of the key that these contributions make, 32 bytes: public, and one per key."""
    ordered = sorted(given, key=lambda each: each.sealing.sender)
    fields = (field for each in ordered for field in (each.sealing.encoded(), each.prekey))
    return hashlib.sha256(framed(GROUP_ALL, *fields)).digest()


def make_key(
    epoch: Epoch,
    silo: str,
    seed: bytes,
    own: KeyContribution,
    secret: bytes,
    relayed: Sequence[Relayed],
    signers: Signers,
) -> bytes:
    """The key, 32 bytes, at one silo.

    ``seed`` is its raw X25519 key of the roster, ``own`` and ``secret`` it gave.

    The steps run in order; RefusedError says who is to blame.
    """
    ctx, others = epoch.context(), epoch.others(silo)
    # (1) Each other silo contributed once; the coordinator brings neither fewer nor more: a key
    # without an honest silo's bytes could be known to it.
    senders = sorted(each.contribution.sealing.sender for each in relayed)
    missing = sorted(set(others) - set(senders))
    doubled = sorted({sender for sender in senders if senders.count(sender) > 1})
    strangers = sorted(set(senders) - set(others))
    for found, what in (
        (missing, "lacks those of"),
        (doubled, "doubles those of"),
        (strangers, "has some of"),
    ):
        why = (
            f"what it brings of contributions to the key of epoch {epoch.number} {what}"
            f" {', '.join(found)}"
        )
        check(not found, COORDINATOR, Code.KEYS, why)

    # (2) Each is signed for this epoch of this roster; the coordinator could see that itself.
    with passed_on():
        for each in relayed:
            each.contribution.check(epoch, signers)

    # (3) Each letter is for us, and opens to what its sender committed to.
    secrets = {silo: secret}
    # Our own secret, too: if it is not the one that we sealed, we would make a key of our own.
    if own.sealing.sender != silo or not is_secret(ctx, GROUP_SEAL, own.sealing, secret):
        raise LocalError(
            f"this is not what {silo!r} gave to the key of epoch {epoch.number}; begin a new epoch"
        )
    for each in relayed:
        sealing = each.contribution.sealing
        ours = each.letter.sealed.recipient == silo
        check(
            ours,
            COORDINATOR,
            Code.SHARES,
            f"brings {silo!r} a letter for {each.letter.sealed.recipient!r}",
        )
        among = tuple(epoch.others(sealing.sender))
        secrets[sealing.sender] = open_letter(ctx, GROUP_SEAL, sealing, each.letter, among, seed)

    # (4) All of them make the key, in order of ids. What was signed is in the key as well, so silos
    # that were shown different contributions have different keys.
    everything = parts_of((own, *(each.contribution for each in relayed)))
    return derive(
        b"".join(secrets[name] for name in sorted(secrets)), ctx, framed(GROUP_KEY, everything)
    )


def _signed_bytes(epoch: Epoch, sealing: Sealing, prekey: bytes) -> bytes:
    return framed(epoch.context(), sealing.encoded(), prekey)
