"""The `deepmesh` command as a program."""

import os
import sys

from mesh.processes.signals import end_on_signals
from mesh.processes.standard_streams import settle

# The exit status of shells for a process that SIGINT ended.
INTERRUPTED = 130


def main() -> None:
    """Run the command of sys.argv."""
    settle()
    end_on_signals()
    # gRPC reads this when it is imported. Its own log lines would mix with ours, and we report the same errors.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        # The imports take most of a second, during which Ctrl-C must work too.
        from cli.commands import run

        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
