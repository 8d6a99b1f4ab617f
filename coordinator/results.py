"""What a job gave, read from the coordinator's folder, also while the daemon runs: files for people and programs.

::

    <out>/rounds.csv         round, members, then a column a sum of METRICS
    <out>/job.json           state and rounds
    <out>/<part>.safetensors what the last closed round published
    <out>/result.safetensors what the method's coordinator half knew in the end, where it has such a thing
"""

import csv
import io
import json
import shutil
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from ..errors import LocalError
from ..files import write_atomic
from .store import RESULT

Round = Mapping[str, Any]  # round, members, metrics


def read(directory: Path, job: str) -> tuple[dict[str, Any], list[Round], dict[str, Path]]:
    """State, closed rounds and published files (by part) of one job; LocalError where there is none."""
    path = directory / "coordinator.sqlite"
    if not path.exists():
        raise LocalError(f"{path}: no such file; a coordinator with this configuration has not run yet")
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            found = connection.execute("SELECT state FROM jobs WHERE name = ?", (job,)).fetchone()
            if found is None:
                known = [name for (name,) in connection.execute("SELECT name FROM jobs ORDER BY position")]
                raise LocalError(f"{path}: has no job {job!r}; it has {', '.join(known) or 'none'}")
            rows = connection.execute("SELECT round, members, metrics FROM rounds WHERE job = ? ORDER BY round", (job,))
            rounds: list[Round] = [{"round": n, "members": json.loads(m), "metrics": json.loads(s)} for n, m, s in rows]
            files = connection.execute("SELECT part, file FROM files WHERE job = ? AND room = 'result'", (job,))
            published = {part: directory / "jobs" / job / file for part, file in files}
    except sqlite3.Error as error:
        raise LocalError(f"{path}: cannot read it: {error}") from error
    state: dict[str, Any] = json.loads(found[0])
    return state, rounds, published


def write(out: Path, state: Mapping[str, Any], rounds: Sequence[Round], published: Mapping[str, Path]) -> list[Path]:
    """Write what there is into a folder; the files. Existing ones of the same name are replaced."""
    out.mkdir(parents=True, exist_ok=True)
    made = [out / "rounds.csv", out / "job.json"]
    write_atomic(made[0], to_csv(rounds).encode(), 0o644)
    document = json.dumps({"state": state, "rounds": list(rounds)}, indent=1) + "\n"
    write_atomic(made[1], document.encode(), 0o644)
    folders = {path.parent for path in published.values()}
    extra = {RESULT.removesuffix(".safetensors"): folder / RESULT for folder in folders if (folder / RESULT).exists()}
    for name, path in {**published, **extra}.items():
        target = out / f"{name}.safetensors"
        try:
            shutil.copyfile(path, target)
        except OSError as error:
            raise LocalError(
                f"{target}: cannot write it: {error.strerror or error}; a round may just have closed"
            ) from error
        made.append(target)
    return made


def to_csv(rounds: Sequence[Round]) -> str:
    """One line a round: number, members joined by spaces, sums."""
    names = sorted({name for closed in rounds for name in closed["metrics"]})
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["round", "members", *names])
    for closed in rounds:
        sums = (closed["metrics"].get(name, "") for name in names)
        writer.writerow([closed["round"], " ".join(closed["members"]), *sums])
    return text.getvalue()
