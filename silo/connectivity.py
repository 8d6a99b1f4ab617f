"""Can this silo reach its coordinator? Three steps tell apart why a call fails.

Nothing of ours leaves but TLS and calls with an empty message, of the standard health service and
for the newest roster. They are no control messages and leave the session of a running agent as it
is; the serialiser below can write nothing else. Everything that has content leaves through the
egress gate.
"""

import base64
import socket
import ssl
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import grpc
from grpc_health.v1 import health_pb2

from ..errors import PeerError, reason
from ..proto import membership_pb2
from ..proto.channel import client_options
from ..security.identity.certificate import clock_fault, server_name, utc_now, validity
from ..security.identity.keys import TLS_CERTIFICATE, TLS_KEY, Keys, RosterEntry

SECONDS = 10.0
HEALTH = "/grpc.health.v1.Health/Check"
NEWEST = "/staddle.v1.Renewal/Newest"


def connect(address: str, coordinator: RosterEntry, proxy: str = "") -> tuple[bool, str]:
    """(1) Something listens there.

    PeerError names the likely cause: the host name, a firewall or the port.
    """
    try:
        with _connected(address, proxy):
            by = f", by the proxy {_shown(proxy)}" if proxy else ""
            return True, f"something listens on {address}{by}"
    except socket.gaierror as error:
        where = _shown(proxy) or address
        raise PeerError(
            coordinator.id, f"no host has the name in {where}; correct it, or ask your network"
        ) from error
    except TimeoutError as error:
        raise PeerError(
            coordinator.id,
            f"{address} did not answer in {SECONDS:g} s; a firewall may be in between",
        ) from error
    except OSError as error:
        raise PeerError(
            coordinator.id,
            f"{address}: {reason(error)}; does the coordinator run, on this port?{_by(proxy)}",
        ) from error


def handshake(
    address: str, folder: Path, coordinator: RosterEntry, proxy: str = ""
) -> tuple[bool, str]:
    """(2) It shows the certificate that the roster has for the coordinator, and takes ours.

    ``folder`` has our TLS key. PeerError if one side does not accept the other.
    """
    # The roster's certificate alone is trusted, as by the agent: no public authority counts.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # gRPC needs HTTP/2, which is negotiated during the handshake.
    context.set_alpn_protocols(["h2"])
    context.load_verify_locations(cadata=coordinator.certificate)
    context.load_cert_chain(folder / TLS_CERTIFICATE, folder / TLS_KEY)
    name = server_name(coordinator.certificate)
    try:
        with (
            _connected(address, proxy) as connection,
            context.wrap_socket(connection, server_hostname=name) as channel,
        ):
            # under TLS 1.3 a refusal of our certificate comes after the handshake
            taken = channel.recv(9)
    except ssl.SSLCertVerificationError as error:
        other = (
            f"{address} shows another certificate than the roster has for it"
            f" ({error.verify_message}); take the newest roster, or find out who answers there"
        )
        # The right certificate fails as well before it begins.
        clock = clock_fault(coordinator.id, coordinator.certificate, utc_now())
        raise PeerError(coordinator.id, clock or other) from error
    except OSError as error:
        raise _refused(coordinator, address, folder) from error
    if not taken:
        raise _refused(coordinator, address, folder)
    return (
        True,
        (
            f"TLS 1.3 with {coordinator.id}, key {coordinator.tls_fingerprint}; it takes our"
            " certificate"
        ),
    )


def _refused(coordinator: RosterEntry, address: str, folder: Path) -> PeerError:
    own = (folder / TLS_CERTIFICATE).read_text("ascii")
    return PeerError(
        coordinator.id,
        f"{address} ended the handshake. {_its_clock(own)} If it is right, its roster may not have"
        " our key, perhaps because we were removed: ask a founder, or compare staddle roster show"
        " on both sides",
    )


def _its_clock(certificate: str) -> str:
    """What to ask about the coordinator's clock, which no message tells us."""
    first, last = validity(certificate)
    return (
        f"Our certificate is good from {first.isoformat()} to {last.isoformat()}, and this"
        f" machine's clock says {utc_now().isoformat(timespec='seconds')}: first check that the"
        " coordinator's clock says the same (NTP)."
    )


def handshake_hint(own: RosterEntry, coordinator: RosterEntry, roster_version: int) -> str:
    """Likely causes of a failed handshake, which gRPC reports only as UNAVAILABLE."""
    first, last = validity(own.certificate)
    either = (
        f"perhaps its roster no longer has this silo, whose key is {own.tls_fingerprint}: ask a"
        f" founder. Or a clock is wrong (our certificate is good from {first:%Y-%m-%d %H:%M} to"
        f" {last:%Y-%m-%d %H:%M} UTC), or our roster, version {roster_version}, has another"
        f" certificate of {coordinator.id}. staddle silo check says more"
    )
    # By our own clock it would fail whatever the other side has, or it was set back since.
    now = utc_now()
    clock = clock_fault(coordinator.id, coordinator.certificate, now)
    return clock or clock_fault(own.id, own.certificate, now) or either


def health(address: str, keys: Keys, coordinator: RosterEntry, proxy: str = "") -> tuple[bool, str]:
    """(3) The coordinator says that it serves.

    PeerError if it does not answer within ``SECONDS``, or does not serve.
    """
    read = health_pb2.HealthCheckResponse.FromString
    status = _asked(HEALTH, read, address, keys, coordinator, proxy).status
    if status != health_pb2.HealthCheckResponse.SERVING:
        raise PeerError(coordinator.id, "answers, but does not serve; it may be stopping")
    return True, f"{coordinator.id} serves"


def newest_roster(address: str, keys: Keys, coordinator: RosterEntry, proxy: str = "") -> bytes:
    """The coordinator's roster, which the caller has to check; for any member's keys.

    PeerError if it does not answer within ``SECONDS``.
    """
    read = membership_pb2.NewestReply.FromString
    found: bytes = _asked(NEWEST, read, address, keys, coordinator, proxy).roster
    return found


def _asked(
    method: str,
    read: Callable[[bytes], Any],
    address: str,
    keys: Keys,
    coordinator: RosterEntry,
    proxy: str,
) -> Any:
    """The answer to a call without content."""
    # The roster's certificate is the only root, and the name is the one in it: an address is not.
    root, own = coordinator.certificate.encode(), keys.entry.certificate.encode()
    options = client_options(server_name(coordinator.certificate), proxy)
    with grpc.secure_channel(
        address, grpc.ssl_channel_credentials(root, keys.tls_key, own), options
    ) as channel:
        ask: grpc.UnaryUnaryMultiCallable[None, Any] = channel.unary_unary(
            method, request_serializer=lambda _: b"", response_deserializer=read
        )
        try:
            return ask(None, timeout=SECONDS)
        except grpc.RpcError as error:
            service = method.rpartition("/")[0].rpartition(".")[2].lower()
            raise PeerError(
                coordinator.id, f"{service} service: {error.code().name}: {error.details()}"
            ) from error


def _connected(address: str, proxy: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    if not proxy:
        # Sockets take IPv6 addresses without brackets.
        return socket.create_connection((host.strip("[]"), int(port)), SECONDS)
    by = urlsplit(proxy)
    line = HTTPConnection(by.hostname or "", by.port, timeout=SECONDS)
    named = f"{by.username}:{by.password}".encode()
    headers = {"Proxy-Authorization": f"Basic {base64.b64encode(named).decode()}"}
    line.set_tunnel(host.strip("[]"), int(port), headers if by.username else {})
    line.connect()
    return cast("socket.socket", line.sock)


def _by(proxy: str) -> str:
    return f" The proxy {_shown(proxy)} said so" if proxy else ""


def _shown(proxy: str) -> str:
    """A proxy without name and password."""
    return proxy.rpartition("@")[2]
