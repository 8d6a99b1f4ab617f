import pytest
from support.recording_gate import World


@pytest.fixture
def world(made, tmp_path):
    found = World(made, tmp_path)
    yield found
    found.ledger.close()
