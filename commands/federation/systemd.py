"""What systemd hears of a daemon: that it is ready, what it does, that its event loop turns.

The protocol is that of sd_notify(3): datagrams of ``NAME=VALUE`` lines to the socket that the
environment names::

    NOTIFY_SOCKET=/run/systemd/notify         # or @name, an abstract socket: unix(7)
    WATCHDOG_USEC=120000000                   # of the unit's WatchdogSec=, with WATCHDOG_PID

What it does is told by events of the log, so that both say the same. Only names, numbers and codes
of closed lists are in these texts, never what a peer wrote.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

from ... import log
from .health import beat

READY, STOPPING, ALIVE = "READY=1", "STOPPING=1", "WATCHDOG=1"
# A full queue of the service manager must not hold the daemon up for longer.
SEND_SECONDS = 1.0

# event → what ``systemctl status`` shows from then on
COORDINATOR: Mapping[str, str] = {
    "ready": "waits for jobs and silos",
    "job.offered": "{job}: offered to its silos",
    "round.opened": "{job}: round {round} is open",
    "fold.waits": "{job}: round {round} waits for room on the disk",
    "round.closed": "{job}: round {round} is closed",
    "job.stopped": "{job}: {why}",
    "job.finishing": "{job}: hands out its results",
    "job.ended": "{job}: {outcome}",
    "stop.asked": "stops",
}
SILO: Mapping[str, str] = {
    "started": "calls the coordinator",
    "connected": "connected to {coordinator}",
    "coordinator.lost": "cannot reach the coordinator, and tries again",
    "job.accepted": "{job}: accepted",
    "job.declined": "{job}: declined, {code}",
    "round.trained": "{job}: round {round} is trained",
    "round.given": "{job}: round {round} is uploaded",
    "round.failed": "{job}: round {round} failed, {code}",
    "round.waits": "{job}: round {round} waits for another silo's word",
    "job.stopped": "{job}: {why}",
    "budget.exhausted": "{job}: the privacy budget is spent",
    "job.finished": "{job}: finished",
    "stop.asked": "stops",
}
STATES = {"ready": READY, "started": READY, "stop.asked": STOPPING}  # event → what it means


class Systemd:
    """Who started this process and wants to hear of it.

    Nobody, where the environment names no socket. A message that cannot be sent is dropped: a
    daemon must not end because nobody listens.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        named = environment.get("NOTIFY_SOCKET", "")
        # An abstract name begins with a zero byte, which no variable can hold.
        self._address = "\0" + named[1:] if named.startswith("@") else named
        microseconds = environment.get("WATCHDOG_USEC", "")
        # The variables of a parent that is watched are not meant for its children.
        ours = environment.get("WATCHDOG_PID", "") in ("", str(os.getpid()))
        watched = ours and microseconds.isascii() and microseconds.isdecimal()
        self.watchdog_seconds = int(microseconds) / 1e6 if watched else None

    def tell(self, *lines: str) -> None:
        """Send these lines as one message."""
        if not self._address:
            return
        message = "\n".join(lines).encode()
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender,
        ):
            sender.settimeout(SEND_SECONDS)
            sender.sendto(message, self._address)

    async def beat(self) -> None:
        """Say at half the watchdog's interval that the event loop turns; for ever.

        Run it in the loop of the daemon: a thread of its own would go on while the loop hangs.
        """
        while self.watchdog_seconds:
            self.tell(ALIVE)
            await asyncio.sleep(self.watchdog_seconds / 2)


async def supervised(
    serving: Coroutine[Any, Any, None],
    directory: Path,
    texts: Mapping[str, str],
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Run a daemon to its end, and tell systemd and ``staddle health`` of it meanwhile.

    ``directory`` is its folder, ``texts`` one of the tables above. Errors are those of the daemon.
    """
    systemd = Systemd(environment)
    ready = asyncio.Event()

    def follow(event: str, fields: Mapping[str, object]) -> None:
        if event in texts:
            # One line of ASCII: a line break would begin another message.
            status = ascii(texts[event].format_map(fields))[1:-1]
            state = STATES.get(event)
            systemd.tell(*filter(None, (state, f"STATUS={status}")))
            if state == READY:
                ready.set()

    with log.followed(follow):
        beats = [asyncio.ensure_future(each) for each in (systemd.beat(), beat(directory, ready))]
        try:
            await serving
        finally:
            for beating in beats:
                beating.cancel()
            await asyncio.wait(beats)
