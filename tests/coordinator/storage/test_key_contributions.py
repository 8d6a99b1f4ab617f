from types import SimpleNamespace

import pytest

from staddle.coordinator.storage import key_contributions
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


def test_what_all_silos_ask_for_is_read_once(monkeypatch):
    read = []

    def loaded(silo, body):
        read.append((silo, body))
        return SimpleNamespace(contribution=silo, pieces=())

    class Letters:
        def __init__(self, pieces):
            assert pieces == ()

        def to(self, recipient):
            return f"to {recipient}"

    monkeypatch.setattr(key_contributions, "_loaded", loaded)
    monkeypatch.setattr(key_contributions, "Letters", Letters)
    bodies = {silo: b"read once " + silo.encode() for silo in SILOS}
    for silo in SILOS:
        found = key_contributions.relayed(bodies, silo)
        assert [each.contribution for each in found] == [each for each in SILOS if each != silo]
        assert {each.letter for each in found} == {f"to {silo}"}
    assert read == list(bodies.items())
    key_contributions._opened.cache_clear()
