"""A daemon that a service manager started: ``told.py SOCKET MODULE ARGUMENTS``.

It is what ``-m MODULE ARGUMENTS`` would be, with the variables that systemd sets for a watched
service.
"""

import os
import runpy
import sys

if __name__ == "__main__":
    _, address, module, *arguments = sys.argv
    own = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "500000", "WATCHDOG_PID": str(os.getpid())}
    os.environ.update(own)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
