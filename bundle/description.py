"""``model.json``: what a trained model is, and all that is needed to use it.

It holds no path, no secret and no record. A silo's figures are exact counts of its own test
records, in private jobs, too: they are for the silo, which decides who else reads them.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from ..files.documents import Strict
from ..security.identity.keys import Hex32

VERSION = 1
Names = tuple[str, ...]
Range = tuple[float, float]


class Origin(Strict):
    """Who made the model: a silo or the coordinator of a federation, or a simulation."""

    kind: Literal["silo", "coordinator", "simulation"]
    name: str
    """The member's id, or the name of a simulated silo."""
    federation: str = ""
    signer: str = ""
    """The operator who signed the job."""
    head: str = ""
    """The signed head of the silo's ledger when the model was made (C2SP tlog-checkpoint)."""

    @property
    def role(self) -> str:
        """What the maker is: a silo, simulated or not, or a coordinator."""
        return {"coordinator": "coordinator"}.get(self.kind, "silo")


class Releases(Strict):
    """Versions of what made the model."""

    staddle: str
    torch: str


class SplitSizes(Strict):
    """How many records the silo has of each side of its split."""

    train: int
    test: int
    train_by_class: tuple[int, ...] = ()


class Figures(Strict):
    """What the model's counts say, and 95 % intervals of single figures by their path.

    A path is such as ``accuracy`` or ``classes.1.sensitivity``.
    """

    records: int
    score: str
    """The key of the task's score among ``said``."""
    said: dict[str, Any]
    baseline: float | None = None
    """The score of the best answer that is the same for all these records."""
    intervals: dict[str, Range] = Field(default_factory=dict)


class Reported(Strict):
    """What silos reported together in the last round, on their own test records.

    They measured the model that came down for that round, before it was trained and averaged again.
    """

    round: int
    silos: Names
    noised: bool
    measures: dict[str, float]


class Threshold(Strict):
    """From which probability on a class or label is called, and what comes of that.

    It was chosen on some test records, and measured on the others.
    """

    of: str
    value: Annotated[float, Field(ge=0, le=1)]
    chosen_on: int
    measured_on: int
    sensitivity: float | None
    sensitivity_interval: Range | None
    specificity: float | None
    specificity_interval: Range | None


class PrivacyCost(Strict):
    """What a private job cost each record of the silo's data set at most."""

    epsilon: float
    delta: float
    exact: Names = ()
    """Parts of the model that were trained without noise, so that this does not cover them."""


class SelfTest(Strict):
    """Answers for made-up records: whoever loads the model sees that it is computed alike."""

    records: int
    outputs: tuple[float, ...]


class Description(Strict):
    """The file ``model.json``."""

    version: Literal[1] = 1
    made: str
    """UTC, as 2026-11-29T06:23:19Z."""
    releases: Releases
    origin: Origin
    job: dict[str, Any]
    """The document of the job, with its digests of method, model and packages."""
    job_digest: Hex32
    contract: dict[str, Any]
    """How records are read: a [data] table without its paths."""
    output_names: Names
    """The classes or labels, or the numbers of the outputs."""
    records: SplitSizes | None = None
    """None where the maker has no records, nor figures of its own."""
    measured: Figures | None = None
    reported: Reported | None = None
    """In a coordinator's model alone."""
    thresholds: tuple[Threshold, ...] = ()
    privacy: PrivacyCost | None = None
    self_test: SelfTest
