"""``staddle status --html``: one page, of which nothing is loaded and nothing runs."""

import re
from base64 import b64encode
from hashlib import sha256
from importlib import resources

from staddle.commands.terminal.printer import PrintedTable
from staddle.console.rendering import span, status_page

NASTY = "</style><script>alert(1)</script><img src=//evil.example onerror=alert(1)>\u202e\x1b[2J"


def test_the_page_is_whole_and_what_strangers_wrote_is_text():
    table = PrintedTable(("silo", "bytes"), [(NASTY, "1,000"), ("north", NASTY)], range(1, 2))
    text = status_page(NASTY, [NASTY, "ledger: DOES NOT HOLD: x", table]).decode()
    sheet = (resources.files("staddle.console") / "static" / "console.css").read_text()
    style = " ".join(sheet.split())
    # the style sheet as it is: its digest lets no other in
    assert f"<style>{style}</style>" in text
    digest = b64encode(sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'"
    assert f'content="{policy}"' in text.replace("&#39;", "'")
    rest = text.replace(style, "")
    assert not re.search(
        r"<script|<img|<link|<iframe|[\u202e\x1b]|\sstyle=|\sonerror=alert\(1\)>", rest
    )
    assert re.findall(r"(?:src|href|url)[=(]", rest.replace("src=//evil", "")) == []
    assert rest.count("&lt;script&gt;") == 5
    assert '<th scope="row">north</th>' in text
    assert '<td class="number">1,000</td>' in text
    assert '<p class="bad">ledger: DOES NOT HOLD: x</p>' in text


def test_lengths_of_time_read_as_people_say_them():
    assert [span(each) for each in (0.04, 9, 61, 7300, 200_000)] == [
        *("0.0 s", "9.0 s", "61 s", "2 h", "2 d")
    ]
