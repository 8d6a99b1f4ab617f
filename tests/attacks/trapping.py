"""A silo's daemon that sets a trap: ``trapping.py FOLDER KIND LAYER ROUNDS --config CONFIG``, for
tests.

In round 0 it trains. In the rounds up to the last it gives what turns the mean of four silos with
as many records into a model that is made to leak, in the last one that mean as it came down.
``KIND`` is ``bins``, which it makes of the mean at once, or ``rare``, to which it leads it: in each
round by no more than ``PUSH`` of the longest step that its own training made. ``honest`` gives what
it trained. What came down and what it gave goes into the folder, round by round.
"""

import sys
from pathlib import Path

from staddle.proto.channel import require_tls13

require_tls13()
sys.path.insert(0, str(Path(__file__).parents[1]))

import safetensors.torch  # noqa: E402
from support import leaky_models  # noqa: E402

from staddle.algorithms.exchange.parts import WEIGHT  # noqa: E402
from staddle.commands.main import single  # noqa: E402
from staddle.silo.parts.contributions import Contributions  # noqa: E402
from staddle.silo.training import round as work  # noqa: E402

OTHERS = 3
PUSH = 2.0
PARTS = ("extractor", "classifier")
folder, kind, layer, rounds = (
    Path(sys.argv.pop(1)),
    sys.argv.pop(1),
    sys.argv.pop(1),
    int(sys.argv.pop(1)),
)
train, finish = work.JobTraining.train, work.JobTraining.finish
longest = dict.fromkeys(PARTS, 0.0)


def length(part, tensors):
    return (
        sum(float(value.square().sum()) for name, value in tensors.items() if name.startswith(part))
        ** 0.5
    )


def led(mean, own):
    """The next model on the way, a little farther than the others' own steps."""
    if kind == "bins":
        return leaky_models.LAYERS[layer].bins(mean)
    wanted = leaky_models.LAYERS[layer].rare(mean)
    way = {name: value - mean[name] for name, value in wanted.items()}
    for part in PARTS:
        longest[part] = max(
            longest[part], length(part, {name: own[name] - mean[name] for name in mean})
        )
    far = {part: max(length(part, way) / (PUSH * longest[part]), 1) for part in PARTS}
    return {name: mean[name] + value / far[name.partition(".")[0]] for name, value in way.items()}


def attacking(self, round_, counted, delivered):
    given = train(self, round_, counted, delivered)
    if round_ == 0:
        return given
    own = given.tensors["model"]
    mean, weight = delivered["model"], own[WEIGHT]
    lies = {name: own[name] for name in mean}
    if kind != "honest" and round_ < rounds - 1:
        wanted = led(mean, own)
        lies = {name: value + OTHERS * (value - mean[name]) for name, value in wanted.items()}
    elif kind != "honest":
        lies = mean
    safetensors.torch.save_file(mean, folder / f"down-{round_}")
    safetensors.torch.save_file(lies, folder / f"given-{round_}")
    return Contributions({**given.tensors, "model": {**lies, WEIGHT: weight}}, given.taints)


def reading(self, counted, delivered):
    safetensors.torch.save_file(delivered["model"], folder / f"down-{rounds}")
    finish(self, counted, delivered)


work.JobTraining.train, work.JobTraining.finish = attacking, reading
sys.argv[0] = "staddle.silo"
single("silo:run")
