"""Initial values for a silo's private part from a local file, such as a pre-trained model.

A job holds no paths, and what crosses starts equal at all silos; so this is for parts that a method
declares ``loadable``. Where there is no file the part is trained from scratch.
"""

import hashlib
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load
from torch import nn

from ...errors import LocalError
from ...files import tensor_file
from ...files.documents import read_bytes
from ...files.file_bounds import check_regular
from ..exchange.parts import Tensors, all_finite
from ..method import Method

HEADER_BYTES = 1 << 20  # bound on names and metadata next to the tensors


def load_weights(
    path: Path, method: Method, silo: str, part: str, digest: str | None = None
) -> tuple[Tensors, str]:
    """The tensors of a safetensors file for a private part, and the file's SHA-256 in hex.

    LocalError unless the method lets the part be loaded, the file's SHA-256 is ``digest`` (if that
    is not None) and its own (if Staddle wrote the file), and the file holds exactly the part's
    tensors by name, dtype and shape, all finite.
    """
    # Only parts that never cross: a part that crosses starts equal at all silos.
    if part not in method.loadable:
        able = "it takes none"
        if method.loadable:
            able = f"it takes weights for {', '.join(method.loadable)}"
        raise LocalError(
            f"{path}: method {method.name!r} takes no weights for part {part!r}, {able}"
        )
    try:
        check_regular(path)
    except OSError as error:
        raise LocalError(f"{path}: cannot read it: {error.strerror or error}") from error

    # The size that the part needs bounds what is read: a wrong path must not fill the memory.
    module = method.modules(silo)[part]
    needed = sum(tensor.nbytes for tensor in module.state_dict().values())
    data = read_bytes(path, needed + HEADER_BYTES)
    # The digest covers the whole file, and is checked before anything is parsed.
    found = hashlib.sha256(data).hexdigest()
    if digest is not None and found != digest.lower():
        raise LocalError(
            f"{path}: its SHA-256 is {found}, expected {digest}; fetch the file again or correct"
            " the digest"
        )

    # safetensors, never pickle: a file from the internet must not run code.
    # Files that Staddle wrote contain a digest, which ``from_bytes`` checks.
    try:
        if tensor_file.is_ours(data):
            tensors, _ = tensor_file.from_bytes(data, str(path))
        else:
            tensors = load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise LocalError(f"{path}: not a safetensors file: {error}") from error
    _check(path, part, tensors, module)
    return tensors, found


def _check(path: Path, part: str, tensors: Tensors, module: nn.Module) -> None:
    # Buffers are needed as well, such as running statistics.
    wanted = module.state_dict()
    if set(tensors) != set(wanted):
        missing, extra = sorted(set(wanted) - set(tensors)), sorted(set(tensors) - set(wanted))
        raise LocalError(f"{path}: is for another {part}: lacks {missing}, has {extra} too many")
    for name, tensor in tensors.items():
        # The dtype must match exactly, since ``load_values`` converts none.
        if tensor.shape != wanted[name].shape or tensor.dtype != wanted[name].dtype:
            raise LocalError(
                f"{path}: {name!r} is {tensor.dtype} {list(tensor.shape)}, "
                f"this job's {part} takes {wanted[name].dtype} {list(wanted[name].shape)}"
            )
        if not all_finite(tensor):
            raise LocalError(f"{path}: {name!r} holds NaN or infinity; take an earlier checkpoint")
