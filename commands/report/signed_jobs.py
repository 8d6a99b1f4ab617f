"""What stands next to a ledger about its jobs: the signed documents, and the silo's own counts.

A document is used only if the ledger names its digest, so it is the one that the silo decided on.
Nothing here needs the code of the job's method or model.
"""

import contextlib
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, NonNegativeInt, ValidationInfo, field_validator

from ...errors import LocalError
from ...files.documents import canonical_json, parse_json, read_bytes, validate
from ...security.identity.keys import ID_PATTERN
from ...security.ledger.overview import LedgerOverview
from ..terminal.output import number

NOT_COUNTED = "how many records is not known here"
# Names of jobs are texts of the ledger, and become names of folders here.
NAME = re.compile(ID_PATTERN).fullmatch


class SignedFile(BaseModel):
    """What is read of a file ``job.json``; whose signature it has, the silo's agent checked."""

    document: dict[str, Any]


class SignedPrivacy(BaseModel, frozen=True):
    """What a report says of a job's ``[privacy]``; numbers are decimals."""

    epsilon: str = ""
    unit: Literal["record", "silo", ""] = "record"  # empty where no document says it
    noise: Literal["local", "shared"] = "local"
    dishonest: NonNegativeInt = 1


class JobDocument(BaseModel, frozen=True):
    """What a report says of a signed job."""

    silos: tuple[str, ...] = ()
    purpose: str = "None was stated in the signed job."
    privacy: SignedPrivacy = SignedPrivacy(unit="")

    @field_validator("*", mode="before")
    @classmethod
    def _left_out(cls, value: Any, info: ValidationInfo) -> Any:
        # Null stands for a key that the job file left out.
        default = cls.model_fields[str(info.field_name)].default
        return default if value in (None, "") else value


UNKNOWN = JobDocument(purpose="Not known: the signed job is not next to this ledger.")


class CountedRound(BaseModel):
    """A round in the silo's own report of a job."""

    tested: NonNegativeInt


class CountedRecords(BaseModel):
    """The records of a job, by the silo's own report of it (silo/job_folder.py)."""

    samples: NonNegativeInt
    rounds: Annotated[tuple[CountedRound, ...], Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class SignedJob:
    """A job as its operator signed it, and how many records this silo had for it, in words."""

    document: JobDocument = UNKNOWN
    counted: str = NOT_COUNTED


def read(silo: Path, view: LedgerOverview) -> dict[str, SignedJob]:
    """All jobs of the ledger, by the folders that the silo keeps of them in ``silo``."""
    found = {}
    for job in filter(NAME, view.jobs):
        folder, own = silo / "jobs" / job, view.of(job)
        digests = {at.record.job_digest for at in own.decisions}
        digests |= {message.intent.job_digest for message in own.messages}
        found[job] = SignedJob(_document(folder / "job.json", digests), _counted(folder))
    return found


def _document(path: Path, digests: set[str]) -> JobDocument:
    """The document, if it has one of these digests."""
    # It may be missing, damaged, or another job's of this name: then nothing is known.
    with contextlib.suppress(LocalError):
        signed = validate(parse_json(read_bytes(path), str(path)), SignedFile, str(path))
        document = signed.document
        if hashlib.sha256(canonical_json(document)).hexdigest() in digests:
            return validate(document, JobDocument, str(path))
    return UNKNOWN


def _counted(folder: Path) -> str:
    path = folder / "report.json"
    with contextlib.suppress(LocalError):
        found = validate(parse_json(read_bytes(path), str(path)), CountedRecords, str(path))
        trained = f"{number(found.samples, 'record')} to train on"
        return f"{trained}, {found.rounds[-1].tested:,} kept for tests"
    return NOT_COUNTED
