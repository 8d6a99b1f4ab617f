"""A silo's split into training and test records, fixed: a drawn one may leave no test record, or
any number of them.
"""

import hashlib
from pathlib import Path

from staddle.files.documents import write_new


def fix_split(folder: Path, silo: str) -> None:
    """Make the key of the split from the silo's name, unless ``folder`` has one."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if not (key := folder / "split.key").exists():
        write_new(key, hashlib.sha256(silo.encode()).digest())
