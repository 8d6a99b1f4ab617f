"""A daemon that is forked from multiprocessing's server, as the silos of a benchmark are."""

import multiprocessing
import os
import signal
from subprocess import TimeoutExpired

from federation.fork_server import run_alone

FORKS = multiprocessing.get_context("forkserver")


def daemon(errors, arguments):
    os.dup2(errors.fileno(), 2)
    run_alone(arguments)


class Forked:
    """A daemon as ``subprocess.Popen`` shows one, without the seconds of its imports."""

    def __init__(self, command):
        ours, theirs = FORKS.Pipe(duplex=False)
        self._process = FORKS.Process(target=daemon, args=(theirs, command[2:]))
        self._process.start()
        theirs.close()
        self.pid, self.stderr = self._process.pid, os.fdopen(os.dup(ours.fileno()), "rb")

    def poll(self):
        return self._process.exitcode

    def wait(self, seconds=None):
        self._process.join(seconds)
        if self.poll() is None:
            raise TimeoutExpired("the daemon", seconds)
        return self.poll()

    def send_signal(self, number):
        os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)
