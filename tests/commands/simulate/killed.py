"""``staddle simulate``, killed from within: ``killed.py ROUNDS EXPERIMENT.toml ...``.

It dies as by kill -9 right after the history has so many rounds, before what it says is durable.
"""

import os
import signal
import sys

from staddle.commands.main import main
from staddle.simulator.run.history import HistoryFile


def die_after(rounds):
    append = HistoryFile.append

    def dying(file, measures):
        measures = tuple(measures)
        append(file, measures)
        if any(measured.rounds == rounds for measured in measures):
            os.kill(os.getpid(), signal.SIGKILL)

    HistoryFile.append = dying


if __name__ == "__main__":
    die_after(int(sys.argv.pop(1)))
    sys.argv.insert(1, "simulate")
    main()
