"""A line between silos and their coordinator that can be bad in every way: asyncio, one address,
plain TCP.
"""

import asyncio
import contextlib
import socket
import struct

PIECE = 32 * 1024
TICKS = 20  # a second: how often a slow line forwards something


class Line:
    """One connection: the silo's end and the coordinator's."""

    def __init__(self, proxy, reader, writer):
        self.proxy = proxy
        self.silo, self.coordinator = (reader, writer), None
        self.tasks = []

    async def open(self):
        host, _, port = self.proxy.target.rpartition(":")
        self.coordinator = await asyncio.open_connection(host, int(port))
        ways = (
            ("up", self.silo[0], self.coordinator[1]),
            ("down", self.coordinator[0], self.silo[1]),
        )
        self.tasks = [asyncio.create_task(self._pump(*way)) for way in ways]

    async def _pump(self, way, reader, writer):
        proxy = self.proxy
        with contextlib.suppress(ConnectionError, OSError):
            while piece := await reader.read(PIECE):
                if proxy.delay:
                    await asyncio.sleep(proxy.delay)
                while piece:
                    some = piece[: max(1, int(proxy.rate / TICKS))] if proxy.rate else piece
                    piece = piece[len(some) :]
                    if proxy.rate:
                        await asyncio.sleep(len(some) / proxy.rate)
                    await proxy.going.wait()
                    proxy.bytes[way] += len(some)
                    writer.write(some)
                    await writer.drain()
                    proxy.passed(way)
        self.close()

    def close(self, *, reset=False):
        """End both halves: in good order, or by RST, which throws away what was not read yet."""
        for end in (self.silo, self.coordinator):
            if end is None:
                continue
            if reset:
                linger = struct.pack("ii", 1, 0)
                with contextlib.suppress(OSError):
                    end[1].get_extra_info("socket").setsockopt(
                        socket.SOL_SOCKET, socket.SO_LINGER, linger
                    )
                end[1].transport.abort()
            else:
                end[1].close()
        self.proxy.lines.discard(self)


class Proxy:
    """Listens while its block runs.

    ``bytes`` are those forwarded, ``came`` the connections that came.
    """

    def __init__(self, target):
        self.target = target
        self.address = ""
        self.delay = 0.0  # seconds that each piece waits
        self.rate = 0.0  # bytes a second in each direction; 0: as fast as it goes
        self.going = asyncio.Event()  # cleared: nothing is forwarded, everything stays open
        self.going.set()
        self.bytes = {"up": 0, "down": 0}
        self.came = 0
        self.lines = set()
        self._at = {"up": [], "down": []}
        self._together = 1
        self._waiting = []
        self._refusing = False

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._come, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *error):
        self._server.close()
        for line in list(self.lines):
            line.close(reset=True)
            for task in line.tasks:
                task.cancel()
            await asyncio.gather(*line.tasks, return_exceptions=True)

    # Controls.

    def when(self, way, count, do):
        """``do()`` once so many bytes have been forwarded in this direction."""
        self._at[way] = sorted([*self._at[way], (count, do)], key=lambda entry: entry[0])

    def cut(self, *, reset=False):
        """Close every connection now."""
        for line in list(self.lines):
            line.close(reset=reset)

    def stall(self):
        """Forward nothing more; everything stays open."""
        self.going.clear()

    def go_on(self):
        self.going.set()

    def refuse(self, refusing=True):
        """Reset connections as they come, or no longer."""
        self._refusing = refusing

    def reverse(self, number):
        """Let this many connections gather, and open them in the reverse of the order in which they
        came.
        """
        self._together = number

    # What they act on.

    def passed(self, way):
        while self._at[way] and self.bytes[way] >= self._at[way][0][0]:
            self._at[way].pop(0)[1]()

    async def _come(self, reader, writer):
        self.came += 1
        line = Line(self, reader, writer)
        self.lines.add(line)
        if self._refusing:
            line.close(reset=True)
            return
        self._waiting.append(line)
        if len(self._waiting) < self._together:
            return
        gathered, self._waiting, self._together = self._waiting, [], 1
        for line in reversed(gathered):
            await line.open()
