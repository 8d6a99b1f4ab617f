import numpy as np
import pytest
import torch
from PIL import Image
from support.refusals import refused

from staddle.algorithms.data.sources.public.tiny_imagenet import TinyImageNet

SHAPE = (3, 64, 64)


def image(path, grey):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((64, 64, 3), grey, np.uint8)).save(path, "JPEG")


@pytest.fixture
def read(tmp_path):
    """Two classes, not in their names' order, of two images to train on and one to validate."""
    (tmp_path / "wnids.txt").write_text("n02\nn01\n")
    for name, grey in (("n01", 10), ("n02", 20)):
        for n in range(2):
            image(tmp_path / "train" / name / "images" / f"{name}_{n}.JPEG", grey + n)
        (tmp_path / "train" / name / f"{name}_boxes.txt").write_text(f"{name}_0.JPEG\t0\t0\t9\t9\n")
        image(tmp_path / "val" / "images" / f"val_{name}.JPEG", grey + 5)
    (tmp_path / "val" / "val_annotations.txt").write_text(
        "val_n01.JPEG\tn01\t0\t0\t9\t9\nval_n02.JPEG\tn02\t0\t0\t9\t9\n"
    )

    def call(**fields):
        return TinyImageNet(kind="tiny-imagenet", folder=tmp_path, **fields).read_at(SHAPE)

    return call


def test_both_parts_with_labels_in_the_official_order(read):
    data = read()
    assert data.class_names == ("n02", "n01")
    assert data.y.tolist() == [0, 0, 1, 1, 1, 0]
    assert torch.round(data.x[:, 0, 0, 0] * 255).tolist() == [20, 21, 10, 11, 15, 25]
    assert data.x.shape == (6, *SHAPE)
    assert data.ids[2] == "train/n01/images/n01_0.JPEG"
    assert data.ids[4:] == ("val/images/val_n01.JPEG", "val/images/val_n02.JPEG")
    assert (read(part="train").ids, read(part="val").ids) == (data.ids[:4], data.ids[4:])


def test_shares_are_pieces_and_only_they_are_decoded(read, tmp_path):
    shares = [read(share=(k, 2), seed=1) for k in (1, 2)]
    assert sorted(shares[0].ids + shares[1].ids) == sorted(read().ids)
    (tmp_path / shares[1].ids[0]).write_text("no image")
    assert torch.equal(read(share=(1, 2), seed=1).x, shares[0].x)
    with refused("cannot read it as PNG or JPEG"):
        read(share=(2, 2), seed=1)


def test_what_is_absent_or_wrong_is_named(read, tmp_path):
    notes = tmp_path / "val" / "val_annotations.txt"
    for text, said in (
        ("val_n01.JPEG\n", "a line has no class"),
        ("val_n01.JPEG\tn03\n", "'n03' is not in wnids.txt"),
    ):
        notes.write_text(text)
        with refused(said):
            read()
    notes.unlink()
    with refused(r"val_annotations\.txt: cannot read it: .*tiny-imagenet-200\.zip"):
        read()
    (tmp_path / "train").rename(tmp_path / "trained")
    with refused(r"no train/CLASS/images/\*\.JPEG; unpack"):
        read(part="train")
