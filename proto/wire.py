"""The one pair of conversions between declared parts and protobuf messages."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..algorithms.exchange.parts import WIRE_DTYPES, Item, TensorSpec
from ..errors import RefusedError
from . import tensor_pb2 as pb

DTYPE_TO_WIRE = {
    "float32": pb.DTYPE_FLOAT32,
    "float64": pb.DTYPE_FLOAT64,
    "int64": pb.DTYPE_INT64,
    "bfloat16": pb.DTYPE_BFLOAT16,
    "int8": pb.DTYPE_INT8,
    "int32": pb.DTYPE_INT32,
}
# NumPy has no bfloat16: its bits are those of whole numbers.
LITTLE_ENDIAN = {"float32": "<f4", "float64": "<f8", "int64": "<i8", "bfloat16": "<i2"}
LITTLE_ENDIAN |= {"int8": "<i1", "int32": "<i4"}
NAMES = {dtype: name for name, dtype in WIRE_DTYPES.items()}
BITS = {torch.bfloat16: torch.int16}


def to_wire(items: Sequence[Item]) -> list[pb.TensorHeader]:
    """Headers of a manifest.

    They stand in the order of the tensors' bytes that follow.
    """
    return [
        pb.TensorHeader(
            part=item.part,
            kind=pb.PartKind.Name(int(item.kind)),
            name=item.spec.name,
            dtype=DTYPE_TO_WIRE[item.spec.dtype],
            shape=item.spec.shape,
            size=item.spec.nbytes,
        )
        for item in items
    ]


def check_manifest(
    peer: str, manifest: pb.Manifest, expected: Sequence[Item], words: int = 0
) -> None:
    """Refuse a manifest that is not exactly what the signed schema declares.

    The text names the first difference. ``words`` are the bytes that follow the tensors, of open
    sums and of rows of a Mix.
    """
    # What is not in the signed schema cannot cross: order, kind and shape included.
    headers = to_wire(expected)
    for index, (found, wanted) in enumerate(zip(manifest.tensors, headers, strict=False)):
        if found != wanted:
            raise RefusedError(
                peer,
                "MANIFEST",
                f"tensor {index}: declared {_show(found)}, the job's schema has {_show(wanted)}",
            )

    # The lists may agree as far as the shorter one goes.
    if len(manifest.tensors) > len(expected):
        extra = manifest.tensors[len(expected)]
        raise RefusedError(
            peer, "MANIFEST", f"undeclared tensor {_show(extra)}: the job's schema does not have it"
        )
    if len(manifest.tensors) < len(expected):
        missing = headers[len(manifest.tensors)]
        raise RefusedError(
            peer, "MANIFEST", f"tensor {_show(missing)} is missing from the manifest"
        )

    # Words have no headers, so only the total size tells how many follow.
    total = sum(item.spec.nbytes for item in expected) + words
    if manifest.size != total:
        what = "tensors and words" if words else "tensors"
        raise RefusedError(
            peer, "MANIFEST", f"declared {manifest.size} bytes, the {what} have {total}"
        )


def _show(header: pb.TensorHeader) -> str:
    # The header may be a hostile peer's: numbers that the schema lacks have no name, and texts are
    # cut.
    dtype = pb.DType.Name(header.dtype) if header.dtype in pb.DType.values() else str(header.dtype)
    kind = (
        pb.PartKind.Name(header.kind) if header.kind in pb.PartKind.values() else str(header.kind)
    )
    return (
        f"{header.part[:64]}/{header.name[:64]} ({kind}, {dtype}, {list(header.shape[:8])},"
        f" {header.size} bytes)"
    )


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Little-endian row-major bytes of a CPU tensor; no copy on a little-endian machine.

    Without a copy it is a view, which changes with the tensor.
    """
    # The wire's byte order is fixed, so that digests agree between machines.
    array = tensor.detach().contiguous().view(BITS.get(tensor.dtype, tensor.dtype)).numpy()
    little = array.astype(LITTLE_ENDIAN[NAMES[tensor.dtype]], copy=False)
    return memoryview(little.reshape(-1).view(np.uint8).data)


def tensor_from(
    buffer: memoryview | bytes | bytearray, spec: TensorSpec, offset: int = 0
) -> Tensor:
    """The tensor at ``offset`` of a buffer; shares the memory of a writable, aligned one.

    ``offset`` is in bytes. Read-only or unaligned memory is copied, and so is all of it on a
    big-endian machine.
    """
    if spec.elements == 0:
        return torch.empty(spec.shape, dtype=WIRE_DTYPES[spec.dtype])
    array = np.frombuffer(
        buffer, dtype=LITTLE_ENDIAN[spec.dtype], count=spec.elements, offset=offset
    )
    usable = array.flags.writeable and array.flags.aligned
    # PyTorch warns of memory that it may not write, and takes no other byte order.
    native = array.astype(array.dtype.newbyteorder("="), copy=not usable)
    return torch.from_numpy(native).view(WIRE_DTYPES[spec.dtype]).reshape(spec.shape)
