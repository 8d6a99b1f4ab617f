"""A silo's data sets by name: what a job may ask for, and whose records it gets."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from ...errors import LocalError

DATASET = "data"  # the name where a silo's configuration gives none


@dataclass(frozen=True, slots=True)
class DataSets:
    """The data sets of a silo.

    ``records`` has, by the name that jobs ask for, the data set whose records these are: itself, or
    another one that is read otherwise. Jobs that ask for none are on the first, that of [data].
    """

    records: Mapping[str, str]

    @classmethod
    def one(cls, name: str = DATASET) -> Self:
        """A single data set."""
        return cls({name: name})

    @property
    def own(self) -> tuple[str, ...]:
        """Those with records of their own, to which budgets and rules belong; the first first."""
        return tuple(dict.fromkeys(self.records.values()))

    def aliases(self, own: str) -> frozenset[str]:
        """All names of these records, with their own."""
        return frozenset(name for name, of in self.records.items() if of == own)

    def of(self, asked: str | None) -> str:
        """Whose records a job gets that asks for this data set, or for none.

        LocalError where the silo has no such data set.
        """
        found = next(iter(self.records)) if asked is None else asked
        if found not in self.records:
            raise LocalError(
                f"the job is for data set {found!r}, and this silo has {', '.join(self.records)};"
                f" add [datasets.{found}] to its configuration, or have the job signed for another"
                " data set"
            )
        return self.records[found]
