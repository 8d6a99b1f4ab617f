import numpy as np
import pydantic
import pytest
from support.refusals import refused

from staddle.algorithms.partition import conventions
from staddle.algorithms.partition.by_label import classes_each, group_mixtures, label_groups, shards
from staddle.algorithms.partition.by_source import by_column, by_source
from staddle.algorithms.partition.draw import dirichlet
from staddle.algorithms.partition.options import Partition, alike, deal
from staddle.files.documents import Strict, validate

LABELS = np.arange(800) % 4
SOURCES = ["usps", "mnist"] * 400
GROUPS = ((0, 1), (2, 3))


class File(Strict):
    partition: Partition


def table(**keys):
    return validate({"partition": keys}, File, "job.toml").partition


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({"kind": "dirichlet", "silos": 3, "alpha": 0.1, "minimum": 200},
            dirichlet(LABELS, 3, 0.1, 7, 200)),
        ({"kind": "dirichlet", "silos": 3, "alpha": 0.1, "convention": "balanced"},
            dirichlet(LABELS, 3, 0.1, 7, balanced=True)),
        ({"kind": "dirichlet", "silos": 3, "alpha": 0.1, "convention": "hsu"},
            conventions.hsu(LABELS, 3, 0.1, 7)),
        ({"kind": "dirichlet", "silos": 40, "alpha": 9.0, "convention": "pfllib"},
            conventions.pfllib(LABELS, 40, 9.0, 7)),
        ({"kind": "dirichlet", "silos": 3, "alpha": 0.1, "convention": "fl-bench", "minimum": 100},
            conventions.fl_bench(LABELS, 3, 0.1, 7, 100)),
        ({"kind": "dirichlet", "silos": 3, "alpha": 0.1, "convention": "ppfl", "clusters": 2},
            conventions.ppfl(LABELS, 3, 0.1, 7, clusters=2)),
        ({"kind": "shards", "silos": 5, "each": 2}, shards(LABELS, 5, 2, 7)),
        ({"kind": "classes", "silos": 5, "each": 2}, classes_each(LABELS, 5, 2, 7)),
        ({"kind": "label-groups", "silos": 5, "groups": GROUPS},
            label_groups(LABELS, 5, GROUPS, 7)),
        ({"kind": "group-mixtures", "silos": 5, "groups": GROUPS, "alpha": 0.3, "minimum": 60},
            group_mixtures(LABELS, 5, GROUPS, 0.3, 7, 60)),
        ({"kind": "sources", "silos": {"usps": 2}}, by_source(SOURCES, {"usps": 2}, 7)),
        ({"kind": "column"}, by_column(SOURCES)),
    ],
)  # fmt: skip
def test_every_kind_is_dealt_as_its_function_deals(keys, parts):
    dealt = deal(table(**keys, seed=7), LABELS, SOURCES)
    expected = (
        parts
        if isinstance(parts, dict)
        else {str(number): part for number, part in enumerate(parts)}
    )
    assert list(dealt) == list(expected)
    assert all(np.array_equal(dealt[name], expected[name]) for name in dealt)


@pytest.mark.parametrize(
    "keys",
    [
        {"kind": "sources", "silos": {"usps": 9}, "minimum": 50},
        {"kind": "column", "minimum": 401},
        {"kind": "shards", "silos": 9, "each": 2, "minimum": 90},
        {"kind": "classes", "silos": 9, "each": 2, "minimum": 90},
        {"kind": "label-groups", "silos": 9, "groups": GROUPS, "minimum": 90},
    ],
)
def test_the_minimum_reaches_every_kind(keys):
    with refused("records"):
        deal(table(**keys), LABELS, SOURCES)


def test_the_column_is_dealt_alike_where_it_decides_and_the_label_elsewhere():
    assert np.array_equal(alike(table(kind="shards", silos=5, each=2), LABELS), LABELS)
    assert alike(table(kind="column"), LABELS[:4], [30, 4, 4, 30]).tolist() == [1, 0, 0, 1]
    for keys in ({"kind": "column"}, {"kind": "sources", "silos": {"usps": 1}}):
        for column, number in ((None, "none"), (SOURCES[1:], "799")):
            with refused(f"one value per record, here {number} for 800 records"):
                deal(table(**keys), LABELS, column)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"kind": "iid"}, "partition"),
        ({"kind": "shards", "silos": 5}, "each"),
        ({"kind": "column", "silos": 5}, "silos"),
        ({"kind": "dirichlet", "silos": 5, "alpha": float("nan")}, "alpha"),
        ({"kind": "dirichlet", "silos": 5, "alpha": 0.0}, "alpha"),
        ({"kind": "dirichlet", "silos": 5, "alpha": 1.0, "balanced": True},
            'write convention = "balanced" for balanced = true, and nothing for false'),
        ({"kind": "dirichlet", "silos": 5, "alpha": 1.0, "clusters": 2},
            'clusters belongs to convention = "ppfl", this is \'per-class\''),
        ({"kind": "dirichlet", "silos": 5, "alpha": 1.0, "convention": "niid"}, "convention"),
        ({"kind": "label-groups", "silos": 5, "groups": [[]]}, "groups"),
        ({"kind": "sources", "silos": {}}, "silos"),
        ({"kind": "sources", "silos": {"usps": 0}}, "silos"),
    ],
)  # fmt: skip
def test_wrong_tables_are_refused(keys, text):
    with refused(text):
        table(**keys)
    with pytest.raises(pydantic.ValidationError):
        File.model_validate({"partition": keys})
