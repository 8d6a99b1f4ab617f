"""FedCP: a network separates each record's features, for a head of all silos and one of its own.

Zhang, Hua, Wang, Song, Xue, Ma, Guan, "FedCP: separating feature information for personalized
federated learning via conditional policy", KDD 2023, arXiv:2307.01217.

W^fe is the extractor f, with d features, W^hd the head g of all silos, W_i^hd silo i's own, both of
K rows, and Θ the policy network. Silo i trains W_i^fe and Θ_i from the delivered W^fe and Θ.

    (1) at silo i, before a round:  v_i = Σ_k w_k, over the rows of W_i^hd
    (2) of a record:                h = f(x; W_i^fe),  c = (v_i / ‖v_i‖) ⊙ h
    (3)                             a = ReLU(LayerNorm(Linear(c))) in R^{2d},
                                    r = exp(a_1) / (exp(a_1) + exp(a_2)),  s = 1 − r
    (4)                             ŷ = g(r ⊙ h; W^hd) + g(s ⊙ h; W_i^hd)
    (5) at silo i, E epochs:        (W_i^fe, Θ_i, W_i^hd) ← SGD of L(ŷ, y) + λ MMD²(h, f(x; W^fe))
    (6) then                        Ŵ_i^hd = (W^hd + W_i^hd) / 2
    (7) at the coordinator:         (W^fe, W^hd, Θ) ← Σ_i n_i (W_i^fe, Ŵ_i^hd, Θ_i) / Σ_i n_i

MMD² is that of a batch of B records, h_b and h'_b = f(x_b; W^fe), with the kernel
k(u, v) = Σ_τ exp(−‖u − v‖² / (2τ)) of τ = 10, 15, 20 and 50:
(1/B²) Σ_{b, c} k(h_b, h_c) + k(h'_b, h'_c) − 2 k(h_b, h'_c).

The parts are ``extractor`` (W_i^fe), ``classifier`` (W^hd), ``personal`` (W_i^hd), ``policy``
(Θ_i), ``vector`` (v_i) and ``delivered`` (W^fe).

Where this differs from the paper:
- The softmax of (3) has no noise. In the authors' code it is Gumbel's, in prediction too, so that a
  record's answer is not always the same.
- The kernel's τ are those of the authors' code; the paper leaves them open. λ = 5 is that of the
  script next to the code.
- Where the first v_i comes from is open; in the code it is random. Here it is (1) of the initial
  head, which W^hd and all W_i^hd begin as.
- The silo's ``personal`` head has to be linear. In the code, (1) is of the product of a head's
  layers.
- Where a model has outputs for each position of a record, each position has a policy, and MMD² is
  of a record's mean features.
- W^fe runs in evaluation mode. Running statistics that cross are averaged as (7) has it.

Wire list, the same in every round:

==========  =========  =========================  =======================
part        way        tensors                    exchange
==========  =========  =========================  =======================
``model``   up, down   W_i^fe and Ŵ_i^hd          Sum weighted by n_i
``policy``  up, down   Θ_i                        Sum weighted by n_i
==========  =========  =========================  =======================

W_i^hd never leaves by itself: the coordinator, which knows W^hd, can compute it from Ŵ_i^hd, but in
a blind job it sees the averages alone. A silo's model in the end is the one delivered last, with
its own W_i^hd. MMD² couples the records of a batch, so a private job needs ``lam = 0``.
"""

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
from ..methods.common.second_model import MODEL
from ..models.build import fill

BANDWIDTHS = (10.0, 15.0, 20.0, 50.0)  # τ


class FedCPOptions(Strict):
    """Options of FedCP."""

    lam: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 5.0
    """λ of Eq. 5, how strongly features are held near those of the delivered extractor."""


class PolicyNetwork(nn.Module):
    """Eq. 3, of conditions [B, d] or [B, d, …] by channel."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2 * width, dtype=dtype)
        self.norm = nn.LayerNorm(2 * width, dtype=dtype)

    def forward(self, condition: Tensor) -> Tensor:
        """r, in the shape of the conditions."""
        a: Tensor = self.norm(self.linear(condition.movedim(1, -1))).relu()
        return a.reshape(*a.shape[:-1], 2, -1).softmax(-2)[..., 0, :].movedim(-1, 1)


class ClientVector(nn.Module):
    """Scales features [B, d], or [B, d, …] by channel, by v_i [d] of length 1."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.values = nn.Parameter(values)

    def forward(self, h: Tensor) -> Tensor:
        """Eq. 2."""
        return h * normalize(self.values, dim=0).view(-1, *(1,) * (h.ndim - 2))


class FedCP(Method):
    """A shared and an own head, between which a policy network divides the features."""

    name = "fedcp"
    version = 1
    options_model = FedCPOptions
    product = "delivered"
    options: FedCPOptions

    def __init__(self, setting: Setting, options: Strict | None = None) -> None:
        super().__init__(setting, options)
        rows = self.header_rows(by_position=True)  # [K, d]
        self.dtype, self.width = DTYPES[rows.dtype], rows.shape[1]
        self.template |= self.crossing({"policy": self.sketched_policy()})
        self.model = self.shared("model", Kind.WHOLE_MODEL, *MODEL)
        self.policy = self.shared("policy", Kind.BACKBONE, "policy")

    def up(self, round_: int) -> tuple[Part, ...]:
        """Extractor and head, and the policy network."""
        return (self.model, self.policy)

    def down(self, round_: int) -> tuple[Part, ...]:
        """The same, averaged."""
        return (self.model, self.policy)

    @property
    def private_fault(self) -> str:
        """MMD² compares the records of a batch."""
        if self.options.lam:
            return (
                f"lam = {self.options.lam:g} lets a record move the gradients of others; set it"
                " to 0"
            )
        return ""

    # The silo half.

    def sketched_policy(self) -> PolicyNetwork:
        """Θ without values."""
        with torch.device("meta"):
            return PolicyNetwork(self.width, self.dtype)

    def modules(self, silo: str) -> dict[str, nn.Module]:
        """The model, W_i^hd as a copy of W^hd, Θ, v_i and a copy of the extractor."""
        model, copy = self.setting.build(), self.setting.build()
        policy = self.sketched_policy()
        fill(policy, self.setting.seed, "fedcp/policy")
        personal = copy["classifier"]
        with torch.no_grad():
            vector = ClientVector(rows_added(dict(personal.named_parameters())))
        own = {"personal": personal, "policy": policy, "vector": vector}
        return {**model, **own, "delivered": copy["extractor"]}

    def predict(self, parts: Parts, x: Tensor) -> Tensor:
        """ŷ of Eq. 4."""
        return self.outputs(parts, parts["extractor"](x))

    def outputs(self, parts: Parts, h: Tensor) -> Tensor:
        """Eqs. 2 to 4, of features [B, d] or [B, d, …] by channel."""
        r = parts["policy"](parts["vector"](h))
        return parts["classifier"](r * h) + parts["personal"]((1 - r) * h)  # (4)

    def deliver(self, state: SiloState, delivered: Results, facts: Facts) -> SiloState:
        """Take W^fe, W^hd and Θ, and freeze W^fe and v_i for the round."""
        taken = super().deliver(state, delivered, facts).parts
        vector = {"values": rows_added(taken["personal"])}  # (1)
        frozen = {"delivered": taken["extractor"], "vector": vector}
        return replace(state, parts={**taken, **frozen})

    def stages(self, state: SiloState, facts: Facts) -> tuple[Stage, ...]:
        """Eq. 5, in one stage."""
        stage = self.stage("extractor", "policy", "personal")
        if not self.options.lam:
            return (stage,)
        return (replace(stage, loss=self.objective, coupled=True),)

    def objective(self, parts: Parts, x: Tensor, y: Tensor, context: Tensors) -> Tensor:
        """Eq. 5 by record [B], of which each has all of λ MMD²."""
        h = parts["extractor"](x)
        losses = self.setting.task.losses(self.outputs(parts, h), y)
        apart = discrepancy(by_record(h), by_record(parts["delivered"](x)))
        return losses + self.options.lam * apart

    def contribute(self, state: SiloState, facts: Facts) -> dict[str, Contribution]:
        """W_i^fe with Ŵ_i^hd, and Θ_i."""
        model = self.flat(state, *MODEL)
        for spec in self.template["classifier"]:
            common, own = (state.parts[part][spec.name] for part in ("classifier", "personal"))
            model[f"classifier.{spec.name}"] = (common + own) / 2  # (6)
        weight = float(facts.samples)
        policy = self.flat(state, "policy")
        return {"model": Contribution(model, weight), "policy": Contribution(policy, weight)}  # (7)


def rows_added(head: Tensors) -> Tensor:
    """Eq. 1: the sum [d] of a head's rows [K, d] or [K, d, 1, …]."""
    return head["weight"].flatten(1).sum(0)


def by_record(h: Tensor) -> Tensor:
    """Features [B, d] as they are; of those of positions [B, d, …] the means [B, d]."""
    return h.flatten(2).mean(2) if h.ndim > 2 else h


def discrepancy(one: Tensor, other: Tensor) -> Tensor:
    """MMD² between features [B, d] and [B, d], a scalar."""
    h = torch.cat([one, other])
    lengths = h.square().sum(1)
    # Rounding may leave distances below 0, which would count as more than equal.
    squared = (lengths[:, None] + lengths - 2 * h @ h.T).clamp(min=0)
    kernel = torch.stack([torch.exp(-squared / (2 * tau)) for tau in BANDWIDTHS]).sum(0)
    # Pairs of one side count positively, pairs of both negatively.
    side = torch.cat([torch.ones_like(lengths[: len(one)]), -torch.ones_like(lengths[len(one) :])])
    return side @ kernel @ side / len(one) ** 2
