"""Who can write to a silo's disk, and lacks its log key, adds records to the ledger or takes some
out of it.

The measure is how many of the forged records the agent signs as its own at its next start.
"""

import json

import pytest
from support.hostile_coordinator import SILO, offer, play
from support.hostile_sum_coordinator import Blind, make_world
from support.ledgers import first, forge, stored

from staddle.errors import LocalError
from staddle.security.log.head import stored as stored_note
from staddle.security.log.tree_head import TreeHead

pytestmark = [pytest.mark.actor("disk thief"), pytest.mark.usefixtures("hurried")]

FORGED = {"type": "start", "silo": SILO, "software": "forged"}
FORGED |= {"roster": "ab" * 32, "policy": "ab" * 32}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """One blind job, which is offered and then withdrawn."""
    security = {"first": {"secure_aggregation": "required", "weight_most": 2000, "tags": False}}
    return make_world(tmp_path_factory.mktemp("attacked"), security)


def signed_forgeries(folder):
    """Forged records below the checkpoint."""
    size = TreeHead.parse(stored_note(folder / "ledger").text).size
    return sum(record.get("software") == "forged" for record in stored(folder / "ledger")[:size])


def starts_again(world, folder):
    """What the agent says; empty if it runs."""
    try:
        play(Blind(world, [], {}), folder)
    except LocalError as error:
        return str(error)
    return ""


def test_a_record_that_somebody_appended_is_not_signed(world, tmp_path):
    """Before: 1 of 1 signed."""
    play(Blind(world, [offer(world, "first")], {}), tmp_path)
    forge(tmp_path / "ledger", FORGED)
    why = starts_again(world, tmp_path)
    found = signed_forgeries(tmp_path)
    assert found == 0, f"{found} of 1 forged records were signed"
    assert "was not written with this log key" in why


def test_a_record_that_somebody_took_out_stays_missed(world, tmp_path):
    """With an older checkpoint put back, all behind it is written anew without the job.

    Before: 1 of 1 signed.
    """
    play(Blind(world, [], {}), tmp_path)
    older = (tmp_path / "ledger" / "checkpoint").read_bytes()
    count = len(stored(tmp_path / "ledger"))
    play(Blind(world, [offer(world, "first")], {}), tmp_path)
    lines = first(tmp_path / "ledger").read_bytes().splitlines()
    assert any(json.loads(line)["type"] == "job.accept" for line in lines[count:])
    (tmp_path / "ledger" / "checkpoint").write_bytes(older)
    forge(tmp_path / "ledger", FORGED, cut=len(lines) - count)
    why = starts_again(world, tmp_path)
    found = signed_forgeries(tmp_path)
    assert found == 0, f"{found} of 1 forged records were signed"
    assert f"seq {count}, behind its checkpoint, was not written with this log key" in why


@pytest.mark.control
def test_what_a_kill_left_unsigned_is_taken_up(world, tmp_path):
    play(Blind(world, [], {}), tmp_path)
    older = (tmp_path / "ledger" / "checkpoint").read_bytes()
    play(Blind(world, [offer(world, "first")], {}), tmp_path)
    (tmp_path / "ledger" / "checkpoint").write_bytes(older)
    assert starts_again(world, tmp_path) == ""
