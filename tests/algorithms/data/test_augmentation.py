"""Random changes of records: torchvision's, one record after another, masks with images."""

import warnings

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from support.engines import check_engines_agree
from support.other_tasks import SIDES
from support.other_tasks import shards as other_shards
from support.refusals import refused

from staddle.algorithms.data.augmentation import KINDS, Augmenter
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.job.job import Job
from staddle.algorithms.method import initial_state
from staddle.algorithms.models.torchvision_import import torchvision
from staddle.algorithms.training.silo_round import local_round
from staddle.files.documents import canonical_json, parse_json

SHAPE = (3, 8, 10)
FLIP = {"kind": "RandomHorizontalFlip"}
ARGUMENTS = {
    "RandomCrop": ({"padding": 2}, lambda v2: v2.RandomCrop((8, 10), padding=2)),
    "RandomResizedCrop": (
        {"scale": [0.3, 0.6], "ratio": [0.5, 2]},
        lambda v2: v2.RandomResizedCrop((8, 10), scale=(0.3, 0.6), ratio=(0.5, 2)),
    ),
    "RandomHorizontalFlip": ({"p": 0.4}, lambda v2: v2.RandomHorizontalFlip(0.4)),
    "RandomVerticalFlip": ({}, lambda v2: v2.RandomVerticalFlip()),
    "RandomAffine": (
        {"degrees": 20, "translate": [0.2, 0.1], "scale": [0.8, 1.1], "shear": 5},
        lambda v2: v2.RandomAffine(
            20, (0.2, 0.1), (0.8, 1.1), 5, interpolation=v2.InterpolationMode.BILINEAR
        ),
    ),
    "RandomErasing": ({"p": 0.7}, lambda v2: v2.RandomErasing(0.7)),
    "GaussianNoise": ({"sigma": 0.3}, lambda v2: v2.GaussianNoise(sigma=0.3, clip=False)),
    "ColorJitter": (
        {"brightness": 0.2, "contrast": 0.3, "saturation": 0.4, "hue": 0.1},
        lambda v2: v2.ColorJitter(0.2, 0.3, 0.4, 0.1),
    ),
}


def kind(name, **arguments):
    return KINDS[name].model_validate({"kind": name, **arguments})


def augmenter(*kinds, shape=SHAPE, dense=False, forgiving=False):
    return Augmenter(kinds, shape, dense, forgiving)


def records(n=64, shape=SHAPE):
    return torch.rand((n, *shape), generator=torch.Generator().manual_seed(1))


def test_every_kind_is_tried():
    assert {*ARGUMENTS, "MixUp"} == KINDS.keys()


@pytest.mark.parametrize("name", ARGUMENTS)
def test_each_record_is_changed_by_torchvision_on_its_own(name):
    arguments, of_theirs = ARGUMENTS[name]
    x, y = records(), torch.arange(64)
    before = x.clone()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        found, truth = augmenter(kind(name, **arguments))(x, y)
        torch.manual_seed(3)
        theirs = of_theirs(torchvision("transforms.v2", "a test"))
        wanted = torch.stack([theirs(record) for record in x])
    assert torch.equal(found, wanted)
    assert type(found) is torch.Tensor
    assert truth is y
    assert torch.equal(x, before)  # what was given stays
    assert not torch.equal(found, x)


def test_kinds_follow_one_another_record_by_record():
    x, kinds = records(), [kind("RandomCrop", padding=3), kind("RandomVerticalFlip")]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        found, _ = augmenter(*kinds)(x, x)
        torch.manual_seed(5)
        single = [augmenter(*kinds)(record[None], x)[0] for record in x]
    assert torch.equal(found, torch.cat(single))


@pytest.mark.parametrize("shape", [(1, 8, 10), (1, 4, 8, 10)])
@pytest.mark.parametrize("name", sorted(set(ARGUMENTS) - {"ColorJitter"}))
def test_masks_move_with_their_images_and_change_no_value(name, shape):
    masks = torch.randint(
        0, 3, (64, *shape[1:]), dtype=torch.uint8, generator=torch.Generator().manual_seed(2)
    )
    arguments = {**ARGUMENTS[name][0]} if name != "RandomAffine" else {"translate": [0.3, 0.3]}
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.manual_seed(7)
        x, y = augmenter(kind(name, **arguments), shape=shape, dense=True)(
            masks[:, None] / 1, masks
        )
    assert (x.shape, y.shape, y.dtype) == ((64, *shape), masks.shape, torch.uint8)
    if name in {"RandomErasing", "GaussianNoise"}:
        assert torch.equal(y, masks)
    # Where nothing is between two values, an image of the classes is their mask.
    elif name != "RandomResizedCrop":
        assert torch.equal(x[:, 0].round(), y.float())
        assert not torch.equal(y, masks)
    assert set(y.unique().tolist()) <= {0, 1, 2}


def test_volumes_are_changed_alike_in_all_slices():
    x = torch.arange(10.0).expand(64, 1, 3, 8, 10)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        found, _ = augmenter(kind("RandomHorizontalFlip"), shape=(1, 3, 8, 10))(x, x)
    turned = found[:, 0, 0, 0, 0] == 9
    assert 0 < turned.sum() < 64
    assert torch.equal(found, torch.where(turned[:, None, None, None, None], x.flip(-1), x))


@pytest.mark.parametrize("alpha", [0.2, 1.0, 8.0])
def test_mixup_is_a_mean_of_two_records_weighted_as_published(alpha):
    """By its own formula, the loss of both truths: the same mean of any function of a mix."""
    n = 40_000
    x = torch.stack([torch.arange(n, dtype=torch.float64), torch.ones(n, dtype=torch.float64)], 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        found, truth = augmenter(kind("MixUp", alpha=alpha), shape=(1, 1, 2))(x, x[:, 0])
    assert truth is not found
    assert torch.equal(truth, x[:, 0])
    assert torch.allclose(found[:, 1], x[:, 1])
    # Each place of a permutation gives another record but by chance.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        shares = torch.distributions.Beta(alpha + 1, alpha).sample((n,)).double()
        other = x[torch.randperm(n), 0]
    assert torch.allclose(found[:, 0], shares * x[:, 0] + (1 - shares) * other)
    # Published: λ ~ Beta(α, α), a record's own share of the loss at λ and its partner's at 1 - λ.
    published = np.random.default_rng(3).beta(alpha, alpha, n)
    for function in (lambda mix: mix**2, lambda mix: np.exp(-3 * mix)):
        own = published * function(published) + (1 - published) * function(1 - published)
        ours = function(shares.numpy())
        error = (own.var() / n + ours.var() / n) ** 0.5
        assert abs(own.mean() - ours.mean()) < 7.5 * error  # chance below 1e-13


def test_mixup_comes_last_and_is_for_no_private_job(make_job):
    last = [FLIP, {"kind": "MixUp", "alpha": 0.4}]
    job = make_job(training={"augment": last})
    assert job.document()["training"]["augment"][1] == {"kind": "MixUp", "alpha": "0.4"}
    with pytest.raises(ValidationError, match="MixUp mixes records as they are trained on; put it"):
        make_job(training={"augment": [*reversed(last)]})
    with pytest.raises(ValidationError, match=r"\[privacy\] with training.augment MixUp, by which"):
        make_job(
            training={"augment": last},
            privacy={"epsilon": 8.0, "delta": 1e-5, "sample_rate": 0.1},
        )


def test_mixup_follows_the_changes_of_each_record():
    x, kinds = records(), [kind("RandomVerticalFlip"), kind("MixUp")]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        found, _ = augmenter(*kinds)(x, x)
        torch.manual_seed(5)
        flipped, _ = augmenter(kinds[0])(x, x)
        mixed, _ = augmenter(kinds[1])(flipped, x)
    assert not torch.equal(found, flipped)
    assert torch.equal(found, mixed)


def test_a_batch_of_nobody_stays_one():
    """As a private step may draw it."""
    x, y = torch.zeros(0, *SHAPE), torch.zeros(0)
    found = augmenter(kind("ColorJitter", hue=0.1), kind("RandomVerticalFlip"))(x, y)
    assert (found[0] is x, found[1] is y) == (True, True)


def test_colours_are_of_pixels():
    jitter, bright = kind("ColorJitter", brightness=0.5), 2 * records()
    with refused("training.augment has ColorJitter, which takes values of 0 to 1"):
        augmenter(jitter)(bright, bright)
    # In private training no record ends the work.
    assert augmenter(jitter, forgiving=True)(bright, bright)[0].max() <= 1


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ({"kind": "RandomCorp", "padding": 2}, "did you mean 'RandomCrop'"),
        ({"kind": "RandomCrop"}, "padding"),
        ({"kind": "RandomCrop", "padding": 2, "p": 0.5}, "'p' is a key of kind RandomHorizontalFl"),
        ({"kind": "RandomErasing", "scale": [0.5, 0.1]}, "give the smaller number first"),
        ({"kind": "RandomErasing", "p": 1.5}, "p"),
        ({"kind": "ColorJitter", "hue": 0.6}, "hue"),
        ({"kind": "ColorJitter"}, "ColorJitter changes nothing; give one of brightness, contrast"),
        ({"kind": "RandomAffine"}, "RandomAffine changes nothing; give one of degrees, translate"),
        ({"kind": "RandomAffine", "scale": [1e-9, 1]}, "scale"),
        ({"kind": "RandomResizedCrop", "scale": [0, 0]}, "scale"),
        ({"kind": "RandomResizedCrop", "ratio": [100, 100]}, "ratio = .*; bring it near 1"),
        ({"kind": "RandomResizedCrop", "ratio": [0.01, 0.01]}, "ratio = .*; bring it near 1"),
        ({"kind": "ColorJitter", "hue": 0.1}, "saturation or hue, and records have one channel"),
        ({"kind": "RandomCrop", "padding": 8}, "padding = 8, and records are .*; lower it"),
    ],
)
def test_tables_that_say_nothing_are_refused(make_job, table, why):
    with pytest.raises(ValidationError, match=why):
        make_job(training={"augment": [table]})


def test_what_no_record_of_the_model_can_be(make_job):
    with pytest.raises(ValidationError, match=r"training.augment.0: RandomHorizontalFlip cannot"):
        make_job(model={"name": "mlp", "input": [1, 1, 30]}, training={"augment": [FLIP]})
    noise = {"kind": "GaussianNoise"}
    assert make_job(model={"name": "mlp", "input": [1, 1, 30]}, training={"augment": [noise]}).draws
    with pytest.raises(ValidationError, match=r"training.augment.0: GaussianNoise cannot change"):
        make_job(
            model={"name": "text-transformer", "input": [30], "norm": "group"},
            training={"augment": [noise]},
        )
    deep = {"name": "volume-resnet", "input": [1, 16, 16, 16]}
    with pytest.raises(ValidationError, match=r"training.augment.1: ColorJitter takes images of"):
        make_job(model=deep, training={"augment": [FLIP, {"kind": "ColorJitter", "contrast": 0.1}]})


def test_a_job_says_it_and_is_read_back(make_job):
    plain, job = make_job(), make_job(training={"augment": [FLIP, {"kind": "RandomErasing"}]})
    document = job.document()
    assert document["training"]["augment"][0] == {"kind": "RandomHorizontalFlip", "p": "0.5"}
    assert "augment" not in plain.document()["training"]
    back = Job.from_document(parse_json(canonical_json(document), "wire"), "wire", None)
    assert (back, back.digest) == (job, job.digest)
    assert (plain.draws, job.draws) == (False, True)
    assert plain.digest != job.digest


def test_a_round_trains_on_changed_records_and_is_the_same_again(make_job, make_shards):
    ends = []
    for augment in ([], [FLIP], [FLIP]):
        job = make_job("fedavg", training={"augment": augment})
        train, test = make_shards(job)["a"]
        state = initial_state(job.method(), "a")
        outcome = local_round(job.method(), job, state, 0, {}, train, test, "a")
        ends.append(outcome.state.parts["classifier"]["weight"])
    assert torch.equal(ends[1], ends[2])
    assert not torch.allclose(ends[0], ends[1])


@pytest.mark.parametrize("method", ["fedavg", "fedper", "moon", "ppfl"])
def test_silos_that_train_at_once_draw_what_each_draws_alone(make_job, make_shards, method):
    """Uneven silos, whose last batches are filled up; each draws by its own stream."""
    augment = [{"kind": "RandomCrop", "padding": 1}, {"kind": "MixUp"}]
    job = make_job(method, training={"augment": augment, "epochs": 2}, rounds=2)
    alone = check_engines_agree(job, make_shards(job))
    plain = simulate(make_job(method, training={"epochs": 2}, rounds=2), make_shards(job))
    one, other = (end.states["a"].flat for end in (alone, plain))
    assert any(not torch.allclose(one[name], value) for name, value in other.items())


def test_batch_norm_and_masks_at_once_as_alone(make_job):
    unet = {"name": "unet", "norm": "batch", "input": [1, *SIDES], "options": {"widths": [8]}}
    augment = [FLIP, {"kind": "GaussianNoise"}]
    job = make_job(
        "fedavg",
        model={**unet, "classes": 3},
        training={"augment": augment},
        task={"kind": "segmentation"},
        rounds=2,
        silos=["a", "b", "c", "d"],
    )
    check_engines_agree(job, other_shards("segmentation"))


def test_a_job_moves_the_masks_of_a_segmentation_and_forgives_where_it_is_private(make_job):
    flips = {"augment": [{"kind": "RandomHorizontalFlip", "p": 1.0}]}
    unet = {"name": "unet", "norm": "group", "input": [1, 8, 8], "options": {"widths": [8]}}
    dense = make_job("local", model=unet, training=flips, task={"kind": "segmentation"})
    y = torch.arange(8, dtype=torch.uint8).expand(2, 8, 8)
    for job, turned in ((dense, y.flip(-1)), (make_job("local", training=flips), y)):
        (stage,) = job.paced(job.method().stages(initial_state(job.method(), "a"), None), 0)
        x, truth = stage.augment(y[:, None].float(), y)
        assert torch.equal(x[:, 0], y.float().flip(-1))
        assert torch.equal(truth, turned)
    jitter = {"augment": [{"kind": "ColorJitter", "brightness": 0.5}]}
    budget = {"epsilon": 8.0, "delta": 1e-5, "sample_rate": 0.5}
    bright = 2 * torch.ones(2, 1, 8, 8)
    for privacy in (None, budget):
        job = make_job("local", training=jitter, privacy=privacy)
        augment = job._augmenter
        if privacy is None:
            with refused("takes values of 0 to 1"):
                augment(bright, y)
        else:
            assert augment(bright, y)[0].max() <= 1


EXTREMES = [
    *({"kind": "RandomResizedCrop", "scale": [0.001, 0.001], "ratio": [r, r]} for r in (0.3, 1, 3)),
    *(
        {"kind": "RandomAffine", "scale": [s, s], "shear": 89.9, "degrees": 180}
        for s in (0.01, 100)
    ),
    {"kind": "RandomAffine", "translate": [1, 1]},
    {"kind": "RandomErasing", "p": 1, "scale": [0.001, 1], "ratio": [0.01, 100]},
    {"kind": "GaussianNoise", "sigma": 100},
    {"kind": "ColorJitter", "brightness": 1, "contrast": 1, "saturation": 1, "hue": 0.5},
    {"kind": "RandomCrop", "padding": 1},
]


@pytest.mark.parametrize("table", EXTREMES)
@pytest.mark.parametrize("shape", [(3, 2, 2), (3, 2, 3), (3, 5, 2)])
def test_what_a_job_may_ask_never_fails_at_a_record(table, shape):
    """In a private job a step would end if it drew a record, and not otherwise."""
    asked = KINDS[table["kind"]].model_validate(table)
    assert asked.fault(shape) == ""
    x = torch.stack([*records(20, shape), torch.full(shape, torch.nan), torch.full(shape, 1e38)])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        found, _ = augmenter(asked, shape=shape, forgiving=True)(x, x)
    assert found.shape == x.shape
