"""Jobs and records for what the simulator keeps, and the order in which a run is run."""

from support import jobs
from support.jobs import make_data

from staddle.algorithms.engines.engine import Records, Serial
from staddle.algorithms.engines.simulation import Simulation
from staddle.simulator.experiment.plan import Population, Run, Schedule
from staddle.simulator.run.folder import opened
from staddle.simulator.run.history import of_look, of_round
from staddle.simulator.run.work_file import work_line

SILOS = ("d", "b", "a", "c")  # job order is not the alphabet's
OPTIONS = {
    "fedala": {"start_epochs": 1},
    "fedavg-ft": {"tuning_epochs": 1},
    "fedbabu": {"tuning_epochs": 1},
    "fedrep": {"head_epochs": 1},
    "fedsimsup": {"tau_s": 1, "tau_theta": 1},
    "ppfl": {"lam": 0},
}
SMALL = {"name": "ppfl-mlp", "input": [1, 8, 8]}
MODELS = {"fedaims": {"name": "convnet-digits"}, "fedbn": {"norm": "batch"}}
SCHEDULE = Schedule(2, 2)


def make_job(method="fedavg", seed=7, **fields):
    share = 0.75 if method == "fedsimsup" else 0.5
    fields = {"seed": seed, "silos": SILOS, "participation": share, **fields}
    return jobs.make_job(method, OPTIONS.get(method), MODELS.get(method, SMALL), **fields)


def make_records(silos=SILOS, *, validation=True):
    found = {}
    for i, silo in enumerate(silos):
        kept = make_data(7, 200 + i) if validation else None
        found[silo] = Records(make_data(16 + 4 * i, i), make_data(9, 100 + i), kept)
    return found


def make_population(digest="5f" * 32, **kinds):
    return Population(make_records(**kinds), 3, None, digest)


def make_run(method="fedavg", seed=7, label=None, **fields):
    return Run(label or method, seed, make_job(method, seed, **fields))


def conduct(out, run, population, until=None, schedule=SCHEDULE):
    """Run it, or go on with it, to its end or to a round; the run's folder."""
    job = run.job
    with opened(out, run, population, schedule) as folder:
        if folder.finished:
            return folder
        simulation = Simulation(job, Serial(job, population.records), begun=folder.begun())
        rounds = job.rounds_before(simulation.round)
        looks = not rounds % schedule.look_every and 0 < rounds < job.rounds
        if looks and not folder.has_look(rounds):
            folder.record(of_look(rounds, simulation.look()))
        while simulation.round < job.length:
            if simulation.round == until:
                return folder
            step = simulation.step()
            rounds = job.rounds_before(simulation.round)
            line = work_line(simulation.round - 1, rounds, step, dict.fromkeys(step.reports))
            folder.record_work(line, 1.0)
            if rounds > job.rounds_before(simulation.round - 1):
                folder.record(of_round(rounds, step.reports))
                if not rounds % schedule.look_every and simulation.round < job.length:
                    folder.record(of_look(rounds, simulation.look()))
            if not simulation.round % schedule.snapshot_every or simulation.round == job.length:
                folder.save_snapshot(simulation.snapshot())
        last = simulation.look()
        simulation.finish(last)
        seen = {silo: look.test for silo, look in last.items()}
        folder.keep_models(simulation.states.items())
        folder.finish(of_look(job.rounds, last), simulation.coordinator, seen)
        return folder


def results(folder):
    """What a run gave, by file: all that two runs of the same must agree in, so no times."""
    found = {
        path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()
    }
    return {
        name: path.read_bytes()
        for name, path in found.items()
        if not name.startswith("snapshot") and path.name != "seconds.csv"
    }
