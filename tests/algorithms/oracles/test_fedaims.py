"""FedAIMS, rounds of the whole method: Algorithms 1 and 2 of its paper in float64."""

import pytest
import torch
from support import whole_methods as whole
from torch.nn.functional import conv2d, max_pool2d

from staddle.algorithms.methods.fedaims.method import balanced

BLOCKS = 3  # m
MODEL = {"name": "convnet-digits", "norm": "group", "classes": whole.CLASSES}
TRAINING = {"momentum": 0.9, "weight_decay": 1e-4}
MU = 0.7
PAPER = {
    "sampling": "algorithm2", "similarity": "raw", "sketch": 0, "reduction": "sum",
    "prototype_weights": "paper_p",
}  # fmt: skip
DEFAULT = {
    "sampling": "balanced", "similarity": "update", "reduction": "mean",
    "prototype_weights": "class_count", "update_gap": 1,
}  # fmt: skip


def channel_means(values, x):
    """φ^1(x) … φ^m(x): each block's feature [B, d_j]."""
    found = []
    for j in range(BLOCKS):
        own = lambda name, j=j: values[f"extractor.blocks.{j}.{name}"]
        x = conv2d(x, own("conv.weight"), own("conv.bias"), padding=1)
        grouped = x.reshape(len(x), x.shape[1] // 4, -1)  # four channels a group
        centred = grouped - grouped.mean(2, keepdim=True)
        x = (centred / ((centred**2).mean(2, keepdim=True) + 1e-5) ** 0.5).reshape(x.shape)
        x = x * own("norm.weight")[:, None, None] + own("norm.bias")[:, None, None]
        x = max_pool2d(x.clamp(min=0), 2)
        found.append(x.mean((2, 3)))
    return found


def adapted(values, j, prototypes):
    """σ^j of prototypes: two layers with a ReLU."""
    own = lambda name: values[f"adapter{j}.{name}"]
    inner = (prototypes @ own("inner.weight").T + own("inner.bias")).clamp(min=0)
    return inner @ own("outer.weight").T + own("outer.bias")


def objective_of(blocks, prototypes, reduction):
    """Φ_i of Eq. 12, or of Eq. 2 for all middle blocks, on one batch.

    ``prototypes`` has those of the classes that are known.
    """
    weight = 1 - 1 / BLOCKS if len(blocks) == 1 else 1 / BLOCKS  # 1 - λ with λ = 1/m, or α_j

    def squared(target, feature, has):
        rows = ((target - feature) ** 2)[has]
        return rows.sum() if reduction == "sum" else rows.sum() / feature.numel()

    def loss(values, x, y):
        found = channel_means(values, x)
        logits = found[-1] @ values["classifier.weight"].T + values["classifier.bias"]
        own = whole.cross_entropies(logits, y).mean()  # L_CE^m, and by a reading L_CE^j
        has = torch.tensor([int(k) in prototypes for k in y])
        main, auxiliary = own, len(blocks) * own
        if has.any():
            unknown = torch.zeros(found[-1].shape[1])
            target = torch.stack([prototypes.get(int(k), unknown) for k in y])
            main = own + MU * squared(target, found[-1], has)  # Eq. 5, 6
            for j in blocks:
                middle = squared(adapted(values, j, target), found[j - 1], has)  # Eq. 8
                auxiliary = auxiliary + MU * middle  # Eq. 7
        return main / BLOCKS + weight * auxiliary  # Eq. 12, 2

    return loss


def class_means(values, data):
    """C_{i,k} of the classes that a silo has (Eq. 3)."""
    last = channel_means(values, data.x)[-1]
    return {int(k): last[data.y == k].mean(0) for k in data.y.unique()}


def cosine(one, other):
    """Of two backbones."""
    return float(one @ other / (one.norm() * other.norm()))


def sampled(drawn, alike):
    """Algorithm 2: the block of each drawn silo."""
    groups = [[] for _ in range(BLOCKS - 1)]
    for i in drawn:
        fewest = min(len(group) for group in groups)  # the constraint of Eq. 10
        added = [
            (sum(alike.get((i, j), 0.0) for j in group) / len(group) if group else 0.0, k)  # Eq. 11
            for k, group in enumerate(groups)
            if len(group) == fewest
        ]
        groups[min(added)[1]].append(i)
    groups.sort(key=len)
    return {i: k for k, group in enumerate(groups, 1) for i in group}


def flat(values):
    return torch.cat([value.flatten() for value in whole.of_parts(values, "extractor").values()])


def blocks_of(form, drawn, alike, t):
    """The middle blocks that each drawn silo supervises."""
    if form["sampling"] == "full":
        return {i: list(range(1, BLOCKS)) for i in drawn}
    # the balanced deal is drawn from a stream: an input
    paper = form["sampling"] == "algorithm2"
    dealt = sampled(drawn, alike) if paper else balanced(drawn, BLOCKS - 1, 7, t)
    return {i: [block] for i, block in dealt.items()}


def rounds_by_hand(job, shards, form):
    """All silos' last trained models with the backbone and prototypes, after each round."""
    values, lr = whole.begun(job), job.training.lr
    backbone, prototypes, alike = whole.of_parts(values["a"], "extractor"), {}, {}
    for t in range(job.rounds):
        drawn = job.cohort(t)
        blocks = blocks_of(form, drawn, alike, t)
        records, own, received = {i: len(shards[i][0]) for i in drawn}, {}, flat(backbone)
        for i in drawn:
            values[i] = {**values[i], **backbone}  # lines 7, 8
            own[i] = class_means(values[i], shards[i][0])  # line 9
            parts = ["extractor", "classifier"]
            # a reading: without a prototype an adapter stays as it is
            parts += [f"adapter{j}" for j in blocks[i]] if prototypes else []
            loss = objective_of(blocks[i], prototypes, form["reduction"])
            batches = whole.steps(job, shards, i, t)
            values[i] = whole.descended(values[i], loss, batches, parts, lr, 0.9, 1e-4)  # 11, 12
        total = sum(records.values())
        for name in backbone:  # line 15
            mean = sum(records[i] * values[i][name] for i in drawn) / total
            backbone = {**backbone, name: mean}
        prototypes = {}
        for k in range(whole.CLASSES):
            # Eq. 4, by a reading over the silos of the round that have the class
            holders = {i: own[i][k] for i in drawn if k in own[i]}
            by_class = {i: int((shards[i][0].y == k).sum()) for i in holders}
            weights = records if form["prototype_weights"] == "paper_p" else by_class
            if holders:
                total = sum(weights[i] * mean for i, mean in holders.items())
                prototypes[k] = total / sum(weights[i] for i in holders)
        begin = received if form["similarity"] == "update" else 0
        for i in drawn if t % form["update_gap"] == 0 else ():  # line 17
            for j in set(drawn) - {i}:
                alike[i, j] = cosine(flat(values[i]) - begin, flat(values[j]) - begin)
        yield values, backbone, prototypes, alike


def check(population, options, lr, rounds):
    """Each round draws four of the six silos."""
    training = {**TRAINING, "lr": lr, "epochs": 1, "fields": {"participation": 4 / 6}}
    job = whole.job_of("fedaims", {"mu": MU, **options}, MODEL, rounds, **training)
    shards = whole.shards_of(population)
    form = {**DEFAULT, **options}
    by_hand = rounds_by_hand(job, shards, form)
    for simulation, after in zip(whole.simulated(job, shards), by_hand, strict=True):
        values, backbone, prototypes, alike = after
        for silo, state in simulation.states.items():
            whole.check_same(state, values[silo])
        # what the next round would begin with
        for silo, seen in simulation.look().items():
            whole.check_same(seen.delivered, {**values[silo], **backbone})
            rows = seen.delivered.extra["prototypes"]
            for k in range(whole.CLASSES):
                expected = prototypes.get(k, torch.zeros(rows.shape[1]))
                assert torch.allclose(rows[k], expected, atol=1e-8, rtol=0)
        for (i, j), near in alike.items() if form["sampling"] == "algorithm2" else ():
            found = simulation.coordinator["similarity"][job.silos.index(i), job.silos.index(j)]
            assert float(found) == pytest.approx(near, abs=1e-6)  # directions are in float32


@pytest.mark.parametrize("population", whole.POPULATIONS.values(), ids=whole.POPULATIONS)
@pytest.mark.parametrize(
    ("options", "lr"), [(PAPER, 0.002), ({}, 0.05)], ids=["as in the paper", "by default"]
)
def test_six_silos_are_algorithms_1_and_2(population, options, lr):
    check(population, options, lr, 5)


@pytest.mark.parametrize(
    ("options", "lr"),
    [
        ({**PAPER, "reduction": "mean", "update_gap": 2}, 0.05),
        ({"sampling": "full", "prototype_weights": "paper_p"}, 0.05),
        ({"sampling": "algorithm2", "sketch": 0, "reduction": "sum"}, 0.002),
    ],
    ids=["every second round compares", "full supervision", "updates under sums"],
)
def test_other_forms_are_the_paper_too(options, lr):
    check(whole.UNEVEN, options, lr, 4)
