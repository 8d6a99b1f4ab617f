"""A daemon in the mount namespace of another process: ``in_mounts.py PID -m MODULE ARGUMENTS``.

The fork server runs it, so without the seconds of its imports. Linux, and for whoever may mount.
"""

import ctypes
import runpy
import sys
from pathlib import Path


def main(process, arguments):
    with Path(f"/proc/{process}/ns/mnt").open() as namespace:
        library = ctypes.CDLL(None, use_errno=True)
        if library.setns(namespace.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")
    sys.argv = arguments
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[3:])
