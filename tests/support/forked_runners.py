"""Processes of pytest-xdist, forked from one that has imported the tests: to import all of them takes ten seconds.

Not on machines with GPUs, because libraries settle on devices when they are imported.
"""

import atexit
import gc
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import pytest
from execnet import XSpec

from mesh.processes.tether import die_with
from mesh.processes.tethered import tethered
from tests.support import asking_runner
from tests.support.gpus import has_gpu
from tests.support.programs import ROOT
from tests.support.run_directory import run_directory

_MOST_BYTES = 1 << 16


def fork_runners(config: pytest.Config, specs: Sequence[XSpec]) -> None:
    """Fork the processes of `specs`, which are about to be started, from one that imports what this run collects."""
    if has_gpu():
        return
    address = str(run_directory() / "runners")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        invoked = config.invocation_params
        command = [sys.executable, "-m", __name__, str(listener.fileno()), str(invoked.dir), *map(str, invoked.args)]
        nothing = subprocess.DEVNULL
        importer = subprocess.Popen(
            tethered(command), cwd=ROOT, pass_fds=[listener.fileno()], stdin=nothing, stdout=nothing
        )
    config.add_cleanup(partial(_end, importer, address))
    for spec in specs:
        # -I -S: in milliseconds.
        spec.python = shlex.join([sys.executable, "-I", "-S", str(Path(asking_runner.__file__)), address])


def _end(importer: subprocess.Popen[bytes], address: str) -> None:
    # Who asks for nothing is the last one.
    with suppress(OSError), socket.socket(socket.AF_UNIX) as asking:
        asking.connect(address)
    importer.wait()


def main() -> None:
    listener, directory, *arguments = sys.argv[1:]
    os.chdir(directory)
    # What cannot be imported fails where the tests run.
    pytest.main([*arguments, "-n0", "--collect-only", "-qq", "-p", "no:cacheprovider"])
    # Ctrl-C is for the runners.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()
    importer = os.getpid()
    with socket.socket(fileno=int(listener)) as requests:
        while True:
            connection, _ = requests.accept()
            with connection:
                program, descriptors, _, _ = socket.recv_fds(connection, _MOST_BYTES, 3)
                if not program:
                    break
                if os.fork() == 0:
                    die_with(importer)
                    _run(program.decode(), descriptors)
                for each in descriptors:
                    os.close(each)
    # So that their processor time counts as this process's.
    with suppress(ChildProcessError):
        while True:
            os.wait()


def _run(program: str, descriptors: Sequence[int]) -> NoReturn:
    """As `python -c program` with these descriptors as its stdin, stdout and stderr."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, received in enumerate(descriptors):
        os.dup2(received, number)
        os.close(received)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    sys.modules["__main__"] = main = ModuleType("__main__")
    try:
        exec(program, vars(main))
        atexit._run_exitfuncs()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
