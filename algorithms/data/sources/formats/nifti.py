"""NIfTI files, by nibabel.

Three axes are x, y and z; a fourth one is the channels. ``scl_slope`` and ``scl_inter`` are
applied. A file that says nothing of its place is taken as nibabel takes it.
"""

import zlib
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from .....errors import LocalError
from .....files.file_bounds import check_fits, check_regular
from .scans import IMAGING, Scan, check_finite, turned

# nibabel raises one of these for a damaged file, or an error of its own.
FAULTS = (OSError, EOFError, ValueError, TypeError, OverflowError, zlib.error)
BYTES = 12  # of a value while it is read: as it is stored, float32, and float32 turned
REAL = "iuf"  # numpy's kinds of numbers that are values


def read(path: Path, values: bool = True) -> Scan:
    """The scan in a file ``.nii`` or ``.nii.gz``; LocalError, which names it, where it is none.

    Without ``values`` the header alone is read, and all are 0.
    """
    try:
        import nibabel  # noqa: PLC0415 - installed for those who have scans
        from nibabel.filebasedimages import ImageFileError  # noqa: PLC0415
        from nibabel.spatialimages import HeaderDataError  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise LocalError(f"{path}: NIfTI files are read by nibabel; {IMAGING}") from error
    try:
        check_regular(path)
        image: Any = nibabel.load(path)
        shape, dtype = tuple(image.shape), image.get_data_dtype()
        if dtype.kind not in REAL or len(shape) not in (3, 4):
            raise LocalError(
                f"{path}: is {dtype} {list(shape)}; store numbers [x, y, z] or [x, y, z, channels]"
            )
        # The header alone is read yet, and a small file can claim any size.
        check_fits(path, BYTES * prod(shape), f"a scan of {' x '.join(map(str, shape))}")
        found = image.dataobj if values else np.broadcast_to(np.float32(0), shape)
        whole = np.asarray(found, np.float32).reshape(*shape[:3], *shape[3:] or (1,))
        return check_finite(path, turned(whole, image.affine))
    except (*FAULTS, ImageFileError, HeaderDataError) as error:
        raise LocalError(f"{path}: cannot read it as NIfTI: {error}; replace it") from error
