"""The records of secure sums and mixes beside the uploads themselves (records.py), each with an example.

``ctx`` names the attempt, and with it job, round, cohort and groups: it is the digest of security/secagg/spec.py. That
of a contribution is of its epoch (security/blind/group_key.py), that of the word on a padded upload of its version
(security/blind/mix_context.py).
"""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from ...files.documents import Strict
from ..faults import Code
from ..identity.keys import Hex32
from .records import Count, Payload, Peer, Text

MOST_WHY = 500  # characters

ProtocolKind: TypeAlias = Literal[
    "keys", "shares", "complaint", "header", "survival", "reveal", "abandon", "end", "contribution", "padded"
]


class ProtocolMessage(Strict):
    """A message of the protocol itself, durable before it leaves; it counts as left, and no outcome follows.

    ``{"ctx":"5c1f…","job":"lung-3","job_digest":"ab12…","kind":"shares","message":{…},"recipient":{…},"round":17,
    "rpc":"/staddle.v1.Federation/Secure","type":"egress.protocol"}``: size and SHA-256 of the message on the wire.
    """

    type: Literal["egress.protocol"] = "egress.protocol"
    job: Text
    job_digest: Hex32
    round: Count
    ctx: Hex32
    kind: ProtocolKind
    rpc: Text
    recipient: Peer
    message: Payload


class SumEnd(Strict):
    """An attempt ended without a sum; ``blame`` says what is known, and is empty where nobody is at fault.

    A silo by its id, ``coordinator``, or ``coordinator or a silo of the cohort`` where none can tell
    (security/faults.py).

    ``{"blame":"coordinator","code":"SURVIVORS","ctx":"5c1f…","job":"lung-3","job_digest":"ab12…","round":17,
    "type":"secagg.end","why":"…"}``
    """

    type: Literal["secagg.end"] = "secagg.end"
    job: Text
    job_digest: Hex32
    round: Count
    ctx: Hex32
    code: Code
    blame: Text
    why: Annotated[str, Field(max_length=MOST_WHY)]


class SumSigned(Strict):
    """Durable before this silo signs the survivors of a sum: from here on the sum may be open.

    Written once per job, set and membership of the federation; sum_history.py judges later sets by it. ``values`` are
    fixed where something in the sum is the same in every job, such as counts of records.

    ``{"absent":["hospital-e"],"ctx":"5c1f…","dataset":"cxr-2024","job":"lung-3","job_digest":"ab12…","round":0,
    "survivors":["hospital-a",…],"type":"secagg.signed","values":"fixed"}``
    """

    type: Literal["secagg.signed"] = "secagg.signed"
    job: Text
    job_digest: Hex32
    round: Count
    ctx: Hex32
    dataset: Text  # of this silo, whose records are in it
    survivors: tuple[Text, ...]  # U3, sorted
    absent: tuple[Text, ...]  # the other silos of the roster, sorted
    values: Literal["fixed", "varying"]
    batches: tuple[Text, ...] = ()  # of a job that has several, each its silos, joined by commas: any may be summed


class SumOpened(Strict):
    """A sum was opened; SHA-256 of what came down.

    ``{"ctx":"5c1f…","job":"lung-3","job_digest":"ab12…","round":17,"sha256":"fcde…","survivors":["hospital-a",…],
    "type":"secagg.sum"}``
    """

    type: Literal["secagg.sum"] = "secagg.sum"
    job: Text
    job_digest: Hex32
    round: Count
    ctx: Hex32
    survivors: tuple[Text, ...]  # U3, sorted: whose values are in the sum
    sha256: Hex32
