"""Real processes on a port that is taken, of which gRPC's core writes a line of its own."""

import json
import os
import socket
import subprocess
import sys

import pytest

from staddle.commands.federation import local_federation


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Start a coordinator that cannot listen; what it wrote on standard error."""
    made = local_federation.make(tmp_path_factory.mktemp("lines") / "federation", ["a", "b"])

    def call(**variables):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            local_federation.write_coordinator(made, [], {}, listen=address)
            kept = {key: value for key, value in os.environ.items() if not key.startswith("GRPC_")}
            command = [sys.executable, "-P", "-m", "staddle.coordinator", "--config"]
            ended = subprocess.run(
                [*command, str(made.coordinator_config)],
                env=kept | variables,
                capture_output=True,
                text=True,
                check=False,
            )
        assert ended.returncode == 1
        *events, error = ended.stderr.splitlines()
        assert error.startswith(f"staddle: cannot listen on {address}")
        return events

    return call


def test_a_daemons_log_has_its_own_lines_alone(run):
    assert all(json.loads(line)["event"] for line in run())


def test_grpcs_lines_are_there_for_who_asks(run):
    """At the level that has the fewest."""
    assert not all(line.startswith('{"') for line in run(GRPC_VERBOSITY="ERROR"))
