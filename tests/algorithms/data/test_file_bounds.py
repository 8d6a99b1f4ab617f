"""What asks for too much is refused by name before it is read: FIFOs, sockets, devices, claims,
bombs.

A reader that opens a FIFO waits for a writer for ever, which the time limit of a test run ends.
"""

import bz2
import io
import os
import struct
import warnings
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from faults.memory import CSV, File, Y, archive, irregular, npy, refusal
from PIL import Image

from staddle.algorithms.data import survey as surveys
from staddle.algorithms.data.sources.formats import labelled, npz
from staddle.algorithms.data.sources.formats import table as tables
from staddle.algorithms.data.sources.public import torchvision_sets
from staddle.errors import LocalError
from staddle.files import file_bounds
from staddle.files.documents import validate

X = np.zeros((4, 1, 8, 8), np.float32)


def read(base, make_job, **table):
    """Why a table's records are refused."""
    source = validate({"data": table}, File, "silo.toml").data.below(base)
    job = make_job(model={"name": "cnn-digits", "classes": 10})
    with pytest.raises(LocalError) as caught:
        source.load(job.model)
    return str(caught.value)


PLACES = {  # a file that is opened → the table whose reader opens it
    "d.npz": {"file": "d.npz"},
    "d.csv": CSV,
    "scans/0/1.png": {"kind": "images", "folder": "scans"},
    "wnids.txt": {"kind": "tiny-imagenet", "folder": "."},
    "MNIST/raw/train-images-idx3-ubyte": {"kind": "torchvision", "folder": ".", "name": "MNIST"},
    "train_32x32.mat": {"kind": "torchvision", "folder": ".", "name": "SVHN"},
    "usps.bz2": {"kind": "torchvision", "folder": ".", "name": "USPS"},
    "cifar-100-binary/train.bin": {"kind": "torchvision", "folder": ".", "name": "CIFAR100"},
    "UCI HAR Dataset/train/Inertial Signals/body_acc_x_train.txt": {"kind": "natural",
        "folder": ".", "name": "har"},
}  # fmt: skip


@pytest.mark.parametrize("kind", ["a FIFO", "a socket", "a device"])
@pytest.mark.parametrize("place", PLACES)
def test_what_is_no_file_is_named_and_not_waited_for(tmp_path, make_job, place, kind):
    with irregular(tmp_path / place, kind):
        assert f"{tmp_path / place}: is {kind}, not a file; put a" in read(
            tmp_path, make_job, **PLACES[place]
        )


def test_a_lone_npy_file_that_claims_400_gb(tmp_path):
    (tmp_path / "d.npz").write_bytes(npy((100_000_000_000,)))
    assert "holds one array; save x and y together" in refusal(tmp_path / "d.npz")


def test_a_member_that_says_it_inflates_beyond_what_zip_can(tmp_path):
    path = archive(tmp_path / "d.npz", x=npy((4, 1), data=bytes(16)))
    whole = bytearray(path.read_bytes())
    entry = whole.rindex(b"PK\1\2")
    whole[entry + 24 : entry + 28] = struct.pack("<I", 2**32 - 2)
    path.write_bytes(whole)
    assert f"{path}, holds {len(whole)} bytes: array 'x' claims to unpack" in refusal(path)
    assert "bytes to 4,294,967,294, which no zip file can; replace the file" in refusal(path)


def test_a_bomb_of_zeros_is_measured_against_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(file_bounds, "available_memory", lambda: 10**8)
    squeezed = io.BytesIO()
    with zipfile.ZipFile(squeezed, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("y.npy", npy((4,), "<i8", Y.tobytes()))
        with made.open("x.npy", "w") as member:
            member.write(npy((4, 2**24)))
            for _ in range(4 * 64):
                member.write(bytes(2**20))
    path = tmp_path / "d.npz"
    path.write_bytes(squeezed.getvalue())
    why = refusal(path)
    assert why.startswith(
        f"{path}, holds {path.stat().st_size:,} bytes: x and y of what its headers claim would"
        " take "
    )
    assert why.endswith(
        "100,000,000 are available; give fewer records, free memory, or replace the file if it"
        " should be smaller"
    )


def test_texts_count_as_what_is_made_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr(file_bounds, "available_memory", lambda: 10**6)
    path = archive(
        tmp_path / "d.npz", x=npy((4,), data=bytes(16)), ids=npy((20_000,), "<U1", bytes(80_000))
    )
    assert "x, y and ids of what its headers claim would take 2,080," in refusal(path)


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"x": npy((0, 10**30))}, "not a .npz file of plain arrays"),
        ({"x": npy((-1,))}, "not a .npz file of plain arrays"),
        ({"x": npy((2**62,), "<U0")}, "not a .npz file of plain arrays"),
        ({"x": npy((10**15,), "<U0")}, "would take"),
        ({"x": npy((4,), version=b"\3\0")}, "not a .npz file of plain arrays"),
        ({"x": npy((4,), version=b"\2\0", length=2**32 - 1)}, "not a .npz file of plain arrays"),
        (
            {"x": b"\x93NUMPY\1\0" + struct.pack("<H", 9000) + b"(" * 9000},
            "not a .npz file of plain arrays",
        ),
        ({"x": npy((4,), [()])}, "not a .npz file of plain arrays"),
        ({"x": npy((4,), ())}, "not a .npz file of plain arrays"),
        ({"x": b"no array"}, "not a .npz file of plain arrays"),
        ({"x": npy((4,), data=bytes(16)), "ids": b"no array"}, "ids is not a plain array; store"),
    ],
)
def test_headers_that_no_numpy_wrote(tmp_path, members, said):
    assert said in refusal(archive(tmp_path / "d.npz", **members))


@pytest.mark.parametrize("compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_members_packed_in_another_way_than_numpys(tmp_path, compression):
    assert "not a .npz file of plain" in refusal(
        archive(tmp_path / "d.npz", compression, x=npy((4,), data=bytes(16)))
    )


def test_a_member_with_a_password(tmp_path):
    path = archive(tmp_path / "d.npz", x=npy((4,), data=bytes(16)))
    whole = bytearray(path.read_bytes())
    for mark, flags in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        whole[whole.rindex(mark) + flags] |= 1
    path.write_bytes(whole)
    assert "not a .npz file of plain arrays" in refusal(path)


def test_an_archive_larger_than_the_memory_is_not_opened(tmp_path, monkeypatch):
    monkeypatch.setattr(file_bounds, "available_memory", lambda: 2**20)
    path = tmp_path / "d.npz"
    with path.open("wb") as file:
        file.truncate(2**40)
    assert f"{path}, holds 1,099,511,627,776 bytes: the file itself would take" in refusal(path)


def test_a_csv_file_larger_than_the_memory(tmp_path, make_job):
    with (tmp_path / "d.csv").open("wb") as file:
        file.truncate(2**43)
    why = read(tmp_path, make_job, **CSV)
    assert f"{tmp_path / 'd.csv'}, holds 8,796,093,022,208 bytes: its text would take" in why


def test_a_csv_file_whose_values_do_not_fit(tmp_path, make_job, monkeypatch):
    (tmp_path / "d.csv").write_text("v,y\n" + "1,0\n" * 100)
    monkeypatch.setattr(tables, "ASKED_EVERY", 10)
    monkeypatch.setattr(file_bounds, "available_memory", lambda: 500)
    why = read(tmp_path, make_job, **CSV)
    assert (
        f"{tmp_path / 'd.csv'}, holds 404 bytes: the values of its first 41 lines would take 640"
        " bytes" in why
    )


def test_a_csv_file_whose_truths_do_not_fit(tmp_path, make_job, monkeypatch):
    (tmp_path / "d.csv").write_text("id,v,y,z\n" + "somebody,1,0,1\n" * 100)
    monkeypatch.setattr(labelled, "HELD_ASKED_EVERY", 200)
    monkeypatch.setattr(file_bounds, "available_memory", lambda: 2000)
    why = read(tmp_path, make_job, **{**CSV, "label": None, "survival": ["y", "z"], "id": "id"})
    assert "what is true of its first 30 lines, and their ids, would take 2,160 bytes" in why


def test_a_survey_whose_values_do_not_fit(tmp_path, monkeypatch):
    (tmp_path / "d.csv").write_text("v,y\n" + "1,0\n" * 100)
    monkeypatch.setattr(surveys, "ASKED_EVERY", 10)
    monkeypatch.setattr(file_bounds, "available_memory", lambda: 1000)
    with pytest.raises(LocalError, match="the values of its first 40 records would take 1,280"):
        surveys.survey(tmp_path / "d.csv")


def test_more_images_than_fit(tmp_path, make_job, monkeypatch):
    (tmp_path / "scans" / "0").mkdir(parents=True)
    for number in range(4):
        Image.new("L", (8, 8)).save(tmp_path / "scans" / "0" / f"{number}.png")
    monkeypatch.setattr(file_bounds, "available_memory", lambda: 2000)
    why = read(tmp_path, make_job, **PLACES["scans/0/1.png"])
    assert f"{tmp_path / 'scans'}: 4 images of 1 x 8 x 8 would take 2,048 bytes of memory" in why


@pytest.mark.parametrize(
    "sides", [(40_000, 40_000), (10_000, 10_000)], ids=["an error of Pillow's", "a warning"]
)
def test_a_picture_of_gigapixels_is_an_error_and_no_warning(tmp_path, make_job, sides):
    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    path = tmp_path / "scans" / "0" / "1.png"
    path.parent.mkdir(parents=True)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", *sides, 8, 0, 0, 0, 0))
    chunks = header + chunk(b"IDAT", zlib.compress(bytes(9))) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunks)
    for action in ("always", "error"):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter(action)
            why = read(tmp_path, make_job, **PLACES["scans/0/1.png"])
        assert why.startswith(
            f"{path}, holds {path.stat().st_size} bytes: claims more than 67,108,864 pixels"
        )
        assert told == []


def test_a_packed_set_that_unpacks_to_too_much(tmp_path, make_job, monkeypatch):
    assert torchvision_sets.MOST_UNPACKED == 2**30
    monkeypatch.setattr(torchvision_sets, "MOST_UNPACKED", 2**26)
    packer, path = bz2.BZ2Compressor(), tmp_path / "usps.bz2"
    path.write_bytes(b"".join([*(packer.compress(bytes(2**25)) for _ in range(3)), packer.flush()]))
    why = read(tmp_path, make_job, kind="torchvision", folder=".", name="USPS")
    assert why.startswith(
        f"{path}, holds {path.stat().st_size:,} bytes: unpacks to more than 67,108,864 bytes; fetch"
    )


def test_memory_that_another_took_meanwhile(tmp_path, make_job, monkeypatch):
    np.savez(tmp_path / "d.npz", x=X, y=Y)

    def out_of_memory(path):
        raise MemoryError

    monkeypatch.setattr(npz, "load_npz", out_of_memory)
    assert "d.npz: out of memory while reading the records; give fewer" in read(
        tmp_path, make_job, file="d.npz"
    )


# The memory that is available.


def machine(folder, monkeypatch, groups, **files):
    """A machine with 8 GB available and control groups as given."""
    files = {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    8000000 kB\n", **files}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "proc" / "self").mkdir()
    (folder / "proc" / "self" / "cgroup").write_text(groups)
    monkeypatch.setattr(file_bounds, "PROC", folder / "proc")
    monkeypatch.setattr(file_bounds, "CGROUPS", folder / "groups")
    return file_bounds.available_memory()


def group(most, used, cache, names=("memory.max", "memory.current", "inactive_file")):
    texts = (f"{most}\n", f"{used}\n", f"anon 1\n{names[2]} {cache}\n")
    return dict(zip((*names[:2], "memory.stat"), texts, strict=True))


def test_available_is_what_the_machine_has(tmp_path, monkeypatch):
    assert machine(tmp_path, monkeypatch, "0::/\n") == 8_000_000 * 1024


@pytest.mark.parametrize("limited", ["", "a/", "a/b/"])
def test_or_what_a_control_group_above_the_process_leaves(tmp_path, monkeypatch, limited):
    files = {f"groups/{limited}{name}": text for name, text in group(1000, 600, 50).items()}
    assert machine(tmp_path, monkeypatch, "0::/a/b\n", **files) == 450


def test_or_one_of_the_first_version(tmp_path, monkeypatch):
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    files = {f"groups/memory/{name}": text for name, text in group(1000, 600, 50, names).items()}
    assert machine(tmp_path, monkeypatch, "4:memory:/not/shown\n1:cpu:/x\n0::/\n", **files) == 450


def test_a_group_without_a_limit_or_beyond_it(tmp_path, monkeypatch):
    files = {f"groups/{name}": text for name, text in group("max", 600, 50).items()}
    files |= {f"groups/a/{name}": text for name, text in group(1000, 1200, 0).items()}
    assert machine(tmp_path, monkeypatch, "0::/\n", **files) == 8_000_000 * 1024
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/a\n")
    assert file_bounds.available_memory() == 0


def test_the_process_has_a_limit_of_its_own(monkeypatch):
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    used = pages * os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr(file_bounds.resource, "getrlimit", lambda _: (used + 10**6, -1))
    assert 0 <= file_bounds.available_memory() <= 2 * 10**6
