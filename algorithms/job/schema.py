"""The wire schema of a job and the digests of its method and model, as canonical-JSON values."""

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, filterfalse, product
from typing import Any

import pydantic

from ...errors import LocalError, check_local
from ...files.documents import canonical_json
from ..exchange.delivery import KEEP
from ..exchange.parts import MOST_TENSORS, Part, TensorSpec, walk_tensors
from ..method import Method
from ..models.build import MODEL_VERSION, ModelOptions, input_shape

# ASCII only: people read these names before they sign, and policies match them.
PART_NAME = r"[A-Za-z0-9_-]{1,64}"
TENSOR_NAME = r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*"
LONGEST_NAME = 255  # of a tensor
MOST_PHASES = 256
ABSENT = object()  # a mark that equals no value of a document

PartsOf = Callable[[int], tuple[Part, ...]]


def plain(value: Any) -> Any:
    """A value in the types that canonical JSON has.

    Floats become texts of their shortest exact decimal, tuples become lists.
    """
    if isinstance(value, pydantic.BaseModel):
        return plain(value.model_dump())
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return list(map(plain, value))
    # Canonical JSON has no fractions: programs write one number in several ways.
    if isinstance(value, float):
        return repr(value)
    return value


def phases(rounds: int, up: PartsOf, down: PartsOf) -> list[dict[str, Any]]:
    """The parts and tensors that cross, phase by phase.

    A phase lasts until the next one begins; the last phase is the final delivery.

    ::

        {"from_round": 0, "up": [{"name": "model", "kind": "WHOLE_MODEL", "exchange": "sum.mean",
                                  "tensors": [{"name": "classifier.bias", "dtype": "float32",
            "shape": [10]}, …]}, …],
         "down": [{"name": "model", …}]}

    Tensors going up include ``@weight`` where the exchange sends one; tensors going down never do.
    A part of sketches also has the vectors that are sketched, ``"sketch_of": [{"name": "sketch",
    "dtype": "float64", "shape": [1, 74880]}]``. In a blind job a silo's gate takes these vectors,
    and sketches them under the key that the coordinator lacks. A tensor whose values have bounds
    says so, as in ``{"name": "@weight", "dtype": "float64", "shape": [], "least": "0.0", "most":
    "1.0"}``: both ends reject values beyond them.
    """
    # A job of a thousand rounds has two or three phases: people read this document and sign it. A
    # job of a few bytes must not take minutes and gigabytes either.
    found: list[dict[str, Any]] = []
    before: tuple[tuple[Part, ...], tuple[Part, ...]] | None = None
    for round_ in range(rounds + 1):
        now = (up(round_), down(round_))
        # Whole parts are compared: another bound or exchange begins a phase, too.
        if now != before:
            check_local(
                len(found) < MOST_PHASES,
                f"round {round_}: what crosses changes for the {MOST_PHASES}th time, and nobody"
                " could read that; lower rounds, or let the method change it more rarely",
            )
            found.append(_phase(round_, *now))
        before = now
    return found


def _phase(round_: int, up: Sequence[Part], down: Sequence[Part]) -> dict[str, Any]:
    # Mail comes down with ``@keep``, the only delivered tensor that Staddle names.
    _check(up, round_)
    _check(down, round_, KEEP.name)
    return {
        "from_round": round_,
        "up": [_part(part, part.wire) for part in up],
        "down": [_part(part, part.tensors) for part in down],
    }


def method_digest(method: Method, schema: list[dict[str, Any]]) -> str:
    """SHA-256 of canonical JSON of a method's name, version, configuration and ordered tensors.

    Silos compare it. It changes with the code only if the author raises ``version``.
    """
    ordered = [
        [phase["from_round"], way, part["name"], tensor]
        for phase, way in product(schema, ("up", "down"))
        for part in phase[way]
        for tensor in part["tensors"]
    ]
    task = method.setting.task
    configuration = [plain(method.options), task.version, plain(task)]
    return _digest(method.name, method.version, configuration, ordered)


def model_digest(options: ModelOptions, method: Method) -> str:
    """SHA-256 of canonical JSON of a model: name, version, configuration and ordered tensors.

    The tensors are those of the method's template.
    """
    ordered = [
        [part, spec.name, spec.dtype, list(spec.shape)]
        for part, specs in method.template.items()
        for spec in specs
    ]
    # The input shape that is used, even if the job leaves it out.
    configuration = {**plain(options), "input": list(input_shape(options))}
    return _digest(options.name, MODEL_VERSION, configuration, ordered)


def explain_difference(
    received: Mapping[str, Any], computed: Mapping[str, Any], method: str, model: str
) -> str:
    """Why a document is not what this machine computes from it, and what to do: one sentence."""
    # The model first: another model has other tensors, so schema and digest differ as well.
    if received.get("model_digest") != computed["model_digest"]:
        return (
            f"this silo's model {model} differs from the job's; install the Staddle release of the"
            " job's operator"
        )
    if received.get("start") != computed.get("start"):
        return _other_start(received.get("start"), computed.get("start"), model)
    # The schema says where two versions of a method differ, which a digest cannot.
    if any(received.get(key) != computed[key] for key in ("schema", "method_digest")):
        where = _first_difference(received.get("schema"), computed["schema"], "schema")
        return (
            f"this silo's {method} version differs ({where or 'method_digest'}); "
            "install the Staddle release of the job's operator, or have the job written again"
        )
    where = _first_difference(received, computed, "")
    return (
        f"key {where} is not written as Staddle writes it; make the document with `staddle job"
        " submit`"
    )


def same_start(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """True if two entries ``start`` have one digest, whatever releases made the values."""
    releases = theirs.get("made_with")
    if theirs.keys() != ours.keys() or not isinstance(releases, Mapping):
        return False
    texts = chain(releases.keys(), releases.values())
    return bool(theirs["sha256"] == ours["sha256"]) and all(isinstance(t, str) for t in texts)


def _other_start(theirs: Any, ours: Any, model: str) -> str:
    """Why a silo would begin from other initial values."""
    releases = theirs.get("made_with") if isinstance(theirs, Mapping) else None
    if ours is None or not isinstance(releases, Mapping):
        return f"key start, the digest of {model}'s initial values, is missing, or is not a digest"
    # What the job says may be of any length.
    wanted = {str(name)[:64]: str(value)[:64] for name, value in releases.items()}
    differing = [
        f"{name} {ours['made_with'].get(name, 'missing')} here, {wanted.get(name, 'missing')} in"
        " the job"
        for name in sorted({*ours["made_with"], *wanted})
        if ours["made_with"].get(name) != wanted.get(name)
    ]
    why = "; ".join(differing) or "the releases are the same, so the machine differs"
    return (
        f"this silo would begin from other initial values of model {model} ({why}); install the"
        " releases that the job was signed with"
    )


def _digest(name: str, version: int, configuration: Any, ordered: Iterable[Any]) -> str:
    body = {
        "name": name,
        "version": version,
        "configuration": configuration,
        "tensors": list(ordered),
    }
    return hashlib.sha256(canonical_json(body)).hexdigest()


def _part(part: Part, tensors: Sequence[TensorSpec]) -> dict[str, Any]:
    written = {
        "name": part.name,
        "kind": part.kind.name,
        "exchange": part.exchange.schema_name,
        "tensors": list(map(_tensor, tensors)),
    }
    # Blind, the silo's gate makes the sketches, so whole vectors are in the schema as well.
    if part.sketch:
        written["sketch_of"] = list(map(_tensor, part.tensors))
    return written


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    bounds = {"least": spec.least, "most": spec.most}
    named = {name: plain(bound) for name, bound in bounds.items() if bound is not None}
    return {"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape), **named}


def _check(parts: Sequence[Part], round_: int, *ours: str) -> None:
    """LocalError for parts that cannot cross together; ``ours`` are tensors named by Staddle."""
    names = [part.name for part in parts]
    # Both ends find parts by name.
    check_local(
        len(set(names)) == len(names), f"round {round_}: parts {names} are not distinct names"
    )
    # A transfer's manifest has a header for each tensor.
    number = len(list(walk_tensors(parts)))
    if number > MOST_TENSORS:
        raise LocalError(
            f"round {round_}: {number} tensors cross, at most {MOST_TENSORS} may; choose a smaller"
            " model"
        )
    for part in parts:
        _check_part(part, round_, ours)


def _check_part(part: Part, round_: int, ours: Collection[str]) -> None:
    # Names with @ are Staddle's own, such as the weight: a method must not stand in for them.
    tensors = [spec.name for spec in part.tensors]
    _check_names(part.name, list(filterfalse(ours.__contains__, tensors)))
    if not tensors:
        raise LocalError(
            f"part {part.name!r}, which crosses in round {round_}, is empty: the job's model"
            " has no parameters there; choose a model that has, or a method that shares the"
            " whole model, such as fedavg"
        )
    check_local(
        len(set(tensors)) == len(tensors),
        f"round {round_}: part {part.name!r} has tensors {tensors}: give each a distinct"
        " name without @",
    )


def _check_names(part: str, tensors: Sequence[str]) -> None:
    """LocalError for a name that a reader of a policy or a ledger might take for another."""
    if not re.fullmatch(PART_NAME, part):
        raise LocalError(
            # ``!a`` escapes what could pass for another character, or control a terminal.
            f"part {part[:64]!a}: a part is named by 1 to 64 ASCII letters, digits, - and _"
        )
    for name in tensors:
        if len(name) > LONGEST_NAME or not re.fullmatch(TENSOR_NAME, name):
            raise LocalError(
                f"part {part!r}: tensor {name[:64]!a}: a tensor is named by ASCII letters, digits,"
                f" - and _ between single dots, {LONGEST_NAME} characters at most"
            )


def _first_difference(received: Any, computed: Any, where: str) -> str:
    """Path of the first value that differs; empty if none does."""
    if received == computed:
        return ""
    # Down to the innermost value, so that the path leads to what a person has to change.
    for path, theirs, ours in _directly_in(received, computed, where):
        if theirs != ours:
            return _first_difference(theirs, ours, path)
    return where


def _directly_in(received: Any, computed: Any, where: str) -> Iterator[tuple[str, Any, Any]]:
    """Path and both values of each entry of two objects or arrays; ABSENT where one has none."""
    match received, computed:
        case Mapping(), Mapping():
            # A key that only one side has is a difference, too.
            for key in dict.fromkeys([*computed, *received]):
                path = f"{where}.{key}".lstrip(".")
                yield path, received.get(key, ABSENT), computed.get(key, ABSENT)
        case list(), list():
            for i, (theirs, ours) in enumerate(zip(received, computed, strict=False)):
                yield f"{where}[{i}]", theirs, ours
