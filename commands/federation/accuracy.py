"""What jobs of a local federation came to, from the report that each silo keeps.

The coordinator knows sums over silos only.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..terminal.printer import PrintedTable
from .local_federation import LocalFederation


def reports(federation: LocalFederation, silo: str, names: Sequence[str]) -> list[dict[str, Any]]:
    """A silo's reports of jobs that have ended there."""
    jobs = federation.state(silo) / "jobs"
    return [json.loads((jobs / name / "report.json").read_text()) for name in names]


def correct(report: Mapping[str, Any]) -> int:
    """Test records that a silo's final model got right; each method says which model that is."""
    return int(sum(report["final"][report["product"]]["by_class"][0]))


def accuracy_table(
    federation: LocalFederation, silos: Sequence[str], jobs: Mapping[str, str]
) -> PrintedTable:
    """A row per silo and one for all, a column per job.

    ``jobs`` has the columns' titles, with the names of jobs that have ended at these silos.
    """
    columns = ("silo", "train", "test", "classes", "one class", *jobs)
    rows: list[Sequence[str]] = []
    totals = [0] * len(jobs)
    tested = frequent = 0
    for silo in silos:
        found = reports(federation, silo, list(jobs.values()))
        right = list(map(correct, found))
        # The same for all jobs: the split follows from the silo's own key, not from the job.
        final = found[0]["final"]["tested"]
        tested += final
        # What a model reaches that says one class for all.
        own_frequent = max(found[0]["final"]["trained"]["by_class"][1])
        frequent += own_frequent
        totals = [total + own for total, own in zip(totals, right, strict=True)]
        present = sum(count > 0 for count in found[0]["classes"])
        shown = [f"{own / final:.1%}" for own in right]
        sizes = (str(found[0]["samples"]), str(final), str(present))
        rows.append((silo, *sizes, f"{own_frequent / final:.1%}", *shown))

    # Over records, not silos: a small silo counts for less.
    shares = (f"{total / tested:.1%}" for total in (frequent, *totals))
    rows.append(("all", "", str(tested), "", *shares))
    title = "Accuracy on each silo's own held-out records"
    return PrintedTable(columns, rows, range(1, len(columns)), (len(rows) - 2,), title=title)
