import pytest

from staddle.security.blind.weight_checks import weights_fault

COUNTS = {"a": 45, "b": 30, "c": 45, "d": 45, "e": 200}
TOO_MUCH = "silo 'e' weighs too much among"


@pytest.mark.parametrize(("cohorts", "said"), [
    ([], ""), (["abcd"], ""), (["abcd", "abcd", "acd"], ""),
    (["abcde"], f"{TOO_MUCH} a, b, c, d, e, with 200 records of 365: one silo has 200 of the"),
    (["abcd", "abce"], f"{TOO_MUCH} a, b, c, e, with 200 records of 320: "),
    (["ab"], "silo 'a' weighs too much among a, b, with 45 records of 75: "),
])  # fmt: skip
def test_the_first_cohort_that_breaks_rule_5_is_named_with_its_heaviest_silo(cohorts, said):
    found = weights_fault(COUNTS, cohorts, 3)
    assert found.startswith(said)
    assert bool(found) == bool(said)
    assert not said or found.endswith("; have more silos of its size, or leave it out")


def test_a_larger_cohort_may_be_asked_for():
    assert weights_fault(COUNTS, ["abcd"], 3) == ""
    assert "they count as" in weights_fault(COUNTS, ["abcd"], 5)


def test_cohorts_that_come_again_cost_nothing():
    many = tuple(f"s{n}" for n in range(200))
    assert weights_fault(dict.fromkeys(many, 9), (many for _ in range(2_000)), 3) == ""


def test_where_nothing_is_weighted_nobody_weighs_too_much():
    assert weights_fault({}, ["abcd"], 5) == ""
