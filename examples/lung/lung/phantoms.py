"""Made-up patients, to try this package: a ball in noise, and a time that depends on the ball.

``python -m lung.phantoms FOLDER --patients 80 --hospital 1`` writes a folder as ``scans`` reads it.
"""

import argparse
import csv
from pathlib import Path

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from .scans import TABLE, as_record

YEAR = 365.0


def phantom(number: int, side: int, hospital: int) -> tuple[np.ndarray, list[float]]:
    """A volume int16 [side, side, side] in Hounsfield units; days, and 1 for death.

    The larger and denser the ball, the sooner the end. Scanners of hospitals differ in brightness.
    """
    rng = np.random.default_rng([hospital, number])
    radius, density = rng.uniform(0.08, 0.3) * side, rng.uniform(0, 1)
    middle = rng.uniform(radius, side - radius, 3)
    place = np.stack(np.meshgrid(*[np.arange(side)] * 3, indexing="ij"), axis=-1)
    inside = np.linalg.norm(place - middle, axis=-1) < radius
    volume = rng.normal(-800 + 25 * hospital, 60, (side, side, side))
    volume[inside] += 500 + 400 * density

    severity = (radius / side - 0.19) / 0.06 + (density - 0.5) / 0.3
    death = rng.exponential(2 * YEAR * np.exp(-severity)) + 1
    last_seen = rng.uniform(YEAR, 6 * YEAR)
    return volume.astype(np.int16), [float(min(death, last_seen)), float(death <= last_seen)]


class Phantoms(Dataset):
    """Patients of one or several hospitals, made when they are asked for."""

    def __init__(self, patients: int, side: int, hospitals: list[int]) -> None:
        self.side = side
        self.who = [(number, own) for own in hospitals for number in range(patients)]
        self.ids = [f"{own}-{number}" for number, own in self.who]
        self.sources = [f"hospital-{own}" for _, own in self.who]

    def __len__(self) -> int:
        return len(self.who)

    def __getitem__(self, index: int) -> tuple[Tensor, list[float]]:
        number, hospital = self.who[index]
        volume, truth = phantom(number, self.side, hospital)
        return as_record(volume), truth


def phantoms(
    _: Path | None, patients: int = 80, side: int = 16, hospital: int = 0, hospitals: int = 4
) -> Dataset:
    """What Staddle calls, with no path: patients of one ``hospital``, or else of the first few."""
    return Phantoms(patients, side, [hospital] if hospital else list(range(1, hospitals + 1)))


def write(folder: Path, patients: int, side: int, hospital: int) -> None:
    """A folder of made-up patients."""
    folder.mkdir(parents=True)
    with (folder / TABLE).open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["patient", "days", "died"])
        for number in range(patients):
            volume, (days, died) = phantom(number, side, hospital)
            np.save(folder / f"p{number:04}.npy", volume)
            table.writerow([f"p{number:04}", round(days, 1), int(died)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write a folder of made-up patients.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--patients", type=int, default=80)
    parser.add_argument("--side", type=int, default=16)
    parser.add_argument("--hospital", type=int, default=1)
    given = parser.parse_args()
    write(given.folder, given.patients, given.side, given.hospital)
