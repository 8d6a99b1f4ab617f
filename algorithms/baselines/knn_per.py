"""kNN-Per: FedAvg, whose model each silo mixes in the end with its own nearest records.

Marfoq, Neglia, Vidal, Kameni, "Personalized federated learning through local memorization", ICML
2022, arXiv:2111.09360, Algorithm 1.

    (1), (2) FedAvg's rounds, to a model with features φ
    (3) at each silo m in the end:  S_m = {(φ(x_i), y_i)} of its training records
    (4) p_kNN(c | x) = Σ_{i ∈ N_k(x), y_i = c} e_i / Σ_{i ∈ N_k(x)} e_i,
        e_i = exp(−‖φ(x) − φ(x_i)‖² / (d s)),   N_k(x) the k of S_m that are nearest to φ(x)
    (5) p(c | x) = λ p_kNN(c | x) + (1 − λ) p_model(c | x)

d is the number of features. (3) is one round more, in which every silo takes part and nothing is
trained.

Where this differs from the paper:
- e_i has squared distances over d s, as in the authors' code; the paper writes distances.
- φ is the job's extractor, and p_model the softmax of its classifier, which has to be linear.
- λ is one number of the job, 0.5 unless set; the paper takes the best for each silo by validation
  records. k is 10, as in the paper's experiments.
- S_m has ``capacity`` records at most, drawn by the job's seed; the paper looks at that too.
- With several records at equal distances from x, which are the k-th nearest is up to the machine.

Wire list: FedAvg's, ``model`` (whole model, Sum weighted by n_m) up and down in every round that
trains; in the last round nothing goes up but the metrics. S_m never leaves, and lies in the silo's
own model file: whoever gets that file can test whether a record is in it. Nothing bounds what a
record moves in (5), so a private job is refused.
"""

from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from ...files.documents import Strict
from ..course import Change, Course, Effort, Facts, Parts, SiloState, Survey
from ..exchange.parts import DTYPES, Contribution, Part, Tensors
from ..method import Setting
from ..methods.common.second_model import logits
from ..methods.fedavg import FedAvg, FedAvgOptions
from ..numerics.streams import permutation, stream

STORE = "store"  # the part that holds S_m
NOBODY = -1  # the class of a place of the store that holds no record


class KNNPerOptions(FedAvgOptions):
    """Options of kNN-Per."""

    neighbours: Annotated[int, Field(strict=True, ge=1, le=10_000)] = 10
    """k, the nearest records that are asked."""
    share: Annotated[float, Field(ge=0, le=1)] = 0.5
    """λ, the share of the nearest records in a prediction; 0 is FedAvg."""
    scale: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] = 1.0
    """s, by which the weight of far records falls: slower for larger values."""
    capacity: Annotated[int, Field(strict=True, ge=1, le=1_000_000)] = 1000
    """Most records that a silo keeps for this."""


class Datastore(nn.Module):
    """S_m: features [n, d] and classes [n], ``NOBODY`` where a place holds no record."""

    features: Tensor
    labels: Tensor

    def __init__(
        self, options: KNNPerOptions, classes: int, width: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.neighbours = min(options.neighbours, options.capacity)
        self.classes, self.reach = classes, options.scale * width
        self.register_buffer("features", torch.zeros(options.capacity, width, dtype=dtype))
        self.register_buffer("labels", torch.full((options.capacity,), NOBODY))

    def forward(self, z: Tensor) -> Tensor:
        """p_kNN [B, C] of features [B, d]; zeros while the store is empty."""
        squared = torch.cdist(z, self.features, compute_mode="donot_use_mm_for_euclid_dist") ** 2
        held = self.labels != NOBODY
        near = torch.where(held, -squared / self.reach, -torch.inf)
        scores, places = near.topk(self.neighbours, dim=1)  # [B, k]
        # An empty store has no score, and a softmax of none would be NaN.
        weights = torch.where(scores.isfinite(), scores, -torch.inf)
        weights = torch.where(held.any(), weights, 0.0).softmax(1)
        labels = self.labels[places]
        member = labels[:, :, None] == torch.arange(self.classes, device=labels.device)
        return (weights[:, :, None] * member).sum(1)  # (4)


class KNNPer(FedAvg):
    """FedAvg, mixed with a silo's nearest records in the end."""

    name = "knn-per"
    version = 1
    sums_steps = False
    needs_classes = "takes classes from a silo's nearest records"
    product = "trained"
    tunes = True
    options_model = KNNPerOptions
    options: KNNPerOptions

    def __init__(self, setting: Setting, options: Strict | None = None) -> None:
        super().__init__(setting, options)
        self.rows = self.header_rows()  # [C, d]

    def up(self, round_: int) -> tuple[Part, ...]:
        """The whole model, while rounds train it."""
        return () if self.tuning(round_) else super().up(round_)

    def effort(self, round_: int) -> Effort:
        """The job's epochs, and none in the last round."""
        return Effort() if self.tuning(round_) else super().effort(round_)

    @property
    def private_fault(self) -> str:
        """Eq. 3 keeps records as they are."""
        return (
            "a silo predicts by its own records as they are, without noise, and its test counts"
            " would tell of them; choose fedavg-ft"
        )

    def modules(self, silo: str) -> dict[str, nn.Module]:
        """The model, and an empty store."""
        classes, width = self.rows.shape
        store = Datastore(self.options, classes, width, DTYPES[self.rows.dtype])
        return {**self.setting.build(), STORE: store}

    def predict(self, parts: Parts, x: Tensor) -> Tensor:
        """Logarithms of (5) [B, C]; the model's own while the store is empty."""
        features = parts["extractor"](x)
        own = parts["classifier"](features).softmax(1)
        nearest = parts[STORE](features)
        # Its rows sum to 1, or to 0 while it is empty.
        share = self.options.share * nearest.sum(1, keepdim=True)
        mixed = self.options.share * nearest + (1 - share) * own  # (5)
        return mixed.clamp(min=torch.finfo(mixed.dtype).tiny).log()

    def task_loss(self, parts: Parts, x: Tensor, y: Tensor, context: Tensors) -> Tensor:
        """The task's loss [B] of the model alone."""
        return self.setting.task.losses(logits(parts, x), y)

    def stages(self, state: SiloState, facts: Facts) -> Course:
        """Train the model; in the last round fill the store."""
        if self.tuning(facts.round):
            return (Survey(self.survey, rows=True), Change(self.fill))
        return (replace(self.stage("extractor", "classifier"), reads=()),)

    def survey(self, parts: Parts, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Features and class of each record."""
        return {"features": parts["extractor"](x), "labels": y}

    def fill(self, state: SiloState, facts: Facts) -> SiloState:
        """Eq. 3, with records drawn where there are more than ``capacity``."""
        features, labels = facts.measured["features"], facts.measured["labels"]
        rng = stream(self.setting.seed, facts.silo, facts.round, "knn-per/store")
        drawn = torch.from_numpy(permutation(rng, len(labels))[: self.options.capacity])
        held = dict(state.parts[STORE])
        held["features"], held["labels"] = held["features"].clone(), held["labels"].clone()
        held["features"][: len(drawn)] = features[drawn].to(held["features"].dtype)
        held["labels"][: len(drawn)] = labels[drawn].long()
        return replace(state, parts={**state.parts, STORE: held})

    def contribute(self, state: SiloState, facts: Facts) -> dict[str, Contribution]:
        """The trained model; nothing in the last round."""
        return {} if self.tuning(facts.round) else super().contribute(state, facts)
