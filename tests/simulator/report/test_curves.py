from dataclasses import replace

import matplotlib as mpl
import numpy as np
import pytest
from support.counted import of_counts, of_scores
from support.pictures import has_colour, pixels, whole
from support.refusals import refused

from staddle.algorithms.tasks.counting import ScoreForm
from staddle.simulator.report import curves as module
from staddle.simulator.report.curves import MEGABYTES, curve, curves, last, pace, spread
from staddle.simulator.report.style import COLOURS, styles_of, within


def measured(rounds, *correct, measure="all/trained", records=10):
    silos = [f"s{number}" for number in range(len(correct))]
    return of_counts(
        rounds, measure, dict(zip(silos, correct, strict=True)), dict.fromkeys(silos, records)
    )


ONE = [
    measured(1, 2, 4),
    measured(2, 4, 6),
    measured(2, 0, 0, measure="all/aggregated"),
    measured(3, 9, 9),
]
OTHER = [measured(1, 6, 8), measured(2, 5, 7)]  # not as far yet


def test_a_curve_goes_over_the_rounds_that_all_seeds_have():
    found = curve({1: ONE, 2: OTHER}, "all/trained")
    assert found.rounds == (1, 2)
    assert np.allclose(found.mean, [0.5, 0.55])
    assert np.allclose(found.low, [0.3, 0.5])
    assert np.allclose(found.high, [0.7, 0.6])
    uneven = of_counts(1, "all/trained", {"a": 1, "b": 90}, {"a": 1, "b": 100})
    assert np.allclose(curve({1: [uneven]}, "all/trained", "micro").mean, 91 / 101)
    assert curve({1: ONE, 2: OTHER}, "all/aggregated").rounds == ()


def test_the_last_of_all_seeds_the_limits_and_the_looks_of_21_methods():
    assert np.allclose(last({1: ONE, 2: OTHER}, "all/trained"), [0.9, 0.9, 0.5, 0.7])
    assert len(last({1: ONE, 2: OTHER}, "all/aggregated")) == 0
    assert within([0.2, 0.7]) == pytest.approx((0.18, 0.72))
    assert within([0.0, 1.0]) == (-0.02, 1.02)
    assert within([0.5]) == pytest.approx((0.49, 0.51))
    assert within([200.0, 300.0], share=False) == pytest.approx((196, 304))
    assert within([-50.0], share=False) == pytest.approx((-52, -48))
    assert within([0.0, 0.0], share=False) == (-1, 1)
    styles = styles_of([str(number) for number in range(21)]).values()
    assert len({(style.colour, style.dashes) for style in styles}) == 21


def test_the_mean_over_seeds_of_what_was_spent_at_the_rounds_that_all_have():
    assert pace([{1: 2.0, 2: 5.0, 3: 9.0}, {1: 4.0, 2: 6.0}]) == {1: 3.0, 2: 5.5}
    assert pace([{}, {1: 1.0}]) == {}


def test_curves_stand_where_their_bytes_are(monkeypatch):
    placed = []
    monkeypatch.setattr(module, "_line", lambda _axes, _one, places, _: placed.append([*places]))
    histories = {"a": {1: ONE}, "b": {1: OTHER}}
    paces = {"a": {1: 10.0, 2: 20.0, 3: 40.0}, "b": {1: 7.0, 2: 8.0, 3: 9.0}}
    curves(histories, ["all/trained"], axis=MEGABYTES, paces=paces)
    assert placed == [[10.0, 20.0, 40.0], [7.0, 8.0]]
    placed.clear()
    curves(histories, ["all/trained"])
    assert placed == [[1, 2, 3], [1, 2]]


@pytest.mark.parametrize("draw", [curves, spread])
def test_every_method_is_drawn_and_nothing_is_cut_off(draw):
    labels = [*"abcdef", r"a label as long as they get, with $\no$ mathematics"]
    histories = {label: {1: ONE, 2: OTHER} for label in labels}
    # a person's own settings
    with mpl.rc_context({"figure.facecolor": "black", "text.usetex": True}):
        made = draw(histories)
    assert made == draw(histories)  # the same bytes
    image = pixels(made)
    assert whole(image)
    short = pixels(draw({label[:9]: own for label, own in histories.items()}))
    assert short.shape[1] < image.shape[1]
    styles = styles_of(labels)
    seen = [has_colour(image, styles[label].colour) for label in labels]
    assert all(seen) or draw is spread  # whose dots are translucent


def test_one_method_one_seed_one_look_is_a_picture_too():
    alone = {"local": {1: [measured(5, 3, 4)]}}
    made = pixels(curves(alone, ["all/trained"]))
    assert has_colour(made, COLOURS[0])
    assert whole(made)
    assert whole(pixels(spread(alone, ["all/trained"])))


@pytest.mark.parametrize("draw", [curves, spread])
def test_scores_that_are_no_shares_have_limits_of_their_own(draw):
    form = ScoreForm("mae", "MAE", "always the median", share=False, higher=False, unit="days")
    looks = [
        of_scores(n, "all/trained", {"a": 90.0 / n, "b": 120.0}, {"a": 1, "b": 2}) for n in (1, 3)
    ]
    made = pixels(draw({"local": {1: looks}}, ["all/trained"], form=form))
    assert whole(made)
    assert has_colour(made, COLOURS[0]) or draw is spread
    # another unit is written on the axis
    other = pixels(draw({"local": {1: looks}}, ["all/trained"], form=replace(form, unit="hours")))
    assert not np.array_equal(made, other)


@pytest.mark.parametrize("draw", [curves, spread])
def test_what_no_run_measured_is_not_drawn(draw):
    with refused(r"selected/after: no run has measured that; measured: \['all/trained'\]"):
        draw({"local": {1: OTHER}}, ["selected/after"])
