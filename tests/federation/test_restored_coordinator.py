"""A coordinator that was restored from a backup gets no second sum of a round from its silos.

Real processes.
"""

from contextlib import closing

import pytest
from federation.keyed import SECURITY, TIMING

from staddle.coordinator import config as configs
from staddle.coordinator import server
from staddle.coordinator.storage.backup import make, restore
from staddle.coordinator.storage.database import Database

SILOS = ("north", "east", "south", "west")
# Once the masked words of all are here, and before the first silo's signature over the survivors.
BEFORE_SURVIVAL = "once:before COMMIT of blind sum 0: given survival"


def signed(running, silo):
    """Rounds and survivors that a silo signed, in its ledger's order."""
    records = running.records(silo, "secagg.signed")
    return [(record["round"], tuple(record["survivors"])) for record in records]


def revealed(running, silo):
    records = running.records(silo, "egress.protocol")
    return [record["ctx"] for record in records if record["kind"] == "reveal"]


def without_north(path):
    """What a hostile operator makes of a restored database: north's words never came."""
    with closing(Database(path)) as database, database.transaction():
        gone = "DELETE FROM secure WHERE silo = 'north' OR (kind = 'spooled' AND"
        found = database._connection.execute(f"{gone} CAST(body AS TEXT) LIKE '%north%')")
        assert found.rowcount > 1


def backed_up(running, document, folder):
    """A blind job, whose coordinator died before the survivors of its first round were signed."""
    fields = {"rounds": 2, "min_cohort": 3, "round_timeout": 30, "security": SECURITY}
    running.job(document("blind", SILOS, **fields))
    running.start_all(TIMING, {"coordinator": BEFORE_SURVIVAL})
    dead(running)
    config = configs.load(running.federation.coordinator_config)
    owner = server.owner(config)
    make(folder, owner)
    return owner


def dead(running):
    running.daemons["coordinator"].wait_for("killed", 120)
    running.daemons["coordinator"].stop()


def restored(running, owner, backup, hostile):
    owner.directory.rename(backup.with_name("lost"))
    restore(backup, owner)
    if hostile:
        without_north(owner.directory / "coordinator.sqlite")
    return running.start_daemon("coordinator").wait_for("job.ended", 120)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("hostile", [False, True], ids=["as it was", "without one silo's words"])
def test_no_silo_helps_to_open_again_a_round_that_is_over(start, document, tmp_path, hostile):
    running, backup = start(*SILOS), tmp_path / "backup"
    owner = backed_up(running, document, backup)
    running.start_daemon("coordinator")
    running.completed()
    running.finished("blind")
    running.daemons["coordinator"].stop()
    before = {silo: (signed(running, silo), revealed(running, silo)) for silo in SILOS}
    assert all(rounds and shown for rounds, shown in before.values())
    ended = restored(running, owner, backup, hostile)
    assert ended["outcome"] == "failed"
    assert all(f"{silo}: DELIVERY" in ended["reason"] for silo in SILOS)
    assert before == {silo: (signed(running, silo), revealed(running, silo)) for silo in SILOS}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("hostile", [False, True], ids=["as it was", "without one silo's words"])
def test_no_silo_signs_other_survivors_of_a_round_that_is_open(start, document, tmp_path, hostile):
    """The coordinator has the shares that open the sum when its machine is lost."""
    running, backup = start(*SILOS), tmp_path / "backup"
    owner = backed_up(running, document, backup)
    running.start_daemon("coordinator", "once:before COMMIT of blind sum 0: opened")
    dead(running)
    ended = restored(running, owner, backup, hostile)
    assert (ended["outcome"] == "completed") or hostile, ended
    for silo in SILOS:
        rounds = signed(running, silo)
        assert {survivors for round_, survivors in rounds if round_ == 0} == {tuple(sorted(SILOS))}
    assert {
        record["blame"] for silo in SILOS for record in running.records(silo, "secagg.end")
    } <= {
        "",
        "coordinator",
    }
