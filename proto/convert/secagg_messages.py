"""The messages of a secure sum in protobuf: ``x_to_wire`` and ``x_from_wire`` of each, in the order
of their crossing.

What is read is refused with the code of its step, and ``peer``, who sent it here, is blamed:
whoever passes on what is malformed could have seen it. Counts and lengths are checked before
anything is made of them, and each of these is the one spelling of its message. Signatures and
proofs are for the machines (security/secagg/messages.py) to check.

A protobuf message prints everything in it, shares too: none is to be printed or logged. The
dataclasses print none.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

from ...algorithms.job.security import MOST_PRODUCTS, MOST_SHARES
from ...errors import RefusedError
from ...security.arithmetic.field import NUMBER_BYTES
from ...security.arithmetic.shamir import SALT_BYTES, SHARE_BYTES
from ...security.faults import Code
from ...security.identity.keys import ID_PATTERN
from ...security.identity.pairwise_keys import KEY_BYTES
from ...security.log.merkle import HASH_BYTES
from ...security.secagg.dealing import (
    PAIR,
    SEALED_BYTES,
    SELF,
    Dealing,
    HeldShare,
    KeyBundle,
    Portion,
    PortionDelivery,
)
from ...security.secagg.evidence import Complaint, Fault, Misdealing, ShownShare, Unjoined, Unopened
from ...security.secagg.gram_pieces import SealedShare
from ...security.secagg.linear_tags import TAG_BYTES
from ...security.secagg.messages import Abandon, Header, Reveal, Revealed, Survival, SurvivorsShown
from ...security.secagg.receiving_keys import KeyDelivery, ReceivingKey
from ...security.secagg.spec import MOST_SILOS
from .. import secure_pb2 as pb

SIGNATURE_BYTES = 64  # Ed25519
MOST_GROUPS = 4096  # of a specification
MOST_HASHES = (MOST_SILOS - 1).bit_length()  # of an inclusion proof
MOST_SPEC_BYTES = 1 << 21  # the longest specification, of 1000 silos and 4096 groups, is shorter
# of all evidence that is told at a time: against twenty dealers of 100 silos, two of 1000
MOST_PROOF_BYTES = 1 << 20

KINDS = {SELF: pb.SHARE_KIND_SELF, PAIR: pb.SHARE_KIND_PAIR}
KINDS_FROM = {number: kind for kind, number in KINDS.items()}

M = TypeVar("M")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sender:
    """Who sent what is read, and the code with which it is refused: a ``Code``, or a name of
    ``ErrorCode``.
    """

    peer: str
    code: str

    def check(self, holds: bool, why: str) -> None:
        """RefusedError unless it holds."""
        if not holds:
            raise RefusedError(self.peer, self.code, why)

    def member(self, found: str, what: str) -> str:
        """A roster id."""
        self.check(
            re.fullmatch(ID_PATTERN, found) is not None,
            f"{what} {found[:65]!r} is not an id of a member",
        )
        return found

    def sized(self, found: bytes, size: int, what: str) -> bytes:
        """Exactly this many bytes."""
        self.check(len(found) == size, f"{what} has {len(found)} bytes, not {size}")
        return found

    def tags(self, found: bytes, what: str) -> bytes:
        """Whole numbers of 8 bytes, no more than there may be groups."""
        whole = len(found) % TAG_BYTES == 0 and len(found) <= TAG_BYTES * MOST_GROUPS
        self.check(
            whole,
            f"{what} has tags of {len(found)} bytes, not {TAG_BYTES} for each of 0 to"
            f" {MOST_GROUPS}",
        )
        return found

    def numbers(self, found: bytes, most: int, what: str) -> bytes:
        """Whole numbers of 8 bytes, or sealed ones, which are 16 bytes longer.

        No more than ``most`` bytes.
        """
        size = len(found)
        self.check(
            size % NUMBER_BYTES == 0 and size <= most,
            f"{what} has {size} bytes, not {NUMBER_BYTES} per number",
        )
        return found

    def few(self, found: Sequence[object], most: int, what: str) -> None:
        """No more entries than there can be."""
        self.check(len(found) <= most, f"{len(found)} {what}, at most {most} there can be")

    def every(
        self,
        messages: Sequence[M],
        read: Callable[[str, M], T],
        key: Callable[[T], Any],
        what: str,
        most: int = MOST_SILOS,
    ) -> tuple[T, ...]:
        """A set: counted, then read one by one; each once, ascending by ``key``."""
        self.few(messages, most, what)
        made = tuple(read(self.peer, message) for message in messages)
        for one, other in pairwise(map(key, made)):
            self.check(
                one < other, f"{what} of {one!r:.80} before {other!r:.80}: not ascending, each once"
            )
        return made


def bundle_to_wire(bundle: KeyBundle) -> pb.KeyBundle:
    """A silo's public keys."""
    return pb.KeyBundle(
        silo=bundle.silo,
        seal=bundle.seal,
        mask=bundle.mask,
        receiving=bundle.receiving,
        signature=bundle.signature,
    )


def bundle_from_wire(peer: str, message: pb.KeyBundle) -> KeyBundle:
    """KEYS."""
    sent = Sender(peer, Code.KEYS)
    silo = sent.member(message.silo, "keys of")
    return KeyBundle(
        silo,
        sent.sized(message.seal, KEY_BYTES, f"the seal key of {silo!r}"),
        sent.sized(message.mask, KEY_BYTES, f"the mask key of {silo!r}"),
        sent.sized(message.receiving, HASH_BYTES, f"the root over the receiving keys of {silo!r}"),
        sent.sized(message.signature, SIGNATURE_BYTES, f"the signature over the keys of {silo!r}"),
    )


def receiving_to_wire(key: ReceivingKey) -> pb.ReceivingKey:
    """The key that one dealer seals to."""
    return pb.ReceivingKey(dealer=key.dealer, public=key.public)


def receiving_from_wire(peer: str, message: pb.ReceivingKey) -> ReceivingKey:
    """KEYS."""
    sent = Sender(peer, Code.KEYS)
    dealer = sent.member(message.dealer, "a receiving key for")
    return ReceivingKey(
        dealer, sent.sized(message.public, KEY_BYTES, f"the receiving key for {dealer!r}")
    )


def key_delivery_to_wire(delivery: KeyDelivery) -> pb.KeyDelivery:
    """One receiving key, with its proof."""
    return pb.KeyDelivery(
        silo=delivery.silo, key=receiving_to_wire(delivery.key), proof=delivery.proof
    )


def key_delivery_from_wire(peer: str, message: pb.KeyDelivery) -> KeyDelivery:
    """KEYS."""
    sent = Sender(peer, Code.KEYS)
    silo = sent.member(message.silo, "a receiving key of")
    key = receiving_from_wire(peer, message.key)
    sent.few(message.proof, MOST_HASHES, "hashes of a proof")
    what = f"a hash of the proof of the receiving key of {silo!r}"
    return KeyDelivery(
        silo, key, tuple(sent.sized(each, HASH_BYTES, what) for each in message.proof)
    )


def dealing_to_wire(dealing: Dealing) -> pb.Dealing:
    """A dealer's word on all of its portions."""
    return pb.Dealing(
        dealer=dealing.dealer,
        h_u1=dealing.h_u1,
        seed=dealing.seed,
        root=dealing.root,
        signature=dealing.signature,
    )


def dealing_from_wire(peer: str, message: pb.Dealing) -> Dealing:
    """SHARES."""
    sent = Sender(peer, Code.SHARES)
    dealer = sent.member(message.dealer, "a dealing of")
    return Dealing(
        dealer,
        sent.sized(message.h_u1, HASH_BYTES, f"H(U1) in the dealing of {dealer!r}"),
        sent.sized(
            message.seed, HASH_BYTES, f"the commitment to its seed in the dealing of {dealer!r}"
        ),
        sent.sized(message.root, HASH_BYTES, f"the root in the dealing of {dealer!r}"),
        sent.sized(
            message.signature, SIGNATURE_BYTES, f"the signature over the dealing of {dealer!r}"
        ),
    )


def portion_to_wire(portion: Portion) -> pb.Portion:
    """What is dealt to one holder."""
    return pb.Portion(
        holder=portion.holder,
        key=portion.key,
        sealed=portion.sealed,
        own=portion.own,
        pair=portion.pair,
    )


def portion_from_wire(peer: str, message: pb.Portion, dealer: str) -> Portion:
    """SHARES; the dealer's portion to itself has nothing sealed."""
    sent = Sender(peer, Code.SHARES)
    holder = sent.member(message.holder, f"a portion of {dealer!r} for")
    what = f"the portion of {dealer!r} for {holder!r}"
    return Portion(
        holder,
        sent.sized(message.key, 0 if holder == dealer else KEY_BYTES, f"the key of {what}"),
        sent.sized(
            message.sealed, 0 if holder == dealer else SEALED_BYTES, f"what is sealed in {what}"
        ),
        sent.sized(message.own, HASH_BYTES, f"the first commitment in {what}"),
        sent.sized(message.pair, HASH_BYTES, f"the second commitment in {what}"),
    )


def delivery_to_wire(delivery: PortionDelivery) -> pb.Delivery:
    """One portion, with its proof."""
    dealing, portion = dealing_to_wire(delivery.dealing), portion_to_wire(delivery.portion)
    return pb.Delivery(dealing=dealing, portion=portion, proof=delivery.proof)


def delivery_from_wire(peer: str, message: pb.Delivery) -> PortionDelivery:
    """SHARES."""
    sent = Sender(peer, Code.SHARES)
    dealing = dealing_from_wire(peer, message.dealing)
    portion = portion_from_wire(peer, message.portion, dealing.dealer)
    sent.few(message.proof, MOST_HASHES, "hashes of a proof")
    what = f"a hash of the proof of what {dealing.dealer!r} dealt"
    return PortionDelivery(
        dealing, portion, tuple(sent.sized(each, HASH_BYTES, what) for each in message.proof)
    )


def complaint_to_wire(complaint: Complaint) -> pb.Complaint:
    """Evidence against a dealer."""
    return pb.Complaint(
        silo=complaint.silo,
        dealer=complaint.dealer,
        key=complaint.key,
        signature=complaint.signature,
    )


def complaint_from_wire(peer: str, message: pb.Complaint) -> Complaint:
    """COMPLAINT."""
    sent = Sender(peer, Code.COMPLAINT)
    silo = sent.member(message.silo, "a complaint of")
    dealer = sent.member(message.dealer, f"a complaint of {silo!r} about")
    return Complaint(
        silo,
        dealer,
        sent.sized(message.key, KEY_BYTES, f"the key in the complaint of {silo!r}"),
        sent.sized(
            message.signature, SIGNATURE_BYTES, f"the signature over the complaint of {silo!r}"
        ),
    )


def header_to_wire(header: Header) -> pb.Header:
    """A silo's word on its upload."""
    return pb.Header(
        silo=header.silo,
        h_u2=header.h_u2,
        length=header.length,
        sha256=header.sha256,
        tags=header.tags,
        signature=header.signature,
    )


def header_from_wire(peer: str, message: pb.Header) -> Header:
    """UPLOAD."""
    sent = Sender(peer, Code.UPLOAD)
    silo = sent.member(message.silo, "a header of")
    return Header(
        silo,
        sent.sized(message.h_u2, HASH_BYTES, f"H(U2) in the header of {silo!r}"),
        message.length,
        sent.sized(message.sha256, HASH_BYTES, f"the digest in the header of {silo!r}"),
        sent.tags(message.tags, f"the header of {silo!r}"),
        sent.sized(
            message.signature, SIGNATURE_BYTES, f"the signature over the header of {silo!r}"
        ),
    )


def sealed_share_to_wire(share: SealedShare) -> pb.SealedShare:
    """A share of compared vectors."""
    return pb.SealedShare(dealer=share.dealer, sealed=share.sealed)


def sealed_share_from_wire(peer: str, message: pb.SealedShare) -> SealedShare:
    """SHARES; whether it opens, its holder sees."""
    sent = Sender(peer, Code.SHARES)
    dealer = sent.member(message.dealer, "a share of the vectors of")
    return SealedShare(
        dealer, sent.numbers(message.sealed, MOST_SHARES, f"the share of the vectors of {dealer!r}")
    )


def survival_to_wire(survival: Survival) -> pb.Survival:
    """A survivor's signature."""
    return pb.Survival(silo=survival.silo, signature=survival.signature)


def survival_from_wire(peer: str, message: pb.Survival) -> Survival:
    """NOTES."""
    sent = Sender(peer, Code.NOTES)
    silo = sent.member(message.silo, "a survivor's signature of")
    return Survival(
        silo,
        sent.sized(message.signature, SIGNATURE_BYTES, f"the survivor's signature of {silo!r}"),
    )


def shown_to_wire(shown: SurvivorsShown) -> pb.SurvivorsShown:
    """Survivors of an earlier attempt."""
    return pb.SurvivorsShown(
        context=shown.ctx,
        h_u1=shown.h_u1,
        h_u2=shown.h_u2,
        headers=[header_to_wire(each) for each in shown.headers],
        survivals=[survival_to_wire(each) for each in shown.survivals],
    )


def shown_from_wire(peer: str, message: pb.SurvivorsShown) -> SurvivorsShown:
    """ABANDON, UPLOAD or NOTES."""
    sent = Sender(peer, Code.ABANDON)
    return SurvivorsShown(
        sent.sized(message.context, HASH_BYTES, "the context of an earlier attempt"),
        sent.sized(message.h_u1, HASH_BYTES, "H(U1) of an earlier attempt"),
        sent.sized(message.h_u2, HASH_BYTES, "H(U2) of an earlier attempt"),
        sent.every(
            message.headers,
            header_from_wire,
            lambda each: each.silo,
            "headers of an earlier attempt",
        ),
        sent.every(
            message.survivals,
            survival_from_wire,
            lambda each: each.silo,
            "signatures of an earlier attempt",
        ),
    )


def reveal_to_wire(reveal: Reveal) -> pb.Reveal:
    """What a survivor reveals."""
    shares = [
        pb.Revealed(
            dealer=each.dealer, kind=KINDS[each.kind], share=each.held.share, salt=each.held.salt
        )
        for each in reveal.shares
    ]
    return pb.Reveal(
        silo=reveal.silo, shares=shares, signature=reveal.signature, products=reveal.products
    )


def reveal_from_wire(peer: str, message: pb.Reveal) -> Reveal:
    """REVEAL."""
    sent = Sender(peer, Code.REVEAL)
    silo = sent.member(message.silo, "shares revealed by")
    shares = sent.every(message.shares, _revealed, lambda each: each.dealer, "revealed shares")
    signature = sent.sized(
        message.signature, SIGNATURE_BYTES, f"the signature over what {silo!r} reveals"
    )
    products = sent.numbers(
        message.products, MOST_PRODUCTS, f"what {silo!r} reveals of inner products"
    )
    return Reveal(silo, shares, signature, products)


def _revealed(peer: str, message: pb.Revealed) -> Revealed:
    sent = Sender(peer, Code.REVEAL)
    dealer = sent.member(message.dealer, "a share of")
    sent.check(
        message.kind in KINDS_FROM,
        f"a share of {dealer!r} is of kind {message.kind}, which there is not",
    )
    share = sent.sized(message.share, SHARE_BYTES, f"a share of {dealer!r}")
    salt = sent.sized(message.salt, SALT_BYTES, f"the salt of a share of {dealer!r}")
    return Revealed(dealer, KINDS_FROM[message.kind], HeldShare(share, salt))


def misdealing_to_wire(evidence: Misdealing) -> pb.Misdealing:
    """Evidence against a dealer."""
    made = pb.Misdealing(
        document=evidence.document,
        bundle=bundle_to_wire(evidence.bundle),
        dealing=dealing_to_wire(evidence.dealing),
        portions=[portion_to_wire(portion) for portion in evidence.portions],
    )
    match evidence.fault:
        case Unopened(holder, key):
            made.holder, made.key = holder, key
        case Unjoined(kind, shares):
            made.kind = KINDS[kind]
            made.shares.extend(
                pb.HolderShare(holder=each.holder, share=each.held.share, salt=each.held.salt)
                for each in shares
            )
    return made


def proofs_to_wire(proofs: Sequence[Misdealing]) -> list[pb.Misdealing]:
    """As many as fit in ``MOST_PROOF_BYTES``, in their order.

    Silos take no sum without the dealers of the others.
    """
    made, left = [], MOST_PROOF_BYTES
    for message in map(misdealing_to_wire, proofs):
        left -= message.ByteSize()
        if left < 0:
            break
        made.append(message)
    return made


def proofs_from_wire(peer: str, messages: Sequence[pb.Misdealing]) -> tuple[Misdealing, ...]:
    """KEYS, SHARES or MISDEALT; one of each dealer at most, in order."""
    sent = Sender(peer, Code.MISDEALT)
    return sent.every(messages, misdealing_from_wire, lambda evidence: evidence.dealer, "proofs")


def misdealing_from_wire(peer: str, message: pb.Misdealing) -> Misdealing:
    """KEYS, SHARES or MISDEALT; ``Misdealing.spec`` reads the document."""
    sent = Sender(peer, Code.MISDEALT)
    bundle, dealing = (
        bundle_from_wire(peer, message.bundle),
        dealing_from_wire(peer, message.dealing),
    )
    portions = sent.every(
        message.portions,
        lambda by, m: portion_from_wire(by, m, dealing.dealer),
        lambda p: p.holder,
        "portions",
    )
    size = len(message.document)
    most = MOST_PROOF_BYTES
    sent.check(
        0 < size <= most, f"evidence with a specification of {size} bytes, 1 to {most} it can have"
    )
    return Misdealing(message.document, bundle, dealing, portions, _fault(sent, message))


def _fault(sent: Sender, message: pb.Misdealing) -> Fault:
    """A key or shares, never both."""
    if message.holder or message.key:
        holder = sent.member(message.holder, "evidence with a key of")
        alone = not message.kind and not message.shares
        sent.check(alone, f"evidence with a key of {holder!r}, and with shares")
        return Unopened(
            holder, sent.sized(message.key, KEY_BYTES, f"the key of {holder!r} in evidence")
        )
    sent.check(
        message.kind in KINDS_FROM,
        f"shares of kind {message.kind}, which there is not, as evidence",
    )
    shares = sent.every(
        message.shares, _holder_share, lambda each: each.holder, "shares of evidence"
    )
    return Unjoined(KINDS_FROM[message.kind], shares)


def _holder_share(peer: str, message: pb.HolderShare) -> ShownShare:
    sent = Sender(peer, Code.MISDEALT)
    holder = sent.member(message.holder, "a share held by")
    share = sent.sized(message.share, SHARE_BYTES, f"the share of {holder!r}")
    return ShownShare(
        holder,
        HeldShare(
            share, sent.sized(message.salt, SALT_BYTES, f"the salt of the share of {holder!r}")
        ),
    )


def abandon_to_wire(note: Abandon) -> pb.Abandon:
    """An abandon note."""
    return pb.Abandon(silo=note.silo, signature=note.signature)


def abandon_from_wire(peer: str, message: pb.Abandon) -> Abandon:
    """ABANDON."""
    sent = Sender(peer, Code.ABANDON)
    silo = sent.member(message.silo, "an abandon note of")
    return Abandon(
        silo, sent.sized(message.signature, SIGNATURE_BYTES, f"the abandon note of {silo!r}")
    )
