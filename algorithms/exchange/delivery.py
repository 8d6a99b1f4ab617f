"""The coordinator's results for a method: what it keeps, publishes and delivers to each silo."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor

from .parts import Tensors, TensorSpec

# small and named, so that the coordinator can store it
CoordinatorState: TypeAlias = Mapping[str, Tensor]


# bytes of a CoordinatorState: the coordinator's database takes 10^9 in one piece
LARGEST_STATE = 950_000_000


Results: TypeAlias = Mapping[str, Tensors]  # part name → what the exchange gave


@dataclass(frozen=True)
class Latest:
    """Deliver the last published value of a part; nothing where none was published yet.

    If only silos may read a blind job's sums, the coordinator relays it without opening it.
    """

    part: str


@dataclass(frozen=True)
class Row:
    """Deliver a Mix row: sum over silos of weight · last uploaded version.

    The runtime normalises the weights. It leaves out silos without a version, and delivers nothing
    if none remains.
    """

    part: str
    weights: Mapping[str, float]


def positive_weights(silos: Iterable[str], row: Tensor) -> dict[str, float]:
    """A row of weights [n] by silo, without those that are not positive.

    The row has one weight per silo, in the same order; ValueError if their lengths differ.
    """
    # Weight 0 is left out: that silo may never have uploaded a version.
    pairs = zip(silos, row.tolist(), strict=True)
    return {silo: weight for silo, weight in pairs if weight > 0}


@dataclass(frozen=True)
class Value:
    """Deliver a small tensor that the coordinator half made for this silo.

    Its part is ``addressed`` (method.py): silos do not compare what they received in it.
    """

    part: str
    tensors: Tensors


@dataclass(frozen=True)
class Mail:
    """Deliver the silo's mail (``Post``) with ``@keep``; nothing where there is none.

    ``Method.mailed`` folds it into the silo's parameters.
    """

    part: str


Delivery: TypeAlias = Latest | Row | Value | Mail


# A method's own tensors cannot have a name with "@".
KEEP = TensorSpec("@keep", "float64", ())


@dataclass(frozen=True)
class Post:
    """Put a Mix row over this round's versions aside as mail for a silo that may be away.

    The mail m and its factor k, at first 0 and 1, become keep·m + (1 − keep)·row and keep·k. A silo
    that receives them sets θ ← k·θ + m, as if it had taken part in each of the rounds. The mail is
    removed once the silo contributes again.
    """

    part: str
    silo: str
    weights: Mapping[str, float]
    keep: float


@dataclass(frozen=True)
class Combined:
    """The outcome of a round at the coordinator half: next state, published values and mail.

    ``published`` replaces the last value of each part that it names; values must be finite.
    ``posts`` name parts that this round's silos uploaded for a Mix.
    """

    state: CoordinatorState
    published: Mapping[str, Tensors] = field(default_factory=dict)  # for Latest
    posts: tuple[Post, ...] = ()  # for Mail
