"""How good a model is on records that it was not trained on: figures, intervals and thresholds.

Shares of records get Wilson's interval (E. B. Wilson, JASA 22, 1927, Eq. 4), other figures that of
a percentile bootstrap over records, or over groups of records where these belong together. Shares
of grouped records get the hull of both; where there is no bootstrap, that of as many records as
there are groups. All are 95 % intervals. The calibration error has none: it is larger in resamples
than in the records they were drawn from, so its interval would lie above it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import filterfalse, pairwise
from math import inf, sqrt
from operator import attrgetter, methodcaller
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..algorithms.data.dataset import Dataset, chunks_of, split
from ..algorithms.job.torchmetrics_counting import counted
from ..algorithms.numerics.streams import stream
from ..algorithms.tasks.counting import Counting, Marks, Tally
from ..algorithms.tasks.metrics_table import MetricsTable
from ..algorithms.tasks.task import Task
from ..algorithms.training.loop import evaluation_chunk, marked, never, stoppable
from ..errors import LocalError
from .description import Figures, Range, Threshold
from .predictor import Predictor

Z = 1.959963984540054  # the 97.5th percentile of the normal distribution
RESAMPLES = 400
FEWEST_RESAMPLES = 100  # of fewer, percentiles of 2.5 % say little
MOST_CELLS = 2**30  # that all resamples together count: half a minute
CLASS_CELLS = 512  # what the measures of one class cost, in marks that are counted
MOST_SCORES = 2**28  # places of scores, two bytes each
SCORE_BINS, RISK_BINS = 64, 64
MOST_CONFUSED = 100  # classes of a matrix in a description
BIASED = "calibration_error"  # has no interval (see above)
FEWEST = (
    5  # records of a class, and of the others, in either half: fewer tell nothing of a threshold
)
SHARES = ("sensitivity", "specificity", "precision")  # of a class's measures


def thorough(job_metrics: MetricsTable, task: Task, outputs: int, records: int) -> MetricsTable:
    """All measures of the task, whatever of them the job lets cross: these stay at the silo.

    Without scores where these would take gigabytes.
    """
    asked: dict[str, Any] = {
        "confusion": outputs <= MOST_CONFUSED,
        "score_bins": SCORE_BINS * (outputs * records <= MOST_SCORES),
        "targets": True,
        "risk_bins": RISK_BINS,
    }
    own = {key: value for key, value in asked.items() if key in task.own_metrics}
    return job_metrics.model_copy(update=own)


def counting_of(task: Task, outputs: int, metrics: MetricsTable, records: int) -> Counting:
    """What is counted of a model here on so many records, exactly."""
    return counted(task, outputs, thorough(metrics, task, outputs, records), noised=False)


def measured(
    predictor: Predictor,
    data: Dataset,
    counting: Counting,
    cancelled: Callable[[], bool] = never,
) -> Figures:
    """The figures of a model on records, which are at least one.

    CancelledError once ``cancelled()`` holds.
    """
    marks = marked(predictor.outputs, predictor.parts, data, counting, None, cancelled)
    whole = {name: np.concatenate(pieces) for name, pieces in marks.items()}
    return figures_of(counting, whole, data.y.cpu().numpy(), data.groups, cancelled)


def figures_of(
    counting: Counting,
    marks: Mapping[str, Marks],
    truth: Marks,
    groups: Sequence[str] | None = None,
    cancelled: Callable[[], bool] = never,
) -> Figures:
    """The figures that marks of records [N, …] give, with intervals.

    CancelledError once ``cancelled()`` holds.
    """
    tally = counting.count(_pieces(marks), [truth])
    said = tally.said()
    resampled = _resampled(counting, marks, truth, groups, said, cancelled)
    sure = filterfalse(methodcaller("endswith", BIASED), resampled)
    # Resamples that all say the same do not know how sure they are, nor do those without a number.
    known = filter(lambda name: 0 < np.ptp(resampled[name]) < inf, sure)
    intervals = {name: _percentiles(resampled[name]) for name in known}
    apart = independent(groups)
    for name, share, records in _shares(said, tally):
        own = wilson(share, records)
        # Records of one group say less than as many others.
        low, high = own if groups is None else intervals.get(name, wilson(share, records * apart))
        intervals[name] = min(low, own[0]), max(high, own[1])
    return Figures(
        records=tally.records,
        score=counting.score.key,
        said=said,
        baseline=tally.baseline,
        intervals=intervals,
    )


def independent(groups: Sequence[str] | None) -> float:
    """The least share of records that count, if those of one group all say the same."""
    return len(set(groups)) / len(groups) if groups else 1.0


def wilson(share: float, records: float) -> Range:
    """The interval of a share of so many records, of at least one."""
    records = max(records, 1.0)
    center = share + Z * Z / (2 * records)
    half = Z * sqrt(share * (1 - share) / records + Z * Z / (4 * records * records))
    scale = 1 + Z * Z / records
    # At the ends rounding would leave 1e-17 in place of 0.
    low = (center - half) / scale if share > 0 else 0.0
    high = (center + half) / scale if share < 1 else 1.0
    return low, high


def flat(said: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Each single figure by its path; of one with bounds its value."""
    match said:
        case {"value": float(value), "least": _, "most": _}:
            yield path, value
        case dict():
            for key, inner in said.items():
                yield from flat(inner, f"{path}.{key}" if path else str(key))
        case list():
            for place, inner in enumerate(said):
                yield from flat(inner, f"{path}.{place}")
        case float():
            yield path, said


def _pieces(marks: Mapping[str, Marks]) -> dict[str, list[Marks]]:
    return {name: [own] for name, own in marks.items()}


def _resampled(
    counting: Counting,
    marks: Mapping[str, Marks],
    truth: Marks,
    groups: Sequence[str] | None,
    said: Mapping[str, Any],
    cancelled: Callable[[], bool],
) -> dict[str, list[float]]:
    """Each figure of resamples with replacement; none where these would take too long."""
    # Records in the order of their groups; single records are groups of one.
    _, codes, sizes = np.unique(
        list(groups or range(len(truth))), return_inverse=True, return_counts=True
    )
    order, starts = np.argsort(codes, kind="stable"), np.cumsum(sizes) - sizes

    measures = CLASS_CELLS * len(said.get("classes", ()))
    cells = truth.size + sum(map(attrgetter("size"), marks.values())) + measures
    rounds = min(RESAMPLES, MOST_CELLS // cells)
    rng = stream(0, "", 0, "bootstrap")
    found: defaultdict[str, list[float]] = defaultdict(list)
    for _ in stoppable(range(rounds * (rounds >= FEWEST_RESAMPLES)), cancelled):
        groups_drawn = rng.integers(0, len(sizes), len(sizes))
        taken = sizes[groups_drawn]
        # The number of each drawn record in its group.
        inner = np.arange(taken.sum()) - np.repeat(np.cumsum(taken) - taken, taken)
        drawn = order[np.repeat(starts[groups_drawn], taken) + inner]
        here = {name: [mark[drawn]] for name, mark in marks.items()}
        for name, value in flat(counting.count(here, [truth[drawn]]).said()):
            found[name].append(value)
    return found


def _percentiles(values: Sequence[float]) -> Range:
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def _shares(said: Mapping[str, Any], tally: Tally) -> Iterator[tuple[str, float, int]]:
    """Figures that are shares of records: the path, the share, and of how many."""
    tested = tally.records
    if tally.balanced is not None:
        yield "accuracy", said["accuracy"], tested
    for place, own in enumerate(said.get("classes", ())):
        # Of the class, of all others, and those that were called it.
        right = (own["sensitivity"] or 0) * own["records"]
        called = round(right / (own["precision"] or inf))
        sizes = own["records"], tested - own["records"], called
        for name, records in zip(SHARES, sizes, strict=True):
            if records:
                yield f"classes.{place}.{name}", own[name], records


@dataclass(frozen=True, eq=False)
class CutOffInputs:
    """What is compared with thresholds [N, K], and what is true of it [N, K] bool.

    Of grouped records a share is ``independent``.
    """

    values: NDArray[np.float64]
    truths: NDArray[np.bool_]
    independent: float = 1.0


def thresholds(
    predictor: Predictor,
    data: Dataset,
    key: bytes,
    names: Sequence[str],
    cancelled: Callable[[], bool] = never,
) -> tuple[Threshold, ...]:
    """The thresholds of a model, chosen on one half of the records and measured on the other.

    ``key`` draws the halves, as it draws the silo's test records; ``names`` are those of the
    outputs. A threshold needs ``FEWEST`` records with and without its class in both halves.
    """
    task, count = predictor.task, predictor.task.cut_offs(len(names))
    if not count:
        return ()
    try:
        test, validation = split(data, key, 0.5)
    # Fewer than two records, or all on one side.
    except LocalError:
        return ()
    chosen, tested = (compared(predictor, task, side, cancelled) for side in (validation, test))
    found = []
    for place, name in enumerate(names[-count:]):
        truths = chosen.truths[:, place]
        # Of few records almost any threshold may be the best.
        if min(map(fewer, (truths, tested.truths[:, place]))) >= FEWEST:
            value = best_cut(chosen.values[:, place], truths)
            found.append(judged(name, value, len(truths), tested, place))
    return tuple(found)


def fewer(truths: NDArray[np.bool_]) -> int:
    """How many records of the rarer kind there are."""
    return int(min(truths.sum(), (~truths).sum()))


def compared(
    predictor: Predictor, task: Task, data: Dataset, cancelled: Callable[[], bool] = never
) -> CutOffInputs:
    """What a model's thresholds are compared with, of all records."""
    chunks = chunks_of(data, evaluation_chunk(data.x.shape, predictor.parts))
    pieces = [task.compared(predictor.answers(x)).double() for x, _ in stoppable(chunks, cancelled)]
    values, truths = torch.cat(pieces).numpy(), task.truths(data.y).numpy()
    return CutOffInputs(values, truths, independent(data.groups))


def judged(name: str, value: float, chosen_on: int, tested: CutOffInputs, place: int) -> Threshold:
    """A threshold, and what comes of it on records that did not choose it."""
    truths = tested.truths[:, place]
    called = tested.values[:, place] >= value
    has, lacks, own = int(truths.sum()), int((~truths).sum()), tested.independent
    sensitivity = float(called[truths].mean()) if has else None
    specificity = float((~called[~truths]).mean()) if lacks else None
    return Threshold(
        of=name,
        value=value,
        chosen_on=chosen_on,
        measured_on=len(truths),
        sensitivity=sensitivity,
        sensitivity_interval=None if sensitivity is None else wilson(sensitivity, has * own),
        specificity=specificity,
        specificity_interval=None if specificity is None else wilson(specificity, lacks * own),
    )


def best_cut(values: NDArray[np.float64], truths: NDArray[np.bool_]) -> float:
    """The threshold of the largest sensitivity + specificity - 1 (Youden, Cancer 3, 1950).

    ``values`` [N] are probabilities; both kinds of ``truths`` [N] occur. Of equal thresholds it is
    the one nearest to 0.5, and it lies in the middle between two values.
    """
    known = np.unique(values)
    cuts = np.array([0.0, *((low + high) / 2 for low, high in pairwise(known)), 1.0])
    own, others = np.sort(values[truths]), np.sort(values[~truths])
    caught = 1 - np.searchsorted(own, cuts) / len(own)
    spared = np.searchsorted(others, cuts) / len(others)
    index = caught + spared
    best = cuts[index >= index.max() - 1e-12]
    return float(best[np.abs(best - 0.5).argmin()])
