"""The commented example that ``staddle job init`` writes.

It is templates/job.toml with the options of a method, the table of a task from tasks.toml next to
it, and a small model that fits every method's example; a few methods need settings of their own.
"""

import ast
import inspect
import textwrap
from collections.abc import Mapping
from itertools import pairwise
from string import Template
from typing import Any, Literal, cast, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from ...algorithms.catalog import method_class, names, without_optimiser
from ...algorithms.method import Method
from ...algorithms.models.build import ModelOptions, input_shape
from ...algorithms.models.registry import NETWORKS
from ...errors import LocalError
from ...files.documents import Strict
from . import examples
from .toml import inline

# The demo trains the same model.
MODEL: Mapping[str, Any] = {"name": "cnn-digits", "classes": 10, "norm": "none"}
# By task, a small model in its place, and what else of the template is another.
NO_CONFUSION = {"confusion = true": "# confusion = false"}
OTHERS: Mapping[str, Mapping[str, Any]] = {
    "multilabel": {"model": {"name": "mlp", "classes": 3, "input": (1, 1, 20)}, "lines": {}},
    "regression": {
        "model": {"name": "mlp", "outputs": 1, "input": (1, 1, 10)},
        "lines": {**NO_CONFUSION, "# targets = false": "targets = true"},
    },
    "survival": {
        "model": {"name": "mlp", "outputs": 3, "input": (1, 1, 10)},
        "lines": {**NO_CONFUSION, "# risk_bins = 0": "risk_bins = 64"},
    },
    "segmentation": {
        "model": {"name": "unet", "classes": 2, "input": (1, 64, 64), "norm": "group"},
        "lines": NO_CONFUSION,
    },
}
TaskKind = Literal["classification", "multilabel", "regression", "survival", "segmentation"]
# lines of the example that declare two features
DECLARING = (
    "input = [1, 1, 3]",
    'class_names = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]',
    "[[features]]",
    'name = "age"',
    "least = 0.0",
    "most = 120.0",
    'name = "smoker"',
    'categories = ["no", "yes"]',
)
# What a method needs to make sense in a job as short as the demo's; there the other jobs run with
# the same model and participation, so that the comparison is one.
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    # It moves the models of absent silos; of eight, a blind round takes one of two batches.
    "fedsimsup": {"silos": 8, "participation": 0.75, "options": {"tau_theta": 2}},
    # header rows grow while μ > 0; 20 rounds of that are too many here
    "fedssa": {"options": {"t_stable": 4}},
    "fedbn": {"model": {"norm": "group"}},  # it shares all but the norm layers
    # it supervises the blocks of a network
    "fedaims": {"model": {"name": "convnet-digits", "norm": "group"}},
    # It counts once, and what there is to count the job declares.
    "statistics": {
        "model": {"name": "tab-resnet", "input": (1, 1, 3)},
        "rounds": 1,
        "lines": {
            **dict(zip(map("# {}".format, DECLARING), DECLARING, strict=True)),
            "confusion = true": "# confusion = false",
        },
        # Noise of 20 would hide the sums of a hospital.
        "private": {"# statistics_sigma = 20.0": "statistics_sigma = 2.0"},
    },
}


# What a blind job has in place of lines of the template.
BLIND = {
    '# secure_aggregation = "off"': 'secure_aggregation = "required"',
    "# min_cohort = 2": "min_cohort = 3",
}
# What a blind job of some methods has besides: sums by class tell how many silos hold each, and
# a matrix of test records would tell it again; and four silos are one too few where some are away.
BLIND_OF = {
    **dict.fromkeys(("fedaims", "fedgh", "fedpac", "fedproto", "fedssa", "ppfl"), NO_CONFUSION),
    "fedsimsup": {
        'silos = ["hospital-a", "hospital-b", "hospital-c", "hospital-d"]': (
            "silos = [" + ", ".join(f'"hospital-{letter}"' for letter in "abcdefgh") + "]"
        )
    },
}
# What one has whose silos share their noise: a round is one step of many, and whole epochs of
# pFedSim's second phase are few.
SHARED = {
    '# noise = "local"': 'noise = "shared"',
    "rounds = 20": "rounds = 120",
    "lr = 0.05": "lr = 1.0",
    "sample_rate = 0.05": "sample_rate = 0.1",
    '# norm = "none"': 'norm = "group"',
    "# rho = 0.5": "rho = 0.97",
}
# What has local noise all the same bears smaller steps: parts that stay, and rounds that sum none.
SLOWER = {"fedper": "0.5", "fedrep": "0.5", "lg-fedavg": "0.5", "fedrod": "0.5", "fedbn": "0.5"}
SLOWER |= {"pfedsim": "0.1", "fedavg-ft": "0.1", "fedbabu": "0.1"}

WIDTH = 118
# in a comment: a purpose that is not the job's own would mislead those who decide by it
PURPOSE = "Predict the length of stay from vital signs, for the planning of wards"
# examples for numbers that are left out by default; the first that the model takes
WITHOUT_DEFAULT = (1.0, 1, 0.25)


def job_text(
    method: str,
    task: TaskKind = "classification",
    *,
    private: bool = False,
    blind: bool = False,
    purpose: str = "",
) -> str:
    """A job file for one method and task, its options and a model that works with both.

    If it is ``private`` and ``blind``, its silos share their noise where the method lets them.
    Without a ``purpose`` it cannot be signed yet.

    Returns TOML. LocalError names the known methods for an unknown one, and says where the method's
    example is of a classification.
    """
    chosen, settings = method_class(method, "--method"), SETTINGS.get(without_optimiser(method), {})
    drafted = OTHERS.get(task, {"model": MODEL, "lines": {}})
    if task in OTHERS and (chosen.needs_classes or "lines" in settings):
        raise LocalError(
            f"--task {task}: the example of method {method!r} is of a classification; leave --task"
            " out, or choose another --method"
        )
    # With the defaults filled in, which decide below what is written out.
    model = ModelOptions.model_validate({**drafted["model"], **settings.get("model", {})})
    # Only a method that measures something releases statistics, which need noise of their own.
    measures = chosen.measure is not Method.measure

    # a line of the template with its default stands commented out
    norm, participation = '# norm = "none"', "# participation = 1.0"
    if model.norm != "none":
        norm = f'norm = "{model.norm}"'
    if "participation" in settings:
        participation = f"participation = {settings['participation']}"
    # a model that takes any input has a default that suits nobody
    given = "" if task in OTHERS else "# "
    comment = "" if private else "# "
    shares = private and blind and chosen.sums_steps
    statistics = f"what {method} measures" if measures else f"{method} has none"
    text = Template(examples.text("job")).substitute(
        method=method,
        rounds=settings.get("rounds", 20),
        version=chosen.version,
        methods=_listed(names()),
        options=options_text(chosen.options_model),
        model=model.name,
        models=_listed(NETWORKS),
        outputs=f"{model.outputs_key} = {model.width}",
        input=f"{given}input = {list(input_shape(model))}",
        class_names={
            "classes": f"# class_names = {inline(list(map(str, range(model.width))))}",
            "outputs": "# Only with model.classes.",
        }[model.outputs_key],
        task=_task_table(task),
        norm=norm,
        participation=participation,
        purpose=f"purpose = {inline(purpose)}" if purpose else f"# purpose = {inline(PURPOSE)}",
        privacy=f"{comment}[privacy]",
        on=comment,
        statistics=statistics,
    )
    lines = {
        **drafted["lines"],
        **settings.get("lines", {}),
        **settings.get("private" * private, {}),
    }
    if blind:
        lines |= BLIND | BLIND_OF.get(method, {})
    if shares:
        rate = SLOWER.get(without_optimiser(method), "1.0")
        lines |= {**SHARED, "# local_rate = 1.0": f"local_rate = {rate}"}
    for line, other in lines.items():
        text = text.replace(f"\n{line}\n", f"\n{other}\n")
    return text


def _task_table(task: str) -> str:
    """The table of a task; that of a classification is a comment, since jobs need none."""
    tables = examples.text("tasks").strip().split("\n\n")
    return next(table for table in tables if f'kind = "{task}"\n' in f"{table}\n")


def _listed(names: Any) -> str:
    width = WIDTH - len("# Required. One of: .")
    return "\n# ".join(textwrap.wrap(", ".join(names), width, break_on_hyphens=False))


def options_text(model: type[Strict]) -> str:
    """The options of a method, each commented out, below what its docstring says.

    All lines begin with "# ". Defaults are written as TOML values.
    """
    docs, lines = docstrings(model), []
    for name, field in model.model_fields.items():
        sentences = [docs.get(name, ""), _choices(field)]
        # TOML has no null, so a default of None cannot be written.
        if field.default is None:
            sentences.append("Left out by default.")
        lines += textwrap.wrap(" ".join(filter(None, sentences)), WIDTH)
        lines.append(f"{name} = {inline(_example(field))}")
    return textwrap.indent("\n".join(lines or ["It has none."]), "# ")


def docstrings(model: type[Strict]) -> dict[str, str]:
    """The string below each field, by name, those that it inherits first.

    Read from the source: Python does not keep strings below fields.
    """
    found: dict[str, str] = {}
    # From the base down: inherited options come first, and one that is
    # declared again has its own text.
    for cls in reversed(model.__mro__):
        # One without fields, such as of a method with a server optimiser, may have no source.
        if issubclass(cls, Strict) and vars(cls).get("__annotations__"):
            found |= _docstrings(cls)
    return found


def _docstrings(cls: type[Strict]) -> dict[str, str]:
    # The fields' docstrings are expressions of the class's body, right after their fields.
    (source,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    found = {}
    for field, below in pairwise(cast("ast.ClassDef", source).body):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = " ".join(text.replace("``", "").split())
    return found


def _choices(field: FieldInfo) -> str:
    if get_origin(field.annotation) is not Literal:
        return ""
    return f"One of {', '.join(map(inline, get_args(field.annotation)))}."


def _example(field: FieldInfo) -> Any:
    """The default, or an example where a field has none."""
    if field.default is not None:
        return field.default
    adapter: TypeAdapter[Any] = TypeAdapter(cast("Any", field.annotation))
    # The annotation only says what is valid, so numbers are tried until one is.
    for number in WITHOUT_DEFAULT:
        try:
            return adapter.validate_python(number)
        except ValidationError:
            continue
    return ""
