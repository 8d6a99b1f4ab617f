"""Any message that there can be, and how a call with it ended: for the fuzz of both services."""

import asyncio
import time

import grpc
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import HealthCheck
from hypothesis import strategies as st
from support.raw_silo import code_of

from staddle.coordinator.rpc import guard

SECONDS = 5  # for any one call
PATIENT = {"suppress_health_check": list(HealthCheck)}
MAGIC = ("@session", "@job", "@digest", "@silo")  # replaced by the true values
BITS = {
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_ENUM: (-(2**31), 2**31 - 1),
}


def field(descriptor):
    kind = descriptor.type
    if kind == FieldDescriptor.TYPE_MESSAGE:
        return messages(descriptor.message_type._concrete_class)
    if kind == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=40) | st.sampled_from([name.encode() for name in MAGIC])
    if kind == FieldDescriptor.TYPE_STRING:
        return st.text(max_size=20) | st.sampled_from(MAGIC)
    if kind == FieldDescriptor.TYPE_BOOL:
        return st.booleans()
    if kind == FieldDescriptor.TYPE_DOUBLE:
        return st.floats()
    return st.sampled_from([0, 1, 2, 4]) | st.integers(*BITS[kind])


def messages(cls):
    """Any well-formed message of a class, from its descriptor."""
    value = lambda f: st.lists(field(f), max_size=3) if f.is_repeated else field(f)
    fields = {each.name: value(each) for each in cls.DESCRIPTOR.fields}
    return st.fixed_dictionaries({}, optional=fields).map(lambda chosen: cls(**chosen))


async def ended(call, seconds=SECONDS):
    """How a call ended, within seconds.

    Nothing but OK, our own codes, and gRPC's for what it cannot read.
    """
    started = time.monotonic()
    error = (await asyncio.gather(call, return_exceptions=True))[0]
    assert time.monotonic() - started < seconds
    if not isinstance(error, BaseException):
        return "OK"
    assert isinstance(error, grpc.aio.AioRpcError), error
    if (found := code_of(error)) is not None:
        assert error.code() is guard.STATUS[found]
        return found
    # INTERNAL is also what a client says that writes into a call that is just ending
    assert error.code().name in {"INTERNAL", "UNIMPLEMENTED"}, (error.code(), error.details())
    assert "coordinator failed" not in error.details()
    return error.code().name
