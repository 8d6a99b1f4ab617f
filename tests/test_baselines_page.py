"""docs/baselines.md says of every baseline what the code says."""

import re
from pathlib import Path

import pytest
from support.jobs import make_job

from staddle.algorithms.catalog import METHODS, configure, method_options
from staddle.algorithms.exchange.parts import Each

PAGE = Path(__file__).parents[1] / "docs" / "baselines.md"
# in README
ELSEWHERE = {"fedaims", "fedavg", "fedper", "fedsimsup", "fedssa", "local", "pfedsim", "ppfl"}
# the options that the page names
WITH = {
    "fedclassavg": {"contrast": 0.0},
    "fedcp": {"lam": 0.0},
    "fedpac": {"variances": "pooled"},
}

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="docs are not beside the tests")


def rows():
    """The cells of each method's line, by its name."""
    lines = [
        line.split(" | ")
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if line.startswith("| `")
    ]
    return {
        re.match(r"\| `([a-z-]+)`", cells[0])[1]: [cell.strip("| ") for cell in cells]
        for cells in lines
    }


def method(name, options):
    setting = make_job(model={"norm": "group"}, silos=list("abcd"), rounds=3).setting()
    return configure(name, method_options(name, options), setting)


def test_the_page_has_every_baseline_and_no_other():
    assert rows().keys() == METHODS.keys() - ELSEWHERE


@pytest.mark.parametrize("name", sorted(METHODS.keys() - ELSEWHERE))
def test_what_crosses_and_who_may_have_it_is_what_the_code_says(name):
    _, crosses, *_, blind, private = rows()[name]

    def exchanges(options):
        chosen = method(name, options)
        return {type(part.exchange) for round_ in range(4) for part in chosen.up(round_)}

    named = set(re.findall(r"`(Sum|Mix|Gram|Each)`", crosses))
    assert named == {kind.__name__ for o in ({}, WITH.get(name, {})) for kind in exchanges(o)}
    assert blind.startswith("no") == (Each in exchanges(WITH.get(name, {})))
    assert blind.startswith("with") == (
        Each in exchanges({}) and Each not in exchanges(WITH.get(name, {}))
    )
    faults = [method(name, options).private_fault for options in ({}, WITH.get(name, {}))]
    assert private.split()[0] == ("yes" if not faults[0] else "no" if faults[1] else "with")
