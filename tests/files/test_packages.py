"""Packages are found by their entry points, and their files digested, without being imported."""

import hashlib
import os
import sys
import zipfile
from importlib.metadata import entry_points

import pytest
from support.refusals import refused

from staddle.errors import LocalError
from staddle.files import packages
from staddle.files.documents import canonical_json
from staddle.files.packages import MODELS


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def by_hand(files):
    """The digest of files by path, from the docstring."""
    whole = hashlib.sha256()
    for name in sorted(files):
        whole.update(canonical_json([name, sha256(files[name].encode())]))
    return whole.hexdigest()


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of packages; what this process knows of others is as before afterwards."""
    monkeypatch.setattr(packages, "_FIRST", {})
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("lung", "lungs", "single", "clinic", "zipped"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        del sys.modules[name]


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def install(site):
    """Write a package with one entry point; RECORD has its files where there is a list of them."""

    def call(files, target="lung:net", record=None, name="lung-models", metadata=True):
        write(site, files)
        info = site / f"{name}-0.3.dist-info"
        info.mkdir()
        write(info, {"entry_points.txt": f"[staddle.models]\nlung-net = {target}\n"})
        if metadata:
            write(info, {"METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.3\n"})
        if record is not None:
            lines = [f"{name},," for name in (*record, f"{info.name}/METADATA")]
            write(info, {"RECORD": "\n".join(lines)})
        return info

    return call


def digest(group=MODELS, name="lung-net"):
    (entry,) = entry_points(group=group, name=name)
    return packages.digest(entry)


def test_a_library_without_entry_points_is_a_package_of_its_own_name(install, monkeypatch):
    known = packages.Catalogue("lung", "lung", "pip install lung")
    monkeypatch.setitem(packages.CATALOGUES, (packages.METRICS, "lung"), known)
    gone = packages.Catalogue("lungs", "lungs", "pip install lungs")
    monkeypatch.setitem(packages.CATALOGUES, (packages.METRICS, "lungs"), gone)
    files = {"lung/__init__.py": "RUNS = True\n", "lung/data.txt": "x"}
    install(files, name="lung", record=files)
    found = packages.package(packages.METRICS, "lung", "metrics.lung")
    assert (found.name, found.version, found.sha256) == ("lung", "0.3", by_hand(files))
    assert packages.owners(packages.METRICS, "lung") == ["lung"]
    assert "lung" not in sys.modules
    loaded, whose = packages.load(packages.METRICS, "lung", "metrics.lung")
    assert loaded.RUNS
    assert "of package lung 0.3" in whose
    assert packages.owners(packages.METRICS, "lungs") == []
    with refused("metrics.lungs: no installed package has it; pip install lungs"):
        packages.package(packages.METRICS, "lungs", "metrics.lungs")


def test_an_entry_point_leads_to_its_package_which_is_not_imported():
    sys.modules.pop("other_models", None)
    assert packages.owners(MODELS, "mixed") == ["other-models"]
    found = packages.package(MODELS, "mixed", "model 'mixed'")
    assert (found.name, found.version) == ("other-models", "0.1")
    assert "mixed" in packages.names(MODELS)
    assert "other_models" not in sys.modules
    assert packages.owners(MODELS, "nowhere") == packages.owners(packages.METHODS, "mixed") == []
    with refused("model 'nowhere': no installed package has it; install the one that does"):
        packages.package(MODELS, "nowhere", "model 'nowhere'")
    found, whose = packages.load(MODELS, "mixed", "model 'mixed'")
    assert found is sys.modules["other_models"].mixed
    assert whose == "model 'mixed', which is 'other_models:mixed' of package other-models 0.1"


def test_the_digest_is_over_all_files_of_the_package_but_compiled_ones(install, site):
    files = {
        "lung/__init__.py": "x = 1\n", "lung/parts/a.py": "y = 2\n", "lung/weights.bin": "\0",
        # Python imports it where there is no source
        "lung/parts/b.pyc": "compiled",
    }  # fmt: skip
    install(files, "lung.parts.a:net")
    assert digest() == by_hand(files)
    write(site, {"lung/parts/__pycache__/a.cpython-311.pyc": "compiled"})
    assert digest() == by_hand(files)
    for name, text in files.items():
        packages._FIRST.clear()
        write(site, {name: "changed"})
        assert digest() == by_hand({**files, name: "changed"})
        write(site, {name: text})


def test_the_other_files_of_the_distribution_count_too(install, site):
    """An entry point's module may import what lies beside it."""
    files = {"lung/__init__.py": "", "lung_layers.py": "z = 1\n", "extra/deep/c.py": ""}
    scripts = ["../../bin/lung", "lung/__pycache__/__init__.cpython-311.pyc"]
    install(files, record=[*files, *scripts, "__editable__.lung.pth"])
    assert digest() == by_hand(files)
    (site / "lung-models-0.3.dist-info" / "RECORD").unlink()
    packages._FIRST.clear()
    assert digest() == by_hand({"lung/__init__.py": ""})


def test_the_files_of_a_checkout_are_no_list_of_what_was_installed(install, site):
    """As ``setup.py develop`` leaves it."""
    info = install({"lung/__init__.py": "", "tests/test_lung.py": ""})
    (info / "METADATA").rename(info / "PKG-INFO")
    write(info, {"SOURCES.txt": "lung/__init__.py\ntests/test_lung.py\n"})
    info.rename(site / "lung_models.egg-info")
    assert packages.owners(MODELS, "lung-net") == ["lung-models"]
    assert digest() == by_hand({"lung/__init__.py": ""})


def test_an_editable_installation_has_the_digest_of_its_wheel(
    install, site, tmp_path_factory, monkeypatch
):
    files = {"lung/__init__.py": "x = 1\n", "lung/a.py": ""}
    install(files, record=files)
    wheel = digest()
    checkout = tmp_path_factory.mktemp("checkout")
    write(checkout, {**files, "setup.py": "", "tests/test_a.py": ""})
    for name in files:
        (site / name).unlink()
    (site / "lung").rmdir()
    monkeypatch.syspath_prepend(checkout)
    write(site / "lung-models-0.3.dist-info", {"RECORD": "__editable__.lung_models.pth,,\n"})
    packages._FIRST.clear()
    assert digest() == wheel


def test_a_package_may_be_one_file(install):
    install({"single.py": "z = 1\n"}, "single:net")
    assert digest() == by_hand({"single.py": "z = 1\n"})


def test_a_namespace_has_the_files_of_the_entry_points_package_alone(install, site):
    """Several projects may share a namespace, in whatever folders they are installed."""
    files = {"clinic/lung/__init__.py": "", "clinic/lung/a.py": ""}
    install({**files, "clinic/heart/__init__.py": ""}, "clinic.lung.a:net")
    assert digest() == by_hand(files)
    # one file in a namespace
    write(site, {"clinic/single.py": "z = 1\n"})
    info = site / "lung-models-0.3.dist-info" / "entry_points.txt"
    info.write_text("[staddle.models]\nlung-net = clinic.single:net\n")
    assert digest() == by_hand({"clinic/single.py": "z = 1\n"})


def test_what_has_no_files_is_refused(install, site, monkeypatch):
    info = install({}, "no_such_net:net")
    with refused("package 'no_such_net' cannot be found; reinstall it"):
        digest()
    info /= "entry_points.txt"
    for module in ("sys", "zipped"):
        info.write_text(f"[staddle.models]\nlung-net = {module}:net\n")
        with zipfile.ZipFile(site / "z.zip", "w") as made:
            made.writestr("zipped/__init__.py", "")
        monkeypatch.syspath_prepend(site / "z.zip")
        with refused(f"package '{module}' has no files that can be read, such as in a zip"):
            digest()


def test_a_symbolic_link_to_a_folder_is_refused(install, site, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    write(elsewhere, {"b.py": "what runs\n"})
    install({"lung/__init__.py": ""})
    (site / "lung" / "inner").symlink_to(elsewhere)
    with refused("lung/inner: a symbolic link to a folder, in a package that a job names"):
        digest()


def test_files_that_changed_after_this_process_imported_them_are_refused(install, site):
    """What runs is what was imported, and not what the files say now."""
    install({"lung/__init__.py": "net = 1\n"})
    before = digest()
    write(site, {"lung/__init__.py": "net = 2\n"})
    assert digest() != before  # nothing of it was imported yet
    packages.load(MODELS, "lung-net", "model 'lung-net'")
    packages.digest(*entry_points(group=MODELS, name="lung-net"))
    write(site, {"lung/__init__.py": "net = 3\n"})
    with refused("files of package 'lung' changed after this process had read them; restart it"):
        digest()


def test_a_package_without_metadata_is_refused(install):
    """What was removed by half may have its entry points still."""
    pytest.importorskip("importlib_metadata")  # which then finds packages in place of importlib
    install({"lung/__init__.py": "net = 1\n"}, metadata=False)
    assert packages.owners(MODELS, "lung-net") == [""]
    for call in (packages.package, packages.load):
        with refused("model, which is 'lung:net', is of a package without name or version; rein"):
            call(MODELS, "lung-net", "model")
    assert "lung" not in sys.modules


def test_metadata_that_cannot_be_read_are_said_to_be_so(install):
    info = install({"lung/__init__.py": ""}, record=["lung/__init__.py"])
    (info / "METADATA").write_bytes(b"Name: lung\nVersion: 1\nAuthor: J\xfcrgen\n")
    for call in (lambda: packages.owners(MODELS, "lung-net"), lambda: package("lung-net")):
        with refused("the metadata of 'lung:net' cannot be read: .*; reinstall its package"):
            call()


def test_a_list_of_files_that_cannot_be_read_is_said_to_be_so(install):
    info = install({"lung/__init__.py": ""}, record=["lung/__init__.py"])
    (info / "RECORD").write_text("\nlung/__init__.py,,\n")
    with refused("the files of 'lung:net' cannot be listed: .*; reinstall its package"):
        digest()


def test_a_pipe_is_not_waited_for(install, site):
    install({"lung/__init__.py": ""})
    os.mkfifo(site / "lung" / "pipe")
    with refused("lung/pipe: is not a file, in a package that a job names; remove it"):
        digest()


def package(name):
    return packages.package(MODELS, name, "model")


def test_one_name_in_two_packages_is_refused(install):
    install({"lung/__init__.py": ""})
    install({"lungs/__init__.py": ""}, "lungs:net", name="lungs")
    assert packages.owners(MODELS, "lung-net") == ["lung-models", "lungs"]
    with refused("model is in lung-models 0.3 and lungs 0.3, which are installed here; uninstall"):
        packages.package(MODELS, "lung-net", "model")


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("raise SystemExit('no licence')", "no licence"), ("raise OSError(2, 'gone')", "gone"),
        ("raise RuntimeError", "RuntimeError"), ("other = 1", "no attribute 'net'"),
        ("raise ValueError('first.\\nsecond')", "first; reinstall"),
        ("(", "'\\(' was never closed"),
        ("raise KeyError('x' * 10_000)", "x{150,200}; reinstall that package$"),
    ],
)  # fmt: skip
def test_whatever_an_import_raises_names_the_package(install, code, why):
    install({"lung/__init__.py": code})
    with refused(f"package lung-models 0.3, cannot be imported: .*{why}"):
        packages.load(MODELS, "lung-net", "model")


def test_who_stops_this_process_is_not_taken_for_the_packages_error():
    with pytest.raises(KeyboardInterrupt), packages.others_code("it fails", "mend it"):
        raise KeyboardInterrupt


class UnsayableError(Exception):
    def __str__(self):
        raise ValueError("no")


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (BaseExceptionGroup("several", [SystemExit(1)]), "several"),
        (GeneratorExit(), "GeneratorExit"), (UnsayableError(), "str"),
        (type("X" * 10_000, (Exception,), {})(), "X" * 200),
    ],
)  # fmt: skip
def test_whatever_is_raised_becomes_a_short_error(error, why):
    with (
        refused(f"^it fails: [^X]*{why}[^X]*; mend it$"),
        packages.others_code("it fails", "mend it"),
    ):
        raise error


def test_our_own_errors_stay_as_they_are():
    with refused("^as it was$"), packages.others_code("it fails", "mend it"):
        raise LocalError("as it was")


def test_names_have_one_spelling():
    assert {
        packages.normal(name) for name in ("Lung_Net", "lung-net", "lung.net", "LUNG--NET")
    } == {"lung-net"}
