"""FedKD: a small mentee that crosses and a mentor that stays learn from each other.

Each learns from the other as far as it is right.

Wu, Wu, Lyu, Huang, Xie, "Communication-efficient federated learning via knowledge distillation",
Nature Communications 13:2032, 2022, arXiv:2108.13323.

At a silo mentor t and mentee s predict p_t and p_s from hidden states H_t and H_s; W is a linear
map, CE cross-entropy with the label, D = CE(p_t) + CE(p_s):

    (1)  L_t = CE(p_t) + KL(p_s ‖ p_t) / D + MSE(H_t, W H_s) / D
    (2)  L_s = CE(p_s) + KL(p_t ‖ p_s) / D + MSE(H_t, W H_s) / D
    (3)  each matrix G of the mentee's update, of singular values σ_1 ≥ σ_2 ≥ …, is given as its
         first K terms of
         U Σ V, with the least K that has Σ_{j ≤ K} σ_j² ≥ T Σ_j σ_j²
    (4)  T = T_start + (T_end − T_start) · (rounds done, with this one) / rounds
    (5)  at the coordinator:  mentee ← mentee + Σ_k n_k G_k / Σ_k n_k

The mentee is the job's model; the option ``mentor`` names the architecture of the other, larger as
a rule.

Where this differs from the paper:
- Nothing is saved on the wire. The paper sends U, Σ and V: K (P + Q + 1) numbers of a matrix [P,
  Q]. A sum takes the same shapes from all, so what crosses is the mentee after its truncated
  update, dense. What comes down is the mean of these, as Eq. 5 has it; it is not truncated a second
  time.
- H is what the extractor gives the classifier. The paper has several layers of transformers, and
  their attention maps.
- D is of the means over a batch, as in the authors' code, and takes no gradient: small losses of
  single records would make its inverse arbitrarily large. Nor does a gradient go through the other
  model's prediction.
- A kernel [O, I, h, w] is a matrix [O, I h w]. Vectors, and numbers of batch norm, are given whole.
- A round is an update, of E epochs of the job's optimiser; ``clip`` is the largest norm of a
  batch's gradient.
- In the code a matrix that needs all its singular values loses them all, and silos count once.

Wire list: ``mentee`` (whole model, Sum weighted by samples) up and down in every round. Mentor and
map never leave. Predictions are the mentor's, and a silo's model in the end is the one that it
trained last.
"""

from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from ...files.documents import Strict
from ..course import Facts, Parts, SiloState, Stage
from ..exchange.delivery import Results
from ..exchange.parts import Contribution, Kind, Part, Tensors, all_finite
from ..method import Method, Setting
from ..methods.common.losses import divergence
from ..methods.common.second_model import MODEL, check_other, logits, names, with_other_model
from ..models.build import fill

MENTOR, MAP = "mentor", "map"

Energy = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]


class FedKDOptions(Strict):
    """Options of FedKD."""

    mentor: str | None = None
    """Architecture of the mentor; left out, the job's."""
    t_start: Energy = 0.95
    """T_start, the share of an update's energy that is uploaded in the beginning."""
    t_end: Energy = 0.98
    """T_end, the share in the end; 1 gives all of it."""
    clip: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Largest Euclidean norm of a batch's gradient; not from the paper."""


class FedKD(Method):
    """A mentee that crosses and a mentor that stays."""

    name = "fedkd"
    version = 1
    needs_classes = "compares what two models say of classes"
    by_rounds = "keeps more of an update towards the last round (t_end)"
    options_model = FedKDOptions
    options: FedKDOptions

    def __init__(self, setting: Setting, options: Strict | None = None) -> None:
        super().__init__(setting, options)
        check_other("fedkd: mentor", self.options.mentor, setting)
        self.mentee = self.shared("mentee", Kind.WHOLE_MODEL, *MODEL)

    def up(self, round_: int) -> tuple[Part, ...]:
        """The mentee."""
        return (self.mentee,)

    def down(self, round_: int) -> tuple[Part, ...]:
        """The averaged mentee."""
        return (self.mentee,)

    # The silo half. ``extra`` holds the mentee as the round found it.

    def modules(self, silo: str) -> dict[str, nn.Module]:
        """Mentee, mentor and map."""
        parts = with_other_model(self.setting, MENTOR, self.options.mentor, "fedkd")
        # W maps the mentee's features, of its width, to the mentor's.
        mentee, mentor = (width(parts[name]) for name in ("classifier", "mentor_classifier"))
        with torch.device("meta"):
            parts[MAP] = nn.Linear(mentee, mentor, bias=False)
        fill(parts[MAP], self.setting.seed, "fedkd/map")
        return parts

    def predict(self, parts: Parts, x: Tensor) -> Tensor:
        """Logits of the mentor."""
        return logits(parts, x, MENTOR)

    def deliver(self, state: SiloState, delivered: Results, facts: Facts) -> SiloState:
        """The averaged mentee, which the round's update starts from."""
        taken = super().deliver(state, delivered, facts)
        # Kept, since the update of Eq. 3 is the difference from it.
        return SiloState(taken.parts, self.flat(taken, *MODEL))

    def stages(self, state: SiloState, facts: Facts) -> tuple[Stage, ...]:
        """Mentor, mentee and map together."""
        # The option is this method's own name for the job's training.clip.
        optimiser = self.setting.optimiser
        optimiser = replace(optimiser, clip=self.options.clip or optimiser.clip)
        trains = (*MODEL, *names(MENTOR), MAP)
        # Coupled: D is a mean over the batch.
        return (Stage(trains, self.setting.epochs, self.mutual, optimiser, coupled=True),)

    def mutual(self, parts: Parts, x: Tensor, y: Tensor, context: Tensors) -> Tensor:
        """L_t + L_s by record [B].

        MSE stands once: its gradient at H_t is that of L_t, those at H_s and W of L_s.
        """
        # [B, d_s], [B, d_t]
        hidden_s, hidden_t = parts["extractor"](x), parts["mentor_extractor"](x)
        mentee, mentor = parts["classifier"](hidden_s), parts["mentor_classifier"](hidden_t)
        by_mentor = self.setting.task.losses(mentor, y)
        losses = by_mentor + self.setting.task.losses(mentee, y)
        predictions = divergence(mentee, mentor) + divergence(mentor, mentee)
        # MSE by record: the mean over the d_t numbers of H_t − W H_s.
        apart = predictions + (hidden_t - parts[MAP](hidden_s)).square().mean(1)
        # D is a mean over the batch, so one record's small loss cannot make its inverse huge.
        return losses + apart / losses.mean().detach()  # (1), (2)

    @property
    def private_fault(self) -> str:
        """D of Eqs. 1 and 2 is a mean over the batch."""
        return (
            "its losses weigh distillation by a batch's mean, by which each record moves the"
            " gradients of others"
        )

    def contribute(self, state: SiloState, facts: Facts) -> dict[str, Contribution]:
        """The mentee after its truncated update, weighted by samples.

        Matrices are uploaded whole: a sum needs equal shapes, and K differs from silo to silo.
        """
        energy = self.energy(facts.round)
        trained = self.flat(state, *MODEL)
        shortened: dict[str, Tensor] = {}
        for name, before in state.extra.items():
            shortened[name] = before + truncated(trained[name] - before, energy)
        return {"mentee": Contribution(shortened, float(facts.samples))}  # (5)

    def energy(self, round_: int) -> float:
        """T of a round.

        T is the share of a matrix's energy Σ σ² that is kept; it grows linearly to ``t_end``.
        """
        start, end = self.options.t_start, self.options.t_end
        return start + (end - start) * (round_ + 1) / self.setting.rounds  # (4)


def width(classifier: nn.Module) -> int:
    """Number of features that a linear classifier takes."""
    return dict(classifier.named_parameters())["weight"].shape[1]


def truncated(update: Tensor, energy: float) -> Tensor:
    """The first singular terms of an update that hold this share of its energy.

    ``update`` [O, …] is taken as a matrix [O, rest]. Vectors and updates that are not finite stay
    whole.
    """
    # A diverged update is reported where it is uploaded; the SVD would fail with another error.
    if update.ndim < 2 or not all_finite(update):
        return update
    # A convolution's kernel [O, I, h, w] becomes the matrix [O, I h w].
    u, sigma, v = torch.linalg.svd(update.flatten(1), full_matrices=False)
    square = sigma.square()
    # A term is kept if the terms before it do not hold enough energy.
    kept = square.cumsum(0) - square < energy * square.sum()
    # Dropped terms are set to zero, so the shape stays.
    terms: Tensor = (u * (sigma * kept)) @ v  # (3)
    return terms.reshape(update.shape)
