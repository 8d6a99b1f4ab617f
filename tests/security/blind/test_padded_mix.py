import hashlib
import tracemalloc
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import ECB
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.blind_mixes import KEY, Mixing, line, seed_of
from support.refusals import blamed
from support.secure_sums import names, signer

from staddle.algorithms.exchange.parts import MIX_BITS, Kind, Mix, Part, TensorSpec, integer_weights
from staddle.algorithms.exchange.plain import PLAIN
from staddle.errors import LocalError
from staddle.security.arithmetic.fixedpoint import check_values
from staddle.security.blind import padded_mix as o
from staddle.security.blind import sealing
from staddle.security.blind.mix_context import mix_group
from staddle.security.faults import COORDINATOR_OR_SILO
from staddle.security.identity.domains import framed

FOUR = names(4)


def mixing(n=4, elements=20, clip_exponent=3, seed=0):
    made = Mixing(n, seed, elements=elements, clip_exponent=clip_exponent)
    random, most = np.random.default_rng(seed), 2.0**clip_exponent
    for silo in made.silos:
        made.contribute(silo, random.uniform(-most, most, elements))
    return made


def integers(silos, weights):
    return dict(zip(silos, integer_weights(weights), strict=True))


@settings(max_examples=40)
@given(st.data())
def test_a_row_against_the_plain_mix(data):
    """A row is the integers' sum within the bound, and what the plain mix gives."""
    n, elements = data.draw(st.integers(3, 9)), data.draw(st.integers(1, 30))
    clip_exponent = data.draw(st.integers(-8, 30))
    silos, most = names(n), 2.0**clip_exponent
    dtype = data.draw(st.sampled_from([np.float32, np.float64]))
    edge = st.sampled_from([0.0, 1.0, -1.0])
    unit = st.floats(-1, 1, width=32, allow_subnormal=False) | edge
    units = st.lists(unit, min_size=elements, max_size=elements)
    values = {s: (np.array(data.draw(units)) * most).astype(dtype) for s in silos}
    drawn = st.lists(st.floats(0, 1e6) | edge.map(abs), min_size=n, max_size=n)
    raw = data.draw(drawn.filter(lambda w: sum(w) > 0))
    weights, recipient = integers(silos, raw), data.draw(st.sampled_from(silos))
    assume(any(w for s, w in weights.items() if s != recipient))  # else nothing comes down
    made = Mixing(n, elements=elements, clip_exponent=clip_exponent)
    for silo in silos:
        assert check_values(made.line.group, values[silo]) == 0
        made.contribute(silo, values[silo])
    found = made.open(made.row(recipient, weights)[0])

    # The slow oracle: Python's own integers.
    e = 62 - 32 - clip_exponent
    assert made.line.group.scale_exponent == e
    for k in range(elements):
        numbers = {s: round(Fraction(float(values[s][k])) * Fraction(2) ** e) for s in silos}
        total = sum(weights[s] * numbers[s] for s in silos)
        assert found[k] == float(Fraction(total, 1) / Fraction(2) ** (32 + e))
        # Rule 19: the error to the exact weights.
        whole = sum(map(Fraction, raw))
        weighed = zip(silos, raw, strict=True)
        exact = sum(Fraction(w) / whole * Fraction(float(values[s][k])) for s, w in weighed)
        bound = Fraction(1, 2) / Fraction(2) ** e + n * Fraction(most) / 2**MIX_BITS
        # one rounding to float64
        assert abs(Fraction(float(found[k])) - exact) <= bound + Fraction(most) / 2**52

    # The plain mix uses the same integers: it differs by the quantisation alone, and by float64's
    # rounding.
    part = Part("extractor", Kind.BACKBONE, Mix(), (TensorSpec("t", "float64", (elements,)),))
    read = lambda silo, _: torch.from_numpy(values[silo].astype(np.float64))
    plain = PLAIN.mix(part, "r", dict(zip(silos, raw, strict=True)), read)["t"].numpy()
    assert np.abs(plain - found).max() <= 2.0 ** -(e + 1) + (n + 1) * most * 2.0**-52


def test_the_plain_mix_in_float32_is_off_by_float32s_rounding():
    made, raw = mixing(elements=500), [0.1, 0.3, 0.35, 0.25]
    found = made.open(made.row(FOUR[0], integers(FOUR, raw))[0])
    part = Part("extractor", Kind.BACKBONE, Mix(), (TensorSpec("t", "float32", (500,)),))
    read = lambda silo, _: torch.from_numpy(made.stored[silo].values)
    plain = PLAIN.mix(part, "r", dict(zip(FOUR, raw, strict=True)), read)["t"].numpy()
    assert np.abs(plain - found).max() <= 2.0**-28 + 8 * 2.0**-24
    assert np.abs(plain - found).max() > 0


def test_what_is_sent_is_that_of_the_docstring():
    made = mixing(elements=5)
    stored = made.stored[FOUR[1]]
    ctx = stored.upload.version.context(made.line)
    info = framed(b"staddle/mix/stream/1", b"\x02", b"silo-01")
    key = HKDF(SHA256(), 32, ctx, info).derive(stored.seed)
    blocks = b"".join(number.to_bytes(16, "big") for number in (2, 3, 4))
    stream = np.frombuffer(Cipher(AES(key), ECB()).encryptor().update(blocks)[:40], "<u8")
    numbers = [round(Fraction(float(v)) * 2**27) % 2**64 for v in stored.values]
    expected = [(number + int(word)) % 2**64 for number, word in zip(numbers, stream, strict=True)]
    assert np.frombuffer(stored.hidden, "<u8").tolist() == expected
    fields = (made.line.context(), b"silo-01", bytes(8), bytes(8), bytes(8))
    assert ctx == hashlib.sha256(framed(b"staddle/mix/version/1", *fields)).digest()


def test_vectors_of_several_pieces_and_rounds():
    elements = o.LENT + o.STEP + 777
    made = Mixing(4, elements=elements)
    values = {s: np.linspace(-8, 8, elements) * (i + 1) / 4 for i, s in enumerate(FOUR)}
    for number, silo in enumerate(FOUR):
        made.contribute(silo, values[silo], number)
    weights = integers(FOUR, [1, 2, 3, 4])
    found = made.open(made.row(FOUR[3], weights)[0])
    exact = sum(weights[s] / 2**32 * values[s] for s in FOUR)
    assert np.abs(found - exact).max() <= 2.0**-28 + 1e-14
    hidden, tag = made.mixed(made.row(FOUR[3], weights)[0])
    whole = made.opening(made.row(FOUR[3], weights)[0])
    whole.add(hidden)
    assert (whole.finish(tag) == found).all()
    narrow = made.opening(made.row(FOUR[3], weights)[0], dtype=np.float32)
    for at in range(0, len(hidden), 8 * 1001):  # pieces that end nowhere in particular
        narrow.add(hidden[at : at + 8 * 1001])
    assert narrow.finish(tag).tobytes() == found.astype(np.float32).tobytes()


def test_all_uploads_and_rows_at_their_limits():
    made = Mixing(4, elements=2, clip_exponent=3)
    for silo in FOUR:
        made.contribute(silo, np.array([8.0, -8.0]))
    for raw in ([1, 1, 1, 1], [0, 0, 1, 0]):
        found = made.open(made.row(FOUR[0], integers(FOUR, raw))[0])
        assert found.tolist() == [8.0, -8.0]


def test_a_silo_without_an_upload_opens_a_row_of_the_others():
    made = mixing()
    weights = integers(FOUR, [0, 1, 1, 2])
    values = {s: made.stored[s].values for s in FOUR}
    del made.stored[FOUR[0]]
    found = made.open(made.row(FOUR[0], weights)[0])
    exact = sum(weights[s] / 2**32 * values[s] for s in FOUR)
    assert np.abs(found - exact).max() <= 2.0**-28 + 1e-14


def altered(change):
    """What a recipient says to a row that came down otherwise than it was."""
    made = mixing()
    row, _ = made.row(FOUR[0], integers(FOUR, [1, 1, 1, 1]))
    hidden, tag = made.mixed(row)
    return blamed(lambda: change(made, row, bytearray(hidden), tag))


def test_a_row_that_was_altered_is_the_coordinators():
    def shifted(made, row, hidden, tag):
        hidden[8] ^= 1
        made.open(row, (bytes(hidden), tag))

    def other_tag(made, row, hidden, tag):
        made.open(row, (bytes(hidden), (int.from_bytes(tag) ^ 1).to_bytes(8)))

    def other_weights(made, row, hidden, tag):
        other, _ = made.row(FOUR[0], integers(FOUR, [1, 1, 1, 2]))
        made.open(row, made.mixed(other))

    def other_version(made, row, hidden, tag):
        old = made.mixed(row)
        made.contribute(FOUR[1], np.ones(20), 1)
        made.open(made.row(FOUR[0], integers(FOUR, [1, 1, 1, 1]))[0], old)

    def other_key(made, row, hidden, tag):
        made.open(row, key=b"x" * 32)

    for change in (shifted, other_tag, other_weights, other_version, other_key):
        assert altered(change)[:2] == (COORDINATOR_OR_SILO, "SUM"), change.__name__
    for change, why in (
        (lambda hidden, _: (hidden, b""), ""),
        (lambda hidden, tag: (hidden[:-8], tag), "a row of 19 numbers, not 20"),
        (lambda hidden, tag: (hidden + bytes(8), tag), "a row of more than 20 numbers"),
        (lambda hidden, tag: (hidden[:-1], tag), "brings 159 bytes"),
    ):

        def cut(made, row, hidden, tag, change=change):
            made.open(row, change(bytes(hidden), tag))

        found = altered(cut)
        assert found[:2] == ("coordinator", "SUM"), why
        assert why in found[2]


def test_wrong_seeds_give_noise_and_no_row():
    made = mixing()
    row, _ = made.row(FOUR[0], integers(FOUR, [1, 1, 1, 1]))
    opening = made.opening(row)
    first, *others = opening._summands
    summands = [replace(first, seed=bytes(32)), *others]
    noise = o.Opening(made.line, KEY, summands, row.own_weight, made.stored[FOUR[0]].values)
    hidden, tag = made.mixed(row)
    noise.add(hidden)
    assert blamed(noise.finish, tag)[1] == "SUM"


def test_each_stream_is_of_one_upload():
    made, zeros = Mixing(4), np.zeros(20)
    seed = bytes(range(32))
    first = made.contribute(FOUR[0], zeros, seed=seed).hidden
    assert made.contribute(FOUR[0], zeros, seed=seed).hidden == first
    assert made.contribute(FOUR[0], zeros, 1, seed=seed).hidden != first
    assert made.contribute(FOUR[1], zeros, seed=seed).hidden != first
    assert made.contribute(FOUR[0], zeros).hidden != first
    for fields in (
        {"job": "j2"},
        {"key_epoch": 3},
        {"members": "ee" * 32},
        {"federation": "liver"},
    ):
        other = Mixing(4, **fields)
        assert other.contribute(FOUR[0], zeros, seed=seed).hidden != first
        assert other.line.context() != made.line.context()


def test_an_upload_is_signed_and_its_pieces_are_all():
    made = mixing()
    stored = made.stored[FOUR[1]]
    upload, sha256 = stored.upload, stored.upload.sha256

    def again(**fields):
        wrong = replace(upload, **fields)
        return replace(
            wrong, signature=signer(FOUR[1])(o.MIX_UPLOAD, wrong.signed_bytes(made.line))
        )

    moved = upload.version.model_copy(update={"number": 1})
    foreign = replace(upload.sealing, sender=FOUR[2])
    for wrong, pieces, digest in (
        (replace(upload, tag=bytes(8)), stored.pieces, sha256),
        (replace(upload, version=moved), stored.pieces, sha256),
        (replace(upload, sha256=bytes(32)), stored.pieces, bytes(32)),
        (replace(upload, signature=bytes(64)), stored.pieces, sha256),
        (again(tag=bytes(9)), stored.pieces, sha256),
        (again(sha256=bytes(31)), stored.pieces, bytes(31)),
        (again(sealing=foreign), stored.pieces, sha256),
        (again(sealing=replace(upload.sealing, ephemeral=b"")), stored.pieces, sha256),
        (upload, stored.pieces[1:], sha256),
        (upload, stored.pieces, bytes(32)),
    ):
        call = (made.line, wrong, pieces, digest, made.signers)
        assert blamed(o.check_upload, *call)[0] == FOUR[1]
    other = line(job="j2")
    call = (other, upload, stored.pieces, sha256, made.signers)
    assert blamed(o.check_upload, *call)[0] == FOUR[1]


def test_a_seed_is_for_each_other_silo_alone():
    made = mixing()
    stored = made.stored[FOUR[1]]
    letters = sealing.letters(stored.pieces)
    assert sorted(letters) == [FOUR[0], FOUR[2], FOUR[3]]

    def opened(silo, letter, own, upload=stored.upload):
        return o.open_seed(made.line, upload, letter, silo, {0: own}, made.signers)

    for silo, letter in letters.items():
        assert opened(silo, letter, seed_of(silo)) == stored.seed
        found = blamed(opened, silo, letter, seed_of("coordinator"))
        assert found[:2] == (FOUR[1], "SHARES")
    found = blamed(opened, FOUR[0], letters[FOUR[2]], seed_of(FOUR[0]))
    assert found[:2] == ("coordinator", "SHARES")
    odd = replace(stored.upload, sealing=replace(stored.upload.sealing, root=b""))
    odd = replace(odd, signature=signer(FOUR[1])(o.MIX_UPLOAD, odd.signed_bytes(made.line)))
    own = (FOUR[0], letters[FOUR[0]], seed_of(FOUR[0]))
    said = "passed on from 'silo-01': what it signed over its sealed secret has the wrong size"
    assert said in blamed(opened, *own, odd)[2]
    unsigned = replace(stored.upload, tag=bytes(8))
    peer, _, why = blamed(opened, *own, unsigned)
    assert (peer, "passed on from 'silo-01'" in why) == ("coordinator", True)


def test_a_line_has_one_spelling_and_its_scale():
    assert mix_group("g", 3, 3).scale_exponent == 27  # rule 19: B = 8
    assert mix_group("g", 3, 30).scale_exponent == 0
    with pytest.raises(LocalError, match=r"up to 2\^30, not 2\^31"):
        mix_group("g", 3, 31)
    good = mix_group("g", 3, 3)
    wrong = {"scale_exponent": 28, "ring": 32, "weights": "public", "clip_exponent": 31}
    for field, value in wrong.items():
        with pytest.raises(ValueError, match="is not one of a Mix"):
            line(group=good.model_copy(update={field: value}))
    assert line().nbytes == 160


def test_a_stored_upload_that_is_too_short_is_told():
    made = mixing()
    with pytest.raises(LocalError, match="has 159 bytes at 0, not 160"):
        list(o.mixed_pieces(made.line, {FOUR[0]: 1}, lambda *_: bytes(159)))


def test_the_coordinator_holds_pieces_only():
    elements = 8 * o.LENT
    stored = np.zeros(elements, "<u8").data.cast("B")
    tracemalloc.start()
    read = lambda _, at, size: stored[at : at + size]
    for _ in o.mixed_pieces(line(elements), dict.fromkeys(names(9), 3), read):
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6 * o.PIECE


def test_a_seed_that_was_opened_is_in_no_text():
    summand = o.Summand(None, 1, b"not for logs".ljust(32))
    assert "not for logs" not in repr(summand)
