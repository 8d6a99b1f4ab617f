import os

import pytest

from staddle.simulator.experiment.experiment import read

DIGITS = """\
version = 1
name = "digits"
{top}
rounds = 3

[data]
{data}

{partition}

[model]
{model}

[training]
lr = 0.1

{methods}
"""
TOP = "seeds = [1, 2]"
BUNDLED = 'kind = "bundled"\nname = "digits"'
DIRICHLET = '[partition]\nkind = "dirichlet"\nsilos = 4\nalpha = 0.5'
MODEL = 'name = "cnn-digits"\nclasses = 10'
METHODS = '[[methods]]\nname = "fedavg"'


@pytest.fixture(scope="module")
def quick():
    """A disk that is never waited for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture
def experiment(tmp_path):
    """An experiment of a file that is written and read; each argument is a piece of TOML."""

    def make(top=TOP, data=BUNDLED, partition=DIRICHLET, model=MODEL, methods=METHODS):
        file = tmp_path / "job.toml"
        file.write_text(
            DIGITS.format(top=top, data=data, partition=partition, model=model, methods=methods)
        )
        return read(file)

    return make
