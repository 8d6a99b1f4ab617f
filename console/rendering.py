"""Templates into HTML: pages for the browser, and one page that is a file."""

from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from importlib import resources

import jinja2

from ..commands.terminal.output import size
from ..commands.terminal.printer import PrintedTable, printable
from ..security.identity.certificate import utc_now


def environment() -> jinja2.Environment:
    """Templates escape whatever they show, and an undefined name is an error."""
    made = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: packaged("templates", name).decode()),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: printable(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        n="{:,}".format, size=size, span=span, at=lambda stamp: stamp[:19].replace("T", " ")
    )
    return made


def span(seconds: float) -> str:
    """A length of time as people say it."""
    units = ((86_400, "d"), (3600, "h"), (60, "min"))
    for length, unit in units:
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def packaged(folder: str, name: str) -> bytes:
    """A file of this package."""
    return (resources.files(__package__) / folder / name).read_bytes()


def status_page(title: str, shown: Sequence[str | PrintedTable]) -> bytes:
    """What ``staddle status`` prints as one page that loads nothing and runs no script."""
    # In one line: whatever a template shows has no line break.
    style = " ".join(packaged("static", "console.css").decode().split())
    digest = b64encode(sha256(style.encode()).digest()).decode()
    page = environment().get_template("status.html")
    return page.render(
        title=title,
        shown=shown,
        made=utc_now().strftime("%Y-%m-%d %H:%M:%S UTC"),
        style=style,
        # Ours alone: should a peer's text ever not be escaped, it still has no style and no script.
        policy=f"default-src 'none'; style-src 'sha256-{digest}'",
    ).encode()
