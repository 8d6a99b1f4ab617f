"""Accuracy against uploaded bytes, by method and codec: a table in Markdown, and a picture.

``python benchmarks/bandwidth.py OUT.svg [--rounds 30] [--seeds 3]``

The digits of scikit-learn, ten silos whose classes differ (Dirichlet, alpha 0.3). Accuracy is the
mean over silos of the model that a silo has after local training, on held-out records, and the mean
over seeds; bytes are those of all tensors that a silo uploads.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from math import log10
from pathlib import Path

from accuracy_chart import COLOURS

from staddle.algorithms.data.dataset import digits, split
from staddle.algorithms.engines.engine import Records, Serial
from staddle.algorithms.engines.simulation import Simulation
from staddle.algorithms.job.job import Job, JobFile
from staddle.algorithms.partition.draw import dirichlet

SILOS = tuple(f"silo-{number}" for number in range(10))
METHODS = ("fedavg", "fedper", "pfedsim")
CODECS = {
    "none": None,
    "bfloat16": {"codec": "bfloat16"},
    "int8": {"codec": "int8"},
    "top-k, 5 %": {"codec": "top-k", "keep": 0.05},
    "top-k, 1 %": {"codec": "top-k", "keep": 0.01},
}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 340, 60, 560, 30, 280  # of a method's panel
LEAST, MOST = 4.0, 7.0  # powers of ten of bytes


@dataclass(frozen=True)
class Point:
    """After a round: bytes that a silo uploaded so far, and the mean accuracy."""

    bytes: float
    accuracy: float


def document(method: str, codec: str, seed: int, rounds: int) -> dict[str, object]:
    """The job, as its file would have it."""
    table = CODECS[codec]
    return {
        "version": 1,
        "name": "bandwidth",
        "seed": seed,
        "rounds": rounds,
        "silos": SILOS,
        "method": {"name": method},
        "model": {"name": "ppfl-mlp", "input": [1, 8, 8], "classes": 10},
        "training": {"epochs": 2, "lr": 0.1},
        **({} if table is None else {"transport": table}),
    }


def run(method: str, codec: str, seed: int, rounds: int) -> list[Point]:
    """A point a round; bytes are those of one silo."""
    data = digits()
    parts = dirichlet(data.y.numpy(), len(SILOS), 0.3, seed, minimum=20)
    sides = (split(data.take(part), bytes([seed] * 32), 0.25) for part in parts)
    records = {silo: Records(*own) for silo, own in zip(SILOS, sides, strict=True)}
    file = JobFile.model_validate(document(method, codec, seed, rounds))
    job = Job.from_file(file, "bandwidth.py")
    simulation, up, found = Simulation(job, Serial(job, records)), 0, []
    while simulation.round < job.length:
        done = simulation.step()
        up += done.bytes_up
        scores = [report.trained.score for report in done.reports.values()]
        found.append(Point(up / len(SILOS), sum(scores) / len(scores)))
    return found


def mean(runs: list[list[Point]]) -> list[Point]:
    """Round by round over the seeds."""
    return [
        Point(rounds[0].bytes, sum(point.accuracy for point in rounds) / len(rounds))
        for rounds in zip(*runs, strict=True)
    ]


def table(curves: dict[tuple[str, str], list[Point]]) -> Iterator[str]:
    """Bytes of all rounds, the accuracy after the last, and what it took to get near."""
    heads = ("method", "codec", "uploaded per silo", "accuracy after the last round")
    yield f"| {' | '.join(heads)} | uploaded up to 90 % |"
    yield "|---" * 5 + "|"
    for (method, codec), points in curves.items():
        near = next((f"{p.bytes / 1e6:.2f} MB" for p in points if p.accuracy >= 0.9), "never")
        last = points[-1]
        size, percent = f"{last.bytes / 1e6:.2f} MB", f"{last.accuracy * 100:.1f} %"
        yield f"| {method} | {codec} | {size} | {percent} | {near} |"


def chart(curves: dict[tuple[str, str], list[Point]]) -> str:
    """A panel a method, lines by codec; bytes on a scale of logarithms."""
    whole = HEIGHT * len(METHODS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {whole}">',
        '<g font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{whole}" fill="#ffffff"/>',
    ]
    for number, method in enumerate(METHODS):
        own = {codec: points for (name, codec), points in curves.items() if name == method}
        parts += [f'<g transform="translate(0 {HEIGHT * number})">', *panel(method, own), "</g>"]
    return "\n".join([*parts, "</g>", "</svg>"]) + "\n"


def panel(method: str, curves: dict[str, list[Point]]) -> Iterator[str]:
    """The lines of one method."""
    yield f'<text x="{RIGHT + 20}" y="{TOP + 4}" font-weight="bold">{method}</text>'
    for percent in range(20, 101, 20):
        y = height(percent / 100)
        yield f'<line x1="{LEFT}" y1="{y}" x2="{RIGHT}" y2="{y}" stroke="#dddddd"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{percent} %</text>'
    for power, name in ((4, "10 kB"), (5, "100 kB"), (6, "1 MB"), (7, "10 MB")):
        x = place(10**power)
        yield f'<line x1="{x}" y1="{TOP}" x2="{x}" y2="{BOTTOM}" stroke="#dddddd"/>'
        yield f'<text x="{x}" y="{BOTTOM + 20}" text-anchor="middle">{name}</text>'
    for number, (codec, points) in enumerate(curves.items()):
        colour, y = COLOURS[number], TOP + 30 + 22 * number
        path = " ".join(f"{place(point.bytes)},{height(point.accuracy)}" for point in points)
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
        yield f'<line x1="{RIGHT + 20}" y1="{y}" x2="{RIGHT + 50}" y2="{y}" stroke="{colour}"/>'
        yield f'<text x="{RIGHT + 58}" y="{y + 4}">{codec}</text>'
    yield f'<text x="{LEFT}" y="{HEIGHT - 18}">accuracy by bytes that a silo has uploaded</text>'


def height(accuracy: float) -> float:
    """Where an accuracy stands."""
    return round(BOTTOM - accuracy * (BOTTOM - TOP), 1)


def place(size: float) -> float:
    """Where a number of bytes stands."""
    share = (log10(max(size, 10**LEAST)) - LEAST) / (MOST - LEAST)
    return round(LEFT + share * (RIGHT - LEFT), 1)


def main() -> None:
    """Parse the arguments, simulate, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    curves = {}
    for method in METHODS:
        for codec in CODECS:
            runs = [run(method, codec, seed, options.rounds) for seed in range(options.seeds)]
            curves[method, codec] = mean(runs)
    options.out.write_text(chart(curves))
    print("\n".join(table(curves)))  # noqa: T201 its answer


if __name__ == "__main__":
    main()
