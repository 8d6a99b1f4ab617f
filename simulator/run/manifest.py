"""run.json: which run a folder holds. It is written first, and compared when the run resumes.

::

    {"job":{…},"label":"pfedsim","look_every":10,"made_with":{"device":"cpu","staddle":"0.1.0","torch":"2.13.0"},
     "population":"5f2a…","seed":1,"silos":[{"name":"clinic-a","test":71,"train":284,"validation":null},…],"version":1}

``job`` is the job's document (job.py). How often a snapshot is written is left out, since it
changes no result.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch

from ...algorithms.engines.attendance import EVERYONE, Attendance
from ...algorithms.engines.engine import Records
from ...algorithms.job.job import DERIVED
from ...algorithms.job.lengthening import lengthening_fault
from ...algorithms.job.schema import plain
from ...errors import LocalError
from ...files.documents import Strict, canonical_json, validate
from ..engines.device import Device
from ..experiment.plan import Population, Run, Schedule
from .disk import parse_kept
from .snapshot import read_index

RUN = "run.json"
MOST_TOLD = 5  # differences that an error names


class SiloRecords(Strict):
    """How many records of each side a silo has.

    ``validation`` is None if the silo has no such side.
    """

    name: str
    train: int
    test: int
    validation: int | None


class MadeWith(Strict):
    """Device and releases on which a run's exact bits depend.

    A run resumes only with the same ones, since others may round differently.
    """

    device: Device
    staddle: str
    torch: str

    def __str__(self) -> str:
        """For people."""
        return f"on {self.device} with Staddle {self.staddle} and torch {self.torch}"


class RunManifest(Strict):
    """The content of run.json; ``population`` is the digest of the records and their partition.

    ``job`` is the job's document; ``attendance`` the table, None where all silos are there.
    """

    version: Literal[1] = 1
    label: str
    seed: int
    job: dict[str, Any]
    population: str
    silos: tuple[SiloRecords, ...]
    look_every: int
    made_with: MadeWith
    attendance: dict[str, Any] | None = None

    @property
    def who(self) -> Attendance:
        """Who is there in the run's rounds."""
        return validate(self.attendance or {}, Attendance, f"attendance of {self.label!r}")

    @property
    def rounds(self) -> int:
        """The rounds that the job trains."""
        return int(self.job["rounds"])

    def seeded_like(self, other: "RunManifest") -> "RunManifest":
        """The manifest of the same run with another's seed, and what follows from that alone."""
        if other.seed == self.seed:
            return self
        job = {**self.job, "seed": other.seed}
        # Initial values that other code makes (Job.document).
        if "start" in job and "start" in other.job:
            job["start"] = {**job["start"], "sha256": other.job["start"]["sha256"]}
        return self.model_copy(update={"seed": other.seed, "job": job})

    def to_bytes(self) -> bytes:
        """Canonical JSON and a newline.

        A snapshot has the digest of these bytes.
        """
        # Runs in which all silos are there are written as earlier releases wrote them.
        left_out = {"attendance"} if self.attendance is None else None
        return canonical_json(self.model_dump(exclude=left_out)) + b"\n"


def identity(
    run: Run, population: Population, schedule: Schedule, device: Device = "cpu"
) -> RunManifest:
    """The manifest of a run that begins with this release, and trains on ``device``.

    Silos are in job order.
    """
    silos = [_counted(silo, population.records[silo]) for silo in run.job.silos]
    made_with = MadeWith(
        device=device,
        staddle=version("staddle"),
        torch=torch.__version__,
    )
    return RunManifest(
        label=run.label,
        seed=run.seed,
        job=run.job.document(),
        population=population.digest,
        silos=tuple(silos),
        look_every=schedule.look_every,
        made_with=made_with,
        attendance=None if run.attendance == EVERYONE else plain(run.attendance),
    )


def _counted(silo: str, records: Records) -> SiloRecords:
    validation = None
    if records.validation is not None:
        validation = len(records.validation)
    return SiloRecords(
        name=silo,
        train=len(records.train),
        test=len(records.test),
        validation=validation,
    )


def read(folder: Path) -> RunManifest:
    """The manifest in a run's folder; LocalError where it is not as it was written."""
    return parse_kept(folder / RUN, RunManifest)


def check_continues(folder: Path, there: RunManifest, run: Run, here: RunManifest) -> None:
    """LocalError unless the folder's run is this one, or one of fewer rounds that can become it.

    ``here`` is the manifest of ``run``. Seeds may differ.
    """
    if there.rounds == here.rounds:
        check_same(folder, there, here.seeded_like(there))
        return
    # First whatever else differs: then they are not the same run at any length.
    as_there = replace(run.job, rounds=there.rounds)
    as_long = here.model_copy(update={"job": as_there.document()})
    check_same(folder, there, as_long.seeded_like(there))
    if there.rounds > here.rounds:
        raise LocalError(
            f"{folder}: holds a run of {there.rounds} rounds, which cannot be shortened to"
            f" {here.rounds}; give {there.rounds} rounds or more, or choose another --out"
        )
    index = read_index(folder)
    done = 0 if index is None else index.round
    fault = lengthening_fault(as_there, run.job, done)
    if index is not None and not index.files:
        fault = "it kept no snapshot to resume from (simulation.keep_models = false)"
    if fault:
        raise LocalError(
            f"{folder}: holds a run of {there.rounds} rounds that cannot be lengthened to"
            f" {here.rounds}: {fault}; choose another --out, or remove it"
        )


def check_same(folder: Path, there: RunManifest, here: RunManifest) -> None:
    """LocalError where the folder holds another run.

    Releases and device are not compared: they matter only to a run that resumes.
    """
    found = differences(there, here)
    if found:
        raise LocalError(
            f"{folder}: holds another run: {'; '.join(found)}; choose another --out, or remove it"
        )


def differences(there: RunManifest, here: RunManifest) -> list[str]:
    """The differences of two runs, releases aside: "training.lr is 0.1 there and 0.05 here".

    At most ``MOST_TOLD`` of them, and how many more there are; empty for the same run.
    """
    found = list(_differences(_written(there), _written(here), ""))
    # Numbers of records say more than the digest, so compare them first.
    if there.silos != here.silos:
        found.append("the silos have other numbers of records")
    elif there.population != here.population:
        found.append("the records, or who holds which, are others")

    # nothing that a person wrote differs, and yet the jobs do: what this release derives is not
    # what the other derived
    if there.job != here.job and not found:
        method = there.job["method"]["name"]
        found.append(f"this release has another {method}, or another model")
    more = len(found) - MOST_TOLD
    if more > 0:
        return [*found[:MOST_TOLD], f"and {more} more"]
    return found


def _written(one: RunManifest) -> dict[str, Any]:
    """The settings that a person wrote, without those that a job derives from them."""
    # These are settings, too, but not part of the job.
    written = {**one.job, "label": one.label, "look_every": one.look_every}
    written["attendance"] = one.attendance or plain(EVERYONE)
    for key in DERIVED:
        written.pop(key, None)
    return written


def _differences(there: Any, here: Any, where: str) -> Iterator[str]:
    match there, here:
        case Mapping(), Mapping():
            # Keys of both, since one may lack some.
            for key in {**there, **here}:
                yield from _differences(there.get(key), here.get(key), f"{where}.{key}".lstrip("."))
        case list(), list() if len(there) != len(here):
            yield f"{where} are {len(there)} there and {len(here)} here"
        case list(), list():
            for number, (one, other) in enumerate(zip(there, here, strict=True)):
                yield from _differences(one, other, f"{where}[{number}]")
        case _ if there != here:
            yield f"{where} is {_shown(there)} there and {_shown(here)} here"


def _shown(value: Any) -> str:
    return "left out" if value is None else str(value)
