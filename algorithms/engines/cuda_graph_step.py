"""One silo's training steps as a device replays them: what a step launches is recorded once in a stage.

For models so small that launching their kernels one by one takes longer than they do; a large one trains as ``Plain``.
"""

from torch import Size, Tensor, device

from ..method import Stage
from ..numerics.devices import CPU, Precision
from ..training.loop import PLAIN, Modules, Plain, Step, Way
from .cuda_graphs import Graphs, Recorder, Replayed

SMALL_BYTES = 32 * 2**20  # of parameters; ResNet-18 takes 45 MB


class Replaying(Plain):
    """As ``Plain``, and the same bits: from its third step on, a batch of some size is not launched but replayed."""

    def __init__(self, recorder: Recorder, precision: Precision = "float32") -> None:
        super().__init__(precision)
        self._recorder = recorder

    def begin(self, modules: Modules, stage: Stage) -> Step:
        """The step on one batch."""
        step = super().begin(modules, stage)
        if sum(p.nbytes for module in modules.values() for p in module.parameters()) > SMALL_BYTES:
            return step
        known: dict[Size, Replayed] = {}  # by the shape of x

        def replayed(x: Tensor, y: Tensor) -> Tensor:
            if x.shape not in known:
                known[x.shape] = Replayed(step, self._recorder)
            return known[x.shape](x, y).clone()

        return replayed


def way_on(device: device, precision: Precision = "float32", *, graphs: bool = True) -> Way:
    """How silos train one by one on a device, in a precision that it has (``check_precision``)."""
    if device == CPU:
        return PLAIN
    return Replaying(Graphs(str(device)), precision) if graphs else Plain(precision)
