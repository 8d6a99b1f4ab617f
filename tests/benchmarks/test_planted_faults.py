import json
import sys
from collections import Counter
from pathlib import Path

import pytest

import staddle

ROOT = Path(str(staddle.__file__)).resolve().parent  # what is installed: the checkout, or the wheel
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

pytestmark = pytest.mark.skipif(
    not BENCHMARKS.is_dir(), reason="the wheel's tests run without the repository"
)


@pytest.fixture(scope="module")
def planted_faults():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import planted_faults  # noqa: PLC0415 it is there in a checkout only

        yield planted_faults
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_there_are_twenty_faults_a_folder_two_a_module_at_most(planted_faults):
    faults = planted_faults.faults()
    expected = {"security": 20, "silo": 20, "coordinator": 20}
    assert Counter(fault.folder for fault in faults) == expected
    assert max(Counter(planted_faults.place(ROOT, fault) for fault in faults).values()) == 2


def test_each_snippet_stands_once_and_the_module_with_the_fault_is_other_code(planted_faults):
    for fault in planted_faults.faults():
        text = planted_faults.planted(ROOT, fault)
        assert text != planted_faults.place(ROOT, fault).read_text()
        assert fault.why.endswith(".")


@pytest.mark.parametrize(
    ("text", "said"), [("", "0 times, in no module"), ("a b a", "2 times, in silo/x.py")]
)
def test_a_snippet_that_is_missing_or_not_unique_is_named(planted_faults, tmp_path, text, said):
    (tmp_path / "silo").mkdir()
    (tmp_path / "silo" / "x.py").write_text(text)
    fault = planted_faults.Fault(7, "silo", "a", "b", "Nothing is broken.")
    with pytest.raises(ValueError, match=f"fault 7: its snippet stands {said}"):
        planted_faults.place(tmp_path, fault)


def test_results_are_counted_by_folder_and_read_again(planted_faults, tmp_path):
    made = {
        2: planted_faults.Result(2, "silo", found=False, test=None),
        1: planted_faults.Result(
            1, "security", found=True, test="tests/security/test_x.py::test_y"
        ),
    }
    path = tmp_path / "out.json"
    planted_faults.write(path, made)
    assert [each["number"] for each in json.loads(path.read_text())] == [1, 2]
    assert planted_faults.read(path) == made
    expected = ["| security | 1 | 1 | 0 |", "| silo | 1 | 0 | 1 |", "| all | 2 | 1 | 1 |"]
    assert list(planted_faults.counts([made[1], made[2]]))[2:] == expected


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
def test_the_first_test_that_fails_has_found_it(planted_faults, tmp_path, source, found):
    copy = tmp_path / "staddle"
    copy.mkdir()
    (copy / "test_x.py").write_text(source)
    seconds = 3 if "sleep" in source else 60
    said = planted_faults.first_failure(
        ["test_x.py"], copy, planted_faults.time.monotonic() + seconds
    )
    assert said is None if found is None else found in said
