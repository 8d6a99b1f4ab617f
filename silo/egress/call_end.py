"""How a call ended while this silo was still writing to it.

gRPC's client may hide what the coordinator said. If a frame is written just as the call ends, the
client sets an end of its own, INTERNAL, before the coordinator's or over it (grpc/grpc issue
36066). A refusal then looks like a lost connection. The silo would upload again and again, and its
policy counts each upload.
"""

import asyncio
from typing import Any, TypeAlias

from ...proto.channel import ERROR_METADATA

Ended: TypeAlias = tuple[Any, str, str]  # gRPC's code and text, and the coordinator's code or ""


class CallEnd:
    """All ends of one call, noted from its start on."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._ends: list[Ended] = []  # in the order in which they were set
        call.add_done_callback(self._note)

    async def told(self) -> Ended:
        """The coordinator's end if there was one, else the last; to be asked once writing failed.

        It waits for the end, at most until the call's deadline.
        """
        await asyncio.gather(self._call, return_exceptions=True)
        last = await self._end()
        return next((end for end in self._ends if end[2]), last)

    async def _end(self) -> Ended:
        call = self._call
        # The coordinator's code comes in the trailing metadata, next to gRPC's own.
        trailing = dict(await call.trailing_metadata() or ())
        return await call.code(), await call.details() or "", str(trailing.get(ERROR_METADATA, ""))

    def _note(self, _: Any) -> None:
        # Now, since the next end replaces this one: it is set, so nothing is waited for.
        try:
            next(self._end().__await__())
        except StopIteration as done:
            self._ends.append(done.value)
