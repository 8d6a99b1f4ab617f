"""Pages as HTML: one self-contained file each, from a template, under one stylesheet.

Whatever a page says is untrusted text here. The template escapes every value (autoescape, of
jinja2, which PyTorch brings along in any case), ``printable`` shows characters that would not be
seen or would turn text around, and the page's own content security policy lets nothing be loaded:
no network, no script, and of styles only the one with its digest.
"""

import base64
import hashlib
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from ..terminal.output import size
from ..terminal.printer import printable
from . import chart

# characters of a word that may not, and of one that must, stand on one line of a table's cell
LONG, SHORT = 22, 18


def render(template: str, **values: Any) -> bytes:
    """A page of this folder's templates in UTF-8: the same bytes for the same values.

    The template puts ``style`` into its only style element, and ``style_digest`` into its policy.
    """
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_template),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_harmless,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(n="{:,}".format, size=size, time=_time, wrapping=_wrapping)

    # the policy of the page lets this one style be used, by its digest, and nothing else
    style = stylesheet()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    found = environment.get_template(template)
    return found.render(style=Markup(style), style_digest=digest, frame=chart, **values).encode()  # noqa: S704 ours


def stylesheet() -> str:
    """The one stylesheet of all pages."""
    return _template("report.css")


def _harmless(value: Any) -> Any:
    """Text that cannot turn the text around it; markup is our own."""
    # Control characters go before autoescape handles the rest.
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return printable(value)


def _wrapping(text: str) -> str:
    """The style class of a cell's text.

    A word too long for a column is broken, a short name never.
    """
    # Escaped first: an escape sequence is longer than its character.
    words = printable(text).split()
    if max(map(len, words), default=0) > LONG:
        return "long"
    if len(words) == 1 and len(text) <= SHORT:
        return "t"
    return ""


def _time(stamp: str) -> str:
    """``2026-11-20 21:30:05`` of a record's time stamp, in UTC."""
    return stamp[:19].replace("T", " ")


def _template(name: str) -> str:
    return (resources.files(__package__) / "templates" / name).read_text("utf-8")
