"""torchvision is imported late, and beside a torch that it was not built for."""

import importlib
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.refusals import refused

from staddle.algorithms.models import torchvision_import
from staddle.algorithms.models.torchvision_import import OPERATORS, declare_operators, torchvision

LATE = """
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from staddle.algorithms.engines import simulation
from staddle.algorithms.models import build as models, registry as networks, torchvision_import
assert not [name for name in sys.modules if name.startswith("torchvision")]
child = os.fork()
if not child:
    status = 1
    try:
        import torchvision
        status = 0
    finally:
        os._exit(status)
fails = os.waitpid(child, 0)[1] != 0
make = lambda _: models.sketch(models.ModelOptions(name="mobilenet-v2", classes=2, norm="group"))
with ThreadPoolExecutor(4) as pool:
    assert len(list(pool.map(make, range(4)))) == 4
assert "torchvision.models" in sys.modules
assert len(torchvision_import.DECLARED) == fails
os._exit(0)  # the end of the interpreter takes as long as that import
"""


def test_torchvision_is_imported_with_the_first_model():
    """Torchvision is imported with the first model and operators declared only where it fails."""
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_threads_import_one_at_a_time_and_not_on_the_device_of_the_model(monkeypatch):
    inside, most, devices = [], [], []

    def slow(name):
        inside.append(name)
        time.sleep(0.02)
        most.append(len(inside))
        devices.append(torch.empty(0).device.type)
        inside.pop()

    def ask(_):
        with torch.device("meta"):
            torchvision("models", "model 'm'")

    monkeypatch.setattr(importlib, "import_module", slow)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, range(4)))
    assert most == [1] * 4
    assert devices == ["cpu"] * 4


def test_operators_that_exist_are_left_alone():
    torchvision("models", "model 'm'")
    before = [str(getattr(torch.ops.torchvision, name).default) for name in OPERATORS]
    declare_operators()  # declaring one anew would be an error
    assert [str(getattr(torch.ops.torchvision, name).default) for name in OPERATORS] == before


@pytest.mark.parametrize(
    "fault", [ImportError("No module named 'torchvision'"), RuntimeError("CUDA versions differ")]
)
def test_another_fault_of_the_import_is_told(monkeypatch, fault):
    def fail(name):
        raise fault

    monkeypatch.setattr(importlib, "import_module", fail)
    monkeypatch.setattr(
        torchvision_import, "declare_operators", lambda: pytest.fail("nothing to declare")
    )
    with refused(f"model 'm' is torchvision's.*{fault}; install the torchvision of this"):
        torchvision("models", "model 'm'")
