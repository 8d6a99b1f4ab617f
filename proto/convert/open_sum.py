"""Open sums that come down in words, in protobuf: what a delivery's manifest says of each
(blind/open_sum.py).
"""

from collections.abc import Sequence

from ...security.blind.open_sum import Claim
from ...security.faults import Code
from ...security.secagg.linear_tags import TAG_BYTES
from ...security.secagg.spec import MOST_SILOS
from .. import secure_pb2 as pb
from .secagg_messages import MOST_SPEC_BYTES, SIGNATURE_BYTES, Sender
from .secagg_sent import ENVELOPE


def sum_to_wire(part: str, claim: Claim) -> pb.OpenSum:
    """At the coordinator."""
    return pb.OpenSum(
        part=part,
        document=claim.document,
        signature=claim.signature,
        survivors=claim.survivors,
        tag=claim.tag,
    )


def sums_from_wire(
    peer: str, messages: Sequence[pb.OpenSum], parts: Sequence[str]
) -> dict[str, Claim]:
    """At the silo: claims by part, in the order of ``parts``, which can come so.

    RefusedError blames ``peer``.
    """
    Sender(peer, ENVELOPE).few(messages, len(parts), "open sums")
    sent = Sender(peer, Code.SPEC)
    names = [message.part for message in messages]
    known = names == [part for part in parts if part in names]
    shown = ", ".join(name[:64] for name in names)
    sent.check(
        known,
        f"brings sums of {shown or 'nothing'}, not some of {', '.join(parts)}, each once and in"
        " order",
    )
    return {message.part: _claim_from_wire(peer, message) for message in messages}


def _claim_from_wire(peer: str, message: pb.OpenSum) -> Claim:
    sent = Sender(peer, Code.SPEC)
    size = len(message.document)
    sent.check(
        size <= MOST_SPEC_BYTES,
        f"brings a specification of {size} bytes, at most {MOST_SPEC_BYTES} it can have",
    )
    sent.few(message.survivors, MOST_SILOS, "survivors of a sum")
    claim = Claim(
        message.document,
        sent.sized(
            message.signature, SIGNATURE_BYTES, "the signature over the specification of a sum"
        ),
        tuple(sent.member(silo, "a survivor") for silo in message.survivors),
        sent.sized(message.tag, TAG_BYTES, "the tag of a sum"),
    )
    sent.check(
        message == sum_to_wire(message.part, claim),
        "has fields that its protocol version does not know",
    )
    return claim
