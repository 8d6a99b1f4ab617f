"""The messages of a secure sum in protobuf, in the order of their crossing.

Each is a table (shape.py). What is read is refused with the code of its step. Signatures and proofs
are for the machines (security/secagg/messages.py) to check.

A protobuf message prints everything in it, shares too: none is to be printed or logged. The
dataclasses print none.
"""

from collections.abc import Sequence
from typing import Any

from ...algorithms.job.security import MOST_PRODUCTS, MOST_SHARES
from ...security.arithmetic.shamir import SALT_BYTES, SHARE_BYTES
from ...security.faults import Code
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
from ...security.secagg.messages import Abandon, Header, Reveal, Revealed, Survival, SurvivorsShown
from ...security.secagg.receiving_keys import KeyDelivery, ReceivingKey
from ...security.secagg.spec import MOST_SILOS
from .. import secure_pb2 as pb
from .shape import (
    SIGNATURE_BYTES,
    Known,
    Sender,
    Shape,
    coded,
    each,
    length_within,
    member,
    numbers,
    one,
    plain,
    proof,
    sized,
    tags,
)

MOST_SPEC_BYTES = 1 << 21  # the longest specification, of 1000 silos and 4096 groups, is shorter
# Of all evidence that is delivered at a time: against twenty dealers of 100 silos, two of 1000.
MOST_PROOF_BYTES = 1 << 20

# Numbers on the wire; commitments and signatures are over the byte strings.
KINDS = {SELF: pb.SHARE_KIND_SELF, PAIR: pb.SHARE_KIND_PAIR}

BUNDLE = Shape(
    KeyBundle,
    pb.KeyBundle,
    Code.KEYS,
    silo=member("keys of"),
    seal=sized(KEY_BYTES, "the seal key of {silo!r}"),
    mask=sized(KEY_BYTES, "the mask key of {silo!r}"),
    receiving=sized(HASH_BYTES, "the root over the receiving keys of {silo!r}"),
    signature=sized(SIGNATURE_BYTES, "the signature over the keys of {silo!r}"),
)
RECEIVING_KEY = Shape(
    ReceivingKey,
    pb.ReceivingKey,
    Code.KEYS,
    dealer=member("a receiving key for"),
    public=sized(KEY_BYTES, "the receiving key for {dealer!r}"),
)
KEY_DELIVERY = Shape(
    KeyDelivery,
    pb.KeyDelivery,
    Code.KEYS,
    silo=member("a receiving key of"),
    key=one(RECEIVING_KEY),
    proof=proof("a hash of the proof of the receiving key of {silo!r}"),
)
DEALING = Shape(
    Dealing,
    pb.Dealing,
    Code.SHARES,
    dealer=member("a dealing of"),
    h_u1=sized(HASH_BYTES, "H(U1) in the dealing of {dealer!r}"),
    seed=sized(HASH_BYTES, "the commitment to its seed in the dealing of {dealer!r}"),
    root=sized(HASH_BYTES, "the root in the dealing of {dealer!r}"),
    signature=sized(SIGNATURE_BYTES, "the signature over the dealing of {dealer!r}"),
)


def _to_another(size: int, known: Known) -> int:
    """The size of a field that is empty in a dealer's portion to itself."""
    # A dealer seals nothing to itself.
    return 0 if known["holder"] == known["dealing"].dealer else size


PORTION_NAME = "the portion of {dealing.dealer!r} for {holder!r}"
PORTION = Shape(  # stands in messages with its dealing
    Portion,
    pb.Portion,
    Code.SHARES,
    holder=member("a portion of {dealing.dealer!r} for"),
    key=sized(lambda known: _to_another(KEY_BYTES, known), f"the key of {PORTION_NAME}"),
    sealed=sized(
        lambda known: _to_another(SEALED_BYTES, known), f"what is sealed in {PORTION_NAME}"
    ),
    own=sized(HASH_BYTES, f"the first commitment in {PORTION_NAME}"),
    pair=sized(HASH_BYTES, f"the second commitment in {PORTION_NAME}"),
)
PORTIONS = each(PORTION, "holder", "portions")
DELIVERY = Shape(
    PortionDelivery,
    pb.Delivery,
    Code.SHARES,
    dealing=one(DEALING),
    portion=one(PORTION),
    proof=proof("a hash of the proof of what {dealing.dealer!r} dealt"),
)
COMPLAINT = Shape(
    Complaint,
    pb.Complaint,
    Code.COMPLAINT,
    silo=member("a complaint of"),
    dealer=member("a complaint of {silo!r} about"),
    key=sized(KEY_BYTES, "the key in the complaint of {silo!r}"),
    signature=sized(SIGNATURE_BYTES, "the signature over the complaint of {silo!r}"),
)
HEADER = Shape(
    Header,
    pb.Header,
    Code.UPLOAD,
    silo=member("a header of"),
    h_u2=sized(HASH_BYTES, "H(U2) in the header of {silo!r}"),
    # ``Header.check`` compares it with the one length that all uploads have.
    length=plain(),
    sha256=sized(HASH_BYTES, "the digest in the header of {silo!r}"),
    tags=tags("the header of {silo!r}"),
    signature=sized(SIGNATURE_BYTES, "the signature over the header of {silo!r}"),
)
SEALED_SHARE = Shape(  # only its holder finds out whether it opens
    SealedShare,
    pb.SealedShare,
    Code.SHARES,
    dealer=member("a share of the vectors of"),
    sealed=numbers(MOST_SHARES, "the share of the vectors of {dealer!r}"),
)
SURVIVAL = Shape(
    Survival,
    pb.Survival,
    Code.NOTES,
    silo=member("a survivor's signature of"),
    signature=sized(SIGNATURE_BYTES, "the survivor's signature of {silo!r}"),
)
ABANDON = Shape(
    Abandon,
    pb.Abandon,
    Code.ABANDON,
    silo=member("an abandon note of"),
    signature=sized(SIGNATURE_BYTES, "the abandon note of {silo!r}"),
)


def _shown(context: bytes, **others: Any) -> SurvivorsShown:
    # ``context`` in the schema is ``ctx`` in the state machines.
    return SurvivorsShown(ctx=context, **others)


SHOWN = Shape(
    _shown,
    pb.SurvivorsShown,
    Code.ABANDON,
    context=sized(HASH_BYTES, "the context of an earlier attempt", path="ctx"),
    h_u1=sized(HASH_BYTES, "H(U1) of an earlier attempt"),
    h_u2=sized(HASH_BYTES, "H(U2) of an earlier attempt"),
    headers=each(HEADER, "silo", "headers of an earlier attempt"),
    survivals=each(SURVIVAL, "silo", "signatures of an earlier attempt"),
)


def _revealed(dealer: str, kind: bytes, share: bytes, salt: bytes) -> Revealed:
    # Share and salt are two fields of the message, and one ``HeldShare`` of ours.
    return Revealed(dealer, kind, HeldShare(share, salt))


REVEALED = Shape(
    _revealed,
    pb.Revealed,
    Code.REVEAL,
    dealer=member("a share of"),
    kind=coded(KINDS, "a share of {dealer!r} is of kind {found}, which there is not"),
    share=sized(SHARE_BYTES, "a share of {dealer!r}", path="held.share"),
    salt=sized(SALT_BYTES, "the salt of a share of {dealer!r}", path="held.salt"),
)
REVEAL = Shape(
    Reveal,
    pb.Reveal,
    Code.REVEAL,
    silo=member("shares revealed by"),
    shares=each(REVEALED, "dealer", "revealed shares"),
    signature=sized(SIGNATURE_BYTES, "the signature over what {silo!r} reveals"),
    # The exact length depends on the survivors (``read_revealed``); here only the maximum is known.
    products=numbers(MOST_PRODUCTS, "what {silo!r} reveals of inner products"),
)


def _shown_share(holder: str, share: bytes, salt: bytes) -> ShownShare:
    return ShownShare(holder, HeldShare(share, salt))


HOLDER_SHARE = Shape(
    _shown_share,
    pb.HolderShare,
    Code.MISDEALT,
    holder=member("a share held by"),
    share=sized(SHARE_BYTES, "the share of {holder!r}", path="held.share"),
    salt=sized(SALT_BYTES, "the salt of the share of {holder!r}", path="held.salt"),
)

# Evidence is the one message with two kinds of content in one set of fields, so it is no table.
EVIDENCE_DOCUMENT = length_within(
    1,
    MOST_PROOF_BYTES,
    "evidence with a specification of {length} bytes, {low} to {high} it can have",
)
EVIDENCE_HOLDER = member("evidence with a key of")
EVIDENCE_KEY = sized(KEY_BYTES, "the key of {holder!r} in evidence")
EVIDENCE_KIND = coded(KINDS, "shares of kind {found}, which there is not, as evidence")
EVIDENCE_SHARES = each(HOLDER_SHARE, "holder", "shares of evidence")


def misdealing_to_wire(evidence: Misdealing) -> pb.Misdealing:
    """Evidence against a dealer.

    It has either a holder and its key, or a kind and shares (``_fault``).
    """
    made = pb.Misdealing(
        document=evidence.document,
        bundle=BUNDLE.to_wire(evidence.bundle),
        dealing=DEALING.to_wire(evidence.dealing),
        portions=PORTIONS.write(evidence.portions),
    )
    match evidence.fault:
        case Unopened(holder, key):
            # ``_fault`` refuses a message with the fields of both kinds.
            made.holder, made.key = holder, key
        case Unjoined(kind, shares):
            made.kind = KINDS[kind]
            for share in EVIDENCE_SHARES.write(shares):
                made.shares.add(**share)
    return made


def misdealing_from_wire(peer: str, message: pb.Misdealing) -> Misdealing:
    """Evidence in the right form; RefusedError KEYS, SHARES or MISDEALT.

    It proves nothing yet: ``Misdealing.spec`` parses the document, and ``proves`` checks it all.
    """
    sent = Sender(peer, Code.MISDEALT)
    bundle = BUNDLE.from_wire(peer, message.bundle)
    dealing = DEALING.from_wire(peer, message.dealing)
    # The dealing tells the dealer: its portion to itself has other sizes.
    portions = PORTIONS.read(sent, message.portions, {"dealing": dealing})
    document = EVIDENCE_DOCUMENT.read(sent, message.document, {})
    return Misdealing(document, bundle, dealing, portions, _fault(sent, message))


def _fault(sent: Sender, message: pb.Misdealing) -> Fault:
    """A key or shares, never both."""
    # Both at once would leave to the reader which of the two the coordinator stands by.
    if message.holder or message.key:
        holder = EVIDENCE_HOLDER.read(sent, message.holder, {})
        alone = not message.kind and not message.shares
        sent.check(alone, f"evidence with a key of {holder!r}, and with shares")
        return Unopened(holder, EVIDENCE_KEY.read(sent, message.key, {"holder": holder}))
    kind = EVIDENCE_KIND.read(sent, message.kind, {})
    return Unjoined(kind, EVIDENCE_SHARES.read(sent, message.shares, {}))


def proofs_to_wire(proofs: Sequence[Misdealing]) -> list[pb.Misdealing]:
    """As many as fit in ``MOST_PROOF_BYTES``, in their order.

    Silos take no sum without the dealers of the others.
    """
    # In a fixed order, so that each delivery has the same evidence.
    made, left = [], MOST_PROOF_BYTES
    for message in map(misdealing_to_wire, proofs):
        left -= message.ByteSize()
        # A smaller one further on is not squeezed in: the choice depends only on the order.
        if left < 0:
            break
        made.append(message)
    return made


def proofs_from_wire(peer: str, messages: Sequence[pb.Misdealing]) -> tuple[Misdealing, ...]:
    """Evidence against dealers, at most one piece each, sorted by dealer.

    RefusedError KEYS, SHARES or MISDEALT. ``evidence.proven`` checks what the evidence proves.
    """
    sent = Sender(peer, Code.MISDEALT)
    # Counted before any is read: checking one takes signatures and, often, joining shares.
    sent.few(messages, MOST_SILOS, "proofs")
    size = sum(message.ByteSize() for message in messages)
    sent.check(size <= MOST_PROOF_BYTES, f"{size} bytes of proofs, at most {MOST_PROOF_BYTES}")
    made = tuple(misdealing_from_wire(peer, message) for message in messages)
    # One per dealer: a second proof adds nothing, and costs the silo as much to check.
    sent.ascending((evidence.dealer for evidence in made), "proofs")
    return made
