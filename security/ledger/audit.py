"""Reading a ledger: whether it holds. Needs no lock and no network.

A key only to say who signed its checkpoint.

``verify`` checks the chain, the rules and the checkpoint. Records behind the last checkpoint that
another party holds can be cut off or rewritten by whoever has the log key: give it those
checkpoints (rule 29).
"""

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...errors import LocalError, ProofError
from ..log import tree_head as checkpoints
from ..log.chain import VerifiedLine
from ..log.head import Agreement, HeldHead, stored, stored_by
from ..log.note import Note, VerifierKey
from ..log.segments import CHECKPOINT, SINGLE, Reading, segment
from ..log.tree_head import TreeHead
from .fast_decoder import checked, well_formed
from .rules import Rules

LEDGER = "ledger"  # the folder inside a silo's folder
# the silo's folder, next to its keys and configuration, as examples and the demo call it
STATE = "state"


@dataclass(frozen=True, slots=True)
class AuditResult:
    """The findings of ``verify``. The ledger holds exactly when ``problems`` is empty.

    ``torn_bytes`` is an unfinished last line, which a running writer or a crash leaves; it was
    promised to nobody. ``undigested`` and ``open_intents`` are no faults: messages cut short,
    counted as left.
    """

    records: int
    head: str | None
    torn_bytes: int
    problems: tuple[str, ...]
    open_intents: tuple[int, ...]  # seq of intents without outcome
    undigested: tuple[int, ...]  # seq of intents without digest, whatever their outcome
    open_control: int | None  # seq of a control session that is not closed
    checkpoint: int | None  # records that the folder's checkpoint covers
    signed: bool  # by the key that was given; False without one

    @property
    def ok(self) -> bool:
        """True if chain, rules and checkpoint hold throughout."""
        return not self.problems


class _Walk:
    """The state of a walk over the records, taken in one after another."""

    def __init__(self, known: Mapping[int, str], silo: str) -> None:
        self.rules = Rules(silo)
        self.problems: list[str] = []
        self.undigested: dict[int, None] = {}
        self.silos: set[str] = set()
        self.missing = dict(known)

    def take(self, line: VerifiedLine) -> None:
        """A broken rule is a problem, not the end."""
        # A receipt names a leaf hash: another record in its place was written after it.
        seq = line.seq
        if seq in self.missing and (leaf := self.missing.pop(seq)) != line.leaf:
            self.problems.append(
                f"seq {seq}: leaf hash is {line.leaf}, another party knows it as {leaf}; if that"
                " was typed, compare it with its source first"
            )
        try:
            record = checked(line)
        except LocalError as error:
            self.problems.append(str(error))
            return
        if problem := self.rules.check(record):
            self.problems.append(f"seq {seq}: {problem}")
            return
        # A record that broke a rule is left out: later ones are judged as if it were not there.
        self.rules.accept(seq, record)
        kind = record["type"]
        if kind == "egress.digest":
            self.undigested.pop(record["ref"], None)
        elif kind in ("egress.intent", "start"):
            self.silos.add(record["silo"])
            if kind == "egress.intent":
                self.undigested[seq] = None

    def close(self) -> None:
        """Add the problems that show only once all records are in."""
        if self.missing:
            seqs = ", ".join(map(str, sorted(self.missing)))
            self.problems.append(
                f"ends before seq {seqs}, which another party knows: records were cut off"
            )
        if len(self.silos) > 1:
            self.problems.append(
                f"records of several silos in one ledger: {', '.join(sorted(self.silos))}"
            )


def verify(
    folder: Path,
    known: Mapping[int, str] | None = None,
    key: VerifierKey | None = None,
    witnessed: Mapping[str, Note] | None = None,
) -> AuditResult:
    """Check a ledger from its first byte to its last.

    A broken chain ends the walk, a broken rule does not.

    With ``key``, the silo's log key, the folder's checkpoint must be signed by it. ``witnessed``
    are checkpoints that other parties hold, by their names, and ``known`` leaf hashes by seq, such
    as those in receipts: with them records that were cut off the end, or rewritten, are found as
    well. LocalError for checkpoints without a key.
    """
    if witnessed and key is None:
        raise LocalError(
            "a checkpoint that another party holds says nothing without the silo's log key; give it"
        )

    # With a key the silo is known before its first record says so.
    whose = checkpoints.owner(key.name)[1] if key else ""
    walk = _Walk(known or {}, whose)
    # (1) Each checkpoint is signed; the folder's is read before the records, which only grow.
    own = _own(folder, key, walk.problems)
    held = [HeldHead("the folder itself", own)] if own else []
    for holder, note in (witnessed or {}).items():
        try:
            held.append(HeldHead(holder, _opened(note, key)))
        except ProofError as error:
            walk.problems.append(f"checkpoint that {holder} holds: {error}")

    # (2) The chain and the rules hold.
    reading = Reading(folder, well_formed)
    agreement = Agreement(held)
    try:
        with _uncollected():
            for line in reading:
                agreement.append(line.hash)
                walk.take(line)
    except LocalError as error:
        walk.problems.append(str(error))
    else:
        # (3) The records are those of the checkpoints. After a broken chain this is not checked,
        # since every later head would differ.
        walk.problems += agreement.problems()

    # A ledger is of one silo, the one that its key names.
    walk.close()
    strangers = ", ".join(sorted(walk.silos - {whose}))
    if key and strangers:
        walk.problems.append(f"records of silo {strangers}, and the key is of {key.name}")
    rules = walk.rules
    return AuditResult(
        records=reading.count,
        head=reading.head if reading.count else None,
        torn_bytes=len(reading.torn),
        problems=tuple(walk.problems),
        open_intents=tuple(rules.intents),
        undigested=tuple(walk.undigested),
        open_control=rules.control[0] if rules.control else None,
        checkpoint=own.size if own else None,
        # With a key, ``_own`` returns no head that another key signed.
        signed=key is not None and own is not None,
    )


@contextmanager
def _uncollected() -> Iterator[None]:
    """No search for reference cycles meanwhile: records have none, and it takes a tenth of the time
    of a million.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _own(folder: Path, key: VerifierKey | None, problems: list[str]) -> TreeHead | None:
    try:
        if key:
            found = stored_by(folder, key)
        else:
            note = stored(folder)
            found = _opened(note, None) if note else None
    except (LocalError, ProofError) as error:
        problems.append(str(error))
        return None
    if found is None:
        problems.append(
            f"{folder / CHECKPOINT}: is missing; a ledger has one from before its first record"
        )
    return found


def _opened(note: Note, key: VerifierKey | None) -> TreeHead:
    """The tree head that a checkpoint states.

    Without a key it may be signed by anybody: good against accidents only.
    """
    return checkpoints.verify(note, key).checkpoint if key else TreeHead.parse(note.text)


def ledger_folder(path: Path) -> Path:
    """The ledger's folder that a silo's folder, the one around it, or itself stands for.

    LocalError without one.
    """
    # The checkpoint alone marks a ledger too: one whose first segment was removed must be found.
    for candidate in (path, path / LEDGER, path / STATE / LEDGER):
        if any(
            (candidate / name).exists() for name in (CHECKPOINT, segment(candidate, 1).name, SINGLE)
        ):
            return candidate
    raise LocalError(
        f"{path}: no ledger here, in {LEDGER!r} or in '{STATE}/{LEDGER}'; name a silo's folder"
    )
