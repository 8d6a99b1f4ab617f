"""TCGA-BRCA as FLamby prepares it: 39 features, six regions.

FLamby: Ogier du Terrail et al., 2022, arXiv:2210.04620. The folder holds FLamby's ``brca.csv``
(pid, features, E = 1 where the patient has died, T = days until then or until the patient was last
seen) and ``centers.csv``, which tells the region of a patient's hospital, the second part of the
pid. Patients of the rest of the world ("Other"), of whom there are eight, are left out, as in
FLamby.

FLamby's task is a Cox regression. Here it is survival in discrete time, with all patients, or one
of two classes: class 1 has died within a number of years, class 0 was seen alive after them. Who
was last seen alive before their end is neither, and is left out.

A record has shape [1, 1, 39], age as (age - 58) / 13, the mean and deviation of the public file,
and the rest 0 or 1.
"""

import csv
import io
from pathlib import Path

import numpy as np
import torch

from .....errors import LocalError, reason
from .....files.file_bounds import check_fits, open_regular
from ...dataset import Dataset
from ..formats.csv_file import Csv

REGIONS = ("Northeast", "South", "West", "Midwest", "Europe", "Canada")  # FLamby's clients 0 … 5
YEARS = 3
DAYS = 365  # of a year
CLASSES = ("alive", "dead")
AGE = "age_at_index"
FEATURES = (
    AGE,
    "ethnicity_not hispanic or latino",
    "ethnicity_not reported",
    "race_asian",
    "race_black or african american",
    "race_not reported",
    "race_white",
    "ajcc_pathologic_m_MX",
    "ajcc_pathologic_n_N0 (i-)",
    "ajcc_pathologic_n_N1",
    "ajcc_pathologic_n_N1a",
    "ajcc_pathologic_n_N2",
    "ajcc_pathologic_n_N2a",
    "ajcc_pathologic_stage_Stage IA",
    "ajcc_pathologic_stage_Stage IIA",
    "ajcc_pathologic_stage_Stage IIB",
    "ajcc_pathologic_stage_Stage IIIA",
    "ajcc_pathologic_stage_Stage IIIC",
    "ajcc_pathologic_t_T1c",
    "ajcc_pathologic_t_T2",
    "ajcc_pathologic_t_T3",
    "ajcc_staging_system_edition_5th",
    "ajcc_staging_system_edition_6th",
    "ajcc_staging_system_edition_7th",
    "icd_10_code_C50.9",
    "morphology_8500/3",
    "morphology_8520/3",
    "primary_diagnosis_Infiltrating duct carcinoma, NOS",
    "primary_diagnosis_Lobular carcinoma, NOS",
    "prior_malignancy_yes",
    "synchronous_malignancy_Not Reported",
    "treatment_or_therapy_not reported",
    "treatment_or_therapy_yes",
    "tumor_stage_stage i",
    "tumor_stage_stage ia",
    "tumor_stage_stage iia",
    "tumor_stage_stage iib",
    "tumor_stage_stage iiia",
    "tumor_stage_stage iiic",
)


def read_brca(folder: Path, years: int | None) -> Dataset:
    """Patients of the six regions, with ``years`` those whose class is known; an id is the pid.

    x is [N, 1, 1, 39], without T and E. Sources are the regions. Without ``years``, y is [N, 2] of
    all patients who were seen for a day or more: T, and E.
    """
    for name in ("brca.csv", "centers.csv"):
        if not (folder / name).is_file():
            raise LocalError(
                f"{folder / name}: no such file; put FLamby's brca.csv and centers.csv into that"
                " folder"
            )
    regions = _regions(folder / "centers.csv")

    # Age is scaled by constants, the same at all hospitals: a silo's own mean would be one more
    # figure computed from its patients (security rule 22).
    file = folder / "brca.csv"
    raw = Csv(
        kind="csv",
        file=file,
        id="pid",
        features=(*FEATURES, "T"),
        label="E",
        classes=("0.0", "1.0"),
        center={AGE: 58.0},
        scale={AGE: 13.0},
    ).read()

    # The second field of a pid is the site that collected the tissue.
    # A pid with one field only has no site, which is the same error.
    found = [regions.get(pid.split("-")[1]) if pid.count("-") else None for pid in raw.ids or ()]
    if None in found:
        raise LocalError(
            f"{file}, record {found.index(None) + 1}: centers.csv has no region for its pid; fetch"
            " both again"
        )

    # Who was alive when last seen, before the years were over, has no known class and is left out.
    # The last feature is T in days; E is 1 if the patient has died.
    days, died = raw.held[:, 0, 0, -1], raw.y == 1
    sources = tuple(region or "" for region in found)
    known = np.isin(np.array(sources), REGIONS)
    # T must not be a feature: it tells the class.
    x = raw.held[..., :-1].contiguous()
    if years is None:
        y = torch.stack([days, died.to(torch.float32)], dim=1)
        seen = np.flatnonzero((days > 0).numpy() & known)
        return Dataset(x, y, None, raw.ids, sources).take(seen)
    dead, alive = died & (days <= years * DAYS), days > years * DAYS
    kept = (dead | alive).numpy() & known
    return Dataset(x, dead.to(torch.int64), CLASSES, raw.ids, sources).take(np.flatnonzero(kept))


def _regions(file: Path) -> dict[str, str]:
    try:
        with (
            open_regular(file) as opened,
            io.TextIOWrapper(opened, "utf-8-sig", newline="") as lines,
        ):
            check_fits(file, file.stat().st_size, "its text")
            return {row["TSS Code"]: row["Region"] for row in csv.DictReader(lines, strict=True)}
    except OSError as error:
        raise LocalError(f"{file}: cannot read it: {reason(error)}") from error
    except (KeyError, UnicodeDecodeError, csv.Error) as error:
        raise LocalError(
            f"{file}: no table with columns 'TSS Code' and 'Region'; fetch FLamby's file again"
        ) from error
