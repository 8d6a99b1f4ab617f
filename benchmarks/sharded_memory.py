"""Peak memory of the processes that compute a round of a transformer with adapters.

Each line: how many processes, whether they shard the weights that stand still, seconds, and the
peak of each process: memory of its own (RssAnon), without files that it maps.

    python benchmarks/sharded_memory.py --width 1024 --blocks 6
"""

import argparse
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from staddle.algorithms.data.dataset import Dataset
from staddle.algorithms.job.job import Job, JobFile
from staddle.algorithms.method import initial_state
from staddle.silo.training.launched import PROGRAM, TORCHRUN, TrainerProcesses
from staddle.silo.training.order import DeviceTable, OrderedRecords
from staddle.silo.training.trainer import SiloRound

TOKENS, LENGTH = 8192, 16


def asked(width: int, blocks: int) -> SiloRound:
    """A round of 16 records, in two steps."""
    options = {"tokens": TOKENS, "width": width, "heads": 8, "hidden": 4 * width, "blocks": blocks}
    model = {"name": "text-transformer", "norm": "group", "classes": 2, "input": [LENGTH]}
    document = {
        "version": 1,
        "name": "sharded",
        "seed": 7,
        "rounds": 1,
        "silos": ["a", "b"],
        "method": {"name": "fedavg"},
        "model": {**model, "options": options, "lora": {"rank": 8}},
        "training": {"epochs": 1, "batch_size": 8, "lr": 0.01},
    }
    job = Job.from_file(JobFile.model_validate(document), "job.toml").for_federation()
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(1, TOKENS, (24, LENGTH), generator=draw).float()
    y = torch.randint(0, 2, (24,), generator=draw)
    of = OrderedRecords(job, Dataset(x[:16], y[:16]), Dataset(x[16:], y[16:]))
    return SiloRound(of, "a", 0, initial_state(job.method(), "a"), {})


def measured(round_: SiloRound, processes: int, *, shard: bool) -> str:
    """Compute the round; the line of it."""
    peaks: dict[int, int] = {}
    command = (*map(str, TORCHRUN), f"--nproc-per-node={processes}", *PROGRAM)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as pool:
        place = TrainerProcesses(command, Path(folder), DeviceTable(shard=shard), {}, "data")
        began = time.monotonic()
        running = pool.submit(place.outcome, round_)
        while wait([running], timeout=0.01).not_done:
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    if rank := process.environ().get("RANK"):
                        memory = process.memory_info()
                        own = memory.rss - memory.shared
                        peaks[int(rank)] = max(peaks.get(int(rank), 0), own)
        running.result()
    shown = ", ".join(f"{peak / 1e6:.0f} MB" for _, peak in sorted(peaks.items()))
    return f"{processes}, {shard=}: {time.monotonic() - began:.0f} s, {shown}"


def main() -> None:
    """Measure three launches."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=6)
    given = parser.parse_args()
    round_ = asked(given.width, given.blocks)
    sizes = [tensor.nbytes for tensor in round_.state.flat.values()]
    sys.stdout.write(f"model {sum(sizes) / 1e6:.0f} MB, largest weight {max(sizes) / 1e6:.0f} MB\n")
    for processes, shard in ((1, False), (2, False), (2, True)):
        sys.stdout.write(f"{measured(round_, processes, shard=shard)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
