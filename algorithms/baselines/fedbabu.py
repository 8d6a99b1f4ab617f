"""FedBABU: an extractor trained under a classifier that stays random.

Each silo fits the classifier to itself in the end.

Oh, Kim, Yun, "FedBABU: toward enhanced representation for federated image classification", ICLR
2022, arXiv:2106.06042, Algorithm 1. The body is the ``extractor``, the head the ``classifier``,
equal at all silos and as it was made.

    (1) at silo k, E epochs:                  θ_k,ext ← SGD_k(θ_ext; θ_cls),   θ_cls stays as it was
                                                                               made
    (2) at the coordinator, cohort S_t:       θ_ext ← Σ_{k ∈ S_t} n_k θ_k,ext / Σ_{k ∈ S_t} n_k
    (3) at each silo k in the end, τ_f epochs:  θ_k,cls ← SGD_k(θ_cls; θ_ext),   or body, or both

(3) is one round more, in which every silo takes part.

Where this differs from the paper:
- It fits the head, the body or both in (3), ``tuned``; "head" is what its abstract says and how
  later papers compare with it. Which of them each of its tables has is left open here.
- ``tuning_epochs`` is 5; in (3) the learning rate is the job's, as in its other rounds.
- What a stage does not train runs in evaluation mode: under batch norm the head is fitted to
  features normalised by the running statistics, which (3) leaves as they are unless it trains the
  body. They stay at each silo, unless ``model.buffers = "global"``.

Wire list: ``extractor`` (backbone, Sum weighted by samples) up and down in every round that trains;
in the round that tunes nothing goes up but the metrics. The classifier never leaves. A silo's model
in the end is the one that it tuned; under differential privacy tuning is noised and paid for as
training is.
"""

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from ...files.documents import Strict
from ..course import Effort, Facts, SiloState, Stage
from ..exchange.parts import Contribution, Kind, Part
from ..method import Method, Setting

TUNED = {"head": ("classifier",), "body": ("extractor",), "full": ("extractor", "classifier")}


class FedBABUOptions(Strict):
    """Options of FedBABU."""

    tuned: Literal["head", "body", "full"] = "head"
    """The parts that each silo fits to itself in the end."""
    tuning_epochs: Annotated[int, Field(strict=True, ge=1, le=10_000)] = 5
    """τ_f, the epochs of tuning."""


class FedBABU(Method):
    """A shared extractor under a fixed random classifier, tuned in the end."""

    name = "fedbabu"
    version = 1
    sums_steps = True
    tunes = True
    options_model = FedBABUOptions
    options: FedBABUOptions

    def __init__(self, setting: Setting, options: Strict | None = None) -> None:
        super().__init__(setting, options)
        self.extractor = self.shared("extractor", Kind.BACKBONE, "extractor")

    def up(self, round_: int) -> tuple[Part, ...]:
        """The extractor, while rounds train it."""
        return () if self.tuning(round_) else (self.extractor,)

    def down(self, round_: int) -> tuple[Part, ...]:
        """The averaged extractor."""
        return (self.extractor,)

    def effort(self, round_: int) -> Effort:
        """The job's epochs, or those of tuning."""
        if self.tuning(round_):
            return Effort(epochs=self.options.tuning_epochs)
        return super().effort(round_)

    def stages(self, state: SiloState, facts: Facts) -> tuple[Stage, ...]:
        """Train the extractor under the initial classifier; in the end tune the chosen parts.

        Tuning takes ``tuning_epochs``, at the job's learning rate.
        """
        if self.tuning(facts.round):
            # Only tuning may move the classifier.
            stage = self.stage(*TUNED[self.options.tuned])
            return (replace(stage, epochs=self.options.tuning_epochs),)  # (3)
        # The classifier keeps its initial values, which are the same at every silo.
        return (self.stage("extractor"),)  # (1)

    def contribute(self, state: SiloState, facts: Facts) -> dict[str, Contribution]:
        """The trained extractor, weighted by samples; nothing after tuning."""
        if self.tuning(facts.round):
            return {}
        # (2)
        return {"extractor": Contribution(self.flat(state, "extractor"), float(facts.samples))}
