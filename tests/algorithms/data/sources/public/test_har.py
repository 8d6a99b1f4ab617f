import numpy as np
import pytest
import torch
from support.refusals import refused

from staddle.algorithms.data.sources.public.har import SIGNALS, read_har

rng = np.random.default_rng(0)


def recording(windows):
    """Windows [n, 9, 128] of one unbroken recording, each the last half of the one before and a new
    half.
    """
    signal = rng.normal(size=(9, 64 * (windows + 1))).astype(np.float32)
    return np.stack([signal[:, 64 * n : 64 * n + 128] for n in range(windows)])


X = np.concatenate([recording(n) for n in (3, 2, 1, 2)])
Y = np.array([0, 0, 0, 0, 0, 5, 5, 5])
SUBJECT = np.array([2, 2, 2, 2, 2, 2, 30, 30])
GROUPS = ("2/0", "2/0", "2/0", "2/1", "2/1", "2/2", "30/0", "30/0")


def test_windows_of_one_recording_are_one_group(tmp_path):
    np.savez(tmp_path / "har.npz", x=X, y=Y, subject=SUBJECT)
    data = read_har(tmp_path)
    assert torch.equal(data.x, torch.from_numpy(X)[:, :, None])
    assert data.y.tolist() == Y.tolist()
    assert data.groups == GROUPS
    assert data.ids == ("2/0", "2/1", "2/2", "2/3", "2/4", "2/5", "30/0", "30/1")
    assert data.sources == tuple(map(str, SUBJECT))


def test_a_subjects_groups_do_not_hang_on_where_the_others_stand(tmp_path):
    order = np.array([6, 0, 1, 7, 2, 3, 4, 5])
    np.savez(tmp_path / "har.npz", x=X[order], y=Y[order], subject=SUBJECT[order])
    assert read_har(tmp_path).groups == tuple(GROUPS[n] for n in order)


def official(folder):
    for part, own in (("train", slice(0, 6)), ("test", slice(6, 8))):
        signals = folder / "UCI HAR Dataset" / part / "Inertial Signals"
        signals.mkdir(parents=True)
        for channel, name in enumerate(SIGNALS):
            np.savetxt(signals / f"{name}_{part}.txt", X[own, channel], "%.9g")
        np.savetxt(signals.parent / f"y_{part}.txt", Y[own] + 1, "%d")
        np.savetxt(signals.parent / f"subject_{part}.txt", SUBJECT[own], "%d")


def test_the_official_text_files_are_the_same_records(tmp_path):
    official(tmp_path)
    data = read_har(tmp_path)
    assert torch.equal(data.x, torch.from_numpy(X)[:, :, None])
    assert data.y.tolist() == Y.tolist()
    assert data.groups == GROUPS
    assert data.sources == tuple(map(str, SUBJECT))


def test_files_that_are_absent_torn_or_no_numbers_are_named(tmp_path):
    with refused(r"has neither har\.npz nor 'UCI HAR Dataset'; unpack"):
        read_har(tmp_path)
    official(tmp_path)
    labels = tmp_path / "UCI HAR Dataset" / "test" / "y_test.txt"
    for text, said in (
        ("2\n", "differ in their numbers of lines"),
        ("walking\n", r"y_test\.txt: is not a table of numbers"),
    ):
        labels.write_text(text)
        with refused(said):
            read_har(tmp_path)
    labels.unlink()
    with refused(r"y_test\.txt: cannot read it"):
        read_har(tmp_path)


@pytest.mark.parametrize(
    "changed",
    [
        {"x": X[:, :, :64]},
        {"x": X.astype(int)},
        {"y": Y[:4]},
        {"subject": SUBJECT[:4]},
        {"x": X[:, :6]},
    ],
)
def test_arrays_of_another_shape_are_refused(tmp_path, changed):
    np.savez(tmp_path / "har.npz", **{"x": X, "y": Y, "subject": SUBJECT, **changed})
    with refused(r"HAR: x is .*; give x \[N, 9, 128\]"):
        read_har(tmp_path)


@pytest.mark.parametrize("changed", [{"y": Y.astype(float)}, {"subject": SUBJECT.astype(float)}])
def test_labels_and_subjects_are_whole_numbers(tmp_path, changed):
    np.savez(tmp_path / "har.npz", **{"x": X, "y": Y, "subject": SUBJECT, **changed})
    with refused("give whole numbers"):
        read_har(tmp_path)
