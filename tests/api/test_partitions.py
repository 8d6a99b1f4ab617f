"""Each way to deal records out is the table of its name."""

import pytest

import staddle
from staddle.files.documents import validate
from staddle.simulator.experiment.options import PARTITIONS


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (
            staddle.Dirichlet(1, silos=4),
            {"kind": "dirichlet", "silos": 4, "alpha": 1.0, "convention": "per-class"},
        ),
        (
            staddle.Dirichlet(0.3, silos=4, convention="balanced", seed=3),
            {"kind": "dirichlet", "silos": 4, "alpha": 0.3, "convention": "balanced", "seed": 3},
        ),
        (staddle.Shards(2, silos=5), {"kind": "shards", "silos": 5, "each": 2}),
        (staddle.Classes(2, silos=5), {"kind": "classes", "silos": 5, "each": 2}),
        (
            staddle.LabelGroups([(0, 1), (2,)], silos=4),
            {"kind": "label-groups", "silos": 4, "groups": [[0, 1], [2]]},
        ),
        (
            staddle.GroupMixtures([[0], [1, 2]], 0.4, silos=4, minimum=5),
            {
                "kind": "group-mixtures",
                "silos": 4,
                "groups": [[0], [1, 2]],
                "alpha": 0.4,
                "minimum": 5,
            },
        ),
        (staddle.Sources({"va": 2}), {"kind": "sources", "silos": {"va": 2}}),
    ],
)
def test_a_function_writes_its_table(found, wanted):
    assert found == wanted
    table = validate(found, PARTITIONS[wanted["kind"]], "partition")
    assert table.model_dump(include=set(wanted), mode="json") == wanted
