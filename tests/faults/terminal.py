"""What strangers wrote, on a terminal."""

import sys
import unicodedata

from faults.table import row

from staddle.commands.terminal.printer import printable

STEERING = (
    "\x1b[2J",
    "\x1b]52;c;eA==\x07",
    "\x1b]8;;http://x\x1b\\",
    "\r",
    "\x08",
    "\x9b31m",
    "\u202e",
    "\n",
)


def letter(draw):
    """A character of any kind, a lone surrogate too."""
    return chr(draw.randrange(sys.maxunicode + 1))


@row(
    "escape sequences and control characters in foreign text",
    "they are shown, and steer nothing",
    6,
)
def foreign_text(folder, draw):
    plain = "".join(each for each in (letter(draw) for _ in range(200)) if each.isprintable())
    text = "".join(
        draw.choice((*STEERING, plain, letter(draw))) for _ in range(draw.randrange(1, 40))
    )
    shown = printable(text)
    assert all(each.isprintable() or unicodedata.category(each) == "Zs" for each in shown), ascii(
        shown
    )
    shown.encode()  # no lone surrogate is left, which a terminal does not take
    assert printable(plain) == plain
    assert printable(shown) == shown
