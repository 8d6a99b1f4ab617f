import argparse
import multiprocessing
import sys

import pytest


def test_a_small_run_is_measured_and_compared(program, tmp_path):
    ours, theirs = multiprocessing.Pipe()
    asked = argparse.Namespace(
        model="lenet5", engine="local", workers=1, rounds=3, share=2, records=4, place=tmp_path
    )
    program.measure(theirs, 6, asked)
    found = ours.recv()
    assert found.silos == 6
    assert min(found.trained, found.evaluated, found.peak) > 0
    assert list(tmp_path.iterdir()) == []
    twice = program.SiloCost(12, 2 * found.trained, found.evaluated, found.peak)
    first, second = program.told([found, twice]).splitlines()
    assert "6 silos: " in first
    assert "(2.00 times)" in second
    assert "(1.00 times)" in second


def test_too_few_rounds_are_no_measure(program, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["simulated_silos.py", "--rounds", "2"])
    with pytest.raises(SystemExit, match="at least 3 rounds"):
        program.main()
