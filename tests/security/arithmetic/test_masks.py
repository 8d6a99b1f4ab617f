import shutil
import subprocess
from itertools import pairwise

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import ECB
from hypothesis import given, settings
from hypothesis import strategies as st
from support.secure_sums import Drawn

from staddle.errors import LocalError
from staddle.security.arithmetic import masks
from staddle.security.arithmetic.fixedpoint import WORD
from staddle.security.arithmetic.masks import Keystream, Mask, Term, negated, pair_term

KEY = bytes(range(32))


def stream(key, group, n, offset=0):
    made = bytearray(n)
    Keystream(key, group, offset).fill(memoryview(made))
    return bytes(made)


def words(mask, n, ring=32):
    found = np.zeros(n, WORD[ring])
    mask.add_to(found)
    return found


# key, IV, plain text, cipher text: test cases of McGrew and Viega, "The Galois/Counter Mode",
# appendix B
VECTORS = [
    (bytes(32).hex(), bytes(12).hex(), bytes(16).hex(), "cea7403d4d606b6e074ec5d3baf39d18"),
    (
        "feffe9928665731c6d6a8f9467308308" * 2,
        "cafebabefacedbaddecaf888",
        "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a721c3c0c95956809532fcf0e2449a6b525",
        "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa8cb08e48590dbb3da7b08b1056828838",
    ),
]


@pytest.mark.parametrize(("key", "iv", "plain", "cipher"), VECTORS, ids=["case 14", "case 16"])
def test_the_stream_is_that_of_the_specification_of_gcm(key, iv, plain, cipher):
    group, segment = int(iv[:8], 16), int(iv[8:], 16)
    expected = bytes(
        a ^ b for a, b in zip(bytes.fromhex(plain), bytes.fromhex(cipher), strict=True)
    )
    assert stream(bytes.fromhex(key), group, len(expected), segment * masks.SEGMENT) == expected


def counter_block(group, at):
    """Of the block of a stream that begins at byte ``at``, by NIST SP 800-38D: inc32 of nonce ‖
    00000001, i + 1 times.

    Written with numbers of its own, so that a change of the layout is seen.
    """
    segment, inside = at >> 20, (at & (1 << 20) - 1) // 16
    return group.to_bytes(4) + segment.to_bytes(8) + (1 + inside + 1).to_bytes(4)


@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**40),
    st.sampled_from([0, -100, 100]),
    st.integers(1, 400),
)
def test_any_piece_is_aes_of_its_counter_blocks(group, far, off, n):
    # the second across or near an edge
    for offset in (max(far + off, 0), max(far // 2**20 * 2**20 + off, 0)):
        first = offset // 16 * 16
        blocks = [counter_block(group, at) for at in range(first, offset + n, 16)]
        made = Cipher(AES(KEY), ECB()).encryptor().update(b"".join(blocks))
        assert stream(KEY, group, n, offset) == made[offset - first :][:n]


def test_no_block_stands_for_two_places():
    """By decrypting: other groups, segments and places are other blocks, and none is GCM's."""
    edge = masks.SEGMENT
    places = [
        (group, at)
        for group in (0, 1, 256)
        for at in (0, 16, edge - 16, edge, 2 * edge - 16, 2 * edge)
    ]
    decrypt = Cipher(AES(KEY), ECB()).decryptor().update
    given_ = [decrypt(stream(KEY, group, 16, at)) for group, at in places]
    assert len(set(given_)) == len(places)
    assert given_ == [counter_block(group, at) for group, at in places]
    assert min(int.from_bytes(block[12:]) for block in given_) == 2
    assert max(int.from_bytes(block[12:]) for block in given_) == edge // 16 + 1 < 2**32


def test_known_bytes():
    assert stream(KEY, 0, 16).hex() == "0ebcb5deb52c83bd08a8a935182c9199"
    assert stream(KEY, 1, 16).hex() == "4436cdaa0c5af4a85f3c6590a9bd3580"
    assert stream(KEY, 0, 16, masks.SEGMENT).hex() == "15d6bffc44f4301e0e2e5139eca63af7"
    assert words(Mask([Term(KEY)], 0, 32), 2).tobytes() == stream(KEY, 0, 8)
    found = words(Mask([Term(KEY, negative=True)], 0, 32), 1)[0]
    assert found == (-int.from_bytes(stream(KEY, 0, 4), "little")) % 2**32


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command here")
@pytest.mark.parametrize("group", [0, 7])
def test_the_stream_is_what_openssl_enc_makes(group):
    start = (group.to_bytes(4) + bytes(8) + (2).to_bytes(4)).hex()
    command = ["openssl", "enc", "-aes-256-ctr", "-K", KEY.hex(), "-iv", start]
    made = subprocess.run(command, input=bytes(100_000), capture_output=True, check=True).stdout
    assert stream(KEY, group, 100_000) == made


@given(
    st.integers(0, 3),
    st.lists(st.integers(1, 300), min_size=1, max_size=8),
    st.sampled_from([32, 64]),
)
def test_any_cut_gives_the_same_words(group, cuts, ring):
    terms = [Term(KEY), Term(bytes(32), negative=True)]
    whole = words(Mask(terms, group, ring), sum(cuts), ring)
    mask, at = Mask(terms, group, ring), 0
    for cut in cuts:
        assert (words(mask, cut, ring) == whole[at : at + cut]).all()
        assert (words(Mask(terms, group, ring, at), cut, ring) == whole[at : at + cut]).all()
        at += cut


@pytest.mark.parametrize("ring", [32, 64])
def test_long_masks_are_those_of_their_pieces(ring):
    n = (masks.SEGMENT + masks.PIECE) // (ring // 8) + 3
    ends = [0, masks.PIECE, masks.SEGMENT - 8, masks.SEGMENT, masks.SEGMENT + 24, n * ring // 8]
    pieces = [stream(KEY, 2, end - at, at) for at, end in pairwise(ends)]
    expected = np.frombuffer(b"".join(pieces), WORD[ring])
    assert (words(Mask([Term(KEY)], 2, ring), n, ring) == expected).all()


@settings(max_examples=60)
@given(st.data())
def test_masks_of_all_cancel_and_what_is_left_is_removed(data):
    ring, n = data.draw(st.sampled_from([32, 64])), data.draw(st.integers(2, 8))
    silos = [f"s{i}" for i in data.draw(st.permutations(range(n)))]
    draw = Drawn(data.draw(st.integers()))
    pair = {frozenset((u, v)): draw(32) for u in silos for v in silos if u < v}
    own = {u: draw(32) for u in silos}
    lost = data.draw(st.sets(st.sampled_from(silos), max_size=n - 1))
    total = np.zeros(50, WORD[ring])
    for u in silos:
        terms = [Term(own[u]), *(pair_term(u, v, pair[frozenset((u, v))]) for v in silos if v != u)]
        if u not in lost:
            Mask(terms, 3, ring).add_to(total)
    assert total.any()
    left = [Term(own[u]) for u in silos if u not in lost]
    left += [pair_term(u, v, pair[frozenset((u, v))]) for u in silos if u not in lost for v in lost]
    Mask(negated(left), 3, ring).add_to(total)
    assert not total.any()


@pytest.mark.parametrize("way", masks.MODES)
def test_both_ways_to_a_stream_give_the_same_bytes(monkeypatch, way):
    monkeypatch.setattr(masks, "_faster", lambda: way)
    edge = masks.SEGMENT
    for group, at in ((0, 0), (7, 3), (2**32 - 1, edge - 5), (1, 3 * edge - 16)):
        blocks = [counter_block(group, place) for place in range(at // 16 * 16, at + 100, 16)]
        wanted = Cipher(AES(KEY), ECB()).encryptor().update(b"".join(blocks))[at % 16 :][:100]
        assert stream(KEY, group, 100, at) == wanted


@pytest.mark.parametrize("ring", [32, 64])
@pytest.mark.parametrize("segments", [0, 1e-5, 1, 2.5, 4, 9.3])  # of the stream; four threads
def test_a_whole_mask_is_added_in_several_threads(ring, segments):
    terms = [Term(KEY), Term(bytes(32), negative=True)]
    made = np.arange(int(segments * masks.SEGMENT) // (ring // 8), dtype=WORD[ring])
    expected = made.copy()
    masks.add_whole(terms, 5, made)
    Mask(terms, 5, ring).add_to(expected)
    assert (made == expected).all()


@pytest.mark.parametrize("ring", [32, 64])
def test_a_term_may_count_several_times(ring):
    times, n = 2**32 - 5, masks.PIECE // (ring // 8) + 5
    once = words(Mask([Term(KEY)], 1, ring), n, ring)
    several = words(Mask([Term(KEY, times=times), Term(bytes(32))], 1, ring), n, ring)
    assert (
        several == once * once.dtype.type(times) + words(Mask([Term(bytes(32))], 1, ring), n, ring)
    ).all()
    left = several - words(Mask([Term(bytes(32))], 1, ring), n, ring)
    Mask(negated([Term(KEY, times=times)]), 1, ring).add_to(left)
    assert not left.any()


def test_one_missing_stream_leaves_uniform_bytes():
    """Chi-square of 255 degrees on a million bytes; 4.5 standard deviations either way."""
    mask = words(Mask([Term(Drawn(1)(32)), Term(Drawn(2)(32), negative=True)], 0, 32), 250_000)
    plain = np.full(250_000, 12345, WORD[32])
    for found in (mask + plain, mask, words(Mask([Term(Drawn(1)(32))], 0, 32), 250_000) + plain):
        counts = np.bincount(found.view(np.uint8), minlength=256)
        expected = found.nbytes / 256
        assert abs(((counts - expected) ** 2 / expected).sum() - 255) < 4.5 * (2 * 255) ** 0.5


def test_a_term_shows_no_key():
    assert KEY.hex() not in repr(Term(KEY))
    assert repr(KEY) not in repr(Term(KEY))


def test_what_a_mask_refuses():
    with pytest.raises(LocalError, match="shares no mask with itself"):
        pair_term("a", "a", KEY)
    with pytest.raises(LocalError, match="31 bytes"):
        Keystream(KEY[:31], 0)
    with pytest.raises(LocalError, match="this is a bug"):
        Mask([Term(KEY)], 0, 32).add_to(np.zeros(3, WORD[64]))
