r"""The one way to a terminal: nothing that commands print can steer it.

Ledgers, rosters, jobs, answers of a coordinator and names of files may be written by others. A
character in them that moves the cursor, colours, rings, sets the clipboard or turns the text around
is shown as Python writes it, such as ``\x1b`` or ``\u202e``. Letters of all languages are shown as
they are. JSON for scripts is ASCII, with its own escapes.
"""

import io
import json
import sys
import traceback
import unicodedata
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, TypeAlias

import typer
from rich import box
from rich import progress as bars
from rich import table as grids
from rich.console import Console
from rich.markup import escape
from rich.text import Text

Progress: TypeAlias = bars.Progress
TaskID: TypeAlias = bars.TaskID
Frame: TypeAlias = Literal["box", "head", "none"]

FRAMES: dict[Frame, dict[str, Any]] = {
    "box": {},
    "head": {"box": box.SIMPLE_HEAD, "pad_edge": False, "padding": (0, 1, 0, 0)},
    "none": {"box": None, "pad_edge": False, "padding": (0, 2, 0, 0)},
}
OVERFLOW: dict[Frame, Literal["fold", "ellipsis"]] = {  # of a cell wider than its column
    "box": "ellipsis",
    "head": "ellipsis",
    "none": "fold",
}

SIDES: tuple[Literal["left"], Literal["right"]] = ("left", "right")


def printable(text: str) -> str:
    """One line of text that moves no cursor and colours nothing, whoever wrote it.

    Escaped are control and format characters, line breaks, lone surrogates (bytes of a file's name
    that are not UTF-8), private and unassigned characters. Letters and spaces of any width stay.
    """
    # Nearly all text is printable already.
    if text.isprintable():
        return text
    return "".join(map(_harmless, text))


def _harmless(character: str) -> str:
    # Spaces of other widths are not printable to Python, but harmless.
    if character.isprintable() or unicodedata.category(character) == "Zs":
        return character
    return ascii(character)[1:-1]


def unmarked(text: str) -> str:
    """A text of help in which rich finds no markup: it shows what stands in square brackets."""
    return escape(text)


@dataclass(frozen=True)
class PrintedTable:
    """Rows of text under the names of their columns.

    ``right`` holds the numbers of columns that stand on the right, ``ends`` the numbers of rows
    with a line below. ``width`` is in columns of text, where there is no terminal that says how
    wide it is.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Collection[int] = ()
    ends: Collection[int] = ()
    frame: Frame = "box"
    title: str = ""
    width: int = 200


def show(*shown: str | PrintedTable, err: bool = False) -> None:
    """Print lines and tables on standard output, or on standard error.

    A line break within a line is escaped.
    """
    for each in shown:
        if isinstance(each, PrintedTable):
            _show_table(each, err=err)
        else:
            _write(f"{printable(each)}\n", err=err)


def confirm(question: str) -> None:
    """Ask, and end the command with code 1 unless the answer is yes."""
    typer.confirm(printable(question), abort=True)


def ask(question: str) -> str:
    """Ask for a line of text; empty where nothing was typed."""
    answer: str = typer.prompt(printable(question), default="", show_default=False)
    return answer


def show_json(value: Any, *, indent: int | None = None) -> None:
    """Print JSON for scripts, on one line unless it is indented.

    All but printable ASCII is escaped, so it cannot steer a terminal.
    """
    _write(f"{json.dumps(value, indent=indent)}\n")


def show_file(data: bytes) -> None:
    """Print the text of a file: its own bytes, or on a terminal lines as ``show`` does."""
    if sys.stdout.isatty():
        # a file from elsewhere must not steer a terminal; a program that reads it needs every byte
        show(*data.decode(errors="backslashreplace").removesuffix("\n").split("\n"))
        return
    # The text layer buffers on its own: without this, bytes would overtake text printed before.
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def show_error(text: str) -> None:
    """Print why the command ends, on standard error.

    Lines after the first are indented, so none looks like another.
    """
    first, *rest = text.split("\n")
    show(f"staddle: {first}", *(f"  {line}" for line in rest), err=True)


def show_crash(error: BaseException) -> None:
    """Print the traceback of an error that nobody expected, on standard error.

    Each line is escaped, since messages may quote what others wrote.
    """
    show(*"".join(traceback.format_exception(error)).removesuffix("\n").split("\n"), err=True)


def show_usage(fault: Any) -> None:
    """Print what is wrong with the command line, on standard error.

    ``fault`` is a usage error of typer's parser.
    """
    text = fault.format_message()
    if not text:
        return  # the command line was empty, and the help was printed
    if fault.ctx is not None:
        usage = fault.ctx.get_usage().split("\n")
        show(*usage, f"Try '{fault.ctx.command_path} --help' for help.", err=True)
    show_error(text.expandtabs(4))


def escape_unknown() -> None:
    """Let standard output escape letters that its encoding does not have.

    Standard error always does.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


class Screen:
    """Shows how a command's work goes: lines, and on a terminal progress bars below them.

    ``in_notebook`` is True in a notebook's cell, which has no bars but lines that are replaced.
    """

    def __init__(self, *, err: bool = False, console: Console | None = None) -> None:
        """On standard output, or on standard error; ``console`` stands for either in tests."""
        self._console = console or Console(stderr=err)
        self.in_notebook = self._console.is_jupyter
        if self.in_notebook:
            # Plain lines: rich would make HTML of each, and a cell claims to be a terminal.
            self._console = Console(stderr=err, force_jupyter=False, force_terminal=False)

    @property
    def is_terminal(self) -> bool:
        """True if bars can be redrawn."""
        return self._console.is_terminal

    def show(self, *lines: str) -> None:
        """Print lines, above the bars where there are some.

        Each is one line, however long; what could steer the terminal is escaped.
        """
        for line in lines:
            # Programs read these lines, too: never break them at the terminal's width.
            self._console.print(_text(line), soft_wrap=True)

    def waiting(self, for_what: str) -> AbstractContextManager[object]:
        """Say what the command waits for while the block runs; on a terminal only."""
        return self._console.status(_text(for_what))

    def replacing(self) -> Callable[[Sequence[str]], None]:
        """Lines in the output of a notebook's cell, which each call replaces by its own."""
        # Whoever runs a notebook has it.
        handle = import_module("IPython.display").display(_plain(()), raw=True, display_id=True)

        def replace(lines: Sequence[str]) -> None:
            handle.update(_plain(lines), raw=True)

        return replace

    def progress(self, *, elapsed: bool = False) -> Progress:
        """No bar yet; a task has a description and a field ``note``.

        ``elapsed`` shows how long each has run.
        """
        # Not rich's text column, which would read markup in a name.
        columns: list[bars.ProgressColumn] = [
            _Words("description"),
            bars.BarColumn(30),
            bars.MofNCompleteColumn(),
        ]
        if elapsed:
            columns.append(bars.TimeElapsedColumn())
        columns.append(_Words("note"))
        return Progress(*columns, console=self._console)


class _Words(bars.ProgressColumn):
    """A task's description, or one of its fields, as text."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def render(self, task: bars.Task) -> Text:
        if self._name == "description":
            return _text(task.description)
        return _text(task.fields[self._name])


def _write(text: str, *, err: bool = False) -> None:
    stream = sys.stderr if err else sys.stdout
    stream.write(text)
    # A reader at the other end of a pipe gets each line at once.
    stream.flush()


def _show_table(table: PrintedTable, *, err: bool) -> None:
    # Cells are ``Text``, which rich takes as it is: no markup is read in them.
    drawn = grids.Table(title=_text(table.title), **FRAMES[table.frame])
    for number, column in enumerate(table.columns):
        justify = SIDES[number in table.right]
        drawn.add_column(_text(column), justify=justify, overflow=OVERFLOW[table.frame])
    for number, row in enumerate(table.rows):
        drawn.add_row(*map(_text, row), end_section=number in table.ends)
    console = Console(stderr=err)
    # Only a terminal says how wide it is; rich takes FORCE_COLOR for one, which notebooks set.
    if not console.file.isatty():
        console = Console(stderr=err, width=table.width)
    console.print(drawn)


def _plain(lines: Sequence[str]) -> dict[str, str]:
    """Lines as an output of a notebook."""
    return {"text/plain": "\n".join(map(printable, lines))}


def _text(written: str) -> Text:
    return Text(printable(written))
