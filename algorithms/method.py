"""The method contract: deliver, train, contribute.

A method is one file with one class. Its wire list says which parts cross and by which exchange; its
silo half turns what came down into stages of local training and one bundle of contributions; its
coordinator half sees only the results that its exchanges grant. Loops, batches, clocks, devices,
files and sockets belong to the runner, so one method file runs in the simulator and over the
network.

A round at a silo: ``deliver`` (what came down) → go through the ``stages`` → ``contribute``. A
round at the coordinator: ``deliveries`` per silo → collect the contributions → ``combine``. Results
are delivered at the start of a silo's next round, and once more after the last round. A method with
a ``census`` has one round more, number 0, in which every silo takes part and nothing trains. One
that ``tunes`` has one round more at the end, in which every silo takes part, trains what came down
for itself, and contributes nothing.

A job with [privacy] runs the same method file, and its runner
(algorithms/training/private_round.py) does the rest, provided that the file keeps to these rules:
it learns of the records from ``facts`` alone, whose counts are noisy then; its ``stages`` take no
more than ``effort`` says; a ``loss`` treats each record by itself, and reaches the state's parts
only as it is handed them; ``measure`` can run under ``torch.vmap``; ``deliver`` and ``contribute``
compute with tensors, and take no value out of one that was trained without noise
(algorithms/leaks/taint.py). ``private_fault`` names what leaves a record's influence without
bounds, such as a ``Survey`` or a ``Change``.

A simulation on a GPU trains silos at once (algorithms/engines/vmap_training.py), and gives the same
if the file keeps to this: ``loss``, ``penalty``, ``predict`` and ``measure`` can run under
``torch.vmap``, and all that they take of one silo they take of what they are handed, such as the
stage's ``context``; a ``loss`` treats each record by itself, or its stage says ``coupled``. A loss
or penalty that is built separately for each silo is right too, but then silos train one by one
(algorithms/engines/grouping.py).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from ..errors import LocalError
from ..files.documents import Strict
from .course import ContributionsAndState, Course, Effort, Facts, Optimiser, Parts, SiloState, Stage
from .exchange.delivery import KEEP, Combined, CoordinatorState, Delivery, Latest, Results
from .exchange.parts import Contribution, Kind, Part, Sum, Tensors, TensorSpec, picked
from .leaks.taint import EXACT, PUBLIC
from .numerics.frozen import running_statistics
from .numerics.streams import Seed
from .tasks.task import Task

VARIANCE = "running_var"  # torch's name for batch norm's: a negative one makes every output NaN


class Build(Protocol):
    """Makes the job's model by part."""

    def __call__(self, prefix: str = "") -> dict[str, nn.Module]:
        """The parts, freshly initialised; another ``prefix`` gives other values."""
        ...


class FeatureSpec(Protocol):
    """One feature of a record, as a job declares it (data/features.py has it all)."""

    name: str
    center: float
    scale: float
    categories: tuple[str, ...] | None

    @property
    def low(self) -> float:
        """The least value, before it is centred and scaled."""
        ...

    @property
    def high(self) -> float:
        """The largest value."""
        ...

    @property
    def stand_in(self) -> float:
        """What a missing value counts as; NaN if none may miss."""
        ...

    @property
    def width(self) -> int:
        """Numbers of a record that it takes."""
        ...


@dataclass(frozen=True)
class Setting:
    """The public facts of a job that both halves know.

    ``build`` returns a freshly initialised model of the job as its two parts, ``extractor`` and
    ``classifier``; it gives the same values at every silo (seeded by the job). ``sketch`` returns
    it without values, on torch's device "meta": names and shapes cost neither time nor memory.
    Other modules that a method needs come from ``models.fill``, by the same streams under a prefix
    of the method's choice. ``buffers`` says whether floating-point buffers, the running statistics
    of batch norm, stay at a silo or cross with the parameters of their part. Where ``counts`` are
    declared, a method asks no silo for its own.
    """

    silos: tuple[str, ...]  # in job order: the order of every fold
    cohort_size: int  # silos drawn for a round that trains; fewer contribute where some fail
    rounds: int  # that train
    outputs: int  # numbers that the model gives for a record: in a classification one per class
    task: Task
    input: tuple[int, ...]  # one record: channels, height, width, or what its model takes
    epochs: int
    optimiser: Optimiser
    seed: Seed
    build: Build
    sketch: Callable[[], dict[str, nn.Module]]
    drawn: Callable[[int], tuple[str, ...]]  # the silos of a round, in job order; fewer may come
    buffers: Literal["local", "global"]
    # training records by silo, where a blind job declares them
    counts: Mapping[str, int] = field(default_factory=dict)
    # the same by class, where it does
    class_counts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # whether what is mixed crosses by directed sums, so that no version stays
    directed: bool = False
    # what each feature of a record is, where the job says it
    features: tuple[FeatureSpec, ...] = ()
    noised: bool = False  # a private job: what is measured of records is noisy


class NoOptions(Strict):
    """Options of a method that has none."""


class Method(ABC):
    """Base of all methods. Subclasses set the class variables and write the two halves.

    The two halves run on different machines, each with its own object; on one machine all users of
    a job share one object (``Job.method``). So an object holds only the setting, the options and
    what follows from them. Silo and coordinator keep everything else in their states.
    """

    name: str
    version: int
    options_model: ClassVar[type[Strict]] = NoOptions
    published: ClassVar[Mapping[str, object] | None] = None
    """Options of its paper that are not the defaults, whose docstrings say why; None: unknown."""
    needs_classes: str = ""
    """What it does with classes, such as "averages features class by class"; empty if nothing."""
    product: Literal["delivered", "trained"] = "trained"
    """The model that a silo keeps in the end: the one delivered last, or the one trained last."""
    loadable: tuple[str, ...] = ()
    """Parts that never cross, whose initial values a silo may take from a file of its own."""
    addressed: tuple[str, ...] = ()
    """Parts that come down to each silo in a value of its own, whatever the others get."""
    census: bool = False
    """True if round 0 asks every silo for facts alone, before anything trains."""
    trains: bool = True
    """False if no model is trained, and records are only counted."""
    tunes: bool = False
    """True if one more round ends the job, in which every silo trains for itself alone."""
    sums_steps: bool = False
    """True if its weighted means are of parameters that all silos train from one value, by the task
    alone, and if nothing else depends on what a silo trained of them. Then a round can be one step
    of all silos together, under noise that they share (job/shared_steps.py). Inherited: a subclass
    with another loss says False."""
    by_rounds: str = ""
    """What it does by the job's number of rounds, besides what crosses, such as "keeps more of an
    update towards the last round"; empty if nothing. A run that did so cannot be lengthened."""
    directed_for: Literal["", "away", "members"] = ""
    """The recipients of a directed Mix, whose weights must be known before the round.

    Empty: nobody. "away": silos that the round does not draw, by ``row_weights``, in a job that
    declares the facts they depend on. "members": silos that the round draws, by
    ``member_weights``, which the coordinator half alone knows.
    """

    options: Strict
    """Checked options, an instance of ``options_model``; subclasses narrow the annotation."""

    def __init__(self, setting: Setting, options: Strict | None = None) -> None:
        self.setting = setting
        self.options = self.options_model() if options is None else options
        # The sketch has no values: specs need only names, dtypes and shapes.
        self.template = self.crossing(setting.sketch())

    def number(self, silo: str) -> int:
        """A silo's index in job order, which is its row in states of the coordinator half.

        ValueError for a silo that the job does not name.
        """
        return self.setting.silos.index(silo)

    def numbers(self, silos: Iterable[str]) -> list[int]:
        """Places of silos in job order."""
        return list(map(self.number, silos))

    def tuning(self, round_: int) -> bool:
        """True if this is the round that ``tunes`` adds."""
        return self.tunes and round_ == self.setting.rounds

    # The wire list.

    @abstractmethod
    def up(self, round_: int) -> tuple[Part, ...]:
        """Parts that a silo uploads in this round, besides the metrics that every method has.

        ``round_`` counts from 0. The list is in the signed job, and each machine computes it again
        and compares: so it depends on the job alone, never on a silo's data.
        """

    @abstractmethod
    def down(self, round_: int) -> tuple[Part, ...]:
        """Parts that may be delivered at the start of this round, or in the final delivery.

        The final delivery has the number ``Job.length``: ``Setting.rounds``, plus one if there is a
        census, plus one if the method tunes. A part that is summed and comes down under the same
        name is published in each round, as its Sum gave it. Nothing else may depend on this sum: if
        only silos read it, ``combine`` gets empty results.
        """

    def by_class(self, round_: int) -> tuple[str, ...]:
        """Parts of ``up``, besides ratios, of which a row is a class.

        A row is zeros where a silo has no record of its class. A blind job counts the holders of
        each class first, and leaves out the rows of classes with too few holders
        (algorithms/job/class_census.py).
        """
        return ()

    def stream_round(self, round_: int) -> int:
        """The number by which a round's batches are drawn.

        It is the round's own, unless rounds were put before those of a method.
        """
        return round_

    @property
    def withholds(self) -> str:
        """The option, with its value, by which the coordinator half withholds rows of rare classes.

        Empty for none.
        """
        return ""

    @property
    def compares_labels(self) -> bool:
        """True if the coordinator half needs the number of training records per class and silo.

        Class counts do not cross in a blind job: its file declares them (``Setting.class_counts``).
        """
        return False

    # The silo half.

    def modules(self, silo: str) -> dict[str, nn.Module]:
        """A silo's own modules by part, freshly initialised.

        Silos may differ in what does not cross. On torch's device "meta" it is called for names and
        shapes only.
        """
        return self.setting.build()

    def initial_extra(self, silo: str) -> dict[str, Tensor]:
        """Other tensors of a silo's state before its first round.

        They stay at the silo unless ``contribute`` puts them into a contribution.
        """
        return {}

    def predict(self, parts: Parts, x: Tensor) -> Tensor:
        """Outputs [B, outputs] of the silo's model, such as logits.

        ``parts`` hold modules, or their functional forms under ``torch.vmap``; ``x`` is [B,
        channels, height, width]. Evaluation compares them with what is true of the test records.
        """
        return parts["classifier"](parts["extractor"](x))

    def deliver(self, state: SiloState, delivered: Results, facts: Facts) -> SiloState:
        """Take what came down into the state.

        By default each part replaces the parameters that it names. ``delivered`` lacks a part of
        ``down`` until the coordinator has something to deliver for it. The result is a new state:
        the given one must stay unchanged, since the round may still fail.
        """
        return self.replaced(state, delivered, *delivered)

    def measure(self, parts: Parts, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Statistics of a batch of training records, by the model as delivered; they add up.

        The runner adds them up in float64 before training; they are in ``facts.measured`` for
        ``stages`` and ``contribute``. In a private job it cuts what each record adds, all tensors
        together, to a norm, and adds noise to the sum.
        """
        return {}

    @property
    def measures(self) -> bool:
        """False if ``measure`` is this class's own, so that nobody need go through the records."""
        return getattr(self.measure, "__func__", None) is not Method.measure

    def effort(self, round_: int) -> Effort:
        """Upper bound on a round's use of records: by default the job's epochs.

        A private job reserves its budget by this bound before the round, so it may not depend on a
        silo's data. ``stages`` that take more are a LocalError there.
        """
        return Effort(epochs=self.setting.epochs)

    @property
    def simulated_only(self) -> str:
        """Why no federation may run it with these options; empty if one may."""
        return ""

    @property
    def private_fault(self) -> str:
        """Why a job with these options cannot be private; empty if it can.

        The text follows the method's name in an error; it says what to change, if anything helps.
        """
        return ""

    @property
    def smallest_cell(self) -> int | None:
        """Fewest of a silo's records that an exact count is of; None if it counts no cells."""
        return None

    @abstractmethod
    def stages(self, state: SiloState, facts: Facts) -> Course:
        """The stages of training of this round in order, with surveys and changes in between.

        All are made before the first one runs. An empty course trains nothing in this round.
        """

    @abstractmethod
    def contribute(
        self, state: SiloState, facts: Facts
    ) -> Mapping[str, Contribution] | ContributionsAndState:
        """One contribution for each part of ``up(facts.round)``, from the state after training.

        Tensors have the dtypes and shapes of ``Part.given``, and finite values within its bounds. A
        Sum of form "mean" takes one weight, a Sum of form "ratio" one weight per row.

        The silo keeps ``state``. A method that computes what stays together with what crosses
        returns ``ContributionsAndState(contributions, state)``, in private jobs too.
        """

    # The coordinator half.

    def begin(self) -> CoordinatorState:
        """State before the first round."""
        return {}

    def combine(
        self, state: CoordinatorState, round_: int, cohort: tuple[str, ...], results: Results
    ) -> Combined:
        """Turn the results of a round into the next state, published values and posts.

        By default the sums are published, except those that silos alone read, whose results are
        empty. ``cohort`` are the silos that contributed, in job order. The given state must stay
        unchanged, since the round may still fail.
        """
        # Sums only: versions for a Mix are stored elsewhere, and a Gram is for the coordinator.
        published = {}
        for part in self.up(round_):
            if isinstance(part.exchange, Sum) and results[part.name]:
                # Without ``@weight``, which does not come down.
                published[part.name] = picked(part.tensors, results[part.name])
        return Combined(state, published)

    def unposted(self, state: CoordinatorState, silos: tuple[str, ...]) -> CoordinatorState:
        """The state of ``combine`` without these of its posts: their rows would show too much."""
        return state

    def deliveries(self, state: CoordinatorState, round_: int, silo: str) -> tuple[Delivery, ...]:
        """The delivery to a silo at the start of a round: by default all of ``down``, latest.

        ``silo`` may be one that never took part.
        """
        return tuple(Latest(part.name) for part in self.down(round_))

    def row_weights(self, round_: int, recipient: str) -> Mapping[str, float]:
        """Weights, by drawn silo, of the Mix that ``combine`` posts to a silo that was not drawn.

        They are computed from the job's declarations alone, so that every machine has the same.
        """
        return {}

    def member_weights(self, state: CoordinatorState, recipient: str) -> Mapping[str, float]:
        """Weights, by silo, of the Mix that ``combine`` posts to a member of a round.

        The recipient's own weight is among them; silos of weight 0 may be missing. ``state`` is the
        state before the round.
        """
        return {}

    def mail_fault(self, round_: int, silo: str, shares: Mapping[str, float], keep: float) -> str:
        """Why a silo's mail of a round cannot be what this method posts; empty where it can.

        ``shares`` of the mixed silos add up to 1. The silo checks them and ``keep`` by the job's
        declarations; by default these say nothing.
        """
        return ""

    # For subclasses. Where the job's ``model.buffers`` is "global", "parameters" includes buffers.

    def crossing(self, modules: Mapping[str, nn.Module]) -> dict[str, tuple[TensorSpec, ...]]:
        """Specs by part of what may cross: parameters, then buffers if they are "global"."""
        # This order is the wire order, so all machines must have the same.
        buffers = self.setting.buffers == "global"
        crossing: dict[str, tuple[TensorSpec, ...]] = {}
        for name, module in modules.items():
            crossing[name] = specs_of_parameters(module)
            if buffers:
                crossing[name] += specs_of_buffers(module)
        return crossing

    def shared(self, name: str, kind: Kind, *parts: str) -> Part:
        """A Sum over the parameters of the named parts, weighted by samples.

        Tensors are named ``part.parameter``.
        """
        return Part(name, kind, Sum("mean"), self.flat_specs(*parts))

    def flat_specs(self, *parts: str) -> tuple[TensorSpec, ...]:
        """Specs of the named parts' parameters, named ``part.parameter``.

        The order is the wire order: part by part, each in definition order.
        """
        return tuple(replace(spec, name=name) for name, _, spec in self._named_specs(parts))

    def flat(self, state: SiloState, *parts: str) -> dict[str, Tensor]:
        """Parameters of the named parts, named ``part.parameter``.

        The tensors are the state's own, not copies.
        """
        named = self._named_specs(parts)
        return {name: state.parts[part][spec.name] for name, part, spec in named}

    def header_rows(self, bias: bool = False, *, by_position: bool = False) -> TensorSpec:
        """The spec of a linear classifier's weight [classes, features], a row per class.

        LocalError where the classifier is anything else; with ``bias`` it must have one.
        ``by_position``: a convolution of one position is linear, too.
        """
        named = {spec.name: spec for spec in self.template["classifier"]}
        wanted = {"weight", "bias"} if bias else {"weight"}
        rows = named.get("weight", TensorSpec("weight", "float32", ()))
        sides = len(rows.shape)
        linear = sides == 2 or (by_position and sides > 2 and prod(rows.shape[2:]) == 1)
        if not linear or not wanted <= named.keys() <= {"weight", "bias"}:
            raise LocalError(
                f"{self.name} needs a linear classifier with {' and '.join(sorted(wanted))}, the"
                f" model's has {', '.join(named) or 'no parameters'}; name one Linear layer in"
                " model.head, or choose another model"
            )
        return replace(rows, shape=rows.shape[:2])

    def _named_specs(self, parts: Iterable[str]) -> Iterator[tuple[str, str, TensorSpec]]:
        """Name ``part.parameter``, part and spec of all parameters of the named parts."""
        for part in parts:
            for spec in self.template[part]:
                yield f"{part}.{spec.name}", part, spec

    def replaced(self, state: SiloState, delivered: Results, *names: str) -> SiloState:
        """The state with the parameters of these delivered parts; absent ones change nothing."""
        parts = dict(state.parts)
        for tensors in map(delivered.get, names):
            for name, value in (tensors or {}).items():
                # The first dot ends the part's name; parameters may have more in theirs.
                part, _, leaf = name.partition(".")
                parts[part] = {**parts[part], leaf: value}
        return SiloState(parts, state.extra)

    def for_round(
        self, contributions: Mapping[str, Contribution], round_: int
    ) -> dict[str, Contribution]:
        """The contributions that the wire list has for this round, in its order."""
        # A method may make contributions for all its phases; those of other rounds are dropped.
        return {part.name: contributions[part.name] for part in self.up(round_)}

    def mailed(self, state: SiloState, mail: Tensors, *parts: str) -> SiloState:
        """Fold mail into the named parts' parameters (``Post``): θ ← k·θ + m.

        It is computed in float64 and rounded once, to each parameter's dtype. KeyError if the mail
        lacks ``@keep`` or one of the parameters.
        """
        # k is the product of ``keep`` over all posts in this mail.
        kept = mail[KEEP.name]
        changed = dict(state.parts)
        for name, value in self.flat(state, *parts).items():
            part, _, leaf = name.partition(".")
            mixed = kept * value.double() + mail[name].double()
            changed[part] = {**changed[part], leaf: mixed.to(value.dtype)}
        return SiloState(changed, state.extra)

    def epochs_left(self, taken: int) -> int:
        """The job's epochs less those that other stages of the round take; at least 1.

        So the epochs of a round's stages add up to ``training.epochs`` in every method, unless
        options say otherwise: methods that are compared take the same local steps.
        """
        return max(1, self.setting.epochs - taken)

    def stage(self, *trains: str) -> Stage:
        """The task's loss on the job's epochs and optimiser, training the named parts.

        Methods change single fields by ``dataclasses.replace``.
        """
        return Stage(trains, self.setting.epochs, self.task_loss, self.setting.optimiser)

    def task_loss(self, parts: Parts, x: Tensor, y: Tensor, context: Tensors) -> Tensor:
        """The task's loss [B] of ``predict``, such as cross-entropy.

        The runner takes the mean, and a private job clips each record's gradient first: so the
        losses are not reduced here.
        """
        return self.setting.task.losses(self.predict(parts, x), y)


def specs_of_parameters(module: nn.Module) -> tuple[TensorSpec, ...]:
    """Specs of a module's parameters, in definition order."""
    return _specs(module.named_parameters())


def specs_of_buffers(module: nn.Module) -> tuple[TensorSpec, ...]:
    """Specs of a module's running statistics, in definition order."""
    return _specs(running_statistics(module))


def _specs(tensors: Iterable[tuple[str, Tensor]]) -> tuple[TensorSpec, ...]:
    return tuple(_spec(name, tensor) for name, tensor in tensors)


def _spec(name: str, tensor: Tensor) -> TensorSpec:
    # The bound crosses with the spec, and both ends reject a model that would answer NaN.
    least = 0.0 if name.rpartition(".")[2] == VARIANCE else None
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(name, dtype, tuple(tensor.shape), least=least)


def initial_state(
    method: Method,
    silo: str,
    weights: Mapping[str, Tensors] | None = None,
    public: Collection[str] | None = None,
) -> SiloState:
    """State of a silo before its first round, from ``modules`` and ``initial_extra``.

    ``weights`` by part (pretrained.load_weights) replace a personal part's own initial values.
    ``public``, in a private job: the parts among them in which no record of this silo shows.
    """
    own = dict(weights or {})
    with torch.no_grad():
        parts = {part: _values(module) for part, module in method.modules(silo).items()}
        # Loaded weights come last, so that they replace those that ``modules`` drew.
        state = SiloState(parts | own, method.initial_extra(silo))
    if public is None:
        return state

    # weights that were trained on this silo's records show them, unless somebody vouches for them
    taints = dict.fromkeys(state.flat, PUBLIC)
    hidden = tuple(f"part/{part}/" for part in own.keys() - set(public))
    taints.update((name, EXACT) for name in state.flat if name.startswith(hidden))
    return replace(state, taints=taints)


def _values(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}
