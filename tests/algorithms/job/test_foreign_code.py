"""Code that a job names is judged before it is imported, whatever the document says."""

import hashlib
import sys

import pytest
from support.jobs import make_job
from support.refusals import refused

from staddle.algorithms.job import foreign_code
from staddle.algorithms.job.foreign_code import check_code, packages_of, unlisted
from staddle.algorithms.job.job import Job
from staddle.algorithms.tasks.registry import TASKS
from staddle.files import packages
from staddle.files.documents import canonical_json, parse_json
from staddle.files.packages import Package

MIXED = {"name": "mixed", "classes": 3, "head": "fc", "input": [1, 8, 8]}


@pytest.fixture(scope="module")
def document():
    return make_job("fedper", model=MIXED).document()


def read(document, allowed=("other-models",), federated=False):
    wire = parse_json(canonical_json(document), "wire")
    return Job.from_document(wire, "wire", allowed, federated=federated)


def changed(document, **model):
    return {**document, "model": {**document["model"], **model}}


@pytest.fixture
def not_imported():
    """Nothing of the package is imported meanwhile."""
    sys.modules.pop("other_models", None)
    yield
    assert "other_models" not in sys.modules


def test_a_job_runs_where_all_its_packages_are_allowed(document):
    assert read(document, ["Other.Models"]) == read(document, None)
    (package,) = packages_of("fedper", "mixed", "classification")
    assert document["packages"] == [vars(package)]
    for model in ("lenet5", "torchvision:resnet18"):
        for task in TASKS:
            assert packages_of("fedper", model, task) == ()


def test_nothing_is_imported_where_it_is_not_allowed(document, not_imported):
    for allowed in ((), ["other"], ["other-models-2"]):
        assert unlisted(document, allowed) == ("other-models",)
        with refused("wire: the job runs code of the installed package other-models, which may no"):
            read(document, allowed)
    assert unlisted(document, ["other-models"]) == unlisted(document, None) == ()


def test_nothing_is_imported_that_is_not_what_was_signed(document, not_imported):
    (signed,) = document["packages"]
    for key, value in (("sha256", "0" * 64), ("version", "0.2"), ("name", "other")):
        with refused(r"key packages, .*, differs \(.*other-models: 0.1, SHA-256 \w+ here, "):
            read({**document, "packages": [{**signed, key: value}]})
    for value in ([], None, {}, [signed, None], [{}], [{**signed, "sha256": 1}], "other-models"):
        if value != [signed, None]:
            with refused(r"other-models: 0.1, SHA-256 \w+ here, none in the job"):
                read({**document, "packages": value})


def test_more_packages_than_the_job_runs_are_refused(document):
    (signed,) = document["packages"]
    with refused(r"other: none here, 0.1, SHA-256 \w+ in the job"):
        read({**document, "packages": [signed, {**signed, "name": "other"}]})
    with refused("key packages"):
        read({**document, "packages": [signed, None]})
    table = make_job("fedper").document()
    with refused("key packages"):
        read({**table, "packages": [signed]}, ())
    with refused("packages"):
        read({**table, "packages": []}, ())


def test_a_job_read_elsewhere_has_the_digest_that_it_was_signed_with(document):
    """On another release of torch, if it makes the same values: the ledgers name it so."""
    releases = {**document["start"]["made_with"], "torch": "2.99.0"}
    other = {**document, "start": {**document["start"], "made_with": releases}}
    job = read(other)
    assert job.digest == hashlib.sha256(canonical_json(other)).hexdigest()
    assert job.document() == other
    assert read(document).digest != job.digest
    assert job.for_federation().document()["start"] != document["start"]


@pytest.mark.parametrize(
    "changes",
    [
        {"head": [""]}, {"head": ["."]}, {"head": ["fc", "fc"]}, {"head": ["fc", "fc.weight"]},
        {"head": ["fc.weight"]}, {"head": ["__class__"]}, {"head": ["forward"]}, {"head": []},
        {"head": ["x" * 300]}, {"head": ["fc"] * 65}, {"head": 3}, {"head": [None]},
        {"input": [4096, 4096, 4096]}, {"input": [1, 8]}, {"input": [0, 8, 8]}, {"input": None},
        {"options": {"depth": 3}}, {"options": {"width": -1}}, {"options": {"width": "x"}},
        {"options": {"dropout": {"decimal": "nan"}}}, {"options": {"dropout": {"decimal": "-inf"}}},
        {"options": {"dropout": {"decimal": "1e999"}}}, {"options": {"width": {"decimal": "x"}}},
        {"options": {"dropout": {"decimal": "0.5", "more": 1}}},
        {"options": {"__class__": 3}}, {"options": {"": 3}}, {"options": {"x": "y" * 1025}},
        {"options": {"width": [3]}}, {"options": {f"x{i}": 1 for i in range(65)}},
        {"options": {"width": 2**40}}, {"name": "failing"}, {"name": "huge", "head": ["2"]},
        {"name": "failing", "options": {"how": "SystemExit"}}, {"name": "dotted", "head": ["a"]},
        {"name": "failing", "options": {"how": "KeyError"}}, {"name": "nowhere"}, {"name": 3},
        {"name": "failing", "options": {"how": "RecursionError"}}, {"name": "torchvision:"},
        {"name": "torchvision:resnet18", "head": ["fc"], "options": {"layers": "x" * 900}},
        {"name": "torchvision:get_model", "head": ["fc"]}, {"name": "mlp", "input": [4096] * 4},
        {"name": "glm", "input": [4096] * 4, "classes": 100_000, "head": None, "options": None},
        {"name": "volume-resnet", "options": {"widths": [4096] * 16, "blocks": 32}},
    ],
)  # fmt: skip
def test_whatever_a_model_says_the_answer_is_a_short_error(document, changes):
    """A daemon reads such documents: nothing but a LocalError may come out of it."""
    with refused("^wire: ") as caught:
        read(changed(document, **changes))
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    "start",
    [
        None, [], "x", {}, {"sha256": "0" * 64}, {"made_with": {}}, {"sha256": 1, "made_with": 1},
        {"sha256": "0" * 64, "made_with": {"torch": "y" * 10_000}},
        {"sha256": "0" * 64, "made_with": {"x" * 10_000: None}},
    ],
)  # fmt: skip
def test_whatever_the_start_says_the_answer_is_a_short_error(document, start):
    for job in (document, make_job("fedper").document()):
        with refused("^wire: .*(key start|other initial values)") as caught:
            read({**job, "start": start})
        assert len(str(caught.value)) < 1000


def table_with(**changes):
    return {**make_job("fedper").document(), **changes}


@pytest.mark.parametrize(
    "changes",
    [
        lambda signed: {"packages": [{**signed, "name": f"other-{i}"} for i in range(5000)]},
        lambda _: {"packages": [{"name": "x" * 10**6, "version": "y", "sha256": "z"}]},
        lambda _: {"method": {"name": "x" * 10**6}},
        lambda _: {"model": {"name": f"torchvision:{'x' * 10**6}", "classes": 3}},
        lambda _: {"x" * 10**6: 1},
        lambda _: {"start": {"sha256": "0" * 64, "made_with": {f"x{i}": "1" for i in range(5000)}}},
    ],
)
def test_whatever_is_long_the_error_is_short(document, changes):
    for job in (document, table_with()):
        with refused("^wire: ") as caught:
            read({**job, **changes(document["packages"][0])})
        assert len(str(caught.value)) <= 2001


def test_a_value_of_another_type_is_another_document(document):
    """Python takes them for equal, and digests of them differ."""
    for job in (document, table_with()):
        (first, *rest) = job["schema"]
        with refused("wire: one of its values has another type than Staddle writes, such as 0 for"):
            read({**job, "schema": [{**first, "from_round": False}, *rest]}, None)


def test_a_project_may_have_its_models_and_methods_in_two_packages(document, monkeypatch):
    """Both digests count: an installation that keeps no list of its files has one for each."""
    (signed,) = document["packages"]
    other = Package(signed["name"], signed["version"], "ff" * 32)
    both = {group: Package(**signed) for group in (packages.METHODS, packages.MODELS)}
    both[packages.METHODS] = other
    monkeypatch.setattr(packages, "package", lambda group, *_: both[group])
    monkeypatch.setattr(packages, "owners", lambda *_: [signed["name"]])
    found = packages_of("softper", "mixed", "classification")
    assert found == tuple(sorted((Package(**signed), other), key=lambda one: one.sha256))
    job = {**document, "method": {"name": "softper"}}
    check_code({**job, "packages": [vars(one) for one in found]}, None, "wire")
    for one in found:
        with refused(rf"SHA-256 .* and 0.1, SHA-256 .* here, 0.1, SHA-256 {one.sha256} in the job"):
            check_code({**job, "packages": [vars(one)]}, None, "wire")


def test_documents_with_anything_in_place_of_a_name_name_no_code():
    nowhere = {"name": "nowhere", "kind": "nowhere"}
    for table in (None, 3, [], {}, {"name": None}, {"name": ["mixed"]}, {"kind": [3]}, nowhere):
        document = {"method": table, "model": table, "task": table}
        assert unlisted(document, ()) == ()
        check_code(document, (), "wire")
        assert foreign_code.runs_others_code(document)
    assert unlisted({}, ()) == ()


def test_an_entry_point_cannot_take_torchvisions_names(document):
    """One of that package is called torchvision:alexnet."""
    assert unlisted(changed(document, name="torchvision:alexnet"), ()) == ()
    assert packages_of("fedper", "torchvision:alexnet", "classification") == ()
