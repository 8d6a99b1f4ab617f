"""The variants of a sweep: their labels and values, and what cannot be swept."""

import pytest
from support.refusals import refused

from staddle.simulator.experiment.experiment import read
from staddle.simulator.experiment.population import populate
from staddle.simulator.experiment.runs import chosen_methods, runs
from staddle.simulator.experiment.sweep import Range

METHODS = """
[[methods]]
name = "local"
training = { lr = 0.05 }

[[methods]]
name = "fedavg"

[[methods]]
name = "fedprox"
label = "near"
options = { weights = "equal" }

[sweep]
"""
DRAWS = "draws = 4\ntraining.lr = { low = 1e-4, high = 0.1, log = true }\noptions.mu = [0.1, 1.0]"


@pytest.fixture
def swept(experiment):
    """An experiment with this [sweep] table."""
    return lambda sweep: experiment(methods=METHODS + sweep)


def labels(found):
    return [variant.label for variant in found.variants]


def test_a_grid_is_all_combinations_of_what_a_method_has_and_does_not_set_itself(swept):
    found = swept('"training.lr" = [0.02, 1.0]\noptions.mu = [0.5, 1]')
    assert labels(found) == [
        "local", "fedavg+lr=0.02", "fedavg+lr=1",
        "near+lr=0.02+mu=0.5", "near+lr=0.02+mu=1", "near+lr=1+mu=0.5", "near+lr=1+mu=1",
    ]  # fmt: skip
    chosen = runs(found, populate(found), seeds=[1])
    assert [run.label for run in chosen] == labels(found)
    assert [run.job.training.rule.lr for run in chosen] == [0.05, 0.02, 1, 0.02, 0.02, 1, 1]
    assert [run.job.method_options.mu for run in chosen[3:]] == [0.5, 1, 0.5, 1]
    assert chosen[3].job.method_options.weights == "equal"
    assert found.variants[3].values == {"training.lr": 0.02, "options.mu": 0.5}


def test_a_label_of_the_file_selects_all_its_variants(swept):
    found = swept("options.mu = [0.5, 1.0]")
    for wanted, expected in {
        "near": ["near+mu=0.5", "near+mu=1"],
        "fedprox": ["near+mu=0.5", "near+mu=1"],
        "near+mu=1": ["near+mu=1"],
        "fedavg": ["fedavg"],
    }.items():
        assert [method.title for method in chosen_methods(found, [wanted])] == expected


def test_draws_stay_where_there_are_more_draws_keys_and_methods(swept):
    few, more = swept(DRAWS), swept(DRAWS.replace("4", "6", 1))
    assert len(labels(few)) == 1 + 4 + 4
    assert set(labels(few)) < set(labels(more))
    # Methods try the same values, so that they can be compared.
    rates = [variant.values["training.lr"] for variant in few.variants[1:]]
    assert rates[:4] == rates[4:]
    assert all(1e-4 <= rate <= 0.1 and f"{rate:.3g}" == f"{rate:g}" for rate in rates)
    alone = swept(DRAWS.rpartition("\n")[0])
    assert [variant.values["training.lr"] for variant in alone.variants[1:5]] == rates[:4]
    other = swept(f"seed = 1\n{DRAWS}")
    assert rates[:4] != [variant.values["training.lr"] for variant in other.variants[1:5]]


def test_a_value_that_comes_again_is_one_run(swept):
    assert labels(swept("options.mu = [1, 0.5, 1.0]"))[2:] == ["near+mu=1", "near+mu=0.5"]
    assert labels(swept("draws = 30\noptions.mu = [0.5, 1.0]"))[2:] in (
        ["near+mu=0.5", "near+mu=1"],
        ["near+mu=1", "near+mu=0.5"],
    )


def test_ranges_have_both_ends():
    whole = Range(low=1, high=3)
    assert [whole.at(share / 6) for share in range(6)] == [1, 1, 2, 2, 3, 3]
    assert whole.at(1 - 2**-53) == 3
    assert [Range(low=1, high=7, log=True).at(share) for share in (0.1, 0.4, 0.7)] == [1, 2, 4]
    assert Range(low=0.1, high=10.0, log=True).at(0.5) == 1.0
    assert Range(low=0.12345, high=0.2).at(0.0) == 0.12345


def test_tables_and_words_have_labels_that_a_folder_may_have(swept):
    found = swept(
        'model.norm = ["none"]\n"training.schedule" = [{ kind = "cosine" }]\nrounds = [2]'
    )
    assert labels(found)[1] == "fedavg+norm=none+schedule=kind-cosine+rounds=2"
    same = swept("options.extractors = [[]]\ntraining.clip = [1.5]")
    assert labels(same)[:2] == ["local+extractors=+clip=1.5", "fedavg+clip=1.5"]


def test_keys_that_end_alike_stand_whole_in_labels(swept):
    with refused(r"method 'local\+model.weights=1'"):
        swept('model.weights = [1]\noptions.weights = ["samples"]')


@pytest.mark.parametrize(
    ("sweep", "text"),
    [
        (
            "training.lrr = [1]",
            "no method has a setting 'training.lrr'; did you mean 'training.lr'",
        ),
        ("options.muu = [1]", "no method has a setting 'options.muu'; did you mean 'options.mu'"),
        ("partition.alpha = [1]", "same for all runs of a folder; .* --set partition.alpha=… and"),
        ("seeds = [1, 2]", r"all variants run with each seed of the file; list them there"),
        ("participation = [1]", "'participation' is the same for all runs"),
        ("seed = 3\nrounds = [1]", "sweep: seed is for random search; add draws"),
        ("draws = 0\nrounds = [1]", "sweep.draws = 0: give 1 or more"),
        ("training.lr = 0.1", "sweep.training.lr = 0.1: give a list of values, or { low"),
        ("training.lr = []", "training.lr: give a list"),
        ('"training.lr" = [1]\ntraining.lr = [2]', "training.lr stands twice"),
        ("", "name a setting, such as"),
        ("training.lr = { low = 1, high = 2 }", "a range is for random search; add draws"),
        ("draws = 2\ntraining.lr = { low = 0, high = 2, log = true }", "above 0 where log"),
        ("draws = 2\ntraining.lr = { low = 2, high = 1 }", "low must be below high"),
        ("draws = 2\ntraining.lr = { low = 0, hihg = 1 }", "unknown key"),
        ("training.lr = [-1]", "method 'fedavg\\+lr=-1': training.lr = -1: give a value above 0"),
        ('training.batch_size = ["a", "A"]', "2 variants would be labelled 'local\\+batch_size=a'"),
        (f'model.name = ["{"x" * 60}"]', "is longer than 64 characters; give the method a shorter"),
        (
            f"training.lr = {list(range(1, 41))}\ntraining.epochs = {list(range(1, 41))}",
            "fedavg would have 1,600 variants, 1,000 are the most",
        ),
    ],
)
def test_what_cannot_be_swept_is_refused_with_the_fix(swept, sweep, text):
    with refused(rf"job\.toml.*{text}"):
        swept(sweep)


def test_a_setting_that_would_do_nothing_is_refused(experiment, swept, tmp_path):
    own = '[method]\nname = "local"\ntraining = { lr = 0.1 }\n[sweep]\ntraining.lr = [1, 2]'
    with refused("all methods set 'training.lr' themselves"):
        experiment(methods=own)
    found = swept("rounds = [2, 3]\ntraining.lr = [0.1]")
    with refused("--rounds would make all variants one"):
        runs(found, populate(found), rounds=5)
    with refused("--set training.lr=1: .sweep. has values for 'training.lr'; choose a variant"):
        read(tmp_path / "job.toml", ["training.lr=1"])
