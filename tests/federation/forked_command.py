"""A command that a fork server runs: ``forked_command.py FOLDER PROGRAM [ARGUMENTS]``.

It is what ``python -P -c PROGRAM ARGUMENTS`` would be, forked by the server of ``FOLDER``
(fork_server.py), which passes on SIGTERM and the exit code. It imports little, so a script may
start many.
"""

import json
import os
import signal
import socket
import sys

BYTES = 65536


def main(folder, *program):
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # the path of the socket itself may be longer than the kernel takes
    control.connect(f"/proc/self/fd/{os.open(folder, os.O_PATH)}/socket")
    line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    message = {"arguments": ["-c", *program], "directory": os.getcwd()}  # noqa: PTH109 - its import
    socket.send_fds(control, [json.dumps(message).encode()], [theirs.fileno(), 2, 1])
    theirs.close()
    _, (process,), _, _ = socket.recv_fds(line, BYTES, 1)
    signal.signal(signal.SIGTERM, lambda *_: signal.pidfd_send_signal(process, signal.SIGTERM))
    code = json.loads(line.recv(BYTES))["code"]
    # as a shell tells the end by a signal
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
