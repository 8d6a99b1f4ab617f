"""The comparison of an experiment's methods as Markdown.

It says what was run (what all runs have in common, and what is different for a method), every
measure, the weakest silos and the cost. The same runs make the same text.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from itertools import chain, product
from operator import attrgetter
from pathlib import PurePosixPath
from statistics import fmean, median
from typing import Any
from urllib.parse import quote

from ...algorithms.job.job import Job
from ...algorithms.partition.file import PartitionFile
from ...algorithms.tasks.counting import ScoreForm
from ...errors import LocalError, check_local
from ..experiment.plan import Population
from ..run.history import Measure, Measured
from ..run.manifest import SiloRecords
from ..run.scores import (
    ALL,
    AVERAGES,
    CHOICES,
    DEFINITIONS,
    TITLES,
    Average,
    Choice,
    Named,
    Spread,
    over_seeds,
    scores,
    spread,
)
from .attendance_tables import attendance_section, newcomers_section
from .finished_runs import Recorded
from .markdown import NONE, MarkdownColumn, escaped, method_table, table
from .silo_spread import against, kept, spectrum
from .work_table import work_section

Rows = list[tuple[str, str]]
Groups = Mapping[str, Sequence[Recorded]]  # runs by label, those of a label by seed
Looks = Mapping[str, Mapping[int, Measured]]  # one of each run, by label and seed
SiloRows = tuple[list[str], list[list[str]]]  # titles of numbers; rows that begin with a label

SHOWN: tuple[Measure, ...] = (*ALL, "selected/before", "selected/after")
# Each silo trains alone: the comparison shows what a silo gains by federation.
LOCAL = "local"
SPECTRUM = {
    "least": "worst silo",
    "worst_tenth": "worst tenth",
    "median": "median",
    "best_tenth": "best tenth",
    "most": "best silo",
    "spread": "spread",
    "variance": "variance",
}
DUELS = ("better", "equal", "worse")
SIDES = {"training": "train", "validation": "validation", "test": "test"}  # of ``SiloRecords``

# of a job's document, that a simulation heeds
TABLES = ("rounds", "participation", "min_cohort", "model", "task", "training")
KEEPS = {
    "delivered": "the model delivered last (all/aggregated)",
    "trained": "the model trained last (all/trained)",
}


def check_comparable(groups: Groups, population: Population | None = None) -> None:
    """LocalError unless all runs had the same records, and those of a label the same method.

    The records must be those of the population, where there is one.
    """
    everyone = _all_runs(groups)
    # Any run will do, since all have to agree with it.
    first = everyone[0]
    digest = first.identity.population
    if population is not None and population.digest != digest:
        raise LocalError(
            f"{first.folder}: its silos held other records than now; choose another --out"
        )

    # scores on different records cannot be compared, and a table would not show the difference
    for run in everyone:
        check_local(
            run.identity.population == digest,
            f"{run.folder}: its silos hold other records than those of {first.folder}, so"
            " the two cannot be compared; let each partition have an --out of its own",
        )
        check_local(
            run.identity.attendance == first.identity.attendance,
            f"{run.folder}: has another [attendance] than {first.folder}, so the two cannot be"
            " compared; let each have an --out of its own",
        )
    for label, runs in groups.items():
        _check_one_job(label, runs)


def _check_one_job(label: str, runs: Sequence[Recorded]) -> None:
    # a mean over seeds is a mean of one experiment: nothing but the seed may differ
    expected = _job_less_seed(runs[0])
    for run in runs:
        if _job_less_seed(run) != expected:
            raise LocalError(
                f"{run.folder}: its job is not that of {runs[0].folder}, though both are"
                f" labelled {label!r}; remove the one that is out of date"
            )


def experiment(groups: Groups, partition: PartitionFile | None) -> Rows:
    """Rows of names and values that hold for all runs, as plain text, not yet escaped."""
    everyone = _all_runs(groups)
    first = everyone[0]
    # Seeds of all labels: one label may lack some of them.
    seeds = {run.seed for run in everyone}
    made = {str(run.identity.made_with) for run in everyone}

    # methods of one comparison may draw cohorts of different sizes: all of them are named
    sizes = set()
    for run in _first_of_each(groups):
        sizes.add(_job(run).cohort_size)

    look_every = first.identity.look_every
    looks = "after each round"
    if look_every > 1:
        looks = f"after every {look_every} rounds and after the last"
    return [
        *_partition_rows(partition),
        ("silos", str(len(first.silos))),
        *_record_rows(first.silos),
        *_shared_settings(groups).items(),
        *_attendance_rows(first),
        ("silos drawn per round", " or ".join(map(str, sorted(sizes)))),
        ("seeds", ", ".join(map(str, sorted(seeds)))),
        ("all silos evaluated", looks),
        ("made", "; ".join(sorted(made))),
    ]


def _attendance_rows(run: Recorded) -> Rows:
    set_keys = run.identity.who.model_dump(exclude_defaults=True)
    return [("attendance", _listed(set_keys))] if set_keys else []


def _partition_rows(partition: PartitionFile | None) -> Rows:
    if partition is None:
        return []
    # a partition's file says how it was made, in keys of its maker's own
    how = {"kind": "", **partition.how}  # the kind stands first
    split = how.pop("split", None)
    rows = [
        ("data", f"{partition.data}: {partition.records:,} records"),
        ("partition", _listed({**how, "seed": partition.seed})),
    ]
    if isinstance(split, Mapping):
        # In its own row, since the split decides what is tested on.
        rows.append(("split", _listed(split)))
    return rows


def _record_rows(silos: Sequence[SiloRecords]) -> Rows:
    """How many records the silos have on each side that any of them has."""
    rows = []
    for side, attribute in SIDES.items():
        # None: the silo has no such side.
        counts = [getattr(silo, attribute) or 0 for silo in silos]
        if not any(counts):
            continue
        text = f"{min(counts):,} to {max(counts):,}, median {median(counts):g}"
        total = f"{sum(counts):,} in all"
        rows.append((f"{side} records per silo", f"{text}; {total}"))
    return rows


def methods(groups: Groups) -> list[tuple[str, str]]:
    """By label, the method and the settings that are its own.

    Plain text, not yet escaped.
    """
    shared = _shared_settings(groups)
    rows = []
    for label, runs in groups.items():
        first = runs[0]
        method = first.identity.job["method"]
        # All options, since a later release may change a default.
        options = _listed(method["options"]) or "no options"
        text = f"{method['name']} version {method['version']}; {options}"
        text += f"; a silo keeps {KEEPS[first.product]}"

        # settings that all methods share stand once, with the experiment
        own = _settings(first)
        for key in shared:
            del own[key]
        if own:
            text += f"; {_listed(own)}"
        rows.append((label, text))
    return rows


def drawn(run: Recorded) -> frozenset[str]:
    """The silos that took part in any round, a census included.

    ``Simulation`` calls these the trained silos. Whoever was late has left no trace.
    """
    found: set[str] = set()
    job, who = _job(run), run.identity.who
    late = {line.round: line.late for line in run.work}
    for round_ in range(job.length):
        found.update(set(who.present(job, round_)).difference(late.get(round_, ())))
        # a job may have 100,000 rounds: the draws after the last newcomer add nothing
        if len(found) == len(run.silos):
            break
    return frozenset(found)


def _all_runs(groups: Groups) -> list[Recorded]:
    return list(chain.from_iterable(groups.values()))


def _first_of_each(groups: Groups) -> list[Recorded]:
    """One run per label: the runs of a label differ in the seed alone."""
    return [runs[0] for runs in groups.values()]


def _job(run: Recorded) -> Job:
    return Job.from_document(run.identity.job, str(run.folder), None, federated=False)


def _job_less_seed(run: Recorded) -> Mapping[str, Any]:
    """The job without its seed, and without the initial values that follow from the seed."""
    job = run.identity.job
    start = job.get("start")
    return job | {"seed": None, "start": start and start["made_with"]}


def _settings(run: Recorded) -> dict[str, str]:
    """Such as ``{"training.lr": "0.1"}``; settings that are left out have no entry."""
    settings: dict[str, str] = {}
    for key in TABLES:
        # as key and text, so that settings of two runs can be compared and printed
        value = run.identity.job[key]
        if not isinstance(value, Mapping):
            settings[key] = as_toml(value)
            continue
        for name, inner in value.items():
            if inner is not None:
                settings[f"{key}.{name}"] = as_toml(inner)
    return settings


def _shared_settings(groups: Groups) -> dict[str, str]:
    """The settings that all labels have alike, in the order of the first."""
    shared, *others = map(_settings, _first_of_each(groups))
    for own in others:
        # Includes keys that only the first has.
        different = shared.items() - own.items()
        for key, _ in different:
            del shared[key]
    return shared


def _listed(values: Mapping[str, Any]) -> str:
    pairs = []
    for key, value in values.items():
        if value is not None:
            pairs.append(f"{key} = {as_toml(value)}")
    return ", ".join(pairs)


def as_toml(value: Any) -> str:
    """A value as it stands in a TOML file."""
    match value:
        case bool():
            return str(value).lower()
        case list() | tuple():
            return f"[{', '.join(map(as_toml, value))}]"
        # as a document has an option's decimal
        case {"decimal": str(text), **rest} if not rest:
            return text
        case Mapping():
            return _listed(value)
        case _:
            return str(value)


@dataclass(frozen=True)
class Link:
    """A picture's path, relative to the summary's folder; only a ``shown`` one is embedded.

    ``path`` has forward slashes, also on Windows.
    """

    path: PurePosixPath
    caption: str
    shown: bool = True

    def to_markdown(self) -> str:
        """The Markdown link and a line break, without the mark that embeds a picture."""
        return f"[{escaped(self.caption)}]({quote(str(self.path))})\n"


def summary(
    groups: Groups,
    partition: PartitionFile | None = None,
    pictures: Sequence[Link] = (),
    sweep: str = "",
) -> str:
    """The summary of finished runs by label; ``check_comparable`` must accept them.

    It is Markdown. Without ``partition`` it does not say how records were dealt out. ``sweep`` is
    the section of a sweep.
    """
    # All runs of a folder belong to one experiment, and so to one task.
    first = next(iter(groups.values()))[0]
    title, form = first.identity.job["name"], first.form
    sections = (
        _experiment(groups, partition),
        sweep,
        _silos(groups, form),
        newcomers_section(groups, form),
        _every_measure(groups, form),
        work_section(groups),
        attendance_section(groups),
        _cost(groups),
        _pictures(pictures),
    )
    return "\n".join([f"# {escaped(title)}\n", *filter(None, sections), _meaning(form)])


def _experiment(groups: Groups, partition: PartitionFile | None) -> str:
    columns = [MarkdownColumn("what"), MarkdownColumn("value")]
    rows = [tuple(map(escaped, row)) for row in experiment(groups, partition)]
    text = f"## What was run\n\n{table(columns, rows)}\n"
    for label, own in methods(groups):
        text += f"- **{escaped(label)}**: {escaped(own)}\n"
    return text


def _silos(groups: Groups, form: ScoreForm) -> str:
    alone = trains_alone(groups)
    text = (
        f"## In the end, silo by silo\n\nAfter the last round, on test records, {form.measured_in}"
    )
    if _several(groups):
        text += ", mean ± standard deviation over seeds"
    text += ".\n"

    # a mean over silos hides those that lose: what federation costs one silo shows silo by silo
    if alone is not None:
        silos = len(groups[alone][0].silos)
        text += (
            f"Better, equal and worse count those of the {silos} silos that have a better, the same"
            f" and a worse {form.name} than with **{escaped(alone)}**, where each silo trains"
            " alone, under the same seed.\n"
        )

    # first the model that a silo would use, then both kinds of model for every method, so that
    # methods that keep different ones can be compared
    text += (
        "\n### The model that each silo keeps\n\nThe list of methods above says which model a silo"
        " keeps; a silo that was in no cohort keeps the one delivered last.\n\n"
    )
    text += _by_silo(_by_seed(groups, _kept), alone, form)
    for measure in ALL:
        text += f"\n### {TITLES[measure].capitalize()} ({measure})\n\n"
        text += _by_silo(_by_seed(groups, partial(_last, measure=measure)), alone, form)
    return text


def trains_alone(groups: Groups) -> str | None:
    """The label that the others are compared with: each silo trains alone."""
    # A single method cannot be compared.
    if len(groups) == 1:
        return None
    for run in _first_of_each(groups):
        if run.method == LOCAL:
            return run.label
    return None


def _by_seed(groups: Groups, look: Callable[[Recorded], Measured]) -> Looks:
    looks = {}
    for label, runs in groups.items():
        looks[label] = {run.seed: look(run) for run in runs}
    return looks


def kept_rows(groups: Groups) -> SiloRows:
    """The model that each silo keeps: the titles after "method", and a row per method.

    Plain text, not yet escaped. The last row is of answers that are the same for all records.
    """
    form = next(iter(groups.values()))[0].form
    return _silo_rows(_by_seed(groups, _kept), trains_alone(groups), form)


def _by_silo(looks: Looks, alone: str | None, form: ScoreForm) -> str:
    titles, rows = _silo_rows(looks, alone, form)
    shown = [[escaped(label), *cells] for label, *cells in rows]
    # No method of anybody's.
    shown[-1][0] = f"*{shown[-1][0]}*"
    return method_table(titles, shown)


def _silo_rows(looks: Looks, alone: str | None, form: ScoreForm) -> SiloRows:
    """A row per method, from the look at each of its seeds, and one of the constant answer."""
    averages = _averages(looks)
    titles = [*averages, *SPECTRUM.values()]
    if alone is not None:
        titles += DUELS
    rows = []
    for label, seeds in looks.items():
        # Columns of numbers, each to be averaged over the seeds.
        own = (_numbers(look, averages, form) for look in seeds.values())
        row = [_shown(spread(column), form) for column in zip(*own, strict=True)]
        # No comparison with itself.
        if alone == label:
            row += [NONE] * len(DUELS)
        elif alone is not None:
            row += _duels(seeds, looks[alone], form)
        rows.append([label, *row])
    rows.append(_constant_row(next(iter(looks.values())), averages, len(titles), form))
    return titles, rows


def _averages(looks: Looks) -> list[Average]:
    """The averages that there are: without classes nothing is balanced by them."""
    every = [look for seeds in looks.values() for look in seeds.values()]
    return [name for name in AVERAGES if all(getattr(one, name) is not None for one in every)]


def _constant_row(
    seeds: Mapping[int, Measured], averages: Sequence[Average], columns: int, form: ScoreForm
) -> list[str]:
    """The row of the best answers that are the same for all records of a silo."""
    look = next(iter(seeds.values()))
    numbers = _numbers(replace(look, scores=look.baselines), averages, form)
    row = [_shown(Spread(1, number, None), form) for number in numbers]
    # By class such answers are right for one of all that the silo has, whichever it is.
    if "balanced" in averages:
        row[averages.index("balanced")] = NONE
    return [form.constant, *row, *[NONE] * (columns - len(row))]


def _numbers(look: Measured, averages: Sequence[Average], form: ScoreForm) -> list[float]:
    """The averages and the spectrum of one look, in the order of the columns."""
    own = {average: getattr(look, average) for average in averages}
    # Shares are shown in percent, so their variance is in squared points: twice the factor.
    factor = 100 if form.share else 1
    numbers = asdict(spectrum(look, higher=form.higher)) | own
    numbers["variance"] = factor * look.spread**2
    return [numbers[name] for name in (*averages, *SPECTRUM)]


def _duels(
    seeds: Mapping[int, Measured], others: Mapping[int, Measured], form: ScoreForm
) -> list[str]:
    """Better, equal and worse, the mean over the seeds that both have."""
    # Compare within a seed: with another seed, silos start from another model.
    both = seeds.keys() & others.keys()
    if not both:
        return [NONE] * len(DUELS)

    duels = []
    for seed in both:
        duel = against(seeds[seed], others[seed], higher=form.higher)
        duels.append(astuple(duel))
    means = map(fmean, zip(*duels, strict=True))
    # With one seed, these are whole numbers.
    return [f"{mean:.1f}".removesuffix(".0") for mean in means]


def _every_measure(groups: Groups, form: ScoreForm) -> str:
    found = {}
    for label, runs in groups.items():
        histories = map(attrgetter("history"), runs)
        # Only scores that all seeds of a label have count.
        found[label] = over_seeds([scores(own, higher=form.higher) for own in histories])
    text = f"## Every measure\n\nOn test records, {form.measured_in} as above.\n"
    for choice in CHOICES:
        text += _scores(found, choice, form)
    return text


def _scores(found: Mapping[str, Mapping[Named, Spread]], choice: Choice, form: ScoreForm) -> str:
    """The scores of one choice of rounds: a column per measure that some method has."""
    measured = set().union(*found.values())
    candidates = [(measure, average, choice) for measure, average in product(SHOWN, AVERAGES)]
    # In a fixed order, not in that of the runs.
    columns = [named for named in candidates if named in measured]
    if not columns:
        return ""
    titles = [f"{measure} {average}" for measure, average, _ in columns]
    rows = []
    for label, own in found.items():
        # a measure that this method lacks is a gap in its row
        cells = (_shown(own.get(column), form) for column in columns)
        rows.append([escaped(label), *cells])
    text = f"\n### {choice.capitalize()}\n\nThat is {CHOICES[choice]}.\n\n"
    return text + method_table(titles, rows)


def _cost(groups: Groups) -> str:
    rows = []
    for label, runs in groups.items():
        pace = [NONE, NONE]
        # a run that no process has timed yet says nothing of the pace
        timed = list(filter(attrgetter("seconds"), runs))
        if timed:
            # Rounds of the timed runs only, to match the seconds.
            seconds = sum(map(attrgetter("seconds"), timed))
            rounds = sum(map(attrgetter("rounds"), timed))
            pace = [f"{seconds / len(timed):,.1f}", _pace(rounds / seconds)]
        rows.append([escaped(label), str(len(runs)), *pace])
    text = (
        "## What it took\n\nWall-clock seconds while processes worked on a run. They include"
        " evaluation and, in the first run of a command, the start of its worker processes. They"
        " leave out work that was lost when a process was killed.\n\n"
    )
    titles = ("runs", "seconds per run", "rounds per second")
    return text + method_table(titles, rows)


def _pictures(pictures: Sequence[Link]) -> str:
    if not pictures:
        return ""
    shown, named = "## Pictures\n", ""
    for link in pictures:
        # All other pictures are only linked.
        if link.shown:
            shown += f"\n!{link.to_markdown()}"
        else:
            named += f"- {link.to_markdown()}"
    return f"{shown}\n{named}"


def _meaning(form: ScoreForm) -> str:
    defined = ""
    for name, meaning in (DEFINITIONS | AVERAGES).items():
        defined += f"- **{name}**: {meaning}.\n"
    return (
        f"## What the numbers mean\n\nThe score of a silo is the {form.name} of a model on its own"
        f" records, on the side named; {'more' if form.higher else 'less'} is better.\n\n"
        f"{defined}- **{form.constant}**: the best answer that is the same for all records of a"
        " silo there; a score that is no better shows nothing learnt.\n- **spread**: the"
        " population standard deviation (divided by n) of the silos' scores.\n-"
        " **variance**: its square, of shares in squared percentage points; the lower, the more"
        " alike the silos fare.\n- **worst tenth**, **best tenth**: the mean score of the tenth of"
        " the silos, rounded up, with the worst and with the best scores.\n- **±**: the sample"
        " standard deviation (divided by n − 1) over seeds.\n\nRounds that train count; a census"
        " before the first does not. Seeds determine initial models, cohorts and batches; all seeds"
        " share who holds which record, and on which side.\n"
    )


def _several(groups: Groups) -> bool:
    return any(len(runs) > 1 for runs in groups.values())


def _kept(run: Recorded) -> Measured:
    # Each silo with the model that it keeps.
    return kept(run.history, run.product, drawn(run))


def _last(run: Recorded, measure: Measure) -> Measured:
    # Later entries replace earlier ones.
    return {one.measure: one for one in run.history}[measure]


def _pace(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _shown(value: Spread | None, form: ScoreForm) -> str:
    return NONE if value is None else form.cell(value.mean, value.deviation)
