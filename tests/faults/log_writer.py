"""Who writes a log of small segments, or repairs it, and may be killed meanwhile."""

from support.ledgers import open_log

from staddle.security.log import append_log
from staddle.security.log.tree_head import TreeHead

RECORDS = 5
SMALL = {"SEGMENT_BYTES": 400, "EVERY": 2}  # segments of two records, a checkpoint every two


def small_segments():
    """For the rest of this process."""
    for name, value in SMALL.items():
        setattr(append_log, name, value)


def write(folder, promise):
    """Open, write three segments with checkpoints, close; ``promise`` hears what is durable."""
    with open_log(folder) as log:
        for n in range(RECORDS):
            promise(log.append({"type": "note", "n": n}).seq + 1)
            if n == 2:
                promise(TreeHead.parse(log.checkpoint().text).size)


def recover(folder, promise):
    """Open, which cuts what is torn, and close."""
    open_log(folder).close()
