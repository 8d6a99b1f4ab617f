"""Where this silo trains: on the processor, or on a GPU that holds the records of the job at hand."""

import torch

from .. import log
from ..algorithms.data import Dataset
from ..algorithms.devices import CPU, find
from .admission import Admitted


class Place:
    """A device, and on it the records of one job; LocalError where this machine has no such device.

    Records that do not fit stay on the host, and are brought batch by batch. Those of a private job stay there, where
    its noise is drawn.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._device = find(device)
        self._held: tuple[Admitted, Dataset, Dataset] | None = None

    def of(self, admitted: Admitted) -> tuple[torch.device, Dataset, Dataset]:
        """The device that trains, the records to train on and those to test on."""
        if self._device == CPU or admitted.job.privacy is not None:
            return CPU, admitted.train, admitted.test
        if self._held is None or self._held[0] is not admitted:  # read anew, a job may have other records
            self._held = None  # first: it makes room
            self._held = admitted, *self._taken(admitted)
        return self._device, *self._held[1:]

    def _taken(self, admitted: Admitted) -> tuple[Dataset, Dataset]:
        try:
            return admitted.train.to(self._device), admitted.test.to(self._device)
        except torch.OutOfMemoryError as error:
            log.problem("records.host", job=admitted.job.name, device=str(self._device), why=str(error))
            return admitted.train, admitted.test
