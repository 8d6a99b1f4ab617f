"""Who is in the federation: a list of entries that k of its founders have signed.

The file is canonical JSON on one line, here broken; each signature is over everything but
``signatures``::

    {"entries":[{"id":"coordinator",…},{"id":"hospital-a",…},{"id":"ministry","role":"founder",…}],
     "federation":"lung","signatures":{"ministry":"5c1f…"},"threshold":1,"version":4}

A roster proves nothing about itself. Each party's own configuration pins the federation, the
threshold and the fingerprints of the founders' keys, so that a swapped file is caught::

    Pins(federation="lung", threshold=1,
        founders=("SHA256:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU",))
"""

import hashlib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from ...errors import LocalError, PeerError, check_local
from ...files.documents import (
    Strict,
    canonical_json,
    parse_canonical,
    read_bytes,
    validate,
    write_atomic,
)
from .domains import MEMBERS, ROSTER, framed
from .keys import Hex64, Id, Keys, Role, RosterEntry
from .selection import among, without


def _checked_fingerprint(text: str) -> str:
    """ValueError for a text that no key can have as its fingerprint."""
    if not re.fullmatch("SHA256:[A-Za-z0-9+/]{43}", text, re.ASCII):
        raise ValueError(
            f"not a fingerprint: that is SHA256: with 43 letters, digits, + or / behind it, and"
            f" these are {len(text)} characters in place of 50; correct it by what staddle keys"
            " show prints at the founder"
        )
    return text


Fingerprint = Annotated[str, AfterValidator(_checked_fingerprint)]


def as_read_out(text: str) -> str:
    """A fingerprint as a person types it: with or without ``SHA256:``, and in groups.

    The letters behind the prefix count as they are: capitals are others.
    """
    return re.sub("^(?:SHA256:)?", "SHA256:", "".join(text.split()), flags=re.IGNORECASE)


TRUST = "in [trust] of the configuration"  # where daemons and operators have their pins


class Pins(Strict):
    """The facts about its federation that a party's configuration fixes, whatever a roster says."""

    federation: Id
    threshold: Annotated[int, Field(ge=1)]
    founders: Annotated[tuple[Fingerprint, ...], Field(min_length=1)]
    # refuses an older roster that still lists a removed member
    minimum_version: Annotated[int, Field(ge=1)] = 1


class Roster(Strict):
    """The members of a federation, sorted by id, and the founders' signatures so far.

    ``roster[member]`` looks up an id; PeerError for a stranger. An instance has at most one
    coordinator, and no id or key twice. Only ``verify`` checks its signatures.
    """

    federation: Id
    version: Annotated[int, Field(ge=1)]
    threshold: Annotated[int, Field(ge=1)]
    entries: tuple[RosterEntry, ...]
    signatures: dict[Id, Hex64] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Self:
        # One order, so that the same members have one digest, whoever wrote the file.
        ids = [entry.id for entry in self.entries]
        if ids != sorted(ids):
            raise ValueError("entries are not sorted by id")
        for name in ("id", "spki_sha256", "protocol_key", "log_key", "exchange_key"):
            # A member under two names could sign, or be summed, twice.
            values = Counter(getattr(entry, name) for entry in self.entries)
            for value, times in values.most_common(1):
                if times > 1:
                    raise ValueError(
                        f"{times} entries have the same {name} {value!r}; each member has its own"
                    )

        # Nobody could ever sign such a roster.
        founders = len(self.having(Role.FOUNDER))
        if founders < self.threshold:
            raise ValueError(
                f"threshold {self.threshold} is more than the {founders} founders of the roster"
            )
        coordinators = [entry.id for entry in self.having(Role.COORDINATOR)]
        if len(coordinators) > 1:
            raise ValueError(
                f"more than one coordinator: {', '.join(coordinators)}; remove all but one"
            )
        return self

    def __contains__(self, member: object) -> bool:
        return any(entry.id == member for entry in self.entries)

    def __getitem__(self, member: str) -> RosterEntry:
        for entry in self.entries:
            if entry.id == member:
                return entry
        raise PeerError(
            member,
            f"is not a member of federation {self.federation!r}, roster version {self.version}",
        )

    def by_spki(self, spki_sha256: str) -> RosterEntry:
        """The member whose TLS key has this SHA-256 (hex); PeerError for a stranger.

        The server passes the fingerprint of the TLS handshake, in which the peer proved that it
        holds the key.
        """
        for entry in self.entries:
            if entry.spki_sha256 == spki_sha256:
                return entry
        raise PeerError(
            f"TLS key {spki_sha256}", f"belongs to no member in roster version {self.version}"
        )

    def having(self, role: Role) -> tuple[RosterEntry, ...]:
        """Members of one role, sorted by id."""
        return tuple(entry for entry in self.entries if entry.role is role)

    @property
    def coordinator(self) -> RosterEntry:
        """The one coordinator; LocalError while the roster has none."""
        self.check_complete()
        return self.having(Role.COORDINATOR)[0]

    def check_complete(self) -> None:
        """LocalError for a roster in the making, which nobody should sign or use."""
        check_local(
            bool(self.having(Role.COORDINATOR)),
            f"roster of {self.federation!r} version {self.version} has no coordinator; add its"
            " entry",
        )

    @property
    def silos(self) -> tuple[RosterEntry, ...]:
        """All silos, sorted by id."""
        return self.having(Role.SILO)

    @property
    def silo_ids(self) -> frozenset[str]:
        """The ids of all silos."""
        return frozenset(entry.id for entry in self.silos)

    @property
    def in_one_hand(self) -> tuple[str, ...]:
        """The ids, sorted, of silos that whoever runs the coordinator, or its host, runs too."""
        # Such an organisation has the coordinator's messages and a silo's keys, so it can read what
        # is hidden only from a coordinator without a silo (security rule 12). Whoever runs a
        # host has its keys.
        runs = {self.coordinator.organisation, self.coordinator.host_operator}
        return tuple(
            entry.id for entry in self.silos if runs & {entry.organisation, entry.host_operator}
        )

    def bundle(self) -> str:
        """All TLS certificates, PEM: the trust bundle of every connection."""
        return "".join(entry.certificate for entry in self.entries)


def new(federation: str, founders: Sequence[RosterEntry], threshold: int) -> Roster:
    """Version 1 of a roster: its founders, nobody else, and no signature.

    Other members are added afterwards, which raises the version by one each time. LocalError for
    an entry with another role.
    """
    for entry in founders:
        check_local(
            entry.role is Role.FOUNDER,
            f"{entry.id!r} has role {entry.role}, not founder; add it after the roster is made",
        )
    return _made(federation, 1, threshold, founders)


def add(roster: Roster, *entries: RosterEntry, replace: bool = False) -> Roster:
    """Next version with more members, unsigned; a known id only with ``replace``."""
    ids = [entry.id for entry in entries]
    known = sorted(among(ids, roster))
    check_local(
        replace or not known,
        f"{', '.join(map(repr, known))} is in the roster already; to give it new keys, say"
        " --replace",
    )
    return _following(roster, ids, *entries)


def renew(roster: Roster, renewed: Mapping[str, RosterEntry]) -> Roster:
    """Next version with these entries, by id, in place of those of before, unsigned."""
    entries = [renewed.get(entry.id, entry) for entry in roster.entries]
    return _made(roster.federation, roster.version + 1, roster.threshold, entries)


def remove(roster: Roster, member: str) -> Roster:
    """Next version without a member, unsigned: this is how a key is revoked."""
    members = ", ".join(entry.id for entry in roster.entries)
    check_local(member in roster, f"{member!r} is not in the roster; its members: {members}")
    return _following(roster, [member])


def _following(roster: Roster, leaving: Collection[str], *more: RosterEntry) -> Roster:
    """The next version, unsigned: the old signatures are over other members."""
    others = [entry for entry in roster.entries if entry.id not in leaving]
    return _made(roster.federation, roster.version + 1, roster.threshold, [*others, *more])


def _made(federation: str, version: int, threshold: int, entries: Iterable[RosterEntry]) -> Roster:
    # ``Roster`` requires them sorted; callers may have them in any order.
    ordered = tuple(sorted(entries, key=lambda entry: entry.id))
    document = {
        "federation": federation,
        "version": version,
        "threshold": threshold,
        "entries": ordered,
    }
    return validate(document, Roster, f"roster of {federation!r}")


def signed_bytes(roster: Roster) -> bytes:
    """The bytes that founders sign, behind the label: the canonical roster without its signatures.

    The version is among them, so a signature of an older version does not hold for a newer one.
    """
    return canonical_json(roster.model_dump(mode="json", exclude={"signatures"}))


def digest(roster: Roster) -> str:
    """SHA-256 (hex) of the framed signed bytes: names the roster, whoever has signed it so far.

    Ledgers, greetings and attestations name the roster by it.
    """
    return hashlib.sha256(framed(ROSTER, signed_bytes(roster))).hexdigest()


def members_digest(roster: Roster, silos: Collection[object]) -> str:
    """SHA-256 (hex) of who the coordinator and these silos are, by the roster.

    Jobs, their keys and sums, and receipts are bound to it: they hold under a later roster, too, as
    long as these members keep their organisations and keys. Certificates are left out, so a renewed
    one changes nothing; other members change nothing either. A silo that the roster lacks is left
    out.
    """
    members = [
        entry.model_dump(mode="json", exclude={"certificate", "spki_sha256", "signature"})
        for entry in roster.entries
        if entry.role is Role.COORDINATOR or (entry.role is Role.SILO and entry.id in silos)
    ]
    document = {"federation": roster.federation, "members": members}
    return hashlib.sha256(framed(MEMBERS, canonical_json(document))).hexdigest()


def sign(roster: Roster, keys: Keys) -> Roster:
    """The roster with one founder's signature more; it must be complete, with its coordinator.

    Returns a copy. LocalError unless the keys are those of a founder in this very roster.
    """
    signer = keys.entry
    check_local(
        # The whole entry is compared, so a founder cannot sign with keys that were replaced.
        signer in roster.having(Role.FOUNDER),
        f"{signer.id!r} with these keys is not a founder in this roster; sign with a founder's"
        " keys",
    )
    roster.check_complete()
    signature = keys.sign(ROSTER, signed_bytes(roster)).hex()
    return roster.model_copy(update={"signatures": {**roster.signatures, signer.id: signature}})


def verify(roster: Roster, pins: Pins, where: str = TRUST) -> None:
    """Check a roster against a party's own pins, which are written ``where``.

    The steps run in order, each has a test with its number. A pin that does not fit may be
    mistyped, and the roster may be another one: only asking a founder tells them apart.
    """
    # (1) It is the roster of our federation.
    check_local(
        roster.federation == pins.federation,
        f"roster is of federation {roster.federation!r}, but federation = {pins.federation!r}"
        f" {where}; correct it there if it is mistyped, otherwise take the roster of"
        f" {pins.federation!r}",
    )

    # (2) It is not older than we know: an old one may have members that were removed since.
    check_local(
        roster.version >= pins.minimum_version,
        f"roster version {roster.version} is older than minimum_version = {pins.minimum_version}"
        f" {where}; take the newest roster, or correct the number if it is mistyped: a founder"
        " knows the newest version",
    )

    # (3) It asks for as many signatures as we do.
    check_local(
        roster.threshold == pins.threshold,
        f"roster version {roster.version} says threshold {roster.threshold}, but threshold ="
        f" {pins.threshold} {where}; ask the founders, by telephone, how many of them must sign."
        " If that is what the roster says, correct the pin; otherwise the roster is not theirs",
    )

    # (4) It is complete.
    roster.check_complete()

    # (5) Every signature in it holds, the superfluous ones too: a broken one shows that the file
    # was changed after it was signed.
    _check_signatures(roster)

    # (6) Enough of them are by keys that we pin, each key once (they are unique among the entries).
    founders = roster.having(Role.FOUNDER)
    pinned = [entry.id for entry in founders if entry.protocol_fingerprint in pins.founders]
    signed = among(pinned, roster.signatures)
    if len(signed) < pins.threshold:
        raise LocalError(_too_few_signed(roster, pins, pinned, signed, where))


def check_next(roster: Roster, present: Roster, pins: Pins, held: Sequence[Keys]) -> None:
    """Check a roster that shall follow the present one, which may come from anybody.

    ``held`` are this party's keys, with each of its TLS keys (``held_keys``). LocalError or
    PeerError say what is wrong; the steps run in order.
    """
    # (1) Our founders signed it.
    verify(roster, pins)
    # (2) It is newer: who was removed could have kept an old one.
    check_local(
        roster.version > present.version,
        f"roster version {roster.version} is not newer than version {present.version}, which is in"
        " use here; a founder makes changes on the newest (staddle federation members)",
    )
    # (3) We are still in it, with the same keys, and with a certificate whose key we have.
    check_local(
        any(keys.entry in roster.entries for keys in held),
        f"roster version {roster.version} has no {held[0].entry.id!r} with the keys in use here;"
        " ask a founder. Whoever has new keys sets them in the configuration, and starts again",
    )


def _check_signatures(roster: Roster) -> None:
    """PeerError names a member whose signature does not hold, or who is no founder."""
    signed = signed_bytes(roster)
    for signer, signature in roster.signatures.items():
        entry = roster[signer]
        holds = entry.has_signed(ROSTER, signed, bytes.fromhex(signature))
        if entry.role is not Role.FOUNDER or not holds:
            raise PeerError(
                signer,
                f"its signature does not fit roster version {roster.version}; the file was changed",
            )


def _too_few_signed(
    roster: Roster, pins: Pins, pinned: Sequence[str], signed: Sequence[str], where: str
) -> str:
    unpinned = sorted(set(roster.signatures) - set(pinned))
    superfluous = f"; signed, but not pinned: {', '.join(unpinned)}" if unpinned else ""
    missing = ", ".join(without(pinned, signed))
    said = (
        f"roster version {roster.version} needs signatures by {pins.threshold} pinned founders;"
        f" signed: {', '.join(signed) or 'nobody'};"
        f" missing: {missing or 'no pinned founder is left in it'}{superfluous}"
    )
    # A signature may be missing because its founder's pin is mistyped.
    if unfit := unfit_pins(roster, pins.founders, where):
        return f"{unfit}. As it is, {said}"
    more = f"add founders {where}: {pins.threshold} or more, by what they say by telephone"
    return f"{said}; {'have a missing founder run: staddle roster sign' if missing else more}"


def unfit_pins(roster: Roster, pinned: Iterable[str], where: str) -> str:
    """Which pinned fingerprints no founder has, and what to do; empty if all fit."""
    founders = roster.having(Role.FOUNDER)
    known = {entry.protocol_fingerprint for entry in founders}
    unfit = without(dict.fromkeys(pinned), known)
    if not unfit:
        return ""
    # Both are shown in full, to be read out to the founder: the file cannot vouch for itself.
    listed = ", ".join(map("{0.id} has {0.protocol_fingerprint}".format, founders))
    return (
        f"a pin does not fit: {' and '.join(unfit)} {where} is the protocol key of no founder in"
        f" roster version {roster.version} of {roster.federation!r}, in which {listed}. Ask the"
        " founders for their fingerprints by telephone (staddle keys show), not whoever sent the"
        " roster. If the pin is mistyped, correct it; if it is right, this roster is not theirs, or"
        " a founder has new keys"
    )


def verify_by(roster: Roster, founders: Sequence[str] = (), least: int = 0) -> None:
    """Check a roster without pins, by fingerprints of founders' keys from elsewhere than the file.

    ``least`` of them must have signed, by default all, and as many as the roster asks for. Without
    founders only the file itself is checked: it has the signatures that it asks for, of founders
    that it names, and nothing vouches for these. LocalError or PeerError if not.
    """
    # A signature counts once however often its founder is named.
    distinct = len(set(founders))
    check_local(
        not founders or distinct >= roster.threshold,
        f"roster version {roster.version} asks for the signatures of {roster.threshold}"
        f" founders; name as many with --founder, not {distinct}",
    )

    # Against fingerprints from elsewhere a forged roster fails, whatever founders it lists itself.
    own = [entry.protocol_fingerprint for entry in roster.having(Role.FOUNDER)]
    unfit = unfit_pins(roster, founders, "after --founder")
    check_local(not founders or not set(founders).isdisjoint(own), unfit)
    named = founders or own
    document = {"federation": roster.federation, "threshold": roster.threshold, "founders": named}
    verify(roster, validate(document, Pins, "--founder"), "after --founder")

    signed, needed = signers(roster, founders), least or distinct
    check_local(
        len(signed) >= needed,
        f"roster version {roster.version} is signed by {', '.join(signed) or 'none'} of the"
        f" {distinct} founders named here, {needed} must;"
        f" {unfit or 'have the others sign, or say how many must with --threshold'}",
    )


def signers(roster: Roster, founders: Sequence[str]) -> tuple[str, ...]:
    """Ids, sorted, of founders who signed and whose fingerprints are among these.

    It does not check the signatures; ``verify`` does.
    """
    return tuple(
        id_ for id_ in sorted(roster.signatures) if roster[id_].protocol_fingerprint in founders
    )


def parse(data: bytes, origin: str) -> Roster:
    """Check the bytes of a roster file; says nothing about its signatures, ``verify`` does."""
    return parse_canonical(data, Roster, origin)


def load(path: Path) -> Roster:
    """Read a roster file; says nothing about its signatures, ``verify`` does."""
    return parse(read_bytes(path), str(path))


def save(roster: Roster, path: Path) -> None:
    """Write a roster file, replacing it at once.

    Durable when it returns. A crash leaves the old file or the new one (``write_atomic``).
    """
    write_atomic(path, encoded(roster) + b"\n", 0o644)


def encoded(roster: Roster) -> bytes:
    """A roster with its signatures as it crosses, and as ledgers keep it: canonical JSON."""
    return canonical_json(roster.model_dump(mode="json"))
