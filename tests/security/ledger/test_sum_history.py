"""What sums over several sets of silos tell together, beside a search of all combinations."""

from itertools import combinations, product

import numpy as np
import pytest

from staddle.security.ledger.records import SumSigned
from staddle.security.ledger.sum_history import SignedSet, choices, find_implied, signed_sets

MEMBERS = frozenset("abcdefgh")
LEAST = 3


def history(*sets, members=MEMBERS):
    return [
        SignedSet(f"j{number}", frozenset(silos), frozenset(members))
        for number, silos in enumerate(sets)
    ]


def of(found):
    return "" if found is None else "".join(found.silos)


@pytest.mark.parametrize(("before", "new", "told_of"), [
    ([], "abcd", ""), (["abcde"], "abcde", ""), (["abcde"], "abde", "c"), (["abde"], "abcde", "c"),
    (["abcde"], "abdf", ""),  # c, e and f together
    (["abcdef"], "abcd", "ef"), (["abcdefg"], "abcd", ""), (["abcd"], "efgh", ""),
    (["abcdef", "abc"], "def", ""),  # nothing new: it is the difference of the two
    (["abcdef", "abc"], "de", "f"),
    (["abcdefgh", "abcd"], "efg", "h"),  # no pair of sets is so near, all three are
    (["abcd", "cdef", "efgh"], "abgh", ""),  # in the space of the others
    (["abcd", "cdef"], "abef", "ab"),  # half of the sum of all
])  # fmt: skip
def test_what_a_new_sum_tells(before, new, told_of):
    assert of(find_implied(history(*before), new, MEMBERS, LEAST)) == told_of


def test_it_names_the_sums_by_which_it_is_told():
    found = find_implied(history("abcdefgh", "abcd", "bcde"), "efg", MEMBERS, LEAST)
    assert [each.job for each in found.by] == ["j0", "j1"]
    found = find_implied(history("abcde", "abcde", "efgh"), "abde", MEMBERS, LEAST)
    assert [each.job for each in found.by] == ["j1"]  # the newest of one set


def test_what_was_told_before_is_told_again():
    """Whoever lowered the bound once is not asked about the same any more."""
    assert find_implied(history("abcde", "abde"), "abcde", MEMBERS, LEAST) is None
    assert find_implied(history("abcde", "abde"), "abcdefg", MEMBERS, LEAST).silos == ("f", "g")
    assert find_implied(history("abcdefg", "abdefg"), "abde", MEMBERS, LEAST).silos == ("f", "g")


def test_who_left_by_the_roster_may_be_told():
    gone = MEMBERS - {"c"}
    assert find_implied(history("abcde"), "abde", gone, LEAST) is None
    assert of(find_implied(history("abcde"), "abd", gone, LEAST)) == "ce"  # e is still there
    back = history("abcde")[0], *history("abde", members=gone)
    assert find_implied(back, "abcde", MEMBERS, LEAST) is None


def test_who_is_new_by_the_roster_may_be_told_once():
    small = MEMBERS - {"f"}
    assert find_implied(history("abcde", members=small), "abcdef", MEMBERS, LEAST) is None
    # It was in the roster when a sum left it out: then the operator chose, not the founders.
    assert of(find_implied(history("abcde"), "abcdef", MEMBERS, LEAST)) == "f"
    # Once it took part it is new no more, whatever older rosters say.
    old = history("abcde", members=small)[0], SignedSet("now", frozenset("abfgh"), MEMBERS)
    assert of(find_implied(old, "abgh", MEMBERS, LEAST)) == "f"


@pytest.mark.parametrize("least", [1, 2, 4])
def test_the_bound_is_the_number_of_silos(least):
    assert (find_implied(history("abcdefg"), "abcd", MEMBERS, least) is None) == (least <= 3)


def test_the_largest_bound_among_many_silos_takes_seconds():
    """Sixteen groups that the sets tell apart."""
    silos = [f"{letter}{number}" for letter in "abcdefghijklmnop" for number in range(3)]
    sets = [[silo for silo in silos if ord(silo[0]) - 97 & 1 << bit] for bit in range(3)]
    found = find_implied(
        history(*sets, members=silos), [s for s in silos if ord(s[0]) - 97 & 8], silos, 8
    )
    assert found is None


def slow(sets, new, least):
    """All combinations of up to four sets by small integers: the fewest silos the new one adds."""
    silos = sorted(frozenset().union(*sets, new))
    rows = np.array([[silo in each for silo in silos] for each in (*sets, new)], int)

    def supports(most):
        """Which silos are left in any combination, with the new set at most so many times."""
        factors = [range(-3, 4)] * len(sets) + [range(-most, most + 1)]
        held = np.array(list(product(*factors))) @ rows != 0
        return {frozenset(np.flatnonzero(each)) for each in np.unique(held, axis=0)}

    whole = frozenset(silos.index(silo) for silo in new)
    fresh = [s for s in supports(3) - supports(0) if len(s) < least and not whole <= s]
    return min(map(len, fresh), default=0)


def test_it_finds_what_trying_all_combinations_finds():
    rng = np.random.default_rng(5)
    seen = set()
    for _ in range(120):
        sets = [
            frozenset(rng.choice(list("abcdefgh"), rng.integers(3, 8), replace=False))
            for _ in range(4)
        ]
        *before, new = sets
        if new in before:
            continue
        found = find_implied(history(*before), new, MEMBERS, LEAST)
        assert len(of(found)) == slow(before, new, LEAST), sets
        seen.add(len(of(found)))
    assert seen == {0, 1, 2}


def record(**changes):
    fields = {"job": "j1", "job_digest": "ab" * 32, "round": 0, "ctx": "cd" * 32, "dataset": "data"}
    return SumSigned(
        **{**fields, "survivors": ("a", "b", "d"), "absent": ("c",), "values": "fixed", **changes}
    )


def test_batches_count_as_told_each_by_itself():
    """Silos of one sign without the other, which hears nothing of it."""
    whole = record(survivors=tuple("abcdef"), absent=("g",), batches=("a,c,e", "b,d,f"))
    before = signed_sets([whole], "data")
    members = frozenset("abcdefg")
    wanted = tuple(SignedSet("j1", frozenset(each), members) for each in ("abcdef", "ace", "bdf"))
    assert before == wanted
    assert find_implied(before, "aceg", members, 3).silos == ("g",)
    assert find_implied(before, "bdf", members, 3) is None
    assert find_implied(before[:1], "aceg", members, 3) is None


def test_choices_are_counted_before_they_are_made():
    sets = [frozenset(map(str, range(size))) for size in range(20, 26)]
    before = [SignedSet("j", each, sets[-1]) for each in sets[:-1]]
    assert choices(before, sets[-1], 3) == 5 + 10  # the twenty that are in all go together
    assert choices(before, sets[-1], 6) == 2**5 - 1


def test_the_fold_takes_the_data_set_and_what_never_changes():
    records = [
        record(), record(round=4), record(job="j2", values="varying"),
        record(job="j3", dataset="other"), record(job="j4", absent=()),
    ]  # fmt: skip
    assert signed_sets(records, "data") == (
        SignedSet("j1", frozenset("abd"), frozenset("abcd")),
        SignedSet("j4", frozenset("abd"), frozenset("abd")),
    )


def test_every_silo_alone_is_found_among_all_that_leave_one_out():
    for gone, other in combinations("abcdef", 2):
        left = [MEMBERS - {gone}, MEMBERS - {other}]
        assert of(find_implied(history(left[0]), left[1], MEMBERS, LEAST)) == gone + other


def test_three_sums_of_which_no_silo_was_in_all_are_not_seen():
    """Documented: each silo judges by what it signed itself."""
    nine, four, other = frozenset("abcdefghi"), frozenset("abcd"), frozenset("efgh")
    assert find_implied([SignedSet("1", nine, nine)], four, nine, LEAST) is None  # at a, b, c and d
    assert (
        find_implied([SignedSet("1", nine, nine)], other, nine, LEAST) is None
    )  # at e, f, g and h
    # at nobody
    found = of(
        find_implied([SignedSet("1", nine, nine), SignedSet("2", four, nine)], other, nine, LEAST)
    )
    assert found == "i"
