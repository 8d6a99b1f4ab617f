"""A method whose sums class by class are counted first, so that no sum shows the few of a class.

A blind job of a method that sums rows by class (``by_class``) runs as this method around it
(job.py), and the method itself knows nothing of it. Round 0 asks every silo which classes it has
records of, 0 or 1 each; nothing trains. Their sum, the holders of each class, comes down in every
later round, and round r is the method's round r - 1. Silos upload a row only where, as security
rule 7 has it::

    holders ≥ min_holders + lost + c

with c colluders and min_holders of the job. ``lost`` is how many silos may drop out of a sum behind
those who still open it. It is 0: everything here is summed over all of the job's silos or not at
all (``JobPlan.terms`` of security/blind/plan.py), but for silos that are proven to have broken the
rules, which are among the c. Presence hardly changes in a job, and so it is summed once, over the
same silos as all else.

Once a sum is open it is too late to leave a row out, so each silo does that before its values are
masked: zeros, of weight 0. All must leave out the same rows, or the one that does not is alone in
its row. So the holders come down as the words of their sum, under the silos' tags
(security/blind/plan.py), and a silo that did not get them uploads nothing at all.

Where the method takes what came down (``deliver``), it sees a class that is not shown as if this
silo had no record of it: so it keeps rows of its own as they are. It trains on all.

=====  ====  ==============================================  ==========
round  way   part                                            exchange
=====  ====  ==============================================  ==========
0      up    ``holders``: [C], 0 or 1                        Sum, total
r ≥ 1  down  ``holders``: [C]; then what the method has      -
=====  ====  ==============================================  ==========
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from ...errors import LocalError, PeerError
from ..course import (
    Change,
    ContributionsAndState,
    Course,
    CourseStep,
    Effort,
    Facts,
    Parts,
    SiloState,
    settled,
)
from ..exchange.delivery import Combined, CoordinatorState, Delivery, Latest, Results
from ..exchange.parts import Contribution, Kind, Part, Sum, TensorSpec
from ..method import Method, Setting

HOLDERS = "holders"
# in a silo's state: its own classes as it said in round 0, and the sum over all silos
SAID, COUNTED = "counted.said", "counted.holders"


class ClassCensus(Method):
    """``inner``, with a round before its own in which the holders of each class are counted."""

    census = True

    def __init__(self, inner: Method, setting: Setting, fewest: int) -> None:
        """``inner`` has rounds of its own, from 0 on; a row with ``fewest`` holders is shown."""
        if inner.census:
            raise LocalError(
                f"method {inner.name!r} has a census and sums class by class: its classes are not"
                " counted"
            )
        # Rows must be withheld before they are summed, not from an open sum.
        if inner.withholds:
            raise LocalError(
                f"method {inner.name!r}: option {inner.withholds} withholds rows after they are"
                " summed, in a blind job they are withheld before; take it out, and write"
                " security.min_holders"
            )
        # The job's method digest is made of this name and version.
        self.name, self.version, self.product = inner.name, inner.version, inner.product
        self.loadable, self.addressed, self.tunes = inner.loadable, inner.addressed, inner.tunes
        self.setting, self.options, self.template = setting, inner.options, inner.template
        self._inner, self._fewest = inner, fewest
        # A silo uploads 0 or 1 per class, so a sum is at most the number of silos.
        one = TensorSpec("holders", "int64", (setting.outputs,), 0.0, 1.0)
        every = replace(one, most=float(len(setting.silos)))
        self._uploaded = Part(HOLDERS, Kind.COUNTS, Sum("total"), (one,))
        self._delivered = replace(self._uploaded, tensors=(every,))

    def up(self, round_: int) -> tuple[Part, ...]:
        """The classes that a silo holds; then the method's parts.

        Round 0 has only the count, round r the inner method's parts of round r - 1.
        """
        if round_ == 0:
            return (self._uploaded,)
        return self._inner.up(round_ - 1)

    def down(self, round_: int) -> tuple[Part, ...]:
        """The holders, and what the method delivers.

        Round 0 has nothing to deliver; later rounds always deliver the holders.
        """
        if round_ == 0:
            return ()
        return (self._delivered, *self._inner.down(round_ - 1))

    def stream_round(self, round_: int) -> int:
        """The method's own number, so that it draws the same batches with and without a count."""
        return round_ - 1

    @property
    def compares_labels(self) -> bool:
        """True if the method does."""
        return self._inner.compares_labels

    # The silo half.

    def modules(self, silo: str) -> dict[str, nn.Module]:
        """The method's modules."""
        return self._inner.modules(silo)

    def initial_extra(self, silo: str) -> dict[str, Tensor]:
        """The method's tensors."""
        return self._inner.initial_extra(silo)

    def predict(self, parts: Parts, x: Tensor) -> Tensor:
        """The method's logits."""
        return self._inner.predict(parts, x)

    def measure(self, parts: Parts, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """The method's statistics."""
        return self._inner.measure(parts, x, y)

    @property
    def measures(self) -> bool:
        """As the method."""
        return self._inner.measures

    def effort(self, round_: int) -> Effort:
        """The method's effort; none in round 0.

        Round 0 trains nothing; in a private job only its noised test counts cost budget.
        """
        if round_ == 0:
            return Effort()
        return self._inner.effort(round_ - 1)

    @property
    def private_fault(self) -> str:
        """The method's reason."""
        return self._inner.private_fault

    def deliver(self, state: SiloState, delivered: Results, facts: Facts) -> SiloState:
        """Keep the classes said in round 0, and the holders; the method takes the rest.

        The method sees a class that few hold as if this silo had no record of it. PeerError where
        no holders came, or a class of this silo has none; LocalError where this silo's classes have
        changed since round 0.
        """
        held = facts.class_counts > 0
        if facts.round == 0:
            # Kept, so that ``_check_said`` can compare it with the records of later rounds.
            return replace(state, extra={**state.extra, SAID: held.long()})

        # without the holders this silo cannot know which rows the others leave out
        if HOLDERS not in delivered:
            raise PeerError(
                "coordinator",
                f"delivered no {HOLDERS!r} in round {facts.round}; every round must have them",
            )
        holders = delivered[HOLDERS]["holders"]
        self._check_said(state, held)

        # This silo is a holder itself, so a count of 0 is not the sum.
        missing = torch.nonzero(held & (holders < 1))[:, 0].tolist()
        if missing:
            raise PeerError(
                "coordinator", f"delivered 0 holders of class {missing[0]}, but this silo is one"
            )

        rest = {name: tensors for name, tensors in delivered.items() if name != HOLDERS}
        taken = self._inner.deliver(_own(state), rest, self._shown_facts(facts, holders))
        # The census keeps two tensors of its own next to the method's.
        return SiloState(taken.parts, {**taken.extra, SAID: held.long(), COUNTED: holders})

    def stages(self, state: SiloState, facts: Facts) -> Course:
        """The method's stages; none in round 0."""
        if facts.round == 0:
            return ()
        return tuple(map(_inside, self._inner.stages(_own(state), _earlier(facts))))

    def contribute(
        self, state: SiloState, facts: Facts
    ) -> Mapping[str, Contribution] | ContributionsAndState:
        """The held classes; then the method's uploads, without the rows that are not shown.

        Such rows are zeros of weight 0, so an upload's size tells nothing.
        """
        if facts.round == 0:
            return {HOLDERS: Contribution({"holders": state.extra[SAID]})}
        # ``deliver`` of this round kept the holders.
        holders, held = state.extra[COUNTED], facts.class_counts > 0
        own = _own(state)
        made = self._inner.contribute(own, _earlier(facts))
        contributions, kept = settled(self.name, own, made)
        shown = shown_rows(holders, self._fewest)
        # Here, before values are masked: no row can be taken out of an open sum.
        for name in by_class(self._inner, facts.round - 1):
            contributions[name] = hide_rows(name, contributions[name], held, shown)
        if kept is own:
            return contributions
        return ContributionsAndState(contributions, _counted_in(state, kept))

    def _check_said(self, state: SiloState, held: Tensor) -> None:
        # A silo that gained a class was not counted among its holders, and would be alone in it.
        # ``said`` is absent if the silo missed round 0, and so was not counted.
        said = state.extra.get(SAID)
        if said is None or not torch.equal(said > 0, held):
            raise LocalError(
                "this silo's training records are of other classes than it reported when the job"
                " counted holders; restore the earlier records, or have the job signed under a new"
                " name"
            )

    def _shown_facts(self, facts: Facts, holders: Tensor) -> Facts:
        # Count 0 makes the method keep the silo's own rows of that class.
        counts = torch.where(shown_rows(holders, self._fewest), facts.class_counts, 0)
        return replace(_earlier(facts), class_counts=counts)

    # The coordinator half.

    def begin(self) -> CoordinatorState:
        """The method's state."""
        return self._inner.begin()

    def combine(
        self, state: CoordinatorState, round_: int, cohort: tuple[str, ...], results: Results
    ) -> Combined:
        """Publish the holders, later what the method does; LocalError for impossible holders."""
        # Round r of the job is the method's round r - 1.
        if round_:
            return self._inner.combine(state, round_ - 1, cohort, results)
        if not results[HOLDERS]:
            return Combined(state)  # silos alone read it
        holders = results[HOLDERS]["holders"]
        # Each silo uploads 0 or 1, so honest answers add up to 0 … the number of silos.
        if bool(((holders < 0) | (holders > len(cohort))).any()):
            raise LocalError(
                f"{len(cohort)} silos say that there are {holders.tolist()} holders of each class;"
                " one of them does not count as the job says: find it in its own log, and have the"
                " job signed without it"
            )
        return Combined(state, {HOLDERS: {"holders": holders}})

    def unposted(self, state: CoordinatorState, silos: tuple[str, ...]) -> CoordinatorState:
        """The method's state."""
        return self._inner.unposted(state, silos)

    def deliveries(self, state: CoordinatorState, round_: int, silo: str) -> tuple[Delivery, ...]:
        """The holders, and what the method delivers; nothing before they are counted."""
        if round_ == 0:
            return ()
        return (Latest(HOLDERS), *self._inner.deliveries(state, round_ - 1, silo))

    def mail_fault(self, round_: int, silo: str, shares: Mapping[str, float], keep: float) -> str:
        """The method's answer."""
        return self._inner.mail_fault(round_ - 1, silo, shares, keep)


def by_class(method: Method, round_: int) -> tuple[str, ...]:
    """Parts that a method uploads class by class: ratios, and those that it names."""
    # Rows of a ratio always count as classes, so that no method can forget to name one.
    ratios = filter(_is_ratio, method.up(round_))
    return (*(part.name for part in ratios), *method.by_class(round_))


def _is_ratio(part: Part) -> bool:
    return isinstance(part.exchange, Sum) and part.exchange.form == "ratio"


def shown_rows(holders: Tensor, fewest: int) -> Tensor:
    """Mask [C] of the rows that enough silos hold to be summed.

    ``fewest`` is ``Job.fewest_holders``: ``min_holders`` plus ``colluders``.
    """
    return holders >= fewest


def hide_rows(name: str, contribution: Contribution, held: Tensor, shown: Tensor) -> Contribution:
    """A contribution with zeros, in values and weight, for the rows that are not shown.

    Tensors without rows stay. ``held`` and ``shown`` are bool [C]. LocalError where the
    contribution has a row of a class that this silo does not hold: the silo was not counted among
    its holders.
    """
    weight, shown_weight = contribution.weight, None
    rows = list(contribution.tensors.values())
    # If rows have weights, a row of weight 0 adds nothing, whatever it holds.
    if weight is not None:
        rows = [torch.as_tensor(weight)]
        shown_weight = _only(shown, rows[0])
    if any(_has_others(each, held) for each in rows):
        raise LocalError(
            f"part {name!r} has rows of other classes than this silo has records of; this is a bug"
            " in the method"
        )
    tensors = {key: _only(shown, value) for key, value in contribution.tensors.items()}
    return Contribution(tensors, shown_weight)


def _has_others(rows: Tensor, held: Tensor) -> bool:
    return rows.shape[:1] == held.shape and bool(rows[~held].any())


def _only(shown: Tensor, rows: Tensor) -> Tensor:
    # A tensor without an axis of classes has no rows to hide.
    if rows.shape[:1] != shown.shape:
        return rows
    return torch.where(shown.reshape(-1, *(1,) * (rows.ndim - 1)), rows, torch.zeros_like(rows))


def _inside(step: CourseStep) -> CourseStep:
    """A step of the method as one of this method."""
    if not isinstance(step, Change):
        return step
    inner = step.change

    # The method sees only its own state; the census's tensors are put back afterwards.
    def change(state: SiloState, facts: Facts) -> SiloState:
        return _counted_in(state, inner(_own(state), _earlier(facts)))

    return Change(change)


def _counted_in(state: SiloState, made: SiloState) -> SiloState:
    """The state that the method made, with the census's tensors of the one before."""
    counted = {name: state.extra[name] for name in (SAID, COUNTED)}
    return replace(state, parts=made.parts, extra={**made.extra, **counted})


def _earlier(facts: Facts) -> Facts:
    return replace(facts, round=facts.round - 1)


def _own(state: SiloState) -> SiloState:
    extra = {name: value for name, value in state.extra.items() if name not in (SAID, COUNTED)}
    return replace(state, extra=extra)
