import pytest

OPTIMISERS = ("sgd", "adam", "adamw")


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_both_train_alike_and_are_timed(program, optimiser):
    assert min(program.measured("mlp", optimiser, 2)) > 0


def test_sides_that_differ_are_no_comparison(program, monkeypatch):
    other = {"sgd": ({"weight_decay": 0.5}, program.OWN["adam"][1])}
    monkeypatch.setattr(program, "OWN", other)
    with pytest.raises(SystemExit, match="the two differ by"):
        program.measured("mlp", "sgd", 2)
