"""A disk that fails, and a process that is killed, at any of its system calls that change a
disk.
"""

import errno
import gc
import os
import signal

import pytest

CALLS = ("open", "write", "fsync", "fdatasync", "ftruncate", "replace")  # all that changes a disk


class Calls:
    """Counts the calls that change the disk.

    ``fault(name, real, args)`` runs in place of the n-th.
    """

    def __init__(self, monkeypatch, nth=0, fault=None):
        self.made = []
        for name in CALLS:
            real = getattr(os, name)
            monkeypatch.setattr(os, name, self._watched(name, real, nth, fault))

    def _watched(self, name, real, nth, fault):
        def call(*args, **options):
            self.made.append(name)
            if len(self.made) == nth:
                return fault(name, real, args, options)
            return real(*args, **options)

        return call


def failing(number):
    def fault(name, real, args, options):
        raise OSError(number, os.strerror(number))

    return fault


def short(name, real, args, options):
    """A write of some bytes only; any other call does its work and then says that it failed."""
    if name == "write":
        return real(args[0], args[1][:7])
    real(*args, **options)
    raise OSError(errno.EIO, "Input/output error")


def killed(place, nth, how, run):
    """What a child was promised that ran this and died by kill -9 at its n-th call.

    None if it came through.
    """

    def fault(name, real, args, options):
        if how == "after":
            real(*args, **options)
        elif how == "torn" and name == "write":
            real(args[0], args[1][: len(args[1]) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        gc.disable()  # a collection would copy most of the parent's pages
        try:
            say = os.write
            with pytest.MonkeyPatch.context() as patch:
                Calls(patch, nth, fault)
                run(place, lambda count: say(theirs, bytes([count])))
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        promised = pipe.read()
    _, status = os.waitpid(child, 0)
    return max(promised, default=0) if os.WIFSIGNALED(status) else None


class Turned:
    """A disk that takes nothing from the n-th change on, as one that is full or has turned
    read-only.
    """

    def __init__(self, monkeypatch, nth, number):
        self.made = 0
        for name in (*CALLS, "unlink", "mkdir"):
            monkeypatch.setattr(os, name, self._watched(name, getattr(os, name), nth, number))

    def _watched(self, name, real, nth, number):
        def call(*args, **options):
            if name == "open" and not args[1] & (os.O_WRONLY | os.O_RDWR):
                return real(*args, **options)
            self.made += 1
            if self.made >= nth:
                raise OSError(number, os.strerror(number))
            return real(*args, **options)

        return call
