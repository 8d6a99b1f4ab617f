"""Heads that this silo holds of others' ledgers, and others of its own (rules 29 and 30).

Whoever has the log key can cut records off the end of a ledger or rewrite them; not if somebody
else holds a head that was signed before. So the silo stops, and nothing more leaves, where a head
that it signed is not of this ledger:

- the coordinator returns, at each greeting, the head under which it took our last upload;
- other silos sign, for a challenge of this session, what they hold of us. The coordinator passes
  that on and can keep it back; it can neither forge it nor show an old one again: the challenge is
  new, and is signed. It comes with a later poll, so an upload of a plain job may precede it;
  private jobs wait for it (``answered``).

In turn we keep, in ``<state>/heads.json``, the last head of each other silo that the coordinator
passed on, and that of the coordinator's own ledger, which must have grown from the one before.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from ... import log
from ...errors import LocalError, PeerError, ProofError
from ...files import checked_file
from ...files.documents import Strict
from ...proto import federation_pb2 as pb
from ...security.identity import roster as rosters
from ...security.identity.certificate import utc_now
from ...security.identity.keys import Id, Keys
from ...security.ledger.egress_ledger import Ledger
from ...security.ledger.records import WitnessRecord
from ...security.log import consistency
from ...security.log import note as notes
from ...security.log import tree_head as checkpoints
from ...security.log.append_log import SignedRecord
from ...security.log.attestation import CHALLENGE_BYTES, Attestation
from ...security.log.head import HeldHead, log_key
from ...security.log.note import Note, VerifierKey
from ...security.log.tree_head import TreeHead

HEADS = "heads.json"  # in the silo's state
# of a checkpoint that somebody passes on: an origin, two numbers and one signature
MAX_HEAD_BYTES = 4096
DAY_MILLISECONDS = 86_400_000


class MemberHeads(Strict):
    """``heads.json``: by member, the last signed head of its ledger that was passed on to us.

    ``forks`` has a second one, of the same size or later, that does not extend it: with the first,
    the evidence of a ledger that was altered. Under a new log key a member's head replaces the one
    before, whatever its size.

    ``generation`` grows when a coordinator takes over from one that died (lease.json there).
    """

    heads: dict[Id, str] = Field(default_factory=dict)
    forks: dict[Id, str] = Field(default_factory=dict)
    generation: Annotated[int, Field(strict=True, ge=0)] = 0  # the highest of the coordinator


class Witness:
    """Both directions for one silo; only the gate's session and uploads use it."""

    def __init__(self, ledger: Ledger, roster: rosters.Roster, keys: Keys, path: Path) -> None:
        self._ledger = ledger
        self._roster = roster
        self._keys = keys
        self._path = path
        self._heads = checked_file.read_json(path, MemberHeads) if path.exists() else MemberHeads()
        self._kept = self._heads  # as it lies on the disk
        self._keeping = asyncio.Lock()
        # Detects unreadable heads now, not in the middle of a round.
        for member in self._heads.heads:
            if member in roster:
                self._held(member)
        self._by_coordinator = 0  # records of our ledger whose head the coordinator holds
        self.challenge = b""
        self.reported: set[str] = set()  # silos that said in this session what they hold of us

    # What others hold of our ledger.

    def begin(self, challenge: bytes) -> None:
        """Begin a session, under this challenge.

        Statements from the previous session do not count any more.
        """
        self.challenge, self.reported = challenge, set()

    async def greeted(self, held: bytes, generation: int = 0) -> None:
        """Compare the head that the coordinator says it holds with our ledger.

        LocalError if we signed that and it is no head of this ledger. PeerError for a coordinator
        from which another one has taken over; ``generation`` is 0 if it knows none.
        """
        coordinator = self._roster.coordinator.id
        await self._check_generation(coordinator, generation)
        try:
            head = self._own(held)
        # of a ledger that was started again under another key, or nobody's
        except ProofError as error:
            log.problem("head.ignored", holder=coordinator, why=str(error))
            head = None
        await self._check(coordinator, head)
        # The next upload proves that our ledger grew from this head.
        self._by_coordinator = head.size if head else 0

    async def _check_generation(self, coordinator: str, generation: int) -> None:
        met = self._heads.generation
        if 0 < generation < met:
            why = (
                f"greets under generation {generation}, and one under {met} has taken over from it:"
                " an old copy of the coordinator runs; its operator has to stop it"
            )
            raise PeerError(coordinator, why)
        # Generations begin with the time in milliseconds. One from a wrong clock would otherwise
        # shut out all later coordinators.
        kept = min(generation, int(utc_now().timestamp() * 1000) + DAY_MILLISECONDS)
        if kept > met:
            await self._keep(generation=kept)

    async def attested(self, said: pb.Attestation) -> None:
        """Compare the head that another silo says it holds with our ledger.

        PeerError where it did not say so, LocalError as for ``greeted``.
        """
        # The challenge is fresh in each session, so what a silo once said of an older ledger cannot
        # be passed on again.
        coordinator = self._roster.coordinator.id
        if (
            said.by not in self._silos()
            or said.silo != self._ledger.silo
            or said.challenge != self.challenge
        ):
            why = f"passed on what {said.by[:64]!r} says of another ledger, or to another challenge"
            raise PeerError(coordinator, why)
        if said.by in self.reported:  # once a session: each is a record
            return
        reported = self.reported

        # A word that does not hold is the coordinator's doing or the silo's: it counts for nothing,
        # and ends nothing.
        try:
            attestation = self._attestation(said.by, said.silo, said.challenge, said.held)
            attestation.verify(self._roster[said.by], said.signature)
            head = self._own(said.held)
        except (PeerError, ProofError) as error:
            log.problem("head.ignored", holder=said.by, why=str(error))
            return
        await self._check(said.by, head)
        # Last, so that only a verified statement counts, and in no later session.
        reported.add(said.by)

    async def _check(self, holder: str, head: TreeHead | None) -> None:
        if head is None:
            return

        # We signed that head: a ledger that does not lead to it has forgotten what left.
        if problem := self._ledger.disagreement(HeldHead(holder, head)):
            raise LocalError(
                f"the ledger of {self._ledger.silo!r} was rolled back or altered: {problem};"
                " nothing more leaves. Restore the newest copy of the whole folder; if there is"
                " none, keep this one as evidence and begin a new ledger under new keys"
                " (docs/operate.md)"
            )
        await asyncio.to_thread(self._ledger.append, WitnessRecord.of(holder, head))

    def _own(self, data: bytes) -> TreeHead | None:
        """A head that we signed; None for none, ProofError for anything else."""
        if not data:
            return None
        note = _parsed(data)
        # Earlier keys count, too: a head from before a key rotation is still ours.
        keys = {(key.name, key.key_id): key for key in self._ledger.keys}
        signer = keys.get((note.signatures[0].name, note.signatures[0].key_id))
        if signer is None:
            raise ProofError("the checkpoint is signed by no key that this ledger has had")
        return checkpoints.verify(note, signer).checkpoint

    @property
    def answered(self) -> bool:
        """Whether another silo has signed in this session what it holds of our ledger.

        It may hold nothing. What differential privacy has cost stands in the ledger, so nothing is
        spent under a copy that no other silo was asked about. The coordinator's word is not enough:
        it may agree with whoever put an older copy back.
        """
        return bool(self.reported & self.independent)

    @property
    def independent(self) -> frozenset[str]:
        """The other silos, without those that the coordinator's operator runs, too.

        The operator of both could vouch for an older copy.
        """
        return self._silos().difference(self._roster.in_one_hand)

    # The head that goes with an upload.

    def proof(self, sealed: SignedRecord) -> tuple[bytes, tuple[bytes, ...]]:
        """The proofs for END: our ledger grew from the head that the coordinator holds, and ends
        with the record.
        """
        growth = self._ledger.growth(self._by_coordinator, sealed.checkpoint)
        return bytes(growth), self._ledger.inclusion(sealed.place.seq, sealed.place.seq + 1)

    def accepted(self, seq: int) -> None:
        """Note that the coordinator holds the head that ends with this record.

        The record is the DIGEST of an upload that it accepted.
        """
        self._by_coordinator = max(self._by_coordinator, seq + 1)

    # What we hold of others' ledgers.

    @property
    def holds(self) -> int:
        """Records of the coordinator's ledger whose head we hold; 0 for none."""
        held = self._held(self._roster.coordinator.id)
        return held.size if held else 0

    async def coordinator_head(self, data: bytes) -> None:
        """Keep the head to which the coordinator's ledger has grown.

        A head that does not extend the one that we hold is kept next to it, as evidence.
        """
        # Bytes that nobody signed prove nothing against the coordinator: they are ignored.
        coordinator = self._roster.coordinator.id
        key = self._key(coordinator)
        try:
            proof = consistency.Consistency.parse(data)
            note = _parsed(bytes(proof.checkpoint))
            checkpoints.verify(note, key)
        except ProofError as error:
            log.problem("head.ignored", holder=coordinator, why=str(error))
            return

        # From here on the coordinator's own signature is on the head. One that does not extend the
        # head before it shows, together with that, that its ledger was altered.
        try:
            consistency.verify_from(self._held(coordinator), proof, key)
        except ProofError as error:
            log.problem(
                "ledger.forked",
                member=coordinator,
                why=f"its ledger was rolled back or altered: {error}",
            )
            if coordinator not in self._heads.forks:  # the first one is evidence, and stays
                await self._keep(forks={coordinator: bytes(note).decode()})
            return
        await self._keep(heads={coordinator: bytes(note).decode()})

    async def relayed(self, heads: Sequence[bytes]) -> None:
        """Keep the largest head of each other silo, and both where two of one size differ."""
        larger: dict[str, str] = {}
        forks: dict[str, str] = {}

        # The coordinator relays these and may send any number, of anybody: one per member is read,
        # and only what the silo itself signed is kept.
        for data in heads[: len(self._roster.entries)]:
            try:
                note = _parsed(data)
                _, silo = checkpoints.owner(TreeHead.parse(note.text).origin)
                if silo not in self._silos():
                    raise ProofError(
                        f"checkpoint is of {silo!r}, which is not another silo of the roster"
                    )
                new = checkpoints.verify(note, self._key(silo)).checkpoint
            except ProofError as error:
                log.problem("head.ignored", holder=self._roster.coordinator.id, why=str(error))
                continue

            # Heads of different sizes cannot be compared without a proof, which only the silo has.
            old = self._held(silo)
            if old is None or new.size > old.size:
                larger[silo] = bytes(note).decode()
            elif new.size == old.size and new.root != old.root and silo not in self._heads.forks:
                log.problem(
                    "ledger.forked", member=silo, why=f"it signed two heads of {new.size} records"
                )
                forks[silo] = bytes(note).decode()

        # Evidence must outlive this process; a larger head can be had again.
        if forks:
            await self._keep(larger, forks)
        else:  # on the disk with the coordinator's next head, or at the end
            self._heads = self._heads.model_copy(update={"heads": self._heads.heads | larger})

    def attest(self, asked: pb.Challenge, session: bytes) -> pb.Attestation:
        """Say, signed, what we hold of another silo's ledger.

        PeerError for a question that nobody may ask.
        """
        if asked.silo not in self._silos() or len(asked.challenge) != CHALLENGE_BYTES:
            raise PeerError(
                self._roster.coordinator.id,
                f"asks what we hold of {asked.silo[:64]!r}, no other silo",
            )

        # Empty where we hold none: a silo that never wrote has to be able to hear so.
        held = self._heads.heads.get(asked.silo, "").encode()
        statement = self._attestation(self._ledger.silo, asked.silo, asked.challenge, held)
        return pb.Attestation(
            session=session,
            by=self._ledger.silo,
            silo=asked.silo,
            challenge=asked.challenge,
            held=held,
            signature=statement.sign(self._keys),
        )

    def _attestation(self, by: str, silo: str, challenge: bytes, head: bytes) -> Attestation:
        try:
            text = head.decode()
        except UnicodeDecodeError as error:
            raise ProofError(
                f"checkpoint is not UTF-8: {error.reason} at byte {error.start}"
            ) from None
        roster = rosters.digest(self._roster)
        return Attestation(self._roster.federation, roster, by, silo, challenge.hex(), text)

    def _silos(self) -> frozenset[str]:
        """The other silos."""
        return self._roster.silo_ids - {self._ledger.silo}

    def _held(self, member: str) -> TreeHead | None:
        """The head that we hold of a member's ledger, if it is under the key that it has now.

        A new key may have a new ledger.
        """
        text = self._heads.heads.get(member)
        if text is None:
            return None
        try:
            note = notes.parse(text.encode())
            if note.signatures[0].key_id != self._key(member).key_id:
                return None
            return TreeHead.parse(note.text)
        except ProofError as error:
            raise LocalError(
                f"{self._path}: what it has of {member!r} cannot be read: {error}; restore it"
            ) from error

    def _key(self, member: str) -> VerifierKey:
        return log_key(self._roster.federation, member, self._roster[member].log_key)

    async def flush(self) -> None:
        """Write the heads that were passed on last to the disk.

        They can be fetched again, so they are not written one by one.
        """
        if self._heads != self._kept:
            await self._keep()

    async def _keep(
        self,
        heads: dict[str, str] | None = None,
        forks: dict[str, str] | None = None,
        generation: int = 0,
    ) -> None:
        self._heads = MemberHeads(
            heads=self._heads.heads | (heads or {}),
            forks=self._heads.forks | (forks or {}),
            generation=max(generation, self._heads.generation),
        )
        # One after another, so that no older one stays.
        async with self._keeping:
            # A copy, since another head may come while the file is written.
            kept = self._heads
            await asyncio.to_thread(checked_file.write_json, self._path, kept)
            self._kept = kept


def _parsed(data: bytes) -> Note:
    """A checkpoint with one signature and nothing below its root, as our logs write them.

    ProofError otherwise.
    """
    # A head of ours is short: without a bound others could fill the disk with what they relay.
    if len(data) > MAX_HEAD_BYTES:
        raise ProofError(f"checkpoint has {len(data)} bytes, more than {MAX_HEAD_BYTES}")
    note = notes.parse(data)
    if len(note.signatures) != 1 or TreeHead.parse(note.text).extensions:
        raise ProofError("checkpoint has more than one signature, or lines below its root")
    return note
