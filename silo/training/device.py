"""Where and how this silo trains: on the processor, or on a GPU that holds the records of the job at hand."""

from dataclasses import dataclass

import torch

from ... import log
from ...algorithms.data.dataset import Dataset
from ...algorithms.engines.cuda_graph_step import way_on
from ...algorithms.numerics.devices import CPU, Precision, check_precision, find
from ...algorithms.training.loop import PLAIN, Way
from ..admission.checks import Admitted


@dataclass(frozen=True, eq=False)
class Here:
    """What a round of one job is given: the device that trains, how, the records to train on and those to test on."""

    device: torch.device
    way: Way
    train: Dataset
    test: Dataset


class Place:
    """A device, and on it the records of one job; LocalError where this machine has no such device.

    Records that do not fit stay on the host, and are brought batch by batch. A private job is trained on the host,
    where its noise is drawn. On a GPU ``precision`` is that of training steps, which are replayed where there are
    to be ``graphs``.
    """

    def __init__(self, device: str = "cpu", precision: Precision = "float32", *, graphs: bool = True) -> None:
        self._device, self._precision, self._graphs = find(device), precision, graphs
        check_precision(self._device, precision)
        self._held: tuple[Admitted, Here] | None = None

    def of(self, admitted: Admitted) -> Here:
        """What a round of the job is given."""
        if self._device == CPU or admitted.job.privacy is not None:
            return Here(CPU, PLAIN, admitted.train, admitted.test)
        if self._held is None or self._held[0] is not admitted:  # read anew, a job may have other records
            self._held = None  # first: it makes room
            way = way_on(self._device, self._precision, graphs=self._graphs)  # anew: its memory is that of one job
            self._held = admitted, Here(self._device, way, *self._taken(admitted))
        return self._held[1]

    def _taken(self, admitted: Admitted) -> tuple[Dataset, Dataset]:
        try:
            return admitted.train.to(self._device), admitted.test.to(self._device)
        except torch.OutOfMemoryError as error:
            log.problem("records.host", job=admitted.job.name, device=str(self._device), why=str(error))
            return admitted.train, admitted.test
