"""Names of all metrics that the daemons have, read from the code."""

import ast

from support.product_source import ROOT

from staddle.metrics.exporter import COORDINATOR, SILO

PLACES = {"coordinator": ROOT / "coordinator" / "gauges.py", "silo": ROOT / "silo" / "daemon.py"}


def _gauges():
    """Gauges as ``coordinator_jobs``, by the first argument of each ``Gauge(...)``."""
    for role, path in PLACES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Gauge"):
                yield f"{role}_{ast.literal_eval(node.args[0])}"


def _counted():
    for role, rules in (("coordinator", COORDINATOR), ("silo", SILO)):
        for rule in rules:
            name = f"{role}_{rule.name}"
            yield from ((f"{name}_sum", f"{name}_count") if rule.each else ())
            yield from (() if rule.each else (name if rule.latest else f"{name}_total",))


GAUGES = tuple(_gauges())
METRICS = {f"staddle_{name}" for name in (*GAUGES, *_counted())}
