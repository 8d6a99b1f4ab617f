"""A starting policy for given jobs: exactly what they give and nothing else, for a person to read and tighten."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..algorithms.exchange import Kind
from ..algorithms.job import Job
from ..proto.wire import Item, given_items
from .toml import to_toml

WIDTH = 100
LISTED = 12  # tensors of a rule that its comment names one by one
KIB = 1024

WHAT = {  # what each kind is, and what it can tell those who read it
    Kind.WHOLE_MODEL: "all parameters of the trained model; they can tell whether a record was trained on, and more",
    Kind.BACKBONE: "the model without its last layer; its parameters can tell whether a record was trained on",
    Kind.INTER_LEARNING_MODEL: "the model that silos exchange; it can tell whether a record was trained on",
    Kind.HEADER_ROWS: "the last layer's rows of the classes seen here; they tell which classes this silo has",
    Kind.PROTOTYPES: "mean features of each class; those of few records are close to a single record",
    Kind.CANONICAL_MODELS: "parameters of the models that silos mix; they can tell whether a record was trained on",
    Kind.CLASSIFIER_ROWS: "the classifier's rows, of unit length; they tell how classes lie here",
    Kind.MEMBERSHIP: "how this silo mixes the common models; it tells what its records are like",
    Kind.COUNTS: "numbers of records, or shares of labels; static facts about the data set",
    Kind.METRIC: "how many test records were classified correctly",
    Kind.SKETCH: "a projection of an update, to compare silos with one another",
    Kind.KEY: "a public key",
    Kind.SHARE: "a share of a secret",
}


@dataclass
class Drafted:
    """One rule as it grows: the parts of one method that bear one name, and the jobs they are of."""

    method: str
    kind: Kind
    items: dict[str, Item] = field(default_factory=dict)  # by tensor name
    jobs: list[str] = field(default_factory=list)


def draft(jobs: Sequence[Job], max_bytes_per_round: str | None = None) -> str:
    """Text of a policy.toml; without a limit, a round may give twice what the largest of these jobs gives.

    Twice, since a broken upload goes on where it broke and counts once more.
    """
    rules: dict[tuple[str, str], Drafted] = {}
    largest = 0
    for job in jobs:
        for start in job.phase_starts:
            items = given_items(job.up(start))
            largest = max(largest, sum(item.spec.nbytes for item in items))
            for item in items:
                rule = rules.setdefault((job.method_name, item.part), Drafted(job.method_name, item.kind))
                known = rule.items.get(item.spec.name)
                if known is None or known.spec.elements < item.spec.elements:
                    rule.items[item.spec.name] = item
                if job.name not in rule.jobs:
                    rule.jobs.append(job.name)
    limit = max_bytes_per_round or f"{-(-2 * largest // KIB)}KiB"
    return _head(jobs, limit) + "".join(_rule(part, rule) for (_, part), rule in rules.items())


def _head(jobs: Sequence[Job], limit: str) -> str:
    named = ", ".join(f"{job.name!r}" for job in jobs)
    lines = [
        *_comment(
            f"What may leave this silo: what these jobs give, and nothing but this: {named}. Read each rule, take out "
            "what you do not want to leave, and run: staddle policy check JOB.json"
        ),
        "version = 1",
        "",
        "[limits]",
        *_comment("Payload bytes of one round, those that a broken upload sends again counted twice."),
        f'max_bytes_per_round = "{limit}"',
        "",
        *_comment("Polls, heartbeats and answers of one session."),
        "[control]",
        "max_messages = 100000",
        'max_bytes = "16MiB"',
    ]
    return "\n".join(lines) + "\n"


def _rule(part: str, rule: Drafted) -> str:
    specs = [item.spec for item in rule.items.values()]
    heads = dict.fromkeys(_glob(spec.name) for spec in specs)
    said = f"{part!r}: {WHAT[rule.kind]}. Of job {', '.join(repr(job) for job in rule.jobs)}: {len(specs)} tensors, "
    said += f"{sum(spec.nbytes for spec in specs):,} bytes a round, as they stand."
    shown = [f"{spec.name} {list(spec.shape)}" for spec in specs[:LISTED]]
    if len(specs) > LISTED:
        shown.append(f"and {len(specs) - LISTED} more, which staddle policy check lists")
    document: Mapping[str, Any] = {
        "name": f"{rule.method}-{part}",
        "methods": [rule.method],
        "parts": [part],
        "kinds": [rule.kind.name.lower()],
        "tensors": list(heads),
        "dtypes": list(dict.fromkeys(spec.dtype for spec in specs)),
        "max_elements": max(spec.elements for spec in specs),
        "recipients": ["coordinator"],
        "readers": ["coordinator"],
    }
    return "\n".join(["", *_comment(said), *_comment("Tensors: " + "; ".join(shown) + "."), "[[allow]]", ""]) + to_toml(
        document
    )


def _glob(name: str) -> str:
    head, dot, _ = name.partition(".")
    return f"{head}.**" if dot else head


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
