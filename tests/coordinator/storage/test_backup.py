"""Backups of a coordinator that runs, with raw silos, and what is put back of them."""

import asyncio
import json
import os
import shutil

import pytest
from support.signed_federation import job_document, raw_silos, signed_federation

from staddle.coordinator import server
from staddle.coordinator.storage import backup
from staddle.coordinator.storage.backup import MANIFEST, Owner, make, restore, verified
from staddle.errors import LocalError
from staddle.security.ledger import audit
from staddle.security.log.segments import segment

SILOS = ("a", "b")


@pytest.fixture
def world(tmp_path):
    """A federation, in a process with the umask that daemon and commands set."""
    before = os.umask(0o077)
    yield signed_federation(tmp_path, SILOS, job_document(SILOS))
    os.umask(before)


@pytest.fixture
def owner(world):
    return server.owner(world.config)


@pytest.fixture
def made(world, owner, tmp_path):
    """A backup between two uploads of a round, and the receipt of the first; nothing runs."""
    asyncio.run(two_uploads(world, owner, tmp_path / "backup"))
    return tmp_path / "backup"


async def two_uploads(world, owner, folder):
    async with server.running(world.config) as address, raw_silos(address, world) as callers:
        first, second = callers
        for caller in callers:
            await caller.told("round")
        world.receipt = await first.contribute()
        made = make(folder, owner)
        assert made.files == backup._described(folder, owner).files
        await second.contribute()
        assert (await first.told("round")).round == 1


def lost(owner):
    shutil.rmtree(owner.directory)


def inode(path):
    return path.stat().st_ino


async def test_a_restored_coordinator_stands_where_the_backup_was_made(world, owner, made):
    shown = {path.name: path.stat().st_mode & 0o777 for path in made.rglob("*")}
    assert made.stat().st_mode & 0o777 == 0o700
    assert set(shown.values()) <= {0o700, 0o600}
    assert not list(made.rglob("*.key"))
    lost(owner)
    assert restore(made, owner) == verified(made, owner)
    assert not (owner.directory / backup.RESTORING).exists()
    ledger = audit.verify(owner.directory / "ledger")
    assert ledger.ok
    assert ledger.records == verified(made, owner).records + 1
    last = segment(owner.directory / "ledger", 1).read_text().splitlines()[-1]
    assert json.loads(last)["reason"].startswith("restored from the backup of 20")
    async with server.running(world.config) as address, raw_silos(address, world, False) as callers:
        for caller in callers:
            await caller.hello()
        # The receipt that was given before the backup still holds, the other upload is asked again.
        first, second = callers
        stands = await first.standing()
        assert stands.receipt.signature == world.receipt.signature
        assert (await second.told("round")).round == 0
        assert not (await second.standing()).HasField("receipt")


def test_what_never_changes_is_linked_and_the_growing_segment_is_copied(owner, made):
    ledger = owner.directory / "ledger"
    assert inode(segment(made / "ledger", 1)) != inode(segment(ledger, 1))
    (job,) = (made / "jobs").iterdir()
    (upload,) = job.iterdir()
    assert upload.name == "0.a.upload"
    # Its round is over: the coordinator removed its own name of the file.
    assert not (owner.directory / "jobs" / job.name / upload.name).exists()
    lost(owner)
    restore(made, owner)
    assert inode(owner.directory / "jobs" / job.name / upload.name) != inode(upload)


async def test_files_that_cannot_be_linked_are_copied(world, owner, tmp_path, monkeypatch):
    def refused(*_, **__):
        raise OSError(backup.errno.EXDEV, "another disk")

    monkeypatch.setattr(backup.os, "link", refused)
    async with server.running(world.config) as address, raw_silos(address, world) as callers:
        await callers[0].told("round")
        await callers[0].contribute()
        make(tmp_path / "copied", owner)
    (found,) = (tmp_path / "copied" / "jobs" / "job").iterdir()
    assert found.read_bytes() == (owner.directory / "jobs" / "job" / found.name).read_bytes()


def test_a_database_that_changes_meanwhile_is_copied_again(made, owner, tmp_path, monkeypatch):
    real, calls = backup._taken, []
    monkeypatch.setattr(backup, "_taken", lambda *given: calls.append(given) or real(*given))
    monkeypatch.setattr(backup.table_seals, "stored", stored_once_differing())
    make(tmp_path / "again", owner)
    assert len(calls) == 2


def test_a_database_that_never_stands_still_is_not_backed_up(made, owner, tmp_path, monkeypatch):
    monkeypatch.setattr(backup, "MOST_SECONDS", 0)
    monkeypatch.setattr(backup, "_copied_at_rest", lambda *_: False)
    with pytest.raises(LocalError, match="changed all the time"):
        make(tmp_path / "again", owner)
    assert not (tmp_path / "again").exists()


def stored_once_differing():
    """As if a commit had come between the first two looks."""
    real, looks = backup.table_seals.stored, []

    def stored(connection):
        looks.append(connection)
        return {**real(connection), **({"jobs": b"?"} if len(looks) == 2 else {})}

    return stored


def changed(made):
    path = next((made / "jobs").rglob("*.upload"))
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])


def cut(made):
    path = segment(made / "ledger", 1)
    path.write_bytes(path.read_bytes()[:-100])


def told(made):
    text = (made / MANIFEST).read_text()
    (made / MANIFEST).write_text(text.replace('"records":', '"records":1'))


FAULTS = {
    "a file that was changed": (changed, r"0\.a\.upload: is not what was backed up"),
    "a ledger that was cut": (cut, "seg-00000001.jsonl: is not what was backed up"),
    "a file that was added": (
        lambda made: (made / "jobs" / "x").write_bytes(b""),
        "jobs/x: is not what was",
    ),
    "a link": (lambda made: (made / "out").symlink_to("/"), "out: is no file of a backup"),
    "no manifest": (lambda made: (made / MANIFEST).unlink(), "backup.json: cannot read it"),
    "a manifest that was changed": (told, "did not sign it with these keys"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_backup_that_is_not_whole_changes_nothing(owner, made, fault):
    change, why = FAULTS[fault]
    lost(owner)
    change(made)
    with pytest.raises(LocalError, match=why):
        restore(made, owner)
    assert {path.name for path in owner.directory.iterdir()} == {"LOCK"}


def test_a_database_that_knows_more_than_the_ledger_is_refused(world, owner, made, monkeypatch):
    """What a backup in the wrong order would hold: a receipt, and no record of it."""
    path = segment(made / "ledger", 1)
    lines = path.read_bytes().splitlines(keepends=True)
    received = next(i for i, line in enumerate(lines) if b'"type":"received"' in line)
    path.write_bytes(b"".join(lines[:received]))
    signed = backup._described(made, owner)
    text = backup.canonical_json(signed.model_dump(mode="json"))
    (made / MANIFEST).write_bytes(text)
    lost(owner)
    with pytest.raises(LocalError, match="the database holds a signed checkpoint"):
        restore(made, owner)


def test_a_state_that_is_there_is_never_replaced(owner, made):
    before = (owner.directory / "coordinator.sqlite").read_bytes()
    with pytest.raises(LocalError, match="this folder has a state already; move the whole"):
        restore(made, owner)
    assert (owner.directory / "coordinator.sqlite").read_bytes() == before
    with pytest.raises(LocalError, match="a backup needs a new folder"):
        make(made, owner)
    assert verified(made, owner)


async def test_a_restore_that_died_is_begun_again(world, owner, made, monkeypatch):
    lost(owner)
    real, moved = backup.Path.rename, []

    def dies(path, target):
        moved.append(path.name)
        if len(moved) == 2:
            raise KeyboardInterrupt
        return real(path, target)

    monkeypatch.setattr(backup.Path, "rename", dies)
    with pytest.raises(KeyboardInterrupt):
        restore(made, owner)
    monkeypatch.undo()
    with pytest.raises(LocalError, match="a restore has not ended; run staddle coordinator"):
        async with server.running(world.config):
            pass
    restore(made, owner)
    async with server.running(world.config):
        pass


def test_other_keys_and_an_older_roster_are_refused(world, owner, made, tmp_path):
    lost(owner)
    other = Owner(owner.directory, world.keys["a"], owner.roster)
    with pytest.raises(LocalError, match="did not sign it with these keys"):
        restore(made, other)
    older = owner.roster.model_copy(update={"version": owner.roster.version - 1})
    with pytest.raises(LocalError, match="get the newest from a founder"):
        restore(made, Owner(owner.directory, owner.keys, older))
