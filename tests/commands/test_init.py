import re
import tomllib
from itertools import pairwise
from typing import get_args, get_origin

import pytest
from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from support.refusals import refused
from typer.testing import CliRunner

from staddle.algorithms.catalog import ALL_METHODS, METHODS, method_class, method_options
from staddle.algorithms.data.sources.formats.npz import Npz
from staddle.algorithms.job.job import Job, JobFile
from staddle.algorithms.job.privacy import signed_sigma
from staddle.algorithms.tasks.classification import Classification
from staddle.algorithms.tasks.registry import TASKS
from staddle.algorithms.tasks.task import Task
from staddle.commands.federation.operator_client import OperatorConfig
from staddle.commands.main import app
from staddle.commands.privacy.noise import planned
from staddle.commands.terminal import job_example
from staddle.commands.terminal.job_example import MODEL, SETTINGS, TaskKind
from staddle.coordinator.config import CoordinatorConfig
from staddle.errors import LocalError
from staddle.files.documents import parse_toml
from staddle.security.policy.file import PolicyFile
from staddle.silo.config import SiloConfig

SETTING = re.compile(r"^# (\[\[?[a-z.]+\]\]?|[a-z0-9_]+ = .*)$", re.MULTILINE)
PURPOSE = 'For a "test", \\ and no more'
FILES = [
    ("silo", (), SiloConfig, 0o600),
    ("coordinator", (), CoordinatorConfig, 0o600),
    ("operator", (), OperatorConfig, 0o600),
    ("policy", (), PolicyFile, 0o644),
    *(("job", ("--method", method), JobFile, 0o644) for method in METHODS),
    ("job", ("--method", "fedaims", "--private"), JobFile, 0o644),
    ("job", ("--method", "statistics"), JobFile, 0o644),
    ("job", ("--method", "statistics", "--private"), JobFile, 0o644),
]


def uncommented(text):
    return SETTING.sub(r"\1", text)


@pytest.fixture
def init(tmp_path):
    def call(noun, *arguments):
        path = tmp_path / f"{noun}.toml"
        arguments += ("--purpose", PURPOSE) * (noun == "job")
        result = CliRunner().invoke(app, [noun, "init", str(path), *arguments])
        if result.exception:
            raise result.exception
        return path

    return call


# keys that the example's other keys rule out: what stands above these tells them
TOLD = {
    ("model", "inputs"): "inputs = { image",
    ("model", "outputs"): "outputs = 1",
    ("task", "gamma"): "gamma = 2.0",
    ("metrics", "torchmetrics"): "torchmetrics = [{ name",
    ("transport", "keep"): "keep = 0.05",
    ("training", "command"): 'command = ["srun',
    ("training", "environment"): 'environment = ["CUDA_VISIBLE_DEVICES',
}


def models(annotation):
    """The models that an annotation holds: itself, or one of a union or tuple."""
    # an example is of the task that a job has without its table
    if annotation is Task:
        return [Classification]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in getattr(annotation, "__args__", ()) for model in models(inner)]


def fields(model, path=()):
    """Path, field and inner models of every field of a model, nested ones too."""
    for name, field in model.model_fields.items():
        inner = models(field.annotation)
        yield (*path, name), field, inner
        # tables with names of their own
        named = ("*",) if get_origin(field.annotation) is dict else ()
        for one in inner:
            yield from fields(one, (*path, name, *named))


def at(document, path):
    """What stands at a path; of repeated tables the first that has it, and of those with names of
    their own.
    """
    for key in path:
        if isinstance(document, list | tuple):
            document = next((each for each in document if key in each), document[0])
        if key == "*" and isinstance(document, dict) and document:
            document = next(iter(document.values()))
            continue
        if not isinstance(document, dict) or key not in document:
            return PydanticUndefined
        document = document[key]
    return document


@pytest.mark.parametrize(
    ("noun", "arguments", "model", "mode"),
    FILES,
    ids=[" ".join([noun, *words]) for noun, words, _, _ in FILES],
)
def test_an_example_has_every_key_with_its_default(init, noun, arguments, model, mode):
    path = init(noun, *arguments)
    assert path.stat().st_mode & 0o777 == mode
    text = path.read_text()
    assert max(map(len, text.splitlines())) <= 120
    parse_toml(text.encode(), model, "as it stands")
    parsed = parse_toml(uncommented(text).encode(), model, "with every line")
    # the policy's second rule has the keys of its first
    documented = text.partition("# How many test records")[0]
    for above, line in pairwise(documented.splitlines()):
        if re.match("(# )?[a-z0-9_]+ = ", line):
            assert above.startswith("# "), f"nothing says what {line!r} does"
            assert not SETTING.match(above), f"nothing says what {line!r} does"
    given, everything = tomllib.loads(text), tomllib.loads(uncommented(text))
    for where, field, inner in fields(model):
        if where[0] == "data" and where[1:] and where[1] not in Npz.model_fields:
            continue  # of another kind: docs/operate.md has an example of each
        if where[:3] == ("datasets", "*", "data") and where[3:]:
            continue  # as of [data]
        if where[:2] in TOLD:
            table = text.partition(f"[{where[0]}]")[2].partition("\n\n")[0]
            words = re.escape(TOLD[where[:2]])
            assert re.search(rf"^# .*\b{words}\b", table, re.MULTILINE), where
            continue
        assert at(everything, where) is not PydanticUndefined, f"{where} is missing"
        if field.is_required():
            continue
        if at(given, where) is PydanticUndefined and not inner and field.default is not None:
            default = field.get_default(call_default_factory=True)
            shown = at(parsed.model_dump(warnings=False), where)
            if shown is PydanticUndefined:  # a document has the key only where it is set
                shown = at(everything, where)
            assert shown == default, f"{where}: {shown!r} is shown, {default!r} is the default"


LINE = re.compile(r"(?:# )?(?:\[+([a-z_.]+)\]+|([a-z0-9_]+) = .*)")


def settings(text):
    """Each setting of an example that has a line of its own: its path, and what stands above."""
    table, above = (), []
    for line in text.splitlines():
        if found := LINE.fullmatch(line):
            table = tuple(found[1].split(".")) if found[1] else table
            if found[2]:
                yield (*table, found[2]), " ".join(above)
            above = []
        else:  # a blank line ends a comment
            above = [*above, line] if line else []


def required_by(model):
    """Paths of all settings, and whether their table needs each; of [data], those of an npz."""
    for path, field, _ in fields(model):
        if "data" not in path[:-1]:
            yield path, field.is_required()
    for table in (("data",), ("datasets", "survival", "data")):
        yield from (((*table, n), f.is_required()) for n, f in Npz.model_fields.items())


EXAMPLES = [
    *((noun, words, model) for noun, words, model, _ in FILES),
    ("job", ("--private",), JobFile),
    *(("job", ("--task", task), JobFile) for task in job_example.OTHERS),
]


@pytest.mark.parametrize(
    ("noun", "arguments", "model"),
    EXAMPLES,
    ids=[" ".join([noun, *words]) for noun, words, _ in EXAMPLES],
)
def test_an_example_marks_the_settings_that_a_table_needs_and_no_others(
    init, noun, arguments, model
):
    # the policy's second rule has the keys of its first
    text = init(noun, *arguments).read_text().partition("# How many test records")[0]
    needed = dict(required_by(model))
    if model is JobFile:
        task = TASKS[tomllib.loads(uncommented(text))["task"]["kind"]]
        needed |= {("task", n): f.is_required() for n, f in task.model_fields.items()}
        needed[("purpose",)] = True  # of a job file, and not of a document
    named = {"dataset": ("dataset", "*"), "datasets": ("datasets", "*")}
    marked = {}
    for path, above in settings(text):
        # tables with names of the silo's own
        own = path if path in needed else (*named.get(path[0], path[:1]), *path[2:])
        if path[:2] != ("method", "options"):
            marked.setdefault(own, set()).add(above.startswith("# Required. "))
    assert marked == {path: {needed[path]} for path in marked}


def test_a_job_example_names_every_task_and_a_changed_default_is_that_of_the_example(init):
    text = init("job").read_text()
    (about,) = re.findall(r"^# \[task\]\n((?:# .*\n)+)# kind = ", text, re.MULTILINE)
    assert all(f'"{kind}"' in about for kind in TASKS)
    changed = text.replace("# [task]", "[task]").replace("# kind = ", "kind = ")
    everything = uncommented(text).replace('loss = "cross-entropy"', 'loss = "focal"\ngamma = 2.0')
    by_default = parse_toml(text.encode(), JobFile, "f")
    assert parse_toml(changed.encode(), JobFile, "f").task == by_default.task == Classification()
    focal = parse_toml(everything.encode(), JobFile, "f").task
    assert (focal.loss, focal.gamma) == ("focal", 2)


OTHER_TASKS = sorted(job_example.OTHERS)
ANY_TASK = [name for name, method in METHODS.items() if not method.needs_classes]


def test_every_task_can_be_drafted():
    assert {*OTHER_TASKS, "classification"} == TASKS.keys() == {*get_args(TaskKind)}


@pytest.mark.parametrize("method", ANY_TASK)
@pytest.mark.parametrize("task", OTHER_TASKS)
def test_a_job_example_of_another_task_can_be_signed(init, task, method):
    path = init("job", "--task", task, "--method", method)
    job = Job.from_toml(path)
    assert job.document()["task"]["kind"] == job.task.kind == task
    assert job.metrics.asked <= job.task.own_metrics
    text = path.read_text()
    assert max(map(len, text.splitlines())) <= 120
    shown = tomllib.loads(uncommented(text))["task"]
    told = {"delta", "positive_weights", "class_weights"}
    assert TASKS[task].model_fields.keys() - told <= shown.keys()
    parse_toml(uncommented(text).encode(), JobFile, "with every line")
    for name, field in TASKS[task].model_fields.items():
        assert field.default in (None, PydanticUndefined) or shown[name] == field.default


def test_a_private_job_example_of_another_task_can_be_signed(init):
    job = planned(Job.from_toml(init("job", "--task", "segmentation", "--private")), "f")
    assert (job.model.name, job.document()["privacy"]["epsilon"]) == ("unet", "8.0")


@pytest.mark.parametrize("method", ["fedproto", "statistics"])
def test_a_job_example_of_a_classification_is_of_no_other_task(init, tmp_path, method):
    with refused(f"--task regression: the example of method '{method}' is of a classification"):
        init("job", "--task", "regression", "--method", method)
    assert not (tmp_path / "job.toml").exists()


def test_lines_that_a_task_changes_stand_in_the_template():
    for task, settings in job_example.OTHERS.items():
        lines = job_example.job_text("fedavg", task).splitlines()
        assert {*settings["lines"].values()} <= {*lines}, task
        assert not settings["lines"].keys() & {*lines}, task


def test_lines_that_a_method_changes_stand_in_the_template():
    """A line that does not would stay as it is."""
    for method, settings in SETTINGS.items():
        for private in (False, True):
            changed = settings.get("lines", {}) | settings.get("private" * private, {})
            lines = job_example.job_text(method, private=private).splitlines()
            assert set(changed.values()) <= {*lines}, method
            assert not changed.keys() & {*lines}, method


@pytest.mark.parametrize("method", ["fedavg", "fedper", "fedprox", "fedssa", "pfedsim", "ppfl"])
def test_the_example_of_a_blind_job_is_private_unless_somebody_says_no(init, method):
    path = init("job", "--method", method, "--blind")
    assert job_example.SLOWER.keys() < {name for name in METHODS if METHODS[name].sums_steps}
    job = planned(Job.from_toml(path), "f")
    assert job.security.required
    assert job.private.shared == METHODS[method].sums_steps
    assert job.rounds == (120 if job.private.shared else 20)
    assert job.private.local_rate == float(job_example.SLOWER.get(method, 1))
    assert float(signed_sigma(job)) < 2.5
    text = path.read_text()
    for line in (job_example.BLIND | job_example.BLIND_OF.get(method, {})).values():
        assert f"\n{line}\n" in text
    path.unlink()
    open_job = Job.from_toml(init("job", "--method", method, "--blind", "--no-privacy"))
    assert (open_job.privacy, open_job.security.required) == (None, True)
    assert open_job.document()["schema"]


def test_not_private_is_said_of_a_blind_example_alone(init):
    for options in ((), ("--blind", "--private")):
        with refused("--no-privacy goes with --blind alone"):
            init("job", "--no-privacy", *options)


@pytest.mark.parametrize("method", [*ALL_METHODS, "fedrep-adam", "fedbabu-momentum"])
def test_a_job_example_can_be_signed_and_has_all_options_of_its_method(init, method):
    path = init("job", "--method", method)
    job = Job.from_toml(path)
    assert job.document()["method"]["name"] == method
    assert job.method_options == method_options(method, {})
    model = {**MODEL, **SETTINGS.get(method, {}).get("model", {})}
    assert {key: getattr(job.model, key) for key in model} == model
    text = uncommented(path.read_text())
    options = tomllib.loads(text)["method"].get("options", {})
    model = method_class(method).options_model
    assert options.keys() == model.model_fields.keys() == job_example.docstrings(model).keys()
    assert parse_toml(text.encode(), JobFile, "f").method.version == method_class(method).version
    checked = method_options(method, options)
    for name, field in model.model_fields.items():
        assert field.default is None or getattr(checked, name) == field.default


# of which each spends in its own way
@pytest.mark.parametrize("method", ["fedaims", "fedsimsup", "ppfl"])
def test_a_private_job_example_can_be_signed_too(init, method):
    job = planned(Job.from_toml(init("job", "--method", method, "--private")), "f")
    assert job.document()["privacy"]["epsilon"] == "8.0"
    assert float(signed_sigma(job)) > 0.5


def test_docstrings_are_read_from_the_options(init):
    said = job_example.docstrings(method_class("pfedsim").options_model)
    assert said["rho"] == "Share of the rounds that the generalisation phase takes."
    text = init("job", "--method", "pfedsim").read_text()
    assert f"# {said['rho']}\n# rho = 0.5\n" in text
    assert 'One of "mean", "per_class".\n# similarity = "mean"\n' in text


def test_a_job_example_without_a_purpose_asks_for_one(init, tmp_path):
    assert Job.from_toml(init("job")).purpose == PURPOSE
    path = tmp_path / "asked.toml"
    result = CliRunner().invoke(app, ["job", "init", str(path)])
    assert "edit it: say in purpose what the job is for" in " ".join(result.output.split())
    with refused(r"asked\.toml: purpose is missing, and people at the silos decide by it"):
        Job.from_toml(path)
    with refused(r"other\.toml: purpose = 'short'"):
        raise (
            CliRunner()
            .invoke(app, ["job", "init", str(tmp_path / "other.toml"), "--purpose", "short"])
            .exception
        )
    assert not (tmp_path / "other.toml").exists()


def test_an_unknown_option_of_a_method_is_told_what_was_meant(init):
    path = init("job", "--method", "pfedsim")
    text = uncommented(path.read_text()).replace("rho = ", "roh = ")
    # settings that do nothing in a private job would be told first
    path.write_text(
        re.sub(r"^(batch_size|last_batch|shuffle) = .*\n", "", text, flags=re.MULTILINE)
    )
    with refused(r"\[method.options\] of pfedsim: unknown key 'roh'; did you mean 'rho'\?"):
        Job.from_toml(path)


def test_an_example_never_overwrites(init, tmp_path):
    path = init("silo")
    path.write_text("mine")
    with pytest.raises(LocalError, match=r"silo\.toml: exists already"):
        init("silo")
    assert path.read_text() == "mine"
    with pytest.raises(LocalError, match="did you mean 'fedper'"):
        init("job", "--method", "fedprr")
    assert not (tmp_path / "job.toml").exists()


def test_the_example_policy_lets_nothing_leave_as_it_stands(init):
    text = init("policy").read_text()
    assert parse_toml(text.encode(), PolicyFile, "f").allow == ()
    rules = parse_toml(uncommented(text).encode(), PolicyFile, "f").allow
    assert [rule.name for rule in rules] == ["extractor", "metrics"]


AT_THE_TOP, IN_TRAINING = "belongs at the top of the file", "belongs in [training]"
TRESHOLD = "'trust.treshold'; did you mean 'threshold'?"


MODELS = {noun: model for noun, _, model, _ in FILES}
UNKNOWN = [
    ("silo", "log = ", "logs = ", "unknown key 'logs'; did you mean 'log'?"),
    ("silo", "[training]", "[traning]", "unknown key 'traning'; did you mean 'training'?"),
    ("silo", "threshold = ", "treshold = ", f"unknown key {TRESHOLD}"),
    ("silo", "sha256 = ", "sha265 = ", "unknown key 'weights.0.sha265'; did you mean 'sha256'?"),
    ("silo", "[training]\n", '[training]\nlog = "json"\n', f"'log' {AT_THE_TOP}"),
    ("silo", "[data]\n", "[data]\nthreads = 3\n", f"'data.threads'; 'threads' {IN_TRAINING}"),
    ("coordinator", "jobs = ", "job = ", "unknown key 'job'; did you mean 'jobs'?"),
    ("coordinator", "[timing]", "[timings]", "unknown key 'timings'; did you mean 'timing'?"),
    ("coordinator", "beat_seconds", "beat_secs", "unknown key 'timing.beat_secs'; did you mean"),
    ("coordinator", "[trust]\n", "[trust]\nhold_seconds = 3\n", "belongs in [timing]"),
    ("operator", "keys = ", "key = ", "unknown key 'key'; did you mean 'keys'?"),
    ("operator", "threshold = ", "treshold = ", TRESHOLD),
    ("policy", "[control]", "[controls]", "unknown key 'controls'; did you mean 'control'?"),
    ("policy", "[[allow]]", "[[alow]]", "unknown key 'alow'; did you mean 'allow'?"),
    ("policy", "never = ", "nevr = ", "unknown key 'allow.0.nevr'; did you mean 'never'?"),
    (*("policy", "max_bytes_per_round", "max_bytes"),
        "'limits.max_bytes'; did you mean 'max_bytes_per_round'? 'max_bytes' belongs in [control]"),
    ("job", "rounds = ", "round = ", "unknown key 'round'; did you mean 'rounds'?"),
    ("job", "[training]", "[trainin]", "unknown key 'trainin'; did you mean 'training'?"),
    ("job", "epochs = ", "epoch = ", "unknown key 'training.epoch'; did you mean 'epochs'?"),
    ("job", "[model]\n", "[model]\nepochs = 2\n", f"'model.epochs'; 'epochs' {IN_TRAINING}"),
    ("job", "[training]\n", "[training]\nseed = 2\n", f"'training.seed'; 'seed' {AT_THE_TOP}"),
]  # fmt: skip


@pytest.mark.parametrize(("noun", "old", "new", "said"), UNKNOWN)
def test_an_unknown_key_or_table_of_each_file_is_told_what_was_meant(init, noun, old, new, said):
    text = uncommented(init(noun).read_text())
    assert old in text
    with pytest.raises(LocalError) as caught:
        parse_toml(text.replace(old, new).encode(), MODELS[noun], "f")
    assert said in str(caught.value)


def test_docstrings_of_inherited_options_come_before_a_methods_own():
    said = job_example.docstrings(method_class("fedprox").options_model)
    assert list(said) == ["weights", "mu"]
    assert said["weights"] == "A silo's weight: its training records, or 1."


LEAKS = "what a model made to leak reveals of single records"
BESIDE = f"for blind sums, add [privacy]: blind sums do not bound {LEAKS}"
DRAFTED = ["As --private drafts it, the job is private: noise of ", "of 8 at delta = 1e-05"]
PRIVATE = ["as drafted, the job is private: noise of ", "441 steps at most, epsilon 7.9"]


@pytest.mark.parametrize(
    ("method", "options", "said"),
    [
        ("fedavg", (), [BESIDE, *DRAFTED]),
        ("ppfl", ("--private",), PRIVATE),
        ("fedfomo", (), ["the job is refused: job 'first'", "choose fedavg"]),
    ],
)
def test_a_job_example_says_what_privacy_costs(tmp_path, method, options, said):
    path = tmp_path / "job.toml"
    result = CliRunner().invoke(app, ["job", "init", str(path), "--method", method, *options])
    assert result.exit_code == 0, result.output
    shown = " ".join(result.output.split())
    assert all(each in shown for each in said), shown
