from collections import Counter
from decimal import Decimal
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from staddle.commands.report import chart as charts
from staddle.commands.report.chart import (
    ACROSS,
    LEFT,
    MAX_BARS,
    TOP,
    UP,
    by_date,
    by_round,
    patterns,
    stacked,
)
from staddle.commands.terminal.output import UNITS
from staddle.security.ledger.messages import At
from staddle.security.ledger.records import PrivacyHead

LARGEST = 2**53 - 1
names = st.sampled_from([f"part-{i}" for i in range(12)])
parts = st.dictionaries(names, st.integers(0, LARGEST), min_size=1)


def number(label):
    """Bytes of a tick's label."""
    if label == "0":
        return 0
    count, unit = label.split()
    return int(count) * 1024 ** UNITS.index(unit)


def drawn(columns):
    totals = Counter()
    for _, by in columns:
        totals.update(by)
    return stacked("t", "round", columns, patterns(totals))


@given(st.dictionaries(st.integers(0, LARGEST), parts, min_size=1, max_size=60))
def test_columns_of_rounds_lose_nothing(rounds):
    columns = by_round(rounds)
    assert 1 <= len(columns) <= MAX_BARS
    summed = Counter()
    for by in rounds.values():
        summed.update(by)
    assert sum((by for _, by in columns), Counter()) == +summed


def test_rounds_in_which_nothing_left_have_their_place():
    assert by_round({3: {"a": 1}, 6: {"a": 2}}) == [
        ("3", {"a": 1}), ("4", {}), ("5", {}), ("6", {"a": 2}),
    ]  # fmt: skip
    assert by_round({0: {"a": 1}, 99: {"b": 5}})[0] == ("0–2", {"a": 1})
    assert by_round({0: {"a": 1}, 99: {"b": 5}})[-1] == ("99", {"b": 5})
    assert [n for n, _ in by_round({0: {}, 79: {}})] == [f"{2 * i}–{2 * i + 1}" for i in range(40)]


def test_days_become_months_and_years_where_there_are_many():
    days = {f"2026-{month:02}-{day:02}": {"j": 1} for month in (1, 2) for day in range(1, 21)}
    assert [name for name, _ in by_date(days)][:2] == ["2026-01-01", "2026-01-02"]
    days["2026-03-01"] = {"j": 3}
    assert by_date(days) == [("2026-01", {"j": 20}), ("2026-02", {"j": 20}), ("2026-03", {"j": 3})]
    months = {f"{year}-{m:02}-01": {"j": 1} for year in range(2000, 2050) for m in range(1, 13)}
    assert by_date(months) == [(str(year), {"j": 12}) for year in range(2000, 2050)]


@given(st.lists(parts, min_size=1, max_size=MAX_BARS))
def test_heights_are_bytes_on_the_scale_of_the_ticks(columns):
    named = [(str(i), by) for i, by in enumerate(columns)]
    chart = drawn(named)
    # The axis: from 0 at the bottom to a round number at the top, evenly.
    values = [number(tick.label) for tick in chart.ticks]
    top, most = values[-1], max(sum(by.values()) for by in columns)
    assert (values[0], chart.ticks[0].at, chart.ticks[-1].at) == (0, TOP + UP, TOP)
    assert len({b - a for a, b in pairwise(values)}) == 1
    assert most <= top <= max(2 * most, 1)
    assert 2 <= len(values) <= charts.TICKS + 1
    # The bars: each part once, as high as its bytes, one upon the other, inside the plot.
    for column, by in named:
        bars = [s for s in chart.segments if s.column == column]
        assert {s.name: s.bytes for s in bars} == {name: c for name, c in by.items() if c}
        floor = TOP + UP
        for bar in bars:
            assert abs(bar.height - UP * bar.bytes / top) <= 0.006
            assert abs(bar.y + bar.height - floor) <= 0.02
            assert bar.x >= LEFT
            assert bar.x + bar.width <= LEFT + ACROSS + 0.01
            floor = bar.y
    # The legend: all bytes, each pattern once.
    total = sum(sum(by.values()) for by in columns)
    assert sum(e.bytes for e in chart.legend) == total == sum(s.bytes for s in chart.segments)
    assert len({entry.pattern for entry in chart.legend}) == len(chart.legend) <= charts.PATTERNS
    assert max(entry.y for entry in chart.legend) + 10 <= charts.HEIGHT


def test_ticks_are_round_numbers():
    shown = [
        (24, "10 B 20 B 30 B"),
        (54856, "20 KiB 40 KiB 60 KiB"),
        (1_100_000, "500 KiB 1000 KiB 1500 KiB"),
    ]
    for most, labels in shown:
        assert " ".join(tick.label for tick in drawn([("0", {"a": most})]).ticks[1:]) == labels
    assert [tick.label for tick in drawn([("0", {"a": 0})]).ticks] == ["0", "1 B"]


def test_parts_beyond_the_patterns_share_the_last_one():
    totals = {f"part-{i:02}": 100 - i for i in range(11)}
    pattern = patterns(totals)
    assert [pattern[name] for name in totals] == [0, 1, 2, 3, 4, 5, 6, 7, 7, 7, 7]
    legend = stacked("t", "round", [("0", totals)], pattern).legend
    assert [(entry.name, entry.bytes) for entry in legend][-2:] == [
        ("part-06", 94),
        (charts.REST, 93 + 92 + 91 + 90),
    ]


@given(st.integers(1, MAX_BARS), st.integers(1, 20))
def test_labels_do_not_touch(count, length):
    places = [mark.at for mark in drawn([("x" * length, {"a": 1})] * count).labels]
    assert places
    assert all(b - a > charts.GLYPH * length for a, b in pairwise(places))


def test_the_description_says_in_words_what_is_drawn():
    said = drawn([("0", {"a": 1000, "b": 24}), ("1", {"a": 2000})]).description
    assert said == "t: 3,024 bytes in 2 bars, at most 2,000 bytes in one; a 3,000 bytes, b 24 bytes"


# What a privacy budget came to.
def head(epsilon, limit="8", second=0):
    record = PrivacyHead(
        dataset="data", size=3, root="ab" * 32, epsilon=epsilon, delta="0.00001", limit=limit
    )
    return At(second, f"2026-11-20T21:30:{second % 60:02}.000000Z", record)


@given(
    st.lists(st.decimals(0, 9999, places=4), min_size=1, max_size=130),
    st.decimals("0.0001", 1000, places=4),
)
def test_spending_is_drawn_on_the_scale_of_its_ticks_under_its_limit(spent, limit):
    chart = charts.spending(
        [head(format(each, "f"), format(limit, "f"), at) for at, each in enumerate(spent)]
    )
    *_, top = chart.ticks
    end = Decimal(top.label)
    assert top.at == TOP
    assert end >= max(limit, spent[-1])  # those between the ones that are drawn may be above
    assert [t.at for t in chart.ticks] == sorted((t.at for t in chart.ticks), reverse=True)
    assert len(chart.bars) <= MAX_BARS
    assert abs((TOP + UP - chart.limit.at) - UP * float(limit / end)) < 0.02
    # the last is never left out
    assert abs(chart.bars[-1].height - UP * float(spent[-1] / end)) < 0.02
    for bar in chart.bars:
        assert abs(bar.y + bar.height - TOP - UP) < 0.02
        assert bar.x >= LEFT
        assert bar.x + bar.width <= LEFT + ACROSS + 0.02
    assert int(chart.labels[-1].label) <= len(spent)
    if len(spent) <= MAX_BARS:
        assert len(chart.bars) == len(spent)


def test_of_many_heads_the_last_of_several_is_drawn_and_the_very_last_is():
    for count, step in ((1, 1), (40, 1), (41, 2), (80, 2), (81, 3), (130, 4)):
        chart = charts.spending([head(str(n), "200", n) for n in range(1, count + 1)])
        drawn_ = [*range(step, count, step), count]
        assert [b.text.split("epsilon ")[1] for b in chart.bars] == [f"{n} of 200" for n in drawn_]
        assert int(chart.labels[0].label) == min(step, count)
