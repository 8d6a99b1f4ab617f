"""Batches of a blind job: silos that are in a sum together or not at all.

Sums over sets that change from round to round reveal single silos: after 60 rounds of 10 silos at
participation 0.5 least squares gave each silo's update (So et al., "Securing Secure Aggregation",
AAAI 2023, Theorem 1). Where silos are summed in fixed disjoint batches alone, any number of rounds
reveals no more than the sums of these batches (Theorem 2).

Batches follow from the job, so each silo knows them without asking anybody.

A silo that is proven to have broken the rules (security/secagg/evidence.py) may leave its batch,
which continues without it. The other silos of the batch stay together, so no difference of sums
shows fewer honest silos than before: evidence holds against no honest silo, and one of the
colluders could have revealed its own contribution at any time.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import combinations, filterfalse, pairwise

from ..numerics.streams import permutation, stream

Batches = tuple[tuple[str, ...], ...]


def drawn_batches(participation: float, silos: int, least: int, fewest: int) -> tuple[int, int]:
    """Numbers of batches that a job has and that each round draws; (1, 1) if none fit.

    A batch has at least ``least`` silos and a round at least ``fewest``. Among the pairs that fit,
    the share of the batches in a round comes nearest to ``participation``; ties go to fewer
    batches.
    """

    def badness(pair: tuple[int, int]) -> tuple[float, int]:
        number, taken = pair
        return abs(taken / number - participation), number

    possible = range(1, silos // least + 1)
    # taken < number: a round of all batches would draw every silo.
    pairs = ((number, taken) for taken, number in combinations(possible, 2))
    fitting = [pair for pair in pairs if smallest_round(silos, *pair) >= fewest]
    return min(fitting, key=badness, default=(1, 1))


def whole_batches(silos: int, least: int, fewest: int) -> Iterator[int]:
    """Into how many batches, two or more, rounds of all silos may be split; the most first.

    More batches are better: a lost silo costs its round fewer others. A batch has at least
    ``least`` silos, and all batches but one still make a sum of ``fewest`` silos.
    """
    for number in range(silos // least, 1, -1):
        # number − 1: a round that loses a silo still sums all other batches.
        if smallest_round(silos, number, number - 1) >= fewest:
            yield number


def smallest_round(silos: int, number: int, taken: int) -> int:
    """Silos of the ``taken`` smallest of so many batches.

    The sizes of batches differ by at most one silo.
    """
    size, larger = divmod(silos, number)
    # ``number - larger`` batches have ``size`` silos, the others one more.
    return taken * size + max(0, taken - (number - larger))


def split(silos: Sequence[str], number: int) -> Batches:
    """The silos in ``number`` batches, whose sizes differ by at most one, each in job order.

    The draw is random but follows from the silos alone, so two jobs of the same silos have the
    same batches.
    """
    # A fixed seed: jobs of the same silos have the same batches, so that sums of several jobs do
    # not differ by single silos.
    named = sorted(silos)
    rng = stream(0, ",".join(named), 0, "batches")
    shuffled = [named[at] for at in permutation(rng, len(silos))]
    cuts = [len(silos) * cut // number for cut in range(number + 1)]
    batches = (shuffled[start:end] for start, end in pairwise(cuts))
    # Job order within a batch, since folds go in job order.
    return tuple(tuple(sorted(batch, key=silos.index)) for batch in batches)


def unbroken(
    batches: Batches, silos: Iterable[str], proven: Collection[str] = (), least: int = 1
) -> tuple[str, ...]:
    """The ``silos``, in their order, whose batch can be summed; all if there are no batches.

    A batch may lack silos that are ``proven`` to have broken the rules, while at least ``least`` of
    it are present. A batch that lacks any other silo is out of the round.
    """
    # A tuple, since ``silos`` may be an iterator and is read more than once.
    present = tuple(silos)
    if not batches:
        return present
    kept: set[str] = set()
    # Two sums of one batch, with and without a silo, would differ by that silo's part.
    for batch in batches:
        missing = set(batch).difference(present)
        if missing.issubset(proven) and _enough(len(batch) - len(missing), batch, least):
            kept.update(batch)
    return tuple(filter(kept.__contains__, present))


def without(batches: Batches, proven: Collection[str], least: int) -> Batches:
    """The batches that can still be summed once these silos have left.

    Each is whole, or has ``least`` silos or more.
    """
    found = []
    for batch in batches:
        left = tuple(filterfalse(proven.__contains__, batch))
        if _enough(len(left), batch, least):
            found.append(left)
    return tuple(found)


def _enough(left: int, batch: Sequence[str], least: int) -> bool:
    """True if a batch may be summed; a whole batch may, even if it is small."""
    return left >= min(least, len(batch))
