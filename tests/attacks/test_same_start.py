"""What the sums of two blind jobs tell of the silo that is in one of them alone, where both begin
with a file of weights.

The operator signs both jobs, and reads the sum of each first round, as the coordinator does. The
measure is the cosine of what it recovers with what the silo's training changed. All silos are
honest; one joined the federation between the jobs, so no rule on counts objects. What ships
declines the second job (tests/silo/admission).
"""

import pytest
import torch
from support.start_weights import NETWORK, save_start, start_table

from staddle.algorithms.data.dataset import digits, split
from staddle.algorithms.engines.engine import Records, Serial
from staddle.algorithms.engines.simulation import Simulation
from staddle.algorithms.job.job import Job, JobFile
from staddle.algorithms.method import initial_state
from staddle.algorithms.models.build import ModelOptions, build
from staddle.algorithms.partition.draw import dirichlet

pytestmark = pytest.mark.actor("operator")

BEFORE, NEW = ("a", "b", "c", "d", "e"), "f"
PARTS = ("extractor", "classifier")


@pytest.fixture(scope="module")
def records():
    data, silos = digits(), (*BEFORE, NEW)
    shares = dirichlet(data.y.numpy(), len(silos), 0.5, 3, minimum=20)
    split_ = (split(data.take(share), bytes(32), 0.25) for share in shares)
    return {silo: Records(*own) for silo, own in zip(silos, split_, strict=True)}


@pytest.fixture
def recovered(records, tmp_path):
    """The cosine, for jobs that begin with a file or as drawn, with batches of this size."""
    parts = build(ModelOptions(name=NETWORK, classes=10), 99)
    named = {part: parts[part].state_dict().items() for part in PARTS}
    values = {f"{part}.{n}": v.clone() for part, items in named.items() for n, v in items}
    save_start(tmp_path / "w.safetensors", values)

    def flat(model):
        return torch.cat([v.flatten().double() for part in PARTS for v in model[part].values()])

    def summed(silos, model, batch_size):
        document = {"version": 1, "name": f"of-{len(silos)}", "seed": 7, "rounds": 1}
        document |= {"silos": silos, "method": {"name": "fedavg"}, "model": model}
        document |= {"training": {"epochs": 1, "batch_size": batch_size, "lr": 0.05}}
        job = Job.from_file(
            JobFile.model_validate(document), "job", tmp_path if "weights" in model else None
        ).for_federation()
        own = {silo: records[silo] for silo in silos}
        simulation = Simulation(job, Serial(job, own))
        simulation.step()
        trained = {silo: flat(simulation.states[silo].parts) for silo in silos}
        start = flat(initial_state(job.method(), silos[0]).parts)
        return sum(len(own[silo].train) * trained[silo] for silo in silos), trained, start

    def call(batch_size, *, file):
        model = {"name": NETWORK, "classes": 10}
        if file:
            model = start_table()
            model["weights"]["parts"] = list(PARTS)
        few, _, _ = summed(BEFORE, model, batch_size)
        more, trained, start = summed((*BEFORE, NEW), model, batch_size)
        found = (more - few) / len(records[NEW].train) - start
        return float(torch.cosine_similarity(found, trained[NEW] - start, dim=0))

    return call


@pytest.mark.control
def test_one_batch_of_all_records_tells_the_new_silos_update_exactly(recovered):
    assert recovered(4096, file=True) > 0.999999


@pytest.mark.control
def test_batches_that_are_drawn_anew_hide_little_of_it(recovered):
    assert recovered(32, file=True) > 0.8


def test_from_values_that_each_job_draws_nothing_is_told(recovered):
    assert abs(recovered(4096, file=False)) < 0.2
    assert abs(recovered(32, file=False)) < 0.2
