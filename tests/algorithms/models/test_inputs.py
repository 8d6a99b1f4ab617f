"""Models and records of several inputs: packed into one row, and taken apart before the model."""

import pytest
import torch
from other_tasks import Wards, mistaken
from support.engines import check_engines_agree
from support.jobs import make_job
from support.refusals import refused
from support.wards import INPUTS, WARD, shards, wards

from staddle.algorithms.data.sources.formats.images import Images
from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.models import foreign
from staddle.algorithms.models.build import (
    ModelOptions,
    build,
    image_shape,
    input_shape,
    vocabularies,
)
from staddle.algorithms.models.inputs import (
    Input,
    image_of,
    inputs_differ,
    ordered,
    pack,
    pieces,
    shown,
    unpacked,
)
from staddle.algorithms.training.record_checks import check_records
from staddle.files.documents import validate

METHODS = {
    "fedper": {},
    "fedsimsup": {"supervisor": "mlp"},
    "fedssa": {},
    "pfedsim": {"rho": 0.5},
    "fedavg": {},
}
BOXES = {
    "zoom": Input(shape=(2,), tokens=5),
    "age": Input(shape=()),
    "scan": Input(shape=(1, 2, 2)),
}


def options(**changes):
    return validate({**WARD, **changes}, ModelOptions, "job.toml")


def test_a_packed_record_has_its_inputs_by_name():
    own = ordered(BOXES)
    assert [(piece.name, piece.place) for piece in pieces(own)] == [
        ("age", slice(0, 1)),
        ("scan", slice(1, 5)),
        ("zoom", slice(5, 7)),
    ]
    record = {
        "zoom": torch.tensor([4, 1]),
        "scan": torch.tensor([[[1.5, 2.0], [3.0, 4.0]]]),
        "age": torch.tensor(63.0),
    }
    row = pack(record)
    assert row.tolist() == [63.0, 1.5, 2.0, 3.0, 4.0, 4.0, 1.0]
    apart = unpacked(row[None], {name: tuple(x.shape) for name, x in record.items()})
    assert {name: x.tolist() for name, x in apart.items()} == {
        name: [x.tolist()] for name, x in record.items()
    }


def test_tokens_are_whole_numbers_of_the_vocabulary():
    (piece,) = pieces((("note", Input(shape=(5,), tokens=4)),))
    given = piece.given(torch.tensor([[1.0, -3.0, 99.0, 1.6, torch.nan]]))
    assert (given.dtype, given.tolist()) == (torch.int64, [[1, 0, 3, 2, 0]])


def test_the_image_is_the_only_input_that_is_one():
    assert image_of(ordered(BOXES)).name == "scan"
    assert image_of(ordered({**BOXES, "other": Input(shape=(1, 3, 3, 3))})) is None
    assert image_of(ordered({"age": Input(shape=())})) is None
    assert image_shape(options()) == (1, 8, 8)
    assert input_shape(options()) == (72,)
    assert vocabularies(options()) == ((slice(67, 72), 20),)


def test_the_module_takes_its_inputs_by_keyword():
    parts = build(options(), 3)
    whole = foreign.builder("ward")({name: tuple(own["shape"]) for name, own in INPUTS.items()}, 4)
    found = {
        f"fc.{name}" if part == "classifier" else name: tensor
        for part, module in parts.items()
        for name, tensor in module.state_dict().items()
    }
    whole.load_state_dict(found)  # under the module's own names
    patients = [Wards(mistaken({}), 6, 0)[n][0] for n in range(6)]
    batch = {name: torch.stack([each[name] for each in patients]) for name in INPUTS}
    packed = torch.stack([pack(each) for each in patients])
    assert torch.equal(parts["classifier"](parts["extractor"](packed)), whole(**batch))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"input": [1, 8, 8]}, "a record is one tensor, input, or several"),
        ({"name": "torchvision:resnet18"}, "networks of torchvision and MONAI take one tensor"),
        ({"name": "monai:DenseNet121"}, "networks of torchvision and MONAI take one tensor"),
        ({"name": "mlp", "head": None}, "model 'mlp' takes one tensor; leave inputs out"),
        ({"inputs": {"class": {"shape": [1]}}}, "'class' is a word of Python"),
        ({"inputs": {"a-b": {"shape": [1]}}}, r"inputs.a-b.\[key\] = 'a-b': give a text that"),
        (
            {"inputs": {"note": {"shape": [1], "tokens": -1}}},
            "inputs.note.tokens = -1: give 0 or more",
        ),
        ({"inputs": {**INPUTS, "age": {"shape": [1]}}}, "unexpected keyword argument 'age'"),
        (
            {"inputs": {**INPUTS, "labs": {"shape": [4096, 4096, 4096, 4096]}}},
            r"a record of image .*, labs \[4096, 4096, 4096, 4096\], note \[5\] has over",
        ),
        (
            {"inputs": {**INPUTS, "labs": {"shape": [3, 4096, 4096]}}},
            r"a record of image \[1, 8, 8\], labs \[3, 4096, 4096\], note \[5\] has over 16,777",
        ),
        (
            {"inputs": {name: INPUTS[name] for name in ("image", "note")}},
            r"'ward' with image \[1, 8, 8\], note \[5\], 4 outputs",
        ),
        (
            {"inputs": {**INPUTS, "note": {"shape": [5]}}},
            r"'ward' with image .*, note \[5\] does not take two records \[2, 72\]: .*tokens",
        ),
    ],
)
def test_what_does_not_go_together_is_told(changes, why):
    with refused(why):
        options(**changes)


def test_a_document_says_no_more_than_the_job_file():
    told = make_job(model=WARD).model.model_dump(mode="json")
    assert told["inputs"] == {name: {"tokens": 0, **own} for name, own in INPUTS.items()}
    assert "inputs" not in make_job().model.model_dump(mode="json")
    one, other = (
        make_job(model={**WARD, "inputs": {**INPUTS, "note": note}})
        for note in ({"shape": [5], "tokens": 20}, {"shape": [5], "tokens": 30})
    )
    assert one.document()["model_digest"] != other.document()["model_digest"]


@pytest.mark.parametrize("method", METHODS)
def test_silos_at_once_train_as_one_by_one(method):
    silos = ["a", "b", "c", "d"]
    job = make_job(method, METHODS[method], WARD, rounds=2, silos=silos, participation=0.75)
    check_engines_agree(job, shards(job))


def test_it_learns_of_all_inputs():
    training = {"epochs": 6, "lr": 0.3}
    job = make_job("fedavg", model=WARD, training=training, rounds=10)
    (metrics,) = simulate(job, shards(job, 120)).metrics[-1:]
    # One input decides a third of the classes alone, two of them two thirds at best.
    assert metrics["correct.trained"] / metrics["tested"] > 0.9


def test_lazy_records_give_the_same_models():
    job = make_job("fedper", model=WARD, rounds=2)
    held = shards(job)
    lazy = {
        silo: (wards(40 + 5 * i, i, lazy=True), wards(12, 100 + i, lazy=True))
        for i, silo in enumerate(job.silos)
    }
    one, other = (simulate(job, records) for records in (held, lazy))
    for silo in job.silos:
        flat = other.states[silo].flat
        assert all(torch.equal(flat[name], x) for name, x in one.states[silo].flat.items())


def test_augmentation_changes_the_image_alone():
    flips = {"augment": [{"kind": "RandomHorizontalFlip", "p": 1.0}]}
    job = make_job("fedavg", model=WARD, training=flips)
    data = wards(8)
    x, y = job._augmenter(data.x, data.y)
    assert torch.equal(y, data.y)
    before, after = (unpacked(each, data.inputs) for each in (data.x, x))
    assert torch.equal(after["image"], before["image"].flip(-1))
    for name in ("labs", "note"):
        assert torch.equal(after[name], before[name])


def test_a_segmentation_has_a_class_for_each_position_of_the_image():
    model = {**WARD, "options": {"dense": True}, "classes": 2}
    job = make_job("fedavg", model=model, task={"kind": "segmentation"}, rounds=2)
    masked = {}
    for silo, sides in shards(job).items():
        both = []
        for side in sides:
            image = unpacked(side.x, side.inputs)["image"]
            both.append(replaced(side, (image[:, 0] > 1).to(torch.uint8)))
        masked[silo] = tuple(both)
    check_records(job, masked["a"][0], "here")
    check_engines_agree(job, masked)
    narrow = replaced(masked["a"][0], masked["a"][0].y[:, :4])
    with refused(r"give a class for each position, \[N, 8, 8\]"):
        check_records(job, narrow, "here")


def replaced(data, y):
    return type(data)(data.x, y, inputs=data.inputs)


def test_a_silos_records_have_the_jobs_inputs():
    job = make_job(model=WARD)
    data = wards(20)
    check_records(job, data, "here")
    with refused("here: a record here has one tensor, and the job's model takes image"):
        check_records(job, type(data)(data.x, data.y), "here")
    other = {**data.inputs, "labs": (4,)}
    with refused(r"has image \[1, 8, 8\], labs \[4\], note \[5\], and the job's model takes image"):
        check_records(job, type(data)(data.x, data.y, inputs=other), "here")
    with refused("here: a record here has image .*, and the job's model takes one tensor; give"):
        check_records(make_job(model={"name": "mlp", "input": [72]}), data, "here")


def test_a_folder_of_images_has_no_other_inputs(tmp_path):
    job = make_job(model=WARD)
    with refused("a record here has one tensor, and the job's model takes image"):
        Images(kind="images", folder=tmp_path).load(job.model)


def test_numbers_that_are_no_tokens_are_told_where_they_are_tokens():
    job = make_job(model=WARD)
    data = wards(20)
    data.x[:3, :64] = 99.0  # of the image
    check_records(job, data, "here")
    data.x[:3, -1] = 20.0
    with refused("3 of 20 records have numbers that are no tokens from 0 to 19"):
        check_records(job, data, "here")


def test_inputs_are_compared_by_name_and_shape():
    one = {"a": (1,), "b": (2, 3)}
    assert inputs_differ(one, dict(reversed(one.items()))) == inputs_differ({}, {}) == ""
    assert shown({"b": (2, 3), "a": (1,)}) == "a [1], b [2, 3]"
    assert shown({"a": ()}) == "a []"
    assert "a record here has a [1], and" in inputs_differ(one, {"a": (1,)})
