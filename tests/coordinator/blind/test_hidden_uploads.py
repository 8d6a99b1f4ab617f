"""Words on padded uploads at the coordinator."""

from types import SimpleNamespace

import pytest
from support.keyed_jobs import SILOS, make_keyed

from staddle.coordinator.blind.hidden_uploads import HiddenUploadStore
from staddle.coordinator.storage.database import StoredHidden
from staddle.errors import RefusedError
from staddle.security.blind.mix_context import Version
from staddle.security.blind.plan import JobPlan


@pytest.mark.parametrize("number", [4, 5])
def test_the_number_of_a_version_is_higher_than_those_of_other_rounds(tmp_path, number):
    """Else recipients, who had the one of the earlier round, would refuse each row with it."""
    made, silo = make_keyed(tmp_path), SILOS[0]
    store = HiddenUploadStore(JobPlan(made.jobs["rows"]), made.roster, ())
    words = []
    for version in (
        Version(silo=silo, round=0, attempt=0, number=5),
        Version(silo=silo, round=1, attempt=0, number=number),
    ):
        context = version.context(store.lines["extractor"])
        store.take(StoredHidden(version.round, "extractor", silo, context, "file", 1, bytes(32)))
        words.append(SimpleNamespace(part="extractor", upload=SimpleNamespace(version=version)))
    store.sign(words[0])
    with pytest.raises(RefusedError, match=f"signs version {number} after version 5"):
        store.check(silo, words[1])
