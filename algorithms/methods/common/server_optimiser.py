"""Server optimisers: the mean of a round as one step of an optimiser at the coordinator.

x is what silos begin a round with, a what the method makes of their contributions, such as their
mean; Δ = a − x is the step that the method itself would take. Then, parameter by parameter:

    sgd    m ← β₁ m + Δ,              x ← x + η m
    adam   m ← β₁ m + (1 − β₁) Δ,     v ← β₂ v + (1 − β₂) Δ²,
           x ← x + η m / (√v + τ)
    yogi   m as for adam,             v ← v − (1 − β₂) Δ² sign(v − Δ²),   x as for adam

with m = 0 and v = τ² before the first round, and without Adam's correction of these beginnings.
``sgd`` is Hsu et al. (2019), the others Reddi et al. (2021), Algorithm 2.

Jobs name a method of the catalogue with one of them, such as ``fedrep-adam``: the options are those
of both (catalog.py). A method of another package is composed by a class::

    class SoftPerYogi(ServerYogi, SoftPer):
        name, version = "softper-yogi", 1
        options_model = SoftPerYogiOptions  # of ServerYogi's and SoftPer's options models

Its parts that come down and hold parameters of the model get another name, ``NAME-stepped``: they
are no sums any more, so silos have no tag by which to check them. Running statistics take no step,
and come down as the method makes them. Prototypes and other tensors that no model has are left as
they are. All this is computed of what the coordinator has anyway, so nothing more crosses, and a
blind or private job needs nothing else.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, cast

import torch
from pydantic import Field, create_model
from torch import Tensor

from ....errors import LocalError
from ....files.documents import Strict
from ...course import Facts, SiloState
from ...exchange.delivery import Combined, CoordinatorState, Delivery, Latest, Results
from ...exchange.parts import Part, Sum, Tensors
from ...method import Method, Setting

STEPPED = "-stepped"  # ends the name of a part that a step was taken in
SERVER = "server/"  # begins the names of what this adds to the coordinator's state


@dataclass(frozen=True)
class ServerRule:
    """One rule of the table above: η, β₁, and for ``adam`` and ``yogi`` β₂ and τ."""

    kind: Literal["sgd", "adam", "yogi"]
    lr: float
    beta1: float = 0.0
    beta2: float = 0.99
    tau: float = 1e-3

    def begin(self, x: Tensor) -> dict[str, Tensor]:
        """m, and v where the rule has one, before the first round."""
        first = {"m": torch.zeros_like(x)}
        if self.kind == "sgd":
            return first
        return first | {"v": torch.full_like(x, self.tau**2)}

    def step(self, x: Tensor, aim: Tensor, memory: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
        """The next x and memory, after a round whose method alone would go from x to ``aim``.

        It is computed in float64, and rounded once to the dtype of each.
        """
        start, m = x.double(), memory["m"].double()
        delta = aim.double() - start
        if self.kind == "sgd":
            m = self.beta1 * m + delta
            return _as(x, start + self.lr * m), {"m": _as(x, m)}
        m = self.beta1 * m + (1 - self.beta1) * delta
        v, square = memory["v"].double(), delta.square()
        if self.kind == "adam":
            v = self.beta2 * v + (1 - self.beta2) * square
        else:
            v = v - (1 - self.beta2) * square * torch.sign(v - square)
        moved = start + self.lr * m / (v.sqrt() + self.tau)
        return _as(x, moved), {"m": _as(x, m), "v": _as(x, v)}


def _as(x: Tensor, value: Tensor) -> Tensor:
    return value.to(x.dtype)


class ServerOptimised(Method):
    """A method whose models take steps of a server optimiser; it stands first of two bases.

    LocalError where no part that comes down to all silos holds parameters of the model.
    """

    def __init__(self, setting: Setting, options: Strict | None = None) -> None:
        super().__init__(setting, options)
        rounds = range(setting.rounds + self.census + self.tunes + 1)
        if self.server_rule is not None and not any(map(self._moves_in, rounds)):
            raise LocalError(
                f"method {self.name!r}: nothing that comes down to all silos is a model, so a"
                " server optimiser has nothing to move; choose another method"
            )

    @property
    @abstractmethod
    def server_rule(self) -> ServerRule | None:
        """The rule; None for the method as it is, without a step."""

    def down(self, round_: int) -> tuple[Part, ...]:
        """The method's parts; those that take steps under their new names."""
        # Of the method that stands behind this class, not of the contract.
        return tuple(map(self._renamed, super().down(round_)))  # type: ignore[safe-super]

    def deliver(self, state: SiloState, delivered: Results, facts: Facts) -> SiloState:
        """As the method, of the parts under its own names."""
        own = {name.removesuffix(STEPPED): tensors for name, tensors in delivered.items()}
        return super().deliver(state, own, facts)

    def combine(
        self, state: CoordinatorState, round_: int, cohort: tuple[str, ...], results: Results
    ) -> Combined:
        """The method's outcome, and from there a step for each model that it publishes."""
        ours, theirs = _apart(state)
        made = super().combine(theirs, round_, cohort, results)
        if self.server_rule is None:
            return made
        published: dict[str, Tensors] = {}
        for part, tensors in made.published.items():
            names = [name for name in tensors if name in self._parameters]
            stepped = dict(tensors)
            for name in names:
                stepped[name], held = self._step(self.server_rule, name, tensors[name], ours)
                ours |= held
            published[part + STEPPED if names else part] = stepped
        return replace(made, state={**made.state, **ours}, published=published)

    def deliveries(self, state: CoordinatorState, round_: int, silo: str) -> tuple[Delivery, ...]:
        """The method's, by the new names."""
        stepped = {part.name for part in self.down(round_)}
        found: list[Delivery] = []
        for delivery in super().deliveries(_apart(state)[1], round_, silo):
            name = delivery.part + STEPPED
            found.append(Latest(name) if name in stepped else delivery)
        return tuple(found)

    def _step(
        self, rule: ServerRule, name: str, aim: Tensor, ours: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The next x of one parameter, and what the state holds of it from there on."""
        kinds = ("m", "v") if rule.kind != "sgd" else ("m",)
        if (x := ours.get(f"{SERVER}x/{name}")) is None:
            x = self._initial[name]
            memory = rule.begin(x)
        else:
            memory = {kind: ours[f"{SERVER}{kind}/{name}"] for kind in kinds}
        moved, memory = rule.step(x, aim, memory)
        held = {f"{SERVER}{kind}/{name}": value for kind, value in memory.items()}
        return moved, {f"{SERVER}x/{name}": moved, **held}

    def _moves_in(self, round_: int) -> bool:
        return any(part.name.endswith(STEPPED) for part in self.down(round_))

    def _renamed(self, part: Part) -> Part:
        # A Mix comes down in a value for each silo, which is no single x.
        holds = any(spec.name in self._parameters for spec in part.tensors)
        if self.server_rule is None or not holds or not isinstance(part.exchange, Sum):
            return part
        # Methods whose ``deliveries`` ask for this list get the new name already.
        return replace(part, name=part.name.removesuffix(STEPPED) + STEPPED)

    @cached_property
    def _parameters(self) -> frozenset[str]:
        """The names of all parameters of a silo's modules, as they cross."""
        # Names alone: the wire list asks for them, too.
        with torch.device("meta"):
            modules = self.modules(self.setting.silos[0])
        found: set[str] = set()
        for part, module in modules.items():
            found.update(f"{part}.{name}" for name, _ in module.named_parameters())
        return frozenset(found)

    @cached_property
    def _initial(self) -> dict[str, Tensor]:
        """The values of x with which all silos begin."""
        values: dict[str, Tensor] = {}
        for part, module in self.modules(self.setting.silos[0]).items():
            values |= {f"{part}.{name}": value for name, value in module.state_dict().items()}
        return values


class MomentumOptions(Strict):
    """Options of momentum at the coordinator."""

    server_lr: Annotated[float, Field(gt=0, le=1e3, allow_inf_nan=False)] = 1.0
    """η, the learning rate of the coordinator."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """β, the coordinator's momentum."""


class AdaptiveOptions(Strict):
    """Options of Adam and Yogi at the coordinator."""

    server_lr: Annotated[float, Field(gt=0, le=1e3, allow_inf_nan=False)] = 0.01
    """η, the learning rate of the coordinator."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """β₁, by which the first moment lasts."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """β₂, by which the second moment lasts."""
    tau: Annotated[float, Field(gt=0, le=1e3, allow_inf_nan=False)] = 1e-3
    """τ, the degree of adaptivity: numbers whose steps are far below it are all scaled alike."""


class ServerMomentum(ServerOptimised):
    """A method with momentum at the coordinator."""

    options_model = MomentumOptions
    options: MomentumOptions

    @property
    def server_rule(self) -> ServerRule:
        """``sgd``."""
        return ServerRule("sgd", self.options.server_lr, self.options.momentum)


class ServerAdam(ServerOptimised):
    """A method with Adam at the coordinator."""

    options_model = AdaptiveOptions
    options: AdaptiveOptions

    @property
    def server_rule(self) -> ServerRule:
        """``adam``."""
        own = self.options
        return ServerRule("adam", own.server_lr, own.beta1, own.beta2, own.tau)


class ServerYogi(ServerAdam):
    """A method with Yogi at the coordinator."""

    @property
    def server_rule(self) -> ServerRule:
        """``yogi``."""
        return replace(super().server_rule, kind="yogi")


# They are whole only with a method behind them.
OPTIMISERS: dict[str, type[ServerOptimised]] = {
    "adam": ServerAdam,  # type: ignore[type-abstract]
    "momentum": ServerMomentum,  # type: ignore[type-abstract]
    "yogi": ServerYogi,  # type: ignore[type-abstract]
}
VERSION = 1  # of what this file computes; raise it with every change


class ComposedOptions(Strict):
    """Options of a method with a server optimiser.

    Their class has no name in a module, so another process makes them again by ``restored``.
    """

    restored: ClassVar[Callable[[Mapping[str, Any]], Strict]]

    def __reduce__(self) -> tuple[Callable[[Mapping[str, Any]], Strict], tuple[dict[str, Any]]]:
        """As pickle has it."""
        return type(self).restored, (self.model_dump(),)


def composed(
    name: str,
    optimiser: type[ServerOptimised],
    method: type[Method],
    restored: Callable[[Mapping[str, Any]], Strict],
) -> type[Method]:
    """The class of a method with a server optimiser, whose options are those of both.

    ``restored`` makes its options of a table, and can be pickled. LocalError where the method has
    an optimiser already.
    """
    if issubclass(method, ServerOptimised):
        raise LocalError(
            f"method {name!r}: {method.name} has an optimiser at the coordinator already; choose"
            " its own options, or another method"
        )
    bases = (ComposedOptions, optimiser.options_model, method.options_model)
    title = f"{method.__name__}With{optimiser.__name__}"
    model = create_model(f"{title}Options", __base__=bases)
    cast("type[ComposedOptions]", model).restored = restored
    # Silos compare versions, and the outcome changes with either.
    own: dict[str, Any] = {
        "name": name,
        "version": 1000 * VERSION + method.version,
        "options_model": model,
    }
    own["__doc__"] = f"{method.__doc__} {optimiser.__doc__}"
    return type(title, (optimiser, method), own)


def _apart(state: CoordinatorState) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The state of this class, and that of the method."""
    ours: dict[str, Tensor] = {}
    theirs: dict[str, Tensor] = {}
    for name, value in state.items():
        (ours if name.startswith(SERVER) else theirs)[name] = value
    return ours, theirs
