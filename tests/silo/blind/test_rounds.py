"""The blind round that a silo is in: what it knows of uploads whose connection broke."""

from types import SimpleNamespace

from staddle.silo.blind.rounds import BlindRounds
from staddle.silo.egress.outcomes import SettledUpload

ONE, TWO, LOST = (bytes([n]) * 32 for n in (1, 2, 3))


def settled(round_, ctx, job="j1", status="sent"):
    return SettledUpload(job, round_, status, "", 7, ctx.hex())


def test_uploads_are_known_for_one_round():
    """Uploads on the disk are known once their round is entered, and forgotten with the job's
    next.
    """
    keys = SimpleNamespace(entry=SimpleNamespace(id="silo-a"))
    rounds = BlindRounds(None, None, None, keys, None)
    for upload in (
        settled(0, ONE),
        settled(1, TWO),
        settled(1, LOST, status="unknown"),
        settled(1, LOST, job="j2"),
    ):
        rounds.settled(upload)
    found = rounds._accepted_in("j1", 1)
    assert found == {TWO}
    found.add(ONE)
    assert rounds._accepted_in("j1", 1) is found  # entered again after a lost connection
    assert rounds._accepted_in("j1", 2) == set()
    assert rounds._accepted == {("j1", 2): set(), ("j2", 1): {LOST}}
    assert rounds._accepted_in("j1", 1) == set()
