"""What the coordinator sees of parts that are mixed or compared blind, by a tap that holds the keys
of both sides.
"""

import itertools
import re
from collections import defaultdict
from pathlib import Path

import pytest
from federation.test_blind_recorded import LARGEST_CHI_SQUARE, chi_square, paths, tapped

from staddle.proto import secure_pb2 as secure
from staddle.proto import tensor_pb2 as tensor
from staddle.proto.channel import UPLOAD

SILOS = ("north", "east", "south", "west")
SECURITY = {"secure_aggregation": "required"}
DOCS = Path(__file__).parents[2] / "docs" / "wire.md"
TITLE = "## What the coordinator sees of a part that is mixed or compared blind"
REQUESTS = {
    "Contribute": secure.Contributed,
    "GroupKey": secure.KeyPoll,
    "Padded": secure.PaddedWordUpload,
}
OF_TENSORS = {"part", "kind", "name", "dtype", "shape", "size"}


def table():
    """Fields by call, as docs/wire.md has them."""
    text = DOCS.read_text().partition(TITLE)[2].partition("\n## ")[0]
    found = {}
    for call, fields in re.findall(r"^\| `(.*?) \| (.*?) \|$", text, re.MULTILINE):
        found[call.replace("`", "")] = set(re.findall(r"`(.*?)`", fields))
    found["Upload manifest, rotated"] = found["Upload manifest, padded"] | {
        f"tensors.{name}" for name in OF_TENSORS
    }
    return found


@pytest.mark.timeout(120)
@pytest.mark.skipif(not DOCS.exists(), reason="the tests run without docs/ beside them")
def test_the_coordinator_sees_the_fields_of_the_table_and_words_like_random_ones(start, document):
    running = start(*SILOS)
    changes = {"rounds": 2, "min_cohort": 3, "security": SECURITY, "options": {"rho": 0.0}}
    running.job(document("job", SILOS, "pfedsim", **changes))
    calls = tapped(running)
    found, words = defaultdict(set), []
    for call in itertools.chain.from_iterable(calls.values()):
        method = call.method.rpartition("/")[2]
        if method in REQUESTS:
            for data in call.sent:
                found[method] |= set(paths(REQUESTS[method].FromString(data)))
        if call.method == UPLOAD:
            frames = [tensor.Frame.FromString(data) for data in call.sent]
            if frames[0].manifest.part:
                form = "rotated" if frames[0].manifest.tensors else "padded"
                found[f"Upload manifest, {form}"] |= set(paths(frames[0].manifest))
                words += [b"".join(frame.chunk for frame in frames)] if form == "padded" else []
    assert dict(found) == table()
    assert len(words) == len(SILOS) * 2
    assert max(map(chi_square, words)) < LARGEST_CHI_SQUARE
