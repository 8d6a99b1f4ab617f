"""Scans as files, for tests: NIfTI by nibabel, DICOM by pydicom."""

import nibabel
import numpy as np
import pydicom
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid


def write_nifti(path, values, affine):
    """Values [x, y, z(, channels)], and the millimetres of their voxels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(values, affine), path)
    return path


def write_slice(path, stored, **elements):
    """Numbers [rows, columns(, 3)] as one DICOM file; ``None`` leaves an element out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    meta = FileMetaDataset()
    meta.TransferSyntaxUID, meta.MediaStorageSOPClassUID = ExplicitVRLittleEndian, CTImageStorage
    meta.MediaStorageSOPInstanceUID = generate_uid(entropy_srcs=[str(path)])
    made = FileDataset(str(path), {}, file_meta=meta, preamble=bytes(128))
    colour = stored.ndim == 3
    known = {
        "SOPClassUID": CTImageStorage,
        "SOPInstanceUID": meta.MediaStorageSOPInstanceUID,
        "PatientName": "Doe^Jane",
        "Rows": stored.shape[0],
        "Columns": stored.shape[1],
        "SamplesPerPixel": 3 if colour else 1,
        "PhotometricInterpretation": "RGB" if colour else "MONOCHROME2",
        "PlanarConfiguration": 0 if colour else None,
        "BitsAllocated": 8 * stored.itemsize,
        "BitsStored": 8 * stored.itemsize,
        "HighBit": 8 * stored.itemsize - 1,
        "PixelRepresentation": int(stored.dtype.kind == "i"),
        "PixelData": stored.tobytes(),
    }
    for name, value in {**known, **elements}.items():
        if value is not None:
            setattr(made, name, value)
    pydicom.dcmwrite(path, made, enforce_file_format=True)
    return path


def write_series(folder, stored, spacing=(2.0, 0.5, 0.75), order=None, **elements):
    """A volume [z, y, x] of axial slices, z upwards, each in a file whose name says nothing."""
    count = len(stored)
    names = order or [(7 * place) % count for place in range(count)]
    for place, plane in enumerate(stored):
        own = {
            "SeriesInstanceUID": "1.2.3",
            "ImageOrientationPatient": [1, 0, 0, 0, 1, 0],
            "ImagePositionPatient": [-10.0, 20.0, 5.0 + spacing[0] * place],
            "PixelSpacing": list(spacing[1:]),
            "SliceThickness": spacing[0],
        }
        write_slice(folder / f"IM{names[place]:03}.dcm", plane, **{**own, **elements})
    return folder


def series_affine(spacing=(2.0, 0.5, 0.75)):
    """Where ``write_series`` has its voxels (x, y, z), in NIfTI's frame."""
    z, y, x = spacing
    affine = np.diag([-x, -y, z, 1.0])
    affine[:3, 3] = [10.0, -20.0, 5.0]
    return affine
