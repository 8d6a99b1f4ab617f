"""The TLS identity of a stranger who is not a member yet: everybody has its key.

It opens one call.

gRPC's server takes a certificate from every client or from none. So a stranger who was invited
shows this one, whose private key follows from a public text. It proves nothing. The coordinator
lets it call ``Enrol`` alone (coordinator/rpc/guard.py); what that call takes, a founder has signed.
"""

import hashlib

from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, derive_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from .certificate import subject_key

# Made once with ``guest_key``. It has no name, and is valid whatever clocks say.
GUEST_CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBIDCBx6ADAgECAgEBMAoGCCqGSM49BAMCMBAxDjAMBgNVBAMMBWd1ZXN0MCAX
DTAwMDEwMTAwMDAwMFoYDzk5OTkxMjMxMjM1OTU5WjAQMQ4wDAYDVQQDDAVndWVz
dDBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABNs4W/4lgcv4c8Bh8ZM4S3NzjHSp
pO3JBZj8ryEQ7Z1tZVDrHKgavcZx8Xv+ynx37jPAO9DL5i1ktKN7vPF6ND6jEDAO
MAwGA1UdEwEB/wQCMAAwCgYIKoZIzj0EAwIDSAAwRQIgQaGse6UeMTVuz3u5YkEr
5F6LrTdHB4tUvpJG5195PRECIQCOjeFufGTKoHzQOFb7r2DJzO+vNYAse9nNvkDf
jVBpng==
-----END CERTIFICATE-----
"""
GUEST_SPKI = hashlib.sha256(subject_key(GUEST_CERTIFICATE)).hexdigest()


def guest_key() -> bytes:
    """The private key of the certificate, PEM: no secret."""
    number = int.from_bytes(hashlib.sha256(b"staddle/guest/1").digest())
    key = derive_private_key(number, SECP256R1())
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
