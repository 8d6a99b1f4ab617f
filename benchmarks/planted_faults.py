"""How good the tests are: ``python benchmarks/planted_faults.py [--folder F] [--only N]``.

Plants the faults of ``planted_faults.toml``, one at a time, in a copy of the checkout's tracked
files, and runs the tests of the fault's folder on it until one fails. Prints for each fault whether
they found it, the seconds, and the first test that failed; then the counts of each folder. Tests
that hang, or cannot be imported, have found the fault. The checkout itself is never changed.

``--out`` writes the results, and takes up where a run that was stopped left them; ``--limit`` is
what one fault's tests may take, some times as long as they take without a fault. Test files named
like the fault's module go first: what they find is soon found, what they miss all the others see.
"""

import argparse
import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FAULTS = Path(__file__).with_suffix(".toml")
SECONDS = 1800.0  # that the tests of one fault may take
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", re.MULTILINE)
HANGS, NO_TEST = "(took longer than its limit)", "(no test could be run)"
PASSED, FAILS, NONE_COLLECTED = 0, 1, 5  # exit codes of pytest


@dataclass(frozen=True)
class Fault:
    """One planted fault: in ``folder`` ``put`` takes the place of ``find``, and ``why`` is so."""

    number: int  # its place in the file, from 1
    folder: str
    find: str
    put: str
    why: str


@dataclass(frozen=True)
class Result:
    """Whether the tests of the folder found a fault, and which of them did; None where none did."""

    number: int
    folder: str
    found: bool
    test: str | None


def faults(path: Path = FAULTS) -> tuple[Fault, ...]:
    """All of the file, in its order."""
    tables = tomllib.loads(path.read_text())["fault"]
    return tuple(Fault(number, **table) for number, table in enumerate(tables, 1))


def spelled(fault: Fault) -> re.Pattern[str]:
    """What matches the fault's snippet however the formatter breaks its lines."""
    pattern = ""
    tokens = re.findall(r"\w+|\s+|[^\w\s]", fault.find.strip())
    for each in tokens:
        if each.isspace():
            pattern += r"\s+"
        elif each in ")]}":
            pattern += r",?\s*" + re.escape(each)
        else:
            pattern += re.escape(each) + (r"\s*" if each in "([{" else "")
    return re.compile(pattern)


def place(root: Path, fault: Fault) -> Path:
    """The module that has the fault's snippet; ValueError unless it occurs there once."""
    snippet = spelled(fault)
    found = {
        path: len(snippet.findall(path.read_text()))
        for path in sorted((root / fault.folder).rglob("*.py"))
    }
    times = {path: count for path, count in found.items() if count}
    if sum(times.values()) != 1:
        where = ", ".join(path.relative_to(root).as_posix() for path in times) or "no module"
        why = f"fault {fault.number}: its snippet stands {sum(times.values())} times, in {where}"
        raise ValueError(f"{why}; it has to stand once in {fault.folder}/: {fault.find.strip()!r}")
    return next(iter(times))


def planted(root: Path, fault: Fault) -> str:
    """The module with the fault in it; ValueError as of ``place``, SyntaxError if it is no code."""
    path = place(root, fault)
    text = spelled(fault).sub(lambda _: fault.put.strip(), path.read_text())
    ast.parse(text, str(path))
    return text


def copied(to: Path) -> None:
    """Copy the tracked files of the checkout as they are."""
    command = ["git", "ls-files", "-z"]
    listed = subprocess.check_output(command, cwd=ROOT, text=True)  # noqa: S603 of this checkout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def first_failure(tests: Sequence[str], copy: Path, ends: float) -> str | None:
    """The first of these tests that fails in a copy until ``ends``; None where all pass."""
    command = [sys.executable, "-m", "pytest", *tests, "-x", "-q", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(copy.parent)}
    with tempfile.TemporaryFile("w+") as said:
        running = subprocess.Popen(  # noqa: S603 pytest of this environment
            [*command, "--tb=no"],
            cwd=copy,
            env=environment,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = running.wait(max(ends - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            return HANGS
        finally:
            _end(running)
        said.seek(0)
        failed = FAILED.search(said.read())
    if code in (PASSED, NONE_COLLECTED):
        return None
    return failed[1] if failed else NO_TEST


def _end(running: "subprocess.Popen[bytes]") -> None:
    """Whatever the tests have left running; they are a session of their own."""
    try:
        os.killpg(running.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    running.wait()


def attempt(fault: Fault, limit: float) -> Result:
    """Plant one fault and run the tests of its folder."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = Path(folder) / "staddle"  # whatever the checkout is called
        copied(copy)
        path, text = place(copy, fault), planted(copy, fault)
        path.write_text(text)
        ends, tests = time.monotonic() + limit, copy / "tests" / fault.folder
        near = [str(test) for test in sorted(tests.rglob(f"test_*{path.stem}*.py"))]
        test = first_failure(near, copy, ends) if near else None
        test = test or first_failure([f"tests/{fault.folder}"], copy, ends)
    return Result(fault.number, fault.folder, test is not None, test)


def chosen(folder: str | None, only: int | None) -> tuple[Fault, ...]:
    """The faults of a folder, or one, or all; exits where there is none, or one has no place."""
    known = faults()
    found = [f for f in known if folder in (None, f.folder) and only in (None, f.number)]
    if not found:
        folders = ", ".join(sorted({fault.folder for fault in known}))
        sys.exit(f"no such fault; there are 1 to {len(known)}, in {folders}")
    for fault in found:
        try:
            planted(ROOT, fault)
        except (ValueError, SyntaxError) as error:
            sys.exit(str(error))
    return tuple(found)


def read(path: Path | None) -> dict[int, Result]:
    """The results so far, by number."""
    if path is None or not path.exists():
        return {}
    return {each["number"]: Result(**each) for each in json.loads(path.read_text())}


def write(path: Path, results: dict[int, Result]) -> None:
    """One result a line, in the order of the faults."""
    lines = [json.dumps(asdict(results[number]), sort_keys=True) for number in sorted(results)]
    aside = path.with_name(f".{path.name}.tmp")
    aside.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    aside.replace(path)


def counts(results: Sequence[Result]) -> Iterator[str]:
    """In Markdown."""
    yield from ("| folder | planted | found | missed |", "|---|---|---|---|")
    for folder in (*dict.fromkeys(each.folder for each in results), "all"):
        own = [each for each in results if folder in ("all", each.folder)]
        found = sum(each.found for each in own)
        yield f"| {folder} | {len(own)} | {found} | {len(own) - found} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the results of the faults that are asked for."""
    shown = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shown)
    parser.add_argument("--folder", help="the faults of this folder alone")
    parser.add_argument("--only", type=int, metavar="N", help="this fault alone")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON; results in it are kept")
    parser.add_argument("--limit", type=float, default=SECONDS, help="seconds of one fault")
    given = parser.parse_args(arguments)
    asked, results = chosen(given.folder, given.only), read(given.out)
    for fault in asked:
        if fault.number in results:
            continue
        began = time.monotonic()
        result = results[fault.number] = attempt(fault, given.limit)
        told = f"found by {result.test}" if result.found else f"missed: {fault.why}"
        seconds = time.monotonic() - began
        print(f"{fault.number:2} {fault.folder} {seconds:.0f} s {told}", flush=True)  # noqa: T201
        if given.out:
            write(given.out, results)
    for line in counts([results[fault.number] for fault in asked]):
        print(line)  # noqa: T201


if __name__ == "__main__":
    main()
