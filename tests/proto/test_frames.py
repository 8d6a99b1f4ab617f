import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from staddle.proto import tensor_pb2 as pb
from staddle.proto.channel import CHUNK_BYTES
from staddle.proto.frames import ChunkFrame, decode, encode

# where the varint grows
LENGTHS = [0, 1, 127, 128, 129, 16_383, 16_384, CHUNK_BYTES, 2**21 - 1, 2**21]


def payload(size):
    return bytes(place * 31 % 251 for place in range(min(size, 1000))).ljust(size, b"\7")


@pytest.mark.parametrize("size", LENGTHS)
def test_a_chunk_is_what_protobuf_writes(size):
    whole = payload(size)
    for pieces in (
        [whole], [whole[: size // 3], memoryview(whole)[size // 3 :]], [b"", whole, b""],
    ):  # fmt: skip
        assert encode(ChunkFrame.of(pieces)) == pb.Frame(chunk=whole).SerializeToString()


@pytest.mark.parametrize("size", LENGTHS)
def test_a_chunk_is_read_without_a_copy(size):
    data = pb.Frame(chunk=payload(size)).SerializeToString()
    read = decode(data)
    assert isinstance(read, ChunkFrame)
    assert read.content == payload(size)
    assert read.content.obj is data


def test_a_chunk_does_not_change_with_what_it_was_made_of():
    source = bytearray(b"abc")
    chunk = ChunkFrame.of([memoryview(source)])
    source[:] = b"xyz"
    assert chunk.content == b"abc"


@pytest.mark.parametrize(
    "frame",
    [pb.Frame(), pb.Frame(manifest=pb.Manifest(job="j", size=7)),
        pb.Frame(end=pb.End(sha256=b"\x12\x01a"))],
    ids=["empty", "manifest", "end"],
)  # fmt: skip
def test_other_frames_are_protobufs(frame):
    assert encode(frame) == frame.SerializeToString()
    assert decode(encode(frame)) == frame


def test_a_chunk_in_another_encoding_is_a_chunk():
    chunk = pb.Frame(chunk=b"abc").SerializeToString()
    for data in (
        b"\x12\x83\x00abc",  # the length with a byte too many: the fast way takes it
        b"\x12\x01z" + chunk,  # of two, the last one counts
        pb.Frame(end=pb.End()).SerializeToString() + chunk,
        chunk + b"\x78\x01",  # and a field that nobody knows
    ):
        read = decode(data)
        assert isinstance(read, ChunkFrame), data
        assert read.content == b"abc"
        assert pb.Frame.FromString(data).chunk == b"abc"


def test_a_frame_that_ends_in_a_chunk_but_is_none():
    read = decode(
        pb.Frame(chunk=b"abc").SerializeToString() + pb.Frame(end=pb.End()).SerializeToString()
    )
    assert isinstance(read, pb.Frame)
    assert read.WhichOneof("body") == "end"


@given(st.binary(max_size=40) | st.binary(max_size=30).map(lambda tail: b"\x12" + tail))
def test_any_bytes_are_read_as_protobuf_reads_them(data):
    try:
        wanted = pb.Frame.FromString(data)
    except DecodeError:
        with pytest.raises(DecodeError):
            decode(data)
        return
    try:
        read = decode(data)
    except DecodeError as error:  # bounds.py
        assert "wire type 3" in str(error) or "more than" in str(error)  # noqa: PT017
        return
    if isinstance(read, ChunkFrame):
        assert wanted.WhichOneof("body") == "chunk"
        assert read.content == wanted.chunk
    else:
        assert read == wanted
        assert read.WhichOneof("body") != "chunk"
