import re
from pathlib import Path

import pytest
from support.refusals import refused

from staddle.algorithms.engines.attendance import Attendance
from staddle.simulator.experiment.experiment import read
from staddle.simulator.experiment.options import Apart, Merged
from staddle.simulator.experiment.plan import Schedule

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
TWO = '[[methods]]\nname = "fedavg"\n[[methods]]\nname = "fedavg"\n'
PRIVATE = "[privacy]\nepsilon = 8.0\ndelta = 1e-5\nsample_rate = 0.1"
NPZ = 'file = "own/data.npz"'
PIXELS = 'name = "cnn-digits"\nclasses = 10'


def test_a_file_says_what_is_run_and_what_is_left_out_has_defaults(experiment):
    found = experiment(
        methods='[[methods]]\nname = "fedavg"\n[[methods]]\nname = "fedavg"\nlabel = "slow"'
    )
    assert (found.name, found.file.all_seeds) == ("digits", (1, 2))
    assert [method.title for method in found.file.all_methods] == ["fedavg", "slow"]
    assert found.schedule == Schedule(look_every=1, snapshot_every=10)
    assert found.file.partition.seed == 0
    assert (
        experiment(
            methods='[method]\nname = "fedavg"\n[simulation]\nlook_every = 5'
        ).schedule.look_every
        == 5
    )
    assert experiment('seed = 7\nsilos = ["a", "b", "c", "d"]').file.all_seeds == (7,)


def test_splits_are_of_a_kind_that_may_be_left_out(experiment):
    splits = [
        experiment(methods=f'[method]\nname = "local"\n[split]\n{keys}').file.split
        for keys in ("", 'ratio = "8:1:1"', 'kind = "apart"\nvalidation = true')
    ]
    assert splits == [Merged(), Merged(ratio="8:1:1"), Apart(kind="apart", validation=True)]


def test_paths_start_at_the_file(experiment, tmp_path):
    found = experiment(data=NPZ, partition='[partition]\nfile = "p.npz"\nformat = "ppfl"')
    assert found.file.data.file == tmp_path / "own/data.npz"
    assert found.file.partition.file == tmp_path / "p.npz"


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        ({"top": ""}, "neither of seed and seeds; give seed, or several as seeds"),
        ({"top": "seed = 1\nseeds = [1]"}, "both of seed and seeds"),
        ({"top": "seeds = [2, 1, 2]"}, "seeds has 2 more than once; keep one of each"),
        ({"top": "seeds = [-1]"}, "seeds.0 = -1: give 0 or more"),
        ({"top": 'seed = 1\nsilos = ["a", "a"]'}, "silos has a more than once"),
        ({"methods": TWO}, 'methods has fedavg more than once; give each a label = "…" of its own'),
        ({"methods": TWO + 'label = "FedAvg"'}, "methods has fedavg more than once"),
        ({"methods": f'{TWO}label = "../fedavg"'}, "methods.1.label = '../fedavg'"),
        ({"methods": f'{TWO}[method]\nname = "local"'}, "both of method and methods"),
        ({"methods": '[method]\nname = "fedavgg"'},
            "method 'fedavgg': unknown method 'fedavgg'; did you"),
        ({"methods": '[method]\nname = "pfedsim"\noptions = { rh = 1 }'},
            r"of pfedsim: unknown key 'rh'; did you mean"),
        ({"methods": '[method]\nname = "local"\ntraining = { lr = -1 }'},
            "method 'local': training.lr = -1: give a val"),
        ({"methods": '[method]\nname = "local"\nmodel = { clases = 3 }'},
            "unknown key 'model.clases'; did you mean"),
        (
            {
                "methods": (
                    '[[methods]]\nname = "local"\n[[methods]]\nname = "fedavg"\nmodel = { classes'
                    " = 9 }"
                )
            },
            (
                r"method 'fedavg': its model has classes 9, \[model\] of the file 10; all methods"
                r" take the same records"
            ),
        ),
        ({"methods": '[method]\nname = "local"\nmodel = { name = "lenet5" }'},
            r"its model has input \(3, 32, 32\), \[model\] of the file \(1, 8, 8\)"),
        ({"methods": f'[method]\nname = "local"\n{PRIVATE}'},
            "privacy: a simulation keeps no privacy budget; take the"),
        ({"methods": '[method]\nname = "local"\n[simulation]\nlook_every = 0'},
            "simulation.look_every = 0: give 1 or"),
        ({"partition": ""},
            "missing key 'partition'; add it: it says which silo holds which records"),
        ({"partition": "[partition]\nsilos = 4"},
            "partition: kind is missing; add one of: dirichlet, shards"),
        ({"partition": '[partition]\nkind = "dirichlett"'},
            "no such kind; did you mean 'dirichlet'"),
        ({"partition": '[partition]\nkind = "shards"\nsilos = 2\nalpha = 1.0'},
            "'alpha' is a key of kind dirichlet or"),
        ({"partition": '[partition]\nkind = "column"\nsed = 1'},
            "unknown key 'partition.sed'; did you mean 'seed'"),
        ({"partition": '[partition]\nfile = "p.json"\n[split]\nratio = "50/50"'},
            "split: the partition's file says which side a record is on; take it out"),
        ({"partition": '[partition]\nfile = "p.npz"\nformat = "numpy"'},
            "partition.format = 'numpy': give 'staddle', 'json', 'csv', 'npz', 'ppfl' or"),
        ({"data": 'kind = "synthetic"'},
            "partition: synthetic records are drawn silo by silo; take it out"),
        ({"data": 'kind = "synthetic"', "partition": '[split]\nratio = "50/50"'},
            "split: synthetic records are drawn for a side; take it out"),
        ({"data": 'kind = "pfllib"\nfolder = "."', "partition": '[split]\nratio = "50/50"'},
            "split: PFLlib's files say which side a record is on; take it out, or add"),
        ({"data": 'kind = "synthetical"'},
            "data: kind = 'synthetical': no such kind; did you mean 'synthetic'"),
        ({"data": NPZ + "\ntest_fraction = 0.2"},
            "data: test_fraction is of a silo's configuration; take it out"),
        ({"data": 'kind = "bundled"\nname = "digits"\nshare = [1, 2]'},
            "data: share is of a silo's configuration"),
        ({"model": 'name = "cnn-digits"'},
            r"the task is classification, so the model has classes; write model\.classes and"),
        ({"model": f'{PIXELS}\n[task]\nkind = "regression"\nrange = [0, 1]'},
            r"the task is regression, so the model has outputs; write model\.outputs"),
        ({"model": f'{PIXELS}\n[task]\nkind = "regresion"\nrange = [0, 1]'},
            "task: kind = 'regresion': no such kind; did you mean 'regression'"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_with_file_key_and_fix(experiment, pieces, text):
    with refused(rf"job\.toml.*{text}"):
        experiment(**pieces)


@pytest.mark.skipif(not EXAMPLES.is_dir(), reason="the wheel's tests run without the repository")
@pytest.mark.parametrize("name", ["digits", "cifar10-pfedsim", "ppfl-synthetic"])
def test_examples_can_be_read(name):
    assert read(EXAMPLES / f"{name}.toml").name == name


@pytest.mark.skipif(not EXAMPLES.is_dir(), reason="the wheel's tests run without the repository")
def test_the_file_that_the_docs_explain_can_be_read(tmp_path):
    pages = [EXAMPLES.parent / "docs" / name for name in ("simulate.md", "attendance.md")]
    docs = "".join(page.read_text() for page in pages)
    block, who = re.findall(r"^```toml\n(.*?)^```$", docs, re.DOTALL | re.MULTILINE)
    (tmp_path / "digits.toml").write_text(block)
    found = read(tmp_path / "digits.toml")
    assert [method.title for method in found.file.all_methods] == ["fedavg", "pfedsim-early"]
    assert found.schedule == Schedule(look_every=1, snapshot_every=10)
    assert found.file.attendance == Attendance(newcomers=2, join_after=15)
    # The table alone, with every key.
    (tmp_path / "digits.toml").write_text(
        block.partition("[attendance]")[0] + who.replace("# fewer_epochs", "fewer_epochs")
    )
    keys = read(tmp_path / "digits.toml").file.attendance.model_fields_set
    assert keys == Attendance.model_fields.keys()
