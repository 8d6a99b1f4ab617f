"""A file of weights that a job may begin with: the extractor of a small network."""

from safetensors.torch import save_file

from staddle.algorithms.models.build import ModelOptions, build

NETWORK = "cnn-digits"


def start_table(file="w.safetensors", **fields):
    """The [model] table of a job that begins with the file."""
    return {"name": NETWORK, "classes": 10, "weights": {"file": file}, **fields}


def extractor(seed=99):
    """Values that no job's streams give, under the names of a coordinator's results."""
    parts = build(ModelOptions(name=NETWORK, classes=10), seed)
    return {f"extractor.{n}": value.clone() for n, value in parts["extractor"].state_dict().items()}


def save_start(path, values=None):
    """Write the file, and its folder; returns its path."""
    path.parent.mkdir(exist_ok=True)
    save_file(extractor() if values is None else values, path)
    return path
