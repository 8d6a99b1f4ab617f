"""Open sums that are delivered in words, in protobuf: a manifest's entry for each.

security/blind/open_sum.py checks them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ...errors import RefusedError
from ...security.blind.open_sum import Claim
from ...security.faults import Code
from ...security.secagg.linear_tags import TAG_BYTES
from .. import secure_pb2 as pb
from .secagg_messages import MOST_SPEC_BYTES
from .secagg_sent import MALFORMED
from .shape import SIGNATURE_BYTES, Sender, Shape, length_within, members, plain, sized


class PartClaim(NamedTuple):
    """The coordinator's claim on the open sum of a part; nothing in it is checked yet."""

    part: str
    claim: Claim


def _part_claim(part: str, **claim: Any) -> PartClaim:
    # On the wire, the part is a field next to those of the claim.
    return PartClaim(part, Claim(**claim))


SUM = Shape(
    _part_claim,
    pb.OpenSum,
    Code.SPEC,
    # Any text: ``sums_from_wire`` compares it with the parts that are due before it reads the rest.
    part=plain(),
    document=length_within(
        0,
        MOST_SPEC_BYTES,
        "brings a specification of {length} bytes, at most {high} it can have",
        path="claim.document",
    ),
    survivors=members("a survivor", "survivors of a sum", path="claim.survivors"),
    signature=sized(
        SIGNATURE_BYTES, "the signature over the specification of a sum", path="claim.signature"
    ),
    # One tag, since the claim is on one group of the sum.
    tag=sized(TAG_BYTES, "the tag of a sum", path="claim.tag"),
)


def sum_to_wire(part: str, claim: Claim) -> pb.OpenSum:
    """At the coordinator."""
    made: pb.OpenSum = SUM.to_wire(PartClaim(part, claim))
    return made


def sums_from_wire(
    peer: str, messages: Sequence[pb.OpenSum], parts: Sequence[str]
) -> dict[str, Claim]:
    """At the silo: claims by part, for some of ``parts`` and in their order.

    RefusedError blames ``peer``.
    """
    Sender(peer, MALFORMED).few(messages, len(parts), "open sums")
    names = [message.part for message in messages]
    # In order and once each, so that a delivery has one spelling.
    if names != [part for part in parts if part in names]:
        shown = ", ".join(name[:64] for name in names)
        why = f"brings sums of {shown}, not some of {', '.join(parts)}, each once and in order"
        raise RefusedError(peer, Code.SPEC, why)
    return dict(SUM.whole_from_wire(peer, message) for message in messages)
