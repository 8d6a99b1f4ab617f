r"""A member's keys: four private keys that never leave the folder, and one public roster entry.

::

    hospital-a/            0700
      tls.key              0600  P-256, PKCS8 PEM: the TLS handshake
      tls.crt              0644  self-signed, CA:FALSE, SAN hospital-a.staddle
      protocol.key         0600  Ed25519: rosters, jobs, protocol messages
      log.key              0600  Ed25519: ledger heads
      exchange.key         0600  X25519: what other silos seal to this one
      entry.json           0644  the public half, below
      renewed-<tag>/       0700  later tls.key, tls.crt and entry.json; all else is unchanged

A daemon, whose keys may be read-only, makes later ones in its own folder (``renewed``) and finds
them in both. Nothing is overwritten: which TLS key counts is what the roster says.

The entry is canonical JSON, signed by the protocol key (proof of possession); one line, here
broken::

    {"certificate":"-----BEGIN CERTIFICATE-----\\n…","exchange_key":"8f40…","host_operator":"General
        Hospital",
     "id":"hospital-a","log_key":"d75a…","organisation":"General
        Hospital","protocol_key":"3d40…","role":"silo",
     "signature":"92a0…","spki_sha256":"6e34…"}
"""

import base64
import hashlib
import re
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Self

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    EllipticCurvePrivateKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from pydantic import AfterValidator, Field, model_validator

from ...errors import LocalError, reason
from ...files.documents import (
    Strict,
    canonical_json,
    parse_canonical,
    read_bytes,
    sync_directory,
    validate,
    write_new,
)
from .certificate import TAG_DIGITS, check_certificate, self_signed, subject_key, validity
from .domains import ENTRY, framed
from .guest import GUEST_SPKI

PrivateKey = EllipticCurvePrivateKey | Ed25519PrivateKey | X25519PrivateKey

TLS_KEY, TLS_CERTIFICATE, ENTRY_FILE = "tls.key", "tls.crt", "entry.json"
PROTOCOL_KEY, LOG_KEY, EXCHANGE_KEY = "protocol.key", "log.key", "exchange.key"
RENEWED = "renewed-"  # begins the names of the folders of later TLS keys


class Role(StrEnum):
    """The part that a member has in its federation.

    A member has one role, which decides what it may sign and which calls it may make.
    """

    COORDINATOR = "coordinator"
    SILO = "silo"
    OPERATOR = "operator"
    FOUNDER = "founder"


def _printable(text: str) -> str:
    if not text.isprintable():  # it is shown on terminals
        raise ValueError("holds control characters")
    return text


ID_PATTERN = r"^[a-z0-9-]{1,64}$"
Id = Annotated[str, Field(pattern=ID_PATTERN)]
Hex32 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]  # a SHA-256 or a raw public key
Hex64 = Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]  # an Ed25519 signature
Title = Annotated[str, Field(min_length=1, max_length=128), AfterValidator(_printable)]


class RosterEntry(Strict):
    """The public half of a member.

    An instance has been checked, signature and certificate included.
    """

    id: Id
    role: Role
    organisation: Title
    # the organisation that runs the member's host: security rules 11 and 12
    host_operator: Title
    certificate: Annotated[str, Field(max_length=8192)]
    spki_sha256: Hex32
    protocol_key: Hex32
    log_key: Hex32
    exchange_key: Hex32
    signature: Hex64

    @model_validator(mode="after")
    def _check(self) -> Self:
        """ValueError names the first step that fails; pydantic hands it on as a LocalError."""
        # (1) The certificate is the member's own and nothing more: all certificates are one trust
        # bundle, so an authority among them could issue certificates for other members.
        check_certificate(self.id, self.certificate)

        # (2) The fingerprint that calls are checked against is that certificate's.
        if spki_digest(self.certificate) != self.spki_sha256:
            raise ValueError(
                f"spki_sha256 {self.spki_sha256} is not that of the certificate of {self.id!r}"
            )

        if self.spki_sha256 == GUEST_SPKI:
            raise ValueError(f"the TLS key of {self.id!r} is the guest's, which everybody has")

        # (3) One key, one use; and no X25519 point with which every exchange gives zero (RFC 7748
        # section 6.1): everybody would know the key that such an exchange leads to.
        if self.protocol_key == self.log_key:
            raise ValueError(f"protocol_key and log_key of {self.id!r} are the same key")
        try:
            X25519PrivateKey.generate().exchange(
                X25519PublicKey.from_public_bytes(bytes.fromhex(self.exchange_key))
            )
        except ValueError as error:
            raise ValueError(f"exchange_key of {self.id!r} is a point of low order") from error

        # (4) All of it is signed by the protocol key, so nobody can enrol a key that it lacks.
        if not self.has_signed(
            ENTRY, entry_bytes(self.model_dump(mode="json")), bytes.fromhex(self.signature)
        ):
            raise ValueError(
                f"signature of entry {self.id!r} does not fit; the entry was changed after it was"
                " made"
            )
        return self

    def has_signed(self, domain: bytes, signed_bytes: bytes, signature: bytes) -> bool:
        """True if this member's protocol key signed ``framed(domain, signed_bytes)``.

        Labels come from ``domains.py``. A signature for one purpose does not hold for another.
        """
        try:
            key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(self.protocol_key))
            key.verify(signature, framed(domain, signed_bytes))
        except (InvalidSignature, ValueError):
            return False
        return True

    @property
    def tls_fingerprint(self) -> str:
        """The fingerprint of the TLS key, for people."""
        return _shown(bytes.fromhex(self.spki_sha256))

    @property
    def protocol_fingerprint(self) -> str:
        """The fingerprint of the protocol key, for people and for pins."""
        return fingerprint(bytes.fromhex(self.protocol_key))


def spki_digest(certificate: str) -> str:
    """SHA-256 (hex) of the public key of a certificate, PEM."""
    return hashlib.sha256(subject_key(certificate)).hexdigest()


def entry_bytes(document: dict[str, Any]) -> bytes:
    """The bytes that the protocol key signs: the canonical entry without its signature."""
    return canonical_json({key: value for key, value in document.items() if key != "signature"})


def fingerprint(public: bytes) -> str:
    """Fingerprint for people of an SPKI (DER) or a raw public key, as OpenSSH writes it:
    ``SHA256:47DEQpj8HB…``.
    """
    return _shown(hashlib.sha256(public).digest())


def _shown(digest: bytes) -> str:
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


@dataclass(frozen=True, slots=True)
class Keys:
    """A member's private keys with its entry; printing it shows no secret.

    ``home`` is the member's folder. ``entry`` is the public half, from ``folder``, where
    ``tls.key`` and ``tls.crt`` lie, too. ``renewed`` is where later TLS keys are made, if not in
    ``home``. Keys and seeds of secure sums are not among them: they are
    drawn for each attempt.
    """

    home: Path
    folder: Path
    entry: RosterEntry
    tls_key: bytes = field(repr=False)  # PEM, as gRPC wants it
    protocol: Ed25519PrivateKey = field(repr=False)
    log: Ed25519PrivateKey = field(repr=False)
    exchange: X25519PrivateKey = field(repr=False)
    renewed: Path | None = None

    @property
    def tls_files(self) -> tuple[Path, Path]:
        """Where the certificate and its key lie."""
        return self.folder / TLS_CERTIFICATE, self.folder / TLS_KEY

    def sign(self, domain: bytes, signed_bytes: bytes) -> bytes:
        """Ed25519 by the protocol key over ``framed(domain, signed_bytes)``, 64 bytes."""
        return self.protocol.sign(framed(domain, signed_bytes))


def create_keys(
    folder: Path, member: str, role: Role, organisation: str, host_operator: str = ""
) -> RosterEntry:
    """Make a member's folder of fresh keys and return its public entry.

    ``host_operator`` is the organisation that runs the host, by default ``organisation`` itself.
    LocalError if the folder holds anything already.
    """
    if not re.fullmatch(ID_PATTERN, member):
        raise LocalError(
            f"id {member!r} is not 1 to 64 of a-z, 0-9 and '-'; choose another, such as"
            " 'hospital-a'"
        )
    # P-256, since gRPC's TLS library offers no Ed25519 certificates by default.
    tls = generate_private_key(SECP256R1())
    protocol, log, exchange = (
        Ed25519PrivateKey.generate(),
        Ed25519PrivateKey.generate(),
        X25519PrivateKey.generate(),
    )
    document: dict[str, Any] = {
        "id": member,
        "role": str(role),
        "organisation": organisation,
        "host_operator": host_operator or organisation,
        "protocol_key": protocol.public_key().public_bytes_raw().hex(),
        "log_key": log.public_key().public_bytes_raw().hex(),
        "exchange_key": exchange.public_key().public_bytes_raw().hex(),
    }
    # Nothing is written before the entry passes the checks that every other party makes of it.
    entry = _certified(document, tls, protocol)
    _make_folder(folder)
    private: dict[str, PrivateKey] = {
        PROTOCOL_KEY: protocol,
        LOG_KEY: log,
        EXCHANGE_KEY: exchange,
    }
    for name, key in private.items():
        write_new(folder / name, _pem(key))
    _write_pair(folder, tls, entry)
    return entry


def renew_keys(folder: Path, renewed: Path | None = None) -> Keys:
    """Make another TLS key and certificate for a member, next to those that it has; all else stays.

    They count once they stand in a roster. LocalError where the folder cannot be written, which is
    ``renewed`` if given.
    """
    keys, tls = load_keys(folder, renewed=renewed), generate_private_key(SECP256R1())
    entry = _certified(keys.entry.model_dump(mode="json"), tls, keys.protocol)
    place = (renewed or folder) / f"{RENEWED}{entry.spki_sha256[:TAG_DIGITS]}"
    _make_folder(place)
    _write_pair(place, tls, entry)
    return replace(keys, folder=place, entry=entry, tls_key=_pem(tls))


def _certified(
    document: dict[str, Any], tls: EllipticCurvePrivateKey, protocol: Ed25519PrivateKey
) -> RosterEntry:
    """An entry with a new certificate for this TLS key, checked."""
    certificate = self_signed(document["id"], tls)
    made = {
        **document,
        "certificate": certificate,
        "spki_sha256": spki_digest(certificate),
    }
    made["signature"] = protocol.sign(framed(ENTRY, entry_bytes(made))).hex()
    return validate(made, RosterEntry, f"entry of {document['id']!r}")


def _pem(key: PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write_pair(folder: Path, tls: EllipticCurvePrivateKey, entry: RosterEntry) -> None:
    write_new(folder / TLS_KEY, _pem(tls))
    write_new(folder / TLS_CERTIFICATE, entry.certificate.encode(), 0o644)
    # The entry is written last: a folder without it is unfinished, and never used.
    write_new(folder / ENTRY_FILE, canonical_json(entry.model_dump(mode="json")) + b"\n", 0o644)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise LocalError(
                f"{folder}: holds files already; choose an empty folder, so that no key is"
                " overwritten"
            )
        # ``mkdir`` does not change the mode of a folder that exists.
        folder.chmod(0o700)
        # The folder's own name is durable before keys are written into it.
        sync_directory(folder.parent)
    except OSError as error:
        raise LocalError(f"{folder}: cannot make this folder: {reason(error)}") from error


def load_entry(path: Path) -> RosterEntry:
    """Read and check a public entry.

    LocalError for a file that is not an entry, or whose certificate, fingerprint or signature does
    not fit.
    """
    return parse_canonical(read_bytes(path), RosterEntry, str(path))


def load_keys(
    folder: Path, among: Collection[RosterEntry] = (), renewed: Path | None = None
) -> Keys:
    """Read a member's folder; LocalError if others can read a private key, or one does not fit.

    Of several TLS keys it is the one whose entry is ``among`` those of a roster, else the first.
    ``renewed`` is as for ``held_keys``.
    """
    return max(held_keys(folder, renewed), key=lambda keys: keys.entry in among)


def held_keys(folder: Path, renewed: Path | None = None) -> tuple[Keys, ...]:
    """A member's keys with each TLS key of its folder, in the order of their certificates.

    ``renewed`` is a daemon's own folder, where it makes later ones, and may not be there yet.
    LocalError as ``load_keys``.
    """
    first = replace(_load_first(folder), renewed=renewed)
    made = chain.from_iterable(
        place.glob(f"{RENEWED}*/{ENTRY_FILE}") for place in {folder, renewed or folder}
    )
    later = [_load_renewed(first, path.parent) for path in made]
    began = {keys.folder: validity(keys.entry.certificate)[0] for keys in (first, *later)}
    return first, *sorted(later, key=lambda keys: began[keys.folder])


def tls_pairs(keys: Keys) -> list[tuple[bytes, bytes]]:
    """The TLS keys with their certificates, PEM, that a coordinator may have in its roster by now.

    First these, which a roster of ours has, then the member's newer ones, the newest first.
    """
    try:
        held = held_keys(keys.home, keys.renewed)
    # A daemon has its own in memory while its files are being replaced.
    except LocalError:
        held = (keys,)
    entries = [each.entry for each in held]
    # Whoever removed the folder of the present ones may have left newer ones, or none.
    after = entries.index(keys.entry) + 1 if keys.entry in entries else len(held)
    newer = held[after:][::-1]
    return [(each.tls_key, each.entry.certificate.encode()) for each in (keys, *newer)]


def _load_first(folder: Path) -> Keys:
    entry = load_entry(folder / ENTRY_FILE)
    protocol: Ed25519PrivateKey = _private_key(folder / PROTOCOL_KEY, Ed25519PrivateKey)
    log: Ed25519PrivateKey = _private_key(folder / LOG_KEY, Ed25519PrivateKey)
    exchange: X25519PrivateKey = _private_key(folder / EXCHANGE_KEY, X25519PrivateKey)

    # A key restored from another backup than the entry would sign what nobody can verify.
    found = {
        PROTOCOL_KEY: (protocol.public_key().public_bytes_raw().hex(), entry.protocol_key),
        LOG_KEY: (log.public_key().public_bytes_raw().hex(), entry.log_key),
        EXCHANGE_KEY: (exchange.public_key().public_bytes_raw().hex(), entry.exchange_key),
    }
    _check_fit(folder, found)
    return Keys(folder, folder, entry, _tls_key(folder, entry), protocol, log, exchange)


def _load_renewed(first: Keys, place: Path) -> Keys:
    entry = load_entry(place / ENTRY_FILE)
    own, others = (
        each.model_dump(exclude={"certificate", "spki_sha256", "signature"})
        for each in (entry, first.entry)
    )
    _check_fit(place, {ENTRY_FILE: (own, others)})
    return replace(first, folder=place, entry=entry, tls_key=_tls_key(place, entry))


def _tls_key(folder: Path, entry: RosterEntry) -> bytes:
    """The key of an entry's certificate, which lies next to it, PEM."""
    pem = _read_private(folder / TLS_KEY)
    tls: EllipticCurvePrivateKey = _private_key(folder / TLS_KEY, EllipticCurvePrivateKey)
    public = tls.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    certificate = read_bytes(folder / TLS_CERTIFICATE).decode(errors="replace")
    # Another one would keep every handshake from working, and gRPC does not say why.
    found = {
        TLS_KEY: (hashlib.sha256(public).hexdigest(), entry.spki_sha256),
        TLS_CERTIFICATE: (certificate, entry.certificate),
    }
    _check_fit(folder, found)
    return pem


def _check_fit(folder: Path, found: Mapping[str, tuple[object, object]]) -> None:
    """LocalError names the first file whose content is not what the entry declares."""
    for name, (actual, declared) in found.items():
        # The first that differs is enough: the whole folder has to be restored.
        if actual != declared:
            raise LocalError(
                f"{folder / name}: does not fit the folder's other files; restore the folder from"
                " one backup"
            )


def _read_private(path: Path) -> bytes:
    """A private file that only its owner can read."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise LocalError(f"{path}: cannot read it: {reason(error)}") from error
    if mode & 0o077:
        raise LocalError(
            f"{path}: mode {mode:04o} lets others at this private key; run: chmod 600 {path}"
        )
    return read_bytes(path)


def _private_key(path: Path, kind: type) -> Any:
    """The private key of this kind in a private file."""
    try:
        key = load_pem_private_key(_read_private(path), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise LocalError(
            f"{path}: is not an unencrypted PKCS8 private key; restore it from your backup"
        ) from error
    if not isinstance(key, kind):
        raise LocalError(
            f"{path}: holds a {type(key).__name__}, not a {kind.__name__}; restore it from your"
            " backup"
        )
    return key
