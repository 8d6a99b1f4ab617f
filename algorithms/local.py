"""Local training only: the baseline that every personalised method has to beat.

Each silo minimises its own empirical risk and exchanges nothing:

    (1) θ_i ← argmin_θ (1/m_i) Σ_{(x,y) ∈ D_i} ℓ(θ; x, y), by E epochs of SGD a round, θ_i carried from round to round.

Wire list: nothing goes up but the metrics, nothing comes down.
"""

from .exchange import Gift, Part
from .method import Facts, Method, SiloState, Stage


class Local(Method):
    """Training without federation."""

    name = "local"
    version = 1

    def up(self, round_: int) -> tuple[Part, ...]:
        """Nothing besides the metrics."""
        return ()

    def down(self, round_: int) -> tuple[Part, ...]:
        """Nothing."""
        return ()

    def stages(self, state: SiloState, facts: Facts) -> tuple[Stage, ...]:
        """Train the whole model."""
        return (self.stage("extractor", "classifier"),)  # (1)

    def give(self, state: SiloState, facts: Facts) -> dict[str, Gift]:
        """Nothing."""
        return {}
