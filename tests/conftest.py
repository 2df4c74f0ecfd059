"""What holds for every test."""

import os

# Before torch is imported: on a busy machine, compute threads that spin make a test take minutes; see engine/client.py.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
