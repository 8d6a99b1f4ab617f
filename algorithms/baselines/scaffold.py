"""SCAFFOLD: one model for all silos, whose steps are corrected by control variates.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: stochastic controlled averaging for
federated learning", ICML 2020, arXiv:1910.06378, Algorithm 1 with option II. y_i is silo i's model,
x the delivered one, c_i and c the control variates of the silo and of all N silos, zeros at first.

    (1) at silo i of S, K steps from y_i = x:  y_i ← y_i − η (g_i(y_i) − c_i + c)
    (2) then                                   c_i⁺ ← c_i − c + (x − y_i) / (K η)
    (3) at the coordinator:                    x ← x + η_g (1/|S|) Σ_{i ∈ S} (y_i − x)
    (4)                                        c ← c + (1/N) Σ_{i ∈ S} (c_i⁺ − c_i)

So c_i is the mean gradient of the silo's last round, and c the mean of all c_i, whoever takes part.
K is the number of steps of the job's epochs, which differs between silos with their records.

Where this differs from the paper:
- With ``training.momentum`` the K of (2) is the number of gradients that a round adds up
  (methods/common/local_steps.py), so that c_i⁺ still is a mean of gradients. Weight decay is a part
  of them. ``training.clip`` cuts the corrected gradient, so c_i⁺ is then a mean of cut ones.
  Other optimisers than SGD are refused: (2) is no mean of gradients there.
- Option I, the gradient at x over all records, is left out: it costs an epoch more.
- η_g is ``global_lr``, 1 unless set, as in the paper's experiments.
- Batch norm's running statistics have no control variate; where ``model.buffers = "global"`` they
  are averaged.
- In a private job c_i is a mean of noised gradients, and the correction comes after the noise.

Wire list, the same in every round:

===========  ====  ============  ============================
part         way   tensors       exchange
===========  ====  ============  ============================
``model``    up    y_i           Sum, each silo counting once
``control``  up    c_i⁺ − c_i    Sum, each silo counting once
``model``    down  x of Eq. 3    -
``variate``  down  c             -
===========  ====  ============  ============================

With ``global_lr`` other than 1 the model comes down as ``model-stepped``. No tag protects c, by
which a coordinator could steer training; a policy's ``max_step`` bounds the model alone. The
coordinator sees each silo's model and the change of its c_i, so over time its mean gradients; in a
blind job it sees the means alone. ``security.clip_exponent`` has to hold gradients then. Weights
are equal, for which declared counts of records cannot stand: ``security.weights = "public"`` is
refused, so a blind job has all its silos in every round. The model of a silo in the end is the one
delivered last.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from ...files.documents import Strict
from ..course import ContributionsAndState, Facts, SiloState, Stage
from ..exchange.delivery import Combined, CoordinatorState, Results
from ..exchange.parts import DTYPES, Contribution, Kind, Part, Sum, Tensors, picked
from ..method import Method, Setting, specs_of_parameters
from ..methods.common.local_steps import check_sgd, gradients_in
from ..methods.common.server_optimiser import ServerOptimised, ServerRule

MODEL = ("extractor", "classifier")


class ScaffoldOptions(Strict):
    """Options of SCAFFOLD."""

    global_lr: Annotated[float, Field(gt=0, le=1e3, allow_inf_nan=False)] = 1.0
    """η_g, the learning rate of the coordinator."""


class ControlVariates(Method):
    """Eqs. 1, 2 and 4, with the mean of the models in place of Eq. 3."""

    product = "delivered"

    def __init__(self, setting: Setting, options: Strict | None = None) -> None:
        super().__init__(setting, options)
        check_sgd(self.name, setting)
        modules = setting.sketch()
        # Buffers have no gradient.
        self.moved = {
            f"{part}.{spec.name}": replace(spec, name=f"control.{part}.{spec.name}")
            for part in MODEL
            for spec in specs_of_parameters(modules[part])
        }
        # Weights are at most 1: Eqs. 3 and 4 count silos, not records.
        once, kind = Sum("mean", most=1.0), Kind.WHOLE_MODEL
        self.model = Part("model", kind, once, self.flat_specs(*MODEL))
        self.control = Part("control", kind, once, tuple(self.moved.values()))
        self.variate = replace(self.control, name="variate")

    def up(self, round_: int) -> tuple[Part, ...]:
        """The model, and the change of c_i."""
        return (self.model, self.control)

    def down(self, round_: int) -> tuple[Part, ...]:
        """The model, and c."""
        return (self.model, self.variate)

    # The silo half. ``extra`` holds x and c as delivered, and c_i.

    def initial_extra(self, silo: str) -> dict[str, Tensor]:
        """Zeros for c and c_i, and x before the first round."""
        modules, extra = self.setting.build(), dict[str, Tensor]()
        for part, module in modules.items():
            for name, value in module.named_parameters():
                extra[f"x.{part}.{name}"] = value.detach().clone()
                extra[f"c.{part}.{name}"] = torch.zeros_like(value)
                extra[f"own.{part}.{name}"] = torch.zeros_like(value)
        return extra

    def deliver(self, state: SiloState, delivered: Results, facts: Facts) -> SiloState:
        """Take the model, and remember it with c."""
        rest = {name: tensors for name, tensors in delivered.items() if name != "variate"}
        taken = super().deliver(state, rest, facts)
        x, came = self.flat(taken, *MODEL), delivered.get("variate", {})
        extra = dict(state.extra)
        for name, spec in self.moved.items():
            extra[f"x.{name}"] = x[name]
            extra[f"c.{name}"] = came.get(spec.name, state.extra[f"c.{name}"])
        return SiloState(taken.parts, extra)

    def stages(self, state: SiloState, facts: Facts) -> tuple[Stage, ...]:
        """Eq. 1: −c_i + c is the gradient of a penalty that is linear in y_i."""
        # A penalty, since it depends on no record; c and c_i differ from silo to silo: context.
        pull = {name: state.extra[f"c.{name}"] - state.extra[f"own.{name}"] for name in self.moved}
        return (replace(self.stage(*MODEL), penalty=self.correction, context=pull),)

    def correction(self, parameters: Mapping[str, Tensors], context: Tensors) -> Tensor:
        """⟨c − c_i, y_i⟩ over parameters, without buffers."""
        terms = []
        for name, pull in context.items():
            part, _, leaf = name.partition(".")
            terms.append((pull * parameters[part][leaf]).sum())
        return torch.stack(terms).sum()

    def contribute(self, state: SiloState, facts: Facts) -> ContributionsAndState:
        """y_i and c_i⁺ − c_i; the silo keeps c_i⁺."""
        y, scale = self.flat(state, *MODEL), facts.lr * gradients_in(self.setting, facts)
        change: dict[str, Tensor] = {}
        extra = dict(state.extra)
        for name, spec in self.moved.items():
            way = (extra[f"x.{name}"] - y[name]) / scale
            change[spec.name] = way - extra[f"c.{name}"]
            extra[f"own.{name}"] = extra[f"own.{name}"] + change[spec.name]  # (2)
        given = {"model": Contribution(y, 1.0), "control": Contribution(change, 1.0)}
        return ContributionsAndState(given, replace(state, extra=extra))

    # The coordinator half.

    def begin(self) -> CoordinatorState:
        """No control variate."""
        specs = self.control.tensors
        return {spec.name: torch.zeros(spec.shape, dtype=DTYPES[spec.dtype]) for spec in specs}

    def combine(
        self, state: CoordinatorState, round_: int, cohort: tuple[str, ...], results: Results
    ) -> Combined:
        """Eq. 4, and the mean of the models, of which buffers are a part."""
        # |S| / N: results["control"] is the mean over the cohort.
        share, changes = len(cohort) / len(self.setting.silos), results["control"]
        after: dict[str, Tensor] = {}
        for spec in self.control.tensors:
            after[spec.name] = state[spec.name] + share * changes[spec.name]  # (4)
        published: dict[str, Tensors] = {"variate": after}
        # Empty where silos alone read this sum.
        if results["model"]:
            published["model"] = picked(self.model.tensors, results["model"])
        return Combined(after, published)


class Scaffold(ServerOptimised, ControlVariates):
    """One model for all silos, by control variates and a learning rate of the coordinator."""

    name = "scaffold"
    version = 1
    options_model = ScaffoldOptions
    options: ScaffoldOptions

    @property
    def server_rule(self) -> ServerRule | None:
        """Eq. 3; with η_g = 1 it is the mean, which silos can check."""
        return None if self.options.global_lr == 1 else ServerRule("sgd", self.options.global_lr)
