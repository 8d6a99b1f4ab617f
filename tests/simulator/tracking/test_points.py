import pytest
from support.counted import of_counts
from support.simulated_jobs import make_job

from staddle.simulator.run.work_file import RoundWork
from staddle.simulator.tracking.points import points, settings

RECORDS = {"a": 10, "b": 30}


def work(round_, rounds, **losses):
    return RoundWork(
        round_, rounds, 0, 0, {silo: (loss, 1, 1, None) for silo, loss in losses.items()}
    )


def test_a_point_has_what_was_measured_after_its_rounds_and_their_loss():
    form = make_job().counting.score
    measures = [
        of_counts(1, "selected/after", {"a": 1, "b": 15}, RECORDS),
        of_counts(2, "selected/after", {"a": 2, "b": 15}, RECORDS),
        of_counts(2, "all/trained", {"a": 4, "b": 15}, RECORDS),
    ]
    # a census before the first round, and the last delivery
    lines = [work(0, 0, a=9.0), work(1, 1, a=2.0, b=1.0), work(2, 2, b=0.5), work(3, 2)]
    first, second = points(measures, lines, form)
    assert (first.rounds, second.rounds) == (1, 2)
    assert first.values["selected/after/accuracy.macro"] == pytest.approx(0.3)
    assert first.values["selected/after/accuracy.micro"] == pytest.approx(0.4)
    assert first.values["loss"] == 1.5
    assert second.values["selected/after/accuracy.worst"] == pytest.approx(0.2)
    assert second.values["all/trained/accuracy.macro"] == pytest.approx(0.45)
    assert second.values["loss"] == 0.5
    (last,) = points(measures[2:], [work(3, 2)], form)
    assert "loss" not in last.values


def test_a_loss_that_is_no_number_is_left_out():
    measures = [of_counts(1, "all/trained", {"a": 1, "b": 2}, RECORDS)]
    (point,) = points(measures, [work(1, 1, a=float("nan"))], make_job().counting.score)
    assert "loss" not in point.values


def test_settings_are_those_that_were_chosen_by_dotted_names():
    found = settings(make_job("pfedsim", rounds=3).document())
    assert (found["rounds"], found["method.name"], found["model.name"]) == (
        3,
        "pfedsim",
        "ppfl-mlp",
    )
    assert found["model.input"] == "[1, 8, 8]"
    assert not any(key.startswith(("silos", "security")) for key in found)
    assert settings({"a": {"b": None, "c": {"d": True}}, "silos": ["x"]}) == {"a.c.d": True}
