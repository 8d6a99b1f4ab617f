"""Records that claim more memory than there is, or that are no file."""

import contextlib
import os
import socket
import struct
import tracemalloc
import warnings
import zipfile

import numpy as np
from faults.table import flip, refused, row

from staddle.algorithms.data import registry
from staddle.algorithms.data.dataset import load_npz
from staddle.errors import LocalError
from staddle.files.documents import Strict, validate

Y = np.array([0, 1, 0, 1])
MEGABYTES = 64  # that a refusal may take
CSV = {"kind": "csv", "file": "d.csv", "features": ["v"], "label": "y"}


class File(Strict):
    data: registry.Source


def npy(shape, dtype="<f4", data=b"", version=b"\1\0", length=None):
    """The bytes of one array, as NEP 1 has them."""
    header = repr({"descr": dtype, "fortran_order": False, "shape": shape}).encode() + b"\n"
    width = "<H" if version == b"\1\0" else "<I"
    size = struct.pack(width, len(header) if length is None else length)
    return b"\x93NUMPY" + version + size + header + data


def archive(path, compression=zipfile.ZIP_DEFLATED, **members):
    """An .npz file of four labels and of members as they are given."""
    with zipfile.ZipFile(path, "w", compression) as made:
        for name, data in {"y": npy((4,), "<i8", Y.tobytes()), **members}.items():
            made.writestr(f"{name}.npy", data)
    return path


def refusal(path):
    """Why an archive is refused; nothing that it claimed was made."""
    tracemalloc.start()
    try:
        why = refused(lambda: load_npz(path), path, LocalError, f"{path.stat().st_size} bytes")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MEGABYTES * 2**20, f"took {peak} bytes"
    return why


@contextlib.contextmanager
def irregular(path, kind):
    """While the block runs, something else than a file is at a place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    if kind != "a socket":
        yield
        return
    # an address is 107 bytes at most
    with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(path.parent):
        made.bind(path.name)
        yield


@row(
    "the header of an array claims more than follows",
    "it is refused by file and array, and nothing is made of it",
)
def claims(folder, draw):
    version = draw.choice((b"\1\0", b"\2\0"))
    shape = draw.choice(((draw.randrange(10**10, 10**15),), (4, draw.randrange(10**10, 10**13))))
    dtype, size = draw.choice((("<f4", 4), ("<f8", 8), ("|u1", 1)))
    path = archive(folder / "d.npz", x=npy(shape, dtype, b"1234", version))
    count = int(np.prod(np.array(shape, dtype=object)))
    why = refusal(path)
    assert why.startswith(
        f"{path}, holds {path.stat().st_size:,} bytes: the header of array 'x' claims"
    )
    assert f"which are {count * size:,} bytes, and 4 follow; write the file again" in why


@row("bytes of an archive of records were changed", "it is read, or refused by its name", 6)
def broken_archive(folder, draw):
    path = folder / "d.npz"
    np.savez_compressed(path, x=np.zeros((4, 1, 8, 8), np.float32), y=Y, ids=np.array([*"abcd"]))
    whole = path.read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # numpy's, of a header in an old spelling
        for _ in range(40):
            path.write_bytes(whole)
            made = [flip(path, draw) for _ in range(draw.randrange(1, 4))]
            try:
                load_npz(path)
            except LocalError as error:
                assert str(error).startswith(str(path)), f"{made}: {error}"  # noqa: PT017 - some can be read


@row(
    "a FIFO, a socket or a device is where records should be",
    "it is named, and nobody waits for it",
)
def no_file(folder, draw):
    table = draw.choice(({"file": "d.npz"}, CSV))
    source = validate({"data": table}, File, "silo.toml").data.below(folder)
    kind = draw.choice(("a FIFO", "a socket", "a device"))
    with irregular(source.file, kind):
        why = refused(source.check_present, source.file, LocalError, kind)
    assert f"is {kind}, not a file" in why
