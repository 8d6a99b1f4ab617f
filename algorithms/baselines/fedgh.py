"""FedGH: a header for all, which the coordinator trains on the silos' mean features by class.

Yi, Wang, Liu, Shi, Yu, "FedGH: heterogeneous federated learning with generalized global header",
ACM MM 2023, arXiv:2303.13137, Algorithm 1.

A model is an extractor ω_k of the silo's own, of any architecture, below a header θ.

    (1) at silo k, E epochs:      (ω_k, θ_k) ← SGD of L_k(ω_k, θ_k), from the delivered θ
    (2)                           v_ks = mean of f(ω_k; x) over its records of class s
    (3) at the coordinator, for each k of the round and each s that it has, in turn:
                                  θ ← θ − η ∇_θ cross-entropy(θ(v_ks), s)

A silo predicts by θ(f(ω_k; x)), with the θ delivered last.

What everybody sees: the coordinator each silo's mean features by class, and which classes it has.
(3) is no sum of them, so [security] secure_aggregation = "required" refuses it.

Where this differs from the paper:
- Steps of (3) are taken silo by silo in job order, and class by class, ``server_epochs`` times; the
  authors leave the order open.
- η is ``server_lr``, 0.01 unless set.
- The header has to be linear, and extractors end in as many units.

Wire list, the same in every round:

==========  ====  ==================================================  ========
part        way   tensors                                             exchange
==========  ====  ==================================================  ========
``means``   up    v_ks [C, d], zeros for a class without records;     Each
                  ``held`` [C], 1 for those with records
``header``  down  θ                                                   -
==========  ====  ==================================================  ========

Extractors never leave. Means are of records without noise, so a private job is refused.
"""

from functools import cached_property
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, one_hot

from ...files.documents import Strict
from ..course import Course, Facts, Parts, SiloState, Survey
from ..exchange.delivery import Combined, CoordinatorState, Results
from ..exchange.parts import DTYPES, Contribution, Each, Kind, Part, TensorSpec
from ..method import Method, Setting
from ..methods.common.heterogeneous import (
    Extractors,
    check_extractors,
    check_features,
    dealt,
    sketched,
)


class FedGHOptions(Strict):
    """Options of FedGH."""

    server_lr: Annotated[float, Field(gt=0, le=1e3, allow_inf_nan=False)] = 0.01
    """η, the learning rate of the header at the coordinator."""
    server_epochs: Annotated[int, Field(strict=True, ge=1, le=1000)] = 1
    """How often the coordinator goes through the means of a round."""
    extractors: Extractors = ()
    """Architectures dealt to the silos in turn, in job order.

    None: the job's model at each silo.
    """


class FedGH(Method):
    """Extractors stay at the silos; the coordinator trains one header on mean features."""

    name = "fedgh"
    version = 1
    needs_classes = "averages features class by class"
    options_model = FedGHOptions
    product = "delivered"
    loadable = ("extractor",)
    options: FedGHOptions

    def __init__(self, setting: Setting, options: Strict | None = None) -> None:
        super().__init__(setting, options)
        weight = self.header_rows()  # [C, d]
        check_extractors(self.name, self.options.extractors, setting, weight.shape[1])
        models = [setting.sketch(), *(sketched(name, setting) for name in self.options.extractors)]
        check_features(self.name, models)
        means = TensorSpec("means", weight.dtype, weight.shape)
        held = TensorSpec("held", "int64", weight.shape[:1], 0.0, 1.0)
        self.means = Part("means", Kind.PROTOTYPES, Each(), (means, held))
        self.header = Part("header", Kind.HEADER_ROWS, Each(), self.flat_specs("classifier"))

    def up(self, round_: int) -> tuple[Part, ...]:
        """The silo's mean features."""
        return (self.means,)

    def down(self, round_: int) -> tuple[Part, ...]:
        """The header."""
        return (self.header,)

    @property
    def private_fault(self) -> str:
        """Eq. 2."""
        return (
            "it uploads sums of the features of all records, for which no private job pays; choose"
            " fedaims"
        )

    def modules(self, silo: str) -> dict[str, nn.Module]:
        """The silo's own extractor, and the header that all begin with."""
        model = dealt(self.options.extractors, self.setting, silo)
        return {**model, "classifier": self.setting.build()["classifier"]}

    def stages(self, state: SiloState, facts: Facts) -> Course:
        """Train the model, then measure its features."""
        return (self.stage("extractor", "classifier"), Survey(self.sums))  # (1)

    def sums(self, parts: Parts, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Sums of the features by class [C, d]."""
        member = one_hot(y, self.setting.outputs).double()  # [B, C]
        return {"sums": member.T @ parts["extractor"](x).double()}

    def contribute(self, state: SiloState, facts: Facts) -> dict[str, Contribution]:
        """Mean features, and the classes that they are of."""
        spec, _ = self.means.tensors
        counts = facts.class_counts
        means = facts.measured["sums"] / counts.double().clamp(min=1)[:, None]  # (2)
        held = (counts > 0).long()
        return {"means": Contribution({"means": means.to(DTYPES[spec.dtype]), "held": held})}

    # The coordinator half. Its state is θ.

    @cached_property
    def initial(self) -> CoordinatorState:
        """The header that all begin with, by the names of the wire."""
        values = self.setting.build()["classifier"].state_dict()
        return {spec.name: values[spec.name.partition(".")[2]] for spec in self.header.tensors}

    def begin(self) -> CoordinatorState:
        """The initial header."""
        return self.initial

    def combine(
        self, state: CoordinatorState, round_: int, cohort: tuple[str, ...], results: Results
    ) -> Combined:
        """Eq. 3."""
        means, held = results["means"]["means"], results["means"]["held"]
        header, theta = self.setting.build()["classifier"], dict(state)
        points = [(n, s) for n in range(len(cohort)) for s in held[n].nonzero()[:, 0].tolist()]
        for n, s in points * self.options.server_epochs:
            theta = self._step(header, theta, means[n, s], s)
        return Combined(theta, {"header": theta})

    def _step(
        self, header: nn.Module, theta: CoordinatorState, mean: Tensor, label: int
    ) -> dict[str, Tensor]:
        leaves = {name: value.detach().requires_grad_() for name, value in theta.items()}
        named = {name.partition(".")[2]: leaf for name, leaf in leaves.items()}
        with torch.enable_grad():
            logits = functional_call(header, named, (mean[None],))
            loss = cross_entropy(logits, torch.tensor([label]))
            gradients = torch.autograd.grad(loss, list(leaves.values()))
        moved = zip(leaves.items(), gradients, strict=True)
        return {name: (leaf - self.options.server_lr * g).detach() for (name, leaf), g in moved}
