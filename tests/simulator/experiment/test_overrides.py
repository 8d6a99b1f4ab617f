import pytest
from support.refusals import refused

from staddle.simulator.experiment.overrides import overridden

DOCUMENT = {"name": "toy", "training": {"lr": 0.1, "epochs": 2}, "methods": [{"name": "fedavg"}]}


@pytest.mark.parametrize(
    ("setting", "table", "expected"),
    [
        ("training.lr=0.05", "training", {"lr": 0.05, "epochs": 2}),
        ("training.momentum = 0.9", "training", {"lr": 0.1, "epochs": 2, "momentum": 0.9}),
        ("split.ratio=80/20", "split", {"ratio": "80/20"}),
        ("model.inputs.note=[4, 5]", "model", {"inputs": {"note": [4, 5]}}),
        ("name=low-rate", "name", "low-rate"),
        ('name="a=b"', "name", "a=b"),
        ("seeds=[1, 2]", "seeds", [1, 2]),
        ("metrics={ confusion = true }", "metrics", {"confusion": True}),
    ],
)
def test_a_setting_replaces_that_of_the_file(setting, table, expected):
    assert overridden(DOCUMENT, [setting])[table] == expected
    assert DOCUMENT["training"] == {"lr": 0.1, "epochs": 2}


def test_the_last_of_several_counts():
    changed = overridden(DOCUMENT, ["training.lr=1", "training.lr=2", "training.epochs=5"])
    assert changed["training"] == {"lr": 2, "epochs": 5}


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("training.lr", "not a key and a value; write --set training.lr=0.05"),
        ("=1", "not a key and a value"),
        ("training..lr=1", "not a key and a value"),
        ("methods.name=fedper", "'methods' is not a table of the file; change it there"),
        ("name.first=a", "'name' is not a table of the file"),
    ],
)
def test_what_is_no_setting_is_refused(setting, why):
    with refused(why):
        overridden(DOCUMENT, [setting])
