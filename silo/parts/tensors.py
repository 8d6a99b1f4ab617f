"""A round's uploads and deliveries as declared tensors: pure functions that the gate calls."""

from collections.abc import Mapping, Sequence
from math import sqrt

import numpy as np
import torch
from torch import Tensor

from ...algorithms.exchange.codec import INDICES, SCALE, Decoded
from ...algorithms.exchange.parts import (
    WEIGHT,
    Item,
    Kind,
    Mix,
    Part,
    all_finite,
    delivered_items,
)
from ...algorithms.job.job import Job
from ...algorithms.tasks.counting import METRICS, TESTED, Counting
from ...algorithms.tasks.value_counting import UNIT
from ...errors import LocalError, RefusedError
from ...files.documents import MAX_SAFE_INTEGER
from ...proto.tensor_pb2 import Manifest
from ...proto.wire import LITTLE_ENDIAN, check_manifest, tensor_from
from ...security.arithmetic.fixedpoint import Flat, Reals
from ...security.blind.rotation import check_kind, check_vectors
from .declared import RecordCount


class Buffer:
    """The bytes of a delivery, in memory that is allocated once.

    Call ``reserve`` before ``write``.
    """

    def __init__(self) -> None:
        self.bytes = memoryview(b"")
        self._filled = 0

    def reserve(self, size: int) -> None:
        """Allocate exactly this many bytes, without clearing them."""
        self.bytes = np.empty(size, np.uint8).data  # not filled with zeros first

    def write(self, chunk: memoryview) -> None:
        """Append bytes; no more may come than there is room for."""
        end = self._filled + len(chunk)
        self.bytes[self._filled : end] = chunk
        self._filled = end


def vectors_of(part: Part, value: Tensor) -> Reals:
    """The vectors of a Gram part's one tensor, [rows, d] float64.

    LocalError where their Gram would disclose them.
    """
    # Inner products of histograms disclose them up to the order of classes (security rule 2).
    check_kind(part.name, part.kind)
    vectors: Reals = value.detach().double().reshape(len(value), -1).numpy()
    check_vectors(part.name, vectors)
    return vectors


def of_parts(
    items: tuple[Item, ...],
    tensors: Mapping[str, Mapping[str, Tensor]],
    parts: Sequence[Part] | None,
) -> tuple[tuple[Item, ...], Mapping[str, Mapping[str, Tensor]]]:
    """The items of these parts, and all tensors but those of the round's other parts.

    Tensors of parts that the round does not have stay, so that ``exactly`` rejects them. None
    stands for all parts of the round.
    """
    if parts is None:
        return items, tensors
    own = {part.name for part in parts}
    wanted = tuple(item for item in items if item.part in own)

    # The other parts of the round leave in messages of their own.
    others = {item.part for item in items} - own
    return wanted, {name: tensors[name] for name in tensors if name not in others}


def exactly(items: tuple[Item, ...], tensors: Mapping[str, Mapping[str, Tensor]]) -> list[Tensor]:
    """Copies of the values in wire order, which nobody else holds.

    LocalError for anything missing, unknown or other. Tensors of a subclass are rejected: they may
    compute their values again each time they are read.
    """
    values: dict[tuple[str, str], Tensor] = {}
    for part, own in tensors.items():
        values.update(((part, name), value) for name, value in own.items())

    # Names in no schema are refused, not dropped: the method meant to send something else.
    declared = [(item.part, item.spec.name) for item in items]
    unknown = values.keys() - set(declared)
    if unknown:
        # A method may use names of any type, which need not be comparable.
        part, name = min(unknown, key=repr)
        raise LocalError(
            f"tensor {_shown(part)}/{_shown(name)} is not in the job's schema; the message is"
            " refused"
        )
    return list(map(_own, items, map(values.get, declared)))


def _own(item: Item, value: Tensor | None) -> Tensor:
    """A copy, row-major, on the CPU.

    It has the elements that a view shows and nothing of what lies behind it.
    """
    spec = item.spec
    found = _found(value)
    if value is None or found != f"{spec.dtype} {list(spec.shape)}":
        raise LocalError(
            f"tensor {item.part}/{spec.name} is {found}, the job's schema says {spec.dtype}"
            f" {list(spec.shape)}; the message is refused"
        )
    try:
        # With gradients, the copy would keep the method's autograd graph alive.
        with torch.no_grad():
            # Memory of NumPy's, which asks for large pages: a fifth of the time.
            own = np.empty(spec.shape, LITTLE_ENDIAN[spec.dtype][1:])  # in this machine's order
            return torch.from_numpy(own).view(value.dtype).copy_(value)
    except RuntimeError as error:  # such as a tensor of vmap that outlived it
        raise LocalError(
            f"tensor {item.part}/{spec.name} cannot be read: {error}; the message is refused"
        ) from error


def _found(value: object) -> str:
    if value is None:
        return "missing"
    # Not ``isinstance``: a subclass could return different values each time.
    if type(value) is not Tensor:
        return f"no plain tensor but {type(value).__name__}"
    found = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    # Sparse and meta tensors have no plain values, so this text must not match any schema.
    if value.layout is not torch.strided or value.is_meta:
        found += f" {value.layout} on {value.device}"
    return found


def _shown(name: object) -> str:
    """A name that is in no schema, as an error may show it: one short line."""
    text = str(name)[:64]
    return text if text.isascii() and text.isprintable() else ascii(text)


def miscounted(
    items: Sequence[Item],
    values: Sequence[Tensor],
    records: RecordCount | None,
    counting: Counting | None,
) -> str:
    """The reason against a value that counts records which this silo lacks; empty for none.

    A weight and an integer of kind COUNTS are whole numbers of training records; the metrics are
    what evaluation counts of the test records. In a private job, which has no ``records``, they are
    noisy: whole numbers that canonical JSON can hold. ``counting`` is None for the task of an
    installed package, whose code has no say here: its sums are of shares of records.
    """
    known, noisy = records, ""
    if known is None:
        known = RecordCount(MAX_SAFE_INTEGER, MAX_SAFE_INTEGER)
        noisy = " at most: the job is private, and its counts are noisy"

    # A count of more records than there are would buy a larger say in the average.
    metrics: dict[tuple[str, str], Tensor] = {}
    for item, value in zip(items, values, strict=True):
        if _counts_training(item):
            if not _whole_up_to(known.train, value):
                return (
                    f"{item.part}/{item.spec.name} is not a whole number from 0 to {known.train},"
                    f" the training records of this silo{noisy}"
                )
        # Noisy numbers that may be below zero are bound by their specs alone, at both ends.
        elif item.kind is Kind.METRIC and item.spec.bounds[0] >= 0:
            metrics[item.part, item.spec.name] = value
    return _miscounted_tests(metrics, known.test, noisy, counting)


def _counts_training(item: Item) -> bool:
    counts = item.kind is Kind.COUNTS and item.spec.dtype == "int64"
    return counts or item.spec.name == WEIGHT


def _whole_up_to(most: int, value: Tensor) -> bool:
    # without a sign: -0.0 equals 0, and its bit could say something that no count does
    whole = value.double()
    return bool(((whole == whole.floor()) & ~torch.signbit(whole) & (whole <= most)).all())


def _miscounted_tests(
    metrics: Mapping[tuple[str, str], Tensor], most: int, noisy: str, counting: Counting | None
) -> str:
    tested = int(metrics.get((METRICS, TESTED), torch.tensor(0)))
    if not 0 <= tested <= most:
        return f"{METRICS}/{TESTED} is {tested}, this silo has {most} test records{noisy}"
    for (part, name), counts in metrics.items():
        unit = _most_of_one(part, name, counting)
        for count in (counts.min(), counts.max()):
            if not 0 <= count <= tested * unit:
                of = f", in units of 1/{unit}" if unit > 1 else ""
                return f"{part}/{name} is {int(count)}{of}, of {tested} that were tested"
    return "" if noisy or counting is None else counting.fault(metrics, tested)


def _most_of_one(part: str, name: str, counting: Counting | None) -> int:
    """The most that one record adds to one number of a tensor."""
    if counting is None:
        return 1 if name == TESTED else UNIT
    return counting.unit(part, name)


def norms(items: Sequence[Item], values: Sequence[Tensor]) -> dict[str, float]:
    """Euclidean norm of each part's tensors together, in float64, weights left out.

    Of coded tensors it is that of what they stand for. For the policy's ``max_norm``.
    """
    squares = dict.fromkeys((item.part for item in items), 0.0)
    named = {(item.part, item.spec.name): value for item, value in zip(items, values, strict=True)}
    read = Decoded(lambda part, name: named[part, name])  # as the coordinator will
    for part, name in named:
        if not name.endswith((WEIGHT, SCALE, INDICES)):
            norm = _norm(read(part, name))
            squares[part] += norm * norm
    return {part: sqrt(square) for part, square in squares.items()}


def _norm(value: Tensor) -> float:
    # ``vector_norm`` does not take integers.
    own = value if value.is_floating_point() else value.double()
    # Squares of large float32 values overflow in float32.
    return float(torch.linalg.vector_norm(own, dtype=torch.float64))


def announced(
    peer: str, job: Job, round_: int, manifest: Manifest, words: Sequence[int] = ()
) -> tuple[Item, ...]:
    """The tensors that a delivery's manifest declares.

    RefusedError unless they are all of some parts that this round may bring. ``words`` are the
    bytes of the open sums and of the rows of a Mix behind the tensors. In a keyed job what comes in
    words never comes as tensors.
    """
    # A delivery of another job or round would be trained on as if it were this one's.
    named = (manifest.job, manifest.job_digest.hex(), manifest.round)
    if named != (job.name, job.digest, round_):
        raise RefusedError(
            peer, "MANIFEST", f"delivery is of {manifest.job[:64]!r} round {manifest.round}"
        )

    # Only uploads resume in the middle: a part of a delivery has digests of nothing whole.
    if manifest.offset:
        raise RefusedError(
            peer, "MANIFEST", f"delivery begins at byte {manifest.offset}; send all of it"
        )

    # In a keyed job these come as words that the silos' tags prove; bare tensors have no tags.
    in_words = Mix if job.keyed else ()
    expected = {
        part.name: part for part in job.down(round_) if not isinstance(part.exchange, in_words)
    }
    parts = []
    for name in dict.fromkeys(header.part for header in manifest.tensors):
        if name not in expected:
            raise RefusedError(
                peer, "MANIFEST", f"delivers part {name[:64]!r}, which is not in the schema"
            )
        parts.append(expected[name])
    items = delivered_items(parts)
    check_manifest(peer, manifest, items, sum(words))
    return items


def unpack(peer: str, items: Sequence[Item], buffer: memoryview) -> dict[str, dict[str, Tensor]]:
    """Tensors of a finished delivery by part; RefusedError for NaN or infinity.

    They share the buffer's memory.
    """
    # A NaN would spread through training into all that this silo uploads.
    delivered: dict[str, dict[str, Tensor]] = {}
    offset = 0
    for item in items:
        value = tensor_from(buffer, item.spec, offset)
        if not all_finite(value):
            raise RefusedError(
                peer, "NOT_FINITE", f"delivered {item.part}/{item.spec.name} holds NaN or infinity"
            )
        delivered.setdefault(item.part, {})[item.spec.name] = value
        offset += item.spec.nbytes
    return delivered


def flat(values: Sequence[Tensor]) -> Flat:
    """The tensors one after another, float64 unless all are float32; float tensors' own memory."""
    all_single = {torch.float32}.issuperset(value.dtype for value in values)
    dtype = np.float32 if all_single else np.float64
    return tuple(value.detach().reshape(-1).numpy().astype(dtype, copy=False) for value in values)
