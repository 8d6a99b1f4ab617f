"""All scripted attacks, by who does them: ``python benchmarks/attacks.py [--junit FILE]``.

Runs ``tests/attacks``, or reads the results of a run that pytest wrote with ``--junit-xml FILE``,
and prints how many attacks each actor tried, how many were refused, and how many succeeded. Each
case of a test is one attack. A test that passes is an attack that was refused, one that fails is
one that succeeded; where it has the marker ``succeeds``, the attack succeeds when the test passes,
as docs/threat-model.md says. Tests with the marker ``control`` do none.

Exit code 1 where an attack succeeded that is not known to, where a test could not be run, or has no
actor.
"""

import argparse
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "tests.attacks."  # of what is counted, as the results name a test's module


@dataclass
class Tally:
    """What became of one actor's attacks; ``known`` of those that succeeded are documented."""

    tried: int = 0
    succeeded: int = 0
    known: int = 0

    @property
    def refused(self) -> int:
        """All others."""
        return self.tried - self.succeeded


@dataclass(frozen=True)
class Case:
    """One test case of the results; ``outcome`` is passed, failure, error or skipped."""

    name: str
    outcome: str
    marks: dict[str, str]


def read(results: bytes) -> list[Case]:
    """The cases of ``tests/attacks``; ValueError for what pytest did not write."""
    try:
        root = ET.fromstring(results)  # noqa: S314 what our own test run wrote
    except ET.ParseError as error:
        raise ValueError(f"no results of pytest: {error}; write them with --junit-xml") from error
    return list(_cases(root))


def _cases(root: ET.Element) -> Iterator[Case]:
    for case in root.iter("testcase"):
        module = case.get("classname", "")
        if not module.startswith(FOLDER):
            continue
        outcomes = [
            found for found in ("error", "failure", "skipped") if case.find(found) is not None
        ]
        marks = {each.get("name", ""): each.get("value", "") for each in case.iter("property")}
        yield Case(f"{module}.{case.get('name')}", outcomes[0] if outcomes else "passed", marks)


def tallies(cases: Sequence[Case]) -> tuple[dict[str, Tally], list[str]]:
    """The outcome of the attacks by actor, and what is wrong.

    Wrong are attacks that succeeded, and tests that say too little.
    """
    found: dict[str, Tally] = {}
    wrong = [] if cases else [f"the results have no test of {FOLDER}*"]
    for case in cases:
        actor = case.marks.get("actor")
        if actor is None:
            wrong.append(
                f"{case.name}: says no actor; mark it, or its file, with pytest.mark.actor"
            )
        elif case.outcome == "error":
            wrong.append(f"{case.name}: could not be run")
        elif case.outcome == "skipped":
            wrong.append(f"{case.name}: was left out")
        elif "control" in case.marks:
            if case.outcome != "passed":
                wrong.append(f"{case.name}: failed, so the attacks beside it show nothing")
        else:
            tally, known = found.setdefault(actor, Tally()), "succeeds" in case.marks
            tally.tried += 1
            if known and case.outcome == "passed":
                tally.succeeded += 1
                tally.known += 1
            elif case.outcome != "passed":
                tally.succeeded += 1
                what = (
                    "does not go as docs/threat-model.md says" if known else "the attack succeeded"
                )
                wrong.append(f"{case.name}: {what}")
    return found, wrong


def table(found: dict[str, Tally]) -> str:
    """In Markdown, as it stands in docs/threat-model.md."""
    total = Tally(
        *(
            sum(getattr(tally, name) for tally in found.values())
            for name in ("tried", "succeeded", "known")
        )
    )
    lines = [
        "| actor | tried | refused | succeeded | of these documented |",
        "|---|---|---|---|---|",
    ]
    for actor, tally in [*sorted(found.items()), ("all", total)]:
        lines.append(
            f"| {actor} | {tally.tried} | {tally.refused} | {tally.succeeded} | {tally.known} |"
        )
    return "\n".join(lines)


def run() -> bytes:
    """Run the attacks; the results, also where some failed."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "attacks.xml"
        command = [sys.executable, "-m", "pytest", "tests/attacks", f"--junit-xml={results}"]
        ended = subprocess.run(command, cwd=ROOT, check=False)  # noqa: S603 pytest of this environment
        if ended.returncode not in (0, 1):  # 1: some failed
            sys.exit(f"pytest ended with {ended.returncode}; what it said stands above")
        return results.read_bytes()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--junit",
        type=Path,
        metavar="FILE",
        help="results of a run of all tests, or of tests/attacks",
    )
    given: Path | None = parser.parse_args().junit
    try:
        found, wrong = tallies(read(given.read_bytes() if given else run()))
    except (OSError, ValueError) as error:
        sys.exit(f"{given}: {error}")
    print(table(found))  # noqa: T201
    for line in wrong:
        print(line, file=sys.stderr)  # noqa: T201
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
