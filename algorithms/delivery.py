"""What a method has the coordinator compute and keep, and what each silo gets of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor

from .exchange.parts import Tensors, TensorSpec

# small and named, so that the coordinator can store it
CoordinatorState: TypeAlias = Mapping[str, Tensor]


Results: TypeAlias = Mapping[str, Tensors]  # part name → what the exchange gave


@dataclass(frozen=True)
class Latest:
    """Deliver the last published value of a part; nothing where none was published yet."""

    part: str


@dataclass(frozen=True)
class Row:
    """Deliver a Mix row: sum over silos of weight · last uploaded version.

    The runtime normalises the weights.
    """

    part: str
    weights: Mapping[str, float]


@dataclass(frozen=True)
class Value:
    """Deliver a small tensor that the coordinator half made for this silo."""

    part: str
    tensors: Tensors


@dataclass(frozen=True)
class Mail:
    """Deliver what ``Post`` has put aside for this silo, with ``@keep``.

    Nothing where there is none.
    """

    part: str


Delivery: TypeAlias = Latest | Row | Value | Mail


KEEP = TensorSpec("@keep", "float64", ())


@dataclass(frozen=True)
class Post:
    """Put a Mix row over this round's versions aside for a silo that may be away.

    What lies there, m with the factor k (0 and 1 at first), becomes keep·m + (1 − keep)·row and
    keep·k. A silo that gets it sets θ ← k·θ + m, as if it had been there for each of the rounds. It
    is gone once the silo gives again.
    """

    part: str
    silo: str
    weights: Mapping[str, float]
    keep: float


@dataclass(frozen=True)
class Combined:
    """What the coordinator half makes of a round."""

    state: CoordinatorState
    published: Mapping[str, Tensors] = field(default_factory=dict)  # for Latest
    posts: tuple[Post, ...] = ()  # for Mail
