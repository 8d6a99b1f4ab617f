"""Prometheus metrics of a daemon, off unless the configuration has ``[metrics]``.

What is counted comes from the log's own events by one table a role, so a daemon says each thing
once; what has a value at any time (``Gauge``) is read from the daemon when it is asked. Labels are
names of jobs, silos and data sets and codes of closed lists: never data, nor anything that
strangers choose.

Beyond loopback whoever asks has to show a certificate that the configuration names. These are no
certificates of the roster: an operator's could also stop jobs, and lies on no monitoring host.
"""

import ipaddress
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self, TypeAlias

import prometheus_client as prometheus
import pydantic
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .. import log
from ..errors import LocalError, reason
from ..files.documents import Strict, read_bytes
from .listener import ClientTls, listening


def _listens(listen: str) -> str:
    # The last colon, since IPv6 addresses contain others.
    host, _, port = listen.rpartition(":")
    known = port.isascii() and port.isdecimal() and int(port) <= 65535
    if not (host and known):
        raise ValueError("is not host:port with a port up to 65535, such as 127.0.0.1:9464")
    return listen


def _stays_here(listen: str) -> bool:
    host = listen.rpartition(":")[0]
    bracketed = host.startswith("[") and host.endswith("]")
    try:
        address = ipaddress.ip_address(host[1:-1] if bracketed else host)
    except ValueError:
        return host == "localhost"
    # As in a URL: IPv6 in brackets, IPv4 without.
    return address.is_loopback and bracketed == (address.version == 6)


class MetricsConfig(Strict):
    """The table ``[metrics]`` of both configurations.

    ``clients`` are files of certificates, one each. With them TLS 1.3 is spoken, and only whoever
    has the key of one of them is answered.
    """

    listen: Annotated[str, pydantic.AfterValidator(_listens)]
    clients: tuple[Path, ...] = ()

    @pydantic.model_validator(mode="after")
    def _protected(self) -> Self:
        if not (self.clients or _stays_here(self.listen)):
            raise ValueError(
                f"listen = {self.listen!r} is not on loopback, and anyone who reaches it could read"
                " the metrics: name the certificates of those who may, such as clients ="
                ' ["prometheus.crt"], or listen on 127.0.0.1, [::1] or localhost'
            )
        return self

    def below(self, base: Path) -> Self:
        """The same with its paths relative to a folder."""
        return self.model_copy(update={"clients": tuple(base / own for own in self.clients)})


class TlsFiles(NamedTuple):
    """Where the daemon's own certificate and its key lie, both as PEM."""

    certificate: Path
    key: Path


def client_tls(clients: Sequence[Path], own: TlsFiles) -> ClientTls | None:
    """TLS for those who have the key of one of these certificates; None where there are none.

    LocalError names a file that is not one certificate.
    """
    if not clients:
        return None
    pinned = set()
    for path in clients:
        try:
            (certificate,) = x509.load_pem_x509_certificates(read_bytes(path))
            pinned.add(certificate.public_bytes(Encoding.DER))
            ssl.create_default_context(cadata=certificate.public_bytes(Encoding.DER))
        except (ValueError, ssl.SSLError) as error:
            raise LocalError(
                f"{path}: not one certificate in PEM form, as metrics.clients needs it; name the"
                " tls.crt that belongs to the key of whoever reads the metrics (staddle keys new"
                " makes both)"
            ) from error
    return ClientTls(_context(pinned, own), frozenset(pinned))


def _context(pinned: Iterable[bytes], own: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(own.certificate, own.key)
    context.verify_mode = ssl.CERT_REQUIRED
    # Each is trusted by itself, whoever issued it.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=b"".join(pinned))
    return context


@dataclass(frozen=True)
class MetricRule:
    """What one event adds to: 1, or the number in a field of it.

    A label's value is the field of its name. With ``latest`` the number replaces the one before;
    without a field it is the time of the event, in seconds since 1970.
    """

    event: str
    name: str
    help: str
    labels: tuple[str, ...] = ()
    amount: str | None = None
    each: bool = False  # a summary: how often, and how much in all
    latest: bool = False

    @property
    def kind(self) -> Callable[..., Any]:
        """What it is to Prometheus: a class of its library."""
        names: Mapping[tuple[bool, bool], Callable[..., Any]]
        names = {(True, False): prometheus.Summary, (False, True): prometheus.Gauge}
        return names.get((self.each, self.latest), prometheus.Counter)


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
    MetricRule(
        "upload.damaged",
        "uploads_damaged",
        "Folds that met uploads which the disk had changed.",
        ("job",),
    ),
    MetricRule("job.broken", "jobs_broken", "Jobs that damaged files ended.", ("job",)),
)
SILO = (
    MetricRule(
        "round.given", "rounds_given", "Rounds whose upload the coordinator accepted.", ("job",)
    ),
    MetricRule(
        "round.given",
        "last_round",
        "The last round whose upload the coordinator accepted, counted from 0.",
        ("job",),
        "round",
        latest=True,
    ),
    MetricRule(
        "round.given", "last_round_timestamp_seconds", "When that was.", ("job",), latest=True
    ),
    MetricRule(
        "connected",
        "session_timestamp_seconds",
        "When the last session with the coordinator began.",
        latest=True,
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
    MetricRule(
        "ledger.forked",
        "ledgers_forked",
        "Times that another member's ledger was rolled back, altered or forked.",
        ("member",),
    ),
    MetricRule(
        "outbox.damaged",
        "outboxes_damaged",
        "Contributions that the disk had changed before they left.",
        ("job",),
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


class ProcessMetrics(Collector):
    """What a daemon's process has counted, by a table of rules, and what has a value now.

    One for the process: a daemon that begins again under a new policy or roster counts on.
    """

    def __init__(self, role: str, rules: Sequence[MetricRule]) -> None:
        # Otherwise each counter has a second series, its creation time.
        prometheus.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._role = role
        self._gauges: Gauges = tuple
        self._tls: ClientTls | None = None
        self._own: TlsFiles | None = None
        # Not the library's global registry, which all daemons of a process would share.
        self._registry = prometheus.CollectorRegistry()
        self._counting: dict[str, list[tuple[MetricRule, Any]]] = {}
        for rule in rules:
            name = f"staddle_{role}_{rule.name}"
            metric = rule.kind(name, rule.help, rule.labels, registry=self._registry)
            self._counting.setdefault(rule.event, []).append((rule, metric))

    def collect(self) -> Iterator[Metric]:
        """All counts as they are now, and all gauges."""
        yield from self._registry.collect()
        # Computed for each request, so nothing has to be kept up to date.
        for gauge in self._gauges():
            family = GaugeMetricFamily(
                f"staddle_{self._role}_{gauge.name}", gauge.help, labels=gauge.labels
            )
            for labels, value in gauge.values.items():
                family.add_metric(labels, value)
            yield family

    def listens(self, tls: ClientTls | None, own: TlsFiles) -> None:
        """By which TLS the listener answers, and with which certificate of ours."""
        self._tls, self._own = tls, own

    def show(self, gauges: Gauges, own: TlsFiles) -> None:
        """From now on these gauges are read, over TLS with this certificate of ours."""
        self._gauges = gauges
        # Read again if it is another alone: a file that is gone must not end a daemon.
        if self._tls is not None and own != self._own:
            self._tls.context, self._own = _context(self._tls.certificates, own), own

    def follow(self, event: str, fields: Mapping[str, object]) -> None:
        """Count one event; most count nothing."""
        for rule, metric in self._counting.get(event, ()):
            # of a method
            labels = (str(fields[name]).rpartition("/")[2] for name in rule.labels)
            own = metric.labels(*labels) if rule.labels else metric
            # Fields have type ``object``, which ``float`` takes only as text.
            amount = float(str(fields[rule.amount])) if rule.amount else 1.0
            match own:
                case prometheus.Summary():
                    own.observe(amount)
                case prometheus.Gauge() if rule.amount is None:
                    own.set_to_current_time()
                case prometheus.Gauge():
                    own.set(amount)
                case _:
                    own.inc(amount)


@contextmanager
def served(config: MetricsConfig | None, counts: ProcessMetrics, own: TlsFiles) -> Iterator[None]:
    """Count and answer while the block runs, in a thread of its own.

    Without a configuration it does nothing. LocalError if the address cannot be bound, or a
    certificate of ``clients`` cannot be read.
    """
    if config is None:
        yield
        return
    registry = prometheus.CollectorRegistry()
    prometheus.ProcessCollector(registry=registry)
    registry.register(counts)
    host, _, port = config.listen.rpartition(":")
    tls = client_tls(config.clients, own)
    counts.listens(tls, own)

    # Counting begins only once the address is bound: a daemon that cannot answer does not start.
    with ExitStack() as stack:
        app = prometheus.make_wsgi_app(registry)
        try:
            bound = stack.enter_context(listening(host.strip("[]"), int(port), app, tls))
        except OSError as error:
            why = f"cannot listen there: {reason(error)}"
            raise LocalError(
                f"metrics.listen = {config.listen!r}: {why}; choose another port"
            ) from error
        stack.enter_context(log.followed(counts.follow))
        log.event("metrics.listening", address=f"{host}:{bound}")
        yield
