"""The results of a job from the coordinator's folder, as files for people and programs.

They can be read while the daemon runs.

::

    <out>/rounds.csv         round, members, then columns of the sums of METRICS and of measures
    <out>/job.json           state and rounds
    <out>/<part>.safetensors what the last closed round published
    <out>/result.safetensors what the method's coordinator half knew in the end, where it has such a
        thing
"""

import csv
import io
import json
import shutil
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...algorithms.job.evaluated import Evaluated, evaluated
from ...algorithms.tasks.counting import METRICS, flattened
from ...errors import LocalError, reason
from ...files import tensor_file
from ...files.documents import write_atomic
from . import table_seals
from .database import evaluation_in, relayed
from .store import RESULT, read_counts

Round = Mapping[str, Any]  # round, members, noisy, metrics, measures


@dataclass(frozen=True)
class Kept:
    """The state of a job, its closed rounds, and its files by part.

    Under "result": the file with what the method's coordinator half knew in the end.
    """

    state: Mapping[str, Any]
    rounds: Sequence[Round]
    sums: Sequence[str] = ()  # names of those that every round has, in their order
    published: Mapping[str, Path] = field(default_factory=dict)
    relayed: Sequence[str] = ()  # parts of which the coordinator has what silos alone can open
    signed: bytes = b""  # the job, as its operator signed it


def read(directory: Path, job: str) -> Kept:
    """Read one job; LocalError where there is none.

    A running coordinator is not disturbed. LocalError, too, for a database that the disk changed.
    """
    path = directory / "coordinator.sqlite"
    if not path.exists():
        raise LocalError(
            f"{path}: no such file; a coordinator with this configuration has not run yet"
        )
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            # One state of the file in all that is read: the daemon may commit meanwhile.
            connection.execute("BEGIN")
            table_seals.check(connection, path)
            found = connection.execute("SELECT state FROM jobs WHERE name = ?", (job,)).fetchone()
            if found is None:
                known = [
                    name
                    for (name,) in connection.execute("SELECT name FROM jobs ORDER BY position")
                ]
                raise LocalError(f"{path}: has no job {job!r}; it has {', '.join(known) or 'none'}")
            rows = connection.execute(
                "SELECT round, members, metrics FROM rounds WHERE job = ? ORDER BY round", (job,)
            )
            closed = rows.fetchall()
            (signed,) = connection.execute(
                "SELECT signed FROM jobs WHERE name = ?", (job,)
            ).fetchone()
            held = (
                "SELECT room, part, file FROM files WHERE job = ? AND room IN ('result', 'words')"
            )
            files = {
                (room, part, ""): file for room, part, file in connection.execute(held, (job,))
            }
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise LocalError(f"{path}: cannot read it: {error}") from error
    folder = directory / "jobs" / job
    evaluation = evaluation_in(signed)
    noisy, reading = evaluation["noised"], evaluated(evaluation)
    rounds = [
        _round(folder, number, json.loads(members), json.loads(sums), noisy, reading)
        for number, members, sums in closed
    ]
    published = {part: folder / file for (room, part, _), file in files.items() if room == "result"}
    # The database does not list the result, which is written at the end of the job.
    if (folder / RESULT).exists():
        published[RESULT.removesuffix(".safetensors")] = folder / RESULT
    state = json.loads(found[0])
    return Kept(state, rounds, sums_of(reading), published, relayed(files), signed)


def sums_of(known: Evaluated | None) -> list[str]:
    """Names of the sums that every round has, as its first columns."""
    parts = () if known is None else known.counting.parts()
    return [spec.name for part in parts if part.name == METRICS for spec in part.tensors]


def _round(
    folder: Path,
    number: int,
    members: list[str],
    metrics: dict[str, Any],
    noisy: bool,
    known: Evaluated | None,
) -> Round:
    tables = {name: sums.tolist() for name, sums in read_counts(folder, number).items()}
    whole = {**metrics, **tables}
    measures = {} if known is None else flattened(known.counting.of_sums(whole))
    fields = {"round": number, "members": members, "noisy": noisy}
    return {**fields, "metrics": whole, "measures": measures}


def write(out: Path, kept: Kept) -> list[Path]:
    """Write what there is into a folder; the files. Existing ones of the same name are replaced.

    LocalError for tensors that the disk changed.
    """
    out.mkdir(parents=True, exist_ok=True)
    made = [out / "rounds.csv", out / "job.json"]
    # Mode 0644: unlike the state, these files are for others.
    write_atomic(made[0], to_csv(kept.rounds, kept.sums).encode(), 0o644)
    document = json.dumps({"state": kept.state, "rounds": list(kept.rounds)}, indent=1) + "\n"
    write_atomic(made[1], document.encode(), 0o644)
    for name, path in kept.published.items():
        target = out / f"{name}.safetensors"
        try:
            shutil.copyfile(path, target)
        except OSError as error:
            raise LocalError(
                f"{target}: cannot write it: {reason(error)}; a round may just have closed"
            ) from error
        # The copy is checked, and not the file: a disk that fails may change either.
        try:
            tensor_file.check(target)
        except LocalError as error:
            target.unlink()
            raise LocalError(f"a copy of {path} is refused: {error}") from error
        made.append(target)
    return made


def to_csv(rounds: Sequence[Round], first: Sequence[str]) -> str:
    """One line per round: number, members joined by spaces, sums, measures.

    The columns ``first`` come before all others. What a round does not have is left empty. Lines
    end with LF. Tables are in job.json.
    """
    # The columns of all rounds together.
    found = [_numbers(closed) for closed in rounds]
    names = sorted(set().union(*found), key=lambda name: (name not in first, name))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["round", "members", *names])
    for closed, own in zip(rounds, found, strict=True):
        values = (own.get(name, "") for name in names)
        writer.writerow([closed["round"], " ".join(closed["members"]), *values])
    return text.getvalue()


def _numbers(closed: Round) -> dict[str, int | float]:
    sums = {name: sum_ for name, sum_ in closed["metrics"].items() if isinstance(sum_, int)}
    return {**sums, **closed["measures"]}
