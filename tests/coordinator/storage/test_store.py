import errno
import stat
import threading
from dataclasses import replace
from hashlib import sha256
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from support.refusals import refused

from staddle.algorithms.exchange.delivery import Post
from staddle.algorithms.exchange.parts import Gram, Item, Kind, Mix, Part, TensorSpec
from staddle.coordinator.storage import spool, store
from staddle.coordinator.storage.spool import MARGIN_BYTES, Spool, SpooledUpload
from staddle.coordinator.storage.store import DamagedError, JobStore, check_folder
from staddle.errors import LocalError, RefusedError
from staddle.files import tensor_file
from staddle.proto.stream import chunks
from staddle.proto.wire import tensor_bytes

ITEMS = (
    Item("counts", Kind.COUNTS, TensorSpec("n", "int64", ())),
    Item("model", Kind.WHOLE_MODEL, TensorSpec("w", "float32", (3, 5))),
    Item("model", Kind.WHOLE_MODEL, TensorSpec("none", "float64", (0, 2))),
    Item("model", Kind.WHOLE_MODEL, TensorSpec("odd", "float32", (1,))),
    # 4 bytes off its alignment
    Item("model", Kind.WHOLE_MODEL, TensorSpec("@weight", "float64", (), 0.0, 2.0**53)),
)


def values(seed=0):
    rng = torch.Generator().manual_seed(seed)
    return [
        torch.tensor(-(2**63) + seed),
        torch.randn(3, 5, generator=rng),
        torch.empty(0, 2, dtype=torch.float64),
        torch.tensor([-0.0]),
        torch.tensor(1e-310, dtype=torch.float64),
    ]


def spooled(path, tensors):
    spool = Spool(path, "silo-a")
    for chunk in chunks(tensors, 7):
        spool.write(chunk.content)
    return spool


def bits(tensor):
    return bytes(tensor_bytes(tensor))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "job"


def store_version(fold, part, silo):
    """What a silo gave is its version; an upload stays as it is, so nothing is read."""
    fold.store(Part(part, Kind.BACKBONE, Mix(), ()), silo, None)


def store_versions(part, *silos):
    """The act of a fold that keeps these silos' versions of a part."""
    return lambda fold: [store_version(fold, part, silo) for silo in silos]


def put(fold, part, silo, tensors):
    fold.put_mail(Post(part, silo, {}, 0.5), tensors)


# Spool.
def test_a_finished_spool_has_every_byte_on_the_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(store.os, "fsync", lambda fd: synced.append(store.os.fstat(fd).st_size))
    assert spooled(tmp_path / "x.part", values()).finished() == tmp_path / "x.part"
    assert synced == [8 + 60 + 0 + 4 + 8]
    assert (tmp_path / "x.part").read_bytes() == b"".join(bits(v) for v in values())


def test_a_spool_starts_empty_is_its_owners_alone_and_leaves_nothing_when_discarded(tmp_path):
    spool = spooled(tmp_path / "x.part", values())
    spool.discard()
    assert list(tmp_path.iterdir()) == []
    spool.discard()
    spool = Spool(tmp_path / "x.part", "silo-a")
    spool.write(b"abc")
    assert (tmp_path / "x.part").read_bytes() == b"abc"
    assert stat.S_IMODE((tmp_path / "x.part").stat().st_mode) == 0o600
    spool.discard()
    (tmp_path / "x.part").write_bytes(b"left by a crash")
    assert Spool(tmp_path / "x.part", "silo-a").finished().read_bytes() == b""


def full_disk(monkeypatch):
    def failing(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store.os, "fsync", failing)


def storage(action, *args):
    with pytest.raises(RefusedError) as caught:
        action(*args)
    assert (caught.value.code, caught.value.peer) == ("STORAGE", "silo-a")
    assert "No space left" in caught.value.why


@pytest.mark.parametrize("data", [bytes(1024 * 1024), b"few"], ids=["a chunk", "a few bytes"])
def test_a_full_disk_refuses_what_comes_and_the_spool_can_be_discarded(tmp_path, data):
    (tmp_path / "x.part").symlink_to("/dev/full")  # every write there says: no space left
    spool = Spool(tmp_path / "x.part", "silo-a")
    storage(spool.write, data)
    spool.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_failed_sync_is_a_refusal(tmp_path, monkeypatch):
    full_disk(monkeypatch)
    storage(spooled(tmp_path / "x.part", values()).finished)


# Uploads.
def uploaded(tmp_path, tensors, name="x.part"):
    return SpooledUpload(spooled(tmp_path / name, tensors).finished(), ITEMS)


def test_an_upload_gives_its_tensors_bit_for_bit_passes_and_stays_as_it_is(tmp_path):
    upload = uploaded(tmp_path, values())
    for item, sent in zip(ITEMS, values(), strict=True):
        found = upload.read(item.part, item.spec.name)
        assert (found.dtype, found.shape, bits(found)) == (sent.dtype, sent.shape, bits(sent))
    upload = uploaded(tmp_path, values())
    before = (tmp_path / "x.part").read_bytes()
    upload.read("model", "w").fill_(7)
    assert (tmp_path / "x.part").read_bytes() == before
    with pytest.raises(KeyError):
        uploaded(tmp_path, values()).read("model", "n")
    uploaded(tmp_path, values()).check_values("silo-a")


def check_refused(upload, code, named):
    with pytest.raises(RefusedError) as caught:
        upload.check_values("silo-a")
    assert (caught.value.code, caught.value.peer) == (code, "silo-a")
    assert f"tensor {named}" in caught.value.why


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    ("place", "named"), [(1, "model/w"), (3, "model/odd"), (4, "model/@weight")]
)
def test_a_value_that_is_not_finite_is_refused_and_its_tensor_named(tmp_path, bad, place, named):
    tensors = values()
    tensors[place].reshape(-1)[-1] = bad
    check_refused(uploaded(tmp_path, tensors), "NOT_FINITE", f"{named} ")


@pytest.mark.parametrize("weight", [-1.0, -1e-310, 2.0**53 + 2, 1.7e308])
def test_a_weight_that_no_silo_has_is_refused(tmp_path, weight):
    tensors = values()
    tensors[4].fill_(weight)
    check_refused(uploaded(tmp_path, tensors), "WEIGHT", "model/@weight")


@pytest.mark.parametrize("weight", [0.0, -0.0, 1e-310, 0.5, 2.0**53])
def test_a_weight_may_be_any_number_of_records(tmp_path, weight):
    tensors = values()
    tensors[4].fill_(weight)
    tensors[3].fill_(-1.7e38)  # what is no weight may be any finite number
    uploaded(tmp_path, tensors).check_values("silo-a")


@pytest.mark.parametrize(
    ("place", "value", "named"), [(0, 3, "counts/n"), (0, -2, "counts/n"), (1, -1e-30, "model/w")]
)
def test_a_value_beyond_its_bounds_is_refused(tmp_path, monkeypatch, place, value, named):
    monkeypatch.setattr(spool, "REGION", 4)
    items, tensors = list(ITEMS), values()
    items[0] = replace(items[0], spec=replace(items[0].spec, least=-1.0, most=2.0))
    items[1] = replace(items[1], spec=replace(items[1].spec, least=0.0))
    tensors[0].fill_(2)
    tensors[1].abs_()
    path = spooled(tmp_path / "good.part", tensors).finished()
    SpooledUpload(path, items).check_values("silo-a")
    tensors[place].view(-1)[-1] = value
    path = spooled(tmp_path / "bad.part", tensors).finished()
    check_refused(SpooledUpload(path, items), "BOUNDS", f"{named} holds a value")


# A job's files.
def nothing(fold):
    del fold


class Rounds:
    """A job's store, and the places that a database would have committed."""

    def __init__(self, folder):
        self.folder, self.places, self.given = folder, {}, {}
        self.store = JobStore(folder, lambda _: ITEMS, {})

    def contribute(self, tmp_path, round_, silo, seed=0):
        spool = spooled(tmp_path / f"{silo}.part", values(seed))
        name = self.store.keep(silo, round_, spool.finished())
        self.given[name] = digest_of(values(seed))
        return name

    def folded(self, round_, act=nothing):
        fold = self.store.folding(round_)
        act(fold)
        return fold

    def fold(self, round_, act=nothing):
        return self.folded(round_, act).changes

    def close(self, round_, act=nothing):
        given = {
            name.split(".")[1]: digest
            for name, digest in self.given.items()
            if name.startswith(f"{round_}.")
        }
        self.store.check_uploads(given, round_)
        fold = self.folded(round_, act)
        self.places = {k: v for k, v in {**self.places, **fold.changes}.items() if v is not None}
        self.store.commit(round_, fold.changes, fold.digests)

    def publish(self, round_, value, part="model"):
        self.close(round_, lambda fold: fold.publish(part, {"w": torch.full((2,), float(value))}))

    def restart(self, uploads=()):
        self.store = JobStore(self.folder, lambda _: ITEMS, self.places, self.given)
        self.store.clean(uploads)

    @property
    def names(self):
        return sorted(path.name for path in self.folder.iterdir())


def digest_of(tensors):
    """Of an upload, as a receipt has it."""
    return sha256(b"".join(sha256(bits(tensor)).digest() for tensor in tensors)).hexdigest()


@pytest.fixture
def job(folder):
    return Rounds(folder)


def flip(path):
    """The last bit of a file."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def emptied(path):
    path.write_bytes(b"")


DAMAGE = pytest.mark.parametrize("damage", [flip, cut, emptied, lambda path: path.unlink()])


@DAMAGE
def test_what_a_silo_gave_in_the_open_round_is_checked_and_its_silo_named(tmp_path, job, damage):
    for seed, silo in enumerate("abc"):
        job.contribute(tmp_path, 0, silo, seed)
    damage(job.folder / "0.b.upload")
    with pytest.raises(DamagedError, match=r"the disk changed 0\.b\.upload") as caught:
        job.close(0)
    assert caught.value.silos == ("b",)


@DAMAGE
@pytest.mark.parametrize("restarted", [False, True])
def test_a_version_that_the_disk_changed_is_not_mixed(tmp_path, job, damage, restarted):
    job.contribute(tmp_path, 0, "a")
    job.close(0, store_versions("model", "a"))
    damage(job.folder / "0.a.upload")
    if restarted:
        job.restart()
    for archive in (job.store, job.store.folding(1)):
        with pytest.raises(LocalError, match=r"the disk changed 0\.a\.upload"):
            archive.version("model", "a", "w")


def test_a_version_is_looked_at_once_a_round(tmp_path, job):
    job.contribute(tmp_path, 0, "a")
    job.close(0, store_versions("model", "a"))
    job.store.version("model", "a", "w")
    flip(job.folder / "0.a.upload")
    job.store.version("model", "a", "w")
    job.close(1)
    with pytest.raises(LocalError, match=r"the disk changed 0\.a\.upload"):
        job.store.version("model", "a", "w")


@DAMAGE
def test_a_file_is_compared_with_the_digest_that_is_known_of_it(tmp_path, job, damage):
    (tmp_path / "part").write_bytes(bytes(range(64)))
    name = job.store.keep_as("0.a.theta.padded", tmp_path / "part")
    digests = {name: sha256(bytes(range(64))).hexdigest()}
    job.store.check_files(digests)
    job.close(0, lambda fold: fold.changes.update({("version", "theta", "a"): "0.a.theta.padded"}))
    damage(job.folder / "0.a.theta.padded")
    with pytest.raises(LocalError, match=r"the disk changed 0\.a\.theta\.padded"):
        job.store.check_files(digests)


def test_checked_uploads_are_read_by_silo_part_and_name(tmp_path, job):
    for seed, silo in enumerate(("b", "a", "c")):
        assert job.contribute(tmp_path, 3, silo, seed) == f"3.{silo}.upload"
        assert not (tmp_path / f"{silo}.part").exists()
    read = job.store.reader(("a", "b"), 3)
    assert bits(read("model", "b", "w")) == bits(values(0)[1])
    assert bits(read("model", "a", "w")) == bits(values(1)[1])
    assert read("counts", "a", "n").item() == -(2**63) + 1
    with pytest.raises(KeyError):
        read("model", "c", "w")


def test_a_closed_round_leaves_what_it_published_and_the_versions_of_a_mix(tmp_path, job):
    for silo in "ab":
        job.contribute(tmp_path, 0, silo)

    def act(fold):
        fold.publish("model", {"w": torch.ones(2)})
        store_version(fold, "model", "a")

    job.close(0, act)
    assert job.names == ["0.a.upload", "0.model.safetensors"]
    job.contribute(tmp_path, 1, "a", 1)
    job.close(1, store_versions("model", "a"))
    assert bits(job.store.version("model", "a", "w")) == bits(values(1)[1])
    job.publish(2, 1.0)
    # the old model may be read yet
    assert job.names == ["0.model.safetensors", "1.a.upload", "2.model.safetensors"]
    job.publish(3, 2.0)
    assert job.names == ["1.a.upload", "2.model.safetensors", "3.model.safetensors"]


def test_a_fold_changes_nothing_before_its_commit(tmp_path, job):
    job.publish(0, 1.0)
    job.close(1, lambda fold: put(fold, "model", "c", {"w": torch.ones(2)}))
    job.contribute(tmp_path, 2, "a")

    def act(fold):
        assert (fold.has("model", "a"), fold.latest("model")["w"].tolist()) == (False, [1, 1])
        fold.publish("model", {"w": torch.zeros(2)})
        store_version(fold, "model", "a")
        fold.clear_mail("c")
        put(fold, "model", "b", {"w": torch.zeros(2)})
        assert not fold.has("model", "a")
        assert fold.mail("model", "b") is None
        assert fold.latest("model")["w"].tolist() == [1, 1]
        assert fold.mail("model", "c")["w"].tolist() == [1, 1]

    first = job.fold(2, act)
    assert first == job.fold(2, act)  # and again, as after a crash
    assert not job.store.has("model", "a")
    assert job.store.mail("model", "c") is not None
    job.close(2, act)
    assert job.store.has("model", "a")
    assert job.store.mail("model", "c") is None
    assert job.store.mail("model", "b")["w"].tolist() == [0, 0]
    assert job.store.latest("model")["w"].tolist() == [0, 0]


def test_a_restart_keeps_what_was_committed_and_the_uploads_of_the_open_round(tmp_path, job):
    job.publish(0, 1.0)
    job.contribute(tmp_path, 1, "a")
    job.close(1, store_versions("model", "a"))
    for silo in "abc":
        job.contribute(tmp_path, 2, silo, 2)
    job.fold(2, lambda fold: fold.publish("model", {"w": torch.zeros(2)}))  # died before its commit
    (job.folder / ".2.model.safetensors.tmp").write_bytes(b"half")
    job.restart(["2.a.upload", "2.b.upload"])  # c's was never committed
    assert job.names == ["0.model.safetensors", "1.a.upload", "2.a.upload", "2.b.upload"]
    assert job.store.latest("model")["w"].tolist() == [1, 1]
    assert bits(job.store.version("model", "a", "w")) == bits(values(0)[1])
    assert bits(job.store.reader(("b",), 2)("model", "b", "w")) == bits(values(2)[1])


def test_the_archive_gives_back_what_was_published(job):
    assert job.store.latest("model") is None
    weight = torch.tensor(2.0, dtype=torch.float64)
    sent = {"extractor.w": torch.randn(4, 3).T, "@weight": weight, "e": torch.empty(0)}
    job.close(0, lambda fold: fold.publish("model", sent))
    found = job.store.latest("model")
    assert {k: (v.dtype, tuple(v.shape), bits(v)) for k, v in found.items()} == {
        k: (v.dtype, tuple(v.shape), bits(v)) for k, v in sent.items()
    }
    job.publish(1, 0.0)
    assert list(job.store.latest("model")) == ["w"]
    assert job.store.latest("other") is None


def test_every_silo_gets_the_published_value_until_the_next_even_while_it_is_read(job):
    job.publish(0, 0.0)
    held = job.store.latest("model")["w"]
    job.publish(1, 1.0)
    job.publish(2, 2.0)
    assert held.sum() == 0
    for round_, value in enumerate((1.0, 2.0)):
        job.publish(round_, value)
        assert [job.store.latest("model")["w"].tolist() for _ in range(3)] == [[value, value]] * 3


def digests(job, **others):
    """What is known of a delivery of the published value and of other parts."""
    return job.store.digests({"model": job.store.latest("model"), **others})


def test_the_digests_of_a_published_value_are_known_until_the_next_one(job):
    for round_, value in enumerate((1, 2)):
        job.publish(round_, value)
        wanted = sha256(np.full(2, value, dtype="<f4").tobytes()).digest()
        assert digests(job) == {("model", "w"): wanted}


def test_no_digest_is_known_of_anything_but_the_published_value(job):
    job.publish(0, 1)
    before = {"w": job.store.latest("model")["w"]}
    assert digests(job, row={"w": torch.ones(2)}).keys() == {("model", "w")}
    assert job.store.digests({"model": {"w": before["w"].clone()}}) == {}  # such as a row of a Mix
    job.publish(1, 2)
    assert job.store.digests({"model": before}) == {}  # of the round before
    job.restart()
    assert digests(job) == {}


def racing(monkeypatch, action):
    """Another thread begins ``action`` while the next published file is being read; that thread."""
    real, other = tensor_file.load_file, threading.Thread(target=action)

    def slow(path):
        monkeypatch.setattr(tensor_file, "load_file", real)
        loaded = real(path)
        other.start()
        other.join(0.2)  # long enough for an action that nothing holds up
        return loaded

    monkeypatch.setattr(tensor_file, "load_file", slow)
    return other


@pytest.mark.parametrize("forgets", [False, True])
def test_a_read_that_a_commit_overtakes_brings_no_old_value(job, monkeypatch, forgets):
    job.publish(0, 0.0)

    def fold():
        if forgets:
            job.store.forget_loaded()
        job.publish(1, 1.0)

    other = racing(monkeypatch, fold)
    job.store.latest("model")
    other.join(60)
    assert not other.is_alive()
    assert job.store.latest("model")["w"].tolist() == [1, 1]


def test_a_value_that_cannot_be_written_is_a_fault_that_the_daemon_reports(job, monkeypatch):
    job.publish(0, 0.0)

    def failing(*args, **kwargs):
        raise safetensors.SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        )

    monkeypatch.setattr(tensor_file, "save_file", failing)
    for act in (
        lambda fold: fold.publish("model", {"w": torch.ones(2)}),
        lambda fold: put(fold, "model", "a", {"w": torch.ones(2)}),
    ):
        with pytest.raises(OSError, match="No space left"):
            job.fold(1, act)
    assert job.store.latest("model")["w"].tolist() == [0, 0]
    assert job.store.mail("model", "a") is None


def test_mail_is_kept_by_part_and_silo_and_cleared_by_silo(job):
    places = [("theta", "a"), ("head", "a"), ("theta", "b")]

    def act(fold):
        for number, (part, silo) in enumerate(places):
            put(fold, part, silo, {"w": torch.full((2,), float(number))})

    job.close(0, act)
    assert [job.store.mail(*place)["w"][0].item() for place in places] == [0, 1, 2]
    job.close(1, lambda fold: fold.clear_mail("a"))
    assert [job.store.mail(*place) is None for place in places] == [True, True, False]


def test_versions_are_kept_by_part_and_silo_and_are_the_uploads_bits(tmp_path, job):
    job.contribute(tmp_path, 0, "a", 0)
    job.contribute(tmp_path, 0, "b", 1)
    job.close(0, lambda f: (store_version(f, "model", "a"), store_version(f, "counts", "b")))
    has = [job.store.has(part, silo) for part in ("model", "counts") for silo in "ab"]
    assert has == [True, False, False, True]
    for place, name in ((1, "w"), (2, "none"), (3, "odd"), (4, "@weight")):
        assert bits(job.store.version("model", "a", name)) == bits(values(0)[place])


def test_files_are_readable_by_their_owner_alone(tmp_path, job):
    job.publish(0, 1.0)
    job.contribute(tmp_path, 1, "a")
    for path in job.folder.iterdir():
        assert path.stat().st_mode & 0o077 == 0


def test_an_upload_that_would_fill_the_disk_is_refused_beforehand(job, monkeypatch):
    free = MARGIN_BYTES + 1000
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    job.store.check_space("silo-a", 1000)
    with pytest.raises(RefusedError, match="1001") as caught:
        job.store.check_space("silo-a", 1001)
    assert caught.value.code == "STORAGE"


# A folder that the database does not know of.
@pytest.mark.parametrize(
    "name",
    ["0.silo-a.upload", "3.model.safetensors", "result.safetensors", "12.mail.b.safetensors"],
)
def test_tensors_of_a_job_that_the_database_does_not_have_are_not_taken_for_rubbish(folder, name):
    folder.mkdir()
    (folder / name).write_bytes(b"the only copy")
    said = (
        rf"{folder}: holds {name}, but by coordinator.sqlite there is no such job.* move the folder"
        r" away"
    )
    with pytest.raises(LocalError, match=said):
        check_folder(folder, -1)
    assert (folder / name).read_bytes() == b"the only copy"


def test_tensors_of_later_rounds_are_kept(folder):
    """Clean-up also keeps tensors of rounds after the current one."""
    folder.mkdir()
    for name in ("2.model.safetensors", "3.silo-a.upload", "result.safetensors"):
        (folder / name).touch()
    check_folder(folder, 3)
    check_folder(folder, 99)
    with refused(r"holds 3\.silo-a\.upload, but by coordinator.sqlite the job stands in round 2"):
        check_folder(folder, 2)


def test_what_a_crash_leaves_of_a_job_that_never_began_locks_nobody_out(folder):
    check_folder(folder, -1)  # no folder
    folder.mkdir()
    check_folder(folder, -1)
    (folder / ".0.model.safetensors.tmp").touch()  # no tensors yet
    check_folder(folder, -1)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "jobs").touch()
    with pytest.raises(LocalError, match=r"jobs/one: cannot make it: Not a directory"):
        JobStore(tmp_path / "jobs" / "one", lambda _: ITEMS, {})


# The end of the job.
def test_the_result_keeps_the_state_bit_by_bit_with_the_names_of_its_rows(folder):
    whole = torch.randn(4, 3)
    # of one memory
    state = {"memberships": whole[:3], "rest": whole[2:].T, "again": whole[1:]}
    state["n"] = torch.tensor(7)
    JobStore(folder, lambda _: ITEMS, {}).keep_result(state, ("b", "a"))
    path = folder / "result.safetensors"
    assert path.stat().st_mode & 0o077 == 0
    found = safetensors.torch.load_file(path)
    assert {k: bits(v) for k, v in found.items()} == {
        k: bits(v.contiguous()) for k, v in state.items()
    }
    with safetensors.safe_open(path, "pt") as file:
        assert {**file.metadata(), "sha256": ""} == {"silos": '["b", "a"]', "sha256": ""}


def test_a_method_that_knows_nothing_leaves_no_result(folder):
    JobStore(folder, lambda _: ITEMS, {}).keep_result({}, ("a",))
    assert not (folder / "result.safetensors").exists()


def test_a_result_that_cannot_be_written_leaves_the_earlier_one(folder, monkeypatch):
    job = JobStore(folder, lambda _: ITEMS, {})
    job.keep_result({"n": torch.tensor(1)}, ("a",))
    full_disk(monkeypatch)
    with pytest.raises(OSError, match="No space left"):
        job.keep_result({"n": torch.tensor(2)}, ("a",))
    assert int(safetensors.torch.load_file(folder / "result.safetensors")["n"]) == 1


# Of a job that mixes blind: versions are padded words, and rows are put aside without theirs.
def hidden(job, tmp_path, round_, silo, part="theta", form="padded"):
    (tmp_path / "part").write_bytes(bytes(24))
    return job.store.keep_as(f"{round_}.{silo}.{part}.{form}", tmp_path / "part")


def mixing(round_, *silos, rows=None, cleared=()):
    """A fold whose versions are padded words; ``rows`` by silo is what is put aside."""

    def act(job):
        folding = job.store.folding(round_, lambda post, _: (rows or {}).get(post.silo))
        for silo in silos:
            store_version(folding, "theta", silo)
        for silo in cleared:
            folding.clear_mail(silo)
        done = {silo: folding.put_mail(Post("theta", silo, {}, 0.5), None) for silo in rows or {}}
        return folding.changes, done

    return act


def test_padded_words_stay_while_versions_or_rows_put_aside_are_of_them(tmp_path, job):
    for silo in "abc":
        hidden(job, tmp_path, 0, silo)
        hidden(job, tmp_path, 0, silo, "rows", "rotated")
    changes, done = mixing(0, *"abc", rows={"d": b"{}", "e": None})(job)
    assert done == {"d": True, "e": False}
    mixed = {"0.a.theta.padded", "0.b.theta.padded"}
    job.store.commit(0, changes, {}, mixed)
    versions = [f"0.{silo}.theta.padded" for silo in "abc"]
    assert job.names == [*versions, "0.theta.d.rows"]
    assert (job.store.put_aside("theta", "d"), job.store.put_aside("theta", "e")) == (b"{}", None)
    assert job.store.mail("theta", "d") is None
    for silo in "abc":
        hidden(job, tmp_path, 1, silo)
    changes, _ = mixing(1, *"abc")(job)
    for round_ in (1, 2):  # the replaced one may still be read once
        job.store.commit(round_, changes if round_ == 1 else {}, {}, mixed)
    newer = [f"1.{silo}.theta.padded" for silo in "abc"]
    assert job.names == [*versions[:2], "0.theta.d.rows", *newer]
    changes, _ = mixing(3, cleared="d")(job)
    job.store.commit(3, changes, {})
    job.store.commit(4, {}, {})
    assert job.names == newer


def test_a_restart_keeps_padded_words_that_are_still_to_be_mixed(tmp_path, job):
    for silo in "ab":
        hidden(job, tmp_path, 0, silo)
    changes, _ = mixing(0, "a", rows={"d": b"{}"})(job)
    hidden(job, tmp_path, 1, "c")
    hidden(job, tmp_path, 1, "d")
    places = {place: name for place, name in changes.items() if name}
    store = JobStore(job.folder, lambda _: ITEMS, places)
    store.clean(["1.c.theta.padded"], {"0.b.theta.padded"})
    padded = ["0.a.theta.padded", "0.b.theta.padded"]
    assert job.names == [*padded, "0.theta.d.rows", "1.c.theta.padded"]


def test_what_was_given_in_a_round_without_a_fold_goes(tmp_path, job):
    for round_ in (0, 1):
        hidden(job, tmp_path, round_, "a")
        hidden(job, tmp_path, round_, "a", "rows", "rotated")
    job.store.discard_hidden(1)
    assert job.names == ["0.a.rows.rotated", "0.a.theta.padded"]


@pytest.mark.parametrize("name", ["3.a.theta.padded", "3.a.rows.rotated", "3.theta.a.rows"])
def test_a_folder_with_parts_of_later_rounds_is_refused(folder, name):
    folder.mkdir()
    (folder / name).write_bytes(b"")
    check_folder(folder, 3)
    with pytest.raises(LocalError, match=name):
        check_folder(folder, 2)


def test_rotated_vectors_are_read_by_part_and_silo(tmp_path, job):
    part = Part("rows", Kind.CLASSIFIER_ROWS, Gram(), (TensorSpec("r", "float32", (2, 3)),))
    for number, silo in enumerate("ab"):
        (tmp_path / "part").write_bytes(np.full(6, number, "<f4").tobytes())
        job.store.keep_as(f"2.{silo}.rows.rotated", tmp_path / "part")
    read = job.store.rotated(("b", "a"), 2, [part])
    assert [read("rows", silo, "r").tolist() for silo in "ab"] == [[[0.0] * 3] * 2, [[1.0] * 3] * 2]


def test_folded_words_are_checked_again(tmp_path):
    """Words that a fold has read are checked again after the next commit, not before."""
    store, looked = JobStore(tmp_path, lambda _: (), {}), []
    store.found_sound("0.model.words")
    for round_ in range(2):
        store.commit(round_, {}, {})
        store.check_once("0.model.words", lambda number=round_: looked.append(number))
    assert looked == [1]
