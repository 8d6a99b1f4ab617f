"""The open sum of a blind round: from masked words to one file, and from there into the fold.

::

    <round>.@sum.safetensors     tensors "part/name", and "part/@weight" where a part has weights; its header names the
                                 "survivors", as a JSON list; of what is compared by shares "part/gram", in their order

Of a part that silos alone read there is nothing in it: its words are kept for them as they are, under their pads.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from ..algorithms.exchange import Gift, Gram, Part, Read, Sum
from ..algorithms.job import Job
from ..algorithms.plain import PLAIN
from ..errors import LocalError
from ..proto.blind import round_frame
from ..security.blind_sum import folded
from ..security.directed_mix import is_row
from ..security.fixedpoint import COORDINATOR_READS
from ..security.gram_pieces import payload_bytes
from ..security.masked_sum import Accumulator, chunks
from ..security.open_sum import Claim, tag_of
from ..security.round_spec import RoundSpec, specify
from ..security.secagg_coordinator_events import Open
from ..security.shared_gram import Compared, dequantise, squares
from .kept_words import kept_words
from .store import JobStore, opened_sum, summed_words

SURVIVORS = "survivors"
GRAM = "gram"
NO_DIGEST = "0" * 64  # in place of digests where only sizes are asked for


@dataclass(frozen=True)
class Keeping:
    """Parts of a sum whose words are kept for silos, and the coordinator's signature over its specification."""

    parts: Sequence[str] = ()
    signature: bytes = b""


NOTHING_KEPT = Keeping()


def masked_bytes(job: Job, round_: int) -> int:
    """How long a silo's upload is in a round at most, masked words and shares of what is compared.

    LocalError for a job whose sums cannot be.
    """
    frame = round_frame(job, round_, "none", NO_DIGEST, NO_DIGEST)
    return payload_bytes(specify(frame, job.cohort(round_), 0))


def open_sum(
    store: JobStore, parts: Sequence[Part], spec: RoundSpec, opening: Open, keep: Keeping = NOTHING_KEPT
) -> bytes:
    """Add up the survivors' words, take the masks off, write what is left; SHA-256 of the file, which is durable.

    ``parts`` are those of the first groups; the others are rows for one silo each. The words that are kept, and those
    of all rows in which somebody is mixed, are durable before it. RefusedError (SUM) where canaries do not come out,
    OSError where the disk does not take it: then there is no file of the sum, and what there is of words is written
    again.
    """
    survivors = opening.survivors
    accumulator = Accumulator(spec)
    for silo in survivors:
        with store.masked(spec.round, silo).open("rb") as file:
            accumulator.add(_pieces(file, spec))
    sums = list(reversed(accumulator.open(opening.terms, survivors)[: len(parts)]))
    for index, own in enumerate(spec.groups):
        if own.name in keep.parts or (is_row(own) and any(own.counts)):
            claim = Claim(spec.payload(), keep.signature, survivors, tag_of(opening.tags, index, len(spec.groups)))
            numbers = (words for group, words in accumulator.numbers() if group == index)
            store.write_aside(summed_words(spec.round, own.name), kept_words(claim, numbers))
    del accumulator  # a sum's words go once it is folded
    tensors: dict[str, Tensor] = {}
    for part, group in zip(parts, spec.groups[: len(parts)], strict=True):
        opened = sums.pop()
        made = folded(part, group, opened) if group.reader == COORDINATOR_READS else {}
        tensors |= {f"{part.name}/{name}": tensor for name, tensor in made.items()}
    if spec.compared is not None:
        tensors[f"{spec.compared.name}/{GRAM}"] = _products(spec.compared, opening)
    store.write(opened_sum(spec.round), tensors, {SURVIVORS: json.dumps(list(survivors))})
    with store.sum_file(spec.round).open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _pieces(file: BufferedReader, spec: RoundSpec) -> Iterator[bytes]:
    """Masked words in the chunks in which they were made; what is too much comes last."""
    for chunk in chunks(spec):
        yield file.read(chunk.words * (spec.groups[chunk.group].ring // 8))
    if not spec.compared and (rest := file.read(1)):  # behind them are sealed shares of what is compared
        yield rest


def _products(compared: Compared, opening: Open) -> Tensor:
    """The inner products [groups, n, n] of the survivors, float64, in their order."""
    products = np.frombuffer(opening.products, "<i8").astype(np.int64).reshape(-1, compared.groups)
    return torch.from_numpy(squares(compared, dequantise(compared, products), len(opening.survivors)))


class OpenedSums:
    """The exchanges of a blind job: what ``collect`` gives was summed before the fold."""

    def __init__(self, path: Callable[[], Path]) -> None:
        """``path``: where the open sum of the round lies that is folded."""
        self._path = path

    def give(self, part: Part, gift: Gift) -> dict[str, Tensor]:
        """Silos mask what they give themselves."""
        raise LocalError(f"part {part.name!r} is given blind; this is a bug in Staddle")

    def collect(self, part: Part, members: Sequence[str], read: Read) -> dict[str, Tensor]:
        """A part's fold over exactly these members; LocalError for another set.

        That of a Sum, or of a Gram by shares, lies in the file; of a sum that silos alone read it is empty. Rotated
        vectors have the inner products of those that were not; of padded words there is nothing to see.
        """
        shared = isinstance(part.exchange, Gram) and part.exchange.shared
        if not shared and not isinstance(part.exchange, Sum):
            return PLAIN.collect(part, members, read)
        with safe_open(self._path(), framework="pt") as file:
            survivors = json.loads(file.metadata()[SURVIVORS])
            if set(survivors) != set(members):
                raise LocalError(f"{self._path()}: is the sum over {survivors}, not over {list(members)}")
            names, prefix = list(file.keys()), f"{part.name}/"
            found = {name.removeprefix(prefix): file.get_tensor(name) for name in names if name.startswith(prefix)}
        if shared:
            order = torch.tensor([survivors.index(silo) for silo in members])
            found[GRAM] = found[GRAM][:, order[:, None], order]
        return found

    def mix(self, part: Part, recipient: str, weights: Mapping[str, float], read: Read) -> None:
        """Nothing: only its recipient can open a row (rows.py)."""
