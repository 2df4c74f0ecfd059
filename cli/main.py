"""The `deepmesh` command as a program."""

import os
import sys

# As a shell counts an end by SIGINT.
INTERRUPTED = 130


def main() -> None:
    """Run the command of sys.argv."""
    # Read when gRPC is imported, whose own lines would stand among ours: we report the same errors ourselves.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        # Imports take most of a second, in which Ctrl-C is an answer too.
        from cli.commands import run

        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
