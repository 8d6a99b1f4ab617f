import functools
from dataclasses import replace
from pathlib import Path

import pytest
from support.refusals import refused

from staddle.algorithms.job.security import SecurityTable
from staddle.algorithms.models import build as models
from staddle.simulator.experiment.experiment import job_of
from staddle.simulator.experiment.silo_names import numbered
from staddle.simulator.reproduce.experiments import FULL, Scale, _clients, experiment_of
from staddle.simulator.reproduce.published import PaperValue, find, parse, published

TOY = """\
citation = "A, B, 'Toys', 2026"

[common]
rounds = 6
split = { ratio = "50/50" }
training = { lr = 0.1, batch_size = 8 }

[settings.easy]
title = "Digits, easy"
data = { kind = "bundled", name = "digits" }
partition = { kind = "dirichlet", silos = 8, alpha = 1.0 }
model = { name = "cnn-digits", classes = 10 }

[settings.hard]
data = { kind = "bundled", name = "digits" }
partition = { kind = "dirichlet", silos = 8, alpha = 0.2 }
model = { name = "cnn-digits", classes = 10 }
training = { batch_size = 4 }

[[tables]]
name = "table1"
title = "Toys"
unit = "percent"
score = { measure = "all/trained", average = "micro", choice = "last" }
columns = [
  { setting = "easy" },
  { setting = "hard", name = "first", title = "The first", silos = "silo-000" },
  { name = "elsewhere", title = "Elsewhere" },
]
notes = ["[R] made up"]

[[tables.rows]]
title = "Early (Ours)"
method = { name = "pfedsim", label = "early", options = { rho = 0.2 }, training = { lr = 0.2 } }
own = { hard = { options = { self_weight = 2.0 }, rounds = 3 } }
published = ["86.7 (0.84)", "64 ± 1.2", "?"]

[[tables.rows]]
title = "Average"
method = { name = "fedavg" }
own = { hard = false }
score = { measure = "all/aggregated", average = "macro", choice = "best by test" }
published = ["-", "12.30±4.5", "7"]

[[tables.rows]]
title = "Nobody's"
published = ["1", "2", "3"]

[[tables]]
name = "table2"
title = "More toys"
unit = "share"
deviation = "silos"
score = { measure = "all/trained", average = "macro", choice = "last" }
columns = [{ setting = "easy" }]

[[tables.rows]]
title = "Alone"
method = { name = "local", label = "alone", training = { lr = 0.3 } }
published = [".863(.001)"]
"""


def toy(*changes):
    text = TOY
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    return parse("toy", text.encode())


def test_a_paper_s_settings_are_its_common_keys_and_their_own():
    first, second = toy()
    expected = [("easy", "Digits, easy"), ("hard", "hard")]
    assert [(setting.name, setting.title) for setting in first.settings] == expected
    easy, hard = (setting.document for setting in first.settings)
    assert (easy["rounds"], hard["rounds"]) == (6, 6)
    assert easy["training"] == {"lr": 0.1, "batch_size": 8}
    assert hard["training"] == {"lr": 0.1, "batch_size": 4}
    assert (first.path, first.seeds, first.deviation) == ("toy/table1", None, "seeds")
    assert (second.path, second.deviation) == ("toy/table2", "silos")
    assert second.citation == "A, B, 'Toys', 2026"
    assert [
        (own.name, own.title, own.setting and own.setting.name, own.silos) for own in first.columns
    ] == [
        ("easy", "Digits, easy", "easy", ""),
        ("first", "The first", "hard", "silo-000"),
        ("elsewhere", "Elsewhere", None, ""),
    ]


def test_values_are_as_printed_and_shares():
    first, second = toy()
    early, average, _ = (row.values for row in first.rows)
    assert early == (
        PaperValue("86.7 (0.84)", 0.867, 0.0084, 1),
        PaperValue("64 ± 1.2", 0.64, 0.012, 0),
        PaperValue("?"),
    )
    assert average == (
        PaperValue("-"),
        PaperValue("12.30±4.5", 0.123, 0.045, 2),
        PaperValue("7", 0.07, None, 0),
    )
    assert second.rows[0].values == (PaperValue(".863(.001)", 0.863, 0.001, 1),)


def test_a_row_is_a_method_where_it_runs_and_as_it_differs_there():
    early, average, nobody = toy()[0].rows
    assert (early.methods["easy"].title, early.methods["easy"].options) == ("early", {"rho": 0.2})
    hard = early.methods["hard"]
    assert (hard.options, hard.training) == ({"rho": 0.2, "self_weight": 2.0}, {"lr": 0.2})
    assert hard.rounds == 3
    assert set(average.methods) == {"easy"}
    assert nobody.methods == {}
    assert early.score == ("all/trained", "micro", "last")
    assert average.score == ("all/aggregated", "macro", "best by test")


def test_local_and_fedrep_run_alongside_as_the_paper_has_them_elsewhere():
    first, second = toy(("[settings.hard]", '[settings.hard]\nwithout = ["fedrep"]'))
    alongside = {row.title: row for row in first.alongside}
    assert set(alongside) == {"local", "fedrep"}
    assert alongside["local"].methods["easy"].training == {"lr": 0.3}  # table2's
    assert alongside["local"].methods["easy"].title == "alone"
    assert alongside["local"].methods["hard"].title == "local"
    assert set(alongside["fedrep"].methods) == {"easy"}
    assert {value.text for row in first.alongside for value in row.values} == {""}
    assert [row.title for row in second.alongside] == ["fedrep"]


def test_an_unknown_method_is_a_published_value_alone_and_a_table_is_found_by_path():
    row = toy(('name = "fedavg"', 'name = "fedfuture"'))[0].rows[1]
    assert (row.methods, row.values[1].mean) == ({}, 0.123)
    assert find("pfedsim/table6").title.startswith("Average model accuracy of pFedSim")
    with refused("pfedsim/tabel3: no such table; did you mean 'pfedsim/table3'"):
        find("pfedsim/tabel3")


STUDY = (
    ('title = "More toys"', 'title = "More toys"\nparameter = "ρ"'),
    ('title = "Alone"', 'title = "Alone"\nat = 0.5'),
)


def test_rows_may_be_values_of_a_parameter_and_such_tables_come_last():
    first, second = toy(*STUDY, ('published = [".863(.001)"]', 'published = [""]'))
    assert (first.parameter, second.parameter) == ("", "ρ")
    assert [row.at for row in (*first.rows, *second.all_rows)] == [None] * 3 + [0.5, None]
    assert second.rows[0].values == (PaperValue(""),)  # the paper never had it
    studies = [bool(table.parameter) for table in published()]
    assert studies == sorted(studies)
    assert any(studies)


@pytest.mark.parametrize("given", [STUDY[:1], STUDY[1:]])
def test_a_parameter_without_values_is_refused_and_values_without_one(given):
    with refused('table2: "parameter" and the rows\' "at" go together; give both'):
        toy(*given)


def test_a_value_of_a_parameter_is_one_row():
    with refused('table1: two rows have the same "at"'):
        toy(
            ('title = "Toys"', 'title = "Toys"\nparameter = "ρ"'),
            ('title = "Average"', 'title = "Average"\nat = 1.0'),
            ('title = "Nobody\'s"', 'title = "Nobody\'s"\nat = 1'),
        )


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ('published = ["1", "2", "3"]', 'published = ["1", "2"]',
            'row "Nobody\'s" has 2 values for 3 columns'),
        ('"64 ± 1.2"', '"64 + 1.2"', "'64 \\+ 1.2' is not a mean with or without deviation"),
        ("[R] made up", "made up", "begin the note 'made up' with one of"),
        ('{ setting = "easy" },', '{ setting = "eazy" },',
            "unknown setting 'eazy'; known: easy, hard"),
        ("own = { hard = false }", "own = { soft = false }",
            "own.soft is not a setting of the file"),
        ('{ name = "elsewhere", title', "{ title",
            "a column without a setting needs a name and a title"),
        ('label = "alone"', 'label = "early"',
            "'early' is two methods in setting 'easy'; give each"),
        ("rounds = 6", "rounds = 6\n[common", ": not valid TOML"),
        ("[common]", 'alongside = [{ name = "fedavg" }]\n[common]',
            '"alongside" has fedavg; next to every table run local and'),
        ('unit = "percent"', 'unit = "promille"', "tables.0.unit = 'promille'"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(old, new, fault):
    with refused(f"toy.toml.*{fault}"):
        toy((old, new))


@pytest.fixture
def sketched_once(monkeypatch):
    """Networks are sketched once each: jobs look at a sketch, and change nothing of it."""
    for name, network in models.NETWORKS.items():
        monkeypatch.setitem(
            models.NETWORKS, name, replace(network, build=functools.cache(network.build))
        )


@pytest.mark.usefixtures("sketched_once")
def test_every_published_setting_makes_a_job():
    """For every method, at full and at small scale.

    All tables of a paper at once: a label is one method in a setting.

    Small scale: the first setting of a model.
    """
    papers = {}
    for table in published():
        papers.setdefault(table.paper, []).append(table)
    for tables in papers.values():
        settings = {setting.name: setting for table in tables for setting in table.settings}
        everyone = replace(
            tables[0], rows=tuple(r for t in tables for r in t.all_rows), alongside=()
        )
        seen = set()
        for setting in settings.values():
            model = setting.document["model"]["name"]
            for scale in (FULL, Scale(clients=6))[: 1 if model in seen else 2]:
                experiment = experiment_of(everyone, setting, Path("data"), scale)
                silos = numbered(scale.clients or _clients(setting) or 300)
                for method in experiment.file.all_methods:
                    found = job_of(experiment, method, 1, silos, SecurityTable()).method().name
                    assert found == method.name
                names = {method.name for method in experiment.file.all_methods}
                assert names >= {"local", "fedrep"} - setting.without
            seen.add(model)


def test_pfedsim_s_tables_are_transcribed():
    """Counts, and values picked by hand from the paper's pages."""
    three, six, eight = (find(f"pfedsim/table{number}") for number in (3, 6, 8))
    expected = [(12, 8), (7, 8), (12, 7)]
    assert [(len(table.rows), len(table.columns)) for table in (three, six, eight)] == expected
    shown = {row.title: [value.text for value in row.values] for row in three.rows}
    assert shown["FedAvg [1]"][4] == "27.66 (6.35)"  # Tiny-ImageNet, Dir(0.1)
    assert shown["Per-FedAvg [21]"][1] == "44.96 (1.99)"
    assert shown["pFedSim (Ours)"][7] == "90.18 (0.11)"
    assert [value.mean for value in six.rows[5].values[:2]] == [0.7905, 0.6470]  # ρ = 0.9
    average = [column.name for column in eight.columns].index("average")
    assert [row.values[average].text for row in eight.rows if row.title == "fedgen [17]"] == [
        "60.67 (0.62)"
    ]
    assert three.rows[-1].values == six.rows[3].values  # ρ = 0.5
