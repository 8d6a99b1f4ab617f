"""Attacks on whole federations start them as the tests of federations do."""

from federation.conftest import fork_server, start

__all__ = ["fork_server", "start"]
