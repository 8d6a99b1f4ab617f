"""Prekeys of a job's silos, in generations: what seeds were sealed to is erased during the job.

A silo's prekey of generation 0 stands in its contribution to the job's key (group_key.py). With
each padded upload that it signs it publishes one of the next generation, signed and bound to that
upload (security rules 10 and 11)::

    signed   framed(MIX_PREKEY, ctx of the upload, root of the seed that it sealed, generation, key)

Seeds are sealed to the newest prekey that their sender knows of each silo. Which generation of ours
a seed is sealed to stands in the leaf under the root (sealing.py), so that this signature is the
sender's word on it too. A silo erases a generation when no upload that may still come is sealed to
it: each other silo's newest upload, of each part that still comes down, and those of the rows that
it has just opened, are all sealed to later ones. A sender never goes back to an earlier generation,
so neither do the uploads that are still on their way.

The coordinator hands these words down and may hold them back. Then seeds are still sealed to old
prekeys, and these stay: it gains no seed by that, and who seizes a silo's disk finds more.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from pydantic import Field

from ...errors import LocalError
from ...files.documents import Strict
from ..faults import COORDINATOR, Code, check, passed_on
from ..identity.domains import MIX_PREKEY, framed
from ..identity.keys import Hex32, Id
from ..identity.pairwise_keys import KEY_BYTES, check_public, public_key
from ..identity.selection import all_but
from ..identity.signers import Sign, Signers
from .mix_context import MixContext, Number, Version
from .sealing import Letter, check_letter


@dataclass(frozen=True, slots=True)
class Prekey:
    """A public X25519 key, 32 bytes, published with an upload; its generation is 1 or later."""

    generation: int
    key: bytes
    signature: bytes

    def check(self, line: MixContext, version: Version, root: bytes, signers: Signers) -> None:
        """RefusedError, for the silo, unless it signed this prekey together with this upload.

        ``root`` is of the seed that it sealed.

        The steps run in order.
        """
        silo = version.silo
        # (1) It signed it.
        signed_bytes = _signed_bytes(line, version, root, self.generation, self.key)
        signed = signers.by_silo(silo, MIX_PREKEY, signed_bytes, self.signature)
        check(signed, silo, Code.KEYS, "its signature does not fit the prekey of its upload")

        # (2) It is a key that something can be sealed to, of a generation of its own: generation 0
        # is the prekey in the contribution to the job's key.
        check(self.generation > 0, silo, Code.KEYS, "publishes another prekey of generation 0")
        check(len(self.key) == KEY_BYTES, silo, Code.KEYS, f"its prekey has {len(self.key)} bytes")
        check_public(self.key, silo)


@dataclass(frozen=True, slots=True)
class Word:
    """Another silo's prekey as the coordinator delivers it, with its newest upload of a part.

    ``letter`` is what the upload has for the recipient: it says to which generation its seed is
    sealed, and is not opened for that.
    """

    version: Version
    root: bytes
    prekey: Prekey
    letter: Letter

    def check(self, line: MixContext, silo: str, signers: Signers) -> None:
        """At ``silo``: RefusedError, for the coordinator, unless another silo signed all for us."""
        sender = self.version.silo
        check(sender != silo, COORDINATOR, Code.KEYS, f"brings {silo!r} a prekey of its own")
        with passed_on():
            self.prekey.check(line, self.version, self.root, signers)
        check_letter(self.root, self.letter, sender, silo, all_but(signers.silos, sender))


def publish(
    line: MixContext, version: Version, root: bytes, generation: int, seed: bytes, sign: Sign
) -> Prekey:
    """At the silo, for an upload whose sealed seed has this root.

    ``seed``, the private half, is durable already.
    """
    key = public_key(seed)
    return Prekey(
        generation, key, sign(MIX_PREKEY, _signed_bytes(line, version, root, generation, key))
    )


def _signed_bytes(
    line: MixContext, version: Version, root: bytes, generation: int, key: bytes
) -> bytes:
    return framed(version.context(line), root, generation.to_bytes(8), key)


class Newest(Strict):
    """The newest known prekey of another silo.

    ``key`` is its public half in hex. Seeds for that silo are sealed to it, and never again to an
    earlier one.
    """

    generation: Number
    key: Hex32


class SealedGeneration(Strict):
    """Another silo's newest upload of a part: its number, and the generation of ours it uses.

    Only the newest upload of a part can still be delivered, apart from rows that were opened last.
    So it determines which generations must be kept.
    """

    number: Number
    generation: Number


class Known(Strict):
    """A silo's knowledge of the prekeys of its job: no secret.

    Durable before a seed is sealed, or a key is erased.

    Canonical JSON, here broken: ``{"newest":{"b":{"generation":3,"key":"9f86…"}},``
    ``"sealed":{"extractor":{"b":{"generation":2,"number":4}}}}``
    """

    newest: dict[Id, Newest] = Field(default_factory=dict)  # of other silos
    sealed: dict[str, dict[Id, SealedGeneration]] = Field(default_factory=dict)  # by part

    @classmethod
    def first(cls, keys: Mapping[str, bytes]) -> Self:
        """At the start, of the prekeys of generation 0 of all other silos."""
        return cls(newest={silo: Newest(generation=0, key=key.hex()) for silo, key in keys.items()})

    def keys(self) -> dict[str, bytes]:
        """The public keys, 32 bytes each, to which seeds are sealed, by silo."""
        return {silo: bytes.fromhex(each.key) for silo, each in self.newest.items()}

    def generations(self) -> dict[str, int]:
        """The generations of ``keys``."""
        return {silo: each.generation for silo, each in self.newest.items()}

    def heard(self, part: str, word: Word) -> Self:
        """After a word that was checked; an older prekey than is known changes nothing.

        RefusedError names a silo.
        """
        # A sender never goes back, so an older word is one that the coordinator held back.
        silo, prekey = word.version.silo, word.prekey
        known = self.newest.get(silo)
        if known is None:
            raise LocalError(f"{silo!r} is not another silo of the job; this is a bug in Staddle")
        newest = self.newest
        if prekey.generation == known.generation:
            why = f"signed two prekeys of generation {prekey.generation}"
            check(prekey.key.hex() == known.key, silo, Code.EQUIVOCATION, why)
        elif prekey.generation > known.generation:
            newest = {**newest, silo: Newest(generation=prekey.generation, key=prekey.key.hex())}
        seen = self.seen(part, word.version, word.letter.sealed.generation)
        return type(self)(newest=newest, sealed=seen.sealed)

    def seen(self, part: str, version: Version, generation: int) -> Self:
        """After an upload of another silo, sealed to this generation of ours.

        RefusedError where it went back.
        """
        # Whoever sealed to a later generation may not need the earlier one again: it may be erased.
        of_part = self.sealed.get(part, {})
        known = of_part.get(version.silo)
        if known is not None and version.number <= known.number:
            return self
        back = known is not None and generation < known.generation
        why = f"sealed upload {version.number} to prekey {generation}, after a later one"
        check(not back, version.silo, Code.SHARES, why)
        changed = {
            **of_part,
            version.silo: SealedGeneration(number=version.number, generation=generation),
        }
        return type(self)(newest=self.newest, sealed={**self.sealed, part: changed})

    def floor(self, parts: Collection[str], opened: Iterable[int]) -> int:
        """The earliest of our generations that may still be needed: all before it may be erased.

        ``parts`` are those that may still come down, ``opened`` the generations that the rows of
        the last delivery are sealed to, since they may come again. A silo of which nothing is known
        may seal to the first.
        """
        return min([*(self._least(silo, parts) for silo in self.newest), *opened])

    def _least(self, silo: str, parts: Collection[str]) -> int:
        sealed = {
            part: of_part[silo].generation
            for part, of_part in self.sealed.items()
            if silo in of_part
        }
        coming = [generation for part, generation in sealed.items() if part in parts]
        # If none of its parts is delivered any more, its latest generation counts: a sender never
        # seals to an earlier one again.
        return min(coming) if coming else max(sealed.values(), default=0)


def check_own(own: Mapping[int, bytes], sender: str, generation: int) -> bytes:
    """The private half that an upload of ``sender`` is sealed to, as it signed.

    RefusedError says whose fault it is.
    """
    # The sender signed the generation, so one above our newest is its invention. One that we
    # erased is old: the coordinator had brought later ones.
    made = max(own)
    why = f"sealed its seed to prekey {generation}, and the newest of this silo is {made}"
    check(generation <= made, sender, Code.SHARES, why)
    erased = (
        f"brings an upload of {sender!r} that is sealed to prekey {generation}, which is erased:"
        " newer were brought"
    )
    check(generation in own, COORDINATOR, Code.SHARES, erased)
    return own[generation]
