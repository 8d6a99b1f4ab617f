"""Public sets whose records come from named sources: hospitals, persons, regions.

Each source can be a silo.

- "heart-disease": UCI Heart Disease (Detrano et al., 1989), files processed.cleveland.data and so
  on (heart_disease.py).
- "har": UCI HAR, smartphones worn by 30 persons (Anguita et al., 2013; har.py).
- "tcga-brca": breast cancer in six regions, as FLamby prepares it (Ogier du Terrail et al., 2022;
  tcga_brca.py).

A silo names its own sources, and needs no file of the others where they have files of their own.
"""

from itertools import filterfalse
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pydantic
from pydantic import Field

from .....errors import LocalError
from ...dataset import Dataset
from ...options import DataTable, Names
from ..formats.labelled import check_distinct
from .har import SUBJECTS, read_har
from .heart_disease import HOSPITALS, read_heart
from .tcga_brca import REGIONS, YEARS, read_brca

SOURCES = {"heart-disease": HOSPITALS, "har": SUBJECTS, "tcga-brca": REGIONS}


class Natural(DataTable):
    """``kind = "natural"``."""

    kind: Literal["natural"]
    name: Literal["heart-disease", "har", "tcga-brca"]
    folder: Path
    sources: Names | None = None
    """Sources whose records are taken; default: all."""
    years: Annotated[int, Field(strict=True, ge=1, le=10)] | None = None
    """For TCGA-BRCA: years within which class 1 has died; default: 3."""
    survival: Annotated[bool, Field(strict=True)] = False
    """For TCGA-BRCA: days until death, or until a patient was last seen, in place of classes."""

    @pydantic.model_validator(mode="after")
    def _known(self) -> "Natural":
        # A misspelt source would silently have no records.
        known, wanted = SOURCES[self.name], self.sources or ()
        for source in filterfalse(known.__contains__, wanted):
            raise ValueError(
                f"sources: {source!r} is not one of {self.name}; known: {', '.join(known)}"
            )
        check_distinct("sources", wanted)
        if self.years is not None and self.name != "tcga-brca":
            raise ValueError("years belongs to tcga-brca; leave it out")
        if self.survival and (self.name != "tcga-brca" or self.years is not None):
            raise ValueError("survival belongs to tcga-brca without years; leave one out")
        return self

    def read(self) -> Dataset:
        """The records of the table's sources, each with its source and an id.

        LocalError if the folder has no record of them.
        """
        wanted = self.sources or SOURCES[self.name]
        match self.name:
            case "heart-disease":
                return read_heart(self.folder, wanted)
            case "har":
                data = read_har(self.folder)
            case "tcga-brca":
                data = read_brca(self.folder, None if self.survival else self.years or YEARS)
        # Both sets are read as a whole; heart disease has one file per source.
        own = data.take(np.flatnonzero(np.isin(np.array(data.sources), wanted)))
        if not len(own):
            raise LocalError(
                f"{self.folder}: no record of {', '.join(wanted)}; name other sources, or complete"
                " the file"
            )
        return own
