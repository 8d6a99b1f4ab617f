"""Values at the edge of what a file may have."""

import time

from faults.table import refused, row

from staddle.errors import LocalError
from staddle.files.documents import Strict, read_toml

SECONDS = 5.0  # of processor time; before, the parser took half a minute


class File(Strict):
    version: int


@row(
    "a TOML file with a key of thousands of parts, or a number of thousands of digits",
    "refused at once, by its line",
)
def large_toml(folder, draw):
    path, lines = folder / "c.toml", draw.randrange(20)
    most = 10 ** draw.randrange(4, 6)
    size = draw.randrange(5000, most + 5000)
    parts = ".".join("a" * size)
    digits = draw.choice(("", "-", "+", "0x", "0o", "0b")) + "1" * size
    texts = f"{parts} = 1", f"[{parts}]", f"[[{parts}]]"
    text = draw.choice((*texts, f"version = {digits}", f"version = [1, {digits}]"))
    path.write_text("# nothing\n" * lines + text)
    began = time.process_time()
    why = refused(lambda: read_toml(path, File), path, LocalError, text[:20])
    assert time.process_time() - began < SECONDS
    assert why.startswith(f"{path}, line {lines + 1}: "), why[:200]
    assert len(why) < 1000
