"""Which tests take long: ``python benchmarks/long_tests.py --junit FILE``.

Reads the results of a run of all tests, which pytest wrote with ``--junit-xml FILE``, and writes
``tests/long.txt``, by which tests have the marker ``long``. A line is a folder, a file or a
function. A function is long if its tests take 1.2 s on average, or 8 s together, on the machine of
the run; a file, if its long functions take nine tenths of its time. ``FOLDERS`` are long as a
whole: their tests start processes.

Prints how many tests are long, and the seconds of both kinds.
"""

import argparse
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

LIST = Path(__file__).resolve().parents[1] / "tests" / "long.txt"
FOLDERS = ("examples", "faults", "federation")
MEAN, TOGETHER, MOST = 1.2, 8.0, 0.9

Times = Mapping[str, Mapping[str, list[float]]]


def read(results: bytes) -> Times:
    """Seconds of each test, by file below ``tests`` and function."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for case in ET.fromstring(results).iter("testcase"):  # noqa: S314 what our own test run wrote
        module, names = [], case.attrib["classname"].split(".")
        while names and not (module and module[-1].startswith("test_")):  # what follows is a class
            module.append(names.pop(0))
        file = "/".join(module[1:]) + ".py"
        function = case.attrib["name"].partition("[")[0]
        found[file][function].append(float(case.attrib["time"]))
    return found


def long_ones(times: Times) -> Iterator[str]:
    """The lines of ``long.txt``, in no order."""
    yield from FOLDERS
    for file, functions in times.items():
        if file.partition("/")[0] in FOLDERS:
            continue
        seconds = {function: sum(each) for function, each in functions.items()}
        long = [
            function
            for function, each in functions.items()
            if sum(each) > TOGETHER or sum(each) / len(each) > MEAN
        ]
        if sum(seconds[function] for function in long) > MOST * sum(seconds.values()):
            yield file
        else:
            yield from (f"{file}::{function}" for function in long)


def main() -> None:
    """Write the list, and say what it comes to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--junit", type=Path, required=True, help="what pytest --junit-xml wrote")
    times = read(parser.parse_args().junit.read_bytes())
    lines = sorted(long_ones(times))
    LIST.write_text("".join(f"{line}\n" for line in lines))
    named = frozenset(lines)
    sizes: dict[bool, list[float]] = {True: [], False: []}
    for file, functions in times.items():
        for function, each in functions.items():
            places = {file, file.partition("/")[0], f"{file}::{function}"}
            sizes[not named.isdisjoint(places)] += each
    for long, each in sizes.items():
        name = "long" if long else "others"
        print(f"{name}: {len(each)} tests, {sum(each):.0f} s")  # noqa: T201 its answer


if __name__ == "__main__":
    main()
