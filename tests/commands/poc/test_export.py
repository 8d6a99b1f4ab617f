"""What keeps a silo from being moved out; each is said before its agent is stopped."""

from types import SimpleNamespace

import pytest
from support.refusals import refused

from staddle.commands.poc.export import _check


@pytest.fixture
def workspace(tmp_path):
    federation = SimpleNamespace(silos=("silo-1", "silo-2"))
    return SimpleNamespace(folder=tmp_path, federation=federation, here=["silo-1"])


def test_a_silo_moves_to_a_new_name_in_a_folder_that_is_there(workspace, tmp_path):
    _check(workspace, "silo-1", tmp_path / "out")
    with refused("'silo-3' is no silo of .*; its silos: silo-1, silo-2"):
        _check(workspace, "silo-3", tmp_path / "out")
    with refused("silo-2 was exported before; only its new folder can start it"):
        _check(workspace, "silo-2", tmp_path / "out")
    with refused("exists already; choose another name"):
        _check(workspace, "silo-1", tmp_path)
    with refused(f"there is no folder {tmp_path / 'no'}; make it first"):
        _check(workspace, "silo-1", tmp_path / "no" / "out")
