"""Measures the cost of a secure sum.

``python benchmarks/secure_sum.py [--silos 4 10 30] [--repeats 5] [--large]``

For models of 60,000 and 10 million float32 parameters, with ``--large`` 100 million too, in one
process without a network, CPU seconds of all its threads, least and median of the repeats:

- *silo*: setup (keys and shares: the specification's check, both key pairs, dealing, opening what
  others dealt); mask (from the model's tensors to the SHA-256 of the masked chunks: clip, weight,
  quantise, mask); unmask (the survivors' headers and signatures checked, signing, revealing). Masks
  are also made with private weights, in both rings, and with linear tags; these are checked in the
  open sum.
- *coordinator*: its state machine's checks of all messages; fold (n uploads added up); open (shares
  joined, the masks that are left taken off, the mean). Then both again where one silo is lost after
  it dealt.
- bytes that one silo sends, protobuf messages included; and by how much the resident set grows at
  its peak while a silo masks, in a fresh process that holds the model already. Each chunk is hashed
  and let go, as one that was sent.

Flower's SecAgg+ is measured beside it, repeat by repeat in turn, where it is installed
(flower_sum.py). It wants an older protobuf than ours, so in an environment of its own, beside an
installed Staddle: ``pip install --no-deps flwr && pip install httpx pycryptodome iterators``.
"""

import argparse
import importlib.util
import multiprocessing
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from typing import Any

import numpy as np
from clock import Clock, extra_memory
from our_sum import MODES, WEIGHT, Members, OurRound, model, our_memory

from staddle.security.secagg.spec import threshold

SIZES, LARGE = (60_000, 10_000_000), 100_000_000
ANCHOR = (10_000_000, 10)
FLOWER = importlib.util.find_spec("flwr") is not None
ROWS = {  # what is printed, and the clock's name for it
    "silo: setup": "setup",
    "silo: mask": "mask",
    "silo: of it SHA-256": "SHA-256",
    **{f"silo: mask, {mode}": f"mask, {mode}" for mode in MODES if mode != "public"},
    "silo: mask, tagged": "mask, tagged",
    "silo: unmask": "unmask",
    "silo: check of the result's tag": "check of the tag",
    "coordinator: messages": "messages",
    "coordinator: fold": "fold",
    "coordinator: open": "open",
    "coordinator: fold, one silo lost": "fold after a dropout",
    "coordinator: open, one silo lost": "open after a dropout",
}


def arrays(elements: int) -> list[Any]:
    """The model for Flower."""
    return [tensor.numpy() for name, tensor in model(elements).items() if name != WEIGHT]


def flower_memory(elements: int, silos: int) -> int:
    """Bytes by which a process grows while Flower masks in it."""
    from flower_sum import Silo  # noqa: PLC0415 only where Flower is installed

    Silo([np.zeros(1000, np.float32)], silos, threshold(silos), Clock()).mask()
    party = Silo(arrays(elements), silos, threshold(silos), Clock())
    return extra_memory(party.mask)


def alone(work: Callable[..., int], *args: object) -> int:
    """A result from a fresh process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other:
        return other.submit(work, *args).result()


def measure(elements: int, silos: int, repeats: int) -> tuple[float, float, float, float]:
    """Print one table; return Flower's cost at a silo as a multiple of ours.

    The four are CPU (ours without SHA-256, and with it), bytes, memory.
    """
    ours, theirs, sent = [], [], [0, 0]
    members, tensors = Members(silos), model(elements)
    for _ in range(repeats):
        ours.append(Clock())
        sent[0] = OurRound(members, elements, silos, ours[-1]).run(tensors)
        if FLOWER:
            from flower_sum import flower_round  # noqa: PLC0415

            theirs.append(Clock())
            sent[1] = flower_round(arrays(elements), silos, threshold(silos), theirs[-1])
    grown = [
        alone(our_memory, elements, silos, "public"),
        alone(flower_memory, elements, silos) if FLOWER else 0,
    ]
    show(f"{elements:,} parameters, {silos} silos; CPU ms of {repeats}", "ours", "Flower", "ratio")
    for title, name in ROWS.items():
        mine = [clock.spent[name] * 1e3 for clock in ours]
        other = [clock.spent[name] * 1e3 for clock in theirs if name in clock.spent]
        ratio = f"{min(other) / min(mine):.1f}" if other else ""
        show(f"  {title}", pair(mine), pair(other), ratio)
    show("  silo: MB sent", *(f"{size / 1e6:.3f}" for size in sent), f"{sent[1] / sent[0]:.2f}")
    show(
        "  silo: MB more while it masks",
        *(f"{size / 1e6:.1f}" for size in grown),
        f"{grown[1] / grown[0]:.1f}",
    )
    hashed = min(clock.spent["mask"] for clock in ours)
    masks = min(clock.spent["mask"] - clock.spent["SHA-256"] for clock in ours)
    flowers = min((clock.spent["mask"] for clock in theirs), default=0.0)
    return flowers / masks, flowers / hashed, sent[1] / sent[0], grown[1] / grown[0]


def pair(values: list[float]) -> str:
    """Least and median."""
    return f"{min(values):.2f} / {statistics.median(values):.2f}" if values else "-"


def show(title: str, ours: str, theirs: str, ratio: str) -> None:
    """A line of the table."""
    print(f"{title:<50}{ours:>20}{theirs:>20}{ratio:>8}", flush=True)  # noqa: T201 its output is its purpose


def main() -> None:
    """Parse the arguments, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--silos", type=int, nargs="+", default=[4, 10, 30])
    parser.add_argument(
        "--repeats", type=int, default=5, help="of 10 million; small models three times as many"
    )
    parser.add_argument(
        "--large", action="store_true", help="100 million parameters too, once each"
    )
    options = parser.parse_args()
    flower = (
        f"Flower {version('flwr')}"
        if FLOWER
        else "Flower is not installed and is skipped; how to: --help"
    )
    print(f"{flower}; numpy {np.__version__}, cryptography {version('cryptography')}")  # noqa: T201 its output
    for elements in (*SIZES, LARGE) if options.large else SIZES:
        repeats = {SIZES[0]: 3 * options.repeats, LARGE: 1}.get(elements, options.repeats)
        for silos in options.silos:
            cpu, hashed, sent, grown = measure(elements, silos, repeats)
            if FLOWER and (elements, silos) == ANCHOR:
                print(  # noqa: T201 its output
                    f"masks: {cpu:.1f} times less CPU than Flower (aim 10; {hashed:.1f} with the"
                    f" SHA-256 of what is sent, of which Flower has none), {sent:.2f} times fewer"
                    f" bytes (aim 2), {grown:.1f} times less memory (aim 20)"
                )


if __name__ == "__main__":
    main()
