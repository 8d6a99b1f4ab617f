import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from typer.testing import CliRunner

from staddle.algorithms.course import SiloState
from staddle.algorithms.methods.ppfl import heatmap
from staddle.algorithms.training.silo_round import state_to_bytes
from staddle.commands.main import app
from staddle.coordinator.storage.store import JobStore
from staddle.errors import LocalError

RELEASED = torch.tensor([[0.25, 0.75, 0.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
SILOS = ("north", "east", "far-south")


def show(*arguments):
    result = CliRunner().invoke(app, ["membership", "show", *map(str, arguments)])
    assert result.exit_code == 0, (result.output, result.exception)
    return [line.split() for line in result.output.splitlines()]


def fails(*arguments):
    result = CliRunner().invoke(app, ["membership", "show", *map(str, arguments)])
    assert isinstance(result.exception, LocalError), (result.output, result.exception)
    return str(result.exception)


def result(folder, state=RELEASED, silos=SILOS):
    JobStore(folder, lambda _: (), {}).keep_result(
        {"memberships": state} if isinstance(state, torch.Tensor) else state, silos
    )
    return folder / "result.safetensors"


def own(folder, *values, part="membership"):
    folder.mkdir(parents=True)
    state = SiloState(
        {"canonical": {"0.weight": torch.ones(2, 3)}, part: {"c": torch.tensor(values)}}
    )
    (folder / "model.safetensors").write_bytes(state_to_bytes(state))
    return folder / "model.safetensors"


def test_the_coordinators_file_by_silo(tmp_path):
    """The coordinator's file is shown silo by silo; one that released nothing is blank."""
    shown = show(result(tmp_path))
    assert shown == [
        ["silo", "0", "1", "2"],
        ["north", "0.2500", "0.7500", "0.0000"],
        ["east", "-", "-", "-"],
        ["far-south", "1.0000", "0.0000", "0.0000"],
    ]


def test_a_silos_own_model_is_one_row_and_other_files_are_named(tmp_path):
    path = own(tmp_path / "hospital-a" / "state" / "jobs" / "first", 0.5, 0.5)
    assert show(path)[1] == ["hospital-a", "0.5000", "0.5000"]
    assert show(path, "--label", "ours")[1] == ["ours", "0.5000", "0.5000"]
    assert show(own(tmp_path / "elsewhere", 0.5, 0.5))[1][0] == "model"
    (tmp_path / "text").write_text("silo,0,1\n")
    for path in (tmp_path / "text", tmp_path):
        assert f"{path}: not a safetensors file" in fails(path)
    assert "holds no membership" in fails(own(tmp_path / "fedper", 0.5, part="extractor"))
    safetensors.torch.save_file({"memberships": RELEASED}, tmp_path / "bare")  # rows of nobody
    assert "holds no membership" in fails(tmp_path / "bare")


def test_files_are_put_one_under_the_other(tmp_path):
    silo = own(tmp_path / "a" / "state" / "jobs" / "j", 0.5, 0.25, 0.25)
    other = own(tmp_path / "b" / "state" / "jobs" / "j", 0.1, 0.2, 0.7)
    both = result(tmp_path / "c")
    assert [row[0] for row in show(silo, both, other)] == ["silo", "a", *SILOS, "b"]
    assert [row[0] for row in show(silo, both, other, "--label", "x", "--label", "y")] == [
        "silo", "x", *SILOS, "y",
    ]  # fmt: skip
    assert "--label is given 1 times for 2 silos' own files" in fails(
        silo, both, other, "--label", "x"
    )
    narrow = own(tmp_path / "d", 0.5, 0.5)
    assert "differ in the number of canonical models" in fails(silo, narrow)


def test_the_picture_has_the_same_rows(tmp_path):
    path, drawn = result(tmp_path), tmp_path / "map.png"
    show(path, "--png", drawn)
    pixels = np.asarray(Image.open(drawn))
    side = heatmap.CELL
    assert pixels.shape[0] == 3 * side
    cells = pixels[:, -3 * side :]
    corner = lambda row, column: cells[row * side + 1, column * side + 1].tolist()
    assert (corner(2, 0), corner(2, 1)) == (heatmap.DARK.tolist(), [255, 255, 255])
    assert [corner(1, column) for column in range(3)] == [heatmap.GREY.tolist()] * 3
    assert drawn.read_bytes() == heatmap.picture(RELEASED, SILOS)
    assert drawn.stat().st_mode & 0o077 == 0


def test_where_nothing_was_released_the_error_names_the_option(tmp_path):
    missing = fails(tmp_path / "jobs" / "first" / "result.safetensors")
    assert 'release_membership = "last"' in missing
    assert "first/result.safetensors" in missing
    for state in (torch.zeros(3, 2), {"phi": torch.ones(3, 3)}):
        why = fails(result(tmp_path, state))
        assert "no membership was released" in why
        assert 'release_membership = "last"' in why


@pytest.mark.parametrize(
    "silos",
    ['["north"', '{"a": 1}', '["a", 1, "c"]', '["a", "\\u001b[2J", "c"]', '["a", "b"]', "[]"],
)
def test_a_list_of_silos_that_no_coordinator_writes_is_refused(tmp_path, silos):
    safetensors.torch.save_file({"memberships": RELEASED}, tmp_path / "x", {"silos": silos})
    assert str(tmp_path / "x") in fails(tmp_path / "x")


def test_numbers_that_are_no_memberships_are_refused_with_their_silo(tmp_path):
    for wrong in (torch.nan, 1.5, -0.25, 0.5):
        rows = RELEASED.clone()
        rows[2, 0] = wrong
        assert "far-south" in fails(result(tmp_path, rows))
    assert "not memberships" in fails(own(tmp_path / "s", 0.5, 0.6))
    assert "not memberships" in fails(own(tmp_path / "t", 1.5, -0.5))
    assert "takes memberships [N, K]" in fails(result(tmp_path, torch.ones(3)))
