"""``staddle demo``: a whole federation on this machine, with real processes, TLS and data."""

import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from ...algorithms.catalog import method_class
from ...algorithms.data.dataset import digits
from ...algorithms.job.job import Job
from ...algorithms.partition.draw import dirichlet
from ...errors import AbortedError, LocalError
from ...files.portable import check_runs_daemons
from ...security.dp.rdp import shown
from ...security.identity import roster as rosters
from ...security.ledger.audit import ledger_folder, verify
from ...security.ledger.messages import summary
from ...security.ledger.reconcile import reconcile
from ...security.log.head import own_log_key
from ...silo import config
from ...silo.admission import budget as silo_budget
from ...simulator.report.style import can_draw
from ..policy.visibility import seen
from ..privacy.noise import noise
from ..terminal import printer
from ..terminal.job_example import MODEL, SETTINGS
from ..terminal.printer import PrintedTable, Progress, Screen, TaskID
from . import local_federation
from .accuracy import accuracy_table, correct, reports
from .demo_picture import MethodResult, svg
from .processes import ChildProcess, exit_on_signals, running

SEED = 7
SILOS = 4
# Dirichlet concentration: the smaller it is, the more the silos' labels differ.
ALPHA = 0.3
TRAINING: Mapping[str, float] = {"epochs": 2, "batch_size": 16, "lr": 0.03, "momentum": 0.9}
# noise grows with momentum; steps draw records by sample_rate
PRIVATE_TRAINING: Mapping[str, float] = {"epochs": 1, "lr": 0.5}
PRIVACY: Mapping[str, float] = {"delta": 1e-4, "clip": 1.0, "sample_rate": 0.1}
TIMING: Mapping[str, float] = {"admission_seconds": 120, "beat_seconds": 2, "hold_seconds": 10}
BASELINES = ("local", "fedavg")
START_SECONDS = 120.0
SILENCE_SECONDS = 300.0
PICTURE = "result.svg"
KEPT = """\
Kept in {folder} until you remove it: keys, roster, configurations, policies, records, signed jobs,
ledgers, models, results, logs. To look at it:
  staddle job show {folder}/jobs/{job}.json --roster {folder}/roster.json
  staddle ledger show {folder}/{first} --job {job}
  staddle model show --model {folder}/{first}/state/jobs/{job}/model
To use it further, start the coordinator and each silo, in a terminal each:
  staddle coordinator run --config {coordinator}
{silos}
Then run a job under a new name. If it is private, raise epsilon in each silo's policy.toml first:
  sed 's/{job}/again/' {folder}/jobs/{job}.toml > {folder}/jobs/again.toml
  staddle job sign {folder}/jobs/again.toml --keys {folder}/operator \\
    --roster {folder}/roster.json --out {folder}/jobs/again.json
  staddle job submit {folder}/jobs/again.json --operator {folder}/operator.toml
  staddle job watch again --operator {folder}/operator.toml
"""


def demo(
    method: Annotated[
        str, typer.Option(help="The method to compare with local-only training and FedAvg.")
    ] = "pfedsim",
    silos: Annotated[
        int | None, typer.Option(min=2, max=32, help="Silo agents; 4, or 8 with FedSimSup.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Rounds of each job.")] = 20,
    keep: Annotated[
        Path | None, typer.Option(help="Keep everything in this new or empty folder.")
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Run every job in the clear, even if it could be blind.")
    ] = False,
    private: Annotated[
        bool, typer.Option("--private", help="With differential privacy for each record.")
    ] = False,
    epsilon: Annotated[
        float, typer.Option(min=0.1, max=1000, help="What each private job may cost.")
    ] = 8.0,
) -> None:
    """Watch a coordinator daemon and silo agents train personalised models on this machine.

    Three jobs in turn (local-only, FedAvg, the method) on label-skewed shards of the handwritten
    digits that come with scikit-learn: separate processes, mutual TLS on loopback, signed jobs, one
    egress ledger per silo. With four silos or more, jobs are blind: the coordinator reads only sums
    and how similar classifiers are. FedSimSup draws some of the silos per round, and needs eight
    for that. With --private each job trains with noise, and each silo's budget says what that cost.
    """
    screen = Screen()
    check_runs_daemons("a federation")
    digits()  # before a folder is made: LocalError where they are not installed
    exit_on_signals()
    # Kept even without --keep, so that ledgers and logs can be read afterwards.
    folder = keep if keep is not None else Path(tempfile.mkdtemp(prefix="staddle-demo-"))
    made = Demo(
        screen, folder, method, silos, rounds, plain=plain, epsilon=epsilon if private else None
    )

    # whatever ended it, Ctrl-C included: the logs that say why lie in the folder
    try:
        sound = made.run()
    except BaseException:
        screen.show(f"Everything so far lies in {folder}")
        raise
    if not sound:
        raise LocalError(f"a ledger did not verify; see above. Everything lies in {folder}")
    screen.show(*made.kept().splitlines())


class Demo:
    """One run of the demo.

    The constructor makes keys, a roster and folders; nothing runs before ``run``.
    """

    def __init__(
        self,
        screen: Screen,
        folder: Path,
        method: str,
        silos: int | None,
        rounds: int,
        *,
        plain: bool = False,
        epsilon: float | None = None,
    ) -> None:
        """With an ``epsilon`` its jobs are private.

        Without ``silos`` there are as many as the method's rounds take.
        """
        method_class(method)  # LocalError names the known ones
        self._screen = screen
        # The method may be one of the baselines: each runs once.
        self._methods = tuple(dict.fromkeys((*BASELINES, method)))
        self._settings = SETTINGS.get(method, {})
        self._chosen = method
        self._rounds = rounds
        self._plain = plain
        self._epsilon = epsilon
        number = silos or self._settings.get("silos", SILOS)
        self._federation = local_federation.make(folder, [f"silo-{n + 1}" for n in range(number)])

    def run(self) -> bool:
        """Run all jobs; True if every ledger verified.

        All daemons are stopped when it returns or fails. AbortedError if one of them ends early, or
        the coordinator falls silent.
        """
        started = time.monotonic()
        # The shards come first: a blind job may declare their class counts.
        shards = self._shards()
        jobs = [self._signed(method, shards) for method in self._methods]
        names = [job.name for job in jobs]
        local_federation.write_coordinator(self._federation, names, TIMING)
        # It chooses a free port itself, so that a second demo does not collide with the first.
        coordinator = ChildProcess(
            "coordinator", ("-m", "staddle.coordinator"), self._federation.coordinator_config
        )
        daemons = [coordinator]

        # The address is known only once the coordinator listens, so silos are configured then.
        with running(daemons):
            address = str(coordinator.wait_for("listening", START_SECONDS)["address"])
            # Whoever uses the folder later starts it where the silos' files look for it.
            local_federation.write_coordinator(self._federation, names, TIMING, listen=address)
            local_federation.write_operator(self._federation, address)
            for silo, shard in zip(self._federation.silos, shards, strict=True):
                local_federation.write_silo(self._federation, silo, address, shard, jobs)
                # One by one into the list that ``running`` stops: a failure leaves none behind.
                daemons.append(
                    ChildProcess(silo, ("-m", "staddle.silo"), self._federation.silo_config(silo))
                )
            self._screen.show(
                f"1 coordinator and {len(self._federation.silos)} silos, processes "
                f"{', '.join(str(d.pid) for d in daemons)}, mutual TLS 1.3 on {address}",
            )
            for job in jobs:
                facts = "; ".join(filter(None, (seen(job), noise(job))))
                self._screen.show(f"{job.name}: {facts}")
            self._follow(coordinator, daemons, {job.name: job.length for job in jobs})
        columns = dict(zip(self._methods, names, strict=True))
        printer.show(accuracy_table(self._federation, self._federation.silos, columns))
        sound = self._show_ledgers()
        self._draw(names)
        if self._epsilon is not None:
            self._show_budgets()
        self._screen.show(f"{time.monotonic() - started:.0f} s in all.")
        return sound

    def kept(self) -> str:
        """What lies in the folder once the demo has ended, and the commands that use it further."""
        federation = self._federation
        run = "  staddle silo run --config {}".format
        return KEPT.format(
            folder=quote(str(federation.folder)),
            coordinator=quote(str(federation.coordinator_config)),
            silos="\n".join(
                run(quote(str(federation.silo_config(silo)))) for silo in federation.silos
            ),
            first=federation.silos[0],
            job=f"demo-{self._methods[-1]}",
        )

    def _signed(self, method: str, shards: list[Any]) -> Job:
        document = self._job(method)
        # Not every job can be blind: the method and the number of silos decide.
        if not self._plain:
            document = local_federation.blind_where_it_can(self._federation, document, shards)
        return local_federation.sign_job(self._federation, document)

    def _job(self, method: str) -> dict[str, Any]:
        training = {"training": dict(TRAINING)}
        if self._epsilon is not None:
            training = {
                "training": dict(PRIVATE_TRAINING),
                "privacy": {"epsilon": self._epsilon, **PRIVACY},
            }
        return {
            "version": 1,
            "name": f"demo-{method}",
            "seed": SEED,
            "rounds": self._rounds,
            "silos": list(self._federation.silos),
            "purpose": "Show on one machine how silos train together, on images of digits",
            "participation": self._settings.get("participation", 1.0),
            "method": {
                "name": method,
                "options": self._settings.get("options", {}) if method == self._chosen else {},
            },
            "model": {**MODEL, **self._settings.get("model", {})},
            **training,
        }

    def _shards(self) -> list[Any]:
        records = digits()
        # At least 20 records each: some are held out for the test.
        parts = dirichlet(records.y.numpy(), len(self._federation.silos), ALPHA, SEED, minimum=20)
        return [records.take(part) for part in parts]

    # Progress.

    def _follow(
        self, coordinator: ChildProcess, daemons: Sequence[ChildProcess], lengths: Mapping[str, int]
    ) -> None:
        with self._screen.progress(elapsed=True) as progress:
            bars = {
                name: progress.add_task(name, total=n, start=False, note="")
                for name, n in lengths.items()
            }
            ended = 0
            heard = time.monotonic()
            while ended < len(lengths):
                # A daemon that has died is noticed within a second.
                event = coordinator.event(1.0)
                for daemon in daemons:
                    # The coordinator would only report that a silo is missing; its log says why.
                    daemon.check()
                if event is not None:
                    heard = time.monotonic()
                    ended += self._show(progress, bars, lengths, event)
                elif time.monotonic() - heard > SILENCE_SECONDS:
                    raise AbortedError(
                        f"the coordinator was silent for {SILENCE_SECONDS:g}"
                        f" s:\n{coordinator.tail()}"
                    )

    def _show(
        self,
        progress: Progress,
        bars: Mapping[str, TaskID],
        lengths: Mapping[str, int],
        event: Mapping[str, Any],
    ) -> int:
        """Show one event; 1 when it ends a job."""
        bar = bars.get(str(event.get("job")))
        # Events without a job, such as those of start and stop.
        if bar is None:
            return 0
        match event["event"]:
            case "job.offered":
                progress.start_task(bar)
            case "job.declined" | "silo.dropped":
                self._screen.show(f"{event['silo']}: {event['event']}, {event['code']}")
            case "round.metrics":
                right, tested = event["correct.trained"], event["tested"]
                note = f"{event['silos']} silos"
                if tested:  # zero in private jobs: the silos keep it to themselves
                    note += f", {right / tested:.1%} after local training"
                progress.update(bar, advance=1, note=note)

                # without a terminal there is no bar, so each round has a line of its own
                if not self._screen.is_terminal:
                    done = event["round"] + 1
                    self._screen.show(
                        f"{event['job']} round {done}/{lengths[event['job']]}: {note}"
                    )
            case "job.ended" if event["outcome"] != "completed":
                raise AbortedError(f"job {event['job']} failed: {event['reason']}")
            case "job.ended":
                progress.stop_task(bar)
                return 1
        return 0

    # Results.

    def _draw(self, names: Sequence[str]) -> None:
        """Draw accuracies and bytes that left into ``result.svg`` of the demo's folder."""
        found = {silo: reports(self._federation, silo, names) for silo in self._federation.silos}
        left: dict[str, Counter[str]] = {name: Counter() for name in names}
        for silo in self._federation.silos:
            for (job, part), total in summary(ledger_folder(self._federation.state(silo))).items():
                # Heartbeats belong to no job.
                if job in left:
                    left[job][part] += total.bytes
        results = [
            MethodResult(
                method,
                {silo: correct(own[at]) for silo, own in found.items()},
                left[name],
            )
            for at, (method, name) in enumerate(zip(self._methods, names, strict=True))
        ]
        tested = {silo: own[0]["final"]["tested"] for silo, own in found.items()}
        if not can_draw():
            self._screen.show("no picture, which matplotlib draws; pip install 'staddle[plots]'")
            return
        path = self._federation.folder / PICTURE
        path.write_bytes(svg(results, tested))
        self._screen.show(f"A picture of this: {path}")

    def _show_budgets(self) -> None:
        """What the jobs cost each silo's data set, from its budget."""
        for silo in self._federation.silos:
            for found in silo_budget.read(config.load(self._federation.silo_config(silo))):
                # Nothing was spent, so no budget was opened.
                if (budget := found.budget) is None:
                    continue
                limit = budget.limit
                jobs = ", ".join(f"{job.job} {job.epsilon}" for job in budget.jobs)
                self._screen.show(
                    f"{silo}: epsilon {shown(budget.spent)} of {limit.epsilon} spent at delta ="
                    f" {limit.delta} (alone: {jobs})",
                )

    def _show_ledgers(self) -> bool:
        columns = ("silo", "job", "part", "messages", "tensors", "bytes")
        rows, ends, verdicts, sound = [], [], [], True
        theirs = ledger_folder(self._federation.state("coordinator"))
        roster = rosters.load(self._federation.folder / "roster.json")
        for silo in self._federation.silos:
            path = ledger_folder(self._federation.state(silo))
            # By the silo's own log key, not by whatever key the ledger names.
            key = own_log_key(self._federation.name, self._federation.keys(silo))
            for (job, part), total in summary(path).items():
                numbers = (f"{n:,}" for n in (total.messages, total.tensors, total.bytes))
                rows.append((silo, job or "-", part, *numbers))
            ends.append(len(rows) - 1)
            found = verify(path, key=key)
            if not found.ok:
                sound = False
                verdicts.append(f"{silo}: LEDGER BROKEN: {found.problems[0]}: {path}")
                continue

            # only a ledger that holds can be compared with the coordinator's
            both = reconcile(path, theirs, roster)
            agreement = (
                f"the coordinator's has the same {both.uploads} uploads and {both.deliveries}"
                " deliveries"
            )
            if both.differences:
                sound = False
                agreement = f"NOT RECONCILED: {both.differences[0]}"
            verdict = f"ledger verified ({found.records} records), {agreement}"
            verdicts.append(f"{silo}: {verdict}: {path}")
        printer.show(
            PrintedTable(
                columns, rows, (3, 4, 5), ends, title="What left each silo, read from its ledger"
            )
        )
        printer.show(*verdicts)
        return sound
