"""A private job of the recording gate's federation, and the budget that pays for it."""

import contextlib
import re

from support.recording_gate import SILO

from staddle.silo.admission import budget as budgets

SIGMA = "2"
TABLE = {"epsilon": 6.0, "delta": 1e-5, "sample_rate": 0.25, "sigma": SIGMA}


def private_job(made, name="private", **changes):
    """A job of three rounds at most that costs under its epsilon of 6."""
    table = {**TABLE, **changes.pop("privacy", {})}
    return made.job(name, **{"rounds": 3, "method": "fedavg", "privacy": table, **changes})


def dataset(epsilon=8.0, delta=1e-5, **more):
    """The table of a policy."""
    lines = [
        f"{key} = {value}" for key, value in {"epsilon": epsilon, "delta": delta, **more}.items()
    ]
    return "\n".join(["", "[dataset.data]", 'unit = "record"', *lines, ""])


def without_budget(made, *jobs):
    """What allows these jobs, as if none of them spent anything."""
    return made.parsed(undrafted(made.policy(*jobs).text))


def undrafted(text):
    """The text of a drafted policy without the budget that its jobs take."""
    return re.sub(r"\[dataset\.data\]\n(.+\n)*", "", text)


def policy_for(made, *jobs, **table):
    """What allows these jobs, with a budget."""
    return made.parsed(without_budget(made, *jobs).text + dataset(**table))


@contextlib.contextmanager
def opened(world, policy=None):
    """The budget beside the ledger of a world."""
    policy = policy or world.policy
    with budgets.opened(
        world.path.parent, policy.on(None), world.ledger, world.made.roster.federation, world.keys
    ) as budget:
        yield budget


def folder_of(world):
    """Of the budget."""
    return world.path.parent / "privacy" / "data"


def steps_of(budget, job):
    """Steps that a job has spent under noise of its own, by (sigma, q)."""
    known = budget._budget._jobs.get(job.digest)
    if known is None:
        return {}
    return {(sigma, q): steps for (sigma, q, shared), steps in known.steps.items() if not shared}


__all__ = ["SILO", "dataset", "folder_of", "opened", "policy_for", "private_job"]
__all__ += ["steps_of", "undrafted", "without_budget"]
