"""What the coordinator sees of parts that are mixed or compared blind, by a tap that holds the keys
of both sides.
"""

import itertools
import re
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from support.tap import Tap

from staddle.proto import secure_pb2 as secure
from staddle.proto import tensor_pb2 as tensor
from staddle.proto.channel import UPLOAD
from staddle.security.identity import roster as rosters
from staddle.security.identity.keys import load_keys

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
LARGEST_CHI_SQUARE = 460  # of 256 values, 255 degrees of freedom: exceeded once in 10^13 uploads


def paths(message, prefix=""):
    """Names of the fields that are set."""
    for descriptor, value in message.ListFields():
        name = f"{prefix}{descriptor.name}"
        if descriptor.message_type is None:
            yield name
        else:
            for inner in [value] if hasattr(value, "ListFields") else value:
                yield from paths(inner, f"{name}.")


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
    running.start_coordinator()
    folder = running.federation.folder
    keys = {silo: load_keys(folder / silo / "keys") for silo in SILOS}
    with Tap(
        running.address,
        rosters.load(folder / "roster.json"),
        load_keys(folder / "coordinator" / "keys"),
        keys,
    ) as tap:
        running.address = tap.address
        for silo in SILOS:
            running.write_silo(silo)
            running.start_silo(silo)
        ended = running.daemons["coordinator"].wait_for("job.ended", 90)
        assert (ended["job"], ended["outcome"]) == ("job", "completed")
        for silo in SILOS:
            running.daemons[silo].stop()
        running.stop()
    found, words = defaultdict(set), []
    for call in itertools.chain.from_iterable(tap.calls.values()):
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
    for one in words:
        counts = np.bincount(np.frombuffer(one, np.uint8), minlength=256)
        assert ((counts - len(one) / 256) ** 2 / (len(one) / 256)).sum() < LARGEST_CHI_SQUARE
