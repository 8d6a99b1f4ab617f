import pytest
import torch
from support.refusals import refused
from support.whole_jobs import check_tensors

from staddle.algorithms.baselines.lg_fedavg import layers_of
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.exchange.parts import Kind
from staddle.algorithms.method import initial_state
from staddle.algorithms.models.build import ModelOptions, sketch
from staddle.algorithms.training.silo_round import local_round
from staddle.security.blind.plan import simulated

MIB = 2**20
SIZES, BIASES = {"a": 10, "b": 30, "c": 20}, {"a": 1.0, "b": 2.0, "c": 6.0}
MEAN = pytest.approx([19 / 6] * 3)  # (10 + 60 + 120) / 60
LAYERS = [
    ["extractor.conv1", "extractor.norm1"],
    ["extractor.conv2", "extractor.norm2"],
    ["extractor.fc1"],
]


def test_layers_in_the_order_of_the_network_norms_with_the_one_before(make_job):
    modules = sketch(ModelOptions(name="cnn-digits", classes=3, norm="batch"))
    assert layers_of(modules) == [*LAYERS, ["classifier"]]
    names = ["conv2.weight", "conv2.bias", "norm2.weight", "norm2.bias", "fc1.weight", "fc1.bias"]
    crossing = [*(f"extractor.{name}" for name in names), "classifier.weight", "classifier.bias"]
    statistics = ["extractor.norm2.running_mean", "extractor.norm2.running_var"]
    for buffers, more in (("local", []), ("global", statistics)):
        model = {"norm": "batch", "buffers": buffers}
        part, _ = make_job("lg-fedavg", {"layers": 3}, model).up(0)
        assert sorted(spec.name for spec in part.tensors) == sorted([*crossing, *more])
        assert more or [spec.name for spec in part.tensors] == crossing
        assert part.kind == Kind.WHOLE_MODEL


@pytest.mark.parametrize(
    ("name", "shape", "classes", "printed"),
    [
        ("convnet-3x64", (1, 28, 28), 47, "0.02"),
        ("convnet-4x128", (3, 32, 32), 10, "0.01"),
        ("resnet18", (3, 32, 32), 100, "0.39"),
        ("resnet18", (3, 64, 64), 200, "0.78"),
    ],
)
def test_what_crosses_by_default_is_what_fedaims_counts_in_its_table_6(
    make_job, name, shape, classes, printed
):
    """The classifier up and down, in MB; its networks are those of test_fedaims.py."""
    job = make_job(
        "lg-fedavg", model={"name": name, "input": shape, "classes": classes, "norm": "group"}
    )
    part, _ = job.up(0)
    assert part.kind == Kind.HEADER_ROWS
    assert f"{2 * sum(spec.nbytes for spec in part.tensors) / MIB:.2f}" == printed


def with_biases(job, *layers):
    """The job's method, in which these layers of silos a, b and c begin with biases 1, 2 and 6."""
    method = job.method()
    modules = method.modules

    def own(silo):
        parts = modules(silo)
        for layer in layers:
            module = parts["classifier"] if layer == "classifier" else parts["extractor"].fc1
            torch.nn.init.constant_(module.bias, BIASES[silo])
        return parts

    method.modules = own
    return method


@pytest.fixture
def shards(make_data):
    return {silo: (make_data(n, n), make_data(6, 1)) for silo, n in SIZES.items()}


def test_the_last_layers_are_weighted_means_and_the_others_stay(make_job, shards):
    job = make_job("lg-fedavg", rounds=1, training={"lr": 1e-30})
    method = with_biases(job, "classifier", "fc1")
    for silo, size in SIZES.items():
        start = initial_state(method, silo)
        made = local_round(method, job, start, 0, {}, *shards[silo], silo)
        contribution = made.contributions["layers"]
        assert contribution.weight == size
        assert contribution.tensors.keys() == {"classifier.weight", "classifier.bias"}
    result = simulate(job, shards)
    method.product = "delivered"
    delivered = simulate(job, shards)
    for silo, bias in BIASES.items():
        # as it was trained
        assert result.states[silo].parts["classifier"]["bias"].tolist() == [bias] * 3
        parts = delivered.states[silo].parts
        assert parts["classifier"]["bias"].tolist() == MEAN
        assert set(parts["extractor"]["fc1.bias"].tolist()) == {bias}


def test_of_silos_that_are_alike_it_is_fedavg(make_job, make_data):
    """Equal records in one batch: all silos train alike, so it does not matter which layers are
    averaged.
    """
    records = make_data(8), make_data(6, 1)
    jobs = [make_job(name, rounds=3) for name in ("lg-fedavg", "fedavg")]
    one, other = (simulate(job, dict.fromkeys(job.silos, records)) for job in jobs)
    delivered = [[r.delivered.correct for r in each.history["a"]] for each in (one, other)]
    assert delivered[0] == delivered[1]
    check_tensors(one.states["b"].flat, other.states["b"].flat, 1e-6)


def test_lower_layers_differ_in_the_clear_and_blind(make_job, make_shards):
    fields = {"silos": list("abcd"), "min_cohort": 3, "rounds": 3}
    security = {"secure_aggregation": "required"}
    job = make_job("lg-fedavg", training={"epochs": 2}, security=security, **fields)
    for exchanges in ({}, {"exchanges": simulated(job)}):
        states = simulate(job, make_shards(job), **exchanges).states
        lowest = [state.parts["extractor"]["conv1.weight"] for state in states.values()]
        assert len({weight.sum().item() for weight in lowest}) == 4


@pytest.mark.parametrize(
    ("layers", "model", "number"), [(4, {}, 4), (9, {}, 4), (1, {"name": "glm"}, 1)]
)
def test_where_all_layers_would_cross_it_is_refused(make_job, layers, model, number):
    with refused(rf"layers = {layers}, but the model has {number}, so nothing would stay .*fedavg"):
        make_job("lg-fedavg", {"layers": layers}, model).document()


def test_silos_of_different_architectures_share_a_classifier(make_job, shards):
    """Below it nothing is alike."""
    names, model = ["digits-cnn-b", "digits-cnn-a"], {"name": "digits-cnn-a"}
    job = make_job("lg-fedavg", {"extractors": names}, model, {"lr": 1e-30}, rounds=1)
    with_biases(job, "classifier").product = "delivered"
    states = simulate(job, shards).states
    for state in states.values():
        assert state.parts["classifier"]["bias"].tolist() == MEAN
    bodies = [
        {name: tuple(t.shape) for name, t in states[silo].parts["extractor"].items()}
        for silo in SIZES
    ]
    assert bodies[0] == bodies[2] != bodies[1]
    with refused("layers = 2, but extractors that differ from silo to silo cannot cross"):
        make_job("lg-fedavg", {"extractors": names, "layers": 2}, model).document()
    with refused("lg-fedavg: extractor 'lenet5' ends in 84 units, the job's model in 64"):
        large = {**model, "input": [1, 28, 28]}
        make_job("lg-fedavg", {"extractors": ["lenet5"]}, large).document()
