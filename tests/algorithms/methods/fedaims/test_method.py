import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.jobs import make_job
from support.refusals import refused
from support.rounds_by_hand import closed, collected
from support.whole_jobs import check_states
from torch import nn
from torch.nn.functional import cross_entropy

from staddle.algorithms.course import Facts, SiloState
from staddle.algorithms.engines.aggregation import MemoryArchive, deliver
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.exchange.delivery import Latest, Value
from staddle.algorithms.exchange.parts import WEIGHT, Gram, Kind, Sum, TensorSpec
from staddle.algorithms.exchange.plain import PLAIN
from staddle.algorithms.method import initial_state
from staddle.algorithms.methods.fedaims.method import (
    ADAPTER_WIDTH,
    FedAIMS,
    FedAIMSOptions,
    balanced,
    prototype_cross_entropy,
    supervision_sampling,
)
from staddle.algorithms.models.build import ModelOptions, build
from staddle.algorithms.models.networks.resnet import Blocks
from staddle.algorithms.models.registry import NETWORKS
from staddle.algorithms.training.loop import measure
from staddle.algorithms.training.silo_round import facts_of, local_round, to_modules
from staddle.errors import PeerError

FACTS = Facts("a", 0, 5, torch.tensor([2, 2, 1]))
MIB = 2**20


@pytest.fixture
def make(make_job):
    def made(options=None, norm="group", **fields):
        return make_job(
            "fedaims", options, model={"name": "convnet-digits", "norm": norm}, **fields
        )

    return made


def count(*modules):
    return sum(p.numel() for m in modules for p in m.parameters())


# The networks.


@pytest.mark.parametrize(
    ("name", "shape", "classes", "parameters", "adapters", "printed"),
    [
        ("convnet-3x64", (1, 28, 28), 47, 77_935, ".063", ("0.30", "0.59", "0.57")),
        ("convnet-4x128", (3, 32, 32), 10, 448_650, ".190", ("1.71", "3.42", "3.41")),
        ("resnet18", (3, 32, 32), 100, 11_220_132, ".487", ("42.80", "85.60", "85.21")),
        ("resnet18", (3, 64, 64), 200, 11_271_432, ".487", ("43.00", "85.99", "85.21")),
    ],
)
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_sizes_are_those_of_the_papers_tables_6_and_8(
    name, shape, classes, parameters, adapters, printed, norm
):
    options = ModelOptions(name=name, classes=classes, norm=norm, input=shape)
    with torch.device("meta"):
        parts = NETWORKS[name].build(shape, classes, norm)
    assert options.norm == norm
    assert count(*parts.values()) == parameters
    assert not list(parts["extractor"].buffers())  # no running statistics
    megabytes = [
        f"{4 * n / MIB:.2f}" for n in (parameters, 2 * parameters, 2 * count(parts["extractor"]))
    ]
    assert tuple(megabytes) == printed
    widths = parts["extractor"].widths
    inner = ADAPTER_WIDTH
    stored = sum(widths[-1] * inner + inner + inner * d + d for d in widths[:-1])
    assert math.floor(4 * stored / MIB * 1000 + 0.5) == round(float(adapters) * 1000)


def test_table_8_counts_the_prototypes_of_the_middle_blocks():
    saved = {  # 2 ways · 300 rounds · Σ_{j<m} d_j · C · 4 bytes
        name: f"{2 * 300 * sum(widths) * classes * 4 / MIB:.2f}"
        for name, widths, classes in [("EMNIST", (64, 64), 47), ("CIFAR-10", (128, 128, 128), 10)]
    }
    assert saved == {"EMNIST": "13.77", "CIFAR-10": "8.79"}


@pytest.mark.parametrize("norm", ["none", "batch", "group"])
@pytest.mark.parametrize("name", ["convnet-digits", "convnet-3x64", "resnet18"])
def test_block_features_are_channel_means(name, norm):
    if norm == "none" and name != "convnet-digits":
        pytest.skip("this network has a norm by definition")
    options = ModelOptions(
        name=name, classes=4, norm=norm, input=(3, 16, 16) if name == "resnet18" else None
    )
    parts = build(options, 1)
    extractor = parts["extractor"]
    assert isinstance(extractor, Blocks)
    x = torch.randn(3, *(options.input or ((1, 8, 8) if name == "convnet-digits" else (1, 28, 28))))
    every = extractor(x, True)
    assert every.shape == (3, sum(extractor.widths))
    out = x
    for block, width, feature in zip(
        extractor.blocks, extractor.widths, every.split(extractor.widths, dim=1), strict=True
    ):
        out = block(out)
        assert out.shape[1] == width
        assert torch.allclose(feature, out.flatten(2).mean(2), atol=1e-6)
    assert torch.equal(extractor(x), feature)
    parts["classifier"](feature).sum().backward()
    assert all(p.grad is not None for m in parts.values() for p in m.parameters())
    assert not any(getattr(m, "inplace", False) for m in extractor.modules())


def test_the_resnet_stem_keeps_the_size_and_lies_in_block_one():
    extractor = build(ModelOptions(name="resnet18", classes=4, norm="batch", input=(3, 16, 16)), 1)[
        "extractor"
    ]
    sides, out = [], torch.randn(2, 3, 16, 16)
    for block in extractor.blocks:
        out = block(out)
        sides.append(out.shape[-1])
    assert sides == [16, 8, 4, 2]
    assert next(name for name, _ in extractor.named_parameters()) == "blocks.0.stem.conv.weight"


# Who supervises which block.


def cosines(n, pairs):
    matrix = torch.zeros(n, n, dtype=torch.float64)
    for (i, j), value in pairs.items():
        matrix[i, j] = matrix[j, i] = value
    return matrix


FIVE = {(0, 2): 0.1, (1, 2): 0.9, (0, 4): 0.8, (2, 4): 0.4, (1, 4): 0.2, (3, 4): 0.6}


@pytest.mark.parametrize(
    ("silos", "pairs", "blocks", "found"),
    [
        # 0 → G1 (both empty, the earlier), 1 → G2 (the only smallest), 2: δ = .1 to G1, .9 to G2
        # → G1 = {0, 2}; 3 → G2 = {1, 3} (the only smallest); 4: δ = (.8 + .4)/2 = .6 to G1,
        # (.2 + .6)/2 = .4 to G2 → G2 = {1, 3, 4}. Sorted by size, G1 supervises block 1, G2 block 2
        (5, FIVE, 2, [1, 2, 1, 2, 2]),
        # 0, 1, 2 open G1, G2, G3. 3: δ = .3, -.2, .5 → G2 = {1, 3}. 4: G1 and G3 are smallest,
        # δ = .7 and .6 → G3; δ = -.9 to the full G2 does not count. Sizes 1, 2, 2
        (5, {(0, 3): 0.3, (1, 3): -0.2, (2, 3): 0.5} |
            {(0, 4): 0.7, (2, 4): 0.6, (1, 4): -0.9, (3, 4): -0.9}, 3, [1, 2, 3, 2, 3]),
        # G1 = {0, 2} is opened first and larger, so it is sorted behind G2 = {1}
        (3, {(1, 2): 0.5}, 2, [2, 1, 2]),
    ],
)  # fmt: skip
def test_algorithm_2_by_hand(silos, pairs, blocks, found):
    """Larger groups supervise deeper blocks."""
    assert supervision_sampling(cosines(silos, pairs), blocks) == found


@settings(max_examples=25)
@given(st.integers(1, 12), st.integers(1, 4), st.integers(0, 2**16))
def test_groups_differ_by_at_most_one_and_deeper_blocks_have_no_fewer(n, middle, seed):
    noise = torch.rand(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    names = [f"silo-{i}" for i in range(n)]
    for blocks in (
        supervision_sampling(noise + noise.T, middle),
        list(balanced(names, middle, seed, 3).values()),
    ):
        sizes = [blocks.count(j) for j in range(1, middle + 1)]
        assert sum(sizes) == n
        assert max(sizes) - min(sizes) <= 1
        assert sizes == sorted(sizes)


def test_the_balanced_deal(make):
    """The balanced deal is over the cohort changes by round and needs no coordinator."""
    job = make(silos=list("abcdef"), participation=0.7, rounds=30)
    method = job.method()
    deals = []
    for round_ in range(30):
        cohort = job.cohort(round_)
        assert len(cohort) == 4
        deal = {
            s: method.supervised(initial_state(method, s), replace(FACTS, silo=s, round=round_))
            for s in cohort
        }
        assert sorted(deal.values()) == [(1,), (1,), (2,), (2,)]
        deals.append(deal)
        stranger = next(s for s in job.silos if s not in cohort)
        with refused("was not drawn"):
            method.supervised(
                initial_state(method, stranger), replace(FACTS, silo=stranger, round=round_)
            )
    assert {deal.get("a") for deal in deals} == {(1,), (2,), None}
    assert [type(part.exchange) for part in method.up(0)] == [Sum, Sum]
    assert method.deliveries(method.begin(), 3, "a") == (Latest("backbone"), Latest("prototypes"))
    assert method.begin() == {}


# The silo half.


def with_prototypes(state, prototypes):
    return SiloState(state.parts, {**state.extra, "prototypes": prototypes})


def objective_by_hand(method, modules, x, y, prototypes, blocks, aux_ce, total=False):
    """Eqs. 5 to 8 and 12 sample by sample, over the samples of a batch."""
    m, lam, losses = 3, 1 / 3, []
    every = modules["extractor"](x, True)
    for row, label in zip(every, y.tolist(), strict=True):
        features = row.split(method.widths)
        norm = lambda v: (v**2).sum() * (len(x) if total else 1 / len(v))
        known = [k for k in range(3) if prototypes[k].any()]
        main = cross_entropy(modules["classifier"](features[-1])[None], torch.tensor([label]))
        own = main
        if label in known:
            main = main + 0.5 * norm(prototypes[label] - features[-1])
        auxiliary = 0
        for j in blocks:
            adapter, feature = modules[f"adapter{j}"], features[j - 1]
            if label in known:
                auxiliary = auxiliary + 0.5 * norm(adapter(prototypes[label]) - feature)
            if aux_ce == "model":
                auxiliary = auxiliary + own
            elif aux_ce == "head":
                auxiliary = auxiliary + cross_entropy(
                    modules[f"head{j}"](feature)[None], torch.tensor([label])
                )
            elif aux_ce == "prototype" and label in known:
                logits = torch.stack(
                    [-((adapter(prototypes[k]) - feature) ** 2).sum() for k in known]
                )
                auxiliary = auxiliary - logits.log_softmax(0)[known.index(label)]
        losses.append(lam * main + (1 - lam if len(blocks) == 1 else 1 / m) * auxiliary)
    return torch.stack(losses)


@pytest.mark.parametrize("aux_ce", ["model", "head", "prototype", "none"])
@pytest.mark.parametrize("sampling", ["balanced", "full"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_and_gradients_are_those_of_the_equations(
    make, make_data, aux_ce, sampling, reduction
):
    method = make(
        {"aux_ce": aux_ce, "sampling": sampling, "reduction": reduction, "mu": 0.5}
    ).method()
    batch = make_data(6)
    assert set(batch.y.tolist()) == {0, 1, 2}
    prototypes = torch.rand(3, 32, generator=torch.Generator().manual_seed(1))
    prototypes[1] = 0  # no silo held class 1
    state = with_prototypes(initial_state(method, "a"), prototypes)
    modules = to_modules(method, "a", state)
    (stage,) = method.stages(state, FACTS)
    blocks = method.supervised(state, FACTS)
    given_ = stage.loss(modules, batch.x, batch.y, stage.context)
    by_hand = objective_by_hand(
        method, modules, batch.x, batch.y, prototypes, blocks, aux_ce, reduction == "sum"
    )
    assert torch.allclose(given_, by_hand, rtol=1e-4)
    parameters = [p for name in stage.trains for p in modules[name].parameters()]
    one = torch.autograd.grad(given_.mean(), parameters)  # each trained parameter is in the loss
    other = torch.autograd.grad(by_hand.mean(), parameters)
    assert all(
        torch.allclose(a, b, rtol=1e-3, atol=1e-5 * (1 + b.abs().max()))
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("aux_ce", ["model", "head", "prototype", "none"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("j", [1, 2, 3])
def test_silos_of_all_blocks_have_one_loss_with_the_bits_of_their_own(
    make_job, make_data, aux_ce, reduction, j
):
    """Each silo's adapter and head under one name, where middle blocks have one width."""
    options = {"aux_ce": aux_ce, "reduction": reduction, "sampling": "algorithm2"}
    model = {"name": "convnet-4x128", "norm": "group", "input": [1, 16, 16]}
    method, batch = make_job("fedaims", options, model=model).method(), make_data(6)
    x = nn.functional.interpolate(batch.x, scale_factor=2.0)
    state = with_prototypes(initial_state(method, "a"), torch.rand(3, 128))
    state = SiloState(state.parts, {**state.extra, "block": torch.tensor(j)})
    modules = to_modules(method, "a", state)
    (stage,) = method.stages(state, FACTS)
    named = {name: modules[part] for name, part in stage.aligned.names.items()}
    named |= {"extractor": modules["extractor"], "classifier": modules["classifier"]}
    losses, gradients = [], []
    for one, parts in ((stage, modules), (stage.common, named)):
        losses.append(one.loss(parts, x, batch.y, one.context))
        moved = [p for part in one.trains for p in parts[part].parameters()]
        gradients.append(torch.autograd.grad(losses[-1].mean(), moved))
    assert torch.equal(*losses)
    # four blocks of four tensors, classifier, adapter, and perhaps head
    assert len(gradients[0]) == 22 + 2 * (aux_ce == "head")
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_blocks_of_different_widths_and_all_blocks_at_once_have_no_common_loss(make, make_job):
    wide = {"model": {"name": "convnet-3x64", "norm": "group"}}
    aligned = make_job("fedaims", **wide), make(), make_job("fedaims", {"sampling": "full"}, **wide)
    found = []
    for job in aligned:
        method = job.method()
        (stage,) = method.stages(initial_state(method, "a"), FACTS)
        found.append(stage.aligned is not None)
    assert found == [True, False, False]


def test_without_prototypes_only_cross_entropies_are_left_and_gradients_are_finite(make, make_data):
    batch = make_data(6)
    for aux_ce in ("model", "head", "prototype", "none"):
        method = make({"aux_ce": aux_ce}).method()
        state = initial_state(method, "a")
        modules = to_modules(method, "a", state)
        (stage,) = method.stages(state, FACTS)
        (j,) = method.supervised(state, FACTS)
        wanted = {"extractor", "classifier"} | ({f"head{j}"} if aux_ce == "head" else set())
        assert set(stage.trains) == wanted  # no adapter: weight decay would move it
        loss = stage.loss(modules, batch.x, batch.y, stage.context)
        by_hand = objective_by_hand(
            method, modules, batch.x, batch.y, torch.zeros(3, 32), (j,), aux_ce
        )
        assert torch.allclose(loss, by_hand, rtol=1e-4)
        everything = [p for m in modules.values() for p in m.parameters()]
        assert all(
            g.isfinite().all()
            for g in torch.autograd.grad(loss.mean(), everything, materialize_grads=True)
        )


def test_prototype_logits_by_hand():
    """σ doubles; prototypes 1, 2 and none.

    Φ = 3: logits -(2-3)² = -1 and -(4-3)² = -1, so log 2 each; class 2: 0.
    """
    prototypes, known = torch.tensor([[1.0], [2.0], [0.0]]), torch.tensor([True, True, False])
    feature, y = torch.full((3, 1), 3.0), torch.tensor([0, 1, 2])
    losses = prototype_cross_entropy(lambda c: 2 * c, prototypes, known, feature, y)
    assert torch.allclose(losses, torch.tensor([math.log(2), math.log(2), 0.0]))


def test_the_unsupervised_blocks_stay_as_they_are(make, make_shards):
    job = make({"aux_ce": "head"}, training={"weight_decay": 0.1, "momentum": 0.9})
    method, (train, test) = job.method(), make_shards(job)["a"]
    state = with_prototypes(initial_state(method, "a"), torch.rand(3, 32))
    (j,) = method.supervised(state, FACTS)
    after = local_round(method, job, state, 0, {}, train, test, "a").state
    moved = {
        part
        for part in state.parts
        if any((state.parts[part][k] != v).any() for k, v in after.parts[part].items())
    }
    assert moved == {"extractor", "classifier", f"adapter{j}", f"head{j}"}


def test_fedper_is_what_is_left_without_auxiliary_terms(make, make_job, make_shards):
    job = make({"main_weight": 1, "mu": 0, "aux_ce": "none"}, participation=0.7)
    other = make_job("fedper", model={"name": "convnet-digits", "norm": "group"}, participation=0.7)
    one, two = simulate(job, make_shards(job)), simulate(other, make_shards(other))
    right = [
        {
            s: [(r.delivered.correct, r.trained.correct) for r in rs]
            for s, rs in each.history.items()
        }
        for each in (one, two)
    ]
    assert right[0] == right[1]
    check_states(one.states, two.states)


# What crosses.


@pytest.mark.parametrize("sampling", ["balanced", "algorithm2", "full"])
@pytest.mark.parametrize("aux_ce", ["model", "head", "prototype", "none"])
def test_heads_and_adapters_are_in_no_part(make, make_data, sampling, aux_ce):
    method = make({"sampling": sampling, "aux_ce": aux_ce}).method()
    names = [
        s.name for r in range(5) for part in (*method.up(r), *method.down(r)) for s in part.tensors
    ]
    private = ("classifier", "adapter", "head", "running")
    assert not any(word in name for name in names for word in private)
    state = initial_state(method, "a")
    state = method.deliver(state, {}, FACTS)
    facts = replace(
        FACTS, measured=measure(method.measure, to_modules(method, "a", state), make_data(5))
    )
    contributions = method.contribute(state, facts)
    assert list(contributions) == [part.name for part in method.up(0)]
    for part in method.up(0):
        PLAIN.contribute(part, contributions[part.name])
    assert {f"adapter{j}" for j in (1, 2)} <= set(state.parts)
    assert ("head1" in state.parts) == (aux_ce == "head")


@pytest.mark.parametrize(("weights", "first"), [("class_count", 2.0), ("paper_p", 1.8)])
def test_prototypes_by_hand_over_two_silos(make, weights, first):
    """a: 3 of class 0 (mean 1), 1 of class 1 (mean 7). b: 1 of class 0 (mean 5).

    Nobody holds class 2. class_count: (3·1 + 1·5)/4 = 2. paper_p: n = 4 and 1, (4·1 + 1·5)/5 = 1.8.
    Class 1: 7 both times.
    """
    method, given_ = make({"prototype_weights": weights}).method(), []
    for silo, *own in (("a", [3, 7, 0], [3, 1, 0]), ("b", [5, 0, 0], [1, 0, 0])):
        sums, counts = torch.tensor(own, dtype=torch.float64)
        measured = {"sums": sums[:, None].expand(3, 32), "counts": counts}
        facts = Facts(silo, 1, int(counts.sum()), counts.long(), measured)
        given_.append(method.contribute(initial_state(method, "a"), facts)["prototypes"])
    mean = collected(method.up(0)[1], given_)["mean"]
    assert torch.allclose(mean, torch.tensor([first, 7.0, 0.0])[:, None].expand(3, 32))


@settings(max_examples=25)
@given(st.lists(st.tuples(*[st.integers(0, 5)] * 3).filter(any), min_size=1, max_size=4))
def test_the_weights_of_eq_4_sum_to_one_for_each_class_that_anyone_holds(method_by_weights, cohort):
    """Where all silos have the same mean of a class, so has the prototype, whoever lacks
    the class.
    """
    wide = torch.tensor([1.0, -2.0, 5.0], dtype=torch.float64)[:, None].expand(3, 32)
    for method in method_by_weights:
        state, part, given_ = initial_state(method, "a"), method.prototypes, []
        for counts in torch.tensor(cohort, dtype=torch.float64):
            sums = {"sums": counts[:, None] * wide, "counts": counts}
            facts = Facts("a", 1, int(counts.sum()), counts.long(), sums)
            given_.append(method.contribute(state, facts)["prototypes"])
            assert not given_[-1].tensors["mean"][counts == 0].any()
        held = torch.tensor(cohort).sum(0) > 0
        mean = collected(part, given_)["mean"]
        assert torch.allclose(mean, (wide * held[:, None]).float(), atol=1e-6)


@pytest.fixture(scope="module")
def method_by_weights():
    model = {"name": "convnet-digits"}
    return [
        make_job("fedaims", {"prototype_weights": weights}, model).method()
        for weights in ("class_count", "paper_p")
    ]


def test_a_class_that_nobody_in_the_last_cohort_held_has_no_prototype_any_more(make):
    method = make().method()
    before = with_prototypes(initial_state(method, "a"), torch.full((3, 32), 9.0))
    mean = torch.ones(3, 32)
    mean[1] = 0
    after = method.deliver(before, {"prototypes": {"mean": mean}}, FACTS)
    assert torch.equal(after.extra["prototypes"], mean)
    assert torch.equal(before.extra["prototypes"], torch.full((3, 32), 9.0))  # states are values
    assert torch.equal(method.deliver(after, {}, FACTS).extra["prototypes"], mean)


def test_the_coordinators_cosines_are_new_values_and_bought_by_no_longer_vector(make):
    method = make({"sampling": "algorithm2"}, silos=list("abc")).method()
    quarters = torch.full((3, 3), 0.25, dtype=torch.float64)
    before = {"similarity": quarters.clone()}
    results = {
        part.name: {spec.name: torch.zeros(spec.shape) for spec in part.tensors}
        for part in (method.backbone, method.prototypes)
    }
    gram = torch.tensor([[[1.0, -50.0], [-50.0, 2500.0]]], dtype=torch.float64)
    results["direction"] = {"gram": gram}
    after = method.combine(before, 1, ("a", "c"), results).state["similarity"]
    assert after.tolist() == [[1, 0.25, -1], [0.25, 0.25, 0.25], [-1, 0.25, 1]]
    assert torch.equal(before["similarity"], quarters)


def run_rounds(job, shards, rounds):
    """Yield (round, cohort, published before, states before, contributions) of a job played by
    hand.
    """
    method, archive, state = job.method(), MemoryArchive(), job.method().begin()
    silos = {silo: initial_state(method, silo) for silo in job.silos}
    for round_ in range(rounds):
        cohort, before, given_ = job.cohort(round_), {}, {}
        for silo in cohort:
            down = deliver(method, PLAIN, state, round_, silo, archive)
            outcome = local_round(method, job, silos[silo], round_, down, *shards[silo], silo)
            before[silo], silos[silo] = down, outcome.state
            given_[silo] = outcome.contributions
        spool = {
            (part.name, silo): PLAIN.contribute(part, given_[silo][part.name])
            for part in method.up(round_)
            for silo in cohort
        }
        old, state = state, closed(method, state, round_, given_, archive)
        yield round_, cohort, before, spool, archive, old, state


def test_cosines_are_taken_in_every_third_round_alone(make, make_shards):
    """Fig. 5 of the paper: between two updates Algorithm 2 deals by the matrix as it stands."""
    options = {"sampling": "algorithm2", "update_gap": 3, "sketch": 0}
    job = make(options, silos=list("abcd"), participation=0.75, rounds=7)
    every = make({**options, "update_gap": 1}, silos=list("abcd"), participation=0.75, rounds=7)
    assert [job.method().up(round_) == every.method().up(round_) for round_ in range(7)] == (
        [True, False, False] * 2 + [True]
    )
    for round_, cohort, before, spool, _, old, new in run_rounds(job, make_shards(job), 7):
        moved = not torch.equal(old["similarity"], new["similarity"])
        sent = {name for name, _ in spool}
        assert (moved, "direction" in sent) == ((True, True) if round_ % 3 == 0 else (False, False))
        index = torch.tensor([job.silos.index(silo) for silo in cohort])
        dealt = supervision_sampling(old["similarity"][index[:, None], index], 2)
        assert [int(before[silo]["block"]["block"]) for silo in cohort] == dealt
    with refused("update_gap = 3 does nothing, because only Algorithm 2 compares silos; take it"):
        make({"update_gap": 3}).document()


def test_prototypes_are_class_means_of_the_received_backbone(make, make_shards):
    """Prototypes are class means of the received backbone under partial participation."""
    job = make(silos=list("abcd"), participation=0.5, rounds=3)
    shards, method = make_shards(job), job.method()
    for round_, cohort, before, _, archive, _, _ in run_rounds(job, shards, 3):
        assert len(cohort) == 2
        rows = {k: [] for k in range(3)}
        for silo in cohort:
            received = method.deliver(
                initial_state(method, silo),
                before[silo],
                facts_of(job, silo, round_, shards[silo][0]),
            )
            extractor = to_modules(method, silo, received)["extractor"].eval()
            for x, y in zip(shards[silo][0].x, shards[silo][0].y.tolist(), strict=True):
                rows[y].append(extractor(x[None])[0])
        oracle = torch.stack([torch.stack(rows[k]).mean(0) for k in range(3)])
        assert torch.allclose(archive.latest("prototypes")["mean"], oracle, atol=1e-5)


def test_backbone_weights_sum_to_one_over_the_cohort(make, make_shards):
    job = make(silos=list("abcd"), participation=0.5, rounds=2)
    shards = make_shards(job)
    for _, cohort, _, spool, archive, _, _ in run_rounds(job, shards, 2):
        shares = torch.tensor(
            [float(spool["backbone", silo][WEIGHT]) for silo in cohort], dtype=torch.float64
        )
        assert shares.tolist() == [len(shards[silo][0]) for silo in cohort]
        shares = shares / shares.sum()
        for name, mean in archive.latest("backbone").items():
            oracle = sum(
                p * spool["backbone", silo][name].double()
                for p, silo in zip(shares, cohort, strict=True)
            )
            assert torch.allclose(mean.double(), oracle, atol=1e-6)


@pytest.mark.parametrize("similarity", ["update", "raw"])
def test_algorithm_2_never_compares_statistics(make, similarity):
    """No network of the table has both blocks and running statistics.

    One that a job may name later could.
    """

    def build():
        torch.manual_seed(0)
        norms = [
            nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)),
            nn.Sequential(nn.Conv2d(4, 6, 3)),
        ]
        return {"extractor": Blocks(norms, (4, 6)), "classifier": nn.Linear(6, 3)}

    setting = replace(make().setting(), build=build, sketch=build, buffers="global")
    method = FedAIMS(
        setting, FedAIMSOptions(sampling="algorithm2", similarity=similarity, sketch=0)
    )
    names = [spec.name for spec in method.backbone.tensors]
    assert [name for name in names if "running" in name] == [
        f"extractor.blocks.0.1.running_{n}" for n in ("mean", "var")
    ]
    start = initial_state(method, "a")
    delivered = {"block": {"block": torch.tensor(1)}}
    facts = replace(FACTS, measured={"sums": torch.ones(3, 6), "counts": torch.ones(3)})
    state, given = method.deliver(start, delivered, facts), []
    for shift in (0.0, 100.0):
        parts = {
            k: v + 1 if "running" not in k else v + shift
            for k, v in state.parts["extractor"].items()
        }
        contributions = method.contribute(
            SiloState({**state.parts, "extractor": parts}, state.extra), facts
        )
        given.append(PLAIN.contribute(method.direction, contributions["direction"])["unit"])
        assert torch.equal(
            contributions["backbone"].tensors["extractor.blocks.0.1.running_mean"],
            torch.full((4,), shift),
        )
    assert torch.equal(given[0], given[1])
    assert given[0].shape == (1, count(build()["extractor"]))


@pytest.mark.parametrize(
    ("similarity", "sketch", "error"),
    [("update", 0, 1e-4), ("raw", 0, 1e-4), ("update", 256, 0.25)],
)
def test_algorithm_2_compares_unit_vectors_of_the_backbone(
    make, make_shards, similarity, sketch, error
):
    options = {"sampling": "algorithm2", "similarity": similarity, "sketch": sketch}
    job = make(options, silos=list("abcd"), participation=0.5, rounds=3)
    shards, method, backbone = make_shards(job), job.method(), None
    flat = lambda tensors: torch.cat(
        [tensors[s.name].flatten() for s in method.backbone.tensors]
    ).double()
    start = flat(method.flat(initial_state(method, "a"), "extractor"))
    assert [type(part.exchange) for part in method.up(0)] == [Sum, Sum, Gram]
    for round_, cohort, before, spool, archive, old, new in run_rounds(job, shards, 3):
        base = start if backbone is None else backbone
        vectors = [
            flat(spool["backbone", s]) - (base if similarity == "update" else 0) for s in cohort
        ]
        cosine = float(torch.cosine_similarity(vectors[0], vectors[1], dim=0))
        i, j = (job.silos.index(s) for s in cohort)
        assert new["similarity"][i, j].item() == pytest.approx(cosine, abs=error)
        assert new["similarity"][i, j] == new["similarity"][j, i]
        untouched = torch.ones(4, 4, dtype=torch.bool)
        untouched[torch.tensor([[i], [j]]), torch.tensor([i, j])] = False
        # pairs not seen stay
        assert torch.equal(new["similarity"][untouched], old["similarity"][untouched])
        assert sorted(int(before[s]["block"]["block"]) for s in cohort) == [1, 2]
        assert not any("received" in name for name in spool)
        backbone = flat(archive.latest("backbone"))
        assert round_ < 3


def test_the_direction_is_sketched_where_that_is_shorter(make):
    direction = lambda **options: make({"sampling": "algorithm2", **options}).method().up(0)[2]
    whole = direction(sketch=0)
    length = whole.tensors[0].elements
    assert (whole.kind, whole.tensors[0].name) == (Kind.BACKBONE, "unit")
    assert direction(sketch=length) == direction(sketch=65_536) == whole
    for size, options in ((256, {}), (length - 1, {"sketch": length - 1})):
        short = direction(**options)
        assert (short.kind, short.exchange) == (Kind.SKETCH, Gram(size, 7))
        assert short.tensors == (TensorSpec("sketch", "float64", (1, length)),)
        assert short.wire == (TensorSpec("sketch", "float32", (1, size)),)


@pytest.mark.parametrize(("kinds", "blocks"), [("xyxy", [1, 2, 2, 1]), ("xyyx", [1, 2, 1, 2])])
@pytest.mark.parametrize("seed", [7, 8, 9])
def test_a_sketch_groups_as_the_whole_vector_where_silos_differ_clearly(make, kinds, blocks, seed):
    """Updates of two kinds, cosine .8 within a kind: 0 → G1, 1 → G2, 2 → the group without its
    kind, 3 → the other.
    """
    rng = torch.Generator().manual_seed(seed)
    silos, spec = list("abcd"), make().method().backbone.tensors
    drawn = {kind: [torch.randn(s.shape, generator=rng) for s in spec] for kind in (*"xy", *silos)}
    facts = replace(FACTS, measured={"sums": torch.zeros(3, 32), "counts": torch.zeros(3)})
    for sketch, error in ((0, 0.01), (256, 0.2)):
        method = make({"sampling": "algorithm2", "sketch": sketch}, silos=silos, seed=seed).method()
        given_ = []
        for silo, kind in zip(silos, kinds, strict=True):
            state = method.deliver(initial_state(method, silo), {}, FACTS)
            extractor = dict(state.parts["extractor"])
            for s, common, own in zip(spec, drawn[kind], drawn[silo], strict=True):
                name = s.name.removeprefix("extractor.")
                extractor[name] = extractor[name] + common + 0.5 * own
            after = SiloState({**state.parts, "extractor": extractor}, state.extra)
            given_.append(method.contribute(after, facts)["direction"])
        results = {"direction": collected(method.direction, given_), "prototypes": {"mean": 0}}
        results["backbone"] = dict.fromkeys((s.name for s in spec), 0)
        state = method.combine(method.begin(), 0, tuple(silos), results).state
        alike = state["similarity"][0, kinds.rindex(kinds[0])].item()
        assert alike == pytest.approx(0.8, abs=error)
        sent = [method.deliveries(state, 1, silo)[2].tensors["block"] for silo in silos]
        assert [int(block) for block in sent] == blocks


@pytest.mark.parametrize("sampling", ["balanced", "algorithm2"])
def test_of_fewer_silos_than_middle_blocks_the_shallow_blocks_are_nobodys(
    make, make_shards, sampling
):
    job = make({"sampling": sampling, "aux_ce": "head"}, participation=0.1, min_cohort=1)
    states = simulate(job, make_shards(job)).states
    fresh = initial_state(job.method(), "a").parts
    moved = lambda silo, part: any(
        not torch.equal(states[silo].parts[part][name], value)
        for name, value in fresh[part].items()
    )
    trained = {silo for round_ in range(job.rounds) for silo in job.cohort(round_)}
    assert {silo for silo in job.silos if moved(silo, "head2")} == trained
    assert not any(moved(silo, part) for silo in job.silos for part in ("head1", "adapter1"))


def test_the_coordinator_delivers_the_blocks_of_algorithm_2_to_the_drawn(make):
    job = make({"sampling": "algorithm2"}, silos=list("abcde"))
    method, state = job.method(), {"similarity": cosines(5, FIVE)}
    sent = [method.deliveries(state, 1, silo)[2] for silo in job.silos]
    assert all(isinstance(value, Value) for value in sent)
    assert [int(value.tensors["block"]) for value in sent] == [1, 2, 1, 2, 2]
    assert len(method.deliveries(state, job.rounds, "a")) == 2  # the last one trains nothing


def test_algorithm_2_takes_the_cosines_of_the_drawn_silos(make):
    """Of three drawn, the third joins the second, to which it is less similar.

    A, b and c would be dealt otherwise.
    """
    job = make({"sampling": "algorithm2"}, silos=list("abcde"), participation=0.6, rounds=9)
    round_ = next(r for r in range(9) if job.cohort(r) != ("a", "b", "c"))
    first, second, third = (job.silos.index(silo) for silo in job.cohort(round_))
    s = cosines(5, {(0, 2): 0.1, (1, 2): 0.5, (first, third): 0.9, (second, third): 0.1})
    assert supervision_sampling(s[:3, :3], 2) == [2, 1, 2]
    sent = [job.method().deliveries({"similarity": s}, round_, silo) for silo in job.silos]
    blocks = {
        silo: int(d[2].tensors["block"])
        for silo, d in zip(job.silos, sent, strict=True)
        if len(d) > 2
    }
    assert blocks == dict(zip(job.cohort(round_), [1, 2, 2], strict=True))


@pytest.mark.parametrize(
    ("options", "known", "trained"),
    [
        ({"mu": 0, "aux_ce": "prototype"}, True, True),  # the logits need it
        ({"mu": 0}, True, False),
        ({"mu": 0, "aux_ce": "head"}, True, False),  # weight decay would move it
        ({"mu": 0.1, "aux_ce": "none"}, True, True),
        ({"mu": 0.1, "aux_ce": "none"}, False, False),
    ],
)
def test_the_adapter_trains_where_the_loss_has_it(make, options, known, trained):
    method = make(options).method()
    state = initial_state(method, "a")
    if known:
        state = with_prototypes(state, torch.eye(3, 32))
    (stage,) = method.stages(state, FACTS)
    (j,) = method.supervised(state, FACTS)
    assert {part for part in stage.trains if "adapter" in part} == (
        {f"adapter{j}"} if trained else set()
    )


@pytest.mark.parametrize("block", [None, 0, 3, -1])
def test_a_block_that_the_model_lacks_is_refused(make, block):
    method = make({"sampling": "algorithm2"}).method()
    stale = SiloState(
        initial_state(method, "a").parts,
        {**initial_state(method, "a").extra, "block": torch.tensor(1)},
    )
    delivered = {} if block is None else {"block": {"block": torch.tensor(block)}}
    with pytest.raises(PeerError, match="the model has 1 to 2"):
        method.stages(method.deliver(stale, delivered, FACTS), FACTS)


def test_a_model_without_blocks_is_refused(make_job):
    with refused(r"choose model\.name = 'convnet-3x64'"):
        make_job("fedaims").document()
