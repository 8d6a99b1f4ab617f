"""A coordinator whose own ledger is missing, or older than its database, does not begin a new one.

Real processes.
"""

import shutil

import pytest

from staddle.coordinator import check
from staddle.errors import AbortedError
from staddle.security.ledger import audit

SILOS = ("north", "east")


def problems(running):
    return [
        finding
        for finding in check.check(running.federation.coordinator_config).findings
        if not finding.ok
    ]


def test_a_coordinator_without_its_ledger_says_how_to_restore_it(start, document):
    running = start(*SILOS)
    coordinator = running.start_coordinator()
    coordinator.stop()
    state = running.kept
    ledger, older = state / "ledger", state / "older"
    shutil.copytree(ledger, older)
    job = running.job(document("job", SILOS))
    coordinator = running.start_coordinator()
    running.start_silos()
    assert coordinator.wait_for("job.ended", 120)["job"] == job.name
    running.stop()
    ledger.rename(state / "newest")

    with pytest.raises(AbortedError, match="the ledger is missing, and the database knows one of"):
        running.start_coordinator()
    assert not ledger.exists()
    (missing,) = problems(running)
    assert (missing.name, "is missing" in missing.text) == ("ledger", True)
    older.rename(ledger)
    with pytest.raises(
        AbortedError, match=r"is not the ledger that the database knows: .*restore the newest copy"
    ):
        running.start_coordinator()
    (cut,) = problems(running)
    assert "records were cut off" in cut.text
    assert "the database holds a signed checkpoint" in cut.text
    shutil.rmtree(ledger)
    (state / "newest").rename(ledger)
    assert problems(running) == []
    running.start_coordinator()
    assert audit.verify(ledger).ok
