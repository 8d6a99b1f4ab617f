"""Handshakes of strangers, many at a time: the coordinator lives.

It is a process of its own: tests must live, too.
"""

import contextlib
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor

AT_A_TIME = 16
EACH = 150
SECONDS = 20


def test_many_handshakes_at_a_time_leave_the_coordinator_alive(start):
    running = start("north", "east")
    coordinator = running.start_coordinator()
    host, _, port = running.address.rpartition(":")
    roster = running.roster
    context = ssl.create_default_context(cadata=roster.coordinator.certificate)
    context.set_alpn_protocols(["h2"])

    def knock(_):
        for _ in range(EACH):
            with (
                contextlib.suppress(OSError),  # nobody is there any more
                socket.create_connection((host, int(port)), timeout=SECONDS) as plain,
                context.wrap_socket(plain, server_hostname="coordinator.staddle"),
            ):
                pass

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        list(pool.map(knock, range(AT_A_TIME)))
    assert coordinator.returncode is None, coordinator.tail()
    assert coordinator.stop() == 0
