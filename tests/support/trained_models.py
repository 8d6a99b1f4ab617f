"""Folders of models whose values are the initial ones: quick, and as good as trained ones here."""

from staddle.algorithms.job.job import Job, JobFile
from staddle.algorithms.method import initial_state
from staddle.bundle.description import Origin
from staddle.bundle.making import ModelMaker

FEATURES = [
    {"name": "age", "unit": "years", "least": 18, "most": 100, "center": 50.0, "scale": 12.5},
    {"name": "sex", "categories": ["f", "m"], "missing": "f"},
    {"name": "chol", "least": 100, "most": 600, "center": 250.0, "scale": 50.0, "missing": 240.0},
]
CSV = {
    "kind": "csv",
    "features": ["age", "sex", "chol"],
    "categories": {"sex": ["f", "m"]},
    "label": "ill",
    "classes": ["no", "yes"],
    "id": "patient",
}
HEADER = "patient,age,sex,chol,ill\n"


def table_job(**fields):
    """A job on three features under a contract; ``fields`` replace its own."""
    document = {
        "version": 1,
        "name": "heart",
        "seed": 7,
        "rounds": 2,
        "silos": ["a", "b", "c"],
        "method": {"name": "fedper"},
        "model": {"name": "mlp", "classes": 2, "input": [1, 1, 4], "class_names": ["no", "yes"]},
        "training": {"epochs": 1, "batch_size": 8, "lr": 0.1},
        "features": FEATURES,
        **fields,
    }
    return Job.from_file(JobFile.model_validate(document), "job.toml")


def table_rows(count, first=0):
    """Lines of a CSV file of the contract."""
    ages = (20 + (37 * number) % 60 for number in range(first, first + count))
    return [
        f"p{first + place},{age},{'fm'[age % 2]},{150 + 5 * age},{'no' if age < 50 else 'yes'}\n"
        for place, age in enumerate(ages)
    ]


def made(path, job, data, contract, keys=None, state=None, **origin):
    """The folder of a model of silo a, measured on all of ``data``."""
    known = {"kind": "silo" if keys else "simulation", "name": keys.entry.id if keys else "a"}
    maker = ModelMaker(job, Origin(**{**known, **origin}), contract, b"key", keys)
    maker.write(path, state or initial_state(job.method(), job.silos[0]), data, data)
    return path
