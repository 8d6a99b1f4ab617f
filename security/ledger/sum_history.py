"""Values that opened sums of one data set reveal together, over all jobs: security rules 33, 35.

A silo has the same number of records, and of the same classes, in every job. So the sums over {a,
b, c, d, e} and over {a, b, d, e} tell those of c exactly. Several sums may do so where no two of
them do: a set of silos is a row of ones and zeros, and the sums tell every linear combination of
their rows. The silos of a combination are those at which it is not zero.

A silo signs no sum that adds a combination of fewer silos than its policy asks. Two kinds are
excepted. The first is a combination that was told before. The second is one of silos that left the
federation, or that are new to it: founders sign that, and neither a coordinator nor an operator
brings it about. A silo that is proven to have broken the rules of the job counts as one that left
(security/secagg/evidence.py).

Where a job has several batches, each may be summed without the others, and its silos sign that
while those of the others hear nothing of it: all of them count as told.

A silo remembers the sets that it signed, open or not. To open a sum takes the signatures of t of
its n silos. So a later sum either has one of these silos, which refuses, or leaves out all of those
that are honest, t - c or more.

Pure: sets in, a finding out. The sets are folded from the ledger (records.py), which is signed and
append-only.
"""

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, combinations
from math import comb

from .records import SumSigned

# silo, or several that are in the same sets, by one of them; zeros left out
Row = Mapping[str, Fraction]
Basis = Mapping[str, Row]  # by pivot, which is 1 in its row and 0 in all others


@dataclass(frozen=True)
class SignedSet:
    """The silos of a sum that this silo signed, of which job, and who was in the federation when
    it accepted that.
    """

    job: str
    silos: frozenset[str]
    members: frozenset[str]


@dataclass(frozen=True)
class ImpliedSum:
    """A value of these silos together, which a new sum would reveal with those ``by``.

    ``by`` are earlier sums, all of them needed. They tell the operator which jobs the new one
    conflicts with.
    """

    silos: tuple[str, ...]
    by: tuple[SignedSet, ...]


def signed_sets(records: Iterable[SumSigned], datasets: Container[str]) -> tuple[SignedSet, ...]:
    """The sets of sums over a data set, oldest first, in which something stands that is the same in
    every job; ``datasets`` are all of its names.
    """
    found: dict[SignedSet, None] = {}  # in order, each once
    for record in records:
        if record.dataset not in datasets or record.values != "fixed":
            continue
        members = frozenset((*record.survivors, *record.absent))
        # Any batch may have been summed without the others: all of them count.
        batches = (batch.split(",") for batch in record.batches)
        for silos in (record.survivors, *batches):
            found[SignedSet(record.job, frozenset(silos), members)] = None
    return tuple(found)


def _distinct(history: Iterable[SignedSet]) -> list[frozenset[str]]:
    """The sets of silos, each once, oldest first."""
    return list(dict.fromkeys(each.silos for each in history))


def choices(history: Sequence[SignedSet], silos: Collection[str], least: int) -> int:
    """An upper bound on the combinations that ``find_implied`` looks at.

    It grows fast with the number of silos that the sets tell apart, so callers bound it before
    they call ``find_implied``.
    """
    groups = _alike([*_distinct(history), frozenset(silos)])
    small = len(_smaller(groups, least))
    return sum(comb(small, count) for count in range(1, least))


def find_implied(
    history: Sequence[SignedSet], silos: Collection[str], members: Collection[str], least: int
) -> ImpliedSum | None:
    """The smallest combination of fewer than ``least`` silos that a sum over ``silos`` would add.

    None for none.

    ``members`` are the silos of the federation now. The work grows with the number of ways to
    choose fewer than ``least`` silos among those that some set tells apart.
    """
    # The same set again tells what it told before.
    new, before = frozenset(silos), _distinct(history)
    if new in before or not before:
        return None

    # Silos that no set tells apart count as one, which keeps the search small.
    groups = _alike([*before, new])
    old, now = _reduced(_rows(before, groups)), _reduced(_rows([*before, new], groups))

    # Founders sign who joins and who leaves: neither a coordinator nor an operator brings it about.
    joined = new.difference(*(each.members for each in history))
    left = frozenset().union(*before).difference(members)
    excused = joined | left

    settled = [new]  # one sum by itself is judged by its size (security/secagg/spec.py)
    for chosen in _unions(groups, least):
        implied = frozenset(chain.from_iterable(groups[name] for name in chosen))
        if any(known <= implied for known in settled) or not _tells(now, chosen):
            continue
        if not _tells(old, chosen) and not implied <= excused:
            return ImpliedSum(tuple(sorted(implied)), _by(history, new, chosen, groups))
        settled.append(implied)
    return None


def _by(
    history: Sequence[SignedSet],
    new: frozenset[str],
    chosen: Collection[str],
    groups: Mapping[str, Sequence[str]],
) -> tuple[SignedSet, ...]:
    """Sums without which the new one would not tell it, the newest where several would do."""
    # Oldest first, so that what stays is the newest.
    needed = {each.silos: each for each in history}
    for silos in tuple(needed):
        fewer = needed.copy()
        del fewer[silos]
        # If the other sums are enough without it, this one is not needed.
        basis = _reduced(_rows([*fewer, new], groups))
        if _tells(basis, chosen):
            needed = fewer
    return tuple(needed.values())


def _alike(sets: Sequence[frozenset[str]]) -> Mapping[str, tuple[str, ...]]:
    """Silos that are in the same sets, and so in no combination without one another.

    By the first of them.
    """
    found: dict[tuple[bool, ...], list[str]] = {}
    for silo in sorted(frozenset().union(*sets)):
        found.setdefault(tuple(silo in each for each in sets), []).append(silo)
    return {silos[0]: tuple(silos) for silos in found.values()}


def _unions(groups: Mapping[str, Sequence[str]], least: int) -> Iterator[tuple[str, ...]]:
    """Groups that have fewer than ``least`` silos together, the fewest silos first."""
    # A group of ``least`` silos or more is too large for any of these unions.
    small = _smaller(groups, least)
    sized = []
    for count in range(1, least):
        for chosen in combinations(small, count):
            size = sum(len(groups[name]) for name in chosen)
            sized.append((size, chosen))
    # Sorted by number of silos, so that the first one revealed is the smallest.
    for size, chosen in sorted(sized):
        if size < least:
            yield chosen


def _smaller(groups: Mapping[str, Sequence[str]], least: int) -> list[str]:
    """Groups of fewer than ``least`` silos."""
    return [name for name, silos in groups.items() if len(silos) < least]


def _rows(sets: Iterable[frozenset[str]], groups: Iterable[str]) -> Iterator[Row]:
    # Exact fractions: with floats, rounding would decide whether a combination is zero.
    return ({name: Fraction(1) for name in groups if name in each} for each in sets)


def _tells(basis: Basis, chosen: Collection[str]) -> bool:
    """True if a combination of the rows is zero everywhere but in ``chosen``.

    Such a combination takes only rows whose pivots are chosen, and these cancel elsewhere.
    """
    # Rows that are dependent elsewhere have a combination that cancels there.
    rows = _only(basis, chosen)
    elsewhere = [_except(row, chosen) for row in rows.values()]
    return len(_reduced(elsewhere)) < len(rows)


def _only(basis: Basis, pivots: Collection[str]) -> Basis:
    return {pivot: row for pivot, row in basis.items() if pivot in pivots}


def _except(row: Row, names: Collection[str]) -> Row:
    return {name: value for name, value in row.items() if name not in names}


def _reduced(rows: Iterable[Row]) -> Basis:
    """The reduced row echelon form, exactly."""
    basis: dict[str, Row] = {}
    for each in rows:
        # What the rows before tell already is taken off; if nothing is left, this one adds nothing.
        row = each
        for pivot, known in basis.items():
            row = _without(row, known, pivot)
        if not row:
            continue
        pivot = min(row)
        scaled = _scaled(row, 1 / row[pivot])

        # And the rows before become zero at its pivot.
        for name, known in basis.items():
            basis[name] = _without(known, scaled, pivot)
        basis[pivot] = scaled
    return basis


def _scaled(row: Row, factor: Fraction) -> Row:
    return {name: factor * value for name, value in row.items()}


def _without(row: Row, other: Row, pivot: str) -> Row:
    """A row less so much of another one that it is zero at the other one's pivot."""
    factor = row.get(pivot)
    if not factor:
        return row
    found = dict(row)
    for name, value in other.items():
        rest = found.pop(name, Fraction(0)) - factor * value
        if rest:
            found[name] = rest
    return found
