from contextlib import contextmanager
from hashlib import sha256
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from staddle.algorithms.exchange.parts import DTYPES, Item, Kind, TensorSpec
from staddle.errors import LocalError, RefusedError
from staddle.proto import stream
from staddle.proto import tensor_pb2 as pb
from staddle.proto.channel import CHUNK_BYTES, MAX_MESSAGE_BYTES
from staddle.proto.frames import decode, encode
from staddle.proto.stream import Digester, Inbound, chunks, recut
from staddle.proto.wire import to_wire

ITEMS = (
    Item("m", Kind.WHOLE_MODEL, TensorSpec("a", "float32", (3,))),
    Item("m", Kind.WHOLE_MODEL, TensorSpec("empty", "float32", (0,))),
    Item("m", Kind.WHOLE_MODEL, TensorSpec("b", "int64", ())),
)
PAYLOAD = bytes(range(20))
EMPTY = sha256(b"").digest()


def oracle(pieces):
    """Digests the obvious way: each piece, then the joined digests."""
    single = [sha256(piece).digest() for piece in pieces]
    return tuple(single), sha256(b"".join(single)).digest()


TENSORS, TOTAL = oracle([PAYLOAD[:12], b"", PAYLOAD[12:]])


@st.composite
def tensors(draw):
    shapes = draw(st.lists(st.lists(st.integers(0, 4), max_size=3), max_size=6))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    made = []
    for shape in shapes:
        dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
        made.append(torch.from_numpy(rng.integers(-5, 5, size=shape)).to(dtype))
    return made


def plain_bytes(tensor):
    return tensor.numpy().tobytes()


# Chunks and digests.


@settings(max_examples=150)
@given(values=tensors(), size=st.integers(1, 70))
def test_chunks_are_the_bytes_back_to_back(values, size):
    cut = [bytes(chunk.content) for chunk in chunks(values, size)]
    assert b"".join(cut) == b"".join(plain_bytes(value) for value in values)
    assert all(len(chunk) == size for chunk in cut[:-1])
    assert all(0 < len(chunk) <= size for chunk in cut)


def test_chunks_are_a_mebibyte_unless_told():
    values = [torch.zeros(CHUNK_BYTES // 4 - 1), torch.ones(2), torch.zeros(CHUNK_BYTES // 2)]
    assert [len(chunk.content) for chunk in chunks(values)] == [CHUNK_BYTES] * 3 + [4]
    assert CHUNK_BYTES < MAX_MESSAGE_BYTES


def test_chunks_do_not_change_with_the_tensors_afterwards():
    value = torch.zeros(4)
    first, second = chunks([value], 8), [bytes(chunk.content) for chunk in chunks([value], 8)]
    taken = next(first).content
    value.fill_(1)
    assert taken == bytes(8)
    assert b"".join(second) == bytes(16)


@settings(max_examples=150)
@given(
    sizes=st.lists(st.integers(0, 9), max_size=8),
    cuts=st.lists(st.integers(0, 80), max_size=10),
    seed=st.integers(0, 99),
)
def test_digests_do_not_depend_on_where_the_stream_is_cut(sizes, cuts, seed):
    data = np.random.default_rng(seed).bytes(sum(sizes))
    digester = Digester(sizes)
    edges = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    for start, end in pairwise(edges):
        digester.update(memoryview(data)[start:end])
        digester.update(b"")
    starts = np.cumsum([0, *sizes]).tolist()
    wanted = oracle([data[a:b] for a, b in pairwise(starts)])
    assert (digester.digests().tensors, digester.digests().total) == wanted


@pytest.mark.parametrize(
    ("sizes", "data"),
    [([], b""), ([0], b""), ([0, 0, 0], b""), ([0, 2, 0], b"ab"), ([2, 0, 0, 1, 0], b"abc")],
)
def test_empty_tensors_have_the_digest_of_nothing(sizes, data):
    digester = Digester(sizes)
    for byte in data:
        digester.update(bytes([byte]))
    found = digester.digests()
    assert len(found.tensors) == len(sizes)
    assert [digest == EMPTY for digest in found.tensors] == [size == 0 for size in sizes]
    assert found.total == sha256(b"".join(found.tensors)).digest()


def test_digests_before_the_last_byte_are_not_all_there():
    digester = Digester([2, 2])
    digester.update(b"abc")
    assert digester.digests().tensors == (sha256(b"ab").digest(),)


@pytest.mark.parametrize(
    ("sizes", "before"), [((), b""), ((0,), b""), ((2, 0), b"ab"), ((2, 3), b"abcd")]
)
def test_more_bytes_than_the_tensors_have_are_our_own_fault(sizes, before):
    digester = Digester(sizes)
    digester.update(before)
    with pytest.raises(LocalError, match="1 bytes more"):
        digester.update(bytes(1 + sum(sizes) - len(before)))


def test_a_known_digest_is_not_computed_again():
    wrong = b"x" * 32
    digester = Digester([12, 0, 8], {2: wrong})
    for start in range(0, 20, 3):
        digester.update(PAYLOAD[start : start + 3])
    assert digester.digests().tensors == (*TENSORS[:2], wrong)


# The receiving end.


@contextmanager
def pieces_of(size):
    """Both ends cut the stream into chunks of this size."""
    with mock.patch.object(stream, "CHUNK_BYTES", size):
        yield


def cut(data, size=8):
    return [chunk(data[start : start + size]) for start in range(0, len(data), size)]


def opening():
    return pb.Frame(manifest=pb.Manifest(size=20, tensors=to_wire(ITEMS)))


def chunk(data):
    return pb.Frame(chunk=data)


def ending(total=TOTAL, digests=TENSORS):
    return pb.Frame(end=pb.End(sha256=total, tensor_sha256=digests, ledger_seq=7))


class Receiver:
    """An Inbound with everything that reached its sink."""

    def __init__(self, items=ITEMS, refuse=False):
        self.taken = bytearray()
        self.seen = []
        self._items = items
        self._refuse = refuse
        self.inbound = Inbound("silo-a", self._check, self.taken.extend)

    def _check(self, manifest):
        self.seen.append(manifest)
        if self._refuse:
            raise RefusedError("silo-a", "MANIFEST", "not this one")
        return [item.spec.nbytes for item in self._items]

    def feed(self, *frames):
        for frame in frames:
            self.inbound.feed(decode(frame.SerializeToString()))
        return self

    def refuses(self, frame, code):
        before = bytes(self.taken)
        with pytest.raises(RefusedError) as caught:
            self.feed(frame)
        assert (caught.value.code, caught.value.peer) == (code, "silo-a")
        assert bytes(self.taken) == before
        return caught.value.why

    def unfinished(self):
        with pytest.raises(RefusedError) as caught:
            self.inbound.finish()
        assert caught.value.code == "INTERRUPTED"


@pytest.mark.parametrize("size", [1, 8, 12, 19, 20, 21, CHUNK_BYTES])
def test_a_whole_stream_is_taken(size):
    with pieces_of(size):
        receiver = Receiver().feed(opening(), *cut(PAYLOAD, size), ending())
    end, digests = receiver.inbound.finish()
    assert bytes(receiver.taken) == PAYLOAD
    assert (digests.tensors, digests.total, end.ledger_seq) == (TENSORS, TOTAL, 7)
    assert len(receiver.seen) == 1


@pytest.mark.parametrize("items", [(), ITEMS[1:2]])
def test_a_stream_without_bytes_is_taken(items):
    receiver = Receiver(items)
    tensors, total = oracle([b""] * len(items))
    receiver.feed(pb.Frame(manifest=pb.Manifest()), ending(total, tensors)).inbound.finish()
    assert not receiver.taken


def test_a_stream_without_bytes_takes_no_chunk():
    receiver = Receiver(()).feed(pb.Frame(manifest=pb.Manifest()))
    receiver.refuses(chunk(b"x"), "LENGTH")


@pytest.mark.parametrize(
    "frame", [chunk(b"x"), chunk(b""), ending(), pb.Frame()], ids=["chunk", "empty", "end", "no"]
)
def test_nothing_comes_before_the_manifest(frame):
    receiver = Receiver()
    receiver.refuses(frame, "MANIFEST")
    assert receiver.seen == []
    receiver.unfinished()


def test_a_second_manifest_is_refused_and_not_looked_at():
    receiver = Receiver().feed(opening())
    receiver.refuses(opening(), "MANIFEST")
    receiver.feed(chunk(PAYLOAD))
    receiver.refuses(opening(), "MANIFEST")
    assert len(receiver.seen) == 1


@pytest.mark.parametrize(
    "frame", [opening(), chunk(b"x"), ending(), pb.Frame()], ids=["manifest", "chunk", "end", ""]
)
def test_nothing_comes_after_the_end(frame):
    receiver = Receiver().feed(opening(), chunk(PAYLOAD), ending())
    receiver.refuses(frame, "MANIFEST")
    assert receiver.inbound.finish()[1].total == TOTAL


def test_a_frame_without_body_is_refused_in_the_middle():
    Receiver().feed(opening()).refuses(pb.Frame(), "MANIFEST")


def test_an_empty_chunk_is_refused():
    receiver = Receiver().feed(opening())
    receiver.refuses(chunk(b""), "LENGTH")
    receiver.feed(chunk(PAYLOAD))
    receiver.refuses(chunk(b""), "LENGTH")


@pytest.mark.parametrize(
    ("before", "size"),
    [(0, 8), (8, 8), (16, 8), (20, 8), (0, 20), (20, 20), (0, CHUNK_BYTES), (20, CHUNK_BYTES)],
)
def test_only_a_chunk_of_exactly_what_is_due_is_taken(before, size):
    due = min(20 - before, size)
    for length in range(22):
        with pieces_of(size):
            receiver = Receiver().feed(opening(), *cut(PAYLOAD[:before], size))
            if length == due and due:
                receiver.feed(chunk(PAYLOAD[before : before + due]))
                continue
            why = receiver.refuses(chunk(bytes(length)), "LENGTH")
        assert f"{20 - before} were left" in why
        assert f"{due} are due" in why
        receiver.unfinished()


@pytest.mark.parametrize("before", [0, 1, 19])
def test_a_byte_too_few_is_refused(before):
    with pieces_of(1):
        receiver = Receiver().feed(opening(), *cut(PAYLOAD[:before], 1))
    receiver.unfinished()
    assert str(20 - before) in receiver.refuses(ending(), "LENGTH")
    receiver.unfinished()


def test_a_stream_without_end_does_not_count():
    Receiver().unfinished()
    Receiver().feed(opening(), chunk(PAYLOAD)).unfinished()


@pytest.mark.parametrize("over", [0, 1, -1, 1 - CHUNK_BYTES, CHUNK_BYTES])
def test_a_chunk_is_a_mebibyte_where_more_is_left(over):
    size = 2 * CHUNK_BYTES
    receiver = Receiver((Item("m", Kind.WHOLE_MODEL, TensorSpec("a", "float32", (size // 4,))),))
    receiver.feed(pb.Frame(manifest=pb.Manifest(size=size)))
    big = chunk(bytes(CHUNK_BYTES + over))
    if over:
        receiver.refuses(big, "LENGTH")
    else:
        receiver.feed(big)


FLIPPED = bytes([TOTAL[0] ^ 1]) + TOTAL[1:]


@pytest.mark.parametrize("end", [
    ending(total=FLIPPED), ending(total=b""), ending(total=TOTAL[:31]),
    ending(total=sha256(PAYLOAD).digest()), ending(digests=()), ending(digests=TENSORS[:2]),
    ending(digests=(*TENSORS, EMPTY)), ending(digests=(TENSORS[2], TENSORS[1], TENSORS[0])),
    ending(digests=(TENSORS[0], TENSORS[2])),
    ending(*reversed(oracle([PAYLOAD[:12], b"", PAYLOAD[13:] + b"\0"]))),
])  # fmt: skip
def test_wrong_digests_are_refused(end):
    receiver = Receiver().feed(opening(), chunk(PAYLOAD))
    receiver.refuses(end, "DIGEST")
    receiver.unfinished()


@pytest.mark.parametrize("place", range(20))
def test_a_changed_byte_is_found(place):
    changed = bytearray(PAYLOAD)
    changed[place] ^= 0x80
    Receiver().feed(opening(), chunk(bytes(changed))).refuses(ending(), "DIGEST")


def test_a_refused_manifest_lets_no_byte_in():
    receiver = Receiver(refuse=True)
    receiver.refuses(opening(), "MANIFEST")
    receiver.refuses(chunk(PAYLOAD), "MANIFEST")


FRAMES = {
    "manifest": opening(), "all": chunk(PAYLOAD), "half": chunk(PAYLOAD[:10]),
    "rest": chunk(PAYLOAD[10:]), "empty": chunk(b""), "long": chunk(PAYLOAD + b"x"),
    "end": ending(), "bad": ending(FLIPPED), "none": pb.Frame(),
}  # fmt: skip
WHOLE = ["manifest", "all", "end"]
GOOD = {10: ["manifest", "half", "rest", "end"], 20: WHOLE, CHUNK_BYTES: WHOLE}


@settings(max_examples=300)
@given(
    names=st.lists(st.sampled_from(sorted(FRAMES)), max_size=5)
    | st.sampled_from(list(GOOD.values())),
    size=st.sampled_from(sorted(GOOD)),
)
def test_only_the_right_order_ever_finishes(names, size):
    receiver = Receiver()
    code = "DONE"
    try:
        with pieces_of(size):
            receiver.feed(*(FRAMES[name] for name in names))
        receiver.inbound.finish()
    except RefusedError as error:
        code = error.code
    assert code in ("DONE", "MANIFEST", "LENGTH", "DIGEST", "INTERRUPTED")
    assert (code == "DONE") == (names == GOOD[size])
    assert len(receiver.taken) <= 20


@settings(max_examples=100)
@given(values=tensors(), size=st.integers(1, 64))
def test_what_one_end_sends_the_other_takes(values, size):
    specs = [TensorSpec("t", str(v.dtype).removeprefix("torch."), tuple(v.shape)) for v in values]
    items = tuple(Item("m", Kind.SKETCH, spec) for spec in specs)
    digester = Digester([spec.nbytes for spec in specs])
    receiver = Receiver(items).feed(pb.Frame(manifest=pb.Manifest()))
    for piece in chunks(values, size):
        digester.update(piece.content)
        with pieces_of(size):
            receiver.inbound.feed(decode(encode(piece)))
    sent = digester.digests()
    receiver.feed(ending(sent.total, sent.tensors))
    assert receiver.inbound.finish()[1] == sent
    assert (sent.tensors, sent.total) == oracle([plain_bytes(value) for value in values])


@pytest.mark.parametrize("size", [1, 7, 8, 20, CHUNK_BYTES])
@pytest.mark.parametrize("pieces", [[], [20], [3, 0, 5, 12], [1] * 20])
def test_bytes_are_cut_anew_whatever_pieces_they_come_in(size, pieces):
    at, cuts, buffer = 0, [], bytearray(20)

    def lent():  # as masked words come: each piece is overwritten once the next is asked for
        nonlocal at
        for length in pieces:
            buffer[:length] = PAYLOAD[at : at + length]
            yield memoryview(buffer)[:length]
            buffer[:length] = bytes(length)
            at += length

    cuts = [bytes(chunk.content) for chunk in recut(lent(), size)]
    assert b"".join(cuts) == PAYLOAD[: sum(pieces)]
    assert all(len(cut) == size for cut in cuts[:-1])
    assert all(0 < len(cut) <= size for cut in cuts[-1:])
