"""A silo's daemon that sets a trap: ``trapping.py FOLDER --config CONFIG``, for tests.

In round 0 it trains. In round 1 it gives what turns the mean of four silos with as many records into a model that is
made to leak, in round 2 that mean as it came down. What came down in round 2 and in the end goes into the folder.
"""

import sys
from pathlib import Path

from staddle.proto.channel import require_tls13

require_tls13()
sys.path.insert(0, str(Path(__file__).parents[1]))

import safetensors.torch  # noqa: E402
import traps  # noqa: E402

from staddle.algorithms.exchange import WEIGHT  # noqa: E402
from staddle.commands.main import single  # noqa: E402
from staddle.commands.silo import run  # noqa: E402
from staddle.silo import work  # noqa: E402
from staddle.silo.bundle import Bundle  # noqa: E402

OTHERS = 3
folder = Path(sys.argv.pop(1))
train, finish = work.Work.train, work.Work.finish


def attacking(self, round_, counted, delivered):
    given = train(self, round_, counted, delivered)
    if round_ == 0:
        return given
    mean, weight = delivered["model"], given.tensors["model"][WEIGHT]
    if round_ == 1:
        wanted = traps.trap(traps.others_records())
        lies = {name: value + OTHERS * (value - mean[name]) for name, value in wanted.items()}
    else:
        safetensors.torch.save_file(mean, folder / "before")
        lies = mean
    return Bundle({**given.tensors, "model": {**lies, WEIGHT: weight}}, given.taints)


def reading(self, counted, delivered):
    safetensors.torch.save_file(delivered["model"], folder / "after")
    finish(self, counted, delivered)


work.Work.train, work.Work.finish = attacking, reading
sys.argv[0] = "staddle.silo"
single(run)
