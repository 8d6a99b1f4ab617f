"""The dependency rule of the folders, read from the imports in the source.

It holds for modules yet to come.
"""

import ast
import functools
import gc
import graphlib
import sys
import tomllib
from pathlib import Path

import pytest
from support.product_source import ROOT, sources

SHELLS = {"api", "bundle", "silo", "simulator", "coordinator", "commands", "console"}


@functools.cache
def nodes(path, text=None):
    """All nodes of a module's tree, or of that of a text in its place: each is parsed once."""
    return tuple(ast.walk(ast.parse(path.read_text() if text is None else text, str(path))))


@pytest.fixture(scope="module", autouse=True)
def _trees_go_with_the_last_test():
    gc.disable()  # a search through all trees, again and again, is most of the cost of a parse
    yield
    nodes.cache_clear()
    gc.enable()


def dotted(node):
    """The code of an expression; names joined by dots without the detour of ``ast.unparse``."""
    names, inner = [], node
    while isinstance(inner, ast.Attribute):
        names.append(inner.attr)
        inner = inner.value
    return ".".join((inner.id, *names[::-1])) if isinstance(inner, ast.Name) else ast.unparse(node)


@functools.cache
def imports_of(path, text=None):
    """Absolute dotted names of everything that a module imports, at any depth of its code."""
    package, found = ("staddle", *path.relative_to(ROOT).parent.parts), []
    for node in nodes(path, text):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *filter(None, [node.module])))
            found += (f"{module}.{alias.name}" for alias in node.names)
    return tuple(found)


def offences(folder, forbidden):
    """Imports in a folder for which ``forbidden(dotted name, path)`` holds."""
    return [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources()
        if path.relative_to(ROOT).parts[0] == folder
        for name in imports_of(path)
        if forbidden(name, path.relative_to(ROOT).as_posix())
    ]


def under(name, *packages):
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def test_the_walk_sees_every_form_of_import():
    path = ROOT / "silo" / "x.py"
    text = (
        "import a.b\nfrom ..proto import p as q\nfrom . import y\n"
        "def f():\n    from staddle.coordinator.storage.store import z\n"
    )
    assert list(imports_of(path, text)) == [
        "a.b", "staddle.proto.p", "staddle.silo.y", "staddle.coordinator.storage.store.z",
    ]  # fmt: skip
    assert ROOT / "algorithms" / "exchange" / "parts.py" in sources()


PURE = [f"staddle.{shell}" for shell in SHELLS]
FORBIDDEN = {  # what each folder does not import
    "algorithms": [*PURE, "staddle.security", "staddle.proto", "grpc", "asyncio"],
    "security": PURE,
    "proto": PURE,
    "silo": ["staddle.coordinator", "staddle.simulator"],
    "coordinator": ["staddle.silo", "staddle.simulator"],
    "simulator": ["staddle.silo", "staddle.coordinator", "staddle.proto", "grpc"],
}


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_folders_import_neither_shells_nor_the_wire_nor_one_another(folder):
    assert offences(folder, lambda name, _: under(name, *FORBIDDEN[folder])) == []


def test_methods_and_models_have_no_way_out_of_the_process():
    """The gate sees what a method gives; a socket of its own it would not see.

    So the source of none may name one.
    """
    ways = ("socket", "socketserver", "ssl", "http", "urllib", "requests", "ftplib", "smtplib")
    ways = (*ways, "webbrowser", "select", "subprocess", "multiprocessing", "ctypes", "grpc")
    ways = (*ways, "torch.distributed", "torch.hub", "os.system", "os.popen")
    lines = ["import grpc", "from torch import hub", "import http.client"]
    for line in (*lines, "from urllib.request import urlopen"):
        found = imports_of(ROOT / "algorithms" / "x.py", line)
        assert any(under(name, *ways) for name in found)
    assert offences("algorithms", lambda name, _: under(name, *ways)) == []


def test_security_knows_the_exchanges_only():
    """And the plan of a blind round, which is made of a job, knows the job."""
    known = ("exchange.parts", "exchange.plain", "exchange.concentration", "job.batches")

    def forbidden(name, path):
        more = ("job.job", "method") if path == "security/blind/plan.py" else ()
        exchanges = [f"staddle.algorithms.{each}" for each in (*known, *more)]
        return under(name, "staddle.algorithms") and not under(name, *exchanges)

    assert offences("security", forbidden) == []


def test_only_the_client_module_holds_the_stub():
    def forbidden(name, path):
        return "_pb2_grpc" in name and path != "silo/egress/client.py"

    assert offences("silo", forbidden) == []


def test_what_opens_a_connection_beside_the_client_has_nothing_to_send():
    """silo/connectivity.py knows keys and addresses; it has no records, tensors or messages."""
    found = offences("silo", lambda name, _: under(name, "grpc", "socket", "ssl"))
    others = [each for each in found if "/connectivity.py" not in each]
    assert others == ["silo/egress/client.py imports grpc"]
    ours = {
        name.rpartition(".")[0]
        for name in imports_of(ROOT / "silo" / "connectivity.py")
        if under(name, "staddle")
    }
    assert ours == {
        "staddle.errors",
        "staddle.proto",  # the message with the newest roster
        "staddle.proto.channel",
        "staddle.security.identity.certificate",
        "staddle.security.identity.keys",
    }


# All that leaves a silo leaves by these, and by no other module (docs/structure.md).
WAY_OUT = tuple(f"silo/egress/{name}.py" for name in ("client", "session", "gate", "protocol"))
CALLERS = {  # which of them makes which call of the client
    "silo/egress/session.py": {
        *(
            "hello",
            "renew",
            "poll",
            "beat",
            "answer",
            "standing",
            "attest",
            "fetch",
            "weights",
            "close",
        )
    },
    "silo/egress/gate.py": {"upload"},
    "silo/egress/protocol.py": {"secure", "secure_next", "contribute", "group_key", "padded"},
}


def ways_out(path, text=None):
    """How a module could send an upload: the stub, its raw call, or the client that has both."""
    for name in imports_of(path, text):
        if under(name, "staddle.silo.egress.client") or name.endswith(".FederationStub"):
            yield name
    in_silo = path.relative_to(ROOT).parts[0] == "silo"
    for node in nodes(path, text):
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr in {"upload", "Upload"}:
            yield f"{node.lineno} {called.attr}"
        elif isinstance(node, ast.Attribute):
            raw = node.attr in {"stream_unary", "FederationStub"}
            if raw or (in_silo and node.attr in {"client", "_client"}):
                yield f"{node.lineno} {node.attr}"


def is_server(path):
    """The coordinator answers calls: the handlers of its server have names of raw calls."""
    return path.relative_to(ROOT).as_posix() == "coordinator/rpc/guard.py"


def test_the_walk_sees_a_second_caller_of_the_upload():
    text = (
        "from .egress.client import Client\n"
        "from ..proto.federation_pb2_grpc import FederationStub\n"
        "async def leak(gate, channel, frames):\n"
        "    await gate.session.client.upload(frames, 1)\n"
        "    await channel.stream_unary(UPLOAD)(frames)\n"
        "    await FederationStub(channel).Upload(frames)\n"
    )
    assert set(ways_out(ROOT / "silo" / "x.py", text)) == {
        "staddle.silo.egress.client.Client", "staddle.proto.federation_pb2_grpc.FederationStub",
        "4 client", "4 upload", "5 stream_unary", "6 Upload",
    }  # fmt: skip


def test_only_four_files_can_send_what_leaves_a_silo():
    found = {
        path.relative_to(ROOT).as_posix(): list(ways_out(path))
        for path in sources()
        if not is_server(path)
    }
    assert {path for path, ways in found.items() if ways} == set(WAY_OUT)
    assert sum(len((ROOT / path).read_text().splitlines()) for path in WAY_OUT) < 1255


def calls_of_the_client(path):
    """Names of the client's methods that a module calls."""
    for node in nodes(path):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            *owner, name = dotted(node.func).split(".")
            if owner and owner[-1] == "client":
                yield name


def test_each_call_of_the_client_is_made_in_one_file():
    assert {path: set(calls_of_the_client(ROOT / path)) for path in CALLERS} == CALLERS
    (client,) = (
        node
        for node in nodes(ROOT / WAY_OUT[0])[0].body
        if isinstance(node, ast.ClassDef) and node.name == "Client"
    )
    methods = {node.name for node in client.body if isinstance(node, ast.AsyncFunctionDef)}
    assert {name for name in methods if not name.startswith("_")} == set().union(*CALLERS.values())


# Each folder imports from those before it alone; a coordinator's and a silo's processes and the
# simulator stand side by side. ``__main__`` starts a command, so it stands above all.
LAYERS = (
    {"errors"}, {"files"}, {"log"}, {"metrics"}, {"algorithms"}, {"security"},
    {"bundle"}, {"proto"}, {"coordinator", "silo", "simulator"}, {"commands"}, {"console"},
    {"api"}, {"staddle_verify"},
)  # fmt: skip
LARGEST_ROOM = 15  # modules and rooms at one level
CATALOGUES = {"algorithms/baselines"}  # one file for each entry


def edges():
    """Which module imports which, both as paths without ``.py`` split into their parts."""
    modules = {path.relative_to(ROOT).with_suffix("").parts for path in sources()}
    for path in sources():
        importer = path.relative_to(ROOT).with_suffix("").parts
        if importer[-1] in {"__init__", "__main__"}:
            continue
        for name in imports_of(path):
            parts = tuple(name.split(".")[1:]) if under(name, "staddle") else ()
            found = next((each for each in (parts, parts[:-1]) if each in modules), None)
            if found is not None and found != importer:
                yield importer, found


def room_edges(found):
    """Which child of each room needs which other: ``{room: {child: {children}}}``."""
    graphs = {}
    for importer, imported in found:
        depth = 0
        while importer[depth] == imported[depth]:
            depth += 1
        room = graphs.setdefault("/".join(importer[:depth]), {})
        room.setdefault(importer[depth], set()).add(imported[depth])
    return graphs


def cycles(found):
    """Rooms with children that need one another, as ``room: children``."""
    for room, graph in sorted(room_edges(found).items()):
        try:
            graphlib.TopologicalSorter(graph).prepare()
        except graphlib.CycleError as error:
            yield f"{room or '.'}: {' -> '.join(error.args[1])}"


def test_no_room_and_no_module_depends_on_what_depends_on_it():
    circle = [(("a", "x"), ("b", "y")), (("b", "z"), ("a", "w"))]
    assert list(cycles(circle)) in ([".: a -> b -> a"], [".: b -> a -> b"])
    assert list(cycles([(("a", "b", "x"), ("a", "c")), (("a", "c"), ("a", "b", "y"))])) != []
    assert len(list(edges())) > 1000
    assert list(cycles(edges())) == []


def test_imports_come_from_lower_layers():
    layer = {name: height for height, names in enumerate(LAYERS) for name in names}
    tops = {path.relative_to(ROOT).with_suffix("").parts[0] for path in sources()} - {"__init__"}
    assert tops == set(layer)
    between = [(one, other) for one, other in edges() if one[0] != other[0]]
    assert [each for each in between if layer[each[0][0]] <= layer[each[1][0]]] == []


def test_a_room_has_few_entries():
    entries = {}
    for path in sources():
        parts = path.relative_to(ROOT).with_suffix("").parts
        for depth, name in enumerate(parts):
            if name not in {"__init__", "__main__"}:
                entries.setdefault("/".join(parts[:depth]), set()).add(name)
    crowded = {room: len(names) for room, names in entries.items() if len(names) > LARGEST_ROOM}
    assert crowded.keys() <= CATALOGUES, crowded


def test_each_room_says_in_a_line_what_it_is_for():
    for path in sources():
        if path.name == "__init__.py":
            assert ast.get_docstring(nodes(path)[0]), path
        elif path.parent != ROOT:
            assert (path.parent / "__init__.py").exists(), path


def bodies(tree):
    """The lines of each function, by where it begins, without its signature and its docstring."""
    for node in tree:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0 if ast.get_docstring(node) is None else 1 :]
            yield node, {n for part in first for n in range(part.lineno, part.end_lineno + 1)}


def branches(node):
    """A condition, a loop, an except, a case, or another operand of ``and`` or ``or``."""
    if isinstance(node, ast.comprehension):
        return 1 + len(node.ifs)
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    kinds = ast.If | ast.For | ast.While | ast.AsyncFor | ast.IfExp
    return int(isinstance(node, kinds | ast.ExceptHandler | ast.match_case))


def test_a_line_of_a_function_has_few_branches():
    found, lines = 0, 0
    for path in sources():
        text = path.read_text().splitlines()
        inside = set().union(*(own for _, own in bodies(nodes(path))))
        written = (text[number - 1].strip() for number in inside)
        lines += sum(bool(line) and not line.startswith("#") for line in written)
        found += sum(map(branches, nodes(path)))
    assert lines > 20_000
    assert found <= 0.28 * lines, (found, lines)


def test_a_long_function_says_why():
    silent = []
    for path in sources():
        text = path.read_text().splitlines()
        for node, inside in bodies(nodes(path)):
            says = any("# " in line for line in text[node.lineno - 1 : node.end_lineno])
            if len(inside) > 25 and not says:
                silent.append(f"{path}:{node.lineno} {node.name}")
    assert silent == []


def classes_by_name(texts):
    """Where each class is defined: ``{name: [path, …]}``, nested ones included."""
    found = {}
    for path, text in texts:
        for node in nodes(path, text):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(str(path))
    return found


def test_a_class_name_stands_for_one_class():
    assert classes_by_name([("a", "class X:\n    class Y: ..."), ("b", "class Y: ...")]) == {
        "X": ["a"],
        "Y": ["a", "b"],
    }
    found = classes_by_name((path, None) for path in sources())
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


def test_what_auditors_copy_needs_nothing_but_python_3_9_and_cryptography():
    path = ROOT / "staddle_verify.py"
    # SyntaxError for what is younger
    ast.parse(path.read_text(), str(path), feature_version=(3, 9))
    foreign = {name.partition(".")[0] for name in imports_of(path)} - set(sys.stdlib_module_names)
    assert foreign == {"cryptography"}


def test_no_assert_and_no_way_to_run_or_unpickle_data():
    found = []
    for path in sources():
        module = path.relative_to(ROOT)
        for node in nodes(path):
            where = f"{module}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Assert):
                found.append(f"{where} assert")
            elif isinstance(node, ast.Call):
                called = dotted(node.func)
                if called in {"eval", "exec", "compile", "__import__", "torch.load", "torch.save"}:
                    found.append(f"{where} {called}")
                if any(
                    word.arg == "allow_pickle"
                    and not (isinstance(word.value, ast.Constant) and word.value.value is False)
                    for word in node.keywords
                ):
                    found.append(f"{where} allow_pickle")
        banned = ("pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib")
        banned = (*banned, "torch.load", "torch.save")
        names = [name for name in imports_of(path) if under(name, *banned)]
        found += [f"{module} imports {name}" for name in names]
    assert found == []


PRINTERS = {
    "commands/terminal/printer.py",
    "log.py",  # the daemons' events
    "proto/generate.py",  # developers alone run it
    "security/dp/prv_program.py",  # its answers go to the process that began it
    "staddle_verify.py",  # one file, which escapes by itself
}
PRINTING = {"print", "input", "breakpoint", "pprint", "pp"}
PRINTING |= {"echo", "secho", "echo_via_pager", "prompt", "confirm"}
STREAMS = ("sys.stdout", "sys.stderr", "sys.__stdout__", "sys.__stderr__")


def printing(path, text=None):
    """The ways to a terminal that a module uses: calls, streams and libraries that print."""
    for node in nodes(path, text):
        if isinstance(node, ast.Call):
            *owner, name = dotted(node.func).split(".")
            logs = name in {"StreamHandler", "basicConfig"}
            if (name in PRINTING and "printer" not in owner) or logs:
                yield f"{node.lineno} {name}"
            elif name.startswith("print_") and owner:  # of traceback, parsers, errors
                yield f"{node.lineno} {'.'.join(owner)}.{name}"
        elif isinstance(node, ast.Attribute) and dotted(node) in STREAMS:
            yield f"{node.lineno} {dotted(node)}"
    ways = (*STREAMS, "rich", "click", "argparse", "pprint", "curses", "getpass", "pdb")
    yield from (f"imports {name}" for name in imports_of(path, text) if under(name, *ways))


def test_whatever_is_printed_passes_the_printer():
    """It alone shows control characters of ledgers, rosters, jobs and file names as text."""
    text = (
        "import rich.console\nfrom sys import stderr as to\nfrom click import echo as say\n"
        "import argparse\nprint(1)\ntyper.echo(1)\nsys.stdout.write('')\nlogging.StreamHandler()\n"
        "traceback.print_exc()\nprinter.show(1)\nprogram = print\n"
    )
    assert list(printing(ROOT / "commands" / "x.py", text)) == [
        "5 print", "6 echo", "8 StreamHandler", "9 traceback.print_exc", "7 sys.stdout",
        "imports rich.console", "imports sys.stderr", "imports click.echo", "imports argparse",
    ]  # fmt: skip
    found = {path.relative_to(ROOT).as_posix(): list(printing(path)) for path in sources()}
    assert {name: ways for name, ways in found.items() if ways and name not in PRINTERS} == {}
    assert all(found[name] for name in PRINTERS)


def test_nothing_waits_by_the_wall_clock():
    """A clock that jumps changes time stamps and, within their validity, nothing else."""
    stamps = {"log.py", "commands/report/report.py", "bundle/making.py"}
    stamps |= {"security/log/append_log.py", "security/identity/certificate.py"}
    stamps |= {"simulator/tracking/mlflow.py"}
    found = []
    for path in sources():
        if path.relative_to(ROOT).as_posix() in stamps:
            continue
        for node in nodes(path):
            called = dotted(node.func) if isinstance(node, ast.Call) else ""
            own = called in {"time.time", "time.time_ns"}
            if called.endswith((".now", ".utcnow", ".today")) or own:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno} {called}")
    assert found == []


def test_file_names_say_what_a_module_does():
    vague = ("manager", "handler", "helper")
    named = [path.relative_to(ROOT).as_posix() for path in sources()]
    assert [
        n for n in named if n.endswith("utils.py") or any(word in Path(n).name for word in vague)
    ] == []


def test_the_package_list_is_that_of_the_tree():
    """A folder that the list lacks would be missing in the wheel."""
    # CI copies it beside the tests
    text = (Path(__file__).resolve().parent.parent / "pyproject.toml").read_text()
    listed = tomllib.loads(text)["tool"]["setuptools"]["packages"]
    folders = {path.relative_to(ROOT).parent for path in sources()}
    assert listed == sorted(".".join(("staddle", *folder.parts)) for folder in folders)


def test_tests_that_take_long_are_there_under_their_names():
    """A line that names nothing would mark no test."""
    tests = Path(__file__).parent
    lines = (tests / "long.txt").read_text().splitlines()
    assert lines == sorted(set(lines))
    for line in lines:
        path, _, function = line.partition("::")
        assert (tests / path).exists(), line
        if function:
            assert f"def {function}(" in (tests / path).read_text(), line
        above = {parent.as_posix() for parent in Path(path).parents}
        assert above.isdisjoint(lines), f"{line}: its folder stands there, too"
        assert not function or path not in lines, f"{line}: its file stands there, too"
