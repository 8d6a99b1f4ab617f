"""The silo's configuration file.

::

    version = 1
    coordinator = "federation.example:7443"
    proxy = "http://proxy.example:3128"  # left out: the silo dials directly
    directory = "state"               # personal parts, ledger, reports; paths are relative to
                                      # this file
    keys = "keys"
    roster = "roster.json"
    policy = "policy.toml"
    dataset = "heart"                 # whose [dataset.NAME] of the policy [data] is, whose privacy
                                      # budget, and by what name the silo remembers over whom sums
                                      # of them were opened; left out: "data"
    log = "text"                      # or "json"

    [trust]                           # pinned by hand: a swapped roster file is noticed
    federation = "northern-hospitals"
    founders = ["SHA256:..."]
    threshold = 1

    [data]
    kind = "npz"               # or "images", "csv", "torchvision", "bundled": each has its own keys
    file = "data.npz"          # arrays x [N, ...], y [N]; if known, class_names [classes], ids [N]
    test_fraction = 0.25       # held out

    [datasets.scans]           # optional: further data sets, for jobs with dataset = "scans"

    [datasets.scans.data]      # as [data]
    kind = "images"
    folder = "scans"

    [datasets.survival]
    records_of = "heart"       # its records are those of that data set, read otherwise: they share
                               # budget and memory

    [datasets.survival.data]
    file = "survival.npz"

    [training]
    jobs = 1               # in how many jobs it takes part at a time, each with these threads; more
                           # than one need a launcher that is no thread
    gpus = ["0", "1"]      # of one trainer each, as CUDA_VISIBLE_DEVICES names them: "0,1" for
                           # two; left out, all see all
    threads = 2
    device = "cpu"         # or "cuda", "cuda:1"; a private job is always trained on the processor
    precision = "float32"  # on a GPU also "tf32" or "bf16": in what layers compute while it trains
    graphs = true          # on a GPU: steps of small models are recorded once a stage, and replayed
    launcher = "thread"    # or "process", "torchrun", "command": trained apart from the agent,
                           # which alone has the keys (docs/train-apart.md)
    processes = 2          # of "torchrun", each with a share of every batch
    shard = true           # where adapters train, each holds but a piece of the weights that stand
                           # still
    orders = "orders"      # its folder of orders, below directory; they hold records
    command = ["srun", "python", "-m", "staddle.silo.training", "{order}"]
    environment = ["SLURM_CONF"]  # variables that the trainer sees in addition to the usual ones

    [[weights]]                       # initial values for a part that never leaves, instead of
                                      # training it from scratch
    jobs = ["digits-*"]               # names of jobs; * stands for any characters
    part = "supervisor"
    file = "transformer.safetensors"
    sha256 = "..."                    # optional
    public = false                    # true: trained on none of the records here; else a private
                                      # job keeps it in, and it is for jobs on one data set alone:
    dataset = "heart"                 # left out: that of [data]

    [admission]
    approve = "policy"     # or "ask": a job that the policy allows waits for a person, too:
                           # staddle silo approve JOB

    [metrics]                         # optional: Prometheus metrics
    listen = "127.0.0.1:9465"
    clients = ["prometheus.crt"]      # optional: over TLS, and only for keys of these certificates
"""

from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter, methodcaller
from pathlib import Path
from typing import Annotated, Literal, Self

import pydantic

from ..algorithms.data import registry
from ..algorithms.numerics.devices import Precision
from ..errors import LocalError
from ..files.documents import Strict, read_toml
from ..metrics.exporter import MetricsConfig
from ..proto.channel import MOST_LANES, checked_proxy
from ..security.identity import roster_in_use
from ..security.identity.roster import Pins
from ..security.identity.roster_in_use import RosterInUse
from ..security.policy.data_sets import DATASET, DataSets
from ..security.policy.file import DatasetName

Launcher = Literal["thread", "process", "torchrun", "command"]


class Training(Strict):
    """How the silo trains; private jobs ignore ``device`` and run on the CPU.

    ``jobs`` is in how many jobs the silo takes part at a time. ``launcher`` says where it trains:
    in a thread of the agent, or in processes apart from it, which get their order in a folder below
    ``orders`` (silo/training/launched.py), and one entry of ``gpus``.
    """

    jobs: int = pydantic.Field(default=1, ge=1, le=MOST_LANES)
    gpus: tuple[Annotated[str, pydantic.Field(pattern=r"^[A-Za-z0-9,/-]+$")], ...] = ()
    threads: int = pydantic.Field(default=1, ge=1, le=1024)
    device: str = pydantic.Field(default="cpu", pattern=r"^(cpu|cuda(:[0-9]+)?)$")
    precision: Precision = "float32"
    graphs: bool = pydantic.Field(default=True, strict=True)
    launcher: Launcher = "thread"
    processes: int = pydantic.Field(default=1, ge=1, le=1024)
    shard: bool = pydantic.Field(default=False, strict=True)
    command: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    orders: Path = Path("orders")

    @pydantic.model_validator(mode="after")
    def _launchable(self) -> Self:
        apart, named = self.launcher != "thread", self.launcher == "command"
        if named != bool(self.command):
            raise ValueError(
                'command and launcher = "command" go together: the command starts the trainer'
            )
        if named and not any("{order}" in word for word in self.command):
            raise ValueError("command has no {order}, for which the order's folder stands")
        if self.processes > 1 and self.launcher != "torchrun":
            raise ValueError('processes are those of launcher = "torchrun"')
        if self.shard and not any((named, self.processes > 1)):
            raise ValueError(
                'shard = true shares weights out to several processes; set launcher = "torchrun"'
                " and processes to how many"
            )
        if self.environment and not apart:
            raise ValueError('environment is for trainer processes; set launcher = "process"')
        if self.gpus and len(self.gpus) * apart < self.jobs:
            raise ValueError(
                f"gpus has {len(self.gpus)} entries, of which trainer processes get one each, in"
                f" {self.jobs} jobs at a time; name one for each, and set launcher to one that"
                " trains apart"
            )
        # Precision, threads and random numbers of torch are those of a whole process.
        if self.jobs > 1 and not apart:
            raise ValueError(
                f"jobs = {self.jobs} trains in processes of each job at a time; set launcher ="
                ' "process", "torchrun" or "command"'
            )
        return self


class Admission(Strict):
    """Who takes part in a job that passes all checks: the policy alone, or a person here, too."""

    approve: Literal["policy", "ask"] = "policy"


class Weights(Strict):
    """Initial values for a personal part, from a file of this machine.

    ``jobs`` are patterns, in which * stands for any characters. ``public``: trained on none of this
    silo's records. Otherwise they are for jobs on ``dataset`` alone, whose records may be in them;
    None: that of [data].
    """

    jobs: tuple[str, ...] = pydantic.Field(min_length=1)
    part: str
    file: Path
    sha256: str | None = pydantic.Field(default=None, pattern=r"^[0-9a-fA-F]{64}$")
    public: bool = pydantic.Field(default=False, strict=True)
    dataset: DatasetName | None = None


class FurtherData(Strict):
    """A data set next to that of [data].

    ``records_of`` names the data set whose records these are; None: it has records of its own.
    """

    data: registry.Source
    records_of: DatasetName | None = None

    def below(self, base: Path) -> Self:
        """The same with its paths relative to a folder."""
        return self.model_copy(update={"data": self.data.below(base)})


class SiloConfig(Strict):
    """The keys of the file; its paths are relative to it until ``load`` resolves them."""

    version: Literal[1]
    coordinator: str
    proxy: Annotated[str, pydantic.AfterValidator(checked_proxy)] = ""
    directory: Path
    keys: Path
    roster: Path
    policy: Path
    dataset: DatasetName = DATASET
    log: Literal["text", "json"] = "text"
    trust: Pins
    data: registry.Source
    datasets: dict[DatasetName, FurtherData] = pydantic.Field(default_factory=dict)
    training: Training = Training()
    admission: Admission = Admission()
    weights: tuple[Weights, ...] = ()
    metrics: MetricsConfig | None = None

    def roster_in_use(self) -> RosterInUse:
        """The configuration's roster, or a newer one that its daemon kept; LocalError as there."""
        kept = self.directory / roster_in_use.FILE
        return RosterInUse(self.roster, kept, self.trust, self.keys, self.directory)

    @property
    def sources(self) -> dict[str, registry.Source]:
        """What is read for each data set, by name; that of [data] comes first."""
        further = map(attrgetter("data"), self.datasets.values())
        return {self.dataset: self.data, **dict(zip(self.datasets, further, strict=True))}

    @property
    def names(self) -> DataSets:
        """The data sets by name, that of [data] first."""
        further = {name: own.records_of or name for name, own in self.datasets.items()}
        return DataSets({self.dataset: self.dataset, **further})

    @pydantic.model_validator(mode="after")
    def _named(self) -> Self:
        if self.dataset in self.datasets:
            raise ValueError(f"[datasets.{self.dataset}] has the name of [data]; choose another")
        records = self.names.records
        own = [name for name, of in records.items() if name == of]
        for name, of in records.items():
            if of not in own:
                raise ValueError(
                    f"[datasets.{name}] has records_of = {of!r}; name a data set here that has"
                    f" records of its own: {', '.join(own)}"
                )
        strange = {own.dataset for own in self.weights} - {None, *records}
        if strange:
            raise ValueError(
                f"[[weights]] has dataset = {min(map(str, strange))!r}, and the data sets here are"
                f" {', '.join(records)}"
            )
        return self

    @contextmanager
    def naming(self, name: str) -> Iterator[None]:
        """Errors of a further data set begin with its table."""
        try:
            yield
        except LocalError as error:
            if name not in self.datasets:
                raise
            raise type(error)(f"[datasets.{name}.data]: {error}") from error

    def check_apart(self) -> None:
        """LocalError where two data sets read the same file or folder and do not say so.

        Privacy that was spent under one name would be forgotten under the other.
        """
        readers: dict[tuple[str, ...], str] = {}
        for name, of in self.names.records.items():
            for place in self.sources[name].places:
                first = readers.setdefault(place, of)
                if first != of:
                    raise LocalError(
                        f"{place[0]}: [datasets.{name}] reads it, as data set {first!r} does; add"
                        f' records_of = "{first}" to [datasets.{name}], so that the two have one'
                        " privacy budget"
                    )


def load(path: Path) -> SiloConfig:
    """Read the file; its paths become relative to it.

    LocalError if it cannot be read or has an unknown key, or two data sets read the same place.
    The files that it names are not opened.
    """
    config = read_toml(path, SiloConfig)
    # Joining keeps absolute paths.
    base = path.parent
    further = map(methodcaller("below", base), config.datasets.values())
    directory = base / config.directory
    orders = directory / config.training.orders
    found = config.model_copy(
        update={
            "directory": directory,
            "training": config.training.model_copy(update={"orders": orders}),
            "keys": base / config.keys,
            "roster": base / config.roster,
            "policy": base / config.policy,
            "metrics": config.metrics and config.metrics.below(base),
            "weights": tuple(
                own.model_copy(update={"file": base / own.file}) for own in config.weights
            ),
            "data": config.data.below(base),
            "datasets": dict(zip(config.datasets, further, strict=True)),
        }
    )
    found.check_apart()
    return found
