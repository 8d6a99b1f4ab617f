"""Prometheus metrics of a daemon, on loopback, off unless the configuration has ``[metrics]``.

What is counted comes from the log's own events by one table a role, so a daemon says each thing
once; what has a value at any time (``Gauge``) is read from the daemon when it is asked. Labels are
names of jobs and silos and codes of closed lists: never data, nor anything that strangers choose.
"""

import ipaddress
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import prometheus_client as prometheus
import pydantic
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from . import log
from .errors import LocalError, reason
from .files.documents import Strict
from .metrics_listener import listening


def _loopback(listen: str) -> str:
    # The last colon, since IPv6 addresses contain others.
    host, _, port = listen.rpartition(":")
    if not (port.isascii() and port.isdecimal() and int(port) <= 65535):
        raise ValueError("is not host:port with a port up to 65535, such as 127.0.0.1:9464")
    if not _stays_here(host):
        raise ValueError(
            "is not on loopback, and whoever reads metrics needs no key; give 127.0.0.1, [::1] or"
            " localhost, and put a reverse proxy that asks for one before it"
        )
    return listen


def _stays_here(host: str) -> bool:
    bracketed = host.startswith("[") and host.endswith("]")
    try:
        address = ipaddress.ip_address(host[1:-1] if bracketed else host)
    except ValueError:
        return host == "localhost"
    # As in a URL: IPv6 in brackets, IPv4 without.
    return address.is_loopback and bracketed == (address.version == 6)


class MetricsConfig(Strict):
    """The table ``[metrics]`` of both configurations.

    Loopback only, since reading metrics takes no key.
    """

    listen: Annotated[str, pydantic.AfterValidator(_loopback)]


@dataclass(frozen=True)
class MetricRule:
    """What one event adds to: 1, or the number in a field of it.

    A label's value is the field of its name.
    """

    event: str
    name: str
    help: str
    labels: tuple[str, ...] = ()
    amount: str | None = None
    each: bool = False  # a summary: how often, and how much in all


# Rules count events of the log, so that log and metrics cannot disagree.
COORDINATOR = (
    MetricRule(
        "upload.accepted", "uploads_accepted", "Uploads that were checked and kept.", ("silo",)
    ),
    MetricRule(
        "refused",
        "calls_refused",
        "Calls that were refused, uploads among them, by code.",
        ("method", "code"),
    ),
    MetricRule(
        "call.failed", "calls_failed", "Calls in which the coordinator itself failed.", ("method",)
    ),
    MetricRule(
        "receipt", "received_bytes", "Payload bytes of the accepted uploads.", ("silo",), "bytes"
    ),
    MetricRule("delivered", "sent_bytes", "Payload bytes of the deliveries.", ("silo",), "bytes"),
    MetricRule(
        "silo.dropped",
        "silos_dropped",
        "Silos that dropped out of a round, by code.",
        ("silo", "code"),
    ),
    MetricRule("round.closed", "rounds_closed", "Rounds that were folded.", ("job",)),
    MetricRule(
        "round.metrics", "fold_seconds", "Time that folds took.", ("job",), "seconds", each=True
    ),
    MetricRule(
        "fold.waits", "fold_waits", "Folds that met a full disk or file table and waited.", ("job",)
    ),
    MetricRule("job.ended", "jobs_ended", "Jobs that ended.", ("outcome",)),
)
SILO = (
    MetricRule(
        "round.given", "rounds_given", "Rounds whose upload the coordinator accepted.", ("job",)
    ),
    MetricRule("round.failed", "rounds_failed", "Rounds that were given up, by code.", ("code",)),
    MetricRule(
        "round.abandoned",
        "rounds_abandoned",
        "Rounds whose training stopped, being wanted no more.",
        ("job",),
    ),
    MetricRule(
        "leaving",
        "sent_bytes",
        "Bytes that the ledger counts as left, control aside.",
        ("job", "kind"),
        "bytes",
    ),
    MetricRule(
        "round.trained",
        "training_seconds",
        "Time that local training took.",
        ("job",),
        "seconds",
        each=True,
    ),
    MetricRule("job.declined", "jobs_declined", "Jobs that were declined, by code.", ("code",)),
    MetricRule(
        "turned.away", "calls_refused", "Calls that the coordinator refused, by code.", ("code",)
    ),
    MetricRule(
        "coordinator.lost", "connections_lost", "Times that the coordinator could not be reached."
    ),
)


@dataclass(frozen=True)
class Gauge:
    """Something that has a value at any time, by the values of its labels.

    Read when Prometheus asks, from a thread of its own.
    """

    name: str
    help: str
    labels: tuple[str, ...]
    values: Mapping[Any, float]  # tuple of as many labels → value


Gauges: TypeAlias = Callable[[], Iterable[Gauge]]


class _Counts:
    """Follows the log by a table of rules."""

    def __init__(
        self, role: str, rules: Sequence[MetricRule], registry: prometheus.CollectorRegistry
    ) -> None:
        self._counting: dict[str, tuple[MetricRule, prometheus.Counter | prometheus.Summary]] = {}
        for rule in rules:
            # A summary has count and sum, and so a mean.
            kind = prometheus.Summary if rule.each else prometheus.Counter
            metric = kind(f"staddle_{role}_{rule.name}", rule.help, rule.labels, registry=registry)
            self._counting[rule.event] = (rule, metric)

    def follow(self, event: str, fields: Mapping[str, object]) -> None:
        """Count one event."""
        # Most events count nothing.
        if event not in self._counting:
            return
        rule, metric = self._counting[event]
        if rule.labels:
            # of a method
            metric = metric.labels(*(str(fields[name]).rpartition("/")[2] for name in rule.labels))
        # Fields have type ``object``, which ``float`` takes only as text.
        amount = float(str(fields[rule.amount])) if rule.amount else 1.0
        if isinstance(metric, prometheus.Summary):
            metric.observe(amount)
        else:
            metric.inc(amount)


class _Now(Collector):
    """Asks the daemon when Prometheus asks us."""

    def __init__(self, role: str, gauges: Gauges) -> None:
        self._role = role
        self._gauges = gauges

    def collect(self) -> Iterator[GaugeMetricFamily]:
        # Computed for each request, so nothing has to be kept up to date.
        for gauge in self._gauges():
            family = GaugeMetricFamily(
                f"staddle_{self._role}_{gauge.name}", gauge.help, labels=gauge.labels
            )
            for labels, value in gauge.values.items():
                family.add_metric(labels, value)
            yield family


@contextmanager
def served(
    config: MetricsConfig | None, role: str, rules: Sequence[MetricRule], gauges: Gauges
) -> Iterator[None]:
    """Count and answer while the block runs, in a thread of its own.

    Without a configuration it does nothing. LocalError if the address cannot be bound.
    """
    if config is None:
        yield
        return
    # Otherwise each counter has a second series, its creation time.
    prometheus.disable_created_metrics()  # type: ignore[no-untyped-call]
    # Not the library's global registry, which all daemons of a process would share.
    registry = prometheus.CollectorRegistry()
    prometheus.ProcessCollector(registry=registry)
    registry.register(_Now(role, gauges))
    counts = _Counts(role, rules, registry)
    host, _, port = config.listen.rpartition(":")

    # Counting begins only once the address is bound: a daemon that cannot answer does not start.
    with ExitStack() as stack:
        app = prometheus.make_wsgi_app(registry)
        try:
            bound = stack.enter_context(listening(host.strip("[]"), int(port), app))
        except OSError as error:
            why = f"cannot listen there: {reason(error)}"
            raise LocalError(
                f"metrics.listen = {config.listen!r}: {why}; choose another port"
            ) from error
        stack.enter_context(log.followed(counts.follow))
        log.event("metrics.listening", address=f"{host}:{bound}")
        yield
