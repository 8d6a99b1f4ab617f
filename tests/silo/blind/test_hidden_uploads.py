"""The parts that leave one by one, with lines that break and processes that are killed."""

import asyncio
import os
import signal
from hashlib import sha256

import pytest
import torch
from support.keyed_jobs import KEY, SILOS, keys_of, make_keyed, sharing_of
from support.refusals import refused

from staddle.algorithms.exchange.parts import Mix
from staddle.errors import LocalError, RefusedError
from staddle.files import checked_file
from staddle.proto import secure_pb2 as pb
from staddle.proto.convert.mix import padded_from_wire
from staddle.security.blind.mix_context import Version
from staddle.security.blind.padded_mix import check_upload, open_seed
from staddle.security.blind.sealing import letters
from staddle.silo.blind.hidden_uploads import HiddenUploads
from staddle.silo.egress.client import TurnedAwayError, UnreachableError
from staddle.silo.egress.messages import padded, rotated, sent
from staddle.silo.ingress.keyed_job import KNOWN, OWN
from staddle.silo.parts.contributions import Contributions
from staddle.silo.parts.declared import Declared, RecordCount
from staddle.silo.parts.tensors import exactly

ME = SILOS[0]


@pytest.fixture(scope="module")
def keyed(tmp_path_factory):
    return make_keyed(tmp_path_factory.mktemp("keyed"))


class Desk:
    """The coordinator in a folder that outlives the silo: what came, and what was signed."""

    def __init__(self, folder, sharing):
        self.folder, self.sharing = folder, sharing
        folder.mkdir()

    def upload(self, part, ctx, data):
        if list(self.folder.glob(f"{part}.signed.*")):
            raise TurnedAwayError("coordinator", "ROUND_CLOSED", "signed already")
        (self.folder / f"{part}.bytes.{ctx.hex()}").write_bytes(data)

    def sign(self, ctx, message):
        given = pb.PaddedWordUpload()
        given.CopyFrom(message)
        given.session = b"session"
        padded = padded_from_wire(ME, pb.PaddedWordUpload.FromString(given.SerializeToString()))
        line = self.sharing.line(PARTS[padded.part])
        assert padded.upload.version.context(line) == ctx
        stored = (self.folder / f"{padded.part}.bytes.{ctx.hex()}").read_bytes()
        check_upload(
            line, padded.upload, padded.pieces, sha256(stored).digest(), self.sharing.signers
        )
        path = self.folder / f"{padded.part}.signed.{ctx.hex()}"
        data = message.SerializeToString(deterministic=True)
        assert not path.exists() or path.read_bytes() == data  # the same again, verbatim
        path.write_bytes(data)

    def forget(self):
        """All but what the silo's ledger has."""
        for path in self.folder.iterdir():
            if ".intent." not in path.name:
                path.unlink()

    def intend(self, round_, part):
        (self.folder / f"{part}.intent.{round_}").touch()

    def left(self, declared):
        assert declared.digest == self.sharing.job.digest
        found = (path.name.split(".") for path in self.folder.glob("*.intent.*"))
        return {(int(round_), part) for part, _, round_ in found}

    def names(self, kind):
        return sorted(path.name for path in self.folder.glob(f"*.{kind}.*"))


PARTS = {}


class Door:
    """One silo's gate; its line breaks at call ``fails_at``, before anything left or ``after``."""

    def __init__(self, desk, fails_at=None, *, after=False, step=lambda: None):
        self.desk, self.fails_at, self.after, self.step = desk, fails_at, after, step
        self.calls, self.order = 0, []
        self.protocol = self

    def crossing(self, what, action):
        self.calls += 1
        self.step()
        if self.calls == self.fails_at and not self.after:
            raise UnreachableError("coordinator", "the line is dead")
        action()
        self.order.append(what)
        self.step()
        if self.calls == self.fails_at:
            raise UnreachableError("coordinator", "the line is dead")

    async def upload_padded(self, declared, round_, payload, padding, cohort):
        part = next(
            part for part in declared.hidden(round_) if part.name == padding.line.group.name
        )
        items = tuple(item for item in declared.items(round_) if item.part == part.name)
        outgoing = padded(part, exactly(items, {part.name: payload.tensors[part.name]}), padding)
        self.desk.intend(round_, part.name)
        data = b"".join(bytes(chunk.content) for chunk in outgoing.chunks())
        ctx = bytes.fromhex(outgoing.hidden.ctx)
        self.crossing(part.name, lambda: self.desk.upload(part.name, ctx, data))
        return sent(outgoing, type("Digests", (), {"tensors": (sha256(data).digest(),)}))

    async def upload_rotated(self, declared, round_, payload, rotating, cohort):
        part = next(part for part in declared.hidden(round_) if part.name == rotating.use.group)
        items = tuple(item for item in declared.items(round_) if item.part == part.name)
        outgoing = rotated(part, exactly(items, {part.name: payload.tensors[part.name]}), rotating)
        self.desk.intend(round_, part.name)
        data = b"".join(bytes(chunk.content) for chunk in outgoing.chunks())
        self.crossing(part.name, lambda: self.desk.upload(part.name, rotating.context, data))

    async def padded(self, ctx, message):
        self.crossing("word", lambda: self.desk.sign(ctx, message))

    def part_left(self, declared, round_, part):
        """The ledger, which outlives the process and the job's folder."""
        return (round_, part) in self.desk.left(declared)


class World:
    def __init__(self, keyed, folder):
        self.keyed, self.folder, self.job = keyed, folder, keyed.jobs["rows"]
        self.sharing = sharing_of(keyed, self.job, ME, folder / "job")
        self.declared = Declared.of(self.job.document(), RecordCount(30, 10))
        PARTS.update({part.name: part for part in self.job.up(0)})
        self.desk = Desk(folder / "desk", self.sharing)
        self.accepted = set()

    def payload(self, seed=0):
        rng = torch.Generator().manual_seed(seed)
        return {
            part.name: {spec.name: torch.randn(spec.shape, generator=rng) for spec in part.tensors}
            for part in self.declared.hidden(0)
        }

    def begin(self, gate, round_=0):
        """As a process that has just begun."""
        return HiddenUploads(gate, self.sharing, self.declared, round_, SILOS, self.accepted)

    def upload(self, uploads, payload=None):
        asyncio.run(uploads.upload_all(Contributions(payload or self.payload())))

    def settle(self):
        """What the coordinator says of uploads whose connection broke."""
        self.accepted |= {bytes.fromhex(n.rpartition(".")[2]) for n in self.desk.names("bytes")}

    def signed(self, part="extractor"):
        (path,) = self.desk.folder.glob(f"{part}.signed.*")
        return padded_from_wire(ME, with_session(pb.PaddedWordUpload.FromString(path.read_bytes())))


def with_session(message):
    message.session = b"session"
    return message


@pytest.fixture
def world(keyed, tmp_path):
    return World(keyed, tmp_path)


def test_each_part_leaves_in_order_and_the_padded_one_is_signed(world):
    gate = Door(world.desk)
    uploads = world.begin(gate)
    world.upload(uploads)
    assert gate.order == ["extractor", "word", "rows"]
    world.upload(uploads)  # the round's sum is begun again: nothing of this is
    assert gate.order == ["extractor", "word", "rows"]
    padded = world.signed()
    assert padded.upload.version == Version(silo=ME, round=0, attempt=0, number=0)
    assert [piece.recipient for piece in padded.pieces] == list(SILOS[1:])
    line = world.sharing.line(PARTS["extractor"])
    for silo in SILOS[1:]:
        other = sharing_of(world.keyed, world.job, silo, world.folder / silo)
        letter = letters(padded.pieces)[silo]
        assert (
            len(open_seed(line, padded.upload, letter, silo, other.prekeys.own(), other.signers))
            == 32
        )
        # all that there is after the job
        lasting = {0: keys_of(world.keyed, silo).exchange.private_bytes_raw()}
        with pytest.raises(RefusedError, match="does not open"):
            open_seed(line, padded.upload, letter, silo, lasting, other.signers)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_line_that_breaks_at_any_call_changes_nothing(world, call, after):
    """The same version goes on, whose bytes are the same; what is there is not given again."""
    gate = Door(world.desk, call, after=after)
    uploads = world.begin(gate)
    with pytest.raises(UnreachableError):
        world.upload(uploads)
    world.settle()
    world.upload(uploads)
    assert len(world.desk.names("bytes")) == 2
    assert world.signed().upload.version.number == 0
    assert gate.order.count("extractor") == gate.order.count("rows") == 1


def killed(world, at):
    """Another process of this silo, killed at a step of its own: whether it was."""
    if (child := os.fork()) == 0:
        status = 1
        try:
            steps = [0]

            def step():
                steps[0] += 1
                if steps[0] == at:
                    os.kill(os.getpid(), signal.SIGKILL)

            real = checked_file.write_atomic

            def write(path, data, mode=0o600):
                step()
                real(path, data, mode)
                step()

            checked_file.write_atomic = write
            world.upload(world.begin(Door(world.desk, step=step)))
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def test_a_process_that_is_killed_at_any_step_signs_one_upload_and_hides_it_alone(keyed, tmp_path):
    """Before and after each file that is written and each call; then a process runs to the end."""
    at, restarts = 1, []
    while True:
        folder = tmp_path / str(at)
        folder.mkdir()
        world = World(keyed, folder)
        was = killed(world, at)
        if was:
            world.accepted = set()  # nothing is known of what became of it
            assert not killed(world, None)
        streams = {path.read_bytes() for path in world.desk.folder.glob("extractor.bytes.*")}
        versions = world.desk.names("bytes")
        assert len(streams) == len([name for name in versions if name.startswith("extractor")])
        assert len([name for name in versions if name.startswith("rows")]) == 1
        assert world.signed().upload.version.number == len(numbers(world)) - 1
        assert world.sharing.memory.versions("extractor").signed_round == 0
        restarts.append(len(streams))
        if not was:
            break
        at += 1
    assert at > 16
    assert set(restarts) == {1, 2}


def numbers(world):
    """The versions that were begun."""
    return range(world.sharing.memory.versions("extractor").number + 1)


def test_a_killed_process_leaves_no_seed_and_no_word_of_another_round(world):
    world.upload(world.begin(Door(world.desk)))
    first = {path.name: path.read_bytes() for path in (world.folder / "job").iterdir()}
    names = {
        "mix-extractor.rows.json",
        "mix-extractor.versions.json",
        "mix-extractor.signed",
        "gram-rows.json",
    }
    assert set(first) == {*names, OWN, KNOWN}
    own = world.sharing.prekeys.own()
    assert not any(KEY in data for data in first.values())
    assert not any(s in data for name, data in first.items() if name != OWN for s in own.values())
    for path in world.desk.folder.iterdir():
        path.unlink()
    world.upload(world.begin(Door(world.desk), 1), world.payload(1))
    assert world.signed().upload.version == Version(silo=ME, round=1, attempt=0, number=1)


def test_what_was_signed_is_given_again_verbatim_and_never_anew(world):
    world.upload(world.begin(Door(world.desk)))
    gate = Door(world.desk)
    world.upload(world.begin(gate), world.payload(1) | {"rows": world.payload()["rows"]})
    assert gate.order == ["word"]


def test_a_round_whose_word_is_lost_is_not_given_in(world):
    """The disk lost it, or an old folder was put back: this silo cannot give the part any more."""
    world.upload(world.begin(Door(world.desk)))
    path = world.folder / "job" / "mix-extractor.signed"
    kept = path.read_bytes()
    path.unlink()
    gate = Door(world.desk)
    lost = (
        r"mix-extractor\.signed: gone or an old one, and with it the word that this silo signed in"
        r" round "
    )
    with pytest.raises(LocalError, match=f"{lost}0"):  # nobody else's fault
        world.upload(world.begin(gate))
    world.desk.forget()
    world.upload(world.begin(Door(world.desk), 1), world.payload(1))
    path.write_bytes(kept)
    with pytest.raises(LocalError, match=f"{lost}1"):
        world.upload(world.begin(gate, 1), world.payload(1))
    assert gate.order == []


def test_other_vectors_are_not_rotated_for_the_same_round(world):
    world.upload(world.begin(Door(world.desk)))
    gate = Door(world.desk)
    changed = world.payload() | {"rows": world.payload(1)["rows"]}
    with pytest.raises(LocalError, match="other vectors were rotated before"):
        world.upload(world.begin(gate), changed)
    assert gate.order == ["word"]


OF_PART = {
    "extractor": ("mix-extractor.versions.json", "mix-extractor.signed"),
    "rows": ("gram-rows.json",),
}


@pytest.mark.parametrize("part", OF_PART)
@pytest.mark.parametrize("old", [True, False])
def test_a_part_whose_memory_is_gone_or_old_is_not_hidden_anew_in_a_round(world, part, old):
    """Else a second request gets another seed, or other vectors under the same rotation."""
    if old:
        world.upload(world.begin(Door(world.desk)))
    kept = {path.name: path.read_bytes() for path in (world.folder / "job").iterdir()}
    world.desk.forget()
    world.upload(world.begin(Door(world.desk), 1), world.payload(1))
    for name in OF_PART[part]:
        path = world.folder / "job" / name
        path.write_bytes(kept[name]) if old else path.unlink()
    gate, ends = Door(world.desk), 0 if old else -1
    changed = world.payload(1) | {part: world.payload(2)[part]}
    with refused(rf"{part}.* ends with round {ends}, and the ledger has it in round 1"):
        world.upload(world.begin(gate, 1), changed)
    assert gate.order == ([] if part == "extractor" else ["word"])


def test_a_round_that_is_over_is_not_gone_back_to(world):
    for round_ in (0, 1):
        for path in world.desk.folder.iterdir():
            path.unlink()
        world.upload(world.begin(Door(world.desk), round_), world.payload(round_))
    with pytest.raises(RefusedError, match="asks for another upload in round 0"):
        world.upload(world.begin(Door(world.desk)))


def test_values_beyond_the_clip_stop_the_round_before_anything_leaves(world):
    given = world.payload()
    next(iter(given["extractor"].values())).reshape(-1)[0] = 65.0
    gate = Door(world.desk)
    with pytest.raises(LocalError, match="above its clip 64"):
        world.upload(world.begin(gate), given)
    assert gate.order == []


def test_the_parts_of_a_job_are_those_of_its_document(world):
    exchanges = [isinstance(part.exchange, Mix) for part in world.declared.hidden(0)]
    assert exchanges == [True, False]
    assert world.declared.groups(0)[0] == (world.job.up(0)[-1],)
