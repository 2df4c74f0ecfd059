"""A mesh of processes on one machine: composes, starts, watches and restarts them."""
