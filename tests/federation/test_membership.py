"""The membership heat map as an operator and a silo get it: real processes of a federation."""

import safetensors.torch
import torch
from PIL import Image
from typer.testing import CliRunner

from staddle.algorithms.engines.simulation import simulate
from staddle.commands.main import app
from staddle.errors import LocalError

SILOS = ("north", "east", "south")


def show(*arguments):
    return CliRunner().invoke(app, ["membership", "show", *map(str, arguments)])


def cells(row):
    return [f"{value:.4f}" for value in row.tolist()]


def test_what_was_released_is_shown_and_nothing_else_is_there(start, document, tmp_path):
    """One job releases at its end, the other never."""
    running = start(*SILOS)
    for release in ("last", "never"):
        options = {"models": 2, "membership_lr": 2.0, "release_membership": release}
        running.job(document(f"ppfl-{release}", SILOS, "ppfl", options=options))
    running.start_coordinator()
    running.start_silos()
    running.completed()
    running.stop()
    last, never = running.jobs
    shards = running.shards()
    expected = simulate(last, shards)
    jobs = running.federation.state("coordinator") / "jobs"
    found = safetensors.torch.load_file(jobs / last.name / "result.safetensors")
    assert found.keys() == {"memberships"}
    assert torch.equal(found["memberships"], expected.coordinator["memberships"])
    drawn = tmp_path / "map.png"
    shown = show(jobs / last.name / "result.safetensors", "--png", drawn)
    assert shown.exit_code == 0, shown.output
    rows = [line.split() for line in shown.stdout.splitlines()]
    assert rows[0] == ["silo", "0", "1"]
    assert rows[1:4] == [[silo, *cells(found["memberships"][i])] for i, silo in enumerate(SILOS)]
    assert Image.open(drawn).format == "PNG"
    # The silent job: no membership anywhere at the coordinator, the command says why, and a silo
    # still has its own.
    for path in (jobs / never.name).rglob("*.safetensors"):
        assert not any(
            "membership" in name or name == "c" for name in safetensors.torch.load_file(path)
        ), path
    shown = show(jobs / never.name / "result.safetensors")
    assert (type(shown.exception), shown.output) == (LocalError, "")
    assert 'release_membership = "last"' in str(shown.exception)
    own = running.federation.state("east") / "jobs" / never.name / "model" / "model.safetensors"
    kept = simulate(never, shards).states["east"].parts["membership"]["c"]
    assert show(own).stdout.splitlines()[1].split() == ["east", *cells(kept)]
