"""Heat maps of what a method learns of the silos: who is like whom, or who mixes which models.

=========  ===========================================  ============================================
method     what is drawn                                where it is from
=========  ===========================================  ============================================
pfedsim    Φ_ij, the weight of silo j's extractor for   ``weights`` of the coordinator's state
           silo i
fedsimsup  s_ij, the cosine of label proportions        ``proportions`` of the coordinator's state
fedaims    cosine of the backbones' updates, or of the  ``similarity`` of the coordinator's state,
           backbones                                    with ``sampling = "algorithm2"`` only
ppfl       c_ik, the share of model k in silo i's       ``membership`` of the silos' states
           mixture
=========  ===========================================  ============================================

The other methods compare no silos. In a simulation all of this is at hand; in a federation a
coordinator has no more of it than the method's wire list says.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from numpy.typing import NDArray
from scipy.cluster.hierarchy import leaves_list, linkage
from torch.nn.functional import normalize

from ...algorithms.catalog import configure
from ...algorithms.course import SiloState
from ...algorithms.exchange.delivery import CoordinatorState
from ...algorithms.job.job import Job
from ...algorithms.methods.fedaims.method import FedAIMS
from ...algorithms.methods.fedsimsup.method import FedSimSup
from ...algorithms.methods.pfedsim import PFedSim
from ...algorithms.methods.ppfl import heatmap
from ...algorithms.methods.ppfl.method import PPFL
from ...algorithms.partition.picture import by_class
from ...errors import LocalError
from .style import picture

Numbers = NDArray[np.float64]
Counts = NDArray[np.int64]

MOST_NAMES = 40  # along a side
# of the numbers of pairs have a colour of their own; a few large ones would leave the rest dark
SHOWN = 0.99
NOTHING = "#bdbdbd"  # where there is no number; on none of the scales
# silos whose leaves are turned so that neighbours are most alike, which takes their cube
MOST_OPTIMAL = 200


@dataclass(frozen=True, eq=False)
class HeatMap:
    """Numbers of N silos: [N, N] for pairs of silos, or [N, K] for a silo and a model.

    NaN where there is no number.
    """

    title: str
    unit: str  # what a number is
    values: Numbers
    silos: tuple[str, ...]
    scale: tuple[float, float]  # of the colours; where it begins below zero, zero is white
    absent: str = ""  # why two silos may have no number

    @property
    def pairs(self) -> bool:
        """True if the columns are silos, not models."""
        return bool(self.absent)

    @property
    def diverging(self) -> bool:
        """True if the scale begins below zero."""
        return self.scale[0] < 0


def heat_map(
    job: Job, coordinator: CoordinatorState, state: Callable[[str], SiloState] | None
) -> HeatMap | None:
    """The heat map of a simulated job.

    None where its method compares no silos, or has not compared any yet. ``state`` returns the last
    state of a silo; None where these were not kept.
    """
    # Configured as in the job, since options decide what a method compares.
    method = configure(job.method_name, job.method_options, job.setting())
    match method:
        case PFedSim():
            return _pfedsim(job, method, coordinator)
        case FedSimSup() if method.labels:
            return _fedsimsup(job, coordinator)
        case FedAIMS() if method.clusters:
            return _fedaims(job, method, coordinator)
        case PPFL() if state is not None:
            return _ppfl(job, state)
        case _:
            return None


def _pfedsim(job: Job, method: PFedSim, coordinator: CoordinatorState) -> HeatMap | None:
    rows = []
    for silo in job.silos:
        own = method.weights(coordinator, silo)
        # only positive weights are there: a pair without one takes nothing of each other
        rows.append([own.get(other, np.nan) for other in job.silos])
    weights = np.array(rows)
    title = "pFedSim: whose extractors a silo receives"
    return _pairs(job, title, "Φ", "dissimilar, or never in a round together", weights)


def _fedsimsup(job: Job, coordinator: CoordinatorState) -> HeatMap | None:
    # [N, C], zeros for a silo without a census
    unit = normalize(coordinator["proportions"], dim=1).numpy()
    cosines = np.where(np.outer(unit.any(1), unit.any(1)), unit @ unit.T, np.nan)
    title = "FedSimSup: whose models a silo receives while it is away"
    return _pairs(job, title, "cosine of label proportions", "proportions unknown", cosines)


def _fedaims(job: Job, method: FedAIMS, coordinator: CoordinatorState) -> HeatMap | None:
    compared = "updates" if method.options.similarity == "update" else "weights"
    similarity = coordinator["similarity"].numpy()
    # 0 stands for a pair that was never compared, not for one without similarity.
    cosines = np.where(similarity == 0, np.nan, similarity)
    title = "FedAIMS: whose backbones are similar"
    return _pairs(job, title, f"cosine of {compared}", "never in a round together", cosines)


def _ppfl(job: Job, state: Callable[[str], SiloState]) -> HeatMap:
    shares = heatmap.simulated({silo: state(silo) for silo in job.silos})
    heatmap.check(shares, job.silos)
    values = shares.double().numpy()
    title = "PPFL: which models a silo mixes"
    return HeatMap(
        title=title,
        unit="share of the model",
        values=values,
        silos=job.silos,
        scale=(0.0, 1.0),
    )


def _pairs(job: Job, title: str, unit: str, absent: str, values: Numbers) -> HeatMap | None:
    """None where no pair has a number; a silo and itself have none."""
    # A silo's similarity to itself would stretch the scale and hide all differences.
    itself = np.eye(len(values), dtype=bool)
    others = np.where(itself, np.nan, values)
    known = others[np.isfinite(others)]
    if not len(known):
        return None

    # a few large numbers would leave the rest dark
    high = float(np.quantile(np.abs(known), SHOWN))
    low = 0.0
    if (known < 0).any():
        low = -high
    return HeatMap(
        title=title,
        unit=unit,
        values=others,
        silos=job.silos,
        scale=(low, high),
        absent=absent,
    )


def by_likeness(found: HeatMap) -> list[int]:
    """The silos in an order that puts like ones together.

    Pairs: the leaves of their cluster tree, average linkage. Otherwise: by main model.
    """
    if not found.pairs:
        # By main model, and its share.
        main, share = found.values.argmax(1), found.values.max(1)
        return sorted(range(len(main)), key=lambda silo: (main[silo], -share[silo]))
    # two silos without a number count as not alike
    similarity = np.nan_to_num(np.clip(found.values, *found.scale))
    distance = found.scale[1] - (similarity + similarity.T) / 2
    # scipy takes the upper triangle, row by row.
    condensed = distance[np.triu_indices(len(distance), 1)]
    optimal = len(distance) <= MOST_OPTIMAL
    tree = linkage(condensed, "average", optimal_ordering=optimal)
    return list(map(int, leaves_list(tree)))


def png(found: HeatMap, counts: Counts | None = None, classes: Sequence[str] = ()) -> bytes:
    """PNG with a panel per order of the silos: job order, likeness, dominant class.

    The last panel needs ``counts``, the records by silo and class [N, C]. ``classes`` are the names
    of the classes; numbers stand in where there are none.

    Cells without a number are grey. LocalError if ``counts`` has another number of silos.
    """
    every = len(found.values)
    if counts is not None and len(counts) != every:
        raise LocalError(
            f"a heat map of {every} silos, and class counts of {len(counts)}; give those of the"
            " same silos"
        )
    found, counts = _compared(found, counts)
    n, columns = found.values.shape

    # groups show in one order alone: in job order they may be scattered
    orders = {"silos in job order": list(range(n)), "silos by likeness": by_likeness(found)}
    if counts is not None:
        orders["silos by dominant class"] = by_class(counts)

    # inches: pairs are square, and their names stand along two sides
    height = min(max(3.0, 0.2 * n), 5.0)
    width, names = min(0.4 * columns + 1.0, 5.0), 0.0
    if found.pairs:
        width = height
        if n <= MOST_NAMES:
            names = 0.06 * max(map(len, found.silos))

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, len(orders))
        for axes, (title, order) in zip(panels, orders.items(), strict=True):
            image = _cells(axes, found, order)
            axes.set_title(title)
        if counts is not None:
            dominant = counts[by_class(counts)].argmax(1)
            _blocks(panels[-1], found, dominant, classes)
        # the scale leaves out the largest numbers of pairs, so its ends are drawn as open
        beyond: Literal["both", "max"] | None = None
        if found.pairs:
            beyond = "both" if found.diverging else "max"
            figure.supxlabel(f"grey: {found.absent}; or a silo and itself", fontsize="small")
        figure.colorbar(image, ax=panels, label=found.unit, shrink=0.8, extend=beyond)
        figure.suptitle(found.title)

    return picture(len(orders) * width + 2.4, height + 1.3 + names, draw)


def _compared(found: HeatMap, counts: Counts | None) -> tuple[HeatMap, Counts | None]:
    """Of many silos those that have a number with another; the rest would be grey alone."""
    every = len(found.values)
    # A mixture of models has numbers for all.
    if not found.pairs or every <= MOST_NAMES:
        return found, counts
    known = np.isfinite(found.values)
    kept = np.flatnonzero(known.any(1) | known.any(0))
    if len(kept) == every:
        return found, counts
    some = replace(
        found,
        title=f"{found.title}\n{len(kept):,} of {every:,} silos; the others: {found.absent}",
        values=found.values[np.ix_(kept, kept)],
        silos=tuple(found.silos[silo] for silo in kept),
    )
    return some, None if counts is None else counts[kept]


def _cells(axes: Axes, found: HeatMap, order: Sequence[int]) -> AxesImage:
    palette = "RdBu_r" if found.diverging else "viridis"
    colours = mpl.colormaps[palette].with_extremes(bad=NOTHING)
    names = []
    if len(order) <= MOST_NAMES:  # more would overlap
        names = [found.silos[silo] for silo in order]
    values = found.values[order]
    if found.pairs:
        image = axes.imshow(values[:, order], colours, aspect="equal", clim=found.scale)
        axes.set_xticks(range(len(names)), names, fontsize="x-small", rotation=90)
    else:
        image = axes.imshow(values, colours, aspect="auto", clim=found.scale)
        axes.set_xticks(range(found.values.shape[1]))
        axes.set_xlabel("model")
    axes.set_yticks(range(len(names)), names, fontsize="x-small")
    axes.spines[:].set_visible(False)
    return image


def _blocks(
    axes: Axes, found: HeatMap, dominant: NDArray[np.int64], classes: Sequence[str]
) -> None:
    """Lines between the silos of one class and the next, and names for classes with room."""
    # A border wherever the dominant class changes.
    borders = (np.flatnonzero(np.diff(dominant)) + 1).tolist()
    colour = "#666666" if found.diverging else "white"
    for border in borders:
        axes.axhline(border - 0.5, color=colour, linewidth=0.8)
        if found.pairs:
            axes.axvline(border - 0.5, color=colour, linewidth=0.8)

    middles, names = [], []
    for start, end in pairwise([0, *borders, len(dominant)]):
        # names of smaller classes would overlap
        if end - start >= len(dominant) / MOST_NAMES:
            label = int(dominant[start])
            middles.append((start + end - 1) / 2)
            names.append(classes[label] if classes else str(label))
    axes.set_yticks(middles, names, fontsize="x-small")
    axes.set_ylabel("class")
