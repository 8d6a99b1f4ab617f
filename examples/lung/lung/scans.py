"""Scans of a hospital: a folder with one volume per patient, and a table of what became of them.

::

    scans/patients.csv     patient,days,died
                           p001,412,1
    scans/p001.npy         int16 [depth, height, width], Hounsfield units
"""

import csv
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

TABLE = "patients.csv"
CENTER, SCALE = -400.0, 400.0  # Hounsfield units: the same constants at all hospitals


def as_record(volume: np.ndarray) -> Tensor:
    """A volume in Hounsfield units as a record [1, depth, height, width]."""
    return torch.from_numpy((volume[None].astype(np.float32) - CENTER) / SCALE)


class Scans(Dataset):
    """Reads a volume when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with (folder / TABLE).open(newline="") as file:
            rows = list(csv.DictReader(file))
        # Staddle draws by ids which records are for testing, and knows from targets what is true
        # of each record without reading its volume.
        self.ids = [row["patient"] for row in rows]
        self.targets = [[float(row["days"]), float(row["died"])] for row in rows]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[Tensor, list[float]]:
        volume = np.load(self.folder / f"{self.ids[index]}.npy")
        return as_record(volume), self.targets[index]


def scans(path: Path | None) -> Dataset:
    """What Staddle calls: ``path`` is ``data.folder`` of the silo's configuration."""
    if path is None:
        raise ValueError(f"name the folder of {TABLE} and the volumes as data.folder")
    return Scans(path)
