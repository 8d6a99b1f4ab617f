"""What docs/operate.md names is there: commands and options, events, metrics, error codes."""

import re
from pathlib import Path

import pytest
import typer
from support.metric_names import GAUGES
from support.product_source import ROOT, sources

from staddle.commands.loader import COMMANDS, program
from staddle.metrics import exporter as metrics
from staddle.proto import federation_pb2 as pb

PAGE = Path(__file__).parents[1] / "docs" / "operate.md"
FILES = ("toml", "json", "yaml", "sqlite", "safetensors", "csv", "npz", "key", "words", "ini", "db")
NO_EVENTS = {"hidden.ctx", "coordinator.staddle"}  # a field of a record, the name in a certificate

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="docs are not beside the tests")


@pytest.fixture(scope="module")
def text():
    return PAGE.read_text(encoding="utf-8")


def commands(text):
    """Every command line of the page, in a block or in a sentence."""
    whole = text.replace("\\\n", " ")
    yield from re.findall(r"^ {4,}staddle ([a-z][^\n#]+)", whole, re.MULTILINE)
    yield from re.findall(r"`staddle ([a-z][^`]+)`", re.sub(r"(?<=\S)\n(?=\S)", " ", whole))


def test_every_option_of_a_command_exists(text):
    found = 0
    for line in commands(text):
        words = line.split()
        path = next((p for p in (" ".join(words[:2]), words[0]) if p in COMMANDS), None)
        if path is None:  # a word for several, such as a group
            assert len(words) == 1, line
            continue
        parameters = typer.main.get_command(program(path, COMMANDS[path])).params
        known = {option for one in parameters for option in (*one.opts, *one.secondary_opts)}
        assert {word for word in words if word.startswith("--")} <= known, line
        found += 1
    assert found > 50


def test_every_event_is_logged(text):
    code = "".join(path.read_text(encoding="utf-8") for path in sources() if path != ROOT)
    named = set(re.findall(r"`([a-z]+\.[a-z_]+)`", text))
    events = {name for name in named if name.split(".")[1] not in FILES} - NO_EVENTS
    assert len(events) > 30
    assert {name for name in events if f'"{name}"' not in code} == set()


def test_every_error_code_is_explained(text):
    codes = {name.removeprefix("ERROR_CODE_") for name in dict(pb.ErrorCode.items())}
    codes -= {"UNSPECIFIED"}
    section = text.partition("\n## 13. ")[2].partition("\n## 14. ")[0]
    missing = {code for code in codes if f"`{code}`" not in section}
    assert missing == set()


def test_every_gauge_is_named(text):
    section = text.partition("\n## 8. ")[2].partition("\n## 9. ")[0]
    assert len(GAUGES) > 15
    assert [name for name in GAUGES if f"{name.partition('_')[2]}" not in section] == []


@pytest.mark.parametrize("rules", [metrics.COORDINATOR, metrics.SILO])
def test_every_metric_is_named(text, rules):
    section = text.partition("\n## 8. ")[2].partition("\n## 9. ")[0]
    for rule in rules:
        labels = f"{{{','.join(rule.labels)}}}" if rule.labels else ""
        name = f"_{rule.name}{'' if rule.each or rule.latest else '_total'}{labels}`"
        assert name in section, name
