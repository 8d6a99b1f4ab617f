"""Reads the keys of keyed jobs from silos' folders while the jobs run: at their end they are
erased.
"""

import contextlib
import os
import threading
import time
from collections import defaultdict
from contextlib import contextmanager

from staddle.files.checked_file import DIGEST_BYTES
from staddle.silo.blind.group_keys import KEY

POLL_SECONDS = 0.005
SETTLED_NS = 50_000_000  # after it, the next change of a folder has another time


@contextmanager
def keys_watched(federation, silos, name=KEY):
    """All contents that a file was seen to have, by job and silo, without their digests."""
    seen, stop = defaultdict(set), threading.Event()
    jobs = {silo: federation.state(silo) / "jobs" for silo in silos}

    def watch():
        changed = {}  # folder of a job → the time of its last change, once it was looked at
        while not stop.wait(POLL_SECONDS):
            now = time.time_ns()
            for silo, folder in jobs.items():
                # there is no folder before the first job, and no file after the last
                with contextlib.suppress(FileNotFoundError):
                    for job in os.scandir(folder):
                        at = job.stat().st_mtime_ns
                        if changed.get(job.path) != at:
                            look(silo, folder / job.name)
                        if now - at > SETTLED_NS:
                            changed[job.path] = at

    def look(silo, job):
        with contextlib.suppress(FileNotFoundError), (job / name).open("rb") as file:
            seen[job.name, silo].add(file.read()[:-DIGEST_BYTES])

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()
