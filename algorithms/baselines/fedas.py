"""FedAS: a delivered extractor is first aligned to the silo's own, then trained.

It is aligned to what the silo's own extractor made of its records.

Yang, Huang, Ye, "FedAS: bridging inconsistency in personalized federated learning", CVPR 2024,
pages 11986-11995; read next to the authors' code, which the equations follow where the paper leaves
the exact form open.

A model is a feature extractor θ below a classifier φ_i of the silo's own.

    (1) P_ik = mean of f(θ_i; x) over silo i's records of class k, by its own extractor of its last
    round
    (2) alignment: θ ← SGD(Σ_k (1/B_k) Σ_{x of class k} (1/d) ‖f(θ; x) - P_ik‖²) from the delivered
        θ, where a batch has B_k records of class k, for an epoch of learning rate 0.01
    (3) (θ_i, φ_i) ← SGD(cross-entropy) from there, for the rest of the job's epochs
    (4) T_i = Σ_x ‖∇_{θ,φ} -log p(y | x; θ_i, φ_i)‖², the trace of the Fisher information of the
    silo's records
    (5) at the coordinator:  θ ← Σ_i T_i θ_i / Σ_i T_i

Where this differs from the paper:
- (2) and (3) take the job's epochs together unless options say otherwise, (3) at least one. In the
  paper the epoch of (2) comes on top.
- The code squares the gradient of each batch's mean in Eq. 4 and adds up over batches, which
  depends on their size; here the gradient of each record is squared, as the information has it.
- P_ik is computed at the end of a round, of the same extractor and records as the paper's at the
  start of the next.
- A silo that has not trained yet takes the extractor as it comes. In the code it aligns it to its
  initial values.
- Eq. 2 takes the job's batches, those of the code have 16 records.
- T_i below 1e-12 counts as 1e-12, so that Eq. 5 is defined where no gradient is left.
- Batch norm's running statistics stay at each silo, unless ``model.buffers = "global"``: then they
  are averaged by T_i.

Wire list, the same in every round:

=============  ====  ==================================================  ==============
part           way   tensors                                             exchange
=============  ====  ==================================================  ==============
``weighted``   up    T_i θ_i, and T_i                                    Sum, total
``extractor``  down  θ                                                   -
=============  ====  ==================================================  ==============

T_i is no number of records, as the weight of a mean has to be, so it crosses within a total. In a
blind job the coordinator learns Σ T_i and Σ T_i θ_i alone; all silos have to take part in every
round, since T_i changes little from one to the next, and ``security.clip_exponent`` has to hold T_i
times the largest parameter. In the clear it sees T_i, which tells about how many records a silo
has. A silo's model in the end is the one it trained last. T_i and P_ik are surveyed after training,
without noise, so such a job cannot be private.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor
from torch.func import grad, vmap
from torch.nn.functional import one_hot

from ...files.documents import Strict
from ..course import Change, Course, Facts, Optimiser, Parts, SiloState, Stage, Survey
from ..exchange.delivery import Combined, CoordinatorState, Results
from ..exchange.parts import DTYPES, Contribution, Kind, Part, Sum, Tensors, TensorSpec
from ..method import Method, Setting
from ..models.functional import called_with, parameters_of

SMALLEST_TRACE = 1e-12
NUMBERS_AT_ONCE = 2**22  # of the gradients of single records, 16 MiB in float32


class FedASOptions(Strict):
    """Options of FedAS."""

    alignment_epochs: Annotated[int, Field(strict=True, ge=0, le=10_000)] = 1
    """Epochs of Eq. 2; 0 takes the delivered extractor as it comes, as in the paper's ablation."""
    alignment_lr: Annotated[float, Field(gt=0, le=1e3, allow_inf_nan=False)] = 0.01
    """Learning rate of Eq. 2."""
    training_epochs: Annotated[int, Field(strict=True, ge=1, le=10_000)] | None = None
    """Epochs of (3); default: those of the job that Eq. 2 leaves."""


class FedAS(Method):
    """A shared extractor, aligned at each silo and averaged by Fisher information."""

    name = "fedas"
    version = 2  # 2: alignment and training add up to the job's epochs by default
    needs_classes = "weighs records by class"
    options_model = FedASOptions
    options: FedASOptions

    def __init__(self, setting: Setting, options: Strict | None = None) -> None:
        super().__init__(setting, options)
        self.extractor = self.shared("extractor", Kind.BACKBONE, "extractor")
        # Bounded below, so that both ends reject a trace by which Eq. 5 could divide by 0.
        trace = TensorSpec("trace", "float64", (), SMALLEST_TRACE)
        self.weighted = Part(
            "weighted", Kind.BACKBONE, Sum("total"), (*self.extractor.tensors, trace)
        )
        weight = self.header_rows()
        self.rows = TensorSpec("prototypes", weight.dtype, weight.shape)  # [C, d]
        # Per-record gradients in memory at a time: each has as many numbers as the model.
        numbers = sum(spec.elements for specs in self.template.values() for spec in specs)
        self.at_once = max(1, NUMBERS_AT_ONCE // numbers)

    def up(self, round_: int) -> tuple[Part, ...]:
        """The extractor times the trace, and the trace."""
        return (self.weighted,)

    def down(self, round_: int) -> tuple[Part, ...]:
        """The averaged extractor."""
        return (self.extractor,)

    @property
    def private_fault(self) -> str:
        """Eqs. 1 and 4 read the records after training."""
        return (
            "its prototypes and weights are those of the trained model, surveyed without noise;"
            " choose fedper"
        )

    # The silo half. ``extra`` holds the prototypes of the last round [C, d], zeros before the
    # first.

    def initial_extra(self, silo: str) -> dict[str, Tensor]:
        """No prototype."""
        return {"prototypes": torch.zeros(self.rows.shape, dtype=DTYPES[self.rows.dtype])}

    def stages(self, state: SiloState, facts: Facts) -> Course:
        """Align the delivered extractor, train, and measure the records.

        A silo's first round has no alignment, since there are no prototypes yet.
        """
        # Before its first round a silo has no prototypes to align to.
        epochs = self.options.alignment_epochs if state.extra["prototypes"].any() else 0
        training = self.options.training_epochs or self.epochs_left(epochs)
        train = replace(self.stage("extractor", "classifier"), epochs=training)  # (3)
        # The survey comes after training: Eqs. 1 and 4 take the trained model.
        course = (train, Survey(self.survey), Change(self.remember))
        if not epochs:
            return course
        optimiser = Optimiser(self.options.alignment_lr)
        context = {"prototypes": state.extra["prototypes"]}
        # (2)
        # Coupled: Eq. 2 divides by B_k, which counts records of the batch.
        align = Stage(("extractor",), epochs, self.apart, optimiser, context=context, coupled=True)
        return (align, *course)

    def apart(self, parts: Parts, x: Tensor, y: Tensor, context: Tensors) -> Tensor:
        """Eq. 2 by sample [B]; the batch's mean of it is the sum over classes of their means."""
        squares = (parts["extractor"](x) - context["prototypes"][y]).square().mean(1)  # [B]
        alike = one_hot(y, self.setting.outputs).sum(0)[y]  # [B]: B_k of each record's class
        # Times B: the runner's mean over the batch divides by it again.
        return squares * len(y) / alike

    def survey(self, parts: Parts, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Sums of features by class [C, d], and Eq. 4.

        Both are float64, by the trained model in evaluation mode. Each record adds the squared norm
        of its own gradient.
        """
        member = one_hot(y, self.setting.outputs).double()  # [B, C]
        return {
            "sums": member.T @ parts["extractor"](x).double(),
            "trace": self.squares(parts, x, y).double().sum(),
        }

    def squares(self, parts: Parts, x: Tensor, y: Tensor) -> Tensor:
        """The squared norm [B] of each record's gradient by all parameters.

        At most ``at_once`` gradients are in memory at a time.
        """
        own = {part: parameters_of(parts[part]) for part in ("extractor", "classifier")}

        def loss(parameters: Mapping[str, Tensors], one_x: Tensor, one_y: Tensor) -> Tensor:
            features = called_with(parts["extractor"], parameters["extractor"], one_x[None])
            logits = called_with(parts["classifier"], parameters["classifier"], features)
            return self.setting.task.losses(logits, one_y[None])[0]

        # By a batch of one record: the mean gradient of a larger one would hide the single norms.
        def square(one_x: Tensor, one_y: Tensor) -> Tensor:
            gradients = grad(loss)(own, one_x, one_y)
            tensors = chain.from_iterable(named.values() for named in gradients.values())
            return torch.stack([gradient.square().sum() for gradient in tensors]).sum()

        squares: Tensor = vmap(square, chunk_size=self.at_once)(x, y)  # (4)
        return squares

    def remember(self, state: SiloState, facts: Facts) -> SiloState:
        """Eq. 1, for the next round.

        The prototypes [C, d] have the classifier's dtype; classes without records have zeros.
        """
        means = facts.measured["sums"] / facts.class_counts.double().clamp(min=1)[:, None]
        return replace(state, extra={"prototypes": means.to(DTYPES[self.rows.dtype])})  # (1)

    def contribute(self, state: SiloState, facts: Facts) -> dict[str, Contribution]:
        """The trained extractor times T_i, and T_i.

        T_i is float64, and the extractor keeps its dtypes.
        """
        # Never 0: Eq. 5 divides by the sum of the traces.
        trace = facts.measured["trace"].clamp(min=SMALLEST_TRACE)
        weighted = {
            # The product is rounded once, to the dtype in which it crosses.
            name: (trace * t.double()).to(t.dtype)
            for name, t in self.flat(state, "extractor").items()
        }
        return {"weighted": Contribution({**weighted, "trace": trace})}

    # The coordinator half.

    def combine(
        self, state: CoordinatorState, round_: int, cohort: tuple[str, ...], results: Results
    ) -> Combined:
        """Eq. 5."""
        total = results["weighted"]
        mean = {
            # Sums of form "total" are float64, so the quotient is rounded once.
            spec.name: (total[spec.name] / total["trace"]).to(DTYPES[spec.dtype])
            for spec in self.extractor.tensors
        }
        return Combined(state, {"extractor": mean})  # (5)
