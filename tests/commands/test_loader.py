"""The table of commands, and that nothing is imported before it is needed."""

import ast
import inspect
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from staddle.commands import loader
from staddle.commands.loader import COMMANDS, GROUPS, LazyCommand, LazyGroup
from staddle.commands.main import app
from staddle.commands.terminal import printer
from staddle.proto.channel import CIPHERS_VARIABLE

ROOT = Path(loader.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "extend.md"
SLOW = {"torch", "grpc", "numpy", "opacus", "cryptography", "jinja2", "matplotlib"}


def test_a_command_imports_what_it_needs():
    """The help of a group imports no slow library, and TLS is set before gRPC is imported: at the
    end that is still not too late.
    """
    commands = [["--help"], *([group, "--help"] for group in GROUPS)]
    commands += [["keys", "new", "--help"], ["silo", "run", "--help"]]
    program = f"""
import os, sys
from staddle.commands import loader, main
for sys.argv[1:] in {commands!r}:
    os.environ.pop({CIPHERS_VARIABLE!r}, None)  # we may have set it, or an earlier command
    try:
        main.main()
    except SystemExit as ended:
        assert ended.code == 0
    print("imported", *sorted({SLOW!r} & set(sys.modules)))
loader.require_tls13()
sys.stdout.flush()
os._exit(0)  # the end of the interpreter costs as much as half the imports
"""
    run = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")
    lines = [line.split() for line in run.stdout.splitlines() if line.startswith("imported")]
    *groups, keys, silo = [set(line[1:]) for line in lines]
    assert (groups, keys) == ([set()] * (1 + len(GROUPS)), {"cryptography"})
    assert silo >= {"torch", "grpc"}


@pytest.mark.parametrize("path", COMMANDS)
def test_the_line_of_help_is_the_one_of_the_function(path):
    """And the module of the table has that function, so that no entry can be wrong."""
    target = COMMANDS[path]
    command = LazyCommand(path.split()[-1], target)
    assert command.help == printer.unmarked(inspect.getdoc(loader.function(target)))


def words(text):
    """A text without the frames and line breaks of a page of help."""
    return " ".join(text.translate(dict.fromkeys(map(ord, "│╭╮╰╯─"), " ")).split())


def sources_of(function):
    """The texts of help of a command, as they stand in its source."""
    yield inspect.getdoc(function)
    for hint in typing.get_type_hints(function, include_extras=True).values():
        yield from (option.help for option in getattr(hint, "__metadata__", ()))


@pytest.mark.parametrize("path", COMMANDS)
def test_help_is_shown_as_it_is_written(path, monkeypatch):
    """No word in square brackets is taken for markup, and no backslash is shown in its place."""
    monkeypatch.setenv("COLUMNS", "2000")  # so that no text is broken into two columns' lines
    shown = words(CliRunner().invoke(app, [*path.split(), "--help"]).output)
    for text in sources_of(loader.function(COMMANDS[path])):
        assert words(text) in shown
        assert "\\[" not in text


def test_brackets_of_every_text_of_help_are_shown(monkeypatch):
    """Of groups, of commands, of their lines in a group, and of a program of its own."""

    def command(file: typing.Annotated[str, typer.Argument(help="A [file].")]) -> None:
        """Read [command]."""

    monkeypatch.setattr(loader, "function", lambda _: command)
    monkeypatch.setattr(loader, "_docstrings", lambda _: {"one": "Read [line]."})
    monkeypatch.setattr(loader, "COMMANDS", {"word one": "m:one"})
    monkeypatch.setattr(loader, "GROUPS", {"word": "About [group]."})
    for arguments, texts in (
        ([], ["About [group]."]),
        (["word"], ["About [group].", "Read [line]."]),
        (["word", "one"], ["Read [command].", "A [file]."]),
    ):
        shown = words(CliRunner().invoke(app, [*arguments, "--help"]).output)
        assert all(text in shown for text in texts), shown
    shown = words(CliRunner().invoke(loader.program("one", "m:one"), ["--help"]).output)
    assert "Read [command]." in shown


def test_every_group_has_commands_and_every_command_its_group():
    of_two = {path.split()[0] for path in COMMANDS if " " in path}
    assert of_two - {path for path in COMMANDS if " " not in path} == GROUPS.keys()
    assert list(LazyGroup(name="silo", help="").commands) == [
        "init", "check", "run", "jobs", "accept", "approve", "decline", "new-split",
    ]  # fmt: skip
    assert (
        LazyGroup(name="", help="").commands.keys()
        == {path for path in COMMANDS if " " not in path} | GROUPS.keys()
    )


def test_simulate_takes_a_file_or_the_word_init(tmp_path):
    """A file of this very name, too, if it is written as a path."""

    def run(*arguments):
        return CliRunner().invoke(app, ["simulate", *arguments])

    missing = ": cannot read it: No such file or directory"
    assert str(run(str(tmp_path / "none.toml")).exception) == f"{tmp_path / 'none.toml'}{missing}"
    assert "simulate init" in " ".join(run("--help").output.split())
    assert "simulate init [OPTIONS]" in run("init", "--help").output
    for arguments in (["--workers", "1", "init"], ["./init"]):
        assert str(run(*arguments).exception) == f"init{missing}"
    assert run().exit_code == run("init").exit_code == 2


def test_commands_import_at_the_top_of_their_modules():
    late = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in ROOT.rglob("*.py")
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert late == []


def blocks():
    """The pieces of code of the page, in their order."""
    return [
        piece.split("\n", 1)[1]
        for piece in PAGE.read_text().partition("## A command")[2].split("```")[1::2]
    ]


@pytest.mark.skipif(not PAGE.exists(), reason="the tests run without docs/ beside them")
def test_the_example_of_the_page_is_a_command(monkeypatch, tmp_path):
    module, entry, call = blocks()
    (tmp_path / "hello.py").write_text(module)
    package = f"{loader.__package__}.hello"
    monkeypatch.setattr(sys.modules[loader.__package__], "__path__", [str(tmp_path), str(ROOT)])
    monkeypatch.setattr(loader, "__file__", str(tmp_path / "loader.py"))
    monkeypatch.setattr(
        loader, "COMMANDS", {**ast.literal_eval(f"{{{entry}}}"), "job init": "job:init"}
    )
    monkeypatch.setattr(loader, "GROUPS", {})
    (tmp_path / "job.py").write_text((ROOT / "job.py").read_text())
    loader._docstrings.cache_clear()
    command, said = call.strip().split("\n")
    assert package not in sys.modules
    try:
        assert "Greet a silo." in " ".join(CliRunner().invoke(app, ["--help"]).output.split())
        assert package not in sys.modules
        assert CliRunner().invoke(app, command.split()[2:]).output == f"{said}\n"
    finally:
        sys.modules.pop(package, None)
        loader._docstrings.cache_clear()
