import pytest

from staddle.simulator.run.progress import Pace, span


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize(
    ("seconds", "rounds", "rate", "left"),
    [
        (0.0, 0, "", ""),
        (2.0, 1, "2 s/round", "0:00:20"),
        (0.25, 4, "4 rounds/s", "0:00:02"),
        (4000.0, 2, "4000 s/round", "11:06:40"),
    ],
)
def test_rate_and_time_left_are_of_the_rounds_seen(seconds, rounds, rate, left):
    clock = Clock()
    pace = Pace(clock)
    for _ in range(rounds):
        clock.now += seconds
        pace.tick()
    clock.now += 1000  # what is under way does not count yet
    assert (pace.rate(), pace.left(10)) == (rate, left)


def test_spans_are_rounded_to_seconds():
    assert [span(s) for s in (0, 59.6, 3599.4, 86400)] == [
        "0:00:00", "0:01:00", "0:59:59", "24:00:00",
    ]  # fmt: skip
