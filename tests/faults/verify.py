"""Ledgers that somebody edited, before those who verify them: the package's command and the file
that auditors copy.
"""

import contextlib
import io
import json

from faults.table import refused, row
from support.ledgers import first, open_ledger, public, write_start, write_stop

from staddle import staddle_verify
from staddle.errors import LocalError
from staddle.security.ledger import audit


def edited(lines, draw):
    """One edit, deletion, repetition or swap of lines, and what it was."""
    at = draw.randrange(len(lines))
    match draw.choice(("edit", "drop", "repeat", "swap", "respell")):
        case "edit":
            record = json.loads(lines[at])
            record["mono_us" if draw.random() < 0.5 else "v"] += 1
            changed = json.dumps(record, sort_keys=True, separators=(",", ":")).encode()
            return [*lines[:at], changed, *lines[at + 1 :]], f"edit of line {at}"
        case "drop":
            return lines[:at] + lines[at + 1 :], f"line {at} dropped"
        case "repeat":
            return [*lines[: at + 1], *lines[at:]], f"line {at} twice"
        case "swap":
            other = (at + draw.randrange(1, len(lines))) % len(lines)
            swapped = list(lines)
            swapped[at], swapped[other] = lines[other], lines[at]
            return swapped, f"lines {at} and {other} swapped"
        case _:
            return [*lines[:at], lines[at] + b" ", *lines[at + 1 :]], f"line {at} spelt otherwise"


def audited(path):
    """How the auditors' file ends."""
    with contextlib.redirect_stdout(io.StringIO()):
        return staddle_verify.main(["ledger", str(path), "--key", str(public())])


@row(
    "a ledger with a line edited, dropped, repeated, swapped or spelt otherwise",
    "both verifiers find it",
    6,
)
def edited_ledger(folder, draw):
    path = folder / "ledger"
    for _ in range(draw.randrange(1, 5)):
        with open_ledger(path) as ledger:
            write_start(ledger, "staddle", "ab" * 32, "cd" * 32)
            write_stop(ledger, "asked to stop")
    assert audit.verify(path, key=public()).ok
    assert audited(path) == 0
    lines, made = edited(first(path).read_bytes().splitlines(), draw)
    first(path).write_bytes(b"".join(line + b"\n" for line in lines))
    assert not audit.verify(path, key=public()).ok, made
    assert audited(path) == 1, made
    refused(lambda: open_ledger(path).close(), path, LocalError, made)
