"""A member's TLS certificate: self-signed, pinned by the roster, good for its names only.

It is its own trust anchor, so what it may vouch for is held to a minimum: CA:FALSE, and the names
of its member: ``<id>.staddle``, and ``<tag>.<id>.staddle`` with a tag that follows from its key. By
the second name a client asks a server for this very certificate: a coordinator that has renewed its
own still shows the one before to silos whose roster has that one. Certificates of earlier releases
have the first name alone.
"""

import datetime as dt
import hashlib
from functools import lru_cache
from typing import TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
)
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import NameOID

ExtensionT = TypeVar("ExtensionT", bound=x509.ExtensionType)

UNREADABLE = (  # all that the parser raises; a bit flip in a certificate leads to most of them
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)
DOMAIN = "staddle"
BACKDATED = dt.timedelta(minutes=5)  # for the clocks of other members that are behind
# Two years. A new roster revokes a certificate; its end bounds the harm of a theft nobody noticed.
LIFETIME = dt.timedelta(days=731)
# the part of its life after which it is renewed: 8 months are left for the founders
RENEWED_AFTER = 2 / 3
TAG_DIGITS = 16  # of the key's SHA-256


def self_signed(member: str, key: EllipticCurvePrivateKey) -> str:
    """PEM of a certificate for ``member``, signed by its own key.

    Valid for two years, from five minutes ago.
    """
    now = utc_now()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, member)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + LIFETIME)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName(list(map(x509.DNSName, _names(member, key.public_key())))),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    return certificate.public_bytes(Encoding.PEM).decode()


def _names(member: str, key: EllipticCurvePublicKey) -> tuple[str, str]:
    spki = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    name = f"{member}.{DOMAIN}"
    return name, f"{hashlib.sha256(spki).hexdigest()[:TAG_DIGITS]}.{name}"


@lru_cache(maxsize=1024)  # asked for each call of each member
def subject_key(pem: str) -> bytes:
    """SubjectPublicKeyInfo (DER) of a certificate; ValueError for anything else.

    For an unusual key the library raises other errors; in a roster ``check_certificate`` comes
    first.
    """
    key = x509.load_pem_x509_certificate(pem.encode()).public_key()
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def server_name(pem: str) -> str:
    """The name by which a client asks for this very certificate, which stands in a roster."""
    extensions = x509.load_pem_x509_certificate(pem.encode()).extensions
    names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return str(names.get_values_for_type(x509.DNSName)[-1])


def utc_now() -> dt.datetime:
    """Now, in UTC, with its time zone.

    Both the validity of new certificates and ``staddle check`` go by this clock.
    """
    return dt.datetime.now(dt.UTC)


def validity(pem: str) -> tuple[dt.datetime, dt.datetime]:
    """The first and the last instant for which a certificate is good.

    ValueError for what is no certificate.
    """
    certificate = x509.load_pem_x509_certificate(pem.encode())
    return certificate.not_valid_before_utc, certificate.not_valid_after_utc


def renewal_due(pem: str, now: dt.datetime) -> bool:
    """Whether so much of a certificate's life is over that its member renews it."""
    first, last = validity(pem)
    return now >= first + (last - first) * RENEWED_AFTER


def check_follows(pem: str, present: str, now: dt.datetime) -> None:
    """ValueError unless ``pem`` may take the place of ``present``; the steps run in order.

    Both have passed ``check_certificate`` for the same member.
    """
    first, last = validity(pem)
    # (1) It is newer: whoever passes on an older one may have its stolen key.
    if first <= validity(present)[0]:
        raise ValueError("certificate is not newer than the one in the roster")
    # (2) It is good today.
    if not first <= now <= last:
        raise ValueError(
            f"certificate is good from {first.isoformat()} to {last.isoformat()}, and this clock"
            f" says {now.isoformat(timespec='seconds')}"
        )
    # (3) It has no longer a life than the one that we would make: renewing it has an end.
    if last - first > LIFETIME + BACKDATED:
        raise ValueError(f"certificate is good for more than {LIFETIME.days} days")


@lru_cache(maxsize=1024)  # asked for each member whenever metrics are read
def end_timestamp(pem: str) -> float:
    """The last instant for which a certificate is good, in seconds since 1970."""
    return validity(pem)[1].timestamp()


def clock_fault(member: str, pem: str, now: dt.datetime) -> str:
    """Why a handshake fails by this machine's clock, what to do first; empty if the clock fits.

    ``pem`` is the certificate of ``member``, made by the clock of another machine.
    """
    first, last = validity(pem)
    shown = now.isoformat(timespec="seconds")
    if now < first:
        return (
            f"this machine's clock says {shown}, which is {_seconds(first - now)} before the"
            f" certificate of {member!r} begins ({first.isoformat()}). Check this clock first"
            " (NTP): it is slow by that much or more, unless the clock of the machine on which the"
            " keys were made was fast. Handshakes fail by this alone, without any attack"
        )
    if now > last:
        return (
            f"this machine's clock says {shown}, which is {_seconds(now - last)} after the"
            f" certificate of {member!r} ended ({last.isoformat()}). Check this clock first (NTP);"
            f" if it is right, {member!r} needs another certificate: staddle keys renew makes one,"
            " and a founder puts its entry.json into the roster"
        )
    return ""


def _seconds(span: dt.timedelta) -> dt.timedelta:
    return dt.timedelta(seconds=round(span.total_seconds()))


def check_certificate(member: str, pem: str) -> None:
    """ValueError unless ``pem`` is what ``self_signed(member, …)`` makes, apart from key and dates.

    The steps run in order; each fault has a test with its number.
    """
    # (1) One certificate and not a byte more: the text goes into the trust bundle as it stands.
    try:
        certificate = x509.load_pem_x509_certificate(pem.encode())
        extensions = certificate.extensions
        key = certificate.public_key()
    except UNREADABLE as error:
        raise ValueError(f"certificate is not readable: {error}") from error
    if certificate.public_bytes(Encoding.PEM).decode() != pem:
        raise ValueError("certificate holds more than one plain PEM block")

    # (2) A P-256 key.
    if not isinstance(key, EllipticCurvePublicKey) or not isinstance(key.curve, SECP256R1):
        raise ValueError("certificate key is not P-256")  # noqa: TRY004 (pydantic collects ValueErrors)

    # (3) Signed by that key.
    try:
        certificate.verify_directly_issued_by(certificate)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm) as error:
        raise ValueError("certificate is not signed by its own key") from error

    # at most 72 bytes for P-256; the parser lets its unused-bits octet pass
    signature = certificate.signature
    if not certificate.public_bytes(Encoding.DER).endswith(
        bytes([3, len(signature) + 1, 0]) + signature
    ):
        raise ValueError("certificate signature is not in DER")

    # (4) Not a certificate authority: it could issue certificates for other members' names.
    constraints = _extension(extensions, x509.BasicConstraints)
    if constraints is None or not constraints.critical or constraints.value.ca:
        raise ValueError("certificate lacks the critical CA:FALSE")

    # (5) Its names are the member's: both of them, or as in earlier releases the first.
    names = _extension(extensions, x509.SubjectAlternativeName)
    wanted = _names(member, key)
    known = [[*map(x509.DNSName, wanted)], [x509.DNSName(wanted[0])]]
    if names is None or list(names.value) not in known:
        raise ValueError(f"certificate is not for the one name {wanted[0]!r}, with or without tag")

    # (6) And nothing else: an extension that is not there needs no check.
    if len(extensions) != 2:
        raise ValueError("certificate has extensions beyond basic constraints and the name")


def _extension(
    extensions: x509.Extensions, kind: type[ExtensionT]
) -> x509.Extension[ExtensionT] | None:
    try:
        return extensions.get_extension_for_class(kind)
    except x509.ExtensionNotFound:
        return None
