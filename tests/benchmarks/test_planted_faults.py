import json
from collections import Counter
from pathlib import Path

import pytest

import staddle

ROOT = Path(str(staddle.__file__)).resolve().parent  # what is installed: the checkout, or the wheel


def test_there_are_twenty_faults_a_folder_two_a_module_at_most(program, monkeypatch):
    """Each snippet stands once, and the module with the fault is other code."""
    places, place = [], program.place
    monkeypatch.setattr(program, "place", lambda *of: places.append(place(*of)) or places[-1])
    faults = program.faults()
    for fault in faults:
        assert program.planted(ROOT, fault) != places[-1].read_text(), fault
        assert fault.why.endswith("."), fault
    expected = {"security": 20, "silo": 20, "coordinator": 20}
    assert Counter(fault.folder for fault in faults) == expected
    assert len(places) == 60
    assert max(Counter(places).values()) == 2


@pytest.mark.parametrize(
    ("text", "said"), [("", "0 times, in no module"), ("a b a", "2 times, in silo/x.py")]
)
def test_a_snippet_that_is_missing_or_not_unique_is_named(program, tmp_path, text, said):
    (tmp_path / "silo").mkdir()
    (tmp_path / "silo" / "x.py").write_text(text)
    fault = program.Fault(7, "silo", "a", "b", "Nothing is broken.")
    with pytest.raises(ValueError, match=f"fault 7: its snippet stands {said}"):
        program.place(tmp_path, fault)


def test_results_are_counted_by_folder_and_read_again(program, tmp_path):
    made = {
        2: program.Result(2, "silo", found=False, test=None),
        1: program.Result(1, "security", found=True, test="tests/security/test_x.py::test_y"),
    }
    path = tmp_path / "out.json"
    program.write(path, made)
    assert [each["number"] for each in json.loads(path.read_text())] == [1, 2]
    assert program.read(path) == made
    expected = ["| security | 1 | 1 | 0 |", "| silo | 1 | 0 | 1 |", "| all | 2 | 1 | 1 |"]
    assert list(program.counts([made[1], made[2]]))[2:] == expected


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def test_a():\n    pass\n", None),
        (("import pytest\n\n@pytest.mark.parametrize('x', ['p - q'])\ndef test_a(x):\n   "
            " assert 0\n"), "test_a"),
        ("import staddle_is_gone\n", "test_x.py"),
        ("import time\n\ndef test_a():\n    time.sleep(60)\n", "took longer"),
    ],
)  # fmt: skip
def test_the_first_test_that_fails_has_found_it(program, tmp_path, source, found):
    copy = tmp_path / "staddle"
    copy.mkdir()
    (copy / "test_x.py").write_text(source)
    seconds = 1 if "sleep" in source else 60
    said = program.first_failure(["test_x.py"], copy, program.time.monotonic() + seconds)
    assert said is None if found is None else found in said
