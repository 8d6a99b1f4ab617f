"""A method's work at one silo in one round: stages of training, surveys, changes of state."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Literal, Self, TypeAlias

from torch import Tensor

from ..errors import LocalError, check_local
from .exchange.parts import Contribution, Tensors
from .leaks.taint import EXACT, Taint
from .leaks.traps import LongestSteps

# Losses call parts by name, so the same loss serves modules and stacked values under vmap.
# part name → the module, or its functional form under vmap
Parts: TypeAlias = Mapping[str, Callable[..., Tensor]]


# (parts, x [B, …], y [B], context) → [B]
Loss: TypeAlias = Callable[[Parts, Tensor, Tensor, Tensors], Tensor]


# (x [B, …], y [B, …]) → the records as they are trained on this time
Augment: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


# (parts, x [B, …], y [B]) → sums or rows
Measurement: TypeAlias = Callable[[Parts, Tensor, Tensor], dict[str, Tensor]]


# (parameters by part, context) → scalar
Penalty: TypeAlias = Callable[[Mapping[str, Tensors], Tensors], Tensor]


LastBatch: TypeAlias = Literal["fill", "keep", "drop"]


def records_taken(records: int, batch_size: int, last: LastBatch | None, wrap: bool = False) -> int:
    """Records of one epoch's batches; one that is taken twice counts twice.

    ``last`` says what becomes of the records that are left over for the last batch. It is filled up
    to be as long as the others, kept short, or dropped unless it is the only one. None fills it up
    with ``wrap``, and keeps it otherwise.
    """
    whole, left = records - records % batch_size, records % batch_size
    # One record has no variance, at which batch norm fails; the code of FL-bench drops it too.
    alone = left == 1 <= whole
    filled = ceil(records / batch_size) * batch_size
    taken = {
        "fill": filled,
        "keep": records - alone,
        "drop": max(whole, min(records, batch_size)),
        None: (records, filled)[wrap],
    }
    return taken[last]


@dataclass(frozen=True)
class Optimiser:
    """The rule by which parameters move.

    ``sgd``: v ← momentum·v + g + weight_decay·θ; θ ← θ − lr·v; with ``clip`` the gradient g of all
    trained parameters together is first scaled down to that Euclidean norm. ``adam`` and ``adamw``
    as torch.optim has them, by ``betas`` and ``eps``; ``clip`` acts on them too. ``mirror``, for
    parameters that are points of a simplex (the last axis): θ ← θ·exp(−lr·g) / Σ, then entries
    below ``floor`` are raised to it and the rest scaled to sum to one.
    ``mirror-double-exponential``: the same with θ·exp(exp(−lr·g)), as the code published with PPFL
    has it.

    ``within`` are bounds into which ``sgd`` brings every trained number back after each step.
    """

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    rule: Literal["sgd", "adam", "adamw", "mirror", "mirror-double-exponential"] = "sgd"
    floor: float = 0.0
    within: tuple[float, float] | None = None
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8


@dataclass(frozen=True)
class SiloState:
    """State of a silo between rounds: parameters and buffers by part, and other tensors.

    ``parts`` holds every tensor of each part's ``state_dict``. A state is replaced as a whole and
    never changed in place, so the old state survives a round that fails.
    """

    parts: Mapping[str, Tensors]
    extra: Tensors = field(default_factory=dict)
    taints: Mapping[str, Taint] = field(
        default_factory=dict
    )  # by the names of ``flat``, in a private job; the runner's
    # of the silo's training, where it looks at what comes down; the runner's
    steps: LongestSteps | None = None

    @property
    def flat(self) -> dict[str, Tensor]:
        """All tensors, as ``part/<part>/<tensor>`` and ``extra/<tensor>``.

        ``taints`` uses these names.
        """
        found: dict[str, Tensor] = {}
        for part, tensors in self.parts.items():
            found |= _prefixed(f"part/{part}/", tensors)
        return found | _prefixed("extra/", self.extra)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.flat.values())

    def taint(self, name: str) -> Taint:
        """The taint of a tensor of ``flat`` in a private job; exact where it is unknown."""
        # A forgotten entry must hold a tensor back, and never let it leave.
        return self.taints.get(name, EXACT)


def _prefixed(prefix: str, tensors: Tensors) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in tensors.items()}


@dataclass(frozen=True)
class Facts:
    """The knowledge of the silo half about itself and its data in one round.

    It stays there unless a contribution carries it. In a private job numbers of records are noisy,
    and ``steps`` and ``batch_size`` follow from its rate of sampling.
    """

    silo: str
    round: int
    samples: int  # training records
    class_counts: Tensor  # [classes] int64, of the training records; without classes [1], of all
    measured: Tensors = field(default_factory=dict)  # what ``measure`` and surveys gave, float64
    steps: int = 1  # of an epoch over drawn batches
    batch_size: int = 1  # records of a step; the last one of an epoch may take fewer
    lr: float = 0.0  # the job's learning rate as its schedule has it in this round
    # int64, by parameter: a step's sums with this silo's share of the noise (job/shared_steps.py)
    summed: Tensors = field(default_factory=dict)


@dataclass(frozen=True)
class Effort:
    """Upper bound on a private round's use of a silo's records.

    It is known before the round, and the same at every silo.
    """

    epochs: int = 0  # over drawn batches, of all stages together
    whole: int = 0  # steps on all records at once
    measures: bool = False  # whether ``measure`` adds anything up
    shared: int = 0  # steps under noise that the silos share, one at most (job/shared_steps.py)


@dataclass(frozen=True)
class Aligned:
    """One stage for silos that train different parts, so that they can train at once.

    ``names`` are common names, and the part that this silo has under each. ``loss`` knows the parts
    by them; it gives the same numbers as the stage's own, and sees no parts but those that the
    stage trains or names in ``reads``, and those of ``names``. What differs from silo to silo is in
    ``context``, which joins the stage's. An aligned stage has no penalty.
    """

    names: Mapping[str, str]
    loss: Loss
    context: Tensors


@dataclass(frozen=True)
class Stage:
    """One stretch of local training: the parts that move, for how many epochs, by which loss.

    ``loss`` returns per-sample losses [B]; the runner takes the mean. Terms that depend on
    parameters alone go into ``penalty``, where differentially private training can see them. Parts
    not trained run in evaluation mode.

    ``reads`` are the parts that loss and penalty receive in addition to those that the stage
    trains; none named, all. In a private job a ``noiseless`` stage trains without noise and costs
    nothing: what it trains must stay here, and what reads that must stay too, or the round is held
    back.

    With ``coupled`` the loss of a record depends on the other records of its batch, or on their
    number; that of batch norm need not be said. A private job has no such stage.

    ``summed``, which a job with shared noise sets, are parameters, named ``part.parameter``, that
    the stage does not move: its one step gives their sums (job/shared_steps.py).

    ``rows``, which the job sets, is how many records of a batch are in memory at a time; None for
    all. The job also sets ``augment``, which changes each batch's records at random, ``last``, what
    becomes of an epoch's last batch (``records_taken``), and ``shuffle``: without it every epoch
    takes the records in their order.

    ``aligned`` is for simulated silos alone, and changes no numbers.
    """

    trains: tuple[str, ...]
    epochs: int
    loss: Loss
    optimiser: Optimiser
    penalty: Penalty | None = None
    context: Tensors = field(default_factory=dict)
    full_batch: bool = False  # an epoch is one step on the gradient over all records
    reads: tuple[str, ...] | None = None
    noiseless: bool = False
    coupled: bool = False
    summed: frozenset[str] = frozenset()
    rows: int | None = None
    augment: Augment | None = None
    last: LastBatch | None = None
    shuffle: bool = True
    aligned: Aligned | None = None

    @property
    def common(self) -> Self:
        """The stage as silos that train at once have it, in the words of ``aligned``."""
        if self.aligned is None:
            return self
        alone = self.penalty is None
        check_local(alone, "an aligned stage has no penalty; leave out one of the two")
        called = {own: name for name, own in self.aligned.names.items()}
        return replace(
            self,
            trains=tuple(called.get(part, part) for part in self.trains),
            loss=self.aligned.loss,
            context={**self.context, **self.aligned.context},
            reads=(*(self.reads or ()), *self.aligned.names),
            aligned=None,
        )


@dataclass(frozen=True)
class Survey:
    """Statistics of all training records, with the model as it is then, in evaluation mode.

    The runner adds up in float64 what ``measure`` gives of each batch; the sums join
    ``facts.measured`` from there on. With ``rows`` it gives a row of each record, and the rows of
    all records, in their order, stand in place of sums. A private job rejects surveys.
    """

    measure: Measurement
    rows: bool = False


@dataclass(frozen=True)
class Change:
    """A change of the silo's state between two stages.

    ``change`` takes the state as trained so far and returns a new one, whose parts the following
    stages train. A private job rejects changes.
    """

    change: Callable[[SiloState, Facts], SiloState]


@dataclass(frozen=True)
class ContributionsAndState:
    """Contributions by part, and the state that the silo keeps of this round.

    ``Method.contribute`` returns it where a contribution and what stays are computed together, such
    as SCAFFOLD's control variates. The state replaces the trained one: it has all of its parts, and
    ``extra`` as a whole. A round that does not count leaves no trace of either.
    """

    contributions: Mapping[str, Contribution]
    state: SiloState


def settled(name: str, state: SiloState, made: object) -> tuple[dict[str, Contribution], SiloState]:
    """The contributions out of what ``contribute`` of a method returned, and the state to keep.

    That is the trained ``state`` unless the method returned another. LocalError for anything that
    is neither contributions nor ``ContributionsAndState``.
    """
    contributions, kept = made, state
    if isinstance(made, ContributionsAndState):
        contributions, kept = made.contributions, made.state
    # What a method returns next to its contributions would be lost without a word.
    if not isinstance(contributions, Mapping):
        raise LocalError(
            f"contribute of method {name!r} returned a {type(contributions).__name__}; return a"
            " dictionary of contributions by part, or ContributionsAndState(contributions, state)"
            " where the silo keeps another state than the trained one"
        )
    if kept.parts.keys() != state.parts.keys():
        raise LocalError(
            f"contribute of method {name!r} returned a state with parts {sorted(kept.parts)}, the"
            f" model has {sorted(state.parts)}; change the state that it is given by"
            " dataclasses.replace"
        )
    return dict(contributions), kept


CourseStep: TypeAlias = Stage | Survey | Change
Course: TypeAlias = tuple[CourseStep, ...]
