"""Small runs that any engine must end in the same bits."""

from dataclasses import replace

from support.jobs import make_data, make_job

from staddle.algorithms.engines.engine import Records
from staddle.algorithms.engines.simulation import Simulation
from staddle.algorithms.training.silo_round import state_to_bytes

SILOS = ("a", "b", "c", "d")
METHODS = ("fedavg", "fedaims", "fedsimsup", "fedssa", "pfedsim", "ppfl")
OPTIONS = {"ppfl": {"lam": 0}, "fedsimsup": {"tau_s": 1, "tau_theta": 2}}


def job_of(method, **training):
    model = {"name": "convnet-digits" if method == "fedaims" else "cnn-digits", "norm": "batch"}
    fields = {"silos": list(SILOS), "participation": 0.75, "rounds": 2, "training": training}
    return make_job(method, OPTIONS.get(method), model, **fields)


def data(n, seed):
    return replace(make_data(n, seed), ids=tuple(map(str, range(n))))


RECORDS = {
    silo: Records(data(19 + 7 * i, i), data(6 + i, 100 + i), data(5, 200 + i) if i % 2 else None)
    for i, silo in enumerate(SILOS)
}


def run(job, engine):
    """All that a simulation gives, tensors as bytes."""
    simulation, told = Simulation(job, engine), []
    rounds = []
    while simulation.round < job.length:
        one = simulation.step(lambda: told.append(1))
        rounds.append((one.reports, {name: value.item() for name, value in one.metrics.items()}))
    last = simulation.look(lambda: told.append(1))
    simulation.finish(last)
    seen = {
        silo: (look.test, look.validation, state_to_bytes(look.delivered))
        for silo, look in last.items()
    }
    states = {silo: state_to_bytes(state) for silo, state in simulation.states.items()}
    kept = {name: value.tolist() for name, value in simulation.coordinator.items()}
    return rounds, seen, states, kept, len(told)
