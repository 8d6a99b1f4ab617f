"""Which roster counts for a member, and which other one may take its place."""

import shutil
from types import SimpleNamespace

import pytest
from support.refusals import refused

from staddle.errors import LocalError, UnwritableError
from staddle.security.identity import roster as rosters
from staddle.security.identity.keys import Role, create_keys, load_keys, renew_keys
from staddle.security.identity.roster import Pins
from staddle.security.identity.roster_in_use import RosterInUse


@pytest.fixture
def world(tmp_path):
    """Three versions of a signed roster, and a silo of them with its two places for files."""
    roles = {"f": Role.FOUNDER, "c": Role.COORDINATOR, "s": Role.SILO, "t": Role.SILO}
    entries = {name: create_keys(tmp_path / name, name, role, name) for name, role in roles.items()}
    founder = load_keys(tmp_path / "f")
    first = rosters.new("lung", [entries["f"]], 1)
    for name in "cs":
        first = rosters.add(first, entries[name])
    second = rosters.add(first, entries["t"])
    third = rosters.remove(second, "t")
    signed = [rosters.sign(each, founder) for each in (first, second, third)]
    pins = Pins(federation="lung", threshold=1, founders=(founder.entry.protocol_fingerprint,))
    given, kept = tmp_path / "given.json", tmp_path / "state" / "roster.json"
    kept.parent.mkdir()
    rosters.save(signed[0], given)
    return SimpleNamespace(
        signed=signed,
        founder=founder,
        given=given,
        kept=kept,
        keys=tmp_path / "s",
        opened=lambda: RosterInUse(given, kept, pins, tmp_path / "s"),
    )


def test_the_newer_of_two_files_counts(world):
    first, second, third = world.signed
    assert world.opened().present == first
    rosters.save(second, world.kept)
    assert world.opened().present == second
    rosters.save(third, world.given)
    assert world.opened().present == third
    # of one version, what was in use
    other = rosters.sign(rosters.add(first, third["c"], replace=True), world.founder)
    rosters.save(other, world.given)
    assert world.opened().present == second


def test_a_spoilt_newer_file_brings_no_older_roster_back(world):
    """Or whoever was removed would be let in again."""
    unsigned = world.signed[1].model_copy(update={"signatures": {}})
    for data in (b"{", rosters.encoded(unsigned) + b"\n"):
        world.kept.write_bytes(data)
        with pytest.raises(LocalError, match=f"^{world.kept}: "):
            world.opened()
    world.kept.unlink()
    world.kept.mkdir()
    with refused(f"{world.kept}: cannot read it"):
        world.opened()


def test_what_may_not_follow_is_neither_kept_nor_present(world, tmp_path):
    first, second, third = world.signed
    rosters.save(second, world.given)
    in_use = world.opened()
    mine = third["s"]
    forger = create_keys(tmp_path / "forger", "f", Role.FOUNDER, "f")
    forged = rosters.sign(rosters.add(third, forger, replace=True), load_keys(tmp_path / "forger"))
    swapped = create_keys(tmp_path / "swapped", "s", Role.SILO, "s")
    for roster, why in (
        (first, "is not newer than version"),
        (third.model_copy(update={"signatures": {}}), "needs signatures by 1 pinned"),
        (forged, "a pin does not fit"),
        (
            rosters.sign(rosters.remove(third, "s"), world.founder),
            "has no 's' with the keys in use",
        ),
        (
            rosters.sign(rosters.add(third, swapped, replace=True), world.founder),
            "has no 's' with the keys in use",
        ),
    ):
        with refused(why):
            in_use.offered(roster)
    assert (in_use.present, world.kept.exists()) == (second, False)
    assert not in_use.offered(second)
    assert not in_use.take_over(first)  # of a coordinator that missed a change
    assert in_use.take_over(third)
    assert (rosters.load(world.kept), in_use.keys.entry) == (third, mine)
    # The file that the configuration names may lie where nobody can write.
    assert rosters.load(world.given) == second


def test_a_roster_that_the_disk_does_not_take_is_not_in_use(world):
    in_use = world.opened()
    world.kept.parent.rmdir()
    with pytest.raises(UnwritableError):
        in_use.keep(world.signed[1])
    assert in_use.present == world.signed[0]


def test_what_lies_there_is_not_written_again(world):
    """A daemon starts on a full disk, too."""
    world.opened().keep(world.signed[1])
    before = world.kept.stat().st_ino
    in_use = world.opened()
    in_use.keep(in_use.present)
    assert world.kept.stat().st_ino == before


def test_keys_are_read_again_for_a_new_certificate_alone(world):
    in_use = world.opened()
    assert in_use.keys.folder == world.keys
    renewed = renew_keys(world.keys)
    following = rosters.sign(rosters.renew(world.signed[2], {"s": renewed.entry}), world.founder)
    assert in_use.offered(world.signed[1])
    assert in_use.take_over(following)
    assert in_use.keys.folder == renewed.folder
    assert [each.entry for each in in_use.held(following)][-1] == renewed.entry
    # from here on no file is needed
    shutil.rmtree(world.keys)
    latest = rosters.sign(rosters.renew(following, {}), world.founder)
    assert in_use.take_over(latest)
    assert in_use.keys.tls_key == renewed.tls_key


def test_a_look_finds_what_others_wrote(world):
    in_use = world.opened()
    assert not in_use.look()
    rosters.save(world.signed[1], world.kept)
    assert in_use.look()
    assert in_use.present == world.signed[1]
    # the same in the other place is no change
    rosters.save(world.signed[1], world.given)
    assert not in_use.look()
    world.kept.unlink()
    rosters.save(world.signed[0], world.given)
    with refused("is not newer than version"):
        in_use.look()
