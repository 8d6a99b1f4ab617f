"""Who seizes a silo's disk while a job runs, in league with a coordinator that kept all that it
ever had.

With one prekey a job the disk opens every version; with one for each upload, those that are still
to come down alone.
"""

import pytest
from support.keyed_jobs import BLIND, SILOS, Coordinator, even, make_keyed

from staddle.errors import RefusedError
from staddle.proto.convert.mix import words_to_wire
from staddle.security.blind.padded_mix import open_seed
from staddle.security.blind.plan import JobPlan
from staddle.security.blind.sealing import letters
from staddle.security.secagg.spec import Terms
from staddle.silo.ingress.keyed_job import OWN
from staddle.silo.ingress.mix_rows import IncomingRows, expected_rows

pytestmark = pytest.mark.actor("disk thief and coordinator")

ME, OTHERS = SILOS[0], SILOS[1:]
TERMS = Terms(min_cohort=3, min_honest=2, colluders=1)


class Running:
    """A job whose coordinator hands down prekeys, unless it keeps them back.

    Round n mixes the versions n - 1.
    """

    def __init__(self, keyed, folder):
        self.folder, self.job = folder, keyed.jobs["long"]
        part = expected_rows(JobPlan(self.job).round(1))["extractor"].part
        self.made = Coordinator(keyed, self.job, part, folder)
        self.round = 0

    def deliver(self, silo, words=True):
        """Of versions of others, by silo and number, whatever is newest."""
        newest = sorted(each for each in self.made.newest.items() if each[0] != silo)
        told = [self.made.word(silo, *version) for version in newest] if words else []
        sharing = self.made.silos[silo]
        # no part of its own
        rows = IncomingRows(sharing, sharing.plan.round(self.round), TERMS, None)
        message, _ = self.made.row(silo, even(newest))
        rows.announced("coordinator", [message], words_to_wire(told))
        rows.admit()

    def turn(self, present=SILOS, words=True):
        """A round of these silos."""
        for silo in present if self.round else ():
            self.deliver(silo, words)
        self.made.give_all(self.round, present)
        self.round += 1

    def own(self, silo=ME):
        return self.made.silos[silo].prekeys.own()

    def files(self):
        """All that there is of the silo."""
        found = sorted((self.folder / f"of-{ME}").rglob("*"))
        return [path.read_bytes() for path in found if path.is_file()]

    def opens(self, disk, silo, number):
        """Whether anything on a disk, at any place, opens what was uploaded."""
        stored, sharing = self.made.stored[silo, number], self.made.silos[ME]
        letter = letters(stored.pieces)[ME]
        generation = letter.sealed.generation
        found = {data[at : at + 32] for data in disk for at in range(len(data) - 31)}
        found |= {bytes.fromhex(each.decode()) for data in disk for each in hexes(data)}
        for secret in found:
            own = {generation: secret}
            try:
                open_seed(self.made.line, stored.upload, letter, ME, own, sharing.signers)
            except RefusedError as error:
                assert error.code == "SHARES" or "low order" in error.why  # noqa: PT017
            else:
                return True
        return False


def hexes(data):
    pieces = {data[at : at + 64] for at in range(len(data) - 63)}
    return {piece for piece in pieces if set(piece) <= set(b"0123456789abcdef")}


@pytest.fixture(scope="module")
def keyed(tmp_path_factory):
    made = make_keyed(tmp_path_factory.mktemp("keyed"))
    made.job("long", "pfedsim", SILOS, {"rho": 0}, min_cohort=3, security=BLIND, rounds=8)
    return made


@pytest.fixture
def running(keyed, tmp_path):
    return Running(keyed, tmp_path)


def test_a_disk_that_is_seized_opens_what_is_still_to_come_and_nothing_earlier(running):
    running.turn()
    naive = running.files()  # what there would be for the whole job without later prekeys
    assert running.opens(naive, "silo-b", 0)
    for _ in range(3):
        running.turn()
    assert set(running.own()) == {2, 3, 4}
    disk = running.files()
    assert running.opens(naive, "silo-b", 0)
    assert not running.opens(disk, "silo-b", 0)
    assert not running.opens(disk, "silo-c", 1)
    assert running.opens(disk, "silo-b", 2)  # its row was the last to come down, and may come again
    assert running.opens(disk, "silo-b", 3)


@pytest.mark.control
def test_a_silo_that_was_away_opens_what_was_sealed_to_it_meanwhile(running):
    running.turn()
    for _ in range(4):
        running.turn(OTHERS)
    assert set(running.own()) == {0, 1}
    running.deliver(ME)
    assert set(running.own()) == {1}  # all others have had it in the meantime


@pytest.mark.succeeds
def test_who_gives_nothing_keeps_the_prekeys_of_the_others_alive(running):
    running.turn()
    for _ in range(3):
        running.turn(SILOS[:4])
    assert set(running.own()) == {0, 1, 2, 3, 4}
    running.turn()
    running.turn()
    assert 0 not in running.own()


@pytest.mark.actor("coordinator")
def test_prekeys_that_are_kept_back_cost_no_row_and_no_seed(running):
    for _ in range(4):
        running.turn(words=False)
    assert set(running.own()) == {0, 1, 2, 3, 4}
    assert {letter.sealed.generation for letter in sent(running, 3)} == {0}
    running.turn()
    running.turn()
    assert {letter.sealed.generation for letter in sent(running, 5)} == {5}


def sent(running, number):
    return [letters(running.made.stored[silo, number].pieces)[ME] for silo in OTHERS]


@pytest.mark.actor("coordinator")
def test_an_older_prekey_that_is_handed_down_again_is_not_sealed_to(running):
    for _ in range(3):
        running.turn()
    mine = running.made.silos[ME]
    before = mine.prekeys.known()
    newest = [(other, 2) for other in OTHERS]
    rows = IncomingRows(mine, mine.plan.round(3), TERMS, None)
    row, _ = running.made.row(ME, even(newest))
    rows.announced("coordinator", [row], words_to_wire(old(running)))
    rows.admit()
    assert mine.prekeys.known().newest == before.newest
    assert {each.generation for each in before.newest.values()} == {2}


def old(running):
    return [running.made.word(ME, other, 0) for other in OTHERS]


@pytest.mark.actor("coordinator")
def test_a_row_that_is_sealed_to_an_erased_prekey_is_the_coordinators_fault(running):
    """As if this silo's memory of its rows, which refuses versions that old, had been put back."""
    running.turn()
    memory = running.folder / f"of-{ME}" / "mix-extractor.rows.json"
    begun = memory.read_bytes()
    for _ in range(2):
        running.turn()
    running.deliver(ME)
    memory.write_bytes(begun)
    sharing, disk = running.made.silos[ME], (running.folder / f"of-{ME}" / OWN).read_bytes()
    rows = IncomingRows(sharing, sharing.plan.round(1), TERMS, None)
    row, _ = running.made.row(ME, even([(other, 0) for other in OTHERS]))
    rows.announced("coordinator", [row], [])
    with pytest.raises(RefusedError, match="sealed to prekey 0, which is erased") as caught:
        rows.admit()
    assert (caught.value.peer, caught.value.code) == ("coordinator", "SHARES")
    assert (running.folder / f"of-{ME}" / OWN).read_bytes() == disk


HOSTILE = {
    "unsigned": lambda messages: setattr(messages[0].prekey, "signature", bytes(64)),
    "another silo's": lambda messages: messages[0].prekey.CopyFrom(messages[1].prekey),
    "skipped": lambda messages: setattr(messages[0].prekey, "generation", 9),
    "doubled": lambda messages: messages.insert(0, messages[0]),
    "of no part": lambda messages: setattr(messages[0], "part", "classifier"),
    "another generation of ours": lambda told: setattr(told[0].letter.sealed, "generation", 1),
}


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.actor("coordinator")
def test_what_no_silo_signed_is_refused_and_changes_nothing(running, hostile):
    running.turn()
    running.round = 1
    messages = words_to_wire([running.made.word(ME, other, 0) for other in OTHERS])
    hostile(messages)
    before = running.files()
    sharing = running.made.silos[ME]
    rows = IncomingRows(sharing, sharing.plan.round(1), TERMS, None)
    row, _ = running.made.row(ME, even([(other, 0) for other in OTHERS]))

    def take():
        rows.announced("coordinator", [row], messages)
        rows.admit()

    with pytest.raises(RefusedError) as caught:
        take()
    assert caught.value.peer == "coordinator"
    assert running.files() == before
    running.deliver(ME)
