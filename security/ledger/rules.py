"""The order that records of a ledger keep, the same for the writer and for the verifier.

Pure functions of records as they are stored; records.py has their form.

====================  ==========================================================================
record                may come
====================  ==========================================================================
``policy.change``     any time; its text has its digest, and it goes from the policy that is in
                      force
``policy.deny``       any time, by the policy in force
``roster.change``     any time; its text is a roster of its digest
``egress.intent``     any time, by the policy in force; its tensors fit into its message and the
                      bytes before its
                      offset, and these were declared by an earlier intent of that round, or of that
                      attempt at a sum, version or use; a tensor's readers, where it names some, are
                      among its own; its cohort, if it has one, is sorted and has this silo; it is
                      what its form asks for (rules.py), and a padded one a version of its part that
                      is newer than all before, or the last once more; with noised tensors it names
                      what paid for them, reservations that the last head of that data set's budget
                      covers, and without it names none
``egress.digest``     once for an intent without outcome, with its tensors and the bytes of the
                      whole message; of a masked, padded or rotated one without any tensor
``egress.outcome``    once for an intent; ``sent`` only after its digest and with all its bytes
``control.open``      when no control session is open; a ``start`` abandons one that a crash left
                      open
``control.close``     for the open session, within its caps
``secagg.sum``        any time; its survivors are sorted and have this silo
``secagg.signed``     the same; and none of those absent, sorted too, survived
``privacy.head``      any time; of a data set's budget that has not shrunk since the last one, and
                      of as many records
                      is the same
all others            any time
====================  ==========================================================================

A ledger from before policies were recorded has none in force until the first ``policy.change``; any
may decide there.

What the form of an intent asks of the rest of it. Pure functions of records as they are stored.

===========  ======================================  ===============================================
form         names                                   and
===========  ======================================  ===============================================
``masked``   an attempt at a sum                     its members are some of the cohort, sorted,
                                                     this silo and at least as many as its
                                                     threshold; its tensors are words, and what they
                                                     leave of the bytes are canaries
``padded``   a version of its part                   its tensors are the one part's, words of 8
                                                     bytes that fill all its bytes
``rotated``  a use of a rotation, whose number is 0  its tensors are the one part's, vectors that
                                                     fill all its bytes
any other    none of them
===========  ======================================  ===============================================
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from typing import Any, NamedTuple

from ...errors import LocalError
from ..identity import roster as rosters
from ..policy.release import ITEM_BYTES, MASKED, PADDED, PLAIN, ROTATED

# forms of which no tensor has a hash: with it guesses could be compared
UNHASHED = (MASKED, PADDED, ROTATED)
NOISED = ("noised", "dp")  # taints; the second is what early releases wrote
ASTRAY = "which is not sorted, has a silo twice, or lacks this one"
_WORDS = ("uint32", "uint64")  # dtypes of what is masked
# dtypes in the clear, the last ones as codecs make them
_PLAIN = ("float32", "float64", "int64", "bfloat16", "int8", "int32")
# dtypes of what is a message of its own
_HIDDEN = {PADDED: ("uint64",), ROTATED: ("float32", "float64")}


def form_fault(record: Mapping[str, Any]) -> str:
    """Why an intent of its form is not so; empty if it may be."""
    return _masked_fault(record) or _hidden_fault(record) or _plain_fault(record)


def stream(record: Mapping[str, Any]) -> int | str:
    """The message of which an intent's offset counts bytes.

    A round has one, and so have an attempt at a sum, a version of a part and a use of a rotation.
    """
    bound = record.get("secagg") or record.get("hidden")
    return bound["ctx"] if bound else record["round"]  # type: ignore[no-any-return]


def astray(silos: Sequence[str], silo: str) -> bool:
    """True if these are not some silos in order, each once, and this one among them."""
    # ``silo`` is empty until a record names it.
    return silos != sorted(set(silos)) or (bool(silo) and silo not in silos)


def strays(absent: Sequence[str], survivors: Sequence[str]) -> bool:
    """True if these are not some silos in order, each once, or have a survivor among them."""
    return absent != sorted(set(absent) - set(survivors))


def _masked_fault(record: Mapping[str, Any]) -> str:
    # A message that is called masked without naming an attempt would pass for hidden in a report.
    secagg, form, cohort = record.get("secagg"), record["form"], record.get("cohort")
    if (secagg is not None) != (form == MASKED):
        return f"intent has form {form!r} and names {_a(secagg, 'an')} attempt at a secure sum"
    if secagg is None:
        return ""
    members, threshold = secagg["members"], secagg["threshold"]
    if astray(members, record["silo"]):
        return f"intent is masked with members {', '.join(members)}, {ASTRAY}"
    if cohort and not set(members) <= set(cohort):
        return (
            f"intent is masked with members {', '.join(members)}, and its cohort is"
            f" {', '.join(cohort)}"
        )

    # So few could never sign survivors, so the bytes were masked for nobody who opens them.
    if threshold > len(members):
        return (
            f"intent is masked with {len(members)} members, fewer than its threshold of {threshold}"
        )
    return _size_fault(record, _WORDS)


def _hidden_fault(record: Mapping[str, Any]) -> str:
    hidden, form = record.get("hidden"), record["form"]
    if (hidden is not None) != (form in _HIDDEN):
        named = f"{_a(hidden)} version of a part or use of a rotation"
        return f"intent has form {form!r} and names {named}"
    if hidden is None:
        return ""
    if len(parts := dict.fromkeys(tensor["part"] for tensor in record["tensors"])) != 1:
        return (
            f"intent is {form} and of part {', '.join(parts) or 'none'}; each part is a message of"
            " its own"
        )
    whole = record.get("offset", 0) + record["message"]["bytes"]
    inside = sum(tensor["bytes"] for tensor in record["tensors"])
    if whole != inside:
        return f"intent is {form} and of {whole} bytes, and its tensors are {inside}"
    if form == ROTATED and hidden["number"]:
        return (
            f"intent is rotated and has number {hidden['number']}; only versions of a padded part"
            " are counted"
        )
    return _size_fault(record, _HIDDEN[form])


def _plain_fault(record: Mapping[str, Any]) -> str:
    return _size_fault(record, _PLAIN) if record["form"] == PLAIN else ""


def _size_fault(record: Mapping[str, Any], dtypes: Sequence[str]) -> str:
    # A tensor whose bytes are not those of its shape would carry numbers that nobody declared.
    for tensor in record["tensors"]:
        dtype, size = tensor["dtype"], tensor["bytes"]
        if dtype not in dtypes or size != prod(tensor["shape"]) * ITEM_BYTES[dtype]:
            where = f"tensor {tensor['part']}/{tensor['name']}"
            return f"intent is {record['form']}, and {where} has {size} bytes of {dtype!r}"
    return ""


@dataclass(slots=True)
class OpenIntent:
    """An intent without outcome so far."""

    tensors: list[tuple[str, str]]  # (part, name) of those that its digest names
    bytes: int  # that go now
    offset: int  # bytes of the message before them
    digested: bool = False


class _Read(NamedTuple):
    """Facts of all tensors of an intent together."""

    names: list[tuple[str, str]]
    twice: str  # those that come twice
    bytes: int
    readers: set[str]  # that single tensors name
    noised: bool  # whether one is


Rule = Callable[[Mapping[str, Any]], str]  # why a record must not come next, or nothing


class Rules:
    """Follows a ledger record by record; ``check`` before ``accept``.

    Both take records whose form is right.
    """

    def __init__(self, silo: str = "") -> None:
        self.silo = silo  # whose ledger it is; by default as its records say
        self.intents: dict[int, OpenIntent] = {}
        self.control: tuple[int, Mapping[str, Any]] | None = None
        # digest of the policy in force; None in a ledger from before they were recorded
        self.policy: str | None = None
        # digests of the rosters that it keeps
        self.rosters: set[str] = set()
        # Job digest → round, or ctx of an attempt at a sum, of a version or of a use → bytes so
        # far.
        self.declared: defaultdict[str, dict[int | str, int]] = defaultdict(dict)
        # (job digest, padded part) → number and ctx
        self.versions: dict[tuple[str, str], tuple[int, str]] = {}
        # data set → the last head of its privacy budget
        self.heads: dict[str, Mapping[str, Any]] = {}
        self._tensors: tuple[object, _Read] = (None, _Read([], "", 0, set(), False))
        self._rules: Mapping[str, Rule] = {
            "egress.intent": self._check_intent,
            "policy.change": self._check_change,
            "roster.change": self._check_roster,
            "policy.deny": self._check_deny,
            "egress.digest": self._check_digest,
            "egress.outcome": self._check_outcome,
            "control.open": self._check_open,
            "control.close": self._check_close,
            "privacy.head": self._check_head,
            "secagg.sum": self._check_sum,
            "secagg.signed": self._check_signed,
        }
        self._rules_of_intents: Sequence[Rule] = (
            self._check_decider,
            self._check_tensors,
            self._check_readers,
            self._check_cohort,
            form_fault,
            self._check_version,
            self._check_paid,
            self._check_offset,
        )
        self._notes: Mapping[str, Callable[[int, Mapping[str, Any]], None]] = {
            "start": self._note_start,
            "policy.change": self._note_change,
            "roster.change": self._note_roster,
            "egress.intent": self._note_intent,
            "egress.digest": self._note_digest,
            "egress.outcome": self._note_outcome,
            "control.open": self._note_open,
            "control.close": self._note_close,
            "privacy.head": self._note_head,
        }

    def check(self, record: Mapping[str, Any]) -> str:
        """Why this record must not come next; empty if it may.

        It returns text, since the writer raises it and the verifier lists it. The state stays as
        it was.
        """
        rule = self._rules.get(record["type"])
        return rule(record) if rule else ""

    def accept(self, seq: int, record: Mapping[str, Any]) -> None:
        """Take note of a record that ``check`` lets pass.

        Call ``check`` for the same record first: this relies on it.
        """
        if note := self._notes.get(record["type"]):
            note(seq, record)

    def _note_start(self, _: int, record: Mapping[str, Any]) -> None:
        self.silo = self.silo or record["silo"]
        # Whoever died with a session open does not close it any more.
        self.control = None

    def _note_change(self, _: int, record: Mapping[str, Any]) -> None:
        self.policy = record["after"]

    def _note_roster(self, _: int, record: Mapping[str, Any]) -> None:
        self.rosters.add(record["roster"])

    def _note_intent(self, seq: int, record: Mapping[str, Any]) -> None:
        # The furthest byte counts, not the last intent: an upload that was resumed from an earlier
        # byte takes nothing back of what had left.
        offset, size = record.get("offset", 0), record["message"]["bytes"]
        hashed = record["form"] not in UNHASHED
        # A masked, padded or rotated message has no hashes of tensors: by the hash of plain values
        # a guess could be checked.
        named = self._read(record["tensors"]).names if hashed else []
        self.intents[seq] = OpenIntent(named, size, offset)
        # Per byte stream: the next attempt at a sum sends other bytes, and starts from 0.
        declared, own = self.declared[record["job_digest"]], stream(record)
        declared[own] = max(offset + size, declared.get(own, 0))
        if record["form"] == PADDED:
            self.versions[_part(record)] = _version(record)
        self.silo = self.silo or record["silo"]

    def _note_digest(self, _: int, record: Mapping[str, Any]) -> None:
        self.intents[record["ref"]].digested = True

    def _note_outcome(self, _: int, record: Mapping[str, Any]) -> None:
        del self.intents[record["ref"]]

    def _note_open(self, seq: int, record: Mapping[str, Any]) -> None:
        self.control = (seq, record)

    def _note_close(self, _: int, __: Mapping[str, Any]) -> None:
        self.control = None

    def _note_head(self, _: int, record: Mapping[str, Any]) -> None:
        self.heads[record["dataset"]] = record

    def _check_change(self, record: Mapping[str, Any]) -> str:
        # Both ends are named, so that a change cannot be cut out of the chain of policies.
        if record["before"] != self.policy:
            return (
                f"policy.change goes from policy {record['before'] or 'none'}, in force is"
                f" {self.policy or 'none'}"
            )
        if record["after"] != (digest := sha256(record["text"].encode()).hexdigest()):
            return f"policy.change has a text of digest {digest}, and names {record['after']}"
        return ""

    def _check_roster(self, record: Mapping[str, Any]) -> str:
        try:
            roster = rosters.parse(record["text"].encode(), "its text")
        except LocalError as error:
            return f"roster.change holds no roster: {error}"
        # Who signed it is asked by whoever audits, who knows the founders.
        if rosters.digest(roster) != record["roster"]:
            return f"roster.change has a text of another roster than {record['roster']}"
        return ""

    def _check_deny(self, record: Mapping[str, Any]) -> str:
        return self._check_policy(record["policy"])

    def _check_policy(self, digest: str) -> str:
        # A ledger from before policies were recorded has none in force, and accepts any.
        if self.policy in (None, digest):
            return ""
        return f"decided by policy {digest}, in force is {self.policy}"

    def _check_intent(self, record: Mapping[str, Any]) -> str:
        # Only the first fault: later rules rely on earlier ones, for example that a padded intent
        # has a tensor.
        faults = (rule(record) for rule in self._rules_of_intents)
        return next(filter(None, faults), "")

    def _check_decider(self, record: Mapping[str, Any]) -> str:
        return self._check_policy(record["policy"]["file"])

    def _check_tensors(self, record: Mapping[str, Any]) -> str:
        tensors = self._read(record["tensors"])
        if tensors.twice:
            return f"intent names a tensor twice: {tensors.twice}"
        offset, size = record.get("offset", 0), record["message"]["bytes"]
        if tensors.bytes > offset + size:
            behind = f" behind {offset}" if offset else ""
            return (
                f"tensors of {tensors.bytes} bytes do not fit into the intent's message of {size}"
                f" bytes{behind}"
            )
        return ""

    def _check_readers(self, record: Mapping[str, Any]) -> str:
        readers = record["readers"]
        if not readers:
            return "intent names no reader; name at least its recipient"
        if strange := sorted(self._read(record["tensors"]).readers - set(readers)):
            return (
                f"intent has readers {', '.join(readers)}, and a tensor of it also"
                f" {', '.join(strange)}"
            )
        return ""

    def _check_cohort(self, record: Mapping[str, Any]) -> str:
        cohort = record.get("cohort")
        if cohort and astray(cohort, record["silo"]):
            return f"intent has cohort {', '.join(cohort)}, {ASTRAY}"
        return ""

    def _check_offset(self, record: Mapping[str, Any]) -> str:
        # Bytes that no intent declared would have left unrecorded.
        offset = record.get("offset", 0)
        before = self.declared[record["job_digest"]].get(stream(record), 0)
        if offset > before:
            return (
                f"intent resumes at byte {offset}, of which earlier intents of its round declared"
                f" {before}"
            )
        return ""

    def _check_version(self, record: Mapping[str, Any]) -> str:
        """A number stands for one version: a pad that is used for a second one hides neither."""
        if record["form"] != PADDED:
            return ""
        last, before = self.versions.get(_part(record), (-1, ""))
        number, ctx = _version(record)
        if (number > last and ctx != before) or (number, ctx) == (last, before):
            return ""
        part = _part(record)[1]
        return (
            f"intent is version {number} of part {part!r} with ctx {ctx}, after version {last} with"
            f" {before}"
        )

    def _check_paid(self, record: Mapping[str, Any]) -> str:
        """Check that what is noised was paid for before, out of a budget whose head stands here."""
        paid, noised = record.get("dp"), self._read(record["tensors"]).noised

        # Noise that no reservation paid for counts in no budget, and so protects nothing.
        if (paid is not None) != noised:
            named = "what" if paid else "nothing that"
            return f"intent has {_a(noised)} tensor that is noised, and names {named} paid for it"
        if paid is None:
            return ""
        # Records of one data set cost the budget of no other.
        if (of := record.get("dataset", "")) not in ("", paid["dataset"]):
            return f"intent is of data set {of!r}, paid by data set {paid['dataset']!r}"
        ids, head = paid["ids"], self.heads.get(paid["dataset"])
        if not ids or ids != sorted(set(ids)):
            return (
                f"intent has tensors that are noised, paid by {ids or 'no reservation'}; name some,"
                " in order, each once"
            )

        # A reservation behind the last head is one that a rolled-back budget would have forgotten.
        size = head["size"] if head else 0
        if ids[-1] >= size:
            return (
                f"intent is paid by {ids[-1]} of data set {paid['dataset']!r}, whose last head has"
                f" {size} records"
            )
        return ""

    def _check_head(self, record: Mapping[str, Any]) -> str:
        # A budget only grows: a smaller one, or another one of its size, has forgotten spending.
        last = self.heads.get(record["dataset"])
        if last is None or record["size"] > last["size"]:
            return ""
        if (record["size"], record["root"]) == (last["size"], last["root"]):
            return ""
        return (
            f"budget of data set {record['dataset']!r} has head {record['size']} {record['root']},"
            f" after {last['size']} {last['root']}: it was rolled back or rewritten"
        )

    def _read(self, tensors: Sequence[Mapping[str, Any]]) -> "_Read":
        """Facts of one list, kept, since it is read at least twice (fast_decoder.py)."""
        # By identity: the decoder hands out one list for the equal tensors of round after round.
        if tensors is not self._tensors[0]:
            names = _named(tensors)
            twice = _listed(names) if len(set(names)) != len(names) else ""
            readers = {reader for tensor in tensors for reader in tensor.get("readers", ())}
            noised = any(tensor["taint"] in NOISED for tensor in tensors)
            self._tensors = (
                tensors,
                _Read(names, twice, sum(tensor["bytes"] for tensor in tensors), readers, noised),
            )
        return self._tensors[1]

    def _check_digest(self, record: Mapping[str, Any]) -> str:
        ref, size = record["ref"], record["message"]["bytes"]
        intent = self.intents.get(ref)
        if intent is None:
            return f"digest refers to seq {ref}, which is not an open intent"

        # Two digests would let the silo show either of two messages later.
        if intent.digested:
            return f"second digest for intent {ref}"

        # The policy decided on the intent: a digest of other tensors was decided on by nobody.
        names = _named(record["tensors"])
        if names != intent.tensors:
            return (
                f"digest of intent {ref} has tensors {_listed(names)}, the intent"
                f" {_listed(intent.tensors)}"
            )
        whole = intent.offset + intent.bytes
        if size != whole:
            return f"digest of intent {ref} has {size} bytes, the intent {whole}"
        return ""

    def _check_outcome(self, record: Mapping[str, Any]) -> str:
        ref, status, sent = record["ref"], record["status"], record["bytes_sent"]
        intent = self.intents.get(ref)
        if intent is None:
            return f"outcome refers to seq {ref}, which is not an open intent"

        # No outcome takes back what the intent declared, and none claims more (rule 27).
        if sent > intent.bytes:
            return f"outcome of intent {ref} sent {sent} bytes, the intent has {intent.bytes}"

        # The digest is durable before the frame that makes the message count (rule 27).
        if status == "sent" and not intent.digested:
            return f"outcome of intent {ref} is 'sent' without a digest"
        if status == "sent" and sent != intent.bytes:
            return f"outcome of intent {ref} is 'sent' with {sent} of {intent.bytes} bytes"
        return ""

    def _check_open(self, _: Mapping[str, Any]) -> str:
        if self.control is None:
            return ""
        seq, opened = self.control
        return f"control session {opened['session']!r} (seq {seq}) is still open"

    def _check_close(self, record: Mapping[str, Any]) -> str:
        if self.control is None or self.control[0] != record["ref"]:
            return (
                f"control.close refers to seq {record['ref']}, which is not an open control session"
            )

        # The caps stand in the record that opened the session: polls are no way around the policy
        # (rule 32).
        cap = self.control[1]
        if record["messages"] > cap["max_messages"] or record["bytes"] > cap["max_bytes"]:
            return (
                f"control session {cap['session']!r} closed with {record['messages']} messages and"
                f" {record['bytes']} bytes, its cap is {cap['max_messages']} and {cap['max_bytes']}"
            )
        return ""

    def _check_sum(self, record: Mapping[str, Any]) -> str:
        if astray(record["survivors"], self.silo):
            return f"sum has survivors {', '.join(record['survivors'])}, {ASTRAY}"
        return ""

    def _check_signed(self, record: Mapping[str, Any]) -> str:
        if fault := self._check_sum(record):
            return fault
        if strays(record["absent"], record["survivors"]):
            absent = ", ".join(record["absent"])
            return f"sum has absent {absent}, which is not sorted, or has a survivor"
        return ""


def _a(named: object, article: str = "a") -> str:
    return article if named else "no"


def _part(record: Mapping[str, Any]) -> tuple[str, str]:
    return record["job_digest"], record["tensors"][0]["part"]


def _version(record: Mapping[str, Any]) -> tuple[int, str]:
    return record["hidden"]["number"], record["hidden"]["ctx"]


def _named(tensors: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    return [(tensor["part"], tensor["name"]) for tensor in tensors]


def _listed(names: list[tuple[str, str]]) -> str:
    return ", ".join("/".join(name) for name in names) or "none"
