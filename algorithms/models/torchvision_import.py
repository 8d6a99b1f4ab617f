"""torchvision, imported where it is used and not before.

Its import takes two seconds that most networks and data do not need.
"""

import importlib
from threading import Lock
from types import ModuleType

import torch

from ...errors import LocalError

OPERATORS = ("nms", "qnms")
LOCK = Lock()  # silos may build their models in threads
DECLARED: list[torch.library.Library] = []  # what a library declares is gone once the object is


def torchvision(name: str, user: str) -> ModuleType:
    """The module torchvision.<name>; ``user`` says in the error what needs it."""
    # Not on "meta", where models are built: modules may make tensors on import.
    with LOCK, torch.device("cpu"):
        try:
            try:
                return importlib.import_module(f"torchvision.{name}")
            # Declaring operators helps only if the error names one of them.
            except RuntimeError as error:
                if not any(f"torchvision::{operator} " in str(error) for operator in OPERATORS):
                    raise
                declare_operators()
                return importlib.import_module(f"torchvision.{name}")
        except (ImportError, RuntimeError) as error:
            raise LocalError(
                f"{user} is torchvision's, which cannot be imported next to torch"
                f" {torch.__version__}: {error}; install the torchvision of this torch release"
            ) from error


def declare_operators() -> None:
    """Declare the operators that torchvision's import describes, where they do not exist."""
    # A torchvision that was built for another torch cannot load its own operators, and its import
    # ends in "operator torchvision::nms does not exist". No classifier calls them, so a schema
    # without an implementation is enough.
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    DECLARED.append(library)
    for name in OPERATORS:
        if not hasattr(torch.ops.torchvision, name):
            schema = f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            library.define(schema)  # type: ignore[no-untyped-call]
