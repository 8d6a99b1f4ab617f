"""Both engines on one job."""

import torch

from staddle.algorithms.engines.attendance import EVERYONE
from staddle.algorithms.engines.engine import Records, Serial
from staddle.algorithms.engines.simulation import Simulation
from staddle.algorithms.engines.vmap_engine import Stacked


def check_engines_agree(job, shards, attendance=EVERYONE):
    """Silos that train at once end as those that train one by one, whose end is returned."""
    records = {silo: Records(*shard) for silo, shard in shards.items()}
    stacked, alone = (
        Simulation(job, engine(job, records), attendance=attendance) for engine in (Stacked, Serial)
    )
    for _ in range(job.length):
        one, other = stacked.step(), alone.step()
        assert (one.absent, one.late, one.seconds) == (other.absent, other.late, other.seconds)
    for silo in job.silos:
        for name, value in alone.states[silo].flat.items():
            torch.testing.assert_close(stacked.states[silo].flat[name], value)
    return alone
