"""Measures the cost of blind inner products.

``python benchmarks/shared_gram.py [--silos 4 10] [--widths 640] [--repeats 5]``

Three ways to give a coordinator the inner products of n silos' unit vectors and nothing else, in
one process without a network. CPU seconds of all threads, least of the repeats:

- *rotated*: a secret rotation under a key that all silos share, float32
  (security/blind/rotation.py);
- *triples*: for each pair a third silo deals a multiplication triple (Beaver, "Efficient multiparty
  protocols using circuit randomization", 1991), here of inner products (Du, Atallah,
  "Privacy-preserving cooperative statistical analysis", 2001): i sends x + a to j, j sends y + b to
  i, and ⟨x, y⟩ = ⟨x + a, y⟩ + r_j - ⟨a, y + b⟩ + r_i with r_i + r_j = ⟨a, b⟩. It is a toy of this
  benchmark: a and b come from seeds, and nothing is sealed;
- *shared*: Shamir shares of each vector, multiplied by all silos (security/secagg/shared_gram.py),
  sealed from silo to silo.

Bytes are those that a silo sends, by pair that it is in; error is the largest over all pairs.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

import numpy as np

from staddle.security.arithmetic.field import add, from_signed, product, to_signed, uniform
from staddle.security.arithmetic.fixedpoint import Reals, Words
from staddle.security.arithmetic.masks import Keystream
from staddle.security.blind.rotation import rotate
from staddle.security.identity.pairwise_keys import TAG_BYTES, seal, unseal
from staddle.security.secagg import shared_gram as g

CTX = bytes(32)
# products [n, n], CPU of a silo, of the coordinator, bytes by silo and pair
Result = tuple[Reals, float, float, float]
STANDS = {
    "rotated": "the coordinator alone",
    "triples": "the coordinator with any silo but the one that deals",
    "shared": "the coordinator with c silos, 3c < n",
}


def unit(silos: int, width: int, seed: int) -> Reals:
    """Unit vectors [silos, width], float32 as methods give them, in float64."""
    drawn = np.random.default_rng(seed).standard_normal((silos, width)).astype(np.float32)
    made: Reals = (
        (drawn / np.linalg.norm(drawn, axis=1, keepdims=True)).astype(np.float32).astype(np.float64)
    )
    return made


def stream(*names: int) -> Keystream:
    """A stream of its own."""
    return Keystream(b"".join(name.to_bytes(8) for name in names).ljust(32, b"\0"), 0)


def seconds(work: Callable[[], object]) -> float:
    """CPU seconds of some work."""
    began = time.process_time()
    work()
    return time.process_time() - began


def by_rotation(vectors: Reals, _: int) -> Result:
    """Under a key that all share."""
    silos, width = vectors.shape
    turned: list[Reals] = []
    spent = seconds(
        lambda: turned.extend(
            rotate(each[None], b"key".ljust(32)).astype(np.float32) for each in vectors
        )
    )
    sent = np.concatenate(turned).astype(np.float64)
    return sent @ sent.T, spent / silos, seconds(lambda: sent @ sent.T), 4 * width / (silos - 1)


def by_triples(vectors: Reals, _: int) -> Result:
    """A third silo deals a triple for each pair."""
    silos, width = vectors.shape
    own = g.Compared(name="v", groups=1, width=width, clip_exponent=1)
    q = [from_signed(g.quantise(own, each[None])) for each in vectors]  # n times [1, width]
    found = np.zeros((silos, silos))

    def pairs() -> Iterator[tuple[int, int, Words]]:
        for i, j in combinations(range(silos), 2):
            a, b, r = (uniform(stream(i, j, at), (1, n)) for at, n in enumerate((width, width, 1)))
            dealt = add(product(a, b.T), _negative(r))
            ours = add(product(_negative(a), add(q[j], b).T), r)
            theirs = add(product(add(q[i], a), q[j].T), dealt)
            yield i, j, add(ours, theirs)

    def run() -> None:
        for i, j, total in pairs():
            found[i, j] = found[j, i] = g.dequantise(own, to_signed(total))[0, 0]

    spent = seconds(run)
    # each silo would tell its own
    np.fill_diagonal(found, [float(each @ each) for each in vectors])
    return found, spent / silos, 0.0, 8 * width + 16


def _negative(numbers: Words) -> Words:
    return from_signed(-to_signed(numbers))


def by_shares(vectors: Reals, colluders: int) -> Result:
    """Shares that all silos multiply."""
    silos, width = vectors.shape
    own = g.Compared(name="v", groups=1, width=width, clip_exponent=1)
    numbers = range(1, silos + 1)
    sealed: dict[int, list[bytes]] = {}
    key = bytes(32)  # agreeing on keys is that of the secure sum

    def deal() -> None:
        for dealer in numbers:
            shares = g.deal(
                own, g.quantise(own, vectors[dealer - 1 : dealer]), silos, colluders, stream(dealer)
            )
            sealed[dealer] = [seal(key, CTX, "i", "k", g.dumped(share)) for share in shares]

    told: dict[int, Words] = {}

    def multiply() -> None:
        for holder in numbers:
            opened = {i: unseal(key, CTX, "i", "k", sealed[i][holder - 1]) for i in numbers}
            shares = {i: g.loaded(own, silos, data) for i, data in opened.items()}
            told[holder] = g.multiply(
                {i: share for i, share in shares.items() if share is not None}
            )

    spent = seconds(deal) + seconds(multiply)
    least = {holder: told[holder] for holder in list(told)[: g.needed(colluders)]}
    found = g.opened(least, colluders)
    if found is None:
        raise SystemExit("the shares lie on no polynomial; this is a bug in Staddle")
    opening = seconds(lambda: g.opened(told, colluders))
    size = 8 * own.numbers(silos) + TAG_BYTES + 8 * own.products(silos) / (silos - 1)
    return g.squares(own, g.dequantise(own, found.products), silos)[0], spent / silos, opening, size


WAYS = {"rotated": by_rotation, "triples": by_triples, "shared": by_shares}


def measure(silos: int, width: int, repeats: int) -> None:
    """Print one table."""
    colluders, vectors = (silos - 1) // 3, unit(silos, width, seed=width)
    exact = vectors @ vectors.T
    _say(f"\n{silos} silos, vectors of {width:,}, c = {colluders}\n")
    _say("| | bytes by silo and pair | silo: CPU | coordinator: CPU | largest error | withstands |")
    _say("|---|---|---|---|---|---|")
    for name, way in WAYS.items():
        results = [way(vectors, colluders) for _ in range(repeats)]
        silo, coordinator = (min(result[at] for result in results) for at in (1, 2))
        off = float(np.abs(results[0][0] - exact).max())
        size = results[0][3]
        _say(
            f"| {name} | {size:,.0f} | {1e3 * silo:.1f} ms | {1e3 * coordinator:.1f} ms | {off:.1e}"
            f" | {STANDS[name]} |"
        )


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, and print a table for each size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--silos", type=int, nargs="+", default=[4, 10, 30])
    parser.add_argument("--widths", type=int, nargs="+", default=[640, 5130])
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args(arguments)
    for silos in asked.silos:
        for width in asked.widths:
            measure(silos, width, asked.repeats)


if __name__ == "__main__":
    main()
