"""Methods of other packages: found by their entry points, refused where they are not what
they say.
"""

import sys

import pytest
from support.refusals import refused

from staddle.algorithms.catalog import (
    ALL_METHODS,
    METHODS,
    OWN_METHODS,
    method_class,
    method_options,
    names,
    without_optimiser,
)
from staddle.algorithms.job.foreign_code import runs_others_code
from staddle.algorithms.job.job import Job

SOURCE = """\
from staddle.algorithms.methods.fedper import FedPer
from staddle.algorithms.method import Method

class Foreign(FedPer):
    name = "foreign"
    version = {version}

class Misnamed(FedPer):
    name = "other"

class Stranger:
    name = "foreign"

class Nameless(Method):
    pass

class Versionless(Method):
    name = "foreign"

class Lacking(Method):
    name, version = "foreign", 1

    def up(self, round_):
        return ()

def function():
    return Foreign
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs packages of one module each; the entry points of each are given by name."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)

    def install(package, version=1, **methods):
        (site / f"{package}.py").write_text(SOURCE.format(version=version))
        info = site / f"{package}-0.{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.{version}\n"
        )
        lines = [f"{name} = {package}:{target}" for name, target in methods.items()]
        (info / "entry_points.txt").write_text("\n".join(["[staddle.methods]", *lines]))
        monkeypatch.delitem(sys.modules, package, raising=False)
        return info

    return install


def test_a_method_of_another_package_is_found_and_works_in_a_job(installed, make_job):
    installed("some_methods", foreign="Foreign")
    assert "some_methods" not in sys.modules
    assert method_class("fedper") is METHODS["fedper"]
    assert "foreign" in names()
    assert "some_methods" not in sys.modules  # to be listed, it need not be imported
    job = make_job("foreign")
    assert type(job.method()).__module__ == "some_methods"
    assert Job.from_document(job.document(), "wire", None).digest == job.digest
    assert job.document()["method_digest"] != make_job("fedper").document()["method_digest"]


def test_a_silo_with_another_version_of_it_or_none_says_so(installed, make_job):
    info = installed("old_methods", version=1, foreign="Foreign")
    document = make_job("foreign").document()
    (info / "entry_points.txt").unlink()
    with refused(r"key packages, .* differs \(old_methods: none here, 0.1, SHA-256 \w{64} in the"):
        Job.from_document(document, "wire", None)
    installed("new_methods", version=2, foreign="Foreign")
    with refused(
        r"\(new_methods: 0.2, SHA-256 \w{64} here, none in the job; old_methods: none here"
    ):
        Job.from_document(document, "wire", None)
    # who signs a job without naming the package that has its method
    del document["packages"]
    (info / "entry_points.txt").write_text("")
    with refused(r"\(new_methods: 0.2, SHA-256 \w{64} here, none in the job\)"):
        Job.from_document(document, "wire", None)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("Absent",
            (r"cannot be imported: module 'bad_methods' has no attribute 'Absent'; reinstall"
            r" that package")),
        ("function",
            r"is not a subclass of staddle.algorithms.method.Method; correct the entry point"),
        ("Stranger",
            r"is not a subclass of staddle.algorithms.method.Method; correct the entry point"),
        ("Misnamed", r"calls itself 'other'; give class and entry point one name"),
        ("Nameless", r"calls itself None; give class and entry point one name"),
        ("Versionless", r"has no whole number as its version; give it one, such as version = 1"),
        ("Lacking", r"lacks contribute, down, stages; implement what the contract asks for"),
    ],
)  # fmt: skip
def test_an_entry_point_that_is_no_such_method_is_refused(installed, target, said):
    installed("bad_methods", foreign=target)
    where = (
        rf"job.toml: method 'foreign', which is 'bad_methods:{target}' of package bad_methods 0.1, "
    )
    with refused(where + said):
        method_options("foreign", {}, "job.toml")


def test_one_name_is_one_method(installed):
    installed("one_package", foreign="Foreign", fedavg="Foreign")
    assert method_class("fedavg") is METHODS["fedavg"]  # a name of the catalog is taken
    assert names().count("fedavg") == 1
    installed("other_package", foreign="Foreign")
    with refused(r"is in one_package 0.1 and other_package 0.1, .*; uninstall all but one"):
        method_class("foreign")


def test_the_nearest_name_is_suggested(installed):
    installed("some_methods", foreign="Foreign")
    with refused(r"unknown method 'foreing'; did you mean 'foreign'\?"):
        method_class("foreing")


def test_a_package_that_python_cannot_read_is_refused(installed, tmp_path):
    installed("newer_methods", foreign="Foreign")
    (tmp_path / "site" / "newer_methods.py").write_text("def of a later Python:\n")
    said = r"of package newer_methods 0.1, cannot be imported: expected .*newer_methods.py, line 1"
    with refused(said):
        method_options("foreign", {}, "job.toml")


def test_names_with_a_server_optimiser_are_staddles_own():
    """So that no package can take one, and no document that has one names a package."""
    assert "fedrep-adam" in OWN_METHODS
    assert "fedrep-adam" not in names()
    assert "softper-adam" not in OWN_METHODS
    assert len(set(OWN_METHODS)) == len(ALL_METHODS) + 3 * len(METHODS)
    assert method_class("fedrep-adam") is method_class("fedrep-adam")
    assert without_optimiser("fedavg-ft-adam") == "fedavg-ft"
    assert without_optimiser("fedavg-ft") == "fedavg-ft"
    assert not runs_others_code({"method": {"name": "fedrep-yogi"}, "model": {"name": "glm"}})
    assert runs_others_code({"method": {"name": "softper-yogi"}, "model": {"name": "glm"}})
    with refused("did you mean 'fedrep-yogi'"):
        method_class("fedrep-yogy")
