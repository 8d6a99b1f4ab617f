"""All of docs/extend.md is run: its modules are loaded and registered, its tables read."""

import re
import sys
import tomllib
import types
from pathlib import Path

import pytest
import torch
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

import staddle
from staddle.algorithms.data import registry as sources
from staddle.algorithms.models import build
from staddle.algorithms.models import registry as networks
from staddle.errors import LocalError, RefusedError
from staddle.files.documents import Strict, validate
from staddle.proto import secure_pb2
from staddle.proto.convert import group_key
from staddle.proto.convert.shape import Shape
from staddle.simulator.experiment.experiment import read
from staddle.simulator.experiment.population import populate

ROOT = Path(str(staddle.__file__)).resolve().parent
PAGE = Path(__file__).parents[1] / "docs" / "extend.md"
FENCED = re.compile(
    r"^```(?:python|toml|proto)\n(?:#|//) (.*?)\n(.*?)^```$", re.DOTALL | re.MULTILINE
)
MESSAGE = re.compile(r"^message KeyPoll \{\n.*?^\}\n", re.DOTALL | re.MULTILINE)
SOURCE = re.compile(r"^Source: TypeAlias = Annotated\[\n(.*?)\n\]$", re.DOTALL | re.MULTILINE)
TEXT = "".join(f"{n % 2} 1:{n} 3:-2.5\n" for n in range(24))

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the tests run without docs/ beside them")


class Silo(Strict):
    data: sources.Source


@pytest.fixture(scope="module")
def blocks():
    """The page's blocks by the file that each belongs to."""
    # what comes then, tests/commands/test_loader.py runs
    text = PAGE.read_text().partition("## A command")[0]
    found = FENCED.findall(text)
    assert len(found) == len(dict(found)) == text.count("\n```") // 2
    return dict(found)


def run(text, module):
    """Run a text as a module inside the package, so that its relative imports work."""
    module.__package__ = module.__name__.rpartition(".")[0]
    exec(compile(text, module.__name__, "exec"), module.__dict__)
    return module


@pytest.fixture
def install(monkeypatch, blocks):
    """Load a block as the module of its file."""

    def installed(file):
        name = "staddle." + file.removesuffix(".py").replace("/", ".")
        module = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        assert not (ROOT / file).exists()
        return run(blocks[file], module)

    return installed


@pytest.fixture
def libsvm(monkeypatch, blocks, install, tmp_path):
    """The page's source, registered by its two statements, and a file of its records."""
    module = install("algorithms/data/sources/formats/libsvm.py")
    block = blocks["algorithms/data/registry.py"]
    text = (ROOT / "algorithms" / "data" / "registry.py").read_text()
    here, there = (" ".join(SOURCE.search(each)[1].split()).rstrip(",") for each in (text, block))
    assert there == here.replace(", Plain", " | Libsvm, Plain")  # the page has the kinds of today
    imported, _, union = block.partition("\n\n")
    edited = text.replace(SOURCE.search(text)[0], f"{imported}\n{union}")
    registered = run(edited, types.ModuleType("staddle.algorithms.data.edited")).KINDS
    assert set(registered) - set(sources.KINDS) == {"libsvm"}
    monkeypatch.setitem(sources.KINDS, "libsvm", module.Libsvm)
    (tmp_path / "records.svm").write_text(TEXT)
    return module


def table(blocks):
    return tomllib.loads(blocks["silo.toml"])


def test_a_silo_reads_the_source(libsvm, blocks, tmp_path):
    source = validate(table(blocks), Silo, "silo.toml").data.below(tmp_path)
    source.check_present()
    data = source.load(None)
    assert (type(source), source.where, source.title) == (
        libsvm.Libsvm,
        str(tmp_path / "records.svm"),
        "records.svm",
    )
    assert (len(data), data.x[3, 0, 0].tolist(), data.y[:2].tolist()) == (
        24,
        [3.0, 0.0, -2.5],
        [0, 1],
    )
    with pytest.raises(LocalError, match=r"unknown key 'data.featurs'; did you mean 'features'"):
        validate({"data": {**table(blocks)["data"], "featurs": 3}}, Silo, "silo.toml")


@pytest.mark.parametrize(
    "line", ["", "1 0:2", "1 4:2", "1 1:secret", "secret 1:2", "1 1:2:secret", "9" * 20]
)
def test_what_is_wrong_in_its_file_is_named_without_a_value(libsvm, blocks, tmp_path, line):
    (tmp_path / "records.svm").write_text(f"0 1:1\n{line}\n")
    with pytest.raises(LocalError, match=r"records.svm, line 2: write a class number") as caught:
        validate(table(blocks), Silo, "silo.toml").data.below(tmp_path).load(None)
    assert "secret" not in str(caught.value)


def test_an_experiment_deals_it_out(libsvm, blocks, tmp_path):
    (tmp_path / "experiment.toml").write_text(blocks["experiment.toml"])
    population = populate(read(tmp_path / "experiment.toml"))
    held = [records.train.x for records in population.records.values()]
    assert len(held) == 2
    assert {tuple(x.shape[1:]) for x in held} == {(1, 1, 3)}


def test_a_job_builds_the_model(install, monkeypatch, blocks):
    install("algorithms/models/networks/mlp_narrow.py")
    monkeypatch.setattr(networks, "NETWORKS", dict(networks.NETWORKS))
    monkeypatch.setattr(build, "NETWORKS", networks.NETWORKS)
    exec(blocks["algorithms/models/registry.py"], dict(networks.__dict__))
    options = build.ModelOptions(**tomllib.loads(blocks["job.toml"])["model"])
    one, other = (build.build(options, 7) for _ in range(2))
    logits = one["classifier"](one["extractor"](torch.ones(5, 1, 8, 8)))
    assert logits.shape == (5, 10)
    assert torch.equal(logits, other["classifier"](other["extractor"](torch.ones(5, 1, 8, 8))))


@pytest.fixture
def key_poll(blocks, tmp_path):
    """The page's message, generated from the schema in which it replaces today's."""
    protoc = pytest.importorskip("grpc_tools.protoc")
    schema, count = MESSAGE.subn(
        lambda _: blocks["proto/secure.proto"], (ROOT / "proto" / "secure.proto").read_text()
    )
    assert count == 1
    (tmp_path / "secure.proto").write_text(schema)
    made = tmp_path / "descriptors"
    assert protoc.main(["", f"-I{tmp_path}", f"--descriptor_set_out={made}", "secure.proto"]) == 0
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(made.read_bytes()).file:
        pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("staddle.v1.KeyPoll"))


def test_a_message_has_one_more_field(blocks, key_poll):
    names = {**vars(group_key), "pb": types.SimpleNamespace(KeyPoll=key_poll)}
    exec(blocks["proto/convert/group_key.py"], names)
    poll = names["KeyPoll"](b"s", "j", bytes(32), 7)
    sent = names["POLL"].to_wire(poll)
    assert (sent.had, names["POLL"].whole_from_wire("a", sent)) == (7, poll)
    with pytest.raises(RefusedError, match="has 1001 contributions, more than there are silos"):
        names["POLL"].from_wire(
            "a", key_poll(session=b"s", job="j", job_digest=bytes(32), had=1001)
        )

    # the table of today takes neither the message nor the schema
    older = secure_pb2.KeyPoll.FromString(sent.SerializeToString())
    with pytest.raises(RefusedError, match="has fields that its protocol version does not know"):
        group_key.POLL.whole_from_wire("a", older)
    with pytest.raises(LocalError, match="KeyPoll: its table and its schema differ in had"):
        Shape(group_key.KeyPoll, key_poll, "MANIFEST", **group_key.POLL.fields)
