"""What holds for each method of the catalog, by one table.

What one method alone promises has a file of its own.
"""

from dataclasses import dataclass, field, replace
from functools import cache
from statistics import mean

import pytest
import torch
from support.banded_records import banded_shards
from support.refusals import refused

from staddle.algorithms.catalog import METHODS
from staddle.algorithms.engines.engine import Records
from staddle.algorithms.engines.simulation import Simulation, simulate
from staddle.algorithms.engines.vmap_engine import Stacked
from staddle.algorithms.job.job import Job, JobFile
from staddle.algorithms.models.networks.resnet import convnet
from staddle.algorithms.models.registry import NETWORKS
from staddle.algorithms.tasks.table_counting import RIGHT
from staddle.security.blind.plan import simulated

PRIVACY = {"epsilon": 3.0, "delta": 1e-5, "clip": 1.0, "sample_rate": 0.25}
BLIND = {"secure_aggregation": "required", "clip_exponent": 6}
SMALL = {"name": "ppfl-mlp", "input": [1, 8, 8]}  # convolutions: engines/test_vmap_engine.py
NORMS = {"name": "cnn-digits", "norm": "group"}
LINEAR = {"name": "glm", "input": [1, 8, 8], "norm": "none"}  # where a step is dear
# by the round that a phase begins in: what goes up, and what comes down
MODEL = {0: ("model sum.mean", "model")}
STEPPED = {0: ("model sum.mean", "model-stepped")}
EXTRACTOR = {0: ("extractor sum.mean", "extractor")}
AVERAGED = "model sum.mean"
FEATURES, COMMON = "extractor sum.mean, prototypes sum.ratio", "extractor, prototypes"
CLASSIFIERS = "classifier mix, vectors gram"
PROTOTYPES = "surveyed without noise; choose fedper"
FOUR_OF_FIVE = {"silos": list("abcde"), "participation": 0.8}

BY_CLASS = {silo: [6 + 2 * own] * 3 for own, silo in enumerate("abcde")}  # of ``banded_shards``
DECLARED = {"weights": "public", "dropouts": "any", "class_counts": BY_CLASS}
DECLARED["counts"] = {silo: sum(own) for silo, own in BY_CLASS.items()}


@dataclass(frozen=True)
class Case:
    """A method with what it promises: its wire list beside ``metrics``, and why it has no blind or
    private form.
    """

    wire: dict
    not_blind: str = ""
    not_private: str = ""
    options: dict = field(default_factory=dict)
    model: dict = field(default_factory=dict)
    fields: dict = field(default_factory=dict)
    security: dict = field(default_factory=dict)
    method: str = ""
    learns: float = 0.8


CASES = {
    "apfl": Case(MODEL, model=LINEAR, not_private="it takes gradients at a mixture of two models"),
    "cfl": Case({0: ("model mix, update gram", ""), 1: ("model mix, update gram", "model")},
        options={"sketch": 64, "eps_1": 0.0}),
    "ditto": Case(MODEL),
    "fedadam": Case(STEPPED, options={"server_lr": 0.05}),
    "fedaims": Case({0: ("backbone sum.mean, prototypes sum.ratio", "backbone, prototypes")},
        model={"name": "convnet-digits"}),
    "fedaims, update gap": Case(
        {
            0: ("backbone sum.mean, prototypes sum.ratio, direction gram",
                "backbone, prototypes, block"),
            1: ("backbone sum.mean, prototypes sum.ratio", "backbone, prototypes, block"),
            2: ("backbone sum.mean, prototypes sum.ratio, direction gram",
                "backbone, prototypes, block"),
        },
        options={"sampling": "algorithm2", "update_gap": 2, "sketch": 0},
        model={"name": "convnet-digits"}, method="fedaims"),
    "fedala": Case(MODEL, options={"start_epochs": 1},
        not_private="how much of the global model a silo takes"),
    # a rotation takes the square of the model's size
    "fedamp": Case({0: ("model mix, moved gram", ""), 1: ("model mix, moved gram", "model")},
        model=LINEAR),
    "fedas": Case({0: ("weighted sum.total", "extractor")}, not_private=PROTOTYPES,
        security={"clip_exponent": 12}),
    "fedavg": Case(MODEL),
    "fedavg-ft": Case({**MODEL, 3: ("", "model")}, options={"tuning_epochs": 1}),
    "fedavgm": Case(STEPPED, options={"momentum": 0.5}),
    "fedbabu": Case({**EXTRACTOR, 3: ("", "extractor")}, options={"tuning_epochs": 2}),
    "fedbn": Case(MODEL, model=NORMS),
    "fedclassavg": Case({0: ("classifier sum.mean", "classifier")},
        not_private="contrast = 1 lets a record move"),
    "fedcp": Case({0: (f"{AVERAGED}, policy sum.mean", "model, policy")}, options={"lam": 0.5},
        not_private="lam = 0.5 lets a record move the gradients"),
    "fedcp, apart": Case({0: (f"{AVERAGED}, policy sum.mean", "model, policy")},
        options={"lam": 0.0}, method="fedcp"),
    "feddbe": Case({0: ("mean sum.mean", ""), 1: ("model sum.mean", "mean, model")},
        not_private="it surveys mean features without noise"),
    "feddyn": Case({0: (AVERAGED, "corrected")}),
    "fedem": Case({0: ("models sum.mean", "models")}, options={"models": 2},
        not_private="it surveys which model suits"),
    "fedfomo": Case(
        {0: ("model each, weights each", ""), 1: ("model each, weights each", "others")},
        not_blind=r"part 'model' \(whole_model\) crosses by 'each' .* no blind form: choose",
        not_private="a silo weighs others' models"),
    "fedgen": Case({0: (f"{AVERAGED}, heads each, counts each", "model, generator, labels")},
        options={"server_steps": 10},
        not_blind=r"part 'heads' \(header_rows\) crosses by 'each'"),
    "fedgh": Case({0: ("means each", "header")}, options={"server_lr": 0.1},
        not_blind=r"part 'means' \(prototypes\) crosses by 'each'",
        not_private="it uploads sums of the features"),
    "fedkd": Case({0: ("mentee sum.mean", "mentee")},
        not_private="its losses weigh distillation by a batch's mean"),
    "fednova": Case({0: ("direction sum.mean", "moved")}),
    "fedntd": Case(MODEL),
    "fedpac": Case(
        {0: (f"{FEATURES}, {CLASSIFIERS}, variance each", f"{COMMON}, classifier")},
        not_blind=r"part 'variance' \(prototypes\) crosses by 'each' from round 1 on",
        not_private=PROTOTYPES),
    "fedpac, pooled": Case(
        {0: (FEATURES, f"{COMMON}, classifier"),
            1: (f"{FEATURES}, {CLASSIFIERS}, variance sum.mean", f"{COMMON}, classifier")},
        options={"variances": "pooled"}, not_private=PROTOTYPES, method="fedpac"),
    "fedper": Case(EXTRACTOR),
    "fedproto": Case({0: ("prototypes sum.ratio", "prototypes")},
        not_private="its prototypes sum the features"),
    "fedprox": Case(MODEL),
    "fedrep": Case(EXTRACTOR, options={"head_epochs": 2}),
    "fedrod": Case(MODEL),
    "fedsimsup": Case({0: ("census each", ""), 1: ("theta mix", ""), 2: ("theta mix", "theta")},
        options={"tau_theta": 1, "supervisor": "cnn"}, fields=FOUR_OF_FIVE, security=DECLARED),
    "fedssa": Case({0: ("rows sum.ratio", "header")}, options={"t_stable": 3}),
    "fedssa, all rows": Case({0: ("rows sum.ratio", "header")}, options={"m2": "all"},
        method="fedssa"),
    "fedssa, without M1": Case({0: ("rows sum.mean", "header")},
        options={"m1": False, "t_stable": 3}, method="fedssa"),
    "fedssa, without M1, stale": Case({0: ("deltas sum.total", "header")},
        options={"m1": False, "t_stable": 3, "stale_inclusive": True}, method="fedssa"),
    "fedyogi": Case(STEPPED, options={"server_lr": 0.05}),
    "fml": Case({0: ("meme sum.mean", "meme")}),
    "gpfl": Case(
        {0: (f"{EXTRACTOR[0][0]}, valve sum.mean, embeddings sum.mean",
            "extractor, valve, embeddings")}),
    "knn-per": Case({**MODEL, 3: ("", "model")},
        not_private="a silo predicts by its own records as they are"),
    "lg-fedavg": Case({0: ("layers sum.mean", "layers")}),
    "local": Case({0: ("", "")}),
    "moon": Case(MODEL),
    "per-fedavg": Case({**MODEL, 3: ("", "model")}, options={"alpha": 0.05}, model=LINEAR,
        not_private="its inner step is taken on half a batch"),
    "pfedfda": Case(
        {
            0: (
                "extractor sum.mean, covariance sum.mean, changes sum.ratio, records sum.total",
                "extractor, covariance, means",
            ),
            3: ("", "extractor, covariance, means"),
        },
        not_private=PROTOTYPES,
    ),
    "pfedhn": Case({0: ("change each", "model")}, options={"hidden": 20},
        not_blind=r"part 'change' \(whole_model\) crosses by 'each' .* no blind form: choose"),
    "pfedme": Case(MODEL, options={"steps": 2}, model=LINEAR,
        not_private="its inner steps are taken on a whole batch"),
    "pfedsim": Case(
        {0: (AVERAGED, "model"), 1: ("extractor mix, rows gram", "model"),
            2: ("extractor mix, rows gram", "extractor, model")},
        options={"rho": 0.5}),
    "ppfl": Case({0: ("model sum.mean, coupling sum.total", "model, coupling")}),
    "scaffold": Case({0: ("model sum.mean, control sum.mean", "model, variate")}),
    "scaffold, global": Case({0: ("model sum.mean, control sum.mean", "model-stepped, variate")},
        options={"global_lr": 0.75}, method="scaffold"),
}  # fmt: skip


def make(name, **fields):
    case = CASES[name]
    document = {
        "version": 1,
        "name": "test",
        "seed": 7,
        "rounds": 3,
        "silos": list("abcd"),
        "min_cohort": 3,
        "method": {"name": case.method or name, "options": case.options},
        "model": {"classes": 3, **SMALL, **case.model},
        "training": {"epochs": 2, "batch_size": 8, "lr": 0.1},
        **case.fields,
        **fields,
    }
    return Job.from_file(JobFile.model_validate(document), "job.toml")


# A recurrent layer, attention, dropout, and a parameter that no layer resets.
OUTSIDE = {"name": "mixed", "head": "fc", "input": [1, 8, 8], "options": {"dropout": 0.1}}
# what torch cannot do with its layers, or what it has not
CANNOT = {
    "fedaims": "supervises the blocks of a model, and the job's model has none",
    "fedas": r"round 0 at silo 'a': method 'fedas' cannot train model 'mixed': .*; choose another",
    "per-fedavg": "cannot train model 'mixed': Trying to use forward AD with .*; choose another",
}


@pytest.mark.parametrize("name", sorted(CANNOT))
def test_says_what_it_cannot_do_with_a_model_from_outside_the_table(name):
    with refused(CANNOT[name]):
        job = make(name, rounds=2, model={"classes": 3, **OUTSIDE})
        simulate(job, banded_shards(job.silos))


@pytest.mark.parametrize(
    "name", sorted(name for name, case in CASES.items() if (case.method or name) not in CANNOT)
)
def test_trains_a_model_from_outside_the_table(name):
    """Dropout draws from the job's streams: torch's own generator is where it was."""
    # a second batch in each stage, and a second round: each may draw elsewhere
    training = {"epochs": 1, "batch_size": 16, "lr": 0.1}
    job = make(name, rounds=2, model={"classes": 3, **OUTSIDE}, training=training)
    before = torch.get_rng_state()
    end = simulate(job, banded_shards(job.silos))
    assert torch.equal(before, torch.get_rng_state())
    for silo in job.silos:
        begun, state = job.method().modules(silo), end.states[silo]
        assert all(tensor.isfinite().all() for tensor in state.flat.values())
        assert not torch.equal(state.parts["extractor"]["scale"], begun["extractor"].scale)


@pytest.fixture(autouse=True, scope="module")
def few_weights_in_blocks():
    """'convnet-digits' is narrow here: a rotation takes time by the square of a model's size."""
    own = replace(NETWORKS["convnet-digits"], build=narrow_blocks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(NETWORKS, "convnet-digits", own)
        yield


def narrow_blocks(shape, classes, norm):
    return convnet(shape[0], (8, 8, 16), classes, norm)


@cache
def plain(name):
    job = make(name)
    return simulate(job, banded_shards(job.silos))


def check_same(one, other, tolerance):
    """All that silos and the coordinator hold in the end."""
    pairs = [(one.states[silo].flat, other.states[silo].flat) for silo in one.states]
    for mine, theirs in (*pairs, (one.coordinator, other.coordinator)):
        assert {name for name in theirs if not name.startswith("extra/counted.")} == mine.keys()
        for name, value in mine.items():
            assert torch.allclose(theirs[name].double(), value.double(), atol=tolerance, rtol=0), (
                name
            )


def test_the_table_has_every_method():
    assert {case.method or name for name, case in CASES.items()} == set(METHODS)


NAN = float("nan")
OUT_OF_RANGE = {
    "fedaims": [
        {"mu": -1}, {"main_weight": 1.5}, {"sampling": "random"}, {"aux_ce": "both"},
        {"sketch": -1}, {"sketch": 70_000}, {"lambda": 0.5}, {"update_gap": 0},
    ],
    "fedclassavg": [{"rho": -1}, {"temperature": 0}, {"contrast": -1}, {"view": "crop"}],
    "feddyn": [{"alpha": 0}],
    "fedproto": [{"lam": -1}, {"predict": "both"}, {"weights": "none"}],
    "fedrod": [{"gamma": -1}, {"gamma": 11}, {"gamma": NAN}],
    "fedsimsup": [
        {"supervisor": "resnet"}, {"supervisor": []}, {"tau_s": 0}, {"tau_theta": 2.0},
        {"c": NAN, "gamma": 0.4}, {"c": 0.0, "gamma": 0.4}, {"gamma": 0.5, "c": 40.0},
        {"schedule": "fast"}, {"similarity": "cosine"}, {"weights": "file"},
    ],
    "fedssa": [
        {"mu_0": 1.1}, {"mu_0": NAN}, {"t_stable": -1}, {"t_stable": 2.5}, {"clip": 0.0},
        {"min_holders": 0},
    ],
    "moon": [{"mu": -1}, {"mu": NAN}, {"temperature": 0}],
    "ppfl": [
        {"models": 0}, {"floor": 0.0}, {"lam": -1.0}, {"lam": float("inf")}, {"p_theta": 1.0},
        {"variant": "x"},
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("method", "options"), [(name, each) for name, own in OUT_OF_RANGE.items() for each in own]
)
def test_an_option_out_of_range_is_refused_by_name(make_job, method, options):
    with refused(next(iter(options))):
        make_job(method, options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"supervisor": []}, "give a list of 1 or more"),
        ({"c": 40.0}, "c and gamma go together"),
        ({"gamma": 0.4}, "c and gamma go together"),
        ({"c": NAN, "gamma": 0.4}, "c = nan"),
        ({"c": 0.0, "gamma": 0.4}, "c = 0.0: give a value above 0.0"),
        ({"c": 40.0, "gamma": 0.4, "schedule": "paper"}, "leave them out"),
        ({"weights": "file"}, "unknown key"),
    ],
)
def test_options_of_fedsimsup_that_contradict_each_other_are_refused(make_job, options, said):
    with refused(said):
        make_job("fedsimsup", options)


@pytest.mark.parametrize("name", CASES)
def test_it_learns(name):
    reached = plain(name).scores(make(name).method().product)
    assert mean(reached.values()) > CASES[name].learns, reached  # of three classes


@pytest.mark.parametrize("name", CASES)
def test_both_engines_are_equal(name):
    """In float32, over a whole job.

    ``engines/test_vmap_engine.py`` compares in float64, option by option.
    """
    job = make(name)
    simulation = Simulation(
        job, Stacked(job, {s: Records(*own) for s, own in banded_shards(job.silos).items()})
    )
    while simulation.round < job.length:
        simulation.step()
    simulation.finish(simulation.look())
    check_same(plain(name), simulation, 1e-4)


@pytest.mark.parametrize("name", CASES)
def test_blind_equals_plain_or_it_says_why_there_is_no_blind_form(name):
    blind = make(name, security={**BLIND, **CASES[name].security})
    if CASES[name].not_blind:
        with refused(CASES[name].not_blind):
            blind.document()
        return
    assert blind.document()["security"]["secure_aggregation"] == "required"
    check_same(
        plain(name), simulate(blind, banded_shards(blind.silos), exchanges=simulated(blind)), 1e-4
    )


@pytest.mark.parametrize("name", CASES)
def test_it_can_be_private_or_says_why_not(name):
    job, why = make(name, privacy=PRIVACY), CASES[name].not_private
    if why:
        with refused(rf"\[privacy\] with method '{job.method_name}': .*{why}"):
            job.document()
    else:
        assert job.document()["privacy"]


@pytest.mark.parametrize("name", CASES)
def test_the_wire_list_is_as_declared(name):
    """By phase; in the last one, the final delivery, nothing goes up and the same comes down as
    before.
    """
    *phases, final = make(name).document()["schema"]
    found = {}
    for phase in phases:
        up = [
            f"{part['name']} {part['exchange']}"
            for part in phase["up"]
            if part["name"] != RIGHT.name
        ]
        found[phase["from_round"]] = (
            ", ".join(up),
            ", ".join(part["name"] for part in phase["down"]),
        )
    assert found == CASES[name].wire
    assert (final["from_round"], final["up"]) == (make(name).length, [])
    assert final["down"] == phases[-1]["down"]
    if found[0] == MODEL[0] and name != "fedbn":  # tensor by tensor what crosses in FedAvg
        batch = {"name": "cnn-digits", "norm": "batch", "buffers": "global"}
        for model in ({**SMALL, **CASES[name].model}, batch):
            one, average = (
                make(each, model={"classes": 3, **model}).document() for each in (name, "fedavg")
            )
            assert one["schema"][0] == average["schema"][0]
