"""Daemons without the seconds of their imports, for tests: one process imports what they import and
forks each of them.

What a child runs is the shipped program, its ``__main__``; it pauses for moments only
(``hurry``), and leaves out the end of the interpreter, which with torch costs as much as its start.
gRPC is imported before a fork, never initialised. Linux: descriptors of processes.

A launch sends ``{"arguments": ["-m", "staddle.silo", ...]}`` over the control socket, with two
descriptors: of the daemon's standard error, and of a line to its asker. That gets ``{"pid": 4711}``
with a descriptor of the process, and ``{"code": 0}`` once it has ended. When the control socket
ends the server ends, and whatever it forked with it.
"""

import atexit
import contextlib
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

from staddle.proto.channel import require_tls13

BYTES = 65536  # of a message, at most
CLOSE_SECONDS = 10.0
LEFT = "processes that a test left behind:"
PRELOADED = (  # what the daemons import, and what their libraries import late
    "staddle.commands.main",
    "staddle.commands.coordinator",
    "staddle.commands.silo",
    "staddle.coordinator.config",
    "staddle.coordinator.server",
    "staddle.silo.config",
    "staddle.silo.daemon",
    "staddle.silo.admission.accountant",
    "staddle.algorithms.training.private_round",
    "torch.fx.experimental.symbolic_shapes",
    "torch._dynamo",
    "cryptography.hazmat.backends",
)
PAUSES = {
    "staddle.silo.agent": {
        "FIRST_WAIT_SECONDS": 0.05,
        "LONGEST_WAIT_SECONDS": 0.05,
        "PAUSE_SECONDS": 0.02,
    },
    "staddle.silo.plain_rounds": {"PAUSE_SECONDS": 0.02},
    "staddle.silo.blind.round": {"PAUSE_SECONDS": 0.02},
    "staddle.silo.blind.group_keys": {"PAUSE_SECONDS": 0.02},
    "staddle.silo.egress.client": {"RECONNECT_MS": (20, 100)},
    "staddle.coordinator.daemon": {"FOLD_WAITS": (0.05,) * 9},
    "staddle.coordinator.jobs.secure_sum_runner": {"PAUSES": (0.05,)},
}


class ForkServer:
    """The server as the tests see it.

    ``launch`` is a launcher of ``staddle.commands.processes``.
    """

    def __init__(self, log, preloaded=PRELOADED):
        self._log = log
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-P", __file__, str(theirs.fileno()), *preloaded]
        with theirs, log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # one signal ends it and all that descends from it
            )

    def launch(self, command):
        """Fork ``[sys.executable, "-P", ...]``."""
        assert command[:2] == [sys.executable, "-P"], command
        return Forked(self, command[2:])

    def ask(self, arguments, descriptors):
        """Ask for a child; its answer comes on the line, the second descriptor."""
        socket.send_fds(self._control, [json.dumps({"arguments": arguments}).encode()], descriptors)

    def tail(self):
        return self._log.read_text(errors="replace")

    def close(self):
        """End it; fails if a test has left a daemon behind."""
        self._control.close()
        code = self._process.wait(CLOSE_SECONDS)
        assert LEFT not in self.tail(), self.tail()
        assert code == -signal.SIGKILL, f"the fork server ended with code {code}:\n{self.tail()}"


class Forked:
    """A process of the server's, as ``subprocess.Popen`` shows one."""

    def __init__(self, server, arguments):
        reading, writing = os.pipe()
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        server.ask(arguments, [writing, theirs.fileno()])
        os.close(writing)
        theirs.close()
        said, descriptors, _, _ = socket.recv_fds(self._line, BYTES, 1)
        assert said, f"the fork server has ended:\n{server.tail()}"
        self.pid = json.loads(said)["pid"]
        (self._descriptor,) = descriptors
        self.stderr = os.fdopen(reading, "rb")
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

    def __init__(self, control):
        self._control = control
        self._children = {}  # descriptor of the process → its number, the line to its asker
        self._ready = selectors.DefaultSelector()
        self._ready.register(control, selectors.EVENT_READ)

    def serve(self):
        """Until the control socket ends: None. In each child: the arguments of its program."""
        while True:
            for key, _ in self._ready.select():
                if key.fd in self._children:
                    self._ended(key.fd)
                    continue
                said, descriptors, _, _ = socket.recv_fds(self._control, BYTES, 2)
                if not said:
                    return None
                arguments = json.loads(said)["arguments"]
                if self._fork(*descriptors) == 0:
                    return arguments

    def _fork(self, errors, line):
        asker = socket.socket(fileno=line)
        pid = os.fork()
        if pid == 0:
            os.dup2(errors, 2)
            for descriptor in (errors, *self._children):
                os.close(descriptor)
            for _, other in self._children.values():
                other.close()
            asker.close()
            self._ready.close()
            self._control.close()
            return pid
        os.close(errors)
        descriptor = os.pidfd_open(pid)
        self._children[descriptor] = pid, asker
        self._ready.register(descriptor, selectors.EVENT_READ)
        socket.send_fds(asker, [json.dumps({"pid": pid}).encode()], [descriptor])
        return pid

    def _ended(self, descriptor):
        pid, asker = self._children.pop(descriptor)
        self._ready.unregister(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(pid, 0)
        with asker, contextlib.suppress(BrokenPipeError):  # nobody asks any more
            asker.send(json.dumps({"code": os.waitstatus_to_exitcode(status)}).encode())

    def left(self):
        """The processes that run still."""
        return [pid for pid, _ in self._children.values()]


def run(arguments):
    """What ``python -P <arguments>`` runs."""
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
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
    sys.stderr.flush()
    os._exit(code)


def hurry():
    """In each child, what a daemon waits for by itself is a moment, and torch has one thread.

    Threads that wait for one another take the processor from the other daemons.
    """
    for name, pauses in PAUSES.items():
        module = importlib.import_module(name)
        for constant, value in pauses.items():
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


def main(control, preloaded):
    require_tls13()
    for name in preloaded:
        importlib.import_module(name)
    if preloaded:
        hurry()
        settle()
    server = Server(socket.socket(fileno=control))
    arguments = server.serve()
    if arguments is not None:
        run_alone(arguments)
    if server.left():
        sys.stderr.write(f"{LEFT} {server.left()}\n")
        sys.stderr.flush()
    # the session is ours: whatever was forked here, what that forked, and the server
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
