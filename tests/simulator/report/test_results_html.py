"""What a notebook shows of runs whose histories are a few numbers."""

import re
from dataclasses import replace

from support.counted import of_counts
from support.finished_runs import finished
from support.refusals import refused
from support.simulated_jobs import make_run

from staddle.simulator.report import report
from staddle.simulator.report.results_html import results_html
from staddle.simulator.run.work_file import RoundWork

RECORDS = {"d": 10, "b": 10, "a": 10, "c": 30}
HOSTILE = '<img src="x" onerror="alert(1)">&'


def recorded(label, seed, correct, steps=4, method="fedavg"):
    right = dict(zip(RECORDS, correct, strict=True))
    measures = ("all/aggregated", "all/trained")
    history = tuple(of_counts(2, name, right, RECORDS) for name in measures)
    work = (RoundWork(1, 1, 100, 50, {"a": (0.5, steps, 32, 2_000_000)}),)
    # No job may have a label that is markup; a folder that others wrote may.
    run = make_run(method, seed, "plain")
    return finished(run, history, label=label, rounds=2, seconds=6.0, work=work)


RUNS = [
    recorded("fedavg", 1, (2, 5, 6, 30)),
    recorded("fedavg", 2, (4, 5, 6, 30)),
    recorded("local", 1, (5, 5, 5, 15), method="local"),
    recorded(HOSTILE, 1, (1, 1, 1, 3), steps=8),
]


def tables(shown):
    """Each as rows of cells."""
    return [
        [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in re.findall("<tr>(.*?)</tr>", one)]
        for one in re.findall("<table>(.*?)</table>", shown, re.DOTALL)
    ]


def test_means_over_seeds_and_the_worst_silos_stand_first():
    first, _ = tables(results_html(RUNS))
    head = ["method", "seeds", "rounds", "macro", "worst tenth", "better", "equal", "worse"]
    assert [name for name in first[0] if name != "balanced"] == head
    rows = {row[0]: dict(zip(first[0], row, strict=True)) for row in first[1:]}
    assert (rows["fedavg"]["seeds"], rows["fedavg"]["rounds"]) == ("2", "2")
    assert rows["fedavg"]["macro"] == "60.00 ± 3.54"  # 57.5 % and 62.5 %
    assert rows["fedavg"]["worst tenth"] == "30.00 ± 14.14"  # 20 % and 40 %
    assert rows["local"]["better"] == "–"
    assert [rows["fedavg"][name] for name in ("better", "equal", "worse")] == ["2", "1", "1"]
    assert list(rows)[-1] == "always the most frequent class"
    assert rows[list(rows)[-1]]["seeds"] == "–"


def test_unequal_work_is_told():
    shown = results_html(RUNS)
    _, work = tables(shown)
    assert work[0] == ["method", "steps", "records", "MFLOPs", "MB up", "MB down"]
    assert work[1][:2] == ["fedavg", "4.0"]
    assert "<b>Warning: the methods did not do the same work.</b>" in shown
    assert "<b>steps</b>: most methods take 4.0;" in shown
    assert "Warning" not in results_html(RUNS[:3])


def test_labels_are_no_markup():
    shown = results_html([*RUNS, replace(RUNS[-1], seed=2, finished=False)])
    safe = "&lt;img src=&#34;x&#34; onerror=&#34;alert(1)&#34;&gt;&amp;"
    assert HOSTILE not in shown
    assert "<img" not in shown
    assert f"<td>{safe}</td>" in shown
    assert f"{safe} +100%" in shown
    assert f"Not finished, and not shown: {safe}, seed 2." in shown
    assert "Not finished" not in results_html(RUNS)


def test_looking_at_results_runs_no_code_that_they_name(tmp_path, monkeypatch):
    """A folder in the working folder is a package, whoever made it."""
    theirs = tmp_path / "their_results"
    theirs.mkdir()
    (theirs / "hostile.py").write_text(f"open({str(tmp_path / 'run')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    named = "python:their_results.hostile:Method"
    job = {**RUNS[0].identity.job, "method": {"name": named}}
    run = replace(RUNS[0], method=named, identity=RUNS[0].identity.model_copy(update={"job": job}))
    with refused("ran method 'python:their_results.hostile:Method', whose module is not imported"):
        results_html([run])
    assert report._heat_map(run, None) is None
    assert not (tmp_path / "run").exists()
