"""Batches of a blind job: silos that are in a sum together or not at all.

Sums over sets that change from round to round tell single silos: after 60 rounds of 10 silos at
participation 0.5 least squares gave each silo's update (So et al., "Securing Secure Aggregation",
AAAI 2023, Theorem 1). Where silos are summed in fixed disjoint batches alone, any number of rounds
tells no more than the sums of these batches (Theorem 2).

Batches follow from the job, so each silo knows them without asking anybody.

A silo that is proven to have broken the rules (security/secagg/evidence.py) may leave its batch,
which goes on without it. The other silos of the batch stay together, so no difference of sums shows
fewer honest silos than before: evidence holds against no honest silo, and one of the colluders
could have told what it gave at any time.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise

from ..numerics.streams import permutation, stream

Batches = tuple[tuple[str, ...], ...]


def drawn_batches(participation: float, silos: int, least: int, fewest: int) -> tuple[int, int]:
    """How many batches there are, and how many of them take part in a round, where not all do.

    (1, 1) if none fit.

    Of batches of at least ``least`` silos, with ``fewest`` silos or more in a round: those whose
    share of a round is nearest to ``participation``, the fewest.
    """
    pairs = [
        (number, taken) for number in range(2, silos // least + 1) for taken in range(1, number)
    ]
    fit = [pair for pair in pairs if smallest_round(silos, *pair) >= fewest]
    return min(
        fit, key=lambda pair: (abs(pair[1] / pair[0] - participation), pair[0]), default=(1, 1)
    )


def whole_batches(silos: int, least: int, fewest: int) -> Iterator[int]:
    """Into how many batches rounds of all silos may be split, the most first, so that a lost silo
    costs few others.

    Batches of at least ``least`` silos, of which all but one make a sum of ``fewest`` silos or
    more; 1 comes last.
    """
    fit = (
        number
        for number in range(silos // least, 1, -1)
        if smallest_round(silos, number, number - 1) >= fewest
    )
    yield from (*fit, 1)


def smallest_round(silos: int, number: int, taken: int) -> int:
    """Silos of the ``taken`` smallest of so many batches."""
    size, larger = divmod(silos, number)
    return taken * size + max(0, taken - (number - larger))


def split(silos: Sequence[str], number: int) -> Batches:
    """So many batches, whose sizes differ by one at most, each in job order.

    A random draw that follows from the silos alone, so that two jobs of the same silos have the
    same batches.
    """
    named = sorted(silos)
    order = [
        silos.index(named[at])
        for at in permutation(stream(0, ",".join(named), 0, "batches"), len(silos))
    ]
    cuts = [len(silos) * cut // number for cut in range(number + 1)]
    places = [sorted(order[start:end]) for start, end in pairwise(cuts)]
    return tuple(tuple(silos[at] for at in batch) for batch in places)


def unbroken(
    batches: Batches, silos: Iterable[str], proven: Collection[str] = (), least: int = 1
) -> tuple[str, ...]:
    """Those of ``silos``, in their order, whose batch is wholly among them.

    All of them where there are no batches.

    A batch may lack silos that are ``proven`` to have broken the rules, while at least ``least`` of
    it are there.
    """
    given = tuple(silos)
    if not batches:
        return given
    kept: set[str] = set()
    for batch in batches:
        missing = set(batch).difference(given)
        if not missing or (missing <= set(proven) and len(batch) - len(missing) >= least):
            kept.update(batch)
    return tuple(silo for silo in given if silo in kept)


def without(batches: Batches, proven: Collection[str], least: int) -> Batches:
    """The batches that can still be summed once these silos have left: each whole, or with
    ``least`` silos or more.
    """
    left = (tuple(silo for silo in batch if silo not in proven) for batch in batches)
    return tuple(
        found
        for found, batch in zip(left, batches, strict=True)
        if len(found) >= min(least, len(batch))
    )
