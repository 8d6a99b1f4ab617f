"""Daemons without the seconds of their imports, for tests: one process imports what they import and
forks each of them.

What a child runs is the shipped program, its ``__main__``; it pauses for moments only
(``hurry``), and leaves out the end of the interpreter, which with torch costs as much as its start.
gRPC is imported before a fork, never initialised. Linux: descriptors of processes.

All who name one folder, in whatever process, share the server there, each over a connection of its
own. A launch sends ``{"arguments": ["-m", "staddle.silo", ...], "directory": "/tmp"}`` over it,
with descriptors: of a line to its asker, of the daemon's standard error, and of its standard output
where that is read. The asker gets ``{"pid": 4711}`` with a descriptor of the process, and
``{"code": 0}`` once it has ended. Who closes is answered ``{"left": [4711]}``, and what it left is
killed. When all have closed the server ends, and whatever descends from it.
"""

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from pathlib import Path
from types import ModuleType

from staddle.proto.channel import require_tls13

BYTES = 65536  # of a message, at most
CLOSE_SECONDS = 60.0
PRELOADED = (  # what the daemons import, and what their libraries import late
    "staddle.commands.main",
    "staddle.commands.coordinator",
    "staddle.commands.silo.agent",
    "staddle.coordinator.config",
    "staddle.coordinator.server",
    "staddle.silo.config",
    "staddle.silo.daemon",
    "staddle.bundle.measuring",
    "staddle.algorithms.training.private_round",
    "torch.fx.experimental.symbolic_shapes",
    "torch._dynamo",
    "cryptography.hazmat.backends",
)
HURRIED = {
    "staddle.bundle.measuring": {"RESAMPLES": 100},
    "staddle.silo.agent": {
        "FIRST_WAIT_SECONDS": 0.1,
        "LONGEST_WAIT_SECONDS": 0.5,
        "PAUSE_SECONDS": 0.02,
    },
    "staddle.silo.plain_rounds": {"PAUSE_SECONDS": 0.02},
    "staddle.silo.blind.round": {"PAUSE_SECONDS": 0.02},
    "staddle.silo.blind.group_keys": {"PAUSE_SECONDS": 0.02},
    "staddle.silo.egress.client": {"RECONNECT_MS": (20, 100)},
    "staddle.coordinator.daemon": {"FOLD_WAITS": (0.05,) * 9},
    "staddle.coordinator.jobs.secure_sum_runner": {"PAUSES": (0.05,)},
}


@contextlib.contextmanager
def changing(folder):
    """Nobody else starts or ends the server of this folder."""
    with (folder / "lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def address(folder):
    """Of the socket there, whose own path may be longer than the kernel takes."""
    descriptor = os.open(folder, os.O_PATH)
    try:
        yield f"/proc/self/fd/{descriptor}/socket"
    finally:
        os.close(descriptor)


class ForkServer:
    """The server as the tests see it: the one of this folder, which the first asker starts.

    ``launch`` is a launcher of ``staddle.commands.processes``.
    """

    def __init__(self, folder, preloaded=PRELOADED):
        self.folder = folder
        self._log = folder / "log"
        self._control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        folder.mkdir(exist_ok=True)
        with changing(folder), address(folder) as place:
            try:
                self._control.connect(place)
            except (FileNotFoundError, ConnectionRefusedError):
                self._start(folder, place, preloaded)
                self._control.connect(place)

    def _start(self, folder, place, preloaded):
        (folder / "socket").unlink(missing_ok=True)
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening,
            self._log.open("ab") as errors,
        ):
            listening.bind(place)
            listening.listen()
            subprocess.run(
                [sys.executable, "-P", __file__, str(folder), str(listening.fileno()), *preloaded],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=[listening.fileno()],
                start_new_session=True,  # one signal ends it and all that descends from it
                check=True,
            )

    def launch(self, command):
        """Fork ``[sys.executable, "-P", ...]``, and read its standard error."""
        reading, writing = os.pipe()
        forked = Forked(self, command, str(Path.cwd()), [writing])
        os.close(writing)
        forked.stderr = os.fdopen(reading, "rb")
        return forked

    def run(self, command, cwd=None):
        """What ``subprocess.run`` gives of the same command, with all that it writes as text."""
        with tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as output:
            files = [errors.fileno(), output.fileno()]
            code = Forked(self, command, str(cwd or Path.cwd()), files).wait()
            texts = []
            for file in (output, errors):
                file.seek(0)
                texts.append(file.read().decode())
        return subprocess.CompletedProcess(command, code, *texts)

    def ask(self, message, descriptors):
        """Ask for a child; its answer comes on the line, the first descriptor."""
        socket.send_fds(self._control, [json.dumps(message).encode()], descriptors)

    def tail(self):
        return self._log.read_text(errors="replace")

    def close(self):
        """Take leave; fails if a test has left a daemon behind."""
        self._control.shutdown(socket.SHUT_WR)
        self._control.settimeout(CLOSE_SECONDS)
        said = self._control.recv(BYTES)
        self._control.close()
        assert said, f"the fork server has ended:\n{self.tail()}"
        left = json.loads(said)["left"]
        assert not left, f"processes that a test left behind: {left}"


class Forked:
    """A process of the server's, as ``subprocess.Popen`` shows one.

    ``written`` are the descriptors of its standard error and, where it is read, standard output.
    """

    def __init__(self, server, command, directory, written):
        assert command[:2] == [sys.executable, "-P"], command
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        message = {"arguments": command[2:], "directory": directory}
        server.ask(message, [theirs.fileno(), *written])
        theirs.close()
        said, descriptors, _, _ = socket.recv_fds(self._line, BYTES, 1)
        assert said, f"the fork server has ended:\n{server.tail()}"
        self.pid = json.loads(said)["pid"]
        (self._descriptor,) = descriptors
        self.returncode = None

    def poll(self):
        if self.returncode is None and select.select([self._line], [], [], 0)[0]:
            self._ended()
        return self.returncode

    def wait(self, timeout=None):
        if self.returncode is None:
            if not select.select([self._line], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            self._ended()
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                signal.pidfd_send_signal(self._descriptor, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def _ended(self):
        said = self._line.recv(BYTES)
        assert said, f"the fork server has ended, and process {self.pid} with it"
        self.returncode = json.loads(said)["code"]
        self._line.close()
        os.close(self._descriptor)


class Server:
    """The server's own half."""

    def __init__(self, folder, listening):
        self._folder = folder
        self._listening = listening
        self._children = {}  # descriptor of the process → its number, the line to its asker, whose
        self._ready = selectors.DefaultSelector()
        self._ready.register(listening, selectors.EVENT_READ)

    def serve(self):
        """Until all askers have left: None. In each child: what was asked for."""
        while True:
            for key, _ in self._ready.select():
                if key.fileobj is self._listening:
                    asker, _ = self._listening.accept()
                    self._ready.register(asker, selectors.EVENT_READ)
                    continue
                if key.fd in self._children:
                    self._ended(key.fd)
                    continue
                said, descriptors = b"", []
                with contextlib.suppress(ConnectionResetError):  # it was killed
                    said, descriptors, _, _ = socket.recv_fds(key.fileobj, BYTES, 3)
                if said and self._fork(key.fileobj, *descriptors) == 0:
                    return json.loads(said)
                if not said and self._leaves(key.fileobj):
                    return None

    def _leaves(self, control):
        """True for the last one: from then on nobody can connect."""
        left = [pid for pid, _, whose in self._children.values() if whose is control]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        self._ready.unregister(control)
        with control, contextlib.suppress(BrokenPipeError):  # it was killed
            control.send(json.dumps({"left": left}).encode())
        with changing(self._folder):
            others = {self._listening.fileno(), *self._children}
            if (
                set(self._ready.get_map()) - others
                or select.select([self._listening], [], [], 0)[0]
            ):
                return False
            (self._folder / "socket").unlink()
            return True

    def _fork(self, control, line, *written):
        asker = socket.socket(fileno=line)
        pid = os.fork()
        if pid == 0:
            for descriptor, stream in zip(written, (2, 1), strict=False):
                os.dup2(descriptor, stream)
            for descriptor in (*written, *self._children):
                os.close(descriptor)
            connections = [other for _, other, _ in self._children.values()]
            watched = [key.fileobj for key in self._ready.get_map().values()]
            for connection in (asker, *connections, *watched):
                if isinstance(connection, socket.socket):
                    connection.close()
            self._ready.close()
            return pid
        for descriptor in written:
            os.close(descriptor)
        descriptor = os.pidfd_open(pid)
        self._children[descriptor] = pid, asker, control
        self._ready.register(descriptor, selectors.EVENT_READ)
        with contextlib.suppress(BrokenPipeError):  # its asker was killed
            socket.send_fds(asker, [json.dumps({"pid": pid}).encode()], [descriptor])
        return pid

    def _ended(self, descriptor):
        pid, asker, _ = self._children.pop(descriptor)
        self._ready.unregister(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(pid, 0)
        with asker, contextlib.suppress(BrokenPipeError):  # nobody asks any more
            asker.send(json.dumps({"code": os.waitstatus_to_exitcode(status)}).encode())


def run(arguments):
    """What ``python -P <arguments>`` runs."""
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.modules["__main__"] = program = ModuleType("__main__")
        exec(arguments[1], vars(program))
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


def run_alone(arguments):
    """The same, and no return. An error that nobody caught is the interpreter's."""
    code = 0
    try:
        run(arguments)
    except SystemExit as ended:
        code = int(ended.code or 0)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def hurry():
    """In each child, what a daemon waits for by itself is a moment, intervals are those of the
    fewest resamples, and torch has one thread.

    Threads that wait for one another take the processor from the other daemons.
    """
    for name, constants in HURRIED.items():
        module = importlib.import_module(name)
        for constant, value in constants.items():
            assert hasattr(module, constant), f"{name} has no {constant}"
            setattr(module, constant, value)
    importlib.import_module("torch").set_num_threads(1)


def settle():
    """Leave the children little to do at their start and end, and few pages to write on.

    The kernel copies each page of ours that a child writes on. The first key initialises the
    cryptography; torch's finalizers alone would write on 8,000 pages; and the garbage collector
    passes over all that the imports made.
    """
    with tempfile.TemporaryDirectory() as folder:
        federations = importlib.import_module("staddle.commands.federation.local_federation")
        federations.make(Path(folder), ("silo",))
    for made in list(weakref.finalize._registry):
        made.atexit = False
    gc.collect()
    gc.freeze()
    # as in conftest.py: to search what a child makes every 700 objects is a tenth of its time
    gc.set_threshold(50_000, 20, 20)


def main(folder, listening, preloaded):
    # A process of its own, which no asker has to wait for: any of them may end first.
    if os.fork():
        return
    require_tls13()
    for name in preloaded:
        importlib.import_module(name)
    if sys.modules.keys() >= HURRIED.keys():  # the daemons were imported
        hurry()
        settle()
    server = Server(Path(folder), socket.socket(fileno=listening))
    asked = server.serve()
    if asked is not None:
        # ours have noted where their files stood, and its own may be pipes
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
        os.chdir(asked["directory"])
        run_alone(asked["arguments"])
    # the session is ours: whatever was forked here, what that forked, and the server
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
