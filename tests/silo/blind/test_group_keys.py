"""The key of a job's silos at each silo, before a coordinator that is honest unless told."""

import asyncio
import os
from dataclasses import replace

import pytest
from support.keyed_jobs import SILOS, make_keyed
from support.refusals import refused

from staddle.errors import LocalError, RefusedError, UnwritableError
from staddle.files import documents as files
from staddle.security.blind import group_key as g
from staddle.security.blind import sealing
from staddle.security.blind.prekeys import Known
from staddle.security.identity import roster as rosters
from staddle.security.identity.keys import Role, create_keys, load_keys
from staddle.security.identity.pairwise_keys import public_key
from staddle.security.identity.signers import Signers
from staddle.silo.blind import group_keys
from staddle.silo.blind.group_keys import ENDED, ERASED, KEY, KNOWN, OWN, SECRET, GroupKeys
from staddle.silo.egress.session import UnreachableError
from staddle.silo.ingress.keyed_job import PrekeyFiles


@pytest.fixture(autouse=True)
def hurried(monkeypatch):
    monkeypatch.setattr(group_keys, "PAUSE_SECONDS", 0.001)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_keyed(tmp_path_factory.mktemp("keyed"))


@pytest.fixture(scope="module")
def job(made):
    return made.jobs["rows"]


class Post:
    """What the coordinator has, and what it makes of what it brings."""

    def __init__(self):
        self.given = {}  # silo → (context, contribution, pieces), all that it gave
        self.asked = 0
        self.bring = lambda relayed: relayed

    def gate(self, silo):
        return Door(self, silo)


class Door:
    def __init__(self, post, silo):
        self.post, self.silo = post, silo

    async def contribute(self, job, ctx, contribution, pieces):
        self.post.given.setdefault(self.silo, []).append((ctx, contribution, pieces))

    async def group_key(self, job):
        self.post.asked += 1
        relayed = ()
        if len(self.post.given) == len(job.silos):
            relayed = tuple(
                g.Relayed(given[-1][1], sealing.letters(given[-1][2])[self.silo])
                for other, given in sorted(self.post.given.items())
                if other != self.silo
            )
        return self.post.bring(relayed)


class Silos:
    """One GroupKeys a silo, each with a folder of its own."""

    def __init__(self, made, job, folder, roster=None):
        self.made, self.job, self.folder, self.post = made, job, folder, Post()
        self.keys = {silo: load_keys(made.files.folder / silo / "keys") for silo in SILOS}
        self.at = {silo: self.begun(silo, roster or made.roster) for silo in SILOS}
        for silo in SILOS:
            self.path(silo).mkdir(parents=True)

    def begun(self, silo, roster):
        return GroupKeys(roster, self.keys[silo], self.post.gate(silo), self.folder / silo)

    def path(self, silo, name=""):
        return self.folder / silo / self.job.name / name

    def contribute(self, *silos):
        for silo in silos or SILOS:
            asyncio.run(self.at[silo].contribute(self.job))

    def key(self, silo):
        return asyncio.run(self.at[silo].keys(self.job)).key


@pytest.fixture
def silos(made, job, tmp_path):
    return Silos(made, job, tmp_path)


@pytest.fixture
def other_roster(made, tmp_path):
    """The same members, one of whom has new keys."""
    entry = create_keys(tmp_path / "new", SILOS[-1], Role.SILO, "o")
    return rosters.add(made.roster, entry, replace=True)


def test_all_silos_have_one_key_and_it_is_asked_for_once(silos, made, job):
    silos.contribute()
    epoch = g.Epoch.of(made.roster, job.silos, job.digest)
    for ctx, contribution, pieces in (given for (given,) in silos.post.given.values()):
        assert ctx == epoch.context()
        g.check_contribution(epoch, contribution, pieces, Signers.of(made.roster, job.silos))
    found = {silos.key(silo) for silo in SILOS for _ in range(3)}
    assert len(found) == 1
    assert len(found.pop()) == 32
    assert silos.post.asked == len(SILOS)


def test_what_it_gave_is_0600_before_it_leaves_and_gone_once_the_key_is_there(silos, monkeypatch):
    seen = []
    upload = Door.contribute

    async def watched(gate, *args):
        seen.append(silos.path(gate.silo, SECRET).stat().st_mode & 0o777)
        await upload(gate, *args)

    monkeypatch.setattr(Door, "contribute", watched)
    silos.contribute()
    assert seen == [0o600] * len(SILOS)
    for silo in SILOS:
        key = silos.key(silo)
        assert {path.name for path in silos.path(silo).iterdir()} == {KEY, OWN, KNOWN}
        assert {path.stat().st_mode & 0o777 for path in silos.path(silo).iterdir()} == {0o600}
        assert silos.path(silo, KEY).read_bytes()[32:64] == key


def test_a_crash_while_the_key_is_made_leaves_the_key_or_the_secret(silos, monkeypatch):
    """The secret is the one other way to the key, so it goes only once the key is there."""
    there = []
    erase = GroupKeys._erase

    def watched(own, path):
        if path.name == SECRET:
            there.append((path.parent / KEY).exists())
        erase(own, path)

    monkeypatch.setattr(GroupKeys, "_erase", watched)
    silos.contribute()
    for silo in SILOS:
        silos.key(silo)
    assert there == [True] * len(SILOS)


def test_a_process_that_starts_anew_gives_the_very_same_and_has_the_same_key(silos, made):
    silos.contribute()
    silos.at = {silo: silos.begun(silo, made.roster) for silo in SILOS}
    silos.contribute()
    assert all(first == second for first, second in silos.post.given.values())
    before = [silos.key(silo) for silo in SILOS]
    silos.at = {silo: silos.begun(silo, made.roster) for silo in SILOS}
    asked = silos.post.asked
    assert [silos.key(silo) for silo in SILOS] == before
    assert silos.post.asked == asked


def dying_at(patch, step):
    """The process dies before the durable step of this number; the sync of a folder is two."""
    left = step

    def dying(real):
        def run(*args, **options):
            nonlocal left
            if left == 0:
                raise KeyboardInterrupt  # nothing of ours catches it
            left -= 1
            return real(*args, **options)

        return run

    for owner, name in (
        (os, "fsync"),
        (files.Path, "replace"),
        (files.Path, "unlink"),
        (files, "sync_directory"),
        (group_keys, "sync_directory"),
    ):
        patch.setattr(owner, name, dying(getattr(owner, name)))


@pytest.mark.parametrize("step", range(7))
def test_whatever_durable_step_it_dies_before_the_key_is_the_same(silos, made, monkeypatch, step):
    """Sync, rename and folder sync for the key, then removal of the secret and folder sync."""
    silos.contribute()
    expected = silos.key(SILOS[1])
    relayed = asyncio.run(silos.post.gate(SILOS[0]).group_key(silos.job))
    keys = silos.at[SILOS[0]]
    with monkeypatch.context() as patch:
        dying_at(patch, step)
        with pytest.raises(KeyboardInterrupt):
            keys._made(silos.job, keys._epoch(silos.job), relayed)
    assert silos.path(SILOS[0], SECRET).exists() or silos.path(SILOS[0], KEY).exists()
    silos.at[SILOS[0]] = silos.begun(SILOS[0], made.roster)
    assert silos.key(SILOS[0]) == expected
    assert not silos.path(SILOS[0], SECRET).exists()


def test_what_is_missing_is_waited_for_at_our_pace_and_not_for_ever(silos, monkeypatch):
    monkeypatch.setattr(group_keys, "MOST_ASKED", 5)
    slept, sleep = [], asyncio.sleep

    async def noted(seconds):
        slept.append(seconds)
        await sleep(0)

    monkeypatch.setattr(group_keys.asyncio, "sleep", noted)
    silos.contribute(*SILOS[:-1])
    why = "lacks some silos' shares of the key of job 'rows'"
    with pytest.raises(UnreachableError, match=why):
        silos.key(SILOS[0])
    assert silos.post.asked == 5
    assert slept.count(group_keys.PAUSE_SECONDS) == 5
    silos.contribute(SILOS[-1])
    assert silos.key(SILOS[0]) == silos.key(SILOS[2])


def test_it_is_there_after_some_answers_without_it(silos):
    silos.contribute()
    held = [(), (), ()]
    silos.post.bring = lambda relayed: held.pop() if held else relayed
    assert len(silos.key(SILOS[0])) == 32
    assert silos.post.asked == 4


def swapped(_, relayed):
    first, second, *rest = relayed
    return (replace(first, letter=second.letter), replace(second, letter=first.letter), *rest)


def of_another_epoch(silos, _):
    """All contributions anew, to the second epoch of the same job and roster."""
    epoch = g.Epoch.of(silos.made.roster, silos.job.silos, silos.job.digest, 1)
    seeds = [os.urandom(32) for _ in range(3)]
    made = {other: g.contribute(epoch, other, *seeds, silos.keys[other].sign) for other in SILOS}
    return tuple(
        g.Relayed(given, sealing.letters(pieces)[SILOS[0]])
        for other, (given, pieces) in made.items()
        if other != SILOS[0]
    )


def own_back(silos, relayed):
    own, pieces = silos.post.given[SILOS[0]][0][1], silos.post.given[SILOS[1]][0][2]
    return (*relayed, g.Relayed(own, sealing.letters(pieces)[SILOS[0]]))


HOSTILE = {
    "withholds one": (lambda _, relayed: relayed[1:], "KEYS", "lacks those of silo-b"),
    "doubles one": (lambda _, relayed: (relayed[0], *relayed), "KEYS", "doubles those of silo-b"),
    "brings our own": (own_back, "KEYS", "has some of silo-a"),
    "swaps letters": (swapped, "SHARES", "that is not what 'silo-b' signed"),
    "another epoch": (of_another_epoch, "KEYS", "passed on from 'silo-b'"),
}


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
def test_what_is_brought_wrongly_is_the_coordinators_fault_and_the_right_counts(silos, hostile):
    bring, code, text = hostile
    silos.contribute()
    silos.post.bring = lambda relayed: bring(silos, relayed)
    with pytest.raises(RefusedError, match=text) as caught:
        silos.key(SILOS[0])
    assert (caught.value.peer, caught.value.code) == ("coordinator", code)
    assert not silos.path(SILOS[0], KEY).exists()
    silos.post.bring = lambda relayed: relayed
    assert silos.key(SILOS[0]) == silos.key(SILOS[1])


def test_a_silo_that_seals_garbage_to_one_is_named(silos):
    """It signs the root of what it sends, so the coordinator cannot see it; who opens it does."""
    silos.contribute()
    ctx, given, pieces = silos.post.given["silo-b"][0]
    garbage = tuple(
        replace(piece, sealed=bytes(48)) if piece.recipient == "silo-a" else piece
        for piece in pieces
    )
    lying = replace(given.sealing, root=sealing.Tree(piece.leaf() for piece in garbage).root())
    epoch = g.Epoch.of(silos.made.roster, silos.job.silos, silos.job.digest)
    signature = silos.keys["silo-b"].sign(
        g.GROUP_CONTRIBUTION, g._signed_bytes(epoch, lying, given.prekey)
    )
    silos.post.given["silo-b"] = [(ctx, g.KeyContribution(lying, given.prekey, signature), garbage)]
    with pytest.raises(RefusedError, match="what it sealed for 'silo-a' does not open") as caught:
        silos.key("silo-a")
    assert (caught.value.peer, caught.value.code) == ("silo-b", "SHARES")
    assert len(silos.key("silo-c")) == 32


def test_when_a_silo_has_new_keys_it_gives_anew_until_there_is_a_key(silos, other_roster):
    silos.contribute()
    before = silos.path(SILOS[0], SECRET).read_bytes()
    later = silos.begun(SILOS[0], other_roster)
    later.check_new(silos.job)
    asyncio.run(later.contribute(silos.job))
    after = silos.path(SILOS[0], SECRET).read_bytes()
    assert not {before[at : at + 32] for at in (0, 32, 64, 96)} & {
        after[at : at + 32] for at in (0, 32, 64, 96)
    }
    with pytest.raises(LocalError, match="missing, or of silos with other keys"):
        silos.key(SILOS[0])


def test_a_key_of_other_members_is_none_and_its_job_is_not_begun_again(silos, other_roster):
    silos.contribute()
    silos.key(SILOS[0])
    later = silos.begun(SILOS[0], other_roster)
    with pytest.raises(LocalError, match="of another job than 'rows', or of silos"):
        asyncio.run(later.keys(silos.job))
    for at in (later, silos.at[SILOS[0]]):
        with pytest.raises(LocalError, match="a job of this name has its key already"):
            at.check_new(silos.job)
    silos.at[SILOS[1]].check_new(silos.job)


# The end of a job.
def test_each_has_the_prekeys_of_the_others_before_and_after_a_restart(silos, made):
    silos.contribute()
    for _ in range(2):
        found = {silo: asyncio.run(silos.at[silo].keys(silos.job)) for silo in SILOS}
        epoch = g.Epoch.of(made.roster, silos.job.silos, silos.job.digest)
        files = {silo: PrekeyFiles(silos.path(silo), epoch.context()) for silo in SILOS}
        first = {silo: files[silo].own()[0] for silo in SILOS}
        assert len(set(first.values())) == len(SILOS)
        for silo, own in found.items():
            assert own.others == {o: public_key(first[o]) for o in SILOS if o != silo}
            assert files[silo].known() == Known.first(own.others)
        silos.at = {silo: silos.begun(silo, made.roster) for silo in SILOS}


@pytest.mark.parametrize("early", [False, True], ids=["with its key", "before there is a key"])
def test_the_end_of_a_job_erases_its_keys_and_it_is_not_begun_again(
    silos, made, other_roster, early
):
    silos.contribute()
    if not early:
        silos.key(SILOS[0])
    silos.at[SILOS[0]].end(silos.job.name)
    assert {path.name: path.read_bytes() for path in silos.path(SILOS[0]).iterdir()} == {ENDED: b""}
    for at in (
        silos.at[SILOS[0]],
        silos.begun(SILOS[0], made.roster),
        silos.begun(SILOS[0], other_roster),
    ):
        assert at.ended(silos.job.name)
        at.end(silos.job.name)
        with pytest.raises(LocalError, match="erased, since job 'rows' has ended here"):
            asyncio.run(at.keys(silos.job))
        with pytest.raises(LocalError, match="a job of this name has ended here"):
            at.check_new(silos.job)
    assert not silos.at[SILOS[1]].ended(silos.job.name)


def test_a_job_without_keys_ends_without_a_file(silos):
    silos.at[SILOS[0]].end(silos.job.name)
    silos.at[SILOS[0]].end("unheard-of")
    assert list(silos.path(SILOS[0]).iterdir()) == []
    assert not silos.at[SILOS[0]].ended(silos.job.name)


@pytest.mark.parametrize("step", range(16))
def test_whatever_durable_step_it_dies_before_it_is_taken_up(silos, made, monkeypatch, step):
    """Sync, rename and folder sync for the mark, then removal and folder sync for each file."""
    silos.contribute()
    secret = silos.path(SILOS[0], SECRET).read_bytes()
    silos.key(SILOS[0])
    silos.path(SILOS[0], SECRET).write_bytes(secret)  # as if it had died before this one was erased
    with monkeypatch.context() as patch:
        dying_at(patch, step)
        with pytest.raises(KeyboardInterrupt):
            silos.at[SILOS[0]].end(silos.job.name)
    left = {path.name for path in silos.path(SILOS[0]).iterdir()} & {*ERASED}
    assert left == {*ERASED[max(0, step - 2) // 3 :]}
    again = silos.begun(SILOS[0], made.roster)
    assert again.ended(silos.job.name) == (step >= 2)
    again.end(silos.job.name)
    assert {
        path.name for path in silos.path(SILOS[0]).iterdir() if not path.name.endswith(".tmp")
    } == {ENDED}


def test_keys_that_the_disk_does_not_give_up_are_told(silos, monkeypatch):
    silos.contribute()
    monkeypatch.setattr(files.Path, "unlink", refusing)
    with pytest.raises(UnwritableError, match="secret: cannot remove it"):
        silos.at[SILOS[0]].end(silos.job.name)


def refusing(*_, **options):
    raise PermissionError(1, "not permitted")


@pytest.mark.parametrize("name", [SECRET, KEY])
def test_a_file_of_another_length_is_told_without_what_it_holds(silos, name):
    silos.contribute()
    if name == KEY:
        silos.key(SILOS[0])
    path = silos.path(SILOS[0], name)
    path.write_bytes(path.read_bytes()[:-1] + b"secret")
    with refused(f"{name}: is not as it was written: the disk changed it") as caught:
        silos.key(SILOS[0])
    assert "secret" not in str(caught.value).replace(SECRET, "")


def test_a_job_with_a_silo_that_the_roster_lacks_is_not_begun(silos, made):
    without = rosters.remove(made.roster, "silo-c")
    with pytest.raises(LocalError, match="the job has silo-c, of which roster version"):
        silos.begun(SILOS[0], without).check_new(silos.job)
