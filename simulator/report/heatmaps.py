"""Heat maps of what a method learns of the silos: PNG of who is like whom, or of who mixes which
models.

=========  ===========================================  ============================================
method     what is drawn                                where it is from
=========  ===========================================  ============================================
pfedsim    Φ_ij, the weight of silo j's extractor for   ``phi`` of the coordinator's state
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
from dataclasses import dataclass
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
from ...algorithms.delivery import CoordinatorState
from ...algorithms.job.job import Job
from ...algorithms.methods.fedaims.method import FedAIMS
from ...algorithms.methods.fedsimsup.method import FedSimSup
from ...algorithms.methods.pfedsim import PFedSim
from ...algorithms.methods.ppfl import heatmap
from ...algorithms.methods.ppfl.method import PPFL
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
    """Numbers of N silos, [N, N] of one with another or [N, K] of a silo and a model.

    NaN where there is none.
    """

    title: str
    unit: str  # what a number is
    values: Numbers
    silos: tuple[str, ...]
    scale: tuple[float, float]  # of the colours; where it begins below zero, zero is white
    absent: str = ""  # why two silos may have no number

    @property
    def pairs(self) -> bool:
        """Whether the columns are the silos."""
        return bool(self.absent)


def heat_map(
    job: Job, coordinator: CoordinatorState, state: Callable[[str], SiloState]
) -> HeatMap | None:
    """What a simulation of this job came to.

    None where its method compares no silos, or has not compared any yet.

    ``state`` gives the last state of a silo.
    """
    method = configure(job.method_name, job.method_options, job.setting())
    match method:
        case PFedSim():
            rows = [method.weights(coordinator, silo) for silo in job.silos]
            phi = np.array([[row.get(silo, np.nan) for silo in job.silos] for row in rows])
            title = "pFedSim: whose extractors a silo is given"
            return _pairs(job, title, "Φ", "unlike, or never in a round together", phi)
        case FedSimSup() if method.labels:
            # [N, C], zeros for one without a census
            unit = normalize(coordinator["proportions"], dim=1).numpy()
            cosines = np.where(np.outer(unit.any(1), unit.any(1)), unit @ unit.T, np.nan)
            title = "FedSimSup: whose models a silo is given while it is away"
            return _pairs(job, title, "cosine of label proportions", "proportions unknown", cosines)
        case FedAIMS() if method.clusters:
            of = "updates" if method.options.similarity == "update" else "weights"
            seen = coordinator["similarity"].numpy()
            cosines = np.where(seen == 0, np.nan, seen)
            return _pairs(
                job,
                "FedAIMS: whose backbones are alike",
                f"cosine of {of}",
                "never in a round together",
                cosines,
            )
        case PPFL():
            shares = heatmap.simulated({silo: state(silo) for silo in job.silos})
            heatmap.check(shares, job.silos)
            title = "PPFL: which models a silo mixes"
            return HeatMap(
                title, "share of the model", shares.double().numpy(), job.silos, (0.0, 1.0)
            )
        case _:
            return None


def _pairs(job: Job, title: str, unit: str, absent: str, values: Numbers) -> HeatMap | None:
    """None where no pair has a number; a silo and itself have none."""
    others = np.where(np.eye(len(values), dtype=bool), np.nan, values)
    known = others[np.isfinite(others)]
    if not len(known):
        return None
    high = float(np.quantile(np.abs(known), SHOWN))
    return HeatMap(
        title, unit, others, job.silos, (-high if bool((known < 0).any()) else 0.0, high), absent
    )


def by_class(counts: Counts) -> list[int]:
    """Silos by the class of which they have most records [N, C], among those of one class the
    purest first.
    """
    dominant, largest = counts.argmax(1), counts.max(1) / np.maximum(counts.sum(1), 1)
    return sorted(range(len(counts)), key=lambda silo: (dominant[silo], -largest[silo]))


def by_likeness(found: HeatMap) -> list[int]:
    """Silos with the same main model together.

    Pairs as the leaves of their tree of clusters, average linkage.
    """
    if not found.pairs:
        main, share = found.values.argmax(1), found.values.max(1)
        return sorted(range(len(main)), key=lambda silo: (main[silo], -share[silo]))
    # where there is no number: not alike
    alike = np.nan_to_num(np.clip(found.values, *found.scale))
    apart = found.scale[1] - (alike + alike.T) / 2
    above = apart[np.triu_indices(len(apart), 1)]
    return [
        int(silo)
        for silo in leaves_list(
            linkage(above, "average", optimal_ordering=len(apart) <= MOST_OPTIMAL)
        )
    ]


def png(found: HeatMap, counts: Counts | None = None, classes: Sequence[str] = ()) -> bytes:
    """PNG: the silos in job order, by likeness, and where ``counts`` [N, C] are given by dominant
    class.

    ``classes`` are the names of the classes; numbers where not given.
    """
    n, columns = found.values.shape
    if counts is not None and len(counts) != n:
        raise LocalError(
            f"a heat map of {n} silos, and class counts of {len(counts)}; give those of the same"
            " silos"
        )
    orders = {"silos in job order": list(range(n)), "silos by likeness": by_likeness(found)}
    if counts is not None:
        orders["silos by dominant class"] = by_class(counts)
    high = min(max(3.0, 0.2 * n), 5.0)
    names = 0.06 * max(map(len, found.silos)) if n <= MOST_NAMES and found.pairs else 0.0  # inches
    wide = high if found.pairs else min(0.4 * columns + 1.0, 5.0)

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, len(orders))
        for axes, (title, order) in zip(panels, orders.items(), strict=True):
            image = _cells(axes, found, order)
            axes.set_title(title)
        if counts is not None:
            _blocks(panels[-1], found, counts[by_class(counts)].argmax(1), classes)
        beyond: Literal["both", "max"] = "both" if found.scale[0] < 0 else "max"
        figure.colorbar(
            image, ax=panels, label=found.unit, shrink=0.8, extend=beyond if found.pairs else None
        )
        figure.suptitle(found.title)
        if found.pairs:
            figure.supxlabel(f"grey: {found.absent}; or a silo and itself", fontsize="small")

    return picture(len(orders) * wide + 2.4, high + 1.3 + names, draw)


def _cells(axes: Axes, found: HeatMap, order: Sequence[int]) -> AxesImage:
    values = found.values[order][:, order] if found.pairs else found.values[order]
    colours = mpl.colormaps["RdBu_r" if found.scale[0] < 0 else "viridis"].with_extremes(
        bad=NOTHING
    )
    image = axes.imshow(
        values, colours, aspect="equal" if found.pairs else "auto", clim=found.scale
    )
    axes.spines[:].set_visible(False)
    names = [found.silos[silo] for silo in order] if len(order) <= MOST_NAMES else []
    axes.set_yticks(range(len(names)), names, fontsize="x-small")
    if found.pairs:
        axes.set_xticks(range(len(names)), names, fontsize="x-small", rotation=90)
    else:
        axes.set_xticks(range(found.values.shape[1]))
        axes.set_xlabel("model")
    return image


def _blocks(
    axes: Axes, found: HeatMap, dominant: NDArray[np.int64], classes: Sequence[str]
) -> None:
    """Lines between the silos of one class and the next, and the classes' names beside those with
    room for them.
    """
    ends = [0, *(np.flatnonzero(np.diff(dominant)) + 1).tolist(), len(dominant)]
    colour = "#666666" if found.scale[0] < 0 else "white"
    for end in ends[1:-1]:
        axes.axhline(end - 0.5, color=colour, linewidth=0.8)
        if found.pairs:
            axes.axvline(end - 0.5, color=colour, linewidth=0.8)
    roomy = [
        (start, end) for start, end in pairwise(ends) if end - start >= len(dominant) / MOST_NAMES
    ]
    named = [
        classes[label] if classes else str(label)
        for label in (int(dominant[start]) for start, _ in roomy)
    ]
    axes.set_yticks([(start + end - 1) / 2 for start, end in roomy], named, fontsize="x-small")
    axes.set_ylabel("class")
