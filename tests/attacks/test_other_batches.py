"""What a silo's ledger says of a coordinator that summed other batches, honestly, since one silo
would have it so.

The measure is whom the ledger of an honest silo blames. The gate, its checks of sums and the ledger
are as they ship; the sum is that which an honest coordinator opens.
"""

import pytest
import torch
from support.keyed_jobs import BLIND
from support.open_sums import ME, Recipient, Summed, delivery
from support.recording_gate import Made

from staddle.algorithms.exchange.parts import DTYPES, WEIGHT
from staddle.algorithms.tasks.table_counting import RIGHT
from staddle.commands.federation import local_federation
from staddle.security.identity import roster as rosters
from staddle.security.identity.keys import load_keys
from staddle.security.secagg.memory import Memory
from staddle.security.secagg.spec import Terms, check_cohort, check_survivors

pytestmark = pytest.mark.actor("silo")

ALL = tuple(f"silo-{letter}" for letter in "abcdefghijklmno")


class Sum(Summed):
    """Over some of fifteen silos."""

    def values(self, part, silo):
        rng = torch.Generator().manual_seed(ALL.index(silo))
        drawn = lambda spec: torch.randn(spec.shape, generator=rng)
        given = {spec.name: drawn(spec).to(DTYPES[spec.dtype]) for spec in part.tensors}
        if part == RIGHT:
            return dict.fromkeys(given, torch.tensor(3))
        weight = next((spec for spec in part.wire if spec.name == WEIGHT), None)
        ones = {} if weight is None else {WEIGHT: torch.ones(weight.shape, dtype=torch.float64)}
        return {**given, **ones}


@pytest.fixture(scope="module")
def fifteen(tmp_path_factory):
    """A job of five batches, of which round 0 was summed twice."""
    files = local_federation.make(tmp_path_factory.mktemp("made") / "local", ALL)
    roster, keys = files.folder / "roster.json", files.folder / "coordinator" / "keys"
    made = Made(files, rosters.load(roster), load_keys(keys))
    made.job("simple", "fedavg", ALL, {}, min_cohort=3, security=BLIND)
    return made


def test_a_spoiled_sum_blames_no_coordinator(fifteen, tmp_path):
    """An honest coordinator is not blamed for a silo that spoils a sum and leaves the next.

    A mate of this silo's batch spoils the sum over all, which this silo signed, and is lost from
    the next.

    The next is asked of all batches but another one, and opened without theirs. What comes down
    then is that sum. Before: ``SUM``, blame ``coordinator``.
    """
    job = fifteen.jobs["simple"]
    (own,) = [batch for batch in job.batches if ME in batch]
    left_out = next(batch for batch in job.batches if batch != own)
    cohort = tuple(sorted(set(ALL) - set(left_out)))
    survivors = tuple(sorted(set(cohort) - set(own)))
    second = Sum(fifteen, job, 0, survivors, cohort)
    terms = Terms(min_cohort=3, batches=job.batches)
    check_cohort(second.spec, terms)
    check_survivors(second.spec, terms, survivors)  # any silo would have it opened
    first = Sum(fifteen, job, 0, ALL, tuple(sorted(ALL)))
    memory = Memory().signed(first.spec, sorted(ALL))
    recipient = Recipient(fifteen, tmp_path)
    recipient.take(job, 1, delivery(job, 1, [second.down("model")]), memory=memory)
    blamed = [each["blame"] for each in recipient.recorded("secagg.end")]
    assert blamed == [], f"blamed: {blamed}"
