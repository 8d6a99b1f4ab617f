"""What keeps a silo from being moved out; each is said before its agent is stopped."""

from types import SimpleNamespace

import pytest
from support.refusals import refused

from staddle.commands.poc.export import _check, _hand_over
from staddle.commands.poc.workspace import EXPORTED
from staddle.errors import LocalError


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


def test_a_silo_whose_new_place_is_taken_at_the_last_instant_stays(tmp_path):
    config, made, out = (tmp_path / name for name in ("silo.toml", "made", "out"))
    config.write_text("version = 1\n")
    made.mkdir()
    (out / "other").mkdir(parents=True)
    with pytest.raises(LocalError, match=r"out: cannot make it: .*; the silo is still here"):
        _hand_over(config, made, out)
    assert config.read_text() == "version = 1\n"
    assert not (tmp_path / EXPORTED).exists()
    (out / "other").rmdir()
    out.rmdir()
    _hand_over(config, made, out)
    assert out.is_dir()
    assert not config.exists()
