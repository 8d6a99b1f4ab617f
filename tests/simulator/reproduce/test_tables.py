"""The tables' files say what the papers print: how many values, some of them picked by hand."""

import pytest

from staddle.algorithms.catalog import METHODS
from staddle.algorithms.methods.fedsimsup.method import PAPER_C, PAPER_GAMMA, PAPER_ROUNDS
from staddle.simulator.reproduce.published import find, published

COUNTS = {  # columns, rows, values that are numbers
    "fedsimsup/table1": (2, 10, 20),
    "fedsimsup/table2": (8, 10, 80),
    "fedsimsup/table3": (8, 10, 80),
    "fedsimsup/table4": (8, 5, 40),
    "fedsimsup/network": (2, 4, 8),  # not in the paper: Table 2's values, twice
    "pfedsim/pipeline": (4, 3, 12),  # likewise: Table 3's, four times
    "fedssa/table1": (6, 8, 43),  # FD failed but for one column
    "fedssa/table2": (6, 8, 41),  # so did FML in two
    "fedssa/table4": (6, 3, 18),
    "fedssa/table5": (6, 3, 18),
    "ppfl/table1": (3, 8, 0),  # lost
    "ppfl/table2": (6, 8, 0),
    "ppfl/table3": (2, 7, 0),
    "ppfl/table-o3": (6, 8, 0),
    "ppfl/table-o4": (3, 5, 15),
    "ppfl/figure-o5": (2, 6, 1),  # drawn, but for what other tables print
    "ppfl/figure-o6": (1, 6, 1),
    "ppfl/lambda": (2, 6, 1),  # not in the paper, nor are FedSSA's two
    "fedssa/mu-0": (2, 5, 2),
    "fedssa/t-stable": (2, 5, 2),
    "fedsimsup/figure9": (2, 4, 2),
    "fedaims/figure4": (4, 6, 4),
    "fedaims/table2": (8, 12, 96),
    "fedaims/table3": (8, 12, 96),
    "fedaims/table4": (3, 12, 36),
    "fedaims/table5": (8, 2, 16),
    "fedaims/figure5": (2, 3, 2),
}
PICKED = [  # table, row, column, mean, deviation
    ("fedsimsup/table1", "FedRep", "femnist-dir01", 0.812, 0.027),
    ("fedsimsup/table1", "Per-FedAvg", "imagenet", 0.013, 0.005),
    ("fedsimsup/table1", "FedSimSup", "imagenet", 0.224, 0.008),
    ("fedsimsup/table2", "Local", "cifar10-50-dir01", 0.853, 0.030),
    ("fedsimsup/table2", "FedProto (2022)", "cifar100-100-dir05", 0.173, 0.002),
    ("fedsimsup/table2", "FedSimSup (Ours)", "cifar10-100-dir05", 0.725, 0.005),
    ("fedsimsup/table3", "FedAvg (2017)", "cifar10-50-shards5", 0.478, 0.033),
    ("fedsimsup/table3", "Local", "cifar100-100-shards5", 0.664, 0.002),
    ("fedsimsup/table3", "FedAs (2024)", "cifar100-50-shards20", 0.442, 0.004),
    ("fedsimsup/table4", "FedSimSup-C", "cifar10-100-dir01", 0.835, 0.004),
    ("fedsimsup/table4", "FedSimSup-L", "cifar100-50-dir05", 0.320, 0.001),
    ("fedsimsup/table4", "FedSimSup-TCL", "cifar100-100-dir01", 0.460, 0.003),
    ("fedssa/table1", "Standalone", "homo-10-cifar100", 0.7432, None),
    ("fedssa/table1", "FedClassAvg", "homo-100-cifar10", 0.9103, None),
    ("fedssa/table1", "FedSSA", "homo-100-cifar100", 0.5854, None),
    ("fedssa/table2", "FML", "hetero-50-cifar100", 0.2196, None),
    ("fedssa/table2", "FedKD", "hetero-10-cifar10", 0.8020, None),
    ("fedssa/table2", "FedSSA", "hetero-50-cifar10", 0.9583, None),
    ("fedssa/table4", "A (LG-FedAvg)", "hetero-100-cifar100", 0.4583, None),
    ("fedssa/table4", "B (LG-FedAvg with M2)", "hetero-50-cifar10", 0.9510, None),
    ("fedssa/table4", "C (FedSSA)", "hetero-10-cifar100", 0.7339, None),
    ("fedssa/table5", "A", "hetero-100-cifar10", 0.8851, None),
    ("fedssa/table5", "B", "hetero-50-cifar10", 0.8242, None),
    ("fedssa/table5", "C (FedSSA)", "hetero-10-cifar10", 0.9654, None),
    ("ppfl/table-o4", "Central", "synthetic", 0.7161, None),
    ("ppfl/table-o4", "τ_0", "mnist", 0.9901, None),
    ("ppfl/table-o4", "the second multiple of τ_0", "cifar10", 0.8621, None),
    ("fedaims/table2", "FedAvg [2]", "cifar10-dir01", 0.1400, 0.2808),
    ("fedaims/table2", "FedBABU [11]", "tiny-imagenet-dir01", 0.2000, 0.2389),
    ("fedaims/table2", "FedAIMS", "cifar10-dir03", 0.8179, 0.0804),
    ("fedaims/table3", "MOON [22]", "emnist-dir01-lr005", 0.7915, 0.1047),
    ("fedaims/table3", "Ditto [17]", "cifar100-dir03-lr005", 0.2555, 0.0557),
    ("fedaims/table3", "FedAIMS", "emnist-dir03-lr005", 0.8864, 0.0356),
    ("fedaims/table4", "Local", "cifar10-classes2", 0.6138, 0.2394),
    ("fedaims/table4", "FedProx [21]", "cifar100-classes10", 0.6596, 0.0835),
    ("fedaims/table4", "FedAIMS", "emnist-classes10", 0.9417, 0.0309),
    ("fedaims/table5", "FedAIMS", "tiny-imagenet-dir03", 0.3317, None),
    ("fedaims/table5", "FedAIMS-Full", "cifar10-dir03", 0.8265, None),
    ("fedaims/table5", "FedAIMS-Full", "cifar100-dir01", 0.5593, None),
]
SAME = [  # rows that the papers print twice
    ("fedsimsup/table2", "FedSimSup (Ours)", "fedsimsup/table4", "FedSimSup"),
    ("fedssa/table2", "FedSSA", "fedssa/table4", "C (FedSSA)"),
    ("fedssa/table2", "FedSSA", "fedssa/table5", "C (FedSSA)"),
    ("fedssa/table2", "LG-FedAvg", "fedssa/table4", "A (LG-FedAvg)"),
]
# Values of other tables in those of a parameter: where each is from.
BORROWED = [
    ("fedaims/figure4", "μ = 1", "fedaims/table2", "FedAIMS"),
    ("fedaims/figure5", "Gap 1", "fedaims/table2", "FedAIMS"),
    ("fedssa/mu-0", "μ_0 = 0.5", "fedssa/table1", "FedSSA"),
    ("fedssa/t-stable", "T_stable = 45", "fedssa/table1", "FedSSA"),
    ("fedsimsup/figure9", "C = 40, γ = 3/7", "fedsimsup/table2", "FedSimSup (Ours)"),
    ("ppfl/figure-o5", "K = 4", "ppfl/table-o4", "τ_0"),
    ("ppfl/figure-o6", "K = 3", "ppfl/table-o4", "τ_0"),
    ("ppfl/lambda", "λ = 1e-05", "ppfl/table-o4", "τ_0"),
]
# The option that a table's parameter is.
OPTIONS = {
    "fedaims/figure4": "mu", "fedaims/figure5": "update_gap", "fedssa/mu-0": "mu_0",
    "fedssa/t-stable": "t_stable", "pfedsim/table6": "rho", "ppfl/figure-o5": "models",
    "ppfl/figure-o6": "models", "ppfl/lambda": "lam",
}  # fmt: skip
CUT = ((10, "1/3"), (20, "2/5"), (40, "2/5"), (40, "3/7"))  # FedSimSup's C and γ
# a row's method where that is not its title in small letters; none: we have it not, or not so
OURS = {
    "Standalone": "local", "Clustered FL": "cfl", "FedLG": "lg-fedavg",
    "A (LG-FedAvg)": "lg-fedavg", "PPFL1": "ppfl", "PPFL2": "ppfl", "τ_0": "ppfl",
    **{f"FedSimSup-{kind}": "fedsimsup" for kind in ("T", "C", "L", "TCL")},
    "FedAIMS-Full": "fedaims", "A": "fedssa", "B": "fedssa",
    "Gap 1": "fedaims", "Gap 3": "fedaims", "Gap 5": "fedaims", "C (FedSSA)": "fedssa",
    "B (LG-FedAvg with M2)": "fedssa",
    **{f"μ = {value}": "fedaims" for value in ("0.01", "0.05", "0.1", "0.5", "1", "5")},
    **{f"μ_0 = {value}": "fedssa" for value in ("0", "0.25", "0.5", "0.75", "1")},
    **{f"T_stable = {value}": "fedssa" for value in (2, 10, 20, 45, 100)},
    **{f"C = {c}, γ = {g}": "fedsimsup" for c, g in CUT},
    **{f"K = {number}": "ppfl" for number in range(1, 7)},
    **{f"λ = {value}": "ppfl" for value in ("1e-05", "0.0001", "0.001", "0.01", "0.1", "1")},
    **{f"the {number} multiple of τ_0": "ppfl" for number in ("first", "second", "third")},
}  # fmt: skip
WITHOUT = {  # titles, or with their tables where we have them in others
    "Central", "FD", ("fedssa/table2", "FML"), ("fedssa/table2", "FedKD"),
}  # fmt: skip


def row(path, title):
    return next(row for row in find(path).rows if row.title == title)


@pytest.mark.parametrize("path", COUNTS)
def test_a_table_has_the_rows_columns_and_values_of_the_paper(path):
    table = find(path)
    numbers = [value for own in table.rows for value in own.values if value.mean is not None]
    assert (len(table.columns), len(table.rows), len(numbers)) == COUNTS[path]
    assert all(0 < value.mean < 1 for value in numbers)
    assert len({own.title for own in table.rows}) == len(table.rows)


@pytest.mark.parametrize(("path", "title", "column", "mean", "deviation"), PICKED)
def test_values_stand_where_the_paper_has_them(path, title, column, mean, deviation):
    place = [own.name for own in find(path).columns].index(column)
    value = row(path, title).values[place]
    assert value.mean == pytest.approx(mean, abs=1e-9)
    assert value.deviation == (None if deviation is None else pytest.approx(deviation, abs=1e-9))


@pytest.mark.parametrize(
    "path", [path for path in COUNTS if path not in ("ppfl/table3", "ppfl/table-o3")]
)
def test_a_row_is_the_method_that_it_names(path):
    for own in find(path).rows:
        wanted = OURS.get(own.title, own.title.split(" (")[0].split(" [")[0].lower())
        expected = set() if {own.title, (path, own.title)} & WITHOUT else {wanted} & set(METHODS)
        assert {method.name for method in own.methods.values()} == expected, own.title


@pytest.mark.parametrize(("path", "title", "other_path", "other_title"), SAME)
def test_rows_that_are_printed_twice_agree(path, title, other_path, other_title):
    assert row(path, title).values == row(other_path, other_title).values


def test_fedaims_has_one_row_in_both_tables_and_fedrep_one_epoch_for_its_classifier():
    """Table 5 prints no deviations."""
    here, there = (row(path, "FedAIMS").values for path in ("fedaims/table2", "fedaims/table5"))
    assert [value.mean for value in here] == [value.mean for value in there]
    for path, setting in (("ppfl/table1", "mnist"), ("fedssa/table2", "hetero-10-cifar10")):
        (fedrep,) = (own.methods[setting] for own in find(path).alongside if own.title == "fedrep")
        assert fedrep.options == {"head_epochs": 1}


def test_tables_prepare_records_as_their_authors_did():
    """FedSSA's dataset.py changes training images in this order; pFedSim's scales whole pixels."""
    for path in ("fedssa/table1", "fedssa/table2", "fedssa/table5", "fedssa/mu-0"):
        for setting in find(path).settings:
            training = setting.document["training"]
            kinds = [change["kind"] for change in training["augment"]]
            assert kinds == ["RandomHorizontalFlip", "RandomErasing", "RandomCrop"]
            assert training["batch_size"] == 512
    setting = find("pfedsim/table3").settings[0].document
    assert (setting["data"]["pixels"], setting["training"]["last_batch"]) == ("bytes", "keep")


def test_the_papers_of_lost_tables_still_have_settings_that_run():
    for path in ("ppfl/table1", "ppfl/table2"):
        ours = {own.title for own in find(path).rows if own.methods}
        assert {"Local", "FedAvg", "PPFL1", "PPFL2"} <= ours
    assert find("ppfl/table3").settings == find("ppfl/table-o3").settings == ()


@pytest.mark.parametrize(("path", "title", "other_path", "other_title"), BORROWED)
def test_a_parameter_s_published_values_are_those_of_the_same_runs(
    path, title, other_path, other_title
):
    """Same setting, same method under the same label."""
    here, there = row(path, title), row(other_path, other_title)
    names = [column.name for column in find(other_path).columns]
    for column, value in zip(find(path).columns, here.values, strict=True):
        if value.mean is not None:
            assert value.mean == there.values[names.index(column.name)].mean
        assert here.methods[column.name] == there.methods[column.name]


def test_both_networks_of_fedsimsup_stand_beside_the_values_of_table_2():
    """The paper does not say which network it has; all else of the runs is the same."""
    narrow, wide = find("fedsimsup/network").settings
    assert {**wide.document, "model": None} == {**narrow.document, "model": None}
    for own in find("fedsimsup/network").rows:
        theirs = next(each for each in find("fedsimsup/table2").rows if own.title in each.title)
        assert own.values == (theirs.values[0],) * 2
        assert own.methods[narrow.name] == theirs.methods[narrow.name]
    supervised = row("fedsimsup/network", "FedSimSup").methods[wide.name]
    assert supervised.options == {"tau_theta": 5, "supervisor": ["lenet-wide"]}


def test_pfedsim_s_pipelines_differ_in_the_network_the_order_or_both():
    """From Table 3's in nothing else, and beside its values."""
    table, known = find("pfedsim/pipeline"), find("pfedsim/table3").settings[0]
    for setting in table.settings:
        name, document = setting.name.removeprefix("cifar10-dir01").lstrip("-"), setting.document
        linear, ordered = name in ("linear", "both"), name in ("ordered", "both")
        assert document["model"]["name"] == ("pfedsim-lenet5" if linear else "lenet5")
        assert document["training"].get("shuffle", True) is not ordered
        model = {**document["model"], "name": "lenet5"}
        training = {k: v for k, v in document["training"].items() if k != "shuffle"}
        assert {**document, "model": model, "training": training} == known.document
    assert len({str(setting.document) for setting in table.settings}) == 4
    for own in (*table.rows, *table.alongside):
        theirs = next(
            each for each in find("pfedsim/table3").rows if own.title.lower() in each.title.lower()
        )
        assert [*own.methods.values()] == [theirs.methods[known.name]] * 4
        assert own.score == theirs.score or own.title == "fedrep"
        if own in table.rows:
            assert own.values == (theirs.values[0],) * 4


def test_a_value_of_a_parameter_is_what_the_method_has():
    studies = {table.path: table for table in published() if table.parameter}
    assert studies.keys() == {*OPTIONS, "fedsimsup/figure9"}
    for path, option in OPTIONS.items():
        for own in studies[path].rows:
            for method in own.methods.values():
                options = METHODS[method.name].options_model(**method.options)
                # FedAvg stands for ρ = 1, and has no such option
                assert getattr(options, option, 1.0) == own.at, (path, own.title)
    for own in studies["fedsimsup/figure9"].rows:
        method = own.methods["cifar10-100-dir01"]
        c = method.options.get("c", PAPER_C)
        assert own.at == round(c * PAPER_ROUNDS ** method.options.get("gamma", PAPER_GAMMA))


def test_published_values_of_unknown_epochs_have_no_place_on_an_axis():
    """Table O4's multiples of τ_0 are lost; ours are a guess."""
    central, *others = find("ppfl/table-o4").rows
    assert not central.methods
    for number, own in enumerate(others, 1):
        assert own.at is None
        assert {method.training.get("epochs", 1) for method in own.methods.values()} == {number}
