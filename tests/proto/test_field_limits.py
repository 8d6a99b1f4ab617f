import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from support.secure_messages import longest_given, longest_told

from staddle.coordinator.blind.mix_rows import MOST_SUMMANDS
from staddle.proto import secure_pb2 as pb
from staddle.proto import tensor_pb2 as tensor
from staddle.proto.channel import MAX_MESSAGE_BYTES
from staddle.proto.convert.mix import MOST_TOLD
from staddle.proto.convert.secagg_messages import MOST_SPEC_BYTES
from staddle.proto.convert.secagg_received import MOST_NOTES, read_delivery, secagg_delivery_to_wire
from staddle.proto.convert.secagg_sent import read_contribution, secagg_upload_to_wire
from staddle.proto.convert.shape import MOST_GROUPS, MOST_HASHES
from staddle.proto.field_limits import check_fields
from staddle.proto.frames import MOST_TENSORS, decode
from staddle.security.secagg.spec import MOST_SILOS


def empties(body, field, number):
    """A message that is ``number`` empty entries of a field in a body."""
    content = bytes((field << 3 | 2, 0)) * number
    sent = pb.SecureUpload(session=content).SerializeToString()
    return sent.replace(b"\x0a", bytes((body << 3 | 2,)), 1)


# Honest messages.


@pytest.mark.parametrize("n", [2, 4, 100, 1000])
@pytest.mark.parametrize("groups", [0, 3, MOST_GROUPS])
def test_the_longest_that_silos_say_are_read(n, groups):
    for message in map(secagg_upload_to_wire, longest_given(n, groups).values()):
        assert read_contribution(message.SerializeToString(), n) == message
    for message in map(secagg_delivery_to_wire, longest_told(n, groups).values()):
        assert read_delivery(message.SerializeToString(), n) == message


def test_the_longest_specification_with_all_notes_is_read():
    message = secagg_delivery_to_wire(
        longest_told(4, document=bytes(MOST_SPEC_BYTES), noted=MOST_NOTES)["spec"]
    )
    assert read_delivery(message.SerializeToString(), 4) == message


def test_the_most_tensors_are_read_and_one_more_of_each_is_not():
    def frames(number):
        headers = [
            tensor.TensorHeader(part="p" * 64, name="n" * 100, shape=[1] * 8, size=4)
        ] * number
        ends = tensor.End(sha256=bytes(32), tensor_sha256=[bytes(32)] * number, head=bytes(2**18))
        return tensor.Frame(manifest=tensor.Manifest(job="j", tensors=headers)), tensor.Frame(
            end=ends
        )

    for frame in frames(MOST_TENSORS):
        assert decode(frame.SerializeToString()) == frame
    for frame in frames(MOST_TENSORS + MOST_TOLD + MOST_SILOS + 128):
        with pytest.raises(DecodeError, match=r"more than \d+ fields in field"):
            decode(frame.SerializeToString())


def test_the_most_rows_that_are_put_aside_are_read():
    sealing = pb.Sealing(sender="s" * 64, ephemeral=bytes(32), commitment=bytes(32), root=bytes(32))
    upload = pb.PaddedUpload(
        silo="s" * 64, round=2**31, number=2**53, sha256=bytes(32), tag=bytes(8), sealing=sealing
    )
    upload.signature = bytes(64)
    piece = pb.Sealed(recipient="r" * 64, sealed=bytes(48), generation=2**53 - 1)
    summand = pb.RowSummand(
        upload=upload, letter=pb.Letter(sealed=piece, proof=[bytes(32)] * MOST_HASHES)
    )
    rows = [pb.MixedRow(part="p" * 64, document=bytes(200 * 5), summands=[summand] * 5)] * (
        MOST_SUMMANDS // 5
    )
    prekey = pb.Prekey(generation=2**53 - 1, key=bytes(32), signature=bytes(64))
    told = pb.DeliveredPrekey(
        part="p" * 64, silo="s" * 64, round=2**31, number=2**53, root=bytes(32), prekey=prekey
    )
    told.letter.CopyFrom(summand.letter)
    frame = tensor.Frame(manifest=tensor.Manifest(rows=rows, prekeys=[told] * MOST_TOLD))
    assert len(data := frame.SerializeToString()) < MAX_MESSAGE_BYTES
    assert decode(data) == frame


# Others.


@pytest.mark.parametrize("field", [1, 2, 3, 15])
@pytest.mark.parametrize("body", range(2, 11))
def test_more_entries_than_silos_are_refused(body, field):
    read_contribution(empties(body, field, 12), 4)
    with pytest.raises(DecodeError, match=f"more than 12 fields in field {body}"):
        read_contribution(empties(body, field, 13), 4)
    if body in (4, 6):  # keys and survivors have two entries of each silo
        read_delivery(empties(body, field, 16), 4)
        with pytest.raises(DecodeError, match=f"more than 16 fields in field {body}"):
            read_delivery(empties(body, field, 17), 4)
    elif body not in (2, 3):  # a specification has notes of many attempts
        with pytest.raises(DecodeError, match=f"more than 12 fields in field {body}"):
            read_delivery(empties(body, field, 13), 4)


def test_entries_that_are_too_long_are_refused():
    deliveries = pb.SecureDelivery(
        shares=pb.DeliveredShares(deliveries=[pb.Delivery(proof=[b""] * 1000)])
    )
    why = "a field of 2000 bytes in field 5, at most 900 it can have"
    with pytest.raises(DecodeError, match=why):
        read_delivery(deliveries.SerializeToString(), 4)
    headers = tensor.Frame(
        manifest=tensor.Manifest(tensors=[tensor.TensorHeader(shape=[1] * 5000)])
    )
    why = "a field of 5003 bytes in field 1, at most 4096 it can have"
    with pytest.raises(DecodeError, match=why):
        decode(headers.SerializeToString())


def test_a_body_again_and_again_is_refused():
    once = pb.SecureUpload(survival=pb.Survival(silo="a")).SerializeToString()
    assert read_contribution(once * 8, 4).survival.silo == "a"
    with pytest.raises(DecodeError, match="more than 8 fields"):
        read_contribution(once * 9, 4)


@pytest.mark.parametrize(
    "data", [b"\x0b\x0c", b"\x0a\x05abc", b"\x08\xff", b"\xff" * 11, b"\x0d\1\2", b"\x09\1"]
)
def test_what_protobuf_does_not_read_either_is_refused(data):
    with pytest.raises(DecodeError):
        check_fields(data, 10, {})
    if data != b"\x0b\x0c":  # a group, which proto3 has not
        with pytest.raises(DecodeError):
            pb.SecureUpload.FromString(data)


@given(st.binary(max_size=60))
def test_what_protobuf_reads_is_walked_to_its_end(data):
    try:
        wanted = pb.SecureUpload.FromString(data)
    except DecodeError:
        with pytest.raises(DecodeError):
            read_contribution(data, 100)
        return
    try:
        assert read_contribution(data, 100) == wanted
    except DecodeError as error:
        assert "wire type" in str(error) or "more than 8 fields" in str(error), error  # noqa: PT017


# What they cost.

MEASURED = """
import sys
from pathlib import Path
from google.protobuf.message import DecodeError
from staddle.proto.frames import decode
from staddle.proto.convert.secagg_sent import read_contribution
from staddle.proto.convert.secagg_received import read_delivery

def peak():
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])

reads = {"given": lambda data: read_contribution(data, 4), "told": lambda data: read_delivery(data,
4), "frame": decode}
for kind in sys.argv[1:]:
    data = sys.stdin.buffer.read(int.from_bytes(sys.stdin.buffer.read(8), "little"))
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
    before = peak()
    try:
        reads[kind](data)
    except DecodeError:
        print(peak() - before)
"""


def in_letters():
    """A manifest of rows with empty hashes in letters: most of 4 MiB, no field beyond 4 KiB."""
    summand = pb.RowSummand(letter=pb.Letter(proof=[b""] * 2000))
    return tensor.Frame(
        manifest=tensor.Manifest(rows=[pb.MixedRow(summands=[summand] * 200)] * 5)
    ).SerializeToString()


needs_linux = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="reads the peak of memory from Linux"
)


CASES = {
    "portions": ("given", 4, 2), "revealed": ("given", 7, 2), "notes": ("told", 3, 3),
    "keys": ("told", 4, 1), "deliveries": ("told", 5, 1), "manifest": ("frame", 1, 6),
    "end": ("frame", 3, 2),
}  # fmt: skip


@pytest.fixture(scope="module")
def grown():
    """KiB that a process grew by for each case in turn; fewer numbers where one passed."""
    sent = {
        case: (kind, empties(body, field, MAX_MESSAGE_BYTES // 2 - 8))
        for case, (kind, body, field) in CASES.items()
    }
    sent["hashes in rows"] = ("frame", in_letters())
    data = b"".join(len(data).to_bytes(8, "little") + data for _, data in sent.values())
    kinds = [kind for kind, _ in sent.values()]
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *kinds], input=data, capture_output=True, check=True
    )
    return dict(zip(sent, map(int, done.stdout.split()), strict=True))


@needs_linux
@pytest.mark.parametrize("case", [*CASES, "hashes in rows"])
def test_four_megabytes_of_empty_entries_cost_no_memory(grown, case):
    """Protobuf would make 45 to 180 MB of them."""
    assert grown[case] < 2000, "KiB"
