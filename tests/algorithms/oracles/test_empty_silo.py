"""No paper says what a silo without records does; a simulation refuses it, whatever the method."""

import pytest
from support import whole_methods as whole
from support.refusals import refused

OPTIONS = {"fedsimsup": {"supervisor": "mlp"}, "ppfl": {"lam": 0.0}}


@pytest.mark.parametrize("method", ["fedsimsup", "fedssa", "ppfl", "pfedsim", "fedaims"])
def test_a_silo_without_records_is_refused_by_name(method):
    model = (
        {"name": "convnet-digits", "classes": whole.CLASSES} if method == "fedaims" else whole.MLP
    )
    job = whole.job_of(method, OPTIONS.get(method), model)
    shards = whole.shards_of({**whole.UNEVEN, "e": (0, 0, 0, 0)})
    with refused("training records of silo 'e': no records; at least one to train on"):
        next(whole.simulated(job, shards))
