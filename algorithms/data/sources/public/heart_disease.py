"""UCI Heart Disease: four hospitals, 13 features, heart disease absent or present.

The file's column num is 0 where it is absent, 1 … 4 where it is present. Janosi, Steinbrunn,
Pfisterer & Detrano, 1989, doi:10.24432/C52P4X. A record has shape [1, 1, 22]: numbers as (value -
centre) / scale, codes one-hot. Centres and scales are round figures near the means and deviations
that Cleveland's public file has. A missing number counts as its centre, a missing code as the
declared one; nothing is computed from a silo's records. A cholesterol or blood pressure of 0 is a
missing one: Switzerland has no other.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from .....errors import LocalError, check_local
from ...dataset import Dataset
from ..formats.csv_file import Csv

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
NUMBERS = {  # column → (centre, scale)
    "age": (54.0, 9.0),
    "sex": (0.0, 1.0),
    "trestbps": (132.0, 18.0),
    "chol": (247.0, 52.0),
    "fbs": (0.0, 1.0),
    "thalach": (150.0, 23.0),
    "exang": (0.0, 1.0),
    "oldpeak": (1.0, 1.2),
    "ca": (0.0, 1.0),
}
CODES = {"cp": (1, 2, 3, 4), "restecg": (0, 1, 2), "slope": (1, 2, 3), "thal": (3, 6, 7)}
MISSING_CODES = {"restecg": 0, "slope": 2, "thal": 3}
NEVER_ZERO = ("trestbps", "chol")
FEATURES = (
    *("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg"),
    *("thalach", "exang", "oldpeak", "slope", "ca", "thal"),
)
CLASSES = ("absent", "present")
DEGREES = 4  # degrees of narrowing; each of them is class 1


def read_heart(folder: Path, hospitals: Sequence[str]) -> Dataset:
    """The records of these hospitals; an id is the hospital and the record's place in its file.

    They are in the order of ``hospitals``, and within one of its file.
    """
    xs, ys = [], []
    ids: list[str] = []
    sources: list[str] = []
    for hospital in hospitals:
        x, y = _read(folder, hospital)
        xs.append(x)
        ys.append(y)
        ids.extend(f"{hospital}/{number}" for number in range(len(y)))
        sources.extend([hospital] * len(y))
    records = torch.cat(xs)[:, None, None]
    return Dataset(records, torch.cat(ys), CLASSES, tuple(ids), tuple(sources))


def _read(folder: Path, hospital: str) -> tuple[Tensor, Tensor]:
    file = folder / f"processed.{hospital}.data"
    check_local(
        file.is_file(), f"{file}: no such file; put {file.name} of UCI's heart+disease.zip there"
    )
    # Age and sex may not be missing, so no value stands in for them.
    centres = {name: centre for name, (centre, _) in NUMBERS.items() if name not in ("age", "sex")}
    raw = Csv(
        kind="csv",
        file=file,
        columns=(*FEATURES, "num"),
        features=FEATURES,
        label="num",
        missing={**centres, **MISSING_CODES},
        missing_marks=dict.fromkeys(FEATURES, ("?",)),
    ).read()
    check_local(
        bool(torch.isin(raw.y, torch.arange(DEGREES + 1)).all()),
        f"{file}, column 'num': holds a label outside 0 … {DEGREES}; fetch the official file again",
    )
    columns = [_column(file, name, raw.held[:, 0, 0, place]) for place, name in enumerate(FEATURES)]
    # Degrees 1 to 4 are all class 1.
    return torch.cat(columns, dim=1), (raw.y > 0).to(torch.int64)


def _column(file: Path, name: str, values: Tensor) -> Tensor:
    """A number as [N, 1], a code one-hot as [N, codes]."""
    # By constants, the same at all hospitals: a hospital's own means would tell of its records.
    if name in CODES:
        # [N, codes], one column per code; all False if the value is none of them.
        hot = values[:, None] == torch.tensor(CODES[name])
        if not hot.any(1).all():
            raise LocalError(
                f"{file}, column {name!r}: holds none of the codes {CODES[name]}; fetch it again"
            )
        return hot.to(torch.float32)
    centre, scale = NUMBERS[name]
    # Nobody has a blood pressure or cholesterol of 0: some files have it for a missing value.
    if name in NEVER_ZERO:
        values = values.where(values != 0, centre)
    return ((values - centre) / scale)[:, None]
