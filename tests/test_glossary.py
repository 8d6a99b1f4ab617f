"""Texts for people use the words of docs/glossary.md, and none of the phrases that it rules out.

Checked are the README, the change log, the pages under docs/, the templates that commands write,
the page that `ledger report` makes, all help texts, and in the product's modules what errors and
logs say, docstrings and comments. Code (fenced, indented or in backticks) is left out: names of
files, fields and events keep their spelling.
"""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest
import typer
from support import product_source
from support.product_source import sources

from staddle.commands.main import app

ROOT = Path(__file__).parents[1]
GLOSSARY = ROOT / "docs" / "glossary.md"
FORBIDDEN = {
    r"\bOf (?:what|whom|which|those|that)\b": (
        "name the subject first: 'For parts that …', 'The coordinator reads …'"
    ),
    r"\bWhether [^.|]{1,200}, that\b": "put the subject and its verb first, then 'whether …'",
    r"\bThat of\b": "name what it is: 'The ledger of …'",
    r"\b(?:is|are) no (?:method|model|option|command)\b": "'unknown method', 'unknown model', …",
    r"\bnone that there can be\b": "'invalid', 'missing' or 'out of range'",
    r"\b(?:go|goes|went|gone|going) on\b(?! (?:to|with what)\b)": (
        "'resume', 'continue' or 'start again'"
    ),
    r"\bbeside\b": "'next to', 'alongside' or 'as well as'",
    r"\bby (?:it|them)sel(?:f|ves) alone\b": "'on its own'",
    r"\banew\b": "'again' or 'from scratch'",
    r"\bgifts?\b": "'contribution'",
    r"\bsilos? (?:gives?|gave|has given|have given)\b": "'uploads' or 'contributes'",
    r"(?<!-)\bcheckpoints?\b": "'tree head' for a ledger, 'snapshot' for a simulation",
    r"\bso many at (?:least|most)\b|\bat (?:least|most) so many\b": (
        "name the number: 'at least this many'"
    ),
    r"\ba (?:thread|record|number|class|silo) each\b": "'per thread', 'per record', …",
    r"\bcounts no more\b": "'no longer counts'",
    r"\bpayloads?\b": "'tensors', 'message' or 'signed bytes'",
    r"(?<!Moreau )\benvelopes?\b": "'signed document'",
    r"\bin league\b": "'collude'",
}
# Most texts have none of them.
ANY = re.compile("|".join(f"(?:{phrase})" for phrase in FORBIDDEN))


def prose(text):
    """A page without its code, its quotations and its line ends."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^(?:    |\t)(?! *[-*|]).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r'`[^`]*`|"[^"\n]*"', "…", text)
    return " ".join(text.split())


def comments(text):
    """What the comments of a template say; settings that are commented out are code."""
    lines = (line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#"))
    return " ".join(line for line in lines if not re.match(r"\[|[a-z0-9_]+ = ", line))


def helps(command, path="staddle"):
    """The help text of a command, its options and its subcommands, by where it stands."""
    texts = [command.help, *(getattr(parameter, "help", None) for parameter in command.params)]
    yield path, " ".join(" ".join(filter(None, texts)).split())
    for name, inner in getattr(command, "commands", {}).items():
        yield from helps(inner, f"{path} {name}")


def texts(path):
    """What a module may say to a person, by line: its strings of several words, no docstrings."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    bodies = [node.body for node in nodes if isinstance(getattr(node, "body", None), list)]
    docstrings = {id(body[0].value) for body in bodies if body and isinstance(body[0], ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            constant = (isinstance(part, ast.Constant) and part.value for part in node.values)
            text = "".join(part or "…" for part in constant)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = "" if id(node) in docstrings else node.value
        else:
            continue
        if " " in text:
            yield node.lineno, text


def notes(path):
    """The docstrings and comments of a module, by line; comments on lines that follow are one."""
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            value = getattr(body[0].value, "value", None)
            if isinstance(value, str):
                yield body[0].lineno, value

    begun, last, block = 0, 0, []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1:
                yield begun, " ".join(block)
                begun, block = token.start[0], []
            last = token.start[0]
            block.append(token.string.lstrip("# "))
    yield begun, " ".join(block)


def found(text):
    """Every forbidden phrase in a text, with its surroundings and what to write instead."""
    if not ANY.search(text):
        return
    for phrase, instead in FORBIDDEN.items():
        for match in re.finditer(phrase, text):
            around = text[max(0, match.start() - 40) : match.end() + 40]
            yield f"…{around}…: write {instead}"


PAGES = sorted(
    {*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")} - {GLOSSARY} if GLOSSARY.exists() else ()
)
REPORT = product_source.ROOT / "commands" / "report" / "templates" / "report.html"
TEMPLATES = sorted((ROOT / "commands" / "console" / "templates").glob("*.toml"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_none_of_the_phrases(page):
    faults = list(found(prose(page.read_text(encoding="utf-8"))))
    # The change log tells of releases in which tree heads went by the name of their format.
    history = page.name == "CHANGELOG.md"
    assert [fault for fault in faults if not (history and "'tree head'" in fault)] == []


def test_the_report_page_has_none_of_the_phrases():
    text = re.sub(r"<[^>]*>|{[{%].*?[%}]}", " ", REPORT.read_text(encoding="utf-8"))
    assert len(text.split()) > 1000
    assert [fault for fault in found(prose(text)) if "'tree head'" not in fault] == []


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name)
def test_a_template_has_none_of_the_phrases(template):
    assert list(found(comments(template.read_text(encoding="utf-8")))) == []


def test_no_help_text_has_one_of_the_phrases():
    texts = dict(helps(typer.main.get_command(app)))
    assert len(texts) > 40
    assert {path: faults for path, text in texts.items() if (faults := list(found(text)))} == {}


@pytest.mark.parametrize("read", [texts, notes])
def test_no_module_has_one_of_the_phrases(read):
    """Neither what errors and logs say, nor docstrings and comments.

    Tree heads are kept as what C2SP calls a checkpoint; simulations have snapshots.
    """
    assert len(sources()) > 300
    faults = {}
    for path in sources():
        of_ledgers = not path.is_relative_to(product_source.ROOT / "simulator")
        for line, text in read(path):
            for fault in found(prose(text)):
                if not (of_ledgers and "'tree head'" in fault):
                    faults[f"{path}:{line}"] = fault
    assert faults == {}


@pytest.mark.parametrize(
    "text",
    [
        "Of what is compared the coordinator reads lengths.",
        "Whether the record holds or does not, that says the ledger.", "'fedpre' is no method",
        "upload 7 is none that there can be", "the same command goes on",
        "the tensors lie beside it", "it ran by itself alone", "jobs are signed anew",
        "fewest silos whose gifts make a round", "what each silo gives", "signed checkpoints",
        "silos, so many at least", "that counts no more", "That of a silo",
        "Sizes are a record each", "bytes of the payload", "in an envelope", "whoever is in league",
    ],
)  # fmt: skip
def test_each_phrase_is_found(text):
    assert list(found(text))


@pytest.mark.parametrize(
    "text",
    [
        "c2sp.org/tlog-checkpoint", "goes on to say", "besides", "silos upload again",
        "minimise the Moreau envelope F_i",
    ],
)  # fmt: skip
def test_what_is_right_is_not_found(text):
    assert not list(found(text))


@pytest.mark.skipif(not GLOSSARY.exists(), reason="the tests run without docs/")
def test_the_glossary_has_the_words_of_the_house_with_one_sentence_each():
    used = (
        GLOSSARY.read_text(encoding="utf-8").partition("## Words we use")[2].partition("\n## ")[0]
    )
    rows = dict(re.findall(r"^\| ([a-z ()]+) \| (.+) \|$", used, re.MULTILINE))
    rows.pop("word")
    asked = {"silo", "coordinator", "job", "round", "cohort", "part", "exchange"}
    asked |= {"contribution", "delivery", "blind", "ledger", "policy", "budget"}
    assert not asked - rows.keys()
    assert all(meaning.endswith(".") and ". " not in meaning for meaning in rows.values())
