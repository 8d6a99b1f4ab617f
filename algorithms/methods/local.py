"""Local training only: the baseline that every personalised method has to beat.

Each silo minimises its own empirical risk and exchanges nothing:

    (1) θ_i ← argmin_θ (1/m_i) Σ_{(x,y) ∈ D_i} ℓ(θ; x, y), by E epochs of SGD a round, θ_i carried
    from round to round.

Silos of different architectures, as those that FedSSA compares with, are dealt theirs by
``extractors``.

Wire list: nothing goes up but the metrics, nothing comes down.
"""

from torch import nn

from ...files.documents import Strict
from ..course import Facts, SiloState, Stage
from ..exchange.parts import Contribution, Part
from ..method import Method, Setting
from .common.heterogeneous import Extractors, check_extractors, check_not_dense, dealt


class LocalOptions(Strict):
    """Options of local training."""

    extractors: Extractors = ()
    """Architectures dealt to the silos in turn, in job order.

    None: the job's model at each silo.
    """


class Local(Method):
    """Training without federation."""

    name = "local"
    version = 1
    options_model = LocalOptions
    options: LocalOptions

    def __init__(self, setting: Setting, options: Strict | None = None) -> None:
        super().__init__(setting, options)
        # Any model will do where all silos have the job's.
        if self.options.extractors:
            check_not_dense("local", setting)
            width = self.header_rows().shape[1]
            check_extractors("local", self.options.extractors, setting, width)

    def up(self, round_: int) -> tuple[Part, ...]:
        """No part: only metrics leave a silo."""
        return ()

    def down(self, round_: int) -> tuple[Part, ...]:
        """Nothing."""
        return ()

    def modules(self, silo: str) -> dict[str, nn.Module]:
        """The silo's own architecture."""
        # Nothing crosses, so architectures need have nothing in common.
        return dealt(self.options.extractors, self.setting, silo)

    def stages(self, state: SiloState, facts: Facts) -> tuple[Stage, ...]:
        """Train the whole model."""
        return (self.stage("extractor", "classifier"),)  # (1)

    def contribute(self, state: SiloState, facts: Facts) -> dict[str, Contribution]:
        """Nothing."""
        return {}
