"""FedAIMS: a shared backbone whose middle blocks are supervised too, under personal heads.

Li, Liu, Zhou, Dong, "FedAIMS: adaptive intermediate supervision for personalized federated
learning", Frontiers of Computer Science, 2025, Algorithms 1 and 2.

Silo i has a backbone φ_i of m blocks (the ``extractor``) with features φ_i^j(x) [d_j], j = 1…m, a
head ψ_i (the ``classifier``) and adapters σ_i^j: R^D → R^{d_j}, j < m, two-layer perceptrons; D =
d_m. Numbers are the paper's:

    (3)  C_{i,k} = Σ_{y=k} φ^m(x) / n_ik               last block, received backbone, before
                                                       training (Alg. 1 line 9)
    (4)  C_{g,k} = Σ_i p_i C_{i,k}
    (5)  R_i^m = Σ_{(x,y)} ‖C_{g,y} - φ_i^m(x)‖²
    (6)  F_i   = L_CE^m + μ R_i^m
               main task
    (7)  A_i^j = L_CE^j + μ R_i^j
         auxiliary task
    (8)  R_i^j = Σ_{(x,y)} ‖σ_i^j(C_{g,y}) - φ_i^j(x)‖²,   j < m
    (11) δ_{i,k} = Σ_{j ∈ G_k} cos(φ_i, φ_j) / |G_k|
        for Algorithm 2
    (12) Φ_i   = λ F_i + (1 - λ) A_i^b,   λ = 1/m,   b = b_i the block that silo i supervises in
                                                     this round
    (2)  Φ_i   = (1/m) F_i + (1/m) Σ_{j<m} A_i^j
               full supervision

    φ ← Σ_{i in the cohort} p_i φ_i, p_i = n_i / Σ n                                (Alg. 1 line 15)

Readings, where the paper leaves a choice:
- L_CE^j of a middle block is nowhere defined. ``aux_ce = "model"``, the default, takes the model's
  own cross-entropy: Algorithm 1 trains θ_i and the adapter alone (lines 11 and 12), and Table 8
  counts the adapters as all that is stored besides. "head" is a private linear head on φ^j(x) (deep
  supervision); "prototype" has the logits -‖σ^j(C_{g,k}) - φ^j(x)‖² over the classes with a
  prototype; "none" leaves the term out. Neither heads nor adapters leave a silo or take part in a
  prediction.
- Eq. 4 is undefined where a silo lacks a class. Weights are renormalised class by class over the
  cohort. So are those of line 15.
- Eq. 2 leaves α_j open: 1/m for all.
- A class that no silo of the last cohort holds has no prototype, in round 0 no class has: R leaves
  its samples out and counts them as zero; λ stays. The prototypes of round t describe φ^{t-1}, as
  in Algorithm 1.
- Line 17 of Algorithm 1 has φ_i^t, which line 8 made equal; φ_i^{t+1} is meant. Pairs never trained
  together count as 0.
- Adapters have a ReLU and 64 hidden units (the text states neither; 64 gives the sizes of Table 8).
- Adapter and head of a block that is not supervised stay as they are, without weight decay.
- The learning rate decays by 0.99, which the job says: ``training.schedule``
  (algorithms/job/lr_schedule.py).

Deviations, each of which an option takes back:
- ``prototype_weights = "class_count"``: Eq. 4 by n_ik, which makes it the mean over a class's
  records; "paper_p", the paper's, by p_i.
- ``reduction = "mean"``: R is the mean over batch and features, since with μ = 1 the sum of Eqs. 5
  and 8 outweighs everything; "sum", the paper's, sums over both, batch by batch.
- ``similarity = "update"``: cos is of φ_i^{t+1} - φ^t. The paper's, of "raw" weights, hardly
  differs between pairs: all start from one backbone.

For security:
- ``sampling = "balanced"``, the default, deals out blocks at random from a stream that all know, so
  nothing leaves a silo for it; groups differ by at most one, the larger ones at deeper blocks.
  "algorithm2" is the paper's clustering and needs cosines between backbones; "full" supervises all
  middle blocks (Eq. 2).
- Both ways deal to the silos that are drawn, before anybody knows who comes: a drawn silo that
  stays away leaves groups that may differ by more than one. Where fewer are drawn than there are
  middle blocks, the shallowest are supervised by nobody, in no round. That is allowed: Algorithm 2
  prefers deep blocks too, and each silo still has its own block.
- ``sketch``: a count-sketch of the direction crosses, since all of it would double the upload. In
  the clear its map is public, one per job (algorithms/exchange/count_sketch.py); blind it is
  secret, another one each round (security/blind/rotated_sketch.py). Over the maps a cosine c is c
  on average with a standard deviation of √((1 + c²) / sketch) at most: for 256 numbers, |φ| =
  74,880 and 1,000 random pairs it was off by .049 on average and .24 at most at a cosine of 0, .051
  and .25 at 0.3. Cosines of "raw" weights differ by about as much: take ``sketch = 0`` with them.

Wire list:

==========  ====  ==========================================  ======================================
part        way   tensors                                     exchange
==========  ====  ==========================================  ======================================
backbone    both  φ                                           Sum, weighted by samples
prototypes  both  ``mean`` [C, D]; zeros for a class without  Sum, class by class
direction   up    "algorithm2" only, in one of                Gram, of sketches [1, sketch]; whole
                  ``update_gap`` rounds: unit vector of the   for ``sketch`` = 0 and for |φ| ≤
                  update or of φ [1, |φ|]                     sketch
block       down  "algorithm2" only: b_i                      -
==========  ====  ==========================================  ======================================

In the clear, the weights of ``prototypes`` tell the coordinator a silo's class counts, for
"paper_p" its classes. A silo's model in the end is the one it trained last. Under differential
privacy the backbone, the head and what belongs to the supervised blocks are cut and noised
together, since the backbone's gradients pass through all of them. The sums of Eq. 3 have noise of
their own in every round, and are divided by the noisy class counts of the job; a class that seems
absent there has no prototype.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import one_hot

from ....errors import LocalError, PeerError
from ....files.documents import Strict
from ...course import Aligned, Effort, Facts, Parts, SiloState, Stage
from ...exchange.delivery import Combined, CoordinatorState, Delivery, Latest, Results, Value
from ...exchange.parts import (
    DTYPES,
    Contribution,
    Gram,
    Kind,
    Part,
    Sum,
    Tensors,
    TensorSpec,
    elements_of,
)
from ...method import Method, Setting, specs_of_parameters
from ...models.build import fill
from ...models.networks.resnet import Blocks
from ...numerics.streams import Seed, permutation, stream


def balanced(cohort: Sequence[str], middle: int, seed: Seed, round_: int) -> dict[str, int]:
    """A block 1 … ``middle`` per silo, dealt from the deepest on to silos in random order.

    Everybody can repeat the draw, so no block needs to be delivered.
    """
    order = permutation(stream(seed, "", round_, "fedaims/blocks"), len(cohort)).tolist()
    # From the deepest block on: if silos do not divide evenly, deeper blocks have one more.
    return {cohort[i]: middle - place % middle for place, i in enumerate(order)}


def supervision_sampling(similarity: Tensor, middle: int) -> list[int]:
    """Algorithm 2: a block 1 … ``middle`` for each silo of a cohort, from their cosines [n, n].

    In order, each silo joins that one of the smallest groups to which it is least similar; ties go
    to the earlier.
    """
    cosines: list[list[float]] = similarity.tolist()
    groups: list[list[int]] = [[] for _ in range(middle)]
    for i, row in enumerate(cosines):
        smallest = min(map(len, groups))  # the constraint of Eq. 10
        # (11), 0 for an empty group
        added = [sum(row[j] for j in group) / max(len(group), 1) for group in groups]
        candidates = [k for k in range(middle) if len(groups[k]) == smallest]
        groups[min(candidates, key=added.__getitem__)].append(i)
    # Algorithm 2 sorts the groups, so that deeper blocks are supervised by more silos.
    groups.sort(key=len)
    block_of = {i: block for block, group in enumerate(groups, start=1) for i in group}
    return [block_of[i] for i in range(len(cosines))]


# The text names no width; 64 gives the adapter sizes of Table 8.
ADAPTER_WIDTH = 64
# A backbone that did not move has no direction; its norm is raised to this, and divides.
SMALLEST_NORM = 1e-12


class FedAIMSOptions(Strict):
    """Options of FedAIMS."""

    sampling: Literal["balanced", "algorithm2", "full"] = "balanced"
    """The middle blocks that a silo supervises; the paper's "algorithm2" compares silos."""
    similarity: Literal["update", "raw"] = "update"
    """The vectors that Algorithm 2 compares; the paper's "raw" hardly tells silos apart."""
    update_gap: Annotated[int, Field(strict=True, ge=1, le=100_000)] = 1
    """Rounds from one comparison of Algorithm 2 to the next, from round 0 on; the paper's is 1."""
    sketch: Annotated[int, Field(strict=True, ge=0, le=65_536)] = 256
    """Numbers that stand for a direction in Algorithm 2; 0, the paper's, doubles the upload."""
    aux_ce: Literal["model", "head", "prototype", "none"] = "model"
    """L_CE^j of a middle block, which the paper leaves open; "model" is the model's own."""
    mu: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 1.0
    """μ of Eqs. 6 and 7, 1 in the paper."""
    main_weight: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    """λ of Eq. 12; left out 1/m, the paper's."""
    reduction: Literal["mean", "sum"] = "mean"
    """Reduction of Eqs. 5 and 8; the paper's "sum" outweighs the cross-entropy at μ = 1."""
    prototype_weights: Literal["class_count", "paper_p"] = "class_count"
    """Weights of Eq. 4; by the paper's "paper_p" it is not the mean over a class's records."""


class FedAIMS(Method):
    """A shared backbone whose middle blocks are supervised too."""

    name = "fedaims"
    version = 2
    needs_classes = "averages features class by class"
    options_model = FedAIMSOptions
    published = MappingProxyType(
        {
            "sampling": "algorithm2",
            "similarity": "raw",
            "sketch": 0,
            "reduction": "sum",
            "prototype_weights": "paper_p",
        }
    )
    options: FedAIMSOptions
    addressed = ("block",)

    def __init__(self, setting: Setting, options: Strict | None = None) -> None:
        super().__init__(setting, options)
        # Only ``Blocks`` can return the features of each block.
        extractor = setting.sketch()["extractor"]
        if not isinstance(extractor, Blocks):
            raise LocalError(
                "method 'fedaims' supervises the blocks of a model, and the job's model has none;"
                " choose model.name = 'convnet-3x64', 'convnet-4x128', 'resnet18' or"
                " 'convnet-digits'"
            )
        self.widths = extractor.widths  # d_1 … d_m
        self.middle = len(self.widths) - 1  # m - 1
        self.clusters = self.options.sampling == "algorithm2"
        if self.options.update_gap > 1 and not self.clusters:
            raise LocalError(
                f"fedaims: update_gap = {self.options.update_gap} does nothing, because only"
                ' Algorithm 2 compares silos; take it out, or write sampling = "algorithm2"'
            )
        # λ of Eq. 12 multiplies the main task: 1/m, literally as in the paper.
        self.main_weight = 1 / len(self.widths)
        if self.options.main_weight is not None:
            self.main_weight = self.options.main_weight
        # D = d_m: prototypes are of the last block's features.
        rows = (setting.outputs, self.widths[-1])
        # Running statistics are not compared, whatever else the backbone holds.
        self.compared = specs_of_parameters(extractor)
        length = elements_of(self.compared)
        self.backbone = self.shared("backbone", Kind.BACKBONE, "extractor")
        mean = TensorSpec("mean", self.compared[0].dtype, rows)
        self.prototypes = Part("prototypes", Kind.PROTOTYPES, Sum("ratio"), (mean,))
        kind, gram, unit = Kind.BACKBONE, Gram(), TensorSpec("unit", "float32", (1, length))
        # A sketch as long as the vector would save nothing.
        if 0 < self.options.sketch < length:
            kind, gram = Kind.SKETCH, Gram(self.options.sketch, setting.seed)
            unit = TensorSpec("sketch", "float64", (1, length))
        self.direction = Part("direction", kind, gram, (unit,))
        self.block = Part("block", Kind.COUNTS, Sum("total"), (TensorSpec("block", "int64", ()),))

    def compares(self, round_: int) -> bool:
        """True in the rounds of Algorithm 2 after which the matrix of cosines changes."""
        return self.clusters and round_ % self.options.update_gap == 0

    def up(self, round_: int) -> tuple[Part, ...]:
        """Backbone and prototypes; for Algorithm 2 also the compared direction.

        The direction is [1, |φ|], which the exchange may sketch. With ``update_gap`` most rounds
        have none.
        """
        shared = (self.backbone, self.prototypes)
        return (*shared, self.direction) if self.compares(round_) else shared

    def down(self, round_: int) -> tuple[Part, ...]:
        """Backbone and prototypes; for Algorithm 2 also the silo's block, where a round trains."""
        shared = (self.backbone, self.prototypes)
        return (*shared, self.block) if self.clusters else shared

    # The silo half. ``extra`` holds the global prototypes and, for Algorithm 2, the block and the
    # received backbone.

    def modules(self, silo: str) -> dict[str, nn.Module]:
        """The model, and the private ``adapter<j>`` and any ``head<j>`` of each middle block j."""
        parts = self.setting.build()
        for j, width in enumerate(self.widths[:-1], start=1):
            # An adapter takes prototypes from the last block's width D to block j's width.
            layers = OrderedDict(
                inner=nn.Linear(self.widths[-1], ADAPTER_WIDTH),
                relu=nn.ReLU(),
                outer=nn.Linear(ADAPTER_WIDTH, width),
            )
            parts[f"adapter{j}"] = nn.Sequential(layers)
            if self.options.aux_ce == "head":
                parts[f"head{j}"] = nn.Linear(width, self.setting.outputs)
        # The job's own parts have their values already.
        for name, module in parts.items():
            if name not in self.template:
                fill(module, self.setting.seed, f"fedaims/{name}")
        return parts

    def initial_extra(self, silo: str) -> dict[str, Tensor]:
        """No prototype, no block."""
        # A row of zeros means that the class has no prototype (``objective``).
        extra = {"prototypes": torch.zeros(self.prototypes.tensors[0].shape)}
        if self.clusters:
            extra["block"] = torch.tensor(0)
        return extra

    def deliver(self, state: SiloState, delivered: Results, facts: Facts) -> SiloState:
        """Lines 7 and 8 of Algorithm 1: φ_i ← φ; C_g and b_i into ``extra``."""
        taken = self.replaced(state, delivered, "backbone")
        extra = dict(state.extra)
        if "prototypes" in delivered:
            # Classes that nobody held in the last round have zeros here, so they are unknown.
            extra["prototypes"] = delivered["prototypes"]["mean"]
        if not self.clusters:
            return SiloState(taken.parts, extra)

        # Reset in each round, so that no old block passes for this round's.
        extra["block"] = torch.tensor(0)
        if "block" in delivered:
            extra["block"] = delivered["block"]["block"]
        if self.options.similarity == "update":
            # "update" compares how far training moves φ, so its start is kept.
            extra["received"] = self.vector(taken)
        return SiloState(taken.parts, extra)

    def effort(self, round_: int) -> Effort:
        """The job's epochs, and the sums of features."""
        return Effort(epochs=self.setting.epochs, measures=True)

    @property
    def private_fault(self) -> str:
        """Eqs. 5 and 8 summed over a batch scale a record's gradient by the others."""
        if self.options.reduction == "sum":
            return 'reduction = "sum" lets a record move the gradients of others; take it out'
        return ""

    def measure(self, parts: Parts, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Sums of the last block's features by class: the numerator of Eq. 3.

        They are {"sums": [C, D]} in float64; ``contribute`` divides them by the class counts.
        """
        # Line 9 of Algorithm 1: by the received backbone, before training.
        member = one_hot(y, self.setting.outputs).double()  # [B, C]
        return {"sums": member.T @ parts["extractor"](x).double()}

    def supervised(self, state: SiloState, facts: Facts) -> tuple[int, ...]:
        """The middle blocks that this silo supervises in this round, counted from 1."""
        match self.options.sampling:
            case "full":
                return tuple(range(1, self.middle + 1))
            case "balanced":
                # The same draw as at every other machine, so no delivery is needed.
                cohort = self.setting.drawn(facts.round)
                if facts.silo not in cohort:
                    raise LocalError(
                        f"round {facts.round}: silo {facts.silo!r} was not drawn, it has no block"
                    )
                return (balanced(cohort, self.middle, self.setting.seed, facts.round)[facts.silo],)
            # Algorithm 2 runs at the coordinator, so the delivered block is checked.
            case _:
                block = int(state.extra["block"])
                if not 1 <= block <= self.middle:
                    raise PeerError(
                        "coordinator", f"delivered block {block}, the model has 1 to {self.middle}"
                    )
                return (block,)

    def stages(self, state: SiloState, facts: Facts) -> tuple[Stage, ...]:
        """Lines 11 and 12 of Algorithm 1: backbone, head and supervised blocks in one stage."""
        blocks = self.supervised(state, facts)
        # Without a global prototype, as in round 0, no loss reaches an adapter.
        known = bool(state.extra["prototypes"].any())
        trains = ["extractor", "classifier"]
        if known and (self.options.mu > 0 or self.options.aux_ce == "prototype"):
            trains += [f"adapter{j}" for j in blocks]
        if self.options.aux_ce == "head":
            trains += [f"head{j}" for j in blocks]
        stage = Stage(
            tuple(trains),
            self.setting.epochs,
            partial(self.objective, blocks),
            self.setting.optimiser,
            # In the context, so that silos that train at once each have their own.
            context={"prototypes": state.extra["prototypes"]},
            # With "sum" a record's loss depends on the size of its batch (``distance``).
            coupled=self.options.reduction == "sum",
        )
        # Adapters of one shape can stand in one another's place where silos train at once.
        if len(blocks) == 1 and len(set(self.widths[:-1])) == 1:
            stage = replace(stage, aligned=self.aligned(blocks[0]))
        return (stage,)

    def aligned(self, block: int) -> Aligned:
        """The stage of a silo that supervises this block, without the block's number."""
        names = {"adapter": f"adapter{block}"}
        if self.options.aux_ce == "head":
            names["head"] = f"head{block}"
        own = torch.arange(1, self.middle + 1) == block
        return Aligned(names, self.aligned_objective, {"block": own})

    def objective(
        self, blocks: tuple[int, ...], parts: Parts, x: Tensor, y: Tensor, context: Tensors
    ) -> Tensor:
        """Φ_i by sample [B].

        ``context["prototypes"]`` is C_g [C, D], with zeros for unknown classes.
        """
        features = self.features(parts, x)
        supervised = [(features[j - 1], f"{j}") for j in blocks]
        return self.supervision(supervised, features[-1], parts, y, context)

    def aligned_objective(self, parts: Parts, x: Tensor, y: Tensor, context: Tensors) -> Tensor:
        """``objective`` for one block, that of ``context["block"]`` [m - 1].

        All middle blocks have features of one width.
        """
        *middle, last = self.features(parts, x)
        # The others become zeros, so this is the block's own feature bit by bit.
        own = torch.where(context["block"][:, None], torch.stack(middle, 1), 0).sum(1)  # [B, d]
        return self.supervision([(own, "")], last, parts, y, context)

    def features(self, parts: Parts, x: Tensor) -> Sequence[Tensor]:
        """φ^j(x) [B, d_j] of each block."""
        # One pass returns all blocks' features side by side.
        return torch.split(parts["extractor"](x, True), list(self.widths), dim=1)

    def supervision(
        self,
        supervised: Sequence[tuple[Tensor, str]],
        last: Tensor,
        parts: Parts,
        y: Tensor,
        context: Tensors,
    ) -> Tensor:
        """Φ_i by sample [B] from the features of the supervised blocks and of the last one.

        Adapters and heads have the text that goes with the feature at the end of their names.
        """
        prototypes = context["prototypes"]  # [C, D]
        known = (prototypes != 0).any(1)  # [C]
        target, has = prototypes[y], known[y]  # [B, D], [B]
        own = self.setting.task.losses(parts["classifier"](last), y)  # L_CE of the model
        # Records of a class without a prototype have R = 0.
        main = own + self.options.mu * self.distance(target, last) * has  # (5), (6)
        auxiliary = torch.zeros_like(main)
        for feature, number in supervised:
            adapter = parts[f"adapter{number}"]
            regulariser = self.distance(adapter(target), feature) * has  # (8)
            auxiliary = auxiliary + self.options.mu * regulariser  # (7)
            if self.options.aux_ce == "model":
                auxiliary = auxiliary + own  # (7)
            elif self.options.aux_ce == "head":
                logits = parts[f"head{number}"](feature)
                auxiliary = auxiliary + self.setting.task.losses(logits, y)  # (7)
            elif self.options.aux_ce == "prototype":
                nearest = prototype_cross_entropy(adapter, prototypes, known, feature, y)
                auxiliary = auxiliary + nearest  # (7)
        # The supervised blocks share 1 − λ, so this is (12) for one block and (2) for all.
        # (12), (2)
        return self.main_weight * main + (1 - self.main_weight) / len(supervised) * auxiliary

    def distance(self, one: Tensor, other: Tensor) -> Tensor:
        """Squared distances [B] of rows [B, d], whose mean over the batch is R of Eqs. 5 and 8.

        With "mean" they are means over the d features, with "sum" sums times B.
        """
        squares = (one - other).square()
        if self.options.reduction == "mean":
            return squares.mean(1)
        # The runner takes the mean over the batch; times B that is the paper's sum.
        return squares.sum(1) * len(squares)

    def contribute(self, state: SiloState, facts: Facts) -> dict[str, Contribution]:
        """Line 13 of Algorithm 1: the trained backbone, and the prototypes from before training."""
        # In a private job both are noisy.
        sums, counts = facts.measured["sums"], facts.class_counts.double()
        # (3); sums may have noise
        mean = torch.where(counts[:, None] > 0, sums / counts.clamp(min=1)[:, None], 0)
        # Eq. 4 is undefined where a silo lacks a class; such a silo has weight 0 there.
        weight = (counts > 0) * float(facts.samples)
        if self.options.prototype_weights == "class_count":
            weight = counts
        (spec,) = self.prototypes.tensors
        contributions = {
            "backbone": Contribution(self.flat(state, "extractor"), float(facts.samples)),
            "prototypes": Contribution({spec.name: mean.to(DTYPES[spec.dtype])}, weight.double()),
        }
        if self.compares(facts.round):
            vector = self.vector(state).double()
            if self.options.similarity == "update":
                vector = vector - state.extra["received"].double()  # φ_i^{t+1} - φ^t
            unit = vector / vector.norm().clamp(min=SMALLEST_NORM)
            (spec,) = self.direction.tensors
            contributions["direction"] = Contribution(
                {spec.name: unit.to(DTYPES[spec.dtype])[None]}
            )
        return contributions

    def vector(self, state: SiloState) -> Tensor:
        """The backbone's parameters in one row [|φ|]."""
        backbone = state.parts["extractor"]
        return torch.cat([backbone[spec.name].reshape(-1) for spec in self.compared])

    # The coordinator half. ``similarity`` [n, n] holds the last cosine of each pair, 0 before the
    # first.

    def begin(self) -> CoordinatorState:
        """No pair seen."""
        n = len(self.setting.silos)
        if not self.clusters:
            return {}
        return {"similarity": torch.zeros(n, n, dtype=torch.float64)}

    def combine(
        self, state: CoordinatorState, round_: int, cohort: tuple[str, ...], results: Results
    ) -> Combined:
        """Lines 15 to 17 of Algorithm 1; the exchanges compute Eq. 4 and the mean backbone."""
        combined = super().combine(state, round_, cohort, results)
        if not self.compares(round_):
            return combined
        # Rows and columns are silos in job order.
        index = torch.tensor(self.numbers(cohort))
        similarity = state["similarity"].clone()
        # Other pairs keep the cosine of the last round that they shared.
        similarity[index[:, None], index] = results["direction"]["gram"][0].clamp(-1, 1)
        return replace(combined, state={"similarity": similarity})

    def deliveries(self, state: CoordinatorState, round_: int, silo: str) -> tuple[Delivery, ...]:
        """The last backbone and prototypes; for Algorithm 2 also a drawn silo's block."""
        last = (Latest("backbone"), Latest("prototypes"))
        if not self.clusters or round_ >= self.setting.rounds:
            return last
        # Algorithm 2 deals to all drawn silos, since it is not yet known which of them come.
        cohort = self.setting.drawn(round_)
        if silo not in cohort:
            return last
        index = torch.tensor(self.numbers(cohort))
        blocks = supervision_sampling(state["similarity"][index[:, None], index], self.middle)
        return (*last, Value("block", {"block": torch.tensor(blocks[cohort.index(silo)])}))


def prototype_cross_entropy(
    adapter: Callable[..., Tensor], prototypes: Tensor, known: Tensor, feature: Tensor, y: Tensor
) -> Tensor:
    """Cross-entropy [B] of the logits -‖σ(C_{g,k}) - φ(x)‖² over the known classes.

    0 where y is not among them.
    """
    # [B, C, d]: a row each, for DP's hooks
    mapped = adapter(prototypes.expand(len(feature), *prototypes.shape))
    logits = -(mapped - feature[:, None]).square().sum(2)  # [B, C]
    has = known[y]
    own = logits.gather(1, y[:, None])[:, 0]
    # no gradient of an empty sum
    others = logits.masked_fill(~known, float("-inf")).logsumexp(1).where(has, own)
    return others - own
