"""Clustered federated learning: silos whose updates point apart continue in clusters of their own.

Sattler, Müller, Samek, "Clustered federated learning: model-agnostic distributed multi-task
optimization under privacy constraints", IEEE Transactions on Neural Networks and Learning Systems,
2020, arXiv:1910.01991.

At first all silos are one cluster c. In each round silo i trains the model of its cluster, θ_c, to
θ_i:

    (1) Δ_i = θ_i - θ_c,   α_ij = ⟨Δ_i, Δ_j⟩ / (‖Δ_i‖ ‖Δ_j‖)
    (2) c is stationary, and its silos are not:  ‖(1/|c|) Σ_{i ∈ c} Δ_i‖ < ε_1  and  max_{i ∈ c}
    ‖Δ_i‖ > ε_2
    (3) c_1, c_2 = argmin_{c_1 ∪ c_2 = c} max_{i ∈ c_1, j ∈ c_2} α_ij,   α_cross that least maximum
    (4) c splits into c_1 and c_2 where (2) holds, and √((1 - α_cross) / 2) > γ_max
    (5) θ_c ← (1/|c|) Σ_{i ∈ c} θ_i = θ_c + (1/|c|) Σ_{i ∈ c} Δ_i

(3) is solved as in the paper: pairs are joined from the most alike downwards until two groups are
left.

Where this differs from the paper:
- Silos count equally in (2) and (5), as in the authors' code; the paper weighs them by their
  records. What mixes their models is not told those counts, and would have to ask each silo for its
  own.
- The code merges by complete linkage, which only comes near (3), has no γ_max, and splits no
  cluster of one or two silos, nor any before its round 21. ``gamma_max`` is 0 by default, so that
  (4) is (2), and ``start`` is 0: 20 is the code's. The defaults of ε_1 and ε_2 are the code's for
  EMNIST; lengths of updates grow with lr and epochs, so look at those of your own job.
- ``smallest``, not from the paper: a split that leaves a cluster fewer silos is not made. In a
  blind job a cluster of ``min_cohort`` or fewer silos would get nothing, and each of its silos
  would train alone: write min_cohort + 1.
- A silo that is away in a round stays in its cluster, and if that splits, in the part with more
  silos of the round, or on a tie with the first one. (1) to (4) are of those who came. The paper
  caches updates and sorts newcomers down the tree of its splits.
- (5) is over those silos of the cluster that came in the last round in which any did; who was away
  then gets it too.
- ``sketch``: a count-sketch of Δ_i crosses in its place, since all of it doubles the upload, and
  blind takes a time to rotate that grows with the square of its length. Inner products of sketches
  are right on average; by how much cosines are off is said in algorithms/exchange/count_sketch.py,
  and squared lengths are off by as much.
- A silo ends with the model of its last cluster. In the code it chooses, by validation records,
  among the models that its clusters had before each split.
- Running statistics take no part in Δ_i; ``model.buffers`` says whether (5) has them.

Wire list:

======  ====  =====================================  ==========================================
part    way   tensors                                exchange
======  ====  =====================================  ==========================================
model   up    θ_i                                    Mix
update  up    from round ``start`` on: Δ_i [1, |θ|]  Gram; of sketches where they are asked for
model   down  the silo's row of (5)                  -
======  ====  =====================================  ==========================================

The coordinator sees the lengths of all updates and the angles between them, and knows who is in
which cluster. A silo's model in the end is that of its cluster. Under differential privacy Δ_i,
computed of what was noised, has no noise of its own.
"""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from ...files.documents import Strict
from ..course import Facts, SiloState, Stage
from ..exchange.delivery import Combined, CoordinatorState, Delivery, Results, Row, positive_weights
from ..exchange.parts import DTYPES, Contribution, Gram, Kind, Mix, Part, TensorSpec
from ..method import Method, Setting, specs_of_parameters
from ..methods.common.second_model import MODEL

# An update of length 0 has no direction; its norm is raised to this, so that (1) is defined.
SMALLEST_NORM = 1e-12


class ClusteredFLOptions(Strict):
    """Options of clustered federated learning."""

    eps_1: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 0.4
    """ε_1: a cluster splits whose mean update is shorter."""
    eps_2: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 1.6
    """ε_2: and of whose updates one is longer."""
    gamma_max: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    """γ_max, by which the two parts must differ."""
    start: Annotated[int, Field(strict=True, ge=0, le=1_000_000)] = 0
    """The first round in which clusters may split; before it no updates are compared."""
    smallest: Annotated[int, Field(strict=True, ge=1, le=10_000)] = 1
    """Fewest silos of a cluster; not from the paper."""
    sketch: Annotated[int, Field(strict=True, ge=0, le=65_536)] = 0
    """Numbers that stand for an update; 0 is all of it, the paper's."""


class ClusteredFL(Method):
    """A model for each cluster of silos, and clusters that split."""

    name = "cfl"
    version = 1
    options_model = ClusteredFLOptions
    product = "delivered"
    options: ClusteredFLOptions
    addressed = ("model",)

    def __init__(self, setting: Setting, options: Strict | None = None) -> None:
        super().__init__(setting, options)
        self.model = Part("model", Kind.WHOLE_MODEL, Mix(), self.flat_specs(*MODEL))
        modules = setting.sketch()
        # Parameters only: running statistics are not in Δ_i, even if ``model`` has them.
        self.compared = [
            (part, spec) for part in MODEL for spec in specs_of_parameters(modules[part])
        ]
        length, dtype = sum(spec.elements for _, spec in self.compared), self.compared[0][1].dtype
        kind, gram, spec = Kind.WHOLE_MODEL, Gram(), TensorSpec("update", dtype, (1, length))
        if 0 < self.options.sketch < length:
            kind, gram = Kind.SKETCH, Gram(self.options.sketch, setting.seed)
            spec = TensorSpec("sketch", "float64", (1, length))
        self.update = Part("update", kind, gram, (spec,))

    def up(self, round_: int) -> tuple[Part, ...]:
        """The whole model, and its update where clusters may split."""
        if round_ < self.options.start:
            return (self.model,)
        return (self.model, self.update)

    def down(self, round_: int) -> tuple[Part, ...]:
        """The cluster's model; there is none before the first round.

        Each silo gets that of its own cluster, so the part is ``addressed``.
        """
        return (self.model,) if round_ else ()

    # The silo half. ``extra`` holds θ_c [|θ|], from which a round's training began.

    def initial_extra(self, silo: str) -> dict[str, Tensor]:
        """Zeros in place of a received model."""
        # [|θ|], so that a state has the same tensors from the start.
        return {"received": torch.zeros(self.update.tensors[0].shape[1])}

    def deliver(self, state: SiloState, delivered: Results, facts: Facts) -> SiloState:
        """The model from which training begins: the cluster's, else the silo's own."""
        # Kept as θ_c of (1), since training changes the parameters.
        fresh = super().deliver(state, delivered, facts)
        return SiloState(fresh.parts, {"received": self.vector(fresh)})

    def stages(self, state: SiloState, facts: Facts) -> tuple[Stage, ...]:
        """Train the whole model."""
        return (self.stage(*MODEL),)

    def contribute(self, state: SiloState, facts: Facts) -> dict[str, Contribution]:
        """The trained model, and how far it is from the one before.

        They are θ_i, and from round ``start`` on Δ_i [1, |θ|], which the exchange may sketch.
        """
        contributions = {"model": Contribution(self.flat(state, *MODEL))}
        if facts.round >= self.options.start:
            (spec,) = self.update.tensors
            update = self.vector(state).double() - state.extra["received"].double()  # (1)
            contributions["update"] = Contribution({spec.name: update.to(DTYPES[spec.dtype])[None]})
        return contributions

    def vector(self, state: SiloState) -> Tensor:
        """The model's parameters in one row [|θ|].

        The order is that of ``compared``: extractor, then classifier, each in definition order.
        """
        return torch.cat([state.parts[part][spec.name].reshape(-1) for part, spec in self.compared])

    # The coordinator half. ``cluster`` [N] has the number of each silo's cluster, ``gave`` [N] the
    # round in which it gave its last model, -1 before.

    def begin(self) -> CoordinatorState:
        """One cluster; no models."""
        n = len(self.setting.silos)
        return {
            "cluster": torch.zeros(n, dtype=torch.int64),
            "gave": torch.full((n,), -1, dtype=torch.int64),
        }

    def combine(
        self, state: CoordinatorState, round_: int, cohort: tuple[str, ...], results: Results
    ) -> Combined:
        """Eqs. 2 to 4 for each cluster, on the members that came.

        ``results["update"]["gram"]`` is [1, m, m] for the m silos of the cohort. Models are not in
        ``results``: they stay stored for their Mix.
        """
        # The state covers all silos, present or not; ``index`` are the rows of this cohort.
        index = torch.tensor(self.numbers(cohort))
        cluster, gave = state["cluster"].clone(), state["gave"].clone()
        gave[index] = round_
        if "update" in results:
            # One vector per silo, so the Gram has one group.
            gram = results["update"]["gram"][0]
            # A cluster can split only if some of its silos are in this round.
            for number in sorted(set(cluster[index].tolist())):
                here = (cluster[index] == number).nonzero()[:, 0]
                leaving = self.leaving(gram[here[:, None], here])
                if leaving.any():
                    # Silos that leave get a new number; the others keep theirs.
                    cluster[index[here[leaving]]] = cluster.max() + 1
        return Combined({"cluster": cluster, "gave": gave})

    def leaving(self, gram: Tensor) -> Tensor:
        """Mask [n] of the members that leave a cluster, by their updates' inner products [n, n].

        All are False if (2) or (4) does not hold, or a part would have fewer than ``smallest``
        silos.
        """
        # Norms and the mean follow from the inner products, so no update itself is needed.
        n, lengths = len(gram), gram.diagonal().clamp(min=0).sqrt()
        stays = torch.zeros(n, dtype=torch.bool)
        mean = gram.mean().clamp(min=0).sqrt()  # ‖(1/n) Σ Δ_i‖² = (1/n²) Σ_ij ⟨Δ_i, Δ_j⟩
        # A single silo cannot split.
        if n < 2 or not (mean < self.options.eps_1 and lengths.max() > self.options.eps_2):  # (2)
            return stays
        divisor = lengths.clamp(min=SMALLEST_NORM)
        alike = (gram / (divisor[:, None] * divisor)).clamp(-1, 1)  # (1)
        second = bipartition(alike)
        # α_cross of (3): the largest similarity across the two groups.
        across = alike[~second][:, second].max()
        fewer = min(int(second.sum()), int((~second).sum()))
        gap = ((1 - across) / 2).sqrt()
        if gap > self.options.gamma_max and fewer >= self.options.smallest:  # (4)
            return second
        return stays

    def deliveries(self, state: CoordinatorState, round_: int, silo: str) -> tuple[Delivery, ...]:
        """Eq. 5; nothing where nobody of the cluster has given a model.

        The row has equal weights over the silos that took part in the cluster's last round.
        """
        same = state["cluster"] == state["cluster"][self.number(silo)]
        # The cluster's last round: the last one in which any of its silos uploaded a model.
        last = torch.where(same, state["gave"], -1).max()
        if last < 0:
            return ()
        # Equal weights, as in the authors' code; the paper weighs by records.
        members = same & (state["gave"] == last)
        return (Row("model", positive_weights(self.setting.silos, members.double())),)


def bipartition(alike: Tensor) -> Tensor:
    """Mask [n] of the members in the smaller of the two groups of Eq. 3.

    Of all ways to split, the most similar pair across these two groups is the least similar. On a
    tie of sizes the first member is in the other group. ``alike`` [n, n] is symmetric, n >= 2.
    """
    # Eq. 3 is solved exactly: each pair that is joined is at least as similar as all that are not.
    n = len(alike)
    group = list(range(n))
    # The most similar pairs first; indices break ties, so every machine gets the same groups.
    pairs = sorted((-float(alike[i, j]), i, j) for i in range(n) for j in range(i + 1, n))
    for _, i, j in pairs:
        if len(set(group)) == 2:
            break
        group = [group[i] if own == group[j] else own for own in group]
    first = torch.tensor([own == group[0] for own in group])
    return first if 2 * int(first.sum()) < n else ~first
