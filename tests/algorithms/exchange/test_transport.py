"""The [transport] table: which parts it codes, and what it is refused with."""

import pytest
from federation.conftest import small_document

from staddle.algorithms.job.job import Job, JobFile
from staddle.errors import LocalError
from staddle.files.documents import validate

SILOS = ("a", "b", "c", "d")


OPTIONS = {"pfedsim": {"options": {"rho": 0.0}}}  # without rounds that average
KEEP = {"bfloat16": {}, "int8": {}, "top-k": {"keep": 0.1}}


def job(method="fedavg", codec=None, **changes):
    if codec is not None:
        changes["transport"] = {"codec": codec, **KEEP.get(codec, {})}
    document = small_document("j", SILOS, method, **changes)
    return Job.from_file(validate(document, JobFile, "job.toml"), "job.toml")


def coded(of, round_=0):
    """The parts of a round's upload that cross in another form."""
    return {part.name for part in of.up(round_) if part.wire != part.given and not part.sketch}


def test_without_the_table_nothing_of_a_document_changes():
    assert "transport" not in job().document()
    assert job().digest != job(codec="bfloat16").digest


@pytest.mark.parametrize(
    ("method", "round_", "expected"),
    [
        ("fedavg", 0, {"model"}),
        ("pfedsim", 1, {"extractor"}),  # and not the rows that are compared
        ("fedproto", 0, {"prototypes"}),
        ("fedssa", 0, {"rows"}),
        ("ppfl", 0, {"model"}),
        ("fedfomo", 0, {"model"}),
    ],
)
def test_what_is_added_up_or_passed_on_is_coded(method, round_, expected):
    assert coded(job(method, "bfloat16"), round_) == expected
    assert coded(job(method), round_) == set()


@pytest.mark.parametrize(
    ("method", "expected"), [("fedavg", {"model"}), ("pfedsim", {"extractor"}), ("fedfomo", None)]
)
def test_int8_is_for_what_all_rounds_add_up_or_mix(method, expected):
    if expected is None:
        with pytest.raises(LocalError, match="does nothing"):
            job(method, "int8").document()
    else:
        assert coded(job(method, "int8"), 1) == expected


def test_top_k_begins_once_there_is_something_to_compare_with():
    """In the first round all silos send whole models; what is mixed never has a common value."""
    made = job("fedavg", "top-k", rounds=3)
    assert [coded(made, round_) for round_ in range(3)] == [set(), {"model"}, {"model"}]
    assert [phase["from_round"] for phase in made.document()["schema"]] == [0, 1, 3]
    for method, changes in {"pfedsim": {}, "fedavg": {"rounds": 1}}.items():
        with pytest.raises(LocalError, match="does nothing"):
            job(method, "top-k", **changes, **OPTIONS.get(method, {})).document()


@pytest.mark.parametrize("table", [{"codec": "top-k"}, {"codec": "int8", "keep": 0.1}])
def test_keep_is_for_top_k(table):
    with pytest.raises(LocalError, match='keep is for codec = "top-k", and that needs it'):
        job(transport=table)


def test_what_would_do_nothing_or_could_not_be_is_refused():
    with pytest.raises(LocalError, match=r"codec = 'bfloat16' does nothing: no part that goes up"):
        job("local", "bfloat16").document()
    blind = {"security": {"secure_aggregation": "required"}, "min_cohort": 3}
    for codec in KEEP:
        with pytest.raises(LocalError, match=r"which no codec makes shorter; take \[transport\]"):
            job("fedavg", codec, **blind)
    with pytest.raises(LocalError, match=r"transport\.codec"):
        job("fedavg", "gzip")


def test_downloads_are_not_coded():
    assert all(part.codec is None for part in job(codec="bfloat16").down(1))
