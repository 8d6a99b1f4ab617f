"""FedAIMS's Tables 6 and 8: what crosses in a round, and what adapters take, in MB of 2^20 bytes.

Both follow from the jobs of its Table 2; nothing is trained.
"""

from math import prod

import pytest

from staddle.algorithms.job.job import Job, JobFile
from staddle.files.documents import validate
from staddle.simulator.reproduce.published import find

SETTINGS = ("emnist-dir01", "cifar10-dir01", "cifar100-dir01", "tiny-imagenet-dir01")
# Table 6, up and down together, by the row's title; Table 8, "Storage"
TABLE_6 = {
    "FedAvg [2]": (0.59, 3.42, 85.60, 85.99),
    "FedProx [21]": (0.59, 3.42, 85.60, 85.99),
    "MOON [22]": (0.59, 3.42, 85.60, 85.99),
    "FedPer [7]": (0.57, 3.41, 85.21, 85.21),
    "FedRep [9]": (0.57, 3.41, 85.21, 85.21),
    "LG-FedAvg [8]": (0.02, 0.01, 0.39, 0.78),
    "Ditto [17]": (0.59, 3.42, 85.60, 85.99),
    "FedBABU [11]": (0.57, 3.41, 85.21, 85.21),
    "FedRoD [10]": (0.59, 3.42, 85.60, 85.99),
    "FedALA [18]": (0.59, 3.42, 85.60, 85.99),
    "FedAIMS": (0.59, 3.42, 85.60, 85.99),
}
TABLE_8 = (0.06, 0.19, 0.49, 0.49)
INPUTS = {"emnist-dir01": [1, 28, 28]}  # which records bring, otherwise
BYTES = {"float32": 4, "float64": 8, "int64": 8}


def job(title, setting, **options):
    """A row's job in a setting."""
    table = find("fedaims/table2")
    (own,) = (each for each in table.settings if each.name == setting)
    (row,) = (each for each in table.rows if each.title == title)
    method = row.methods[setting]
    shape = {"input": INPUTS[setting]} if setting in INPUTS else {}
    document = {
        "version": 1,
        "name": "costs",
        "purpose": "count what crosses",
        "seed": 1,
        "rounds": 300,
        "silos": [f"silo-{number:02}" for number in range(100)],
        "participation": 0.1,
        "method": {"name": method.name, "options": method.options | options},
        "model": own.document["model"] | shape,
        "training": {"epochs": 5, "batch_size": 64, "lr": 0.1},
    }
    return Job.from_file(validate(document, JobFile, "costs"), "costs")


def megabytes(parts):
    """Of parameters, and of what goes with them."""
    sizes = (prod(spec.shape) * BYTES[spec.dtype] for part in parts for spec in part.wire)
    return sum(sizes) / 2**20


def both_ways(of):
    """What crosses in a round in the middle, without what silos report of it."""
    parts = (*of.up(150), *of.down(150))
    return megabytes(part for part in parts if part.name not in ("metrics", "direction"))


@pytest.mark.parametrize("place", range(len(SETTINGS)), ids=SETTINGS)
@pytest.mark.parametrize("title", TABLE_6)
def test_as_much_crosses_as_the_paper_prints(title, place):
    assert both_ways(job(title, SETTINGS[place])) == pytest.approx(TABLE_6[title][place], abs=6e-3)


@pytest.mark.parametrize("place", range(len(SETTINGS)), ids=SETTINGS)
def test_adapters_take_as_much_as_the_paper_prints(place):
    modules = job("FedAIMS", SETTINGS[place]).method().modules("silo-00")
    adapters = [module for name, module in modules.items() if name.startswith("adapter")]
    sizes = (value.nbytes for module in adapters for value in module.state_dict().values())
    assert sum(sizes) / 2**20 == pytest.approx(TABLE_8[place], abs=6e-3)


def test_directions_come_on_top_as_a_part_of_their_own():
    """The paper's coordinator takes them from uploads, which it may read."""

    def direction(**options):
        parts = job("FedAIMS", "cifar10-dir01", **options).up(150)
        return megabytes(part for part in parts if part.name == "direction")

    assert direction() == pytest.approx(1.71, abs=6e-3)
    assert direction(sketch=256) == pytest.approx(256 * 8 / 2**20, abs=6e-3)
