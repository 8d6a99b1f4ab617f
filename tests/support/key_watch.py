"""Reads the keys of keyed jobs from silos' folders while the jobs run: at their end they are
erased.
"""

import contextlib
import threading
from collections import defaultdict
from contextlib import contextmanager

from staddle.files.checked_file import DIGEST_BYTES
from staddle.silo.blind.group_keys import KEY

POLL_SECONDS = 0.005


@contextmanager
def keys_watched(federation, silos, name=KEY):
    """All contents that a file was seen to have, by job and silo, without their digests."""
    seen, stop = defaultdict(set), threading.Event()

    def watch():
        while not stop.wait(POLL_SECONDS):
            for silo in silos:
                for path in federation.state(silo).glob(f"jobs/*/{name}"):
                    with contextlib.suppress(FileNotFoundError):  # erased just now
                        seen[path.parent.name, silo].add(path.read_bytes()[:-DIGEST_BYTES])

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()
