"""A silo's daemon that sets a trap in each of its jobs: ``trapping.py FOLDER --config CONFIG``, for
tests.

In round 0 it trains. In the rounds up to the last it gives what turns the mean of four silos with
as many records into a model that is made to leak, in the last one that mean as it came down. Jobs
with the name of a layer have ``bins``, which it makes of the mean at once; others get units that
are rare, to which it leads it: in each round by no more than ``PUSH`` of the longest step that its
own training made. What came down and what it gave goes into the job's folder, round by round.
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
folder = Path(sys.argv.pop(1))
train, finish = work.JobTraining.train, work.JobTraining.finish
longest = dict.fromkeys(PARTS, 0.0)


def length(part, tensors):
    values = [value for name, value in tensors.items() if name.startswith(part)]
    return sum(float(value.square().sum()) for value in values) ** 0.5


def led(job, mean, own):
    """The next model on the way, a little farther than the others' own steps."""
    if job.name in leaky_models.LAYERS:
        return leaky_models.LAYERS[job.name].bins(mean)
    wanted = leaky_models.LAYERS["dense"].rare(mean)
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
    job, own = self.admitted.job, given.tensors["model"]
    mean, weight = delivered["model"], own[WEIGHT]
    lies = mean
    if round_ < job.length - 1:
        wanted = led(job, mean, own)
        lies = {name: value + OTHERS * (value - mean[name]) for name, value in wanted.items()}
    safetensors.torch.save_file(mean, folder / job.name / f"down-{round_}")
    safetensors.torch.save_file(lies, folder / job.name / f"given-{round_}")
    return Contributions({**given.tensors, "model": {**lies, WEIGHT: weight}}, given.taints)


def reading(self, counted, delivered, maker):
    job = self.admitted.job
    safetensors.torch.save_file(delivered["model"], folder / job.name / f"down-{job.length}")
    finish(self, counted, delivered, maker)


work.JobTraining.train, work.JobTraining.finish = attacking, reading
sys.argv[0] = "staddle.silo"
single("silo.agent:run")
