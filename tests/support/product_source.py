"""The product's modules, in the checkout or in the wheel; no generated ones."""

import functools
from pathlib import Path

import staddle

ROOT = Path(str(staddle.__file__)).resolve().parent  # what is installed: the checkout, or the wheel
FOLDERS = (
    "algorithms", "api", "bundle", "commands", "console", "coordinator", "files", "metrics",
    "proto", "security", "silo", "simulator",
)  # fmt: skip
GENERATED = ("_pb2.py", "_pb2_grpc.py")


@functools.cache
def sources():
    rooms = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    found = [*ROOT.glob("*.py"), *rooms]
    return sorted(path for path in found if not path.name.endswith(GENERATED))
