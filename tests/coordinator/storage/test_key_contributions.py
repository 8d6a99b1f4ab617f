from types import SimpleNamespace

import pytest

from staddle.coordinator.storage.database import StoredContribution
from staddle.coordinator.storage.key_contributions import KeyContributions

SILOS = ("a", "b", "c")


@pytest.mark.parametrize("silos", [(), ("a",), ("a", "b"), SILOS])
def test_contributions_are_passed_on_once_all_silos_gave_theirs(monkeypatch, silos):
    kept = {silo: StoredContribution("11" * 32, silo.encode()) for silo in silos}
    contributions = object.__new__(KeyContributions)
    contributions._database = SimpleNamespace(contributions=lambda _: kept)
    bodies = contributions.bodies(SimpleNamespace(name="j", silos=SILOS))
    assert bodies == ({silo: silo.encode() for silo in SILOS} if silos == SILOS else {})
