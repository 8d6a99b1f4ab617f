"""One silo's round: deliver, train, contribute.

The simulator and the silo agent run this same function. So a federation gives bit for bit what its
simulation gave, on one machine type at one thread. A round of a private job takes the same course;
what it does otherwise at each place is private_round.py's.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import CancelledError, ExhaustedError, LocalError, PeerError
from ...files import tensor_file
from ..course import Change, Course, Facts, SiloState, Stage, Survey
from ..data.dataset import Dataset, forgiving
from ..exchange.delivery import Results
from ..exchange.parts import Contribution, Part, Tensors, fits, value_fault
from ..job.job import Job
from ..leaks.taint import Taint, taints_from_text, taints_to_text
from ..leaks.traps import Caution, LongestSteps, lengthened, replaced
from ..method import Method
from ..models.build import wanted
from ..models.functional import mapped
from ..models.lora import computed
from ..numerics.devices import CPU, exact, in_memory
from ..numerics.frozen import frozen_names
from ..numerics.streams import stream
from ..tasks.counting import Tally
from ..tasks.task import histogram
from .accountant import PrivateSilo, ReservedSteps
from .loop import (
    PLAIN,
    Modules,
    Note,
    Stepper,
    batch_coupled,
    evaluate,
    never,
    silent,
    train,
    unnoted,
)
from .plain_round import ClearRound, Side
from .work import LocalWork, work_of

TAINTS = "staddle.taints"  # in the metadata of a private job's state file
STEPS = "staddle.steps"  # in that of a silo's state file


@dataclass(frozen=True)
class RoundReport:
    """Counts and loss of one silo in one round.

    It stays at the silo but for the counts that METRICS adds up, and those that the job's [metrics]
    table asks for.
    """

    round: int
    samples: int  # training records; 0 in the final round, which trains nothing
    delivered: Tally  # of test records, with the model as delivered
    trained: Tally  # the same after local training
    loss: float | None  # mean training loss of the last stage's last epoch
    work: LocalWork | None = None  # of a round in a plain job

    @property
    def tested(self) -> int:
        """Test records."""
        return self.delivered.records


@dataclass(frozen=True)
class RoundOutcome:
    """The silo's next state, its contributions by part (METRICS included) and its report.

    In a private job also the taint of each tensor of each contribution, ``@weight`` included, and
    what the round took out of the account: the caller commits it once all this is kept.
    """

    state: SiloState
    contributions: Mapping[str, Contribution]
    report: RoundReport
    taints: Mapping[str, Mapping[str, Taint]] = field(default_factory=dict)
    spending: ReservedSteps | None = None


@dataclass
class _Counter:
    """Counts batches for a progress display."""

    show: Callable[[int, int], None]
    total: int
    done: int = field(default=0)

    def __call__(self) -> None:
        self.done += 1
        self.show(self.done, self.total)


@in_memory()
@exact()
def local_round(
    method: Method,
    job: Job,
    state: SiloState,
    round_: int,
    delivered: Results,
    train_data: Dataset,
    test_data: Dataset,
    client: str,
    way: Stepper = PLAIN,
    cancelled: Callable[[], bool] = never,
    progress: Callable[[int, int], None] = silent,
    private: PrivateSilo | None = None,
    device: torch.device = CPU,
    caution: Caution | None = None,
    note: Note = unnoted,
) -> RoundOutcome:
    """Run round ``round_`` of silo ``client`` from ``state``; no argument is changed.

    ``way`` trains in a plain job; a private job takes ``private`` and ignores ``way``. The model is
    trained on the ``device``, and records go there batch by batch unless they are there already;
    states and contributions stay on the host. ``note`` is told of each evaluation. With
    ``caution`` a delivery that may be made to leak
    records (algorithms/leaks/traps.py) raises TrapError before anything is trained.
    """
    check_private(job, private, device)
    rows, ask = None, cancelled
    if private is not None:
        # All calls have one size: else the number of records could change a result.
        rows = job.private.physical_batch
        # No round stops because of a record, which would tell of it.
        train_data, test_data = forgiving(train_data), forgiving(test_data)
        # What was paid for is kept, whoever asks to stop after that.
        ask = never
    # Checked first, since methods rely on the wire list.
    check_delivered(job, round_, delivered)
    side = _side(method, job, client, round_, train_data, way, private, cancelled)
    held, state = state, side.deliver(state, delivered)
    # This round's step is measured from the delivered model (``lengthened``).
    began = state.parts

    # A model that is made to leak copies records into the first step, so it is checked before that
    # (security rule 38).
    if caution is not None:
        layers = partial(computed, options=job.model.lora)
        known, fresh = side.judged(held, began, delivered)
        caution.check(known.steps, known.parts, fresh, replaced(delivered), round_, layers)

    # Training changes the modules in place, so the delivered model is tested first.
    modules = to_modules(method, client, state, device)
    seen_delivered = evaluate(method, modules, test_data, job.counting, rows, cancelled, note)
    side.evaluated(modules)
    side.measure(modules, train_data)

    # Stages come after ``measure``: a method may choose them by what it found.
    course, size = job.paced(side.stages(state), round_), job.training.batch_size
    total = 0
    for step in course:
        if isinstance(step, Stage):
            total += step.epochs * side.way(step).steps(step, len(train_data), size)
    counter, loss, where = _Counter(progress, total), None, f"round {round_} at silo {client!r}"
    for number, stage in enumerate(course):
        with _model_named(method, job, where):
            match stage:
                case Survey():
                    side.survey(stage, modules, train_data)
                case Change(change):
                    # The modules take the values that the change has made.
                    state = change(to_state(modules, state), side.facts)
                    load_values(modules, state, device)
                case Stage():
                    # Each stage has its own stream, so two stages do not draw the same batches.
                    rng = stage_stream(method, job, client, round_, number)
                    draws = stage_stream(method, job, client, round_, number, "draw")
                    own = handed(modules, stage)
                    loss = _trained(
                        side, stage, own, train_data, size, rng, where, cancelled, counter, draws
                    )

    # The step is kept with the state: later deliveries are measured by it.
    trained = side.keep(to_state(modules, state))
    if caution is not None:
        trained = replace(trained, steps=lengthened(held.steps, round_, began, trained.parts))
    # A model that did not move, such as one whose step is the coordinator's, counts as before.
    seen_trained = seen_delivered
    if not _equal(began, trained.parts):
        seen_trained = evaluate(method, modules, test_data, job.counting, rows, ask, note)
    # Either way: that it did not move may depend on records.
    side.evaluated(modules)
    report = RoundReport(
        round_,
        len(train_data),
        seen_delivered,
        seen_trained,
        loss,
        None if private else local_work(method, job, course, modules, len(train_data)),
    )

    contributions, taints, kept_state = side.contribute(trained)
    seen, of_seen = side.metrics(metrics(job, report))
    # A state that the method made lacks the steps, which are the runner's.
    if kept_state is not trained:
        trained = replace(kept_state, steps=trained.steps)
    return RoundOutcome(trained, {**contributions, **seen}, report, taints | of_seen, side.spending)


def _equal(before: Mapping[str, Tensors], after: Mapping[str, Tensors]) -> bool:
    """True if all parts have the same values."""
    found = SiloState(after).flat
    return all(torch.equal(value, found[name]) for name, value in SiloState(before).flat.items())


def local_work(
    method: Method, job: Job, course: Course, modules: Modules, records: int
) -> LocalWork:
    """The work of a silo's course in a plain round of the job."""

    def wraps(stage: Stage) -> bool:
        return batch_coupled(handed(modules, stage))

    return work_of(course, records, job.training.batch_size, wraps, method.measures)


@contextmanager
def _model_named(method: Method, job: Job, where: str) -> Iterator[None]:
    """LocalError where torch cannot do with the layers of a model what the method asks of them.

    Such as a derivative of a derivative, or gradients record by record.
    """
    try:
        yield
    # It is a RuntimeError too, and says more.
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        # The table's models work with every method, so this would be a bug of ours.
        if wanted(job.model) is None:
            raise
        # torch's further lines are for its own developers.
        why = str(error).partition("\n")[0].rstrip(".")
        raise LocalError(
            f"{where}: method {method.name!r} cannot train model {job.model.name!r}: {why};"
            " choose another method or model"
        ) from error


def _trained(
    side: Side,
    stage: Stage,
    modules: Modules,
    data: Dataset,
    batch_size: int,
    rng: np.random.Generator,
    where: str,
    cancelled: Callable[[], bool],
    count: Callable[[], None],
    draws: np.random.Generator,
) -> float:
    """Train the modules that one stage reaches, in place; returns its loss."""
    # DP-SGD adds no noise to running statistics, so a private round must see which moved.
    before = _buffers(modules)
    try:
        loss = train(
            modules, stage, data, batch_size, rng, side.way(stage), cancelled, count, draws
        )
    # The caller tells these two apart by their class, so they pass unchanged.
    except (CancelledError, ExhaustedError):
        raise
    except LocalError as error:
        raise LocalError(f"{where}: {error}") from error
    side.trained(stage, modules, before)
    return loss


def stage_stream(
    method: Method, job: Job, client: str, round_: int, number: int, what: str = "train"
) -> np.random.Generator:
    """The generator that shuffles the batches of one stage of a round, or that dropout draws by.

    It depends on the job's root, the silo, the round and the stage, so a retry draws the same
    batches.
    """
    return stream(job.root, client, method.stream_round(round_), f"{what}/{number}")


def _side(
    method: Method,
    job: Job,
    client: str,
    round_: int,
    data: Dataset,
    way: Stepper,
    private: PrivateSilo | None,
    cancelled: Callable[[], bool],
) -> Side:
    if private is None:
        return ClearRound(method, facts_of(job, client, round_, data), way, cancelled)
    # Opacus takes two seconds to import.
    if job.private.whole_silos:
        from .whole_round import WholeRound  # noqa: PLC0415

        facts = partial(facts_of, job, client, round_, data)
        return WholeRound(method, job, round_, private, facts)
    from .private_round import PrivateRound  # noqa: PLC0415

    return PrivateRound(method, job, client, round_, data, private)


@dataclass(frozen=True)
class Seen:
    """The counts of a silo's delivered model and of its last trained one, on the same records."""

    delivered: Tally
    trained: Tally


@dataclass(frozen=True, eq=False)
class Evaluation:
    """A silo's state after a delivery, and the counts of the new and the old state.

    ``validation`` is None if the split has no such side.
    """

    delivered: SiloState
    test: Seen
    validation: Seen | None = None


@in_memory()
@exact()
def look(
    method: Method,
    job: Job,
    round_: int,
    state: SiloState,
    delivered: Results,
    train_data: Dataset,
    test_data: Dataset,
    client: str,
    validation_data: Dataset | None = None,
    private: PrivateSilo | None = None,
    device: torch.device = CPU,
    cancelled: Callable[[], bool] = never,
    note: Note = unnoted,
) -> Evaluation:
    """Evaluate the model with which round ``round_`` would begin at this silo.

    Nothing is trained, contributed or spent. CancelledError once ``cancelled()`` holds. PeerError
    if the job's schema does not allow the delivery.
    """
    check_private(job, private, device)
    # An evaluation must not cost budget: a private job uses the counts that it has released.
    facts = partial(facts_of, job, client, round_, train_data)
    if private is None:
        fresh = take_delivery(method, job, state, facts(), delivered)
    else:
        from .private_round import (  # noqa: PLC0415 - Opacus takes two seconds to import
            take_private_delivery,
        )

        check_delivered(job, round_, delivered)
        fresh = take_private_delivery(
            method, job, round_, state, delivered, client, private.account, facts
        )

    # One set of modules holds both models, one after the other: GPU memory is not taken twice.
    modules = to_modules(method, client, fresh, device)
    sides = [data for data in (test_data, validation_data) if data is not None]
    seen = partial(evaluate, counting=job.counting, cancelled=cancelled, note=note)
    new = [seen(method, modules, data) for data in sides]
    load_values(modules, state, device)
    old = [seen(method, modules, data) for data in sides]
    return Evaluation(fresh, *map(Seen, new, old))


def final_round(
    method: Method,
    job: Job,
    state: SiloState,
    delivered: Results,
    train_data: Dataset,
    test_data: Dataset,
    client: str,
    trained: bool = True,
    private: PrivateSilo | None = None,
    device: torch.device = CPU,
    cancelled: Callable[[], bool] = never,
    note: Note = unnoted,
) -> RoundOutcome:
    """Take the results of the last round; the outcome's state is what the silo keeps (``kept``).

    The report holds the counts of both models. Nothing is contributed or spent. ``trained`` is
    True if the silo has ever taken part in a round.
    """
    # The results of the last round come down at the start of the round that would follow.
    last = look(
        method,
        job,
        job.length,
        state,
        delivered,
        train_data,
        # A record that cannot be read must not cost the model.
        forgiving(test_data),
        client,
        private=private,
        device=device,
        cancelled=cancelled,
        note=note,
    )
    return RoundOutcome(kept(method, state, last, trained), {}, final_report(job, last))


def kept(method: Method, state: SiloState, last: Evaluation, trained: bool) -> SiloState:
    """The model that a silo keeps after the last round.

    That is the one delivered where the method's product is "delivered", or where this silo never
    trained (``trained`` false) and so has nothing better; otherwise ``state``, the one trained
    last.
    """
    if method.product == "delivered" or not trained:
        return last.delivered
    return state


def final_report(job: Job, last: Evaluation) -> RoundReport:
    """The report of the round after the last, which trains nothing.

    Its round is ``Job.length``, its loss None.
    """
    return RoundReport(job.length, 0, last.test.delivered, last.test.trained, None)


def check_private(job: Job, private: PrivateSilo | None, device: torch.device = CPU) -> None:
    """LocalError unless a private job, and no other, comes with an account that pays for it."""
    # Noise and sums of a private job are computed on the host alone (clipped_sum.py).
    if private is not None and device != CPU:
        raise LocalError(
            f"job {job.name!r} is private and was given to {device}; this is a bug in Staddle"
        )
    if (job.privacy is None) != (private is None):
        lacking = "is not private"
        if private is None:
            lacking = "is private, and no account was given that pays for it"
        raise LocalError(f"job {job.name!r} {lacking}; this is a bug in Staddle")


def take_delivery(
    method: Method, job: Job, state: SiloState, facts: Facts, delivered: Results
) -> SiloState:
    """The state after a delivery; PeerError where the job's schema does not allow the delivery.

    Private jobs use ``private_round.take_private_delivery``, which sets taints.
    """
    check_delivered(job, facts.round, delivered)
    return method.deliver(state, delivered, facts)


def check_delivered(job: Job, round_: int, delivered: Results) -> None:
    """PeerError where the job's schema does not allow this delivery in the round.

    The delivery may lack parts of the schema, but have no others.
    """
    allowed = {part.name: part for part in job.down(round_)}
    for name, tensors in delivered.items():
        if name not in allowed:
            raise PeerError(
                "coordinator",
                f"delivered part {name!r} in round {round_}, the job allows {list(allowed)}",
            )
        check_delivery(allowed[name], tensors)


def check_delivery(part: Part, tensors: Mapping[str, Tensor]) -> None:
    """PeerError unless the tensors are exactly the part's, all finite and within bounds.

    A silo does not trust the coordinator: one delivered NaN would spoil its model.
    """
    wrong: list[str] = []
    # Names, shapes and dtypes first, then values.
    for spec in part.tensors:
        tensor = tensors.get(spec.name)
        if tensor is None or not fits(spec, tensor):
            wrong.append(spec.name)
    # With tensors beyond the schema, a method could use one that nobody has checked.
    if not wrong and len(tensors) != len(part.tensors):
        wrong = sorted(tensors)
    if wrong:
        raise PeerError(
            "coordinator",
            f"delivered part {part.name!r} with tensors that its schema lacks: {wrong}",
        )

    for spec in part.tensors:
        if fault := value_fault(spec, tensors[spec.name]):
            raise PeerError(
                "coordinator", f"delivered part {part.name!r}, whose tensor {spec.name!r} {fault}"
            )


def facts_of(job: Job, client: str, round_: int, data: Dataset) -> Facts:
    """The facts that a method may know about the silo and its training records.

    They are exact; a private job uses ``noisy_facts``.
    """
    # On the host, where ``deliver`` and ``contribute`` compute.
    counts = histogram(job.task, data.y, job.model.width).cpu()
    return Facts(
        client,
        round_,
        len(data),
        counts,
        steps=job.training.steps(len(data)),
        batch_size=min(job.training.batch_size, len(data)),
        lr=job.lr(round_),
    )


def metrics(job: Job, report: RoundReport) -> dict[str, Contribution]:
    """The contributions of a report: METRICS, and the parts that the job's [metrics] table adds.

    They have int64 sums over test records, and neither the loss nor the number of training records.
    """
    return job.counting.contributions(report.delivered, report.trained)


def handed(modules: Modules, stage: Stage) -> Modules:
    """The modules that a stage's loss and penalty may reach.

    They are all modules, or with ``reads`` those that the stage trains or reads. So a private round
    can tell what could reach a trained parameter.
    """
    if stage.reads is None:
        return modules
    return {
        part: module for part, module in modules.items() if part in (*stage.trains, *stage.reads)
    }


def to_modules(
    method: Method, client: str, state: SiloState, device: torch.device = CPU
) -> dict[str, nn.Module]:
    """The silo's modules with copies of the state's values.

    They are on the ``device``. LocalError if state and model do not fit.
    """
    # without values: drawing initial ones takes longer than the rest of this function
    with torch.device("meta"):
        modules = method.modules(client)
    load_values(modules, state, device)
    return modules


def _buffers(modules: Modules) -> dict[str, Tensor]:
    """Copies of all running statistics, by part and name, as they are before a stage.

    Buffers that stand still are not copied.
    """
    copies: dict[str, Tensor] = {}
    for part, module in modules.items():
        still = frozen_names(module)
        for name, buffer in module.named_buffers():
            copies[f"{part}.{name}"] = buffer if name in still else buffer.clone()
    return copies


def load_values(modules: Modules, state: SiloState, device: torch.device = CPU) -> None:
    """Replace the modules' values by copies of the state's; LocalError where they do not fit.

    Each part must have the model's names, shapes and dtypes.
    """
    # Parts without tensors, such as a ``Flatten``, need not be in the state.
    wanted = {part for part, module in modules.items() if module.state_dict()}
    saved = {part for part, held in state.parts.items() if held}
    if wanted != saved:
        raise LocalError(
            f"the saved state has parts {sorted(state.parts)}, the job's model has"
            f" {sorted(modules)}"
        )
    for part, module in modules.items():
        values = state.parts.get(part, {})  # a part may hold no tensors
        _load_part(part, module, values, device)


def _load_part(
    part: str, module: nn.Module, values: Mapping[str, Tensor], device: torch.device
) -> None:
    # With ``assign``, another dtype would silently replace the model's.
    dtypes = {name: own.dtype for name, own in module.state_dict().items()}
    other = [name for name, own in dtypes.items() if name in values and values[name].dtype != own]
    if other:
        raise LocalError(
            f"the saved state of part {part!r} has {other} in another dtype than the job's model"
        )
    copies = {
        # Copies, since training writes in place and must not change the state.
        name: value.detach().to(device, copy=True, memory_format=torch.contiguous_format)
        for name, value in values.items()
    }
    try:
        module.load_state_dict(copies, strict=True, assign=True)
    except RuntimeError as error:
        raise LocalError(
            f"the saved state of part {part!r} does not fit the job's model: {error}"
        ) from error


def to_state(modules: Mapping[str, nn.Module], before: SiloState) -> SiloState:
    """The modules' parameters and buffers as a state on the host.

    On a CPU state and modules share memory, so the modules must not train any further. ``extra`` is
    that of ``before``; the caller adds taints and steps.
    """
    values = {part: module.state_dict() for part, module in modules.items()}
    parts = mapped(values, lambda tensor: tensor.detach().cpu().contiguous())
    return SiloState(parts, before.extra)


def state_to_bytes(state: SiloState, texts: Mapping[str, str] | None = None) -> bytes:
    """One safetensors file with the names of ``SiloState.flat``.

    Its metadata holds the taints in a private job, and the longest steps where they are known, and
    further ``texts``.
    """
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in state.flat.items()}
    metadata = dict(texts or {})
    if state.taints:
        metadata[TAINTS] = taints_to_text(state.taints)
    if state.steps is not None:
        metadata[STEPS] = state.steps.to_text()
    return tensor_file.to_bytes(tensors, metadata)


def state_from_bytes(data: bytes, origin: str = "silo state") -> SiloState:
    """Read what ``state_to_bytes`` wrote; ``origin`` names it in errors.

    LocalError for a file of another form. Only ``load_values`` checks that it fits a model.
    """
    # The file lies on the silo's disk, where another program may have changed it.
    return state_of(*tensor_file.from_bytes(data, origin), origin)


def state_of(flat: Tensors, metadata: Mapping[str, str], origin: str) -> SiloState:
    """The state of a file's tensors, which are named as in ``SiloState.flat``, and its metadata."""
    try:
        taints = taints_from_text(metadata.get(TAINTS, "[]"))
        steps = LongestSteps.from_text(metadata[STEPS]) if STEPS in metadata else None
    except (ValueError, KeyError) as error:
        raise LocalError(
            f"{origin}: not a state file: {error}; restore it from a backup"
        ) from error
    # The inverse of ``SiloState.flat``: only the first two slashes separate.
    parts: dict[str, dict[str, Tensor]] = {}
    extra: dict[str, Tensor] = {}
    for full_name, tensor in flat.items():
        room, _, rest = full_name.partition("/")
        part, slash, name = rest.partition("/")
        if room == "part" and slash:
            parts.setdefault(part, {})[name] = tensor
        elif room == "extra" and rest:
            extra[rest] = tensor
        else:
            raise LocalError(
                f"{origin}: holds a tensor {full_name!r}, which no state has; restore it from a"
                " backup"
            )
    return SiloState(parts, extra, taints, steps)
