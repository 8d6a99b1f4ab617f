"""FedGen: the coordinator trains a generator of features on all heads, and silos learn from it.

Zhu, Hong, Zhou, "Data-free knowledge distillation for heterogeneous federated learning", ICML 2021,
arXiv:2105.10056, Algorithm 1.

A model is an extractor f_k below a head h_k, of C classes. G is the generator with parameters w,
p̂ the shares of the classes, c_k(y) silo k's records of class y, and S the silos of a round. H is
cross-entropy, and ε are numbers drawn at random.

    (1) at silo k, E epochs:  (f_k, h_k) ← SGD of H(h_k(f_k(x)), y)
                                  + α_t Σ_s p̂(s) mean_ε H(h_k(G(ε, s)), s)
                                  + β_t KL(mean_ε softmax h_k(G(ε, y)) ‖ softmax h_k(f_k(x)))
    (2) at the coordinator:   (f, h) ← Σ_{k ∈ S} n_k (f_k, h_k) / Σ_{k ∈ S} n_k
    (3)                       p̂(y) = Σ_{k ∈ S} c_k(y) / Σ_{k ∈ S} n_k
    (4) server_steps times:   w ← Adam of mean over drawn (ε, s), s by p̂, of
                                  Σ_{k ∈ S} v_k(s) H(h_k(G(ε, s)), s), v_k(s) = c_k(s) / Σ_j c_j(s)
                                  + η exp(−mean_{ij} ‖ε_i − ε_j‖² ‖G_i − G_j‖₁)

α_t, β_t and Adam's rate shrink by ``decay`` per round. The left of KL is held constant. Both norms
of (4) are means over the numbers of a vector. In the first round there is no generator yet, and (1)
is plain SGD. G is a linear layer of ε and the class's indicator, batch norm, ReLU, and a linear
layer that has a number for each feature.

Where this differs from the paper:
- β's term, η's term and the v_k are those of the authors' code. With ``teacher = "mean"`` (4) has
  the paper's H(mean_k h_k(G(ε, s)), s) in place of the weighted sum.
- A silo draws ``samples`` vectors ε for each class once per round, and each step takes all of them,
  with p̂ as weights. In paper and code each step draws a batch of ε and classes.
- ε is uniform in 0 … 1, as in the code; the paper writes N(0, I).
- Classes are drawn by p̂, as the paper has it. In the code each class with more than one record is
  as likely as another, and it counts one record more of each class at each silo.
- α_t and β_t have no least value; in the code it is 1e-4.
- Each gradient of (4) is cut to the length ``clip``, so that Adam remembers no one huge head for
  good. Steps after which w or a moment is not finite are not taken: w stays what it was.
- The code has a term against the averaged head in (4), whose weight is 0 in all of its settings. It
  is left out, and so is the variant that averages the head alone.
- The latent layer is where ``model.head`` divides the model. Defaults are those of the code for
  MNIST.

Wire list, the same in every round:

=============  =========  ========================================  ====================
part           way        tensors                                   exchange
=============  =========  ========================================  ====================
``model``      up, down   (f_k, h_k)                                Sum weighted by n_k
``heads``      up         h_k again                                 Each
``counts``     up         c_k [C]                                   Each
``generator``  down       w, and batch norm's running statistics    -
``labels``     down       p̂ [C]                                     -
=============  =========  ========================================  ====================

The coordinator sees each silo's head and its records by class. (4) is no sum of them, so [security]
secure_aggregation = "required" refuses it.

Silos see p̂, and p̂ tells exact counts, up to a common divisor of all. In a round of two, each silo
learns the other's counts by class from p̂ and its own. In a larger round, all silos but one together
learn the last one's. Where the silos of two rounds differ by one, the two p̂ show the counts of that
one. The generator is trained on heads alone, but what it makes may show what the records of a class
have in common. In a private job c_k are the noisy counts, and p̂ tells no more than these.

Adam's moments stay at the coordinator. A silo's model in the end is the one delivered last. One
silo with a huge head can still turn the steps of its own rounds, or stop them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.functional import cross_entropy, one_hot

from ...errors import LocalError, PeerError
from ...files.documents import Strict
from ..course import Facts, Parts, SiloState, Stage
from ..exchange.delivery import LARGEST_STATE, Combined, CoordinatorState, Results
from ..exchange.parts import (
    DTYPES,
    LARGEST_WEIGHT,
    Contribution,
    Each,
    Kind,
    Part,
    Tensors,
    TensorSpec,
    all_finite,
    picked,
)
from ..method import Method, Setting, specs_of_buffers, specs_of_parameters
from ..methods.common.second_model import MODEL
from ..models.build import fill
from ..numerics.streams import stream, uniform

LABELS = "labels"  # p̂ in a silo's ``extra``, next to w
MOMENTS = ("exp_avg", "exp_avg_sq")  # Adam's two, by torch's names, which begin those in the state
STEPS = "steps"  # of Adam so far
MOST_NUMBERS = 2**28  # of one pass of generated features: 1 GiB of float32


class FedGenOptions(Strict):
    """Options of FedGen."""

    alpha: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 10.0
    """α_0, how strongly a silo's head learns the generator's features."""
    beta: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 10.0
    """β_0, how strongly a record's answer is held near those of its class's generated features."""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.98
    """What α_t, β_t and the generator's learning rate are multiplied by in each round."""
    samples: Annotated[int, Field(strict=True, ge=1, le=10_000)] = 16
    """Generated features of each class that a silo takes in a round."""
    noise: Annotated[int, Field(strict=True, ge=1, le=4096)] = 32
    """Numbers of ε."""
    hidden: Annotated[int, Field(strict=True, ge=1, le=4096)] = 256
    """Width of the generator's hidden layer."""
    server_steps: Annotated[int, Field(strict=True, ge=1, le=10_000)] = 50
    """Steps of the generator in each round."""
    server_batch: Annotated[int, Field(strict=True, ge=2, le=10_000)] = 128
    """Generated features of such a step."""
    server_lr: Annotated[float, Field(gt=0, le=1e3, allow_inf_nan=False)] = 3e-4
    """Learning rate of the generator in the first round."""
    weight_decay: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 1e-2
    """Weight decay of the generator."""
    clip: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] = 10.0
    """The greatest length of the generator's gradient."""
    eta: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 1.0
    """η, how strongly generated features are driven apart."""
    teacher: Literal["weighted", "mean"] = "weighted"
    """Whether each head teaches the generator, by its silo's records of a class, or their mean."""


class LatentGenerator(nn.Module):
    """The network G, from ε [B, noise] and classes [B] to features [B, width]."""

    def __init__(
        self, options: FedGenOptions, classes: int, width: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.classes = classes
        self.body = nn.Sequential(
            nn.Linear(options.noise + classes, options.hidden, dtype=dtype),
            nn.BatchNorm1d(options.hidden, dtype=dtype),
            nn.ReLU(),
            nn.Linear(options.hidden, width, dtype=dtype),
        )

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        """Features of these classes."""
        indicators = one_hot(labels, self.classes).to(noise.dtype)
        made: Tensor = self.body(torch.cat((noise, indicators), dim=1))
        return made


class FedGen(Method):
    """FedAvg, whose silos also learn of features that a common generator makes for each class."""

    name = "fedgen"
    version = 1
    needs_classes = "generates features for each class"
    options_model = FedGenOptions
    product = "delivered"
    options: FedGenOptions

    def __init__(self, setting: Setting, options: Strict | None = None) -> None:
        super().__init__(setting, options)
        self.head = setting.sketch()["classifier"].eval()
        first = specs_of_parameters(self.head)[0]
        if len(first.shape) != 2 or next(self.head.buffers(), None) is not None:
            raise LocalError(
                "fedgen needs a classifier that begins with a linear layer and has no buffers; name"
                " Linear layers in model.head, or choose another model"
            )
        self.dtype, self.width = DTYPES[first.dtype], first.shape[1]
        network = self.sketched()
        self.network = (*specs_of_parameters(network), *specs_of_buffers(network))
        counts = TensorSpec("counts", "int64", (setting.outputs,), 0.0, LARGEST_WEIGHT)
        shares = TensorSpec(LABELS, first.dtype, (setting.outputs,), 0.0, 1.0)
        self.model = self.shared("model", Kind.WHOLE_MODEL, *MODEL)
        self.heads = Part("heads", Kind.HEADER_ROWS, Each(), self.flat_specs("classifier"))
        self.counts = Part("counts", Kind.COUNTS, Each(), (counts,))
        self.generator = Part("generator", Kind.PROTOTYPES, Each(), self.network)
        self.labels = Part(LABELS, Kind.COUNTS, Each(), (shares,))
        self._check_size()

    def _check_size(self) -> None:
        # w, and both of Adam's moments
        if (held := 3 * sum(spec.nbytes for spec in self.network)) > LARGEST_STATE:
            raise LocalError(
                f"fedgen: the coordinator would keep {held:,} bytes of a generator and its moments,"
                f" {LARGEST_STATE:,} are the most; lower method.options.hidden, or choose a model"
                " with fewer features"
            )
        own, classes, silos = self.options, self.setting.outputs, self.setting.cohort_size
        # For each generated feature: ε and the class's indicator, the hidden layer, the feature
        # itself, and the answers of one head, or of all heads and distances from all others.
        one = own.noise + classes + own.hidden + self.width
        for option, rows, each in (
            ("samples", classes * own.samples, one + classes),
            ("server_batch", own.server_batch, one + silos * classes + own.server_batch),
        ):
            if (numbers := rows * each) > MOST_NUMBERS:
                raise LocalError(
                    f"fedgen: {rows:,} generated features would take {numbers:,} numbers at once,"
                    f" {MOST_NUMBERS:,} are the most; lower method.options.{option}"
                )

    def up(self, round_: int) -> tuple[Part, ...]:
        """The model, its head for the generator, and the records by class."""
        return (self.model, self.heads, self.counts)

    def down(self, round_: int) -> tuple[Part, ...]:
        """The averaged model, the generator, and the shares of the classes."""
        return (self.model, self.generator, self.labels)

    def sketched(self) -> LatentGenerator:
        """The network G without values."""
        with torch.device("meta"):
            return LatentGenerator(self.options, self.setting.outputs, self.width, self.dtype)

    def filled(self, values: Tensors) -> LatentGenerator:
        """The network G with copies of these values, by the names of the wire."""
        network = self.sketched()
        copies = {spec.name: values[spec.name].clone() for spec in self.network}
        # Batch norm also counts its calls, which nothing here depends on.
        network.load_state_dict(copies, strict=False, assign=True)
        return network

    def draws(
        self, silo: str, round_: int, size: int, times: int = 1
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """So many times ε [size, noise], and [size] numbers in 0 … 1 to draw classes by."""
        rng = stream(self.setting.seed, silo, round_, "fedgen")
        for _ in range(times):
            numbers = torch.from_numpy(uniform(rng, (size, self.options.noise + 1), 0, 1))
            yield numbers[:, 1:].to(self.dtype), numbers[:, 0].contiguous()

    # The silo half. ``extra`` holds w and p̂.

    def initial_extra(self, silo: str) -> dict[str, Tensor]:
        """The initial generator, and equal shares."""
        classes = self.setting.outputs
        shares = torch.full((classes,), 1 / classes, dtype=self.dtype)
        return {**self.initial(), LABELS: shares}

    def initial(self) -> dict[str, Tensor]:
        """The generator's first values."""
        network = self.sketched()
        fill(network, self.setting.seed, "fedgen")
        return picked(self.network, network.state_dict())

    def deliver(self, state: SiloState, delivered: Results, facts: Facts) -> SiloState:
        """Take the model, and remember w and p̂."""
        taken = self.replaced(state, delivered, "model")
        came = {**delivered.get("generator", {}), **delivered.get(LABELS, {})}
        return replace(taken, extra={**state.extra, **came})

    def stages(self, state: SiloState, facts: Facts) -> tuple[Stage, ...]:
        """Eq. 1, from the second round on with what the generator makes."""
        stage = self.stage(*MODEL)
        if not facts.round:
            return (stage,)
        context = self.generated(state, facts)
        return (replace(stage, loss=self.distilled, penalty=self.taught, context=context),)

    def generated(self, state: SiloState, facts: Facts) -> dict[str, Tensor]:
        """Features [C · samples, d], class by class; p̂, α_t and β_t.

        PeerError where the delivered generator and head cannot be used.
        """
        own, classes = self.options, self.setting.outputs
        ((noise, _),) = self.draws(facts.silo, facts.round, classes * own.samples)
        labels = torch.arange(classes).repeat_interleave(own.samples)
        with torch.no_grad():
            features = self.filled(state.extra).eval()(noise, labels)
            answers = functional_call(self.head, dict(state.parts["classifier"]), (features,))
        # Finite numbers can give these. Training would then blame this silo's learning rate.
        if not all(map(all_finite, (features, answers))):
            raise PeerError(
                "coordinator",
                "the delivered generator makes features that are not finite, or to which the"
                " delivered head has no finite answer",
            )
        weights = own.decay**facts.round * torch.tensor([own.alpha, own.beta], dtype=self.dtype)
        alpha, beta = weights.unbind()
        return {"features": features, LABELS: state.extra[LABELS], "alpha": alpha, "beta": beta}

    def distilled(self, parts: Parts, x: Tensor, y: Tensor, context: Tensors) -> Tensor:
        """The task's loss [B], and β_t's term but for a constant."""
        outputs = self.predict(parts, x)
        # No gradient, so that DP-SGD does not take these features for records.
        with torch.no_grad():
            made = parts["classifier"](context["features"]).softmax(-1)
        targets = made.reshape(-1, self.options.samples, made.shape[-1]).mean(1)  # [C, C]
        held = cross_entropy(outputs, targets[y], reduction="none")
        return self.setting.task.losses(outputs, y) + context["beta"] * held

    def taught(self, parameters: Mapping[str, Tensors], context: Tensors) -> Tensor:
        """α_t's term."""
        head = dict(parameters["classifier"])
        made = functional_call(self.head, head, (context["features"],)).log_softmax(-1)
        by_class = made.reshape(-1, self.options.samples, made.shape[-1])  # [C, samples, C]
        right = by_class.diagonal(dim1=0, dim2=2)  # [samples, C]
        loss: Tensor = -context["alpha"] * (context[LABELS] * right.mean(0)).sum()
        return loss

    def contribute(self, state: SiloState, facts: Facts) -> dict[str, Contribution]:
        """The model, its head, and the records by class."""
        # No file of tensors takes the same memory twice.
        heads = {name: value.clone() for name, value in self.flat(state, "classifier").items()}
        return {
            "model": Contribution(self.flat(state, *MODEL), float(facts.samples)),
            "heads": Contribution(heads),
            "counts": Contribution({"counts": facts.class_counts}),
        }

    # The coordinator half. Its state is w, and what Adam remembers of each parameter.

    def begin(self) -> CoordinatorState:
        """The initial generator, before any step."""
        network = self.initial()
        moments: dict[str, Tensor] = {}
        for spec in specs_of_parameters(self.sketched()):
            moments |= {
                f"{key}/{spec.name}": torch.zeros_like(network[spec.name]) for key in MOMENTS
            }
        return {**network, **moments, STEPS: torch.zeros(())}

    def combine(
        self, state: CoordinatorState, round_: int, cohort: tuple[str, ...], results: Results
    ) -> Combined:
        """Eqs. 2 to 4."""
        published = super().combine(state, round_, cohort, results).published  # (2)
        counts = results["counts"]["counts"].double()  # [K, C]
        # Noisy counts may all be zero.
        shares = counts.sum(0) / counts.sum().clamp(min=1)  # (3)
        after = self.stepped(state, round_, shares, partial(self.losses, results["heads"], counts))
        made = {
            "generator": picked(self.network, after),
            LABELS: {LABELS: shares.to(self.dtype)},
        }
        return Combined(after, {**published, **made})

    def stepped(
        self, state: CoordinatorState, round_: int, shares: Tensor, losses: Callable[..., Tensor]
    ) -> dict[str, Tensor]:
        """The state after the steps of Eq. 4, of ``losses`` [B] of features [B, d] and classes.

        It is the state before if a number would not be finite.
        """
        own, network = self.options, self.filled(state)
        rate, named = own.server_lr * own.decay**round_, dict(network.named_parameters())
        optimiser = torch.optim.Adam(named.values(), lr=rate, weight_decay=own.weight_decay)
        # Adam continues where the last round left it.
        for name, parameter in named.items():
            kept = {key: state[f"{key}/{name}"].clone() for key in MOMENTS}
            optimiser.state[parameter] = {"step": state[STEPS].clone(), **kept}

        # Drawn step by step, so that only one batch lies in memory.
        for epsilon, chances in self.draws("", round_, own.server_batch, own.server_steps):
            # Of shares that are all zero, the last class is drawn.
            drawn = torch.searchsorted(shares.cumsum(0), chances, right=True)
            chosen = drawn.clamp(max=len(shares) - 1)
            with torch.enable_grad():
                features = network(epsilon, chosen)
                loss = losses(features, chosen).mean() + own.eta * closeness(epsilon, features)
                optimiser.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(named.values(), own.clip)
            optimiser.step()

        after = picked(self.network, {k: v.detach() for k, v in network.state_dict().items()})
        for name, parameter in named.items():
            after |= {f"{key}/{name}": optimiser.state[parameter][key] for key in MOMENTS}
        after[STEPS] = state[STEPS] + own.server_steps
        # A head of huge numbers must not stop the job, nor the generator for good.
        return after if all(map(all_finite, after.values())) else dict(state)

    def losses(self, heads: Tensors, counts: Tensor, features: Tensor, labels: Tensor) -> Tensor:
        """The loss [B] of features [B, d] by the heads [K, …] of silos with these counts [K, C]."""
        named = {name.partition(".")[2]: values for name, values in heads.items()}

        def answered(head: dict[str, Tensor]) -> Tensor:
            scores: Tensor = functional_call(self.head, head, (features,))
            return scores

        scores = vmap(answered)(named)  # [K, B, C]
        if self.options.teacher == "mean":
            return cross_entropy(scores.mean(0), labels, reduction="none")
        weights = counts / counts.sum(0).clamp(min=1)  # v_k(s)
        right = scores.log_softmax(-1)[:, torch.arange(len(labels)), labels]  # [K, B]
        return -(weights[:, labels].to(right.dtype) * right).sum(0)


def closeness(noise: Tensor, features: Tensor) -> Tensor:
    """η's term of Eq. 4, of ε [B, noise] and the features [B, d] that they gave."""
    apart = torch.cdist(features, features, p=1) / features.shape[1]
    # Products of matrices would round what lies close together.
    between = torch.cdist(noise, noise, compute_mode="donot_use_mm_for_euclid_dist")
    return (-between.square() / noise.shape[1] * apart).mean().exp()
