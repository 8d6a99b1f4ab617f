"""One silo's round: deliver, train, give. The simulator and the silo agent run this same function.

So a federation gives bit for bit what its simulation gave, on one machine type at one thread.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import ceil

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from ..errors import CancelledError, LocalError, PeerError
from .data import Dataset
from .exchange import Gift, Part, fits, value_fault
from .job import Job
from .method import METRICS, Facts, Method, Results, SiloState
from .streams import stream
from .training import PLAIN, Way, evaluate, measure, never, silent, train


@dataclass(frozen=True)
class Report:
    """What one silo saw in one round; it stays at the silo but for the counts that METRICS adds up."""

    round: int
    samples: int  # training records; 0 in the final round, which trains nothing
    tested: int
    correct_delivered: int
    correct_trained: int
    loss: float | None  # mean training loss of the last stage's last epoch


@dataclass(frozen=True)
class Outcome:
    """The silo's next state, its gifts by part (METRICS included) and its report."""

    state: SiloState
    gifts: Mapping[str, Gift]
    report: Report


@dataclass
class _Counter:
    """Counts batches for a progress display."""

    show: Callable[[int, int], None]
    total: int
    done: int = field(default=0)

    def __call__(self) -> None:
        self.done += 1
        self.show(self.done, self.total)


def local_round(
    method: Method,
    job: Job,
    state: SiloState,
    round_: int,
    delivered: Results,
    train_data: Dataset,
    test_data: Dataset,
    client: str,
    way: Way = PLAIN,
    cancelled: Callable[[], bool] = never,
    progress: Callable[[int, int], None] = silent,
) -> Outcome:
    """Run round ``round_`` of silo ``client`` from ``state``; nothing given is changed."""
    facts = facts_of(job, client, round_, train_data)
    state = take_delivery(method, job, state, facts, delivered)
    modules = to_modules(method, client, state)
    correct_delivered = evaluate(method, modules, test_data)
    facts = replace(facts, measured=measure(method, modules, train_data))
    stages = method.stages(state, facts)
    total = sum(stage.epochs * (1 if stage.full_batch else ceil(len(train_data) / job.batch_size)) for stage in stages)
    counter, loss = _Counter(progress, total), None
    for number, stage in enumerate(stages):
        rng = stream(job.seed, client, method.stream_round(round_), f"train/{number}")
        try:
            loss = train(modules, stage, train_data, job.batch_size, rng, way, cancelled, counter)
        except CancelledError:
            raise
        except LocalError as error:
            raise LocalError(f"round {round_} at silo {client!r}: {error}") from error
    trained = to_state(modules, state)
    correct_trained = evaluate(method, modules, test_data)
    report = Report(round_, len(train_data), len(test_data), correct_delivered, correct_trained, loss)
    gifts = {**method.give(trained, facts), METRICS.name: metrics(report)}
    return Outcome(trained, gifts, report)


def final_round(
    method: Method,
    job: Job,
    state: SiloState,
    delivered: Results,
    train_data: Dataset,
    test_data: Dataset,
    client: str,
    trained: bool = True,
) -> Outcome:
    """Take the results of the last round; the outcome's state is the model that the silo keeps.

    That is the one delivered where the method's product is "delivered", or where this silo never trained
    (``trained`` false) and so has nothing better; otherwise the one trained last. The report holds the accuracy of
    both. Nothing is given.
    """
    fresh = take_delivery(method, job, state, facts_of(job, client, job.length, train_data), delivered)
    correct_delivered = evaluate(method, to_modules(method, client, fresh), test_data)
    correct_trained = evaluate(method, to_modules(method, client, state), test_data)
    kept = fresh if method.product == "delivered" or not trained else state
    return Outcome(kept, {}, Report(job.length, 0, len(test_data), correct_delivered, correct_trained, None))


def take_delivery(method: Method, job: Job, state: SiloState, facts: Facts, delivered: Results) -> SiloState:
    """State after what came down; PeerError where it is not what the job's schema lets come down in this round."""
    allowed = {part.name: part for part in job.down(facts.round)}
    for name, tensors in delivered.items():
        if name not in allowed:
            raise PeerError(
                "coordinator", f"delivered part {name!r} in round {facts.round}, the job allows {list(allowed)}"
            )
        check_delivery(allowed[name], tensors)
    return method.deliver(state, delivered, facts)


def check_delivery(part: Part, tensors: Mapping[str, Tensor]) -> None:
    """PeerError unless the tensors are exactly those of the part, all finite and within their bounds."""
    wrong = [spec.name for spec in part.tensors if spec.name not in tensors or not fits(spec, tensors[spec.name])]
    if wrong or len(tensors) != len(part.tensors):
        wrong = wrong or sorted(tensors)
        raise PeerError("coordinator", f"delivered part {part.name!r} with tensors that its schema lacks: {wrong}")
    for spec in part.tensors:
        if fault := value_fault(spec, tensors[spec.name]):
            raise PeerError("coordinator", f"delivered part {part.name!r}, whose tensor {spec.name!r} {fault}")


def facts_of(job: Job, client: str, round_: int, data: Dataset) -> Facts:
    """What a method may know of the silo and its training records."""
    return Facts(client, round_, len(data), torch.bincount(data.y, minlength=job.model.classes))


def metrics(report: Report) -> Gift:
    """The METRICS gift of a report."""
    counts = {
        "correct.delivered": report.correct_delivered,
        "correct.trained": report.correct_trained,
        "tested": report.tested,
    }
    return Gift({name: torch.tensor(count, dtype=torch.int64) for name, count in counts.items()})


def to_modules(method: Method, client: str, state: SiloState) -> dict[str, nn.Module]:
    """The silo's modules with copies of the state's values; LocalError where state and model do not fit."""
    modules = method.modules(client)
    if {part for part, m in modules.items() if m.state_dict()} != {part for part, held in state.parts.items() if held}:
        raise LocalError(f"the saved state has parts {sorted(state.parts)}, the job's model has {sorted(modules)}")
    for part, module in modules.items():
        try:
            module.load_state_dict(dict(state.parts.get(part, {})), strict=True)  # a part may hold no tensors
        except RuntimeError as error:
            raise LocalError(f"the saved state of part {part!r} does not fit the job's model: {error}") from error
    return modules


def to_state(modules: Mapping[str, nn.Module], before: SiloState) -> SiloState:
    """State that takes over the modules' parameters and buffers; the modules must not train on."""
    parts = {part: {k: v.detach() for k, v in m.state_dict().items()} for part, m in modules.items()}
    return SiloState(parts, before.extra)


def state_to_bytes(state: SiloState) -> bytes:
    """One safetensors file with the names ``part/<part>/<tensor>`` and ``extra/<tensor>``."""
    flat = {f"part/{part}/{name}": t for part, tensors in state.parts.items() for name, t in tensors.items()}
    flat |= {f"extra/{name}": t for name, t in state.extra.items()}
    return bytes(save({name: tensor.detach().clone().contiguous() for name, tensor in flat.items()}))


def state_from_bytes(data: bytes, origin: str = "silo state") -> SiloState:
    """Read what ``state_to_bytes`` wrote; ``origin`` names it in errors."""
    try:
        flat = load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise LocalError(f"{origin}: not a state file: {error}; restore it from a backup") from error
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
            raise LocalError(f"{origin}: holds a tensor {full_name!r}, which no state has; restore it from a backup")
    return SiloState(parts, extra)
