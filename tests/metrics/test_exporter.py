import re
import socket
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from staddle import log
from staddle.errors import LocalError
from staddle.metrics.exporter import (
    COORDINATOR,
    SILO,
    Gauge,
    MetricRule,
    MetricsConfig,
    ProcessMetrics,
    TlsFiles,
    served,
)

HERE = MetricsConfig(listen="127.0.0.1:0")
NONE = TlsFiles(Path("none"), Path("none"))  # nothing asks for them without ``clients``


@contextmanager
def running(rules=(), gauges=(), config=HERE, role="silo", own=NONE, counts=None):
    """A function that reads the metrics once, as name with labels → value."""
    heard = []

    def follow(event, fields):
        if event == "metrics.listening":
            heard.append(fields["address"])

    log.setup("json")
    counts = counts or ProcessMetrics(role, rules)
    with log.followed(follow), served(config, counts, own):
        counts.show(lambda: gauges, own)

        def read():
            with urllib.request.urlopen(f"http://{heard[0]}/metrics", timeout=60) as answer:
                lines = answer.read().decode().splitlines()
            return {
                name: float(value)
                for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")
            }

        yield read


@pytest.mark.parametrize(
    "listen", ["127.0.0.1:9464", "127.8.9.1:0", "[::1]:9464", "localhost:65535"]
)
def test_metrics_are_served_on_loopback(listen):
    assert MetricsConfig(listen=listen).listen == listen


@pytest.mark.parametrize(
    ("listen", "why"),
    [
        *(
            (f"{host}:9464", "clients =")
            for host in ("0.0.0.0", "10.0.0.1", "[::]", "[fe80::1]", "example.org")
        ),
        *(
            (f"{host}:9464", "clients =")
            for host in ("::1", "[127.0.0.1]", "localhost.evil.org", "127.1")
        ),
        *(
            (listen, "host:port")
            for listen in (":9464", "127.0.0.1", "127.0.0.1:", "127.0.0.1:65536", "[::1]:9²", "")
        ),
    ],
)
def test_and_nowhere_else(listen, why):
    with pytest.raises(ValueError, match=why):
        MetricsConfig(listen=listen)


def test_beyond_loopback_they_are_for_named_certificates():
    config = MetricsConfig(listen="0.0.0.0:9464", clients=(Path("a.crt"), Path("/b.crt")))
    assert config.below(Path("/etc")).clients == (Path("/etc/a.crt"), Path("/b.crt"))


def test_the_latest_value_and_the_time_of_an_event_are_shown():
    rules = (
        MetricRule("a", "round", "x", ("job",), "round", latest=True),
        MetricRule("a", "when", "x", (), latest=True),
        MetricRule("a", "often", "x"),
    )
    with running(rules) as read:
        log.event("a", job="lung", round=7)
        log.event("a", job="lung", round=3)
        found = read()
    assert found['staddle_silo_round{job="lung"}'] == 3
    assert 0 <= time.time() - found["staddle_silo_when"] < 3600
    assert found["staddle_silo_often_total"] == 2


def test_events_are_counted_by_their_labels_and_amounts():
    rules = (
        MetricRule("a", "seen", "x"),
        MetricRule("b", "bytes", "x", ("silo",), "bytes"),
        MetricRule("c", "calls", "x", ("method", "code")),
        MetricRule("d", "seconds", "x", (), "took", each=True),
    )
    with running(rules) as read:
        log.event("a", other=1)
        log.problem("a")
        log.event("b", silo="north", bytes=10)
        log.event("b", silo="north", bytes=5, extra="x")
        log.event("c", method="/staddle.v1.Federation/Upload", code="WEIGHT")
        log.event("d", took=1.5)
        log.event("d", took=2)
        log.event("unknown")
        found = read()
    assert found["staddle_silo_seen_total"] == 2
    assert found['staddle_silo_bytes_total{silo="north"}'] == 15
    assert found['staddle_silo_calls_total{code="WEIGHT",method="Upload"}'] == 1
    assert (found["staddle_silo_seconds_count"], found["staddle_silo_seconds_sum"]) == (2, 3.5)
    assert found["process_resident_memory_bytes"] > 1e6


def test_a_daemon_that_begins_again_counts_on():
    counts = ProcessMetrics("silo", (MetricRule("a", "seen", "x"),))
    for expected in (1, 2):
        with running(counts=counts) as read:
            log.event("a")
            assert read()["staddle_silo_seen_total"] == expected


def test_what_no_line_is_written_of_is_counted(capsys):
    with running((MetricRule("a", "seen", "x", ("code",)),)) as read:
        log.event("a", code="LIMIT")
        log.unwritten("a", code="LIMIT")
        assert read()['staddle_silo_seen_total{code="LIMIT"}'] == 2
    assert capsys.readouterr().err.count("LIMIT") == 1


def test_gauges_are_read_at_the_time_of_asking():
    values = {("a",): 1}
    with running(gauges=[Gauge("near", "x", ("silo",), values)], role="coordinator") as read:
        assert read()['staddle_coordinator_near{silo="a"}'] == 1
        values["a",] = 0
        assert read()['staddle_coordinator_near{silo="a"}'] == 0


def test_an_event_without_its_field_neither_stops_the_daemon_nor_the_counting(capsys):
    with running((MetricRule("a", "seen", "x", ("silo",)),)) as read:
        log.event("a")
        log.event("a", silo="north")
        assert read()['staddle_silo_seen_total{silo="north"}'] == 1
    assert "KeyError" in capsys.readouterr().err


def test_nothing_listens_or_counts_without_the_table_or_after_the_end(capsys):
    with served(None, ProcessMetrics("silo", (MetricRule("a", "seen", "x"),)), NONE):
        assert "metrics.listening" not in capsys.readouterr().err
    with running() as read:
        pass
    with pytest.raises(OSError, match="refused"):
        read()
    assert len(log._LOGGER.handlers) == 1


def test_a_taken_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        wanted = served(MetricsConfig(listen=listen), ProcessMetrics("silo", ()), NONE)
        with (
            pytest.raises(
                LocalError, match=re.escape(f"metrics.listen = '{listen}': cannot listen there")
            ),
            wanted,
        ):
            pass


@pytest.mark.parametrize("rules", [COORDINATOR, SILO])
def test_labels_are_of_closed_or_signed_lists(rules):
    """A label that a stranger or a record could choose has no place here."""
    assert {label for rule in rules for label in rule.labels} <= {
        "silo", "job", "code", "method", "kind", "outcome", "member",
    }  # fmt: skip
    assert len({rule.name for rule in rules}) == len(rules)
