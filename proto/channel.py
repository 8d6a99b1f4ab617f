"""The settings of both ends of the channel: protocol version, limits, gRPC options, TLS 1.3."""

import os
import re
import sys
from functools import cache
from importlib.metadata import version

from ..errors import LocalError

PROTOCOL_MIN = 2
PROTOCOL_MAX = 2

CHUNK_BYTES = 1024 * 1024  # bytes of tensors in one chunk frame
MAX_MESSAGE_BYTES = 4 * 1024 * 1024  # a frame, a manifest of thousands of tensors, or a signed job
MAX_METADATA_BYTES = 16 * 1024
MAX_STREAMS_PER_CONNECTION = 16
# Jobs of one silo at a time: each may hold two of these streams for long, and others are needed.
MOST_LANES = 4

# Full names, since each ledger record of a message states its RPC.
ENROL = "/staddle.v1.Enrolment/Enrol"
FETCH = "/staddle.v1.Federation/Fetch"
UPLOAD = "/staddle.v1.Federation/Upload"
SECURE = "/staddle.v1.Federation/Secure"
CONTRIBUTE = "/staddle.v1.Federation/Contribute"
GROUP_KEY = "/staddle.v1.Federation/GroupKey"
PADDED = "/staddle.v1.Federation/Padded"
SECURE_NEXT = "/staddle.v1.Federation/SecureNext"

ERROR_METADATA = "staddle-error"  # trailing metadata that carries the name of an ErrorCode

# Both ends ping a silent connection, so each notices within a minute that the other vanished
# without a word: a router that died, a machine without power. Every call but transfers and polls
# has a shorter deadline.
KEEPALIVE_SECONDS = 30
KEEPALIVE_ANSWER_SECONDS = 10  # until the other side's kernel has acknowledged what was sent
# Otherwise gRPC waits for the answer to a ping for a minute. The answer may stand behind
# ``WINDOW_BYTES`` of a transfer, which the slowest line takes 128 s for.
PING_SECONDS = 150

UPLOAD_SECONDS = 60  # grace on top of the time that the bytes take at the slowest rate
# TCP that takes each lost packet for a full line (CUBIC, most systems' default) reaches 40 KB/s at
# 300 ms and 2 % loss, whatever the line could carry. Who stops altogether is lost much sooner.
SLOWEST_BYTES_PER_SECOND = 32 * 1024

# What a silo may send ahead of what the coordinator has read, in its memory: 40 MB/s at a round
# trip of 100 ms. gRPC would otherwise probe the line and let the window grow, with several uploads
# to more than the tensors of a fold.
WINDOW_BYTES = 4 * 1024 * 1024

# gRPC offers TLS 1.2 by default and Python has no option against it. The variable sets the cipher
# suites of TLS 1.2 only; this one needs a pre-shared key that no member has, so nothing below TLS
# 1.3 can complete a handshake.
CIPHERS_VARIABLE = "GRPC_SSL_CIPHER_SUITES"
TLS13_ONLY = "ECDHE-PSK-AES128-CBC-SHA"

# gRPC's core would write to standard error on its own, past log.py: in another form, and in words
# for those who develop gRPC. What concerns a user is an event or an error of ours.
VERBOSITY_VARIABLE = "GRPC_VERBOSITY"
SILENT = "NONE"

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    # A small compressed message could make its reader unpack one of the largest size.
    ("grpc.compression_enabled_algorithms_bitset", 1),  # no compression
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),  # bytes that the ledger counts once cross once
    ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_ANSWER_SECONDS * 1000),
    ("grpc.http2.ping_timeout_ms", PING_SECONDS * 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    # A connection that stays silent is pinged again and again.
    ("grpc.http2.max_pings_without_data", 0),
)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *OPTIONS,
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
    ("grpc.max_concurrent_streams", MAX_STREAMS_PER_CONNECTION),
    # Off, so that a second server on this port fails at start instead of taking some of the calls.
    ("grpc.so_reuseport", 0),
    # Honest peers ping every KEEPALIVE_SECONDS. A peer that keeps pinging more often than every
    # 10 s is cut off: two such pings are forgiven.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 2),
    # A peer that connects and sends nothing holds its connection no longer than this.
    ("grpc.server_handshake_timeout_ms", 20_000),
    # Nor does one that makes no call: anybody may connect as a guest. Members reconnect.
    ("grpc.max_connection_idle_ms", 120_000),
)


NO_HOST = "no host has the name in {address}"
ABSENCES = {
    "Connection refused": "nothing listens on {address}",
    "Domain name not found": NO_HOST,
    "DNS resolution failed": NO_HOST,
}


@cache
def software() -> str:
    """Our name and version, as peers and ledgers have them.

    It stays what it was when this process first asked, whatever is installed meanwhile.
    """
    return f"staddle {version('staddle')}"


def client_options(name: str, proxy: str) -> list[tuple[str, int | str]]:
    """Options of a connection to the holder of a certificate, whose name (``server_name``) this is.

    By an HTTP proxy (``checked_proxy``), or directly.
    """
    # The certificate names the member, not its host.
    options: dict[str, int | str] = {**dict(OPTIONS), "grpc.ssl_target_name_override": name}
    # What the environment says of proxies counts for nothing: whoever starts us need not know.
    if proxy:
        options |= {"grpc.enable_http_proxy": 1, "grpc.http_proxy": proxy}
    return list(options.items())


def require_tls13() -> None:
    """Remove TLS 1.2 from this process's handshakes, and gRPC's own lines from its standard error.

    gRPC reads its variables when it is imported, so the programs call this first. LocalError if
    gRPC was imported before the first call. Who sets GRPC_VERBOSITY sees gRPC's lines.
    """
    os.environ.setdefault(VERBOSITY_VARIABLE, SILENT)
    # Every new client calls it again, long after gRPC was imported.
    if os.environ.get(CIPHERS_VARIABLE) == TLS13_ONLY:
        return
    if "grpc" in sys.modules:
        raise LocalError(
            f"grpc was imported before {CIPHERS_VARIABLE} was set; call require_tls13() first"
        )
    os.environ[CIPHERS_VARIABLE] = TLS13_ONLY


def transfer_seconds(size: int) -> float:
    """Deadline of a transfer of ``size`` bytes.

    In seconds: one minute, plus the time that the bytes take at 32 KiB per second.
    """
    return UPLOAD_SECONDS + size / SLOWEST_BYTES_PER_SECOND


def absence(details: str, address: str) -> str:
    """Why nothing answers there, from the text of a failed call; empty where something did.

    Calls that fail in the handshake are UNAVAILABLE as well, and only gRPC's text tells them apart.
    """
    found = (words for said, words in ABSENCES.items() if said in details)
    return next(found, "").format(address=address)


def checked_proxy(proxy: str) -> str:
    """``http://host:port`` of a proxy that takes CONNECT; ValueError for anything else."""
    if proxy and not re.fullmatch(r"http://([^\s/@]+@)?[^\s/@:]+:[0-9]{1,5}", proxy):
        raise ValueError(
            "not http://host:port, such as http://proxy.example:3128; name and password may stand"
            " before the host: http://name:password@…"
        )
    return proxy


def checked_address(address: str) -> str:
    """``host:port`` as written in a configuration; LocalError for anything else.

    The port is 1 to 65535. The host is not looked up, so it may still be a name that does not
    exist.
    """
    host, _, port = address.rpartition(":")
    # ``isdecimal`` on its own accepts digits of other scripts.
    number = int(port) if port.isascii() and port.isdecimal() else 0
    if not host or "/" in address or not 0 < number < 65536:
        raise LocalError(
            f"coordinator address {address!r} is not host:port, such as federation.example:7443"
        )
    return address
