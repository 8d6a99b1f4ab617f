"""What reaches a terminal, and what an escape sequence in it looks like there."""

import io
import json
import sys
import unicodedata

import pytest
import typer
from rich.console import Console

from staddle.commands import main
from staddle.commands.terminal import printer
from staddle.commands.terminal.printer import PrintedTable, Screen, printable
from staddle.errors import CancelledError, LocalError

HOSTILE = "a\x1b[2Jb\x1b]52;c;eA==\x07c\rd\x9bHe\u202ef\udc9bg\x7fh\ni"
SHOWN = r"a\x1b[2Jb\x1b]52;c;eA==\x07c\rd\x9bHe\u202ef\udc9bg\x7fh\ni"


class Terminal(io.TextIOWrapper):
    """Standard output as a terminal."""

    def __init__(self, encoding="utf-8"):
        super().__init__(io.BytesIO(), encoding, newline="")

    def isatty(self):
        return True

    def said(self):
        self.flush()
        return self.buffer.getvalue()


def drawn(console):
    """What a console recorded, without the sequences that rich itself writes on a terminal."""
    return console.file.getvalue()


@pytest.mark.parametrize("text", ["", "plain", "é ü 你 → … ± ─ Φ", r"C:\x1b", "8\xa0MB\u3000你"])
def test_letters_of_all_languages_stay_as_they_are(text):
    assert printable(text) == text


def test_what_steers_a_terminal_is_shown_as_python_writes_it():
    assert printable(HOSTILE) == SHOWN
    assert printable("\t\x85\u200b\u2028\u2066\ufeff\ue000\U000e0041") == (
        r"\t\x85\u200b\u2028\u2066\ufeff\ue000\U000e0041"
    )
    everything = printable("".join(map(chr, range(0x110000))))
    assert {unicodedata.category(c) for c in everything if not c.isprintable()} == {"Zs"}


def test_lines_go_to_their_stream_unbroken_and_an_errors_others_are_indented(capsys):
    printer.show("one", HOSTILE, "")
    printer.show("é", err=True)
    assert capsys.readouterr() == (f"one\n{SHOWN}\n\n", "é\n")
    printer.show_error(f"one\ntwo{HOSTILE}")
    first, rest = SHOWN.rsplit(r"\n", 1)
    assert capsys.readouterr().err == f"staddle: one\n  two{first}\n  {rest}\n"


def test_json_is_ascii_and_reads_back(capsys):
    value = {"name": HOSTILE, "é": [1, None]}
    printer.show_json(value)
    printer.show_json(value, indent=1)
    line, rest = capsys.readouterr().out.split("\n", 1)
    assert json.loads(line) == json.loads(rest) == value
    assert line.isascii()
    assert line.isprintable()
    assert rest == json.dumps(value, indent=1) + "\n"


def test_a_table_keeps_every_row_on_its_line_and_no_cell_is_markup(capsys):
    for frame in ("box", "head", "none"):
        printer.show(
            PrintedTable(
                ("[b]x", HOSTILE),
                [("[red]y", "1"), (HOSTILE, "2")],
                right=(1,),
                ends=(0,),
                frame=frame,
            )
        )
        said = capsys.readouterr().out
        assert said.replace("\n", "").isprintable()
        assert "[b]x" in said
        assert "[red]y" in said
        assert [line.count(SHOWN) for line in said.splitlines() if SHOWN in line] == [1, 1]


def test_a_title_stands_above(capsys):
    printer.show(PrintedTable(("a",), [("1",)], title=HOSTILE, width=100), err=True)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.replace("\n", "").isprintable()


def test_a_file_is_its_bytes_for_a_program_and_text_on_a_terminal(monkeypatch, capfdbinary):
    data = "é\x1b[2J\n\u202eb\xff\n".encode() + b"\xff\n"
    printer.show_file(data)
    assert capfdbinary.readouterr().out == data
    monkeypatch.setattr(sys, "stdout", Terminal())
    printer.show_file(data)
    assert sys.stdout.said().decode() == "é\\x1b[2J\n\\u202ebÿ\n\\xff\n"


def test_a_traceback_is_text(capsys):
    try:
        raise RuntimeError(HOSTILE)
    except RuntimeError as error:
        printer.show_crash(error)
    said = capsys.readouterr().err
    assert said.startswith("Traceback (most recent call last):\n")
    assert said.replace("\n", "").isprintable()
    assert SHOWN.rsplit(r"\n", 1)[0] in said


def test_letters_that_a_terminal_lacks_are_escaped(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal("ascii"))
    printer.escape_unknown()
    printer.show("é 你", PrintedTable(("ü",), [("→",)]))
    said = sys.stdout.said().decode("ascii")
    assert said.startswith("\\xe9 \\u4f60\n")
    assert r"\xfc" in said
    assert r"\u2192" in said


def test_a_screen_shows_lines_bars_and_what_is_waited_for_as_text():
    file = io.StringIO()
    screen = Screen(console=Console(file=file, force_terminal=True, width=300, color_system=None))
    with screen.waiting(f"[b]{HOSTILE}"):
        pass
    with screen.progress(elapsed=True) as progress:
        bar = progress.add_task(f"[red]{HOSTILE}", total=2, note="")
        progress.update(bar, advance=1, note=f"[i]{HOSTILE}")
        screen.show(f"[u]{HOSTILE}")
    said = file.getvalue()
    assert not set("\x07\x9b\x7f\u202e\udc9b") & set(said)
    assert "\x1b]" not in said
    assert all(f"{tag}{SHOWN}" in said for tag in ("[b]", "[red]", "[i]", "[u]"))
    assert screen.is_terminal


def test_a_screen_that_is_no_terminal_is_lines_alone(capsys):
    screen = Screen(err=True)
    assert not screen.is_terminal
    with screen.waiting("x"):
        screen.show(HOSTILE, "x" * 500)
    assert capsys.readouterr() == ("", f"{SHOWN}\n{'x' * 500}\n")


def ends(run, capsys):
    with pytest.raises(SystemExit) as end:
        main.ended(run)
    return end.value.code, *capsys.readouterr()


def raises(error):
    def run():
        raise error

    return run


def test_how_a_program_ends(capsys):
    """Its own code; 1 and a line for an error of ours, 1 and a traceback for any other."""
    assert ends(lambda: 3, capsys) == (3, "", "")
    assert ends(lambda: None, capsys) == (None, "", "")
    assert ends(raises(LocalError("no\x1b")), capsys) == (1, "", "staddle: no\\x1b\n")
    # a stop that was asked for is told as such
    assert ends(raises(typer.Abort()), capsys) == (130, "", "stopped\n")
    assert ends(raises(CancelledError("stopped\x1b")), capsys) == (130, "", "stopped\\x1b\n")
    code, out, err = ends(raises(OSError("no\x1b")), capsys)
    assert (code, out) == (1, "")
    assert err.endswith("OSError: no\\x1b\n")


def test_a_wrong_command_line_is_told_as_text_with_code_2(monkeypatch, capsys):
    cases = (
        ["--\x1b[2J"],
        ["ro\x1b"],
        ["ledger", "show", "d", "\x1b"],
        ["keys", "new", "x", "--role", "b\x1boss"],
    )
    for arguments in cases:
        monkeypatch.setattr(sys, "argv", ["staddle", *arguments])
        with pytest.raises(SystemExit) as end:
            main.main()
        said = capsys.readouterr()
        assert (end.value.code, said.out) == (2, "")
        assert said.err.startswith("Usage: ")
        assert "--help' for help.\nstaddle: " in said.err
        assert r"\x1b" in said.err
        assert said.err.replace("\n", "").isprintable()


def test_nothing_asked_is_answered_with_the_help(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["staddle"])
    with pytest.raises(SystemExit) as end:
        main.main()
    said = capsys.readouterr()
    assert end.value.code == 2
    assert "Usage: " in said.out + said.err
    assert "staddle:" not in said.err


def test_a_colour_that_is_forced_makes_no_terminal_that_knows_its_width(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    printer.show(PrintedTable(["a"], [["x" * 150]]))
    assert "x" * 150 in capsys.readouterr().out


def test_a_cell_of_a_notebook_has_plain_lines(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    screen = Screen(console=Console(force_jupyter=True))
    assert screen.in_notebook
    with screen.waiting("records"):
        screen.show("one")
    assert capsys.readouterr().out == "one\n"
    assert not Screen().in_notebook
