"""The records of a data set's privacy budget, each with a literal example.

The log adds its frame (log/chain.py).
"""

from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from ...errors import LocalError
from ...files.documents import MAX_SAFE_INTEGER, Strict
from ..identity.keys import Hex32
from ..ledger.records import Number, typed
from ..log.chain import VerifiedLine
from .rdp import Event

Count = Annotated[int, Field(strict=True, ge=0, le=MAX_SAFE_INTEGER)]
Text = Annotated[str, Field(min_length=1, max_length=1024)]
Some = Field(min_length=1, max_length=64)


class BudgetOpened(Strict):
    """The first record, which names the data set.

    ``{"dataset":"cxr-2024","silo":"hospital-a","type":"budget.opened","unit":"record"}``
    """

    type: Literal["budget.opened"] = "budget.opened"
    silo: Text
    dataset: Text
    unit: Literal["record"]


class Limit(Strict):
    """The most that the data set's owner allows to be spent.

    ``{"delta":"0.00001","epsilon":"8","policy":"e3b0…","type":"budget.limit"}``
    """

    type: Literal["budget.limit"] = "budget.limit"
    epsilon: Number
    delta: Number
    # The text of the file is in the silo's ledger (``policy.change``).
    policy: Hex32  # digest of the policy file that says so


class MechanismSteps(Strict):
    """Equal steps of one mechanism: ``{"q":"0.0128","sigma":"1.1","steps":390}``.

    ``sigma`` is the noise in units of the sensitivity, ``q`` the probability that a step draws a
    record; both are decimals. ``"shared":true`` stands where the silos of a job share the noise.
    Values that ``Event`` does not allow do not parse.
    """

    sigma: Number
    q: Number
    steps: Annotated[int, Field(strict=True, ge=1, le=MAX_SAFE_INTEGER)]
    shared: Annotated[bool, Field(strict=True)] = False

    @model_serializer(mode="wrap")
    def _written(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without ``shared`` where the noise is this silo's own, as older releases wrote it."""
        written: dict[str, Any] = serialise(self)
        if not self.shared:
            written.pop("shared", None)
        return written

    @model_validator(mode="after")
    def _event(self) -> "MechanismSteps":
        try:
            # The accountant's own check: steps that it cannot price must not be recorded.
            self.event(self.steps)
        except LocalError as error:
            raise ValueError(str(error)) from None
        return self

    def event(self, steps: int) -> Event:
        """So many of them, as the accountant has it."""
        return Event(self.sigma, self.q, steps, self.shared)


class NoiseSharing(Strict):
    """What a job protects whose silos share the noise, and how many of them may not do their part.

    ``{"dishonest":1,"unit":"silo"}``: with "record" each record, with "silo" all of the silo's
    records together.
    """

    unit: Literal["record", "silo"]
    dishonest: Count


class Reserve(Strict):
    """Durable before the first of its steps; spent, unless a commit says that fewer were taken.

    ``sharing`` stands where the silos of the job share the noise.

    ``{"events":[{…}],"job":"lung-3","job_digest":"ab12…","purpose":"training","round":17,"type":"budget.reserve"}``
    """

    type: Literal["budget.reserve"] = "budget.reserve"
    job: Text
    # Costs are kept by digest, since a name may be used again.
    job_digest: Hex32
    round: Count
    purpose: Text
    events: Annotated[tuple[MechanismSteps, ...], Some]
    sharing: NoiseSharing | None = None  # older records have none

    @model_serializer(mode="wrap")
    def _written(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without ``sharing`` where the noise is this silo's own, as older releases wrote it."""
        written: dict[str, Any] = serialise(self)
        if self.sharing is None:
            written.pop("sharing", None)
        return written


class Commit(Strict):
    """How many steps of each event were taken; no more follow.

    ``{"ref":12,"steps":[390],"type":"budget.commit"}``
    """

    type: Literal["budget.commit"] = "budget.commit"
    # ``seq`` of the reservation in this log.
    ref: Count
    steps: Annotated[tuple[Count, ...], Some]


class BudgetRecovery(Strict):
    """A torn last line was put aside.

    ``{"dropped_bytes":117,"last_good_seq":41,"type":"recovery"}``
    """

    type: Literal["recovery"] = "recovery"
    dropped_bytes: Annotated[int, Field(strict=True, ge=1, le=MAX_SAFE_INTEGER)]
    last_good_seq: Annotated[int, Field(strict=True, ge=-1, le=MAX_SAFE_INTEGER)]


Record = BudgetOpened | Limit | Reserve | Commit | BudgetRecovery
_RECORDS: pydantic.TypeAdapter[Record] = pydantic.TypeAdapter(
    Annotated[Record, Field(discriminator="type")]
)


def parse(line: VerifiedLine) -> Record:
    """The typed record of a verified line; LocalError names its seq and what is wrong with it."""
    return typed(line, _RECORDS.validate_python)
