"""A silo's prekeys on its disk: what is durable when, and what is gone."""

import os

import pytest
from support.blind_mixes import line
from support.refusals import refused
from support.secure_sums import names, signer, signers

from staddle.errors import LocalError
from staddle.files import checked_file, documents
from staddle.security.blind.mix_context import Version
from staddle.security.blind.prekeys import Known
from staddle.security.identity.pairwise_keys import public_key
from staddle.silo.ingress.keyed_job import KNOWN, OWN, PrekeyFiles

CONTEXT = bytes(range(32))
FIRST = b"1".ljust(32)
SILOS = names(3)
ROOT = b"r" * 32


def seed(generation):
    return f"seed {generation}".encode().ljust(32)


def version(number):
    return Version(silo=SILOS[0], round=number, attempt=0, number=number)


def publish(kept, generation):
    return kept.publish(line(), version(generation), ROOT, seed(generation), signer(SILOS[0]))


@pytest.fixture
def kept(tmp_path):
    made = PrekeyFiles(tmp_path, CONTEXT)
    made.begin(FIRST, Known.first({silo: public_key(seed(0)) for silo in SILOS[1:]}))
    return made


def test_a_generation_is_durable_before_it_is_given_and_what_is_erased_is_in_no_file(
    kept, tmp_path
):
    first = publish(kept, 1)
    first.check(line(), version(1), ROOT, signers(SILOS))
    assert (first.generation, first.key) == (1, public_key(seed(1)))
    assert publish(kept, 2).generation == 2
    assert (tmp_path / OWN).stat().st_mode & 0o777 == 0o600
    assert kept.own() == {0: FIRST, 1: seed(1), 2: seed(2)}
    kept.erase_before(0)
    assert set(kept.own()) == {0, 1, 2}
    kept.erase_before(2)
    assert PrekeyFiles(tmp_path, CONTEXT).own() == {2: seed(2)}
    data = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert FIRST not in data
    assert seed(1) not in data
    assert publish(kept, 3).generation == 3
    kept.erase_before(9)  # the newest is never erased: others may seal to it
    assert kept.own() == {3: seed(3)}


def dying_at(patch, step):
    """The process dies before the durable step of this number."""
    left = step

    def dying(real):
        def run(*args, **options):
            nonlocal left
            if left == 0:
                raise KeyboardInterrupt
            left -= 1
            return real(*args, **options)

        return run

    for owner, name in ((os, "fsync"), (documents.Path, "replace"), (documents, "sync_directory")):
        patch.setattr(owner, name, dying(getattr(owner, name)))


@pytest.mark.parametrize("step", range(4))
def test_whatever_step_it_dies_before_no_generation_is_lost(kept, tmp_path, monkeypatch, step):
    """Sync, rename, folder sync: what died before the last was not given and does not count."""
    given = publish(kept, 1)
    with monkeypatch.context() as patch:
        dying_at(patch, step)
        with pytest.raises(KeyboardInterrupt):
            publish(kept, 2)
    again = PrekeyFiles(tmp_path, CONTEXT)
    assert set(again.own()) == ({0, 1} if step < 2 else {0, 1, 2})
    later = again.publish(line(), version(2), ROOT, seed(9), signer(SILOS[0]))
    assert later.generation > given.generation
    assert again.own()[later.generation] == seed(9)
    with monkeypatch.context() as patch:
        dying_at(patch, step)
        with pytest.raises(KeyboardInterrupt):
            again.erase_before(later.generation)
    assert later.generation in again.own()
    assert (0 in again.own()) == (step < 2)
    again.erase_before(later.generation)
    assert set(again.own()) == {later.generation}


def test_known_prekeys_that_are_gone_are_not_begun_anew(kept, tmp_path):
    (tmp_path / KNOWN).unlink()
    with pytest.raises(LocalError, match=r"prekeys\.json: gone"):
        kept.known()


@pytest.mark.parametrize("cut", [b"secret", b""])
def test_a_file_of_another_length_or_job_is_told_without_what_it_holds(kept, tmp_path, cut):
    path = tmp_path / OWN
    path.write_bytes(path.read_bytes()[:-1] + cut)
    with refused(r"group\.prekeys: is not as it was written: the disk changed it") as caught:
        kept.own()
    assert "secret" not in str(caught.value)
    checked_file.write_bytes(path, CONTEXT)
    with pytest.raises(LocalError, match=r"group\.prekeys: 32 bytes, not 32 and some times 40"):
        kept.own()
    checked_file.write_bytes(path, bytes(72))
    with pytest.raises(LocalError, match="of another job, or of silos with other keys"):
        kept.own()


def test_nothing_is_written_where_nothing_is_erased(kept, monkeypatch):
    publish(kept, 1)
    monkeypatch.setattr(checked_file, "write_atomic", lambda *_: pytest.fail("wrote"))
    kept.erase_before(0)
