"""What the repository's ``deploy/`` holds, and the programs that read it."""

import json
import re
import shutil
from pathlib import Path

import pytest

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
BOARD = DEPLOY / "grafana" / "staddle.json"
RULES = DEPLOY / "prometheus" / "alerts.yml"
SCRAPES = DEPLOY / "prometheus" / "prometheus.yml"
VARIABLES = {
    "$job": ".*", "$measure": "accuracy", "$__rate_interval": "5m",
}  # fmt: skip

beside = pytest.mark.skipif(not DEPLOY.is_dir(), reason="deploy/ is not beside the tests")


def needs(program):
    """Skips a test where a program is not installed."""
    missing = shutil.which(program) is None
    return pytest.mark.skipif(missing, reason=f"{program} is not installed")


def board_queries():
    """The queries of the board, as Prometheus gets them, by panel and place."""
    for panel in json.loads(BOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"]
            for name, value in VARIABLES.items():
                query = query.replace(name, value)
            yield f"{panel['title']} {target['refId']}", query


def metrics_in(text):
    """The names of Staddle's metrics in a query."""
    roles = (text.replace("(coordinator|silo)", role) for role in ("coordinator", "silo"))
    return set(re.findall(r"staddle_(?:coordinator|silo)_[a-z_]+", " ".join(roles)))
