"""A silo's round of a private job: every access to the records is paid for first.

silo_round.py has the steps that all jobs share.

    counts   once per job: noisy numbers of training records per class, which are all that a method
             learns about the records (Facts)
    reserve  everything that the round spends, in one reservation, before any record is read
    deliver  watched by a tracker (algorithms/leaks/taint.py): what came down is public to the silo
    measure  record by record, each record's share clipped to a norm, with noise on the sum
    train    every stage by DP-SGD (dp_sgd.py), except those that are ``noiseless``
    give     watched by a tracker: whatever leaves has a taint, and so has whatever stays
    metrics  test counts with noise, or zeros

So a round releases only what it has reserved for, and what is computed from that. The counts follow
security rules 21 and 22: the divisor of a step is q times their sum, and a class counts as
absent where the noise could have made its count.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import filterfalse
from math import ceil, sqrt

import torch
from torch import Tensor
from torch.func import vmap

from ...errors import LocalError
from ..course import Facts, SiloState, Stage, Survey, settled
from ..data.dataset import Dataset, calls_of
from ..exchange.delivery import Results
from ..exchange.parts import WEIGHT, Contribution, Sum, Tensors
from ..job.job import Job
from ..job.privacy import (
    HISTOGRAM,
    METRICS,
    SHARED,
    SHARED_METRICS,
    STATISTICS,
    TRAINING,
    WHOLE,
    histogram_spend,
    round_spends,
    signed_sigma,
    whole_sigma,
)
from ..job.privacy_table import MOST_DRAWN, PRESENT, PrivacyTable, share_variance
from ..leaks.taint import EXACT, PUBLIC, Taint, Tracker, paid, worst
from ..method import Method
from ..models.functional import mapped
from ..tasks.counting import METRICS as SEEN
from ..tasks.counting import TESTED
from ..tasks.task import cells, histogram
from .accountant import Counts, PrivacyAccount, PrivateSilo, Random
from .clipped_sum import ClippedSum
from .data_parallel import plain_on
from .dp_sgd import Mechanism, Private
from .loop import Modules, Step, Stepper
from .plain_round import ContributionTaints, Judged, Made

SURE = 9.0  # no normal number is as many standard deviations below 0: one in 10^19 is


def noisy_facts(job: Job, silo: str, round_: int, counts: Counts | None) -> Facts:
    """Facts of a silo from its noisy counts.

    A silo that has released none looks to its method like one without records. ``samples`` is at
    least 1, since a step divides by it.
    """
    known = torch.zeros(cells(job.task, job.model.width), dtype=torch.int64)
    if counts is not None:
        known = counts.counts
    # Records are counted by the noisy counts too, never exactly (security rule 21). Steps are of
    # drawn records, so their number and size follow from the rate and these counts.
    samples, rate = max(int(known.sum()), 1), job.private.sample_rate
    return Facts(
        silo,
        round_,
        samples,
        known,
        steps=ceil(1 / rate),
        batch_size=max(1, round(rate * samples)),
        lr=job.lr(round_),
    )


def release_counts(job: Job, round_: int, data: Dataset, private: PrivateSilo) -> Counts:
    """Noisy counts of training records by class: those released before, or new ones.

    They are [classes] int64, or [1] in a task without, and 0 if noise alone could have made a
    count. The release is paid for and stored before this returns. ExhaustedError if the budget does
    not cover it.
    """
    account, sigma = private.account, job.private.histogram_sigma

    # A second draw for the same counts would be a second release, and the mean of many is exact.
    if (kept := account.counts()) is not None:
        return kept

    # Reserved before the records are counted, kept before they are committed: after a crash the
    # budget holds the release, whether or not anybody saw it.
    spending = account.reserve(round_, (histogram_spend(job.private),))
    spending.take(HISTOGRAM)
    exact = histogram(job.task, data.y, job.model.width)  # [C], or [1]; of sensitivity 1
    noise = torch.from_numpy(private.fresh().normal(len(exact)))
    noisy = (exact + sigma * noise).round()
    # Noise alone must not make a class seem present.
    counts = Counts(torch.where(noisy >= max(PRESENT * sigma, 1), noisy, 0).long(), spending.id)
    account.keep_counts(counts)
    account.commit(spending)
    return counts


def check_counts(job: Job, silo: str, counts: Counts) -> None:
    """LocalError where no count is more than noise could have made."""
    if not counts.counts.any():
        sigma = job.private.histogram_sigma
        raise LocalError(
            f"silo {silo!r}: with the noise that job {job.name!r} has for counts,"
            f" privacy.histogram_sigma = {sigma:g}, no count of training records reaches the"
            f" {PRESENT * sigma:g} from which on it is more than noise; leave this silo out of the"
            " job, or have it signed with less noise"
        )


def deliver(
    method: Method, state: SiloState, delivered: Results, facts: Facts, known: Taint
) -> SiloState:
    """The state after a delivery, with its taints; ``known`` is the taint of the facts.

    Nothing is spent. Each new tensor gets the worst taint of what the method computed it from.
    """
    # A delivery is public: whatever it was computed from has left its silo and was paid for there.
    tracker = Tracker()
    came = mapped(delivered, lambda tensor: tracker.enter(tensor, PUBLIC))
    held, facts = _entered(tracker, state), _facts_entered(tracker, facts, known, PUBLIC)
    with tracker:
        made = method.deliver(held, came, facts)
    return replace(made, taints={name: tracker.of(tensor) for name, tensor in made.flat.items()})


def take_private_delivery(
    method: Method,
    job: Job,
    round_: int,
    state: SiloState,
    delivered: Results,
    silo: str,
    account: PrivacyAccount,
    exact: Callable[[], Facts],
) -> SiloState:
    """The state after a delivery that no training follows; nothing is spent for it.

    ``exact`` reads the records, which is free where a job protects whole silos.
    """
    if job.private.whole_silos:
        return deliver(method, state, delivered, exact(), EXACT)
    # No release is made here: without released counts the method gets none.
    counts = account.counts()
    known = PUBLIC if counts is None else paid(counts.id)
    return deliver(method, state, delivered, noisy_facts(job, silo, round_, counts), known)


class PrivateRound:
    """One round at one silo, from the reservation to the contributions.

    It is a ``plain_round.Side``. ExhaustedError if the budget does not cover the counts, or not the
    whole round.
    """

    def __init__(
        self, method: Method, job: Job, silo: str, round_: int, data: Dataset, private: PrivateSilo
    ) -> None:
        self._method, self._table, self._fresh = method, job.private, private.fresh
        self._counting = job.counting
        sigma = signed_sigma(job)

        # Everything after this knows the records by these counts alone (security rule 21).
        counts = release_counts(job, round_, data, private)
        check_counts(job, silo, counts)
        self.facts = noisy_facts(job, silo, round_, counts)
        self._known = paid(counts.id)

        # The round is reserved as a whole: it must not end halfway for want of budget, after some
        # of its steps were spent.
        spends = round_spends(job, round_, sigma)
        # A round without steps, such as a census without test counts, reserves nothing.
        self.spending = private.account.reserve(round_, spends) if spends else None
        self._paid = PUBLIC if self.spending is None else paid(self.spending.id)
        self._effort, self._measured = method.effort(round_), PUBLIC

        # The divisor is q times the noisy count: the number of records drawn would tell of them
        # (security rule 22).
        table = self._table
        self._honest = table.honest(len(job.silos))
        mechanism = Mechanism(
            clip=table.clip,
            sigma=float(sigma),
            whole_sigma=float(whole_sigma(sigma, table.sample_rate)),
            q=table.sample_rate,
            divisor=table.sample_rate * self.facts.samples,
            physical_batch=table.physical_batch,
            honest=self._honest,
            local_rate=table.local_rate,
        )
        self._way = Private(mechanism, private.fresh, self._charge, private.ranks)
        self._noiseless = Noiseless(plain_on(private.ranks))
        self._summed = PUBLIC  # the taint of the sums of a step with shared noise
        self._taints: dict[str, Taint] = {}
        # ``evaluated`` raises this taint to that of the evaluated models.
        self._metrics = PUBLIC

    def _charge(self, stage: Stage) -> None:
        if stage.summed:
            self._check_drawn()
            self._take(SHARED)
        else:
            self._take(WHOLE if stage.full_batch else TRAINING)

    def _check_drawn(self) -> None:
        """LocalError where a step may draw more records than whole numbers have room for."""
        # By the noisy counts, so that no failure tells of a record. Of a class that noise hides
        # there may be as many records as PRESENT allows, and noise may have taken some off: a job
        # could have it hide nearly all of them.
        counts, table = self.facts.class_counts, self._table
        hidden = (PRESENT + SURE) * table.histogram_sigma * counts.numel()
        most = table.sample_rate * (int(counts.sum()) + hidden)
        if most > MOST_DRAWN:
            raise LocalError(
                f"a step draws up to {most:,.0f} of this silo's records on average, and the sums of"
                f" a job with shared noise have room for {MOST_DRAWN:,}; have the job signed with a"
                " lower privacy.sample_rate or histogram_sigma"
            )

    def _take(self, purpose: str) -> None:
        if self.spending is None:
            raise LocalError(
                f"a round that spends nothing takes a step for {purpose!r}; this is a bug in the"
                " method"
            )
        self.spending.take(purpose)

    def deliver(self, state: SiloState, delivered: Results) -> SiloState:
        """The state after the method's ``deliver``; its taints are remembered."""
        fresh = deliver(self._method, state, delivered, self.facts, self._known)
        self._taints = dict(fresh.taints)
        return fresh

    def judged(self, held: SiloState, began: Mapping[str, Tensors], delivered: Results) -> Judged:
        """By what the silo holds and begins from: what came down before, and noised steps."""
        return held, began

    def evaluated(self, modules: Modules) -> None:
        """The model was evaluated as it is now: the test counts take over all its taints.

        Test counts reveal something of the records that trained the model.
        """
        self._metrics = worst((self._metrics, self._of(modules)))

    def measure(self, modules: Modules, data: Dataset) -> None:
        """Add the noisy sums of the method's ``measure`` to the facts.

        This takes one step of purpose STATISTICS. Nothing is measured unless the method's
        ``effort`` says ``measures``.
        """
        if not self._effort.measures:
            return
        # Taken before the records are read, so that a crash cannot leave an unpaid release.
        self._take(STATISTICS)
        noisy = noisy_measure(self._method, modules, data, self._table, self._fresh())
        self.facts = replace(self.facts, measured=noisy)
        # The sums depend on the delivered model as well as on the records.
        self._measured = worst((self._of(modules), self._paid))

    def survey(self, survey: Survey, modules: Modules, data: Dataset) -> None:
        """LocalError: no budget pays for surveys, and ``stages`` lets none through."""
        raise LocalError(
            f"method {self._method.name!r} surveys records in a private job; this is a bug in the"
            " method"
        )

    def stages(self, state: SiloState) -> tuple[Stage, ...]:
        """The method's stages, which take no more steps than were reserved.

        The method makes them without the parts in which records show.
        """
        course = self._method.stages(SiloState(self._shown(state), state.extra), self.facts)
        stages = tuple(stage for stage in course if isinstance(stage, Stage))
        if len(stages) < len(course):
            raise LocalError(
                f"method {self._method.name!r} surveys records or changes the model between two"
                " stages, for which no private job pays; its private_fault should say so: this is"
                " a bug in the method. A state to keep can be returned by contribute, with the"
                " contributions"
            )
        if any(stage.coupled for stage in stages):
            raise LocalError(
                f"method {self._method.name!r} trains a stage that is coupled: there a record moves"
                " the gradients of others, which no clip bounds; its private_fault should say so:"
                " this is a bug in the method"
            )
        # Noiseless stages cost nothing: taints keep what they train at the silo.
        self._check_effort([stage for stage in stages if not stage.noiseless])
        return stages

    def _shown(self, state: SiloState) -> "_Shown":
        """The parts of a state without those that were trained without noise."""
        hidden = {name.split("/")[1] for name in filter(self._is_exact_part, self._taints)}
        return _Shown({part: held for part, held in state.parts.items() if part not in hidden})

    def _is_exact_part(self, name: str) -> bool:
        return name.startswith("part/") and self._taints[name].exact

    def _check_effort(self, noisy: Sequence[Stage]) -> None:
        """LocalError for more steps than the method declared, which is all that is paid for."""
        effort = self._effort
        shared = sum(stage.epochs for stage in noisy if stage.summed)
        whole = sum(stage.epochs for stage in noisy if stage.full_batch)
        epochs = sum(stage.epochs for stage in noisy) - whole - shared
        if epochs > effort.epochs or whole > effort.whole or shared > effort.shared:
            raise LocalError(
                f"the stages of round {self.facts.round} take {epochs} epochs, {whole} steps on all"
                f" records and {shared} with shared noise, effort() of method"
                f" {self._method.name!r} says {effort.epochs}, {effort.whole} and {effort.shared};"
                " this is a bug in the method"
            )

    def way(self, stage: Stage) -> Stepper:
        """DP-SGD; plain training for a ``noiseless`` stage.

        Parts that a ``noiseless`` stage trains must stay at the silo.
        """
        return self._noiseless if stage.noiseless else self._way

    def trained(self, stage: Stage, handed: Modules, before: Mapping[str, Tensor]) -> None:
        """Set the taints after a stage that was handed these modules.

        ``before`` holds their buffers as they were before the stage. A trained parameter takes the
        worst taint of everything that loss and penalty could reach: the modules handed to them,
        tensors that are no part of the model, the facts, and the state that made the stage.
        """
        # Exact parts were hidden from ``stages`` (``_shown``), so they reach a stage only as
        # modules that it is handed.
        shown = filterfalse(self._is_exact_part, self._taints)
        reached = [self._taints[name] for name in shown]
        found = worst((*reached, self._of(handed), self._known, self._measured, self._paid))
        if stage.summed:
            self._summed, self.facts = found, replace(self.facts, summed=self._way.summed)
        for part in stage.trains:
            for name, _ in handed[part].named_parameters():
                # What is summed has not moved.
                if f"{part}.{name}" not in stage.summed:
                    self._taints[f"part/{part}/{name}"] = EXACT if stage.noiseless else found
            # DP-SGD puts noise on parameters alone; a buffer that moved, such as running
            # statistics, has the records in it as they are.
            for name, buffer in handed[part].named_buffers():
                if not torch.equal(buffer, before[f"{part}.{name}"]):
                    self._taints[f"part/{part}/{name}"] = EXACT

    def keep(self, state: SiloState) -> SiloState:
        """The state after training, with its taints.

        A tensor without a known taint counts as exact.
        """
        return replace(state, taints={name: self._taints.get(name, EXACT) for name in state.flat})

    def contribute(self, state: SiloState) -> Made:
        """The method's contributions, the taint of each tensor of them, and the state to keep.

        The egress gate rejects exact tensors. The taints of the others name the reservations that
        paid for them.
        """
        tracker = Tracker()
        held = _entered(tracker, state)
        facts = _facts_entered(tracker, self.facts, self._known, self._measured)
        # A share of the noise protects them in the sum alone, as they are: what a method makes of
        # them stays here.
        own = {name: tracker.enter(tensor, EXACT) for name, tensor in facts.summed.items()}
        with tracker:
            made = self._method.contribute(held, replace(facts, summed=own))
        contributions, kept = settled(self._method.name, held, made)
        in_sums: Mapping[object, Mapping[int, Taint]] = {
            Sum("total"): dict.fromkeys(map(id, own.values()), self._summed)
        }
        exchanges = {part.name: part.exchange for part in self._method.up(facts.round)}
        taints: ContributionTaints = {}
        for part, contribution in contributions.items():
            shared = in_sums.get(exchanges.get(part), {})
            taints[part] = self._taints_of(tracker, contribution, shared)
        # Each tensor that stays has the worst taint of what it was computed from, as after
        # ``deliver``.
        if kept is held:
            return contributions, taints, state
        known = {name: tracker.of(tensor) for name, tensor in kept.flat.items()}
        return contributions, taints, replace(kept, taints=known)

    def _taints_of(
        self, tracker: Tracker, contribution: Contribution, shared: Mapping[int, Taint]
    ) -> dict[str, Taint]:
        """The taint of each tensor of a contribution, ``@weight`` included.

        ``shared``, by ``id``, are those of tensors under a share of the noise that is paid for.
        """
        # The tracker follows tensors, not Python numbers such as ``facts.samples``: so everything
        # that leaves takes the taint of the counts too.
        everything = dict(contribution.tensors)
        if contribution.weight is not None:
            everything[WEIGHT] = torch.as_tensor(contribution.weight)
        found: dict[str, Taint] = {}
        for name, tensor in everything.items():
            taint = shared.get(id(tensor), tracker.of(tensor))
            found[name] = worst((taint, self._known))
        return found

    def metrics(
        self, exact: Mapping[str, Contribution]
    ) -> tuple[Mapping[str, Contribution], ContributionTaints]:
        """Noisy test counts, whole numbers; zeros where the job has no noise.

        Those of METRICS are from 0 to what all tested records can add. Cells of tables may be below
        zero: set to zero silo by silo, the noise of many empty cells would add up.
        """
        sigma = self._table.metrics_sigma
        if sigma is None:
            # Zeros, since the wire list has these counts in every round.
            return withheld(exact)
        self._take(SHARED_METRICS if self._table.shared else METRICS)
        made = _seen(exact, worst((self._metrics, self._paid)))
        random = self._fresh()
        # A share of the noise must reach the sum as it is.
        if self._table.shared:
            return self._with_shares(exact, sigma, random), made
        # One noise for all counts together: the more a job counts, the more a record changes.
        scale = sigma * sqrt(self._counting.squared_sensitivity)
        noisy = {}
        for name, part in exact.items():
            units = {tensor: self._counting.unit(name, tensor) for tensor in part.tensors}
            shares = {
                tensor: value.double() / units[tensor] for tensor, value in part.tensors.items()
            }
            drawn = with_noise(shares, scale, random)
            noisy[name] = Contribution(
                {tensor: value * units[tensor] for tensor, value in drawn.items()}
            )

        # What is computed from noisy counts costs nothing more: within what the records can add.
        tested = noisy[SEEN].tensors[TESTED].round().clamp(min=0)
        whole = _mapped(noisy, lambda count: count.round().long())
        within = {
            name: count.round()
            .clamp(min=0)
            .minimum(tested * self._counting.unit(SEEN, name))
            .long()
            for name, count in noisy[SEEN].tensors.items()
        }
        return {**whole, SEEN: Contribution(within)}, made

    def _with_shares(
        self, exact: Mapping[str, Contribution], sigma: float, random: Random
    ) -> dict[str, Contribution]:
        """Counts with this silo's share of the noise of them all."""
        counting, found = self._counting, dict[str, Contribution]()
        together = counting.squared_sensitivity
        for name, part in exact.items():
            tensors = {}
            for tensor, counts in part.tensors.items():
                unit = counting.unit(name, tensor)
                variance = share_variance(sigma, unit, self._honest, together)
                noise = torch.from_numpy(random.discrete_gaussian(counts.numel(), variance))
                tensors[tensor] = counts + noise.reshape(counts.shape)
            found[name] = Contribution(tensors)
        return found

    def _of(self, modules: Modules) -> Taint:
        prefixes = tuple(f"part/{part}/" for part in modules)
        return worst(taint for name, taint in self._taints.items() if name.startswith(prefixes))


class Noiseless:
    """Plain training, by this way, of what stays at this silo: a ``Stepper``.

    A loss that is not finite does not end the round: others would see that, and it depends on the
    records without noise.
    """

    def __init__(self, way: Stepper) -> None:
        self.batches, self.steps, self.draws, self._begin = (
            way.batches, way.steps, way.draws, way.begin
        )  # fmt: skip

    def begin(self, modules: Modules, stage: Stage) -> Step:
        """The step on one batch."""
        plain = self._begin(modules, stage)

        def step(x: Tensor, y: Tensor) -> Tensor:
            return plain(x, y).nan_to_num(0.0, 0.0, 0.0)

        return step


class _Shown(dict[str, Tensors]):
    """The parts of a state that a stage may be made with."""

    def __missing__(self, part: str) -> Tensors:
        raise LocalError(
            f"the method makes its stages with part {part!r}, in which records show unprotected, so"
            " what they train could not leave; hand it to the loss of the stage that needs it, by"
            " ``reads``"
        )


def _entered(tracker: Tracker, state: SiloState) -> SiloState:
    parts: dict[str, dict[str, Tensor]] = {}
    for part, tensors in state.parts.items():
        parts[part] = _prefixed_entered(tracker, state, f"part/{part}/", tensors)
    return SiloState(parts, _prefixed_entered(tracker, state, "extra/", state.extra))


def _prefixed_entered(
    tracker: Tracker, state: SiloState, prefix: str, tensors: Tensors
) -> dict[str, Tensor]:
    entered: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        entered[name] = tracker.enter(tensor, state.taint(prefix + name))
    return entered


def _facts_entered(tracker: Tracker, facts: Facts, known: Taint, measured: Taint) -> Facts:
    sums = {name: tracker.enter(tensor, measured) for name, tensor in facts.measured.items()}
    # Class counts have the taint of their release, sums that of their measurement.
    return replace(facts, class_counts=tracker.enter(facts.class_counts, known), measured=sums)


def withheld(
    exact: Mapping[str, Contribution],
) -> tuple[Mapping[str, Contribution], ContributionTaints]:
    """Zeros in place of test counts, which stay at the silo."""
    return _mapped(exact, torch.zeros_like), _seen(exact, PUBLIC)


def _mapped(
    parts: Mapping[str, Contribution], change: Callable[[Tensor], Tensor]
) -> dict[str, Contribution]:
    return {
        name: Contribution({key: change(count) for key, count in part.tensors.items()})
        for name, part in parts.items()
    }


def _seen(metrics: Mapping[str, Contribution], taint: Taint) -> ContributionTaints:
    return {name: dict.fromkeys(part.tensors, taint) for name, part in metrics.items()}


@torch.no_grad()
def noisy_measure(
    method: Method, modules: Modules, data: Dataset, table: PrivacyTable, random: Random
) -> dict[str, Tensor]:
    """Noisy sums of the method's ``measure`` over the records, in float64.

    Each record's share is clipped to the norm ``statistics_clip``, in all tensors together. A
    record whose share is not finite adds nothing.
    """
    # In evaluation mode: batch norm would let one record change the shares of others.
    for module in modules.values():
        module.eval()

    # Record by record, since each record's share is clipped on its own.
    def share(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        own = method.measure(modules, x[None], y[None])
        return {name: value.double() for name, value in own.items()}

    # The first call tells names and shapes, so a method need not declare them.
    names: tuple[str, ...] = ()
    sums = ClippedSum((), table.statistics_clip, table.statistics_sigma)
    for x, y, records in calls_of(data, table.physical_batch):
        try:
            shares = vmap(share)(x, y)  # each [B, …]
        except RuntimeError as error:
            raise LocalError(
                f"method {method.name!r} cannot measure record by record: {error}"
            ) from error
        if not names:
            names, shapes = tuple(shares), [value.shape[1:] for value in shares.values()]
            sums = ClippedSum(shapes, table.statistics_clip, table.statistics_sigma)
        # Rows that fill up a call are not records, and must not be added.
        sums.add([shares[name][:records] for name in names])
    return dict(zip(names, sums.noisy(random), strict=True))


def with_noise(tensors: Tensors, scale: float, random: Random) -> dict[str, Tensor]:
    """Tensors in float64 plus normal noise of this standard deviation.

    ``scale`` is the standard deviation. ``random`` must be fresh.
    """
    noisy: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        noise = torch.from_numpy(random.normal(tensor.numel())).reshape(tensor.shape)
        noisy[name] = tensor.double() + scale * noise
    return noisy
