"""What the sums that were opened of one data set tell together, over all jobs: SECURITY.md rules 33
and 35.

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

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from math import comb

from .records import SumSigned

# silo, or several that are in the same sets, by one of them; zeros left out
Row = Mapping[str, Fraction]
Basis = Mapping[str, Row]  # by pivot, which is 1 in its row and 0 in all others


@dataclass(frozen=True)
class SignedSet:
    """The silos of a sum that this silo signed, of which job, and who was in the federation
    then.
    """

    job: str
    silos: frozenset[str]
    members: frozenset[str]


@dataclass(frozen=True)
class ImpliedSum:
    """A value of these silos together, which a new sum would tell beside these others."""

    silos: tuple[str, ...]
    by: tuple[SignedSet, ...]


def signed_sets(records: Iterable[SumSigned], dataset: str) -> tuple[SignedSet, ...]:
    """The sets of sums over a data set in which something stands that is the same in every job,
    oldest first.
    """
    found = []
    for record in records:
        if record.dataset == dataset and record.values == "fixed":
            members = frozenset((*record.survivors, *record.absent))
            sets = (record.survivors, *(batch.split(",") for batch in record.batches))
            found += [SignedSet(record.job, frozenset(each), members) for each in sets]
    return tuple(dict.fromkeys(found))


def choices(history: Sequence[SignedSet], silos: Collection[str], least: int) -> int:
    """How many combinations ``told`` looks at, at most."""
    groups = _alike([*dict.fromkeys(each.silos for each in history), frozenset(silos)])
    small = sum(len(each) < least for each in groups.values())
    return sum(comb(small, count) for count in range(1, least))


def told(
    history: Sequence[SignedSet], silos: Collection[str], members: Collection[str], least: int
) -> ImpliedSum | None:
    """The smallest combination of fewer than ``least`` silos that a sum over ``silos`` would add.

    None for none.

    ``members`` are the silos of the federation now. The work grows with the number of ways to
    choose fewer than ``least`` silos among those that some set tells apart.
    """
    new, before = frozenset(silos), list(dict.fromkeys(each.silos for each in history))
    if new in before or not before:
        return None
    groups = _alike([*before, new])
    old, now = _reduced(_rows(before, groups)), _reduced(_rows([*before, new], groups))
    joined = new.difference(*(each.members for each in history))
    excused = joined | {silo for each in before for silo in each}.difference(members)
    settled = [new]  # one sum by itself is judged by its size (security/secagg/spec.py)
    for chosen in _unions(groups, least):
        of = frozenset(silo for name in chosen for silo in groups[name])
        if any(known <= of for known in settled) or not _tells(now, chosen):
            continue
        if not _tells(old, chosen) and not of <= excused:
            return ImpliedSum(tuple(sorted(of)), _by(history, new, chosen, groups))
        settled.append(of)
    return None


def _by(
    history: Sequence[SignedSet],
    new: frozenset[str],
    chosen: Collection[str],
    groups: Mapping[str, Sequence[str]],
) -> tuple[SignedSet, ...]:
    """Sums without which the new one would not tell it, the newest where several would do."""
    needed = list({each.silos: each for each in history}.values())
    for each in tuple(needed):
        fewer = [kept for kept in needed if kept != each]
        if _tells(_reduced(_rows([*(kept.silos for kept in fewer), new], groups)), chosen):
            needed = fewer
    return tuple(needed)


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
    small = [name for name, silos in groups.items() if len(silos) < least]
    every = (chosen for count in range(1, least) for chosen in combinations(small, count))
    sized = ((sum(len(groups[name]) for name in chosen), chosen) for chosen in every)
    return (chosen for size, chosen in sorted(each for each in sized if each[0] < least))


def _rows(sets: Iterable[frozenset[str]], groups: Iterable[str]) -> Iterator[Row]:
    return ({name: Fraction(1) for name in groups if name in each} for each in sets)


def _tells(basis: Basis, chosen: Collection[str]) -> bool:
    """Whether a combination of the rows is zero everywhere but in ``chosen``.

    Such a combination takes only rows whose pivots are chosen, and these cancel elsewhere.
    """
    rows = [row for pivot, row in basis.items() if pivot in chosen]
    elsewhere = ({name: value for name, value in row.items() if name not in chosen} for row in rows)
    return len(_reduced(elsewhere)) < len(rows)


def _reduced(rows: Iterable[Row]) -> Basis:
    """The reduced row echelon form, exactly."""
    basis: dict[str, Row] = {}
    for each in rows:
        row = each
        for pivot, known in basis.items():
            row = _without(row, known, pivot)
        if not row:
            continue
        pivot = min(row)
        row = {name: value / row[pivot] for name, value in row.items()}
        basis = {name: _without(known, row, pivot) for name, known in basis.items()} | {pivot: row}
    return basis


def _without(row: Row, other: Row, pivot: str) -> Row:
    """A row less so much of another one that it is zero at the other one's pivot."""
    factor = row.get(pivot)
    if not factor:
        return row
    names = dict.fromkeys((*row, *other))
    found = {
        name: row.get(name, Fraction(0)) - factor * other.get(name, Fraction(0)) for name in names
    }
    return {name: value for name, value in found.items() if value}
