"""Silos with the right keys and bad intentions in rounds that mix and compare, against the
coordinator as it ships.
"""

import hashlib
import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from support.coordinator_thread import coordinator
from support.raw_mixing_silo import MixSilo, in_turn
from support.raw_silo import SECONDS, arrived, refused
from support.signed_federation import pfedsim, signed_federation

from staddle.algorithms.exchange.parts import Contribution, upload_items
from staddle.algorithms.exchange.plain import PLAIN
from staddle.algorithms.tasks.table_counting import RIGHT
from staddle.coordinator.blind import hidden_uploads
from staddle.proto.wire import to_wire
from staddle.security.blind.mix_context import Version
from staddle.security.blind.plan import uploaded
from staddle.security.blind.sealing import SealedSecret
from staddle.security.identity.domains import MIX_UPLOAD
from staddle.security.secagg import silo_events as s

pytestmark = pytest.mark.actor("silo")

SILOS = ("north", "east", "south", "west")  # the first is the bad one


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    documents = (pfedsim(SILOS), pfedsim(SILOS, name="other"))
    folder = tmp_path_factory.mktemp("attacked")
    return signed_federation(folder, SILOS, *documents, beat_seconds=60)


def contributions(world):
    rng = torch.Generator().manual_seed(3)
    extractor, rows = uploaded(world.job.up(0))
    (spec,) = rows.tensors
    vectors = torch.randn(spec.shape, generator=rng, dtype=torch.float64)
    counts = {each.name: torch.full(each.shape, 7, dtype=torch.int64) for each in RIGHT.tensors}
    found = {
        extractor.name: {e.name: torch.randn(e.shape, generator=rng) for e in extractor.tensors},
        rows.name: {spec.name: (vectors / vectors.norm()).float()},
        RIGHT.name: counts,
    }
    contribute = lambda part: PLAIN.contribute(part, Contribution(found[part.name]))
    return lambda _: {part.name: contribute(part) for part in world.job.up(0)}


@pytest.fixture
def play(world, tmp_path):
    """``play(harm)`` runs ``await harm(bad)`` in round 0.

    ``whole``: then the round comes to its end with all four, who get rows of it.
    """
    config = world.config.model_copy(update={"directory": tmp_path / "state"})

    def run(harm, whole=False):
        async def scenario():
            of = world.roster, world.job, contributions(world)
            silos = [MixSilo(here.address, world.keys[silo], *of) for silo in SILOS]
            for each in silos:
                await each.accept()
            for each in silos:
                await each.told("round")
            await harm(silos[0])
            await in_turn(silos if whole else (), lambda each: each.take_part(0))
            for each in silos if whole else ():
                each.counted(0)
                assert (await each.told("round")).round == 1
                found = await each.opened(1)
                assert set(found) == {"extractor"}
            for each in silos:
                await each.channel.close()

        with coordinator(config) as here:
            here.run(scenario(), 60)
            assert here.broken == []

    run.hidden = lambda: rows_of(config, "round, part, silo, signed")
    run.folder = config.directory / "jobs" / "job"
    run.spool = config.directory / "spool"
    return run


def rows_of(config, columns):
    with closing(sqlite3.connect(config.directory / "coordinator.sqlite")) as database:
        return database.execute(
            f"SELECT {columns} FROM hidden ORDER BY round, part, silo"
        ).fetchall()


def parts(bad):
    return uploaded(bad.job.up(0))


async def given(bad):
    """An upload of the extractor that is here and not signed: its words, and the word on it."""
    extractor, _ = parts(bad)
    words, context, made = bad.padded(extractor, 0)
    await bad.upload(bad.part_frames(extractor, 0, words, context))
    return extractor, words, made


# Manifests: what changes, code, words of the refusal.

MANIFESTS = {
    "too short": ({"size": 8}, "MANIFEST", "declared 8 bytes of padded words"),
    "with tensors": ({"tensors": "headers"}, "MANIFEST", " tensors, due are "),
    "no such part": ({"part": "nothing"}, "MANIFEST", "no upload of a part 'nothing'"),
    "a part that is summed": ({"part": "metrics"}, "MANIFEST", "no upload of a part 'metrics'"),
    "no context": ({"context": b""}, "MANIFEST", "gives a part 'extractor'"),
    "half a context": ({"context": b"\1" * 31}, "MANIFEST", "is bound to"),
    "another round": ({"round": 1}, "ROUND_CLOSED", "does not await it"),
    "the round after the last": ({"round": 2**32 - 1}, "ROUND_CLOSED", "does not await it"),
    "goes on at nothing": ({"offset": 2**20}, "MANIFEST", "this coordinator has 0 bytes of it"),
}


@pytest.mark.parametrize("wrong", MANIFESTS)
def test_a_manifest_that_does_not_fit_is_refused(play, wrong):
    changes, code, words = MANIFESTS[wrong]

    async def harm(bad):
        extractor, _ = parts(bad)
        payload, context, _ = bad.padded(extractor, 0)
        if "tensors" in changes:
            changes["tensors"] = to_wire(upload_items([extractor]))
        frames = bad.part_frames(extractor, 0, payload, context, **changes)
        await refused(bad.upload(frames[:1] + frames[-1:], wary=True), code, words)
        assert play.hidden() == []

    play(harm)


def test_rotated_vectors_are_bound_to_their_round(play):
    async def harm(bad):
        _, rows = parts(bad)
        payload, _ = bad.rotated(rows, 0)
        frames = bad.part_frames(rows, 0, payload, b"\1" * 32)
        await refused(bad.upload(frames, wary=True), "MANIFEST", "is bound to")
        assert play.hidden() == []

    play(harm)


def test_rotated_vectors_with_nan_are_refused(play):
    async def harm(bad):
        _, rows = parts(bad)
        payload, context = bad.rotated(rows, 0)
        frames = bad.part_frames(rows, 0, b"\0\0\xc0\x7f" + payload[4:], context)
        await refused(bad.upload(frames), "NOT_FINITE", "rows/rows holds NaN")
        assert play.hidden() == []

    play(harm)


def test_an_upload_comes_once_and_is_told_of_after_a_lost_connection(play):
    async def harm(bad):
        extractor, rows = parts(bad)
        payload, context = bad.rotated(rows, 0)
        await bad.upload(bad.part_frames(rows, 0, payload, context))
        again = bad.part_frames(rows, 0, payload, context)
        await refused(bad.upload(again, wary=True), "ROUND_CLOSED", "has all of part 'rows'")
        assert (await bad.part_standing(rows, 0)).receipt.size == len(payload)
        assert (await bad.part_standing(extractor, 0)).received == 0
        bad.given = {rows.name}

    play(with_rest(harm), whole=True)


@pytest.mark.control
def test_an_upload_that_broke_goes_on_for_its_own_version_alone(play):
    async def harm(bad):
        extractor, rows = parts(bad)
        words, context, made = bad.padded(extractor, 0)
        frames = bad.part_frames(extractor, 0, words, context)
        call = bad.stub.Upload(timeout=SECONDS)
        for frame in frames[:-1]:
            await call.write(frame)
        await arrived(play.spool, bad.silo, len(words))
        assert (await bad.part_standing(extractor, 0)).received == len(words)
        assert (await bad.part_standing(rows, 0)).received == 0
        assert (await bad.standing(0)).received == 0
        _, newer, _ = bad.padded(extractor, 0)
        other = bad.part_frames(extractor, 0, words, newer, offset=len(words))
        await refused(
            bad.upload(other, wary=True), "MANIFEST", "this coordinator has 0 bytes of it"
        )
        await bad.upload(bad.part_frames(extractor, 0, words, context, offset=len(words)))
        await bad.say_padded(bad.word(extractor, made))
        (kept,) = [path.read_bytes() for path in play.folder.glob("*.padded")]
        assert kept == words

    play(harm)


def with_rest(harm):
    """Afterwards the bad silo gives what it has not given."""

    async def run(bad):
        await harm(bad)
        contribute, done = bad.give_part, bad.given

        async def rest(part, round_):
            if part.name not in done:
                await contribute(part, round_)

        bad.give_part = rest

    return run


def test_until_it_is_signed_a_newer_version_takes_its_place(play):
    async def harm(bad):
        extractor, words, made = await given(bad)
        _, newer, word = await given(bad)  # as after a restart: another seed, another number
        assert words != newer
        (kept,) = [path.read_bytes() for path in play.folder.glob("*.padded")]
        assert kept == newer
        older = bad.say_padded(bad.word(extractor, made))
        await refused(
            older, "SECURE", "UPLOAD: signs version 0, its upload is bound to another one"
        )
        await bad.say_padded(bad.word(extractor, word))
        await bad.say_padded(bad.word(extractor, word))  # its answer was lost on the way
        payload, context, third = bad.padded(extractor, 0)
        frames = bad.part_frames(extractor, 0, payload, context)
        await refused(bad.upload(frames, wary=True), "ROUND_CLOSED", "has all of part 'extractor'")
        await refused(
            bad.say_padded(bad.word(extractor, third)), "SECURE", "EQUIVOCATION: signs another"
        )
        assert (await bad.part_standing(extractor, 0)).receipt.size == len(newer)
        bad.given = {extractor.name}

    play(with_rest(harm), whole=True)


def test_versions_of_one_round_are_not_taken_without_end(play, monkeypatch):
    """Each is a record of the coordinator's ledger; the last that was taken may still be signed."""
    monkeypatch.setattr(hidden_uploads, "MOST_VERSIONS", 3)

    async def harm(bad):
        for _ in range(3):
            extractor, _, word = await given(bad)
        words, context, _ = bad.padded(extractor, 0)
        more = bad.part_frames(extractor, 0, words, context)
        await refused(bad.upload(more, wary=True), "ROUND_CLOSED", "has all of part 'extractor'")
        await bad.say_padded(bad.word(extractor, word))

    play(harm)


def test_masked_words_come_after_all_else(play):
    async def harm(bad):
        contribute = bad.give_parts

        async def too_early(round_):
            async def masked(words):
                await refused(bad.upload(bad.masked_frames(), wary=True), "ROUND_CLOSED", words)

            bad.words = bad.masked(next(e.terms for e in bad.now if isinstance(e, s.UploadWords)))
            await masked("extractor, rows come first")
            extractor, rows = parts(bad)
            _, _, made = await given(bad)
            await masked("extractor, rows come first")
            await bad.say_padded(bad.word(extractor, made))
            await masked("rows come first")
            await bad.give_part(rows, round_)
            bad.give_parts = contribute

        real = bad.do

        async def noted(effects):
            bad.now = effects
            await real(effects)

        bad.do, bad.give_parts = noted, too_early

    play(harm, whole=True)


# Words on an upload that is here: what is wrong, and how it is refused.


def signed_again(bad, upload):
    line = bad.line(parts(bad)[0])
    payload = replace(upload, signature=b"").signed_bytes(line)
    return replace(upload, signature=bad.keys.sign(MIX_UPLOAD, payload))


def foreign(bad, made):
    upload, pieces = made
    return signed_again(bad, replace(upload, sha256=hashlib.sha256(b"other").digest())), pieces


def of_another_job(bad, made):
    here, bad.job = bad.job, bad.world.jobs["other"]
    try:
        return bad.padded(parts(bad)[0], 0)[2]
    finally:
        bad.job = here


def version_of(**changes):
    def wrong(bad, made):
        upload, pieces = made
        version = Version(**{**upload.version.model_dump(), **changes})
        return signed_again(bad, replace(upload, version=version)), pieces

    return wrong


def changed(**fields):
    """Another word, under the signature of the right one."""
    return lambda _, made: (replace(made[0], **fields), made[1])


def pieces(change):
    return lambda bad, made: (made[0], tuple(change(bad, made[1])))


def for_itself(bad, sealed):
    own = SealedSecret(bad.silo, bytes(48))
    return sorted((*sealed[1:], own), key=lambda piece: piece.recipient)


def anothers_sealing(bad, made):
    sealing = replace(made[0].sealing, sender="east")
    return signed_again(bad, replace(made[0], sealing=sealing)), made[1]


def changed_piece(_, sealed):
    return (SealedSecret(sealed[0].recipient, bytes(48)), *sealed[1:])


NO_PIECE = "SHARES: sealed 3 pieces, not one for each of the others"
NOT_SEVEN = "signs version 7, its upload is bound to another one"
WORDS = {
    "unsigned": (changed(signature=bytes(64)), "SECURE", "signature does not fit"),
    "other bytes": (foreign, "SECURE", "UPLOAD: its upload is not the one that it signed"),
    "another job": (of_another_job, "SECURE", "is bound to another one"),
    "another's name": (version_of(silo="east"), "SECURE", "gives an upload in the name of 'east'"),
    "a stranger": (version_of(silo="nobody"), "SECURE", "gives an upload in the name of 'nobody'"),
    "another attempt": (version_of(attempt=1), "SECURE", "is bound to another one"),
    "another number": (version_of(number=7), "SECURE", NOT_SEVEN),
    "another round": (version_of(round=1), "ROUND_CLOSED", "round 1 does not await it"),
    "a round far away": (version_of(round=2**32 - 1), "ROUND_CLOSED", "does not await it"),
    "a piece is missing": (pieces(lambda _, p: p[:-1]), "SECURE", "SHARES: sealed 2 pieces"),
    "a piece twice": (pieces(lambda _, p: (*p, p[-1])), "SECURE", "ascending"),
    "a piece for itself": (pieces(for_itself), "SECURE", NO_PIECE),
    "a piece that was changed": (pieces(changed_piece), "SECURE", "do not lead to the root"),
    "a tag of nothing": (changed(tag=b""), "SECURE", "tag"),
    "a tag that was changed": (changed(tag=bytes(8)), "SECURE", "signature"),
    "another's sealing": (anothers_sealing, "SECURE", "signed a seed of 'east' as its own"),
}


@pytest.mark.parametrize("wrong", WORDS)
def test_a_false_word_on_an_upload(play, world, wrong):
    """A word on an upload that does not hold is refused, and the right one is accepted."""
    change, code, words = WORDS[wrong]

    async def harm(bad):
        bad.world = world
        extractor, _, made = await given(bad)
        message = bad.word(extractor, (*change(bad, made[:2])[:2], made[2]))
        await refused(bad.say_padded(message), code, words)
        assert [row[3] for row in play.hidden()] == [b""]
        await bad.say_padded(bad.word(extractor, made))
        assert [bool(row[3]) for row in play.hidden()] == [True]

    play(harm)


PREKEYS = {
    "unsigned": ({"signature": bytes(64)}, "KEYS: its signature does not fit the prekey"),
    "another key": ({"key": bytes(32)}, "KEYS: its signature does not fit the prekey"),
    "another generation": ({"generation": 7}, "KEYS: its signature does not fit the prekey"),
    "generation 0": ({"generation": 0}, "of generation 0, of which there is none"),
}


@pytest.mark.parametrize("wrong", PREKEYS)
def test_a_prekey_that_its_silo_did_not_sign_is_refused_and_the_right_one_is_taken(play, wrong):
    changes, words = PREKEYS[wrong]

    async def harm(bad):
        extractor, _, made = await given(bad)
        message = bad.word(extractor, (*made[:2], replace(made[2], **changes)))
        await refused(bad.say_padded(message), "SECURE", words)
        assert [row[3] for row in play.hidden()] == [b""]
        await bad.say_padded(bad.word(extractor, made))
        assert [bool(row[3]) for row in play.hidden()] == [True]

    play(harm)


FIELDS = {
    "no job": ({"job": ""}, "MANIFEST"),
    "another job": ({"job": "nothing"}, "UNKNOWN_JOB"),
    "another digest": ({"job_digest": b"\1" * 32}, "UNKNOWN_JOB"),
    "half a digest": ({"job_digest": b"\1" * 31}, "MANIFEST"),
    "no part": ({"part": ""}, "MANIFEST"),
    "a long part": ({"part": "x" * 129}, "MANIFEST"),
    "a part that is summed": ({"part": "metrics"}, "SECURE"),
    "a part that is rotated": ({"part": "rows"}, "SECURE"),
    "no session": ({"session": b""}, "SESSION"),
}


@pytest.mark.parametrize("wrong", FIELDS)
def test_garbage_in_the_fields_of_a_word_is_refused(play, wrong):
    changes, code = FIELDS[wrong]

    async def harm(bad):
        extractor, _, made = await given(bad)
        await refused(bad.say_padded(bad.word(extractor, made, **changes)), code)
        await bad.say_padded(bad.word(extractor, made))

    play(harm)


def test_a_word_comes_after_its_upload(play):
    async def harm(bad):
        extractor, _ = parts(bad)
        _, _, made = bad.padded(extractor, 0)
        await refused(bad.say_padded(bad.word(extractor, made)), "SECURE", "ORDER", "send it first")

    play(harm)


def test_numbers_of_versions_grow_over_rounds(play):
    """Else no row with this silo's upload could be made any more: recipients refuse older ones than
    they had.
    """

    async def harm(bad):
        bad.number, told = 5, bad.told

        async def then(body):
            found = await told(body)
            if found.round == 1:
                bad.number = 3
                extractor, _ = uploaded(bad.job.up(1))
                words, context, made = bad.padded(extractor, 1)
                await bad.upload(bad.part_frames(extractor, 1, words, context))
                why = "UPLOAD: signs version 3 after version 5"
                await refused(bad.say_padded(bad.word(extractor, made)), "SECURE", why)
            return found

        bad.told = then

    play(harm, whole=True)
