"""A model's folder is made of what a silo has, whatever became of its records."""

from dataclasses import replace

import numpy as np
from PIL import Image
from support.jobs import make_data, make_job
from support.trained_models import made

from staddle.algorithms.data.dataset import split
from staddle.algorithms.data.sources.formats.images import Images
from staddle.algorithms.method import initial_state
from staddle.bundle import folder
from staddle.bundle.description import Origin
from staddle.bundle.making import ModelMaker, output_names


def test_thresholds_halve_test_records_by_another_secret_than_the_split(tmp_path):
    """By the same, all test records would lie in one half."""
    job, key = make_job(model={"classes": 2}), b"secret"
    # By their ids: a side's records without any are counted anew.
    data = replace(make_data(200, classes=2), ids=tuple(map(str, range(200))))
    train, test = split(data, key, 0.25)
    maker = ModelMaker(job, Origin(kind="simulation", name="a"), {"kind": "npz"}, key)
    maker.write(tmp_path / "model", initial_state(job.method(), "a"), train, test)
    (own,) = folder.read(tmp_path / "model").description.thresholds
    assert own.chosen_on + own.measured_on == len(test)
    assert min(own.chosen_on, own.measured_on) > len(test) // 4


def test_a_record_that_is_gone_costs_no_description(tmp_path):
    """Records may be read when they are used, which is long after the job began."""
    pixels = np.random.default_rng(0).integers(0, 256, (12, 8, 8), dtype=np.uint8)
    for place, own in enumerate(pixels):
        path = tmp_path / "images" / "ab"[place % 2] / f"{place}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(own).save(path)
    job = make_job(model={"classes": 2})
    source = Images(kind="images", folder=tmp_path / "images", lazy=True)
    data = source.load(job.model)
    (tmp_path / "images" / "a" / "0.png").unlink()
    assert source.contract() == {"kind": "images"}  # and no path
    path = made(tmp_path / "model", job, data, source.contract())
    assert folder.read(path).description.measured.records == 12


def test_classes_have_the_jobs_names_or_else_those_of_the_records():
    named = make_job(model={"classes": 2, "class_names": ["no", "yes"]})
    assert output_names(named, ("a", "b")) == ("no", "yes")
    assert output_names(make_job(model={"classes": 2}), ("a", "b")) == ("a", "b")
    assert output_names(make_job(model={"classes": 2})) == ("0", "1")
