"""A mesh of processes on one machine: composed, started, watched, started again."""
