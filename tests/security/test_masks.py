import shutil
import subprocess

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from secure_sums import Drawn

from staddle.errors import LocalError
from staddle.security import masks
from staddle.security.fixedpoint import WORD
from staddle.security.masks import Keystream, Mask, Term, negated, pair_term

KEY = bytes(range(32))


def stream(key, group, n, offset=0):
    made = bytearray(n)
    Keystream(key, group, offset).fill(memoryview(made))
    return bytes(made)


def words(mask, n, ring=32):
    found = np.zeros(n, WORD[ring])
    mask.add_to(found)
    return found


def test_the_cipher_is_that_of_sp_800_38a_section_f_5_5():
    key = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    group, block = 0xF0F1F2F3F4F5F6F7, 0xF8F9FAFBFCFDFEFF
    plain = "6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51"
    cipher = "601ec313775789a5b7a7f504bbf3d228f443e3ca4d62b59aca84e990cacaf5c5"
    expected = bytes(a ^ b for a, b in zip(bytes.fromhex(plain), bytes.fromhex(cipher), strict=True))
    assert stream(key, group, 32, block * 16) == expected


def test_known_bytes():
    assert stream(KEY, 0, 16).hex() == "f29000b62a499fd0a9f39a6add2e7780"
    assert stream(KEY, 1, 16).hex() == "511dd5ef9a682b7da49f91c86c4f7ac3"
    assert words(Mask([Term(KEY)], 0, 32), 2).tobytes() == stream(KEY, 0, 8)
    assert (
        words(Mask([Term(KEY, negative=True)], 0, 32), 1)[0] == (-int.from_bytes(stream(KEY, 0, 4), "little")) % 2**32
    )


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command here")
@pytest.mark.parametrize("group", [0, 7])
def test_the_stream_is_what_openssl_enc_makes(group):
    command = ["openssl", "enc", "-aes-256-ctr", "-K", KEY.hex(), "-iv", (group.to_bytes(8) + bytes(8)).hex()]
    made = subprocess.run(command, input=bytes(100_000), capture_output=True, check=True).stdout
    assert stream(KEY, group, 100_000) == made


@settings(deadline=None)
@given(st.integers(0, 3), st.lists(st.integers(1, 300), min_size=1, max_size=8), st.sampled_from([32, 64]))
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
    n = 2 * masks.PIECE // (ring // 8) + 3
    expected = np.frombuffer(
        b"".join(stream(KEY, 2, masks.PIECE, at) for at in range(0, 3 * masks.PIECE, masks.PIECE)), WORD[ring]
    )[:n]
    assert (words(Mask([Term(KEY)], 2, ring), n, ring) == expected).all()


@settings(max_examples=60, deadline=None)
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
