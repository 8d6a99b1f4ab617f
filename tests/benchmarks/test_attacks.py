import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "threat-model.md"
ATTACKS = Path(__file__).resolve().parents[1] / "attacks"


def results(*cases):
    """As pytest writes them: (module, actor, outcome, marks)."""
    text = ""
    for number, (module, actor, outcome, *marks) in enumerate(cases):
        own = [f'<property name="actor" value="{actor}"/>'] if actor else []
        own += [f'<property name="{mark}" value="yes"/>' for mark in marks]
        inner = f"<properties>{''.join(own)}</properties>" + (f"<{outcome}/>" if outcome else "")
        text += f'<testcase classname="{module}" name="test_{number}">{inner}</testcase>'
    return f'<testsuites><testsuite name="pytest">{text}</testsuite></testsuites>'.encode()


def test_each_attack_counts_for_its_actor(program):
    found, wrong = program.tallies(
        program.read(
            results(
                ("tests.attacks.test_one", "silo", ""),
                ("tests.attacks.test_one", "silo", "failure"),
                ("tests.attacks.test_two", "coordinator", ""),
                ("tests.attacks.test_two", "coordinator", "", "succeeds"),
                ("tests.attacks.test_two", "coordinator", "", "control"),
                ("tests.silo.test_work", "", "failure"),
            )
        )
    )
    assert wrong == ["tests.attacks.test_one.test_1: the attack succeeded"]
    assert program.table(found).splitlines()[2:] == [
        "| coordinator | 2 | 1 | 1 | 1 |",
        "| silo | 2 | 1 | 1 | 0 |",
        "| all | 4 | 2 | 2 | 1 |",
    ]


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (("tests.attacks.test_one", "", ""), "says no actor"),
        (("tests.attacks.test_one", "silo", "error"), "could not be run"),
        (("tests.attacks.test_one", "silo", "skipped"), "was left out"),
        (("tests.attacks.test_one", "silo", "failure", "control"),
            "the attacks beside it show nothing"),
        (("tests.attacks.test_one", "silo", "failure", "succeeds"),
            "does not go as docs/threat-model.md says"),
        (("tests.silo.test_work", "silo", ""), "have no test of"),
    ],
)  # fmt: skip
def test_what_says_too_little_is_named(program, case, said):
    (wrong,) = program.tallies(program.read(results(case)))[1]
    assert said in wrong


def test_what_pytest_did_not_write_is_no_result(program):
    with pytest.raises(ValueError, match="write them with --junit-xml"):
        program.read(b"passed")


def test_each_file_has_an_actor_and_the_page_has_them_all():
    """The counts are of the day that stands below the table; the actors are those of today."""
    actors = set()
    for path in ATTACKS.glob("test_*.py"):
        assert re.search(r"^pytestmark = .*mark\.actor\(", path.read_text(), re.MULTILINE), (
            path.name
        )
        actors |= set(re.findall(r'mark\.actor\("([^"]+)"\)', path.read_text()))
    lines = PAGE.read_text().split("| actor | tried |")[1].splitlines()[2:]
    table = [line.strip("| ").split(" | ") for line in lines[: lines.index("")]]
    assert [row[0] for row in table] == [*sorted(actors), "all"]
    columns = list(zip(*[[int(cell) for cell in row[1:]] for row in table], strict=True))
    assert all(sum(column[:-1]) == column[-1] for column in columns)
    assert columns[0] == tuple(map(sum, zip(columns[1], columns[2], strict=True)))
