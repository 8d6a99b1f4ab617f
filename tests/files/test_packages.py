"""Packages are found by their entry points, and their files digested, without being imported."""

import hashlib
import sys

import pytest
from support.refusals import refused

from staddle.files import packages
from staddle.files.documents import canonical_json


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def written(site, **files):
    for name, text in files.items():
        path = site / name.replace("__", "/").replace("_py", ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_an_entry_point_leads_to_its_package_which_is_not_imported():
    sys.modules.pop("other_models", None)
    assert packages.named(packages.MODELS, "mixed") == "other-models"
    found = packages.package(packages.MODELS, "mixed")
    assert (found.name, found.version) == ("other-models", "0.1")
    assert "other_models" not in sys.modules
    assert packages.named(packages.MODELS, "nowhere") == ""
    assert packages.package(packages.METHODS, "mixed") is None


def test_the_digest_is_over_all_files_of_the_package_but_compiled_ones(site):
    """By hand, from the docstring."""
    folder = site / "lung_net"
    (folder / "parts").mkdir(parents=True)
    texts = {"__init__.py": "x = 1\n", "parts/a.py": "y = 2\n", "weights.bin": "\0"}
    for name, text in texts.items():
        (folder / name).write_text(text)
    whole = hashlib.sha256()
    for name in sorted(texts):
        digest = hashlib.sha256(texts[name].encode()).hexdigest()
        whole.update(canonical_json([f"lung_net/{name}", digest]))
    assert packages.digest("lung_net.parts.a") == whole.hexdigest()
    (folder / "parts" / "__pycache__").mkdir()
    (folder / "parts" / "__pycache__" / "a.cpython-311.pyc").write_bytes(b"compiled")
    assert packages.digest("lung_net") == whole.hexdigest()
    (folder / "parts" / "a.py").write_text("y = 3\n")
    assert packages.digest("lung_net") != whole.hexdigest()


def test_a_package_may_be_one_file(site):
    (site / "single_net.py").write_text("z = 1\n")
    digest = hashlib.sha256(b"z = 1\n").hexdigest()
    assert (
        packages.digest("single_net")
        == hashlib.sha256(canonical_json(["single_net.py", digest])).hexdigest()
    )


def test_what_has_no_files_is_refused():
    with refused("package 'no_such_net' has no files that can be read; reinstall it"):
        packages.digest("no_such_net")
    with refused("package 'sys' has no files|cannot read"):
        packages.digest("sys")


def test_names_have_one_spelling():
    assert {
        packages.normal(name) for name in ("Lung_Net", "lung-net", "lung.net", "LUNG--NET")
    } == {"lung-net"}
