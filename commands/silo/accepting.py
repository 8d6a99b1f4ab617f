"""``staddle silo accept``: a policy for a job that was offered, without its file."""

import secrets
from contextlib import suppress

from ...algorithms.job.job import Job
from ...errors import LocalError, RefusedError, check_local
from ...files.documents import write_atomic
from ...security.identity.keys import ENTRY_FILE, load_entry
from ...security.identity.roster import Roster
from ...security.policy import policy as policies
from ...security.policy.policy import SiloPolicy
from ...silo import config as configs
from ...silo.admission import approvals, checks
from ...silo.admission.start_weights import WeightsNeededError
from ...silo.config import SiloConfig
from ...silo.job_folder import kept_split_key
from ..policy.draft import draft, missing_rules
from ..terminal import printer
from ..terminal.newest_roster import newest
from .approval import ConfigFile, JobName, Sure, reviewed_under

BEFORE = "policy.before.toml"
# By who has the last word on a job.
THEN = {
    "policy": "The running agent takes part within a minute; staddle silo jobs shows it",
    "ask": "Once the agent has been offered it again, approve it: staddle silo approve {}",
}
# A person who is asked about one job would take the rules for rules about that job.
LATER = {
    "policy": "The rules hold for later jobs, too: one of any operator that uploads nothing else"
    ' runs here unasked. To be asked about each, write approve = "ask" under [admission] in'
    " silo.toml, and restart the agent.",
    "ask": "The rules hold for later jobs, too. You are asked about each.",
}


def accept(job: JobName, config: ConfigFile, yes: Sure = False) -> None:
    """Show what a job that the policy declined would have leave, then have the policy allow it.

    The policy gets rules for what the job uploads, and nothing else; one that has no rule yet is
    replaced, and kept as policy.before.toml. The running agent reads it by itself, and takes part
    when the job is offered again, within seconds.
    """
    loaded = configs.load(config)
    # Read once: what is allowed is what was shown, whatever is offered meanwhile.
    signed = approvals.declined_offer(loaded.directory, job)
    roster = newest(loaded)
    present = policies.load(loaded.policy, loaded.names)
    offered, _ = checks.read_job(signed, roster, present.file.packages, f"job {job!r}")
    check_local(
        offered.name == job,
        f"the coordinator offered {offered.name!r} as {job!r}; tell the founder",
    )
    text = allowing(offered, present, loaded)
    policy = policies.parse(text.encode(), str(loaded.policy), loaded.names)
    _check_takes(signed, policy, loaded, roster)

    # All that changes, and then what would leave under it.
    printer.show(f"{loaded.policy} would be:", "", *text.splitlines(), "")
    printer.show(*reviewed_under(policy, signed, job, loaded, roster))
    printer.show("", LATER[loaded.admission.approve])
    if not yes:
        printer.confirm(f"let this leave, and take part in job {job!r}?")
    # Whoever else changes it meanwhile must not lose that.
    check_local(
        policies.load(loaded.policy, loaded.names).digest == present.digest,
        f"{loaded.policy}: was changed meanwhile, and stays as it is; run this again",
    )
    write_atomic(loaded.policy.with_name(BEFORE), present.text.encode(), 0o600)
    write_atomic(loaded.policy, text.encode(), 0o644)
    printer.show(
        f"{loaded.policy}: allows job {job!r}. {THEN[loaded.admission.approve].format(job)}"
    )


def allowing(job: Job, present: SiloPolicy, config: SiloConfig) -> str:
    """The text of a policy that has rules for a job, too."""
    # Without a rule nobody has decided anything yet: limits and sums are drafted, too.
    if not present.file.allow:
        return draft([job], datasets=config.names)
    missing = missing_rules(job, present.on(job.dataset), config.names)
    return f"{present.text.rstrip()}\n{missing}"


def _check_takes(signed: bytes, policy: SiloPolicy, config: SiloConfig, roster: Roster) -> None:
    """LocalError where the silo would decline the job under this policy, too."""
    silo = load_entry(config.keys / ENTRY_FILE).id
    # The agent draws its own at its start.
    key = kept_split_key(config.directory) or secrets.token_bytes(32)
    try:
        # Its file of weights comes only once it is accepted.
        with suppress(WeightsNeededError):
            checks.admit(signed, silo, roster, policy, config, key)
    except RefusedError as error:
        raise LocalError(
            f"with rules for it this silo would still decline the job, {error.code}: {error.why}."
            f" Put that right in {config.policy} or in the data, and run this again"
        ) from error
