"""Functions of a program, by name."""

import hashlib
import sys
from importlib import invalidate_caches

import pytest
from support.jobs import make_job
from support.refusals import refused

from staddle.algorithms.job.job import Job
from staddle.algorithms.models.build import build
from staddle.files import packages
from staddle.files.program_code import (
    entry_of,
    find_in,
    is_imported,
    name_of,
    names_program,
)

NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.body, self.out = nn.Linear(64, width), nn.Linear(width, 3)

    def forward(self, x):
        return self.out(self.body(x.flatten(1)).relu())

def by_shape(shape, outputs, width=4):
    body = nn.Linear(shape[1] * shape[2], width)
    return nn.Sequential(nn.Flatten(), body, nn.Linear(width, outputs))
"""

METHOD = """
from staddle.algorithms.methods.fedper import FedPer

class Mine(FedPer):
    name = "mine"
    version = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "program_nets.py").write_text(NET)
    monkeypatch.syspath_prepend(tmp_path)
    invalidate_caches()
    yield "program_nets"
    sys.modules.pop("program_nets", None)


def test_a_name_says_where_a_function_is():
    assert name_of(make_job) == "python:support.jobs:make_job"
    with refused("cannot be found by its name; define it by def or class"):
        name_of(lambda: 1)


def test_what_a_document_names_is_imported_already_or_not(module):
    mine, own = f"python:{module}:Net", "python:support.jobs:make_job"
    assert is_imported({"method": {"name": "fedavg"}, "model": [own, "python:__main__:Net"]})
    assert not is_imported({"method": {"name": "fedavg"}, "models": [{"name": mine}]})
    assert not is_imported("python:support.jobs :make_job")
    assert module not in sys.modules


@pytest.mark.parametrize("name", ["python:net", "python:a b:net", "python::net"])
def test_a_name_that_says_no_function_is_refused(name):
    with refused("name a function as python:module:function"):
        entry_of("staddle.models", name)


@pytest.mark.parametrize("net", ["Net", "by_shape"])
def test_its_function_or_class_makes_the_model(module, net):
    job = make_job(
        model={"name": f"python:{module}:{net}", "input": [1, 8, 8], "options": {"width": 6}}
    )
    parts = build(job.model, 1)
    # The last submodule with parameters is the head.
    assert [tuple(own.shape) for own in parts["classifier"].parameters()] == [(3, 6), (3,)]
    assert sum(own.numel() for own in parts["extractor"].parameters()) == 64 * 6 + 6


def test_what_stands_for_it_is_its_file(module, tmp_path):
    job = make_job(model={"name": f"python:{module}:Net", "input": [1, 8, 8]})
    (own,) = job.packages
    assert (own.name, own.version) == ("python", module)
    assert own.sha256 == hashlib.sha256(NET.encode()).hexdigest()
    (tmp_path / "program_nets.py").write_text(f"{NET}# changed\n")
    with refused("key packages, the code that the job runs, differs"):
        Job.from_document(job.document() | {"packages": [vars(own) | {}]}, "x", None)


def test_no_federation_takes_it(module):
    job = make_job(model={"name": f"python:{module}:Net", "input": [1, 8, 8]})
    with refused("is of a program on this machine, for simulations; make it an entry point"):
        job.for_federation()
    for allowed in ((), ("python",)):
        with refused("may not run here|of a program, for simulations alone"):
            Job.from_document(job.document(), "x", allowed)


@pytest.mark.parametrize(
    ("document", "found"),
    [
        ({"methods": [{"name": "fedavg"}, {"name": "python:mine:Mine"}]}, True),
        ({"model": {"name": "python:nets:net"}}, True),
        ({"model": {"name": "glm", "classes": 3}, "seeds": [1], "name": "a python: name"}, False),
    ],
)
def test_a_document_names_a_program_in_any_place(document, found):
    assert names_program(document) is found


def test_what_is_installed_comes_before_a_folder_of_the_same_names(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = [*sys.path]
    find_in(tmp_path)
    find_in(tmp_path)
    assert sys.path == [*before, str(tmp_path.resolve())]


def test_a_module_that_is_missing_is_told():
    with refused("its source cannot be read: No module named 'nowhere_at_all'"):
        packages.package(packages.MODELS, "python:nowhere_at_all:net", "model")


def test_a_method_of_a_program_is_for_simulations(tmp_path, monkeypatch):
    (tmp_path / "program_methods.py").write_text(METHOD)
    monkeypatch.syspath_prepend(tmp_path)
    invalidate_caches()
    job = make_job("python:program_methods:Mine")
    assert job.method().name == "mine"
    (own,) = job.packages
    assert (own.name, own.version) == ("python", "program_methods")
    with refused("'python:program_methods:Mine' is of a program on this machine"):
        job.for_federation()
    sys.modules.pop("program_methods")
