import ast
import re
from pathlib import Path

import pytest

import staddle.proto
from staddle.proto import federation_pb2, operations_pb2, tensor_pb2

FOLDER = Path(staddle.proto.__file__).parent  # of the checkout, or of the installed package
NAMES = {
    "federation_pb2.py", "federation_pb2.pyi", "federation_pb2_grpc.py", "operations_pb2.py",
    "operations_pb2.pyi", "operations_pb2_grpc.py", "membership_pb2.py", "membership_pb2.pyi",
    "membership_pb2_grpc.py", "secure_pb2.py", "secure_pb2.pyi",
    "tensor_pb2.py", "tensor_pb2.pyi",
}  # fmt: skip


@pytest.fixture(scope="module")
def generate():
    pytest.importorskip("grpc_tools")
    from staddle.proto import generate  # noqa: PLC0415 - needs grpc_tools

    return generate


@pytest.fixture(scope="module")
def fresh(generate, tmp_path_factory):
    return generate.generate(tmp_path_factory.mktemp("generated"))


def test_a_fresh_generation_makes_these_modules(fresh):
    assert set(fresh) == NAMES


@pytest.mark.parametrize("name", sorted(NAMES))
def test_generated_modules_are_those_of_the_proto_files(fresh, name):
    assert (FOLDER / name).read_text() == fresh[name]


def test_a_changed_proto_file_gives_other_modules(generate, fresh, tmp_path, monkeypatch):
    for source in generate.SOURCES:
        text = (FOLDER / source).read_text()
        (tmp_path / source).write_text(text.replace("PART_KIND_SHARE = 13", "PART_KIND_SHARE = 15"))
    monkeypatch.setattr(generate, "PROTO", tmp_path)
    (tmp_path / "out").mkdir()
    changed = generate.generate(tmp_path / "out")
    # stubs name, modules number
    assert {name for name in NAMES if changed[name] != fresh[name]} == {"tensor_pb2.py"}


def test_the_check_finds_a_stale_module(generate, fresh, tmp_path, monkeypatch, capsys):
    for path in (*FOLDER.glob("*.proto"), *(FOLDER / name for name in NAMES)):
        (tmp_path / path.name).write_text(path.read_text())
    monkeypatch.setattr(generate, "PROTO", tmp_path)
    monkeypatch.setattr("sys.argv", ["generate.py", "--check"])
    generate.main()
    assert f"{len(NAMES)} modules, 0 stale" in capsys.readouterr().out
    with (tmp_path / "tensor_pb2.py").open("a") as file:
        file.write("edited = True\n")
    with pytest.raises(SystemExit, match=r"stale: tensor_pb2\.py"):
        generate.main()
    monkeypatch.setattr("sys.argv", ["generate.py"])
    generate.main()
    assert (tmp_path / "tensor_pb2.py").read_text() == fresh["tensor_pb2.py"]


def test_generated_modules_are_named_inside_the_package():
    assert federation_pb2.DESCRIPTOR.name == "staddle/proto/federation.proto"
    assert tensor_pb2.DESCRIPTOR.name == "staddle/proto/tensor.proto"
    assert federation_pb2.DESCRIPTOR.package == "staddle.v1"


def test_every_call_of_the_service_is_one_of_fourteen():
    service = federation_pb2.DESCRIPTOR.services_by_name["Federation"]
    streams = {m.name: (m.client_streaming, m.server_streaming) for m in service.methods}
    unary = (False, False)
    assert streams == {
        "Hello": unary, "Attest": unary, "Poll": unary, "Beat": unary, "Answer": unary,
        "Fetch": (False, True), "Upload": (True, False), "Standing": unary, "Secure": unary,
        "Weights": (False, True), "SecureNext": unary, "Contribute": unary, "GroupKey": unary,
        "Padded": unary,
    }  # fmt: skip


def test_operators_have_a_service_of_their_own():
    service = operations_pb2.DESCRIPTOR.services_by_name["Operations"]
    assert [m.name for m in service.methods] == [
        "Submit", "SubmitWeights", "List", "Show", "Watch", "Stop", "Resume",
            "Withdraw",
    ]  # fmt: skip
    found = [m.name for m in service.methods if m.client_streaming or m.server_streaming]
    assert found == ["SubmitWeights", "Watch"]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.proto")), ids=lambda p: p.name)
def test_no_field_number_is_used_twice_or_left_out(path):
    for body in re.findall(
        r"^(?:message) \w+ \{\n(.*?)^\}", path.read_text(), re.DOTALL | re.MULTILINE
    ):
        numbers = [int(n) for n in re.findall(r"= (\d+);", body)]
        assert sorted(numbers) == list(range(1, len(numbers) + 1))


def test_generated_code_imports_nothing_but_its_runtime():
    roots = set()
    for name in (name for name in NAMES if name.endswith(".py")):
        for node in ast.walk(ast.parse((FOLDER / name).read_text())):
            if isinstance(node, ast.ImportFrom):
                roots.add(node.module.partition(".")[0])
            elif isinstance(node, ast.Import):
                roots |= {alias.name.partition(".")[0] for alias in node.names}
    assert roots <= {"google", "grpc", "staddle", "warnings"}
