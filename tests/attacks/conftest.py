"""Attacks on whole federations start them as the tests of federations do.

Each attack says who does it.

``actor`` goes into the results that pytest writes with ``--junit-xml``, for benchmarks/attacks.py;
so do ``succeeds``, an attack that the threat model says is not withstood, and ``control``, what
does no attack on what ships.
"""

from pathlib import Path

import pytest
from federation.conftest import start

from staddle.bundle import measuring
from staddle.silo import agent, plain_rounds
from staddle.silo.blind import group_keys
from staddle.silo.blind import round as blind

__all__ = ["start"]

HERE = Path(__file__).parent


@pytest.fixture
def hurried(monkeypatch):
    """The agent of this process pauses for moments only, and resamples as few times as it may."""
    monkeypatch.setattr(measuring, "RESAMPLES", measuring.FEWEST_RESAMPLES)
    monkeypatch.setattr(agent, "PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(agent, "FIRST_WAIT_SECONDS", 0.02)
    monkeypatch.setattr(plain_rounds, "PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(blind, "PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(group_keys, "PAUSE_SECONDS", 0.02)


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents and (actor := item.get_closest_marker("actor")) is not None:
            item.user_properties.append(("actor", *actor.args))
            item.user_properties += [
                (mark, "yes") for mark in ("succeeds", "control") if item.get_closest_marker(mark)
            ]
