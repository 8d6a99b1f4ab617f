"""Attacks on whole federations start them as the tests of federations do; each attack says who does it.

``actor`` goes into the results that pytest writes with ``--junit-xml``, for benchmarks/attacks.py; so do ``succeeds``,
an attack that the threat model says is not withstood, and ``control``, what does no attack on what ships.
"""

from pathlib import Path

from federation.conftest import fork_server, start

__all__ = ["fork_server", "start"]

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents and (actor := item.get_closest_marker("actor")) is not None:
            item.user_properties.append(("actor", *actor.args))
            item.user_properties += [(mark, "yes") for mark in ("succeeds", "control") if item.get_closest_marker(mark)]
