"""The egress ledger of a silo: exactly what left its door, written before it leaves.

``<silo>/ledger/`` (security/log/segments.py) is an append-only hash chain of the records in
records.py, under checkpoints that the silo's log key signs. One message that leaves is up to three
records: ``egress.intent`` is durable before the first byte, ``egress.digest`` before the frame that
makes the message count, ``egress.outcome`` says how it ended.

What it proves: the records were not edited, and they are consistent. Records behind the last
checkpoint that another party holds can be cut off or rewritten by whoever has the log key; and the
ledger cannot prove what the software chose not to write.
"""

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ...errors import LocalError
from ...files.documents import parse_json
from ..identity.keys import Role
from ..identity.roster import Roster
from ..log.append_log import Appended, AppendLog, SignedRecord
from ..log.chain import VerifiedLine
from ..log.consistency import Consistency
from ..log.head import HeldHead, Signer
from ..log.merkle import Hashes
from ..log.note import Note, VerifierKey
from . import kept_rosters
from .fast_decoder import Record, checked, parse_record, well_formed
from .records import Digest, Intent, KeyRotate, PolicyChange, PrivacyHead, SumSigned, is_durable
from .rules import Rules


@dataclass(frozen=True, slots=True)
class Unsettled:
    """A message without outcome so far, and its digest with the place of that record, if it came to
    it.
    """

    seq: int
    intent: Intent
    digest: Digest | None = None
    place: Appended | None = None


class Ledger:
    """The writer; safe to share between threads.

    ``append`` and ``seal`` return once the record is on the disk, or raise LocalError. The few
    types that records.py lists last reach it with the next record.
    """

    def __init__(self, silo: str) -> None:
        self.silo = silo
        self._rules = Rules(silo)
        # bytes, by job digest and round
        self._sent: Counter[tuple[str, int]] = Counter()
        # digests of jobs into a secure sum of which keys were given
        self._entered: set[str] = set()
        self._contributed: set[str] = set()  # and of those to whose key something was given
        self._signed: list[SumSigned] = []
        self._summed: set[str] = set()  # digests of jobs of which a sum was signed, or opened
        # the last: the part of a message of its own
        self._attempts: Counter[tuple[str, int, str]] = Counter()
        # seq of an intent → it, and its digest if there is one
        self._unsettled: dict[int, list[VerifiedLine]] = {}
        self._budgets: dict[str, PrivacyHead] = {}  # data set → the last head of its privacy budget
        self._past: list[VerifierKey] = []  # keys that signed before the one that does
        # by the digest of a roster: its silos; and by that of a job: those when it was accepted
        self._silos: dict[str, frozenset[str]] = {}
        self._roster = ""
        self._silos_then: dict[str, frozenset[str] | None] = {}
        self._mutex = threading.Lock()
        self._log: AppendLog

    @classmethod
    def open(cls, folder: Path, silo: str, federation: str, key: Ed25519PrivateKey) -> Self:
        """Open a silo's ledger, checking all of it; ``key`` is the silo's log key.

        LocalError refuses one that breaks its chain or its rules, or is not the one that its
        checkpoint speaks of.
        """
        ledger = cls(silo)

        def visit(line: VerifiedLine) -> None:
            evidence = "keep it as evidence, move it away, begin a new one"
            try:
                record = checked(line)
            except LocalError as error:
                raise LocalError(f"{folder}: {error}; {evidence}") from error
            if problem := ledger._rules.check(record) or _foreign(record, silo):
                raise LocalError(f"{folder}: seq {line.seq}: {problem}; {evidence}")
            ledger._rules.accept(line.seq, record)
            ledger._note(line)

        ledger._log = AppendLog.open(folder, Signer.of(federation, silo, key), visit, well_formed)
        return ledger

    def append(self, record: Record) -> Appended:
        """Write a record; its ``seq`` is the ``ref`` of the records that follow up on it.

        LocalError for one that may not come next (rules.py).
        """
        # Checked by the verifier's own rules: nothing is written that an audit would refuse.
        stored = record.model_dump(mode="json")
        with self._mutex:
            # Check and write under one lock, so that no other record comes in between.
            self._check(stored)
            appended = self._log.append(stored, durable=is_durable(record))
            self._accept(appended, stored)
            return appended

    def seal(self, record: Digest) -> SignedRecord:
        """Append it, and sign the head that ends with it, for the coordinator to hold.

        All records before it are durable then, too, and the head covers them.
        """
        stored = record.model_dump(mode="json")
        with self._mutex:
            self._check(stored)
            sealed = self._log.seal(stored)
            self._accept(sealed.place, stored)
            return sealed

    def put_in_force(self, digest: str, text: str) -> Appended | None:
        """From now on this policy decides; None if it is in force already.

        The record is durable when this returns, so nothing leaves under an unrecorded policy.
        """
        before = self._rules.policy
        # Every start reads the file; an unchanged one needs no record.
        if digest == before:
            return None
        return self.append(PolicyChange(before=before, after=digest, text=text))

    def keep_roster(self, roster: Roster) -> bool:
        """Keep the text of a roster, unless it is kept already; False if it is too large for that.

        The record is durable when this returns.
        """
        record = kept_rosters.record_of(roster)
        if record is not None and record.roster not in self._rules.rosters:
            self.append(record)
        return record is not None

    def secagg_signed(self, record: SumSigned) -> None:
        """The survivors of a sum are about to be signed.

        Recorded where no record says so of this job and set yet.
        """
        # Round after round sums the same silos, and what that tells does not grow: one record per
        # job and set is enough.
        if not any(_same_set(record, known) for known in self.signed):
            self.append(record)

    @property
    def signed(self) -> tuple[SumSigned, ...]:
        """The sets of silos with whose sums this silo agreed, of all jobs, restarts included."""
        with self._mutex:
            return tuple(self._signed)

    def summed(self, job_digest: str) -> bool:
        """True if a sum of this job was signed or opened, restarts included.

        An agent does not start if a job's folder says so and the ledger does not: then the ledger
        is an older copy (silo/admission/signed_sets.py).
        """
        with self._mutex:
            return job_digest in self._summed

    def silos_then(self, job_digest: str) -> frozenset[str] | None:
        """The silos of the federation when this silo first accepted a job.

        None where the ledger does not have the roster of then, or no such job.
        """
        with self._mutex:
            return self._silos_then.get(job_digest)

    @property
    def privacy_heads(self) -> Mapping[str, PrivacyHead]:
        """The last head of each data set's privacy budget.

        A data set that is not there was never spent on.
        """
        with self._mutex:
            return dict(self._budgets)

    @property
    def head(self) -> Appended | None:
        """The last record."""
        return self._log.head

    def sent(self, job_digest: str, round_number: int) -> int:
        """Bytes of all intents and protocol messages of a round, whatever became of them, restarts
        included.
        """
        with self._mutex:
            return self._sent[job_digest, round_number]

    def left(self, job_digest: str) -> bool:
        """True if anything of a job left this silo or was signed in it, restarts included.

        Whatever became of it. Control messages, such as answers to an offer, do not count.
        """
        with self._mutex:
            return job_digest in self._summed.union(digest for digest, _ in self._sent)

    def attempts(self, job_digest: str, round_number: int, part: str) -> int:
        """How many intents a message of a round has had, whatever became of them, restarts
        included.

        ``part`` is that of a padded or rotated message; empty for the one of a round that is
        neither.
        """
        with self._mutex:
            return self._attempts[job_digest, round_number, part]

    def entered(self, job_digest: str) -> bool:
        """True if keys were given into a secure sum of this job, restarts included.

        Then the job's folder must hold a memory of the sum: without it, this silo could enter one
        attempt twice.
        """
        with self._mutex:
            return job_digest in self._entered

    def contributed(self, job_digest: str) -> bool:
        """True if something was given to the key that the silos of this job share, restarts
        included.
        """
        with self._mutex:
            return job_digest in self._contributed

    @property
    def open_intents(self) -> tuple[int, ...]:
        """Intents without outcome, such as a crash leaves: they count as left."""
        return tuple(message.seq for message in self.unsettled)

    @property
    def unsettled(self) -> tuple[Unsettled, ...]:
        """The intents without outcome, oldest first, with what they said.

        The recipient may be asked what became of them.
        """
        with self._mutex:
            return tuple(map(_message, self._unsettled.values()))

    def checkpoint(self) -> Note:
        """The signed head of all records so far, which are durable then.

        Others may hold it against us.
        """
        return self._log.checkpoint()

    def growth(self, held: int, to: Note) -> Consistency:
        """Proof for who holds the head of ``held`` records, 0 for none, that it only grew until
        ``to``.
        """
        return self._log.growth(held, to)

    def inclusion(self, seq: int, size: int) -> Hashes:
        """RFC 6962 section 2.1.1: that record ``seq`` is in the ledger of ``size`` records."""
        return self._log.inclusion(seq, size)

    def disagreement(self, held: HeldHead) -> str:
        """Why this is not the ledger that somebody's checkpoint was signed for.

        Empty if it is, or grew from it.
        """
        return self._log.disagreement(held)

    def root(self, size: int) -> bytes:
        """Root of the first ``size`` records."""
        return self._log.root(size)

    @property
    def keys(self) -> tuple[VerifierKey, ...]:
        """The log's public key, and those before it."""
        return (self._log.signer.public, *self._past)

    def rekey(self, key: Ed25519PrivateKey) -> Appended:
        """From now on this log key signs; the old one signs a checkpoint that says so.

        Record and checkpoint are durable when this returns.
        """
        # The record is under the old key still: whoever trusts that key reads which one follows.
        old = self._log.signer
        new = Signer(old.origin, key)
        appended = self.append(KeyRotate(old=str(old.public), new=str(new.public)))
        self._log.rekey(new)
        return appended

    def close(self) -> None:
        """Make everything durable and let the lock go."""
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def _check(self, stored: Mapping[str, Any]) -> None:
        if problem := self._rules.check(stored) or _foreign(stored, self.silo):
            raise LocalError(f"ledger of {self.silo!r}: {problem}")

    def _accept(self, appended: Appended, stored: dict[str, Any]) -> None:
        self._rules.accept(appended.seq, stored)
        self._note(VerifiedLine(appended.seq, bytes.fromhex(appended.leaf), stored))

    def _note(self, line: VerifiedLine) -> None:
        record = line.record
        match record["type"]:
            # Bytes count from the intent on: after a crash nobody knows how many of them left, so
            # all of them count against the policy's limits (security rule 27).
            case "egress.intent":
                self._sent[record["job_digest"], record["round"]] += record["message"]["bytes"]
                # A padded or rotated part is a message of its own, with attempts of its own.
                part = record["tensors"][0]["part"] if record.get("hidden") else ""
                self._attempts[record["job_digest"], record["round"], part] += 1
                self._unsettled[line.seq] = [line]
            case "egress.protocol":
                self._sent[record["job_digest"], record["round"]] += record["message"]["bytes"]
                # It tells when a job's folder has lost its memory of a sum (silo/blind/rounds.py).
                if record["kind"] == "keys":
                    self._entered.add(record["job_digest"])
                if record["kind"] == "contribution":
                    self._contributed.add(record["job_digest"])
            case "secagg.signed":
                self._signed.append(parse_record(line, SumSigned))
                self._summed.add(record["job_digest"])
            case "secagg.sum":
                self._summed.add(record["job_digest"])
            case "egress.digest":
                self._unsettled[record["ref"]].append(line)
            case "egress.outcome":
                del self._unsettled[record["ref"]]
            case "privacy.head":
                self._budgets[record["dataset"]] = parse_record(line, PrivacyHead)
            case "roster.change":
                self._silos[record["roster"]] = _silos(record["text"])
            case "start":
                self._roster = record["roster"]
            case "job.accept":
                then = self._silos.get(self._roster)
                self._silos_then.setdefault(record["job_digest"], then)
            case "key.rotate":
                self._past.append(VerifierKey.parse(record["old"]))


def _silos(roster: str) -> frozenset[str]:
    entries = parse_json(roster.encode(), "a roster in the ledger")["entries"]
    return frozenset(entry["id"] for entry in entries if entry["role"] == Role.SILO)


def _message(lines: list[VerifiedLine]) -> Unsettled:
    intent, *digests = lines
    # There is one digest at most (rules.py).
    found = Unsettled(intent.seq, parse_record(intent, Intent))
    for line in digests:
        found = Unsettled(
            intent.seq, found.intent, parse_record(line, Digest), Appended(line.seq, line.leaf)
        )
    return found


def _same_set(one: SumSigned, other: SumSigned) -> bool:
    """True if two say the same but for the attempt in which."""
    return one.model_copy(update={"round": other.round, "ctx": other.ctx}) == other


def _foreign(record: Mapping[str, Any], silo: str) -> str:
    named = record["silo"] if record["type"] in ("start", "egress.intent") else silo
    return "" if named == silo else f"the record is of silo {named!r}, this is {silo!r}"
