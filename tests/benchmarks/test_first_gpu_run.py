import json
import subprocess
from argparse import Namespace

import pytest


@pytest.fixture
def run(program, tmp_path, monkeypatch, capsys):
    """Run the program here, its parts in processes of their own; returns its output."""

    def call(*options):
        small = ["first_gpu_run.py", str(tmp_path), "--device", "cpu", "--small"]
        monkeypatch.setattr("sys.argv", [*small, *options])
        program.main()
        return capsys.readouterr().out

    return call


def test_parts_run_on_a_cpu_and_are_not_run_again(program, run, tmp_path, monkeypatch):
    begin = program.begin

    def one_begun(options, part):
        """Of two processes that import torch one is enough: the other part runs here."""
        if part != "memory-lenet5":
            return begin(options, part)
        program.run_one(Namespace(**vars(options) | {"one": part}))
        return subprocess.Popen(["true"])

    monkeypatch.setattr(program, "begin", one_begun)
    options = ["--network", "glm", "--part", "smoke-float32", "--part", "memory-lenet5"]
    assert "smoke-float32: exit 0\nmemory-lenet5: exit 0\n" in run(*options)
    (row,) = json.loads((tmp_path / "smoke-float32.json").read_text())["rows"]
    assert row["what"] == "glm"
    assert 0 <= row["stacked, one by one"] < 1e-4
    assert "fault" not in row
    report = (tmp_path / "report.md").read_text()
    assert "## Faults\n\n- none\n" in report
    assert "lenet5, 4 silos  reckoned MB" in report

    (tmp_path / "memory-lenet5.json").write_text(json.dumps({"rows": [], "seconds": 0.0}))
    again = run(*options)
    assert "exit 0" not in again
    assert "## memory-lenet5 (0 s)" in again


def test_networks_for_positions_have_records_of_their_own(program):
    job = program.smoke_job("unet", 1, 2)
    records = program.smoke_records(job, 8)
    engine = program.Stacked(job, records)
    assert program.Simulation(job, engine).step().metrics["tested"] == 16


def test_large_networks_train_in_one_call_while_forms_are_compared(program):
    large = program.convolutions.LARGE_BYTES
    with program.in_one_call():
        assert large < program.convolutions.LARGE_BYTES
    assert large == program.convolutions.LARGE_BYTES


def test_a_rounds_parts_are_timed_and_forms_compared(program, tmp_path):
    options = Namespace(device="cpu", small=True, network=["glm"], precision=["float32"])
    (row,) = program.parallel(options)
    assert row["what"] == "glm, float32"
    assert all(row[form] > 0 for form in ("grouped", "unfolded", "by shape", "parallel"))
    job = program.smoke_job("glm")
    engine = program.Stacked(job, program.smoke_records(job))
    simulation = program.Simulation(job, engine)
    spent = program.seconds_of(simulation, engine.device)
    assert simulation.round == 1
    assert spent["round"] > sum(seconds for name, seconds in spent.items() if name != "round") > 0
    assert program.vmap_engine.train.__name__ == "train"


def test_a_part_that_fails_stands_first_in_the_report(program, run, tmp_path):
    (tmp_path / "card.log").write_text("so far\nRuntimeError: the device is lost\n")
    found = {"rows": [{"what": "glm", "fault": "bits differ when replayed"}], "seconds": 1.0}
    (tmp_path / "smoke-bf16.json").write_text(json.dumps(found))
    first, second = run("--seconds", "0").split("## Faults\n\n")[1].splitlines()[:2]
    assert first == "- card: found nothing; its log ends: RuntimeError: the device is lost"
    fault = "smoke-bf16, glm: bits differ when replayed"
    assert second == f"- {fault}; see {program.SEE['bits differ when replayed']}"


def test_a_share_of_the_gpu_covers_what_torch_reserves(program):
    assert program.too_much(100.0, 400.0) == {}
    assert "4 times" in program.too_much(100.0, 401.0)["fault"]


def test_a_step_that_is_compiled_computes_the_same(program, monkeypatch):
    monkeypatch.setattr(program.compiled_step, "BACKEND", "eager")
    options = Namespace(device="cpu", small=True, precision=["float32"])
    (row,) = program.compiled(options, "cnn-digits")
    assert row["apart"] == 0
    assert "fault" not in row
    assert row["compiled, ms"] > 0


def test_the_small_form_begins_all_parts_but_those_of_a_gpu_and_of_large_networks(
    program, run, monkeypatch
):
    begun = []
    monkeypatch.setattr(
        program, "begin", lambda _, part: begun.append(part) or subprocess.Popen(["true"])
    )
    run()
    left = set(program.PARTS) - set(begun)
    assert len(begun) == len(set(begun))
    assert left >= {"smoke-tf32", "smoke-bf16", "engines-resnet18", "compiled-convnet-4x128"}
    assert all(part in program.ON_A_GPU or part.endswith(program.SLOW) for part in left)
