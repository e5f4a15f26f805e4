"""Runs a module as a child that cannot outlive its parent.

    python -m syncer.demo.processes.tether PARENT_PID MODULE [ARGUMENT ...]

Asks the kernel to kill this process when the parent is gone, even by SIGKILL, and becomes
`python -m MODULE ARGUMENT ...`: the request survives `exec`. It must import little, since every
child starts through it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent = int(sys.argv[1])
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the request: nobody is left to work for
        sys.exit(1)
    os.execv(sys.executable, [sys.executable, "-m", *sys.argv[2:]])


if __name__ == "__main__":
    main()
