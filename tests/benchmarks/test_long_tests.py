import sys

import pytest


def results(times):
    """As pytest writes them: seconds by class and test."""
    cases = "".join(
        f'<testcase classname="{module}" name="{name}" time="{seconds}" />'
        for (module, name), seconds in times.items()
    )
    return f'<testsuites><testsuite name="pytest">{cases}</testsuite></testsuites>'.encode()


TIMES = {
    ("tests.silo.test_work", "test_slow[a]"): 2.0,
    ("tests.silo.test_work", "test_slow[b]"): 0.6,
    ("tests.silo.test_work", "test_quick[a]"): 1.0,
    ("tests.silo.test_work", "test_quick[b]"): 1.0,
    ("tests.silo.test_work.TestMany", "test_often[a]"): 1.0,
    **{("tests.silo.test_work.TestMany", f"test_often[{each}]"): 0.9 for each in range(9)},
    ("tests.test_whole", "test_slow"): 9.0,
    ("tests.test_whole", "test_quick"): 0.5,
    ("tests.federation.test_quick", "test_quick"): 0.1,
}
LONG = [
    "examples",
    "faults",
    "federation",
    "silo/test_work.py::test_often",
    "silo/test_work.py::test_slow",
    "test_whole.py",
]


def test_functions_files_and_folders_are_long(program):
    assert sorted(program.long_ones(program.read(results(TIMES)))) == LONG


def test_the_list_is_written_and_summed_up(program, tmp_path, monkeypatch, capsys):
    (tmp_path / "results.xml").write_bytes(results(TIMES))
    monkeypatch.setattr(program, "LIST", tmp_path / "long.txt")
    monkeypatch.setattr(sys, "argv", ["", "--junit", str(tmp_path / "results.xml")])
    program.main()
    assert (tmp_path / "long.txt").read_text().splitlines() == LONG
    assert capsys.readouterr().out == "long: 15 tests, 21 s\nothers: 2 tests, 2 s\n"


@pytest.mark.parametrize("seconds", [1.1, 1.3])
def test_a_test_is_long_by_its_mean(program, seconds):
    times = {("tests.test_a", "test_one"): seconds, ("tests.test_a", "test_other"): 0.5}
    assert ("test_a.py::test_one" in program.long_ones(program.read(results(times)))) == (
        seconds > 1.2
    )
