"""The folder of a model: whoever changes a byte of it, or signs it with other keys, is seen."""

import errno
import json
import os
import shutil
from types import SimpleNamespace

import pytest
from support.refusals import refused
from support.trained_models import CSV, HEADER, made, table_job, table_rows

from staddle.algorithms.data.dataset import Dataset
from staddle.algorithms.data.sources.formats.csv_file import Csv
from staddle.bundle import folder
from staddle.bundle.ledger_head import check_head
from staddle.commands.federation import local_federation
from staddle.errors import PeerError, UnwritableError
from staddle.security.identity import roster as rosters
from staddle.security.identity.keys import load_keys
from staddle.security.log.head import Signer
from staddle.security.log.merkle import EMPTY_ROOT


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """A federation with two silos, and a model that the first one signed."""
    path = tmp_path_factory.mktemp("folder")
    federation = local_federation.make(path / "federation", ("north", "east"))
    keys = {silo: load_keys(federation.keys(silo)) for silo in ("north", "east")}
    roster = rosters.load(federation.folder / "roster.json")
    (path / "records.csv").write_text(HEADER + "".join(table_rows(40)))
    contract = {key: value for key, value in CSV.items() if key != "kind"}
    data = Csv(kind="csv", file=path / "records.csv", **contract).read()
    assert isinstance(data, Dataset)
    signer = Signer.of(roster.federation, "north", keys["north"].log)
    head = bytes(signer.sign(0, EMPTY_ROOT)).decode()
    origin = {"federation": roster.federation, "head": head}
    model = made(path / "model", table_job(), data, CSV, keys["north"], **origin)
    return SimpleNamespace(
        path=path, keys=keys, roster=roster, data=data, model=model, federation=federation
    )


@pytest.fixture
def copied(known, tmp_path):
    return shutil.copytree(known.model, tmp_path / "model")


def test_what_was_written_is_read(known):
    found = folder.read(known.model)
    assert found.signer == known.roster["north"]
    assert found.description.job["name"] == "heart"
    assert found.description.records.train == len(known.data)
    found.check_signer(known.roster)
    assert check_head(found).size == 0
    assert {path.name for path in known.model.iterdir()} == {*folder.FILES, folder.SIGNATURE}


@pytest.mark.parametrize("name", folder.FILES)
def test_each_changed_file_is_named(copied, name):
    data = bytearray((copied / name).read_bytes())
    data[len(data) // 2] ^= 1
    (copied / name).write_bytes(data)
    with refused(rf"model/{name}: is not the file that was signed"):
        folder.read(copied)


@pytest.mark.parametrize("name", [folder.WEIGHTS, folder.CARD, folder.SIGNATURE])
def test_each_missing_file_is_named(copied, name):
    (copied / name).unlink()
    with refused(rf"model/{name}: cannot read it"):
        folder.read(copied)


def change(copied, **changes):
    path = copied / folder.SIGNATURE
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_signature_of_another_is_none(copied, known):
    change(copied, signer=known.keys["east"].entry.model_dump(mode="json"))
    with refused("its signature is not that of 'east'"):
        folder.read(copied)


def test_a_model_without_its_signature_is_none_of_a_silo(copied):
    """Whoever takes the signature out may have changed the rest."""
    change(copied, signer=None, signature=None)
    with refused("made by north, and signed by nobody"):
        folder.read(copied)
    change(copied, signer=None, signature="0" * 128)
    with refused("has a signer and no signature, or a signature and no signer"):
        folder.read(copied)


def test_digests_of_fewer_files_are_refused(copied):
    path = copied / folder.SIGNATURE
    files = json.loads(path.read_text())["files"]
    files.pop(folder.CARD)
    change(copied, files=files)
    with refused("a model has model.json, model.safetensors, MODEL_CARD.md"):
        folder.read(copied)


def test_a_model_signed_by_another_member_is_not_the_makers(known, tmp_path):
    """East signs a description that says north."""
    files = {name: (known.model / name).read_bytes() for name in folder.FILES}
    folder.write(tmp_path / "model", files, known.keys["east"])
    with refused("made by north, and signed by east"):
        folder.read(tmp_path / "model")


def test_keys_of_ones_own_show_by_the_roster(known, tmp_path):
    """A stranger makes keys with north's name, and signs what it changed."""
    other = local_federation.make(tmp_path / "federation", ("north", "east"))
    keys = load_keys(other.keys("north"))
    files = {name: (known.model / name).read_bytes() for name in folder.FILES}
    files[folder.CARD] += b"It is perfect.\n"
    folder.write(tmp_path / "model", files, keys)
    found = folder.read(tmp_path / "model")  # it is signed: by whom is the question
    with pytest.raises(PeerError, match="signed with another key than this member's"):
        found.check_signer(known.roster)
    with refused("its ledger head"):
        check_head(found)


def test_the_silo_that_is_asked_for_must_have_signed(known):
    found = folder.read(known.model)
    found.check_named("north")
    with refused("made by silo north, not by silo east; take the folder of that silo"):
        found.check_named("east")


def test_only_silos_make_models(known, tmp_path):
    operator = load_keys(known.federation.folder / "operator")
    path = made(tmp_path / "model", table_job(), known.data, CSV, operator)
    with pytest.raises(
        PeerError, match="has the role operator, and says that it was made by a silo"
    ):
        folder.read(path).check_signer(known.roster)


def test_a_model_of_another_federation_is_told_from_one_of_the_rosters(known, tmp_path):
    """Though the same key signed it."""
    keys = known.keys["north"]
    path = made(tmp_path / "model", table_job(), known.data, CSV, keys, federation="elsewhere")
    why = f"made in federation 'elsewhere', and the roster is that of '{known.roster.federation}'"
    with refused(why):
        folder.read(path).check_signer(known.roster)


def test_nobody_signs_for_a_simulation(known, tmp_path):
    path = made(tmp_path / "model", table_job(), known.data, CSV)
    found = folder.read(path)
    assert found.signer is None
    assert check_head(found) is None
    with refused("nobody signed it: it comes from a simulation"):
        found.check_signer(known.roster)


def test_a_folder_is_never_overwritten_and_never_half_there(known, tmp_path):
    there = tmp_path / "there"
    there.mkdir()
    (there / "mine").touch()
    with refused("exists already"):
        folder.write(there, {}, None)
    (tmp_path / "file").touch()
    with pytest.raises(UnwritableError):
        folder.write(tmp_path / "file" / "model", {}, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "there"]


def test_a_disk_that_fails_or_a_crash_leaves_nothing_to_find(tmp_path, monkeypatch):
    files, written = dict.fromkeys(folder.FILES, b"x"), []

    def fails(path, data):
        written.append(path.name)
        if len(written) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        path.write_bytes(data)

    with monkeypatch.context() as patched:
        patched.setattr(folder, "write_new", fails)
        with pytest.raises(UnwritableError, match="model: cannot write it: No space left"):
            folder.write(tmp_path / "model", files, None)
    assert list(tmp_path.iterdir()) == []
    # kill -9 leaves it, and the next attempt takes it away.
    (tmp_path / ".model.0123456789ab.tmp").mkdir()
    folder.write(tmp_path / "model", files, None)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_folder_that_is_none_is_told(tmp_path):
    (tmp_path / "first" / "model").mkdir(parents=True)
    for path in (tmp_path / "nothing", tmp_path / "first"):
        with refused("no model there; a model is a folder with model.json"):
            folder.read(path)


@pytest.mark.parametrize("name", [*folder.FILES, folder.SIGNATURE])
def test_a_file_that_never_ends_is_not_waited_for(copied, name):
    (copied / name).unlink()
    os.mkfifo(copied / name)
    with refused(f"{name}: is a FIFO, not a file"):
        folder.read(copied)


def test_a_job_has_its_own_digest(known, tmp_path):
    files = {name: (known.model / name).read_bytes() for name in folder.FILES}
    description = json.loads(files[folder.DESCRIPTION])
    description["job_digest"] = "0" * 64
    files[folder.DESCRIPTION] = json.dumps(description).encode()
    folder.write(tmp_path / "model", files, known.keys["north"])
    with refused("job_digest is not that of its job"):
        folder.read(tmp_path / "model")


def test_a_description_that_nobody_could_read_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "MOST_DESCRIPTION", 3)
    folder.write(tmp_path / "short", {folder.DESCRIPTION: b"abc"}, None)
    with refused("larger than 3 bytes"):
        folder.write(tmp_path / "model", {folder.DESCRIPTION: b"abcd"}, None)
    assert [path.name for path in tmp_path.iterdir()] == ["short"]


def test_others_on_the_machine_may_not_read_it(known):
    assert known.model.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in known.model.iterdir()} == {0o600}
