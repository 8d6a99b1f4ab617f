"""A job's own file of weights: how it is named, found, and what it may hold."""

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file
from support.engines import check_engines_agree
from support.jobs import make_shards
from support.refusals import refused

from staddle.algorithms.engines.simulation import simulate
from staddle.algorithms.job.job import Job
from staddle.algorithms.models.build import ModelOptions, build, start_digest
from staddle.algorithms.models.foreign import builder
from staddle.algorithms.models.pretrained import StartWeights
from staddle.algorithms.training.silo_round import state_to_bytes
from staddle.commands.terminal.toml import to_toml
from staddle.files.documents import validate

DIGITS = {"name": "cnn-digits", "classes": 3}
RESNET = {"name": "torchvision:resnet18", "classes": 3, "head": "fc", "input": [3, 32, 32]}


@pytest.fixture
def read(tmp_path):
    """A job file in a folder of its own, read as ``staddle job sign`` reads it."""

    def call(method="fedper", model=DIGITS, weights=None, **fields):
        document = {
            "version": 1,
            "name": "test",
            "seed": 7,
            "purpose": "For a test",
            "rounds": 2,
            "silos": ["a", "b", "c"],
            "method": {"name": method, "options": fields.pop("options", {})},
            "model": {**model, "weights": {"file": "w.safetensors", **(weights or {})}},
            "training": {"epochs": 1, "batch_size": 8, "lr": 0.1},
            **fields,
        }
        (tmp_path / "job.toml").write_text(to_toml(document))
        return Job.from_toml(tmp_path / "job.toml")

    return call


@pytest.fixture
def write(tmp_path):
    def call(tensors, name="w.safetensors"):
        save_file({name: value.contiguous() for name, value in tensors.items()}, tmp_path / name)
        return tmp_path / name

    return call


def other(model=DIGITS, seed=99):
    """Parts of a model that the job's own streams do not give."""
    return build(validate(model, ModelOptions, "job"), seed)


def flat(parts, *chosen):
    return {
        f"{part}.{name}": value
        for part, module in parts.items()
        for name, value in module.state_dict().items()
        if part in (chosen or parts)
    }


def same(module, values):
    own = module.state_dict()
    return own.keys() == values.keys() and all(torch.equal(own[name], values[name]) for name in own)


def test_the_parts_that_are_named_begin_with_the_file_and_the_others_as_drawn(read, write):
    trained = other()
    write(flat(trained))
    for parts in (["extractor"], ["classifier"], ["extractor", "classifier"]):
        job = read(weights={"parts": parts})
        begun, drawn = job.setting().build(), build(job.model, job.seed, "x")
        fresh = other(seed=7)
        for part in ("extractor", "classifier"):
            source = trained if part in parts else fresh
            assert same(begun[part], source[part].state_dict())
        # a second model that is to differ from the job's is drawn
        assert not same(drawn["extractor"], begun["extractor"].state_dict())
    found = job.start_values()
    assert (found.drawn, found.unused) == ((), ())


def test_a_signed_job_has_digest_and_size_and_no_path(read, write):
    path = write(flat(other(), "extractor"))
    job = read()
    digest, size = hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_size
    document = job.document()
    assert document["model"]["weights"] == {"parts": ["extractor"], "sha256": digest, "size": size}
    back = Job.from_document(document, "the job", None, federated=False)
    assert (back, back.digest, back.weights_file) == (job, job.digest, None)
    # whoever needs the values says where files of weights lie
    (path.parent / "weights").mkdir()
    path.rename(path.parent / "weights" / f"{digest}.safetensors")
    here = back.with_weights(path.parent)
    assert same(here.setting().build()["extractor"], other()["extractor"].state_dict())
    with refused("begins with the file [0-9a-f]{64}.safetensors, and nobody says where it lies"):
        back.setting().build()


def test_a_job_without_a_file_is_as_before(make_job):
    job = make_job("fedper")
    assert "weights" not in job.document()["model"]
    assert job.with_weights(Path("nowhere")) is job
    assert job.start_values().parts == {}


def test_a_file_that_may_not_be_read_is_told(read, write, monkeypatch):
    path = write(flat(other()))

    def denied(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("staddle.algorithms.models.pretrained.open_regular", denied)
    with refused(r"model.weights: .*w.safetensors: cannot read it: Permission denied"):
        read()
    assert not StartWeights(sha256="ab" * 32, size=path.stat().st_size).is_at(path)


def test_a_document_cannot_have_a_machine_open_a_path(read, write):
    write(flat(other()))
    document = read().document()
    for weights in (
        {"file": "/etc/passwd"},
        {**document["model"]["weights"], "file": "w.safetensors"},
    ):
        changed = {**document, "model": {**document["model"], "weights": weights}}
        with refused("model.weights.file: a job file names the file; a job that crosses has its"):
            Job.from_document(changed, "the job", None, federated=False)


def test_a_job_file_names_the_file(read, write, tmp_path):
    path = write(flat(other()))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert read(weights={"sha256": digest, "size": path.stat().st_size}).model == read().model
    with refused(rf"w.safetensors: it has {path.stat().st_size} bytes with SHA-256 {digest}, ex"):
        read(weights={"sha256": "ab" * 32})
    with refused("sha256"):
        read(weights={"sha256": digest.upper()})
    both = read(weights={"parts": ["classifier", "extractor"]})
    assert both.model.weights.parts == ("extractor", "classifier")
    with refused("name each part once"):
        read(weights={"parts": ["extractor", "extractor"]})
    with refused("name the file: file ="):
        StartWeightsTable = {"parts": ["extractor"], "sha256": digest}
        validate(StartWeightsTable, StartWeights, "weights")
    path.unlink()
    with refused(r"model.weights: .*w\.safetensors: cannot read it: No such file"):
        read()
    os.mkfifo(path)
    with refused("is a FIFO, not a file"):
        read()
    path.unlink()
    path.touch()
    with refused("w.safetensors: is empty; fetch it again"):
        read()


def test_names_of_a_whole_module_are_those_of_its_own_state_dict(read, write):
    """A file that torch users have: ``save_file(resnet18(weights=…).state_dict(), …)``."""
    torch.manual_seed(3)
    whole = builder("torchvision:resnet18")((3, 32, 32), 1000).state_dict()
    write(whole)
    job = read(model=RESNET)
    begun = job.setting().build()
    body = {name: value for name, value in whole.items() if not name.startswith("fc.")}
    assert same(begun["extractor"], body)
    assert job.start_values().unused == ("fc.bias", "fc.weight")
    with refused(
        r"'fc.weight' is torch.float32 \[1000, 512\], this job's classifier takes .* \[3,"
    ):
        read(model=RESNET, weights={"parts": ["extractor", "classifier"]}).start_values()


def test_a_head_of_several_submodules_has_their_own_names(read, write):
    model = {"name": "normed", "classes": 3, "head": ["3", "4"], "input": [1, 8, 8]}
    torch.manual_seed(3)
    whole = builder("normed")((1, 8, 8), 3)
    write(whole.state_dict())
    begun = read("fedavg", model, {"parts": ["extractor", "classifier"]}).setting().build()
    assert torch.equal(begun["classifier"][1].weight, whole[4].weight)
    assert torch.equal(begun["extractor"][1].weight, whole[1].weight)


def test_names_of_files_that_staddle_writes(read, write, tmp_path):
    trained = other()
    job = read_of(read, write, flat(trained))  # what the coordinator published
    assert same(job.setting().build()["extractor"], trained["extractor"].state_dict())
    for part in ("extractor", "classifier"):  # one part alone, as FedPer's coordinator has it
        write(trained[part].state_dict())
        begun = read(weights={"parts": [part]}).setting().build()
        assert same(begun[part], trained[part].state_dict())
    # a silo's model.safetensors
    job = read_of(read, write, flat(trained))
    ended = simulate(job, make_shards(job))
    (tmp_path / "w.safetensors").write_bytes(state_to_bytes(ended.states["a"]))
    again = read(weights={"parts": ["extractor", "classifier"]})
    for part in ("extractor", "classifier"):
        assert same(again.setting().build()[part], ended.states["a"].parts[part])


def read_of(read, write, tensors):
    write(tensors)
    return read()


def test_running_statistics_may_be_missing_and_parameters_may_not(read, write):
    trained = other(RESNET)
    values = flat(trained, "extractor")
    buffers = {f"extractor.{name}" for name, _ in trained["extractor"].named_buffers()}
    assert len(buffers) == 60  # mean, variance and count of each norm
    job = read_of(lambda: read("fedavg", RESNET), write, without(values, buffers))
    assert job.start_values().drawn == tuple(name for name in values if name in buffers)
    begun = job.setting().build()["extractor"].state_dict()
    assert all(
        torch.equal(begun[name.removeprefix("extractor.")], value)
        for name, value in values.items()
        if name not in buffers
    )
    some = [name for name in values if name not in buffers][:7]
    write(without(values, some))
    with refused(rf"lacks '{some[0]}', .* and 2 more, which the job's extractor has; it has '"):
        read("fedavg", RESNET).start_values()


def without(values, names):
    return {name: value for name, value in values.items() if name not in names}


def spoilt(name, change):
    values = flat(other())
    return {**values, name: change(values[name])}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda w: w[:1], r"is torch.float32 \[1, 1, .*this job's extractor takes"),
        (lambda w: w.double(), "is torch.float64"),
        (lambda w: w.half(), "is torch.float16"),
        (lambda w: torch.full_like(w, torch.inf), "holds NaN or infinity"),
    ],
)
def test_values_that_do_not_fit_are_named(read, write, change, complaint):
    name = next(name for name, value in flat(other(), "extractor").items() if value.ndim == 4)
    write(spoilt(name, change))
    with refused(complaint):
        read().start_values()


def test_names_that_fit_no_way_or_two_are_told(read, write):
    values = flat(other(), "extractor")
    write({f"module.{name}": value for name, value in values.items()})  # DataParallel's
    first, *_ = other()["extractor"].state_dict()
    with refused(
        rf"has no tensor of the job's extractor, such as '{first}', .*; it has 'module.extractor.*;"
        " rename them so, or with 'extractor.' before, or leave extractor out of"
    ):
        read().start_values()
    write(values)
    with refused("has no tensor of the job's classifier, such as 'weight', 'bias'"):
        read(weights={"parts": ["extractor", "classifier"]}).start_values()
    write(values | {name.removeprefix("extractor."): value + 1 for name, value in values.items()})
    with refused("names the tensors of extractor in two ways, such as '.*', 'extractor..*'; keep"):
        read().start_values()


def test_a_file_that_changed_or_is_none_is_refused(read, write, tmp_path):
    path = write(flat(other()))
    job = read()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    with refused(r"w.safetensors: it has \d+ bytes with SHA-256 [0-9a-f]{64}, expected"):
        job.start_values()
    path.write_bytes(b"\0" * 100)
    with refused("w.safetensors: not a safetensors file"):
        read().start_values()
    torch.save(flat(other()), path)
    with refused("not a safetensors file but one of torch.save; load it with torch.load and write"):
        read().start_values()
    path.unlink()
    with refused("w.safetensors: cannot read it: No such file"):
        job.start_values()


def test_a_blind_job_from_a_file_sums_no_changing_silos(read, write):
    write(flat(other()))
    silos = {"silos": list("abcdef"), "min_cohort": 3}
    counts = {"weights": "public", "counts": dict.fromkeys("abcdef", 30)}
    table = {"secure_aggregation": "required", **counts}
    assert read(**silos, security=table).document()
    table = {**table, "dropouts": "any"}
    with refused("model.weights in a blind job with security.dropouts = 'any': from one start"):
        read(**silos, security=table).document()


def test_a_file_is_bounded_by_the_model_and_its_header(read, write, tmp_path):
    write({**flat(other()), "more": torch.zeros((1 << 24) + (1 << 16))})  # 64 MiB and 256 KiB
    with refused(r"6\d{7} bytes, at most 6\d{7} for this model; take a file that holds the model"):
        read().start_values()
    write({**flat(other()), **{f"tensor.{'x' * 200}.{i}": torch.zeros(0) for i in range(20_000)}})
    with refused("not a safetensors file, or one whose header has over 4194304 bytes"):
        read().start_values()


def test_weights_for_what_a_method_does_not_have_are_refused(read, write):
    write(flat(other()))
    assert read("ppfl").document()
    with refused("model.weights.parts names 'classifier', which method 'ppfl' does not have"):
        read("ppfl", weights={"parts": ["extractor", "classifier"]}).document()
    options = {"extractors": ["digits-cnn-a", "digits-cnn-b"]}
    small = {"name": "digits-cnn-a", "classes": 3}
    write(flat(other(small)))
    assert read("fedproto", small).document()
    with refused("model.weights with method.options.extractors of 'fedproto': silos have net"):
        read("fedproto", small, options=options).document()


def test_the_digest_of_what_code_makes_does_not_take_the_file(read, write):
    write(flat(other(RESNET)))
    job = read(model=RESNET)
    bare = job.model.model_copy(update={"weights": None})
    assert job.document()["start"]["sha256"] == start_digest(bare, 7)
    assert job.document()["model_digest"] != Job.document(read_bare(job))["model_digest"]


def read_bare(job):
    bare = job.model.model_copy(update={"weights": None})
    return replace(job, model=bare, weights_file=None)


@pytest.mark.parametrize("method", ["fedavg", "fedper", "fedssa", "ditto", "pfedsim"])
def test_silos_train_on_from_the_file_in_both_engines(read, write, method):
    trained = other()
    write(flat(trained))
    job = read(method, weights={"parts": ["extractor", "classifier"]})
    alone = check_engines_agree(job, make_shards(job))
    bare = read_bare(job)
    drawn = simulate(bare, make_shards(bare))
    name = next(iter(trained["extractor"].state_dict()))
    own, others = (states["a"].parts["extractor"][name] for states in (alone.states, drawn.states))
    begun = trained["extractor"].state_dict()[name]
    # two rounds lead away from where they began, and not to where others began
    assert 0 < (own - begun).norm() < (others - begun).norm()


def test_the_bytes_of_a_file_that_anybody_wrote_count_not_its_tensors(read, tmp_path):
    """Another header with the same tensors is another file, so its digest is another."""
    tensors = {name: v.contiguous() for name, v in flat(other()).items()}
    (tmp_path / "w.safetensors").write_bytes(save(tensors))
    one = read().model.weights
    (tmp_path / "w.safetensors").write_bytes(save(tensors, {"made": "elsewhere"}))
    assert read().model.weights.sha256 != one.sha256
