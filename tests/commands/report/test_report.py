import base64
import hashlib
import re
import shutil
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser

import jinja2
import pytest
from support import report_ledgers as ledgers
from support.ledgers import (
    FEDERATION,
    PADDED_BYTES,
    ROTATED_BYTES,
    end_sum,
    first,
    intend_masked,
    intend_padded,
    keyed,
    open_ledger,
    private,
    protocol,
    secagg,
    stored,
    summed,
    write_policy_deny,
    write_start,
    write_witness,
)
from support.refusals import refused
from support.report_ledgers import CONTROL, HASH, LONG, NASTY, OTHER, POLICY, QUOTES, SCRIPT
from typer.testing import CliRunner

from staddle.commands.main import app
from staddle.commands.report import page as report_page
from staddle.commands.report import report, tables
from staddle.commands.report.page import RosterSources
from staddle.commands.terminal.printer import printable
from staddle.errors import LocalError
from staddle.security.identity import roster as rosters
from staddle.security.identity.keys import Role, create_keys, load_keys
from staddle.security.ledger import audit, overview
from staddle.security.ledger import messages as ledger_view
from staddle.security.log.tree_head import TreeHead
from staddle.security.policy.release import Release

MADE = "2026-11-21 17:30 UTC"
VOID = {"meta", "br"}
BLOCKS = {"div", "p", "li", "dt", "dd", "h1", "h2", "h3", "pre", "td", "th", "br"}
TAG_NAMES = """
html head meta title style body header section article nav a ol main div span b strong p ul li dl dt
dd h1 h2 h3 code pre br table caption thead tbody tr th td figure figcaption svg defs
pattern desc rect line circle path text
"""
TAGS = set(TAG_NAMES.split())
OUTSIDE = {"href", "src", "srcset", "action", "style", "xlink:href", "background"}


class Parsed(HTMLParser):
    """A page as a tree of (tag, attributes, texts and nodes).

    Raises for markup that is not well-formed.
    """

    def __init__(self, data):
        super().__init__()
        self.nodes = [("", {}, [])]
        self.open = [self.nodes[0]]
        self.feed(data.decode())
        self.close()
        assert [node[0] for node in self.open] == [""]

    def handle_starttag(self, tag, attrs):
        node = (tag, dict(attrs), [])
        assert len(node[1]) == len(attrs), f"an attribute twice in {tag}"
        self.nodes.append(node)
        self.open[-1][2].append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag, f"</{tag}> closes another element"

    def handle_data(self, data):
        self.open[-1][2].append(data)

    def handle_comment(self, data):
        raise AssertionError(f"comment {data!r}")

    def handle_pi(self, data):
        raise AssertionError(f"processing instruction {data!r}")

    def all(self, tag, **attributes):
        return [n for n in self.nodes if n[0] == tag and attributes.items() <= n[1].items()]

    def items(self):
        """Texts of the list of section 1, an item per job."""
        start = next(n for n, node in enumerate(self.nodes) if node[1].get("id") == "s1")
        found = next(node for node in self.nodes[start:] if node[0] == "ul")
        return [text(item) for item in found[2] if isinstance(item, tuple)]

    def section(self, title):
        """Rows of each table between a heading and the next, as texts of their cells."""
        rows, inside = [], False
        for node in self.nodes:
            if node[0] == "h2":
                inside = title in text(node)
            elif inside and node[0] == "tr":
                rows.append([text(cell) for cell in node[2] if isinstance(cell, tuple)])
        return rows


def text(node):
    return node if isinstance(node, str) else "".join(text(child) for child in node[2])


def words(page):
    """All that is to be read, with single spaces."""

    def spaced(node):
        if isinstance(node, str):
            return node
        inner = "".join(map(spaced, node[2]))
        return f" {inner} " if node[0] in BLOCKS else inner

    return " ".join(spaced(page.all("body")[0]).split())


@pytest.fixture(scope="module", autouse=True)
def _one_template():
    """Jinja compiles the page's template once, not for each page: it takes longer than a page."""
    compiled, compiles = {}, jinja2.Environment.compile

    def once(environment, source, *place):
        if source not in compiled:
            compiled[source] = compiles(environment, source, *place)
        return compiled[source]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jinja2.Environment, "compile", once)
        yield


@pytest.fixture
def path(tmp_path):
    return tmp_path / "silo" / "ledger"


def made(path, sources=RosterSources(), only=""):  # noqa: B008 frozen
    return report.html(report.read(path, MADE, sources, only))


def parsed(path, sources=RosterSources(), only=""):  # noqa: B008 frozen
    return Parsed(made(path, sources, only))


def figure(text):
    return int(text.replace(",", "")) if text != "–" else 0


def break_it(path):
    first(path).write_bytes(first(path).read_bytes().replace(b"too large", b"too small"))


def pages(tmp_path):
    """One page of each sort."""
    names = ("full", "governed", "nasty", "broken", "empty")
    full, governed, nasty, broken, empty = (tmp_path / name / "ledger" for name in names)
    ledgers.full(full)
    ledgers.governed(governed, *NASTY)
    ledgers.nasty(nasty)
    break_it(ledgers.full(broken))
    with open_ledger(empty, "silo-a"):
        pass
    yield made(full)
    yield made(full, only="lung-3")
    yield from (made(governed), made(nasty), made(broken), made(empty))


# The file.
def test_a_page_is_well_formed_and_refers_to_nothing_outside(tmp_path):
    for data in pages(tmp_path):
        page = Parsed(data)
        assert {node[0] for node in page.nodes[1:]} <= TAGS
        ids = [node[1]["id"] for node in page.nodes if "id" in node[1]]
        assert len(ids) == len(set(ids))
        for tag, attributes, _ in page.nodes:
            outside = OUTSIDE & set(attributes)
            if tag == "a":  # within the page
                outside.discard("href")
                assert attributes["href"].removeprefix("#") in ids
            assert not outside, tag
            assert not [name for name in attributes if name.startswith("on")]
            for value in attributes.values():
                assert "//" not in value or "url" not in value
                assert all(target.startswith("#p") for target in re.findall(r"url\((.*?)\)", value))
            for label in attributes.get("aria-labelledby", "").split():
                assert label in ids
        ((_, _, (style,)),) = page.all("style")
        assert not re.search(r"@import|url\(|http|@font-face", style)
        digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
        (policy,) = page.all("meta", **{"http-equiv": "Content-Security-Policy"})
        directives = dict(part.strip().split(" ", 1) for part in policy[1]["content"].split(";"))
        nothing = dict.fromkeys(("default-src", "base-uri", "form-action"), "'none'")
        assert directives == {**nothing, "style-src": f"'sha256-{digest}'"}
        tags = [node[1] for node in page.all("head")[0][2] if isinstance(node, tuple)]
        assert [sorted(each) for each in tags][:2] == [["charset"], ["content", "http-equiv"]]


def test_every_picture_has_a_name_and_a_description(path):
    page = parsed(ledgers.full(path))
    pictures = [node for node in page.all("svg", role="img") if node[1].get("aria-labelledby")]
    assert len(pictures) == 2
    for picture in pictures:
        title, description = (
            page.nodes[[n[1].get("id") for n in page.nodes].index(i)]
            for i in picture[1]["aria-labelledby"].split()
        )
        assert "lung" in text(title)
        assert "bytes in" in text(description)
    labels = [node[1]["aria-label"] for node in page.all("svg") if "aria-label" in node[1]]
    assert labels == ["holds"]


def test_the_same_ledger_gives_the_same_bytes_whatever_the_day(path):
    ledgers.full(path)
    one = made(path)
    assert made(path) == one
    later = report.html(report.read(path, "2027-01-01 00:00 UTC", RosterSources()))
    assert later != one
    assert later.replace(b"2027-01-01 00:00 UTC", MADE.encode()) == one


# Untrusted text.
def test_names_that_would_like_to_be_markup_stay_text(path, tmp_path, monkeypatch):
    nasty = parsed(ledgers.nasty(path))
    monkeypatch.setattr(ledgers, "NASTY", ("one", "two", "three", "four"))
    monkeypatch.setattr(ledgers, "SCRIPT", "silo-a")
    plain = parsed(ledgers.nasty(tmp_path / "plain" / "ledger"))
    shape = lambda page: Counter(node[0] for node in page.nodes if node[0] != "span")
    assert shape(nasty) == shape(plain)
    said = words(nasty)
    for name in NASTY:
        shown = " ".join(printable(name).split())
        assert said.count(shown) >= 15, name
        assert plain.all("title")
    assert SCRIPT in text(nasty.all("title")[0])
    assert said.count(SCRIPT) > said.count(QUOTES) >= 15


def test_characters_that_nobody_sees_are_shown(path):
    data = made(ledgers.nasty(path)).decode()
    assert {c for c in data if not c.isprintable() and c != "\u00a0"} == {"\n"}
    assert r"a\x00b\x1b[2Jc\u202ed\ne\u2028f" in data
    assert printable("é ß 名 – \u00a0") == "é ß 名 – \u00a0"
    assert printable(CONTROL + "\ue000\U000e0041\u200b\xad") == (
        r"a\x00b\x1b[2Jc\u202ed\ne\u2028f" r"\ue000\U000e0041\u200b\xad"
    )


def test_problems_of_a_broken_ledger_are_escaped_too(path):
    ledgers.nasty(path)
    verified = replace(audit.verify(path), problems=NASTY)
    page = Parsed(report.html(report_page.broken(verified, MADE, SCRIPT)))
    assert not page.all("script")
    assert all(
        printable(name).replace("  ", " ") in words(page)
        for name in (SCRIPT, QUOTES, CONTROL, LONG)
    )


# Numbers.
COLUMNS = ("messages", "tensors", "elements", "bytes", "assumed")


def test_the_table_adds_up_to_the_summary(path):
    rows = parsed(ledgers.full(path)).section("3. What left")
    totals, job, sums, grand = {}, None, {}, None
    for row in rows:
        match row:
            case [name] if name.startswith(("Job ", "Control")):
                job = name.removeprefix("Job ").replace("Control messages", "(control)")
            case ["sum", *numbers]:
                sums[job] = [figure(cell) for cell in numbers]
            case ["in all", *numbers]:
                grand = [figure(cell) for cell in numbers]
            case [part, _, "coordinator", _, "plain", _, *numbers]:
                totals.setdefault((job, part), []).append([figure(cell) for cell in numbers])
    summary = ledger_view.summary(path)
    assert set(totals) == set(summary)
    for key, expected in summary.items():
        added = [sum(column) for column in zip(*totals[key], strict=True)]
        assert added == [getattr(expected, name) for name in COLUMNS]
    left = [message for message in ledger_view.messages(path) if message.handed]
    messages = Counter(message.intent.job for message in left)
    for job, row in sums.items():
        mine = [total for (name, _), total in summary.items() if name == job]
        assert row[0] == messages.get(job, mine[0].messages)  # a message of two parts once
        for column, name in enumerate(COLUMNS[1:], 1):
            assert row[column] == sum(getattr(total, name) for total in mine)
    assert grand == [sum(column) for column in zip(*sums.values(), strict=True)]
    assert grand[3] == sum(total.bytes for total in summary.values())


def test_the_pictures_add_up_to_the_messages(path):
    page = parsed(ledgers.full(path))
    expected = Counter()
    for message in ledger_view.messages(path):
        expected[message.intent.job] += message.handed or 0
    drawn = Counter()
    for node in page.all("figure"):
        title, picture = (child for child in node[2] if isinstance(child, tuple))
        nodes = [child[1] for child in picture[2] if isinstance(child, tuple)]
        drawn[text(title)] += sum(int(node.get("data-bytes", 0)) for node in nodes)
    assert drawn == {f"Job {job}": count for job, count in expected.items()}


def test_a_ledger_of_several_days_has_a_picture_by_day(path):
    verified = audit.verify(ledgers.full(path))

    def dated(line):
        time = f"2026-03-{1 + line.seq // 20:02}T12:00:00.000000Z"
        return replace(line, record={**line.record, "time": time})

    records = [(dated(line), record) for line, record in ledger_view.records(path)]
    body = report_page.page(overview.view(verified, records), MADE, RosterSources()).body
    expected = Counter()
    for message in ledger_view.messages(path):
        day = f"2026-03-{1 + message.seq // 20:02}"
        expected[day, message.intent.job] += message.handed or 0
    assert {(s.column, s.name): s.bytes for s in body.days.segments} == expected
    assert {day for day, _ in expected} == {"2026-03-01", "2026-03-02"}
    assert report.read(path, MADE, RosterSources()).body.days is None


def test_of_very_many_rows_and_pictures_the_page_says_what_is_left_out(path, monkeypatch):
    ledgers.full(path)
    with open_ledger(path, "silo-a") as ledger:
        for number in range(3):
            fields = {"job": "lung-3", "round_number": number, "purpose": "x", "policy": HASH}
            write_policy_deny(ledger, **fields, reasons=[f"no {number}"])
    monkeypatch.setattr(tables, "MAX_ROWS", 2)
    monkeypatch.setattr(report_page, "MAX_CHARTS", 1)
    page = parsed(path)
    said = words(page)
    assert "Listed are the newest 2 refusals, not the 2 before them." in said
    assert [row[3] for row in page.section("5. The policy")[-2:]] == ["no 1", "no 2"]
    assert "Drawn: the jobs with the most bytes, 1. Not drawn, but in section 3: 1." in said
    assert [text(node) for node in page.all("figcaption")] == ["Job lung-1"]


def test_messages_are_listed_one_by_one(path):
    page = parsed(ledgers.full(path))
    rows = page.section("10. Every message")[1:]
    for row, message in zip(rows, ledger_view.messages(path), strict=True):
        intent = message.intent
        outcome = message.status if message.digested else f"{message.status}, no digest, assumed"
        receipt = "not checked" if message.receipt else "no"
        assert [row[0], *row[2:4]] == [str(message.seq), intent.job, str(intent.round)]
        size = f"{message.handed or 0:,}"
        assert row[5:] == [size, "coordinator", "round-update, metrics", outcome, receipt]
    assert rows[4][4] == "model\u00a00 to 176, metrics\u00a00 to 8"  # cut short, and no outcome
    assert rows[6][4] == "model\u00a0176, metrics\u00a08, (message)\u00a030"
    assert "9 messages." in words(page)


def test_a_long_ledger_is_listed_by_round_and_its_newest_rounds(path, monkeypatch):
    monkeypatch.setattr(tables, "MAX_ROWS", 4)
    page = parsed(ledgers.full(path))
    rows = page.section("10. Every message")[1:]
    assert [(row[2], row[3], row[5], row[8], row[9]) for row in rows] == [
        ("lung-1", "3", "184", "sent", "not checked"),
        ("lung-1", "6", "184", "1 no outcome, no digest, assumed; 1 failed", "0 of 2"),
        ("lung-1", "7", "228", "1 unknown; 1 sent", "1 of 2"),
        ("lung-3", "0", "8", "no outcome", "no"),
    ]
    assert (
        "Only the newest 4 rounds are listed here, 3 older ones are counted in every total"
        in words(page)
    )
    assert "staddle ledger show DIR" in words(page)
    assert page.section("3. What left")[-3][4:] == ["1,668", "584"]


# Words.
def check_says(said, *parts):
    for part in parts:
        assert part in said


def test_one_sentence_a_job(path):
    first, second, third = parsed(ledgers.full(path)).items()
    assert (
        first
        == "Job lung-1: 1,148 bytes (1.121 KiB) left in 7 messages, 6 rounds between 0 and 7, for"
        " coordinator: model 1,062 bytes, metrics 56 bytes, (message) 30 bytes. Who can read it:"
        " coordinator. None of it is differentially private: the silo's software states 15 tensors"
        " computed from records without noise. The policy's rules round-update, metrics let it"
        " pass. At most 184 bytes more may have left, of 1 message whose end no record tells."
    )
    assert second == "Job lung-2: nothing left; this silo declined it."
    assert (
        third
        == "Job lung-3: 8 bytes left in 1 message, round 0, for coordinator: metrics 8 bytes. Who"
        " can read it: coordinator, silo-b. None of it is differentially private: the silo's"
        " software states 1 tensor computed from records without noise. The policy's rules"
        " round-update, metrics let it pass. The silo's policy held 1 message back."
    )


def test_the_verification_in_words(path):
    ledgers.full(path)
    with first(path).open("ab") as file:
        file.write(b'{"half')
    said = words(parsed(path))
    head = audit.verify(path).head
    check_says(
        said,
        "The ledger holds",
        f"Head (SEQ:LEAF) 37:{head}",
        f"staddle ledger verify DIR --known 37:{head}",
        "Unfinished last line 6 bytes",
        "messages without the digest of what went: 1;",
        "Without outcome messages: 2",
        "Control session that of record 37 is open; its cap is assumed",
        "staddle 0.1.0, staddle 0.2.0",
        "No differential privacy is recorded for these messages.",
        *("It never proves absence", "cut off the end", "unmodified software", "own statement"),
    )


def test_policies_rules_denials_jobs_and_taints(path):
    page = parsed(ledgers.full(path, policy=HASH))
    policies = page.section("5. The policy")
    assert [row[0] for row in policies[1:3]] == [OTHER, HASH]
    assert policies[1][2] == policies[2][1]
    assert policies[2][2] == "the last record"
    assert ["lung-1", "round-update", "8"] in policies
    assert policies[-1][1:] == ["lung-3", "1", "too largeNaN"]
    jobs = page.section("6. Jobs")
    assert [row[2:] for row in jobs[1:]] == [
        ["0–3, 6–7", "2,800 bytes, rounds 0–3"],
        ["none", "nothing"],
        ["0", "nothing"],
    ]
    assert "lung 0.3" not in jobs[1][0]
    # whose code computed what left
    assert jobs[3][0] == f"lung-3method fedavgcode of package lung 0.3{'c1' * 32}"
    assert "signed by operator-1" in jobs[2][1]
    assert "no rule has part 'labels'" in jobs[2][1]
    assert "approved by anna, 2026-11-20T21:29:00+00:00" in jobs[3][1]
    assert "approved" not in jobs[1][1]
    assert [row[:3] for row in page.section("8. Privacy")[1:]] == [
        ["lung-1", "exact", "13"],
        ["lung-1", "public", "7"],
        ["lung-3", "exact", "1"],
    ]
    sessions = page.section("9. Sessions")
    assert [row[4:6] + row[8:] for row in sessions[1:3]] == [
        ["8", "512", "yes"],
        ["–", "0 to 400", "no: its cap is assumed"],
    ]
    assert sessions[3][1:3] == ["8", "512"]
    assert [row[2] for row in sessions[5:]] == ["start", "stop", "start"]
    assert "puts in force. Ask" not in words(page)


def test_a_policy_that_no_record_puts_in_force_is_pointed_out(path):
    page = parsed(ledgers.full(path, policy=OTHER))  # messages are by another one
    assert (
        f"Decisions were made by a policy with digest {HASH}, which no record of the ledger puts in"
        " force" in words(page)
    )


def test_the_text_of_each_policy_in_force_stands_there_once_with_its_dates(path):
    first, second = POLICY, SCRIPT
    digests = ledgers.governed(path, first, second, first)
    page = parsed(path)
    assert [text(node) for node in page.all("pre")][:2] == [first.expandtabs(4), f"{second}\n"]
    assert len(page.all("pre")) == 3  # the commands are the last
    rows = page.section("5. The policy")[1:4]
    assert [row[0] for row in rows] == digests
    assert [row[3] for row in rows] == ["1", "1", "1"]
    times = [record["time"][:19].replace("T", " ") for record in stored(path, "start")]
    said = words(page)
    assert (
        f"In force from {times[0]} to {times[1]}, {times[2]} to the last record, digest"
        f" {digests[0]}" in said
    )
    assert f"In force from {times[1]} to {times[2]}, digest {digests[1]}" in said
    assert "not in this ledger" not in said
    assert "puts in force. Ask" not in said


def test_an_older_ledger_has_no_text_of_its_policies(path):
    page = parsed(ledgers.full(path))
    said = words(page)
    assert len(page.all("pre")) == 1
    for digest in (HASH, OTHER):
        assert f"digest {digest}. Its text is not in this ledger" in said


def test_the_roster_gives_names_only_if_the_ledger_names_it(path, tmp_path):
    members = {"founder": "founder", "coordinator": "coordinator", "silo-a": "silo"}
    founder, *entries = (
        create_keys(tmp_path / id_, id_, Role(role), f"Org <{role}>")
        for id_, role in members.items()
    )
    roster = rosters.new(FEDERATION, [founder], 1)
    for entry in entries:
        roster = rosters.add(roster, entry)
    key = load_keys(tmp_path / "silo-a").log
    ledgers.full(path, roster=rosters.digest(roster), key=key, receipt=None)
    page = parsed(path, RosterSources((roster,)))
    check_says(
        words(page),
        f"Federation {FEDERATION} (roster version 3, signed by the founders that it names, and"
        " nothing",
        "signed by the log key that the roster has for this silo",
        "for coordinator (Org <coordinator>): model",
    )
    row = ["coordinator", "Org <coordinator>", HASH, "has ANOTHER key there"]
    assert row in page.section("3. What left")
    # its certificate was renewed: another roster that is at hand has that key
    coordinator = roster["coordinator"].model_copy(update={"spki_sha256": HASH})
    entries = tuple(coordinator if e.id == "coordinator" else e for e in roster.entries)
    before = roster.model_copy(update={"entries": entries, "version": 2})
    row = ["coordinator", "Org <coordinator>", HASH, "its key in another version"]
    assert row in parsed(path, RosterSources((roster, before))).section("3. What left")
    older = rosters.remove(roster, "silo-a")
    said = words(parsed(path, RosterSources((older,))))
    digest = rosters.digest(older)
    check_says(
        said,
        "whose key signed it was not checked",
        f"not one that this ledger names (digest {digest})",
    )
    assert f"Federation {FEDERATION}" not in said
    assert "Org <" not in said


def test_a_checkpoint_that_another_key_signed_is_an_alarm(path, tmp_path):
    entries = [
        create_keys(tmp_path / id_, id_, Role(role), "Org")
        for id_, role in (("f", "founder"), ("silo-a", "silo"))
    ]
    for federation in (FEDERATION, "other"):
        roster = rosters.add(rosters.new(federation, entries[:1], 1), entries[1])
        shutil.rmtree(path, ignore_errors=True)
        ledgers.full(path, roster=rosters.digest(roster))  # signed by the tests' own key
        said = words(parsed(path, RosterSources((roster,))))
        check_says(said, "This ledger does not hold", "checkpoint")
        assert "3. What left" not in said


def test_a_page_of_one_job_says_what_it_leaves_out(path):
    page = parsed(ledgers.full(path), only="lung-3")
    said = words(page)
    assert "this page is of job lung-3 only; 7 messages with 1,148 bytes are of other jobs" in said
    assert "lung-1" not in said
    assert "(control)" not in said
    assert page.section("3. What left")[-3][4] == "8"
    with refused("no record is of job 'x'; its jobs: lung-1, lung-2, lung-3"):
        made(path, only="x")


def test_what_was_spent_is_shown_by_data_set_and_drawn_under_its_limit(path):
    private(path)
    page = parsed(path)
    head, data, scans, taints, *rows = page.section("8. Privacy spent")
    assert [row[0] for row in (head, data, scans, taints)] == ["Data set", "data", "scans", "Job"]
    assert data[1:5] == ["1.7500", "8", "0.00001", "3"]
    assert data[-1] == f"7 {'07' * 32}"
    assert scans[1:5] == ["0.5000", "1.5", "0.00001", "1"]
    assert [[row[0], row[1], row[2], row[-1]] for row in rows] == [
        ["j1", "noised", "4", "data: 2, 4, 6"],
        ["j1", "public", "2", "–"],
        ["j2", "exact", "3", "–"],
    ]
    pictures = [text(node) for node in page.all("desc")]
    assert "Data set data: epsilon 1.7500 of 8 at delta 0.00001 after 3 heads" in pictures
    assert "Data set scans: epsilon 0.5000 of 1.5 at delta 0.00001 after 1 head" in pictures
    first, second = page.items()[:2]
    told = (
        "4 tensors differentially private, 2 public, 0 computed from records without noise"
        " (section 8)."
    )
    assert f"The silo's software states: {told}" in first
    bare = "states 3 tensors computed from records without noise."
    assert f"None of it is differentially private: the silo's software {bare}" in second
    assert "No differential privacy is recorded" not in words(page)


@pytest.mark.parametrize("noise", ["local", "shared"])
def test_a_share_of_the_noise_is_said_to_protect_a_sum_alone(path, noise):
    private(path, noise=noise)
    first, second = parsed(path).items()
    assert ("what is protected is a sum, as long as the other silos add" in first) == (
        noise == "shared"
    )
    assert "share" not in second


def test_cohorts_by_size_and_by_name(path, monkeypatch):
    assert "is not recorded in this ledger" in words(parsed(ledgers.full(path)))
    with open_ledger(path) as ledger:
        for number, cohort in enumerate(("abc", "abc", "ab", "abc", "abd", "abd", "ab")):
            ledgers.contribute(ledger, "lung-4", number, cohort=sorted({"silo-a", *cohort}))
        ledgers.contribute(ledger, "lung-5", 0, cohort=["silo-a"])
    page = parsed(path)
    four, five = (row[2] for row in page.section("6. Jobs")[4:])
    assert (
        four == "0–6cohorts of 3 to 4 silos, this one among them; changes: 4"
        "3 silos: rounds 2, 6"
        "4 silos: rounds 0–1, 3–5"
        "cohort a, b, c, silo-a: rounds 0–1, 3"
        "cohort a, b, d, silo-a: rounds 4–5"
        "cohort a, b, silo-a: rounds 2, 6"
    )
    assert five == "0cohorts of 1 silos, this one among them; changes: 0cohort silo-a: rounds 0"
    assert "is not recorded in this ledger" not in words(page)
    monkeypatch.setattr(tables, "MAX_COHORTS", 1)
    assert "rounds 2, 6other cohorts, not listed: 2" in parsed(path).section("6. Jobs")[4][2]


# Secure sums.
def sums(path):
    """Sums: one opened, one attempt that was not, one cut upload, and a job that gave only keys."""
    summed(path)
    with open_ledger(path) as ledger:
        fewer = secagg(members=("silo-a", "silo-b", "silo-c"), ctx="e9" * 32)
        intend_masked(ledger, round_number=5, secagg=fewer)
        end_sum(ledger, "", round_number=5, ctx=fewer.ctx, code="STOPPED", blame="")
        protocol(ledger, "keys", 7, job="j2")
    return path


def test_secure_sums_and_attempts_that_ended(path):
    page = parsed(sums(path))
    forms, masked, head, *rows = page.section("7. Secure sums, mixes and comparisons")
    assert [row[0] for row in (forms, masked)] == ["Form, reader", "masked, sum"]
    assert [row[1:] for row in rows[:2]] == [
        ["3, 5", "3 to 4", "3", "1", "4", "3", "3", "8", "1,113"],
        ["none", "–", "–", "–", "0", "none", "–", "1", "7"],
    ]
    assert [row[:1] for row in rows[:2]] == [["j1"], ["j2"]]
    assert len(head) == len(rows[0]) == 10
    assert [[row[0], *row[2:]] for row in rows[3:]] == [
        ["11", "j1", "4", "SURVIVORS", "coordinator", "U3 has 2 members"],
        ["16", "j1", "5", "STOPPED", "nobody", "–"],
    ]
    first, second = page.items()[:2]
    took = "The protocol of secure sums took"
    check_says(
        first,
        "Who can read it: sum. 2 messages of these left masked, and can be read only in a sum.",
        "At most 224 bytes more may have left, of 1 message whose end no record tells.",
    )
    assert first.endswith(f"{took} 8 messages more, 1,113 bytes (1.087 KiB).")
    assert second == f"Job j2: no tensor left. {took} 1 message more, 7 bytes."
    plain = words(parsed(ledgers.full(path.parent / "plain")))
    nothing = "No message of this ledger left masked, padded or rotated"
    assert f"{nothing}: who can read it reads" in plain


def test_sums_that_silos_alone_read_are_told_from_others(path):
    with open_ledger(path) as ledger:
        intend_masked(ledger, readers=["silos", "sum"])
    page = parsed(path)
    _, masked, padded, *_ = page.section("7. Secure sums, mixes and comparisons")
    assert (masked[0], padded[0]) == ("masked, sum", "masked, silos")
    assert padded[2] == "The silos of the job; the coordinator only together with one of them."
    check_says(
        page.items()[0],
        "Who can read it: silos, sum.",
        "Sums that only silos read are hidden from the coordinator unless a silo colludes with it.",
    )


def test_means_that_silos_read_by_name_are_told_from_other_sums(path):
    with open_ledger(path) as ledger:
        intend_masked(ledger, readers=["silo-c", "sum"])
    _, masked, named, *_ = parsed(path).section("7. Secure sums, mixes and comparisons")
    assert (masked[0], named[0]) == ("masked, sum", "masked, silos by name")
    assert named[2].startswith("Each of these silos its own mean.")


def test_padded_and_rotated_parts_say_who_reads_what_and_who_would_have_to_collude(path):
    keyed(path)
    with open_ledger(path) as ledger:
        other = [Release("other", "backbone", "w", "uint64", (4,), "padded")]
        fields = {"releases": other, "message_bytes": 32, "round_number": 4, "job": "j2"}
        intend_padded(ledger, "f7" * 32, 2, **fields)
    page = parsed(path)
    section = page.section("7. Secure sums, mixes and comparisons")
    forms, masked, padded, rotated, head, *rows = section
    assert [row[0] for row in (forms, masked, padded, rotated)] == [
        *("Form, reader", "masked, sum", "padded, mix", "rotated, gram")
    ]
    for row in (padded, rotated):
        assert row[3] == "The coordinator together with any one silo of the job."
    assert "more silos than the job assumes to collude" in masked[3]
    assert "Other silos of the job, each its own mean." in padded[2]
    assert "only differential privacy bounds this" in padded[2]
    assert rotated[1:3] == [
        "How long this silo's vectors are, and how alike to those of other silos, class by class.",
        "The coordinator.",
    ]
    # One padded upload broke after 64 bytes and resumed there: they count once.
    left = [PADDED_BYTES * 2, ROTATED_BYTES * 2]
    assert [row for row in rows if len(row) == len(head)] == [
        ["j1", "extractor", "padded", "mix", "0–1", "3", "2", f"{left[0]:,}"],
        ["j1", "heads", "rotated", "gram", "0–1", "2", "2", f"{left[1]:,}"],
        ["j2", "other", "padded", "mix", "4", "0", "1", "0 to 32"],
    ]
    assert [row[-2:] for row in rows if row[0] == "j1" and len(row) == 10] == [["5", "1,300"]]
    first, second = page.items()[:2]
    for said in (
        "Who can read it: mix, gram, sum.",
        (
            "2 messages of these left masked, and can be read only in a sum. 3 messages of these"
            " left padded, and can"
        ),
        (
            " be read only by other silos, mixed with what these and others uploaded. 2 messages of"
            " these left rotated,"
        ),
        (
            " of which the coordinator reads only lengths and their similarity to those of other"
            " silos. For padded"
        ),
        "For padded and rotated messages, this holds unless a silo colludes with the coordinator.",
        "The protocols of secure sums and mixes took 5 messages more, 1,300 bytes (1.27 KiB).",
    ):
        assert said in first
    assert "1 message of these left padded, and can be read only by other silos" in second
    assert "rotated, of which" not in second


def test_the_page_of_a_job_without_mixes_does_not_speak_of_them(path):
    said = words(parsed(sums(path)))
    for form in (
        "padded, mix",
        "rotated, gram",
        "Parts that left padded or rotated",
        "no silo collude",
    ):
        assert form not in said
    assert "The protocol of secure sums took" in said


def test_the_table_of_a_ledger_with_mixes_adds_up_too(path):
    rows = parsed(keyed(path) and path).section("3. What left")
    assert [row[:6] for row in rows if row[4:5] in (["padded"], ["rotated"])] == [
        ["extractor", "backbone", "coordinator", "mix", "padded", "sent"],
        ["heads", "classifier_rows", "coordinator", "gram", "rotated", "sent"],
        ["extractor", "backbone", "coordinator", "mix", "padded", "unknown"],
    ]
    (everything,) = (row for row in rows if row[0] == "in all")
    assert figure(everything[4]) == sum(t.bytes for t in ledger_view.summary(path).values())


def test_the_table_of_a_ledger_with_sums_adds_up_too(path):
    rows = parsed(sums(path)).section("3. What left")
    of_protocol = [row for row in rows if row[0] == "(protocol)"]
    assert [row[:6] for row in of_protocol[:2]] == [
        ["(protocol)", kind, "coordinator", "coordinator", "plain", "no outcome"]
        for kind in ("keys", "shares")
    ]
    sent = [row for row in rows if row[4:6] == ["masked", "sent"]]
    assert [row[0] for row in sent] == ["model", "metric", "(message)"]
    assert [row[3] for row in sent] == ["sum"] * 3
    total = sum(totals.bytes for totals in ledger_view.summary(path).values())
    (everything,) = (row for row in rows if row[0] == "in all")
    assert figure(everything[4]) == total == 1113 + 7 + 224
    assert figure(everything[5]) == 224
    assert [figure(row[1]) for row in rows if row[0] == "sum" and len(row) == 6] == [9, 1]
    only = report.read(path, MADE, RosterSources(), "j2").body
    assert (only.total.bytes, only.elsewhere[1]) == (7, 1113 + 224)


# Ledgers that are not as they should be.
def test_a_ledger_that_does_not_hold_is_said_first_and_shows_no_number(path):
    ledgers.full(path)
    break_it(path)
    page = parsed(path)
    first = next(n for n in page.all("main")[0][2] if isinstance(n, tuple) and n[0] == "div")
    assert first[1] == {"class": "verdict alarm", "role": "alert"}
    assert "This ledger does not hold" in text(first)
    assert "THIS LEDGER DOES NOT HOLD" in text(page.all("header")[0])
    said = words(page)
    assert "does not follow the line before" in said
    assert "silo-a, as the ledger calls itself" in said
    assert not page.all("table")
    assert not page.all("figure")
    for told in ("lung-1", "1,148", "1,062", "The ledger holds"):
        assert told not in said


def test_an_empty_ledger(path):
    with open_ledger(path, "silo-a"):
        pass
    said = words(parsed(path))
    assert "The ledger is empty" in said
    assert "it is empty" in said
    assert "In all 0 bytes" in said
    assert "--known" not in said


# The command.
def run(*arguments):
    return CliRunner().invoke(app, ["ledger", *map(str, arguments)])


def test_the_command_writes_one_file(path, tmp_path, monkeypatch):
    ledgers.full(path)
    out = tmp_path / "page.html"
    result = run("report", tmp_path / "silo", "--out", out, "--job", "lung-1")
    assert result.exit_code == 0, result.exception
    assert (
        f"{out}: verified, 7 messages, 1,148 bytes, head 37:{audit.verify(path).head}"
        in result.output
    )
    assert "this page is of job lung-1 only" in words(Parsed(out.read_bytes()))
    assert out.stat().st_mode & 0o077 == 0
    monkeypatch.chdir(tmp_path)
    assert run("report", path).exit_code == 0
    assert (tmp_path / "ledger-report.html").is_file()


def test_the_command_fails_for_a_broken_ledger_and_writes_why(path, tmp_path):
    ledgers.full(path)
    break_it(path)
    result = run("report", path, "--out", tmp_path / "page.html")
    assert isinstance(result.exception, SystemExit)
    assert (result.exit_code, "does NOT hold" in result.output) == (1, True)
    assert "This ledger does not hold" in words(Parsed((tmp_path / "page.html").read_bytes()))


def test_the_command_writes_nothing_for_what_is_no_ledger(tmp_path):
    out = tmp_path / "page.html"
    for place in (tmp_path / "gone", tmp_path):
        result = run("report", place, "--out", out)
        assert isinstance(result.exception, LocalError)
        assert str(place) in str(result.exception)
    assert not out.exists()


def test_who_holds_a_head_of_the_ledger_is_said(tmp_path):
    ledgers.full(tmp_path / "one")
    assert "no member has said yet that it holds a head of this ledger" in words(
        parsed(tmp_path / "one")
    )
    with open_ledger(tmp_path / "two") as ledger:
        for _ in range(3):
            write_start(ledger, "staddle 0.1.0", OTHER, HASH)
            head = TreeHead.parse(ledger.checkpoint().text)
            write_witness(ledger, "coordinator", head)
        write_witness(ledger, "silo-b", head)
    said = words(parsed(tmp_path / "two"))
    assert re.search(
        r"Held by others coordinator: the first 5 records, said 20\d\d-.*; silo-b: the first 5"
        r" records",
        said,
    )
