import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.blind_mixes import KEY, Mixing, seed_of
from support.secure_messages import HASH, SIGNATURE
from support.secure_sums import names, signer

from staddle.coordinator.blind import mix_rows as r
from staddle.coordinator.blind.hidden_uploads import dumped, loaded
from staddle.errors import LocalError
from staddle.proto import tensor_pb2 as tensor
from staddle.proto.channel import MAX_MESSAGE_BYTES
from staddle.proto.convert.mix import (
    MOST_TOLD,
    Mixed,
    PaddedWord,
    WireSummand,
    mixed_to_wire,
    padded_to_wire,
    words_to_wire,
)
from staddle.security.blind import mix_row, sealing
from staddle.security.blind import padded_mix as o
from staddle.security.blind.mix_context import Version
from staddle.security.blind.mix_row import RecipientRow, RowMemory, Share
from staddle.security.blind.plan import JobPlan
from staddle.security.blind.prekeys import Prekey, Word
from staddle.security.blind.sealing import Letter, SealedSecret, Sealing
from staddle.security.secagg.spec import Terms

SILOS = names(5)
PREKEY = Prekey(1, HASH, SIGNATURE)
LONGEST = Prekey(2**53 - 1, HASH, SIGNATURE)
WEIGHTS = dict.fromkeys(SILOS, 1.0)


@pytest.fixture
def mixing(tmp_path):
    """Five silos and their uploads on the disk."""
    made = Mixing(5, elements=100_000)
    made.folder = tmp_path
    for number, silo in enumerate(SILOS):
        contribute(made, silo, np.full(100_000, number / 8))
    return made


def contribute(mixing, silo, values, number=0):
    stored = mixing.contribute(silo, values, number)
    path(mixing)(stored.upload.version).write_bytes(stored.hidden)


def path(mixing):
    return lambda version: mixing.folder / f"{version.silo}.{version.number}"


def planning(mixing, memories=None):
    security = SimpleNamespace(colluders=1)
    job = SimpleNamespace(name="j1", min_cohort=3, security=security, batches=())
    return r.Planning(
        JobPlan(job), {"extractor": mixing.line}, signer("coordinator"), memories or {}
    )


def versions(mixing, *without):
    return {silo: e.upload.version for silo, e in mixing.stored.items() if silo not in without}


def signed(mixing):
    """The silos' words, as they are kept."""
    return {silo: dumped(padded_to_wire(given(each))) for silo, each in mixing.stored.items()}


def given(stored):
    return PaddedWord(b"session", "j1", HASH, "extractor", stored.upload, stored.pieces, PREKEY)


def test_a_row_is_planned_sent_and_opened(mixing):
    planned, memory = planning(mixing).plan("extractor", SILOS[0], WEIGHTS, versions(mixing))
    assert memory.newest == dict.fromkeys(SILOS[1:], 0)
    sent = r.mixed(planned, signed(mixing))
    row, after = mix_row.admit(
        mixing.line, SILOS[0], sent.document, sent.signature, RowMemory(), Terms(), mixing.signers
    )
    assert (row, after) == (planned.row, memory)
    mix_row.check_uploads(row, [each.upload for each in sent.summands])
    own = {0: seed_of(SILOS[0])}
    seeds = [
        o.open_seed(mixing.line, e.upload, e.letter, SILOS[0], own, mixing.signers)
        for e in sent.summands
    ]
    parts = zip(sent.summands, row.shares, seeds, strict=True)
    summands = [o.Summand(e.upload, share.weight, seed) for e, share, seed in parts]
    opening = o.Opening(mixing.line, KEY, summands, row.own_weight, mixing.stored[SILOS[0]].values)
    for piece in r.words(planned, mixing.line, path(mixing)):
        opening.add(piece)
    assert np.allclose(opening.finish(sent.tag), sum(range(5)) / 8 / 5, atol=1e-7)


def test_who_has_no_version_does_not_count_and_the_recipient_always_does(mixing):
    plan = planning(mixing).plan
    planned, _ = plan("extractor", SILOS[0], WEIGHTS, versions(mixing, SILOS[0], SILOS[4]))
    assert [share.version.silo for share in planned.row.shares] == list(SILOS[1:4])
    assert planned.row.own_weight == 2**30
    planned, _ = plan("extractor", SILOS[0], dict.fromkeys(SILOS[1:], 1.0), versions(mixing))
    assert planned.row.own_weight == 0
    assert plan("extractor", SILOS[0], WEIGHTS, {}) is None
    assert plan("extractor", SILOS[0], {SILOS[0]: 1.0}, versions(mixing)) is None
    # nothing is left of them
    assert plan("extractor", SILOS[0], {**WEIGHTS, SILOS[0]: 1e30}, versions(mixing)) is None


def test_a_row_that_its_recipient_would_refuse_is_not_planned(mixing, caplog):
    caplog.set_level("INFO")
    plans = planning(mixing)
    planned, memory = plans.plan("extractor", SILOS[0], WEIGHTS, versions(mixing))
    assert plans.news("extractor", SILOS[0], memory) == {("extractor", SILOS[0]): memory}
    plans.memories["extractor", SILOS[0]] = memory
    assert plans.news("extractor", SILOS[0], memory) == {}
    # the same again
    assert plans.plan("extractor", SILOS[0], WEIGHTS, versions(mixing))[0].row == planned.row
    assert plans.plan("extractor", SILOS[0], {**WEIGHTS, SILOS[1]: 1.1}, versions(mixing)) is None
    assert "new uploads of 0 silos" in caplog.records[-1].fields["why"]
    assert plans.plan("extractor", SILOS[1], {**WEIGHTS, SILOS[2]: 9.0}, versions(mixing)) is None
    assert "one silo has" in caplog.records[-1].fields["why"]
    for silo in SILOS[1:4]:
        contribute(mixing, silo, np.zeros(100_000), 1)
    assert plans.plan("extractor", SILOS[0], WEIGHTS, versions(mixing)) is not None


def test_rows_put_aside_come_back_in_order(mixing):
    first, _ = planning(mixing).plan("extractor", SILOS[0], WEIGHTS, versions(mixing), 0.1)
    second, _ = planning(mixing).plan(
        "extractor", SILOS[0], {**WEIGHTS, SILOS[1]: 1.1}, versions(mixing), 1 / 3
    )
    data = r.put_aside(r.aside("extractor", r.put_aside((), first), "x"), second)
    assert r.aside("extractor", data, "x") == (first, second)
    for wrong in (data + b" ", data.replace(b'"keep"', b'"kept"'), b"{}"):
        with pytest.raises(LocalError, match=r"^0\.x\.rows"):
            r.aside("extractor", wrong, "0.x.rows")


def longest(summands):
    """A row with the longest of everything."""
    ids = [f"{i:064}" for i in range(summands)]
    given = [Version(silo=s, round=2**32 - 1, attempt=2**32 - 1, number=2**53 - 1) for s in ids]
    shares = tuple(Share(version=version, weight=2**31) for version in given)
    row = RecipientRow(line="f" * 64, recipient="r" * 64, own_weight=2**32, shares=shares)
    uploads = [
        o.PaddedUpload(
            version, HASH, b"\xff" * 8, Sealing(version.silo, HASH, HASH, HASH), SIGNATURE
        )
        for version in given
    ]
    sent = tuple(WireSummand(upload, letter(summands)) for upload in uploads)
    return Mixed("p" * 128, row.signed_bytes(), SIGNATURE, sent, b"\xff" * 8, 0.1)


def letter(silos):
    return Letter(
        SealedSecret("r" * 64, b"\xff" * 48, 2**53 - 1), (HASH,) * (silos - 1).bit_length()
    )


@pytest.mark.parametrize("silos", [3, 100, 1000])
def test_a_manifest_has_room_for_all_rows_that_may_be_put_aside(silos):
    row = mixed_to_wire(longest(silos))
    word = Word(
        Version(silo="s" * 64, round=2**32 - 1, attempt=2**32 - 1, number=2**53 - 1),
        HASH,
        LONGEST,
        letter(silos),
    )
    told = words_to_wire([("p" * 128, word)] * min(MOST_TOLD, silos))
    manifest = tensor.Manifest(rows=[row] * (r.MOST_SUMMANDS // silos), prekeys=told)
    assert manifest.ByteSize() < MAX_MESSAGE_BYTES - 2**17


def test_too_many_rows_are_not_put_aside(mixing):
    planned, _ = planning(mixing).plan("extractor", SILOS[0], WEIGHTS, versions(mixing), 0.1)
    many = [planned] * (r.MOST_SUMMANDS // 4)
    assert r.put_aside(many[1:], planned) is not None
    assert r.put_aside(many, planned) is None


def test_words_of_uploads_that_are_gone_are_not_made(mixing):
    planned, _ = planning(mixing).plan("extractor", SILOS[0], WEIGHTS, versions(mixing))
    made = r.words(planned, mixing.line, path(mixing))
    first = len(next(made))
    assert open_files(mixing) == len(planned.row.shares)
    path(mixing)(versions(mixing)[SILOS[2]]).unlink()  # what is open stays open
    assert first + sum(len(piece) for piece in made) == mixing.line.nbytes
    with pytest.raises(FileNotFoundError):
        next(r.words(planned, mixing.line, path(mixing)))
    path(mixing)(versions(mixing)[SILOS[2]]).write_bytes(b"short")
    with pytest.raises(LocalError, match="has 5 bytes at 0"):
        list(r.words(planned, mixing.line, path(mixing)))
    assert open_files(mixing) == 0


def open_files(mixing):
    """Descriptors of the uploads, removed ones included; the process has others that may end."""
    found = (os.path.realpath(each) for each in Path("/proc/self/fd").iterdir())
    return sum(path.startswith(str(mixing.folder)) for path in found)


def test_a_word_is_kept_without_its_session(mixing):
    each = mixing.stored[SILOS[1]]
    body = dumped(padded_to_wire(given(each)))
    assert b"session" not in body
    assert loaded(SILOS[1], body) == replace(given(each), session=b"-")
    assert sealing.letter_for(SILOS[0], each.pieces) == sealing.letters(each.pieces)[SILOS[0]]
    with pytest.raises(LocalError, match="nothing is sealed to"):
        sealing.letter_for(SILOS[1], each.pieces)
