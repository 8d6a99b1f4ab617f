"""Records with several inputs, those of ``other_tasks.Wards``, and the model that takes them."""

from staddle.algorithms.data.sources.installed import Installed

INPUTS = {
    "image": {"shape": [1, 8, 8]},
    "labs": {"shape": [3]},
    "note": {"shape": [5], "tokens": 20},
}
WARD = {"name": "ward", "classes": 4, "head": "fc", "inputs": INPUTS}


def wards(count, seed=0, **fields):
    options = {"count": count, "seed": seed}
    return Installed(kind="package", name="wards", options=options, **fields).read()


def shards(job, n=40):
    """``n`` records at the first silo to train on, five more at each next."""
    return {silo: (wards(n + 5 * i, i), wards(12, 100 + i)) for i, silo in enumerate(job.silos)}
