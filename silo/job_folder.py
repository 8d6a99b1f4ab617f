"""What a silo keeps on its own disk, per job; nothing here ever leaves.

::

    <directory>/jobs/<job>/job.json                the job as its operator signed it
    <directory>/jobs/<job>/dataset                 whose records it is on, since it was accepted
    <directory>/jobs/<job>/state-<n>.safetensors   personal parts after round n - 1: of the last
                                                   round that was trained here, and of the one
                                                   before it that counted
    <directory>/jobs/<job>/counted                 the most rounds that the coordinator ever said to
                                                   count
    <directory>/jobs/<job>/outbox-<n>.safetensors  what the last of them gives; sent again, not
                                                   trained again (silo/parts/contributions.py)
    <directory>/jobs/<job>/counts.json             of a private job: silo/admission/accountant.py
    <directory>/jobs/<job>/model/                  the model that the silo keeps in the end, signed
                                                   and described (bundle/folder.py)
    <directory>/jobs/<job>/model.safetensors       its values alone, of a job that trains no model
                                                   and of earlier releases
    <directory>/jobs/<job>/failed                  of a job that ended without its result; empty
    <directory>/jobs/<job>/report.json             scores by round, and each class's measures in
                                                   the end, for the silo's own eyes
    <directory>/jobs/<job>/group.*                 keys that it shares with the job's silos, until
                                                   the job ends: silo/blind/group_keys.py
    <directory>/split.key                          secret of the train/test split

Every file is replaced as a whole, and shows whether a disk changed it: tensors by tensor_file.py,
``job.json`` by its operator's signature, all others by files/checked_file.py. The outbox is written
before the state: a crash between the two costs a training.

A round counts once the coordinator has folded this silo's contribution. One that did not (the
connection broke, the deadline passed) is as if the silo had been away: the next begins from the
state before it, as in a simulation without the silo.
"""

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import NonNegativeInt

from ..algorithms.course import SiloState
from ..algorithms.tasks.counting import Tally
from ..algorithms.training.silo_round import RoundReport, state_from_bytes, state_to_bytes
from ..errors import LocalError, UnwritableError, check_local, reason
from ..files import checked_file
from ..files.documents import (
    Strict,
    canonical_json,
    parse_json,
    read_bytes,
    remove,
    unwritable,
    write_atomic,
    write_new,
)
from ..security.ledger import messages
from ..security.ledger.audit import LEDGER
from ..security.ledger.messages import RecordT
from ..security.ledger.records import JobAccept
from ..security.policy.data_sets import DataSets
from .parts import contributions
from .parts.contributions import Contributions

MOST_REASON = 500  # characters of why a job ended
# files of a job that was accepted, and of which no round has begun
OFFERED = frozenset(("job.json", "dataset", "failed"))


class LastCountedRound(Strict):
    """The file ``counted``."""

    counted: NonNegativeInt


class JobDataset(Strict):
    """The file ``dataset``."""

    dataset: str


@dataclass(frozen=True)
class JobFolder:
    """The files of one job."""

    path: Path

    def check_new(self, signed: bytes, left: Callable[[str], bool]) -> None:
        """LocalError if this silo took part in another job of this name, or trained in this one.

        One signature is good for one run: whoever repeats rounds asks a silo about models of the
        asker's choice. ``left`` says by the ledger whether anything of the job with a digest left.
        Another job of this name is replaced only while there is nothing of it but its offer.
        """
        kept = self.signed()
        other = kept is not None and kept != signed
        if other and (self._begun or left(self._digest())):
            raise LocalError(
                f"{self.path}: another job has this name, and this silo took part in it; the"
                " operator must sign it under a new one"
            )
        if self.rounds_done or self.finished:
            raise LocalError(
                f"{self.path}: this job was run here before, {self.rounds_done} rounds of it; the"
                " operator must sign it again under a new name, for the same silos"
            )

    @property
    def _begun(self) -> bool:
        """Whether there is more than the offer: a key, memory of a sum, counts, a state."""
        return any(path.name not in OFFERED for path in self.path.iterdir())

    def _digest(self) -> str:
        """The accepted job's digest, also where this release cannot read the job."""
        document = parse_json(self.signed() or b"{}", str(self.path / "job.json")).get("document")
        return sha256(canonical_json(document)).hexdigest()

    def accept(self, signed: bytes, dataset: str) -> None:
        """Keep the signed job, and on whose records it is; UnwritableError for a full disk.

        It replaces a job of the same name, after ``check_new``.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UnwritableError(f"{self.path}: cannot make it: {unwritable(error)}") from error
        # First: after a crash, neither job is on the data set of the other.
        if self.signed() != signed:
            remove(self.path / "job.json")
        checked_file.write_json(self.path / "dataset", JobDataset(dataset=dataset))
        write_atomic(self.path / "job.json", signed)
        # A job that failed before its first round may be offered again.
        remove(self.path / "failed")

    def begin(self) -> None:
        """Note that its first round begins: no other job of this name takes its place any more.

        Durable when it returns. A round may train long before the disk has anything else of it.
        """
        if not (self.path / "counted").exists():
            checked_file.write_json(self.path / "counted", LastCountedRound(counted=0))

    def check_on(self, dataset: str) -> None:
        """LocalError where the job was accepted on the records of another data set."""
        before = self.dataset
        if before and before != dataset:
            raise LocalError(
                f"{self.path}: this job began on data set {before!r}, and by the configuration of"
                f" now it would go over to {dataset!r}; name the data sets as before until it ends"
            )

    @property
    def dataset(self) -> str:
        """The data set that the job was accepted on.

        Empty where it is not known: earlier releases had one data set, and kept no such file.
        """
        kept = self.path / "dataset"
        return checked_file.read_json(kept, JobDataset).dataset if kept.exists() else ""

    @property
    def rounds_done(self) -> int:
        """The number of the next round: all before it are over for this silo."""
        numbers = (path.stem.partition("-")[2] for path in self.path.glob("state-*.safetensors"))
        # Ignore copies made by hand, such as state-3-old.
        return max(map(int, filter(str.isdecimal, numbers)), default=0)

    @property
    def finished(self) -> bool:
        """True if the job has ended here, whatever rounds this silo missed."""
        return self.values.exists()

    @property
    def values(self) -> Path:
        """The file of the values that the job ends with, in the model's folder or without one."""
        alone = self.path / "model.safetensors"
        return alone if alone.exists() else self.model / "model.safetensors"

    @property
    def model(self) -> Path:
        """The folder of the model that the job ends with."""
        return self.path / "model"

    @property
    def failed(self) -> bool:
        """Whether the job has ended without its result, as the coordinator said."""
        return (self.path / "failed").exists()

    def fail(self, why: str = "") -> None:
        """Note that it has ended so; nothing for a job that was not accepted here.

        ``why`` is the coordinator's word, of which the first MOST_REASON characters are kept.
        """
        if self.signed() is not None:
            write_atomic(self.path / "failed", why[:MOST_REASON].encode())

    @property
    def failure(self) -> str:
        """Why it has ended so, in the coordinator's words; empty where it said nothing."""
        return read_bytes(self.path / "failed").decode("utf-8", "replace") if self.failed else ""

    @property
    def since(self) -> float:
        """When it came to what it is now, accepted or ended, in seconds since 1970."""
        files = (self.path / "job.json", self.path / "failed", self.values)
        return max((path.stat().st_mtime for path in files if path.exists()), default=0.0)

    def signed(self) -> bytes | None:
        """The job that was accepted, or None.

        As it was offered: callers check its signature again.
        """
        kept = self.path / "job.json"
        return read_bytes(kept) if kept.exists() else None

    def save_round(self, round_: int, counted: int, state: SiloState, given: Contributions) -> None:
        """Keep what a round trained and uploads, and the state that it began from.

        All other states go.
        """
        # The count comes before older states go: after a crash in between, a coordinator that goes
        # back on it is refused rather than told that a state is gone.
        outbox, kept = self._outbox(round_ + 1), self._state(round_ + 1)
        if counted > self._confirmed():
            checked_file.write_json(self.path / "counted", LastCountedRound(counted=counted))
        # The outbox first: a round is over once its state exists, and must have its outbox by then.
        written = replace(given, start=counted, job=self._digest())
        write_atomic(outbox, contributions.to_bytes(written))
        write_atomic(kept, state_to_bytes(state))

        # The state that the round began from stays: if the round does not count, the next begins
        # from it again.
        old = chain(self.path.glob("outbox-*.safetensors"), self.path.glob("state-*.safetensors"))
        for path in old:
            if path not in (outbox, kept, self._state(counted)):
                remove(path)

    def save_values(self, state: SiloState) -> None:
        """Keep the values that the job ends with, without a description of a model.

        The job counts as finished from then on, as it does once its ``model`` is there.
        """
        write_atomic(self.path / "model.safetensors", state_to_bytes(state))

    def state(self, counted: int) -> SiloState | None:
        """Personal parts after round ``counted`` - 1, the last that counted; None before the first.

        LocalError for a round before one that counted already: the coordinator cannot take a round
        back.
        """
        # Whoever could take rounds back would ask this silo about models of its own choice.
        path, done, confirmed = self._state(counted), self.rounds_done, self._confirmed()
        if counted < confirmed:
            raise LocalError(
                f"{self.path}: the coordinator now counts our rounds up to {counted - 1}, but it"
                f" counted them up to {confirmed - 1} before, which it cannot take back: ask its"
                " operator"
            )
        if not counted:
            return None

        # somebody may have put back an older copy of the folder
        if counted > done:
            raise LocalError(
                f"{self.path}: the coordinator counts our round {counted - 1}, but the last one"
                f" trained here is {done - 1}: an old state was restored; restore the latest, or"
                " have the job signed under a new name"
            )
        # ``save_round`` removes states from which the kept round did not begin.
        if not path.exists():
            raise LocalError(
                f"{path}: missing; the coordinator says that our last round to count is"
                f" {counted - 1}, but it counted a later one before; ask its operator, or have the"
                " job signed under a new name"
            )
        try:
            return state_from_bytes(path.read_bytes(), str(path))
        except OSError as error:
            raise LocalError(
                f"{path}: cannot read it: {reason(error)}; restore it from a backup"
            ) from error

    def outbox(self, round_: int) -> Contributions | None:
        """A round's contributions, if it is the one that was trained last.

        LocalError if the disk changed the file, or it is of another job of this name.
        """
        path = self._outbox(round_ + 1)
        # An outbox without its state was left by a crash: that round is trained again.
        if not (path.exists() and self._state(round_ + 1).exists()):
            return None
        found = contributions.read(path)
        # A job that an operator signed under the same name may have other rules for who reads it.
        whose = f"{path}: is of another job of this name; it does not leave in this one"
        # Earlier releases did not write it.
        check_local(found.job in ("", self._digest()), whose)
        return found

    def forget(self, round_: int) -> None:
        """Let the round be trained again from the state before it; nothing of it has left."""
        remove(self._state(round_ + 1))  # first: an outbox counts only next to its state
        remove(self._outbox(round_ + 1))

    def _confirmed(self) -> int:
        """The most rounds that the coordinator ever said to count."""
        path = self.path / "counted"
        return checked_file.read_json(path, LastCountedRound).counted if path.exists() else 0

    def _state(self, rounds: int) -> Path:
        return self.path / f"state-{rounds}.safetensors"

    def _outbox(self, rounds: int) -> Path:
        return self.path / f"outbox-{rounds}.safetensors"

    # The silo's own report.

    def report(self) -> dict[str, Any]:
        """The report so far.

        LocalError if the file is not a report, or the disk changed it.
        """
        path = self.path / "report.json"
        if not path.exists():
            return {"rounds": [], "final": None}
        match parse_json(read_bytes(path), str(path)):
            case {"rounds": [*rounds]} as document if all(map(_is_round, rounds)):
                _check_digest(path, document)
                return {**document}
            case dict() as document:
                _check_digest(path, document)
        raise LocalError(f"{path}: not a report as the silo writes it; move it away")

    def add_round(self, report: RoundReport, facts: Mapping[str, object]) -> None:
        """Append a round; repeating one replaces it.

        ``facts`` about the whole job replace those of earlier calls.
        """
        document = self.report()
        rounds = [entry for entry in document["rounds"] if entry["round"] != report.round]
        self._write({**document, **facts, "rounds": [*rounds, _entry(report)]})

    def finish(self, report: RoundReport, facts: Mapping[str, object]) -> None:
        """Add the final evaluation, with each class's counts.

        ``facts`` as in ``add_round``.
        """
        models = {"delivered": report.delivered, "trained": report.trained}
        tables = {model: _tables(counts) for model, counts in models.items()}
        self._write({**self.report(), **facts, "final": {**_entry(report), **tables}})

    def _write(self, document: Mapping[str, Any]) -> None:
        sealed = {**document, checked_file.DIGEST: _digest(document)}
        write_atomic(self.path / "report.json", (json.dumps(sealed, indent=1) + "\n").encode())


def _entry(report: RoundReport) -> dict[str, Any]:
    """A round of the report, without the counts of single classes: a job may have many rounds."""
    delivered, trained = report.delivered, report.trained
    return {
        "round": report.round,
        "samples": report.samples,
        "tested": report.tested,
        "score_delivered": delivered.score,
        "score_trained": trained.score,
        "balanced_delivered": delivered.balanced,
        "balanced_trained": trained.balanced,
        "baseline": trained.baseline,
        "loss": report.loss,
    }


def _tables(counts: Tally) -> dict[str, Any]:
    """All counts of a model, and what they say, as plain values."""
    return {**counts.tables, "measures": counts.said()}


def _is_round(entry: object) -> bool:
    return isinstance(entry, dict) and "round" in entry


def _check_digest(path: Path, document: dict[str, Any]) -> None:
    """Take the digest out; LocalError where it is that of another report."""
    found = document.pop(checked_file.DIGEST, "")
    if found and found != _digest(document):
        raise LocalError(
            f"{path}: is not as the silo wrote it: the disk changed it; restore it, or move it away"
        )


def _digest(report: Mapping[str, Any]) -> str:
    """The digest of a report, not of canonical JSON: that has no fractions."""
    return sha256(json.dumps(report).encode()).hexdigest()


def split_key(directory: Path) -> bytes:
    """The secret that assigns records to training and test; made once, never sent.

    LocalError if the disk changed it, or it is gone: with another key, records that were trained on
    would be tested on.
    """
    return kept_split_key(directory) or new_split_key(directory)


def kept_split_key(directory: Path) -> bytes | None:
    """The secret of the split, or None where no job was accepted yet; LocalError as ``split_key``.

    A silo that accepted a job had one: it is written before the answer.
    """
    path = directory / "split.key"
    if not path.exists():
        check_local(
            not _accepted_before(directory),
            f"{path}: missing, and this silo has accepted jobs with it: it decides which records"
            " are trained on and which are tested. Restore it from a backup of this folder; it"
            " never changes, so any backup will do. If there is none, staddle silo new-split"
            " --config FILE draws a new split. Records that were trained on may then be tested on,"
            " and the scores of models that saw them are too good",
        )
        return None
    kept = read_bytes(path)
    if len(kept) not in (32, 64):  # an earlier release wrote no digest behind it
        raise LocalError(
            f"{path}: {len(kept)} bytes, not 64; restore it from a backup of this folder. If there"
            " is none, move it away and start again: the agent says what to do"
        )
    return kept if len(kept) == 32 else checked_file.read_bytes(path)


def new_split_key(directory: Path) -> bytes:
    """Draw another secret, and with it another split; LocalError where there is one."""
    key = secrets.token_bytes(32)
    write_new(directory / "split.key", checked_file.to_bytes(key))
    return key


def _accepted_before(directory: Path) -> bool:
    """Whether this silo ever accepted a job, by the folders of its jobs or by its ledger."""
    # Either may have been moved away, as after the loss of a log key.
    folders = directory.glob("jobs/*/job.json")
    return any(folders) or any(recorded(directory, JobAccept))


def recorded(directory: Path, kind: type[RecordT]) -> list[RecordT]:
    """All records of a type in the silo's ledger; none before its first start."""
    ledger = directory / LEDGER
    if not ledger.is_dir():
        return []
    return [record for _, record in messages.of_type(ledger, kind)]


def check_same_records(jobs: Path, names: DataSets) -> None:
    """LocalError where the configuration would move a job that runs to the records of another data
    set.
    """
    for path in sorted(jobs.glob("*/job.json")):
        folder, signed = JobFolder(path.parent), _document(path)
        if signed is None or folder.finished or folder.failed:
            continue
        try:
            dataset = names.of(signed.get("dataset"))
        except LocalError as error:
            raise LocalError(f"{folder.path}: this job runs: {error}") from error
        folder.check_on(dataset)


def accepted(jobs: Path) -> dict[str, str]:
    """The names of all accepted jobs by their digests, but of those that the disk changed."""
    documents = {path.parent.name: _document(path) for path in jobs.glob("*/job.json")}
    return {
        sha256(canonical_json(document)).hexdigest(): name
        for name, document in documents.items()
        if document is not None
    }


def _document(path: Path) -> Mapping[str, Any] | None:
    """The document of a signed job; None for one that the disk changed, as its signature shows
    later.
    """
    try:
        signed = parse_json(read_bytes(path), str(path))
    except LocalError:
        return None
    document = signed.get("document") if isinstance(signed, dict) else None
    return document if isinstance(document, dict) else None
