"""A silo's round of a job that protects whole silos: it trains freely, and gives a clipped update.

What is protected is all that a silo uploads in the job (``privacy.unit = "silo"``,
job/shared_steps.py). So nothing that stays has noise. From what is summed, as it was trained, the
silo subtracts what came down, cuts the difference to the clip, all of it together, and adds its
share of the noise: to the sum of that round it is what a record is to the sum of a step. But a
silo cannot be missing from a sum as a record can. It gives another update instead, which lies up to
two clips away, so there is twice the noise for the same cost. This covers each record as well: one
more or less may turn a silo's update into any other.

    reserve  the round's one release, before any record is read
    train    as in a plain job, but that no loss ends the round
    give     the update; whatever else a method makes has been computed from records, and is held
             back by the egress gate (algorithms/leaks/taint.py)
    metrics  zeros: test counts stay at the silo
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from itertools import chain

import torch
from torch import Tensor

from ..course import Course, Facts, SiloState, Stage
from ..exchange.delivery import Results
from ..exchange.parts import Contribution, Tensors
from ..job.job import Job
from ..job.privacy import SHARED, round_spends, signed_sigma
from ..leaks.taint import EXACT, PUBLIC, paid
from ..method import Method, initial_state
from .accountant import PrivateSilo
from .clipped_sum import ClippedSum
from .data_parallel import plain_on
from .loop import never
from .plain_round import ClearRound, ContributionTaints, Judged, Made
from .private_round import Noiseless, deliver, withheld


class WholeRound(ClearRound):
    """One round at one silo; ExhaustedError if the budget does not cover it."""

    def __init__(
        self,
        method: Method,
        job: Job,
        round_: int,
        private: PrivateSilo,
        facts: Callable[[], Facts],
    ) -> None:
        """``facts`` reads the records."""
        sigma, self._table, self._fresh = signed_sigma(job), job.private, private.fresh
        spending, self._paid = None, PUBLIC
        # Before a record is read, so that a crash cannot leave an unpaid release.
        if spends := round_spends(job, round_, sigma):
            spending = private.account.reserve(round_, spends)
            spending.take(SHARED)
            self._paid = paid(spending.id)
        super().__init__(method, facts(), Noiseless(plain_on(private.ranks)), never)
        self.spending = spending
        self._honest = job.private.honest(len(job.silos))
        self._sigma = float(Decimal(sigma) * job.private.spread)  # in clips
        self._came: dict[str, Tensors] = {}
        self._summed: frozenset[str] = frozenset()

    def deliver(self, state: SiloState, delivered: Results) -> SiloState:
        """The state after the method's ``deliver``, from which the update is measured."""
        came = deliver(self._method, state, delivered, self.facts, EXACT)
        self._came = dict(came.parts)
        return came

    def judged(self, held: SiloState, began: Mapping[str, Tensors], delivered: Results) -> Judged:
        """By what came down and what all silos began from, and by no steps.

        What a silo trained has no noise, and others see a refusal.
        """
        first = initial_state(self._method, self.facts.silo)
        parts = dict(first.parts)
        for name, value in chain.from_iterable(map(Mapping.items, delivered.values())):
            part, _, leaf = name.partition(".")
            # Such as a count, which names no part, or a tensor that no layer has.
            if leaf in parts.get(part, {}):
                parts[part] = {**parts[part], leaf: value}
        return first, parts

    def stages(self, state: SiloState) -> Course:
        """The method's course for this round."""
        course = super().stages(state)
        stages = [step.summed for step in course if isinstance(step, Stage)]
        self._summed = frozenset().union(*stages)
        return course

    def keep(self, state: SiloState) -> SiloState:
        """The state after training, none of which may leave as it is."""
        return replace(state, taints=dict.fromkeys(state.flat, EXACT))

    def contribute(self, state: SiloState) -> Made:
        """The update of what is summed, with its taints, and the state to keep."""
        if self._summed:
            self.facts = replace(self.facts, summed=self._update(state, sorted(self._summed)))
        contributions, _, kept = super().contribute(state)
        # Only the shares themselves have noise: what a method makes of one is held back.
        shares = set(map(id, self.facts.summed.values()))
        taints = {
            part: {
                name: self._paid if id(tensor) in shares else EXACT
                for name, tensor in made.tensors.items()
            }
            for part, made in contributions.items()
        }
        return contributions, taints, self.keep(kept)

    @torch.no_grad()
    def _update(self, state: SiloState, names: Sequence[str]) -> dict[str, Tensor]:
        """The update by parameter, int64, cut to the clip and with a share of the noise.

        An update with a number that is not finite counts as none.
        """
        moves = []
        for name in names:
            part, _, leaf = name.partition(".")
            moves.append(state.parts[part][leaf].double() - self._came[part][leaf].double())
        shapes = [move.shape for move in moves]
        total = ClippedSum(shapes, self._table.clip, self._sigma, shared=True)
        # As a batch of one record.
        total.add([move[None] for move in moves])
        shares = total.shares(self._fresh(), self._honest, range(len(names)))
        return dict(zip(names, shares, strict=True))

    def metrics(
        self, exact: Mapping[str, Contribution]
    ) -> tuple[Mapping[str, Contribution], ContributionTaints]:
        """Zeros, since a silo's test counts have no bound."""
        return withheld(exact)
