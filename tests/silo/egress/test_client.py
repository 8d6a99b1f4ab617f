"""The silo's end of the channel: what an upload raises, however gRPC says that its call ended."""

import asyncio

import grpc
import pytest

from staddle.proto.channel import ERROR_METADATA
from staddle.silo.egress.client import Client, TurnedAwayError, UnreachableError

REFUSED = (grpc.StatusCode.FAILED_PRECONDITION, "round 0 is closed", "ROUND_CLOSED")
BROKEN = (grpc.StatusCode.UNAVAILABLE, "Socket closed", "")
OWN = (grpc.StatusCode.INTERNAL, "Internal error from Core", "")
FRAMES = 3


class Call:
    """A call that gRPC ends: its end is set to these, one over the other, before the second frame
    fails (``early``) or once the answer is awaited (``late``).

    This is what gRPC does where a frame is written into a call that the other side has just ended.
    """

    def __init__(self, early, late):
        self._early, self._late = early, late
        self._ends, self._told = [], []
        self.written = 0

    def add_done_callback(self, told):
        self._told.append(told)

    def _end(self, ends):
        for end in ends:
            self._ends.append(end)
            for told in self._told:
                told(self)

    async def trailing_metadata(self):
        code = self._ends[-1][2]
        return grpc.aio.Metadata(*([(ERROR_METADATA, code)] if code else []))

    async def code(self):
        return self._ends[-1][0]

    async def details(self):
        return self._ends[-1][1]

    def _error(self):
        code, details, own = self._ends[-1]
        trailing = grpc.aio.Metadata(*([(ERROR_METADATA, own)] if own else []))
        return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details)

    async def write(self, _):
        self.written += 1
        if self.written > 1:
            self._end(self._early)
            raise self._error()

    async def done_writing(self):
        raise AssertionError("a frame before it failed")

    async def _answer(self):
        self._end(self._late)
        self._late = ()
        raise self._error()

    def __await__(self):
        return self._answer().__await__()

    def cancel(self):
        pass


async def frames():
    for number in range(FRAMES):
        yield number


def raised(call):
    """What an upload over this call raises."""
    client = object.__new__(Client)  # without a channel
    client._peer, client._address, client._hint = "coordinator", "there:1", lambda: "no hint"
    client._upload = lambda **_: call
    with pytest.raises((TurnedAwayError, UnreachableError)) as caught:
        asyncio.run(client.upload(frames(), 0))
    assert call.written == 2
    return caught.value


ORDERS = {
    "before it fails": ((REFUSED,), ()),
    "over gRPC's own": ((OWN,), (REFUSED,)),
    "under gRPC's own": ((REFUSED, OWN), ()),
}


@pytest.mark.parametrize(("early", "late"), ORDERS.values(), ids=ORDERS)
def test_a_refusal_is_heard_while_frames_are_written(early, late):
    """Before: gRPC's INTERNAL counted as a lost connection, and all of it was uploaded again, until
    the policy held back what a round may begin.
    """
    error = raised(Call(early, late))
    assert isinstance(error, TurnedAwayError)
    assert (error.peer, error.code, error.why) == ("coordinator", "ROUND_CLOSED", REFUSED[1])


@pytest.mark.parametrize(("early", "late"), [((BROKEN,), ()), ((OWN,), (BROKEN,)), ((OWN,), ())])
def test_a_connection_that_breaks_is_no_refusal(early, late):
    error = raised(Call(early, late))
    assert isinstance(error, UnreachableError)
    assert (late or early)[-1][1] in str(error)
