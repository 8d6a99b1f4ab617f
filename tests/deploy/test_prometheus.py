"""The rules, the scrape configuration and the board agree with the code and with Prometheus."""

import json
import re
import subprocess

import pytest
import yaml
from support.deployed import (
    BOARD,
    RULES,
    SCRAPES,
    beside,
    board_queries,
    metrics_in,
    needs,
)
from support.metric_names import METRICS

pytestmark = beside


def promtool(*arguments):
    done = subprocess.run(
        ["promtool", *map(str, arguments)], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def alerts():
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


@needs("promtool")
def test_prometheus_takes_the_rules():
    code, said = promtool("check", "rules", RULES)
    assert code == 0, said
    assert f"{len(alerts())} rules found" in said


@needs("promtool")
def test_each_alarm_fires_when_it_should_and_not_before():
    code, said = promtool("test", "rules", RULES.with_name("alerts.test.yml"))
    assert code == 0, said


@needs("promtool")
def test_prometheus_takes_the_scrape_configuration():
    code, said = promtool("check", "config", "--syntax-only", SCRAPES)
    assert code == 0, said


@needs("promtool")
def test_prometheus_takes_each_query_of_the_board(tmp_path):
    rules = [
        {"record": f"board:panel_{number}", "expr": query}
        for number, (_, query) in enumerate(board_queries())
    ]
    path = tmp_path / "board.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": rules}]}))
    code, said = promtool("check", "rules", path)
    assert code == 0, said


def test_each_alarm_has_a_test():
    tests = RULES.with_name("alerts.test.yml").read_text()
    tested = set(re.findall(r'ALERTS\{alertname="(\w+)"', tests))
    assert tested == {rule["alert"] for rule in alerts()}


def test_each_alarm_says_how_bad_it_is_and_what_to_do():
    for rule in alerts():
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert rule["annotations"].keys() == {"summary", "description"}


@pytest.mark.parametrize(
    "text",
    [*(rule["expr"] for rule in alerts()), *(query for _, query in board_queries())]
    if BOARD.exists()
    else [],
)
def test_every_metric_of_rules_and_board_is_in_the_code(text):
    found = metrics_in(text)
    assert found <= METRICS
    assert found or "up{" in text


def test_labels_that_rules_and_board_name_are_there():
    """Prometheus keeps ``job`` for itself: ours is ``exported_job``."""
    for text in (RULES.read_text(), BOARD.read_text()):
        for name, labels in re.findall(r"(staddle_[a-z_]+)\{([^}]*)\}", text):
            assert not re.search(r"(?<!exported_)job=", labels), name


def test_the_board_says_where_its_panels_lie():
    board = json.loads(BOARD.read_text())
    cells = set()
    for panel in board["panels"]:
        where = panel["gridPos"]
        own = {
            (where["x"] + x, where["y"] + y) for x in range(where["w"]) for y in range(where["h"])
        }
        assert not own & cells, panel["title"]
        assert max(x for x, _ in own) < 24
        cells |= own
    numbers = [panel["id"] for panel in board["panels"]]
    assert len(set(numbers)) == len(numbers)
