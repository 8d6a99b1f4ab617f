import numpy as np
import torch
from support.refusals import refused

from staddle.algorithms.data.dataset import digits
from staddle.algorithms.engines.attendance import Attendance
from staddle.algorithms.job.job import Job
from staddle.algorithms.partition.file import partition_file, save
from staddle.algorithms.partition.split import Sides
from staddle.simulator.experiment.experiment import read
from staddle.simulator.experiment.population import populate
from staddle.simulator.experiment.runs import runs

METHODS = """
[[methods]]
name = "fedavg"

[[methods]]
name = "pfedsim"
label = "early"
options = { rho = 0.25 }
training = { lr = 0.05, momentum = 0.9 }
rounds = 4

[[methods]]
name = "pfedsim"
label = "late"
model = { name = "convnet-digits", norm = "group" }
"""
BLIND = """
[[methods]]
name = "fedavg"

[[methods]]
name = "fedsimsup"
options = { similarity = "labels" }

[security]
secure_aggregation = "required"
weights = "public"
dropouts = "any"
"""
PLAIN = """\
version = 1
name = "digits"
seed = 7
purpose = "For a test"
rounds = 3
silos = ["clinic-a", "clinic-b", "clinic-c", "clinic-d"]
participation = 0.5
min_cohort = 2

[method]
name = "fedavg"
version = 1

[model]
name = "cnn-digits"
classes = 10

[training]
lr = 0.1

[security]
secure_aggregation = "off"
"""


def test_a_run_for_each_method_and_seed_with_what_is_different_for_it(experiment):
    found = experiment(methods=METHODS)
    all_runs = runs(found, populate(found))
    assert [(run.label, run.seed, run.job.seed) for run in all_runs] == [
        (label, seed, seed) for label in ("fedavg", "early", "late") for seed in (1, 2)
    ]
    plain, early, late = (run.job for run in all_runs[::2])
    assert plain.silos == ("silo-000", "silo-001", "silo-002", "silo-003")
    assert (plain.name, plain.rounds) == ("digits", 3)
    assert (plain.training.rule.lr, plain.model.name) == (0.1, "cnn-digits")
    assert (early.rounds, early.training.rule.lr) == (4, 0.05)
    assert early.training.rule.momentum == 0.9
    assert (late.model.name, late.model.norm, late.model.classes) == ("convnet-digits", "group", 10)
    assert (early.method_options.rho, late.method_options.rho) == (0.25, 0.5)


def test_the_command_line_chooses_methods_seeds_and_rounds(experiment):
    found = experiment(methods=METHODS)
    people = populate(found)

    def chosen(*methods, **others):
        return [(r.label, r.seed, r.job.rounds) for r in runs(found, people, methods, **others)]

    assert chosen("late", seeds=[9], rounds=2) == [("late", 9, 2)]
    expected = [("fedavg", 9, 3), ("early", 9, 4), ("late", 9, 3)]
    assert chosen("pfedsim", "fedavg", seeds=[9]) == expected
    assert chosen("early", seeds=[2, 2]) == [("early", 2, 4)]
    with refused(r"job\.toml: no method is labelled or named 'earl'; did you mean 'early'"):
        chosen("earl")
    with refused("method 'early': seed = -1: give 0 or more"):
        chosen("early", seeds=[-1])
    with refused("method 'early': rounds = 0: give 1 or more"):
        chosen("early", rounds=0)


def test_a_label_is_one_method_and_private_weights_of_changing_silos_are_refused(experiment):
    methods = '[[methods]]\nname = "fedavg"\n[[methods]]\nname = "fedavg"\nlabel = "slow"'
    found = experiment(methods=methods)
    assert {run.label for run in runs(found, populate(found), ["fedavg"])} == {"fedavg"}
    found = experiment(
        "seed = 1\nparticipation = 0.5\nmin_cohort = 4", methods=BLIND[: BLIND.index("weights")]
    )
    people = populate(found)
    with refused(r"participation = 0\.5: 4 silos are too few for two batches"):
        runs(found, people)


def test_who_is_there_holds_for_all_runs_and_must_fit_them(experiment):
    table = "\n[attendance]\nnewcomers = {}\njoin_after = {}\n"
    found = experiment(methods=METHODS + table.format('["silo-001"]', 3))
    people = populate(found)
    who = Attendance(newcomers=("silo-001",), join_after=3)
    assert [run.attendance for run in runs(found, people)] == [who] * 6
    with refused(r"job\.toml: attendance, method 'fedavg': join_after = 3, but there are 2 rounds"):
        runs(found, people, ["fedavg"], rounds=2)
    found = experiment(methods=METHODS + table.format('["silo-009"]', 3))
    with refused(r"job\.toml: attendance\.newcomers names 'silo-009'"):
        runs(found, people)
    with refused(r"attendance: newcomers and join_after go together"):
        experiment(methods=METHODS + "\n[attendance]\nnewcomers = 1\n")


def test_a_job_file_with_data_and_a_partition_is_an_experiment_of_the_same_job(tmp_path):
    (tmp_path / "job.toml").write_text(PLAIN)
    tables = (
        '[data]\nkind = "bundled"\nname = "digits"\n[partition]\nkind = "shards"\nsilos = 4\neach'
        " = 2\n"
    )
    (tmp_path / "more.toml").write_text(PLAIN + tables)
    found = read(tmp_path / "more.toml")
    people = populate(found)
    (run,) = runs(found, people)
    assert run.job == Job.from_toml(tmp_path / "job.toml")
    assert list(people.records) == list(run.job.silos)


def test_a_blind_job_declares_the_counts_that_the_silos_have(experiment):
    found = experiment(
        "seed = 1\nparticipation = 0.5\nmin_cohort = 3\nquorum = 1.0",
        methods=BLIND.replace('weights = "public"', 'weights = "public"\ncolluders = 0'),
    )
    people = populate(found)
    plain, labelled = (run.job for run in runs(found, people))
    sizes = {silo: len(own.train) for silo, own in people.records.items()}
    assert plain.security.counts == labelled.security.counts == sizes
    assert plain.security.class_counts == {}
    assert labelled.security.class_counts["silo-001"] == tuple(
        torch.bincount(people.records["silo-001"].train.y, minlength=10).tolist()
    )


def test_what_does_not_fit_a_method_is_refused_before_any_run(experiment):
    found = experiment(methods='[method]\nname = "fedaims"')
    people = populate(found)
    with refused("fedaims on cnn-digits"):
        runs(found, people)
    larger = experiment(model='name = "lenet5"\nclasses = 10')
    with refused(r"training records of silo 'silo-000': x is .* the job's model takes"):
        runs(larger, people)


def test_every_method_is_asked_whether_the_silos_have_enough_to_train_on(experiment, tmp_path):
    sides = {
        "a": Sides(np.array([1]), np.empty(0, np.int64), np.arange(2, 9)),
        "b": Sides(np.arange(10, 50), np.empty(0, np.int64), np.arange(50, 60)),
    }
    save(tmp_path / "p.json", partition_file(sides, digits().y.numpy(), "digits", None, {}))
    methods = (
        '[[methods]]\nname = "local"\n[[methods]]\nname = "fedavg"\nmodel = { norm = "batch" }'
    )
    model = 'name = "convnet-digits"\nclasses = 10'
    found = experiment(partition='[partition]\nfile = "p.json"', model=model, methods=methods)
    people = populate(found)
    assert len(runs(found, people, ["local"])) == 2
    with refused("silo 'a': 1 training record, too few for batch norm"):
        runs(found, people)
