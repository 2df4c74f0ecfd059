"""Runs a command that the kernel kills when its parent dies: `python tether.py PARENT_PID COMMAND...`.

It is a separate program that replaces itself by the command: the setting survives exec, and nothing has to run between
fork and exec in a parent with threads. Linux only. It imports nothing of deepmesh, so it starts in milliseconds.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    die_with(parent)
    os.execvp(command[0], command)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent, with that process id, dies. Raises SystemExit if it is dead
    already.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # The parent may have died before the setting took effect.
    if os.getppid() != parent:
        sys.exit(1)


if __name__ == "__main__":
    main()
