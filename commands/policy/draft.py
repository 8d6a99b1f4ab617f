"""A starting policy for given jobs: it allows what they need, and nothing else.

A person reads and tightens it.
"""

import json
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import chain, count, filterfalse
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import typer

from ...algorithms.exchange.parts import Kind
from ...algorithms.job.job import Job
from ...algorithms.job.shared_steps import STEPS
from ...algorithms.job.torchmetrics_counting import TORCHMETRICS
from ...algorithms.tasks.risk_counting import RISKS
from ...algorithms.tasks.table_counting import CONFUSION, SCORES
from ...algorithms.tasks.value_counting import TARGETS
from ...errors import LocalError
from ...proto.convert.secagg_sent import most_contributed
from ...security.blind.plan import JobPlan, RoundPlan
from ...security.identity import roster as rosters
from ...security.identity.signed_document import read_signed
from ...security.policy import policy as policies
from ...security.policy.data_sets import DATASET, DataSets
from ...security.policy.file import SecureAggregation
from ...security.policy.policy import Policy
from ...security.policy.release import (
    MASKED,
    PADDED,
    PLAIN,
    ROTATED,
    Release,
)
from ...security.preflight import size
from ...silo import config as configs
from ...silo.admission import checks
from ...silo.admission.checks import TRUSTED, trusting
from ...silo.admission.signed_sets import tells_fixed
from ...silo.parts.releases import upload_releases
from ..privacy import budget_text
from ..terminal import examples, printer
from ..terminal.newest_roster import newest
from ..terminal.output import number
from ..terminal.package_option import Packages
from ..terminal.toml import to_toml
from .visibility import FOR_SILOS, ROWS, SHARED, way_of

WIDTH = 100
LONGEST_NAME = 64  # of a rule
LONGEST_NUMBER = 5  # behind a name that another rule has
LISTED = 12  # tensors of a rule that its comment names one by one; more would bury the rule
KIB = 1024
# of federations whose silos have about as many records, honest ones stayed below 2.2
MAX_STEP = 3.0
MAX_PARALLEL = 2  # honest layers have none
TIMES, TIMES_BLIND = 2, 10  # what a round gives may leave so often in it

WHAT = {  # what each kind is, and what it can tell those who read it
    Kind.WHOLE_MODEL: (
        "all parameters of the trained model; whoever reads them can test whether a record was"
        " trained on, and learn more"
    ),
    Kind.BACKBONE: (
        "the model without its last layer; whoever reads it can test whether a record was trained"
        " on"
    ),
    Kind.INTER_LEARNING_MODEL: (
        "the model that silos exchange; whoever reads it can test whether a record was trained on"
    ),
    Kind.HEADER_ROWS: (
        "rows of the last layer, one per class; they reveal which classes this silo has"
    ),
    Kind.PROTOTYPES: (
        "mean features of each class; if it has few records, they are close to a single record"
    ),
    Kind.CANONICAL_MODELS: (
        "parameters of the models that silos mix; whoever reads them can test whether a record was"
        " trained on"
    ),
    Kind.CLASSIFIER_ROWS: (
        "the classifier's rows, scaled to unit length; they reveal how this silo's classes relate"
    ),
    Kind.MEMBERSHIP: (
        "how this silo mixes the common models; it reveals what kind of records this silo has"
    ),
    Kind.COUNTS: (
        "numbers of records, proportions of labels, or which classes occur; fixed facts about the"
        " data set"
    ),
    Kind.METRIC: "how many test records there are, and how good models are on them",
    Kind.SKETCH: "a projection of an update, used to compare silos with one another",
    Kind.KEY: "a public key",
    Kind.SHARE: "a share of a secret",
    Kind.STATISTICS: (
        "sums of what records have in each feature, and of its squares; they reveal mean and"
        " spread of this silo's values"
    ),
}

OF_PART = {  # the same of single parts
    STEPS: (
        "by how much this silo's records would change each parameter of the model in one step, and"
        " its noisy number of records; in jobs that protect whole silos, how they changed it in a"
        " round; under this silo's share of the noise; whoever reads the sum over the silos reads"
        " it under all of the noise"
    ),
    CONFUSION: (
        "test records by class and by the class that the model says; they reveal how many test"
        " records of each class this silo has"
    ),
    SCORES: (
        "test records by class and by the model's score; they reveal how many test records of each"
        " class this silo has"
    ),
    TORCHMETRICS: (
        "what metrics of torchmetrics add up over the test records, such as a confusion matrix;"
        " they can reveal how many test records of each class this silo has"
    ),
    TARGETS: "sums of test records' targets and of their squares; they reveal mean and spread",
    RISKS: (
        "test records by time, by whether the event came, and by the model's risk; they reveal when"
        " events come here"
    ),
}

HOW = {  # how each form leaves, and what can be read of it
    PLAIN: "in the clear",
    MASKED: "masked: only their sum over a round's silos can be read",
    FOR_SILOS: "masked and padded: only silos can read their sum over a round's silos",
    ROWS: (
        "masked and padded once per recipient: each recipient can read its own weighted mean and"
        " nothing else, and the coordinator nothing, even if another silo colludes with it"
    ),
    SHARED: (
        "as secret shares sealed from silo to silo: the coordinator can read how similar the silos'"
        " vectors are, but no vector, even if as many silos collude with it as the job assumes"
    ),
    PADDED: (
        "padded: each silo can read its own weighted mean of the others and nothing else, and the"
        " coordinator nothing"
    ),
    ROTATED: (
        "rotated: the coordinator can read how similar the silos' vectors are, but no vector"
    ),
}


def new(
    signed_jobs: Annotated[list[Path], typer.Argument(metavar="JOB.json...", help="Signed jobs.")],
    roster: Annotated[
        Path | None,
        typer.Option(
            help="The roster file: the jobs must be signed by an operator of it. Left out: that of"
            " --config, or the coordinator's newer one."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The new policy file.")] = Path("policy.toml"),
    dataset: Annotated[
        str,
        typer.Option(
            help="The silo's data set, as its configuration calls it, for jobs that ask for none."
        ),
    ] = DATASET,
    config: Annotated[
        Path | None,
        typer.Option(help="The silo's TOML file, for its data sets, in place of --dataset."),
    ] = None,
    package: Packages = None,
) -> None:
    """Write a policy that allows what these jobs upload, and nothing else.

    Read and tighten it. Each rule says what its tensors are and what they can tell about your
    records.
    """
    loaded = None if config is None else configs.load(config)
    if roster is not None:
        members = rosters.load(roster)
    elif loaded is not None:
        members = newest(loaded)
    else:
        raise LocalError("say --config SILO.toml, or --roster ROSTER.json")
    jobs = [
        checks.read_job(read_signed(path), members, package or (), str(path))[0]
        for path in signed_jobs
    ]

    # Parsed as the agent will parse it, so that no draft is written that it would reject.
    datasets = _named_by(jobs, dataset) if loaded is None else loaded.names
    text = draft(jobs, datasets=datasets)
    rules = len(policies.parse(text.encode(), str(out), datasets).file.allow)
    examples.write(out, text, 0o644)
    printer.show(
        f"{out}: {rules} rules. Read each one, then run: staddle policy check JOB.json --config"
        " SILO.toml"
    )
    if names := _changing_jobs(jobs):
        printer.show(
            f"{out}: as written, this policy declines {names}. When silos drop out, these jobs sum"
            " whichever silos are left, and over many rounds such sums reveal single contributions;"
            ' if you accept that, remove the # from the line dropouts = "any"'
        )
    if names := trusting_jobs(jobs):
        printer.show(
            f"{out}: as written, this policy declines {names}. These jobs are safe only if none of"
            " their silos colludes with the coordinator; if you trust that, remove the # from the"
            f' line trust = "{checks.TRUSTED}"'
        )


@dataclass
class Drafted:
    """One rule as it grows: the parts of one method that bear one name, and their jobs.

    ``dataset``: whose records it is for; empty where the silo has one data set.

    It grows with each phase and job. ``readers``, ``dtypes`` and ``jobs`` are ordered sets.
    """

    method: str
    kind: Kind
    dataset: str = ""
    # by way and tensor name, the largest
    releases: dict[tuple[str, str], Release] = field(default_factory=dict)
    # of all jobs: one may let the same tensors be read by other silos
    readers: dict[str, None] = field(default_factory=dict)
    dtypes: dict[str, None] = field(default_factory=dict)
    jobs: dict[str, None] = field(default_factory=dict)

    def add(self, release: Release, job: str) -> None:
        """Let this leave, too."""
        way = way_of(release)
        known = self.releases.get((way, release.name))
        # A rule bounds the number of elements, so the largest tensor decides.
        if known is None or known.elements < release.elements:
            self.releases[way, release.name] = release
        self.readers |= dict.fromkeys(release.readers or ("coordinator",))
        self.dtypes[release.dtype] = self.jobs[job] = None


def draft(
    jobs: Sequence[Job],
    max_bytes_per_round: str | None = None,
    datasets: DataSets | None = None,
    *,
    trust: bool = False,
) -> str:
    """Text of a policy.toml; without a limit, a round may upload some times what jobs need.

    ``trust``: the person whose policy it is trusts that the coordinator colludes with no silo, and
    lets sums be over changing silos. Otherwise what to write if they do stands in a comment, and
    jobs that ask for it are declined. ``datasets`` are the silo's; without them, those that the
    jobs ask for, and DATASET for the others.
    """
    names = datasets or _named_by(jobs, DATASET)
    rules, largest = _rules(jobs, names)
    # Rounded up to whole KiB, for readability.
    limit = max_bytes_per_round or f"{-(-largest // KIB)}KiB"
    return _head(jobs, limit, names, trust=trust) + "".join(rules.values())


def missing_rules(job: Job, policy: Policy, datasets: DataSets) -> str:
    """Texts of the rules that a job needs, for parts of which the policy has none.

    The first rule for a part alone decides, so another one for it would change nothing.
    """
    rules, _ = _rules([job], datasets, {rule.name for rule in policy.file.allow})
    return "".join(
        text for (_, method, part), text in rules.items() if policy.rule(method, part) is None
    )


def _rules(
    jobs: Sequence[Job], names: DataSets, taken: Collection[str] = ()
) -> tuple[dict[tuple[str, str, str], str], int]:
    """Texts of rules by data set, method and part; and the bytes of the largest round.

    ``taken`` are names that other rules have.
    """
    rules: dict[tuple[str, str, str], Drafted] = {}
    # A rule that names no data set would let jobs on one do what only jobs on another need.
    apart = len(names.own) > 1
    largest = 0
    for job in jobs:
        of = names.of(job.dataset) if apart else ""
        for phase in JobPlan(job).phases:
            releases = upload_releases(phase)
            # The largest round of all jobs: the limit holds for any round.
            largest = max(largest, _most(job, phase, releases))
            for release in releases:
                drafted = Drafted(job.method_name, Kind[release.kind.upper()], of)
                key = (of, job.method_name, release.part)
                rules.setdefault(key, drafted).add(release, job.name)
    return {key: _rule(key[-1], rule, taken) for key, rule in rules.items()}, largest


def _named_by(jobs: Sequence[Job], first: str) -> DataSets:
    """The data sets that jobs ask for; those that ask for none are on the first."""
    asked = dict.fromkeys((first, *filter(None, map(attrgetter("dataset"), jobs))))
    return DataSets(dict(zip(asked, asked, strict=True)))


def _most(job: Job, phase: RoundPlan, releases: Sequence[Release]) -> int:
    """Bytes that a silo may upload in one round of a phase."""
    # Tensors only; the messages of a secure sum are added below.
    size = sum(release.nbytes for release in releases)

    # Twice, since a broken upload resumes where it broke and counts once more.
    if not job.security.required:
        return TIMES * size

    # A secure sum that a silo drops out of begins again, and each attempt sends all masked words
    # again; a padded upload starts again after a restart.
    silos, groups = len(job.silos), len(phase.groups[1])
    products = sum(4 * part.tensors[0].shape[0] * silos**2 * 2 for part in phase.shared)
    return TIMES_BLIND * (size + most_contributed(silos, groups, products))


def _head(jobs: Sequence[Job], limit: str, names: DataSets, *, trust: bool) -> str:
    # A person reads this file before a first job and years after it, so each bound says in place
    # what it is against.
    named = ", ".join(f"{job.name!r}" for job in jobs)
    lines = [
        *_comment(
            f"This policy allows what these jobs upload, and nothing else: {named}. It allows"
            " later jobs that upload no more, too. Read each rule, delete what you do not want to"
            " leave, then run: staddle policy check JOB.json --config SILO.toml"
        ),
        "version = 1",
        *_code(jobs),
        *_weights(jobs),
        "",
        "[limits]",
        *_comment(
            "Bytes per round: tensors, what an interrupted upload sends again, and the messages of"
            " secure sums."
        ),
        f'max_bytes_per_round = "{limit}"',
        *_comment(
            "A delivery may move a part of the model by at most this many of the longest steps of"
            " this silo's own training. A model made to leak records lies farther away. So can an"
            " honest model, if other silos have many times more records: then raise the limit. In"
            " rounds whose silos share the noise it has no effect."
        ),
        f"max_step = {MAX_STEP}",
        *_comment(
            "How many rows of a delivered layer may be multiples of other rows. A model made to"
            " sort records has many such rows."
        ),
        f"max_parallel = {MAX_PARALLEL}",
        *_cells(jobs),
        "",
        *_comment("Polls, heartbeats and answers per session."),
        "[control]",
        "max_messages = 100000",
        'max_bytes = "16MiB"',
    ]
    sums = _sums([job for job in jobs if job.security.required], len(jobs), trust=trust)
    by_set: dict[str, list[Job]] = {}
    for job in jobs:
        by_set.setdefault(names.of(job.dataset), []).append(job)
    budgets = chain.from_iterable(map(budget_text.table, by_set.values(), by_set))
    return "\n".join([*lines, *sums, *budgets]) + "\n"


def _cells(jobs: Sequence[Job]) -> list[str]:
    smallest = [cell for job in jobs if (cell := job.method().smallest_cell) is not None]
    if not smallest:
        return []
    why = "How many of this silo's records each number is of that statistics count without noise."
    return [*_comment(why), f"min_cell = {min(smallest)}"]


def _sums(blind: Sequence[Job], jobs: int, *, trust: bool) -> list[str]:
    """What the blind jobs take, as strict as they let it be."""
    if not blind:
        return []
    lines: list[str] = []
    if len(blind) == jobs:
        lines += [*_comment("Nothing that a round uploads leaves in the clear."), "required = true"]
    if (colluders := min(job.security.colluders for job in blind)) < 1:
        why = (
            "Jobs must assume at least this many silos that collude with the coordinator. One of"
            " these jobs assumes none."
        )
        lines += [*_comment(why), f"assumed_colluders = {colluders}"]
    if any(map(tells_fixed, blind)):
        lines += _least_difference(colluders)
    lines += _public_counts(blind)
    lines += _changing(blind, trust=trust)
    lines += _keyed(blind, trust=trust)
    return ["", "[secure_aggregation]", *lines] if lines else []


def _least_difference(colluders: int) -> list[str]:
    least = SecureAggregation(assumed_colluders=min(colluders, 1)).least_difference
    why = (
        "A silo has the same numbers of records in every job, so sums over two sets of silos reveal"
        " the numbers of those silos by which the sets differ. This silo contributes to no sum that"
        " would reveal them for fewer silos than this, unless the roster says that silos joined or"
        " left."
    )
    return [*_comment(why), f"min_difference = {least}"]


def _public_counts(blind: Sequence[Job]) -> list[str]:
    if not any(job.security.weights == "public" for job in blind):
        return []
    # Class counts reveal more than the number of records: say which are declared.
    what = ""
    if any(job.security.class_counts for job in blind):
        what = ", in all and per class"
    return [
        *_comment(f"A job file states how many training records this silo has{what}."),
        "public_counts = true",
    ]


def _changing(blind: Sequence[Job], *, trust: bool) -> list[str]:
    """The line for jobs whose sums are over whichever silos are left."""
    names = _changing_jobs(blind)
    if not names:
        return []
    why = (
        f"When silos drop out, a round of {names} sums whichever silos are left. Over many rounds"
        " such sums reveal single contributions."
    )
    keep = 'Keep this line only if you accept that; "batches" declines such jobs.'
    decide = (
        "Only you can decide whether to accept that. As written, this policy declines such jobs;"
        " to accept them, remove the # from the line below."
    )
    return _decision(why, keep, decide, 'dropouts = "any"', trust=trust)


def _keyed(blind: Sequence[Job], *, trust: bool) -> list[str]:
    """The line for jobs that hide something by a key that all their silos have."""
    names = trusting_jobs(blind)
    if not names:
        return []
    why = (
        "A key that all silos of a job hold hides three things from the coordinator: what"
        f" {names} mixes or compares, sums that only silos read, and the tags by which silos check"
        " who holds a class. If any one of these silos colludes with the coordinator, the two can"
        " read such sums and what each silo uploads to be mixed or compared, and can alter those"
        " counts."
    )
    keep = 'Keep this line only if you trust that none does; "none" declines such jobs.'
    decide = (
        "Only you can decide whether to trust that none does. As written, this policy declines"
        " such jobs; to accept them, remove the # from the line below."
    )
    return _decision(why, keep, decide, f'trust = "{TRUSTED}"', trust=trust)


def _code(jobs: Sequence[Job]) -> list[str]:
    """The line for jobs that run code of other packages; whoever drafts has named these."""
    names = sorted({package.name for job in jobs for package in job.packages})
    if not names:
        return []
    why = (
        f"Jobs may run code of the installed packages {', '.join(names)}, which can do whatever"
        " this program can do. Keep this line only if you trust that code."
    )
    return [*_comment(why), f"packages = {json.dumps(names)}"]


def _weights(jobs: Sequence[Job]) -> list[str]:
    """The line for jobs that begin with a file of weights."""
    files = {job.name: job.model.weights.expected for job in jobs if job.model.weights}
    if not files:
        return []
    why = (
        "Jobs may begin with the files of weights of these SHA-256 digests. Whoever makes such a"
        " file can make it leak records to whoever reads what this silo uploads. Keep this line"
        " only if you know where the files come from."
    )
    said = [
        f"# {digest} ({size(nbytes)}): job {name!r}" for name, (digest, nbytes) in files.items()
    ]
    digests = sorted({digest for digest, _ in files.values()})
    return [*_comment(why), *said, f"weights = {json.dumps(digests)}"]


def _decision(why: str, keep: str, decide: str, line: str, *, trust: bool) -> list[str]:
    """A line that only a person can allow: commented out unless they did."""
    if trust:
        return [*_comment(f"{why} {keep}"), line]
    return [*_comment(f"{why} {decide}"), f"# {line}"]


def _changing_jobs(jobs: Sequence[Job]) -> str:
    return ", ".join(f"{job.name!r}" for job in jobs if job.security.dropouts == "any")


def trusting_jobs(jobs: Sequence[Job]) -> str:
    """Names of the jobs that ask a silo to trust that the coordinator colludes with no silo.

    Empty for none.
    """
    # A plain job hides nothing from the coordinator, so collusion adds nothing.
    blind = [job for job in jobs if job.security.required]
    return ", ".join(f"{job.name!r}" for job in blind if trusting(JobPlan(job)))


def _rule(part: str, rule: Drafted, taken: Collection[str]) -> str:
    names, forms, elements = [], [], []
    by_way: dict[str, list[Release]] = {}
    for (way, name), release in rule.releases.items():
        by_way.setdefault(way, []).append(release)
        names.append(_glob(name))
        forms.append(release.form)
        elements.append(release.elements)

    # One rule serves all jobs of a method, so its bounds are those of the largest tensors.
    document: dict[str, Any] = {
        "name": _named("-".join(filter(None, (rule.method, part, rule.dataset))), taken),
        "methods": [rule.method],
        "parts": [part],
        "kinds": [rule.kind.name.lower()],
        "tensors": _distinct(names),
        "dtypes": list(rule.dtypes),
        "max_elements": max(elements),
        # Every message goes to the coordinator; ``readers`` says who can open it.
        "recipients": ["coordinator"],
        "readers": list(rule.readers),
    }
    # Without ``forms`` a rule lets tensors leave in the clear.
    if set(forms) != {PLAIN}:
        document["forms"] = _distinct(forms)
    if rule.dataset:
        document["datasets"] = [rule.dataset]

    jobs = ", ".join(map(repr, rule.jobs))
    ways = "; ".join(_summary(way, releases) for way, releases in by_way.items())
    comments = [
        *_comment(f"{part!r}: {OF_PART.get(part, WHAT[rule.kind])}. In job {jobs}: {ways}."),
        *_comment(f"Tensors: {'; '.join(map(_listed, by_way.values()))}."),
    ]
    return "\n".join(["", *comments, "[[allow]]", ""]) + to_toml(document)


def _named(name: str, taken: Collection[str]) -> str:
    """A rule's name that no other has; of a long one, the beginning and a digest."""
    fits = len(name) <= LONGEST_NAME - LONGEST_NUMBER
    short = f"{name[: LONGEST_NAME - LONGEST_NUMBER - 9]}-{sha256(name.encode()).hexdigest()[:8]}"
    first = name if fits else short
    numbered = map(f"{first}-{{}}".format, count(2))
    return next(filterfalse(taken.__contains__, chain([first], numbered)))


def _distinct(texts: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(texts))


def _summary(way: str, releases: Sequence[Release]) -> str:
    size = sum(release.nbytes for release in releases)
    return f"{number(len(releases), 'tensor')}, {size:,} bytes per round, {HOW[way]}"


def _listed(releases: Sequence[Release]) -> str:
    shown = [f"{release.name} {list(release.shape)}" for release in releases[:LISTED]]
    if (more := len(releases) - LISTED) > 0:
        shown.append(f"and {more} more, listed by staddle policy check")
    return "; ".join(shown)


def _glob(name: str) -> str:
    # The first segment names a module, whose layers leave together.
    head, dot, _ = name.partition(".")
    return f"{head}.**" if dot else head


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
    )
