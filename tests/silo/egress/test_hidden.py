"""Padded and rotated parts through the gate, by the checks that all else passes."""

import asyncio
from dataclasses import replace
from functools import partial
from hashlib import sha256

import numpy as np
import pytest
import torch
from support.keyed_jobs import BLIND, KEY, SILOS, keys_of, make_keyed, sharing_of
from support.ledgers import stored
from support.recording_gate import SESSION, SILO, World, kinds, records
from support.refusals import refused
from support.secure_sums import frame, group

from staddle.errors import LocalError
from staddle.proto import federation_pb2 as federation
from staddle.proto import secure_pb2 as pb
from staddle.proto.convert.mix import PaddedWord, padded_from_wire, padded_to_wire
from staddle.proto.wire import to_wire
from staddle.security.blind.mix_context import Version
from staddle.security.blind.padded_mix import hidden_pieces, make_upload, tagger_of
from staddle.security.blind.plan import JobPlan
from staddle.security.blind.prekeys import Prekey
from staddle.security.blind.rotated_sketch import sketched
from staddle.security.blind.rotation import rotate
from staddle.security.secagg.spec import specify
from staddle.silo.egress import messages
from staddle.silo.egress.messages import Masking, Padding, Rotating, Sent, sent_of
from staddle.silo.egress.outcomes import DeniedError
from staddle.silo.egress.session import TurnedAwayError, UnreachableError
from staddle.silo.parts.contributions import Contributions
from staddle.silo.parts.tensors import flat

SEED = bytes(range(32))


@pytest.fixture(scope="module")
def keyed(tmp_path_factory):
    return make_keyed(tmp_path_factory.mktemp("keyed"))


class Keyed(World):
    """A gate and the parts of the job's round."""

    def __init__(self, made, folder, policy=None):
        super().__init__(made, folder, policy)
        self.job = made.jobs["rows"]
        self.sharing = sharing_of(made, self.job, SILO, folder / "job")
        self.parts = {part.name: part for part in self.job.up(0)}

    def gives(self):
        """Values within 2^6, and vectors of both signs."""
        given = self.payload()
        for value in given["extractor"].values():
            value.clamp_(-60, 60)
        return given

    def padding(self, round_=0, number=0, **changes):
        version = Version(silo=SILO, round=round_, attempt=0, number=number)
        line = self.sharing.line(self.parts["extractor"])
        return replace(Padding(line, version, SEED, KEY), **changes)

    def rotating(self, round_=0):
        part = self.parts["rows"]
        use, ctx = JobPlan(self.job).use(part, round_), self.sharing.rotation(part, round_)
        return Rotating(use, ctx, KEY)

    def run(self, call):
        async def scenario():
            if not self.gate.session.token:
                await self.gate.session.hello()
            return await call()

        return asyncio.run(scenario())

    def upload_padded(self, payload=None, padding=None, round_=0):
        return self.leave(self.gate.upload_padded, payload, padding or self.padding(round_), round_)

    def upload_rotated(self, payload=None, rotating=None, round_=0):
        return self.leave(
            self.gate.upload_rotated, payload, rotating or self.rotating(round_), round_
        )

    def leave(self, upload, payload, own, round_):
        given = Contributions(self.gives() if payload is None else payload)
        return self.run(lambda: upload(self.declared, round_, given, own, SILOS))

    def arrived(self):
        return b"".join(frame.chunk for frame in self.client.frames)

    def values(self, payload, part):
        return [payload[part][spec.name] for spec in self.parts[part].tensors]


@pytest.fixture
def world(keyed, tmp_path):
    found = Keyed(keyed, tmp_path)
    yield found
    found.ledger.close()


@pytest.fixture
def small_pieces(monkeypatch):
    """Chunks of 4096 bytes, so that there are some."""
    real = messages.recut
    monkeypatch.setattr(messages, "recut", lambda pieces: real(pieces, 4096))
    monkeypatch.setattr("staddle.proto.stream.CHUNK_BYTES", 4096)


# Padded.
def test_a_part_leaves_padded_and_is_recorded(world, small_pieces):
    given, padding = world.gives(), world.padding()
    sent = world.upload_padded(given, padding)
    line, tagger = padding.line, tagger_of(padding.line, KEY)
    values = flat(world.values(given, "extractor"))
    pieces = hidden_pieces(line, padding.version, SEED, values, tagger)
    wanted = b"".join(piece.tobytes() for piece in pieces)
    ctx = padding.version.context(line)
    assert world.arrived() == wanted
    assert len(world.client.frames) > 10
    assert sent == Sent(sha256(wanted).digest(), tagger.padded(KEY, ctx, SILO))
    manifest = world.client.frames[0].manifest
    assert (manifest.part, manifest.context, manifest.size) == ("extractor", ctx, line.nbytes)
    assert list(manifest.tensors) == []

    found = stored(world.path)
    assert kinds(found) == ["control.open", "egress.intent", "egress.digest", "egress.outcome"]
    intent, digest, outcome = found[1:]
    assert (intent["form"], intent["readers"], intent["cohort"]) == ("padded", ["mix"], list(SILOS))
    assert intent["hidden"] == {"ctx": ctx.hex(), "number": 0}
    tensors = {(tensor["part"], tensor["dtype"]) for tensor in intent["tensors"]}
    assert tensors == {("extractor", "uint64")}
    assert (digest["tensors"], outcome["status"]) == ([], "sent")
    assert world.audited().open_intents == ()


def test_what_a_lost_receipt_leaves_to_be_signed_is_the_same(world):
    given, padding = world.gives(), world.padding()
    sent = sent_of(world.parts["extractor"], world.values(given, "extractor"), padding)
    assert sent == world.upload_padded(given, padding)


BOUND = "a padded upload bound to"
OTHER_SILO, OTHER_ROUND = (
    Version(silo=silo, round=round_, attempt=0, number=0)
    for silo, round_ in (("silo-b", 0), (SILO, 1))
)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": OTHER_SILO}, BOUND),
        ({"version": OTHER_ROUND}, BOUND),
        ({"job": "mail"}, BOUND),
        ({"job_digest": "ab" * 32}, BOUND),
        ({"clip": 5}, BOUND),
        ({"part": "rows"}, "part 'rows' does not cross by a Mix in round 0"),
        ({"part": "metrics"}, "part 'metrics' does not cross by a Mix in round 0"),
    ],
)
def test_3_a_line_or_version_not_of_the_job_lets_nothing_leave(world, change, said):
    padding = world.padding()
    if "version" in change:
        padding = replace(padding, **change)
    else:
        line = padding.line
        group = line.group.model_copy(update={"name": change.pop("part", "extractor")})
        if "clip" in change:
            clip = change.pop("clip")
            group = group.model_copy(update={"clip_exponent": clip, "scale_exponent": 30 - clip})
        padding = replace(padding, line=line.model_copy(update={"group": group, **change}))
    with pytest.raises(LocalError, match=said):
        world.upload_padded(padding=padding)
    world.nothing_left()


def test_2_a_value_beyond_the_clip_and_vectors_of_one_sign_do_not_leave(world):
    given = world.gives()
    given["extractor"]["extractor.fc1.bias"].reshape(-1)[-1] = 65.0
    with pytest.raises(LocalError, match="its largest magnitude is 65, above its clip 64"):
        world.upload_padded(given)
    world.nothing_left()
    given = world.gives()
    given["rows"]["rows"].abs_()
    with pytest.raises(LocalError, match="part 'rows': vector 0 has entries of one sign only"):
        world.upload_rotated(given)
    world.nothing_left()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_2_a_value_that_is_not_finite_leaves_in_no_form(world, bad):
    given = world.gives()
    for part in ("extractor", "rows"):
        next(iter(given[part].values())).reshape(-1)[0] = bad
    with pytest.raises(LocalError, match="holds NaN or infinity"):
        world.upload_padded(given)
    with pytest.raises(LocalError, match="holds NaN or infinity"):
        world.upload_rotated(given)
    world.nothing_left()


def test_1_a_part_not_of_the_job_stops_every_message_that_takes_it(world):
    given = {**world.gives(), "secret": {"x": torch.zeros(1)}}
    for give in (world.upload_padded, world.upload_rotated):
        with pytest.raises(LocalError, match="secret/x is not in the job's schema"):
            give(given)
    world.nothing_left()
    given = world.gives()
    given["rows"] = {"other": torch.zeros(1)}  # not of this message; that of the rows refuses it
    world.upload_padded(given)
    with pytest.raises(LocalError, match="rows/other is not in the job's schema"):
        world.upload_rotated(given)


@pytest.mark.parametrize(
    ("upload", "old", "new", "said"),
    [
        ("padded", 'forms = ["padded"]', 'forms = ["masked"]', "'padded' is not in forms"),
        ("padded", 'readers = ["mix"]', 'readers = ["coordinator"]', "'mix' is not in readers"),
        ("padded", 'dtypes = ["uint64"]\nmax_elements = ', 'dtypes = ["float32"]\nmax_elements = ',
            "'uint64' is not in dtypes"),
        ("rotated", 'forms = ["rotated"]', 'forms = ["plain"]', "'rotated' is not in forms"),
    ],
)  # fmt: skip
def test_4_the_policy_decides_on_what_is_hidden(keyed, tmp_path, upload, old, new, said):
    strict = Keyed(keyed, tmp_path, keyed.policy(keyed.jobs["rows"], replace={old: new}))
    with pytest.raises(DeniedError, match=said):
        getattr(strict, f"upload_{upload}")()
    strict.nothing_left()
    strict.ledger.close()


def test_4_each_part_that_is_hidden_has_so_many_attempts_of_its_own(keyed, tmp_path):
    """Those that were begun count, whatever became of them."""
    old = 'max_bytes_per_round = "64MiB"'
    once = {old: f"{old}\nmax_attempts_per_round = 1"}
    world = Keyed(keyed, tmp_path, keyed.policy(keyed.jobs["rows"], replace=once))
    broken(world, world.upload_padded, 1)
    world.run(world.gate.settle)
    world.upload_rotated()
    with pytest.raises(DeniedError, match="1 uploads of this round were begun"):
        world.upload_padded(padding=world.padding(number=1))
    with pytest.raises(DeniedError, match="1 uploads of this round were begun"):
        world.upload_rotated()
    assert world.client.uploads == 2
    world.ledger.close()


def test_a_sketch_of_the_whole_vector_leaves_and_nothing_longer(keyed, tmp_path):
    options = {"sampling": "algorithm2", "sketch": 32}
    model = {"name": "convnet-digits", "classes": 3}
    fields = {"min_cohort": 3, "security": BLIND, "model": model}
    job = keyed.job("sketched", "fedaims", SILOS, options, **fields)
    del keyed.jobs["sketched"]  # of this test alone
    world = Keyed(keyed, tmp_path, keyed.policy(job))
    world.job, world.parts = job, {part.name: part for part in job.up(1)}
    world.sharing = sharing_of(keyed, job, SILO, tmp_path / "sketched")
    part = world.parts["direction"]
    use, ctx = JobPlan(job).use(part, 1), world.sharing.rotation(part, 1)
    (whole,) = [item.spec for item in world.declared.items(1) if item.part == "direction"]
    assert (whole, world.declared.hidden(1)[0].wire) == (part.tensors[0], part.wire)
    assert whole.elements > 10_000
    rng, rotating = torch.Generator().manual_seed(3), Rotating(use, ctx, KEY)
    vector = torch.randn(whole.shape, generator=rng, dtype=torch.float64)
    world.upload_rotated({"direction": {"sketch": vector}}, rotating, 1)
    assert world.arrived() == sketched(vector.numpy(), 32, use.key(KEY)).astype("<f4").tobytes()
    (header,) = world.client.frames[0].manifest.tensors
    assert (header.name, list(header.shape), header.size) == ("sketch", [1, 32], 128)
    intent = stored(world.path)[1]
    assert [(each["kind"], each["shape"], each["dtype"]) for each in intent["tensors"]] == [
        ("sketch", [1, 32], "float32")
    ]
    with refused(r"direction/sketch is float32 \[1, 32\], the job's schema says float64"):
        world.upload_rotated({"direction": {"sketch": vector[:, :32].float()}}, rotating, 1)
    world.ledger.close()


# A lost connection.
def broken(world, give, frames):
    def gone(_):
        raise world.client.error

    world.client.stop_after, world.client.receipt = frames, gone
    with pytest.raises(UnreachableError):
        give()
    world.client.stop_after, world.client.receipt = None, world.receipt


def test_a_padded_upload_goes_on_where_it_broke(world, small_pieces):
    given, padding = world.gives(), world.padding()
    broken(world, lambda: world.upload_padded(given, padding), 5)
    first = world.arrived()
    world.client.standing_reply = lambda _: federation.StandingReply(received=len(first))
    (settled,) = world.run(world.gate.settle)
    assert (settled.status, settled.ctx) == ("unknown", padding.version.context(padding.line).hex())
    assert world.client.messages[-1].part == "extractor"
    sent = world.upload_padded(given, padding)
    assert world.client.frames[0].manifest.offset == len(first) == 4 * 4096
    assert sent.sha256 == sha256(first + world.arrived()).digest()
    assert world.audited().open_intents == ()


def test_another_version_does_not_go_on_where_the_first_broke(world, small_pieces):
    given = world.gives()
    broken(world, lambda: world.upload_padded(given, world.padding()), 5)
    world.client.standing_reply = lambda _: federation.StandingReply(received=4 * 4096)
    world.run(world.gate.settle)
    world.upload_padded(given, world.padding(number=1))
    assert world.client.frames[0].manifest.offset == 0
    assert world.audited().open_intents == ()


def test_parts_of_a_round_break_and_settle_each_by_itself(world, small_pieces):
    given = world.gives()
    uploads, settled = (world.upload_padded, world.upload_rotated), []
    for upload, frames in zip(uploads, (3, 1), strict=True):
        broken(world, partial(upload, given), frames)
        before = world.client.uploads
        for other in uploads:
            with pytest.raises(UnreachableError, match="has an upload to settle first"):
                other(given)
        assert world.client.uploads == before, "of this job neither"
        settled += world.run(world.gate.settle)
    assert len({each.ctx for each in settled}) == len(settled) == 2
    asked = [
        each.part for each in world.client.messages if isinstance(each, federation.StandingRequest)
    ]
    assert asked == ["extractor", "rows"]


# Rotated.
def test_vectors_leave_rotated_and_are_recorded(world):
    given, rotating = world.gives(), world.rotating()
    world.upload_rotated(given, rotating)
    value = given["rows"]["rows"]
    wanted = [
        rotate(v[None].double().numpy(), replace(rotating.use, row=r).key(KEY))
        for r, v in enumerate(value)
    ]
    assert world.arrived() == np.concatenate(wanted).astype("<f4").tobytes()
    manifest = world.client.frames[0].manifest
    items = [item for item in world.items() if item.part == "rows"]
    assert (manifest.part, manifest.context) == ("rows", rotating.context)
    assert list(manifest.tensors) == to_wire(items)
    intent, digest = stored(world.path)[1:3]
    assert (intent["form"], intent["readers"]) == ("rotated", ["gram"])
    assert intent["hidden"] == {"ctx": rotating.context.hex(), "number": 0}
    assert digest["tensors"] == []
    assert world.audited().open_intents == ()


def test_each_row_has_a_rotation_of_its_own(keyed, tmp_path):
    options = {"rho": 0, "similarity": "per_class"}
    made = keyed.job("by-class", "pfedsim", SILOS, options, min_cohort=3, security=BLIND)
    world = Keyed(keyed, tmp_path, keyed.policy(made))
    world.job, world.sharing = made, sharing_of(keyed, made, SILO, tmp_path / "other")
    world.parts = {part.name: part for part in made.up(0)}
    given = world.gives()
    given["rows"]["rows"][:] = given["rows"]["rows"][0]
    world.upload_rotated(given)
    rows = np.frombuffer(world.arrived(), "<f4").reshape(given["rows"]["rows"].shape)
    assert len({row.tobytes() for row in rows}) == len(rows) == 3
    norms = np.linalg.norm(rows.astype(np.float64), axis=1)
    assert np.allclose(norms, float(given["rows"]["rows"][0].double().norm()), rtol=1e-6)
    world.ledger.close()


def test_3_a_rotation_for_another_round_or_job_lets_nothing_leave(world):
    rotating = world.rotating()
    for changes, why in (
        ({"round": 1}, "vectors rotated for"),
        ({"job": "ab" * 32}, "vectors rotated for"),
        ({"group": "extractor"}, "part 'extractor' does not cross by a Gram"),
    ):
        with pytest.raises(LocalError, match=why):
            world.upload_rotated(rotating=replace(rotating, use=replace(rotating.use, **changes)))
    world.nothing_left()


def test_a_plain_message_of_a_keyed_job_does_not_leave(world):
    with refused("wants secure aggregation; nothing of it leaves in the clear"):
        world.contribute(world.gives())
    world.nothing_left()


# The word on an upload.
def test_the_word_on_an_upload_is_recorded_before_it_leaves(world):
    padding = world.padding()
    sent, own = world.upload_padded(padding=padding), world.sharing
    sealed = (SEED, SEED, own.others, keys_of(world.made, SILO).sign)
    upload, pieces = make_upload(padding.line, padding.version, sent.sha256, sent.tag, *sealed)
    prekey = Prekey(1, bytes(32), bytes(64))
    digest = bytes.fromhex(world.job.digest)
    message = padded_to_wire(PaddedWord(b"", "rows", digest, "extractor", upload, pieces, prekey))
    ctx = padding.version.context(padding.line)
    seen = []
    real = world.client.padded

    async def padded(request):
        seen.append(records(world.path)[-1])
        await real(request)

    world.client.padded = padded
    world.run(lambda: world.gate.protocol.padded(ctx, message))
    assert message.session == b""  # as it is kept
    given = padded_from_wire(SILO, pb.PaddedWordUpload.FromString(world.client.calls[-1].sent[0]))
    assert (given.session, given.upload) == (SESSION, upload)
    assert (given.pieces, given.prekey) == (pieces, prekey)
    (record,) = seen
    assert (record["type"], record["kind"]) == ("egress.protocol", "padded")
    assert record["ctx"] == ctx.hex()
    assert record["message"]["sha256"] == sha256(world.client.calls[-1].sent[0]).hexdigest()
    assert world.audited().ok


def test_a_word_that_is_refused_was_recorded_all_the_same(world):
    async def padded(request):
        raise TurnedAwayError("coordinator", "ROUND_CLOSED", "over")

    world.client.padded = padded
    message = pb.PaddedWordUpload(job="rows", job_digest=bytes.fromhex(world.job.digest))
    with pytest.raises(TurnedAwayError):
        world.run(lambda: world.gate.protocol.padded(bytes(32), message))
    assert records(world.path)[-1]["kind"] == "padded"


def test_what_left_of_a_part_in_a_round_is_known_from_the_ledger(world):
    world.upload_padded()
    world.upload_rotated(round_=1)
    left = [
        (part, round_)
        for part in world.parts
        for round_ in (0, 1)
        if world.gate.part_left(world.declared, round_, part)
    ]
    assert left == [("extractor", 0), ("rows", 1)]


# Rows for members of a round, in the words of its sum.
G = 1 << 30  # a quarter of all weights


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        # one that there may be
        ({"counts": (0, 2 * G, G, G // 2, G // 2)}, "a secure sum of groups"),
        ({"counts": (G, G, G, G // 2, G // 2)}, "mixes 1073741824 of the reader's own part"),
        ({"counts": (0, 3 * G, G // 2, G // 4, G // 4)},
            "one silo has 3221225472 of the 4294967296"),
        ({"counts": (0, 2 * G, 2 * G, 0, 0)}, "2 silos are mixed, fewer than min_cohort 3"),
    ],
)  # fmt: skip
def test_a_row_that_its_reader_may_not_read_is_held_at_the_gate(world, changes, why):
    """Whoever let it through before; nothing of the values is looked at."""
    name = f"extractor.{SILOS[0]}"
    row = group(name, 8, weights="public", reader=SILOS[0])
    spec = specify(frame(groups=(row,), rows={name: {}}, brought=frozenset({name})), SILOS, 0)
    spec = spec.model_copy(update={"groups": (spec.groups[0].model_copy(update=changes),)})
    masking = Masking(spec, SILO, (), SILOS, None)
    given = Contributions(world.gives())
    with pytest.raises(LocalError, match=f"{why}.*nothing leaves"):
        world.run(lambda: world.gate.upload_masked(world.declared, 0, given, masking))
    assert world.client.frames == []
    assert kinds(stored(world.path)) == ["control.open"]
