"""NIfTI files, by nibabel.

Three axes are x, y and z; a fourth one is the channels. ``scl_slope`` and ``scl_inter`` are
applied. A file that says nothing of its place is taken as nibabel takes it.
"""

import logging
from math import prod
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np

from .....errors import LocalError
from .....files.file_bounds import check_fits, check_regular
from .scans import IMAGING, Scan, check_sound, reading, turned

BYTES = 12  # of a value while it is read: as it is stored, float32, and float32 turned
LARGEST_HEADER = 540  # bytes
MILLIMETRES = {"meter": 1000.0, "mm": 1.0, "micron": 0.001}
REAL = "iuf"  # numpy's kinds of numbers that are values


def read(path: Path, values: bool = True) -> Scan:
    """The scan in a file ``.nii`` or ``.nii.gz``; LocalError, which names it, where it is none.

    Without ``values`` the header alone is read, and all are 0.
    """
    try:
        import nibabel  # noqa: PLC0415 - installed for those who have scans
    except ModuleNotFoundError as error:
        raise LocalError(f"{path}: NIfTI files are read by nibabel; {IMAGING}") from error
    # It logs faults of headers, which are errors here.
    logging.getLogger("nibabel.global").setLevel(logging.CRITICAL)
    with reading(path, "NIfTI"):
        check_regular(path)
        # What lies between header and values is read whole, and a small file can claim any size.
        with nibabel.openers.ImageOpener(str(path)) as file:
            begin = file.read(LARGEST_HEADER)
        forms: Any = (nibabel.Nifti1Header, nibabel.Nifti2Header)
        for form in filter(methodcaller("may_contain_header", begin), forms):
            header = form(begin[: form.sizeof_hdr], check=False)
            check_fits(path, int(header["vox_offset"]), "what lies before its values")
        image: Any = nibabel.load(path)
        shape, dtype = tuple(image.shape), image.get_data_dtype()
        if dtype.kind not in REAL or len(shape) not in (3, 4):
            raise LocalError(
                f"{path}: is {dtype} {list(shape)}; store numbers [x, y, z] or [x, y, z, channels]"
            )
        # The header alone is read yet.
        check_fits(path, BYTES * prod(shape), f"a scan of {' x '.join(map(str, shape))}")
        found = image.dataobj if values else np.broadcast_to(np.float32(0), shape)
        whole = np.asarray(found, np.float32).reshape(*shape[:3], -1)
        unit = MILLIMETRES.get(image.header.get_xyzt_units()[0], 1.0)
        place = np.diag([unit, unit, unit, 1.0]) @ image.affine
        scan = turned(path, whole, place)
    return check_sound(path, scan)
