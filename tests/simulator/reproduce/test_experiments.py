from pathlib import Path

import pytest
from support.refusals import refused

from staddle.algorithms.job.security import SecurityTable
from staddle.simulator.experiment.experiment import job_of
from staddle.simulator.experiment.silo_names import numbered
from staddle.simulator.reproduce.experiments import (
    Scale,
    chosen_labels,
    chosen_settings,
    experiment_of,
    records_of,
    reduced,
)
from staddle.simulator.reproduce.published import find, parse

TABLE = """\
citation = "A"
{seeds}

[common]
rounds = 200
participation = 0.1
training = {{ lr = 0.1 }}
model = {{ name = "glm", classes = 2, input = [1, 1, 4] }}

[settings.file]
data = {{ file = "digits.npz" }}
partition = {{ kind = "dirichlet", silos = 100, alpha = 0.5 }}

[settings.sources]
data = {{ kind = "npz", file = "digits.npz" }}
partition = {{ kind = "sources", silos = {{ a = 3, b = 2 }} }}

[settings.synthetic]
participation = 1.0
data = {{ kind = "synthetic", silos = 30, dimension = 4 }}

[[tables]]
name = "one"
title = "One"
unit = "percent"
score = {{ measure = "all/trained", average = "micro", choice = "last" }}
columns = [{{ setting = "file" }}, {{ setting = "sources" }}, {{ setting = "synthetic" }}]

[[tables.rows]]
title = "A"
method = {{ name = "fedavg", label = "mean", rounds = 50 }}
own = {{ synthetic = false }}
published = ["1", "2", "3"]

[[tables.rows]]
title = "B"
method = {{ name = "fedavg", label = "mean", rounds = 50 }}
own = {{ synthetic = false }}
score = {{ measure = "all/aggregated", average = "micro", choice = "last" }}
published = ["4", "5", "6"]

[[tables]]
name = "none"
title = "None of ours"
unit = "percent"
score = {{ measure = "all/trained", average = "micro", choice = "last" }}
columns = [{{ name = "x", title = "X" }}]

[[tables.rows]]
title = "A"
published = ["1"]
"""


@pytest.fixture
def table():
    return parse("toy", TABLE.format(seeds="seeds = 4").encode())[0]


def of(table, setting, *more):
    (chosen,) = chosen_settings(table, [setting])
    return experiment_of(table, chosen, Path("/data"), *more)


def test_at_full_scale_it_is_what_the_paper_says(table):
    found = of(table, "file")
    assert (found.name, str(found.path)) == ("toy-file", "toy/file")
    assert (found.file.data.file, found.file.rounds) == (Path("/data/digits.npz"), 200)
    assert found.file.participation == 0.1
    assert found.file.partition.keep is None
    assert found.file.all_seeds == (1, 2, 3, 4)  # as many as the paper's
    expected = [("mean", 50), ("local", None), ("fedrep", None)]
    assert [(method.title, method.rounds) for method in found.file.all_methods] == expected
    assert parse("toy", TABLE.format(seeds="").encode())[0].seeds is None
    assert of(parse("toy", TABLE.format(seeds="").encode())[0], "file").file.all_seeds == (1, 2, 3)
    assert of(table, "file", Scale(), None, (7,)).file.all_seeds == (7,)


def test_fewer_clients_are_some_of_the_partition_s_and_enough_are_drawn(table):
    small = of(table, "file", Scale(clients=10)).file
    assert (small.partition.silos, small.partition.keep) == (100, 10)
    for clients, size in ((10, 3), (50, 5)):  # a tenth of 10 is one
        found = of(table, "file", Scale(clients=clients))
        job = job_of(found, found.file.all_methods[0], 1, numbered(clients), SecurityTable())
        assert job.cohort_size == size
    drawn = of(table, "synthetic", Scale(clients=10)).file
    assert (drawn.data.silos, drawn.min_cohort) == (10, 2)  # all of them train
    assert of(table, "sources", Scale(clients=10)).file.partition.keep is None  # it has five
    with refused("3 clients of setting 'file'; 4 are the least"):
        of(table, "file", Scale(clients=3))


def test_fewer_rounds_are_every_method_s_and_local_and_fedrep_always_run(table):
    found = of(table, "file", Scale(rounds=20)).file
    assert found.rounds == 20
    assert {method.rounds for method in found.all_methods} == {None}
    assert chosen_labels(table, ["mean"]) == {"mean", "local", "fedrep"}
    assert chosen_labels(table, []) == {"mean", "local", "fedrep"}
    methods = of(table, "file", Scale(), frozenset({"local", "fedrep"})).file.all_methods
    assert [method.title for method in methods] == ["local", "fedrep"]
    expected = ["local", "fedrep"]
    assert [method.title for method in of(table, "synthetic").file.all_methods] == expected


def test_what_is_other_than_in_the_paper_is_said(table):
    every = table.settings
    assert reduced(every, Scale()) == ()
    assert reduced(every, Scale(clients=10)) == ("10 instead of 100 or 30 clients",)
    expected = ("10 instead of 100 clients", "20 instead of 200 rounds")
    assert reduced(every[:1], Scale(10, 20)) == expected
    assert reduced(every[1:2], Scale(10, 200)) == ()
    published = next(own for own in find("ppfl/table1").settings if own.name == "synthetic")
    assert reduced([published], Scale(10)) == ("10 instead of 300 clients",)


def test_settings_and_methods_are_known_ones(table):
    with refused("toy/one: no setting 'flie'; did you mean 'file'"):
        chosen_settings(table, ["flie"])
    with refused("toy/one: no method that runs here 'zzz'; known: mean, local, fedrep"):
        chosen_labels(table, ["zzz"])
    found = [setting.name for setting in chosen_settings(table, ["sources", "file", "sources"])]
    assert found == ["sources", "file"]
    with refused("toy/none: none of its columns can be run here"):
        chosen_settings(parse("toy", TABLE.format(seeds="").encode())[1], [])


def test_records_are_looked_for_in_the_folder():
    first, *_ = find("pfedsim/table3").settings
    assert records_of(first, Path("/data")).data.folder == Path("/data")
    settings = find("pfedsim/table3").settings
    tiny = next(setting for setting in settings if setting.name.startswith("tiny"))
    assert records_of(tiny, Path("/data")).data.folder == Path("/data/tiny-imagenet-200")
