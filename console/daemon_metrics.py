"""Which silos a running coordinator hears: only the daemon knows, and tells it as a metric."""

import urllib.request
from http.client import HTTPException

from prometheus_client.parser import text_string_to_metric_families

from ..metrics.exporter import MetricsConfig

SECONDS = 1.0
MOST_BYTES = 4 * 1024 * 1024
CONNECTED = "staddle_coordinator_silo_connected"


def connected(config: MetricsConfig | None) -> dict[str, bool]:
    """By silo; empty where the coordinator does not answer, or only whom its [metrics] names."""
    if config is None or config.clients:
        return {}
    # No proxy: the address is on loopback.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{config.listen}/metrics", timeout=SECONDS) as answer:
            text = answer.read(MOST_BYTES).decode("utf-8", "replace")
        families = list(text_string_to_metric_families(text))
    # Nobody listens there, or somebody else does.
    except (OSError, HTTPException, ValueError):
        return {}
    samples = [
        sample for family in families if family.name == CONNECTED for sample in family.samples
    ]
    return {sample.labels["silo"]: bool(sample.value) for sample in samples}
