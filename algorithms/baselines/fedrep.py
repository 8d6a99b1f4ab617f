"""FedRep: a shared extractor, trained under classifiers that each silo fits to it first.

Collins, Hassani, Mokhtari, Shakkottai, "Exploiting shared representations for personalized
federated learning", ICML 2021, arXiv:2102.07078, Algorithm 1.

    (1) at silo i, τ epochs under a frozen φ^t:    h_i ← SGD_i(h_i; φ^t)
    (2) at silo i, E epochs under the frozen h_i:  φ_i ← SGD_i(φ; h_i), from φ^t
    (3) at the coordinator, cohort I_t:            φ^{t+1} ← Σ_{i ∈ I_t} n_i φ_i / Σ_{i ∈ I_t} n_i

The representation φ is the ``extractor``, the head h_i the ``classifier``.

Where this differs from the paper:
- τ + E are the job's epochs unless options say otherwise: E is 1, as in the authors' code, τ the
  rest. The paper's algorithm steps on φ once; its experiments take τ = 10, and 1 epoch or 5 for φ.
  A job of one epoch takes one for each.
- (3) weighs by samples, as the authors' code does; the paper weighs equally.
- Heads start from one common initial value, the paper leaves their start open.
- A stage begins without momentum; in the authors' code one optimiser goes through both.
- What a stage does not train runs in evaluation mode: under batch norm heads are fitted to features
  normalised by the running statistics, which (1) leaves as they are. In the authors' code the
  statistics move in both. They stay at each silo, unless ``model.buffers = "global"``.
- There is no last fit of the heads to the final φ, which the authors' evaluation makes.

Wire list: ``extractor`` (backbone, Sum weighted by samples) up and down in every round. The
classifier never leaves; under differential privacy it is noised as well, since the extractor's
gradients pass through it: a round costs τ + E epochs.
"""

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from ...files.documents import Strict
from ..course import Effort, Facts, SiloState, Stage
from ..exchange.parts import Contribution, Kind, Part
from ..method import Method, Setting

Epochs = Annotated[int, Field(strict=True, ge=1, le=10_000)]


class FedRepOptions(Strict):
    """Options of FedRep."""

    head_epochs: Epochs | None = None
    """τ, epochs of the classifier in each round; default: those of the job that E leaves."""
    extractor_epochs: Epochs | None = None
    """E, epochs of the extractor after them; default: 1, or those of the job that τ leaves."""


class FedRep(Method):
    """A shared extractor under personal classifiers that are trained first."""

    name = "fedrep"
    version = 2  # 2: the epochs of both stages add up to the job's by default
    sums_steps = True
    options_model = FedRepOptions
    options: FedRepOptions

    def __init__(self, setting: Setting, options: Strict | None = None) -> None:
        super().__init__(setting, options)
        self.extractor = self.shared("extractor", Kind.BACKBONE, "extractor")
        self.head_epochs, self.extractor_epochs = self._epochs()

    def _epochs(self) -> tuple[int, int]:
        """τ and E."""
        head, extractor = self.options.head_epochs, self.options.extractor_epochs
        if extractor is None:
            extractor = 1 if head is None else self.epochs_left(head)
        if head is None:
            head = self.epochs_left(extractor)
        return head, extractor

    def up(self, round_: int) -> tuple[Part, ...]:
        """The extractor."""
        return (self.extractor,)

    def down(self, round_: int) -> tuple[Part, ...]:
        """The averaged extractor."""
        return (self.extractor,)

    def effort(self, round_: int) -> Effort:
        """Both stages' epochs."""
        return Effort(epochs=self.head_epochs + self.extractor_epochs)

    def stages(self, state: SiloState, facts: Facts) -> tuple[Stage, ...]:
        """The classifier, then the extractor."""
        # The classifier comes first, so that the extractor trains under one that fits the silo.
        return (
            replace(self.stage("classifier"), epochs=self.head_epochs),  # (1)
            replace(self.stage("extractor"), epochs=self.extractor_epochs),  # (2)
        )

    def contribute(self, state: SiloState, facts: Facts) -> dict[str, Contribution]:
        """The trained extractor, weighted by samples."""
        # (3)
        return {"extractor": Contribution(self.flat(state, "extractor"), float(facts.samples))}
