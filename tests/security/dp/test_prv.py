"""A tighter accountant in its own process: dp-accounting as oracle, and limits that end it."""

import math
import subprocess
import sys

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant

from staddle.security.dp import prv as so
from staddle.security.dp.prv import PrvLimits, Question
from staddle.security.dp.rdp import Event, cost

DELTA = 1e-5
# where a machine has other things to do, and with less memory than many steps take
LIMITS = PrvLimits(seconds=150, memory=150 << 20)
JOB = (Event("1", "0.05", 200), Event("10.0", "1", 1), Event("20", "1.0", 20))


def oracle(events, delta):
    """Of a record that is added and of one that is taken away, the worse."""
    accountant = PLDAccountant(value_discretization_interval=1e-3)
    for one in events:
        event = PoissonSampledDpEvent(float(one.q), GaussianDpEvent(float(one.sigma)))
        accountant.compose(SelfComposedDpEvent(event, one.steps))
    return accountant.get_epsilon(delta)


GIVEN = [(JOB, DELTA), ((Event("0.8", "0.01", 30),), 1e-8), ((Event("100", "1", 1),), DELTA)]


@pytest.fixture(scope="module")
def answers():
    """One process answers all questions."""
    extreme = [((), DELTA), ((Event("1", "1", 0),), DELTA), ((Event("0", "1", 1),), DELTA)]
    many = (tuple(Event(f"1.{n}", "0.05", 1) for n in range(9)), DELTA)
    large = ((Event("1", "0.0128", 39_000),), DELTA)
    asked = (*GIVEN, *extreme, many, (JOB, 1e-12), large)
    return so.opinions([Question(*each) for each in asked], LIMITS)


def test_it_lies_between_the_oracle_and_what_is_enforced(answers):
    """All that has an answer at once."""
    *found, nothing, no_steps, no_noise, too_many, tiny, _ = answers
    for (events, delta), answer in zip(GIVEN, found, strict=True):
        assert oracle(events, delta) <= answer <= cost(events, delta), events
    assert found[0] < 0.97 * cost(JOB, DELTA)
    assert (nothing, no_steps, no_noise, too_many, tiny) == (0, 0, math.inf, None, None)
    seen = [so.shown_bound(each) for each in (None, 1.00001, math.inf)]
    assert seen == ["not computed", "1.0001", "inf"]


def test_no_answer_takes_more_memory_than_its_limit(answers):
    assert answers[-1] is None


@pytest.fixture
def answering(monkeypatch):
    """Another program in its place."""
    real = subprocess.run

    def call(code):
        def run(command, **options):
            return real([sys.executable, "-c", code], **options)

        monkeypatch.setattr(subprocess, "run", run)
        # a busy machine may start it late; only the program that sleeps is to meet the limit
        limits = PrvLimits(seconds=3 if "sleep" in code else 60)
        return so.opinions([Question(JOB, DELTA)] * 2, limits)

    return call


@pytest.mark.parametrize(("code", "expected"), [
    ("print('3.000000000000'); print('4.000000000000')", [3.0, 4.0]),
    ("print('3.000000000000')", [3.0, None]),
    ("print('3.000000000000\\n4.0000', end='')", [3.0, None]),
    ("print('3.000000000000', flush=True); import time; time.sleep(60)", [3.0, None]),
    ("print('none\\n4.000000000000')", [None, 4.0]),
    ("print('nan\\n-1.000000000000')", [None, None]),
    ("print('1e9\\n99999.000000000000')", [None, pytest.approx(cost(JOB, DELTA))]),
    ("raise SystemExit(1)", [None, None]),
    ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", [None, None]),
])  # fmt: skip
def test_what_it_says_is_read_strictly(answering, code, expected):
    assert answering(code) == expected


def test_equal_noise_is_one_event_however_it_is_written(monkeypatch):
    asked = []
    monkeypatch.setattr(so, "_answers", lambda questions, _: asked.extend(questions) or [1.0])
    so.opinion([Event("1", "0.50", 2), Event("1.0", "0.5", 3), Event("2", "1", 0)], DELTA)
    assert asked == [{"delta": "1e-05", "events": [["1", "0.50", 5]]}]


def test_noise_that_silos_share_has_no_answer(monkeypatch):
    monkeypatch.setattr(so, "_answers", lambda questions, _: [1.0] * len(questions))
    shared = Event("1", "0.5", 2, shared=True)
    assert so.opinion([Event("1", "0.5", 2), shared], DELTA) is None
    assert so.opinion([Event("1", "0.5", 2)], DELTA) == 1.0
