"""GPFL: features that are guided by an embedding of each class, and features of a silo's own task.

Zhang, Hua, Wang, Song, Xue, Ma, Cao, Guan, "GPFL: simultaneously learning global and personalized
feature information for personalized federated learning", ICCV 2023, arXiv:2308.10279.

f = φ(x; W^fe) are a record's d features, ψ with W_i^h silo i's own head, C_u the embedding of class
u of U, of d numbers, and V the conditional valve. Ĉ is C as delivered, frozen for the round, and
α_i^u the share of class u in silo i's records.

    (0) at silo i, before a round:  g = Σ_u Ĉ_u / U,  p_i = Σ_u α_i^u Ĉ_u
    (1) of a record:                f^G = σ[(γ + 1) ⊙ f + β],  f^P = σ[(γ_i + 1) ⊙ f + β_i]
    (2)                             (γ, β) = CoV(g; V),  (γ_i, β_i) = CoV(p_i; V)
    (3)                             L^alg = −log [ exp(cos(f^G, C_y)) / Σ_u exp(cos(f^G, C_u)) ]
    (4)                             L^mlg = ‖f^G − Ĉ_y‖
    (5)                             L^P = ℓ(ψ(f^P; W_i^h), y)
    (6) at silo i, E epochs:        (W^fe, V, C, W_i^h) ← SGD of L^P + L^alg + λ L^mlg
                                                          + μ/2 (‖V‖² + ‖C‖²)
    (7) at the coordinator:         (W^fe, V, C) ← Σ_i n_i (W^fe_i, V_i, C_i) / Σ_i n_i

σ is ReLU. CoV is two networks of a linear layer, ReLU and layer norm, one for γ and one for β. A
silo predicts by ψ(f^P). (1) to (5) are numbered as in the paper.

Where this differs from the paper:
- The paper writes CoV(f, g) and CoV(f, p_i). As in the authors' code γ and β depend on g or p_i
  alone, and f enters in (1).
- (4) is record by record. The code has the length of a batch's differences together, which grows
  with the root of its size.
- g and p_i are of the delivered Ĉ; in the code they are of the embeddings that the silo trained
  last, and zeros in the first round.
- The factor of μ makes its gradient μ V and μ C, the weight decay of the code. λ = 0.01 and μ = 0.1
  are those of the authors for a CNN of four layers.
- Embeddings begin with a variance of 1, as in the code, drawn uniformly.

Wire list, the same in every round, all of them Sums weighted by n_i:

==============  ========  ====================
part            way       tensors
==============  ========  ====================
``extractor``   up, down  W^fe
``valve``       up, down  V
``embeddings``  up, down  C [U, d]
==============  ========  ====================

W_i^h and α_i never leave; what the embeddings of rare classes went through may tell which classes a
silo has, as a classifier's rows do. A silo's model in the end is the one delivered last, with its
own head. In a private job α_i is of the noisy counts.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import normalize

from ...files.documents import Strict
from ..course import Facts, Parts, SiloState, Stage
from ..exchange.delivery import Results
from ..exchange.parts import DTYPES, Contribution, Kind, Part, Tensors
from ..method import Method, Setting
from ..models.build import fill
from ..models.functional import parameters_of
from ..numerics.streams import stream, uniform

SHARED = ("extractor", "valve", "embeddings")  # the parts that cross
FROZEN = "frozen"  # the part that is Ĉ and p_i


class GPFLOptions(Strict):
    """Options of GPFL."""

    lam: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 0.01
    """λ of Eq. 6, how strongly features are held near the embedding of their class."""
    mu: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 0.1
    """μ of Eq. 6, the weight decay of valve and embeddings."""


class ConditionalValve(nn.Module):
    """Eqs. 1 and 2, of features [B, d] and a condition [d]."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gamma = nn.Linear(width, width, dtype=dtype)
        self.gamma_norm = nn.LayerNorm(width, dtype=dtype)
        self.beta = nn.Linear(width, width, dtype=dtype)
        self.beta_norm = nn.LayerNorm(width, dtype=dtype)

    def forward(self, features: Tensor, condition: Tensor) -> Tensor:
        """f^G of g, f^P of p_i."""
        gamma: Tensor = self.gamma_norm(self.gamma(condition).relu())
        beta: Tensor = self.beta_norm(self.beta(condition).relu())
        return ((gamma + 1) * features + beta).relu()


class CategoryEmbeddings(nn.Module):
    """C [U, d]."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.rows = nn.Parameter(rows)

    def forward(self, features: Tensor) -> Tensor:
        """Cosines [B, U] of features [B, d] and each embedding."""
        return normalize(features, dim=1) @ normalize(self.rows, dim=1).T


class FrozenEmbeddings(nn.Module):
    """Ĉ [U, d] and p_i [d], which are only held."""

    def __init__(self, rows: Tensor, own: Tensor) -> None:
        super().__init__()
        self.rows, self.own = nn.Parameter(rows), nn.Parameter(own)


class GPFL(Method):
    """An extractor guided by embeddings of the classes, below a head of the silo's own."""

    name = "gpfl"
    version = 1
    needs_classes = "learns an embedding of each class"
    options_model = GPFLOptions
    product = "delivered"
    options: GPFLOptions

    def __init__(self, setting: Setting, options: Strict | None = None) -> None:
        super().__init__(setting, options)
        rows = self.header_rows()  # [U, d]
        self.dtype, (self.classes, self.width) = DTYPES[rows.dtype], rows.shape
        self.template |= self.crossing(self.sketched())
        kinds = (Kind.BACKBONE, Kind.BACKBONE, Kind.HEADER_ROWS)
        named = zip(SHARED, kinds, strict=True)
        self.parts = tuple(self.shared(name, kind, name) for name, kind in named)

    def up(self, round_: int) -> tuple[Part, ...]:
        """Extractor, valve and embeddings."""
        return self.parts

    def down(self, round_: int) -> tuple[Part, ...]:
        """The same, averaged."""
        return self.parts

    # The silo half.

    def sketched(self) -> dict[str, nn.Module]:
        """V and C without values."""
        with torch.device("meta"):
            rows = torch.empty(self.classes, self.width, dtype=self.dtype)
            valve = ConditionalValve(self.width, self.dtype)
        return {"valve": valve, "embeddings": CategoryEmbeddings(rows)}

    def modules(self, silo: str) -> dict[str, nn.Module]:
        """The model, V, C, and Ĉ with the mean of its rows in place of p_i."""
        own = self.sketched()
        fill(own["valve"], self.setting.seed, "gpfl/valve")
        rng = stream(self.setting.seed, "", 0, "init/gpfl/embeddings")
        # Between ± √3 the variance is 1.
        drawn = uniform(rng, (self.classes, self.width), -(3**0.5), 3**0.5)
        rows = torch.from_numpy(drawn).to(self.dtype)
        own["embeddings"] = CategoryEmbeddings(rows)
        return {**self.setting.build(), **own, FROZEN: FrozenEmbeddings(rows, rows.mean(0))}

    def predict(self, parts: Parts, x: Tensor) -> Tensor:
        """ψ(f^P)."""
        return self.personal(parts, parts["extractor"](x))

    def personal(self, parts: Parts, features: Tensor) -> Tensor:
        """Logits [B, U] of the silo's own task."""
        own = parameters_of(parts[FROZEN])["own"]
        return parts["classifier"](parts["valve"](features, own))

    def deliver(self, state: SiloState, delivered: Results, facts: Facts) -> SiloState:
        """Take the shared parts, and freeze Ĉ and p_i for the round."""
        taken = super().deliver(state, delivered, facts).parts
        rows = taken["embeddings"]["rows"]
        counts = facts.class_counts.to(rows.dtype)
        # A silo without records, by its noisy counts, has the p_i of nothing.
        shares = counts / counts.sum().clamp(min=1)  # α_i
        frozen = {"rows": rows, "own": shares @ rows}  # (0)
        return replace(state, parts={**taken, FROZEN: frozen})

    def stages(self, state: SiloState, facts: Facts) -> tuple[Stage, ...]:
        """Eq. 6, in one stage."""
        stage = replace(self.stage(*SHARED, "classifier"), loss=self.objective)
        return (replace(stage, penalty=self.decay) if self.options.mu else stage,)

    def objective(self, parts: Parts, x: Tensor, y: Tensor, context: Tensors) -> Tensor:
        """L^P + L^alg + λ L^mlg by record [B]."""
        features = parts["extractor"](x)
        losses = self.setting.task.losses(self.personal(parts, features), y)  # (5)
        frozen = parameters_of(parts[FROZEN])["rows"]
        guided = parts["valve"](features, frozen.mean(0))  # f^G
        angle = self.setting.task.losses(parts["embeddings"](guided), y)  # (3)
        magnitude: Tensor = torch.linalg.vector_norm(guided - frozen[y], dim=1)  # (4)
        return losses + angle + self.options.lam * magnitude

    def decay(self, parameters: Mapping[str, Tensors], context: Tensors) -> Tensor:
        """μ/2 (‖V‖² + ‖C‖²)."""
        squares = [
            value.square().sum()
            for part in ("valve", "embeddings")
            for value in parameters[part].values()
        ]
        return self.options.mu / 2 * torch.stack(squares).sum()

    def contribute(self, state: SiloState, facts: Facts) -> dict[str, Contribution]:
        """The shared parts, weighted by samples."""
        weight = float(facts.samples)
        return {name: Contribution(self.flat(state, name), weight) for name in SHARED}  # (7)
