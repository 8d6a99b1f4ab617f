"""The ranking of a sweep: the variants of each method, the best first.

Variants are compared after their last round, by the mean over silos of the score of the model that
each silo keeps: on validation records where the silos have such, else on test records. Best is the
variant whose records say so; its test score alone says how good it is, and only where validation
records chose it.
"""

import csv
import io
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, filterfalse
from operator import attrgetter
from typing import Any, Literal, TypeAlias

from ...algorithms.tasks.counting import ScoreForm
from ..experiment.sweep import Variant
from ..run.scores import Spread, spread
from .finished_runs import Recorded
from .markdown import MarkdownColumn, escaped, table
from .silo_spread import kept
from .summary import Groups, as_toml, drawn

Side: TypeAlias = Literal["validation", "test"]
SIDES: tuple[Side, ...] = ("validation", "test")
SPLIT = '[split] ratio = "8:1:1"'  # gives each silo validation records
TOO_GOOD = f"the records that chose make the best score too good, {SPLIT} avoids that"


@dataclass(frozen=True)
class RankedVariant:
    """A variant with finished runs, and its scores over their seeds by side.

    The first side is the one that ranks.
    """

    variant: Variant
    rounds: int
    seeds: int
    scores: Mapping[Side, Spread]

    @property
    def score(self) -> float:
        """By what it is ranked."""
        return next(iter(self.scores.values())).mean


@dataclass(frozen=True)
class Ranking:
    """Variants by their method's label, best first; ``by`` is the side whose records ranked them.

    ``unfinished`` are labels of variants without a finished run.
    """

    by: Side
    methods: Mapping[str, Sequence[RankedVariant]]
    unfinished: tuple[str, ...]

    @property
    def outranked(self) -> set[str]:
        """Labels of all but the best variant of each method."""
        found: set[str] = set()
        for _, *others in self.methods.values():
            found.update(one.variant.label for one in others)
        return found


def rank(groups: Groups, variants: Iterable[Variant]) -> Ranking | None:
    """The ranking of the finished runs by label; None where none is of a sweep."""
    swept = list(filter(attrgetter("values"), variants))
    finished = list(filter(lambda variant: variant.label in groups, swept))
    if not finished:
        return None

    runs = list(chain.from_iterable(groups[variant.label] for variant in finished))
    # Compared on the records that all have.
    sides = SIDES if all(map(_validated, runs)) else SIDES[1:]
    found: dict[str, list[RankedVariant]] = defaultdict(list)
    for variant in finished:
        own = groups[variant.label]
        scores = {side: spread([_macro(run, side) for run in own]) for side in sides}
        ranked = RankedVariant(
            variant=variant,
            rounds=own[0].rounds,
            seeds=len(own),
            scores=scores,
        )
        found[variant.method].append(ranked)

    # A mean over fewer seeds may leave out those that failed, so it comes after the others.
    sign = -1 if runs[0].form.higher else 1
    for ranking in found.values():
        ranking.sort(key=lambda one: (-one.seeds, sign * one.score))
    return Ranking(
        by=sides[0],
        methods=found,
        unfinished=tuple(map(attrgetter("label"), filterfalse(finished.__contains__, swept))),
    )


def _validated(run: Recorded) -> bool:
    return any(one.measure.startswith("validation/") for one in run.history)


def _macro(run: Recorded, side: Side) -> float:
    return kept(run.history, run.product, drawn(run), side).macro


def chosen_by(ranking: Ranking, form: ScoreForm) -> str:
    """What ranked the variants, for people: a text without a full stop."""
    return (
        f"{ranking.by} records rank them, by the mean over silos of the {form.name} of the model"
        " that each silo keeps, after the last round"
    )


def section(ranking: Ranking, form: ScoreForm) -> str:
    """The section of the summary: a table per method, and which records chose."""
    text = (
        f"## Sweep\n\nThe variants of each method, best first: {chosen_by(ranking, form)}. The"
        " other sections show the best variant of each method; sweep.csv and results.csv have"
        " all.\n"
    )
    if ranking.by == "test":
        text += (
            "\n**The test records chose, so the best score on them is too good.** Give silos"
            f" validation records, such as by `{SPLIT}`: then those choose.\n"
        )
    for method, own in ranking.methods.items():
        text += f"\n### {escaped(method)}\n\n{_table(own, form)}"
    if ranking.unfinished:
        listed = ", ".join(ranking.unfinished)
        text += f"\nWithout a finished run: {escaped(listed)}.\n"
    return text


def _table(own: Sequence[RankedVariant], form: ScoreForm) -> str:
    keys = [*own[0].variant.values]
    titles = ["rank", *map(escaped, keys), "seeds", "rounds", *own[0].scores]
    rows = []
    for place, one in enumerate(own, 1):
        values = map(as_toml, one.variant.values.values())
        rows.append([
            str(place),
            *map(escaped, values),
            str(one.seeds),
            str(one.rounds),
            *cells(one, form),
        ])  # fmt: skip
    columns = [MarkdownColumn(title, numbers=True) for title in titles]
    return table(columns, rows)


def cells(one: RankedVariant, form: ScoreForm) -> list[str]:
    """The scores of a variant over its seeds, for people."""
    return [form.cell(score.mean, score.deviation) for score in one.scores.values()]


def rows(ranking: Ranking) -> list[dict[str, Any]]:
    """A row per variant, method by method, best first; None where there is nothing.

    Scores have all their digits; shares are from 0 to 1.
    """
    every = chain.from_iterable(map(_rows, ranking.methods.values()))
    found = list(every)
    # All rows have the settings of all methods, in one order.
    keys: dict[str, None] = {}
    for _, one in found:
        keys |= dict.fromkeys(one.variant.values)
    return [_row(place, one, keys, ranking.by) for place, one in found]


def _rows(own: Sequence[RankedVariant]) -> list[tuple[int, RankedVariant]]:
    return list(enumerate(own, 1))


def _row(place: int, one: RankedVariant, keys: Iterable[str], by: Side) -> dict[str, Any]:
    row: dict[str, Any] = {
        "method": one.variant.method,
        "rank": place,
        "label": one.variant.label,
        **dict.fromkeys(keys),
        **one.variant.values,
        "seeds": one.seeds,
        "trained_rounds": one.rounds,
        "ranked_by": by,
        "validation": None,
        "validation_deviation": None,
    }
    for side, score in one.scores.items():
        row[side] = score.mean
        row[f"{side}_deviation"] = score.deviation
    return row


def sweep_csv(ranking: Ranking) -> str:
    """The rows as a table; lists, tables and truth values are written as in TOML."""
    text = io.StringIO()
    listed = rows(ranking)
    writer = csv.DictWriter(text, list(listed[0]), lineterminator="\n")
    writer.writeheader()
    for row in listed:
        writer.writerow({key: _plain(value) for key, value in row.items()})
    return text.getvalue()


def _plain(value: Any) -> Any:
    return as_toml(value) if isinstance(value, bool | list | tuple | dict) else value
